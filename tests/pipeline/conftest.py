"""Fixtures of the pipeline tests: one small model a run, and topics of a module's own."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from relaygr.devbroker import LocalBroker
from relaygr.kafka.settings import KafkaSettings
from tests.worlds.relay import Relay, make_model, own_topics


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint folder with `calibration.json` in it."""
    return make_model(tmp_path_factory.mktemp("pipeline") / "model")


@pytest.fixture(scope="module")
def module_kafka(broker: LocalBroker) -> Iterator[KafkaSettings]:
    """As `kafka_settings`, for all tests of a module."""
    with own_topics(broker) as settings:
        yield settings


@pytest.fixture(scope="module")
def relay(module_kafka: KafkaSettings, model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Relay]:
    """A relay without running processes."""
    with Relay(module_kafka, tmp_path_factory.mktemp("relay"), model) as relay:
        yield relay
