"""Behaviours as events: whatever is read first, a history is its newest snapshot and the behaviours after it."""

from __future__ import annotations

import signal
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from structlog.testing import capture_logs

from relaygr.kafka.log_reader import LastRecord
from relaygr.schemas.digest import digest_chain
from relaygr.schemas.messages import MAX_BEHAVIOURS, BehaviourEvent, Behaviours, BehavioursOffset, History
from relaygr.worker.history import records as records_module
from relaygr.worker.history.batches import ApplyOutcome, EventRecord, HistoryBatch, HistoryRecord
from relaygr.worker.history.rules import Added, Draft
from relaygr.worker.history.store import HistoryStore, StoreOrigin
from relaygr.worker.history.tables import LAYOUT, PartitionState

MIB = 1024 * 1024
ORIGIN = StoreOrigin("cluster", "relaygr.history", "topic-1", "topic-2")
FEATURES = np.array([3, -1])


def behaviours(*items: int, first_ms: int = 0) -> Behaviours:
    """Behaviours whose time and action follow from the item."""
    array = np.array(items, "<i8")
    return Behaviours(array, (array % 5).astype("<u2"), array + first_ms)


def event(
    offset: int, *items: int, user: str = "ann", position: int | None = None, written_at_ms: int = 0, first_ms: int = 0
) -> EventRecord:
    new = BehaviourEvent(user, behaviours(*items, first_ms=first_ms), position)
    return EventRecord(new, offset, written_at_ms or 1000 + offset)


def snapshot(
    offset: int,
    *items: int,
    user: str = "ann",
    covers: int | None = None,
    number: int = 1,
    written_at_ms: int = 0,
    topic_id: str | None = None,
    first_position: int | None = None,
) -> HistoryRecord:
    named = None if covers is None else BehavioursOffset(0, covers, topic_id)
    history = History(user, number, FEATURES, behaviours(*items), first_position, named)
    return HistoryRecord(user, offset, history, written_at_ms)


def tombstone(offset: int, written_at_ms: int, user: str = "ann") -> HistoryRecord:
    return HistoryRecord(user, offset, None, written_at_ms)


def read(store: HistoryStore, *entries: HistoryRecord | EventRecord, partition: int = 0) -> ApplyOutcome:
    """Applies entries of both topics in one transaction."""
    histories = tuple(each for each in entries if isinstance(each, HistoryRecord))
    events = tuple(each for each in entries if isinstance(each, EventRecord))
    return store.apply_all(
        [
            HistoryBatch(
                partition,
                histories,
                max((each.offset + 1 for each in histories), default=0),
                events,
                max((each.offset + 1 for each in events), default=0),
            )
        ]
    )


def items(store: HistoryStore, user: str = "ann") -> list[int] | None:
    """The stored items. Checks the digests and times of the history."""
    stored = store.get(user)
    if stored is None:
        return None
    assert stored.chain == stored.history.chain()
    stored.history.behaviours.check()
    return stored.history.behaviours.items.tolist()


def has_gap(store: HistoryStore, user: str = "ann") -> bool:
    stored = store.get(user)
    assert stored is not None
    return stored.has_gap


@pytest.fixture
def store(tmp_path: Path) -> Iterator[HistoryStore]:
    opened = HistoryStore.open(tmp_path / "history", 64 * MIB)
    opened.trust(ORIGIN)
    yield opened
    opened.close()


@pytest.mark.parametrize("base", [0, 63, 64, 65, 3584, 3700])
@pytest.mark.parametrize("added", [1, 64, 1000])
def test_appended_behaviours_follow_the_snapshot_with_the_digests_of_the_whole(
    store: HistoryStore, base: int, added: int
) -> None:
    read(store, snapshot(0, *range(base), covers=0))
    for start in range(0, added, 7):
        new = range(base + start, base + min(start + 7, added))
        read(store, event(start, *new))
    assert items(store) == list(range(base + added))
    stored = store.get("ann")
    assert stored is not None and stored.history.features.tolist() == FEATURES.tolist()
    assert (stored.version.number, stored.has_gap) == (1, False)


def test_a_user_without_a_snapshot_begins_with_the_first_behaviour(store: HistoryStore) -> None:
    outcome = read(store, event(0, 5, position=0), event(1, 6))
    assert (outcome.changed, outcome.added) == (["ann", "ann"], {Added.APPENDED: 2})
    stored = store.get("ann")
    assert stored is not None
    assert (items(store), stored.version.number, stored.has_gap) == ([5, 6], 0, False)


def test_records_and_both_offsets_are_one_transaction(store: HistoryStore) -> None:
    read(store, snapshot(4, 1), event(7, 2))
    assert store.state(0) == PartitionState(5, 0, 0, 8)
    assert (store.next_offset(0), store.next_event(0)) == (5, 8)
    assert read(store, event(7, 2)).repeated == 1
    assert items(store) == [1, 2]


def test_records_that_are_read_again_because_of_an_undelivered_dead_letter_add_nothing_twice(
    store: HistoryStore,
) -> None:
    """The stored offsets stay before a dead letter, though later records are stored."""
    entries = (snapshot(1, 1), event(1, 2), event(2, 3, position=2))
    histories, events = entries[:1], entries[1:]
    for added in ({Added.APPENDED: 2}, {Added.COVERED: 2}):
        outcome = store.apply_all([HistoryBatch(0, histories, 0, events, 0)])
        assert outcome.added == added
        assert (store.next_offset(0), store.next_event(0)) == (None, None)
        assert items(store) == [1, 2, 3]


def test_duplicates_by_position_are_left_out_also_in_part(store: HistoryStore) -> None:
    read(store, snapshot(0, 0, 1, 2, covers=0), event(0, 3, position=3))
    outcome = read(store, event(1, 3, position=3), event(2, 2, 3, 4, 5, position=2), event(3, 0, position=0))
    assert outcome.added == {Added.DUPLICATE: 2, Added.APPENDED: 1}
    assert items(store) == [0, 1, 2, 3, 4, 5]


def test_without_positions_a_repeated_record_cannot_be_told_apart(store: HistoryStore) -> None:
    read(store, event(0, 3), event(1, 3))
    assert items(store) == [3, 3]


def test_a_gap_is_marked_until_a_snapshot_brings_what_is_missing(store: HistoryStore) -> None:
    read(store, snapshot(0, 0, 1, covers=0), event(0, 4, position=4))
    assert (items(store), has_gap(store)) == ([0, 1, 4], True)
    assert read(store, event(1, 2, position=2)).added == {Added.LATE: 1}, "too late: the order is that of the log"
    read(store, event(2, 5, position=5))
    assert (items(store), has_gap(store)) == ([0, 1, 4, 5], True)
    read(store, snapshot(1, 0, 1, 2, covers=0))
    assert (items(store), has_gap(store)) == ([0, 1, 2, 4, 5], True), "3 is missing still"
    read(store, snapshot(2, 0, 1, 2, 3, 4, covers=1))
    assert (items(store), has_gap(store)) == ([0, 1, 2, 3, 4, 5], False)


def at_times(offset: int, position: int, *rows: tuple[int, int], written_at_ms: int = 0) -> EventRecord:
    """Behaviours (item, time) at positions from this one on."""
    new = Behaviours.of((item, 0, time_ms) for item, time_ms in rows)
    return EventRecord(BehaviourEvent("ann", new, position), offset, written_at_ms or 1000 + offset)


def log_of(offset: int, rows: list[tuple[int, int]], skipped: int = 0) -> list[EventRecord]:
    """A log's behaviours, one in a record, as `publish behaviours` writes them: positions count from 0."""
    return [at_times(offset + place, place, row) for place, row in enumerate(rows)][skipped:]


DAY_1 = [(item, 10 * item) for item in range(1, 11)]
DAY_2 = [(item, 10 * item) for item in range(11, 17)]


@pytest.mark.slow
@pytest.mark.parametrize("is_snapshot", [True, False])
@pytest.mark.parametrize("length", [1, 3, 10, 70, 4000])
def test_a_later_log_whose_positions_begin_at_0_goes_on_from_the_first(
    store: HistoryStore, is_snapshot: bool, length: int
) -> None:
    first = [(item, 10 * item) for item in range(length)]
    later = [(item, 10 * item) for item in range(length, length + 6)]
    read(store, *([snapshot_at(first)] if is_snapshot else log_of(0, first)))
    outcome = read(store, *log_of(length, later))
    assert outcome.added == {Added.APPENDED: 6}
    assert (items(store), has_gap(store)) == (list(range(length + 6)), False)
    assert read(store, *log_of(length + 6, later), *log_of(length + 20, first)).added == {Added.DUPLICATE: length + 6}
    read(store, *log_of(2 * length + 40, [(99_999, 10 * length + 900)]))
    assert (items(store), has_gap(store)) == ([*range(length + 6), 99_999], False)


def snapshot_at(rows: list[tuple[int, int]], offset: int = 0, cut_ms: int | None = None, **named: int) -> HistoryRecord:
    """A snapshot of these behaviours (item, time), without an offset of the behaviours topic."""
    new = Behaviours.of((item, 0, time_ms) for item, time_ms in rows)
    return HistoryRecord("ann", offset, History("ann", 1, FEATURES, new, cut_ms=cut_ms), named.get("written_at_ms", 1))


def test_behaviours_of_equal_times_keep_the_order_of_the_logs(store: HistoryStore) -> None:
    """Also those of logs without times."""
    read(store, snapshot_at([(1, 0), (2, 0), (3, 0)]))
    read(store, *log_of(0, [(100, 0), (1, 0), (100, 0), (2, 0), (2, 0)]))
    assert (items(store), has_gap(store)) == ([1, 2, 3, 100, 1, 100, 2, 2], False)


def test_a_log_that_overlaps_the_one_before_adds_what_is_new_once(store: HistoryStore) -> None:
    read(store, snapshot_at(DAY_1))
    overlapping = [*DAY_1[-3:], *DAY_2]
    for offset in (0, 20):
        read(store, *log_of(offset, overlapping))
        assert (items(store), has_gap(store)) == (list(range(1, 17)), False)


def test_three_logs_published_in_any_mixture_stay_one_history(store: HistoryStore) -> None:
    day_3 = [(item, 10 * item) for item in range(17, 20)]
    read(store, *log_of(0, DAY_1), *log_of(100, DAY_2), *log_of(200, day_3))
    read(store, *log_of(300, DAY_2), *log_of(400, day_3), *log_of(500, DAY_1))
    assert (items(store), has_gap(store)) == (list(range(1, 20)), False)


@pytest.mark.parametrize("skipped", [1, 2, 5])
def test_a_later_log_without_its_first_behaviours_leaves_a_gap(store: HistoryStore, skipped: int) -> None:
    """Nobody knows what they were."""
    read(store, snapshot_at(DAY_1), *log_of(0, DAY_2, skipped=skipped))
    assert (items(store), has_gap(store)) == ([*range(1, 11), *range(11 + skipped, 17)], True)


def test_a_behaviour_between_those_of_the_store_is_left_out_and_leaves_a_gap(store: HistoryStore) -> None:
    read(store, snapshot_at(DAY_1))
    assert read(store, at_times(0, 0, (77, 55))).added == {Added.LATE: 1}
    assert (items(store), has_gap(store)) == (list(range(1, 11)), True)
    read(store, snapshot_at(sorted([*DAY_1, (77, 55)], key=lambda row: row[1]), 1, written_at_ms=2000))
    assert not has_gap(store)


def test_a_log_after_a_snapshot_that_left_the_oldest_out_repeats_nothing(store: HistoryStore) -> None:
    left_out = HistoryRecord(
        "ann", 0, History("ann", 1, FEATURES, Behaviours.of((item, 0, at) for item, at in DAY_1[4:]), 4), 1
    )
    read(store, left_out, *log_of(0, DAY_1), *log_of(20, DAY_2))
    assert (items(store), has_gap(store)) == (list(range(5, 17)), False)


def test_a_snapshot_that_is_older_than_what_was_streamed_keeps_what_came_after_its_cut(store: HistoryStore) -> None:
    streamed = [event(place, item, first_ms=9 * item) for place, (item, _) in enumerate(DAY_2[:3])]
    read(store, snapshot_at(DAY_1, 0, cut_ms=100), *streamed, *log_of(3, DAY_2[3:]))
    lived = items(store), has_gap(store)
    for offset, written_at_ms in ((1, 5000), (2, 6000)):
        read(store, snapshot_at(DAY_1, offset, cut_ms=100, written_at_ms=written_at_ms))
        assert (items(store), has_gap(store)) == lived == (list(range(1, 17)), False)
    read(store, snapshot_at([*DAY_1, *DAY_2], 3, cut_ms=160, written_at_ms=7000))
    assert (items(store), has_gap(store)) == (list(range(1, 17)), False)


@pytest.mark.parametrize(("cut_ms", "kept"), [(99, 4), (110, 3), (119, 3), (140, 0), (None, 0)])
def test_a_cut_divides_what_a_snapshot_can_include_from_what_it_can_not(
    store: HistoryStore, tmp_path: Path, cut_ms: int | None, kept: int
) -> None:
    streamed = [at_times(place, place, row) for place, row in enumerate(DAY_2[:4])]
    read(store, *streamed, snapshot_at(DAY_1, 0, cut_ms=cut_ms, written_at_ms=5000))
    assert (items(store), has_gap(store)) == ([*range(1, 11), *range(15 - kept, 15)], kept not in (0, 4))


def test_a_snapshot_with_an_earlier_cut_than_the_one_before_leaves_a_gap(store: HistoryStore) -> None:
    read(store, snapshot_at([*DAY_1, *DAY_2], 0, cut_ms=160))
    for offset in (1, 2):
        read(store, snapshot_at(DAY_1, offset, cut_ms=100, written_at_ms=100 + offset))
        assert (items(store), has_gap(store)) == (list(range(1, 11)), True)
    read(store, snapshot_at([*DAY_1, *DAY_2], 3, cut_ms=160, written_at_ms=200))
    assert (items(store), has_gap(store)) == (list(range(1, 17)), False)


def test_a_snapshot_with_a_time_after_its_own_cut_leaves_no_gap_when_it_is_published_again(store: HistoryStore) -> None:
    """A log with a row in the future is cut at the last time that is none."""
    ahead = (99, 150)
    for offset in (0, 1):
        read(store, snapshot_at([*DAY_1, ahead], offset, cut_ms=100, written_at_ms=100 + offset))
        assert (items(store), has_gap(store)) == ([*range(1, 11), 99], False)


def times(store: HistoryStore) -> list[int]:
    items(store)
    stored = store.get("ann")
    assert stored is not None
    return stored.history.behaviours.timestamps_ms.tolist()


FUTURE_MS = 4_102_444_800_000


@pytest.mark.parametrize("position", [True, False])
@pytest.mark.parametrize("base", [0, 5, 60, 63, 64, 3583])
@pytest.mark.parametrize("base_ms", [1_600_000_000_000, 1_700_000_000_500])
@pytest.mark.parametrize("future_ms", [FUTURE_MS, 1_800_000_000_000 + 86_400_001, 2**62])
def test_a_behaviour_from_the_future_gets_its_records_time_and_raises_no_other(
    store: HistoryStore, position: bool, base: int, base_ms: int, future_ms: int
) -> None:
    """`base_ms`: an old log that is published now, or behaviours of the moment."""
    now_ms = 1_700_000_000_000
    first = [(item, 1000 + item) for item in range(base)]
    sent = [base_ms, future_ms, *(base_ms + 1000 * at for at in (2, 3, 4))]
    read(store, snapshot_at(first))
    entries = [
        EventRecord(
            BehaviourEvent("ann", Behaviours.of([(900 + at, 0, time_ms)]), base + at if position else None),
            at, now_ms + 1000 * at + 600,
        )
        for at, time_ms in enumerate(sent)
    ]  # fmt: skip
    assert read(store, *entries).ahead == 1
    shown = times(store)[base:]
    assert [shown[0], *shown[2:]] == [sent[0], *sent[2:]]
    is_last_of_block = (base + 2) % 64 == 0
    assert shown[1] == (sent[0] if is_last_of_block else min(now_ms + 1600, sent[2]))
    assert store.recent_users({0}, 1, lambda: True) == ["ann"]
    assert store.head("ann").newest_ms == sent[-1]  # type: ignore[union-attr]
    if position:
        again = [replace(entry, offset=entry.offset + 10, written_at_ms=now_ms + 90_000) for entry in entries]
        assert read(store, *again).added == {Added.DUPLICATE: 5}


def test_the_last_behaviour_from_the_future_is_shown_at_its_records_time(store: HistoryStore) -> None:
    read(store, at_times(0, 0, (1, 1000), written_at_ms=1_700_000_000_000))
    read(store, at_times(1, 1, (2, FUTURE_MS), written_at_ms=1_700_000_000_700))
    assert times(store) == [1000, 1_700_000_000_700]


def test_a_snapshot_with_behaviours_from_the_future_raises_no_later_time(store: HistoryStore) -> None:
    rows = [(1, 1000), (2, 2000), (3, FUTURE_MS), (4, FUTURE_MS + 5)]
    assert read(store, snapshot_at(rows, written_at_ms=1_700_000_000_000)).ahead == 1
    read(store, at_times(0, 4, (5, 3000), written_at_ms=1_700_000_000_001))
    assert times(store) == [1000, 2000, 2000, 2000, 3000]


def test_a_record_written_in_the_future_covers_nothing_until_then(store: HistoryStore) -> None:
    read(store, tombstone(0, FUTURE_MS), event(0, 5, written_at_ms=int(time.time() * 1000) + 1000))
    assert items(store) == [5]


def test_records_whose_timestamps_are_in_seconds_make_no_behaviour_one_from_the_future(store: HistoryStore) -> None:
    now_ms = int(time.time() * 1000)
    outcome = read(store, at_times(0, 0, (1, now_ms - 5), (2, now_ms), written_at_ms=now_ms // 1000))
    assert (outcome.ahead, times(store)) == (0, [now_ms - 5, now_ms])


@pytest.mark.parametrize("per_ms", [1e-3, 1, 1000, 1_000_000])
def test_a_timestamp_in_another_unit_covers_what_it_means(store: HistoryStore, per_ms: float) -> None:
    now_ms = int(time.time() * 1000) // 1000 * 1000

    def stamp(ago_s: int) -> int:
        return int((now_ms - 1000 * ago_s) * per_ms)

    read(store, snapshot_at(DAY_1, written_at_ms=now_ms - 9000), at_times(0, 10, (11, 110), written_at_ms=stamp(5)))
    head = store.head("ann")
    assert head is not None and head.unsaved_since_ms == now_ms - 5000
    read(store, tombstone(1, stamp(4)), at_times(1, 11, (12, 120), written_at_ms=now_ms - 3000))
    assert items(store) == [12]


def test_a_tombstone_without_a_timestamp_deletes_all_that_was_read(store: HistoryStore) -> None:
    now_ms = int(time.time() * 1000)
    read(store, snapshot_at(DAY_1), at_times(0, 10, (11, 110), written_at_ms=now_ms - 5000))
    read(store, tombstone(1, 0))
    assert items(store) is None
    read(store, at_times(1, 0, (12, 120), written_at_ms=now_ms + 60_000))
    assert items(store) == [12]


def test_the_store_knows_when_a_user_was_last_deleted(store: HistoryStore) -> None:
    read(store, snapshot(0, 1, 2))
    assert store.deleted_at_ms("ann", 0) == 0
    at_ms = 1_750_000_000_000
    store.conceal("ann", 0, 1, at_ms)
    assert (store.get("ann"), store.deleted_at_ms("ann", 0)) == (None, at_ms)
    read(store, tombstone(1, at_ms))
    assert store.deleted_at_ms("ann", 0) == at_ms
    read(store, replace(event(0, 7), written_at_ms=at_ms + 5))
    assert (items(store), store.deleted_at_ms("ann", 0)) == ([7], at_ms)
    read(store, replace(snapshot(2, 7, 8), written_at_ms=at_ms + 9))
    assert store.deleted_at_ms("ann", 0) == at_ms
    assert store.deleted_at_ms("bob", 0) == 0


def test_positions_count_behaviours_that_the_snapshot_left_out(store: HistoryStore) -> None:
    read(store, snapshot(0, 10, 11, covers=0, first_position=10), event(0, 11, 12, position=11))
    assert (items(store), has_gap(store)) == ([10, 11, 12], False)


def test_a_time_before_the_newest_is_raised_and_stays_in_the_order_of_the_log(store: HistoryStore) -> None:
    late = [event(offset, offset, first_ms=-offset * (offset % 3)) for offset in range(300)]
    read(store, *late)
    stored = store.get("ann")
    assert stored is not None
    sent = np.concatenate([each.event.behaviours.timestamps_ms for each in late])
    assert items(store) == list(range(300))
    assert stored.history.behaviours.timestamps_ms.tolist() == np.maximum.accumulate(sent).tolist()
    with pytest.raises(ValueError, match="read-only"):
        stored.history.behaviours.timestamps_ms[0] = 1


@pytest.mark.parametrize("covers", [0, 3, 5, 8])
def test_a_snapshot_keeps_the_behaviours_from_the_offset_that_it_names(store: HistoryStore, covers: int) -> None:
    read(store, *(event(offset, 100 + offset) for offset in range(5)))
    read(store, snapshot(0, 1, 2, covers=covers))
    assert items(store) == [1, 2, *(100 + offset for offset in range(covers, 5))]
    read(store, *(event(offset, 100 + offset) for offset in range(5, 10)))
    assert items(store) == [1, 2, *(100 + offset for offset in range(covers, 10))]


@pytest.mark.parametrize("covers", [None, 0])
def test_a_snapshot_that_lacks_refused_behaviours_leaves_a_gap(store: HistoryStore, covers: int | None) -> None:
    read(store, snapshot(0, *range(MAX_BEHAVIOURS), covers=0, written_at_ms=5), event(0, 8, written_at_ms=20))
    read(store, snapshot(1, 1, 2, covers=covers, number=2, written_at_ms=10))
    assert (items(store), has_gap(store)) == ([1, 2], True)
    read(store, snapshot(2, 1, 2, 8, covers=None if covers is None else 1, number=3, written_at_ms=30))
    assert (items(store), has_gap(store)) == ([1, 2, 8], False)


def test_a_snapshot_that_covers_less_than_the_one_before_leaves_a_gap(store: HistoryStore) -> None:
    """The behaviours between are known to no store that has read the one before."""
    read(store, snapshot(0, 1, 2, 3, covers=3, written_at_ms=5))
    read(store, snapshot(1, 1, 2, covers=2, number=2, written_at_ms=6))
    assert (items(store), has_gap(store)) == ([1, 2], True)
    read(store, snapshot(2, 1, 2, 3, covers=3, number=3, written_at_ms=7))
    assert (items(store), has_gap(store)) == ([1, 2, 3], False)


@pytest.mark.parametrize("topic_id", [None, "another"])
def test_a_snapshot_without_an_offset_in_this_topic_covers_older_timestamps(
    store: HistoryStore, topic_id: str | None
) -> None:
    covers = None if topic_id is None else 99
    entries = [event(offset, 100 + offset, written_at_ms=50 + offset) for offset in range(5)]
    read(store, *entries[:3])
    read(store, snapshot(0, 1, written_at_ms=52, covers=covers, topic_id=topic_id))
    read(store, *entries[3:])
    assert items(store) == [1, 102, 103, 104]


def test_a_tombstone_deletes_and_no_older_behaviour_brings_the_user_back(store: HistoryStore) -> None:
    read(store, snapshot(0, 1, covers=0), event(0, 2, written_at_ms=10))
    outcome = read(store, tombstone(1, written_at_ms=20))
    assert (outcome.deleted, items(store)) == (["ann"], None)
    assert read(store, event(1, 3, written_at_ms=20)).added == {Added.COVERED: 1}
    assert items(store) is None
    read(store, event(2, 4, written_at_ms=21))
    assert items(store) == [4]


@pytest.mark.parametrize("is_rebuilt", [False, True])
@pytest.mark.parametrize("later", ["cut", "offset"])
def test_no_later_snapshot_brings_back_what_a_tombstone_deleted(
    store: HistoryStore, later: str, is_rebuilt: bool
) -> None:
    """A worker that reads both logs anew reads the histories first."""
    deleted, kept = at_times(0, 0, (77, 150), written_at_ms=1000), at_times(1, 10, (88, 160), written_at_ms=2500)
    new = Behaviours.of((item, 0, time_ms) for item, time_ms in DAY_1)
    cut_ms, covers = (100, None) if later == "cut" else (None, BehavioursOffset(0, 0, "topic-2"))
    snapshots = [
        HistoryRecord("ann", offset, History("ann", 1, FEATURES, new, None, covers, None, cut_ms), 3000 + offset)
        for offset in (1, 2)
    ]
    if is_rebuilt:
        read(store, tombstone(0, written_at_ms=2000), *snapshots)
        read(store, deleted, kept)
    else:
        for entry in (deleted, tombstone(0, written_at_ms=2000), *snapshots, kept):
            read(store, entry)
    assert (items(store), has_gap(store)) == ([*range(1, 11), 88], False)


def test_a_tombstone_that_is_read_late_keeps_newer_behaviours_alone(store: HistoryStore) -> None:
    read(store, snapshot(0, 1, covers=0), event(0, 2, written_at_ms=10), event(1, 3, written_at_ms=30))
    outcome = read(store, tombstone(1, written_at_ms=20))
    assert (outcome.deleted, outcome.changed) == (["ann"], ["ann"])
    stored = store.get("ann")
    assert stored is not None
    assert (items(store), stored.version.number, stored.history.features.size) == ([3], 0, 0)
    assert read(store, event(2, 9, written_at_ms=15)).added == {Added.COVERED: 1}


def test_the_hash_of_a_deleted_user_goes_when_no_older_behaviour_can_come(
    store: HistoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    from relaygr.worker.history import store as store_module

    monkeypatch.setattr(store_module, "_EXPIRED_AT_ONCE", 2)
    read(store, *(tombstone(offset, 10 * offset, f"user-{offset}") for offset in range(1, 6)))
    found = 0
    for _ in range(4):
        found += store.expire(35)
    assert found == 3
    read(store, event(0, 1, user="user-1", written_at_ms=5), event(1, 1, user="user-5", written_at_ms=5))
    assert (items(store, "user-1"), items(store, "user-5")) == ([1], None)


def test_many_hashes_of_deleted_users_are_looked_at_in_the_same_number_of_calls(
    store: HistoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    from relaygr.worker.history import store as store_module

    monkeypatch.setattr(store_module, "_EXPIRED_AT_ONCE", 10)
    read(store, *(tombstone(offset, 1 + offset, f"user-{offset}") for offset in range(200)))
    assert sum(store.expire(1000, share=0.25) for _ in range(8)) == 200


def test_a_history_of_the_largest_length_takes_no_more_and_says_so(store: HistoryStore) -> None:
    read(store, snapshot(0, *range(MAX_BEHAVIOURS - 1), covers=0), event(0, 7))
    assert read(store, event(1, 8)).added == {Added.TOO_LONG: 1}
    assert has_gap(store)
    assert len(items(store) or ()) == MAX_BEHAVIOURS


def test_a_full_store_refuses_a_user_whose_behaviours_do_not_fit(tmp_path: Path) -> None:
    opened = HistoryStore.open(tmp_path, MIB)
    opened.trust(ORIGIN)
    offset = 0
    refused: list[str] = []
    while not refused:
        batch = [event(offset + at, *range(256), user=f"user-{offset % 7}") for at in range(10)]
        refused += read(opened, *batch).refused
        offset += 10
    state = opened.state(0)
    assert state is not None and state.refused >= 1
    assert state.next_event == offset
    read(opened, event(offset, 1, user=refused[-1]), event(offset + 1, 1, user="after-that"))
    assert has_gap(opened, refused[-1]), "its earlier behaviours were refused"
    assert has_gap(opened, "after-that"), "nobody knows whether it had earlier ones"
    for at, (cut_ms, is_missing) in enumerate(((100, True), (10**6, False))):
        history = History("after-that", 1, FEATURES, behaviours(1), cut_ms=cut_ms)
        read(opened, HistoryRecord("after-that", at, history, 10**6 + at))
        assert has_gap(opened, "after-that") is is_missing, "they may be later than the cut"
    assert (tmp_path / "data.mdb").stat().st_size <= MIB
    opened.close()


def test_a_store_that_refused_users_opens_again(tmp_path: Path) -> None:
    """LMDB had freed the last pages of the file before it wrote them, and the file was taken for a truncated one."""
    opened = HistoryStore.open(tmp_path, MIB)
    opened.trust(ORIGIN)
    batches = []
    for partition in range(4):
        events = [event(at, *range(256 * at, 256 * at + 256), user=f"u{partition}") for at in range(40)]
        batches.append(HistoryBatch(partition, (), 0, tuple(events), 40))
    assert opened.apply_all(batches).refused
    opened.close()
    again = HistoryStore.open(tmp_path, 32 * MIB)
    assert again.trust(ORIGIN)
    again.close()


def test_a_compaction_keeps_histories_that_grow_meanwhile(store: HistoryStore, monkeypatch: pytest.MonkeyPatch) -> None:
    from relaygr.worker.history import files as files_module

    monkeypatch.setattr(files_module, "_SLICE_BYTES", 1)
    read(store, snapshot(0, *range(1000), covers=0), snapshot(1, 1, user="bob", covers=0))
    offset = 0
    while not store.compact():
        read(store, event(offset, 1000 + offset), event(offset + 1, offset, user="bob"))
        offset += 2
    assert items(store) == [*range(1000), *range(1000, 1000 + offset, 2)]
    assert items(store, "bob") == [1, *range(0, offset, 2)]


def test_an_older_form_of_the_store_is_emptied_and_read_again(tmp_path: Path) -> None:
    opened = HistoryStore.open(tmp_path, MIB)
    opened.trust(ORIGIN)
    read(opened, snapshot(0, 1, covers=0))
    with opened._files.env.begin(write=True) as txn:
        txn.put(b"layout", b"relaygr.history-store.2", db=opened._files.meta)
    opened.close()
    again = HistoryStore.open(tmp_path, MIB)
    assert again.trust(ORIGIN) is False
    assert (again.get("ann"), again.state(0), again.user_count) == (None, None, 0)
    again.close()


def test_the_form_of_a_later_version_is_not_read_but_named_and_emptied(tmp_path: Path) -> None:
    """After a rollback. Its values may have any form."""
    opened = HistoryStore.open(tmp_path, MIB)
    opened.trust(ORIGIN)
    read(opened, snapshot(0, 1, covers=0))
    with opened._files.env.begin(write=True) as txn:
        txn.put(b"layout", b"relaygr.history-store.99", db=opened._files.meta)
        for table in (*opened._files.tables, opened._files.partitions):
            for key, _ in txn.cursor(db=table):
                txn.put(key, b"of another form", db=table)
    opened.close()
    again = HistoryStore.open(tmp_path, MIB)
    assert (again.get("ann"), again.deleted_at_ms("ann", 0), again.some_histories(1)) == (None, 0, [])
    with capture_logs() as told:
        assert again.trust(ORIGIN) is False
    [line] = told
    assert (line["layout"], line["this_version_reads"]) == (
        "relaygr.history-store.99",
        "relaygr.history-store.8, relaygr.history-store.7, relaygr.history-store.6",
    )
    assert (again.get("ann"), again.state(0), again.user_count) == (None, None, 0)
    read(again, snapshot(0, 1, covers=0))
    assert items(again) != []
    again.close()


def test_a_store_without_last_records_is_kept_and_gets_them_with_the_next_records(tmp_path: Path) -> None:
    """Its states of partitions are shorter. An older version would misread longer ones: the layout's number grows."""
    opened = HistoryStore.open(tmp_path, MIB)
    opened.trust(ORIGIN)
    read(opened, snapshot(0, 1, covers=0))
    last = LastRecord(1, 4, 1_700_000_000_000, b"digested")
    with opened._files.env.begin(write=True) as txn:
        txn.put(b"layout", b"relaygr.history-store.6", db=opened._files.meta)
        txn.put(struct.pack(">I", 0), struct.pack("<QQQQ", 1, 77, 0, 5), db=opened._files.partitions)
    opened.close()
    again = HistoryStore.open(tmp_path, MIB)
    assert len(again.some_histories(1)) == 1
    assert again.trust(ORIGIN) is True
    assert (again.user_count, again.state(0)) == (1, PartitionState(1, 77, 0, 5))
    again.apply_all([HistoryBatch(0, (), 2, (), 5, last)])
    assert again.state(0) == PartitionState(2, 77, 0, 5, last)
    with again._files.env.begin() as txn:
        assert txn.get(b"layout", db=again._files.meta) == LAYOUT
    again.close()


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(-50, 50), min_size=1, max_size=300), st.integers(0, 200))
def test_times_are_raised_alike_however_the_history_was_cut_into_blocks(times: list[int], base: int) -> None:
    draft = Draft.of_snapshot(
        History("ann", 1, FEATURES, behaviours(*range(base), first_ms=-100)), 0, records_module.Coverage()
    )
    for offset, time_ms in enumerate(times):
        new = Behaviours(np.array([offset]), np.zeros(1, "<u2"), np.array([time_ms]))
        draft.add(BehaviourEvent("ann", new), offset, 0)
    chunks = [draft.written[index] for index in range(draft.head.chunks)]
    stored = records_module.assembled("ann", draft.head, draft.head_bytes(), chunks)
    sent = np.concatenate((np.arange(base) - 100, times))
    assert stored.history.behaviours.timestamps_ms.tolist() == np.maximum.accumulate(sent).tolist()
    assert stored.chain == digest_chain(FEATURES, stored.history.behaviours)


# -- deaths ------------------------------------------------------------------------------------------

_APPENDER = """
import sys
import numpy as np
from relaygr.schemas.messages import BehaviourEvent, Behaviours
from relaygr.worker.history.batches import EventRecord, HistoryBatch
from relaygr.worker.history.store import HistoryStore, StoreOrigin
store = HistoryStore.open(sys.argv[1], 64 << 20)
store.trust(StoreOrigin("cluster", "relaygr.history", "topic-1", "topic-2"))
offset = began = store.next_event(0) or 0
while True:
    # The item of a record is its offset.
    events = tuple(
        EventRecord(
            BehaviourEvent(f"user-{at % 5}", Behaviours(np.array([at]), np.zeros(1, "<u2"), np.array([at]))), at, at
        )
        for at in range(offset, offset + 20)
    )
    store.apply_all([HistoryBatch(0, (), 0, events, offset + 20)])
    if offset == began:
        print("writing", flush=True)
    offset += 20
"""


@pytest.mark.slow
def test_after_kill_9_each_behaviour_below_the_stored_offset_is_there_once(tmp_path: Path) -> None:
    reached = 0
    for delay_s in (0.05, 0.11, 0.18, 0.3):
        writer = subprocess.Popen([sys.executable, "-c", _APPENDER, str(tmp_path)], stdout=subprocess.PIPE, text=True)
        assert writer.stdout is not None
        assert writer.stdout.readline().strip() == "writing"
        time.sleep(delay_s)
        writer.send_signal(signal.SIGKILL)
        writer.communicate()
        opened = HistoryStore.open(tmp_path, 64 * MIB)
        assert opened.trust(ORIGIN) is True
        offset = opened.next_event(0)
        assert offset is not None and offset >= reached
        for user in range(5):
            assert items(opened, f"user-{user}") == list(range(user, offset, 5))
        reached = offset
        opened.close()
    assert reached > 0
