#!/bin/sh
# Starts Kafka with the properties that the environment names as for the published image: KAFKA_NODE_ID is node.id.
set -eu
properties=/opt/kafka/server.properties
env | grep '^KAFKA_' | grep --invert-match --extended-regexp '^KAFKA_(HOME|OPTS|HEAP_OPTS|JVM_PERFORMANCE_OPTS)=' \
    | awk '{ at = index($0, "="); name = tolower(substr($0, 7, at - 7)); gsub("_", ".", name); print name "=" substr($0, at + 1) }' \
    > "$properties"
/opt/kafka/bin/kafka-storage.sh format --ignore-formatted --cluster-id "${CLUSTER_ID:-5L6g3nShT-eMCtK--X86sw}" --config "$properties"
exec /opt/kafka/bin/kafka-server-start.sh "$properties"
