"""A loop whose predecessor left finished offsets: which messages it processes again, and which it skips.

The consumer is scripted, so that only the commits of the test happen.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import OFFSET_END, KafkaError, KafkaException
from confluent_kafka import TopicPartition as KafkaPartition

from relaygr.cluster.topic_identity import TopicIdentity
from relaygr.consumer.finished import FinishedOffsets
from relaygr.consumer.interface import Received
from relaygr.consumer.loop import ConsumerLoop
from relaygr.consumer.watermark import Progress, TopicPartition
from tests.waiting import until

TOPIC = "t.ranking"
PLACE = TopicPartition(TOPIC, 0)
COMMITTED, END = 5, 20
TIMEOUT_S = 30


class Delivered:
    """A message with the methods that the loop uses."""

    def __init__(self, offset: int) -> None:
        self._offset = offset

    def offset(self) -> int:
        return self._offset

    def topic(self) -> str:
        return TOPIC

    def partition(self) -> int:
        return 0

    def timestamp(self) -> tuple[int, int]:
        return (1, 0)

    def __getattr__(self, name: str) -> Callable[[], None]:
        return lambda: None


class _Failed(KafkaPartition):
    """The answer about a partition whose leader has just moved."""

    error = KafkaError(KafkaError.NOT_LEADER_FOR_PARTITION)


class Log:
    """A consumer that assigns the one partition and delivers its messages from the committed offset on."""

    def __init__(self, ends_are_known: bool, times_are_known: bool, written_at_s: float) -> None:
        self._times_are_known = times_are_known
        self._written_at_ms = int(written_at_s * 1000)
        self._left: list[Delivered] = []
        self._begun = False
        self._ends_are_known = ends_are_known

    def subscribe(self, topics: Any, on_assign: Any, on_revoke: Any, on_lost: Any) -> None:
        self.on_assign, self.on_revoke = on_assign, on_revoke

    def poll(self, timeout: float) -> Delivered | None:
        if not self._begun:
            self._begun = True
            self.assign()
        if self._left:
            return self._left.pop(0)
        threading.Event().wait(timeout)
        return None

    def assign(self) -> None:
        self.on_assign(self, [KafkaPartition(TOPIC, 0)])
        self._left = [Delivered(offset) for offset in range(COMMITTED, END)]

    def committed(self, partitions: list[KafkaPartition], timeout: float) -> list[KafkaPartition]:
        return [KafkaPartition(tp.topic, tp.partition, COMMITTED) for tp in partitions]

    def offsets_for_times(self, partitions: list[KafkaPartition], timeout: float) -> list[KafkaPartition]:
        if not self._ends_are_known:
            raise KafkaException(KafkaError(KafkaError._TIMED_OUT))
        # All messages were written at the same time.
        return [
            KafkaPartition(tp.topic, tp.partition, END) if tp.offset == OFFSET_END else self._first_since(tp)
            for tp in partitions
        ]

    def _first_since(self, asked: KafkaPartition) -> KafkaPartition:
        if not self._times_are_known:
            return _Failed(asked.topic, asked.partition)
        offset = COMMITTED if asked.offset <= self._written_at_ms else OFFSET_END
        return KafkaPartition(asked.topic, asked.partition, offset)

    def __getattr__(self, name: str) -> Any:
        return lambda *_, **__: None


class Successor:
    """A loop that finishes every delivered message, except the offsets in `keeps`."""

    def __init__(
        self,
        finished: FinishedOffsets,
        ends_are_known: bool = True,
        keeps: frozenset[int] = frozenset(),
        written_at_s: float = 0.0,
        times_are_known: bool = True,
    ):
        self.worked_on: list[int] = []
        self._keeps = keeps
        self.consumer = Log(ends_are_known, times_are_known, written_at_s)
        self.loop = ConsumerLoop(lambda _: self.consumer, [TOPIC], self, finished_log=finished)  # type: ignore[arg-type, return-value]
        self.loop.start()

    def on_message(self, message: Received) -> None:
        self.worked_on.append(message.offset)
        if message.offset not in self._keeps:
            self.loop.finish(message.token)

    def __getattr__(self, name: str) -> Any:
        return lambda *_: None

    def until(self, condition: Callable[[], bool]) -> None:
        until(condition, "the loop has come so far", TIMEOUT_S)

    def stop(self) -> None:
        self.loop.stop(0)
        assert self.loop.join(TIMEOUT_S)


@dataclass
class Holder:
    """The lock of a process with this epoch."""

    arena_epoch: int

    def is_held(self) -> bool:
        return True


def open_log(folder: Path, epoch: int) -> FinishedOffsets:
    log = FinishedOffsets(folder / "finished", TopicIdentity("c", {TOPIC: "id"}), 1, Holder(epoch))
    log.begin()
    return log


@pytest.mark.parametrize(
    ("left", "begins_at"),
    [
        pytest.param(Progress(0, 12), 12, id="finished and not committed"),
        pytest.param(Progress(0, END), END, id="all of the log"),
        pytest.param(Progress(0, 5), 5, id="no more than is committed"),
        pytest.param(Progress(6, 12), 5, id="the group was set back"),
        pytest.param(Progress(0, END + 1), 5, id="the log was cut"),
    ],
)
def test_it_works_on_nothing_that_is_certainly_finished(tmp_path: Path, left: Progress, begins_at: int) -> None:
    open_log(tmp_path, 1).note({PLACE: left})
    successor = Successor(open_log(tmp_path, 2))
    expected = list(range(begins_at, END))
    successor.until(lambda: len(successor.consumer._left) == 0 and len(successor.worked_on) >= len(expected))
    successor.stop()
    assert successor.worked_on == expected


@pytest.mark.parametrize(("minutes", "begins_at"), [(0, 12), (3, COMMITTED)], ids=["before", "after its end"])
def test_messages_that_came_after_the_predecessor_are_not_finished_whatever_their_offsets(
    tmp_path: Path, minutes: int, begins_at: int
) -> None:
    """An older disk was put back: the log came back shorter, and grew beyond the offset that was finished."""
    open_log(tmp_path, 1).note({PLACE: Progress(0, 12)})
    successor = Successor(open_log(tmp_path, 2), written_at_s=time.time() + 60 * minutes)
    successor.until(lambda: len(successor.worked_on) == END - begins_at)
    successor.stop()
    assert successor.worked_on[0] == begins_at


def test_where_the_broker_does_not_tell_what_came_later_a_second_is_done_again(tmp_path: Path) -> None:
    open_log(tmp_path, 1).note({PLACE: Progress(0, 12)})
    successor = Successor(open_log(tmp_path, 2), times_are_known=False)
    successor.until(lambda: len(successor.worked_on) == END - COMMITTED)
    successor.stop()
    assert successor.worked_on[0] == COMMITTED


def test_where_the_broker_does_not_tell_the_end_a_second_is_done_again(tmp_path: Path) -> None:
    open_log(tmp_path, 1).note({PLACE: Progress(0, 12)})
    successor = Successor(open_log(tmp_path, 2), ends_are_known=False)
    successor.until(lambda: len(successor.worked_on) == END - COMMITTED)
    successor.stop()
    assert successor.worked_on[0] == COMMITTED


def test_it_notes_for_its_own_successor_what_is_finished_without_a_gap(tmp_path: Path) -> None:
    successor = Successor(open_log(tmp_path, 1), keeps=frozenset({9}))
    successor.until(lambda: open_log(tmp_path, 2).predecessor() == {PLACE: Progress(COMMITTED, 9)})
    successor.stop()


def test_a_rebalance_ends_what_the_predecessor_knew(tmp_path: Path) -> None:
    """Another owner may have had the partition in between; only its commits are valid."""
    open_log(tmp_path, 1).note({PLACE: Progress(0, 12)})
    log = open_log(tmp_path, 2)
    successor = Successor(log, keeps=frozenset(range(END)))
    successor.until(lambda: len(successor.worked_on) == END - 12)
    successor.consumer.on_revoke(successor.consumer, [KafkaPartition(TOPIC, 0)])
    assert open_log(tmp_path, 3).predecessor() == {}
    successor.stop()
