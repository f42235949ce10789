"""New behaviours are appended to cached prefixes while the device is idle, and nothing else changes."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from relaygr.admission.latency import LatencyModel
from relaygr.schemas.messages import History, Path
from relaygr.worker.cache import PrefixKey
from relaygr.worker.executor import warm_up
from relaygr.worker.executor.executor import WORK_TOO_LONG
from relaygr.worker.executor.resolver import Scored
from relaygr.worker.executor.work import JobOutcome
from relaygr.worker.history.resolve import StoredHistory
from tests.worlds import executor
from tests.worlds.executor import COEFFICIENTS, LIMITS, PAGE_TOKENS, TOKEN_US, ExecutorWorld, FakeEngine
from tests.worlds.invariants import check_invariants
from tests.worlds.real_executor import KINDS, RealExecutorWorld, behaviours_of

FOLLOWS = "relaygr_worker_follows_total"


class FollowWorld(ExecutorWorld):
    """Users whose first histories were ranked, so that their prefixes are in HBM."""

    def __init__(self, users: str = "u", length: int = 100, **changes) -> None:
        super().__init__(**{"follow_behaviours": "cached", **changes})
        for user in users:
            self.rank(user, self.store.put(user, length), f"first-{user}")
            self.run()
            self.mover.finish()
        self.engine.chunks.clear()

    def act(self, user: str, length: int) -> None:
        """The store has a history of this length now."""
        self.store.put(user, length)
        self.executor.histories_changed([user])

    def idle(self, most_us: int = 10_000_000) -> None:
        """Lets time pass until no user waits and nothing is computed."""
        until_us = self.clock.monotonic_us() + most_us
        while self.clock.monotonic_us() < until_us:
            wait_us = self.executor.step()
            check_invariants(self.cache)
            if wait_us == 0:
                continue
            if not self.executor._follows._users and not len(self.executor._scheduler.warm_up):
                return
            self.clock.advance_us(wait_us or 1)
        raise AssertionError("users still wait")

    def key(self, user: str) -> PrefixKey:
        resolver = self.executor._resolver
        return resolver.prefix(user, resolver.history(user, None, None, 0), 0, Scored(0, 10)).key

    def in_hbm(self, user: str) -> int:
        return self.cache.peek(self.key(user)).hbm_behaviours

    def outcomes(self) -> dict[str, float]:
        return {
            sample.labels["outcome"]: sample.value
            for family in self.registry.collect()
            for sample in family.samples
            if sample.name == FOLLOWS and sample.value
        }


def test_what_is_new_is_appended_before_anyone_asks() -> None:
    world = FollowWorld()
    world.act("u", 130)
    world.idle()
    assert sum(end - start for start, end in world.engine.chunks) == 30, "only what is new"
    assert world.outcomes() == {"appended": 1}
    seconds = world.registry.get_sample_value("relaygr_worker_device_seconds_total", {"work_class": "follow"})
    assert seconds == pytest.approx(30 * TOKEN_US / 1e6)
    work = world.rank("u", world.store.get("u").version)
    world.run()
    assert (work.path, work.tokens_cached, work.pre_infer_us) == (Path.HBM, 130, 0)


def test_a_request_for_the_history_before_it_uses_what_is_cached() -> None:
    world = FollowWorld()
    before = world.store.get("u").version
    world.act("u", 130)
    world.idle()
    work = world.rank("u", before)
    world.run()
    assert (work.path, work.tokens_cached) == (Path.HBM, 100)


@pytest.mark.parametrize("changes", [{"follow_behaviours": "off"}, {"reuse_prefixes": False}])
def test_nothing_is_appended_where_it_is_off(changes: dict[str, object]) -> None:
    world = FollowWorld(**changes)
    world.act("u", 130)
    world.idle()
    assert world.engine.chunks == [] and world.outcomes() == {}


def test_a_user_with_several_changes_waits_once_and_too_many_users_are_dropped(monkeypatch) -> None:
    monkeypatch.setattr(warm_up, "MOST_FOLLOWED", 2)
    world = FollowWorld("uvw")
    for length in (101, 102, 103):
        for user in "uvw":
            world.act(user, length)
    world.executor.histories_changed(["nobody"])
    world.idle()
    assert world.outcomes() == {"dropped": 7, "appended": 2}
    assert world.in_hbm("w") == 103


def test_ranking_and_pre_infer_go_first_and_the_share_of_the_device_is_kept() -> None:
    world = FollowWorld("uv", warm_up_share=0.25)
    world.act("u", 400)
    world.job("n", world.store.put("n", 200), "job")
    work = world.rank("m", world.store.put("m", 200), "rank")
    while not (work.has_ended and world.outbox.jobs):
        assert world.executor.step() == 0
    assert sum(end - start for start, end in world.engine.chunks) == 400, "two histories of 200, and no new behaviours"
    world.act("v", 400)
    begun_us = world.clock.monotonic_us()
    world.idle()
    assert world.in_hbm("u") == world.in_hbm("v") == 400
    spent_us = 600 * TOKEN_US
    # No pause follows the last chunk that `idle` waits for.
    assert world.clock.monotonic_us() - begun_us >= (spent_us - 100 * TOKEN_US) / 0.25


def test_the_poll_thread_leaves_it_to_the_device_thread() -> None:
    world = FollowWorld()
    world.act("u", 130)
    world.clock.advance_us(1_000_000)
    while world.executor.step(longest_us=50_000) == 0:
        pass
    assert world.executor.step(longest_us=50_000) == WORK_TOO_LONG
    assert world.engine.chunks == []


def test_nothing_is_evicted_for_it() -> None:
    world = FollowWorld("uv", length=112, hbm_pages=2 * 112 // PAGE_TOKENS)
    world.act("u", 128)
    world.idle()
    assert (world.in_hbm("u"), world.in_hbm("v")) == (112, 112)
    assert world.outcomes() == {"no_room": 1}


def test_free_rows_of_the_last_page_are_room_and_a_copy_of_the_entry_that_runs_is_not_disturbed() -> None:
    world = FollowWorld(length=100, hbm_pages=8)
    world.act("u", 110)
    world.idle()
    assert world.outcomes() == {"appended": 1} and world.copied == [], "in place"
    # The spill of the ranking is under way, and reads the last page.
    world.rank("u", world.store.get("u").version, "again")
    world.run()
    assert world.mover.waiting
    world.act("u", 112)
    world.idle()
    assert world.outcomes() == {"appended": 2} and len(world.copied) == 1
    world.mover.finish()


def test_another_history_is_not_computed() -> None:
    world = FollowWorld(length=300)
    replaced = np.arange(310, dtype="<i8")
    replaced[200:] += 1_000
    known = world.store.get("u").history
    history = History("u", 2, known.features, replace(executor.behaviours_of(310), items=replaced))
    world.store.histories["u"] = StoredHistory(history, history.chain())
    world.executor.histories_changed(["u"])
    world.idle()
    # What both have in common is longer than nothing, and the entry stays as it is.
    assert world.engine.chunks == [] and world.outcomes() == {"no_room": 1}


def test_a_window_that_lost_its_oldest_behaviours_is_not_computed() -> None:
    world = FollowWorld(length=LIMITS.max_prefix_behaviours)
    world.act("u", LIMITS.max_prefix_behaviours + 5)
    world.idle()
    assert world.engine.chunks == [] and world.outcomes() == {"not_cached": 1}


def test_a_deleted_user_is_not_computed() -> None:
    world = FollowWorld()
    world.act("u", 130)
    world.executor.user_deleted("u")
    world.idle()
    assert world.engine.chunks == [] and world.outcomes() == {"not_cached": 1}, "though the store still had a history"


def begun(length: int = 400) -> FollowWorld:
    """One chunk of an append has run."""
    world = FollowWorld()
    world.act("u", length)
    while not world.engine.chunks:
        world.clock.advance_us(world.executor.step() or 1)
    return world


def test_a_user_deleted_during_the_append_leaves_nothing() -> None:
    world = begun()
    world.executor.user_deleted("u")
    world.idle()
    assert (world.in_hbm("u"), world.outcomes()) == (0, {"failed": 1})
    assert world.cache.stats().hbm.free == world.cache.stats().hbm.capacity


def test_a_new_model_in_between_ends_the_append() -> None:
    world = begun()
    world.executor.serve_with(FakeEngine(world.clock, world.outbox, b"model-2", "model-2"))
    world.act("u", 410)
    world.idle()
    assert world.outcomes() == {"overtaken": 1, "not_cached": 1}
    assert world.in_hbm("u") == 0


@pytest.mark.parametrize("take", ["rank", "job"])
def test_a_request_and_a_job_of_the_user_join_the_append(take: str) -> None:
    world = begun()
    getattr(world, take)("u", world.store.get("u").version, "own")
    world.run()
    assert sum(end - start for start, end in world.engine.chunks) == 300, "computed once"
    if take == "job":
        assert world.outbox.jobs == [JobOutcome.COMPUTED]
    assert world.outcomes() == {}


def test_an_append_that_fails_ends_alone() -> None:
    world = FollowWorld()
    world.engine.fail_next = RuntimeError("kernel failed")
    world.act("u", 130)
    world.idle()
    assert world.outcomes() == {"failed": 1}
    work = world.rank("u", world.store.get("u").version)
    world.run()
    assert work.path is Path.HBM, "what was cached before still serves"


def test_few_behaviours_wait_until_the_fixed_part_of_an_append_is_small(monkeypatch) -> None:
    monkeypatch.setattr(executor, "LATENCY", LatencyModel(replace(COEFFICIENTS, b0=100.0)))
    monkeypatch.setattr(warm_up, "FIXED_PARTS", 8)
    world = FollowWorld()
    for length in range(120, 240, 20):
        world.act("u", length)
        world.idle()
    # 80 behaviours take 800 µs, and the fixed part 100.
    assert world.outcomes() == {"few": 5, "appended": 1}
    assert world.in_hbm("u") == 180


@pytest.mark.parametrize("kind", KINDS)
def test_scores_on_what_was_appended_are_those_of_full_inference(kind: str, monkeypatch) -> None:
    monkeypatch.setattr(warm_up, "FIXED_PARTS", 0)
    world = RealExecutorWorld(kind, follow_behaviours="cached")
    rules = world.engine.rules
    follows = rules.grows and rules.chunks and not rules.uses_query_time
    first = world.put("u", 70)
    world.job("u", first)
    world.rank("u", first)
    for count in (71, 75, 100):
        version = world.put("u", count)
        world.executor.histories_changed(["u"])
        for _ in range(200):
            world.clock.advance_us(1_000)
            world.run()
        work = world.rank("u", version, f"at {count}", suffix=behaviours_of(3, start=count))
        world.assert_exact(work, behaviours_of(count + 3))
        if follows:
            assert work.tokens_cached == world.engine.layout.tokens(count)
    appended = world.registry.get_sample_value(FOLLOWS, {"outcome": "appended"})
    assert appended == (3 if follows else None)
