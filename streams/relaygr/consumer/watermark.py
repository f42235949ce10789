"""The commit watermark of each partition: the offset up to which every message is finished.

    assign(positions)       the group assigned these partitions, to be read from these offsets
    assume_finished(ends)   the predecessor finished everything before these offsets
    begin(tp, offset, ...)  a message was delivered: NEW, or again: IN_FLIGHT or FINISHED (skip both)
    reach_end(tp, end)      everything before the end of the log was delivered
    finish(tp, offset, g)   the work of the message is done; calls come in any order
    committable()           the offsets to commit now, of owned partitions
    progress(partitions)    the finished offsets, for a successor
    revoke(partitions)      the partitions are no longer owned; their state is kept
    suspect(topic)          the topic was missing: the log of its next assignment may be another one
    begin_anew(topics)      the logs of these topics are new ones
    set_back()              the offsets that the group's commits must go back to

docs/consumer.md has the rules. Pure: no Kafka, no clock, no threads.
"""

from __future__ import annotations

import enum
from collections.abc import Collection, Iterable, Mapping
from typing import NamedTuple

from relaygr.runtime.errors import RelayError
from relaygr.schemas.record import record


class TopicPartition(NamedTuple):
    """One partition of one topic."""

    topic: str
    partition: int


@record(frozen=True, slots=True)
class Progress:
    """Every offset in [start, finished) is finished or does not exist."""

    start: int
    finished: int
    leader_epoch: int = -1
    """The highest of the messages that were delivered; -1: unknown. A message that is there with a higher one was
    written later, to a log that came back shorter."""
    time_ms: int = -1
    """The latest timestamp of these messages, likewise; -1: none has one."""


class Begin(enum.StrEnum):
    """The state of a delivered message."""

    NEW = "new"
    IN_FLIGHT = "in_flight"
    """Delivered again while this process works on it: skip it."""
    FINISHED = "finished"
    """Delivered again after this process finished it: skip it."""


class _Partition:
    """The state of one partition. `next_offset` follows the last offset that was begun."""

    __slots__ = (
        "assumed", "committed", "delivered", "generation", "group_offset", "leader_epoch", "low", "next_offset",
        "owned", "set_back", "suspect", "time_ms", "unfinished",
    )  # fmt: skip

    def __init__(self, generation: int) -> None:
        self.generation = generation
        self.owned = False
        # The next assignment may be of another log.
        self.suspect = False
        # The log went back, and the group's commit must do so, too.
        self.set_back = False
        # Insertion order is offset order, because begin() adds at the end.
        self.unfinished: dict[int, None] = {}
        # [low, next_offset) was delivered here; None until the first position is known.
        self.low: int | None = None
        self.next_offset = 0
        # The group's committed offset, or the one given to the client to commit; None: not known.
        self.committed: int | None = None
        # The group's offset, the last that is known. Commits of this log are not below it.
        self.group_offset = 0
        # The last offset delivered in this assignment, or the one before its position. Offsets grow from there.
        self.delivered = -1
        # The predecessor finished all before this offset.
        self.assumed = 0
        # As in `Progress`.
        self.leader_epoch = self.time_ms = -1

    @property
    def watermark(self) -> int:
        return next(iter(self.unfinished), self.next_offset)


class WatermarkTracker:
    """Offsets in flight, finished and committable of all partitions that this process ever owned.

    `max_span` bounds the offsets between the watermark and the last one begun, which are delivered again after a crash.
    At the bound `is_full` is true, and the caller should pause the partition. Not thread-safe: the poll thread owns it.
    """

    def __init__(self, max_span: int) -> None:
        if max_span < 1:
            raise RelayError(f"max_span is {max_span}: at least one message must be allowed in flight")
        self.max_span = max_span
        self._partitions: dict[TopicPartition, _Partition] = {}

    def assign(self, positions: Mapping[TopicPartition, int | None]) -> None:
        """Adds owned partitions.

        A position is the committed offset of the group, from which it reads. None means that the position is not
        known yet; the first delivered message then sets it.
        """
        for tp, position in positions.items():
            state = self._partitions.get(tp)
            if state is None:
                state = self._partitions[tp] = _Partition(generation=0)
            if state.suspect or (position is not None and position < state.group_offset):
                state = self._partitions[tp] = _Partition(state.generation + 1)
            state.owned = True
            state.delivered = -1
            # Nothing may be committed until the position is known: it could reset the commit of another owner.
            state.committed = None
            if position is not None:
                state.delivered = position - 1
                state.group_offset = position
                self._placed(tp, position)

    def assume_finished(self, finished: Mapping[TopicPartition, Progress]) -> None:
        """Marks every message before these offsets as finished by the predecessor.

        Only for partitions that were just assigned for the first time and whose position is known. Messages before
        these offsets are FINISHED when they are delivered, and their offsets are committable. If one of them was
        written after the predecessor's messages, the log has gone back.
        """
        for tp, progress in finished.items():
            state = self._partitions[tp]
            state.assumed = progress.finished
            state.next_offset = max(state.next_offset, progress.finished)
            state.leader_epoch, state.time_ms = progress.leader_epoch, progress.time_ms

    def progress(self, partitions: Iterable[TopicPartition]) -> dict[TopicPartition, Progress]:
        """The finished offsets of those partitions that are owned and whose position is known."""
        found = {}
        for tp in partitions:
            state = self._partitions.get(tp)
            if state is not None and state.owned and state.low is not None and state.committed is not None:
                found[tp] = Progress(state.low, state.watermark, state.leader_epoch, state.time_ms)
        return found

    def revoke(self, partitions: Iterable[TopicPartition]) -> None:
        """Removes owned partitions. None of their offsets is committable until they are assigned again."""
        for tp in partitions:
            state = self._partitions.get(tp)
            if state is not None:
                state.owned = state.set_back = False

    def suspect(self, topic: str) -> None:
        """Drops the state of the topic at the next assignment of its partitions."""
        for tp, state in self._partitions.items():
            if tp.topic == topic:
                state.suspect = True

    def begin_anew(self, topics: Collection[str]) -> list[TopicPartition]:
        """Drops the state of these topics, whose logs are new ones. Returns their owned partitions, at offset 0."""
        known = [tp for tp in self._partitions if tp.topic in topics]
        for tp in known:
            if self._partitions[tp].owned:
                self._go_back(tp, 0)
            else:
                self._forget(tp, 0).owned = False
        return [tp for tp in known if self._partitions[tp].owned]

    def begin(self, tp: TopicPartition, offset: int, leader_epoch: int = -1, time_ms: int = -1) -> Begin:
        """Notes the delivery of a message of an owned partition. -1: its leader epoch or timestamp is not known."""
        state = self._partitions[tp]
        if state.committed is None:
            self._placed_by_delivery(tp, offset)
        # The predecessor has not seen such a message.
        is_new = offset < state.assumed and (leader_epoch > state.leader_epoch or time_ms > state.time_ms)
        if is_new or offset <= state.delivered or (state.low is not None and offset < state.low):
            state = self._go_back(tp, offset)
        state.leader_epoch, state.time_ms = max(state.leader_epoch, leader_epoch), max(state.time_ms, time_ms)
        state.delivered = offset
        if offset >= state.next_offset:
            state.unfinished[offset] = None
            state.next_offset = offset + 1
            return Begin.NEW
        return Begin.IN_FLIGHT if offset in state.unfinished else Begin.FINISHED

    def reach_end(self, tp: TopicPartition, end: int) -> None:
        """Notes that the consumer reached the end of a log: between the last message and `end` there is none."""
        state = self._partitions.get(tp)
        if state is None or not state.owned:
            return
        if state.committed is None:
            self._placed_by_delivery(tp, end)
        if end < state.next_offset:
            self._go_back(tp, end)
        elif end > state.next_offset:
            state.next_offset = end

    def set_back(self) -> dict[TopicPartition, int]:
        """The watermarks of the owned partitions whose logs went back.

        They are returned again until `committed` is called for them.
        """
        return {tp: state.watermark for tp, state in self._partitions.items() if state.set_back}

    def generation(self, tp: TopicPartition) -> int:
        """How often the state of the partition was dropped. `finish` takes the value at the time of `begin`."""
        return self._partitions[tp].generation

    def finish(self, tp: TopicPartition, offset: int, generation: int) -> None:
        """Marks a message that was NEW as finished. Repeated calls and calls of an old generation do nothing."""
        state = self._partitions.get(tp)
        if state is not None and state.generation == generation:
            state.unfinished.pop(offset, None)

    def committable(self) -> dict[TopicPartition, int]:
        """The watermarks of owned partitions that are beyond the committed offset of the group.

        They are returned again until `committed` is called for them.
        """
        return {
            tp: state.watermark
            for tp, state in self._partitions.items()
            if state.owned and state.committed is not None and state.watermark > state.committed
        }

    def committed(self, offsets: Mapping[TopicPartition, int]) -> None:
        """Notes that these offsets were given to the client, which commits them soon."""
        for tp, offset in offsets.items():
            state = self._partitions.get(tp)
            if state is not None and state.owned and state.committed is not None:
                state.set_back = False
                state.committed = max(state.committed, offset)
                state.group_offset = max(state.group_offset, offset)

    def is_full(self, tp: TopicPartition) -> bool:
        """Whether no more messages of this partition should be begun until its oldest one is finished."""
        return self.span(tp) >= self.max_span

    def span(self, tp: TopicPartition) -> int:
        """The number of offsets between the watermark and the last one begun."""
        state = self._partitions.get(tp)
        return 0 if state is None else state.next_offset - state.watermark

    def next_offset(self, tp: TopicPartition) -> int:
        """The offset after the last one that was begun."""
        return self._partitions[tp].next_offset

    def in_flight(self) -> int:
        """The number of unfinished messages of owned partitions."""
        return sum(len(state.unfinished) for state in self._partitions.values() if state.owned)

    def owned(self) -> frozenset[TopicPartition]:
        """The owned partitions."""
        return frozenset(tp for tp, state in self._partitions.items() if state.owned)

    def _placed(self, tp: TopicPartition, position: int) -> None:
        """Sets the group's offset of an owned partition. All messages before it are finished by some process."""
        state = self._partitions[tp]
        if state.low is None:
            state.low = state.next_offset = position
        elif position > state.low:
            for offset in [offset for offset in state.unfinished if offset < position]:
                del state.unfinished[offset]
            state.low = position
            state.next_offset = max(state.next_offset, position)
        state.committed = position

    def _placed_by_delivery(self, tp: TopicPartition, offset: int) -> None:
        """Every message before the first delivered one was committed by another process or does not exist."""
        self._placed(tp, offset)
        # The group may have no commit at all: offer this offset as its first commit.
        self._partitions[tp].committed = offset - 1

    def _go_back(self, tp: TopicPartition, offset: int) -> _Partition:
        state = self._forget(tp, offset)
        state.set_back = True
        return state

    def _forget(self, tp: TopicPartition, offset: int) -> _Partition:
        state = _Partition(self._partitions[tp].generation + 1)
        state.owned = True
        state.low = state.next_offset = state.committed = offset
        state.delivered = offset - 1
        self._partitions[tp] = state
        return state


def split_partitions(owners: Iterable[tuple[TopicPartition, str]], topics: Collection[str]) -> frozenset[int]:
    """The partitions that have no one owner on all of `topics` (an owner split). `owners`: owned partitions, and whose.

    Pre-infer jobs and ranking requests of their users go to different workers.
    """
    found: dict[int, dict[str, str]] = {}
    for tp, owner in owners:
        if tp.topic in topics:
            found.setdefault(tp.partition, {})[tp.topic] = owner
    return frozenset(
        partition
        for partition, by_topic in found.items()
        if len(by_topic) < len(topics) or len(set(by_topic.values())) > 1
    )
