"""Values that the Kafka settings refuse: librdkafka would refuse them later, or accept and change them."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from relaygr.cluster.rights import Role, rights_of
from relaygr.kafka.clients import make_assigned_consumer, make_group_consumer
from relaygr.kafka.settings import Affinity, KafkaSettings
from relaygr.schemas.topics import Topic


def test_blanks_around_addresses_are_dropped() -> None:
    """With a blank after the comma, some clients use a host name with a leading blank."""
    kafka = KafkaSettings(bootstrap=" kafka-1:9092, [::1]:9093 ,kafka-3")
    assert kafka.bootstrap == "kafka-1:9092,[::1]:9093,kafka-3"


@pytest.mark.parametrize(
    "bootstrap", ["", " ", "a:9092,", "a b:9092", "PLAINTEXT://a:9092", "a:b:c", "a:port", "::1:9092"]
)
def test_what_is_no_address_is_refused(bootstrap: str) -> None:
    with pytest.raises(ValidationError, match=r"is not an address: use HOST:PORT"):
        KafkaSettings(bootstrap=bootstrap)


def test_heartbeats_must_fit_into_the_session() -> None:
    with pytest.raises(ValidationError, match=r"heartbeat_interval_ms is 6000, session_timeout_ms 6000"):
        KafkaSettings(heartbeat_interval_ms=6000)


def test_replicas_that_cannot_all_be_in_sync_are_refused() -> None:
    with pytest.raises(ValidationError, match="min_insync_replicas is 3, but replication_factor 2: no message could"):
        KafkaSettings(replication_factor=2, min_insync_replicas=3)


@pytest.mark.parametrize(("replicas", "least"), [(1, "1"), (2, "1"), (3, "2")])
def test_by_default_one_replica_may_be_away(replicas: int, least: str) -> None:
    assert KafkaSettings(replication_factor=replicas).topic_config(Topic.HISTORY)["min.insync.replicas"] == least


def test_each_times_largest_value_is_one_that_the_client_takes() -> None:
    """librdkafka truncates a number to 32 bits without an error: 10^10 ms would have been 16 days."""
    largest = KafkaSettings(session_timeout_ms=300_000, heartbeat_interval_ms=299_999, fetch_wait_max_ms=10_000)
    make_group_consumer(largest, "group", "client").close()
    make_assigned_consumer(largest, "client").close()
    for name in ("session_timeout_ms", "fetch_wait_max_ms", "connect_timeout_s"):
        with pytest.raises(ValidationError, match="less than or equal"):
            KafkaSettings.model_validate({name: 10**10})


def test_with_one_topic_every_role_uses_the_ranking_topic_for_jobs() -> None:
    kafka = KafkaSettings(affinity=Affinity.ONE_TOPIC)
    assert kafka.worker_topics == (Topic.RANKING,)
    rights = {role: {right.name: right.operations for right in rights_of(role, kafka)} for role in Role}
    assert rights[Role.TRIGGER]["relaygr.ranking"] == ("Read", "Write")
    assert rights[Role.WORKER]["relaygr.ranking"] == ("Read",)
    assert not [role for role, names in rights.items() if "relaygr.preinfer" in names]


@pytest.mark.parametrize("affinity", [Affinity.RANGE, Affinity.CONSUMER_PROTOCOL])
def test_with_two_topics_the_workers_read_both(affinity: Affinity) -> None:
    kafka = KafkaSettings(affinity=affinity)
    assert kafka.worker_topics == (Topic.PREINFER, Topic.RANKING)
    assert set(kafka.catalogue) == set(Topic)


def test_settings_of_a_topic_replace_ours_in_kafkas_words() -> None:
    given = {
        "workers": {"segment.bytes": 52_428_800.0, "segment.ms": None, "unclean.leader.election.enable": True},
        "history": {"min.cleanable.dirty.ratio": 0.05},
    }
    kafka = KafkaSettings.model_validate({"topic_settings": given})
    assert kafka.topic_config(Topic.HISTORY)["min.cleanable.dirty.ratio"] == "0.05"
    config, ours = kafka.topic_config(Topic.WORKERS), KafkaSettings().topic_config(Topic.WORKERS)
    assert config == {
        **{key: value for key, value in ours.items() if key != "segment.ms"},
        "segment.bytes": "52428800",
        "unclean.leader.election.enable": "true",
    }
    assert kafka.topic_config(Topic.RANKING) == KafkaSettings().topic_config(Topic.RANKING)


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"history": {"cleanup.policy": "delete"}}, "cleanup.policy cannot be changed"),
        ({"relaygr.workers": {"segment.bytes": 1}}, "workers"),
        ({"workers": {"segment.bytes": [1]}}, "valid string"),
    ],
)
def test_settings_of_a_topic_that_make_no_sense_are_refused(given: dict[str, object], told: str) -> None:
    with pytest.raises(ValidationError, match=told):
        KafkaSettings.model_validate({"topic_settings": given})
