"""Fixtures for tests that need a broker.

`broker` runs a test on librdkafka's embedded cluster and on a real Apache Kafka (marked `kafka`); each
is started once. `kafka_settings` gives a test topics and groups of its own on it.

The real one is `RELAYGR_TEST_BOOTSTRAP` where that is set, else one started from `KAFKA_HOME`. Where
there is none, its tests are skipped; with `RELAYGR_TEST_REQUIRE_BROKER=1` they fail.

Examples of property tests may take as long as they like: no test asserts how long something took.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator

import pytest
from hypothesis import settings

from relaygr.devbroker import BrokerChoice, LocalBroker, local_broker
from relaygr.kafka.settings import KafkaSettings
from relaygr.runtime.errors import RelayError

TEST_PARTITIONS = 12

settings.register_profile("relaygr", deadline=None)
settings.load_profile("relaygr")


@pytest.fixture(scope="session")
def embedded_broker() -> Iterator[LocalBroker]:
    """librdkafka's own cluster."""
    with local_broker(BrokerChoice.EMBEDDED) as broker:
        yield broker


@pytest.fixture(scope="session")
def real_broker() -> Iterator[LocalBroker]:
    """A real Apache Kafka; tests that take it directly carry the `kafka` marker themselves."""
    choice = os.environ.get("RELAYGR_TEST_BOOTSTRAP") or BrokerChoice.KAFKA
    required = os.environ.get("RELAYGR_TEST_REQUIRE_BROKER") == "1"
    context = local_broker(choice)
    try:
        broker = context.__enter__()
    except RelayError as error:
        if required:
            raise
        pytest.skip(f"no real Kafka here: {error}")
    try:
        yield broker
    finally:
        context.__exit__(None, None, None)


@pytest.fixture(scope="session", params=["embedded", pytest.param("kafka", marks=pytest.mark.kafka)])
def broker(request: pytest.FixtureRequest) -> LocalBroker:
    """Each broker in turn."""
    name = "embedded_broker" if request.param == "embedded" else "real_broker"
    chosen: LocalBroker = request.getfixturevalue(name)
    return chosen


@pytest.fixture
def kafka_settings(broker: LocalBroker) -> Iterator[KafkaSettings]:
    """Settings for `broker` with a prefix of the test's own, its topics created and deleted after."""
    prefix = f"test-{uuid.uuid4().hex[:12]}"
    settings = broker.settings(KafkaSettings(topic_prefix=prefix, group_prefix=prefix, partitions=TEST_PARTITIONS))
    broker.create_topics(settings)
    yield settings
    broker.delete_topics(settings)
