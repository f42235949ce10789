"""Real Kafka brokers of a test's own: one with listeners beside the plain one, or a cluster that it may break."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

import relaygr.devbroker.kafka
from relaygr.devbroker import available_brokers
from relaygr.devbroker.kafka import KafkaCluster, kafka_broker
from relaygr.devbroker.local import free_ports
from tests.promised import unavailable

START_TIMEOUT_S = 180.0


@dataclass(frozen=True)
class OwnBroker:
    """The addresses of a broker: of its plain listener, and of the others by name."""

    bootstrap: str
    others: Mapping[str, str]


@contextmanager
def own_cluster(brokers: int, properties: Mapping[str, str | int] | None = None) -> Iterator[KafkaCluster]:
    """Starts a cluster from KAFKA_HOME. Without one the test is skipped, or fails if a broker is promised."""
    with KafkaCluster(_kafka_home(), brokers, properties) as cluster:
        yield cluster


def _kafka_home() -> Path:
    home = available_brokers().kafka_home
    if home is None:
        unavailable("broker", "KAFKA_HOME is not set")
    return home


@contextmanager
def own_broker(
    listeners: Mapping[str, str],
    properties: Mapping[str, str] | None = None,
    advertised: Mapping[str, str] | None = None,
) -> Iterator[OwnBroker]:
    """Starts a broker from KAFKA_HOME. Without one the test is skipped, or fails if a broker is promised.

    `listeners`: the security protocol of each further listener, by name. `advertised`: the addresses that clients of
    these listeners get to know, where they are not the listeners' own.
    """
    home = _kafka_home()
    plain, controller, *ports = free_ports(2 + len(listeners))
    others = {name: f"127.0.0.1:{port}" for name, port in zip(listeners, ports, strict=True)}
    clients = {"PLAINTEXT": f"127.0.0.1:{plain}", **others}
    protocols = {"PLAINTEXT": "PLAINTEXT", **listeners, "CONTROLLER": "PLAINTEXT"}
    own = {
        "listeners": _places({**clients, "CONTROLLER": f"127.0.0.1:{controller}"}),
        "advertised.listeners": _places({**clients, **(advertised or {})}),
        "listener.security.protocol.map": ",".join(f"{name}:{protocol}" for name, protocol in protocols.items()),
    }
    with pytest.MonkeyPatch.context() as patch:
        # `kafka_broker` takes the ports of its plain listener and of its controller from here.
        patch.setattr(relaygr.devbroker.kafka, "free_ports", lambda _: [plain, controller])
        with kafka_broker(home, "a test", start_timeout_s=START_TIMEOUT_S, properties=own | dict(properties or {})):
            yield OwnBroker(clients["PLAINTEXT"], others)


def _places(addresses: Mapping[str, str]) -> str:
    return ",".join(f"{name}://{address}" for name, address in addresses.items())
