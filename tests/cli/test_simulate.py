"""The simulation of a fleet: against queueing theory and the product's own schedule, and from the command line."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import simpy
from scipy import stats
from typer.testing import CliRunner

from relaygr.admission.latency import LatencyModel
from relaygr.cli.app import app
from relaygr.cli.fleet_options import plan_caveats
from relaygr.cli.fleet_output import PlanRow, plain, plan_json, plan_table, table_of
from relaygr.runtime.errors import RelayError
from relaygr.schemas.messages import Path as RankingPath
from relaygr.schemas.messages import PreInferJob, RankingRequest, StageTimings
from relaygr.schemas.partitioner import partition_for
from relaygr.settings import load_settings
from relaygr.simulate import plan as plan_module
from relaygr.simulate import worker as worker_module
from relaygr.simulate.case import Case, System, case_of, shape_of_tokens
from relaygr.simulate.demand import Demand, partitions_of
from relaygr.simulate.device import EPOCH_US, SharedHistories, behaviours_of
from relaygr.simulate.figures import CODE, NO_LATENCY, Figures, PartOutcome, Requests, figures_of
from relaygr.simulate.fleet import FleetSize, Runner, parts_of, simulate
from relaygr.simulate.plan import CapacityPlan, Probe, least_workers, plan_capacity
from relaygr.simulate.relay import RelaySimulation
from relaygr.simulate.times import MeasuredTimes, learn, load_times, save_times
from relaygr.simulate.worker import SimulatedWorker
from relaygr.traffic.population import SyntheticPopulation
from relaygr.traffic.records import ImpressionRecord, RecordWriter
from relaygr.traffic.schedule import Impression, impressions
from relaygr.worker.executor.work import RankingWork
from relaygr.worker.results import timings_of
from tests.worlds.simulated import COEFFICIENTS, NO_TIMES, calibration_in

TOKENS, CANDIDATES = 512, 64
LATENCY = LatencyModel(COEFFICIENTS)
"""A prefix of 512 tokens takes 10.2 ms, a ranking 0.3 ms."""


def case(
    *settings: str,
    system: System = System.RELAY,
    times: MeasuredTimes = NO_TIMES,
    day_s: float | None = None,
    on_cpu: bool = True,
    rate: float = 20,
    seconds: float = 20,
) -> Case:
    """Users with histories of one length; `settings` change that."""
    loaded = load_settings(
        None,
        environment={},
        overrides=(
            "partitions=12",
            f"traffic.rate_per_s={rate}",
            f"traffic.duration_s={seconds}",
            "traffic.users=400",
            f"traffic.history_median={TOKENS}",
            "traffic.history_sigma=0",
            "traffic.history_max=1024",
            "traffic.growth=0",
            "traffic.suffix=0",
            f"traffic.candidates={CANDIDATES}",
            "traffic.budget_ms=40",
            *settings,
        ),
    )
    shape = shape_of_tokens(2048, loaded)
    return case_of(loaded, shape, LATENCY, times, on_cpu=on_cpu, system=system, day_s=day_s)


def outcome(one: Case) -> PartOutcome:
    return RelaySimulation(one, range(one.demand.partitions)).run()


def share(done: PartOutcome, ending: str) -> float:
    return float((done.requests.endings == CODE[ending]).mean())


# -- the model ------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("load", [0.3, 0.6])
def test_without_the_relay_the_mean_latency_is_that_of_an_m_d_1_queue(load: float):
    service_us = LATENCY.append_us(0, TOKENS) + LATENCY.hit_us(TOKENS, CANDIDATES)
    parts = [
        outcome(
            case(
                "traffic.budget_ms=20000", "worker.max_batch_requests=1", f"traffic.seed={seed}",
                system=System.OFF, rate=load * 1e6 / service_us, seconds=40,
            )
        )
        for seed in range(4)
    ]  # fmt: skip
    means_us = [float(part.requests.latencies_us.mean()) for part in parts]
    expected_us = service_us + load * service_us / (2 * (1 - load))
    assert all(share(part, RankingPath.FULL) == 1 for part in parts)
    error_us = 3.2 * float(np.std(means_us, ddof=1)) / 2
    assert np.mean(means_us) == pytest.approx(expected_us, abs=max(error_us, 0.02 * expected_us))


@pytest.mark.slow
def test_the_device_thread_is_busy_with_device_work_and_with_the_workers_own():
    times = NO_TIMES.model_copy(update={"look_up_us": 3_000.0, "answer_us": 2_000.0})
    for one, own_s in ((NO_TIMES, 0.0), (times, 0.005)):
        done = outcome(case("traffic.budget_ms=2000", system=System.OFF, times=one, rate=10, seconds=60))
        assert done.thread_s == pytest.approx(done.device_s + own_s * len(done.requests), rel=0.01)


def test_a_request_is_looked_up_also_if_its_job_has_read_the_history():
    # The trigger prepares each request, since full inference takes longer than the time limit.
    settings = ("traffic.budget_ms=8", "worker.reply_margin_ms=0")
    none, some = (
        outcome(case(*settings, times=NO_TIMES.model_copy(update={"look_up_us": each}), rate=2))
        for each in (0.0, 3_000.0)
    )
    assert share(some, RankingPath.HBM) > 0.9
    later_us = np.median(some.requests.latencies_us) - np.median(none.requests.latencies_us)
    assert later_us == pytest.approx(3_000, abs=20)


@pytest.mark.parametrize("is_admitted", [True, False], ids=["behind a request", "behind a job"])
def test_the_poll_thread_sees_the_request_that_the_device_computes(is_admitted: bool):
    """As a real one. Time of a job's prefix is promised to no request, so it refuses none."""
    one = case("worker.chunk_ms=60", "worker.longest_chunk_ms=60", "worker.reply_margin_ms=0")
    env, histories, ended = simpy.Environment(), SharedHistories(1024), {}
    histories.lengths.update(long=TOKENS, new=TOKENS)
    worker = SimulatedWorker(
        env, "w", frozenset({0}), one, histories, np.random.default_rng(1),
        lambda number, at_us, ending: ended.setdefault(number, (at_us, ending)),
        lambda *_: None, lambda *_: None,
    )  # fmt: skip

    def request(user_id: str, budget_us: int) -> RankingRequest:
        now_us, items = EPOCH_US + int(env.now), np.zeros(CANDIDATES, "<i8")
        return RankingRequest(f"{user_id}{env.now}", user_id, now_us, now_us + budget_us, 0, items, behaviours_of(0))

    if is_admitted:
        worker.receive_ranking(0, request("long", 40_000), 0)
    else:
        due_us = EPOCH_US + 20_000
        worker.receive_job(0, PreInferJob("j", "long", EPOCH_US, due_us, 40, CANDIDATES, 0, EPOCH_US), 0)
    env.run(until=1_000)
    # The prefix takes 10.2 ms: 9.2 are left.
    worker.receive_ranking(1, request("new", 9_000), 0)
    env.run(until=1_001)
    assert ended.get(1) == ((1_000, "refused") if is_admitted else None)
    worker.receive_ranking(2, request("long", 9_800), 0)
    env.run(until=30_000)
    assert ended[2][0] == 10_560, "its prefix is ready in time"


def test_an_idle_worker_answers_in_the_calibrated_time():
    done = outcome(case("traffic.budget_ms=2000", system=System.OFF, rate=0.5, seconds=60))
    service_us = LATENCY.append_us(0, TOKENS) + LATENCY.hit_us(TOKENS, CANDIDATES)
    assert float(np.median(done.requests.latencies_us)) == pytest.approx(service_us, abs=2)


@pytest.mark.slow
@pytest.mark.parametrize("on_cpu", [True, False], ids=["cpu", "accelerator"])
def test_with_enough_lead_time_the_relay_ranks_on_prepared_prefixes(on_cpu: bool):
    # Full inference takes longer than the time limit.
    settings = ("traffic.budget_ms=8", "worker.reply_margin_ms=0")
    relay, off = (outcome(case(*settings, system=each, on_cpu=on_cpu)) for each in (System.RELAY, System.OFF))
    assert share(relay, RankingPath.HBM) > 0.9
    assert share(off, RankingPath.FULL) == 0
    assert np.percentile(relay.requests.latencies_us, 50) < 2_000


@pytest.mark.slow
def test_the_cache_alone_has_hits_of_returning_users_and_no_jobs():
    settings = ("traffic.users=20", "traffic.budget_ms=16")
    relay, cache, off = (outcome(case(*settings, system=each)) for each in System)
    assert relay.jobs and not cache.jobs and not off.jobs
    assert (share(cache, RankingPath.HBM) > 0.5, share(off, RankingPath.HBM)) == (True, 0)


def test_with_time_of_grace_requests_are_ranked_whole_although_they_are_late():
    settings = ("traffic.budget_ms=8", "worker.reply_margin_ms=0")
    done = outcome(case(*settings, "worker.grace_ms=1000", system=System.OFF, rate=2))
    assert share(done, RankingPath.FULL) == 1.0
    assert np.percentile(done.requests.latencies_us, 50) > 8_000


def test_without_lead_time_nothing_is_prepared():
    done = outcome(case("traffic.budget_ms=8", "traffic.lead_median_ms=1", "worker.reply_margin_ms=0"))
    assert done.jobs.get("computed", 0) == 0


@pytest.mark.slow
def test_prefixes_that_do_not_fit_into_hbm_come_from_dram():
    prefix_bytes = TOKENS * 2048
    done = outcome(
        case(
            f"worker.hbm_bytes={20 * prefix_bytes}", f"worker.dram_bytes={400 * prefix_bytes}", "traffic.users=60",
            "traffic.zipf_exponent=0", "admission.footprint_reserve=0", seconds=60,
        )
    )  # fmt: skip
    looked_up = sum(done.found.values())
    assert done.found["hbm"] / looked_up < 0.6
    assert done.found["dram"] / looked_up > 0.4


@pytest.mark.slow
def test_the_same_seed_gives_the_same_requests_and_another_seed_others():
    noisy = case("traffic.growth=8", times=MeasuredTimes())
    first, again = outcome(noisy), outcome(noisy)
    other = outcome(replace(noisy, demand=replace(noisy.demand, seed=2)))
    assert first.requests.latencies_us.tolist() == again.requests.latencies_us.tolist()
    assert first.requests.endings.tolist() == again.requests.endings.tolist()
    assert first.requests.latencies_us.tolist() != other.requests.latencies_us.tolist()


@pytest.mark.slow
@pytest.mark.parametrize("system", System)
def test_each_request_ends_exactly_once(system: System):
    done = outcome(case("traffic.growth=8", system=system, times=MeasuredTimes(), rate=40, seconds=12))
    assert share(done, "lost") == share(done, "failed") == 0
    assert (done.requests.latencies_us != NO_LATENCY).all()


@pytest.mark.slow
def test_a_user_that_starts_again_is_deleted_first():
    done = outcome(case("traffic.start_again=true", "traffic.growth=200", "traffic.users=4", seconds=30))
    assert share(done, "lost") == 0
    assert done.found["nowhere"] > 4


@pytest.mark.slow
def test_behaviours_between_the_visits_are_appended_before_the_next_one():
    settings = ("traffic.users=20", "traffic.growth=64", "traffic.history_max=4096", "worker.longest_tail=0")
    off, cached = (
        outcome(case(*settings, f"worker.follow_behaviours={each}", system=System.CACHE, seconds=40))
        for each in ("off", "cached")
    )
    assert len(off.requests) == len(cached.requests)
    assert share(cached, "lost") == 0
    p50_off_us, p50_cached_us = (float(np.median(each.requests.latencies_us)) for each in (off, cached))
    assert p50_off_us - p50_cached_us > 0.9 * 64 * COEFFICIENTS.b1, "a visit appends nothing"
    assert cached.device_s > off.device_s, "some users do not return"


def test_new_weights_empty_the_caches_and_a_warm_up_fills_them_again_for_those_who_came_last():
    """Ten users, who all come again within seconds, and new weights every four."""
    settings = ("traffic.users=10", "traffic.zipf_exponent=0")
    never, cold, warmed = (
        outcome(replace(case(*settings, *more, system=System.CACHE), refresh_s=every))
        for more, every in (([], None), ([], 4.0), (["worker.warm_up_users=10", "traffic.settle_s=1"], 4.0))
    )

    def found(one: PartOutcome) -> float:
        return one.found["hbm"] / sum(one.found.values())

    assert found(never) == 1.0
    assert 0.8 < found(cold) < 0.95, "in four seconds each user comes eight times, and misses once"
    assert found(cold) < found(warmed) < 1.0
    assert share(cold, "lost") == share(warmed, "lost") == 0


# -- demand ---------------------------------------------------------------------------------------


def test_users_lie_in_the_partitions_of_the_product():
    users = np.array([0, 7, 999_999, 1_000_000, 12_345_678])
    name_of = SyntheticPopulation(case().demand.traffic).user_id
    assert partitions_of(users, 48).tolist() == [partition_for(name_of(user).encode(), 48) for user in users.tolist()]


def played(demand: Demand, partitions: Iterable[int] = range(12)) -> list[Impression]:
    return list(demand.part(frozenset(partitions)).impressions)


@pytest.mark.slow
@pytest.mark.parametrize("new_share", [0.0, 0.3])
def test_impressions_have_the_distributions_of_the_gateways_schedule(new_share: float):
    settings = ("traffic.growth=8", "traffic.history_sigma=0.3", "traffic.users=30", f"traffic.new_share={new_share}")
    demand = case(*settings, rate=200, seconds=60).demand
    ours = [*played(demand, range(5)), *played(demand, range(5, 12))]
    theirs = list(impressions(demand.traffic, SyntheticPopulation(demand.traffic)))
    for of in (
        lambda each: float(each.retrieval_us),
        lambda each: float(each.ranking_us - each.retrieval_us),
        lambda each: float(min(each.user, 30)),
        lambda each: float(each.history_length),
    ):
        assert stats.ks_2samp([of(each) for each in ours], [of(each) for each in theirs]).statistic < 0.03
    assert len(ours) == pytest.approx(len(theirs), rel=0.04)
    new = [each.user for each in ours if each.user >= 30]
    assert len(new) == len(set(new)), "they come once"
    assert len(new) / len(ours) == pytest.approx(new_share, abs=0.02)


def test_a_part_has_the_impressions_of_its_own_users():
    demand = case("traffic.new_share=0.3", rate=60).demand
    name_of = SyntheticPopulation(demand.traffic).user_id
    part = demand.part(frozenset({2, 7}))
    found = {each.user: partition_for(name_of(each.user).encode(), 12) for each in part.impressions}
    assert set(found.values()) == {2, 7}
    assert found.items() <= part.partition_of.items()


def test_the_histories_of_a_log_grow_to_their_ends(tmp_path: Path):
    log = tmp_path / "log.csv"
    rows = [f"{user},{item},{item}" for user, count in (("a", 20), ("b", 10)) for item in range(count)]
    log.write_text("\n".join(["user_id,item_id,timestamp", *rows]) + "\n")
    demand = case(f"traffic.interactions={log}", "traffic.growth=1", seconds=30).demand
    part = demand.part(frozenset(range(12)))
    assert [part.user_id(user) for user in part.users.tolist()] == ["a", "b"]
    lengths = {part.user_id(user): set() for user in part.users.tolist()}
    for each in part.impressions:
        lengths[part.user_id(each.user)].add(each.history_length)
    assert lengths == {"a": set(range(16, 21)), "b": {8, 9, 10}}
    assert demand.shares().sum() == pytest.approx(1)


@pytest.mark.slow
def test_the_impressions_are_thinned_to_a_day():
    demand = case("traffic.users=30000", "traffic.new_share=0.1", rate=400, seconds=60).demand
    constant, curve = (
        np.array([one.retrieval_us for one in played(each)]) for each in (demand, replace(demand, day_s=60.0))
    )
    assert constant.size == pytest.approx(24_000, rel=0.03)
    night, noon = (curve < 10e6).sum(), ((curve > 25e6) & (curve < 35e6)).sum()
    assert night / noon == pytest.approx(0.42, abs=0.05)


@pytest.mark.slow
def test_parts_have_their_shares_of_the_impressions():
    demand = case("traffic.new_share=0.3", rate=2_000).demand
    shares = demand.shares()
    assert shares.sum() == pytest.approx(1)
    counts = np.array([len(played(demand, {each})) for each in range(12)])
    assert counts / counts.sum() == pytest.approx(shares, abs=0.01)


def test_parts_are_the_ranges_of_the_groups_assignor():
    assert parts_of(8, 3) == [range(3), range(3, 6), range(6, 8)]
    with pytest.raises(RelayError, match="9 workers cannot share 8 partitions"):
        parts_of(8, 9)


# -- fleets ---------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_sample_of_a_fleet_equals_the_whole_within_the_error():
    fleet = case("partitions=96", "traffic.users=30000", "traffic.zipf_exponent=0.4", rate=160, seconds=16)
    with Runner(1) as runner:
        whole = simulate(fleet, FleetSize(12, 12, 2), runner, lambda _: None)
        some = simulate(fleet, FleetSize(12, 3, 3), runner, lambda _: None)
    assert some.requests < whole.requests
    for name in ("p50_ms", "late_share", "device_load", "device_s_per_1000"):
        ours, theirs = getattr(some, name), getattr(whole, name)
        assert ours.error is not None
        assert ours.value == pytest.approx(theirs.value, abs=1.5 * ours.error + (theirs.error or 0))


@pytest.mark.slow
def test_a_sample_counts_the_users_who_come_most():
    # One worker of twelve owns the first user, and has more than its device can do.
    fleet = case(
        "partitions=96", "traffic.users=30000", "traffic.zipf_exponent=1.2", system=System.OFF, rate=500, seconds=4
    )
    with Runner(1) as runner:
        whole = simulate(fleet, FleetSize(12, 12, 1), runner, lambda _: None)
        some = simulate(fleet, FleetSize(12, 4, 3), runner, lambda _: None)
    assert whole.highest_share == some.highest_share > 2
    assert whole.late_share.value > 0.1
    assert some.late_share.value == pytest.approx(whole.late_share.value, abs=0.04)
    assert some.thread_load.value == pytest.approx(whole.thread_load.value, rel=0.15)


@pytest.mark.slow
def test_a_fleet_may_have_more_workers_than_users():
    fleet = case("partitions=96", "traffic.users=6", "traffic.zipf_exponent=0", rate=20, seconds=4)
    with Runner(1) as runner:
        some = simulate(fleet, FleetSize(12, 8, 2), runner, lambda _: None)
        whole = simulate(fleet, FleetSize(12, 12, 1), runner, lambda _: None)
    assert some.requests > 0 and whole.requests == pytest.approx(60, abs=25)


def test_a_load_without_a_request_is_explained():
    with Runner(1) as runner, pytest.raises(RelayError, match="No request was counted"):
        simulate(case("partitions=96", rate=0.001, seconds=1), FleetSize(12, 2, 1), runner, lambda _: None)


@pytest.mark.slow
def test_processes_give_the_same_figures_as_one():
    one = case(seconds=6)
    with Runner(1) as alone, Runner(2) as pool:
        size = FleetSize(2, 8, 2)
        done: list[float] = []
        assert replace(simulate(one, size, alone, done.append), took_s=0) == replace(
            simulate(one, size, pool, done.append), took_s=0
        )
    assert done == 2 * [share / 4 for share in range(1, 5)]


def test_the_error_of_one_simulation_is_not_known_and_that_of_equal_ones_is_zero():
    requests = Requests(np.array([1_000, 3_000, 90_000]), np.array([CODE[RankingPath.HBM]] * 3, np.uint8))
    part = PartOutcome(
        requests=requests, found={"hbm": 1, "nowhere": 3}, jobs={}, device_s=0.6, thread_s=1.0, worker_s=4.0,
        impressions=4, took_s=0.5,
    )  # fmt: skip
    alone, pair = figures_of([part], 40), figures_of([part, part], 40)
    assert (alone.p50_ms.value, alone.p50_ms.error) == (3.0, None)
    assert alone.late_share.value == pytest.approx(1 / 3)
    assert (alone.found_hbm.value, alone.device_load.value, round(alone.device_s_per_1000.value)) == (0.25, 0.15, 200)
    assert alone.thread_load.value == 0.25
    assert pair.p99_ms.error == 0
    assert (pair.requests, pair.impressions_per_s) == (6, 8)


def part_with(latencies_us: Sequence[int], device_s: float) -> PartOutcome:
    requests = Requests(np.array(latencies_us), np.array([CODE[RankingPath.HBM]] * len(latencies_us), np.uint8))
    return PartOutcome(
        requests=requests, found={}, jobs={}, device_s=device_s, worker_s=1.0,
        impressions=len(latencies_us), took_s=0.1,
    )  # fmt: skip


def test_the_busiest_part_stands_for_itself_and_the_sample_for_all_others():
    busiest, usual = part_with([90_000] * 1_000, 0.9), part_with([10_000] * 100, 0.1)
    found = figures_of([usual] * 4, 40, 11, [busiest] * 2)
    assert found.late_share.value == pytest.approx(0.5)
    assert found.late_share.error == pytest.approx(0, abs=1e-9)
    assert found.device_load.value == pytest.approx((0.9 + 10 * 0.1) / 11)
    assert found.p99_ms.value == 90
    assert (found.requests, found.parts) == (2_400, 6)
    assert figures_of([usual] * 4, 40, 11, [busiest]).late_share.error is None, "one simulation tells no spread"


def test_the_errors_of_the_busiest_part_and_of_the_others_add_up():
    busiest, others = [part_with([1], each) for each in (0.7, 0.9)], [part_with([1], each) for each in (0.1, 0.3, 0.5)]
    error = figures_of(others, 40, 5, busiest).device_load.error
    variances = (0.1**2, 4**2 * 0.04 / 3)
    freedom = sum(variances) ** 2 / (variances[0] ** 2 + variances[1] ** 2 / 2)
    assert error == pytest.approx(stats.t.ppf(0.975, freedom) * np.sqrt(sum(variances)) / 5)


def test_percentiles_count_a_request_as_often_as_its_part_stands_for_others():
    random = np.random.default_rng(1)
    busiest, usual = (random.lognormal(mean, 0.3, 2_000).astype(np.int64) for mean in (11, 10))
    found = figures_of([part_with(usual.tolist(), 0.1)], 40, 4, [part_with(busiest.tolist(), 0.1)])
    expected = np.percentile(np.concatenate([busiest, usual, usual, usual]), [50, 99], method="inverted_cdf") / 1000
    assert [found.p50_ms.value, found.p99_ms.value] == pytest.approx(expected)


@pytest.mark.parametrize(("thread_s", "is_in_range", "said"), [(3.2, True, "yes"), (3.3, False, "no")])
def test_figures_near_saturation_are_marked_as_out_of_range(thread_s: float, is_in_range: bool, said: str):
    part = PartOutcome(
        requests=Requests(np.zeros(1, np.int64), np.array([CODE[RankingPath.HBM]], np.uint8)), found={}, jobs={},
        device_s=1.0, thread_s=thread_s, worker_s=4.0, impressions=1, took_s=0.1,
    )  # fmt: skip
    found = figures_of([part], 40)
    assert found.is_in_range is plain(found)["is_in_range"] is is_in_range
    row = PlanRow(System.RELAY, CapacityPlan(Probe(2, found, 4.0), ()), 0, 0, None, None)
    assert plan_json([row], {})["systems"]["relay"]["is_in_range"] is is_in_range
    for table in (table_of({System.RELAY: found}, ""), plan_table([row], "")):
        names, values = (list(column.cells) for column in table.columns)
        assert values[names.index("in range (thread load up to 80%)")] == said


def test_latencies_are_those_of_ranked_requests_and_refusals_are_late():
    endings = np.array([CODE[each] for each in (RankingPath.HBM, RankingPath.TRUNCATED, *["refused"] * 98)], np.uint8)
    requests = Requests(np.array([20_000, 30_000, *[1_000] * 98]), endings)
    part = PartOutcome(
        requests=requests, found={}, jobs={}, device_s=0.1, worker_s=1.0,
        impressions=100, took_s=0.5,
    )  # fmt: skip
    found = figures_of([part], 40)
    assert (found.p50_ms.value, found.late_share.value) == (20.0, pytest.approx(0.99))


@pytest.mark.parametrize("parts", [2, 5, 20])
def test_an_error_is_that_of_students_t(parts: int):
    outcomes = [
        PartOutcome(
            requests=Requests(np.zeros(1, np.int64), np.array([CODE[RankingPath.HBM]], np.uint8)), found={}, jobs={},
            device_s=float(number % 3), worker_s=1.0, impressions=1, took_s=0.1,
        )
        for number in range(parts)
    ]  # fmt: skip
    error = figures_of(outcomes, 40).device_load.error
    deviation = np.std([each.device_s for each in outcomes], ddof=1) / np.sqrt(parts)
    exact = stats.t.ppf(0.975, parts - 1) * deviation
    assert error == pytest.approx(exact)


@pytest.mark.slow
def test_the_planner_finds_fewer_workers_with_the_relay():
    settings = ("traffic.users=500", "traffic.budget_ms=30", "worker.hbm_bytes=1GiB", "worker.dram_bytes=1GiB")
    with Runner(1) as runner:
        relay, off = (
            plan_capacity(case(*settings, system=each, rate=60), 1, 1, runner, lambda *_: None, 100)
            for each in (System.RELAY, System.OFF)
        )
        none = plan_capacity(
            case("traffic.budget_ms=5", system=System.OFF, rate=30), 1, 1, runner, lambda *_: None, 100
        )
    assert relay.best is not None and off.best is not None
    assert relay.best.is_enough and off.best.is_enough
    assert 1 <= relay.workers < off.workers
    assert none.best is None and none.workers == 0


def seen(late: Sequence[int], requests: int = 1_000) -> Figures:
    """Figures of parts with so many requests each, and so many late ones."""
    return figures_of([part_with([90_000] * each + [1_000] * (requests - each), 1.0) for each in late], 40)


def plan_with(
    simulated: Callable[[FleetSize, float], Figures], one: Case, monkeypatch: pytest.MonkeyPatch
) -> CapacityPlan:
    """The plan for a fleet with these figures in so many seconds."""
    monkeypatch.setattr(
        plan_module, "simulate", lambda probed, size, *_: simulated(size, probed.demand.traffic.duration_s)
    )
    with Runner(1) as runner:
        return plan_capacity(one, 2, 2, runner, lambda *_: None)


def plan_where(is_enough: Callable[[int, float], bool], one: Case, monkeypatch: pytest.MonkeyPatch) -> CapacityPlan:
    """The plan for a fleet of which this tells whether so many workers are enough in so many seconds."""
    return plan_with(
        lambda size, seconds: seen([0, 0] if is_enough(size.workers, seconds) else [900, 900]), one, monkeypatch
    )


@pytest.mark.parametrize("needed", [1, 2, 7, 16, 17, 60])
def test_the_planner_finds_also_fewer_workers_than_rankings_alone_would_fill(
    needed: int, monkeypatch: pytest.MonkeyPatch
):
    # A ranking alone takes 20.3 ms. Most of it is paid once for a batch.
    one = case(rate=800)
    one = replace(one, model=replace(one.model, latency=LatencyModel(replace(COEFFICIENTS, c0=20_000))))
    assert least_workers(one) == 16
    assert plan_where(lambda workers, _: workers >= needed, one, monkeypatch).workers in (needed, needed + 1)


def test_a_first_probe_that_fails_is_repeated_with_all_impressions(monkeypatch: pytest.MonkeyPatch):
    # Full inference of all requests fills 0.22 workers. 2 seeds: 600 impressions of 5 workers take 37.5 s at 20 a
    # second, and 4,000 take 250 s.
    one, seconds = case(rate=20), list[float]()

    def is_enough(workers: int, simulated_s: float) -> bool:
        seconds.append(simulated_s)
        return workers < 5 or simulated_s > 200

    assert plan_where(is_enough, one, monkeypatch).workers == 1
    assert seconds[:2] == [37.5, 250]
    assert plan_where(lambda *_: False, one, monkeypatch).best is None


@pytest.mark.parametrize(
    ("late", "requests", "is_enough", "is_unclear"),
    [
        ([2, 2, 3, 3], 1_000, True, False),
        ([0, 0, 0, 18], 1_000, False, True),
        ([15, 15, 15, 15], 1_000, False, False),
        ([0, 0, 0, 0], 90, False, True),
        ([1, 1], 150, False, True),
        ([0], 1_000, False, True),
    ],
    ids=["few are late", "in some parts", "many are late", "too few requests", "equal by chance", "error not known"],
)
def test_workers_are_enough_if_the_upper_end_of_the_interval_is(
    late: list[int], requests: int, is_enough: bool, is_unclear: bool
):
    probe = Probe(1, seen(late, requests), 4.0)
    assert (probe.is_enough, probe.is_unclear) == (is_enough, is_unclear)


def test_the_upper_end_of_a_share_is_that_of_wilson():
    for late, requests in ((0, 400), (3, 1_000), (30, 3_000)):
        expected = stats.binomtest(late, requests).proportion_ci(method="wilson").high
        assert plan_module.highest_share(late / requests, requests) == pytest.approx(expected, rel=1e-4)


def test_a_number_that_is_not_clear_is_simulated_once_more_with_more_seeds(monkeypatch: pytest.MonkeyPatch):
    asked = list[tuple[int, int]]()

    def simulated(size: FleetSize, _: float) -> Figures:
        asked.append((size.workers, size.seeds))
        # One worker is too few, the more seeds show that 2 are enough, and that of 3 nothing is certain.
        return seen([0, 18] if size.seeds == 2 and size.workers < 5 else [[90] * 8, [3] * 8][size.workers > 1])

    found = plan_with(simulated, case(rate=20), monkeypatch)
    assert found.workers == 2
    assert asked == [(5, 2), (2, 2), (2, 8), (1, 2), (1, 8)]


def test_where_also_more_seeds_leave_it_open_no_number_is_certain(monkeypatch: pytest.MonkeyPatch):
    found = plan_with(lambda *_: seen([0, 18]), case(rate=20), monkeypatch)
    assert found.best is None and found.is_unclear
    rows = [PlanRow(System.OFF, found, None, None, None, None)]
    assert next(iter(plan_table(rows, "").columns[1].cells)) == "none is certain"
    assert ["It is not certain" in each for each in plan_caveats(rows, 400)] == [True]
    none = plan_where(lambda *_: False, case(rate=20), monkeypatch)
    assert not none.is_unclear and not plan_caveats([PlanRow(System.OFF, none, None, None, None, None)], 400)


@pytest.mark.parametrize(
    ("workers", "prefixes", "partitions"),
    [(1, 1, 48), (7, 1, 96), (511, 1, 4_096), (512, 1, 4_096), (513, 2, 2_064), (764, 2, 3_072), (1_025, 3, 2_736)],
)
def test_a_plan_has_as_many_topic_prefixes_as_the_settings_need(workers: int, prefixes: int, partitions: int):
    plan = CapacityPlan(Probe(workers, seen([0, 0]), 4.0), ())
    row = PlanRow(System.RELAY, plan, 0, 0, None, None)
    written = plan_json([row], {})["systems"]["relay"]
    assert (written["topic_prefixes"], written["partitions"]) == (prefixes, partitions)
    assert load_settings(None, environment={}, overrides=(f"partitions={partitions}",)).partitions == partitions
    assert partitions >= 8 * workers / prefixes
    names, values = (list(column.cells) for column in plan_table([row], "").columns)
    if prefixes > 1:
        assert values[names.index("topic prefixes, for parts of the users")] == str(prefixes)
        assert "share users and workers among them" in " ".join(plan_caveats([row], 10**6))
    else:
        assert values[names.index("partitions")] == f"{partitions:,}" and not plan_caveats([row], 10**6)


def test_a_load_that_is_too_low_to_plan_for_is_refused_with_one_that_is_not(monkeypatch: pytest.MonkeyPatch):
    with pytest.raises(RelayError, match=r"--qps 0\.001 is too low .* Give --qps 0\.05:"):
        plan_where(lambda *_: True, case(rate=0.001), monkeypatch)
    seconds = list[float]()
    assert plan_where(lambda _, each: not seconds.append(each), case(rate=0.05), monkeypatch).workers == 1
    assert seconds == [1_500], "no longer than that"


def test_a_plan_says_how_many_seconds_it_simulated(monkeypatch: pytest.MonkeyPatch):
    found = plan_where(lambda *_: True, case(rate=20), monkeypatch)
    row = PlanRow(System.OFF, found, 0, 0, None, None)
    assert plan_json([row], {})["systems"]["off"]["seconds"] == 100
    assert [each["seconds"] for each in plan_json([row], {})["systems"]["off"]["probes"]][-1] == 100
    names, values = (list(column.cells) for column in plan_table([row], "").columns)
    assert values[names.index("simulated seconds, from empty caches on")] == "100"


# -- measured times -------------------------------------------------------------------------------


def record(number: int, path: str, timings: StageTimings, latency_us: int, cached: int = TOKENS) -> ImpressionRecord:
    return ImpressionRecord(
        number, str(number), "u", "ranked", latency_us, 0, False, path=path, prefix_tokens=TOKENS, timings=timings,
        tokens_cached=cached,
    )  # fmt: skip


def test_times_are_learnt_from_a_run(tmp_path: Path):
    hit = StageTimings(queue_us=200, rank_us=640, total_us=4_940, history_wait_us=4_000)
    full = StageTimings(queue_us=200, pre_infer_us=15_360, rank_us=400, total_us=16_100)
    records = [record(number, "hbm", hit, 6_940) for number in range(60)]
    records += [record(number, "full", full, 18_100, cached=0) for number in range(60, 120)]
    times = learn(records, LATENCY, CANDIDATES, "a run")
    assert set(times.hop_us) == {1_000.0}
    assert (times.look_up_us, times.answer_us, times.requests) == (200, 100, 120)
    assert times.hit_noise[50] == pytest.approx(2.0)
    assert times.pre_noise[50] == pytest.approx(1.5)
    save_times(tmp_path / "times.json", times)
    assert load_times(tmp_path / "times.json") == times


@pytest.mark.parametrize(
    ("slow", "highest"),
    [
        (lambda number: number % 32 == 0, 1.03),  # One ranking of as many as take the time of a prefix.
        (lambda number: number >= 150, 2.0),  # The second half of the run.
    ],
    ids=["short disturbances even out", "slow phases do not"],
)
def test_without_prefixes_their_noise_is_that_of_rankings_in_a_row(slow: Callable[[int], bool], highest: float):
    usual_us = round(LATENCY.hit_us(TOKENS, CANDIDATES))
    assert LATENCY.pre_us(TOKENS) == 32 * usual_us
    timings = [StageTimings(queue_us=200, rank_us=usual_us * (2 if slow(n) else 1), total_us=5_000) for n in range(300)]
    times = learn([record(n, "hbm", each, 6_000) for n, each in enumerate(timings)], LATENCY, CANDIDATES, "a run")
    assert times.hit_noise[-1] == pytest.approx(2.0, rel=0.01)
    assert times.pre_noise[-1] == pytest.approx(highest, rel=0.03)
    assert times.pre_noise[0] == pytest.approx(1.0, rel=0.06)


def test_a_tail_that_was_ranked_with_the_suffix_is_no_noise():
    rank_us = round(LATENCY.hit_us(TOKENS - 64, CANDIDATES + 64))
    hit = StageTimings(queue_us=200, rank_us=rank_us, total_us=300 + rank_us)
    records = [record(number, "hbm", hit, 2_000 + rank_us, cached=TOKENS - 64) for number in range(60)]
    assert learn(records, LATENCY, CANDIDATES, "a run").hit_noise[50] == pytest.approx(1.0, rel=0.01)


@pytest.mark.slow
def test_simulated_requests_teach_the_times_that_they_were_simulated_with(monkeypatch: pytest.MonkeyPatch):
    given = NO_TIMES.model_copy(update={"hop_us": (1_500.0,), "look_up_us": 200.0, "answer_us": 100.0})
    given = given.model_copy(update={"hit_noise": (1.2,), "pre_noise": (1.3,)})
    records: list[ImpressionRecord] = []
    works: dict[int, RankingWork] = {}
    end, ranked = RelaySimulation._end, worker_module._Results.ranked

    def keep_too(self: Any, work: RankingWork, outputs: object) -> bool:
        works[work.received.offset] = work
        return ranked(self, work, outputs)

    def record_too(self: RelaySimulation, *ended: Any) -> None:
        end(self, *ended)
        number, at_us, ending = ended
        records.append(record(number, ending, timings_of(works[number], at_us), self._latencies_us[number], 0))
        records[-1] = replace(records[-1], tokens_cached=works[number].tokens_cached)

    monkeypatch.setattr(worker_module._Results, "ranked", keep_too)
    monkeypatch.setattr(RelaySimulation, "_end", record_too)
    done = outcome(case(times=given, rate=4, seconds=100))
    assert len(records) == done.impressions
    times = learn(records, LATENCY, CANDIDATES, "a simulation")
    assert (times.hop_us[50], times.look_up_us, times.answer_us) == pytest.approx((1_500, 200, 100), abs=2)
    assert times.hit_noise[50] == pytest.approx(1.2, rel=0.01)


def test_too_few_requests_teach_nothing(tmp_path: Path):
    with pytest.raises(RelayError, match="has 0 requests"):
        learn([], LATENCY, CANDIDATES, "a run")
    (tmp_path / "other.json").write_text('{"hop_us": []}')
    with pytest.raises(RelayError, match="is not a file of"):
        load_times(tmp_path / "other.json")


@pytest.mark.slow
def test_the_time_outside_the_worker_is_spread_as_it_was_learnt():
    # Evenly between 0 and 20 ms for both ways together.
    times = NO_TIMES.model_copy(update={"hop_us": (0.0, 10_000.0)})
    settings = ("traffic.budget_ms=2000",)
    plain, spread = (
        outcome(case(*settings, system=System.OFF, times=each, rate=2, seconds=600)) for each in (NO_TIMES, times)
    )
    service_us = float(np.median(plain.requests.latencies_us))
    outside_us = np.percentile(spread.requests.latencies_us, [10, 50, 90]) - service_us
    assert outside_us == pytest.approx([2_000, 10_000, 18_000], abs=1_000)


def test_slower_devices_and_hops_make_requests_slower():
    times = NO_TIMES.model_copy(update={"hop_us": (2_000.0,), "hit_noise": (3.0,), "answer_us": 500.0})
    usual, slow = (outcome(case(times=each, rate=4)) for each in (NO_TIMES, times))
    gained_us = np.percentile(slow.requests.latencies_us, 50) - np.percentile(usual.requests.latencies_us, 50)
    assert gained_us == pytest.approx(2 * 2_000 + 2 * LATENCY.hit_us(TOKENS, CANDIDATES) + 500, abs=20)


# -- the command ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def calibration(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return calibration_in(tmp_path_factory.mktemp("simulate"))


@pytest.mark.slow
def test_the_command_simulates_both_systems_and_writes_figures(calibration: Path, tmp_path: Path):
    done = CliRunner().invoke(
        app,
        [
            "simulate", "run", "--calibration", str(calibration), "--qps", "20", "--seconds", "5", "--seeds", "2",
            "--lengths", "512", "--slo-ms", "40", "--jobs", "1", "--json", str(tmp_path / "out.json"),
            "--plot", str(tmp_path / "out.png"), "--token-bytes", "2KiB",
        ],
    )  # fmt: skip
    assert done.exit_code == 0, done.output
    assert "Simulated" in done.output and "full inference" in done.output
    assert done.output.splitlines()[-1].startswith("Late, truncated or refused: ")
    written = json.loads((tmp_path / "out.json").read_text())
    assert written["simulated"] is True
    assert set(written["systems"]) == {"relay", "off"}
    assert written["systems"]["off"]["mix"]["hbm"]["value"] == 0
    assert (tmp_path / "out.png").stat().st_size > 1_000


@pytest.mark.slow
@pytest.mark.parametrize(
    ("slo_ms", "expected"),
    [
        (
            "200",
            {
                "workers": 1,
                "partitions": 48,
                "hbm_bytes": 0,
                "dram_bytes": 0,
                "cost_per_hour": 2.0,
                "cost_per_million": pytest.approx(2 / (5 * 3600) * 1e6),
            },
        ),
        ("1", {"cost_per_million": None}),
    ],
    ids=["nothing is kept without the relay", "no number of workers is enough"],
)
def test_the_memory_and_costs_of_a_plan(calibration: Path, tmp_path: Path, slo_ms: str, expected: dict[str, object]):
    out = tmp_path / "plan.json"
    done = CliRunner().invoke(
        app,
        [
            "simulate", "plan", "--calibration", str(calibration), "--qps", "5", "--impressions", "600", "--seeds", "1",
            "--sample", "1", "--lengths", "256:512", "--slo-ms", slo_ms, "--jobs", "1", "--system", "off",
            "--price-per-worker-hour", "2", "--json", str(out), "--token-bytes", "2KiB",
        ],
    )  # fmt: skip
    assert done.exit_code == 0, done.output
    plan = json.loads(out.read_text())["systems"]["off"]
    if "workers" not in expected:
        expected |= dict.fromkeys(("workers", "partitions", "hbm_bytes", "dram_bytes", "cost_per_hour"))
    assert {name: plan[name] for name in expected} == expected


@pytest.mark.parametrize(("scored_tokens", "is_far"), [(CANDIDATES, False), (8 * CANDIDATES, True)])
def test_times_far_from_the_calibrated_ones_raise_a_question(
    calibration: Path, tmp_path: Path, scored_tokens: int, is_far: bool
):
    writer = RecordWriter(tmp_path / "relay.jsonl")
    for number in range(60):
        writer.write(record(number, "hbm", StageTimings(queue_us=200, rank_us=320, total_us=620), 2_620))
    writer.close()
    done = CliRunner().invoke(
        app,
        [
            "simulate", "learn", str(tmp_path / "relay.jsonl"), "--calibration", str(calibration),
            "--out", str(tmp_path / "times.json"), "--scored-tokens", str(scored_tokens),
        ],
    )  # fmt: skip
    assert done.exit_code == 0, done.output
    assert (f"{scored_tokens} tokens (--scored-tokens)" in done.output) is is_far


def simulated(calibration: Path, *arguments: str) -> str:
    """What `relaygr simulate run` prints in a short run."""
    command = ["simulate", "run", "--calibration", str(calibration), "--token-bytes", "2KiB", "--jobs", "1"]
    command += ["--qps", "20", "--lengths", "512", "--slo-ms", "40", "--sample", "1", "--seeds", "1", *arguments]
    done = CliRunner().invoke(app, command)
    assert done.exit_code == 0, done.output
    return done.output


@pytest.mark.slow
def test_the_command_warns_of_fewer_users_than_workers_need(calibration: Path):
    few = "users are few for 4 workers"
    arguments = ("--workers", "4", "--sample", "4", "--seconds", "2")
    assert f"39 {few}" in simulated(calibration, *arguments, "--users", "39")
    assert few not in simulated(calibration, *arguments, "--users", "40")


@pytest.mark.slow
def test_with_one_seed_the_sampling_error_is_said_to_be_unknown(calibration: Path):
    unknown = "± ?: the sampling error is not known"
    for workers in ("1", "4"):
        arguments = ("--workers", workers, "--seconds", "2")
        said = simulated(calibration, *arguments)
        assert unknown in said and "± ? %" in said
        known = simulated(calibration, *arguments, "--seeds", "2", "--sample", "2", "--slo-ms", "11")
        assert unknown not in known and "± ?" not in known


def test_the_figures_say_which_fleet_and_samples_they_are_of(calibration: Path, tmp_path: Path):
    out = tmp_path / "out.json"
    simulated(
        calibration, "--system", "off", "--seconds", "4", "--workers", "2", "--json", str(out),
    )  # fmt: skip
    written = json.loads(out.read_text())
    expected = {"workers": 2, "sample": 1, "seeds": 1}
    assert {name: written[name] for name in expected} == expected


def test_a_day_is_played_once_unless_seconds_are_given(calibration: Path, tmp_path: Path):
    out = tmp_path / "out.json"
    for more, seconds in (((), 6), (("--seconds", "2"), 2)):
        simulated(calibration, "--system", "off", "--day", "6", "--json", str(out), *more)
        written = json.loads(out.read_text())
        assert (written["seconds"], written["traffic"]["duration_s"], written["day_s"]) == (seconds, seconds, 6)


def test_the_simulated_time_of_the_settings_is_taken(calibration: Path, tmp_path: Path):
    simulated(calibration, "--system", "off", "--set", "traffic.duration_s=3", "--json", str(tmp_path / "out.json"))
    assert json.loads((tmp_path / "out.json").read_text())["seconds"] == 3


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--lengths", "long"], "--lengths"),
        (["--lengths", "1000:1200"], "as in 1000:1250."),
        (["--system", "none"], "--system none"),
        (["--token-bytes", "3"], "multiple of 4"),
        (["--workers", "100"], "100 workers cannot share 48 partitions: set partitions to 800 (--set partitions=800)."),
        (["--workers", "1000"], "(--set partitions=4096)."),
        (["--workers", "5000"], "simulate a part of the fleet"),
        (["--lengths", "abc"], "--lengths abc: write"),
        (["--times", "absent.json"], "cannot be read"),
        (["--set", "worker.hbm_bytes=1MiB"], "worker.hbm_bytes"),
        (["--set", "worker.divert=true"], "--set worker.divert=false"),
        (["--refresh", "300"], "--refresh 300: no weights change within 2 s: raise --seconds"),
    ],
)
def test_wrong_options_are_explained(calibration: Path, arguments: list[str], complaint: str):
    done = CliRunner().invoke(app, ["simulate", "run", "--calibration", str(calibration), "--seconds", "2", *arguments])
    assert done.exit_code == 1
    assert complaint in done.output.replace("\n", " ")


def test_learning_needs_records(calibration: Path, tmp_path: Path):
    done = CliRunner().invoke(
        app,
        ["simulate", "learn", str(tmp_path / "no"), "--calibration", str(calibration), "--out", str(tmp_path / "t")],
    )
    assert done.exit_code == 1 and "cannot be read" in done.output


def test_a_day_loses_a_minute_to_its_cold_beginning_and_not_its_night():
    traffic = case(seconds=86_400).demand.traffic
    assert Demand(traffic, 12, 1, day_s=86_400).cold_s == 60
    assert Demand(traffic, 12, 1).cold_s == 21_600
    assert Demand(case(seconds=80).demand.traffic, 12, 1, day_s=80).cold_s == 20


def test_a_plot_where_the_library_cannot_have_its_cache_is_one_sentence(
    calibration: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in a container whose file system is read-only."""

    class NoCache:
        def find_spec(self, name: str, *_: object) -> None:
            if name.startswith("matplotlib"):
                raise OSError("Matplotlib requires access to a writable cache directory")

    for name in [each for each in sys.modules if each.startswith(("matplotlib", "relaygr.cli.plots"))]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "meta_path", [NoCache(), *sys.meta_path])
    picture = str(tmp_path / "out.png")
    done = CliRunner().invoke(app, ["simulate", "run", "--calibration", str(calibration), "--plot", picture])
    assert done.exit_code == 1
    assert "No plot can be drawn: Matplotlib requires access" in " ".join(done.output.split())
