"""Any number of requests compute, append to or reload a prefix once; each waits until its own deadline."""

from __future__ import annotations

import dataclasses

from relaygr.schemas.messages import Path
from relaygr.worker.cache import NoRoom
from tests.worlds.executor import HIT_US, TOKEN_US, ExecutorWorld, world_with_a_in_dram

CROWD = 20


def crowd(world: ExecutorWorld, version, count: int = CROWD, budget_us: int = 200_000):  # type: ignore[no-untyped-def]
    return [world.rank("a", version, f"r{index}", budget_us=budget_us) for index in range(count)]


def computed_tokens(world: ExecutorWorld) -> int:
    return sum(end - start for start, end in world.engine.chunks)


def test_a_crowd_of_requests_computes_a_prefix_once() -> None:
    world = ExecutorWorld()
    works = crowd(world, world.store.put("a", 400))
    world.run()
    assert all(work.has_ended for work in works)
    assert computed_tokens(world) == 400


def test_a_crowd_and_its_job_compute_a_prefix_once() -> None:
    world = ExecutorWorld()
    version = world.store.put("a", 400)
    world.job("a", version, "r0")
    world.executor.step()
    works = crowd(world, version)
    world.run()
    assert {work.path for work in works} == {Path.PENDING}
    assert computed_tokens(world) == 400


def test_a_crowd_appends_to_a_prefix_once() -> None:
    world = ExecutorWorld()
    world.rank("a", world.store.put("a", 320), "first")
    world.run()
    works = crowd(world, world.store.put("a", 400, number=2))
    world.run()
    assert all(work.has_ended and work.path is Path.HBM for work in works)
    assert computed_tokens(world) == 400


def test_a_crowd_reloads_a_prefix_once() -> None:
    """6. Every concurrent request started a copy of its own."""
    world, version = world_with_a_in_dram()
    before = computed_tokens(world)
    works = crowd(world, version)
    world.run()
    reloads = [request for request in world.mover.waiting if request.deadline.at_us < 2**61]
    assert len(reloads) == 1
    world.mover.finish()
    world.run()
    assert {work.path for work in works} == {Path.DRAM}
    assert computed_tokens(world) == before


def test_what_was_reloaded_for_a_request_is_not_evicted_before_the_request_looks_again() -> None:
    world, version = world_with_a_in_dram()
    work = world.rank("a", version, "waits")
    world.run()
    world.mover.finish()
    key = dataclasses.replace(work.prefix.key, user_id="c")
    assert isinstance(world.cache.reserve(key, world.clock.monotonic_us()), NoRoom)
    world.run()
    assert (work.has_ended, work.path) == (True, Path.DRAM)


def test_one_that_can_not_wait_leaves_and_the_others_get_what_was_computed() -> None:
    """7. The first waiter's time-out cancelled the work of all."""
    world = ExecutorWorld()
    version = world.store.put("a", 400)
    world.job("a", version, "job")
    world.executor.step()
    # The whole takes 400 x TOKEN_US and HIT_US: this one has less.
    hurried = world.rank("a", version, "hurried", budget_us=400 * TOKEN_US // 2 + HIT_US)
    patient = world.rank("a", version, "patient", budget_us=200_000)
    world.run()
    assert (hurried.has_ended, hurried.path) == (True, Path.TRUNCATED)
    assert (patient.has_ended, patient.path) == (True, Path.PENDING)
    assert world.cache.peek(patient.prefix.key).hbm_behaviours == 400
