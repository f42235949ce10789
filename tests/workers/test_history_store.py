"""The history store: one transaction for records and offset, a bounded file, a known origin."""

from __future__ import annotations

import resource
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import relaygr.worker.history.store
from relaygr.runtime.errors import RelayError
from relaygr.schemas.messages import BehaviourEvent, Behaviours, History
from relaygr.worker.history.batches import ApplyOutcome, EventRecord, HistoryBatch, HistoryRecord, StoreFullError
from relaygr.worker.history.files import DamagedError
from relaygr.worker.history.records import Coverage
from relaygr.worker.history.rules import Draft
from relaygr.worker.history.store import HistoryStore, StoreOrigin
from relaygr.worker.history.tables import PartitionState

MIB = 1024 * 1024
ORIGIN = StoreOrigin("cluster", "relaygr.history", "topic-1")


def history(user_id: str, number: int = 1, length: int = 100, seed: int = 0) -> History:
    random = np.random.default_rng(seed)
    times = np.sort(random.integers(0, 2**40, length))
    behaviours = Behaviours(
        random.integers(-(2**63), 2**63 - 1, length), random.integers(0, 2**16, length, "<u2"), times
    )
    return History(user_id, number, np.array([3, -1]), behaviours)


def entry(offset: int, user_id: str, number: int = 1, length: int = 100) -> HistoryRecord:
    return HistoryRecord(user_id, offset, history(user_id, number, length, seed=offset))


def apply(store: HistoryStore, partition: int, records: Sequence[HistoryRecord], next_offset: int) -> ApplyOutcome:
    return store.apply_all((HistoryBatch(partition, tuple(records), next_offset),))


@pytest.fixture
def store(tmp_path: Path) -> Iterator[HistoryStore]:
    opened = HistoryStore.open(tmp_path / "history", 16 * MIB)
    opened.trust(ORIGIN)
    yield opened
    opened.close()


@pytest.mark.parametrize("length", [0, 1, 63, 64, 65, 1000])
@pytest.mark.parametrize("features", [0, 1, 5])
def test_a_stored_history_comes_back_with_its_digest_chain(store: HistoryStore, length: int, features: int) -> None:
    plain = history("käthe", 7, length)
    given_history = History("käthe", 7, np.arange(features), plain.behaviours)
    apply(store, 0, [HistoryRecord("käthe", 0, given_history)], 1)
    stored = store.get("käthe")
    assert stored is not None
    assert stored.history == given_history
    assert stored.chain == given_history.chain()
    assert stored.version == given_history.version()


def test_a_history_that_was_read_does_not_change_when_the_store_does(store: HistoryStore) -> None:
    apply(store, 0, [entry(0, "u", 1)], 1)
    before = store.get("u")
    assert before is not None
    copy = before.history.behaviours.items.copy()
    for offset in range(1, 50):
        apply(store, 0, [entry(offset, "u", 1 + offset)], offset + 1)
    np.testing.assert_array_equal(before.history.behaviours.items, copy)
    with pytest.raises(ValueError, match="read-only"):
        before.history.behaviours.items[0] = 1


def test_an_unknown_user_has_no_history(store: HistoryStore) -> None:
    assert store.get("nobody") is None
    assert store.get("nobody") is None


def test_a_partition_that_was_never_read_has_no_offset(store: HistoryStore) -> None:
    apply(store, 3, [entry(0, "u")], 1)
    assert store.next_offset(3) == 1
    assert store.next_offset(4) is None


def test_a_tombstone_deletes_the_user(store: HistoryStore) -> None:
    apply(store, 0, [entry(0, "u"), entry(1, "v")], 2)
    outcome = apply(store, 0, [HistoryRecord("u", 2, None)], 3)
    assert outcome.deleted == ["u"]
    assert store.get("u") is None
    assert store.user_count == 1


def test_a_larger_version_number_replaces_and_a_smaller_one_is_counted(store: HistoryStore) -> None:
    apply(store, 0, [entry(0, "u", number=5)], 1)
    older = apply(store, 0, [entry(1, "u", number=4)], 2)
    assert (older.older, older.changed) == (1, [])
    newer = apply(store, 0, [entry(2, "u", number=6, length=3)], 3)
    assert newer.changed == ["u"]
    stored = store.get("u")
    assert stored is not None and (stored.history.number, stored.chain.length) == (6, 3)


def test_a_number_of_any_size_is_mended_by_a_snapshot_of_a_later_time(store: HistoryStore) -> None:
    largest = replace(entry(0, "u", number=2**53 - 1), written_at_ms=1_000)
    apply(store, 0, [largest], 1)
    same_time = replace(entry(1, "u", number=7), written_at_ms=1_000)
    assert apply(store, 0, [same_time], 2).older == 1
    later = replace(entry(2, "u", number=7), written_at_ms=1_001)
    assert apply(store, 0, [later], 3).changed == ["u"]
    stored = store.get("u")
    assert stored is not None and stored.history.number == 7
    assert apply(store, 0, [replace(entry(3, "u", number=8), written_at_ms=500)], 4).changed == ["u"]


def test_a_number_of_any_size_is_mended_by_a_tombstone(store: HistoryStore) -> None:
    apply(store, 0, [entry(0, "u", number=2**53 - 1), HistoryRecord("u", 1, None), entry(2, "u", number=1)], 3)
    stored = store.get("u")
    assert stored is not None and stored.history.number == 1


def test_of_equal_numbers_the_later_record_stays(store: HistoryStore) -> None:
    apply(store, 0, [entry(0, "u", number=5, length=10)], 1)
    apply(store, 0, [entry(1, "u", number=5, length=20)], 2)
    stored = store.get("u")
    assert stored is not None and stored.chain.length == 20


def test_a_record_below_the_stored_offset_is_not_applied_twice(store: HistoryStore) -> None:
    """A predecessor that is still alive must not restore a deleted user."""
    records = [entry(0, "u"), HistoryRecord("u", 1, None), entry(2, "v")]
    apply(store, 0, records, 3)
    again = apply(store, 0, records[:1], 1)
    assert again.repeated == 1
    assert store.get("u") is None
    assert store.next_offset(0) == 3


def test_batches_of_several_partitions_are_one_transaction(store: HistoryStore) -> None:
    broken = HistoryRecord("v", 0, history("v"))
    object.__setattr__(broken.history, "behaviours", None)
    with pytest.raises(AttributeError):
        store.apply_all([HistoryBatch(0, (entry(0, "u"),), 1), HistoryBatch(1, (broken,), 1)])
    assert store.get("u") is None
    assert store.next_offset(0) is None


@settings(max_examples=30, deadline=None)
@given(
    log=st.lists(st.tuples(st.sampled_from("abc"), st.none() | st.integers(0, 3)), max_size=12),
    cuts=st.lists(st.integers(0, 12), max_size=4),
)
def test_replays_from_any_earlier_offset_end_in_the_same_store(
    log: list[tuple[str, int | None]], cuts: list[int]
) -> None:
    records = [
        HistoryRecord(user, offset, None if number is None else history(user, number, 3, seed=offset))
        for offset, (user, number) in enumerate(log)
    ]
    with tempfile.TemporaryDirectory() as folder:
        opened = HistoryStore.open(folder, MIB)
        opened.trust(ORIGIN)
        done = 0
        for cut in (*cuts, len(records)):
            end = min(cut, len(records))
            apply(opened, 0, records[: max(end, done)], max(end, done))
            done = max(end, done)
        expected: dict[str, History] = {}
        for one in records:
            if one.history is None:
                expected.pop(one.user_id, None)
            elif one.user_id not in expected or expected[one.user_id].number <= one.history.number:
                expected[one.user_id] = one.history
        for user in "abc":
            stored = opened.get(user)
            assert (stored.history if stored else None) == expected.get(user)
        opened.close()


def test_a_store_is_not_read_before_its_origin_is_known(tmp_path: Path) -> None:
    first = HistoryStore.open(tmp_path, MIB)
    first.trust(ORIGIN)
    apply(first, 0, [entry(0, "u")], 1)
    first.close()
    second = HistoryStore.open(tmp_path, MIB)
    assert second.get("u") is None
    assert second.trust(ORIGIN) is True
    assert second.get("u") is not None
    assert second.next_offset(0) == 1
    second.close()


@pytest.mark.parametrize(
    "other",
    [
        StoreOrigin("other", ORIGIN.topic, ORIGIN.topic_id),
        StoreOrigin(ORIGIN.cluster_id, "other", ORIGIN.topic_id),
        StoreOrigin(ORIGIN.cluster_id, ORIGIN.topic, "topic-2"),
    ],
)
def test_a_store_of_another_topic_is_emptied(tmp_path: Path, other: StoreOrigin) -> None:
    first = HistoryStore.open(tmp_path, MIB)
    first.trust(ORIGIN)
    apply(first, 0, [entry(0, "u")], 1)
    first.close()
    second = HistoryStore.open(tmp_path, MIB)
    assert second.trust(other) is False
    assert second.get("u") is None
    assert second.next_offset(0) is None
    assert second.user_count == 0
    second.close()


@pytest.mark.slow
def test_a_reader_in_another_process_sees_what_was_stored(tmp_path: Path, store: HistoryStore) -> None:
    apply(store, 0, [entry(0, "u", number=9)], 1)
    script = f"""
from relaygr.worker.history.store import HistoryStore, StoreOrigin
store = HistoryStore.open({str(store.path)!r}, {store.max_bytes})
print(store.get("u"))
print(store.trust(StoreOrigin("cluster", "relaygr.history", "topic-1")), store.get("u").version.number)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=240, check=True)
    assert done.stdout.splitlines()[-2:] == ["None", "True 9"]


@pytest.mark.parametrize("exists", [False, True])
def test_only_the_owner_may_read_the_store(tmp_path: Path, exists: bool) -> None:
    """Stores of earlier versions were readable for every user."""
    folder = tmp_path / "history"
    if exists:
        HistoryStore.open(folder, MIB).close()
        folder.chmod(0o755)
        for path in folder.iterdir():
            path.chmod(0o644)
    HistoryStore.open(folder, MIB).close()
    assert folder.stat().st_mode & 0o777 == 0o700
    assert {path.name: path.stat().st_mode & 0o777 for path in folder.iterdir()} == {
        "data.mdb": 0o600,
        "lock.mdb": 0o600,
    }


@pytest.mark.parametrize("name", ["history", "history/data.mdb"])
def test_a_store_behind_a_link_is_refused(tmp_path: Path, name: str) -> None:
    HistoryStore.open(tmp_path / "victim", MIB).close()
    target = tmp_path / name.replace("history", "victim")
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).symlink_to(target)
    with pytest.raises(RelayError, match="is a symbolic link"):
        HistoryStore.open(tmp_path / "history", MIB)


def test_a_store_without_free_space_is_refused_with_advice(tmp_path: Path) -> None:
    """No file can grow under this limit, as on a full file system."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, before[1]))
    try:
        with pytest.raises(RelayError, match=r"cannot be written .*`worker\.history_path`") as refused:
            HistoryStore.open(tmp_path / "history", MIB)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert "delete" not in str(refused.value)


def test_a_second_opening_in_one_process_is_refused(store: HistoryStore) -> None:
    with pytest.raises(RelayError, match="already open in this process"):
        HistoryStore.open(store.path, store.max_bytes)


def test_a_file_that_is_not_a_store_is_refused(tmp_path: Path) -> None:
    (tmp_path / "data.mdb").write_bytes(b"not a store" * 1000)
    with pytest.raises(RelayError, match="delete the folder"):
        HistoryStore.open(tmp_path, MIB)


def test_a_truncated_store_is_refused(tmp_path: Path) -> None:
    opened = HistoryStore.open(tmp_path, MIB)
    opened.trust(ORIGIN)
    apply(opened, 0, [entry(offset, f"u{offset}") for offset in range(50)], 50)
    opened.close()
    data = (tmp_path / "data.mdb").read_bytes()
    (tmp_path / "data.mdb").write_bytes(data[: len(data) // 2])
    with pytest.raises(RelayError, match="truncated"):
        HistoryStore.open(tmp_path, MIB)


def test_a_damaged_store_says_what_to_do(tmp_path: Path) -> None:
    opened = HistoryStore.open(tmp_path, MIB)
    opened.trust(ORIGIN)
    apply(opened, 0, [entry(0, "u0", length=1000)], 1)
    files = opened._files
    with files.env.begin(write=True) as txn, txn.cursor(db=files.records) as cursor:
        assert cursor.last() and cursor.delete()
    with pytest.raises(RelayError, match=f"store in {tmp_path} is damaged.*delete the folder"):
        opened.get("u0")
    assert opened.some_histories(1) == []
    opened.close()


_CHUNK_OF_U, _HEAD_OF_U = b"\0\0\0\7u\0\1", b"\0\0\0\7u\0\0"


@pytest.mark.parametrize("place", [0, 7, 100, 183, 190, 210, -6, -5, -1], ids=str)
@pytest.mark.parametrize("key", [_HEAD_OF_U, _CHUNK_OF_U], ids=["head", "chunk"])
def test_one_bit_that_changed_in_a_stored_history_is_found_by_whoever_reads_it(
    store: HistoryStore, key: bytes, place: int
) -> None:
    """A worker's snapshot would write it into the log, and an append would seal it again."""
    apply(store, 7, [entry(0, "u", length=100), entry(1, "v", length=100)], 2)
    with store._files.env.begin(write=True) as txn:
        part = bytearray(txn.get(key, db=store._files.records))
        part[place] ^= 4
        txn.put(key, part, db=store._files.records)
    new = Behaviours(np.arange(64), np.zeros(64, "<u2"), np.full(64, 2**41))
    append = HistoryBatch(7, (), 2, (EventRecord(BehaviourEvent("u", new), 0),), 1)
    reads: list[Callable[[], object]] = [
        lambda: store.get("u"), lambda: store.saved("u", 0), lambda: store.apply_all([append]),
    ]  # fmt: skip
    for read in reads:
        with pytest.raises(DamagedError) as told:
            read()
        assert told.value.partition == 7
    assert store.get("v") is not None
    assert store.forget(7) == 2, "it can be deleted"


def test_a_part_in_the_place_of_that_of_another_user_is_found(store: HistoryStore) -> None:
    apply(store, 7, [entry(0, "u"), entry(1, "v")], 2)
    with store._files.env.begin(write=True) as txn:
        other = bytes(txn.get(_HEAD_OF_U.replace(b"u", b"v"), db=store._files.records))
        txn.put(_HEAD_OF_U, other, db=store._files.records)
    with pytest.raises(DamagedError):
        store.get("u")


def test_histories_of_a_layout_without_seals_are_read_and_get_seals_with_their_next_change(tmp_path: Path) -> None:
    opened = HistoryStore.open(tmp_path, MIB)
    opened.trust(ORIGIN)
    given = [entry(offset, f"u{offset}", length=60 * offset) for offset in range(5)]
    apply(opened, 7, given, 5)
    with opened._files.env.begin(write=True) as txn:
        sealed = dict(txn.cursor(db=opened._files.records))
        for key, part in sealed.items():
            txn.put(key, part[:-5], db=opened._files.records)
        txn.put(b"layout", b"relaygr.history-store.7", db=opened._files.meta)
    opened.close()
    again = HistoryStore.open(tmp_path, MIB)
    assert again.trust(ORIGIN) is True
    assert [stored.history for each in given if (stored := again.get(each.user_id))] == [each.history for each in given]
    apply(again, 7, [replace(each, offset=each.offset + 5) for each in given], 10)
    with again._files.env.begin() as txn:
        assert [len(part) % 2 for _, part in txn.cursor(db=again._files.records)] == [1] * len(sealed)
    again.close()


def test_a_limit_below_what_is_stored_is_refused(tmp_path: Path) -> None:
    opened = HistoryStore.open(tmp_path, 16 * MIB)
    opened.trust(ORIGIN)
    apply(opened, 0, [entry(offset, f"u{offset}", length=5000) for offset in range(50)], 50)
    opened.close()
    with pytest.raises(RelayError, match="raise it"):
        HistoryStore.open(tmp_path, MIB)


def test_a_limit_below_the_least_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RelayError, match="history_max_bytes is 1000"):
        HistoryStore.open(tmp_path, 1000)


def test_a_full_store_refuses_counts_and_keeps_within_its_bytes(tmp_path: Path) -> None:
    opened = HistoryStore.open(tmp_path, MIB)
    opened.trust(ORIGIN)
    changed = refused = 0
    for first in range(0, 200, 20):
        records = [entry(offset, f"u{offset}", length=1000) for offset in range(first, first + 20)]
        outcome = apply(opened, 0, records, first + 20)
        changed += len(outcome.changed)
        refused += len(outcome.refused)
    assert changed + refused == 200
    assert changed == opened.user_count > 20
    assert refused > 0
    assert opened.state(0) == PartitionState(200, 0, refused)
    assert not opened.has_room
    assert (tmp_path / "data.mdb").stat().st_size <= MIB
    opened.close()


def test_a_refused_update_leaves_no_outdated_history_behind(tmp_path: Path) -> None:
    opened = HistoryStore.open(tmp_path, MIB)
    opened.trust(ORIGIN)
    apply(opened, 0, [entry(0, "small", 1, length=10)], 1)
    outcome = apply(opened, 0, [entry(1, "small", 2, length=100_000)], 2)
    assert outcome.refused == ["small"]
    assert opened.get("small") is None
    assert opened.next_offset(0) == 2
    opened.close()


def test_a_batch_that_does_not_fit_as_a_whole_does_not_pass_its_offset(tmp_path: Path) -> None:
    """Its offset stays before a dead letter that is not delivered yet, also if the records are stored one by one."""
    opened = HistoryStore.open(tmp_path, MIB)
    opened.trust(ORIGIN)
    records = [entry(offset, f"u{offset}", length=2000) for offset in range(40)]
    transactions: list[int] = []
    apply_once = opened._apply

    def counted(batches: Sequence[HistoryBatch]) -> ApplyOutcome:
        transactions.append(len(batches[0].records))
        return apply_once(batches)

    opened._apply = counted  # type: ignore[method-assign]
    with opened._files.env.begin(), pytest.raises(StoreFullError):
        while True:
            apply(opened, 0, records, 3)
    assert 1 in transactions, "stored one by one"
    assert opened.next_offset(0) == 3
    opened.close()


def test_while_a_reader_holds_old_pages_nothing_is_lost_silently(tmp_path: Path) -> None:
    """LMDB reuses no page while a read transaction is open, so the file itself becomes full."""
    opened = HistoryStore.open(tmp_path, MIB)
    opened.trust(ORIGIN)
    records = [entry(offset, "u", 1 + offset, length=10_000) for offset in range(40)]
    apply(opened, 0, records[:1], 1)
    refused = 0
    with opened._files.env.begin(), pytest.raises(StoreFullError) as full:
        for offset in range(1, 40):
            refused += len(apply(opened, 0, records[offset : offset + 1], offset + 1).refused)
    assert full.value.done == ApplyOutcome()
    assert refused > 0
    state = opened.state(0)
    assert state is not None and state.refused == refused
    reached = state.next_offset
    assert reached < 40
    assert apply(opened, 0, records[reached:], 40).refused == []
    stored = opened.get("u")
    assert stored is not None and stored.version.number == 40
    opened.close()


def test_forgetting_deletes_the_users_of_the_partition(store: HistoryStore) -> None:
    apply(store, 0, [entry(0, "a")], 5)
    apply(store, 1, [entry(0, "b")], 7)
    assert store.forget(0) == 1
    assert store.get("a") is None
    assert store.get("b") is not None
    assert (store.state(0), store.state(1)) == (None, PartitionState(7, 0, 0))


@pytest.fixture
def two_partitions(tmp_path: Path) -> Iterator[HistoryStore]:
    """A store that is more than half full of short histories. Each page has users of both partitions."""
    opened = HistoryStore.open(tmp_path, MIB)
    opened.trust(ORIGIN)
    for first in range(0, 1000, 100):
        for partition in (0, 1):
            offsets = range(first + partition, first + 100, 2)
            apply(opened, partition, [entry(offset, f"u{offset:04}", length=8) for offset in offsets], first + 100)
    yield opened
    opened.close()


def test_a_partition_is_forgotten_though_copies_of_all_pages_would_not_fit(two_partitions: HistoryStore) -> None:
    """LMDB copies each page that a transaction changes: one transaction for all needed more pages than were free."""
    assert two_partitions.bytes_used > MIB / 2
    assert two_partitions.forget(0) == 500
    assert two_partitions.user_count == 500
    assert two_partitions.get("u0001") is not None
    assert (two_partitions.state(0), two_partitions.state(1)) == (None, PartitionState(1000, 0, 0))
    assert two_partitions.removed_at_ms is not None


def test_a_partition_that_was_forgotten_in_part_counts_as_too_old(
    two_partitions: HistoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its follower forgets it again, whatever the time, and then reads it from the beginning."""
    two_partitions.mark_current([0], 1 << 60)
    forget_some, left = two_partitions._forget_some, iter([True, False])

    def dies(partition: int) -> tuple[int, bool]:
        if not next(left):
            raise KeyboardInterrupt
        return forget_some(partition)

    monkeypatch.setattr(two_partitions, "_forget_some", dies)
    with pytest.raises(KeyboardInterrupt):
        two_partitions.forget(0)
    assert 500 < two_partitions.user_count < 1000
    assert two_partitions.state(0) == PartitionState(0, 0, 0)
    assert two_partitions.next_offset(0) is None


def test_the_time_when_a_partition_was_current_is_stored(store: HistoryStore) -> None:
    store.mark_current([0, 1], 1234)
    apply(store, 0, [entry(0, "u")], 1)
    assert store.state(0) == PartitionState(1, 1234, 0)
    assert store.next_offset(1) is None


def test_bytes_used_grow_with_records_and_fall_with_deletions(store: HistoryStore) -> None:
    empty = store.bytes_used
    apply(store, 0, [entry(0, "u", length=10_000)], 1)
    assert store.bytes_used - empty >= 180_000
    apply(store, 0, [HistoryRecord("u", 1, None)], 2)
    assert store.bytes_used - empty <= 4096


def test_the_stored_form_is_laid_out_as_documented() -> None:
    given_history = history("u", 258, 65)
    draft = Draft.of_snapshot(given_history, 7, Coverage())
    head, behaviours = draft.head_bytes(), given_history.behaviours
    assert len(head) == 184 + 2 * 8 + 42
    assert head[:8] == bytes([2, 1, 0, 0, 0, 0, 0, 0])
    assert head[200:208] == behaviours.items[64:].astype("<i8").tobytes()
    assert draft.written == {
        0: given_history.chain().blocks[0]
        + behaviours.items[:64].astype("<i8").tobytes()
        + behaviours.timestamps_ms[:64].astype("<i8").tobytes()
        + behaviours.actions[:64].astype("<u2").tobytes()
    }


_WRITER = """
import sys
import numpy as np
from relaygr.schemas.messages import Behaviours, History
from relaygr.worker.history.batches import HistoryBatch, HistoryRecord
from relaygr.worker.history.store import HistoryStore, StoreOrigin
store = HistoryStore.open(sys.argv[1], 16 << 20)
store.trust(StoreOrigin("cluster", "relaygr.history", "topic-1"))
offset = began = store.next_offset(0) or 0
while True:
    # Version and length are the offset's, for both of a pair of users.
    length = offset % 500
    behaviours = Behaviours(np.full(length, offset), np.zeros(length, "<u2"), np.arange(length))
    users = (f"left-{offset // 2 % 40}", f"right-{offset // 2 % 40}")
    records = tuple(
        HistoryRecord(user, offset + at, History(user, offset, np.empty(0, "<i8"), behaviours))
        for at, user in enumerate(users)
    )
    store.apply_all([HistoryBatch(0, records, offset + 2), HistoryBatch(1, (), offset + 2)])
    if offset == began:
        print("writing", flush=True)
    offset += 2
"""


@pytest.mark.slow
def test_a_store_whose_writer_was_killed_is_whole_and_agrees_with_its_offset(tmp_path: Path) -> None:
    reached = 0
    for delay_s in (0.05, 0.11, 0.18, 0.3):
        writer = subprocess.Popen([sys.executable, "-c", _WRITER, str(tmp_path)], stdout=subprocess.PIPE, text=True)
        assert writer.stdout is not None
        assert writer.stdout.readline().strip() == "writing"
        time.sleep(delay_s)
        writer.send_signal(signal.SIGKILL)
        writer.wait()
        opened = HistoryStore.open(tmp_path, 16 * MIB)
        assert opened.trust(ORIGIN) is True
        offset = opened.next_offset(0)
        assert offset is not None and offset > reached
        assert opened.next_offset(1) == offset
        newest = set()
        for pair in range(40):
            left, right = opened.get(f"left-{pair}"), opened.get(f"right-{pair}")
            assert (left is None) == (right is None)
            if left is None or right is None:
                continue
            assert left.history.behaviours == right.history.behaviours
            assert left.chain == left.history.chain()
            assert left.history.number == right.history.number
            newest.add(left.history.number)
        assert max(newest) == offset - 2
        assert newest == set(range(max(0, offset - 80), offset, 2))
        reached = offset
        opened.close()


# -- users for a warm-up ---------------------------------------------------------------------------


def seen_at(user_id: str, newest_ms: int, offset: int) -> HistoryRecord:
    behaviours = Behaviours(np.array([1, 2]), np.array([0, 0], "<u2"), np.array([0, newest_ms]))
    return HistoryRecord(user_id, offset, History(user_id, 1, np.arange(offset % 3), behaviours))


def test_the_users_with_the_newest_behaviours_of_the_partitions_come_first(store: HistoryStore) -> None:
    apply(
        store, 0, [seen_at("old", 10, 0), seen_at("newest", 40, 1), seen_at("käthe", 30, 2), entry(3, "empty", 1, 0)], 4
    )
    apply(store, 1, [seen_at("elsewhere", 99, 0)], 1)
    assert store.recent_users({0}, 2, lambda: True) == ["newest", "käthe"]
    assert store.recent_users({0, 1}, 10, lambda: True) == ["elsewhere", "newest", "käthe", "old"]
    assert store.recent_users({0, 1}, 0, lambda: True) == []
    assert store.recent_users({2}, 10, lambda: True) == []


def test_a_scan_of_many_users_misses_none_and_ends_when_it_is_not_wanted(
    store: HistoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(relaygr.worker.history.store, "_SCAN_RECORDS", 7)
    apply(store, 0, [seen_at(f"u{number}", number, number) for number in range(50)], 50)
    assert store.recent_users({0}, 100, lambda: True) == [f"u{number}" for number in reversed(range(50))]
    asked = iter([True, True, False])
    assert len(store.recent_users({0}, 100, lambda: next(asked))) == 14
