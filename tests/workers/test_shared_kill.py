"""After a kill at any step of any sequence of operations, every prefix in the arena is complete.

While hypothesis's operations run on a real cache, a trace function copies both files of the arena after every line
of the cache, of the arena and of the copy loop: each copy is the state that a successor would find if the process had
been killed there. Each copy is then adopted, and every restored prefix must hold exactly the rows of its key.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import relaygr.worker.cache
import relaygr.worker.shared
from relaygr.worker.cache import PrefixKey
from relaygr.worker.cache.copies import CopyRequest
from relaygr.worker.shared.dram_tier import ArenaJournal, MappedFile, SharedArena, TornPageError, map_file
from relaygr.worker.shared.index import ArenaIndex
from relaygr.worker.shared.lock import ArenaLock
from tests.worlds import shared as shared_world
from tests.worlds.cache import PAGE_TOKENS, make_key
from tests.worlds.invariants import check_invariants
from tests.worlds.shared import MODEL, SHAPE, GuardedMover, SharedWorld, holds

WATCHED = (*relaygr.worker.shared.__path__, *relaygr.worker.cache.__path__, shared_world.__file__)
# Few pages, so that nearly every spill takes another prefix's.
SMALL = replace(SHAPE, num_pages=12)


@dataclass(frozen=True)
class Killed:
    """The content of both files, and the line after which the kill came."""

    dram: bytes
    index: bytes
    where: str


class Killer:
    """Records each distinct state of the files."""

    def __init__(self, folder: Path) -> None:
        self._files = {path.name.partition("-")[0]: path for path in folder.iterdir() if "-" in path.name}
        self.states: list[Killed] = []

    @contextmanager
    def at_every_line(self) -> Iterator[None]:
        before = sys.gettrace()
        sys.settrace(self._enter)
        try:
            yield
        finally:
            sys.settrace(before)
        self._look("the end")

    def _enter(self, frame: FrameType, event: str, argument: Any) -> Callable[..., Any] | None:
        return self._line if frame.f_code.co_filename.startswith(WATCHED) else None

    def _line(self, frame: FrameType, event: str, argument: Any) -> Callable[..., Any]:
        self._look(f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}")
        return self._line

    def _look(self, where: str) -> None:
        dram, index = self._files["dram"].read_bytes(), self._files["index"].read_bytes()
        if not self.states or (self.states[-1].dram, self.states[-1].index) != (dram, index):
            self.states.append(Killed(dram, index, where))


class Keys:
    """All keys that were used; they determine the rows of a restored prefix."""

    def __init__(self) -> None:
        self._known: dict[tuple[str, bytes], PrefixKey] = {}

    def make(self, user: str, length: int, changed_at: int | None) -> PrefixKey:
        key = make_key(user, length, changed_at)
        self._known[user, key.chain.digest] = key
        return key

    def of(self, stored: PrefixKey) -> PrefixKey:
        return self._known[stored.user_id, stored.chain.digest]


Step = tuple[str, str, int, int | None]

operations = st.lists(
    st.tuples(
        st.sampled_from(["spill", "spill", "spill", "fail", "reload", "invalidate", "drop", "restart"]),
        st.sampled_from(["ann", "bob", "cas"]),
        st.integers(1, 5 * PAGE_TOKENS),
        st.sampled_from([None, None, 0, 20]),
    ),
    min_size=1,
    max_size=10,
)


def perform(world: SharedWorld, kind: str, key: PrefixKey) -> None:
    """One operation and its copies."""
    if kind in ("spill", "fail"):
        if world.cache.peek(key).hbm_behaviours < key.length:
            world.store(key)
        world.cache.transfers.spill(key)
        world.mover.run(copied=kind == "spill")
    elif kind == "reload":
        world.cache.transfers.start_reload(key, 10**9, 0)
        world.mover.run()
    elif kind == "invalidate":
        world.cache.invalidate_user(key.user_id)
    else:
        world.cache.drop_namespace(MODEL)


class Successor:
    """Adopts the arena of a killed process."""

    def __init__(self, folder: Path, inode: int) -> None:
        folder.mkdir()
        (folder / "epoch").write_text("1000\n")
        self._lock = ArenaLock(folder)
        self._lock.acquire()
        self._inode = inode

    def check(self, state: Killed, keys: Keys) -> int:
        """Raises AssertionError unless every restored prefix is complete. Returns the number of prefixes."""
        dram, index = (np.frombuffer(bytearray(each), np.uint8) for each in (state.dram, state.index))
        path = Path("as it was")
        arena = SharedArena(SMALL, self._lock, MappedFile(path, dram, self._inode), MappedFile(path, index, 0))
        stored = arena.adopt(MODEL)
        rows = dram.view(np.int64).reshape(SMALL.num_pages, PAGE_TOKENS)
        for entry in stored:
            assert holds(entry, keys.of(entry.key), rows), f"killed after {state.where}: {entry.key.user_id} is torn"
            arena.journal.verify(entry.pages)
        return len(stored)


def live_through(folder: Path, steps: list[Step]) -> tuple[list[Killed], Keys, int]:
    """Every state of the files during the steps, the keys used, and the DRAM file's inode."""
    keys = Keys()
    world = SharedWorld(folder, shape=SMALL)
    killer = Killer(folder)
    for kind, user, length, changed_at in steps:
        key = keys.make(user, length, changed_at)
        with killer.at_every_line():
            if kind == "restart":
                world.die()
                world = SharedWorld(folder, shape=SMALL)
            else:
                perform(world, kind, key)
        check_invariants(world.cache)
    [dram] = folder.glob("dram-*")
    return killer.states, keys, dram.stat().st_ino


@pytest.mark.slow
@settings(max_examples=30, deadline=None)
@given(operations)
def test_after_a_kill_at_any_step_every_restored_prefix_is_complete(steps: list[Step]) -> None:
    with tempfile.TemporaryDirectory() as name:
        states, keys, inode = live_through(Path(name) / "life", steps)
        coroner = Successor(Path(name) / "after", inode)
        for state in states:
            coroner.check(state, keys)


def test_kills_happen_during_copies_and_during_records(tmp_path: Path) -> None:
    """The property above has a value only if kills happen in the middle of an operation."""
    steps: list[Step] = [("spill", user, 4 * PAGE_TOKENS, None) for user in ("ann", "bob", "cas")]
    states, keys, inode = live_through(tmp_path / "life", steps)
    places = {state.where.partition(":")[0] for state in states}
    assert places >= {"index.py", "shared.py"}
    coroner = Successor(tmp_path / "after", inode)
    assert {coroner.check(state, keys) for state in states} == {0, 1, 2}


def test_a_kill_while_an_index_is_formatted_restores_nothing_of_the_old_one(tmp_path: Path) -> None:
    steps: list[Step] = [("spill", user, 3 * PAGE_TOKENS, None) for user in ("ann", "bob")]
    states, keys, inode = live_through(tmp_path / "life", steps)
    assert Successor(tmp_path / "before", inode).check(states[-1], keys) == 2
    [index] = (tmp_path / "life").glob("index-*")
    with index.open("r+b") as file:
        file.write(b"relaygr.arena.0\0")
    killer = Killer(tmp_path / "life")
    with killer.at_every_line():
        ArenaIndex(map_file(index, SMALL.index_bytes).bytes, SMALL.num_pages, SMALL.slot_bytes).format(
            SMALL.identity(inode)
        )
    coroner = Successor(tmp_path / "after", inode)
    assert len(killer.states) > 3
    assert {coroner.check(state, keys) for state in killer.states} == {0}


@pytest.mark.parametrize("broken", ["removed", "published too early"])
def test_the_property_fails_for_a_journal_that_breaks_the_rule(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, broken: str
) -> None:
    if broken == "removed":
        monkeypatch.setattr(ArenaJournal, "removed", lambda self, entry: None)
    else:
        monkeypatch.setattr(GuardedMover, "_copy", sealed_before_it_is_copied)
    steps: list[Step] = [("spill", user, 4 * PAGE_TOKENS, None) for user in ("ann", "bob", "cas", "ann")]
    states, keys, inode = live_through(tmp_path / "life", steps)
    coroner = Successor(tmp_path / "after", inode)
    with pytest.raises((AssertionError, TornPageError)):
        for state in states:
            coroner.check(state, keys)


def sealed_before_it_is_copied(mover: GuardedMover, request: CopyRequest) -> None:
    mover.guard.seal(request.target_pages)
