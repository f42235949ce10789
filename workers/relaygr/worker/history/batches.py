"""What the follower hands to the store, and what the store answers."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, fields

from relaygr.kafka.log_reader import LastRecord
from relaygr.schemas.headers import RepeatedTombstone
from relaygr.schemas.messages import BehaviourEvent, History
from relaygr.schemas.record import record
from relaygr.worker.history.rules import Added


@record(frozen=True, slots=True)
class HistoryRecord:
    """One record of the history topic; `history` None is a tombstone."""

    user_id: str
    offset: int
    history: History | None
    written_at_ms: int = 0
    """The record's timestamp in the log; ms since the epoch; 0: none."""
    repeated: RepeatedTombstone | None = None
    """Set if a worker wrote the tombstone."""


@record(frozen=True, slots=True)
class EventRecord:
    """One record of the behaviours topic."""

    event: BehaviourEvent
    offset: int
    written_at_ms: int = 0
    """The record's timestamp in the log; ms since the epoch; 0: none."""

    @property
    def user_id(self) -> str:
        return self.event.user_id


@record(frozen=True, slots=True)
class HistoryBatch:
    """Records of one partition of both topics in offset order, and the offsets to continue from."""

    partition: int
    records: tuple[HistoryRecord, ...]
    next_offset: int
    events: tuple[EventRecord, ...] = ()
    next_event: int = 0
    last: LastRecord | None = None
    """The last record that was read of the history topic, as `last_event` of the other; None: none since the last
    batch."""
    last_event: LastRecord | None = None


@dataclass(slots=True)
class ApplyOutcome:
    """The effect of batches. Users are in the order of their records; the numbers count records."""

    changed: list[str] = field(default_factory=list)
    """A user may occur more than once."""
    deleted: list[str] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)
    older: int = 0
    superseded: int = 0
    """Records of workers that another record had overtaken."""
    repeated: int = 0
    """Records of both topics that had been read."""
    snapshots: int = 0
    added: Counter[Added] = field(default_factory=Counter)
    """Records of the behaviours topic."""
    ahead: int = 0
    """Stored records of both topics with a time that was too far ahead to be used."""

    def extend(self, other: ApplyOutcome) -> None:
        """Adds the effect of later batches."""
        for each in fields(self):
            setattr(self, each.name, getattr(self, each.name) + getattr(other, each.name))


class StoreFullError(Exception):
    """No page is free, not even for a deletion: readers hold old pages, or the file is full. The caller may retry.

    `done`: the outcome of the records that were stored before, with their offsets.
    """

    def __init__(self, text: str, done: ApplyOutcome) -> None:
        super().__init__(text)
        self.done = done
