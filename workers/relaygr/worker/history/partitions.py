"""How far the two logs of a followed partition are read and stored."""

from __future__ import annotations

import enum
from collections.abc import Iterator
from dataclasses import dataclass, field

from relaygr.worker.history.batches import EventRecord, HistoryBatch, HistoryRecord


@dataclass(slots=True)
class FollowedLog:
    """How far one topic of a followed partition is read."""

    read_to: int
    """The offset after the last received record."""
    stored_to: int
    end: int | None = None
    """The end of the log when the first record arrived; records of open transactions are before it."""
    at_end: bool = False
    undelivered: set[int] = field(default_factory=set)
    """The offsets of invalid records whose dead letters are not delivered."""

    @property
    def may_store_to(self) -> int:
        """The offset from which a restart may read."""
        return min(self.undelivered, default=self.read_to)

    @property
    def reached_end(self) -> bool:
        return self.at_end or (self.end is not None and self.read_to >= self.end)


@dataclass(frozen=True, slots=True)
class LogEnds:
    """The ends of both logs of a partition, their last stable offsets.

    All committed records from before `asked_ms` (wall time) are below them.
    """

    asked_ms: int
    history: int
    behaviours: int


class Stage(enum.IntEnum):
    """What is read of a partition: each stage follows the one before."""

    HISTORIES = 0
    BOTH = 1
    """Histories and behaviours, whose end is not reached yet."""
    CAUGHT_UP = 2


@dataclass(slots=True)
class FollowedPartition:
    """The state of one followed partition."""

    number: int
    history: FollowedLog
    behaviours: FollowedLog
    stage: Stage = Stage.HISTORIES
    ends: LogEnds | None = None
    """The ends that were asked for last, until the partition is stored up to them."""
    records: list[HistoryRecord] = field(default_factory=list)
    """Received, and not stored yet, as `events`."""
    events: list[EventRecord] = field(default_factory=list)

    @classmethod
    def at(cls, number: int, offset: int, event: int) -> FollowedPartition:
        """Reading begins at these offsets of the two topics."""
        return cls(number, FollowedLog(offset, offset), FollowedLog(event, event))

    @property
    def reads_behaviours(self) -> bool:
        return self.stage >= Stage.BOTH

    @property
    def logs(self) -> Iterator[FollowedLog]:
        return iter((self.history, self.behaviours))

    @property
    def stored_to(self) -> tuple[int, int]:
        """The stored offsets of both topics."""
        return self.history.stored_to, self.behaviours.stored_to

    @property
    def reached_ends(self) -> bool:
        """Whether the partition is stored up to `ends`."""
        ends = self.ends
        return ends is not None and self.stored_to[0] >= ends.history and self.stored_to[1] >= ends.behaviours

    def batch(self) -> HistoryBatch | None:
        """The received records; None if nothing is to be stored."""
        offset, event = self.history.may_store_to, self.behaviours.may_store_to
        if not self.records and not self.events and (offset, event) == self.stored_to:
            return None
        return HistoryBatch(self.number, tuple(self.records), offset, tuple(self.events), event)

    def note_stored(self, batch: HistoryBatch) -> None:
        """The batch of all received records is stored."""
        self.records.clear()
        self.events.clear()
        self.history.stored_to, self.behaviours.stored_to = batch.next_offset, batch.next_event

    def leave(self) -> None:
        """The partition is not followed any more. A dead letter that fails now is not written again: whoever reads the
        partition again writes it.
        """
        for log in self.logs:
            log.undelivered.clear()
