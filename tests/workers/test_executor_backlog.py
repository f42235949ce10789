"""A backlog of requests whose prefixes are in DRAM, while HBM has room for a few: they wait for room."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path as FilePath

import numpy as np
import pytest

from relaygr.admission.latency import LatencyModel
from relaygr.schemas.messages import HistoryVersion, Path
from relaygr.worker.executor.reloads import ROOM_INTERVAL_US
from relaygr.worker.executor.work import JobOutcome
from tests.waiting import until
from tests.worlds.executor import HIT_US, TOKEN_US, ExecutorWorld
from tests.worlds.real_executor import COEFFICIENTS, TOLERANCE, RealExecutorWorld

LENGTH = 160
PAGES = 10
"""Pages of one prefix."""
USERS = [f"user-{number:02d}" for number in range(12)]


def world_with_all_in_dram(fitting: int = 2, **settings: object) -> tuple[ExecutorWorld, dict[str, HistoryVersion]]:
    """Every user's prefix is in DRAM. HBM has room for so many prefixes, and holds none of theirs."""
    world = ExecutorWorld(hbm_pages=fitting * PAGES, dram_pages=(len(USERS) + 1) * PAGES, **settings)
    versions = {user: world.store.put(user, LENGTH) for user in [*USERS, "another"]}
    for user in [*USERS, *["another"] * fitting]:
        world.rank(user, versions[user], f"first-{user}", budget_us=1_000_000)
        world.run()
        world.mover.finish()
    world.cache.demote(lambda _: True)
    world.outbox.ranked_works.clear()
    world.engine.chunks.clear()
    return world, versions


def finish(world: ExecutorWorld, answers: int) -> None:
    for _ in range(1_000):
        world.run()
        if len(world.outbox.ranked_works) >= answers:
            return
        world.mover.finish()
    raise AssertionError(f"{len(world.outbox.ranked_works)} of {answers} requests were ranked")


def look_ups(world: ExecutorWorld) -> int:
    counted = world.cache.stats()
    return counted.hits + counted.misses.total() + counted.joins.total()


def test_a_backlog_reloads_every_prefix_although_hbm_has_room_for_two():
    """The prefixes of the first requests fill HBM. Without a wait for room, full inference would serve the others."""
    world, versions = world_with_all_in_dram()
    before = look_ups(world)
    for turn in range(2):
        for user in USERS:
            world.rank(user, versions[user], f"r{turn}-{user}", budget_us=20_000_000)
    finish(world, 2 * len(USERS))
    assert Counter(world.outbox.paths) == {Path.DRAM: 2 * len(USERS)}
    assert world.engine.chunks == [], "nothing is computed again"
    assert look_ups(world) - before == 2 * len(USERS), "each request counts once"


def test_each_look_up_of_a_backlog_counts_as_progress_of_the_device_thread():
    """All of a backlog is looked up in one step. On a busy machine the watchdog ended the worker, then its standby."""
    world, versions = world_with_all_in_dram()
    for user in USERS:
        world.clock.advance_us(1_000_000)
        world.rank(user, versions[user], user, budget_us=20_000_000)
        assert world.executor.last_progress_us == world.clock.monotonic_us()


def test_those_that_wait_for_room_are_served_by_their_deadline():
    world, versions = world_with_all_in_dram(fitting=1)
    for number, user in enumerate(reversed(USERS)):
        world.rank(user, versions[user], user, budget_us=20_000_000 - number * 1_000_000)
    finish(world, len(USERS))
    assert [work.request.user_id for work in world.outbox.ranked_works][1:] == USERS[:-1]


def test_a_new_request_does_not_take_the_room_that_an_earlier_one_waits_for():
    world, versions = world_with_all_in_dram(fitting=1)
    world.rank("user-00", versions["user-00"], "r0", budget_us=5_000_000)
    world.rank("user-01", versions["user-01"], "r1", budget_us=5_000_000)
    world.mover.finish()
    world.executor.step()
    assert [work.request.request_id for work in world.outbox.ranked_works] == ["r0"]
    world.rank("user-02", versions["user-02"], "r2", budget_us=5_000_000)
    finish(world, 3)
    assert [work.request.request_id for work in world.outbox.ranked_works] == ["r0", "r1", "r2"]
    assert Counter(world.outbox.paths) == {Path.DRAM: 3}


def test_a_request_waits_for_room_only_while_full_inference_fits():
    world, versions = world_with_all_in_dram(fitting=1)
    world.rank("user-00", versions["user-00"], "slow", budget_us=5_000_000)
    work = world.rank("user-01", versions["user-01"], "short", budget_us=30_000)
    world.run()
    world.idle_until(work.deadline_us - LENGTH * TOKEN_US - HIT_US)
    assert (work.has_ended, work.path) == (True, Path.FULL)
    assert world.clock.monotonic_us() <= work.deadline_us
    finish(world, 2)
    assert world.outbox.paths == [Path.FULL, Path.DRAM]
    assert (world.executor.step() or 0) > ROOM_INTERVAL_US, "nobody waits for room any more"


def test_a_request_does_not_wait_for_room_that_only_leases_hold():
    """A lease lasts until its request arrives, which may take longer than full inference."""
    world, versions = world_with_all_in_dram(fitting=1, lease_margin_ms=60_000)
    world.job("user-00", versions["user-00"], "r0")
    world.run()
    world.mover.finish()
    world.run()
    assert world.outbox.jobs == [JobOutcome.RELOADED]
    work = world.rank("user-01", versions["user-01"], "r1", budget_us=5_000_000)
    world.run()
    assert (work.has_ended, work.path) == (True, Path.FULL)


def test_a_job_that_found_no_room_reloads_its_prefix_when_its_turn_comes():
    world, versions = world_with_all_in_dram(fitting=1)
    world.rank("user-00", versions["user-00"], "r0", budget_us=1_000_000)
    world.job("user-01", versions["user-01"], "r1", lead_us=2_000_000)
    world.mover.finish()
    for _ in range(5):
        world.run()
        world.mover.finish()
    assert world.outbox.jobs == [JobOutcome.RELOADED]
    assert world.engine.chunks == []


@pytest.mark.slow
def test_the_backlog_after_a_restart_is_served_from_the_restored_prefixes_with_the_same_scores(tmp_path: FilePath):
    """With a real engine, an arena, and copy threads. The second world is the process after a kill."""
    before, scores = RealExecutorWorld("plain", shared=tmp_path, dram_pages=len(USERS) * PAGES), {}
    for seed, user in enumerate(USERS):
        version = before.put(user, LENGTH, seed)
        before.rank(user, version, user)
        scores[user] = before.outbox.answered[user][1]
        wait_for_copies(before)
    before.die()
    after = RealExecutorWorld("plain", hbm_pages=2 * PAGES, shared=tmp_path, dram_pages=len(USERS) * PAGES)
    after.corrector.recalibrate(LatencyModel(replace(COEFFICIENTS, b1=1_000)))
    for seed, user in enumerate(USERS):
        after.submit(user, after.put(user, LENGTH, seed), user, budget_us=60_000_000)
    until(lambda: len(after.outbox.ranked_works) == len(USERS), "all are answered", meanwhile=after.run)
    after.die()
    assert Counter(after.outbox.paths) == {Path.DRAM: len(USERS)}
    for user in USERS:
        np.testing.assert_allclose(after.outbox.answered[user][1], scores[user], rtol=0, atol=TOLERANCE)


def wait_for_copies(world: RealExecutorWorld) -> None:
    until(lambda: not (world.cache.stats().hbm.pinned or world.cache.ledger.dram.works), "all copies have ended")


def test_the_room_counts_what_is_free_now_and_what_rankings_will_give_back():
    world, versions = world_with_all_in_dram()
    room = world.cache.room()
    assert (room.free_pages, room.held_pages, room.reloads) == (2 * PAGES, 0, 0)
    world.rank("user-00", versions["user-00"], "r0", budget_us=1_000_000)
    room = world.cache.room()
    assert (room.free_pages, room.held_pages, room.reloads) == (PAGES, PAGES, 1)
    assert world.cache.stats().hbm.in_flight == PAGES
    world.mover.finish()
    world.run()
    assert world.cache.room().held_pages == 0
