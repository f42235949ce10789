"""A loop whose predecessor left finished offsets: which messages it processes again, and which it skips.

The consumer is scripted, so that only the commits of the test happen.
"""

from __future__ import annotations

import threading
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
EPOCH, TIME_MS = 3, 1_000
TIMEOUT_S = 30


def left(start: int, finished: int) -> Progress:
    """Of a predecessor, up to whose messages the log is the same."""
    return Progress(start, finished, EPOCH, TIME_MS)


class Delivered:
    """A message with the methods that the loop uses."""

    def __init__(self, offset: int, epoch: int = EPOCH, time_ms: int = TIME_MS) -> None:
        self._offset = offset
        self._epoch = epoch
        self._time_ms = time_ms

    def offset(self) -> int:
        return self._offset

    def topic(self) -> str:
        return TOPIC

    def partition(self) -> int:
        return 0

    def timestamp(self) -> tuple[int, int]:
        return (1, self._time_ms)

    def leader_epoch(self) -> int:
        return self._epoch

    def __getattr__(self, name: str) -> Callable[[], None]:
        return lambda: None


class Log:
    """A consumer that assigns the one partition and delivers its messages from the committed offset on.

    `written`: the first offset, leader epoch and time of messages that were written later.
    """

    def __init__(self, ends_are_known: bool, written: tuple[int, int, int]) -> None:
        self._written = written
        self.commits: list[int] = []
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
        first, epoch, time_ms = self._written
        old = [Delivered(offset) for offset in range(COMMITTED, min(first, END))]
        self._left = old + [Delivered(offset, epoch, time_ms) for offset in range(first, END)]

    def committed(self, partitions: list[KafkaPartition], timeout: float) -> list[KafkaPartition]:
        return [KafkaPartition(tp.topic, tp.partition, COMMITTED) for tp in partitions]

    def offsets_for_times(self, partitions: list[KafkaPartition], timeout: float) -> list[KafkaPartition]:
        if not self._ends_are_known:
            raise KafkaException(KafkaError(KafkaError._TIMED_OUT))
        assert all(tp.offset == OFFSET_END for tp in partitions)
        return [KafkaPartition(tp.topic, tp.partition, END) for tp in partitions]

    def commit(self, offsets: list[KafkaPartition], asynchronous: bool) -> None:
        self.commits += [tp.offset for tp in offsets]

    def __getattr__(self, name: str) -> Any:
        return lambda *_, **__: None


class Successor:
    """A loop that finishes every delivered message, except the offsets in `keeps`."""

    def __init__(
        self,
        finished: FinishedOffsets,
        ends_are_known: bool = True,
        keeps: frozenset[int] = frozenset(),
        written: tuple[int, int, int] = (END, EPOCH, TIME_MS),
    ):
        self.worked_on: list[int] = []
        self._keeps = keeps
        self.consumer = Log(ends_are_known, written)
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
    ("noted", "begins_at"),
    [
        pytest.param(left(0, 12), 12, id="finished and not committed"),
        pytest.param(left(0, END), END, id="all of the log"),
        pytest.param(left(0, 5), 5, id="no more than is committed"),
        pytest.param(left(6, 12), 5, id="the group was set back"),
        pytest.param(left(0, END + 1), 5, id="the log was cut"),
    ],
)
def test_it_works_on_nothing_that_is_certainly_finished(tmp_path: Path, noted: Progress, begins_at: int) -> None:
    open_log(tmp_path, 1).note({PLACE: noted})
    successor = Successor(open_log(tmp_path, 2))
    expected = list(range(begins_at, END))
    successor.until(lambda: len(successor.consumer._left) == 0 and len(successor.worked_on) >= len(expected))
    successor.stop()
    assert successor.worked_on == expected


@pytest.mark.parametrize(
    ("written", "begins_at"),
    [
        pytest.param((8, EPOCH + 1, TIME_MS - 1), 8, id="by another leader"),
        pytest.param((9, EPOCH, TIME_MS + 1), 9, id="at a later time"),
        pytest.param((12, EPOCH + 1, TIME_MS + 1), 12, id="after what is finished"),
    ],
)
def test_messages_that_came_after_the_predecessor_are_not_finished_whatever_their_offsets(
    tmp_path: Path, written: tuple[int, int, int], begins_at: int
) -> None:
    """The log came back shorter, and grew beyond the offset that was finished within a minute of its last note."""
    open_log(tmp_path, 1).note({PLACE: left(0, 12)})
    successor = Successor(open_log(tmp_path, 2), written=written)
    successor.until(lambda: len(successor.worked_on) == END - begins_at)
    successor.stop()
    assert successor.worked_on == list(range(begins_at, END))
    assert bool(successor.consumer.commits) is (begins_at < 12), "what was committed on trust goes back"


def test_where_the_broker_does_not_tell_the_end_a_second_is_done_again(tmp_path: Path) -> None:
    open_log(tmp_path, 1).note({PLACE: left(0, 12)})
    successor = Successor(open_log(tmp_path, 2), ends_are_known=False)
    successor.until(lambda: len(successor.worked_on) == END - COMMITTED)
    successor.stop()
    assert successor.worked_on[0] == COMMITTED


def test_it_notes_for_its_own_successor_what_is_finished_without_a_gap(tmp_path: Path) -> None:
    successor = Successor(open_log(tmp_path, 1), keeps=frozenset({9}))
    successor.until(lambda: open_log(tmp_path, 2).predecessor() == {PLACE: left(COMMITTED, 9)})
    successor.stop()


def test_a_rebalance_ends_what_the_predecessor_knew(tmp_path: Path) -> None:
    """Another owner may have had the partition in between; only its commits are valid."""
    open_log(tmp_path, 1).note({PLACE: left(0, 12)})
    log = open_log(tmp_path, 2)
    successor = Successor(log, keeps=frozenset(range(END)))
    successor.until(lambda: len(successor.worked_on) == END - 12)
    successor.consumer.on_revoke(successor.consumer, [KafkaPartition(TOPIC, 0)])
    assert open_log(tmp_path, 3).predecessor() == {}
    successor.stop()
