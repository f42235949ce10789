"""The contract of `relaygr.worker.pool.store`, kept by the store in this process and by Mooncake."""

from __future__ import annotations

import time
from collections.abc import Iterator

import numpy as np
import pytest

from relaygr.worker.pool.store import GetOutcome, Memory, PutOutcome, Store, StoredObject
from tests.worlds.pool import TwinStore, mooncake

FOUND, ABSENT, UNREADABLE = GetOutcome.FOUND, GetOutcome.ABSENT, GetOutcome.UNREADABLE
PAGE = 64 * 1024
SMALL = 16 << 20


@pytest.fixture(scope="module", params=["twin", pytest.param("mooncake", marks=pytest.mark.slow)])
def shared(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Store, Memory]]:
    """A store with room for 16 MiB, and registered memory [64, PAGE]."""
    memory = np.random.default_rng(1).integers(0, 255, (64, PAGE), np.uint8)
    if request.param == "twin":
        twin = TwinStore(SMALL)
        twin.register(memory)
        yield twin, memory
        return
    with mooncake(tmp_path_factory.mktemp("pool"), size_bytes=SMALL) as processes:
        store = processes.client()
        store.register(memory)
        yield store, memory


@pytest.fixture
def store(shared: tuple[Store, Memory]) -> Store:
    shared[0].forget("^")
    return shared[0]


@pytest.fixture
def memory(shared: tuple[Store, Memory]) -> Memory:
    return shared[1]


def test_an_object_comes_back_in_other_pages_scattered(store: Store, memory: Memory) -> None:
    assert store.put(StoredObject("a/1", (memory[0][:32], memory[5], memory[2]))) is PutOutcome.STORED
    memory[40:44] = 0
    assert store.get([StoredObject("a/1", (memory[40][:32], memory[43], memory[41]))]) == [FOUND]
    assert (memory[40][:32] == memory[0][:32]).all()
    assert (memory[43] == memory[5]).all() and (memory[41] == memory[2]).all()
    assert not memory[40][32:].any() and not memory[42].any()


def test_each_object_of_a_call_has_its_own_outcome(store: Store, memory: Memory) -> None:
    store.put(StoredObject("a/1", (memory[0],)))
    store.put(StoredObject("a/2", (memory[1],)))
    assert store.has(["a/1", "a/0", "a/2"]) == [True, False, True]
    asked = [StoredObject(key, (memory[40 + at],)) for at, key in enumerate(("a/1", "a/0", "a/2"))]
    assert store.get(asked) == [FOUND, ABSENT, FOUND]
    assert (memory[40] == memory[0]).all() and (memory[42] == memory[1]).all()


def test_a_key_that_exists_is_not_written_again(store: Store, memory: Memory) -> None:
    store.put(StoredObject("a/1", (memory[0],)))
    assert store.put(StoredObject("a/1", (memory[1],))) is PutOutcome.STORED
    assert store.get([StoredObject("a/1", (memory[40],))]) == [FOUND]
    assert (memory[40] == memory[0]).all()


@pytest.mark.parametrize("asked", [PAGE // 2, 2 * PAGE])
def test_an_object_of_another_size_is_unreadable(store: Store, memory: Memory, asked: int) -> None:
    store.put(StoredObject("a/1", (memory[0],)))
    assert store.get([StoredObject("a/1", (memory.reshape(-1)[40 * PAGE : 40 * PAGE + asked],))]) == [UNREADABLE]


def test_a_key_is_removed_once(store: Store, memory: Memory) -> None:
    for key in ("p/1", "p/12"):
        store.put(StoredObject(key, (memory[0],)))
    store.get([StoredObject("p/1", (memory[40],))])
    assert store.remove("p/1") and not store.remove("p/1")
    assert store.has(["p/1", "p/12"]) == [False, True]


def test_forgetting_removes_what_the_pattern_matches_at_the_beginning_at_once(store: Store, memory: Memory) -> None:
    for key in ("p/m1/u1/a", "p/m2/u1/b", "p/m1/u2/c", "x/p/m1/u1/d"):
        store.put(StoredObject(key, (memory[0],)))
        assert store.has([key]) == [True]
    store.get([StoredObject("p/m1/u1/a", (memory[40],))])
    assert store.forget("^p/[^/]+/u1/") == 2
    assert store.forget("^p/[^/]+/u1/") == 0
    assert store.forget("p/m1/u2") == 1
    assert store.has(["p/m1/u1/a", "p/m2/u1/b", "p/m1/u2/c", "x/p/m1/u1/d"]) == [False, False, False, True]


def test_a_full_store_refuses_or_evicts_at_once_and_keeps_the_rest_readable(store: Store, memory: Memory) -> None:
    outcomes = []
    for number in range(300):
        began_s = time.monotonic()
        outcomes.append(store.put(StoredObject(f"full/{number}", (memory[0],))))
        assert time.monotonic() - began_s < 2
        if outcomes[-1] is not PutOutcome.STORED:
            break
    assert len(outcomes) > 100 and set(outcomes) <= {PutOutcome.STORED, PutOutcome.NO_ROOM}
    there = store.has([f"full/{number}" for number in range(len(outcomes))])
    assert outcomes[-1] is PutOutcome.NO_ROOM or not all(there)
    memory[40] = 0
    assert store.get([StoredObject(f"full/{there.index(True)}", (memory[40],))]) == [FOUND]
    assert (memory[40] == memory[0]).all()
