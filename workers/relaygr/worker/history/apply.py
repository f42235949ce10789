"""The effect of records on stored histories, in one transaction: which snapshot replaces, what a tombstone keeps.

* A snapshot replaces the stored history if its version number is not smaller, or if its timestamp in the log is later.
  So a wrong number, however large, blocks no later snapshot. A tombstone deletes. Both keep the behaviours that they do
  not cover (`relaygr.worker.history.rules`).
* A worker's snapshot or tombstone (`relaygr.worker.history.snapshots`) changes nothing if another record of the user
  came after those that the worker had read. A user whose last record in the log changed nothing is *superseded*:
  Kafka may drop the record before it, so the owner writes the stored state again.
* A record for which there is no space is refused: the user's older version is deleted, since it would be mistaken for
  the newest, and later behaviours of that user count as a history with a gap.
* After a deletion a hash of the user's id stays with the time and the offset of the deletion, for as long as old
  behaviours may come.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TypeVar

from relaygr.kafka.log_reader import LastRecord
from relaygr.schemas.messages import History
from relaygr.schemas.record import record
from relaygr.worker.history.batches import ApplyOutcome, EventRecord, HistoryBatch, HistoryRecord
from relaygr.worker.history.records import Coverage, Head, without_future
from relaygr.worker.history.rules import Draft, TimeRules, continuation_of
from relaygr.worker.history.tables import Deletion, PartitionState, Tables

_Entry = TypeVar("_Entry", HistoryRecord, EventRecord)
UNREAD = PartitionState(0, 0, 0)


@record(frozen=True, slots=True)
class Bounds:
    """What a transaction knows besides its records."""

    history_id: str
    """The ids of the two topics that the store is a copy of."""
    behaviours_id: str
    now_ms: int
    max_ahead_ms: int
    """See `TimeRules`."""
    value_bytes: int
    """The bytes of pages that values may take."""
    page_bytes: int


class Application:
    """Applies batches to the tables of one transaction, and adds up the outcome."""

    def __init__(self, tables: Tables, bounds: Bounds) -> None:
        self.outcome = ApplyOutcome()
        self._tables = tables
        self._bounds = bounds
        self._times = TimeRules(bounds.max_ahead_ms)

    def apply(self, batch: HistoryBatch) -> None:
        """Applies the records that were not read before, and moves the offsets on."""
        state = self._tables.state(batch.partition) or UNREAD
        refused_before = len(self.outcome.refused)
        # The refused records may have behaviours of a user without a stored history.
        for entry in map(self._dated, batch.records):
            may_miss = state.refused > 0 or len(self.outcome.refused) > refused_before
            if entry.offset < state.next_offset:
                self.outcome.repeated += 1
            elif entry.history is None:
                self._remove(batch.partition, entry)
            else:
                self._replace(batch.partition, entry, entry.history, state.next_event if may_miss else 0)
        for each in map(self._dated, batch.events):
            may_miss = state.refused > 0 or len(self.outcome.refused) > refused_before
            if each.offset < state.next_event:
                self.outcome.repeated += 1
            else:
                self._add(batch.partition, each, may_miss)
        self._advance(batch, len(self.outcome.refused) - refused_before)

    def refuse(self, batch: HistoryBatch, user_id: str) -> None:
        """Leaves the one record of a batch out, and deletes the older version of its user."""
        self._tables.erase(user_id)
        self.outcome.refused.append(user_id)
        self._advance(batch, 1)

    def _advance(self, batch: HistoryBatch, refused: int) -> None:
        state = self._tables.state(batch.partition) or UNREAD
        after = replace(
            state,
            next_offset=max(batch.next_offset, state.next_offset),
            next_event=max(batch.next_event, state.next_event),
            refused=state.refused + refused,
            last=_later(state.last, batch.last),
            last_event=_later(state.last_event, batch.last_event),
        )
        if after != state:
            self._tables.put_state(batch.partition, after)

    def _dated(self, entry: _Entry) -> _Entry:
        """The record, with the timestamp that counts."""
        is_tombstone = isinstance(entry, HistoryRecord) and entry.history is None
        written_at_ms = self._times.record_ms(entry.written_at_ms, self._bounds.now_ms, is_tombstone=is_tombstone)
        return entry if written_at_ms == entry.written_at_ms else replace(entry, written_at_ms=written_at_ms)

    def _latest_ms(self, written_at_ms: int) -> int:
        return self._times.latest_ms(written_at_ms, self._bounds.now_ms)

    def _replace(self, partition: int, entry: HistoryRecord, history: History, missing: int) -> None:
        """Stores a snapshot, and the behaviours that it does not cover.

        `missing`: if the user has no history, records of behaviours below this offset may have been refused.
        """
        user_id = entry.user_id
        before = self._tables.draft(user_id)
        read_to = self._next_snapshot(partition, user_id, before)
        tail = continuation_of(history, partition, self._bounds.history_id, self._bounds.behaviours_id)
        if entry.offset < read_to:
            self.outcome.repeated += 1
            return
        if tail is not None and tail.next_offset < read_to:
            self.outcome.superseded += 1
            self._supersede(partition, entry, before)
            return
        if tail is None and before is not None and _is_older(history.number, entry.written_at_ms, before.head):
            self.outcome.older += 1
            self._supersede(partition, entry, before)
            return
        used = without_future(history, entry.written_at_ms, self._latest_ms(entry.written_at_ms))
        if tail is None or used.continues is None:
            draft = Draft.of_snapshot(used, entry.written_at_ms, self._coverage(partition, entry, history))
        else:
            draft = Draft.of_saved(used, used.continues)
        draft.head.next_snapshot = entry.offset + 1
        draft.head.deleted_before_ms = self._deleted_before_ms(partition, user_id, before)
        if before is not None:
            draft.keep_after(before, is_made_of_it=tail is not None and tail.next_offset >= read_to)
            if tail is None:
                draft.lacks(before.head.known_ms)
        elif missing > draft.head.next_event:
            draft.miss(missing, self._bounds.now_ms)
        self._tables.erase(user_id)
        if self._store_or_refuse(partition, user_id, draft):
            self._tables.delete_deletion(partition, user_id)
            self.outcome.snapshots += 1
            self.outcome.ahead += used is not history

    def _remove(self, partition: int, entry: HistoryRecord) -> None:
        """Deletes a user, but for behaviours that were written after the tombstone."""
        user_id = entry.user_id
        before = self._tables.draft(user_id)
        read_to = self._next_snapshot(partition, user_id, before)
        if entry.offset < read_to:
            self.outcome.repeated += 1
            return
        written_at_ms, repeated = entry.written_at_ms, entry.repeated
        if repeated is not None and repeated.topic_id == self._bounds.history_id:
            if repeated.next_offset < read_to:
                self.outcome.superseded += 1
                self._supersede(partition, entry, before)
                return
            written_at_ms = repeated.written_at_ms
        draft = Draft.empty(Coverage(before_ms=written_at_ms + 1), entry.offset + 1)
        if before is not None:
            draft.keep_after(before)
        self._tables.erase(user_id)
        # An earlier version may be in a free page even if the store has no record of the user.
        self._tables.note_removal(self._bounds.now_ms)
        self._tables.put_deletion(partition, user_id, Deletion(written_at_ms, entry.offset + 1))
        self.outcome.deleted.append(user_id)
        if draft.head.length:
            self._store_or_refuse(partition, user_id, draft)

    def _add(self, partition: int, entry: EventRecord, may_miss: bool) -> None:
        """Appends a record's behaviours. `may_miss`: earlier ones of a user without a history may have been refused."""
        user_id = entry.user_id
        stored = self._tables.draft(user_id)
        draft = stored or self._without_history(partition, user_id)
        if stored is None and may_miss:
            draft.miss(entry.offset, entry.written_at_ms + 1)
        before, latest_ms = draft.head.pack(), self._latest_ms(entry.written_at_ms)
        self.outcome.added[draft.add(entry.event, entry.offset, entry.written_at_ms, latest_ms)] += 1
        if draft.head.pack() == before:
            return
        # Times never decrease, so the last one is the latest.
        self.outcome.ahead += int(entry.event.behaviours.timestamps_ms[-1]) > latest_ms
        if stored is None:
            self._store_or_refuse(partition, user_id, draft)
        elif draft.written and not self._has_room_for(draft):
            self._tables.erase(user_id)
            self.outcome.refused.append(user_id)
        else:
            # A head grows to a few KB only, so it needs no look at the space.
            self._tables.put_parts(partition, user_id, draft)
            self.outcome.changed.append(user_id)

    def _store_or_refuse(self, partition: int, user_id: str, draft: Draft) -> bool:
        """Stores a history of a user who has none. Returns whether there was room for it."""
        if not self._has_room_for(draft):
            self.outcome.refused.append(user_id)
            return False
        self._tables.put_user(partition, user_id, draft)
        self.outcome.changed.append(user_id)
        return True

    def _has_room_for(self, draft: Draft) -> bool:
        new_bytes = sum(map(len, draft.written.values())) + len(draft.head_bytes())
        return self._tables.pages * self._bounds.page_bytes + new_bytes <= self._bounds.value_bytes

    def _next_snapshot(self, partition: int, user_id: str, stored: Draft | None) -> int:
        """The offset after the last record of the history topic that was read of a user; 0: none."""
        return (stored or self._without_history(partition, user_id)).head.next_snapshot

    def _without_history(self, partition: int, user_id: str) -> Draft:
        """The history of a user who is not stored, and may have been deleted."""
        deletion = self._tables.deletion(partition, user_id)
        if deletion is None:
            return Draft.empty(Coverage())
        return Draft.empty(Coverage(before_ms=deletion.at_ms + 1), deletion.next_snapshot)

    def _deleted_before_ms(self, partition: int, user_id: str, stored: Draft | None) -> int:
        """Records of the user with a timestamp before this are deleted; 0: none is."""
        known_ms: int = 0 if stored is None else stored.head.deleted_before_ms
        deletion = self._tables.deletion(partition, user_id)
        return known_ms if deletion is None else max(known_ms, deletion.at_ms + 1)

    def _supersede(self, partition: int, entry: HistoryRecord, stored: Draft | None) -> None:
        """Notes that the last record in the log is not the stored state, or not the user's deletion."""
        draft = stored or self._without_history(partition, entry.user_id)
        draft.supersede(entry.offset + 1, is_deleted=stored is None)
        if stored is None:
            self._tables.put_user(partition, entry.user_id, draft)
        else:
            self._tables.put_parts(partition, entry.user_id, draft)

    def _coverage(self, partition: int, entry: HistoryRecord, history: History) -> Coverage:
        """What a snapshot covers. An offset in another topic or partition says nothing about ours."""
        named, known_id = history.covers, self._bounds.behaviours_id
        is_ours = named is not None and named.partition == partition
        if named is None or not is_ours or (named.topic_id and known_id and named.topic_id != known_id):
            return Coverage(before_ms=entry.written_at_ms, cut_ms=history.cut_ms)
        return Coverage(offset=named.offset)


def _later(*records: LastRecord | None) -> LastRecord | None:
    return max((each for each in records if each is not None), key=lambda each: each.offset, default=None)


def _is_older(number: int, written_at_ms: int, stored: Head) -> bool:
    return number < stored.number and written_at_ms <= stored.written_at_ms
