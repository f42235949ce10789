"""How the trigger reads its events: errors that end it, and those that it survives."""

from __future__ import annotations

import pytest
from confluent_kafka import KafkaError
from structlog.testing import capture_logs

from relaygr.kafka.session import KafkaSession
from relaygr.kafka.settings import KafkaSettings
from relaygr.runtime.errors import RelayError
from relaygr.trigger.faust_stream import EventFeed, position


@pytest.fixture
def feed() -> EventFeed:
    kafka = KafkaSettings(bootstrap="127.0.0.1:1")
    return EventFeed(KafkaSession(kafka, "test"), "test", on_partitions=lambda _: None, on_error=lambda _: None)


@pytest.mark.parametrize(
    ("code", "advice"),
    [
        (KafkaError.INCONSISTENT_GROUP_PROTOCOL, "another assignor: stop them first"),
        (KafkaError.INVALID_SESSION_TIMEOUT, "raise session_timeout_ms"),
        (KafkaError._FATAL, "Start the trigger again"),
    ],
)
def test_an_error_that_does_not_pass_ends_the_trigger_with_advice(feed: EventFeed, code: int, advice: str) -> None:
    with pytest.raises(RelayError, match=advice):
        feed._on_poll_error(KafkaError(code))
    feed.close()


@pytest.mark.parametrize("code", [KafkaError.TOPIC_AUTHORIZATION_FAILED, KafkaError.GROUP_AUTHORIZATION_FAILED])
def test_a_missing_right_is_named_and_waited_for(feed: EventFeed, code: int) -> None:
    feed._on_poll_error(KafkaError(code))
    assert feed.refusal is not None
    assert "Kafka refuses the trigger" in feed.refusal
    feed.close()


def test_a_right_that_is_taken_away_while_it_reads_leaves_its_positions() -> None:
    """It stayed not ready when the right was given back, until its partitions were assigned anew."""
    told: list[tuple[str, KafkaError]] = []
    session = KafkaSession(KafkaSettings(bootstrap="127.0.0.1:1"), "test")
    session.note = lambda *error: told.append(error)  # type: ignore[method-assign]
    feed = EventFeed(session, "test", lambda _: None, lambda _: None)
    feed._own(frozenset({0}))
    feed.is_positioned = True
    refused = KafkaError(KafkaError.TOPIC_AUTHORIZATION_FAILED)
    feed._on_poll_error(refused)
    assert feed.is_positioned and feed.refusal is None
    assert told == [("relaygr.retrieval", refused)]
    feed.close()


@pytest.mark.parametrize(
    "code", [KafkaError._TRANSPORT, KafkaError._ALL_BROKERS_DOWN, KafkaError.UNKNOWN_TOPIC_OR_PART]
)
def test_an_error_that_may_pass_is_not_even_a_warning(feed: EventFeed, code: int) -> None:
    with capture_logs() as lines:
        feed._on_poll_error(KafkaError(code))
    assert [line["log_level"] for line in lines] == ["debug"]
    feed.close()


@pytest.mark.parametrize(
    ("committed", "expected"),
    [
        pytest.param(-1001, 40, id="no commit: from now on"),
        pytest.param(30, 30, id="in the log"),
        pytest.param(40, 40, id="at the end"),
        pytest.param(3, 20, id="retention deleted what was unread"),
        pytest.param(65, 20, id="the topic was made anew"),
    ],
)
def test_it_begins_at_its_commit_if_that_is_in_the_log(committed: int, expected: int) -> None:
    assert position(committed, 20, 40) == expected


def test_a_feed_that_was_not_subscribed_owns_nothing(feed: EventFeed) -> None:
    assert feed.partitions == frozenset()
    assert not feed.is_positioned
    feed.close()
