"""The memory that requests and jobs hold: counted as it is, and bounded."""

from __future__ import annotations

import gc
import tracemalloc
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from relaygr.schemas.ended import Reason
from relaygr.schemas.messages import MAX_BEHAVIOURS, PreInferJob
from relaygr.worker.executor.work import JobOutcome, JobWork, ResolvedPrefix
from relaygr.worker.history.batches import HistoryBatch, HistoryRecord
from relaygr.worker.history.store import HistoryStore, StoreOrigin
from relaygr.worker.model.interface import EngineLimits
from tests.worlds.executor import LIMITS, PAGE_TOKENS, ExecutorWorld, history_of

MIB = 1024 * 1024
RECORD_BYTES = 18 * MAX_BEHAVIOURS


class StoredHistories:
    """A history store that has caught up."""

    def __init__(self, store: HistoryStore) -> None:
        self.store = store
        self.get = store.get

    def is_loading(self, partition: int) -> bool:
        return False

    def is_settling(self, partition: int) -> bool:
        return False

    def deleted_at_ms(self, user_id: str) -> int:
        return self.store.deleted_at_ms(user_id, 0)

    def put(self, user_id: str, length: int, number: int = 1) -> None:
        self.store.apply_all([HistoryBatch(0, (HistoryRecord(user_id, number, history_of(user_id, length)),), 0)])


class RealStoreWorld(ExecutorWorld):
    """An executor that reads a real history store."""

    def __init__(self, store: HistoryStore, longest: int = LIMITS.max_prefix_behaviours, **settings) -> None:
        super().__init__(hbm_pages=longest // PAGE_TOKENS, **settings)
        self.engine.limits = EngineLimits(longest, LIMITS.max_suffix_behaviours, LIMITS.max_candidates)
        self.histories = StoredHistories(store)
        resolver = self.executor._resolver
        resolver._histories = self.histories

    @property
    def requests_bytes(self) -> int:
        return self.executor.ranking_outstanding_bytes

    @property
    def jobs_bytes(self) -> int:
        return self.executor._held_by_jobs.outstanding_bytes


@pytest.fixture
def store(tmp_path: Path) -> Iterator[HistoryStore]:
    opened = HistoryStore.open(tmp_path / "history", 64 * MIB)
    opened.trust(StoreOrigin("cluster", "relaygr.history", "topic"))
    yield opened
    opened.close()


def traced_bytes() -> int:
    gc.collect()
    return tracemalloc.get_traced_memory()[0]


@pytest.fixture
def traced() -> Iterator[None]:
    tracemalloc.start()
    yield
    tracemalloc.stop()


@pytest.mark.usefixtures("traced")
def test_three_hundred_requests_with_the_longest_history_hold_no_more_than_the_bound(store: HistoryStore) -> None:
    """Each had its own copy of the record: 690 MB were held where 0.5 MB were counted."""
    world = RealStoreWorld(store, longest=MAX_BEHAVIOURS, ranking_queue_bytes=32 * MIB)
    world.histories.put("u", MAX_BEHAVIOURS)
    before_bytes = traced_bytes()
    for number in range(300):
        world.rank("u", request_id=f"r{number}", budget_us=10_000_000_000)
    held_bytes = traced_bytes() - before_bytes
    assert 2 * RECORD_BYTES < held_bytes < 33 * MIB
    assert held_bytes <= world.requests_bytes <= 32 * MIB
    refused = [reason for _, reason, _ in world.outbox.failures]
    assert set(refused) == {Reason.OVERLOADED}
    assert len(refused) + world.executor.ranking_outstanding == 300
    assert world.executor.ranking_outstanding >= 2


@pytest.mark.usefixtures("traced")
def test_a_request_keeps_only_the_part_of_a_long_history_that_its_model_reads(store: HistoryStore) -> None:
    world = RealStoreWorld(store)
    world.histories.put("u", MAX_BEHAVIOURS)
    world.rank("u", request_id="first", budget_us=10_000_000_000)
    before_bytes = traced_bytes()
    for number in range(100):
        world.rank("u", request_id=f"r{number}", budget_us=10_000_000_000)
    assert traced_bytes() - before_bytes < RECORD_BYTES
    assert not world.outbox.failures
    assert world.executor.ranking_outstanding == 101


def test_what_was_counted_is_free_when_every_request_and_job_has_ended(store: HistoryStore) -> None:
    world = RealStoreWorld(store)
    for number in range(5):
        world.histories.put(f"u{number}", 300)
        world.job(f"u{number}", request_id=f"r{number}")
        world.rank(f"u{number}", request_id=f"r{number}")
        world.rank(f"u{number}", request_id=f"again{number}")
        world.rank(f"u{number}", history=history_of(f"u{number}", 400), request_id=f"inline{number}")
        world.rank(f"u{number}", request_id=f"tight{number}", budget_us=3_000)
    assert world.requests_bytes > 0
    assert world.jobs_bytes > 0
    world.idle_until(world.clock.monotonic_us() + 10_000_000)
    world.mover.finish()
    world.run()
    assert world.executor.ranking_outstanding == 0
    assert (world.requests_bytes, world.jobs_bytes) == (0, 0)


def test_jobs_beyond_the_bound_are_shed(store: HistoryStore) -> None:
    world = RealStoreWorld(store, longest=MAX_BEHAVIOURS, preinfer_queue_bytes=16 * MIB)
    for number in range(4):
        world.histories.put(f"u{number}", MAX_BEHAVIOURS)
        world.job(f"u{number}", request_id=f"r{number}", lead_us=50_000_000)
    assert RECORD_BYTES < world.jobs_bytes <= 16 * MIB
    assert JobOutcome.SHED in world.outbox.jobs


def test_parked_requests_and_jobs_count_their_messages(store: HistoryStore) -> None:
    world = RealStoreWorld(store, preinfer_queue_bytes=MIB)
    version = history_of("u", 120, number=2).version()
    wall_us = world.clock.wall_us()
    for number in range(8):
        job = PreInferJob(f"r{number}", "u", wall_us, wall_us + 100_000, 50, 10, 0, wall_us, version, None)
        received = replace(world.received("preinfer"), value=bytes(100_000))
        world.executor.take_job(JobWork(job, received, world.clock.monotonic_us() + 100_000, 5_000_000))
        world.executor.run_posted()
    assert 800_000 < world.jobs_bytes <= MIB
    world.rank("u", version)
    assert world.requests_bytes > 0
    world.idle_until(6_000_000)
    assert (world.requests_bytes, world.jobs_bytes) == (0, 0)


def test_a_request_that_is_alone_is_served_although_it_exceeds_the_bound(store: HistoryStore) -> None:
    world = RealStoreWorld(store, longest=MAX_BEHAVIOURS, ranking_queue_bytes=MIB)
    world.histories.put("u", MAX_BEHAVIOURS)
    world.rank("u", budget_us=10_000_000_000)
    assert not world.outbox.failures


def test_the_mailbox_counts_while_the_device_thread_is_busy() -> None:
    world = ExecutorWorld(preinfer_queue_bytes=MIB)
    wall_us = world.clock.wall_us()
    job = PreInferJob("r", "u", wall_us, wall_us + 100_000, 50, 10, 0, wall_us, None, None)
    received = replace(world.received("preinfer"), value=bytes(200_000))
    taken = [world.executor.take_job(JobWork(job, received, 0, 0)) for _ in range(4)]
    assert taken == [True, True, False, False]
    world.executor.run_posted()
    assert world.executor.take_job(JobWork(job, received, 0, 0))


def test_a_history_that_two_pieces_of_work_share_counts_once() -> None:
    world = ExecutorWorld()
    world.store.put("u", 300)
    work = world.rank("u")
    prefix = work.held_prefix
    assert isinstance(prefix, ResolvedPrefix)
    assert prefix.holders == 2
    assert world.executor.ranking_outstanding_bytes == work.held_bytes + prefix.held_bytes
    assert prefix.held_bytes >= sum(np.asarray(part).nbytes for part in (prefix.behaviours.items, prefix.features))
