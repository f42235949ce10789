"""The headline figures: searches, the decision rule, the figures from rows, the report, and a cell in miniature."""

from __future__ import annotations

import itertools
import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.figure import Figure
from rich.console import Console

from relaygr.admission.latency import LatencyModel, Stage
from relaygr.bench.generator.samples import LOST, Sample, write_samples
from relaygr.bench.generator.trace import WARM_UP, Trace, read_trace, write_trace
from relaygr.bench.generator.workload import Workload, make_trace, reuse_of
from relaygr.bench.headline import command
from relaygr.bench.headline.__main__ import main
from relaygr.bench.headline.checked import LEARNT_UP_TO, compare_in_virtual_time, live_runs
from relaygr.bench.headline.command import runs_there, with_other_reuses
from relaygr.bench.headline.decision import decide, paired_ratio, queue_growth, upper_bound
from relaygr.bench.headline.document import Grid, Text
from relaygr.bench.headline.figures import (
    CONFIRMED,
    NO_LENGTHS,
    counts_for_b,
    figures_of,
    longest_truncation,
    same_load,
)
from relaygr.bench.headline.grid import BY_NAME, CENTRE, GRID, LOOSE, PUBLISHED, QUICK, REUSES, Cell, at_reuse
from relaygr.bench.headline.outlook import Demand, Verdict, late_share_of_full, verdict_of, work_of
from relaygr.bench.headline.plan import (
    CellPlan,
    EngineTimes,
    alone_path,
    load_engine_times,
    load_plan,
    plan_in,
    plan_of,
    save_engine_times,
    save_plan,
)
from relaygr.bench.headline.plots import plot_cell
from relaygr.bench.headline.points import (
    FRESH_SEEDS,
    FULL_MODE,
    PARTITIONS,
    QUICK_MODE,
    RATES_MODE,
    SIMULATED_MODE,
    CellSearch,
    FoundUses,
    Mode,
    Point,
    samples_path,
    trace_name,
    trace_path,
    unfinished_in,
    workload_of,
)
from relaygr.bench.headline.report import (
    FIGURES,
    GRID_FIGURES,
    OTHERS_FIGURES,
    break_even,
    fill_page,
    marks_for,
    write_report,
)
from relaygr.bench.headline.rows import (
    AT_RATE,
    CHECKED,
    OF_LOG,
    SIMULATED,
    SLOW_LIMIT,
    RunFile,
    RunRow,
    Used,
    columns_of,
    paths_at,
    read_dicts,
    read_rows,
    score_columns,
)
from relaygr.bench.headline.run import Bench, estimated_s, read_others, served_cell
from relaygr.bench.headline.search import highest_passing, snapped, values_around
from relaygr.bench.headline.simulated import SimulatedBench, SimulatedRun, TraceLoad, samples_of, simulate, times_of
from relaygr.bench.headline.summary import (
    at_rates,
    baseline,
    by_cell,
    by_reuse,
    hits_beside_preinfer,
    limits_by_seed,
)
from relaygr.bench.headline.systems import FLAGS, QUICK_SYSTEMS, TUNED, UNCUT, System, settings_of
from relaygr.bench.rows import machine
from relaygr.bench.speed import MachineSpeed
from relaygr.devbroker import BrokerChoice, LocalBroker
from relaygr.runtime.errors import RelayError
from relaygr.schemas.messages import MAX_BEHAVIOURS, LatencyCoefficients
from relaygr.settings import load_settings
from relaygr.traffic.settings import TrafficSettings
from relaygr.worker.calibration import Calibration, MachineDescription, load_calibration, save_calibration
from relaygr.worker.kv import KvDtype
from relaygr.worker.model.options import ComputeDtype
from tests.worlds.simulated import NO_TIMES

SAMPLE = Sample(
    row=0, part=1, user_id="u", history_length=64, ranking_us=0, lag_us=100, latency_us=40_000, status="ranked",
    path="full", prefix_tokens=64, in_worker_us=38_000, queue_us=8_000, pre_infer_us=20_000, rank_us=5_000,
)  # fmt: skip
DEADLINE_MS = 100


def columns(samples: list[Sample], **used: Any) -> dict[str, Any]:
    return columns_of(samples, DEADLINE_MS, 10.0, 0.5, Used(**used), {each.row: 25_000.0 for each in samples})


@pytest.fixture(autouse=True)
def no_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """The figures of tests say nothing, so the engine alone does not wait for a quiet machine."""
    for module in ("run", "simulated"):
        monkeypatch.setattr(f"relaygr.bench.headline.{module}.ENGINE_WAIT_S", 0.0)


def row(**changes: Any) -> RunRow:
    base = RunRow(
        measured_at="2026-01-01T00:00:00Z", machine="one", code="c0de", broker="Kafka", mode="full", cell="centre",
        figure="B", system="B0", variant="", history=64, rate_per_s=10.0, seed=1, attempt=1, **columns([SAMPLE] * 20),
        **score_columns([], []),
    )  # fmt: skip
    return replace(base, **changes)


def outcome(system: str, rates: dict[float, float], seed: int, **changes: Any) -> list[RunRow]:
    """Rows of figure B: late shares by rate."""
    return [row(system=system, seed=seed, rate_per_s=rate, late_share=late, **changes) for rate, late in rates.items()]


def reported(folder: Path, rows: Iterable[RunRow]) -> str:
    """The report of a folder with these rows."""
    file = RunFile(folder)
    for each in rows:
        file.add(each, [SAMPLE])
    write_report(folder)
    return (folder / "report.md").read_text(encoding="utf-8")


def confirming(rates: dict[float, float], **changes: Any) -> list[RunRow]:
    """Rows of five fresh seeds that confirm these rates of figure B."""
    seeds = range(1_001, 1_006)
    return [each for seed in seeds for each in outcome("B0", rates, seed, figure=CONFIRMED["B"], **changes)]


class TestSearch:
    RATES = values_around(4.0, 1.05, 0.25, 256.0, snapped)

    @pytest.mark.parametrize("start", [0.1, 1.0, 17.0, 1_000.0])
    @pytest.mark.parametrize("capacity", [0.7, 1.0, 3.3, 17.0, 90.0])
    def test_the_highest_rate_is_within_the_resolution_of_the_capacity(self, capacity: float, start: float) -> None:
        found = highest_passing(lambda rate: rate <= capacity, self.RATES, start)
        assert found.passed is not None and found.failed is not None
        assert found.passed <= capacity < found.failed
        assert found.failed / found.passed <= 1.06

    def test_searches_that_start_alike_ask_for_the_same_rates(self) -> None:
        asked: list[set[float]] = []
        for capacity in (9.0, 9.5):
            rates: set[float] = set()

            def passes(rate: float, rates: set[float] = rates, capacity: float = capacity) -> bool:
                rates.add(rate)
                return rate <= capacity

            highest_passing(passes, self.RATES, 4.0)
            asked.append(rates)
        assert len(asked[0] & asked[1]) >= 4

    def test_a_search_that_starts_at_the_answer_needs_two_runs_and_one_nearby_few(self) -> None:
        best, places = 8.73, self.RATES
        assert best in places
        for away, runs in ((0, 2), (1, 2), (-1, 3), (2, 3), (-2, 5), (40, 14)):
            asked: list[float] = []

            def passes(rate: float, asked: list[float] = asked) -> bool:
                asked.append(rate)
                return rate <= 9.0

            highest_passing(passes, places, places[places.index(best) + away])
            assert len(asked) <= runs, away

    def test_a_system_that_passes_or_fails_everywhere_ends_the_search_at_its_bounds(self) -> None:
        rates = values_around(4.0, 2.0, 1.0, 16.0, snapped)
        assert rates == [1.0, 2.0, 4.0, 8.0, 16.0]
        always, never = (highest_passing(lambda rate, passes=passes: passes, rates, 4.0) for passes in (True, False))
        assert (always.passed, always.failed) == (16.0, None)
        assert (never.passed, never.failed) == (None, 1.0)

    @pytest.mark.parametrize("limit", [64, 200, 1_000, 4_095])
    def test_a_fine_search_finds_the_last_page_that_passes(self, limit: int) -> None:
        lengths = values_around(512, 1.01, 64, 4_160, lambda length: round(length / 64) * 64)
        assert lengths == [float(length) for length in range(64, 4_161, 64)]
        found = highest_passing(lambda length: length <= limit, lengths, 512)
        assert (found.passed, found.failed) == (limit // 64 * 64, limit // 64 * 64 + 64)


class TestDecision:
    CASES: tuple[tuple[str, list[float], bool, str], ...] = (
        ("every seed well within", [0.001, 0.0, 0.002, 0.001, 0.0], True, "every seed"),
        ("one seed beyond", [0.0, 0.0, 0.0, 0.0, 0.011], False, "a seed had 1.10% late"),
        ("too few seeds", [0.0] * 4, False, "4 of 5 seeds"),
        ("within, but too scattered to be sure", [0.0, 0.0099, 0.0, 0.0099, 0.0099], False, "not 95% sure"),
    )

    @pytest.mark.parametrize(("shares", "passed", "why"), [case[1:] for case in CASES], ids=[case[0] for case in CASES])
    def test_the_rule(self, shares: list[float], passed: bool, why: str) -> None:
        decision = decide(shares)
        assert decision.passed == passed
        assert why in decision.why

    def test_a_system_at_its_limit_seldom_passes(self) -> None:
        """One run of it passes about every second time."""
        random = np.random.default_rng(1)
        late = random.binomial(2_000, 0.01, (400, 5)) / 2_000
        assert 0.4 < np.mean(late[:, 0] <= 0.01) < 0.7
        assert np.mean([decide(list(each)).passed for each in late]) < 0.1

    def test_the_bound_is_that_of_students_t(self) -> None:
        assert upper_bound([1.0, 2.0, 3.0, 4.0, 5.0]) == pytest.approx(3 + 2.1318 * math.sqrt(2.5 / 5), rel=1e-4)
        assert math.isnan(upper_bound([0.0]))

    def test_what_a_trace_makes_hard_for_both_falls_out_of_the_paired_ratio(self) -> None:
        base = {1: 10.0, 2: 20.0, 3: 5.0, 4: 12.0, 5: 30.0}
        ours = {seed: 2 * rate * (1.01 if seed % 2 else 0.99) for seed, rate in base.items()}
        ratio = paired_ratio(ours, base)
        assert ratio is not None and ratio.low < 2.0 < ratio.high
        assert ratio.high / ratio.low < 1.05

    def test_a_seed_without_a_pair_or_a_value_does_not_count(self) -> None:
        ratio = paired_ratio({1: 10.0, 2: 10.0, 3: 10.0}, {1: 5.0, 2: 0.0})
        assert ratio is not None and (ratio.value, ratio.seeds) == (2.0, 1)
        assert math.isnan(ratio.low)
        assert paired_ratio({1: 1.0}, {2: 1.0}) is None

    def test_a_queue_that_grows_is_seen_and_one_that_stays_is_not(self) -> None:
        begins = list(range(0, 10_000_000, 10_000))
        assert abs(queue_growth(begins, [each + 50_000 for each in begins])) < 1
        assert queue_growth(begins, [int(each * 1.1) + 50_000 for each in begins]) > 50


class TestRow:
    def test_every_offered_request_without_a_whole_answer_in_time_is_late(self) -> None:
        samples = [
            *[SAMPLE] * 93,
            replace(SAMPLE, latency_us=DEADLINE_MS * 1000 + 1),
            replace(SAMPLE, path="truncated"),
            replace(SAMPLE, history_stale=True),
            replace(SAMPLE, status="failed", path=None),
            replace(SAMPLE, status="expired", path=None),
            replace(SAMPLE, status=LOST, path=None, latency_us=None),
            replace(SAMPLE, path="hbm", tokens_cached=64),
            *[replace(SAMPLE, part=0, status=LOST, latency_us=None)] * 9,
        ]
        found = columns(samples)
        assert (found["offered"], found["late"], found["late_share"]) == (100, 6, 0.06)
        assert (found["truncated"], found["failed"], found["expired"], found["lost"]) == (1, 1, 1, 1)
        assert (found["hbm_share"], found["full_share"]) == (0.01, 0.95)
        assert found["offered_p99_ms"] == math.inf
        assert found["p50_ms"] == 40.0

    def test_time_in_the_worker_is_compared_with_the_engine_alone_without_the_queue(self) -> None:
        assert columns([SAMPLE] * 5)["worker_over_engine"] == pytest.approx(30 / 25)

    def test_a_run_whose_generator_was_late_is_not_valid(self) -> None:
        assert columns([replace(SAMPLE, lag_us=1_900)] * 5)["valid"]
        assert not columns([SAMPLE] * 500 + [replace(SAMPLE, lag_us=9_000)])["valid"]

    def test_device_seconds_are_for_a_thousand_rankings(self) -> None:
        assert columns([SAMPLE] * 50, device_s=2.0)["device_s_per_1000"] == pytest.approx(40)

    def test_scores_are_compared_with_those_of_the_same_row(self) -> None:
        kept = [replace(SAMPLE, row=each, scores=np.array([1.0, 2.0 * each], np.float32)) for each in (1, 2, 3)]
        wrong = replace(kept[1], scores=np.array([1.0, 4.5], np.float32))
        found = score_columns([kept[0], wrong, replace(kept[2], history_stale=True)], kept)
        assert (found["scores_compared"], found["scores_different"]) == (2, 1)
        assert found["scores_worst_error"] == pytest.approx(0.125)
        assert score_columns([wrong], kept, tolerance=0.13)["scores_different"] == 0

    @pytest.mark.parametrize(
        "change", [{"valid": False}, {"late_share": 0.02}, {"queue_growth": 9.0}, {"scores_different": 1}]
    )
    def test_what_makes_a_run_fail(self, change: dict[str, Any]) -> None:
        assert row().passed
        assert not row(**change).passed

    def test_a_run_says_why_it_did_not_pass(self) -> None:
        changes: dict[str, dict[str, Any]] = {
            "passed": {}, "late": {"late_share": 0.02}, "over-saturated": {"late_share": 0.5, "queue_growth": 9.0},
            "other scores than B0's in 2 requests": {"scores_different": 2},
            "not valid: the generator was late": {"valid": False, "lag_p999_ms": 50.0, "slowdown": 1.5},
            "not valid: the machine took 1.50 times as long": {"valid": False, "slowdown": 1.5},
        }  # fmt: skip
        assert [row(**change).verdict for change in changes.values()] == list(changes)

    @pytest.mark.parametrize(
        ("slowdown", "is_valid"), [(math.nan, True), (0.8, True), (SLOW_LIMIT, True), (1.3, False)]
    )
    def test_a_run_on_a_machine_that_is_slower_than_quiet_is_invalid(self, slowdown: float, is_valid: bool) -> None:
        used, engine_us = Used(slowdown=slowdown), {SAMPLE.row: 25_000.0}
        found = columns_of([SAMPLE], DEADLINE_MS, 10.0, 0.5, used, engine_us, SLOW_LIMIT)
        assert found["valid"] is is_valid

    def test_rows_are_read_as_they_were_added_and_answer_their_question(self, tmp_path: Path) -> None:
        file = RunFile(tmp_path)
        file.add(row(offered_p99_ms=math.inf), [SAMPLE])
        file.add(row(seed=2), [SAMPLE])
        again = RunFile(tmp_path)
        assert [each.seed for each in again.rows] == [1, 2]
        assert again.rows[0].offered_p99_ms == math.inf
        assert [each.seed for each in again.attempts(row(seed=2, attempt=3).key)] == [2]

    def test_rows_of_something_else_are_refused(self, tmp_path: Path) -> None:
        (tmp_path / "runs.csv").write_text("a,b\n1,2\n", encoding="utf-8")
        with pytest.raises(RelayError, match=r"runs\.csv does not have the rows of this version: line 2: KeyError"):
            read_rows(tmp_path / "runs.csv")

    def test_a_row_that_cannot_be_read_is_refused_with_its_line(self, tmp_path: Path) -> None:
        file = RunFile(tmp_path)
        file.add(row(), [SAMPLE])
        file.add(row(machine="here"), [SAMPLE])
        text = (tmp_path / "runs.csv").read_text(encoding="utf-8")
        (tmp_path / "runs.csv").write_text(
            text.replace(",here,c0de,Kafka,full,centre,B,B0,,64,", ",here,c0de,Kafka,full,centre,B,B0,,many,")
        )
        with pytest.raises(RelayError, match=r"line 3: ValueError.*many"):
            read_rows(tmp_path / "runs.csv")


class TestFigures:
    def test_the_highest_value_lies_below_the_lowest_that_failed(self) -> None:
        rows = outcome("B0", {10.0: 0.0, 20.0: 0.05, 40.0: 0.0}, 1)
        assert figures_of(rows, "full")[0].value == 10.0

    def test_ratios_are_paired_by_seed(self) -> None:
        rows = []
        for seed in range(1, 6):
            base = 10.0 * seed
            rows += outcome("B0", {base: 0.001, 2 * base: 0.5}, seed)
            rows += outcome("R", {3 * base: 0.001, 6 * base: 0.5}, seed)
        b0, relay = figures_of(rows, "full")
        assert (b0.value, b0.ratio) == (30.0, None)
        assert relay.ratio is not None
        assert (relay.ratio.value, relay.ratio.low, relay.ratio.high) == (pytest.approx(3),) * 3

    def test_the_runs_that_chose_a_value_do_not_decide_about_it(self) -> None:
        searched = [each for seed in range(1, 6) for each in outcome("B0", {10.0: 0.001, 20.0: 0.5}, seed)]
        (alone,) = figures_of(searched, "full")
        assert (alone.value, alone.decided, alone.decision) == (10.0, None, None)
        assert [each.decided for each in figures_of(searched + confirming({10.0: 0.001}), "full")] == [10.0]
        (refused,) = figures_of(searched + confirming({10.0: 0.02}), "full")
        assert refused.decided is None and refused.decision is not None and "2.00% late" in refused.decision.why

    def test_a_value_above_one_that_failed_is_not_decided(self) -> None:
        rows = outcome("B0", {40.0: 0.0}, 1) + confirming({10.0: 0.0, 20.0: 0.05, 40.0: 0.0})
        assert [each.decided for each in figures_of(rows, "full")] == [10.0]

    def test_a_confirming_run_with_wrong_scores_decides_nothing(self) -> None:
        rows = outcome("B0", {10.0: 0.0}, 1) + confirming({10.0: 0.0}, scores_different=1)
        (found,) = figures_of(rows, "full")
        assert found.decided is None and found.decision is not None and found.decision.why == "seed 1001 did not pass"

    def test_the_truncation_of_b1_is_what_was_decided_and_no_single_run(self) -> None:
        lucky = [row(figure="A", history=length, seed=1) for length in (512, 1_024)]
        rows = [*lucky, *(row(figure=CONFIRMED["A"], history=512, seed=1_000 + seed) for seed in range(1, 6))]
        assert longest_truncation(figures_of(lucky, "full"), "centre", decides=True) == 0
        assert longest_truncation(figures_of(rows, "full"), "centre", decides=True) == 512
        assert longest_truncation(figures_of(lucky, "full"), "centre", decides=False) == 1_024

    def test_rows_of_another_mode_do_not_count_nor_invalid_attempts(self) -> None:
        repeated = row(rate_per_s=10.0, late_share=0.5, valid=False)
        rows = [repeated, *outcome("B0", {10.0: 0.0}, 1), row(mode="quick")]
        assert [each.value for each in figures_of(rows, "full")] == [10.0]
        assert figures_of(rows, "full")[0].is_at_least

    def test_a_search_that_met_a_run_without_a_valid_attempt_has_no_value_and_the_report_says_so(
        self, tmp_path: Path
    ) -> None:
        rows = [
            *outcome("B0", {10.0: 0.0}, 1),
            *outcome("B0", {20.0: 0.0}, 1, valid=False),
            *outcome("B0", {10.0: 0.0, 20.0: 0.5}, 2),
            *outcome("R", {10.0: 0.0}, 1, valid=False),
        ]
        assert [(each.system, each.by_seed) for each in figures_of(rows, "full")] == [("B0", {2: 10.0})]
        report, page = reported(tmp_path, rows), tmp_path / "page.md"
        page.write_text(TestPage.PAGE, encoding="utf-8")
        fill_page(tmp_path, None, page)
        for text in (page.read_text(encoding="utf-8"), report):
            assert "each attempt of a run was invalid: centre B0 B seed 1, centre R B seed 1." in text

    def test_a_search_that_was_interrupted_has_no_value_and_no_ratio_and_report_and_page_say_so(
        self, tmp_path: Path
    ) -> None:
        plan = plan_of(QUICK, engine_times(QUICK))
        half, quick = plan.half_rate_per_s, {"cell": "quick", "mode": "quick"}
        below, above = snapped(half / 1.4), snapped(half * 1.4)
        save_plan(plan, tmp_path / "plans" / "quick.json")
        page = tmp_path / "page.md"
        page.write_text(TestPage.PAGE, encoding="utf-8")
        told = "Search not finished, so without a value: quick B0 B seed 1."

        text = reported(tmp_path, outcome("B0", {half: 0.5, below: 0.5}, 1, **quick))
        assert told in text and "nowhere in the search" not in text and "| quick | 0 |" not in text
        with pytest.raises(RelayError, match="have no figures for a page: no search is finished"):
            fill_page(tmp_path, None, page)

        text = reported(tmp_path, outcome("R", {half: 0.0, above: 0.5}, 1, **quick))
        fill_page(tmp_path, None, page)
        for each in (text, page.read_text(encoding="utf-8")):
            assert told in each and "one seed)" not in each

        text = reported(tmp_path, outcome("B0", {snapped(half / 1.4**2): 0.0}, 1, **quick))
        assert "not finished" not in text and "1.95 (one seed)" in text

    @pytest.mark.parametrize(
        ("lengths", "is_finished"),
        [
            ({512: True}, False), ({512: True, 704: False}, True), ({512: True, 1_024: False}, False),
            ({256: False}, True), ({512: False, 384: False}, False), ({8_192: True}, True),
        ],
    )  # fmt: skip
    def test_a_search_of_lengths_is_finished_between_neighbours_or_at_a_bound(
        self, lengths: dict[int, bool], is_finished: bool
    ) -> None:
        rows = [
            row(cell="quick", mode="quick-9s", figure="A", history=length, late_share=0.0 if passed else 0.5)
            for length, passed in lengths.items()
        ]
        plans = {"quick": plan_of(QUICK, engine_times(QUICK))}
        assert (unfinished_in(rows, "quick-9s", plans) == []) is is_finished
        assert unfinished_in(rows, "quick-9s", {}) == []

    @pytest.mark.parametrize(("use", "counts"), [(0.31, True), (0.2, False)])
    def test_figure_b_counts_where_the_work_limits_the_baseline(self, use: float, counts: bool) -> None:
        rows = outcome("B0", {10.0: 0.0, 20.0: 0.5}, 1, device_use=use)
        assert counts_for_b(figures_of(rows, "full"), rows, "centre", "full") == counts

    @pytest.mark.parametrize(("late", "rate"), [(0.0, 10.0), (0.5, 5.0)])
    def test_systems_are_compared_at_a_rate_that_all_were_asked_at_and_most_passed(
        self, late: float, rate: float
    ) -> None:
        rows = outcome("B0", {5.0: 0.0, 10.0: late}, 1) + outcome("R", {5.0: 0.0, 10.0: 0.0, 20.0: 0.0}, 1)
        found = same_load(rows, "full", "centre")
        assert [(each.system, each.rate_per_s) for each in found] == [("B0", rate), ("R", rate)]

    def test_the_report_says_the_ratio_at_each_share_of_returning_users_and_what_it_cost(self, tmp_path: Path) -> None:
        rows = []
        for cell, best, hits in (("quick-r0", 10.0, 0.0), ("quick", 20.0, 0.55)):
            for system, top in (("B0", 10.0), ("R", best)):
                used = {"hbm_share": hits, "preinfer_computed": 8, "preinfer_wasted": 2}
                rows += outcome(system, {5.0: 0.0, top: 0.0, 2 * top: 0.5}, 1, cell=cell, **used)
        text = reported(tmp_path, rows)
        head = "| quick | B: requests/s |"
        lines = [line for line in text.splitlines() if line.startswith(head)]
        assert [line.split(" | ")[2] for line in lines] == ["0", "0.9"]
        assert ["1.00 (one seed)" in lines[0], "2.00 (one seed)" in lines[1]] == [True, True]
        assert all("| 25% |" in line for line in lines) and "| 55% |" in lines[1]
        assert "The folder `plans` lacks quick, quick-r0: " in text and "Energy: not readable here." in text

    def test_b0_stands_in_the_cells_of_its_plan_in_which_it_was_not_measured(self, tmp_path: Path) -> None:
        quick = {"mode": "quick"}
        rows = outcome("B0", {5.0: 0.0, 10.0: 0.0, 20.0: 0.5}, 1, cell="quick", device_use=0.2, **quick)
        rows = [replace(each, device_s_per_1000=100.0) for each in rows]
        rows += outcome(
            "R", {20.0: 0.0, 40.0: 0.5}, 1, cell="quick-r0.6", hbm_share=0.6, device_s_per_1000=50.0, **quick
        )
        rows += outcome("R", {20.0: 0.0, 40.0: 0.5}, 1, **quick)
        figures = figures_of(rows, "quick")
        found = {(each.cell, each.system): each for each in figures}
        lent, relay = found["quick-r0.6", "B0"], found["quick-r0.6", "R"]
        assert (lent.measured_in, lent.value) == ("quick", 10.0)
        assert relay.ratio is not None and (relay.measured_in, relay.ratio.value) == ("quick-r0.6", pytest.approx(2.0))
        assert ("centre", "B0") not in found
        assert not counts_for_b(figures, rows, "quick-r0.6", "quick")
        text = reported(tmp_path, rows)
        line = next(each for each in text.splitlines() if each.startswith("| quick | B: requests/s | 0.6 |"))
        assert "| 10 (of quick) | 20 | 2.00 (one seed) | 20%, does not count | 60% at 20/s | - |" in line
        assert line.endswith("| 100.0 at 10/s, 50.0 at 20/s |")
        assert "B0 was measured in quick alone" in text

    def test_b0_stands_for_no_cell_in_a_mode_that_measures_it_in_each(self) -> None:
        rows = outcome("B0", {10.0: 0.0}, 1, cell="quick") + outcome("R", {10.0: 0.0}, 1, cell="quick-r0")
        for mode, lends in (("quick", True), ("quick-9s", True), ("quick-log-1", False), ("full", False)):
            found = figures_of([replace(each, mode=mode) for each in rows], mode)
            assert (("quick-r0", "B0") in {(each.cell, each.system) for each in found}) == lends

    def test_b0_does_not_stand_where_its_own_runs_were_invalid(self) -> None:
        quick = {"mode": "quick"}
        rows = outcome("B0", {10.0: 0.0, 20.0: 0.5}, 1, cell="quick", **quick)
        rows += outcome("R", {10.0: 0.0}, 1, cell="quick-r0", **quick)
        assert ("quick-r0", "B0") in {(each.cell, each.system) for each in figures_of(rows, "quick")}
        rows += outcome("B0", {10.0: 0.0}, 1, cell="quick-r0", valid=False, **quick)
        assert ("quick-r0", "B0") not in {(each.cell, each.system) for each in figures_of(rows, "quick")}

    def test_runs_of_another_mode_in_the_folder_do_not_change_the_table(self) -> None:
        own = outcome("B0", {10.0: 0.0}, 1) + outcome("R", {10.0: 0.0, 20.0: 0.0}, 1, reuse=0.6)
        other = [replace(each, mode="quick", reuse=0.1) for each in own] * 2
        other.append(replace(own[-1], valid=False, reuse=0.9))
        table = by_reuse(own, figures_of(own, "full"), "full")
        assert by_reuse(other + own, figures_of(other + own, "full"), "full") == table
        assert [line[3] for line in table.rows] == ["0.60"]

    def test_every_figure_that_had_no_real_broker_says_so(self, tmp_path: Path) -> None:
        kafka, embedded = (
            reported(
                tmp_path / folder,
                outcome("B0", {10.0: 0.0}, 1, broker=broker) + outcome("R", {10.0: 0.0}, 1, broker=broker),
            )
            for folder, broker in (("kafka", "Apache Kafka 4"), ("embedded", "librdkafka's embedded cluster"))
        )
        assert "no real broker" not in kafka
        figures = [
            line
            for line in embedded.splitlines()
            if line.startswith(("![", "## R against", "## A:", "## B:", "## centre:"))
        ]
        assert len(figures) > 3 and all("; no real broker" in line for line in figures)

    def test_a_folder_takes_the_runs_of_one_broker(self, tmp_path: Path) -> None:
        RunFile(tmp_path).add(row(broker="Kafka"), [SAMPLE])
        RunFile(tmp_path).add(row(broker=f"{SIMULATED}: Kafka"), [SAMPLE])
        RunFile(tmp_path).refuse_other_brokers("Kafka")
        with pytest.raises(RelayError, match="are of Kafka, this is librdkafka: give another folder with --out"):
            RunFile(tmp_path).refuse_other_brokers("librdkafka")

    def test_the_report_compares_the_relay_with_a_mere_cache_and_with_the_oracle(self, tmp_path: Path) -> None:
        bests = {"B0": 10.0, "C": 20.0, "R": 30.0, "O": 40.0}
        rows = [each for system, best in bests.items() for each in outcome(system, {best: 0.0, 2 * best: 0.5}, 1)]
        text = reported(tmp_path, rows)
        assert "| centre | B: requests/s | 1.50 (one seed) | 0.75 (one seed) |" in text

    def test_the_report_tells_approximate_scores_apart_from_exact_ones(self, tmp_path: Path) -> None:
        errors = {"B0": 0.0, "R": 1e-6, "R-int8": 3e-3}
        rows = [row(system=each, scores_compared=5, scores_worst_error=error) for each, error in errors.items()]
        text = reported(tmp_path, rows)
        assert "10 compared, 0 different, largest difference 1.0e-06" in text
        assert "Approximate scores of R-int8 against B0's on the same trace: 5 compared, 0 different" in text

    def test_paths_of_another_mode_are_not_drawn_as_those_of_a_run(self, tmp_path: Path) -> None:
        file = RunFile(tmp_path)
        for mode, late_ms in (("quick", 900.0), ("full", 40.0)):
            file.add(row(mode=mode), [replace(SAMPLE, latency_us=int(late_ms * 1000))])
        (found,) = paths_at(read_dicts(tmp_path / "paths.csv"), row(mode="full"))
        assert float(found["q1_ms"]) == 40.0

    def test_p99_is_drawn_for_each_rate_by_itself(self, tmp_path: Path) -> None:
        rows = [row(figure="A", rate_per_s=rate, history=length) for rate in (5.0, 9.0) for length in (64, 128)]
        made = plot_cell(tmp_path, "quick-centre", rows, [], [], [])
        assert [each.path.name for each in made] == ["quick-centre-length-5.png", "quick-centre-length-9.png"]

    def test_the_report_names_a_cell_that_only_the_baseline_serves_as_lost(self, tmp_path: Path) -> None:
        text = reported(tmp_path, outcome("B0", {10.0: 0.0}, 1) + outcome("R", {10.0: 0.5}, 1))
        assert "R loses to B0: centre (R meets it nowhere)" in text

    def test_the_report_of_a_search_with_a_log_says_why_it_has_no_figure_a(self, tmp_path: Path) -> None:
        text = reported(tmp_path, [row(mode=f"quick{OF_LOG}0123abcd")])
        _, _, after = text.partition("## A: longest median history")
        assert NO_LENGTHS in after and after.index(NO_LENGTHS) < after.index("## B: ")

    def test_the_report_says_of_how_many_seeds_a_ratio_is_and_counts_the_others_as_lost(self, tmp_path: Path) -> None:
        rows = []
        for seed in range(1, 6):
            passes = {10.0: 0.0, 20.0: 0.0 if seed < 3 else 0.5}
            relay = passes if seed < 3 else dict.fromkeys(passes, 0.5)
            rows += outcome("B0", {10.0: 0.0, 20.0: 0.5}, seed) + outcome("R", relay, seed)
        text = reported(tmp_path, rows)
        assert "2.00 (2.00 to 2.00; 2 of 5 seeds)" in text
        assert "R loses to B0: centre (median of all seeds 0, B0 10)" in text

    def test_the_report_says_at_which_rate_of_a_the_relay_loses(self, tmp_path: Path) -> None:
        text = reported(
            tmp_path,
            [
                row(figure="A", system=system, rate_per_s=rate, history=length)
                for rate, longest in ((5.0, 128), (9.0, 32))
                for system, length in (("B0", 64), ("R", longest))
            ],
        )
        assert "R / B0 over 2 pairs of a cell and a rate: median 1.25" in text
        assert "R loses to B0: centre at 9/s (0.50)" in text

    def test_the_report_says_why_a_cell_does_not_count(self, tmp_path: Path) -> None:
        rows = []
        cells = {"idle": ({10.0: 0.0}, 0.1, {10.0: 0.0}), "busy": ({10.0: 0.0}, 0.9, {10.0: 0.5})}
        for cell, (base, use, relay) in (cells | {"alone": ({}, 0.0, {10.0: 0.0})}).items():
            rows += outcome("B0", base, 1, cell=cell, device_use=use) + outcome("R", relay, 1, cell=cell)
        lines = reported(tmp_path, rows).splitlines()
        assert [line for line in lines if "Not counted" in line] == [
            "* Not counted, because B0 does not reach 30 % device use within the deadline: idle",
            "* Not counted, because no seed has a value of both R and B0: busy",
            "* Not counted, because B0 was not run: alone",
        ]

    def test_the_report_reads_the_plan_of_a_cell_with_a_dot_in_its_name(self, tmp_path: Path) -> None:
        name = "n1024-d1.5-r0.6"
        plan = CellPlan(
            cell=name, asked="", machine="one", made_at="now", engine="cpu", full_ms=20.0, pre_ms=15.0, hit_ms=5.0,
            short_full_ms=4.0, deadline_ms=40, lead_ms=45.0, half_rate_per_s=10.0, prefix_bytes=1 << 20,
            hbm_bytes=1 << 26, dram_bytes=1 << 28, coefficients=TestBreakEven.LATENCY.coefficients,
        )  # fmt: skip
        save_plan(plan, tmp_path / "plans" / f"{name}.json")
        text = reported(tmp_path, outcome("B0", {10.0: 0.0}, 1, cell=name))
        assert f"| {name} | 1,024 |" in text and f"{name}: where the relay pays" in text

    def test_a_line_for_each_cell_says_whether_it_counts_and_the_best_and_the_median_cell_are_named(self) -> None:
        rows = []
        uses = {"lead-0": (0.5, 5.0), "lead-1": (0.4, 20.0), "n2048-d4-r0.9": (0.5, 40.0), "bursts": (0.1, 80.0)}
        for cell, (use, relay) in uses.items():
            for system, top in (("B0", 10.0), ("C", 10.0), ("R", relay)):
                rows += outcome(system, {top: 0.0, 2 * top: 0.5}, 1, cell=cell, device_use=use)
            rows += [row(system=each, cell=cell, figure="A", history=64) for each in ("B0", "R")]
        found = by_cell(rows, figures_of(rows, "full"), "full")
        grid, lines = found.table, found.ratios
        assert grid.rows[-1] == ["bursts", "10", "10", "80", "8.00", "8.00", "10%", "no", "64, 64 (1.00)"]
        counted = "R / B0 in B, where it counts: best 4.00 (n2048-d4-r0.9), median 2.00 (lead-1), worst 0.50 (lead-0)"
        assert lines.lines[0] == f"{counted}; 3 cells, below 1 in 1, at least 1.5 in 2"
        assert lines.lines[1].startswith("R / B0 in B, all cells: best 8.00 (bursts), median 2.00 (lead-1)")

    def test_medians_by_reuse_are_of_the_cells_that_have_a_value_at_each_share(self) -> None:
        rows = []
        relays = {"n2048-d4-r0": 10.0, "n2048-d4-r0.9": 40.0, "n4096-d4-r0": 20.0, "n4096-d4-r0.9": 80.0}
        relays["n1024-d2.5-r0.9"] = 5.0
        for cell, relay in relays.items():
            for system, top in (("B0", 10.0), ("R", relay)):
                rows += outcome(system, {top: 0.0, 2 * top: 0.5}, 1, cell=cell)
        lines = by_cell(rows, figures_of(rows, "full"), "full").ratios
        assert lines.lines[0].endswith("; medians by reuse, 2 cells each: 1.00 at 0, 4.00 at 0.9")

    def test_without_a_cell_that_has_a_value_at_each_share_there_are_no_medians_by_reuse(self) -> None:
        rows = []
        for cell in ("n2048-d4-r0", "n2048-d4-r0.6", "n4096-d4-r0.6", "n4096-d4-r0.9"):
            for system in ("B0", "R"):
                rows += outcome(system, {10.0: 0.0, 20.0: 0.5}, 1, cell=cell)
        lines = by_cell(rows, figures_of(rows, "full"), "full").ratios
        assert lines.lines[0].endswith("4 cells, below 1 in 0, at least 1.5 in 0")

    @pytest.mark.parametrize(
        ("is_valid", "told"),
        [(True, "4 runs above 1.25 count, so the figures are those of a slow machine."), (False, "invalid: 4 were.")],
    )
    def test_the_speed_of_the_machine_says_whether_slow_runs_count(
        self, is_valid: bool, told: str, tmp_path: Path
    ) -> None:
        rows = [*outcome("B0", {10.0: 0.0, 20.0: 0.5}, 1), *outcome("R", {10.0: 0.0, 20.0: 0.0}, 1)]
        rows = [replace(each, slowdown=1.5, valid=is_valid) for each in rows]
        text = reported(tmp_path, [*rows, row(slowdown=1.0)])
        assert "fixed work took 1.00 to 1.50 times its quiet time during 5 of 5 runs" in text and told in text

    def test_every_figure_of_a_simulation_says_that_it_is_one(self, tmp_path: Path) -> None:
        changes: dict[str, Any] = {"broker": f"{SIMULATED}: a run on Kafka", "foreign_cpu": math.nan}
        rows = outcome("B0", {10.0: 0.0}, 1, **changes) + outcome("R", {20.0: 0.0}, 1, **changes)
        text = reported(tmp_path, rows)
        figures = [line for line in text.splitlines() if line.startswith(("## The systems", "## R against", "## B:"))]
        assert len(figures) == 3 and all(line.split(" (")[0].endswith("; simulated") for line in figures)
        assert "Times learnt from real runs: simulated: a run on Kafka" in text and "Generator" not in text

    def test_hits_of_the_relay_are_held_against_those_of_the_oracle_on_the_same_trace(self, tmp_path: Path) -> None:
        file = RunFile(tmp_path)
        hits = {10.0: {"R": 61, "R-uncut": 90, "O": 10}, 20.0: {"R": 63, "O": 10}, 40.0: {"R": 30}}
        for rate, by_system in hits.items():
            for system, latency_ms in by_system.items():
                each = row(system=system, rate_per_s=rate, preinfer_device_s=1.0, device_s=4.0, preinfer_computed=3)
                file.add(each, [replace(SAMPLE, path="hbm", latency_us=latency_ms * 1000)])
        table = hits_beside_preinfer(file.rows, read_dicts(tmp_path / "paths.csv"))
        # The longest chunk takes 50 ms.
        assert [(*line[2:4], *line[5:]) for line in table.rows] == [
            ("10", "R", "25%", "61.0 ms", "10.0 ms", "62.0 ms", "yes"),
            ("20", "R", "25%", "63.0 ms", "10.0 ms", "62.0 ms", "no"),
        ]


class TestPage:
    PAGE = "# Page\n\nBefore.\n\n{}\nreplaced\n{}\n\nAfter.\n".format(*marks_for(FIGURES))

    def test_the_figures_of_the_last_mode_replace_what_stands_between_the_marks(self, tmp_path: Path) -> None:
        file, page = RunFile(tmp_path), tmp_path / "page.md"
        for mode, best in (("quick", 20.0), ("full", 30.0)):
            for system, top in (("B0", 10.0), ("R", best)):
                for each in outcome(system, {5.0: 0.0, top: 0.0}, 1, mode=mode, worker_over_engine=1.02):
                    file.add(each, [SAMPLE])
        page.write_text(self.PAGE, encoding="utf-8")
        for _ in range(2):
            fill_page(tmp_path, None, page)
            text = page.read_text(encoding="utf-8")
            assert text.startswith("# Page\n\nBefore.") and text.endswith("After.\n") and "replaced" not in text
            assert text.count("3.00 (one seed)") == 1 and "2.00 (one seed)" not in text
        fill_page(tmp_path, "quick", page)
        assert "2.00 (one seed)" in page.read_text(encoding="utf-8")

    def test_the_page_says_what_a_mere_cache_reaches(self, tmp_path: Path) -> None:
        file, page = RunFile(tmp_path), tmp_path / "page.md"
        for system, top in (("B0", 10.0), ("C", 15.0), ("R", 30.0)):
            for each in outcome(system, {5.0: 0.0, top: 0.0}, 1):
                file.add(each, [SAMPLE])
        page.write_text(self.PAGE, encoding="utf-8")
        fill_page(tmp_path, None, page)
        text = page.read_text(encoding="utf-8")
        assert "| cell | figure | R / C, 95 % |" in text and "| 2.00 (one seed) |" in text

    def test_the_page_shows_late_requests_by_rate_and_what_each_system_reached(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        rows = outcome("B0", {5.0: 0.0, 10.0: 0.2}, 1, cell="quick", mode="quick")
        for cell, top in (("quick", 20.0), ("quick-r0", 10.0)):
            rows += outcome("R", {5.0: 0.0, top: 0.0, 2 * top: 0.1}, 1, cell=cell, mode="quick")
        page, drawn = tmp_path / "page.md", list[Figure]()
        page.write_text(self.PAGE, encoding="utf-8")
        reported(tmp_path, rows)
        save = Figure.savefig
        monkeypatch.setattr(Figure, "savefig", lambda *to, **how: drawn.append(to[0]) or save(*to, **how))
        fill_page(tmp_path, None, page)
        assert "![Late requests by rate, and what each system reached (quick)](images/page.png)" in page.read_text(
            "utf-8"
        )
        assert (tmp_path / "images" / "page.png").exists()
        late, reached = drawn[-1].axes
        lines = {line.get_label(): line.get_xydata().tolist() for line in late.get_lines()[:2]}
        assert lines == {"B0": [[5.0, 0.0], [10.0, 20.0]], "R": [[5.0, 0.0], [20.0, 0.0], [40.0, 10.0]]}
        # Without returning users first, B0 of the other cell and R; then at 0.9.
        assert [bar.get_height() for bar in reached.patches] == [5.0, 10.0, 5.0, 20.0]
        assert [bar.get_hatch() for bar in reached.patches] == ["//", None, None, None]
        assert [text.get_text() for text in reached.get_xticklabels()] == ["0", "0.9"]

    def test_simulated_figures_of_the_grid_and_of_others_stand_between_marks_of_their_own(self, tmp_path: Path) -> None:
        rows, page = [], tmp_path / "page.md"
        reached = {"n2048-d4-r0": 10.0, "n2048-d4-r0.6": 20.0, "unipinrec": 2.0}
        for cell, top in reached.items():
            for system, value in (("B0", 10.0), ("R", top)):
                rates = {value: 0.0, 2 * value: 0.5}
                rows += outcome(system, rates, 1, cell=cell, mode="simulated", broker=f"{SIMULATED}: a run")
            rows += [
                row(system=each, cell=cell, mode="simulated", broker=f"{SIMULATED}: a run", figure="A", history=length)
                for each, length in (("B0", 64), ("R", 128))
            ]
        parts = {name: "{}\n{}\n".format(*marks_for(name)) for name in (GRID_FIGURES, OTHERS_FIGURES)}
        page.write_text("\n".join(parts.values()), encoding="utf-8")
        reported(tmp_path, rows)
        fill_page(tmp_path, None, page)
        grid, others = page.read_text(encoding="utf-8").split(marks_for(GRID_FIGURES)[1])
        assert "| n2048-d4 | 0, 0.6 | 10; 10 | -; - | 10; 20 | 0%; 0% | 64; 64 | -; - | 128; 128 | - |" in grid
        assert "2 of 65 cells were played. Not played: n1024-d1.5, " in grid and ", n2048-d4-r0.9, " in grid
        assert "a run" in grid and "unipinrec" not in grid and "Indicative: 1 of at least 5 seeds" in grid
        assert "| unipinrec | 0.6 | 10 | - | 2 | 0% | 64 | - | 128 | - |" in others and "n2048" not in others

    def test_rates_that_were_given_stand_between_marks_with_the_name_of_their_folder(self, tmp_path: Path) -> None:
        out, page = tmp_path / "far", tmp_path / "page.md"
        rows = [
            each for seed in range(1, 6) for each in outcome("R", {50.0: 0.0}, seed, figure="rate 50", device_use=0.5)
        ]
        page.write_text("{}\n{}\n".format(*marks_for("far")), encoding="utf-8")
        reported(out, rows)
        fill_page(out, None, page)
        text = page.read_text(encoding="utf-8")
        assert "Rows: folder `far`." in text and "nothing compares B0 with the engine alone" in text
        assert "| R | 50 | 50% | 5 of 5 | 0 | 0.00% | 5 | every seed passed; 95% sure" in text and "Machine" in text

    @pytest.mark.parametrize(
        "folder",
        [
            "headline-quick", "headline-noisy", "headline-simulated", "headline-best", "headline-rates",
            "headline-fresh",
        ],
    )  # fmt: skip
    def test_the_documentation_shows_the_figures_of_the_runs_that_are_kept(self, tmp_path: Path, folder: str) -> None:
        root, copy = Path(__file__).parents[2], tmp_path / "benchmark.md"
        shutil.copy(root / "docs" / "benchmark.md", copy)
        fill_page(root / "benchmarks" / "results" / folder, None, copy)
        assert copy.read_text(encoding="utf-8") == (root / "docs" / "benchmark.md").read_text(encoding="utf-8")

    def test_a_page_without_marks_is_refused(self, tmp_path: Path) -> None:
        RunFile(tmp_path).add(row(), [SAMPLE])
        (tmp_path / "page.md").write_text("text", encoding="utf-8")
        with pytest.raises(RelayError, match="has no lines `<!-- figures: begin"):
            fill_page(tmp_path, None, tmp_path / "page.md")


class TestBreakEven:
    LATENCY = LatencyModel(
        LatencyCoefficients(a0=0, a1=40, a2=0.01, b0=0, b1=40, b2=0.01, c0=500, c1=20, c2=0.01, d0=100, d1=1e-4)
    )
    WORK = work_of(LATENCY, 2_000, 0.0, 144, 8)
    """A prefix takes 120 ms, a ranking on it 6.5 ms."""
    DEMAND = Demand(
        rate_per_s=1.0, reuse=0.6, return_gap_s=10.0, deadline_us=300_000, outside_us=10_000, lead_us=500_000,
        cache_bytes=1 << 30, prefix_bytes=2_048 * 2_000,
    )  # fmt: skip

    CASES: tuple[tuple[str, dict[str, Any], Verdict], ...] = (
        ("low load: full inference is enough", {"rate_per_s": 0.2}, Verdict.FULL),
        ("a queue that only the relay keeps short", {"rate_per_s": 4.0}, Verdict.RELAY),
        ("the lead time is too short for new users", {"rate_per_s": 4.0, "lead_us": 1_000}, Verdict.NEITHER),
        ("more work than the device does", {"rate_per_s": 60.0}, Verdict.NEITHER),
        ("everybody comes back, after a time that the cache does not cover",
         {"rate_per_s": 15.0, "reuse": 1.0, "return_gap_s": 3_600.0}, Verdict.NEITHER),
        ("everybody comes back in time", {"rate_per_s": 15.0, "reuse": 1.0}, Verdict.RELAY),
        ("hops take the time that full inference needs", {"rate_per_s": 0.2, "outside_us": 180_000}, Verdict.RELAY),
    )  # fmt: skip

    @pytest.mark.parametrize(("changes", "verdict"), [case[1:] for case in CASES], ids=[case[0] for case in CASES])
    def test_a_demand_has_its_verdict(self, changes: dict[str, Any], verdict: Verdict) -> None:
        assert verdict_of(self.WORK, replace(self.DEMAND, **changes)) is verdict

    def test_the_queue_is_that_of_a_device_with_constant_times_and_exponential_gaps(self) -> None:
        """Erlang's formula of M/D/1: at half load 1.4 % of the requests wait for more than three service times."""
        service_us = float(self.WORK.full[0])
        late = late_share_of_full(self.WORK, 0.5e6 / service_us, 4 * service_us)
        load, wait = 0.5, 3.0
        waits_less = (1 - load) * sum(
            math.exp(load * (wait - k)) * (-load * (wait - k)) ** k / math.factorial(k) for k in range(4)
        )
        assert late == pytest.approx(1 - waits_less, rel=0.1)

    def test_a_spread_of_lengths_makes_more_requests_late(self) -> None:
        spread = work_of(self.LATENCY, 2_000, 0.3, 144, 8)
        assert max(spread.full) <= self.LATENCY.pre_us(4_000) + self.LATENCY.hit_us(4_000, 144)
        same, other = (late_share_of_full(work, 2.0, 300_000) for work in (self.WORK, spread))
        assert other > 2 * same

    def test_without_returning_users_the_relay_saves_no_device_time_and_the_cuts_of_prefixes_cost_some(self) -> None:
        full_s = self.WORK.full_s()
        assert self.WORK.relay_s(0.0) == pytest.approx(full_s, rel=1e-3)
        cuts = work_of(self.LATENCY.scaled({}, {Stage.PRE: 1_000.0}), 2_000, 0.0, 144, 8)
        assert 1.05 * cuts.full_s() < cuts.relay_s(0.0) < 1.2 * cuts.full_s()
        assert self.WORK.relay_s(0.9) < 0.5 * full_s

    @pytest.mark.parametrize(
        ("folder", "name"),
        [
            ("headline-quick", "quick"),
            ("headline-best", "dram768-n2048-d4-r0.9"),
            ("headline-best", "dram768-n2048-d5-r0.9"),
        ],
    )
    def test_the_verdicts_of_a_report_agree_with_its_measured_runs(self, folder: str, name: str) -> None:
        results, cell = Path(__file__).parents[2] / "benchmarks" / "results" / folder, BY_NAME[name]
        rows = [each for each in read_rows(results / "runs.csv") if each.cell == name]
        blocks = break_even(cell, load_plan(results / "plans" / f"{name}.json"), rows)
        verdicts, costs = (each for each in blocks if isinstance(each, Grid))
        passed: dict[tuple[str, float], list[bool]] = {}
        for each in rows:
            if each.valid and each.history == cell.history:
                passed.setdefault((each.system, each.rate_per_s), []).append(each.passed)
        reached = [rate for (system, rate), runs in passed.items() if system == "B0" and all(runs)]
        missed = [rate for (system, rate), runs in passed.items() if system == "B0" and not any(runs)]
        relayed = [rate for (system, rate), runs in passed.items() if system == "R" and all(runs)]
        (line,) = (each for each in verdicts.rows if each[:2] == [f"{cell.history:,}", f"{cell.return_gap_s:g} s"])
        found = {float(head.removesuffix("/s")): told for head, told in zip(verdicts.header[2:], line[2:], strict=True)}
        assert all(told == "full" for rate, told in found.items() if rate <= max(reached, default=0.0))
        failing = {rate: told for rate, told in found.items() if rate >= min(missed)}
        assert "full" not in failing.values()
        assert {told for rate, told in failing.items() if rate <= max(relayed)} == {"relay"}
        # Measured at reuse 0: 1.04 to 1.15 times.
        (at_median,) = (each for each in costs.rows if each[0] == f"{cell.history:,}")
        assert 1.04 <= float(at_median[2].split()[0]) / float(at_median[1]) <= 1.15

    def test_the_report_says_from_which_times_it_is_calculated(self) -> None:
        plan = plan_of(QUICK, engine_times(QUICK))
        rows = outcome("R", {10.0: 0.0}, 1, cell="quick", to_worker_p99_ms=4.0, to_gateway_p99_ms=3.0)
        base = outcome("B0", {10.0: 0.0}, 1, cell="quick", worker_over_engine=1.24, history=QUICK.history)

        def told(rows: Sequence[RunRow]) -> str:
            return next(each.text for each in break_even(QUICK, plan, rows) if isinstance(each, Text))

        assert "1.10 times as long as the engine alone, the limit for B0's in the worker, which was not" in told(rows)
        assert "7 ms are for the hops" in told(rows)
        assert "1.24 times as long as the engine alone, as B0's in the worker" in told(rows + base)


class TestCells:
    def test_they_have_names_of_their_own_and_differ(self) -> None:
        named = (QUICK, LOOSE, *GRID, *PUBLISHED)
        assert len({cell.name for cell in named}) == len({replace(cell, name="") for cell in named}) == len(named)
        for cell in named:
            cell.model()
            assert BY_NAME[cell.name] == cell and cell.longest_history <= MAX_BEHAVIOURS

    def test_those_of_others_say_whose_they_are_and_what_differs(self) -> None:
        assert all(cell.origin for cell in PUBLISHED)
        assert not any(cell.origin for cell in GRID)

    def test_every_cell_is_there_at_each_share_of_returning_users_with_the_same_deadline(self) -> None:
        for cell in (QUICK, LOOSE, *GRID, *PUBLISHED):
            for reuse in REUSES:
                other = at_reuse(cell, reuse)
                assert (BY_NAME[other.name], other.reuse) == (other, reuse)
                assert at_reuse(other, cell.reuse).family == cell.family
                assert (other.family, other.plan_name) == (cell.family, cell.plan_name)

    def test_processes_serve_all_shares_of_returning_users_but_a_trigger_learns_from_one_cell(self) -> None:
        cells = (QUICK, at_reuse(QUICK, 0.0))
        served = {system: len({served_cell(cell, system) for cell in cells}) for system in QUICK_SYSTEMS}
        assert served == {System.B0: 1, System.C: 1, System.R: 2, System.O: 1}

    def test_cells_are_measured_with_b0_and_r_at_the_other_shares(self) -> None:
        asked = with_other_reuses((QUICK,), QUICK_SYSTEMS, FULL_MODE)
        assert [(cell.name, systems) for cell, systems in asked] == [
            ("quick", QUICK_SYSTEMS), ("quick-r0", (System.B0, System.R)), ("quick-r0.6", (System.B0, System.R))
        ]  # fmt: skip
        # The grid has most of them itself.
        names = [cell.name for cell, _ in with_other_reuses(GRID, QUICK_SYSTEMS, FULL_MODE)]
        assert "lead-1-r0" in names and names.count("n1024-d2.5-r0") == 1
        assert len({(BY_NAME[name].family, BY_NAME[name].reuse) for name in names}) == len(names)

    def test_the_quick_run_measures_b0_at_the_highest_share_alone(self) -> None:
        asked = with_other_reuses((QUICK,), QUICK_SYSTEMS, QUICK_MODE)
        assert [(cell.name, systems) for cell, systems in asked] == [
            ("quick", QUICK_SYSTEMS), ("quick-r0", (System.R,)), ("quick-r0.6", (System.R,))
        ]  # fmt: skip
        # With more returning users lengths would have to change, and users of a log have lengths of their own.
        alone = at_reuse(QUICK, 0.0)
        assert QUICK_MODE.lends_b0(alone) and not QUICK_MODE.lends_b0(QUICK)
        assert not QUICK_MODE.lends_b0(replace(BY_NAME["n2048-d4-r0.9"], planned_as="n2048-d4-r0.6"))
        assert not replace(QUICK_MODE, name=f"quick{OF_LOG}1").lends_b0(alone)

    def test_where_b0_is_not_measured_the_trace_has_the_same_times_and_lengths(self, tmp_path: Path) -> None:
        plan, traces = plan_of(QUICK, engine_times(QUICK)), {}
        with Bench(Console(quiet=True), tmp_path, NO_BROKER, QUICK_MODE, None) as bench:
            for cell in (QUICK, at_reuse(QUICK, 0.0), at_reuse(QUICK, 0.6)):
                traces[cell.reuse] = read_trace(bench._trace(cell, plan, Point("B", QUICK.history, 20.0, 1)))
        own = traces[QUICK.reuse]
        for reuse, other in traces.items():
            assert np.array_equal(other.ranking_us, own.ranking_us) and np.array_equal(other.part, own.part)
            assert np.array_equal(other.history_length, own.history_length)
            assert reuse_of(other) == pytest.approx(reuse, abs=0.12)
        assert set(own.user_id).isdisjoint(traces[0.0].user_id)


RELAYS = [system for system, flags in FLAGS.items() if flags.events]


class TestSystems:
    def test_they_differ_by_their_flags(self) -> None:
        assert set(FLAGS) == set(System)
        without = (System.B0, System.B0_LATE, System.B0_THREADS, System.B1, System.C, System.O)
        assert {system for system, flags in FLAGS.items() if not flags.events} == set(without)
        assert not FLAGS[System.B0].reuse and not FLAGS[System.R].settings
        assert len({repr(FLAGS[system]) for system in RELAYS}) == len(RELAYS)

    @pytest.mark.parametrize("variant", TUNED)
    def test_b1_has_the_settings_that_b0_was_tuned_to(self, variant: str) -> None:
        plan = plan_of(QUICK, engine_times(QUICK))
        tuned = settings_of(QUICK, plan, System.B0, variant)
        assert settings_of(QUICK, plan, System.B1, f"{variant}, at most 704 behaviours") == tuned
        assert all(tuned["worker"][name] == value for name, value in TUNED[variant].items())

    def test_a_worker_with_other_threads_than_the_engine_alone_had_calibrates_itself(self, tmp_path: Path) -> None:
        measured_in(tmp_path, QUICK)
        broker = LocalBroker(BrokerChoice.EXTERNAL, "localhost:9092", "a test", (), repr, repr, 100, 6_000)
        with Bench(Console(quiet=True), tmp_path, broker, QUICK_MODE, None) as bench:
            plan = bench.plan(QUICK)
            for system in (System.B0, System.B0_THREADS, System.R, System.R_THREADS):
                worker = bench._settings_of(QUICK, plan, system, UNCUT, tmp_path).worker
                assert (worker.calibration is None) == (worker.threads != 1)

    @pytest.mark.parametrize("system", [system for system in RELAYS if system is not System.R])
    def test_an_ablation_is_a_setting_of_the_product_that_is_not_its_default(self, system: System) -> None:
        assert FLAGS[system].settings
        for name, value in FLAGS[system].settings.items():
            section, _, key = name.partition(".")
            assert getattr(getattr(load_settings(None, environment={}), section), key) != value
            load_settings(None, environment={}, overrides=(f"{name}={str(value).lower()}",))


def test_the_quick_run_takes_ten_minutes_and_the_full_one_says_that_it_takes_days() -> None:
    assert 480 < estimated_s(with_other_reuses((QUICK,), QUICK_SYSTEMS, QUICK_MODE), QUICK_MODE) < 660
    assert estimated_s(with_other_reuses(GRID, tuple(System), FULL_MODE), FULL_MODE) > 86_400


def test_only_valid_runs_of_what_is_asked_count_as_there() -> None:
    mode, asked = FULL_MODE.with_seeds((1, 2)), [(CENTRE, (System.B0, System.R))]
    there = [row(), row(), row(seed=1_002), row(system="R", rate_per_s=9.0)]
    others = [row(cell="quick"), row(system="C"), row(mode="quick"), row(seed=3), row(seed=2, valid=False)]
    assert runs_there(there + others, asked, mode) == 3


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({}, "give one of --quick"),
        ({"quick": True, "full": True}, "give one of --quick"),
        ({"quick": True, "cells": "nowhere"}, "no cell has the name 'nowhere'"),
        ({"quick": True, "systems": "B0,Z"}, "no system has the name 'Z'"),
        ({"trace": Path("load.csv"), "systems": "B0,B1"}, "B1 takes its longest history from figure A"),
        ({"trace": Path("load.csv"), "systems": "B0,O"}, "O ranks synthetic users of its own"),
        ({"quick": True, "interactions": Path("log.csv"), "systems": "O"}, "O ranks synthetic users of its own"),
        ({"rates": "5,fast"}, "--rates takes requests a second, 0.1 to 10,000, by commas, such as 5,50: not '5,fast'"),
        ({"rates": "0"}, "--rates takes requests a second"),
        ({"trace": Path("load.csv"), "page": Path("benchmark.md")}, "no figures for --page"),
        ({"rates": "5", "page": Path("nowhere.md")}, "nowhere.md cannot be read"),
        ({"quick": True, "page": Path("README.md")}, "README.md has no lines `<!-- figures: begin -->`"),
        ({"rates": "5", "page": Path("README.md")}, "README.md has no lines `<!-- headline: begin -->`"),
        ({"rates": "5", "histories": "2k"}, "--histories takes whole numbers of behaviours"),
        ({"rates": "5", "histories": "64,8193"}, "cell quick takes histories of up to 8,192 behaviours, not 8,193"),
        ({"quick": True, "histories": "64"}, "--histories belongs to --rates"),
        ({"rates": "5", "histories": "64", "interactions": Path("log.csv")}, "leave out --histories"),
        ({"full": True, "systems": "B0,B1", "interactions": Path("log.csv")}, "--interactions does not measure"),
        ({"rates": "5", "systems": "B0,B1"}, "B1 takes its longest history from figure A"),
        ({"report": True, "out": Path("/nonexistent")}, "run with --quick"),
        ({"simulated": True, "systems": "B0,O"}, "B1 and O are not simulated"),
        ({"simulated": True, "systems": "B0,R-threads"}, "R-threads is not simulated: the engine is timed on one"),
        ({"simulated": True, "interactions": Path("log.csv")}, "--simulated does not take --interactions"),
        ({"simulated": True, "any_speed": True}, "--any-speed belongs to real runs"),
    ],
)
def test_wrong_options_are_refused_with_the_reason(options: dict[str, Any], why: str) -> None:
    call: Callable[..., None] = main
    with pytest.raises(RelayError, match=re.escape(why)):
        call(**options)


def test_empty_names_of_cells_and_systems_are_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[list[str], list[str]]] = []
    monkeypatch.setattr(
        command, "measure", lambda cells, systems, *_, **__: asked.append(([each.name for each in cells], [*systems]))
    )
    call: Callable[..., None] = main
    call(quick=True, cells="quick-r0, lead-0,", systems=",R,b0")
    call(quick=True, cells=",", systems=",")
    assert asked == [(["quick-r0", "lead-0"], ["B0", "R"]), (["quick"], [*QUICK_SYSTEMS])]


COEFFICIENTS = LatencyCoefficients(
    a0=1_500.0, a1=8.0, a2=0.0, b0=1_000.0, b1=7.0, b2=0.0, c0=500.0, c1=1.0, c2=0.0, d0=10.0, d1=1e-4
)
"""A prefix of 2,048 tokens takes 15.3 ms, a ranking on it 0.6 ms."""


def engine_times(cell: Cell) -> EngineTimes:
    return EngineTimes(
        shape=cell.shape, machine=machine(), made_at="now", engine="cpu", pre_ms=16.0, hit_ms=4.0, short_full_ms=5.0,
        prefix_bytes=1 << 20, longest_bytes=1 << 23, coefficients=COEFFICIENTS,
    )  # fmt: skip


def measured_in(folder: Path, cell: Cell) -> None:
    """Writes what is measured of a cell's engine."""
    path = folder / "engines" / f"{cell.shape}.json"
    save_engine_times(engine_times(cell), path)
    described = MachineDescription(
        "m", "cpu", "a test", "here", 1, "2", KvDtype.FLOAT32, 64, ComputeDtype.FLOAT32, "none"
    )
    calibration = Calibration(described, "2026-01-01T00:00:00Z", COEFFICIENTS, (), (), (), ())
    for each in (path.with_suffix(".calibration.json"), alone_path(path.with_suffix(".calibration.json"))):
        save_calibration(calibration, each)


class TestCellSearch:
    PLAN = plan_of(QUICK, engine_times(QUICK))

    def asked(self, mode: Mode, system: System, limit: float) -> list[Point]:
        """The points that a search asks for, if a run passes while length times rate is at most `limit`."""
        points: list[Point] = []

        def ask(system: System, variant: str, point: Point) -> RunRow:
            points.append(point)
            late = 0.0 if point.history * point.rate_per_s <= limit else 0.5
            return row(system=system.value, rate_per_s=point.rate_per_s, history=point.history, late_share=late)

        CellSearch(QUICK, self.PLAN, mode, ask).figures(system, "uncut", 200.0)
        return points

    def test_every_system_is_first_asked_at_half_load(self) -> None:
        for system in (System.B0, System.R, System.O):
            assert self.asked(QUICK_MODE, system, 1e5)[0] == Point("B", 2_048, self.PLAN.half_rate_per_s, 1)

    def test_a_system_that_is_compared_with_none_is_asked_where_its_answer_is_expected(self) -> None:
        points: list[Point] = []

        def ask(system: System, variant: str, point: Point) -> RunRow:
            points.append(point)
            return row(late_share=0.0 if point.rate_per_s < 1e3 else 0.5)

        CellSearch(QUICK, self.PLAN, QUICK_MODE, ask, compares=False).figures(System.R, "uncut", 200.0)
        assert points[0].rate_per_s > self.PLAN.half_rate_per_s

    def test_many_returning_users_have_more_time_to_get_warm(self) -> None:
        def warm_up_s(rate: float, cell: Cell = QUICK, mode: Mode = QUICK_MODE) -> float:
            return workload_of(cell, self.PLAN, Point("B", 2_048, rate, 1), mode).warm_up_s

        assert warm_up_s(5.0) == warm_up_s(200.0, at_reuse(QUICK, 0.0)) == QUICK_MODE.warm_up_s
        pre_s = self.PLAN.latency.pre_us(2_048) / 1e6
        rate = 4.0 / (QUICK.reuse * QUICK.return_gap_s * pre_s)
        assert warm_up_s(rate) == pytest.approx(3 * QUICK.return_gap_s + 2 * 4.0)
        assert warm_up_s(1e4) == 2 * QUICK_MODE.warm_up_s
        assert warm_up_s(rate, mode=RATES_MODE) == RATES_MODE.warm_up_s

    def test_a_quick_search_takes_few_runs_and_compares_lengths_of_b0_and_r_only(self) -> None:
        limits = {System.B0: 4e4, System.C: 2e5, System.R: 2.5e5, System.O: 8e5}
        points = {system: self.asked(QUICK_MODE, system, limit) for system, limit in limits.items()}
        assert {system for system, asked in points.items() if any(each.figure == "A" for each in asked)} == {"B0", "R"}
        for asked in points.values():
            for figure in {each.figure for each in asked}:
                assert len({each for each in asked if each.figure == figure}) <= 5

    def searched(
        self, cells: Sequence[Cell], systems: Sequence[System], use: float
    ) -> list[tuple[Cell, System, Point]]:
        """The points of searches that share what they found, if a run passes while it uses at most this part of the
        device.
        """
        points: list[tuple[Cell, System, Point]] = []

        def search_of(cell: Cell) -> CellSearch:
            def ask(system: System, variant: str, point: Point) -> RunRow:
                points.append((cell, system, point))
                computed = 1.0 if system is System.B0 else 1.0 - cell.reuse
                latency, scored = self.PLAN.latency, cell.suffix + cell.candidates
                needed_us = latency.hit_us(point.history, scored) + computed * latency.pre_us(point.history)
                late = 0.0 if point.rate_per_s * needed_us <= use * 1e6 else 0.5
                return row(rate_per_s=point.rate_per_s, history=point.history, late_share=late)

            return CellSearch(cell, self.PLAN, QUICK_MODE, ask, uses)

        uses = FoundUses()
        searches = [search_of(cell) for cell in cells]
        for system in systems:
            for search in searches:
                search.figures(system, "uncut", 200.0)
        return points

    def test_searches_of_other_cells_start_at_the_answer_of_the_most_alike(self) -> None:
        cells = [QUICK, at_reuse(QUICK, 0.0), at_reuse(QUICK, 0.6)]
        for use in (0.25, 0.8):
            points = self.searched(cells, (System.B0, System.R), use)
            later = {
                (cell.name, system): [each for at, by, each in points if (at, by) == (cell, system)]
                for cell in cells[1:]
                for system in (System.B0, System.R)
            }
            for figure in ("A", "B"):
                counts = {key: len({each for each in asked if each.figure == figure}) for key, asked in later.items()}
                # Figure B has a run at half load, too.
                assert counts["quick-r0", System.B0] <= 3 and counts["quick-r0.6", System.B0] <= 3
                assert counts["quick-r0", System.R] <= 3
                assert counts["quick-r0.6", System.R] <= 5

    def test_the_search_of_each_further_seed_starts_where_the_one_before_ended(self) -> None:
        points = self.asked(replace(FULL_MODE, a_loads=()), System.R, 2.5e5)
        by_seed = {seed: [each for each in points if (each.figure, each.seed) == ("B", seed)] for seed in range(1, 8)}
        assert all(len(asked) == 2 for seed, asked in by_seed.items() if seed > 1) and len(by_seed[1]) > 2

    def test_a_cache_that_reached_less_than_expected_is_asked_for_shorter_histories_first(self) -> None:
        def first(system: System, limit: float) -> int:
            return next(each.history for each in self.asked(QUICK_MODE, system, limit) if each.figure == "A")

        assert first(System.R, 1e5) < first(System.R, 6e5)
        assert first(System.B0, 2e4) == first(System.B0, 6e5)

    @pytest.mark.parametrize("figure", ["B", "A"])
    def test_a_run_without_a_valid_attempt_ends_its_search_and_no_other(self, figure: str) -> None:
        points: list[Point] = []

        def ask(system: System, variant: str, point: Point) -> RunRow:
            points.append(point)
            rows = [each for each in points if each.figure == figure]
            return row(history=point.history, rate_per_s=point.rate_per_s, late_share=0.5, valid=len(rows) < 2)

        CellSearch(QUICK, self.PLAN, QUICK_MODE, ask).figures(System.B0, "uncut", 200.0)
        assert len([each for each in points if each.figure == figure]) == 2
        assert {each.figure for each in points} == {"A", "B"}

    def test_b0_is_tuned_by_valid_runs(self) -> None:
        def ask(system: System, variant: str, point: Point) -> RunRow:
            return row(variant=variant, late_share=0.0 if variant == "uncut" else 0.5, valid=variant == "one at a time")

        assert CellSearch(QUICK, self.PLAN, FULL_MODE, ask).tuned() == "one at a time"

    def test_a_search_starts_below_half_load_if_half_load_failed(self) -> None:
        half = self.PLAN.half_rate_per_s
        points = self.asked(QUICK_MODE, System.R, 0.99 * half * QUICK.history)
        assert max(each.rate_per_s for each in points if each.figure == "B") == half

    def test_a_value_that_fresh_seeds_do_not_confirm_is_followed_by_the_one_below(self) -> None:
        points: list[Point] = []

        def ask(system: System, variant: str, point: Point) -> RunRow:
            points.append(point)
            limit = 2e5 if point.seed > FRESH_SEEDS else 2.5e5
            late = 0.0 if point.history * point.rate_per_s <= limit else 0.5
            return row(rate_per_s=point.rate_per_s, history=point.history, late_share=late)

        CellSearch(QUICK, self.PLAN, replace(FULL_MODE, a_loads=()), ask).figures(System.R, "uncut", 200.0)
        confirmed = [each for each in points if each.figure == CONFIRMED["B"]]
        rates = list(dict.fromkeys(each.rate_per_s for each in confirmed))
        assert rates == sorted(rates, reverse=True) and len(rates) > 2
        assert rates[-1] * QUICK.history <= 2e5 < rates[-2] * QUICK.history
        assert len({each.seed for each in confirmed}) == len(confirmed)

    def test_what_was_found_is_confirmed_with_fresh_seeds(self) -> None:
        points = self.asked(replace(FULL_MODE, a_loads=()), System.R, 2.5e5)
        confirmed = [each for each in points if each.figure == CONFIRMED["B"]]
        assert [each.seed for each in confirmed] == list(range(1_001, 1_008))
        best = max(each.rate_per_s for each in points if each.figure == "B" and each.rate_per_s * 2_048 <= 2.5e5)
        assert {each.rate_per_s for each in confirmed} == {best}

    @pytest.mark.parametrize("mode", [QUICK_MODE, FULL_MODE])
    def test_the_highest_rate_of_a_search_is_known_before(self, mode: Mode) -> None:
        tokens, latency = QUICK.history, self.PLAN.latency
        for system, computed in ((System.B0, 1.0), (System.C, 0.1), (System.R, 0.1)):
            filled = 1e6 / (latency.hit_us(tokens, QUICK.suffix + QUICK.candidates) + computed * latency.pre_us(tokens))
            asked = self.asked(replace(mode, a_loads=()), system, filled * tokens)
            highest = CellSearch(QUICK, self.PLAN, mode, lambda *_: row()).highest_rate_per_s(system)
            assert max(each.rate_per_s for each in asked) <= highest <= 2 * filled


NO_BROKER: Any = None
"""For runs that never start."""


class TestQuietMachine:
    @pytest.fixture
    def slowdowns(self, monkeypatch: pytest.MonkeyPatch) -> list[float]:
        """Those that the next windows find, the last one again and again."""
        found = [1.5, 1.4, 1.1]
        monkeypatch.setattr("relaygr.bench.speed._quiet_us_in", lambda *_: 1.0)
        monkeypatch.setattr(MachineSpeed, "slowdown", lambda *_: found.pop(0) if len(found) > 1 else found[0])
        return found

    def test_a_run_that_decides_waits_for_it(self, slowdowns: list[float], tmp_path: Path) -> None:
        with Bench(Console(quiet=True), tmp_path, NO_BROKER, RATES_MODE, None) as bench:
            bench._quiet_speed()
        assert slowdowns == [1.1]

    @pytest.mark.parametrize("mode", [QUICK_MODE, replace(RATES_MODE, wait_s=0.05)])
    def test_it_does_not_wait_for_ever(self, mode: Mode, slowdowns: list[float], tmp_path: Path) -> None:
        slowdowns[:] = [1.5]
        with Bench(Console(quiet=True), tmp_path, NO_BROKER, mode, None) as bench:
            assert bench._quiet_speed().slowdown(0.0) == 1.5

    def test_only_searches_that_decide_are_invalid_on_a_slow_one(self) -> None:
        assert RATES_MODE.slow_limit == FULL_MODE.slow_limit == SLOW_LIMIT < QUICK_MODE.slow_limit
        five = QUICK_MODE.with_seeds((1, 2, 3, 4, 5))
        assert (five.slow_limit, five.wait_s) == (SLOW_LIMIT, RATES_MODE.wait_s)
        assert QUICK_MODE.with_seeds((3,)) == replace(QUICK_MODE, seeds=(3,))

    def test_where_it_is_never_quiet_slow_runs_count_if_asked_and_are_not_mixed_with_others(self) -> None:
        five = QUICK_MODE.with_seeds((1, 2, 3, 4, 5)).at_any_speed()
        assert (five.slow_limit, five.wait_s, five.name) == (math.inf, 0.0, "quick-any-speed")
        assert five.decides

    def test_runs_that_it_made_invalid_are_tried_again_by_the_next_call(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        measured_in(tmp_path, QUICK)
        point = Point("rate 8", QUICK.history, 8.0, 1)
        attempts: list[int] = []

        def run(
            bench: Bench, cell: Cell, _: CellPlan, system: System, variant: str, point: Point, attempt: int, __: None
        ) -> RunRow:
            attempts.append(attempt)
            made = row(
                mode="rates", cell=cell.name, figure=point.figure, system=system.value, variant=variant,
                history=point.history, rate_per_s=point.rate_per_s, valid=False, **changes,
            )  # fmt: skip
            bench.file.add(made, [SAMPLE])
            return made

        monkeypatch.setattr(Bench, "_run", run)
        calls: list[tuple[dict[str, float], int]] = [
            ({"slowdown": 1.5}, 3), ({"slowdown": 1.5}, 6), ({"lag_p999_ms": 50.0}, 9), ({}, 9),
        ]  # fmt: skip
        for changes, in_all in calls:  # noqa: B007 - `run` uses them
            with Bench(Console(quiet=True), tmp_path, NO_BROKER, RATES_MODE, None) as bench:
                bench._row(QUICK, bench.plan(QUICK), System.C, "", point)
            assert attempts == list(range(1, in_all + 1))


class TestUsersOfALog:
    def log(self, folder: Path, users: int, length: int) -> Path:
        lines = [f"u{user}\t{item}\t{item}" for user in range(users) for item in range(length)]
        text = "user_id:token\titem_id:token\ttimestamp:float\n" + "\n".join(lines) + "\n"
        (folder / "log.inter").write_text(text, encoding="utf-8")
        return folder / "log.inter"

    @pytest.mark.parametrize("option", ["quick", "full"])
    def test_a_search_leaves_figure_a_out(self, option: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        asked: list[tuple[tuple[System, ...], Mode]] = []
        monkeypatch.setattr(command, "measure", lambda _, systems, mode, *__, **___: asked.append((systems, mode)))
        call: Callable[..., None] = main
        call(**{option: True}, interactions=self.log(tmp_path, 1, 2))
        ((systems, mode),) = asked
        assert System.B1 not in systems and System.R in systems and OF_LOG in mode.name
        search = TestCellSearch()
        assert {each.figure for each in search.asked(mode, System.B0, 4e4)} <= {"B", CONFIRMED["B"]}
        assert CellSearch(QUICK, search.PLAN, mode, lambda *_: row(figure="short")).short_capacity("uncut") == 200.0

    def test_a_log_with_too_few_users_for_a_search_is_refused_before_the_first_run(self, tmp_path: Path) -> None:
        measured_in(tmp_path, QUICK)
        log = self.log(tmp_path, 20, 30)
        with (
            Bench(Console(quiet=True), tmp_path, NO_BROKER, QUICK_MODE, log) as bench,
            pytest.raises(RelayError, match=r"quick: its search may go up to .*20 users are too few .* --rates"),
        ):
            bench.run_cells([(QUICK, (System.B0, System.R))])

    def test_rates_have_all_their_traces_before_the_first_run_with_histories_up_to_each_cells_longest(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        cells = [replace(CENTRE, name=f"n{n}", history=n, return_gap_s=0.5) for n in (16, 128)]
        for cell in cells:
            measured_in(tmp_path, cell)
        there: list[list[Path]] = []
        monkeypatch.setattr(Bench, "_row", lambda *_: there.append(sorted((tmp_path / "traces").iterdir())))
        mode, log = replace(RATES_MODE, seconds=1.0, least_requests=0, warm_up_s=0.5), self.log(tmp_path, 40, 400)
        with Bench(Console(quiet=True), tmp_path, NO_BROKER, mode, log) as bench:
            bench.run_rates(cells, [System.B0], [8.0])
        assert len(there) == 2 and there[0] == there[1]
        assert [read_trace(path).history_length.max() for path in reversed(there[0])] == [32, 256]


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_run_that_is_stopped_leaves_no_folder(number: signal.Signals, tmp_path: Path) -> None:
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    run = subprocess.Popen(
        [sys.executable, "-m", "relaygr.bench.headline", "--quick", "--broker", "embedded", "--out", str(tmp_path)],
        env={**os.environ, "TMPDIR": str(temporary)}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    try:
        ends = time.monotonic() + 60
        while not any(temporary.glob("relaygr-headline-*")):
            assert time.monotonic() < ends and run.poll() is None, "the run has not begun"
            time.sleep(0.1)
        run.send_signal(number)
        said, _ = run.communicate(timeout=60)
    finally:
        run.kill()
    assert run.returncode not in (0, -number) and "Traceback" not in said, said
    assert not list(temporary.glob("relaygr-*"))


class TestTraceOfOthers:
    TRACE = make_trace(
        Workload(
            seed=1, rate_per_s=8, seconds=2, warm_up_s=0, reuse=0, return_gap_s=1, history_median=200, history_max=256,
            lead_median_ms=100,
        )
    )  # fmt: skip

    @pytest.mark.parametrize(("column", "value"), [("history_length", 16_385), ("suffix", 81), ("candidates", 129)])
    def test_what_is_more_than_the_cell_takes_is_refused_with_the_option_for_another_cell(
        self, column: str, value: int, tmp_path: Path
    ) -> None:
        columns: dict[str, Any] = {column: np.full(len(self.TRACE), value, np.int32)}
        write_trace(replace(self.TRACE, **columns), tmp_path / "large.csv")
        with pytest.raises(RelayError, match=rf"large\.csv: {column} is up to {value:,}, .* --cells"):
            read_others(tmp_path / "large.csv", QUICK)

    @pytest.mark.parametrize(("part", "why"), [(WARM_UP, "every row is warm-up"), (-1, "part is below 0")])
    def test_one_that_cannot_be_played_is_refused_before_the_broker_starts(
        self, part: int, why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        rows = f"0,100,a,64,{part}\n"
        (tmp_path / "load.csv").write_text(f"retrieval_us,ranking_us,user_id,history_length,part\n{rows}")
        monkeypatch.setattr(command, "local_broker", lambda *_: pytest.fail("the broker was started"))
        call: Callable[..., None] = main
        with pytest.raises(RelayError, match=why):
            call(trace=tmp_path / "load.csv", out=tmp_path)

    def test_it_is_played_from_its_first_event_on(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        measured_in(tmp_path, QUICK)
        hour_us = 3_600_000_000
        later = replace(
            self.TRACE, retrieval_us=self.TRACE.retrieval_us + hour_us, ranking_us=self.TRACE.ranking_us + hour_us
        )
        write_trace(later, tmp_path / "later.csv")
        played: list[Trace] = []
        monkeypatch.setattr(Bench, "_row", lambda *asked: played.append(read_trace(asked[-1])))
        with Bench(Console(quiet=True), tmp_path, NO_BROKER, QUICK_MODE, None) as bench:
            bench.run_trace(QUICK, [System.B0, System.R], read_others(tmp_path / "later.csv", QUICK))
        assert len(played) == 2 + 2 * len(REUSES)
        for each in played:
            assert each.retrieval_us[0] == 0 and np.array_equal(np.diff(each.ranking_us), np.diff(later.ranking_us))
            assert np.array_equal(each.ranking_us - each.retrieval_us, later.ranking_us - later.retrieval_us)

    def test_its_first_seconds_are_a_question_of_their_own(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        measured_in(tmp_path, QUICK)
        write_trace(self.TRACE, tmp_path / "load.csv")
        played: list[tuple[str, Trace]] = []
        monkeypatch.setattr(Bench, "_row", lambda *asked: played.append((asked[-2].figure, read_trace(asked[-1]))))
        for seconds in (None, 1.0):
            with Bench(Console(quiet=True), tmp_path, NO_BROKER, QUICK_MODE, None) as bench:
                bench.run_trace(QUICK, [System.B0], read_others(tmp_path / "load.csv", QUICK, seconds))
        (whole, every), (part, first) = played[0], played[1 + len(REUSES)]
        assert part == f"{whole} first 1 s" and len(every) == len(self.TRACE)
        from_start_us = self.TRACE.retrieval_us - self.TRACE.retrieval_us[0]
        assert np.array_equal(first.retrieval_us, from_start_us[from_start_us < 1_000_000])


def simulated_mode(**changes: Any) -> Mode:
    return replace(SIMULATED_MODE, seconds=10.0, least_requests=0, warm_up_s=5.0, resolution=64.0, **changes)


class TestSimulated:
    CELL = replace(CENTRE, return_gap_s=2.0)

    def simulated(self, folder: Path, system: System, rate_per_s: float) -> tuple[RunRow, list[Sample]]:
        measured_in(folder, self.CELL)
        plan, path = plan_in(folder, self.CELL)
        calibration = load_calibration(path)
        point = Point("B", self.CELL.history, rate_per_s, 1)
        return simulate(
            SimulatedRun(self.CELL, plan, simulated_mode(), system, "uncut", point, calibration, calibration, NO_TIMES)
        )

    def test_full_inference_ranks_every_request_in_the_time_of_the_engine(self, tmp_path: Path) -> None:
        row, samples = self.simulated(tmp_path, System.B0, 5.0)
        assert (row.full_share, row.late, row.preinfer_jobs, row.reuse > 0.4) == (1.0, 0, 0, True)
        assert row.is_simulated and row.valid and row.passed
        assert row.device_s_per_1000 == pytest.approx(16, rel=0.1)
        alone = [each for each in samples if each.queue_us == 0 and each.tokens_cached == 0]
        whole_us = {each.in_worker_us - round(7 * each.history_length + 1_000 + 644) for each in alone}
        assert alone and max(map(abs, whole_us)) <= 2

    def test_the_systems_differ_on_the_same_trace_as_on_a_broker(self, tmp_path: Path) -> None:
        rows, samples = zip(
            *(self.simulated(tmp_path, system, 25.0) for system in (System.B0, System.C, System.R)), strict=True
        )
        assert len({tuple((each.row, each.user_id, each.ranking_us) for each in own) for own in samples}) == 1
        base, cache, relay = rows
        assert (base.hit_share, cache.preinfer_jobs) == (0.0, 0) and cache.hit_share > 0.3
        assert relay.preinfer_computed > 0 and relay.hit_share > cache.hit_share
        assert relay.late_share <= cache.late_share <= base.late_share

    def test_a_prefix_that_ranking_computed_is_none_that_pre_infer_computed(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """With a short lead time, requests overtake their jobs, and take the computation over."""
        monkeypatch.setattr(TestSimulated, "CELL", replace(self.CELL, reuse=0.0, lead_factor=0.1))
        row, samples = self.simulated(tmp_path, System.R_ALWAYS, 45.0)
        by_ranking = sum(each.path == "full" for each in samples)
        assert row.preinfer_computed > 0 and by_ranking > 0
        assert row.preinfer_computed + by_ranking <= len(samples)

    def test_a_trace_is_played_row_by_row(self) -> None:
        trace = make_trace(
            Workload(
                seed=1, rate_per_s=20, seconds=5, warm_up_s=1, reuse=0.5, return_gap_s=1, history_median=200,
                history_max=400, lead_median_ms=100,
            )
        )  # fmt: skip
        part = TraceLoad(trace, TrafficSettings(), 1).part(frozenset(range(PARTITIONS)))
        played = list(part.impressions)
        assert [each.number for each in played] == list(range(len(trace)))
        assert [part.user_id(each.user) for each in played] == trace.user_id
        assert part.share == 1.0 and set(part.partition_of.values()) <= set(range(PARTITIONS))
        assert {each.status for each in samples_of(trace, [])} == {LOST}

    def test_only_what_reuses_no_prefixes_has_the_times_of_b0(self) -> None:
        learnt = {system: NO_TIMES.model_copy(update={"origin": system.value}) for system in (System.B0, System.R)}
        asked = (System.B0, System.C, System.R, System.R_HBM)
        assert [times_of(learnt, system).origin for system in asked] == ["B0", "R", "R", "R"]

    def test_a_run_at_a_low_rate_lasts_until_it_has_enough_requests(self) -> None:
        assert SIMULATED_MODE.seconds_at(0.5) == 2_000 and SIMULATED_MODE.seconds_at(500) == SIMULATED_MODE.seconds
        assert QUICK_MODE.seconds_at(0.5) == 5 * QUICK_MODE.seconds

    @pytest.mark.slow
    def test_cells_are_simulated_side_by_side_and_found_in_the_file_again(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("relaygr.bench.headline.points.RATE_FACTOR", 1)
        cells = [replace(CENTRE, name=name, reuse=reuse) for name, reuse in (("new", 0.0), ("again", 0.9))]
        measured_in(tmp_path, CENTRE)
        learnt = {System.B0: NO_TIMES, System.R: NO_TIMES}
        asked = [(cell, (System.B0, System.R)) for cell in cells]
        texts = []
        for _ in range(2):
            SimulatedBench(Console(quiet=True), tmp_path, simulated_mode(a_loads=(0.3,)), learnt, 2).run_cells(asked)
            texts.append((tmp_path / "runs.csv").read_text(encoding="utf-8"))
        assert texts[0] == texts[1]
        rows = read_rows(tmp_path / "runs.csv")
        assert {(each.cell, each.system) for each in rows} == {
            (cell.name, system.value) for cell, systems in asked for system in systems
        }
        assert len({each.key for each in rows}) == len(rows)


@pytest.mark.slow
class TestLiveRunsInVirtualTime:
    """The runs are simulated ones that are called live, so they agree unless a test changes them."""

    MODE = simulated_mode(name="rates")

    def played(self, folder: Path, system: System, rate_per_s: float, seed: int = 1, slower: int = 1) -> None:
        """Adds a run. `slower`: its answers came so many times as late."""
        measured_in(folder, QUICK)
        plan, path = plan_in(folder, QUICK)
        calibration = load_calibration(path)
        point = Point(f"{AT_RATE}{rate_per_s:g}", QUICK.history, rate_per_s, seed)
        run = SimulatedRun(QUICK, plan, self.MODE, system, "", point, calibration, calibration, NO_TIMES)
        row, samples = simulate(run)
        samples = [
            each if each.latency_us is None else replace(each, latency_us=slower * each.latency_us) for each in samples
        ]
        trace = make_trace(workload_of(QUICK, plan, point, self.MODE), f"{trace_name(QUICK, point, self.MODE.name)}-")
        write_trace(trace, trace_path(folder, QUICK, self.MODE.name, point))
        kept = samples_path(folder, QUICK, self.MODE.name, system, "", point, 1)
        kept.parent.mkdir(exist_ok=True)
        write_samples(samples, kept)
        RunFile(folder).add(replace(row, broker="Kafka"), samples)

    def test_they_agree_where_the_times_at_other_rates_tell_theirs(self, tmp_path: Path) -> None:
        for seed, rate in itertools.product((1, 2, 3), (8.0, 12.0)):
            self.played(tmp_path, System.B0, rate, seed)
        compare_in_virtual_time(tmp_path, 1)
        checked = read_dicts(tmp_path / CHECKED)
        assert [(each["system"], each["rate_per_s"], each["repeats"], each["verdict"]) for each in checked] == [
            ("B0", rate, "3", "agrees") for rate in ("8.0", "12.0")
        ]
        write_report(tmp_path)
        assert "| quick | 2,048 | B0 | 12 | 3 |" in (tmp_path / "report.md").read_text(encoding="utf-8")

    def test_runs_that_are_slower_than_the_others_tell_differ(self, tmp_path: Path) -> None:
        self.played(tmp_path, System.B0, 8.0)
        self.played(tmp_path, System.B0, 12.0, slower=2)
        compare_in_virtual_time(tmp_path, 1)
        verdicts = {each["rate_per_s"]: each["verdict"] for each in read_dicts(tmp_path / CHECKED)}
        assert verdicts["12.0"].startswith("differs: P50 -")

    def test_times_are_learnt_from_the_same_kind_of_system_at_another_and_low_load(self, tmp_path: Path) -> None:
        for system, rate in ((System.B0, 8.0), (System.C, 8.0), (System.R, 8.0), (System.R, 9.0), (System.B0, 100.0)):
            self.played(tmp_path, system, rate)
        full, cache, relay, other, busy = live_runs(tmp_path)
        assert busy.device_use > LEARNT_UP_TO > other.device_use
        assert {each.name for each in (full, cache, relay, other, busy) if each.teach(relay)} == {other.name}
        assert {each.name for each in (full, cache, relay, other, busy) if each.teach(full)} == set()

    def test_runs_with_none_to_learn_from_are_refused(self, tmp_path: Path) -> None:
        for system in (System.C, System.R):
            self.played(tmp_path, system, 8.0)
        with pytest.raises(RelayError, match="at two rates or histories"):
            compare_in_virtual_time(tmp_path, 1)

    def test_only_runs_at_given_rates_that_can_be_simulated_are_compared(self, tmp_path: Path) -> None:
        self.played(tmp_path, System.B0, 8.0)
        file = RunFile(tmp_path)
        for changes in ({"figure": "B"}, {"system": "O"}, {"system": "R-threads"}, {"valid": False}):
            file.add(replace(file.rows[0], **changes), [])
        assert [runs.name for runs in live_runs(tmp_path)] == ["quick B0 at 8/s, 2,048 behaviours"]

    def test_a_folder_without_its_samples_is_refused(self, tmp_path: Path) -> None:
        self.played(tmp_path, System.B0, 8.0)
        shutil.rmtree(tmp_path / "samples")
        with pytest.raises(RelayError, match="is gone, so its run cannot be compared"):
            compare_in_virtual_time(tmp_path, 1)


def miniature() -> Cell:
    """Its deadline is so long that runs pass on a busy machine, too."""
    cell = replace(CENTRE, name="mini", history=256, heads=1, head_width=16, layers=1, candidates=16, growth=2)
    return replace(cell, least_deadline_ms=8_000, return_gap_s=0.5)


@pytest.mark.slow
def test_users_who_were_there_in_the_run_before_are_new_in_the_next_one(
    embedded_broker: LocalBroker, tmp_path: Path
) -> None:
    cell, trace = miniature(), tmp_path / "once.parquet"
    load = Workload(
        seed=1, rate_per_s=8, seconds=1, warm_up_s=0, reuse=0, return_gap_s=1, history_median=200, history_max=256,
        lead_median_ms=100, candidates=16,
    )  # fmt: skip
    write_trace(make_trace(load), trace)
    with Bench(Console(quiet=True), tmp_path, embedded_broker, QUICK_MODE, None) as bench:
        for name in ("first", "second"):
            again = Path(shutil.copy(trace, tmp_path / f"{name}.parquet"))
            bench.run_trace(cell, [System.C], read_others(again, cell))
    rows = read_rows(tmp_path / "runs.csv")
    assert {each.figure.split()[1] for each in rows} == {"first.parquet", "second.parquet"}
    assert [each.full_share for each in rows] == [1.0] * len(rows)


def test_cells_of_one_shape_have_plans_of_the_same_times() -> None:
    longer = replace(CENTRE, name="longer", deadline_factor=10.0, lead_factor=1.0, reuse=0.0)
    times = engine_times(CENTRE)
    plans = [plan_of(cell, times) for cell in (CENTRE, longer)]
    assert longer.shape == CENTRE.shape != replace(CENTRE, candidates=32).shape
    assert [plan.deadline_ms for plan in plans] == [50, 200]
    assert [plan.lead_ms for plan in plans] == [48.0, 16.0]
    assert plans[0] == replace(plans[1], cell="centre", asked=CENTRE.digest, deadline_ms=50, lead_ms=48.0)


@pytest.mark.slow
def test_rates_are_played_on_each_system_without_a_search(embedded_broker: LocalBroker, tmp_path: Path) -> None:
    mode = replace(RATES_MODE, seconds=1.0, least_requests=0, warm_up_s=0.5, wait_s=0.0, slow_limit=math.inf)
    with Bench(Console(quiet=True), tmp_path, embedded_broker, mode, None) as bench:
        bench.run_rates([miniature()], [System.B0, System.R], [8.0, 12.34])
        bench.run_rates([miniature()], [System.R], [8.0], [192])
    rows = read_rows(tmp_path / "runs.csv")
    assert [(each.system, each.figure, each.rate_per_s) for each in rows if each.valid] == [
        (system, f"rate {rate:g}", rate) for system in (System.B0, System.R) for rate in (8.0, snapped(12.34))
    ] + [(System.R, "rate 8", 8.0)]
    assert [each.history for each in rows if each.valid] == [256] * 4 + [192]
    assert figures_of(rows, "rates") == []
    write_report(tmp_path)
    report = (tmp_path / "report.md").read_text()
    for history in (256, 192):
        assert re.search(rf"\| mini \| \d+ ms \| {history} \| R \| 8 \| \d+% \| 1 of 1 \| 0 \|", report)
    assert "no fresh seed" in report
    assert "mini: rate 8" in report and f"mini: rate {snapped(12.34):g}" in report


class TestRatesWithoutASearch:
    def test_the_highest_rates_are_compared_seed_by_seed(self) -> None:
        rows = [
            each
            for system, limits in {"B0": (5, 5, 6), "C": (30, 40, 40), "R": (50, 60, 60)}.items()
            for seed, limit in enumerate(limits)
            for rate in (limit, limit + 10)
            for each in outcome(system, {rate: 0.0 if rate == limit else 0.02}, seed, figure=f"rate {rate}")
        ]
        lines = {line[2]: line[3:] for line in limits_by_seed(rows).rows}
        assert [lines[system][1] for system in ("B0", "C", "R")] == ["5", "40", "60"]
        assert lines["R"][2].startswith("10.63 (") and lines["R"][3].startswith("1.55 (")
        assert lines["B0"][2] == "" and lines["B0"][4] == "0: 5, not 15; 1: 5, not 15; 2: 6, not 16"

    def test_the_longest_histories_at_a_rate_are_compared_seed_by_seed(self) -> None:
        rows = [
            each
            for system, limit in {"B0": 1024, "R": 3072}.items()
            for seed in (1, 2)
            for history in (limit - 64, limit, limit + 64)
            for each in outcome(
                system, {20.0: 0.02 if history > limit else 0.0}, seed, figure="rate 20", history=history
            )
        ]
        (base, relay) = limits_by_seed(rows).rows
        each_seed = "1: 1,024, not 1,088; 2: 1,024, not 1,088"
        assert base == ["centre", "longest history at 20/s", "B0", "2 of 2", "1,024", "", each_seed]
        assert relay[4:6] == ["3,072", "3.00 (3.00 to 3.00)"]

    def test_systems_are_compared_with_a_baseline_on_as_many_threads(self) -> None:
        limits = {"B0": 5.0, "R": 40.0, "B0-threads": 8.0, "R-threads": 40.0}
        rows = [
            each
            for system, limit in limits.items()
            for seed in (1, 2)
            for rate in (limit, 2 * limit)
            for each in outcome(system, {rate: 0.0 if rate == limit else 0.02}, seed, figure=f"rate {rate:g}")
        ]
        table = limits_by_seed(rows)
        assert table.header[5:7] == ("over B0, 95 %", "over B0-threads, 95 %")
        over = {line[2]: line[5:7] for line in table.rows}
        assert over["R"] == ["8.00 (8.00 to 8.00)", ""]
        assert over["R-threads"] == ["", "5.00 (5.00 to 5.00)"]

    def test_systems_without_a_common_seed_have_no_ratio(self) -> None:
        rows = [
            *outcome("B0", {5.0: 0.0, 6.0: 0.02}, 1, figure="rate 5"),
            *outcome("R", {50.0: 0.0, 60.0: 0.02}, 2, figure="rate 50"),
        ]
        assert [line[5] for line in limits_by_seed(rows).rows] == ["", "-"]

    def test_seeds_that_chose_a_rate_do_not_decide_about_it(self) -> None:
        rows = [each for seed in range(1, 7) for each in outcome("R", {50.0: 0.0}, seed, figure="rate 50")]
        rows += outcome("R", {60.0: 0.02}, 1, figure="rate 60")
        rows += outcome("R", {60.0: 0.0}, 7, figure="rate 60", valid=False)
        rows += outcome("R", {70.0: 0.0}, 8, figure="rate 70", valid=False)
        lines = {line[4]: line[6:] for line in at_rates(rows).rows}
        assert lines["50"] == [
            "6 of 6",
            "0",
            "0.00%",
            "5",
            "every seed passed; 95% sure that their mean is at most 0.00% late",
        ]
        assert lines["60"] == ["0 of 1", "1", "2.00%", "0", "no fresh seed"]
        assert lines["70"] == ["0 of 0", "1", "-", "0", "no fresh seed"]

    def test_a_seed_that_passed_or_failed_at_each_rate_has_no_highest(self) -> None:
        rows = [
            *outcome("B0", {5.0: 0.0, 6.0: 0.02}, 1, figure="rate 5"),
            *outcome("B0", {6.0: 0.0}, 2, figure="rate 6"),
            *outcome("B0", {6.0: 0.02}, 3, figure="rate 6"),
            *outcome("C", {9.0: 0.0, 10.0: 0.02}, 1, figure="rate 9"),
            *outcome("R", {50.0: 0.0}, 1, figure="rate 50"),
        ]
        table = limits_by_seed(rows)
        assert [(line[2], line[3], line[-1]) for line in table.rows] == [
            ("B0", "1 of 3", "1: 5, not 6"),
            ("C", "1 of 1", "1: 9, not 10"),
        ]

    def test_the_page_says_that_seeds_which_search_do_not_decide(self, tmp_path: Path) -> None:
        rows = [
            *outcome("B0", {5.0: 0.0, 6.0: 0.02}, 1, figure="rate 5"),
            *outcome("R", {50.0: 0.0, 60.0: 0.02}, 1, figure="rate 50"),
        ]
        out, page = tmp_path / "far", tmp_path / "page.md"
        page.write_text("{}\n{}\n".format(*marks_for("far")), encoding="utf-8")
        reported(out, rows)
        fill_page(out, None, page)
        text = page.read_text(encoding="utf-8")
        assert "These seeds search, so they do not decide." in text and "| 10.00 (one seed) | 1: 50, not 60 |" in text

    def test_a_system_without_another_one_is_not_shown(self) -> None:
        assert limits_by_seed(outcome("R", {50.0: 0.0, 60.0: 0.02}, 1, figure="rate 50")).rows == []

    @pytest.mark.parametrize(
        ("over", "slowdown", "verdict"),
        [
            (1.05, 1.2, "honest"),
            (1.15, 1.1, "not known: the machine was slower"),
            (1.25, 1.1, "too slow for an honest baseline"),
            (1.15, math.nan, "too slow for an honest baseline"),
        ],
    )
    def test_the_baseline_is_held_against_the_engine_alone_on_the_quiet_machine(
        self, over: float, slowdown: float, verdict: str
    ) -> None:
        plan = plan_of(QUICK, engine_times(QUICK))
        rows = outcome("B0", {plan.half_rate_per_s: 0.0}, 1, cell="quick", worker_over_engine=over, slowdown=slowdown)
        told = "-" if math.isnan(slowdown) else f"{slowdown:.2f}"
        assert [line[3:] for line in baseline(rows, {"quick": plan}).rows] == [[f"{over:.2f}", told, "1.1", verdict]]

    def test_a_baseline_is_not_known_if_the_engine_alone_was_measured_on_a_slow_machine(self) -> None:
        for slowdown, verdict in (
            (SLOW_LIMIT, "honest"),
            (1.3, "not known: the engine alone was measured on a slow machine"),
        ):
            plan = plan_of(QUICK, replace(engine_times(QUICK), slowdown=slowdown))
            rows = outcome("B0", {plan.half_rate_per_s: 0.0}, 1, cell="quick", worker_over_engine=0.9)
            assert [line[-1] for line in baseline(rows, {"quick": plan}).rows] == [verdict]

    def test_the_report_says_how_slow_the_machine_was_while_the_engine_was_measured(self, tmp_path: Path) -> None:
        save_plan(plan_of(QUICK, replace(engine_times(QUICK), slowdown=1.72)), tmp_path / "plans" / "quick.json")
        text = reported(tmp_path, outcome("B0", {10.0: 0.0}, 1, cell="quick"))
        assert "| slowdown while measured |" in text and "| 20.0 ms | 4.0 ms | 1.72 | 100 ms |" in text

    def test_times_of_an_engine_that_were_kept_without_the_slowdown_can_be_read(self, tmp_path: Path) -> None:
        files = {"engine": tmp_path / "engine.json", "plan": tmp_path / "plan.json"}
        times = replace(engine_times(QUICK), slowdown=1.25)
        save_engine_times(times, files["engine"])
        save_plan(plan_of(QUICK, times), files["plan"])
        loads: dict[str, Callable[[Path], EngineTimes | CellPlan]] = {"engine": load_engine_times, "plan": load_plan}
        assert [load(files[name]).slowdown for name, load in loads.items()] == [1.25, 1.25]
        for path in files.values():
            kept = json.loads(path.read_text(encoding="utf-8"))
            del kept["slowdown"]
            path.write_text(json.dumps(kept), encoding="utf-8")
        assert all(math.isnan(load(files[name]).slowdown) for name, load in loads.items())

    def test_a_run_at_half_load_shows_whether_the_baseline_is_honest(self) -> None:
        plan = plan_of(QUICK, engine_times(QUICK))
        half = plan.half_rate_per_s
        for history, lines in ((QUICK.history, 1), (QUICK.history // 2, 0)):
            rows = outcome("B0", {half: 0.0}, 1, cell="quick", figure=f"rate {half:g}", history=history)
            assert len(baseline(rows, {"quick": plan}).rows) == lines
            noisy = baseline([replace(each, slowdown=1.3) for each in rows], {"quick": plan}).rows
            assert [line[2:] for line in noisy] == [["0", "-", "-", "1.1", "not known: the machine was slow"]] * lines

    def test_cells_that_differ_in_returning_users_alone_have_one_line_of_the_baseline(self) -> None:
        plan = plan_of(QUICK, engine_times(QUICK))
        half = plan.half_rate_per_s
        rows = [
            each
            for cell, ratio in (("quick", 1.2), ("quick-r0", 1.0), ("quick-r0.6", 1.05))
            for each in outcome("B0", {half: 0.0}, 1, cell=cell, worker_over_engine=ratio)
        ]
        assert baseline(rows, {"quick": plan}).rows == [["quick", f"{half:g}", "3", "1.05", "-", "1.1", "honest"]]


@pytest.mark.slow
def test_a_cell_in_miniature_runs_resumes_and_is_reported(
    embedded_broker: LocalBroker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cell = miniature()
    mode = replace(QUICK_MODE, seconds=1.0, warm_up_s=0.5, resolution=64.0, a_loads=())
    monkeypatch.setattr("relaygr.bench.headline.points.RATE_FACTOR", 1)
    monkeypatch.setattr("relaygr.bench.headline.plan.HALF", 0.02)
    monkeypatch.setitem(BY_NAME, "mini", cell)
    systems = (System.B0, System.R)
    with Bench(Console(quiet=True), tmp_path, embedded_broker, mode, None) as bench:
        bench.run_cells([(cell, systems)])
    rows = read_rows(tmp_path / "runs.csv")
    asked = [(each.system, each.figure, each.valid) for each in rows]
    assert asked == [("B0", "B", True), ("R", "B", True)]
    assert all(each.late == 0 and each.offered > 3 and each.passed for each in rows)
    assert rows[0].full_share == 1 and rows[0].worker_over_engine > 0
    assert load_plan(tmp_path / "plans" / "mini.json").slowdown > 0
    relay = rows[-1]
    assert relay.scores_compared > 0 and relay.scores_different == 0
    assert relay.hbm_share > 0 and relay.cached_token_share > 0 and relay.device_s > 0
    # Another mode has other traces, so its scores are not compared with these samples.
    assert {each.stem.rsplit("-", 1)[1] for each in (tmp_path / "samples").iterdir()} == {mode.name}
    # The same command again finds every run in the file, and starts no process.
    with Bench(Console(quiet=True), tmp_path, embedded_broker, mode, None) as bench:
        bench.run_cells([(cell, systems)])
    assert len(read_rows(tmp_path / "runs.csv")) == 2
    write_report(tmp_path)
    text = (tmp_path / "report.md").read_text(encoding="utf-8")
    assert "Indicative: 1 of at least 5 seeds" in text and "| mini |" in text and "calculated, not measured" in text
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert "data:image/png;base64," in page and not re.search(r'(src|href)="http', page)
