"""Behaviours as events: whatever is read first, a history is its newest snapshot and the behaviours after it."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from relaygr.schemas.digest import digest_chain
from relaygr.schemas.messages import MAX_BEHAVIOURS, BehaviourEvent, Behaviours, BehavioursOffset, History
from relaygr.worker.history import records as records_module
from relaygr.worker.history.records import Added
from relaygr.worker.history.store import (
    ApplyOutcome,
    EventRecord,
    HistoryBatch,
    HistoryRecord,
    HistoryStore,
    PartitionState,
    StoreOrigin,
)

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
    assert (outcome.changed, outcome.added) == (("ann", "ann"), {Added.APPENDED: 2})
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
    assert read(store, event(1, 2, position=2)).added == {Added.DUPLICATE: 1}, "too late: the order is that of the log"
    read(store, event(2, 5, position=5))
    assert (items(store), has_gap(store)) == ([0, 1, 4, 5], True)
    read(store, snapshot(1, 0, 1, 2, covers=0))
    assert (items(store), has_gap(store)) == ([0, 1, 2, 4, 5], True), "3 is missing still"
    read(store, snapshot(2, 0, 1, 2, 3, 4, covers=1))
    assert (items(store), has_gap(store)) == ([0, 1, 2, 3, 4, 5], False)


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
    assert (outcome.deleted, items(store)) == (("ann",), None)
    assert read(store, event(1, 3, written_at_ms=20)).added == {Added.COVERED: 1}
    assert items(store) is None
    read(store, event(2, 4, written_at_ms=21))
    assert items(store) == [4]


def test_a_tombstone_that_is_read_late_keeps_newer_behaviours_alone(store: HistoryStore) -> None:
    read(store, snapshot(0, 1, covers=0), event(0, 2, written_at_ms=10), event(1, 3, written_at_ms=30))
    outcome = read(store, tombstone(1, written_at_ms=20))
    assert (outcome.deleted, outcome.changed) == (("ann",), ("ann",))
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
    assert (tmp_path / "data.mdb").stat().st_size <= MIB
    opened.close()


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
    with opened._write() as txn:
        txn.put(b"layout", b"relaygr.history-store.2", db=opened._files.meta)
    opened.close()
    again = HistoryStore.open(tmp_path, MIB)
    assert again.trust(ORIGIN) is False
    assert (again.get("ann"), again.state(0), again.user_count) == (None, None, 0)
    again.close()


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(-50, 50), min_size=1, max_size=300), st.integers(0, 200))
def test_times_are_raised_alike_however_the_history_was_cut_into_blocks(times: list[int], base: int) -> None:
    draft = records_module.Draft.of_snapshot(
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
from relaygr.worker.history.store import EventRecord, HistoryBatch, HistoryStore, StoreOrigin
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
