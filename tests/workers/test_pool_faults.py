"""Faults of Mooncake's real processes: a prefix is missed, its scores stay exact, and nothing waits for the store."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from relaygr.worker.pool import metrics, segments
from relaygr.worker.pool.stores.contract import ObjectKey, PutOutcome, StoredObject, StoreDownError
from tests.waiting import until
from tests.worlds.invariants import check_invariants
from tests.worlds.pool import Mooncake, mooncake
from tests.worlds.pooled import PooledWorld
from tests.worlds.real_executor import behaviours_of

pytestmark = pytest.mark.outage

LENGTH = 200
PAGES = 192 // 16
PATIENCE_S = 60.0
"""Longer than a call to a store that hangs."""


@pytest.fixture(autouse=True)
def small_objects(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(segments, "_LEAST_BYTES", 1)
    yield
    PooledWorld.close_all()


@pytest.fixture
def processes(tmp_path: Path) -> Iterator[Mooncake]:
    with mooncake(tmp_path / "mooncake", size_bytes=16 << 20) as running:
        yield running


def worker(processes: Mooncake, folder: Path, name: str) -> PooledWorld:
    return PooledWorld(processes, folder / name)


def write(world: PooledWorld, user: str = "ann", visits: int = 2) -> None:
    version = world.put(user, LENGTH)
    for visit in range(visits):
        world.visit(user, version, f"{user}-{time.monotonic_ns()}-{visit}")


def keys(world: PooledWorld, user: str = "ann") -> list[ObjectKey]:
    (entry,) = world.cache.ledger.dram.index.of_user(user)
    return [each.key for each in world.pool._segments.of(entry.key, entry.key.length)]


def count(outcome: str) -> float:
    return metrics.FETCHES.labels(outcome)._value.get()


def serve(world: PooledWorld, user: str = "ann", request: str = "r") -> None:
    """A job and its request, 200 ms later. Both end without a wait for the store, with exact scores."""
    version, jobs = world.put(user, LENGTH), len(world.outbox.jobs)
    world.queue_job(user, version, request)
    end_s = time.monotonic() + 1
    while len(world.outbox.jobs) == jobs and time.monotonic() < end_s:
        world.run()
        time.sleep(0.001)
    world.clock.advance_us(200_000)
    world.run()
    assert len(world.outbox.jobs) == jobs + 1
    began_s = time.monotonic()
    work = world.rank(user, version, request)
    assert time.monotonic() - began_s < 2
    world.assert_exact(work, behaviours_of(LENGTH))
    check_invariants(world.cache)


def write_until_there(world: PooledWorld) -> None:
    """Writes ann's prefix until the store has it, and answers."""
    end_s = time.monotonic() + PATIENCE_S
    while time.monotonic() < end_s:
        with contextlib.suppress(StoreDownError):
            if all(world.pool._store.has(keys(world))):
                return
        write(world, visits=1)
    raise AssertionError("the prefix was not written again")


def recover(world: PooledWorld) -> None:
    """Lets the time pass in which a worker tries the store again, until it answers."""

    def try_again() -> None:
        world.clock.advance_us(100_000)
        world.run()
        world.wake()
        time.sleep(0.05)

    until(lambda: not (metrics.AWAY._value.get() or world.pool._fetches), "the store answers", PATIENCE_S, try_again)


def test_prefixes_pass_from_worker_to_worker(processes: Mooncake, tmp_path: Path) -> None:
    write(worker(processes, tmp_path, "a"))
    before = count("loaded")
    serve(worker(processes, tmp_path, "b"))
    assert count("loaded") == before + 1


def test_a_holder_that_dies_costs_misses_and_its_objects_are_written_anew(processes: Mooncake, tmp_path: Path) -> None:
    first = worker(processes, tmp_path, "a")
    write(first)
    processes.processes[-1].kill()
    processes.processes[-1].wait()
    before = count("loaded")
    serve(worker(processes, tmp_path, "b"))
    assert count("loaded") == before
    processes.start_holder()
    write_until_there(first)  # The master forgets a dead holder after some seconds.
    serve(worker(processes, tmp_path, "c"))
    assert count("loaded") == before + 1


def test_a_master_that_dies_and_comes_back_costs_misses(processes: Mooncake, tmp_path: Path) -> None:
    first = worker(processes, tmp_path, "a")
    write(first)
    second = worker(processes, tmp_path, "b")
    processes.processes[0].kill()
    processes.processes[0].wait()
    failed, loaded = count("failed"), count("loaded")
    serve(second)
    second.until(lambda: count("failed") == failed + 1)
    assert metrics.AWAY._value.get() == 1
    serve(second, "bob", "again")
    assert count("failed") == failed + 1 and count("loaded") == loaded
    processes.start_master()
    recover(second)
    write_until_there(first)  # What the master knew is gone.
    serve(worker(processes, tmp_path, "c"))
    assert count("loaded") == loaded + 1


def test_a_holder_that_hangs_keeps_pages_but_no_request(processes: Mooncake, tmp_path: Path) -> None:
    first = worker(processes, tmp_path, "a")
    write(first)
    second = worker(processes, tmp_path, "b")
    processes.processes[-1].send_signal(signal.SIGSTOP)
    serve(second)
    assert second.cache.stats().dram.in_flight >= PAGES and second.pool._running
    processes.processes[-1].send_signal(signal.SIGCONT)
    recover(second)
    second.settle()
    assert second.cache.stats().dram.in_flight == 0
    check_invariants(second.cache)
    serve(second, request="later")


def test_two_calls_that_hang_put_the_tier_away(processes: Mooncake, tmp_path: Path) -> None:
    first = worker(processes, tmp_path, "a")
    for user in ("ann", "bob"):
        write(first, user)
    second = worker(processes, tmp_path, "b")
    processes.processes[-1].send_signal(signal.SIGSTOP)
    for user in ("ann", "bob"):
        serve(second, user, user)
    serve(second, "cid", "cid")
    assert len(second.pool._running) == 2 and len(second.pool._fetches) == 2
    recover(second)
    second.settle()
    check_invariants(second.cache)


def test_a_master_that_hangs_delays_nobody(processes: Mooncake, tmp_path: Path) -> None:
    write(worker(processes, tmp_path, "a"))
    second = worker(processes, tmp_path, "b")
    processes.processes[0].send_signal(signal.SIGSTOP)
    serve(second)
    processes.processes[0].send_signal(signal.SIGCONT)
    recover(second)
    check_invariants(second.cache)


def test_bytes_that_change_in_the_store_are_a_miss(processes: Mooncake, tmp_path: Path) -> None:
    first = worker(processes, tmp_path, "a")
    write(first)
    key = keys(first)[1]
    memory = np.zeros((16, first.built.dram_arena.shape[1]), np.uint8)
    store = processes.open([memory])
    (entry,) = first.cache.ledger.dram.index.of_user("ann")
    segment = first.pool._segments.of(entry.key, entry.key.length)[1]
    rows = memory[: segment.end_page - segment.first_page]
    read = StoredObject(key, (memory[-1][: segments.SEAL_BYTES], *rows))
    store.get([read])
    rows[0, 100] ^= 1
    assert store.remove(key) and store.put(read) is PutOutcome.STORED
    torn = count("torn")
    serve(worker(processes, tmp_path, "b"))
    assert count("torn") == torn + 1 and store.has([key]) == [False]


def test_a_full_store_costs_nothing(processes: Mooncake, tmp_path: Path) -> None:
    filler = np.ones((1, 1 << 20), np.uint8)
    store = processes.open([filler])
    for number in range(64):  # Refused or evicted at about 16.
        store.put(StoredObject(ObjectKey("0", "other", f"{number}"), (filler[0],)))
    first = worker(processes, tmp_path, "a")
    write(first)
    check_invariants(first.cache)
    serve(worker(processes, tmp_path, "b"))


PUT = """
import sys
import numpy as np
from relaygr.worker.pool.stores import store_url
from relaygr.worker.pool.stores.contract import ObjectKey, StoredObject
from relaygr.worker.pool.stores.mooncake import open_store

memory = np.ones(int(sys.argv[3]), np.uint8)
store = open_store(store_url(sys.argv[1]), "relaygr", [memory])
print("up", flush=True)
sys.stdin.readline()
store.put(StoredObject(ObjectKey(*sys.argv[2].split("/")), (memory,)))
"""


def test_a_put_that_is_torn_by_a_death_is_not_read(processes: Mooncake, tmp_path: Path) -> None:
    first = worker(processes, tmp_path, "a")
    write(first)
    store = processes.open()
    key = keys(first)[0]
    assert store.remove(key)
    size = 4 * first.built.dram_arena.shape[1] + segments.SEAL_BYTES
    dying = subprocess.Popen(
        [sys.executable, "-c", PUT, processes.url, str(key), str(size)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=dict(os.environ),
    )  # fmt: skip
    assert dying.stdin is not None and dying.stdout is not None and dying.stdout.readline() == b"up\n"
    processes.processes[-1].send_signal(signal.SIGSTOP)
    dying.stdin.write(b"go\n")
    dying.stdin.flush()
    time.sleep(1)
    dying.kill()
    dying.wait()
    processes.processes[-1].send_signal(signal.SIGCONT)
    assert store.has([key]) == [False]
    loaded = count("loaded")
    serve(worker(processes, tmp_path, "b"))
    assert count("loaded") == loaded
