"""The measuring thread: the errors that it survives, and its end."""

from __future__ import annotations

import threading

import pytest
from confluent_kafka import KafkaError, KafkaException

from relaygr.cluster.admin_process import AdminProcess
from relaygr.kafka.session import KafkaSession
from relaygr.kafka.settings import KafkaSettings
from relaygr.lag.collector import LagCollector
from relaygr.lag.model import Snapshot
from relaygr.lag.monitor import LagMonitor
from relaygr.lag.settings import LagSettings
from relaygr.runtime.errors import RelayError

FAST = LagSettings(interval_s=0.1, request_timeout_s=0.1)


@pytest.mark.parametrize("error", [KafkaException(KafkaError(KafkaError._TIMED_OUT)), TimeoutError()])
def test_a_poll_that_fails_in_any_way_is_said_and_tried_again(
    monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    """A time-out of the client's own futures used to end the thread, and its figures became stale without an error."""
    polls, again = [0], threading.Event()

    def fail(*_: object) -> None:
        polls[0] += 1
        if polls[0] > 1:
            again.set()
        raise error

    monkeypatch.setattr("relaygr.kafka.session.require_broker", lambda *_: None)
    monkeypatch.setattr("relaygr.lag.collector.is_embedded", lambda *_: True)
    monkeypatch.setattr(AdminProcess, "call", fail)
    monitor = LagMonitor(KafkaSession(KafkaSettings(bootstrap="127.0.0.1:1"), "test"), FAST)
    monitor.start()
    assert again.wait(5)
    monitor.stop()
    assert "Kafka at 127.0.0.1:1 does not answer" in (monitor.state.error or "")


def test_a_poll_that_hangs_is_left_alone_when_the_monitor_stops(monkeypatch: pytest.MonkeyPatch) -> None:
    closed: list[None] = []
    polls, release = threading.Event(), threading.Event()

    def hang(_: object) -> Snapshot:
        polls.set()
        release.wait(10)
        return Snapshot("cluster", 0, 0, ())

    monkeypatch.setattr(LagCollector, "poll", hang)
    monkeypatch.setattr(LagCollector, "close", lambda _: closed.append(None))
    monitor = LagMonitor(KafkaSession(KafkaSettings(), "test"), FAST)
    monitor.start()
    assert polls.wait(5)
    monitor.stop()
    assert closed == [], "a consumer closed under the thread that polls it crashes the process"
    release.set()
    monitor.stop()
    assert closed == [None]


def test_an_empty_group_is_refused() -> None:
    with pytest.raises(RelayError, match="--group names no group"):
        LagMonitor(KafkaSession(KafkaSettings(), "test"), FAST, [""])
