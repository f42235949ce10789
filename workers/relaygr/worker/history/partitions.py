"""How far the two logs of a followed partition are read and stored."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from confluent_kafka import Message

from relaygr.kafka.log_reader import LastRecord, Log
from relaygr.schemas.messages import History
from relaygr.worker.history.batches import EventRecord, HistoryBatch, HistoryRecord
from relaygr.worker.history.tables import PartitionState


@dataclass(slots=True)
class FollowedLog:
    """How far one topic of a followed partition is stored."""

    log: Log
    stored_to: int
    last: Message | None = None
    """The last record that was received since; None: none, or it is stored."""
    undelivered: set[int] = field(default_factory=set)
    """The offsets of invalid records whose dead letters are not delivered."""

    @property
    def may_store_to(self) -> int:
        """The offset from which a restart may read."""
        return min(self.undelivered, default=self.log.read_to)

    @property
    def last_record(self) -> LastRecord | None:
        return None if self.last is None else LastRecord.of(self.last)


@dataclass(frozen=True, slots=True)
class LogEnds:
    """The ends of both logs of a partition, their last stable offsets.

    All committed records from before `asked_ms` (wall time) are below them.
    """

    asked_ms: int
    history: int
    behaviours: int


class Restart(enum.StrEnum):
    """Why a partition is deleted from the store and read from the beginning again, apart from a `Loss` of a log."""

    DELETIONS_MAY_BE_MISSING = "deletions_may_be_missing"
    """The store is so old that tombstones may be gone from the log."""
    REFUSED_BEFORE = "refused_before"
    """The store had no room for some records, and has now."""
    DAMAGED = "damaged"
    """A stored history was not as it was stored."""


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
    named_event: int | None = 0
    """The highest offset of the behaviours topic that a snapshot names which was read before any behaviours were; None:
    unknown, since a process before this one read snapshots, and no behaviours."""

    @classmethod
    def at(cls, number: int, state: PartitionState, history_topic: str, behaviours_topic: str) -> FollowedPartition:
        """Reading goes on where it is stored."""
        history = Log(history_topic, number, state.next_offset, state.last, is_compacted=True)
        behaviours = Log(behaviours_topic, number, state.next_event, state.last_event)
        followed = cls(number, FollowedLog(history, state.next_offset), FollowedLog(behaviours, state.next_event))
        if state.next_offset and not state.next_event:
            followed.named_event = None
        return followed

    @property
    def reads_behaviours(self) -> bool:
        return self.stage >= Stage.BOTH

    @property
    def logs(self) -> tuple[Log, Log]:
        return self.history.log, self.behaviours.log

    @property
    def undelivered(self) -> int:
        """Invalid records whose dead letters are not delivered."""
        return len(self.history.undelivered) + len(self.behaviours.undelivered)

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
        last, last_event = self.history.last_record, self.behaviours.last_record
        return HistoryBatch(self.number, tuple(self.records), offset, tuple(self.events), event, last, last_event)

    def note_named(self, history: History) -> None:
        """A snapshot was read."""
        if self.stage is Stage.HISTORIES and history.covers is not None and self.named_event is not None:
            self.named_event = max(self.named_event, history.covers.offset)

    def note_stored(self, batch: HistoryBatch) -> None:
        """The batch of all received records is stored."""
        self.records.clear()
        self.events.clear()
        self.history.stored_to, self.behaviours.stored_to = batch.next_offset, batch.next_event
        self.history.last = self.behaviours.last = None

    def leave(self) -> None:
        """The partition is not followed any more. A dead letter that fails now is not written again: whoever reads the
        partition again writes it.
        """
        self.history.undelivered.clear()
        self.behaviours.undelivered.clear()
