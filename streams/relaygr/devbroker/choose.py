"""Selects the broker for a value of `--broker`: a pure function of the available brokers.

`auto` takes the first of: an address that is already known (`RELAYGR_BOOTSTRAP`), a real Apache Kafka
(`KAFKA_HOME` and a Java runtime), librdkafka's own cluster. It never downloads anything.
"""

from __future__ import annotations

import enum
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from relaygr.runtime.errors import RelayError

SERVER_SCRIPT: Final = "bin/kafka-server-start.sh"
STORAGE_SCRIPT: Final = "bin/kafka-storage.sh"
_ADDRESSES: Final = re.compile(r"[^\s,:]+:\d{1,5}(,[^\s,:]+:\d{1,5})*|\[[0-9a-fA-F:]+\]:\d{1,5}")


class BrokerChoice(enum.StrEnum):
    """The values of `--broker`. EXTERNAL is written as HOST:PORT[,HOST:PORT...]."""

    AUTO = "auto"
    EMBEDDED = "embedded"
    KAFKA = "kafka"
    DOCKER = "docker"
    EXTERNAL = "external"


@dataclass(frozen=True, slots=True)
class AvailableBrokers:
    """The brokers that can be chosen on this machine."""

    known_bootstrap: str | None = None
    """A cluster that the user has configured. Tests never pass the user's cluster."""
    kafka_home: Path | None = None
    java: Path | None = None


@dataclass(frozen=True, slots=True)
class Chosen:
    """The decision."""

    kind: BrokerChoice
    """Never AUTO."""
    why: str
    bootstrap: str | None = None
    """Set for EXTERNAL."""
    kafka_home: Path | None = None
    """Set for KAFKA."""


def choose(choice: str, available: AvailableBrokers) -> Chosen:
    """The broker for a choice. Raises RelayError if it is unknown or not possible on this machine."""
    if _ADDRESSES.fullmatch(choice):
        return Chosen(BrokerChoice.EXTERNAL, "named by --broker", bootstrap=choice)
    try:
        kind = BrokerChoice(choice)
    except ValueError:
        raise RelayError(
            f"--broker {choice!r} is not one of auto, embedded, kafka, docker, HOST:PORT[,HOST:PORT...]"
        ) from None
    if kind is BrokerChoice.AUTO:
        return _first(available)
    if kind is BrokerChoice.EXTERNAL:
        if available.known_bootstrap is None:
            raise RelayError("--broker external needs RELAYGR_BOOTSTRAP; or give HOST:PORT itself")
        return Chosen(kind, "RELAYGR_BOOTSTRAP is set", bootstrap=available.known_bootstrap)
    if kind is BrokerChoice.KAFKA:
        hindrance = _hindrance(available)
        if hindrance is not None:
            raise RelayError(f"--broker kafka: {hindrance}")
        return Chosen(kind, "named by --broker", kafka_home=available.kafka_home)
    return Chosen(kind, "named by --broker")


def _first(available: AvailableBrokers) -> Chosen:
    if available.known_bootstrap is not None:
        return Chosen(BrokerChoice.EXTERNAL, "RELAYGR_BOOTSTRAP is set", bootstrap=available.known_bootstrap)
    hindrance = _hindrance(available)
    if hindrance is None:
        return Chosen(BrokerChoice.KAFKA, "KAFKA_HOME is set", kafka_home=available.kafka_home)
    return Chosen(BrokerChoice.EMBEDDED, hindrance)


def _hindrance(available: AvailableBrokers) -> str | None:
    """The reason why no real Kafka can be started on this machine; None if one can."""
    if available.kafka_home is None:
        return "KAFKA_HOME is not set (the folder of an unpacked Apache Kafka)"
    missing = [script for script in (SERVER_SCRIPT, STORAGE_SCRIPT) if not (available.kafka_home / script).is_file()]
    if missing:
        return f"KAFKA_HOME={available.kafka_home} contains no {' and no '.join(missing)}"
    if available.java is None:
        return "no Java runtime found: put `java` (17 or later) on PATH, or set JAVA_HOME"
    return None
