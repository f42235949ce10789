"""The executor with work that fails: one request or job ends, other work and the process continue."""

from __future__ import annotations

import numpy as np
import pytest

from relaygr.schemas.ended import Reason
from relaygr.schemas.messages import Path
from relaygr.worker.executor.work import JobOutcome
from relaygr.worker.model.interface import RankOutputs
from tests.worlds.executor import LIMITS, ExecutorWorld, world_with_a_in_dram

pytestmark = pytest.mark.slow


class BrokenError(RuntimeError):
    pass


def break_once(world: ExecutorWorld, name: str) -> None:
    """The next call of this method of the engine raises."""
    whole = getattr(world.engine, name)

    def broken(*arguments, **fields):
        setattr(world.engine, name, whole)
        raise BrokenError("no good")

    setattr(world.engine, name, broken)


def test_a_job_whose_inputs_cannot_be_made_fails_alone():
    world = ExecutorWorld()
    version, other = world.store.put("u", 100), world.store.put("v", 100)
    break_once(world, "prefix_inputs")
    world.job("u", version, "r1")
    world.job("v", other, "r2")
    world.run()
    assert world.outbox.jobs == [JobOutcome.FAILED, JobOutcome.COMPUTED]


def test_a_job_that_breaks_after_it_waited_for_its_history_fails_alone():
    world = ExecutorWorld()
    version = world.store.put("u", 100)
    world.store.histories.clear()
    world.job("u", version)
    world.store.put("u", 100)
    break_once(world, "prefix_inputs")
    world.executor.histories_changed(["u"])
    world.run()
    assert world.outbox.jobs == [JobOutcome.FAILED]


def test_a_job_that_breaks_after_it_waited_for_another_version_fails_alone():
    world = ExecutorWorld()
    world.job("u", world.store.put("u", 100), "r1")
    world.job("u", world.store.put("u", 200, number=2), "r2")
    break_once(world, "prefix_inputs")
    world.run()
    assert world.outbox.jobs == [JobOutcome.COMPUTED, JobOutcome.FAILED]


def test_a_request_that_breaks_after_it_waited_for_its_history_is_answered():
    world = ExecutorWorld()
    version = world.store.put("u", 100)
    world.store.histories.clear()
    world.rank("u", version)
    world.store.put("u", 100)
    break_once(world, "prefix_inputs")
    world.executor.histories_changed(["u"])
    world.run()
    ((_, reason, detail),) = world.outbox.failures
    assert (reason, detail) == (Reason.DEVICE_ERROR, "no good")
    assert world.executor.ranking_outstanding == 0


@pytest.mark.parametrize("hbm_pages", [128, 4], ids=["in the cache", "on the scratch pages"])
def test_a_request_that_breaks_once_its_prefix_is_there_fails_alone(hbm_pages):
    world = ExecutorWorld(hbm_pages)
    world.rank("u", world.store.put("u", 100), "r1")
    break_once(world, "rank_inputs")
    world.rank("v", world.store.put("v", 100), "r2")
    world.run()
    assert [work.request.request_id for work, _, _ in world.outbox.failures] == ["r1"]
    assert [work.request.request_id for work in world.outbox.ranked_works] == ["r2"]
    assert world.executor.ranking_outstanding == 0


def test_a_request_that_fails_when_it_is_truncated_does_not_affect_other_waiters():
    """The requests before it had been planned again already, and were answered twice."""
    world = ExecutorWorld()
    version = world.store.put("u", 480)
    for name in ("r1", "r2", "r3"):
        world.rank("u", version, name, budget_us=7_000 if name != "r3" else 50_000)
    world.clock.advance_us(3_000)
    whole, calls = world.engine.prefix_inputs, []

    def broken_at_the_second(*arguments, **fields):
        calls.append(1)
        if len(calls) == 2:
            raise BrokenError("no good")
        return whole(*arguments, **fields)

    world.engine.prefix_inputs = broken_at_the_second
    world.run()
    assert [work.request.request_id for work, _, _ in world.outbox.failures] == ["r2"]
    assert sorted((work.request.request_id, work.path) for work in world.outbox.ranked_works) == [
        ("r1", Path.TRUNCATED), ("r3", Path.FULL),
    ]  # fmt: skip
    assert world.executor.ranking_outstanding == 0


@pytest.mark.parametrize("submit", [ExecutorWorld.job, ExecutorWorld.rank])
def test_an_error_before_a_tail_is_computed_releases_the_cached_part(submit):
    """The cached part stayed pinned until the cache revoked the handle, three minutes later."""
    world = ExecutorWorld()
    world.job("u", world.store.put("u", 100), "r1")
    world.run()
    world.cache.end_lease("u", "r1")
    version = world.store.put("u", 200)
    break_once(world, "prefix_inputs")
    submit(world, "u", version, "r2")
    world.run()
    assert len(world.outbox.failures) + world.outbox.jobs.count(JobOutcome.FAILED) == 1
    stats = world.cache.stats()
    assert (stats.hbm.pinned, stats.hbm.evictable > 0) == (0, True)


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_scores_that_are_no_numbers_fail_the_request_and_invalidate_the_users_prefixes(value):
    world = ExecutorWorld()
    version = world.store.put("u", 100)
    whole = world.engine.rank
    world.engine.rank = lambda batch: [
        RankOutputs(np.full((request.candidates, 1), value, np.float32)) for request in batch
    ]
    world.rank("u", version, "r1")
    world.run()
    ((_, reason, detail),) = world.outbox.failures
    assert reason is Reason.DEVICE_ERROR
    assert "not finite" in detail
    world.engine.rank = whole
    world.rank("u", version, "r2")
    world.run()
    assert world.outbox.paths == [Path.FULL], "computed anew"


def test_scores_that_are_no_numbers_do_not_fail_the_neighbours_in_the_batch():
    world = ExecutorWorld()
    versions = [world.store.put(user, 50) for user in "uvw"]
    for user, version in zip("uvw", versions, strict=True):
        world.rank(user, version, f"first-{user}")
    world.run()
    world.outbox.ranked_works.clear()
    whole = world.engine.rank

    def one_bad(batch):
        outputs = whole(batch)
        return [RankOutputs(output.scores * np.nan) if output.scores.size == 13 else output for output in outputs]

    world.engine.rank = one_bad
    for user, version in zip("uvw", versions, strict=True):
        world.rank(user, version, f"again-{user}", candidates=13 if user == "v" else 10)
    world.run()
    assert sorted(work.request.user_id for work in world.outbox.ranked_works) == ["u", "w"]
    assert [work.request.user_id for work, _, _ in world.outbox.failures] == ["v"]


def test_too_many_candidates_are_refused_before_anything_is_computed():
    world = ExecutorWorld()
    version = world.store.put("u", 100)
    world.rank("u", version, candidates=LIMITS.max_candidates + 1, budget_us=1)
    world.run()
    ((_, reason, detail),) = world.outbox.failures
    assert reason is Reason.TOO_LONG
    assert str(LIMITS.max_candidates) in detail
    assert not world.engine.chunks and not world.engine.batches


def test_a_request_whose_scores_are_sent_gets_no_second_result_whatever_breaks_then(monkeypatch):
    world = ExecutorWorld()
    work = world.rank("u", world.store.put("u", 100))

    def broken(_work):
        raise BrokenError("no good")

    monkeypatch.setattr(world.outbox, "count_ranked", broken)
    world.run()
    assert work.has_ended and (len(world.outbox.ranked_works), world.outbox.failures) == (1, [])
    assert world.executor.ranking_outstanding == world.executor.ranking_outstanding_bytes == 0


def test_a_request_that_broke_while_it_waited_for_a_copy_is_not_answered_again_when_the_copy_ends(monkeypatch):
    world, version = world_with_a_in_dram()

    def broken(*_arguments):
        raise BrokenError("no good")

    with monkeypatch.context() as while_it_begins_to_wait:
        while_it_begins_to_wait.setattr(world.executor._timers, "at", broken)
        work = world.rank("a", version, "breaks")
    assert work.has_ended and [reason for _, reason, _ in world.outbox.failures] == [Reason.DEVICE_ERROR]
    answers = world.outbox.answers
    world.mover.finish()
    world.run()
    assert world.outbox.answers == answers
    assert world.executor.ranking_outstanding == world.executor._prefixes.reloads.awaited == 0
    assert world.executor.backlog.total_us == 0


def test_a_device_that_stays_broken_fails_the_request_and_not_the_process(monkeypatch):
    world = ExecutorWorld()
    work = world.rank("u", world.store.put("u", 100), looks_up=False)

    def broken(*_arguments, **_fields):
        raise BrokenError("no good")

    for name in ("prefix_inputs", "rank_inputs"):
        monkeypatch.setattr(world.engine, name, broken)
    world.run()
    assert work.has_ended and [reason for _, reason, _ in world.outbox.failures] == [Reason.DEVICE_ERROR]
