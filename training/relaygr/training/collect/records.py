"""The rows of Kafka's records. Times, tombstones and workers' snapshots follow the rules of the worker's history store
(`relaygr.worker.history.rules`), but for this: each record is taken as it is, without the user's other records.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from relaygr.schemas.messages import Behaviours, History
from relaygr.training.collect.deletions import Deletion
from relaygr.training.collect.folder import Origin
from relaygr.worker.history.batches import EventRecord, HistoryRecord
from relaygr.worker.history.records import NO_POSITION, without_future
from relaygr.worker.history.rules import TimeRules


@dataclass(slots=True)
class LogRows:
    """The rows of one partition of a topic that are in no file yet, in the order of the log. A row takes 48 bytes."""

    first: int
    """The offset of the first record."""
    read_to: int
    """The offset after the last record that was read."""
    users: dict[str, int] = field(default_factory=dict)
    """User id -> its number in `user_numbers`."""
    user_numbers: array[int] = field(default_factory=lambda: array("i"))
    positions: array[int] = field(default_factory=lambda: array("q"))
    items: array[int] = field(default_factory=lambda: array("q"))
    actions: array[int] = field(default_factory=lambda: array("i"))
    times_ms: array[int] = field(default_factory=lambda: array("q"))
    offsets: array[int] = field(default_factory=lambda: array("q"))
    recorded_at_ms: array[int] = field(default_factory=lambda: array("q"))

    def __len__(self) -> int:
        return len(self.items)

    def add(self, user_id: str, behaviours: Behaviours, position: int | None, offset: int, recorded_at_ms: int) -> None:
        """Adds the behaviours of one record. `position`: that of the first one; None: they have none."""
        count = len(behaviours)
        number = self.users.setdefault(user_id, len(self.users))
        if count == 1:  # The most frequent record, and ten times as fast.
            self.user_numbers.append(number)
            self.positions.append(NO_POSITION if position is None else position)
            self.items.append(int(behaviours.items[0]))
            self.actions.append(int(behaviours.actions[0]))
            self.times_ms.append(int(behaviours.timestamps_ms[0]))
            self.offsets.append(offset)
            self.recorded_at_ms.append(recorded_at_ms)
            return
        _extend(self.user_numbers, np.full(count, number, np.int32))
        _extend(self.positions, np.full(count, NO_POSITION) if position is None else position + np.arange(count))
        _extend(self.items, behaviours.items.astype(np.int64))
        _extend(self.actions, behaviours.actions.astype(np.int32))
        _extend(self.times_ms, behaviours.timestamps_ms.astype(np.int64))
        _extend(self.offsets, np.full(count, offset))
        _extend(self.recorded_at_ms, np.full(count, recorded_at_ms))


def add_event(rows: LogRows, entry: EventRecord, rules: TimeRules, now_ms: int) -> int:
    """Adds the behaviours of a record. Returns their number."""
    recorded_at_ms = rules.record_ms(entry.written_at_ms, now_ms)
    latest_ms = rules.latest_ms(recorded_at_ms, now_ms)
    new = entry.event.behaviours
    if int(new.timestamps_ms[-1]) > latest_ms:  # Times never decrease.
        used_ms = latest_ms - rules.max_ahead_ms
        times_ms = np.where(new.timestamps_ms > latest_ms, used_ms, new.timestamps_ms)
        new = Behaviours(new.items, new.actions, times_ms)
    rows.add(entry.user_id, new, entry.event.position, entry.offset, recorded_at_ms)
    return len(new)


def add_snapshot(
    rows: LogRows, entry: HistoryRecord, history: History, taken: NDArray[np.bool_], rules: TimeRules, now_ms: int
) -> int:
    """Adds those behaviours of a snapshot that are `taken` ([behaviours]). Returns their number."""
    recorded_at_ms = rules.record_ms(entry.written_at_ms, now_ms)
    used = without_future(history, recorded_at_ms, rules.latest_ms(recorded_at_ms, now_ms)).behaviours
    first = history.first_position or 0
    # Runs of taken behaviours, since positions count on within a run.
    edges = np.flatnonzero(np.diff(np.concatenate(([False], taken, [False])).astype(np.int8)))
    for start, end in zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True):
        rows.add(entry.user_id, used[start:end], first + start, entry.offset, recorded_at_ms)
    return int(taken.sum())


def deletion_of(entry: HistoryRecord, rules: TimeRules, now_ms: int, origin: Origin) -> Deletion:
    """What a tombstone deletes."""
    repeated = entry.repeated
    if repeated is not None and repeated.topic_id == origin.history_id:
        # A worker wrote the tombstone again; records that came since are none of those that the first one deleted.
        return Deletion(min(repeated.next_offset, entry.offset), repeated.written_at_ms, entry.offset + 1, now_ms)
    until_ms = rules.record_ms(entry.written_at_ms, now_ms, is_tombstone=True)
    return Deletion(entry.offset, until_ms, entry.offset + 1, now_ms)


def _extend(column: array[int], values: NDArray[np.int64] | NDArray[np.int32]) -> None:
    column.frombytes(np.ascontiguousarray(values).tobytes())
