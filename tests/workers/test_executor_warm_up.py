"""Warm-up: prefixes of likely users are computed on an idle device, and give way to everything else."""

from __future__ import annotations

import pytest

from relaygr.schemas.messages import Path
from relaygr.worker.cache import PrefixKey
from relaygr.worker.executor.resolver import Scored
from relaygr.worker.executor.work import JobOutcome
from relaygr.worker.model.config import PrefixRules
from tests.worlds.executor import TOKEN_US, ExecutorWorld

LENGTH = 400


class WarmWorld(ExecutorWorld):
    """Users a, b, ... with histories of 400 behaviours, all offered for a warm-up."""

    def __init__(self, users: str = "ab", **changes) -> None:
        super().__init__(**{"warm_up_users": 10, "hbm_bytes": 1 << 20, **changes})
        self.versions = {user: self.store.put(user, LENGTH) for user in users}

    def offer(self, users: str = "ab") -> None:
        self.executor.begin_warm_up()
        self.executor.offer_warm_ups(list(users))

    def idle(self, steps: int = 2_000) -> None:
        """Steps until nothing is left but timers, and lets the time pass that the executor wants to wait."""
        for _ in range(steps):
            wait_us = self.executor.step()
            if wait_us == 0:
                continue
            if self.executor._warm_ups.next_in_us(self.clock.monotonic_us()) is None:
                return
            self.clock.advance_us(wait_us or 1)

    def key(self, user: str) -> PrefixKey:
        resolver = self.executor._resolver
        return resolver.prefix(user, resolver.history(user, None, None, 0), 0, Scored(0, 10)).key

    def in_hbm(self) -> list[str]:
        return [user for user in self.versions if self.cache.peek(self.key(user)).hbm_behaviours == LENGTH]

    def outcomes(self) -> dict[str, float]:
        found = {
            outcome: self.registry.get_sample_value("relaygr_worker_warm_ups_total", {"outcome": outcome})
            for outcome in ("computed", "skipped", "no_room", "failed")
        }
        return {outcome: count for outcome, count in found.items() if count}


def test_the_offered_users_are_computed_while_the_device_is_idle_and_copied_to_dram() -> None:
    world = WarmWorld()
    world.offer()
    world.idle()
    assert world.in_hbm() == ["a", "b"]
    assert world.outcomes() == {"computed": 2}
    assert len(world.mover.waiting) == 2
    work = world.rank("a", world.versions["a"])
    world.run()
    assert (work.path, work.tokens_cached) == (Path.HBM, LENGTH)


def test_the_device_time_of_a_warm_up_is_counted_as_such() -> None:
    world = WarmWorld("a")
    world.offer("a")
    world.idle()
    seconds = world.registry.get_sample_value("relaygr_worker_device_seconds_total", {"work_class": "warm_up"})
    assert seconds == pytest.approx(LENGTH * TOKEN_US / 1e6)
    assert world.executor.preinfer_backlog_us == 0


def test_nothing_is_computed_without_an_offer_or_beyond_the_setting() -> None:
    world = WarmWorld("abc", warm_up_users=2)
    world.idle()
    assert world.engine.chunks == []
    world.offer("abc")
    world.idle()
    assert world.in_hbm() == ["a", "b"]


def test_users_that_are_cached_or_unknown_are_skipped() -> None:
    world = WarmWorld()
    world.rank("a", world.versions["a"])
    world.run()
    world.offer("ax")
    world.idle()
    assert world.outcomes() == {"skipped": 2}


def test_a_warm_up_evicts_nothing_and_ends_when_hbm_is_full() -> None:
    world = WarmWorld("abc", hbm_pages=60)
    world.offer("abc")
    world.idle()
    assert world.in_hbm() == ["a", "b"]
    assert world.outcomes() == {"computed": 2, "no_room": 1}
    world.executor.offer_warm_ups(["c"])
    world.idle()
    assert world.outcomes() == {"computed": 2, "no_room": 1}


def begun(world: WarmWorld) -> None:
    """Steps until the first chunk of the warm-up has run."""
    for _ in range(100):
        world.executor.step()
        if world.engine.chunks:
            return
        world.clock.advance_us(1_000)


def test_a_ranking_request_runs_right_after_the_chunk_on_the_device() -> None:
    world = WarmWorld("ab")
    world.offer("a")
    begun(world)
    work = world.rank("b", world.versions["b"])
    before = len(world.engine.chunks)
    while not work.has_ended:
        assert world.executor.step() == 0
    own = world.engine.chunks[before:]
    assert sum(end - start for start, end in own) == LENGTH, "only chunks of the request ran"
    world.idle()
    assert world.in_hbm() == ["a", "b"]


def test_a_request_and_a_job_for_the_same_user_take_the_warm_up_over() -> None:
    for take in ("rank", "job"):
        world = WarmWorld("a")
        world.offer("a")
        begun(world)
        getattr(world, take)("a", world.versions["a"])
        world.run()
        assert sum(end - start for start, end in world.engine.chunks) == LENGTH, "computed once"
        if take == "rank":
            assert world.outbox.paths == [Path.PENDING]
        else:
            assert world.outbox.jobs == [JobOutcome.COMPUTED]
        assert world.outcomes() == {}


def test_a_model_whose_prefixes_serve_one_impression_is_not_warmed_up() -> None:
    world = WarmWorld("a")
    world.engine.rules = PrefixRules(uses_query_time=True)
    world.offer("a")
    world.idle()
    assert world.engine.chunks == []


def test_a_user_deleted_during_its_warm_up_leaves_nothing() -> None:
    world = WarmWorld("a")
    world.offer("a")
    begun(world)
    world.executor.user_deleted("a")
    world.idle()
    assert world.in_hbm() == []
