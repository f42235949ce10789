"""A worker that was killed and restarted: the prefixes that it restores from its arena, and those it must not.

The cache is the real one over a toy arena (`tests.worlds.shared`); every hit is compared with the stamps of its prefix.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import structlog
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import REGISTRY

from relaygr.runtime.limits import Memory
from relaygr.schemas.digest import DIGEST_BYTES
from relaygr.schemas.messages import PrefixSource
from relaygr.worker import memory
from relaygr.worker.cache import Miss, MissReason, PendingOutcome, PendingPrefix, PrefixKey, SpillOutcome, Tier
from relaygr.worker.cache.entries import CacheEntry
from relaygr.worker.cache.journal import StoredEntry
from relaygr.worker.device import CpuDevice
from relaygr.worker.kv import DramGeometry, DramKvDtype, PrefixLayout
from relaygr.worker.memory import MemoryPlan
from relaygr.worker.model.engine import NoMemoryForWeightsError
from relaygr.worker.process import prepare
from relaygr.worker.process.prepare import _require_memory
from relaygr.worker.settings import WorkerSettings
from relaygr.worker.shared import dram_tier
from relaygr.worker.shared.dram_tier import (
    ArenaShape,
    SharedArena,
    TornPageError,
    delete_abandoned,
    make_room,
    map_file,
)
from relaygr.worker.shared.index import HEADER_BYTES, ArenaIndex
from relaygr.worker.shared.lock import ArenaLock
from relaygr.worker.shared.record import IndexRecord, pack
from tests.workers.test_shared_index import records
from tests.worlds.cache import GEOMETRY, PAGE_TOKENS, CacheWorld, make_key
from tests.worlds.invariants import check_invariants
from tests.worlds.shared import DRAM_PAGES, MODEL, SHAPE, SharedWorld, holds

ANN, BOB = make_key("ann", 100), make_key("bob", 60)


def reload(world: CacheWorld, key: PrefixKey) -> None:
    """Reloads the prefix from DRAM and reads every row."""
    pending = world.cache.transfers.start_reload(key, deadline_us=10**9, now_us=0)
    assert isinstance(pending, PendingPrefix), pending
    world.mover.run()
    assert pending.outcome is PendingOutcome.PUBLISHED
    world.cache.release(world.hit(key))


def reload_fails(world: CacheWorld, key: PrefixKey) -> None:
    pending = world.cache.transfers.start_reload(key, deadline_us=10**9, now_us=0)
    assert isinstance(pending, PendingPrefix)
    world.mover.run()
    assert pending.outcome is PendingOutcome.FAILED


def left_by(folder: Path, *keys: PrefixKey) -> None:
    """A worker with these prefixes in DRAM is killed."""
    world = SharedWorld(folder)
    for key in keys:
        world.spilled(key)
    world.die()


def users(stored: tuple[StoredEntry, ...]) -> list[str]:
    return [each.key.user_id for each in stored]


@contextlib.contextmanager
def counted(name: str, **labels: str) -> Iterator[list[float]]:
    """The increase of a counter."""

    def read() -> float:
        return REGISTRY.get_sample_value(name, labels) or 0.0

    grown: list[float] = []
    before = read()
    yield grown
    grown.append(read() - before)


def path_of(folder: Path, prefix: str) -> Path:
    [path] = folder.glob(f"{prefix}-*")
    return path


class UsedArena:
    """The arena of a long-running worker, and its successors, each of which finds another index.

    Pages were reused many times, so the index holds the bytes of old, dropped records.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.keys: dict[tuple[str, bytes], PrefixKey] = {}
        world = SharedWorld(folder)
        for turn in range(12):
            key = make_key(f"user-{turn % 7}", 30 + 37 * turn % 150, feature=turn // 7)
            self.keys[key.user_id, key.chain.digest] = key
            world.spilled(key)
        assert len(world.cache.stats().evictions) == 2
        world.die()
        self.index = path_of(folder, "index").read_bytes()

    @contextlib.contextmanager
    def successor(self, index: bytes) -> Iterator[SharedWorld]:
        """Starts another second holder."""
        (self._folder / "epoch").write_text("1\n")
        with path_of(self._folder, "index").open("r+b") as file:
            file.write(index)
        world = SharedWorld(self._folder)
        try:
            yield world
        finally:
            world.die()


@pytest.fixture(scope="module")
def much_used(tmp_path_factory: pytest.TempPathFactory) -> UsedArena:
    return UsedArena(tmp_path_factory.mktemp("used"))


# Restored prefixes.


def test_a_killed_worker_comes_back_with_its_prefixes_in_dram(tmp_path: Path) -> None:
    left_by(tmp_path, ANN, BOB)
    world = SharedWorld(tmp_path)
    assert sorted(users(world.restored)) == ["ann", "bob"]
    check_invariants(world.cache)
    for key in (ANN, BOB):
        found = world.cache.acquire(key, 0)
        assert isinstance(found, Miss)
        assert (found.reason, found.dram_behaviours) == (MissReason.IN_DRAM, key.length)
        reload(world, key)


def test_a_planned_stop_keeps_the_prefixes_too(tmp_path: Path) -> None:
    world = SharedWorld(tmp_path)
    world.spilled(ANN)
    world.cache.close()
    world.die()
    assert users(SharedWorld(tmp_path).restored) == ["ann"]


def test_a_second_kill_is_like_the_first(tmp_path: Path) -> None:
    left_by(tmp_path, ANN)
    left_by(tmp_path, BOB)
    world = SharedWorld(tmp_path)
    assert sorted(users(world.restored)) == ["ann", "bob"]
    assert world.lock.arena_epoch == 3


def test_a_restored_prefix_grows_as_any_other(tmp_path: Path) -> None:
    """Only the tail is computed and copied; the other pages are those of the killed worker."""
    left_by(tmp_path, ANN)
    world = SharedWorld(tmp_path)
    grown = make_key("ann", 150)
    reload(world, ANN)
    world.cache.release(world.compute(grown))
    assert world.cache.transfers.spill(grown) is SpillOutcome.STARTED
    world.mover.run()
    world.die()
    successor = SharedWorld(tmp_path)
    [entry] = successor.restored
    assert entry.key.length == 150
    reload(successor, grown)


def test_the_order_of_use_survives_a_kill(tmp_path: Path) -> None:
    world = SharedWorld(tmp_path)
    for key in (ANN, BOB):
        world.spilled(key)
    world.cache.transfers.start_reload(ANN, deadline_us=10**9, now_us=500)
    world.mover.run()
    world.die()
    assert users(SharedWorld(tmp_path).restored) == ["bob", "ann"]


def test_a_full_tier_is_restored_and_then_evicts(tmp_path: Path) -> None:
    keys = [make_key(f"user-{number}", 14 * PAGE_TOKENS) for number in range(4)]
    left_by(tmp_path, *keys)
    world = SharedWorld(tmp_path)
    assert len(world.restored) == DRAM_PAGES // 15
    world.spilled(make_key("late", 100))
    check_invariants(world.cache)
    world.die()
    assert len(SharedWorld(tmp_path).restored) == 4


def test_a_record_that_was_read_ahead_and_has_changed_is_read_again(tmp_path: Path) -> None:
    """A standby decodes the index while the active worker still writes it."""
    active = SharedWorld(tmp_path)
    active.spilled(ANN)
    active.spilled(BOB)
    lock = ArenaLock(tmp_path)
    standby = SharedArena.attach(tmp_path, SHAPE, CpuDevice(), lock)
    assert standby.read_ahead() == 2
    active.cache.invalidate_user("bob")
    active.spilled(make_key("cas", 40))
    active.die()
    lock.acquire()
    assert sorted(users(standby.adopt(MODEL))) == ["ann", "cas"]


def test_before_it_is_restored_the_tier_allocates_no_pages(tmp_path: Path) -> None:
    """A worker may join its group while it restores: a spill at that time could overwrite a stored prefix."""
    left_by(tmp_path, ANN)
    world = SharedWorld(tmp_path, restores=False)
    world.store(BOB)
    assert world.cache.transfers.spill(BOB) is SpillOutcome.NO_ROOM
    world.cache.restore(world.restored, 0)
    assert world.cache.transfers.spill(BOB) is SpillOutcome.STARTED
    world.mover.run()
    reload(world, ANN)


# Dropped prefixes.


@pytest.mark.parametrize("forget", ["invalidate", "drop_model"])
def test_a_removed_prefix_is_not_restored(tmp_path: Path, forget: str) -> None:
    world = SharedWorld(tmp_path)
    world.spilled(ANN)
    if forget == "invalidate":
        world.cache.invalidate_user("ann")
    else:
        world.cache.drop_namespace(ANN.namespace)
    world.die()
    assert SharedWorld(tmp_path).restored == ()


def test_an_unfinished_copy_is_not_restored(tmp_path: Path) -> None:
    world = SharedWorld(tmp_path)
    world.store(ANN)
    world.cache.transfers.spill(ANN)
    world.mover.start()
    world.die()
    assert SharedWorld(tmp_path).restored == ()


def test_another_models_prefixes_are_freed(tmp_path: Path) -> None:
    left_by(tmp_path, ANN)
    with counted("relaygr_arena_prefixes_total", outcome="other_model") as grown:
        world = SharedWorld(tmp_path, model=b"model-2")
    assert grown == [1]
    assert world.restored == ()
    world.die()
    assert SharedWorld(tmp_path).restored == (), "and are gone for their own model too: their pages were given away"


def test_a_torn_page_fails_its_reload_and_drops_its_prefix(tmp_path: Path) -> None:
    left_by(tmp_path, ANN, BOB)
    world = SharedWorld(tmp_path)
    [ann] = [entry for entry in world.restored if entry.key.user_id == "ann"]
    world.shared.tensor[int(ann.pages[3]), 5] ^= 1
    with counted("relaygr_arena_pages_verified_total", outcome="torn") as grown:
        reload_fails(world, ANN)
    assert grown == [1]
    found = world.cache.acquire(ANN, 0)
    assert isinstance(found, Miss)
    assert found.reason is MissReason.ABSENT
    reload(world, BOB)
    check_invariants(world.cache)
    world.die()
    assert users(SharedWorld(tmp_path).restored) == ["bob"]


def test_pages_are_verified_once(tmp_path: Path) -> None:
    left_by(tmp_path, ANN)
    world = SharedWorld(tmp_path)
    with counted("relaygr_arena_pages_verified_total", outcome="whole") as grown:
        for _ in range(2):
            reload(world, ANN)
            world.evict_hbm()
    assert grown == [float(GEOMETRY.pages_for(102))]


def test_a_truncated_dram_file_serves_nothing(tmp_path: Path) -> None:
    left_by(tmp_path, ANN)
    with path_of(tmp_path, "dram").open("r+b") as file:
        file.truncate(GEOMETRY.page_bytes)
    world = SharedWorld(tmp_path)
    reload_fails(world, ANN)


def test_a_dram_file_that_was_replaced_drops_the_index(tmp_path: Path) -> None:
    left_by(tmp_path, ANN)
    dram = path_of(tmp_path, "dram")
    dram.rename(tmp_path / "old")
    with structlog.testing.capture_logs() as logs:
        world = SharedWorld(tmp_path)
    assert world.restored == ()
    [said] = [line for line in logs if line["event"] == "the arena's index is dropped as a whole"]
    assert (said["reason"], said["fields"]) == ("other_arena", ("dram_file",))


@pytest.mark.parametrize(("damage", "reason"), [("header", "torn_header"), ("format", "other_format"), ("emptied", "")])
def test_an_index_of_another_arena_is_dropped_as_a_whole(tmp_path: Path, damage: str, reason: str) -> None:
    left_by(tmp_path, ANN, BOB)
    with path_of(tmp_path, "index").open("r+b") as file:
        if damage == "header":
            file.seek(40)
            file.write(b"?")
        elif damage == "format":
            file.write(b"relaygr.arena.0\0")
        else:
            file.truncate(0)
    with structlog.testing.capture_logs() as logs:
        world = SharedWorld(tmp_path)
    assert world.restored == ()
    said = [line["reason"] for line in logs if line["event"] == "the arena's index is dropped as a whole"]
    assert said == ([reason] if reason else [])
    world.spilled(ANN)
    world.die()
    assert users(SharedWorld(tmp_path).restored) == ["ann"], "the index is valid from then on"


def test_a_torn_record_is_dropped_alone(tmp_path: Path) -> None:
    left_by(tmp_path, ANN, BOB)
    found = SharedWorld(tmp_path)
    [ann] = [entry for entry in found.restored if entry.key.user_id == "ann"]
    found.die()
    with path_of(tmp_path, "index").open("r+b") as file:
        file.seek(4096 + int(ann.pages[0]) * SHAPE.slot_bytes + 68)
        file.write(b"\xff\xff\xff")
    with counted("relaygr_arena_prefixes_total", outcome="torn") as grown:
        assert users(SharedWorld(tmp_path).restored) == ["bob"]
    assert grown == [1]


def test_two_prefixes_with_one_page_are_both_dropped(tmp_path: Path) -> None:
    """No holder writes such an index, so none of its records can be trusted."""
    left_by(tmp_path, ANN, BOB)
    found = SharedWorld(tmp_path)
    ann, bob = sorted(found.restored, key=lambda entry: entry.key.user_id)
    forged = CacheEntry(1, bob.key, 1, pages=bob.pages.copy(), tokens=bob.tokens)
    forged.pages[1:] = ann.pages[1 : bob.pages.size]
    found.shared.journal.published(forged, 0)
    found.die()
    with counted("relaygr_arena_prefixes_total", outcome="overlapping") as grown:
        assert SharedWorld(tmp_path).restored == ()
    assert grown == [2]


# Damage of the index: bytes over any place of it, and slots in the place of other slots. Offsets near the start of
# a slot hit its head, where kind, length and links are.
places = st.one_of(
    st.integers(0, SHAPE.index_bytes - 1),
    st.builds(
        lambda page, offset: HEADER_BYTES + page * SHAPE.slot_bytes + offset,
        st.integers(0, DRAM_PAGES - 1),
        st.integers(0, 63),
    ),
)
words = st.sampled_from([b"head", b"more", bytes(4), b"\xff" * 4, b"\x01\0\0\0"])
written_over = st.tuples(places, st.binary(min_size=1, max_size=80) | words)
misplaced = st.tuples(st.integers(0, DRAM_PAGES - 1), st.integers(0, DRAM_PAGES - 1))


def damaged(index: bytes, over: list[tuple[int, bytes]], slots: list[tuple[int, int]]) -> bytes:
    """The index's bytes after these writes and copies of slots."""
    found = bytearray(index)
    body = memoryview(found)[HEADER_BYTES:]
    for source, target in slots:
        copied = bytes(body[source * SHAPE.slot_bytes : (source + 1) * SHAPE.slot_bytes])
        body[target * SHAPE.slot_bytes : (target + 1) * SHAPE.slot_bytes] = copied
    for at, value in over:
        found[at : at + len(value)] = value[: len(found) - at]
    return bytes(found)


@pytest.mark.slow
@given(over=st.lists(written_over, max_size=6), slots=st.lists(misplaced, max_size=4))
def test_no_damage_of_the_index_makes_a_reload_return_other_rows(
    much_used: UsedArena, over: list[tuple[int, bytes]], slots: list[tuple[int, int]]
) -> None:
    with much_used.successor(damaged(much_used.index, over, slots)) as world:
        check_invariants(world.cache)
        for entry in world.restored:
            try:
                world.shared.journal.verify(entry.pages)
            except TornPageError:
                continue  # A record of long ago, whose pages were given away since: its reload fails.
            key = much_used.keys[entry.key.user_id, entry.key.chain.digest]
            assert holds(entry, key, world.arenas[Tier.DRAM])


@pytest.mark.slow
@given(st.lists(records(), max_size=4))
def test_foreign_records_with_valid_checksums_are_not_restored(
    much_used: UsedArena, foreign: list[IndexRecord]
) -> None:
    file = np.frombuffer(bytearray(much_used.index), np.uint8)
    index = ArenaIndex(file, DRAM_PAGES, SHAPE.slot_bytes)
    for number, record in enumerate(foreign):
        index.put(pack(record), np.array([60 + number, 50 + number, 40 + number], np.int32), number, number)
    with much_used.successor(file.tobytes()) as world:
        assert all((entry.key.user_id, entry.key.chain.digest) in much_used.keys for entry in world.restored)


POSSIBLE = StoredEntry(ANN.held(), np.arange(5, 12, dtype=np.int32), 102, PrefixSource.COMPUTED)
IMPOSSIBLE = {
    "in the slot of a page that is not its first": replace(POSSIBLE, pages=POSSIBLE.pages[::-1].copy()),
    "with a page that the tier does not have": replace(POSSIBLE, pages=np.append(POSSIBLE.pages[:6], np.int32(64))),
    "with a negative page": replace(POSSIBLE, pages=np.append(POSSIBLE.pages[:6], np.int32(-1))),
    "with too few pages": replace(POSSIBLE, pages=POSSIBLE.pages[:6]),
    "with too many pages": replace(POSSIBLE, pages=np.append(POSSIBLE.pages, np.int32(12))),
    "with other tokens than its behaviours have": replace(POSSIBLE, tokens=101),
    "of nobody": replace(POSSIBLE, key=replace(POSSIBLE.key, user_id="")),
    "whose digests are not as many as its blocks": replace(
        POSSIBLE,
        key=replace(POSSIBLE.key, chain=replace(POSSIBLE.key.chain, packed=POSSIBLE.key.chain.packed[:DIGEST_BYTES])),
    ),
}


@pytest.mark.parametrize("entry", [POSSIBLE, *IMPOSSIBLE.values()], ids=["a possible one", *IMPOSSIBLE])
def test_a_record_of_an_impossible_prefix_is_torn(tmp_path: Path, entry: StoredEntry) -> None:
    assert adopted_after(tmp_path, SHAPE, entry) == (["ann"] if entry is POSSIBLE else [])


def test_a_record_of_an_empty_prefix_is_torn(tmp_path: Path) -> None:
    """An empty prefix has no page, so it has no head."""
    shape = replace(SHAPE, layout=PrefixLayout(contextual_tokens=0, tokens_per_behaviour=1))
    nothing = StoredEntry(make_key(length=0).held(), np.empty(0, np.int32), 0, PrefixSource.COMPUTED)
    assert adopted_after(tmp_path, shape, nothing) == []


def adopted_after(folder: Path, shape: ArenaShape, entry: StoredEntry) -> list[str]:
    """Users of the prefixes that a successor restores after the entry, with a valid checksum, was written to slot 5."""
    SharedWorld(folder, shape=shape).die()
    file = map_file(path_of(folder, "index"), shape.index_bytes).bytes
    record = pack(IndexRecord(entry, np.zeros(entry.pages.size, np.uint32), 1))
    assert ArenaIndex(file, DRAM_PAGES, shape.slot_bytes).put(record, np.array([5, 6], np.int32), 1, 1)
    with counted("relaygr_arena_prefixes_total", outcome="torn") as torn:
        found = users(SharedWorld(folder, shape=shape).restored)
    assert torn == [1 - len(found)]
    return found


def test_records_of_a_later_holder_are_foreign(tmp_path: Path) -> None:
    """The epoch was reset, so the writer of these records is not known."""
    left_by(tmp_path, ANN)
    (tmp_path / "epoch").write_text("0\n")
    assert SharedWorld(tmp_path).restored == ()


@pytest.mark.parametrize(
    "shape",
    [
        replace(SHAPE, num_pages=DRAM_PAGES - 1),
        replace(SHAPE, worker_id="worker-01"),
        replace(SHAPE, geometry=DramGeometry(replace(GEOMETRY, num_heads=2, attention_dim=0))),
        replace(SHAPE, geometry=DramGeometry(GEOMETRY, DramKvDtype.INT8)),
    ],
)
def test_an_arena_of_another_shape_is_not_read_and_its_memory_is_freed(tmp_path: Path, shape: ArenaShape) -> None:
    left_by(tmp_path, ANN)
    world = SharedWorld(tmp_path)
    assert make_room(tmp_path, shape, ArenaLock(tmp_path)) == 0
    assert path_of(tmp_path, "dram").exists(), "not while a process uses it"
    world.die()
    make_room(tmp_path, shape, world.lock)
    assert not list(tmp_path.glob("dram-*"))


def test_a_start_without_an_arena_frees_the_one_that_a_killed_worker_left(tmp_path: Path) -> None:
    left_by(tmp_path, ANN)
    assert make_room(tmp_path, None, ArenaLock(tmp_path)) == 0
    assert not list(tmp_path.glob("dram-*")) and not list(tmp_path.glob("index-*"))


def arenas(root: Path) -> set[str]:
    """Group and id of the workers that have one."""
    return {str(path.parent.relative_to(root)) for path in root.rglob("dram-*")}


def test_only_arenas_that_no_process_uses_are_abandoned(tmp_path: Path) -> None:
    for name in ("group/dead", "group/own", "other-group/dead"):
        left_by(tmp_path / name, ANN)
    alive = SharedWorld(tmp_path / "group/alive")
    delete_abandoned(tmp_path / "group/own")
    assert arenas(tmp_path) == {"group/alive", "group/own"}
    alive.die()
    assert len(SharedWorld(tmp_path / "group/own").restored) == 1


def plan_of(dram_bytes: int) -> MemoryPlan:
    return MemoryPlan(0, 0, 0, dram_bytes, 0, 0, 0, 0)


@pytest.mark.parametrize(
    ("free_bytes", "space_bytes", "left"),
    [
        (10**12, 10**12, {"group/dead"}),  # Enough: the worker may come back for it.
        (SHAPE.dram_bytes, 10**12, set()),
        (10**12, SHAPE.dram_bytes - 1, set()),
    ],
)
def test_a_start_that_lacks_memory_frees_that_of_workers_that_do_not_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, free_bytes: int, space_bytes: int, left: set[str]
) -> None:
    left_by(tmp_path / "group/dead", ANN)
    plan = plan_of(SHAPE.dram_bytes + SHAPE.index_bytes)

    def free() -> Memory:
        return Memory(free_bytes if arenas(tmp_path) else 10**12, 10**12)

    monkeypatch.setattr(memory, "available_memory", free)
    monkeypatch.setattr(dram_tier.os, "statvfs", lambda _: SimpleNamespace(f_bavail=space_bytes, f_frsize=1))
    (tmp_path / "group/own").mkdir()
    _require_memory(plan, device_is_host=False, folder=tmp_path / "group/own", shape=SHAPE, taken_bytes=0)
    assert arenas(tmp_path) == left


def test_weights_that_do_not_fit_take_the_memory_that_a_killed_worker_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("group/dead", "group/own"):
        left_by(tmp_path / name, ANN)

    def load_engine(*_: object) -> str:
        if arenas(tmp_path):
            raise NoMemoryForWeightsError("the weights need 1.00 GiB")
        return "an engine"

    monkeypatch.setattr(prepare, "load_engine", load_engine)
    own = ArenaLock(tmp_path / "group/own")
    own.acquire()
    assert prepare._load(WorkerSettings(), tmp_path / "group/own", own) == "an engine"


# The right to write.


def test_a_worker_whose_folder_was_replaced_writes_nothing_more(tmp_path: Path) -> None:
    world = SharedWorld(tmp_path / "worker-00")
    (tmp_path / "worker-00").rename(tmp_path / "elsewhere")
    SharedWorld(tmp_path / "worker-00").die()
    world.store(ANN)
    assert world.cache.transfers.spill(ANN) is SpillOutcome.STARTED
    world.mover.run()
    assert world.cache.peek(ANN).dram_behaviours == 0
    world.cache.release(world.hit(ANN))
    world.die()
    assert SharedWorld(tmp_path / "elsewhere").restored == ()


def test_only_the_holder_of_the_lock_adopts(tmp_path: Path) -> None:
    world = SharedWorld(tmp_path)
    world.die()
    with pytest.raises(ValueError, match="holder of the lock"):
        world.shared.adopt(MODEL)


def test_a_user_who_is_deleted_before_the_restore_is_not_brought_back(tmp_path: Path) -> None:
    """The tombstone was handled while the tier was empty, and forgotten."""
    left_by(tmp_path, ANN, BOB)
    world = SharedWorld(tmp_path, restores=False)
    assert world.cache.invalidate_user("ann") == 0
    world.cache.restore(world.restored, 0)
    check_invariants(world.cache)
    assert world.cache.peek(ANN).dram_behaviours == 0
    assert world.cache.peek(BOB).dram_behaviours == BOB.length
    world.die()
    assert users(SharedWorld(tmp_path).restored) == ["bob"]


def test_a_partition_whose_deletions_were_missed_is_not_brought_back(tmp_path: Path) -> None:
    left_by(tmp_path, ANN, BOB)
    world = SharedWorld(tmp_path, restores=False)
    assert world.cache.invalidate_users(lambda user: user.startswith("b")) == 0
    world.cache.restore(world.restored, 0)
    check_invariants(world.cache)
    assert [world.cache.peek(key).dram_behaviours for key in (ANN, BOB)] == [ANN.length, 0]
    assert world.cache.invalidate_users(lambda _: True) == 1
    assert world.cache.peek(ANN).dram_behaviours == 0
