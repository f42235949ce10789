"""The compaction of the history store: after it no byte of a deleted user is in any file, whatever dies meanwhile."""

from __future__ import annotations

import os
import random
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import lmdb
import numpy as np
import pytest

from relaygr.runtime.clock import ManualClock
from relaygr.runtime.errors import RelayError
from relaygr.schemas.messages import Behaviours, History
from relaygr.worker.history import files as files_module
from relaygr.worker.history.batches import HistoryBatch, HistoryRecord
from relaygr.worker.history.files import claim
from relaygr.worker.history.store import HistoryStore, StoreOrigin
from relaygr.worker.history.tables import PartitionState, Table

MIB = 1024 * 1024
ORIGIN = StoreOrigin("cluster", "relaygr.history", "topic-1")
PATIENCE_S = 60.0
LENGTHS = (3, 100, 180, 1000)
"""Of histories in a page with others, in half a page, in a page of its own, and in several."""


def mark(user_id: str) -> int:
    """An item id that only this user has."""
    return int.from_bytes(f"~{user_id:_<7}"[:8].encode(), "little")


def record(offset: int, user_id: str, length: int = 100, number: int = 1) -> HistoryRecord:
    items = np.full(length, mark(user_id), "<i8")
    behaviours = Behaviours(items, np.zeros(length, "<u2"), np.arange(length, dtype="<i8"))
    return HistoryRecord(user_id, offset, History(user_id, number, np.array([mark(user_id)]), behaviours))


def apply(store: HistoryStore, *records: HistoryRecord, partition: int = 0) -> None:
    store.apply_all([HistoryBatch(partition, records, records[-1].offset + 1)])


def content(folder: Path) -> bytes:
    return b"".join(path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file())


def traces(folder: Path, *users: str) -> list[str]:
    """Those of the users of whom a byte string is left: the id, or an item."""
    left = content(folder)
    return [user for user in users if user.encode() in left or mark(user).to_bytes(8, "little") in left]


def compact(store: HistoryStore) -> None:
    while not store.compact():
        pass


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def store(tmp_path: Path, clock: ManualClock) -> Iterator[HistoryStore]:
    opened = HistoryStore.open(tmp_path / "history", 16 * MIB, clock)
    opened.trust(ORIGIN)
    yield opened
    opened.close()


@pytest.fixture
def small_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files_module, "_SLICE_BYTES", 1)


@pytest.mark.parametrize("length", LENGTHS)
def test_after_a_compaction_no_byte_of_a_deleted_user_is_in_any_file(store: HistoryStore, length: int) -> None:
    """LMDB leaves the bytes in free pages, and in unused parts of the pages of other users."""
    others = [f"user{number}" for number in range(20)]
    for version in range(3):
        apply(store, *(record(100 * version + at, user, length) for at, user in enumerate((*others, "ann"), 1)))
    apply(store, HistoryRecord("ann", 400, None))
    for at, user in enumerate(others[:10]):
        apply(store, record(500 + at, user, length // 2))
    assert traces(store.path, "ann") == ["ann"]
    compact(store)
    assert traces(store.path, "ann") == []
    assert traces(store.path, *others) == others
    for at, user in enumerate(others):
        stored = store.get(user)
        assert stored is not None and len(stored.history.behaviours) == (length // 2 if at < 10 else length)
    assert store.state(0) == PartitionState(510, 0, 0)


def test_a_compacted_store_is_opened_again_and_grows_on(store: HistoryStore, tmp_path: Path) -> None:
    apply(store, record(0, "ann"), record(1, "bob"))
    for offset in range(2, 8, 2):
        apply(store, HistoryRecord("ann", offset, None))
        compact(store)
        apply(store, record(offset + 1, "ann"))
    store.close()
    again = HistoryStore.open(store.path, 16 * MIB)
    assert again.trust(ORIGIN) is True
    assert again.user_count == 2
    assert again.next_offset(0) == 8
    assert [path.name for path in store.path.iterdir()] == ["3"], "older files are deleted"
    again.close()
    assert store.path.stat().st_mode & 0o777 == (store.path / "3").stat().st_mode & 0o777 == 0o700
    assert {path.stat().st_mode & 0o777 for path in (store.path / "3").iterdir()} == {0o600}


def test_the_time_of_the_first_deletion_is_known_until_its_bytes_are_erased(
    store: HistoryStore, clock: ManualClock
) -> None:
    assert store.removed_at_ms is None
    apply(store, record(0, "ann"), record(1, "bob"), record(2, "eve"))
    assert store.removed_at_ms is None
    first_ms = clock.wall_us() // 1000
    apply(store, HistoryRecord("ann", 3, None))
    clock.advance_us(5_000_000)
    apply(store, HistoryRecord("bob", 4, None))
    assert store.removed_at_ms == first_ms
    compact(store)
    assert store.removed_at_ms is None
    store.forget(1)
    assert store.removed_at_ms is None, "nobody was deleted"
    store.forget(0)
    assert store.removed_at_ms == first_ms + 5_000


def test_a_tombstone_of_a_user_without_a_record_counts_too(store: HistoryStore) -> None:
    """A larger history of the user may have been refused, and the smaller one deleted."""
    apply(store, HistoryRecord("ann", 0, None))
    assert store.removed_at_ms is not None


@pytest.mark.usefixtures("small_slices")
def test_a_user_who_is_deleted_during_a_compaction_is_erased_by_the_next(
    store: HistoryStore, clock: ManualClock
) -> None:
    apply(store, record(0, "ann"), record(1, "bob"), record(2, "eve"))
    apply(store, HistoryRecord("eve", 3, None))
    assert not store.compact()
    clock.advance_us(1_000_000)
    apply(store, HistoryRecord("ann", 4, None))
    compact(store)
    assert store.get("ann") is None
    assert traces(store.path, "ann", "eve") == ["ann"]
    assert store.removed_at_ms == clock.wall_us() // 1000
    compact(store)
    assert traces(store.path, "ann", "eve") == []
    assert store.removed_at_ms is None


@pytest.mark.usefixtures("small_slices")
@pytest.mark.parametrize("seed", range(4))
def test_changes_between_the_slices_are_kept(store: HistoryStore, seed: int) -> None:
    dice = random.Random(seed)
    users = [f"user{number:02}" for number in range(30)]
    expected: dict[str, int] = {}
    compactions = offset = 0
    while compactions < 4:
        user, partition = dice.choice(users), dice.randrange(2)
        length = dice.choice((*LENGTHS, None))
        if length is None:
            expected.pop(user, None)
            apply(store, HistoryRecord(user, offset, None), partition=partition)
        else:
            expected[user] = length
            apply(store, record(offset, user, length), partition=partition)
        offset += 1
        compactions += store.compact()
        assert store.user_count == len(expected)
    while store.removed_at_ms is not None:
        compact(store)
    assert traces(store.path, *users) == sorted(expected)
    for user, length in expected.items():
        stored = store.get(user)
        assert stored is not None and len(stored.history.behaviours) == length


def test_a_store_that_is_emptied_during_a_compaction_begins_it_again(store: HistoryStore) -> None:
    apply(store, record(0, "ann"))
    store.compact()
    assert store.is_compacting
    assert store.trust(StoreOrigin("other", "relaygr.history", "topic-2")) is False
    assert not store.is_compacting
    compact(store)
    assert traces(store.path, "ann") == []


def test_only_old_files_that_exist_are_deleted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A store is compacted many thousand times."""
    for number in (7, 12, 13):
        (tmp_path / str(number)).mkdir()
    deleted: list[str] = []
    monkeypatch.setattr(files_module.shutil, "rmtree", lambda place, **_: deleted.append(place.name))
    files_module._delete_before(tmp_path, 12)
    assert deleted == ["7"]


def test_replaced_files_are_unmapped_when_their_last_reader_is_done(store: HistoryStore) -> None:
    def is_mapped() -> bool:
        maps = Path("/proc/self/maps").read_text().splitlines()
        return any(f"{store.path}/data.mdb" in line for line in maps)

    apply(store, record(0, "ann"), record(1, "bob"))
    with store._read() as tables:
        compact(store)
        assert is_mapped()
        assert tables.count(Table.USERS) == 2
    del tables
    assert not is_mapped()
    assert store.user_count == 2


def test_another_thread_reads_while_files_are_replaced(store: HistoryStore) -> None:
    apply(store, record(0, "ann"))
    with ThreadPoolExecutor(1) as threads:
        reads = threads.submit(lambda: [store.get("ann") is not None for _ in range(2000)])
        while not reads.done():
            compact(store)
        assert all(reads.result())
    assert store._files.number > 0


# -- several processes -----------------------------------------------------------------------------

_OTHER = """
import sys
from relaygr.worker.history.batches import HistoryBatch
from relaygr.worker.history.store import HistoryStore, StoreOrigin
store = HistoryStore.open(sys.argv[1], 16 << 20)
store.trust(StoreOrigin("cluster", "relaygr.history", "topic-1"))
print("open", flush=True)
for line in sys.stdin:
    print(eval(line), flush=True)
"""


class Other:
    """Another process that maps the store, and evaluates expressions."""

    def __init__(self, folder: Path) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", _OTHER, str(folder)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == "open\n"

    def ask(self, expression: str) -> str:
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(expression + "\n")
        self.process.stdin.flush()
        return self.process.stdout.readline().strip()

    @property
    def deleted_files(self) -> list[str]:
        """Files that this process still keeps on the disk."""
        maps = Path(f"/proc/{self.process.pid}/maps").read_text().splitlines()
        return [line for line in maps if line.endswith("(deleted)") and ".mdb" in line]

    def close(self) -> None:
        self.process.kill()
        self.process.communicate()


@pytest.fixture
def other(store: HistoryStore) -> Iterator[Other]:
    process = Other(store.path)
    yield process
    process.close()


@pytest.mark.slow
def test_another_process_moves_on_at_its_next_transaction(store: HistoryStore, other: Other) -> None:
    apply(store, record(0, "ann"), record(1, "bob"))
    assert other.ask("store.user_count") == "2"
    apply(store, HistoryRecord("ann", 2, None))
    compact(store)
    assert other.deleted_files
    assert other.ask("store.refresh()") == "None"
    assert other.deleted_files == []
    apply(store, record(3, "eve"))
    assert other.ask("(store.get('ann'), store.user_count, store.next_offset(0))") == "(None, 2, 4)"
    # Also one that writes, in both directions.
    assert other.ask("store.mark_current([0], 77)") == "None"
    compact(store)
    assert other.ask("store.mark_current([1], 78)") == "None"
    assert other.ask("(store.compact(), store.compact())") == "(False, True)"
    assert (store.state(0), store.state(1)) == (PartitionState(4, 77, 0), PartitionState(0, 78, 0))
    assert [path.name for path in store.path.iterdir()] == ["3"]


@pytest.mark.slow
def test_files_that_are_deleted_while_they_are_opened_have_successors(
    store: HistoryStore, other: Other, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A reader raised FileNotFoundError: the writer had compacted twice since the reader looked for newer files."""
    apply(store, record(0, "ann"))
    compacted = "(store.compact(), store.compact())"
    assert other.ask(compacted) == "(False, True)"
    check, opened = files_module._check_size, list[Any]()

    def check_late(*arguments: Any) -> None:
        opened.append(arguments)
        if len(opened) == 1:
            assert other.ask(compacted) == "(False, True)"
        check(*arguments)

    monkeypatch.setattr(files_module, "_check_size", check_late)
    assert store.get("ann") is not None
    assert (len(opened), store._files.number) == (2, 2)


@pytest.mark.slow
@pytest.mark.usefixtures("small_slices")
def test_a_write_by_another_process_makes_the_compaction_begin_again(store: HistoryStore, other: Other) -> None:
    apply(store, record(0, "ann"), record(1, "bob"))
    store.compact()
    other.ask("store.apply_all([HistoryBatch(1, (), 9)])")
    with pytest.raises(lmdb.Error, match="another process has written"):
        compact(store)
    assert not store.is_compacting
    compact(store)
    assert store.next_offset(1) == 9
    assert store.get("bob") is not None


@pytest.mark.slow
@pytest.mark.usefixtures("small_slices")
def test_a_write_by_another_process_is_noticed_after_a_transaction_that_changed_nothing(
    store: HistoryStore, other: Other
) -> None:
    """LMDB gives both transactions the same number."""
    apply(store, record(0, "ann"), record(1, "bob"))
    store.compact()
    assert store.apply_all([HistoryBatch(0, (record(0, "ann"),), 2)]).repeated == 1
    other.ask("store.apply_all([HistoryBatch(1, (), 9)])")
    with pytest.raises(lmdb.Error, match="another process has written"):
        compact(store)
    compact(store)
    assert store.next_offset(1) == 9


@pytest.mark.slow
def test_one_process_compacts_at_a_time(store: HistoryStore, other: Other) -> None:
    assert other.ask("store.compact()") == "False"
    with pytest.raises(BlockingIOError):
        store.compact()
    other.close()
    compact(store)


@pytest.mark.slow
def test_a_store_belongs_to_the_processes_of_one_worker(store: HistoryStore, other: Other) -> None:
    """Another worker would delete the histories of users that are not its own."""
    store.claim("worker-00")
    assert other.ask("store.claim('worker-00')") == "None"
    store.close()
    with pytest.raises(RelayError, match=r"worker-00 uses .* set another `worker\.history_path` for worker-01"):
        claim(store.path, "worker-01")
    other.close()
    os.close(claim(store.path, "worker-01"))


# -- deaths ----------------------------------------------------------------------------------------


class DiedError(Exception):
    """Stands for kill -9."""


def die(*_: Any) -> None:
    raise DiedError


def before_the_switch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files_module, "sync_folder", die)


def after_the_switch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files_module, "_move_on", die)


def before_the_old_files_are_deleted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files_module, "_delete_before", die)


@pytest.mark.parametrize("dies", [before_the_switch, after_the_switch, before_the_old_files_are_deleted])
def test_a_store_whose_compaction_ended_too_early_is_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dies: Callable[[pytest.MonkeyPatch], None]
) -> None:
    store = HistoryStore.open(tmp_path, 16 * MIB)
    store.trust(ORIGIN)
    apply(store, record(0, "ann"), record(1, "bob"), HistoryRecord("ann", 2, None))
    with monkeypatch.context() as patches:
        patches.setattr(HistoryStore, "_abandon_compaction", lambda store: None)
        dies(patches)
        with pytest.raises(DiedError):
            compact(store)
        store._files.close()
    successor = HistoryStore.open(tmp_path, 16 * MIB)
    assert successor.trust(ORIGIN) is True
    assert (successor.user_count, successor.next_offset(0)) == (1, 3)
    if store._compaction is not None:
        store._compaction.release()  # As the kernel does at a death.
    if dies is before_the_switch:
        assert successor.removed_at_ms is not None
        compact(successor)
    assert traces(tmp_path, "ann", "bob") == ["bob"]
    assert len(list(tmp_path.iterdir())) == 1
    successor.close()


_COMPACTOR = """
import sys
import numpy as np
from relaygr.schemas.messages import Behaviours, History
from relaygr.worker.history.batches import HistoryBatch, HistoryRecord
from relaygr.worker.history.store import HistoryStore, StoreOrigin
store = HistoryStore.open(sys.argv[1], 16 << 20)
store.trust(StoreOrigin("cluster", "relaygr.history", "topic-1"))
offset = store.next_offset(0) or 0
print("writing", flush=True)
while True:
    # Users come in pairs of the same number. Of each ten pairs one is deleted.
    number, history = offset // 2, None
    if number % 10:
        length = number % 500
        history = Behaviours(np.full(length, number), np.zeros(length, "<u2"), np.arange(length))
    users = (f"left-{number % 40}", f"right-{number % 40}")
    records = tuple(
        HistoryRecord(user, offset + at, history and History(user, number, np.empty(0, "<i8"), history))
        for at, user in enumerate(users)
    )
    store.apply_all([HistoryBatch(0, records, offset + 2)])
    offset += 2
    store.compact()
"""


@pytest.mark.slow
def test_a_store_whose_compacting_writer_was_killed_is_whole(tmp_path: Path) -> None:
    """Meanwhile this process reads."""
    reached = numbers = 0
    reader = HistoryStore.open(tmp_path, 16 * MIB)

    def read() -> None:
        stored = reader.get("left-7")
        assert stored is None or stored.chain == stored.history.chain()

    for delay_s in (0.05, 0.15, 0.25):
        writer = subprocess.Popen([sys.executable, "-c", _COMPACTOR, str(tmp_path)], stdout=subprocess.PIPE, text=True)
        assert writer.stdout is not None
        try:
            assert writer.stdout.readline().strip() == "writing"
            reader.trust(ORIGIN)
            gives_up_s = time.monotonic() + PATIENCE_S
            while (reader.next_offset(0) or 0) <= reached or reader._files.number <= numbers:
                assert time.monotonic() < gives_up_s, "it writes and compacts"
                read()
            ends_s = time.monotonic() + delay_s
            while time.monotonic() < ends_s:
                read()
        finally:
            writer.kill()
            writer.communicate()
        offset = reader.next_offset(0)
        assert offset is not None and offset > reached
        reached = offset
        numbers = max(numbers, reader._files.number)
        newest = offset // 2 - 1
        for pair in range(40):
            number = newest - (newest - pair) % 40
            for user in (f"left-{pair}", f"right-{pair}"):
                stored = reader.get(user)
                if number < 0 or number % 10 == 0:
                    assert stored is None
                else:
                    assert stored is not None and stored.history.number == number
                    assert stored.chain == stored.history.chain()
    compact(reader)
    assert len(list(tmp_path.iterdir())) == 1, "incomplete files are deleted"
    reader.close()


# -- what can go wrong -----------------------------------------------------------------------------


def test_a_compaction_without_space_fails_and_leaves_the_store_as_it_is(store: HistoryStore) -> None:
    apply(store, *(record(offset, f"user{offset}", 1000) for offset in range(50)))
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, before[1]))
    try:
        with pytest.raises((lmdb.Error, OSError, RelayError)):
            compact(store)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, ignored)
    assert not store.is_compacting
    assert not (store.path / "1.new").exists()
    assert store.user_count == 50
    apply(store, record(50, "later"))
    compact(store)
    assert store.user_count == 51


def test_a_store_whose_newest_files_were_removed_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = HistoryStore.open(tmp_path, MIB)
    store.trust(ORIGIN)
    with monkeypatch.context() as patches:
        patches.setattr(HistoryStore, "_abandon_compaction", lambda store: None)
        after_the_switch(patches)
        with pytest.raises(DiedError):
            compact(store)
    store._files.close()
    (tmp_path / "1.new").rename(tmp_path / "elsewhere")
    with pytest.raises(RelayError, match=r"damaged: .*1 is missing.*delete the folder"):
        HistoryStore.open(tmp_path, MIB)
