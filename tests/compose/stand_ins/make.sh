#!/bin/sh
# Makes stand-ins for the images of compose/.env from Debian's packages, for a machine that reaches no image registry.
# As root, with debootstrap and Docker:
#
#   KAFKA_HOME=/path/to/kafka tests/compose/stand_ins/make.sh > stand-ins.env
#   set -a; . ./stand-ins.env; docker compose --project-directory compose up --build
#
# They differ from the published images in the base system and its packages (Debian's Python, Java and Prometheus), and in
# the script that starts Kafka. Ryuk, with which testcontainers removes what a killed process leaves, has no stand-in.
# SUITE and MIRROR choose the packages; CERTIFICATES names a file of authorities that the machine's package index needs.
set -eu
: "${KAFKA_HOME:?name the folder of an Apache Kafka}"
here=$(dirname "$(readlink -f "$0")")
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

packages=ca-certificates,python3,python3-venv,openjdk-17-jre-headless,netcat-openbsd,prometheus

{
    debootstrap --variant=minbase --include="$packages" "${SUITE:-bookworm}" "$work/root" \
        "${MIRROR:-http://deb.debian.org/debian}"
    rm -rf "$work"/root/var/cache/apt/archives/*.deb "$work"/root/var/lib/apt/lists/*
    [ -z "${CERTIFICATES:-}" ] || cp "$CERTIFICATES" "$work/root/etc/ssl/certs/ca-certificates.crt"
    tar --directory "$work/root" --create . | docker import - stand-in/debian:1

    mkdir "$work/kafka"
    cp -R "$KAFKA_HOME/bin" "$KAFKA_HOME/libs" "$KAFKA_HOME/config" "$here/start-kafka.sh" "$work/kafka"
    docker build --tag stand-in/kafka:1 --file - "$work/kafka" <<'DOCKERFILE'
FROM stand-in/debian:1
RUN useradd --create-home appuser \
    && install --directory --owner=appuser /opt/kafka /var/lib/kafka/data
COPY --chown=appuser . /opt/kafka/
USER appuser
VOLUME ["/var/lib/kafka/data"]
CMD ["/opt/kafka/start-kafka.sh"]
DOCKERFILE

    docker build --tag stand-in/prometheus:1 - <<'DOCKERFILE'
FROM stand-in/debian:1
RUN install --directory --owner=nobody --group=nogroup /prometheus
USER nobody
VOLUME ["/prometheus"]
ENTRYPOINT ["prometheus"]
DOCKERFILE
} >&2

cat <<'LINES'
BASE_IMAGE=stand-in/debian:1
KAFKA_IMAGE=stand-in/kafka:1
PROMETHEUS_IMAGE=stand-in/prometheus:1
TESTCONTAINERS_RYUK_DISABLED=true
LINES
