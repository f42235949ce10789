"""A pool of pre-infer workers: their number, its correction by two signals, and such a fleet in virtual time."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import simpy
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from relaygr.admission.latency import LatencyModel
from relaygr.cli.app import app
from relaygr.schemas.messages import Path as RankingPath
from relaygr.schemas.messages import PreInferJob
from relaygr.settings import load_settings
from relaygr.simulate.case import Case, Pool, System, case_of, shape_of_tokens
from relaygr.simulate.compare import settle
from relaygr.simulate.device import EPOCH_US
from relaygr.simulate.figures import CODE, HIGHEST_LOAD, PartOutcome
from relaygr.simulate.fleet import Runner, parts_of, simulate_as_one
from relaygr.simulate.pool import PoolJob, PreInferWorkers
from relaygr.simulate.ratio import OPPOSITE, Correction, Move, Ratio, Signals, ratio_of
from relaygr.simulate.relay import RelaySimulation
from relaygr.simulate.size import size_of
from relaygr.simulate.store import SharedStore, StoreTimes
from relaygr.worker.executor.work import JobOutcome
from tests.worlds.simulated import COEFFICIENTS, NO_TIMES, calibration_in

US_PER_BYTE = 8 / 10_000
"""10 Gbit/s."""
PREFIX_BYTES = 512 * 2048
SLOTS = 2


def case(*overrides: str, rate: float = 20, seconds: float = 20) -> Case:
    """Histories of 512 behaviours that do not fit into the time limit: 10.2 ms, and a ranking 0.3 ms."""
    loaded = load_settings(
        None,
        environment={},
        overrides=(
            "partitions=12", f"traffic.rate_per_s={rate}", f"traffic.duration_s={seconds}", "traffic.users=400",
            "traffic.history_median=512", "traffic.history_sigma=0", "traffic.history_max=1024", "traffic.growth=0",
            "traffic.suffix=0", "traffic.candidates=64", "traffic.budget_ms=8", "worker.reply_margin_ms=0", *overrides,
        ),
    )  # fmt: skip
    shape = shape_of_tokens(2048, loaded)
    return case_of(loaded, shape, LatencyModel(COEFFICIENTS), NO_TIMES, on_cpu=False, system=System.RELAY)


# -- the ratio ------------------------------------------------------------------------------------


def test_the_ratio_of_a_pool_is_that_of_its_device_times_and_fetches() -> None:
    lengths = "traffic.history_median=1024", "traffic.history_max=2048", "traffic.growth=10"
    one = case(*lengths, "traffic.candidates=1000")
    found = ratio_of(one, size_of(one, 2, keep_s=20, reuse=0.5), US_PER_BYTE)
    assert found.pre_us == 0.5 * 1024 * 20, "the owner has the prefix of who returned"
    # Half of the visits reload 2 MiB, 50 µs and 1/4096 µs a byte.
    assert found.rank_us == pytest.approx(5_000 + 0.5 * (10 * 20 + 50 + 512), rel=0.02)
    assert found.fetch_us == 0.5 * (2_000 + 1024 * 2048 * US_PER_BYTE)
    assert found.pre_per_rank == found.pre_us / found.rank_us, "two fetches at once are faster than the device"
    assert [found.split(workers) for workers in (2, 4, 10)] == [1, 3, 7]
    assert sum(found.workers(10)) in (10, 11), "as much work as together"


def test_fetches_that_are_slower_than_the_device_bound_what_a_worker_ranks() -> None:
    assert Ratio(pre_us=12_000, rank_us=500, fetch_us=4_000, pays_from=128).pre_per_rank == 6


@pytest.mark.parametrize(("us_per_byte", "pays_from"), [(US_PER_BYTE, 128), (8 / 1_000, 640), (8 / 500, None)])
def test_a_pool_loses_where_a_fetch_takes_longer_than_computing(us_per_byte: float, pays_from: int | None) -> None:
    # A token takes 20 µs, and its 2 KiB 1.6, 16 or 33 µs, beside 2 ms for the whole prefix.
    one = case()
    assert ratio_of(one, size_of(one, 2, keep_s=20, reuse=0.0), us_per_byte).pays_from == pays_from


# -- the correction -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Fleet:
    """A fleet in mean values. A job for which no worker has time prepares nothing, and costs a full inference."""

    workers: int
    load: float
    """Of all devices, if every prefix is prepared."""
    pre_ms: float
    rank_ms: float
    limit_ms: float = 100.0

    def signals(self, count: int) -> Signals:
        per_ms = self.load * self.workers / (self.pre_ms + self.rank_ms)
        prepared = min(1.0, 0.9 * count / (per_ms * self.pre_ms))
        full_ms = self.pre_ms + self.rank_ms
        work_ms = prepared * self.rank_ms + (1 - prepared) * full_ms
        busy = per_ms * work_ms / (self.workers - count)
        wait_ms = work_ms * busy / (1 - busy) if busy < 1 else self.limit_ms
        hit_ms, late_ms = (min(self.limit_ms, each + wait_ms) for each in (self.rank_ms, full_ms))
        answer_ms = prepared * hit_ms + (1 - prepared) * late_ms
        return Signals(answer_ms, (1 - prepared) * late_ms / answer_ms)


FLEETS = st.builds(
    Fleet,
    workers=st.integers(3, 24),
    load=st.floats(0.2, HIGHEST_LOAD),
    pre_ms=st.floats(3, 60),
    rank_ms=st.floats(2, 20),
)


def test_a_way_that_ends_among_ratios_as_slow_as_the_limit_is_left_for_the_other() -> None:
    fleet = Fleet(workers=6, load=0.798828125, pre_ms=57.0, rank_ms=20.0)
    assert [round(fleet.signals(count).answer_ms) for count in range(1, 6)] == [100, 100, 98, 53, 100]
    assert settle(fleet.signals, fleet.workers, 3, fleet.rank_ms) == 4


@given(FLEETS, st.data())
def test_from_every_ratio_the_correction_ends_within_5_percent_of_the_best(fleet: Fleet, data: st.DataObject) -> None:
    first = data.draw(st.integers(1, fleet.workers - 1))
    settled = settle(fleet.signals, fleet.workers, first, fleet.rank_ms)
    best_ms = min(fleet.signals(count).answer_ms for count in range(1, fleet.workers))
    assert fleet.signals(settled).answer_ms <= 1.05 * best_ms


@given(FLEETS, st.data(), st.integers(0, 2**32 - 1))
def test_under_a_constant_load_the_correction_turns_three_times_at_most_and_then_holds(
    fleet: Fleet, data: st.DataObject, seed: int
) -> None:
    """Also if each window is up to 4 % off."""
    random, moves = np.random.default_rng(seed), list[Move]()
    state, count = Correction(fleet.rank_ms), data.draw(st.integers(1, fleet.workers - 1))
    for _ in range(3 * fleet.workers + 100):
        seen = fleet.signals(count)
        noisy = replace(seen, answer_ms=seen.answer_ms * random.uniform(0.96, 1.04))
        bounds = {Move.PRE_INFER: count < fleet.workers - 1, Move.RANKING: count > 1}
        state, move = state.after(noisy, frozenset(each for each in OPPOSITE if bounds[each]))
        moves.append(move)
        count += {Move.PRE_INFER: 1, Move.RANKING: -1, Move.HOLD: 0}[move]
        assert 1 <= count < fleet.workers
    made = [move for move in moves if move is not Move.HOLD]
    assert sum(before is not after for before, after in itertools.pairwise(made)) <= 3
    assert set(moves[-100:]) == {Move.HOLD}


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        (Signals(13.0, 0.4), Move.PRE_INFER),
        (Signals(13.0, 0.05), Move.RANKING),
        (Signals(10.9, 0.4), Move.HOLD),
    ],
    ids=["both up", "time up and share down", "time as before"],
)
def test_a_settled_fleet_is_corrected_after_three_slow_windows(changed: Signals, expected: Move) -> None:
    state, moves = Correction(hit_ms=6.0, settled_ms=10.0), list[Move]()
    for seen in (changed, changed, Signals(10.0, 0.1), changed, changed, changed):
        state, move = state.after(seen)
        moves.append(move)
    assert moves == [Move.HOLD] * 5 + [expected]


# -- virtual time ---------------------------------------------------------------------------------


def outcome(one: Case, owners: int, pool: Pool | None) -> PartOutcome:
    return RelaySimulation(one if pool is None else one.with_pool(pool), range(12), parts_of(12, owners)).run()


def share(done: PartOutcome, ending: str) -> float:
    return float((done.requests.endings == CODE[ending]).mean())


@pytest.mark.slow
def test_owners_rank_on_what_workers_of_the_pool_computed() -> None:
    done = outcome(case(), 2, Pool(US_PER_BYTE, 1))
    assert share(done, RankingPath.HBM) > 0.9 and done.ready / done.asked > 0.9
    assert share(done, "lost") == 0
    assert done.jobs["computed"] > 100
    assert done.device_s < 1.3 * (done.jobs["computed"] * 0.01024 + len(done.requests) * 0.00032)


@pytest.mark.slow
def test_owners_compute_what_a_pool_that_lacks_workers_has_no_time_for() -> None:
    few, enough = (outcome(case("traffic.new_share=1", rate=150, seconds=6), 2, Pool(US_PER_BYTE, n)) for n in (1, 4))
    told, passed_on = ([one.jobs.get(name, 0) for one in (few, enough)] for name in ("computed", "passed_on"))
    assert passed_on[0] > 0 and share(few, "lost") == 0
    assert few.ready / few.asked < enough.ready / enough.asked and enough.ready / enough.asked > 0.9
    assert told[0] > 0.5 * few.asked, "owners or workers of the pool computed them"


@pytest.mark.slow
def test_the_store_has_what_the_tiers_of_a_worker_have_not() -> None:
    sizes = (f"worker.hbm_bytes={10 * PREFIX_BYTES}", f"worker.dram_bytes={10 * PREFIX_BYTES}")
    one = case(*sizes, "traffic.users=120", "traffic.zipf_exponent=0", "admission.footprint_reserve=0", seconds=60)
    without, with_store = (outcome(one, 2, pool) for pool in (None, Pool(US_PER_BYTE)))
    assert with_store.device_s < 0.5 * without.device_s
    assert with_store.jobs["reloaded"] > 0.5 * with_store.asked
    found = sum(with_store.found.values())
    assert found == pytest.approx(len(with_store.requests), rel=0.03), (
        "an impression whose job looked twice counts once"
    )


def test_a_worker_of_the_pool_takes_no_more_jobs_than_it_has_slots() -> None:
    env, store = simpy.Environment(), SharedStore(StoreTimes(case().model, US_PER_BYTE))
    received, told, passed = list[int](), list[int](), list[PoolJob]()
    ended = list[Callable[[int, JobOutcome], None]]()

    class Worker:
        now_us = 1_500
        cache: Any = None
        executor = SimpleNamespace(preinfer_backlog_us=0)

        def receive_job(self, number: int, *_: object) -> None:
            received.append(number)

    def make(_worker_id: str, on_job: Callable[[int, JobOutcome], None]) -> Any:
        ended.append(on_job)
        return Worker()

    pool = PreInferWorkers(
        env, store, make, 1, SLOTS, lambda job: told.append(job.number), lambda job: passed.append(job)
    )
    for number in range(SLOTS + 2):
        due_us = EPOCH_US + (1_000 if number == SLOTS else 60_000)
        pool.offer(PoolJob(number, PreInferJob(str(number), "u", due_us, due_us, 0, 64, 0, EPOCH_US), 0))
    assert received == list(range(SLOTS))
    ended[0](0, JobOutcome.OVER_FOOTPRINT)
    env.run(until=2_000)
    assert received == [*range(SLOTS), SLOTS + 1], "the job between could not end in time"
    assert pool.jobs == {"over_footprint": 1, "rejected": 1} and not told and not passed


@pytest.mark.slow
def test_in_virtual_time_too_the_correction_ends_within_5_percent_of_the_best_fixed_ratio() -> None:
    one, workers = case("traffic.new_share=0.7", "traffic.budget_ms=15", rate=160, seconds=4), 4
    found: dict[int, Signals] = {}
    with Runner(1) as runner:
        for count in range(1, workers):
            pool = Pool(US_PER_BYTE, count)
            figures = simulate_as_one(one.with_pool(pool), workers - count, 1, runner, lambda _: None)
            found[count] = Signals(figures.answer_ms.value, figures.prefix_share.value)
    best_ms = min(each.answer_ms for each in found.values())
    assert max(each.answer_ms for each in found.values()) > 2 * best_ms, "the ratio matters"
    for first in found:
        assert found[settle(found.__getitem__, workers, first, hit_ms=0.4)].answer_ms <= 1.05 * best_ms


# -- the commands ---------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_command_compares_three_fleets_over_the_same_impressions(tmp_path: Path) -> None:
    done = CliRunner().invoke(
        app,
        [
            "simulate", "run", "--system", "pool", "--calibration", str(calibration_in(tmp_path)), "--workers", "3",
            "--qps", "40", "--seconds", "4", "--seeds", "2", "--lengths", "512", "--slo-ms", "12", "--jobs", "1",
            "--token-bytes", "2KiB", "--json", str(tmp_path / "out.json"),
        ],
    )  # fmt: skip
    assert done.exit_code == 0, done.output
    written = json.loads((tmp_path / "out.json").read_text())
    assert list(written["systems"]) in (["relay", "relay + store", pool] for pool in ("pool 1 + 2", "pool 2 + 1"))
    assert len({figures["requests"] for figures in written["systems"].values()}) == 1
    assert "jobs ready in time" in done.output


@pytest.mark.parametrize(
    ("options", "error"),
    [
        (("--workers", "1"), "give --workers 2 or more"),
        (("--refresh", "60"), "leave out --refresh"),
    ],
)
def test_a_fleet_that_is_not_simulated_with_a_pool_is_refused(
    tmp_path: Path, options: tuple[str, ...], error: str
) -> None:
    command = ["simulate", "run", "--system", "pool", "--calibration", str(calibration_in(tmp_path))]
    command += ["--workers", "3", "--lengths", "512", "--token-bytes", "2KiB", "--jobs", "1", *options]
    done = CliRunner().invoke(app, command)
    assert done.exit_code and error in f"{done.output}{done.exception}"
