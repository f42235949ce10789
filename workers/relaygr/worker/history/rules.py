"""How behaviours are added to a stored history, what a snapshot keeps of the history before it, and which times count.

docs/histories.md has the rules: what a snapshot covers, what a position means, and when a history has a gap. Pure.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Final

from relaygr.schemas.messages import MAX_BEHAVIOURS, BehaviourEvent, Continuation, History
from relaygr.schemas.times import EARLIEST_MS, in_ms
from relaygr.worker.history.records import (
    DELETED,
    HAS_GAP,
    NO_CUT,
    NO_POSITION,
    NO_TIME,
    SUPERSEDED,
    HistoryBytes,
)


class Added(enum.Enum):
    """What became of a record of the behaviours topic; of several behaviours, the first of these."""

    TOO_LONG = "too_long"
    """The history has as many behaviours as a history may have."""
    AFTER_GAP = "after_gap"
    """Appended, though earlier behaviours are missing."""
    APPENDED = "appended"
    LATE = "late"
    """Left out: it is not stored, and later behaviours are."""
    DUPLICATE = "duplicate"
    COVERED = "covered"
    """The snapshot includes it, or the user was deleted later."""


_ADDED: Final = tuple(Added)


@dataclass(frozen=True, slots=True)
class TimeRules:
    """What is done with times that are wrong."""

    max_ahead_ms: int
    """A behaviour whose time is further ahead of its record's gets that of the record."""

    def record_ms(self, written_at_ms: int, now_ms: int, *, is_tombstone: bool = False) -> int:
        """The timestamp of a record in ms. It is the present time if it lies in the future, since the record would
        cover all until then, or if a tombstone has none, which would cover nothing.
        """
        if EARLIEST_MS <= written_at_ms <= now_ms:
            return written_at_ms
        found = in_ms(written_at_ms)
        return now_ms if (is_tombstone and not found) or found > now_ms + self.max_ahead_ms else found

    def latest_ms(self, record_ms: int, now_ms: int) -> int:
        """The latest time of a behaviour that is used. A record's timestamp may be missing, or in seconds."""
        return (record_ms if record_ms >= EARLIEST_MS else now_ms) + self.max_ahead_ms


def continuation_of(history: History, partition: int, history_id: str, behaviours_id: str) -> Continuation | None:
    """How a worker's snapshot continues what was before it in the topics with these ids; None for a pipeline's, or one
    of other topics.
    """
    tail, covers = history.continues, history.covers
    if tail is None or covers is None or covers.partition != partition:
        return None
    return tail if (tail.topic_id or "", covers.topic_id or "") == (history_id, behaviours_id) else None


class Draft(HistoryBytes):
    """A stored history that is being changed by the records of the logs."""

    def add(self, event: BehaviourEvent, offset: int, written_at_ms: int, latest_ms: int = NO_CUT) -> Added:
        """Adds a record of the behaviours topic: at `offset`, with this timestamp in the log.

        Times after `latest_ms` are not used.
        """
        if offset < self.head.next_event:
            return Added.COVERED
        new, found = event.behaviours, set()
        for index, (item, time_ms, action) in enumerate(
            zip(new.items.tolist(), new.timestamps_ms.tolist(), new.actions.tolist(), strict=True)
        ):
            position = NO_POSITION if event.position is None else event.position + index
            used_ms = NO_TIME if time_ms > latest_ms else time_ms
            found.add(self._take(item, used_ms, offset, written_at_ms, position, action))
        if found & {Added.APPENDED, Added.AFTER_GAP}:
            self.head.next_event = offset + 1
        return min(found, key=_ADDED.index)

    def keep_after(self, before: Draft, *, is_made_of_it: bool = False) -> None:
        """Adds the previous history's behaviours that this history does not cover.

        `is_made_of_it`: a worker saved it that had read the previous one. If it covers less, the log has lost the rest.
        """
        head, old, rows = self.head, before.head, list(before.origins())
        next_event, sent_position = head.next_event, head.sent_position
        last = Added.COVERED
        # Stored behaviours have positions of the history, which may differ from those of the publisher's count.
        head.sent_position = head.next_position
        for row in rows:
            last = self._take(*row) if row[2] >= next_event else Added.COVERED
        head.sent_position = sent_position if last is Added.COVERED else old.sent_position
        if is_made_of_it and old.covered_offset > next_event:
            head.next_event = max([next_event, *(row[2] + 1 for row in rows)])
            return
        head.next_event = max(next_event, old.next_event)
        # What the snapshot covers is below `next_event`; of a worker's snapshot that is more than its base covers.
        if old.missing_offset > next_event:
            self.miss(old.missing_offset, old.missing_before_ms, old.missing_ms)
        if old.covered_offset > next_event:
            self.miss(old.covered_offset, old.written_at_ms, old.known_ms)

    def lacks(self, known_ms: int) -> None:
        """Notes the latest time of a behaviour in an earlier snapshot: a snapshot that was cut before that lacks it."""
        head = self.head
        head.known_ms = max(head.known_ms, known_ms)
        if known_ms > head.cut_ms:
            head.flags |= HAS_GAP

    def miss(self, offset: int, before_ms: int, time_ms: int | None = None) -> None:
        """Notes that records may be missing: some below this offset, with a timestamp before this and behaviours up to
        this time; None: as late as the records.

        Without effect if the snapshot covers all of them.
        """
        head = self.head
        time_ms = before_ms if time_ms is None else time_ms
        if offset <= head.covered_offset or before_ms <= head.deleted_before_ms:
            return
        if before_ms <= head.covered_before_ms and time_ms <= head.cut_ms:
            return
        head.missing_offset = max(head.missing_offset, offset)
        head.missing_before_ms = max(head.missing_before_ms, before_ms)
        head.missing_ms = max(head.missing_ms, time_ms)
        head.flags |= HAS_GAP

    def supersede(self, next_snapshot: int, *, is_deleted: bool = False) -> None:
        """Notes that an older snapshot came after this history, or after the user's deletion."""
        self.head.next_snapshot = next_snapshot
        self.head.flags |= SUPERSEDED | (DELETED if is_deleted else 0)

    def uncover(self, end: int) -> None:
        """Covers nothing from this offset on: the log of behaviours has lost what it had there. The owner saves it so,
        for workers that read the log when it has grown beyond.
        """
        head = self.head
        head.next_event = min(head.next_event, end)
        head.covered_offset = min(head.covered_offset, end)
        head.missing_offset = min(head.missing_offset, end)
        head.flags |= SUPERSEDED

    def _take(self, item: int, time_ms: int, offset: int, written_at_ms: int, position: int, action: int) -> Added:
        """Adds one behaviour after the base, unless it is covered, known or late, or has no room."""
        head = self.head
        if head.covers(offset, written_at_ms, time_ms):
            return Added.COVERED
        found = Added.APPENDED
        if position != NO_POSITION:
            found, position = self._classify(item, time_ms, position)
        if found not in (Added.DUPLICATE, Added.LATE) and head.length == MAX_BEHAVIOURS:
            found = Added.TOO_LONG
        if found is Added.TOO_LONG or (found is Added.LATE and not head.has_gap):
            self.miss(offset + 1, written_at_ms + 1, None if time_ms == NO_TIME else time_ms)
        elif found in (Added.APPENDED, Added.AFTER_GAP):
            head.flags |= HAS_GAP if found is Added.AFTER_GAP else 0
            self.append(item, time_ms, offset, written_at_ms, position, action)
        return found

    def _classify(self, item: int, time_ms: int, sent: int) -> tuple[Added, int]:
        """What a behaviour with a position is (the table in docs/histories.md), and its position in this history."""
        head = self.head
        position = head.next_position + sent - head.sent_position
        index = head.length + sent - head.sent_position
        if 0 <= index < head.length:
            stored_item, stored_ms = self.at(index)
            if item == stored_item and time_ms in (stored_ms, NO_TIME):
                return Added.DUPLICATE, position
        is_earlier = NO_TIME < time_ms < head.newest_ms
        if index == head.length:
            return Added.DUPLICATE if is_earlier and self.has(item, time_ms) else Added.APPENDED, position
        if time_ms == head.newest_ms and head.length and self.at(head.length - 1) == (item, time_ms):
            head.sent_position = sent + 1
            return Added.DUPLICATE, position
        if (is_earlier or (time_ms == head.newest_ms and sent)) and self.has(item, time_ms):
            return Added.DUPLICATE, position
        if is_earlier:
            was_left_out = index < 0 and time_ms <= self.at(0)[1]
            return Added.DUPLICATE if was_left_out else Added.LATE, position
        if index < head.length:
            # Another count begins, and the store does not know its first `sent` behaviours.
            position, head.sent_position = head.next_position + sent, 0
        return Added.AFTER_GAP if sent else Added.APPENDED, position
