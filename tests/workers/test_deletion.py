"""After a tombstone no byte of the user's prefix is left: not in the pages, not in the index."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from relaygr.worker.cache import Tier
from relaygr.worker.shared.index import HEADER_BYTES, ArenaIndex, index_bytes
from tests.worlds.cache import make_key
from tests.worlds.invariants import check_invariants
from tests.worlds.real_executor import RealExecutorWorld
from tests.worlds.shared import SharedWorld

ANN, BOB = make_key("ann", 100), make_key("bob", 60)
MANY = 1 << 30


def clean(world: SharedWorld) -> None:
    for tier in Tier:
        pages = world.cache.begin_cleaning(tier, MANY)
        check_invariants(world.cache)
        world.arenas[tier][pages] = 0
        world.cache.end_cleaning(tier)
        check_invariants(world.cache)


def files(folder: Path) -> bytes:
    return b"".join(path.read_bytes() for path in sorted(folder.iterdir()) if path.is_file())


def test_the_arena_and_its_index_hold_no_byte_of_a_deleted_user(tmp_path: Path) -> None:
    world = SharedWorld(tmp_path)
    world.spilled(ANN)
    world.spilled(BOB)
    (entry,) = world.cache.ledger.dram.index.of_user("ann")
    rows = [world.arenas[Tier.DRAM][page].tobytes() for page in entry.pages]
    marks = [b"ann", *ANN.chain.blocks, *rows]
    assert all(mark in files(tmp_path) for mark in marks)
    world.cache.invalidate_user("ann")
    clean(world)
    left = files(tmp_path)
    assert [mark for mark in marks if mark in left] == []
    assert not any(row in world.arenas[Tier.HBM].tobytes() for row in rows)
    assert b"bob" in left
    assert world.cache.peek(BOB).dram_behaviours == BOB.length


def test_a_successor_zeroes_what_a_death_between_removal_and_zeroing_left(tmp_path: Path) -> None:
    world = SharedWorld(tmp_path)
    world.spilled(ANN)
    world.spilled(BOB)
    (entry,) = world.cache.ledger.dram.index.of_user("ann")
    rows = [world.arenas[Tier.DRAM][page].tobytes() for page in entry.pages]
    index = world.shared._index
    index._words[int(entry.pages[0]), 0] = 0
    world.die()
    successor = SharedWorld(tmp_path)
    clean(successor)
    left = files(tmp_path)
    assert not any(mark in left for mark in (b"ann", *rows))
    assert successor.cache.peek(BOB).dram_behaviours == BOB.length


def test_pages_that_a_reader_holds_are_zeroed_when_it_has_left(tmp_path: Path) -> None:
    world = SharedWorld(tmp_path)
    handle = world.compute(ANN)
    rows = [world.arenas[Tier.HBM][page].tobytes() for page in handle.pages]
    world.cache.invalidate_user("ann")
    clean(world)
    assert all(row in world.arenas[Tier.HBM].tobytes() for row in rows)
    world.cache.release(handle)
    clean(world)
    assert not any(row in world.arenas[Tier.HBM].tobytes() for row in rows)


def test_pages_in_use_and_pages_that_are_clean_already_are_left_alone(tmp_path: Path) -> None:
    world = SharedWorld(tmp_path)
    clean(world)
    assert world.cache.begin_cleaning(Tier.DRAM, MANY).size == 0
    world.spilled(BOB)
    assert world.cache.begin_cleaning(Tier.DRAM, MANY).size == 0
    check_invariants(world.cache)


def test_the_executor_zeroes_pages_and_scratch_within_moments_of_a_tombstone() -> None:
    world = RealExecutorWorld("plain")
    version = world.put("ann", 200)
    world.rank("ann", version)
    with world.erases("ann"):
        del world.histories["ann"]
        world.executor.post(lambda: world.executor.user_deleted("ann"))


def test_a_dropped_record_leaves_no_byte_in_any_of_its_slots() -> None:
    file = np.zeros(index_bytes(8, 128), np.uint8)
    index = ArenaIndex(file, 8, 128)
    record = b"secret--" * 30
    assert index.put(record, np.array([5, 2, 7, 1], np.int32), used_us=1, stamp=1)
    assert index.get(5) == record
    index.drop(5)
    assert b"secret" not in file[HEADER_BYTES:].tobytes()
    assert index.heads().size == 0
