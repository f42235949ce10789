"""Prefixes under computation append events, and call none of the requests and jobs that wait for them."""

from __future__ import annotations

import ast
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import relaygr.worker.executor.executor
from relaygr.schemas.messages import Path as AnswerPath
from relaygr.worker.cache.results import PendingOutcome
from relaygr.worker.executor.events import Change, ComputedTooLate, DeviceFailed, PrefixComputed, PrefixLeft
from relaygr.worker.executor.job_admission import MAX_UNCOUNTED_PASSES
from relaygr.worker.executor.prefixes import ChunkReadiness
from relaygr.worker.executor.resolver import Scored
from relaygr.worker.executor.waits import Timers
from relaygr.worker.executor.work import Impression, PrefixWork, RankingWork, ResolvedPrefix
from relaygr.worker.history.resolve import StoredHistory
from tests.worlds.executor import ExecutorWorld, history_of

FOLDER = Path(relaygr.worker.executor.executor.__file__).parent
ORDER = (
    "device_record",
    "schedulable",
    "measured",
    "backlog",
    "order",
    "chunks",
    "routes",
    "waits",
    "work",
    "impressions",
    "resolver",
    "job_admission",
    "parts",
    "events",
    "capacity",
    "reloads",
    "prefixes",
    "look_up",
    "serving",
    "ends",
    "requests",
    "jobs",
    "warm_up",
    "batches",
    "executor",
    "status",
)
"""Each module imports only modules before it."""


class PrefixWorld:
    """The prefixes of an executor that never steps."""

    def __init__(self, hbm_pages: int = 128) -> None:
        self.world = ExecutorWorld(hbm_pages=hbm_pages)
        self.scheduler = self.world.executor._scheduler
        self.prefixes = self.world.executor._prefixes

    def resolve(self, user_id: str, length: int) -> ResolvedPrefix:
        version = self.world.store.put(user_id, length)
        resolver = self.world.executor._resolver
        return resolver.prefix(user_id, resolver.history(user_id, version, None, 0), 0, Scored(0, 10))

    def request(self, user_id: str, length: int, budget_us: int = 50_000) -> RankingWork:
        """A request that waits for its prefix, queued."""
        now_us = self.world.clock.monotonic_us()
        work = RankingWork(None, None, None, 0, now_us + budget_us, now_us + budget_us)  # type: ignore[arg-type]
        work.impression = Impression(user_id, "r")
        work.prefix = self.resolve(user_id, length)
        work.latest_start_us = work.answer_by_us
        self.prefixes.compute(work.prefix, None, float(length), request=work)
        return work

    def run(self) -> ChunkReadiness:
        """The next chunk of the most urgent prefix, if it is ready."""
        now_us = self.world.clock.monotonic_us()
        work = self.scheduler.pick(now_us)
        assert isinstance(work, PrefixWork)
        ready = self.prefixes.prepare(work, now_us)
        if ready is ChunkReadiness.READY:
            self.prefixes.run(work, now_us)
        return ready


def test_a_complete_prefix_is_a_change_whose_handle_pins_it() -> None:
    world = PrefixWorld()
    work = world.request("u", 50)
    assert world.run() is ChunkReadiness.READY
    (change,) = world.prefixes.changes
    event = change.event
    assert isinstance(event, PrefixComputed) and event.handle is not None
    assert change.requests == [work]
    assert (event.handle.tokens, event.handle.complete) == (50, True)
    assert world.prefixes.by_user == {}
    world.world.cache.release(event.handle)


def test_a_request_that_would_be_late_gets_an_event_before_the_chunk() -> None:
    world = PrefixWorld()
    late = world.request("u", 50, budget_us=1)
    assert world.run() is ChunkReadiness.DROPPED
    assert list(world.prefixes.changes) == [Change([late], [], ComputedTooLate(world.world.clock.monotonic_us()))]
    assert world.world.engine.chunks == []


def test_a_prefix_that_was_invalidated_is_left_by_its_requests_which_look_again() -> None:
    world = PrefixWorld()
    work = world.request("u", 300)
    world.run()
    world.world.cache.invalidate_user("u")
    assert world.run() is ChunkReadiness.DROPPED
    (change,) = world.prefixes.changes
    assert isinstance(change.event, PrefixLeft) and (change.requests, change.jobs) == ([work], [])
    assert work.path is AnswerPath.FULL
    assert world.world.cache.stats().hbm.in_flight == 0


def test_a_failed_chunk_fails_the_requests_of_its_prefix() -> None:
    world = PrefixWorld()
    work = world.request("u", 50)
    world.world.engine.fail_next = error = RuntimeError("kernel failed")
    world.run()
    assert list(world.prefixes.changes) == [Change([work], [], DeviceFailed(error))]
    assert world.prefixes.by_user == {}


def test_a_second_request_on_the_scratch_pages_waits_for_the_first() -> None:
    world = PrefixWorld(hbm_pages=1)
    first, second = world.request("u", 200), world.request("v", 200)
    assert world.run() is ChunkReadiness.READY
    assert isinstance(world.prefixes.scratch_user, PrefixWork)
    world.scheduler.remove(world.prefixes.scratch_user)
    assert world.run() is ChunkReadiness.SCRATCH_BUSY
    assert not world.prefixes.changes
    assert [work.waiters for work in (world.prefixes.scratch_user, world.scheduler.ranking.peek())] == [
        [first], [second],
    ]  # fmt: skip


def test_a_request_that_the_scratch_pages_can_not_serve_yet_counts_the_computation_that_has_them():
    world = ExecutorWorld(hbm_pages=16)
    version = world.store.put("u", 400)
    world.rank("u", version, "first", budget_us=100_000)
    urgent = world.rank("u", version, "urgent", budget_us=6_000)
    world.executor.step()
    assert world.engine.chunks == [(0, 96)]
    assert urgent.path is AnswerPath.TRUNCATED, "400 tokens more, behind those of the first request, would be too late"
    assert urgent.started_us is None
    world.run()
    assert [work.request.request_id for work in world.outbox.ranked_works] == ["first", "urgent"]


def test_a_late_request_ends_its_lease_before_its_prefix_takes_pages() -> None:
    world = ExecutorWorld(hbm_pages=32)
    world.job("u", world.store.put("u", 300), "late")
    world.run()
    other = replace(history_of("u", 300, number=2), features=np.array([7], "<i8"))
    world.store.histories["u"] = StoredHistory(other, other.chain())
    world.rank("u", other.version(), "late", budget_us=5_000)
    world.rank("u", other.version(), "in time", budget_us=50_000)
    world.clock.advance_us(4_500)
    world.run()
    assert [work.request.request_id for work, _, _ in world.outbox.failures] == ["late"]
    assert [work.request.request_id for work in world.outbox.ranked_works] == ["in time"]
    stats = world.cache.stats()
    assert (stats.no_room, stats.fills) == ({}, {PendingOutcome.PUBLISHED: 2}), "the leased prefix was evicted for it"


def test_the_job_admission_counts_ranking_passes_without_any_job() -> None:
    world = PrefixWorld()
    told: list[tuple[float, int]] = []
    admission, capacity = world.world.executor._parts.admission, world.world.executor._capacity
    admission._buckets.count_ranking = lambda device_us, at_us: told.append((device_us, at_us))  # type: ignore[method-assign]
    work = world.request("u", 50)
    for now_us in range(MAX_UNCOUNTED_PASSES):
        capacity.pass_took([work], 5, now_us)
    assert told == [(5, now_us) for now_us in range(MAX_UNCOUNTED_PASSES)]
    prefix = world.prefixes.by_user["u"]
    work.was_announced = True
    capacity.chunk_took(prefix, 5, MAX_UNCOUNTED_PASSES)
    prefix.waiters.clear()
    prefix.idle_class = None
    capacity.chunk_took(prefix, 5, MAX_UNCOUNTED_PASSES)
    admission.count_rankings()
    assert len(told) == MAX_UNCOUNTED_PASSES, "neither a prefix for which a job had come, nor pre-infer"


def test_timers_return_the_time_until_the_next_call() -> None:
    timers = Timers()
    assert timers.next_at_us == float("inf")
    timers.at(30, lambda: None)
    timers.at(10, lambda: None)
    assert timers.next_at_us == 10
    timers.run_due(10)
    assert timers.next_at_us == 30
    timers.run_due(30)
    assert timers.next_at_us == float("inf")


@pytest.mark.parametrize("module", ORDER)
def test_the_modules_of_the_executor_import_one_way(module: str) -> None:
    tree = ast.parse((FOLDER / f"{module}.py").read_text(encoding="utf-8"))
    imported = {
        node.module.rpartition(".")[2]
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("relaygr.worker.executor.")
    }
    assert imported <= set(ORDER[: ORDER.index(module)])


def test_the_order_names_every_module() -> None:
    assert {path.stem for path in FOLDER.glob("*.py")} == {*ORDER, "thread", "__init__"}
