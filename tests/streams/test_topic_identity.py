"""The watch of topic ids: which topics it reports, and what it survives."""

from __future__ import annotations

import threading
from collections import deque
from typing import Any

import pytest
from confluent_kafka import KafkaError, KafkaException

from relaygr.cluster import topic_identity
from relaygr.cluster.topic_identity import TopicIdentity, TopicIdentityWatch
from relaygr.kafka.session import KafkaSession
from relaygr.kafka.settings import KafkaSettings

TIMEOUT_S = 30.0


class Answers:
    """The child process. It repeats its last answer."""

    def __init__(self, *answers: dict[str, str] | Exception) -> None:
        self._left = deque(answers)

    def call(self, *_: Any) -> TopicIdentity:
        answer = self._left.popleft() if len(self._left) > 1 else self._left[0]
        if isinstance(answer, Exception):
            raise answer
        return TopicIdentity("cluster", answer)

    def renew(self) -> None:
        pass

    def close(self) -> None:
        pass


def watched(monkeypatch: pytest.MonkeyPatch, known: dict[str, str], answers: Answers, reports: int) -> list[set[str]]:
    monkeypatch.setattr(topic_identity, "INTERVAL_S", 0.001)
    monkeypatch.setattr(topic_identity, "AdminProcess", lambda *_: answers)
    found: list[set[str]] = []
    done = threading.Event()

    def on_new(topics: frozenset[str]) -> None:
        found.append(set(topics))
        if len(found) == reports:
            done.set()

    watch = TopicIdentityWatch(KafkaSession(KafkaSettings(), "test"), TopicIdentity("cluster", known), "test", on_new)
    watch.start()
    assert not reports or done.wait(TIMEOUT_S)
    watch.stop()
    return found


def test_a_topic_with_another_id_is_reported_once_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = Answers({"a": "1", "b": "1"}, {"a": "2", "b": "1"}, {"a": "2", "b": "1"}, {"a": "3", "b": "2"})
    assert watched(monkeypatch, {"a": "1", "b": "1"}, answers, 2) == [{"a"}, {"a", "b"}]


def test_a_broker_that_is_away_and_a_topic_that_is_missing_for_a_while_hide_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    missing = KafkaException(KafkaError(KafkaError.UNKNOWN_TOPIC_OR_PART))
    answers = Answers(missing, TimeoutError(), OSError("no child process"), {"a": "2"})
    assert watched(monkeypatch, {"a": "1"}, answers, 1) == [{"a"}]


def test_on_a_cluster_without_topic_ids_it_does_not_ask(monkeypatch: pytest.MonkeyPatch) -> None:
    assert watched(monkeypatch, {"a": "", "b": ""}, Answers(AssertionError("asked")), 0) == []
