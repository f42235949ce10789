"""A real Apache Kafka in a container, through testcontainers. Docker may download the image."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, Final

from confluent_kafka import KafkaException

from relaygr.cluster.admin import create_topics, delete_topics
from relaygr.devbroker.choose import BrokerChoice
from relaygr.devbroker.local import LocalBroker, free_ports
from relaygr.kafka.client_errors import ClientErrors
from relaygr.kafka.clients import make_admin
from relaygr.kafka.settings import KafkaSettings
from relaygr.runtime.errors import RelayError

IMAGE: Final = "apache/kafka:4.3.1"
START_TIMEOUT_S: Final = 120.0
LIMITS: Final = ("one Kafka broker in a container on this machine: no replication, and it shares the machine's cores",)


def require_docker() -> None:
    """Raises RelayError if no Docker daemon answers."""
    try:
        from testcontainers.core.docker_client import DockerClient
    except ImportError:
        raise RelayError(
            "--broker docker needs testcontainers: pip install 'relaygr[bench]', or choose another"
        ) from None
    try:
        DockerClient().client.ping()
    except Exception as error:
        # The Docker client raises many kinds of errors if Docker is missing or this user may not use it.
        raise RelayError(
            f"Docker cannot start {IMAGE}: {error}. Is the Docker daemon running, and may this user access it?"
        ) from error


@contextmanager
def docker_broker(why: str) -> Iterator[LocalBroker]:
    """A broker while the block runs. Raises RelayError without Docker, and if it is not ready in time."""
    require_docker()
    from testcontainers.core.container import DockerContainer

    [port] = free_ports(1)
    bootstrap = f"127.0.0.1:{port}"
    container = _container(DockerContainer, port)
    try:
        container.start()
    except Exception as error:
        raise RelayError(f"Docker cannot start {IMAGE}: {error}") from error
    try:
        _await_ready(container, bootstrap, START_TIMEOUT_S)
        defaults = KafkaSettings()
        yield LocalBroker(
            BrokerChoice.DOCKER,
            bootstrap,
            f"{IMAGE} in Docker at {bootstrap}, started here ({why})",
            LIMITS,
            create_topics,
            delete_topics,
            fetch_wait_max_ms=defaults.fetch_wait_max_ms,
            session_timeout_ms=defaults.session_timeout_ms,
        )
    finally:
        container.stop()


def _container(make: Any, port: int) -> Any:
    environment = {
        "KAFKA_NODE_ID": "1",
        "KAFKA_PROCESS_ROLES": "broker,controller",
        "KAFKA_LISTENERS": "PLAINTEXT://0.0.0.0:9092,CONTROLLER://127.0.0.1:9093",
        # Clients connect to the advertised address, so it has the port outside the container.
        "KAFKA_ADVERTISED_LISTENERS": f"PLAINTEXT://127.0.0.1:{port}",
        "KAFKA_CONTROLLER_LISTENER_NAMES": "CONTROLLER",
        "KAFKA_LISTENER_SECURITY_PROTOCOL_MAP": "CONTROLLER:PLAINTEXT,PLAINTEXT:PLAINTEXT",
        "KAFKA_CONTROLLER_QUORUM_VOTERS": "1@127.0.0.1:9093",
        "KAFKA_OFFSETS_TOPIC_REPLICATION_FACTOR": "1",
        "KAFKA_TRANSACTION_STATE_LOG_REPLICATION_FACTOR": "1",
        "KAFKA_TRANSACTION_STATE_LOG_MIN_ISR": "1",
        "KAFKA_GROUP_INITIAL_REBALANCE_DELAY_MS": "0",
        "KAFKA_AUTO_CREATE_TOPICS_ENABLE": "false",
    }
    container = make(IMAGE).with_bind_ports(9092, port)
    for name, value in environment.items():
        container = container.with_env(name, value)
    return container


def _await_ready(container: Any, bootstrap: str, timeout_s: float) -> None:
    quiet = ClientErrors("relaygr-broker-start", quiet=True)
    admin = make_admin(KafkaSettings(bootstrap=bootstrap), "relaygr-broker-start", quiet)
    ends_s = time.monotonic() + timeout_s
    while time.monotonic() < ends_s:
        with suppress(KafkaException):
            if admin.list_topics(timeout=0.5).brokers:
                return
    output, errors = container.get_logs()
    tail = (output + errors).decode(errors="replace")[-3000:].strip()
    raise RelayError(f"Kafka in Docker was not ready within {timeout_s:.0f} s. The end of its log:\n{tail}")
