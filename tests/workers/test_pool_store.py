"""The contract of `relaygr.worker.pool.stores`, kept by each store: one in this process, and Mooncake.

The tests open a store by its URL, as a worker does. A new store is a line of `STORES` and of the fixture `opened`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from relaygr.worker.pool import stores
from relaygr.worker.pool.stores.contract import GetOutcome, Memory, ObjectKey, PutOutcome, Store, StoredObject
from tests.worlds.pool import MemoryStores, mooncake

FOUND, ABSENT, UNREADABLE = GetOutcome.FOUND, GetOutcome.ABSENT, GetOutcome.UNREADABLE
PAGE = 64 * 1024
SMALL = 16 << 20
PREFIX = "shop-1.x"
"""It has what regular expressions and patterns of files read in their own way."""


@contextmanager
def in_memory(_folder: Path) -> Iterator[str]:
    """A store in this process."""
    yield f"memory://contract?bytes={SMALL}"


@contextmanager
def mooncakes(folder: Path) -> Iterator[str]:
    with mooncake(folder, size_bytes=SMALL) as processes:
        yield processes.url


STORES: dict[str, Callable[[Path], AbstractContextManager[str]]] = {"memory": in_memory, "mooncake": mooncakes}
"""Starts a store with room for 16 MiB, and gives its URL."""


@dataclass
class Shared:
    """A store, as two workers that share it see it, and memory uint8 [64, PAGE] of the first one."""

    store: Store
    other: Store
    elsewhere: Store
    """Of workers with another prefix."""
    memory: Memory


@pytest.fixture(scope="module", params=["memory", pytest.param("mooncake", marks=pytest.mark.slow)])
def opened(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shared]:
    memory = np.random.default_rng(1).integers(0, 255, (64, PAGE), np.uint8)
    with pytest.MonkeyPatch.context() as patched, STORES[request.param](tmp_path_factory.mktemp("pool")) as text:
        patched.setitem(stores.STORES, "memory", MemoryStores())
        url = stores.store_url(text)
        module = stores.STORES[url.scheme]
        assert module.missing() is None and module.unreachable(url, 3.0) is None
        yield Shared(*(module.open_store(url, prefix, [memory]) for prefix in (PREFIX, PREFIX, "shop-1yx")), memory)


@pytest.fixture
def shared(opened: Shared) -> Shared:
    for store in (opened.store, opened.elsewhere):
        store.forget(None)
    return opened


@pytest.fixture
def store(shared: Shared) -> Store:
    return shared.store


@pytest.fixture
def memory(shared: Shared) -> Memory:
    return shared.memory


def key(digest: str, user: str = "ann", model: str = "m1") -> ObjectKey:
    return ObjectKey(model, user, digest)


def test_an_object_comes_back_in_other_pages_scattered(store: Store, memory: Memory) -> None:
    assert store.put(StoredObject(key("1"), (memory[0][:32], memory[5], memory[2]))) is PutOutcome.STORED
    memory[40:44] = 0
    assert store.get([StoredObject(key("1"), (memory[40][:32], memory[43], memory[41]))]) == [FOUND]
    assert (memory[40][:32] == memory[0][:32]).all()
    assert (memory[43] == memory[5]).all() and (memory[41] == memory[2]).all()
    assert not memory[40][32:].any() and not memory[42].any()


def test_each_object_of_a_call_has_its_own_outcome(store: Store, memory: Memory) -> None:
    store.put(StoredObject(key("1"), (memory[0],)))
    store.put(StoredObject(key("2"), (memory[1],)))
    asked = [key("1"), key("0"), key("2")]
    assert store.has(asked) == [True, False, True]
    assert store.get([StoredObject(each, (memory[40 + at],)) for at, each in enumerate(asked)]) == [
        FOUND,
        ABSENT,
        FOUND,
    ]
    assert (memory[40] == memory[0]).all() and (memory[42] == memory[1]).all()


def test_a_key_that_exists_is_not_written_again(store: Store, memory: Memory) -> None:
    store.put(StoredObject(key("1"), (memory[0],)))
    assert store.put(StoredObject(key("1"), (memory[1],))) is PutOutcome.STORED
    assert store.get([StoredObject(key("1"), (memory[40],))]) == [FOUND]
    assert (memory[40] == memory[0]).all()


@pytest.mark.parametrize("asked", [PAGE // 2, 2 * PAGE])
def test_an_object_of_another_size_is_unreadable(store: Store, memory: Memory, asked: int) -> None:
    store.put(StoredObject(key("1"), (memory[0],)))
    assert store.get([StoredObject(key("1"), (memory.reshape(-1)[40 * PAGE : 40 * PAGE + asked],))]) == [UNREADABLE]


def test_a_key_is_removed_once(store: Store, memory: Memory) -> None:
    for digest in ("1", "12"):
        store.put(StoredObject(key(digest), (memory[0],)))
    store.get([StoredObject(key("1"), (memory[40],))])
    assert store.remove(key("1")) and not store.remove(key("1"))
    assert store.has([key("1"), key("12")]) == [False, True]


def test_two_workers_share_objects_under_one_prefix_and_none_under_another(shared: Shared) -> None:
    shared.store.put(StoredObject(key("1"), (shared.memory[0],)))
    assert shared.other.get([StoredObject(key("1"), (shared.memory[40],))]) == [FOUND]
    assert (shared.memory[40] == shared.memory[0]).all()
    assert shared.elsewhere.has([key("1")]) == [False] and not shared.elsewhere.remove(key("1"))


def test_forgetting_users_removes_their_objects_of_every_model_and_worker_and_no_others(shared: Shared) -> None:
    of_ann = [key("1"), key("2"), key("1", model="m2")]
    others = [key("1", "bob"), key("1", "an"), key("1", "annn"), key("ann", "cid", "ann"), key("1", ".*")]
    for number, each in enumerate(of_ann + others):
        (shared.other if number % 2 else shared.store).put(StoredObject(each, (shared.memory[0],)))
        assert shared.store.has([each]) == [True]
    shared.elsewhere.put(StoredObject(key("1"), (shared.memory[0],)))
    shared.store.get([StoredObject(key("1"), (shared.memory[40],))])
    assert shared.store.forget({}) == 0
    assert shared.store.forget({"ann", "nobody"}) == len(of_ann)
    assert shared.store.forget({"ann"}) == 0
    assert shared.store.has(of_ann) == [False] * len(of_ann)
    assert shared.store.forget({".*"}) == 1
    assert shared.store.has(others) == [True] * (len(others) - 1) + [False]
    assert shared.elsewhere.has([key("1")]) == [True]


def test_forgetting_everyone_leaves_what_is_under_another_prefix(shared: Shared) -> None:
    for each in (key("1"), key("1", "bob"), key("0", "a0", "probe")):
        shared.other.put(StoredObject(each, (shared.memory[0],)))
    shared.elsewhere.put(StoredObject(key("1"), (shared.memory[0],)))
    assert shared.store.forget(None) == 3 and shared.store.forget(None) == 0
    assert shared.elsewhere.has([key("1")]) == [True]


@pytest.mark.slow
def test_mooncakes_objects_of_earlier_versions_are_found_and_deleted(tmp_path: Path) -> None:
    """Their keys were texts, and this is the text of that time."""
    with mooncake(tmp_path) as processes:
        store = processes.open()
        user, other = "1efa805931e5906ddb1fb0ec83aef3d8", "2" * 32
        for each in (user, other):
            assert store._store.put(f"relaygr/d5f5a12a4fc7534685dce9c1cb14a2fc/{each}/f69b0fba", b"bytes") == 0
        written = [key("f69b0fba", each, "d5f5a12a4fc7534685dce9c1cb14a2fc") for each in (user, other)]
        assert store.has(written) == [True, True]
        assert store.forget({user}) == 1
        assert store.has(written) == [False, True]


def test_a_full_store_refuses_or_evicts_at_once_and_keeps_the_rest_readable(store: Store, memory: Memory) -> None:
    outcomes = []
    for number in range(300):
        began_s = time.monotonic()
        outcomes.append(store.put(StoredObject(key(f"{number}"), (memory[0],))))
        assert time.monotonic() - began_s < 2
        if outcomes[-1] is not PutOutcome.STORED:
            break
    assert len(outcomes) > 100 and set(outcomes) <= {PutOutcome.STORED, PutOutcome.NO_ROOM}
    there = store.has([key(f"{number}") for number in range(len(outcomes))])
    assert outcomes[-1] is PutOutcome.NO_ROOM or not all(there)
    memory[40] = 0
    assert store.get([StoredObject(key(f"{there.index(True)}"), (memory[40],))]) == [FOUND]
    assert (memory[40] == memory[0]).all()
