"""Which offsets may be committed: per partition, the contiguous watermark of what is finished.

Work ends out of order, Kafka commits one number. So for each partition the tracker holds the offsets
that were begun and are not finished; what may be committed is the first of them, or, when there is none,
the offset after the last that was begun. A consumer delivers in order, so offsets that it passed over
(compacted away, transaction markers) do not exist and hold nothing up.

    assign(positions)      the group gave us these partitions, to be read from these offsets
    trust(progress)        of these, so much was finished by our predecessor
    begin(tp, offset)      a message was delivered: NEW, or again: IN_FLIGHT or FINISHED (both: skip it)
    finish(tp, offset, g)  its work is done, in any order, from any assignment
    committable()          what to commit now, of partitions that are ours
    progress(partitions)   what is finished now, for a successor
    revoke(partitions)     no longer ours; what is known about them is kept

A rebalance of the classic protocol takes all partitions and gives most of them back, with everything that
was not committed delivered a second time. Since the knowledge is kept, what is in flight or finished here
is not done twice. Where another owner committed past us meanwhile, what lies before its commit is dropped.
Where a message is delivered from before all that was seen here, or a second time within one assignment,
somebody reset the group's offset or the log was cut: all is forgotten and done again, under the next
`generation`, so that a late `finish` of the old work does not count for the new.

Pure: no Kafka, no clock, no threads.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from relaygr.runtime.errors import RelayError


class TopicPartition(NamedTuple):
    """One partition of one topic."""

    topic: str
    partition: int


@dataclass(frozen=True, slots=True)
class Progress:
    """Every offset in [start, finished) is finished or does not exist."""

    start: int
    finished: int


class Begin(enum.StrEnum):
    """What a delivered message is to us."""

    NEW = "new"
    IN_FLIGHT = "in_flight"
    """Delivered again while its work goes on here: skip it."""
    FINISHED = "finished"
    """Delivered again after its work ended here: skip it."""


class _Partition:
    """What is known about one partition. `next_offset` follows the last offset that was begun."""

    __slots__ = ("committed", "delivered", "generation", "low", "next_offset", "owned", "unfinished")

    def __init__(self, generation: int) -> None:
        self.generation = generation
        self.owned = False
        # Insertion order is offset order: begin() only ever adds at the end.
        self.unfinished: dict[int, None] = {}
        # [low, next_offset) was seen here; None before the first position is known.
        self.low: int | None = None
        self.next_offset = 0
        # What the group holds or will hold, so that it is not committed again; None: not known.
        self.committed: int | None = None
        # The last offset delivered in this assignment: within one it only grows.
        self.delivered = -1

    @property
    def watermark(self) -> int:
        return next(iter(self.unfinished), self.next_offset)


class WatermarkTracker:
    """Offsets in flight, finished and committable of all partitions that this process ever owned.

    `max_span` bounds what lies between the watermark and the last offset begun: what would be delivered
    again after a crash. At the bound `is_full` says so, and the partition should pause until it is not.
    Not thread-safe: it belongs to the poll thread.
    """

    def __init__(self, max_span: int) -> None:
        if max_span < 1:
            raise RelayError(f"max_span is {max_span}: at least one message must be allowed in flight")
        self.max_span = max_span
        self._partitions: dict[TopicPartition, _Partition] = {}
        self._changed: set[TopicPartition] = set()

    def assign(self, positions: Mapping[TopicPartition, int | None]) -> None:
        """These partitions are ours now, besides those that are already.

        A position is the offset from which the group reads, that is, its commit; None if it is not known
        now, in which case the first delivered message tells it.
        """
        for tp, position in positions.items():
            state = self._partitions.get(tp)
            if state is None:
                state = self._partitions[tp] = _Partition(generation=0)
            state.owned = True
            state.delivered = -1
            # Until the position is known nothing may be committed: it could turn another owner's commit back.
            state.committed = None
            if position is not None:
                self._placed(tp, position)

    def trust(self, finished: Mapping[TopicPartition, int]) -> None:
        """All before these offsets was finished before this process began. For partitions just assigned for the
        first time, whose position is known; what is delivered from before is FINISHED, and committable.
        """
        for tp, offset in finished.items():
            state = self._partitions[tp]
            state.next_offset = max(state.next_offset, offset)
            self._changed.add(tp)

    def progress(self, partitions: Iterable[TopicPartition]) -> dict[TopicPartition, Progress]:
        """What is finished of those that are ours and whose position is known."""
        found = {}
        for tp in partitions:
            state = self._partitions.get(tp)
            if state is not None and state.owned and state.low is not None and state.committed is not None:
                found[tp] = Progress(state.low, state.watermark)
        return found

    def revoke(self, partitions: Iterable[TopicPartition]) -> None:
        """These are no longer ours: nothing of them is committable until they are assigned again."""
        for tp in partitions:
            state = self._partitions.get(tp)
            if state is not None:
                state.owned = False
            self._changed.discard(tp)

    def begin(self, tp: TopicPartition, offset: int) -> Begin:
        """A message of an owned partition was delivered."""
        state = self._partitions[tp]
        if state.committed is None:
            # Whatever lies before the first message delivered was committed by somebody, or does not exist.
            self._placed(tp, offset)
            # Maybe nobody ever committed: offer this one as the start.
            state.committed = offset - 1
        if offset <= state.delivered or (state.low is not None and offset < state.low):
            state = self._forget(tp, offset)
        state.delivered = offset
        if offset >= state.next_offset:
            state.unfinished[offset] = None
            state.next_offset = offset + 1
            return Begin.NEW
        return Begin.IN_FLIGHT if offset in state.unfinished else Begin.FINISHED

    def generation(self, tp: TopicPartition) -> int:
        """Counts how often all was forgotten. `finish` takes that of the moment of `begin`."""
        return self._partitions[tp].generation

    def finish(self, tp: TopicPartition, offset: int, generation: int) -> None:
        """The work of a message that was NEW is done. Repeated or outdated calls do nothing."""
        state = self._partitions.get(tp)
        if state is None or state.generation != generation or offset not in state.unfinished:
            return
        del state.unfinished[offset]
        if state.owned:
            self._changed.add(tp)

    def committable(self) -> dict[TopicPartition, int]:
        """Offsets to commit: watermarks of owned partitions that passed what the group will hold.

        They are offered again until `committed` takes note of them.
        """
        offsets = {}
        for tp in list(self._changed):
            state = self._partitions[tp]
            watermark = state.watermark
            if state.committed is None or watermark <= state.committed:
                self._changed.discard(tp)
            else:
                offsets[tp] = watermark
        return offsets

    def committed(self, offsets: Mapping[TopicPartition, int]) -> None:
        """These offsets were handed to a client that commits them in a while."""
        for tp, offset in offsets.items():
            state = self._partitions.get(tp)
            if state is not None and state.owned and state.committed is not None:
                state.committed = max(state.committed, offset)

    def is_full(self, tp: TopicPartition) -> bool:
        """Whether no more of this partition should be begun before its oldest message is finished."""
        return self.span(tp) >= self.max_span

    def span(self, tp: TopicPartition) -> int:
        """Offsets between the watermark and the last one begun."""
        state = self._partitions.get(tp)
        return 0 if state is None else state.next_offset - state.watermark

    def next_offset(self, tp: TopicPartition) -> int:
        """The offset after the last one that was begun."""
        return self._partitions[tp].next_offset

    def in_flight(self) -> int:
        """Messages of owned partitions that are not finished."""
        return sum(len(state.unfinished) for state in self._partitions.values() if state.owned)

    def owned(self) -> frozenset[TopicPartition]:
        """The partitions that are ours."""
        return frozenset(tp for tp, state in self._partitions.items() if state.owned)

    def _placed(self, tp: TopicPartition, position: int) -> None:
        """The group's offset of an owned partition is known: whatever lies before it is somebody's done work."""
        state = self._partitions[tp]
        if state.low is None:
            state.low = state.next_offset = position
        elif position > state.low:
            for offset in [offset for offset in state.unfinished if offset < position]:
                del state.unfinished[offset]
            state.low = position
            state.next_offset = max(state.next_offset, position)
        state.committed = position
        self._changed.add(tp)

    def _forget(self, tp: TopicPartition, offset: int) -> _Partition:
        state = _Partition(self._partitions[tp].generation + 1)
        state.owned = True
        state.low = state.next_offset = state.committed = offset
        self._partitions[tp] = state
        return state


def split_partitions(owned: Iterable[TopicPartition], topics: Sequence[str]) -> frozenset[int]:
    """Partitions owned on some of `topics`, but not on all: their users' K,V and requests do not meet."""
    by_topic: dict[str, set[int]] = {topic: set() for topic in topics}
    for tp in owned:
        by_topic.setdefault(tp.topic, set()).add(tp.partition)
    return frozenset(
        partition
        for partition in set[int]().union(*by_topic.values())
        if any(partition not in partitions for partitions in by_topic.values())
    )
