"""The executor, one step at a time: a clock that moves only when the fake device works."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from relaygr.admission.buckets import OwnerBuckets
from relaygr.admission.latency import LatencyModel, Stage
from relaygr.admission.policy import Estimate, Refusal
from relaygr.schemas.digest import digest_chain
from relaygr.schemas.ended import Reason
from relaygr.schemas.messages import HistoryVersion, Path, PrefixSource, RankingRequest, StaleCause
from relaygr.worker.cache import Hit, MissReason, PendingKind, PrefixKey, WasteReason
from relaygr.worker.executor.executor import WORK_TOO_LONG
from relaygr.worker.executor.impressions import REMEMBERED_US, Impressions
from relaygr.worker.executor.look_up import WAITED_PART
from relaygr.worker.executor.resolver import Deletions, Scored
from relaygr.worker.executor.waits import FailedWaits
from relaygr.worker.executor.work import JobOutcome
from relaygr.worker.history.resolve import StoredHistory
from relaygr.worker.results import timings_of
from tests.worlds.executor import (
    COEFFICIENTS,
    GEOMETRY,
    HIT_US,
    LIMITS,
    PAGE_TOKENS,
    TOKEN_US,
    ExecutorWorld,
    FakeEngine,
    history_of,
    world_with_a_in_dram,
)
from tests.worlds.invariants import check_invariants


def test_a_prefix_computed_ahead_is_hit_in_hbm():
    world = ExecutorWorld()
    version = world.store.put("u", 100)
    world.job(version=version)
    world.run()
    assert world.outbox.jobs == [JobOutcome.COMPUTED]
    work = world.rank(version=version)
    world.run()
    assert world.outbox.paths == [Path.HBM]
    assert (work.tokens_cached, work.prefix_source, work.pre_infer_us) == (100, PrefixSource.COMPUTED, 0)
    assert sum(end - start for start, end in world.engine.chunks) == 100, "computed once"


def test_without_a_job_the_request_takes_the_full_path_and_leaves_its_prefix():
    world = ExecutorWorld()
    version = world.store.put("u", 100)
    world.rank(version=version)
    world.run()
    world.rank(version=version, request_id="r2")
    world.run()
    assert world.outbox.paths == [Path.FULL, Path.HBM]


def test_a_grown_history_computes_only_its_tail_and_stays_on_the_hbm_path():
    world = ExecutorWorld()
    world.rank(version=world.store.put("u", 100))
    world.run()
    world.engine.chunks.clear()
    work = world.rank(version=world.store.put("u", 130, number=2), request_id="r2")
    world.run()
    assert world.outbox.paths == [Path.FULL, Path.HBM]
    assert work.tokens_cached == 100
    assert world.engine.chunks[0][0] == 100
    assert world.engine.chunks[-1][1] == 130


def test_a_request_that_overtakes_its_queued_job_takes_the_work_over():
    world = ExecutorWorld()
    version = world.store.put("u", 100)
    world.job(version=version)
    world.rank(version=version)
    world.run()
    assert world.outbox.paths == [Path.FULL]
    assert world.outbox.jobs == [JobOutcome.JOINED]
    assert sum(end - start for start, end in world.engine.chunks) == 100, "one computation for both"


def test_impressions_are_remembered_for_a_time_and_up_to_a_number():
    """At a low rate, a bound on the number alone let the memory of a worker grow for an hour."""
    impressions = Impressions(capacity=3, kept_us=100)
    first, second, third = (impressions.of("u", f"r{now_us}", now_us) for now_us in (0, 50, 100))
    assert len(impressions) == 3
    fourth = impressions.of("u", "r120", 120)
    assert len(impressions) == 3
    assert impressions.of("u", "r50", 120) is second
    assert impressions.of("u", "r0", 120) is not first
    assert impressions.of("u", "r100", 120) is not third, "the oldest, since r50 was seen again"
    impressions.of("u", "r500", 500)
    assert len(impressions) == 1
    assert impressions.of("u", "r120", 500) is not fourth


def test_answered_requests_are_forgotten_when_no_job_of_theirs_can_be_alive():
    world = ExecutorWorld()
    version = world.store.put("u", 10)
    for number in range(3):
        world.rank(version=version, request_id=f"r{number}")
        world.run()
    impressions = world.executor._impressions
    assert len(impressions) == 3
    world.clock.advance_us(REMEMBERED_US + 1)
    later = world.rank(version=version, request_id="later")
    world.run()
    assert len(impressions) == 1
    assert later.impression.is_answered


def test_a_request_that_finds_its_job_begun_waits_for_it():
    world = ExecutorWorld()
    version = world.store.put("u", 300)
    world.job(version=version)
    world.executor.step()
    work = world.rank(version=version)
    world.run()
    assert world.outbox.paths == [Path.PENDING]
    assert 0 < work.tokens_cached < 300


def test_a_step_leaves_work_that_takes_longer_than_its_bound():
    world = ExecutorWorld()
    version = world.store.put("u", 100)
    world.job(version=version)
    assert world.executor.step(100 * TOKEN_US - 1) == WORK_TOO_LONG
    assert not world.engine.chunks
    world.run()
    world.rank(version=version)
    world.rank(version=version, request_id="r2")
    assert world.executor.step(2 * HIT_US - 1) == WORK_TOO_LONG, "both may be ranked in one pass"
    assert world.executor.step(2 * HIT_US) == 0
    assert world.outbox.paths == [Path.HBM, Path.HBM]


def test_a_job_that_comes_after_its_request_was_answered_is_dropped():
    world = ExecutorWorld()
    version = world.store.put("u", 100)
    world.rank(version=version)
    world.run()
    world.job(version=version)
    world.run()
    assert world.outbox.jobs == [JobOutcome.OVERTAKEN]


def test_an_evicted_prefix_comes_back_from_dram():
    world, first = world_with_a_in_dram()
    work = world.rank("a", first, "r3")
    world.run()
    assert world.outbox.answers == 2, "waits for the copy"
    world.mover.finish()
    world.run()
    assert world.outbox.paths == [Path.FULL, Path.FULL, Path.DRAM]
    assert (work.prefix_source, work.tokens_cached) == (PrefixSource.DRAM, 400)
    assert sum(end - start for start, end in world.engine.chunks) == 800, "nothing computed twice"


def test_a_failed_reload_falls_back_to_full_inference():
    world, first = world_with_a_in_dram()
    work = world.rank("a", first, "r3")
    world.run()
    world.mover.finish(ok=False)
    assert not work.has_ended
    world.mover.finish(ok=False)
    world.run()
    assert (work.has_ended, work.path) == (True, Path.FULL)


def test_a_request_waits_for_a_slow_reload_only_while_full_inference_fits():
    world, first = world_with_a_in_dram()
    work = world.rank("a", first, "r3", budget_us=30_000)
    world.run()
    world.idle_until(work.deadline_us - 400 * TOKEN_US - HIT_US)
    assert world.outbox.paths[-1] is Path.FULL
    assert world.clock.monotonic_us() <= work.deadline_us


def test_a_request_waits_for_a_reload_that_should_end_soon_although_full_inference_then_does_not_fit():
    """Such requests began full inference without time to spare, a millisecond before their prefix came."""
    world, first = world_with_a_in_dram()
    work = world.rank("a", first, "r3", budget_us=400 * TOKEN_US + HIT_US)
    world.run()
    world.clock.advance_us(1_000)
    world.run()
    world.mover.finish()
    world.run()
    assert (work.path, world.outbox.paths[-1]) == (Path.DRAM, Path.DRAM)
    assert world.clock.monotonic_us() <= work.deadline_us


def test_a_request_gives_a_reload_up_after_half_of_the_time_before_its_latest_start():
    world, first = world_with_a_in_dram()
    work = world.rank("a", first, "r3", budget_us=400 * TOKEN_US + HIT_US)
    world.run()
    world.idle_until(work.latest_start_us - int((1 - WAITED_PART) * (work.latest_start_us - work.received.received_us)))
    assert (work.has_ended, work.path) == (True, Path.TRUNCATED)
    assert world.clock.monotonic_us() <= work.deadline_us


def test_a_request_does_not_wait_long_for_a_reload_that_is_overdue():
    """The copy may hang."""
    world, first = world_with_a_in_dram()
    world.job("a", first, "r3")
    world.run()
    world.clock.advance_us(5_000)
    work = world.rank("a", first, "r3", budget_us=400 * TOKEN_US + HIT_US)
    world.run()
    assert (work.has_ended, work.path) == (True, Path.FULL)


def test_a_request_waits_for_a_long_reload_only_while_full_inference_fits():
    world, first = world_with_a_in_dram()
    world.mover.copy_us = 0.8 * 400 * TOKEN_US
    work = world.rank("a", first, "r3", budget_us=400 * TOKEN_US + HIT_US)
    world.run()
    assert (work.has_ended, work.path) == (True, Path.FULL)


def test_a_job_for_a_prefix_in_dram_triggers_its_reload():
    world, first = world_with_a_in_dram()
    world.job("a", first, "r3")
    world.run()
    world.mover.finish()
    world.run()
    work = world.rank("a", first, "r3")
    world.run()
    assert world.outbox.jobs == [JobOutcome.RELOADED]
    assert (world.outbox.paths[-1], work.prefix_source) == (Path.HBM, PrefixSource.DRAM)


def test_a_history_that_does_not_fit_the_deadline_is_truncated_to_its_newest_part():
    world = ExecutorWorld()
    work = world.rank(version=world.store.put("u", 500), budget_us=3_000)
    world.run()
    assert world.outbox.paths == [Path.TRUNCATED]
    assert work.prefix is not None
    assert 0 < work.prefix.tokens < 500
    assert work.prefix.tokens % PAGE_TOKENS == 0
    assert work.prefix.behaviours.items[-1] == 499, "the newest are kept"
    assert world.clock.monotonic_us() <= work.deadline_us


def test_a_request_that_nothing_can_serve_in_time_is_refused_at_once():
    world = ExecutorWorld()
    world.rank(version=world.store.put("u", 500), budget_us=500)
    assert [reason for _, reason, _ in world.outbox.failures] == [Reason.OVERLOADED]


def test_an_expired_request_costs_no_device_time():
    world = ExecutorWorld()
    version = world.store.put("u", 100)
    world.rank(version=version, budget_us=-10_000)
    world.run()
    assert len(world.outbox.expired_works) == 1
    assert world.engine.batches == []


def test_without_any_history_the_request_is_ranked_with_what_it_carries():
    world = ExecutorWorld()
    work = world.rank("stranger")
    world.run()
    assert world.outbox.paths == [Path.FULL]
    assert work.prefix is not None
    assert (work.prefix.tokens, work.prefix.version) == (0, None)


def test_an_inline_history_is_used_and_refused_if_it_is_not_the_named_version():
    world = ExecutorWorld()
    carried = history_of("u", 80)
    world.rank(history=carried, version=carried.version())
    world.rank(history=carried, version=HistoryVersion(1, 80, bytes(16)), request_id="r2")
    world.run()
    assert world.outbox.paths == [Path.FULL]
    assert [reason for _, reason, _ in world.outbox.failures] == [Reason.UNDECODABLE]


@pytest.mark.parametrize(("budget_us", "later_us"), [(50_000, 10_000), (2_000_000, 150_000)])
def test_a_request_waits_for_a_version_that_is_not_stored_yet(budget_us, later_us):
    world = ExecutorWorld()
    world.store.put("u", 100)
    newer = history_of("u", 120, number=2).version()
    work = world.rank(version=newer, budget_us=budget_us)
    world.run()
    world.idle_until(world.clock.monotonic_us() + later_us)
    assert world.outbox.answers == 0
    world.store.put("u", 120, number=2)
    world.executor.histories_changed(["u"])
    world.run()
    assert work.prefix is not None
    assert (work.prefix.tokens, work.prefix.stale, work.history_wait_us) == (120, False, later_us)


@pytest.mark.parametrize(("budget_us", "part_us"), [(48_000, 12_000), (7_200, 1_800), (3_600_000, 500_000)])
def test_a_version_that_never_comes_is_waited_for_a_quarter_of_the_budget_and_half_a_second_at_most(budget_us, part_us):
    world = ExecutorWorld()
    world.store.put("u", 100)
    received_us = world.clock.monotonic_us()
    work = world.rank(version=history_of("u", 120, number=2).version(), budget_us=budget_us)
    world.run()
    world.idle_until(received_us + part_us - 1)
    assert world.outbox.answers == 0
    world.idle_until(received_us + part_us)
    assert world.outbox.paths == [Path.FULL]
    assert (work.prefix.tokens, work.prefix.stale_cause) == (100, StaleCause.BEHIND)
    assert work.history_wait_us == part_us


def test_the_wait_for_a_version_counts_from_the_sending_of_the_request():
    world = ExecutorWorld()
    world.store.put("u", 100)
    sent_us = world.clock.monotonic_us() - 6_000
    work = world.rank(version=history_of("u", 120, number=2).version(), budget_us=42_000, sent_ago_us=6_000)
    world.idle_until(sent_us + 12_000)
    assert (work.has_ended, work.history_wait_us) == (True, 6_000)
    late = world.rank("v", history_of("v", 9).version(), "late", budget_us=30_000, sent_ago_us=10_001)
    world.run()
    assert (late.has_ended, late.history_wait_us) == (True, 0), "a quarter of the budget was gone"


def test_a_wait_for_a_version_leaves_time_for_the_queue_and_for_the_history_that_is_there():
    """It left time for the named history, of five behaviours, while the stored one was ranked: too late."""
    world = ExecutorWorld()
    world.store.put("u", 480, number=1)
    world.rank("other", world.store.put("other", 400), "first")
    queued_us = world.executor.backlog.predicted_us
    assert queued_us > 4_000
    received_us = world.clock.monotonic_us()
    budget_us = queued_us + 480 * TOKEN_US + HIT_US + 1_000 + 900
    work = world.rank("u", HistoryVersion(9, 5, bytes(16)), "second", budget_us=budget_us)
    timers = world.executor._timers
    assert timers.next_at_us <= received_us + 900 + TOKEN_US
    world.run()
    assert (work.has_ended, work.path) == (True, Path.FULL)
    assert work.answered_us <= work.deadline_us


def with_gap(world: ExecutorWorld, user: str, length: int) -> None:
    history = history_of(user, length)
    world.store.histories[user] = StoredHistory(history, history.chain(), has_gap=True)


def test_nobody_waits_for_a_version_of_a_history_with_a_gap_until_it_is_mended():
    """Each request of the user took its whole budget, since no later behaviour makes the digest match."""
    world = ExecutorWorld()
    with_gap(world, "u", 100)
    newer = history_of("u", 121, number=2).version()
    world.job(version=newer, request_id="a")
    world.run()
    assert world.outbox.jobs == [JobOutcome.COMPUTED], "the newest history is pre-inferred"
    work = world.rank(version=newer, request_id="a")
    world.run()
    assert (work.path, work.prefix.tokens, work.prefix.stale_cause) == (Path.HBM, 100, StaleCause.GAP)
    assert work.history_wait_us == 0
    world.store.put("u", 110)
    work = world.rank(version=newer, request_id="b")
    world.clock.advance_us(5_000)
    world.store.put("u", 121, number=2)
    world.executor.histories_changed(["u"])
    world.run()
    assert (work.prefix.tokens, work.prefix.stale_cause, work.history_wait_us) == (121, None, 5_000)


def test_a_history_with_a_gap_that_does_not_reach_a_length_is_waited_for_once():
    """Later behaviours, or a snapshot, may reach it."""
    world = ExecutorWorld()
    with_gap(world, "u", 100)

    def rank(request_id, length):
        request = replace(world_request(request_id), history_at_least=length)
        return world.take_ranking(request, 40_000)

    def world_request(request_id):
        wall_us = world.clock.wall_us()
        return RankingRequest(
            request_id, "u", wall_us, wall_us + 40_000, 0, np.arange(10), history_of("u", 0).behaviours
        )

    first = rank("a", 101)
    world.idle_until(world.clock.monotonic_us() + 10_000)
    assert (first.has_ended, first.history_wait_us, first.prefix.stale_cause) == (True, 10_000, StaleCause.GAP)
    with_gap(world, "u", 101)
    second = rank("b", 102)
    world.run()
    assert (second.has_ended, second.history_wait_us) == (True, 0)
    world.store.put("u", 110)
    third = rank("c", 111)
    world.run()
    assert not third.has_ended, "the gap is mended, so the length may be reached again"


def test_a_version_from_before_the_users_deletion_is_not_waited_for():
    world = ExecutorWorld()
    world.store.deleted["u"] = world.clock.wall_us() // 1000 + 50
    old = history_of("u", 300, number=300).version()
    gone = world.rank(version=old, request_id="gone")
    world.job(version=old, request_id="job")
    world.run()
    assert (gone.prefix.version, gone.prefix.stale_cause, gone.prefix.loading) == (None, StaleCause.DELETED, False)
    assert world.outbox.jobs == [JobOutcome.NO_HISTORY]
    world.store.put("u", 70, number=70)
    begun_again = world.rank(version=old, request_id="begun again")
    world.run()
    assert (begun_again.prefix.tokens, begun_again.prefix.stale_cause) == (70, StaleCause.DELETED)
    world.clock.advance_us(60_000)
    later = world.rank(version=history_of("u", 71, number=71).version(), request_id="later")
    world.run()
    assert not later.has_ended, "chosen after the deletion: it is on its way"


@pytest.mark.parametrize("stored", [None, 64])
def test_a_version_is_not_waited_for_again_until_it_or_a_newer_one_is_there(stored):
    world = ExecutorWorld()
    if stored is not None:
        world.store.put("u", stored)

    def waits(version, request_id):
        work = world.rank(version=version, request_id=request_id)
        world.run()
        is_waiting = not work.has_ended
        world.idle_until(world.clock.monotonic_us() + 12_500)
        assert work.has_ended
        return is_waiting

    wanted, longer, shorter = (history_of("u", length, number=length).version() for length in (90, 95, 80))
    assert waits(wanted, "a")
    assert not waits(wanted, "b")
    world.store.put("u", 70)
    assert not waits(longer, "c"), "it lacks what the failed wait was for"
    assert waits(shorter, "d")
    world.store.put("u", 90, number=90)
    assert waits(longer, "e")


def test_failed_waits_are_remembered_for_a_bounded_number_of_users():
    waits, version = FailedWaits(2), history_of("u", 5, number=5).version()
    for user in ("a", "b", "c"):
        waits.add(user, version)
    assert [waits.cover(user, version, None) for user in ("a", "b", "c")] == [False, True, True]


@pytest.mark.parametrize("names_version", [True, False])
def test_a_request_waits_within_its_budget_until_the_store_of_its_partition_is_open(names_version):
    """After a restart, requests without a version were ranked on nothing, with seconds of their budget left."""
    world = ExecutorWorld(parked_jobs_max=1)
    world.store.loading = world.store.settling = True
    version = history_of("u1", 60).version() if names_version else None
    works = [world.rank(f"u{number}", version, f"r{number}", budget_us=8_000_000) for number in range(3)]
    world.job("u1", version, "job", lead_us=4_000_000)
    world.idle_until(world.clock.monotonic_us() + 3_000_000)
    assert world.outbox.answers == 0, "three wait, though one may wait for a record"
    for number in range(3):
        world.store.put(f"u{number}", 60)
    world.executor.partitions_read(frozenset([5]))
    world.run()
    assert world.outbox.answers == 0, "another partition"
    world.store.loading = world.store.settling = False
    world.executor.partitions_read(frozenset([0]))
    world.run()
    assert [work.prefix.tokens for work in works] == [60, 60, 60]
    assert [work.history_wait_us for work in works] == [3_000_000] * 3
    assert world.outbox.jobs == [JobOutcome.JOINED]


@pytest.mark.parametrize("is_deleted", [True, False])
def test_what_a_store_has_of_a_user_is_used_once_the_log_after_it_is_read(is_deleted):
    """While a partition is elsewhere, a user may grow, or be deleted. A version proves what its sender knows."""
    world = ExecutorWorld()
    known = world.store.put("u", 40)
    world.store.put("v", 40)
    world.store.loading = world.store.settling = True
    named = world.rank("u", known, "named", budget_us=8_000_000)
    works = [world.rank(user, None, user, budget_us=8_000_000) for user in ("u", "v")]
    world.executor.partitions_read(frozenset([0]))
    world.run()
    assert (named.has_ended, [work.has_ended for work in works]) == (True, [False, False]), "it is open, and not read"
    if is_deleted:
        del world.store.histories["u"]
    else:
        world.store.put("u", 50)
    world.store.loading = world.store.settling = False
    world.executor.partitions_read(frozenset([0]))
    world.run()
    assert [work.prefix.tokens for work in (named, *works)] == [40, 0 if is_deleted else 50, 40]
    assert not any(work.prefix.loading for work in works)


def test_a_store_that_does_not_open_costs_no_deadline():
    world = ExecutorWorld()
    world.store.loading = world.store.settling = True
    work = world.rank(budget_us=30_000)
    world.run()
    world.idle_until(int(world.executor._timers.next_at_us))
    world.idle_until(work.deadline_us - 2 * HIT_US - 1_000)
    world.idle_until(work.deadline_us - HIT_US - 1_000)
    assert (work.has_ended, work.path, work.prefix.loading) == (True, Path.FULL, True)
    assert world.clock.monotonic_us() <= work.deadline_us


def test_the_wait_for_a_history_is_neither_a_time_in_the_queue_nor_one_outside_full_inference():
    """The trigger found nearly every user at risk, since requests waited for behaviours that never came."""
    world = ExecutorWorld()
    world.rank("v", world.store.put("v", 100), "no wait")
    world.run()
    world.store.put("u", 100)
    work = world.rank(version=history_of("u", 120, number=2).version(), budget_us=80_000)
    world.idle_until(world.clock.monotonic_us() + 20_000)
    assert work.history_wait_us == 20_000
    outside = [outside_us for _, outside_us in world.executor._requests.ends.full_path.outside_full]
    assert len(outside) == 2 and max(outside) == min(outside)
    timings = timings_of(work, work.answered_us)
    assert (timings.queue_us, timings.history_wait_us) == (0, 20_000)
    assert timings.total_us == 20_000 + timings.pre_infer_us + timings.rank_us


def test_a_partition_that_catches_up_during_a_look_up_says_loading():
    """The history was not there when it was asked for, so the store was loading, whatever it says afterwards."""
    world = ExecutorWorld()
    world.store.loading = True

    def get(user_id):
        world.store.loading = False

    world.store.get = get
    work = world.rank("u")
    world.run()
    assert work.prefix is not None
    assert (work.prefix.version, work.prefix.stale, work.prefix.loading) == (None, False, True)


def test_nothing_waits_for_a_version_longer_than_the_setting_however_late_its_deadline():
    world = ExecutorWorld(history_wait_ms=300)
    world.store.put("u", 100)
    newer = history_of("u", 120, number=2).version()
    world.rank(version=newer, budget_us=3_600_000_000)
    world.job(version=newer, request_id="other", lead_us=3_600_000_000)
    received_us = world.clock.monotonic_us()
    world.idle_until(received_us + 299_000)
    assert (world.outbox.answers, world.outbox.jobs) == (0, [])
    world.idle_until(received_us + 300_000)
    assert world.outbox.paths == [Path.FULL]
    assert world.outbox.jobs == [JobOutcome.JOINED], "the job goes on with the newest history"


def test_a_waiting_job_whose_version_never_comes_ends_when_its_request_is_expected():
    world = ExecutorWorld()
    world.job(version=history_of("u", 120, number=2).version())
    world.run()
    assert world.outbox.jobs == []
    world.idle_until(world.clock.monotonic_us() + 100_000)
    assert world.outbox.jobs == [JobOutcome.NO_HISTORY]
    world.job(version=history_of("u", 120, number=2).version(), request_id="again")
    assert world.outbox.jobs == [JobOutcome.NO_HISTORY] * 2, "it does not wait a second time"


def test_the_work_that_waits_for_a_version_is_bounded():
    world = ExecutorWorld(parked_jobs_max=2)
    version = history_of("u", 120, number=2).version()
    for number in range(3):
        world.job(version=version, request_id=f"r{number}")
    assert world.outbox.jobs == [JobOutcome.NO_HISTORY]


def test_requests_of_different_users_are_ranked_in_one_batch():
    world = ExecutorWorld()
    for user in ("a", "b", "c"):
        world.rank(user, world.store.put(user, 50), f"{user}1")
    world.run()
    world.engine.batches.clear()
    for user in ("a", "b", "c"):
        world.rank(user, None, f"{user}2")
    world.run()
    assert world.engine.batches == [3]


def test_no_batch_grows_so_long_that_its_first_request_is_late():
    world = ExecutorWorld()
    for number in range(5):
        world.rank(f"u{number}", budget_us=3_500, request_id=f"r{number}")
    world.run()
    assert max(world.engine.batches) == 3


def test_one_request_that_fails_in_a_batch_does_not_fail_its_neighbours():
    world = ExecutorWorld()
    world.engine.fail_candidates = 7
    for number, candidates in enumerate((5, 7, 9)):
        world.rank(f"u{number}", request_id=f"r{number}", candidates=candidates)
    world.run()
    assert len(world.outbox.ranked_works) == 2
    assert [(work.request.candidates.size, reason) for work, reason, _ in world.outbox.failures] == [
        (7, Reason.DEVICE_ERROR)
    ]


def test_a_failed_chunk_fails_its_request_and_frees_its_pages():
    world = ExecutorWorld()
    world.engine.fail_next = MemoryError("device out of memory")
    version = world.store.put("u", 100)
    world.rank(version=version)
    world.run()
    assert [reason for _, reason, _ in world.outbox.failures] == [Reason.OUT_OF_MEMORY]
    assert world.cache.stats().hbm.free == 128
    world.rank(version=version, request_id="r2")
    world.run()
    assert world.outbox.paths == [Path.FULL]


def test_too_many_candidates_and_too_long_a_suffix_are_refused_with_the_limit():
    world = ExecutorWorld()
    world.rank(candidates=101)
    most = LIMITS.max_suffix_behaviours
    world.rank(suffix=most + 1, request_id="r2")
    world.rank(candidates=100, suffix=most, request_id="r3")
    world.run()
    assert [(reason, detail) for _, reason, detail in world.outbox.failures] == [
        (Reason.TOO_LONG, "101 candidates, the model takes 100"),
        (Reason.TOO_LONG, f"{most + 1} suffix behaviours, the model takes {most}"),
    ]


def test_without_room_in_the_cache_full_inference_runs_on_the_scratch_pages_one_by_one():
    world = ExecutorWorld(hbm_pages=8)
    for user in ("a", "b"):
        world.rank(user, world.store.put(user, 200), f"r-{user}")
    world.run()
    assert world.outbox.paths == [Path.FULL, Path.FULL]
    assert world.cache.stats().hbm.free == 8


def test_without_room_a_job_ends_as_no_room():
    world = ExecutorWorld(hbm_pages=8)
    world.job(version=world.store.put("u", 200))
    world.run()
    assert world.outbox.jobs in ([JobOutcome.NO_ROOM], [JobOutcome.OVER_FOOTPRINT])


def test_the_baseline_reuses_nothing():
    world = ExecutorWorld(reuse_prefixes=False)
    version = world.store.put("u", 100)
    world.job(version=version)
    for number in range(2):
        world.rank(version=version, request_id=f"r{number}")
        world.run()
    assert world.outbox.jobs == [JobOutcome.DISABLED]
    assert world.outbox.paths == [Path.FULL, Path.FULL]


def test_a_prefix_waits_leased_for_its_request_and_is_not_evicted_by_others():
    world = ExecutorWorld(hbm_pages=32)
    version = world.store.put("a", 300)
    world.job("a", version, "r1")
    world.run()
    for number in range(3):
        user = f"b{number}"
        world.rank(user, world.store.put(user, 300), f"x{number}")
        world.run()
    world.rank("a", version, "r1")
    world.run()
    assert world.outbox.paths[-1] is Path.HBM


def test_a_lease_that_nobody_ends_is_freed():
    world = ExecutorWorld()
    world.job(version=world.store.put("u", 100), lead_us=10_000, budget_ms=10)
    world.run()
    assert world.cache.stats().hbm.leased > 0
    world.idle_until(world.clock.monotonic_us() + 1_000_000)
    assert world.cache.stats().hbm.leased == 0


def test_a_deleted_user_leaves_nothing_in_the_cache():
    world = ExecutorWorld()
    version = world.store.put("u", 100)
    world.rank(version=version)
    world.run()
    world.executor.user_deleted("u")
    world.mover.finish()
    assert world.cache.stats().hbm.free == 128
    assert world.cache.stats().dram.free == 128


def deleted(world: ExecutorWorld, user_id: str) -> list[object]:
    """Deletes the user as the history follower does, ends all work, and returns what the cache has of the user."""
    world.cache.invalidate_user(user_id)
    world.store.histories.pop(user_id)
    world.executor.user_deleted(user_id)
    for _ in range(3):
        world.mover.finish()
        world.run()
    return [entry for tier in world.cache.ledger.tiers for entry in tier.index.of_user(user_id)]


def test_a_user_deleted_in_mid_computation_is_still_answered_and_leaves_nothing():
    world = ExecutorWorld()
    world.rank(version=world.store.put("u", 300))
    world.executor.step()
    assert deleted(world, "u") == []
    assert (world.outbox.answers, world.outbox.paths) == (1, [Path.FULL])


def test_a_user_deleted_before_a_computation_begins_is_still_answered_and_leaves_nothing():
    world = ExecutorWorld()
    world.rank(version=world.store.put("u", 300))
    assert deleted(world, "u") == []
    assert (world.outbox.answers, world.outbox.paths) == (1, [Path.FULL])


@pytest.mark.parametrize("is_job", [True, False])
def test_a_user_deleted_during_a_reload_leaves_nothing(is_job: bool):
    world, version = world_with_a_in_dram()
    answers, jobs = world.outbox.answers, len(world.outbox.jobs)
    (world.job if is_job else world.rank)("a", version, "r9")
    assert deleted(world, "a") == []
    assert world.outbox.jobs[jobs:] == ([JobOutcome.NO_HISTORY] if is_job else [])
    assert world.outbox.answers - answers == (0 if is_job else 1)


def test_a_job_that_waits_for_another_version_of_a_user_who_is_deleted_leaves_nothing():
    world = ExecutorWorld()
    world.job(version=world.store.put("u", 200), request_id="r1")
    world.executor.step()
    world.job(version=world.store.put("u", 300, number=2), request_id="r2")
    assert deleted(world, "u") == []
    assert sorted(world.outbox.jobs) == [JobOutcome.FAILED, JobOutcome.NO_HISTORY]


def test_the_prefix_of_a_user_who_returns_after_a_deletion_is_cached_again():
    world = ExecutorWorld()
    world.rank(version=world.store.put("u", 300))
    assert deleted(world, "u") == []
    version = world.store.put("u", 20)
    for number in range(2):
        world.rank(version=version, request_id=f"again-{number}")
        world.run()
    assert world.outbox.paths[-2:] == [Path.FULL, Path.HBM]


def test_a_prefix_counts_as_deleted_where_its_deletion_may_be_forgotten():
    deletions, resolver = Deletions(2), ExecutorWorld().executor._resolver
    unknown = resolver.history("z", None, None, 0)
    prefixes = {user: resolver.prefix(user, unknown, 0, Scored(0, 4)) for user in "abcz"}
    for user in "abc":
        deletions.add(user)
    # The deletion of "a" is no longer known, so "z" may have been deleted, too.
    assert all(deletions.cover(prefix) for prefix in prefixes.values())
    for prefix in prefixes.values():
        prefix.deletions = deletions.count
    assert not any(deletions.cover(prefix) for prefix in prefixes.values())


def test_jobs_that_were_admitted_are_not_charged_again_for_another_model(monkeypatch: pytest.MonkeyPatch):
    charged: list[int] = []
    admit = OwnerBuckets.admit

    def counted(self: OwnerBuckets, estimate: Estimate, now_us: int, scenario: str) -> Refusal | None:
        charged.append(estimate.prefix_tokens)
        return admit(self, estimate, now_us, scenario)

    monkeypatch.setattr(OwnerBuckets, "admit", counted)
    world = ExecutorWorld()
    for number in range(3):
        world.job(f"u{number}", world.store.put(f"u{number}", 100), f"r{number}", lead_us=3_000_000)
    world.executor.serve_with(FakeEngine(world.clock, namespace=b"m2", revision="m2", outbox=world.outbox))
    world.run()
    assert world.outbox.jobs == [JobOutcome.COMPUTED] * 3
    assert len(charged) == 3


def test_beyond_its_bound_the_job_queue_sheds_the_job_that_saves_least():
    world = ExecutorWorld(preinfer_queue_max=2)
    for user, length in (("a", 300), ("b", 20), ("c", 200)):
        world.job(user, world.store.put(user, length), f"r-{user}")
    assert world.outbox.jobs == [JobOutcome.SHED]
    world.run()
    assert world.engine.chunks[-1][1] in (300, 200)
    assert world.outbox.jobs.count(JobOutcome.COMPUTED) == 2


def test_beyond_its_bound_the_job_queue_drops_expired_jobs_first():
    world = ExecutorWorld(preinfer_queue_max=2)
    world.job("a", world.store.put("a", 300), "r-a", lead_us=1_000, budget_ms=1)
    world.job("b", world.store.put("b", 20), "r-b")
    world.clock.advance_us(10_000)
    world.job("c", world.store.put("c", 200), "r-c")
    assert world.outbox.jobs == [JobOutcome.EXPIRED]


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(6))
def test_every_request_gets_exactly_one_answer_whatever_happens(seed: int):
    world = ExecutorWorld(
        hbm_pages=40, dram_pages=40, preinfer_queue_max=3, parked_jobs_max=3, mix_chunks=seed % 2 == 0
    )
    random = np.random.default_rng(seed)
    lengths = {f"u{user}": int(random.integers(1, 400)) for user in range(8)}
    asked = jobs = 0
    for step in range(400):
        user = f"u{random.integers(8)}"
        choice = random.integers(10)
        if choice < 3:
            jobs += 1
            world.job(user, history_of(user, lengths[user], lengths[user]).version(), f"r{step}")
        elif choice < 6:
            asked += 1
            budget_us = int(random.integers(-1_000, 30_000))
            world.rank(user, history_of(user, lengths[user], lengths[user]).version(), f"r{step}", budget_us)
        elif choice == 6:
            lengths[user] += int(random.integers(0, 30))
            world.store.put(user, lengths[user], number=lengths[user])
            world.executor.histories_changed([user])
        elif choice == 7:
            world.mover.finish(ok=bool(random.integers(4)))
        elif choice == 8:
            world.executor.user_deleted(user)
        else:
            world.engine.fail_next = RuntimeError("kernel failed") if random.integers(3) == 0 else None
        for _ in range(random.integers(4)):
            world.executor.step()
        check_invariants(world.cache)
    world.mover.finish()
    world.run()
    world.idle_until(world.clock.monotonic_us() + 1_000_000)
    world.mover.finish()
    world.run()
    assert world.outbox.answers == asked
    assert len(world.outbox.jobs) == jobs
    assert world.executor.ranking_outstanding == 0
    assert world.cache.stats().hbm.pinned == 0


def test_the_digest_of_a_shortened_history_is_never_looked_up():
    """The prefix of a truncated request must not enter the cache, where the key stands for the whole prefix."""
    world = ExecutorWorld()
    version = world.store.put("u", 500)
    world.rank(version=version, budget_us=3_000)
    world.run()
    assert world.outbox.paths == [Path.TRUNCATED]
    history = world.store.histories["u"].history
    assert digest_chain(history.features, history.behaviours).length == 500
    assert world.cache.stats().hbm.free == 128


def test_a_request_whose_version_is_ready_does_not_wait_while_a_newer_one_is_computed():
    world = ExecutorWorld()
    older = world.store.put("u", 64)
    world.rank(version=older, request_id="r0")
    world.run()
    world.job(version=world.store.put("u", 480, number=2), request_id="r1")
    world.executor.step()
    assert world.outbox.jobs == [], "the newer one has begun"
    work = world.rank(version=older, request_id="r2")
    world.run()
    assert (work.path, work.tokens_cached, work.pre_infer_us) == (Path.HBM, 64, 0)
    assert world.outbox.jobs == [JobOutcome.COMPUTED]


def test_a_cached_part_that_can_not_grow_for_lack_of_room_is_ranked_with_the_rest_as_suffix():
    world = ExecutorWorld(hbm_pages=8)
    world.rank(version=world.store.put("u", 64), request_id="r0")
    world.run()
    world.job("v", world.store.put("v", 64), "r1")
    world.run()
    chunks = list(world.engine.chunks)
    work = world.rank(version=world.store.put("u", 64 + LIMITS.max_suffix_behaviours, number=2), request_id="r2")
    world.run()
    assert (work.path, work.tokens_cached) == (Path.HBM, 64)
    assert (work.prefix.tokens, len(work.suffix)) == (128, 64)
    assert world.engine.chunks == chunks, "nothing was computed for the cache"


def test_a_tail_that_there_is_no_time_to_compute_is_ranked_as_suffix_and_not_cached():
    world = ExecutorWorld()
    world.rank(version=world.store.put("u", 400), request_id="r0")
    world.run()
    grown = world.store.put("u", 440, number=2)
    # 40 tokens take 400 µs as an append, 4,000 µs as suffix rows: make the append the more expensive one.
    world.corrector.calibrated = world.corrector._model = LatencyModel(replace(COEFFICIENTS, b0=20_000.0))
    work = world.rank(version=grown, request_id="r2", budget_us=10_000)
    world.run()
    assert (work.path, work.tokens_cached, work.ranked_prefix_tokens) == (Path.HBM, 400, 400)
    assert np.array_equal(work.suffix.items, np.arange(400, 440))
    key = PrefixKeys.of(world, "u")
    assert world.cache.peek(key).hbm_behaviours == 400


def test_a_cached_part_that_can_not_grow_for_lack_of_room_is_reported_as_full_inference():
    world = ExecutorWorld(hbm_pages=8)
    world.rank(version=world.store.put("u", 64), request_id="r0")
    world.run()
    world.job("v", world.store.put("v", 64), "r1")
    world.run()
    assert world.cache.stats().hbm.leased == 4
    work = world.rank(version=world.store.put("u", 129, number=2), request_id="r2")
    world.run()
    assert (work.path, work.tokens_cached, work.prefix_source) == (Path.FULL, 0, PrefixSource.COMPUTED)
    assert world.engine.chunks[-2:] == [(0, 96), (96, 129)]


def test_a_job_that_ends_after_its_request_was_answered_leases_nothing():
    world = ExecutorWorld(max_clock_skew_ms=0)
    version = world.store.put("u", 480)
    world.job(version=version)
    world.executor.step()
    work = world.rank(version=version, budget_us=2_500)
    world.run()
    assert work.path is Path.TRUNCATED
    assert world.outbox.jobs == [JobOutcome.COMPUTED]
    assert world.cache.stats().leases == 0
    assert dict(world.cache.stats().wasted) == {WasteReason.OVERTAKEN: 1}


def test_a_request_of_another_user_with_the_same_id_ends_no_lease_and_overtakes_no_job():
    """Whoever could write a request with a known id freed the prefix of its user, and dropped its later job."""
    world = ExecutorWorld()
    version = world.store.put("u", 100)
    world.job("u", version, "r1")
    world.run()
    assert world.cache.stats().leases == 1
    world.rank("v", world.store.put("v", 10), "r1")
    world.rank("v", world.store.put("v", 10), "r2")
    world.run()
    assert world.cache.stats().leases == 1
    world.job("u", version, "r2")
    world.run()
    assert (world.outbox.jobs, world.cache.stats().leases) == ([JobOutcome.COMPUTED, JobOutcome.ALREADY_CACHED], 2)


def test_a_job_that_joins_the_computation_of_a_request_computed_nothing():
    world = ExecutorWorld()
    version = world.store.put("u", 480)
    world.rank(version=version)
    world.executor.step()
    world.job(version=version, request_id="r2")
    world.run()
    assert world.outbox.jobs == [JobOutcome.JOINED]


def test_a_prefix_that_another_request_uses_is_not_wasted_because_its_own_went_before():
    world = ExecutorWorld(max_clock_skew_ms=0)
    version = world.store.put("u", 480)
    world.job(version=version)
    world.executor.step()
    world.rank(version=version, budget_us=2_500)
    other = world.rank(version=version, request_id="r2")
    world.run()
    assert (other.path, world.outbox.jobs) == (Path.PENDING, [JobOutcome.COMPUTED])
    assert dict(world.cache.stats().wasted) == {}


def test_a_prefix_that_is_taken_away_before_its_request_came_is_wasted_as_invalidated():
    world = ExecutorWorld()
    version = world.store.put("u", 100)
    world.job(version=version)
    world.run()
    world.executor.user_deleted("u")
    assert dict(world.cache.stats().wasted) == {WasteReason.INVALIDATED: 1}


def test_a_lease_ends_a_margin_after_the_request_should_have_come_and_its_prefix_is_wasted():
    world = ExecutorWorld(lease_margin_ms=30)
    asked_us = world.clock.monotonic_us()
    world.job(version=world.store.put("u", 100), lead_us=40_000, budget_ms=20)
    world.run()
    assert world.outbox.jobs == [JobOutcome.COMPUTED]
    ends_us = asked_us + 40_000 + 20_000 + 30_000
    world.cache.expire_leases(ends_us - 1)
    assert world.cache.stats().hbm.leased > 0
    world.cache.expire_leases(ends_us)
    stats = world.cache.stats()
    assert (stats.hbm.leased, stats.leases_leaked) == (0, 1)
    assert dict(stats.wasted) == {WasteReason.LEASE_EXPIRED: 1}


def test_a_job_from_a_clock_that_runs_ahead_holds_its_prefix_for_a_minute_at_most():
    world = ExecutorWorld()
    version = world.store.put("u", 100)
    world.rank(version=version, request_id="r0")
    world.run()
    world.job(version=version, request_id="r1", lead_us=10**12)
    world.run()
    assert (world.outbox.jobs, world.cache.stats().leases) == ([JobOutcome.ALREADY_CACHED], 1)
    world.idle_until(world.clock.monotonic_us() + 61_000_000)
    assert world.cache.stats().leases == 0


def test_a_history_just_above_the_models_longest_keeps_most_of_it():
    world = ExecutorWorld()
    work = world.rank(version=world.store.put("u", LIMITS.max_prefix_behaviours + 1))
    world.run()
    assert work.path is Path.FULL
    assert work.prefix.tokens == LIMITS.max_prefix_behaviours * 3 // 4 + 1


def test_a_job_of_a_deleted_user_is_not_computed():
    world = ExecutorWorld()
    world.job(version=world.store.put("u", 100))
    world.executor.user_deleted("u")
    world.run()
    assert world.outbox.jobs == [JobOutcome.NO_HISTORY]
    assert world.engine.chunks == []


def test_an_error_in_one_computation_ends_only_that_computation():
    world = ExecutorWorld()
    world.copy_page = None  # A copy that cannot be made.
    world.rank(version=world.store.put("u", 100))
    world.run()
    first = world.cache.acquire(PrefixKeys.of(world, "u"), world.clock.monotonic_us())
    assert isinstance(first, Hit)
    world.rank(version=world.store.put("u", 130, number=2), request_id="r2")
    world.rank("v", world.store.put("v", 50), request_id="r3")
    world.run()
    assert [work.request.request_id for work, _, _ in world.outbox.failures] == ["r2"]
    assert [work.request.request_id for work in world.outbox.ranked_works] == ["r", "r3"]


def test_a_job_for_a_prefix_in_dram_is_charged_the_pages_that_it_takes():
    """Otherwise jobs that compute would be admitted into room that reloaded prefixes have taken."""
    world, first = world_with_a_in_dram()
    buckets = world.executor._parts.admission._buckets
    before = buckets._footprint._levels["default"]
    world.job("a", first, "r3", lead_us=100_000)
    assert buckets._footprint._levels["default"] - before == 400 * GEOMETRY.bytes_per_token * 100_000
    world.run()
    world.mover.finish()
    world.run()
    assert world.outbox.jobs == [JobOutcome.RELOADED]


def test_a_job_that_waits_for_another_version_is_charged_once():
    world = ExecutorWorld()
    charged = []
    refuse = world.executor._parts.admission.refuse

    def counted(work, *rest):
        charged.append(work.job.request_id)
        return refuse(work, *rest)

    world.executor._parts.admission.refuse = counted
    world.job(version=world.store.put("u", 100), request_id="r1")
    world.job(version=world.store.put("u", 200, number=2), request_id="r2")
    world.run()
    assert world.outbox.jobs == [JobOutcome.COMPUTED, JobOutcome.COMPUTED]
    assert charged == ["r1", "r2"]


def test_full_inference_that_takes_longer_than_calibrated_is_reported_to_the_triggers():
    """Triggers admit impressions that full inference would make late. With too short times they admitted none."""
    world = ExecutorWorld()
    slow = replace(COEFFICIENTS, a0=COEFFICIENTS.a0 / 2, a1=COEFFICIENTS.a1 / 2)
    world.corrector.recalibrate(LatencyModel(slow))
    for number in range(200):
        world.rank(f"u{number}", world.store.put(f"u{number}", 100), f"r{number}")
        world.run()
        world.mover.finish()
    assert set(world.outbox.paths) == {Path.FULL}
    took_us = 100 * TOKEN_US + HIT_US
    assert world.executor.latency_of_prefixes.full_us(100, 10) == pytest.approx(took_us, rel=0.01)


def test_an_append_does_not_correct_the_prediction_of_full_inference():
    world = ExecutorWorld()
    world.rank(version=world.store.put("u", 100))
    world.run()
    before = world.corrector.factor(Stage.FULL)
    world.corrector.recalibrate(LatencyModel(COEFFICIENTS))
    work = world.rank(version=world.store.put("u", 130, number=2), request_id="r2")
    world.run()
    assert (work.path, work.pre_infer_us, world.corrector.factor(Stage.FULL)) == (Path.HBM, 30 * TOKEN_US, 1.0)
    assert before != 1.0


def test_triggers_get_the_time_of_a_prefix_in_chunks():
    world = ExecutorWorld(chunk_ms=1.0)
    world.corrector.recalibrate(LatencyModel(replace(COEFFICIENTS, b0=200.0)))
    # Pieces of 80 tokens: five pages in a millisecond, the fixed part paid for each.
    expected = LIMITS.max_prefix_behaviours * TOKEN_US + 7 * 200
    assert world.executor.latency_of_prefixes.pre_us(LIMITS.max_prefix_behaviours) == pytest.approx(expected)


class PrefixKeys:
    """The keys that the worker makes."""

    @staticmethod
    def of(world: ExecutorWorld, user_id: str) -> PrefixKey:
        stored = world.store.histories[user_id]
        return PrefixKey(user_id, world.engine.namespace, stored.chain, stored.history.behaviours)


def test_an_expired_request_marks_its_unused_prefix_as_wasted():
    world = ExecutorWorld()
    version = world.store.put("u", 100)
    world.job(version=version)
    world.run()
    world.rank(version=version, budget_us=-10_000)
    world.run()
    assert dict(world.cache.stats().wasted) == {WasteReason.REQUEST_EXPIRED: 1}


def test_a_request_that_overtakes_a_queued_append_hits_the_cached_part():
    world = ExecutorWorld()
    world.rank(version=world.store.put("u", 100))
    world.run()
    grown = world.store.put("u", 130, number=2)
    world.job(version=grown, request_id="r2")
    work = world.rank(version=grown, request_id="r2")
    world.run()
    assert (work.path, work.tokens_cached) == (Path.HBM, 100)


def test_each_request_counts_as_one_look_up_with_its_first_outcome():
    """A request that waits or computes looks its prefix up again. When counted, full inference was half a hit."""
    world = ExecutorWorld()
    version = world.store.put("u", 300)
    world.rank(version=version, request_id="full")
    world.run()
    world.rank(version=version, request_id="hbm")
    world.run()
    other = world.store.put("v", 300)
    world.job("v", other, "j")
    world.executor.step()
    world.rank("v", other, "pending")
    world.run()
    late = world.store.put("w", 300)
    world.job("w", late, "overtaken")
    world.rank("w", late, "overtaken")
    world.run()
    assert world.outbox.paths == [Path.FULL, Path.HBM, Path.PENDING, Path.FULL]
    stats = world.cache.stats()
    assert (stats.hits, dict(stats.joins), dict(stats.misses)) == (
        1, {PendingKind.FILL: 1}, {MissReason.ABSENT: 2},
    )  # fmt: skip
    assert dict(stats.wasted) == {}


def test_a_prefix_that_comes_back_from_dram_is_one_look_up():
    world, first = world_with_a_in_dram()
    before = world.cache.stats().lookups
    world.rank("a", first, "r3")
    world.run()
    world.mover.finish()
    world.run()
    assert world.outbox.paths[-1] is Path.DRAM
    assert world.cache.stats().lookups == before + 1


def test_however_many_wait_for_the_scratch_pages_each_gets_its_turn():
    """The request that used the pages was queued behind more waiting prefixes than a batch passes over: a deadlock."""
    world = ExecutorWorld(hbm_pages=8, max_batch_requests=4)
    for number in range(30):
        user = f"u{number}"
        world.rank(user, world.store.put(user, 300), f"r{number}", budget_us=60_000_000)
    world.run(steps=2_000)
    assert world.outbox.paths == [Path.FULL] * 30


def with_cheap_rows(world: ExecutorWorld) -> ExecutorWorld:
    """The predictions are, and stay: a row takes as long in the suffix as in an append, which takes 1 ms besides."""
    world.corrector.recalibrate(LatencyModel(replace(COEFFICIENTS, b0=1_000.0, c1=float(TOKEN_US))))
    world.corrector.observe = lambda *_: None
    return world


def test_a_short_tail_is_ranked_with_the_suffix_until_it_pays_to_append_it():
    world = with_cheap_rows(ExecutorWorld())
    tails, version = [], world.store.put("u", 200)
    world.rank(version=version, request_id="r0")
    world.run()
    for number in range(1, 8):
        version = world.store.put("u", 200 + 8 * number, number=number + 1)
        work = world.rank(version=version, request_id=f"r{number}")
        world.run()
        assert (work.path, work.pre_infer_us > 0) == (Path.HBM, not len(work.suffix))
        tails.append(len(work.suffix))
    # Half of 1,000 µs is as much as 10 n µs for n = 50.
    assert tails == [8, 16, 24, 32, 40, 48, 0]
    check_invariants(world.cache)


def test_requests_that_nobody_announced_count_as_helped_by_a_cut_with_a_short_tail_too():
    world = with_cheap_rows(ExecutorWorld())
    counted = []
    for number, length in enumerate((200, 200, 208)):
        world.rank(version=world.store.put("u", length, number=number + 1), request_id=f"r{number}")
        world.run()
        counted.append(len(world.executor._requests._arrivals._seen))
    assert counted == [0, 1, 2], "computed, complete, and with a short tail"


def test_without_a_tail_every_history_that_grew_is_appended():
    world = with_cheap_rows(ExecutorWorld(longest_tail=0))
    for number, length in enumerate((200, 208, 216)):
        work = world.rank(version=world.store.put("u", length, number=number + 1), request_id=f"r{number}")
        world.run()
        assert (len(work.suffix), work.ranked_prefix_tokens) == (0, length)


def test_a_job_whose_request_can_be_ranked_with_a_short_tail_computes_nothing_and_leases_the_prefix():
    world = with_cheap_rows(ExecutorWorld())
    world.rank(version=world.store.put("u", 200), request_id="r0")
    world.run()
    chunks = list(world.engine.chunks)
    grown = world.store.put("u", 208, number=2)
    world.job(version=grown, request_id="r1")
    world.run()
    assert (world.outbox.jobs, world.cache.stats().leases) == ([JobOutcome.ALREADY_CACHED], 1)
    work = world.rank(version=grown, request_id="r1")
    world.run()
    assert (work.path, len(work.suffix), world.cache.stats().leases) == (Path.HBM, 8, 0)
    assert world.engine.chunks == chunks


def test_a_job_for_a_prefix_in_dram_reloads_it_and_leaves_a_short_tail_to_the_suffix():
    world, _ = world_with_a_in_dram()
    with_cheap_rows(world)
    chunks = list(world.engine.chunks)
    world.job("a", world.store.put("a", 408, number=2), "r3")
    world.run()
    world.mover.finish()
    world.run()
    assert world.outbox.jobs == [JobOutcome.RELOADED]
    assert world.engine.chunks == chunks
