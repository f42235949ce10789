#!/bin/sh
# Starts Kafka as the published image does: its wrapper writes server.properties from KAFKA_* and formats the storage.
set -eu
export CLUSTER_ID="${CLUSTER_ID:-5L6g3nShT-eMCtK--X86sw}"
said=$(/opt/kafka/bin/kafka-run-class.sh kafka.docker.KafkaDockerWrapper setup --default-configs-dir /etc/kafka/docker \
    --mounted-configs-dir /mnt/shared/config --final-configs-dir /opt/kafka/config 2>&1) || {
    echo "$said"
    echo "$said" | grep --quiet --ignore-case "already formatted"
}
exec /opt/kafka/bin/kafka-server-start.sh /opt/kafka/config/server.properties
