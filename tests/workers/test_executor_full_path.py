"""The executor's report of how full inference ends, for the triggers' test of the risk."""

from __future__ import annotations

import pytest

from relaygr.admission.latency import length_bucket
from relaygr.admission.lead import LEAST_SAMPLES
from relaygr.schemas.messages import FullPathReport, Path
from tests.worlds.executor import HIT_US, TOKEN_US, ExecutorWorld

LENGTH = 400
FULL_US = LENGTH * TOKEN_US + HIT_US
BUCKET = length_bucket(LENGTH)


def report(world: ExecutorWorld) -> FullPathReport:
    return world.executor.full_path_report(world.executor.latency_of_prefixes)


def test_a_request_that_was_cut_or_rejected_without_a_job_is_named() -> None:
    world = ExecutorWorld()
    version = world.store.put("u", LENGTH)
    cut = world.rank("u", version, "cut", budget_us=FULL_US // 2)
    world.run()
    world.rank("v", world.store.put("v", LENGTH), "rejected", budget_us=HIT_US // 2)
    world.run()
    world.rank("u", version, "whole")
    world.run()
    assert cut.path is Path.TRUNCATED
    assert report(world).missed == ("cut", "rejected")


def test_a_request_with_a_job_is_no_mistake_of_the_trigger() -> None:
    world = ExecutorWorld()
    version = world.store.put("u", LENGTH)
    world.job("u", version, "r")
    cut = world.rank("u", version, "r", budget_us=FULL_US // 2)
    world.run()
    assert cut.path is Path.TRUNCATED
    assert report(world).missed == ()


def test_a_prepared_request_is_needless_if_full_inference_had_the_time() -> None:
    world = ExecutorWorld()
    for name, budget_us in (("roomy", 2 * FULL_US), ("tight", FULL_US // 2)):
        version = world.store.put(name, LENGTH)
        world.job(name, version, name)
        world.run()
        assert world.rank(name, version, name, budget_us=budget_us).has_ended is False
        world.run()
    sent = report(world)
    assert (sent.prepared[BUCKET], sent.needless[BUCKET]) == (2, 1)
    assert world.registry.get_sample_value("relaygr_worker_preinfer_needless_total") == 1


def test_a_prefix_that_the_job_found_in_the_cache_took_no_device_time_and_is_not_counted() -> None:
    world = ExecutorWorld()
    version = world.store.put("u", LENGTH)
    for request_id in ("computes", "finds"):
        world.job("u", version, request_id)
        world.run()
        world.rank("u", version, request_id, budget_us=2 * FULL_US)
        world.run()
    assert (report(world).prepared[BUCKET], report(world).needless[BUCKET]) == (1, 1)


def test_the_ratio_is_of_measured_and_predicted_full_inference() -> None:
    world = ExecutorWorld(hbm_pages=1024, preinfer_queue_max=1024)
    for number in range(40):
        world.rank(f"u{number}", world.store.put(f"u{number}", LENGTH), f"r{number}")
        world.run()
    ratio = report(world).ratios[BUCKET]
    assert 0.95 <= ratio <= 1.05
    shown = world.registry.get_sample_value("relaygr_worker_full_path_ratio", {"tokens": str(1 << (BUCKET - 1))})
    assert shown == ratio


def test_lead_times_are_those_from_retrieval_to_the_request_of_each_job() -> None:
    world = ExecutorWorld(hbm_pages=1024, preinfer_queue_max=1024)
    for number in range(LEAST_SAMPLES):
        version = world.store.put(f"u{number}", 100)
        comes_us = world.clock.monotonic_us() + 60_000
        world.job(f"u{number}", version, f"r{number}", lead_us=100_000)
        world.run()
        world.idle_until(comes_us)
        world.rank(f"u{number}", version, f"r{number}")
        # A request without a job has no known beginning.
        world.rank(f"u{number}", version, f"other{number}")
        world.run()
    sent = world.executor.lead_time_report()
    assert sent is not None
    assert (sent.scenarios, sent.low_us, sent.median_us) == (("default",), (60_000,), (60_000,))
    assert sent.low_shares == (0.6,)
    assert world.executor.lead_times()["default"].median_share == 0.6


def test_the_time_outside_device_work_counts_the_way_the_queue_and_the_reply_margin() -> None:
    world = ExecutorWorld()
    version = world.store.put("u", LENGTH)
    for number in range(2):
        work = world.rank("u", version, f"r{number}")
        work.answer_by_us -= 500
        work.received_wall_us = work.request.sent_at_us + 3_000
        world.clock.advance_us(700)
        world.run()
    assert report(world).outside_us == 500 + 3_000 + 700


@pytest.mark.parametrize("unit", [pytest.param(0, id="0"), pytest.param(1_000, id="ms instead of µs")])
def test_a_request_with_a_wrong_time_of_sending_does_not_count_for_the_time_outside(unit: int) -> None:
    """It was the P99 of the time outside, above any ranking budget, so that triggers held every user at risk."""
    world = ExecutorWorld()
    version = world.store.put("u", LENGTH)
    for number in range(LEAST_SAMPLES):
        world.rank("u", version, f"r{number}", sent_ago_us=500)
        world.run()
    wall_us = world.clock.wall_us()
    wrong = world.rank("u", version, "wrong", sent_ago_us=wall_us - (wall_us // unit if unit else 0))
    world.run()
    assert wrong.has_ended
    assert report(world).outside_us == 500


def test_requests_of_a_gateway_whose_clock_is_ahead_count_without_their_way() -> None:
    world = ExecutorWorld()
    version = world.store.put("u", LENGTH)
    for number in range(2):
        world.rank("u", version, f"r{number}", sent_ago_us=-3_000)
        world.clock.advance_us(700)
        world.run()
    assert report(world).outside_us == 700


def test_the_wait_of_full_inference_is_reported_beside_that_of_all_requests() -> None:
    world = ExecutorWorld(hbm_pages=1024)
    hit = world.store.put("hit", LENGTH)
    world.rank("hit", hit, "first")
    world.run()
    for number in range(2 * LEAST_SAMPLES):
        full = world.rank(f"u{number}", world.store.put(f"u{number}", LENGTH), f"full{number}", budget_us=20 * FULL_US)
        for other in range(20):
            world.rank("hit", hit, f"hit{number}.{other}")
        world.run()
        assert full.path is Path.FULL
    sent = report(world)
    assert sent.full_outside_us is not None
    assert sent.full_outside_us > 2 * HIT_US
    assert sent.full_outside_us >= sent.outside_us
