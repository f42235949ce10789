"""The headline figures: the question, the search and its resumption, the report, and a live run in miniature."""

from __future__ import annotations

import io
import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from rich.progress import Progress

from relaygr.admission.latency import LatencyModel
from relaygr.bench.headline import search as search_module
from relaygr.bench.headline.question import (
    DRAM_PREFIXES,
    FULL,
    HBM_PREFIXES,
    LIVE,
    LOADS,
    QUICK,
    TUNED,
    USERS,
    Asked,
    Effort,
    Plan,
    RunRow,
    System,
    figures_of,
    highest_passing,
    lengths_around,
    rates_around,
    settings_of,
    traffic_of,
)
from relaygr.bench.headline.report import (
    BEGIN,
    END,
    Figures,
    as_markdown,
    conditions,
    fill_page,
    gates_of,
    table_of,
    write_report,
)
from relaygr.bench.headline.run import LiveBench, Machine, Point, measured_machine, play_virtually
from relaygr.bench.headline.search import Rows, ScoreRow, Search, TimeIsUpError, read_rows, tuned_variant
from relaygr.demo.summary import ScoreComparison
from relaygr.devbroker import local_broker
from relaygr.runtime.errors import RelayError
from relaygr.schemas.messages import LatencyCoefficients, StageTimings
from relaygr.settings import Settings
from relaygr.simulate.times import save_times
from relaygr.traffic.population import population_of
from relaygr.traffic.records import LOST, ImpressionRecord
from relaygr.traffic.schedule import impressions
from relaygr.traffic.settings import TrafficSettings
from relaygr.worker.calibration import Calibration, MachineDescription
from relaygr.worker.kv import KvDtype
from relaygr.worker.model.options import ComputeDtype
from tests.worlds.simulated import NO_TIMES

ROOT = Path(__file__).parents[2]
PLAN = Plan("this machine", "an engine", "2026-01-01", 2_048, 5.0, pre_ms=30.0, hit_ms=5.0, prefix_bytes=1 << 20)
LATENCY = LatencyModel(
    LatencyCoefficients(a0=500, a1=10, a2=0, b0=0, b1=10, b2=0, c0=0, c1=5, c2=0, d0=50, d1=1 / 4096)
)


def row(**changed: Any) -> RunRow:
    values: dict[str, Any] = {
        "measured_at": "2026-01-02T03:04:05Z", "machine": PLAN.machine, "code": "abc", "broker": "a broker",
        "effort": "full", "asked": "requests", "load": 0.9, "system": "relay", "variant": "", "history": 2_048,
        "deadline_ms": 175, "full_ms": 35.0, "rate_per_s": 20.0, "seed": 1, "offered": 1_000, "late": 0, "hits": 0.85,
        "hits_gained": 0.01, "lag_p99_ms": 1.0, "p99_ms": 100.0,
    } | changed  # fmt: skip
    # As LoadGen does with that many queries.
    return RunRow(**({"verdict": "VALID" if values["late"] < 5 else "INVALID"} | values))


# -- the question -----------------------------------------------------------------------------------


def test_all_systems_have_the_same_memory_for_kv_and_full_inference_has_no_cache():
    for system in LIVE:
        worker = Settings.model_validate(settings_of(PLAN, system)).worker
        assert worker.hbm_bytes + worker.dram_bytes == (HBM_PREFIXES + DRAM_PREFIXES) * PLAN.prefix_bytes
        assert worker.reuse_prefixes is (system is not System.FULL)
    # Whether retrieval events are sent is their only difference.
    assert settings_of(PLAN, System.CACHE) == settings_of(PLAN, System.RELAY)


def test_every_variant_of_full_inference_is_one_that_workers_take():
    for variant in TUNED:
        Settings.model_validate(settings_of(PLAN, System.FULL, variant))


@pytest.mark.parametrize("load", LOADS)
def test_about_the_asked_share_of_the_impressions_is_by_users_who_return(load: float):
    traffic = TrafficSettings(**traffic_of(PLAN, load, 50.0, seed=3, duration_s=40.0))
    stream = list(impressions(traffic, population_of(traffic)))
    assert sum(each.user < USERS for each in stream) / len(stream) == pytest.approx(load, abs=0.05)


def test_deadline_and_lead_time_are_multiples_of_the_engines_times():
    assert PLAN.deadline_ms == 175
    assert replace(PLAN, pre_ms=1.0, hit_ms=1.0).deadline_ms == 40, "messages need some time on any machine"
    assert traffic_of(PLAN, 0.6, 5.0, 1, 10.0)["lead_median_ms"] == 90


def test_full_inference_by_the_engine_is_as_measured_at_the_median_and_grows_with_the_history():
    assert PLAN.engine_us(LATENCY, 2_048) == pytest.approx(35_000)
    assert PLAN.engine_us(LATENCY, 1_024) < 0.6 * 35_000


def test_a_run_at_a_low_rate_has_enough_queries_and_a_load_that_returns_slowly_a_longer_warm_up():
    assert FULL.queries_at(6.0) == 662
    assert FULL.queries_at(100.0) == 3_000
    assert FULL.warm_up_at(0.6, 5.0) > FULL.warm_up_at(0.6, 50.0) == FULL.warm_up_at(0.0, 5.0)


# -- what a run shows -------------------------------------------------------------------------------


def record(number: int, **changed: Any) -> ImpressionRecord:
    values: dict[str, Any] = {
        "status": "ranked",
        "path": "hbm",
        "latency_us": 20_000,
        "send_lag_us": 100,
        "late": False,
    }
    return ImpressionRecord(number, str(number), "user", **(values | changed))


def figures(*records: ImpressionRecord, first: int = 0) -> dict[str, Any]:
    return figures_of(records, first, lambda tokens: 10.0 * tokens)


def test_the_warm_up_is_not_counted():
    lost = record(0, status=LOST, path=None, latency_us=None, late=True)
    found = figures(lost, record(1, path="full"), record(2), first=1)
    assert (found["lost"], found["hits"]) == (0, 0.5)
    assert figures(lost, record(1))["lost"] == 1


def test_the_share_of_hits_tells_whether_the_warm_up_was_long_enough():
    found = figures(record(0, path="full"), record(1, path="full"), record(2), record(3, path="dram"))
    assert (found["hits"], found["hits_gained"]) == (0.5, 1.0)


def test_full_inference_in_the_worker_is_compared_with_the_engine_without_its_queue():
    timings = StageTimings(total_us=16_000, queue_us=5_000, wait_us=0, pre_infer_us=0, reload_us=0, rank_us=0)
    assert figures(record(0, path="full", prefix_tokens=1_000, timings=timings))["over_engine"] == pytest.approx(1.1)
    assert math.isnan(figures(record(0))["over_engine"])


def test_a_run_passes_if_loadgen_calls_it_valid_and_the_queries_were_sent_on_time():
    assert row(verdict="VALID").passed and not row(verdict="INVALID").passed
    assert not row(lag_p99_ms=4.0).passed and not row(lag_p99_ms=4.0).valid


def test_in_virtual_time_a_run_passes_with_one_request_of_a_hundred_late():
    def virtual(late: int) -> RunRow:
        return row(late=late, verdict="", lag_p99_ms=math.nan)

    assert virtual(10).passed and not virtual(11).passed


# -- the search -------------------------------------------------------------------------------------


@given(limit=st.integers(0, 30), start=st.floats(0.5, 40))
def test_a_search_finds_the_highest_value_that_passes_from_any_start(limit: int, start: float):
    asked: list[float] = []

    def passes(value: float) -> bool:
        asked.append(value)
        return value <= limit

    assert highest_passing(passes, [float(value) for value in range(1, 31)], start) == limit
    assert len(asked) == len(set(asked)) <= 13


def test_a_search_that_starts_at_the_answer_needs_two_runs():
    asked: list[float] = []
    rates = rates_around(10.0, 1.1)

    def passes(rate: float) -> bool:
        asked.append(rate)
        return rate <= 10

    assert highest_passing(passes, rates, 10.0) == 10
    assert len(asked) == 2


def test_lengths_are_whole_pages_up_to_twice_the_history():
    lengths = lengths_around(2_048, 1.1)
    assert all(length % 64 == 0 for length in lengths) and lengths == sorted(set(lengths))
    assert lengths[0] <= 128 and 1.9 * 2_048 < lengths[-1] <= 2 * 2_048


class FakeBench:
    """A machine on which each system carries so many requests a second."""

    broker_name = "a broker"
    CARRIES: ClassVar = {System.FULL: 10.0, System.CACHE: 30.0, System.RELAY: 40.0}

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.played: list[Point] = []
        self.compared: list[Point] = []
        self.invalid: set[System] = set()
        self.invalid_from = math.inf

    def expected_s(self, point: Point) -> float:
        return 60.0

    def play(self, point: Point) -> RunRow:
        self.played.append(point)
        self.records_of(point).parent.mkdir(parents=True, exist_ok=True)
        self.records_of(point).touch()
        lag_ms = 100.0 if point.system in self.invalid or point.rate_per_s >= self.invalid_from else 1.0
        late = 0 if point.rate_per_s <= self.CARRIES[point.system] else 500
        return row_at(point, late=late, lag_p99_ms=lag_ms)

    def records_of(self, point: Point) -> Path:
        return self.folder / "records" / f"{point.system}-{point.rate_per_s}-{point.seed}"

    def forget_records(self) -> None:
        for path in (self.folder / "records").iterdir():
            path.unlink()

    def compare_scores(self, point: Point) -> ScoreComparison:
        self.compared.append(point)
        return ScoreComparison(240, 0, 1e-7, 0)

    def learn_times(self, point: Point) -> None:
        (self.folder / "times-test.json").touch()


def row_at(point: Point, **changed: Any) -> RunRow:
    return row(
        effort="test", asked=point.asked.value, load=point.load, system=point.system.value, variant=point.variant,
        history=point.history, deadline_ms=PLAN.deadline_ms, rate_per_s=point.rate_per_s, seed=point.seed, **changed,
    )  # fmt: skip


EFFORT = Effort("test", (1, 2), 10.0, 100, 5.0, 1.2, attempts=2)
SEARCHES = 1 + 2 * len(LOADS)
"""Of a seed: full inference is searched once."""


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeBench:
    """Without simulations: the guess is wrong by half."""

    def virtual(_: Any, __: Effort, point: Point) -> RunRow:
        return row_at(point, late=0 if point.rate_per_s <= FakeBench.CARRIES[point.system] / 2 else 500)

    monkeypatch.setattr(search_module, "play_virtually", virtual)
    return FakeBench(tmp_path)


def search_in(fake: FakeBench, ends_s: float = math.inf) -> Search:
    on = Machine(PLAN, None, None, fake.folder)  # type: ignore[arg-type]
    return Search(Rows(fake.folder), on, EFFORT, Progress(console=Console(quiet=True)), ends_s)


def test_each_seed_finds_what_each_system_carries_and_a_later_seed_starts_there(fake: FakeBench):
    search_in(fake).live(fake)  # type: ignore[arg-type]
    found = Figures(Rows(fake.folder).runs, [], EFFORT)
    for load in LOADS:
        for system in LIVE:
            for seed in EFFORT.seeds:
                reached = found.reached(load, system, seed)
                assert reached is not None and reached.failed is not None
                assert reached.value <= FakeBench.CARRIES[system] < reached.failed <= 1.21 * reached.value
    runs = [sum(point.seed == seed and point.asked is Asked.REQUESTS for point in fake.played) for seed in (1, 2)]
    assert runs[1] == 2 * SEARCHES < runs[0]


def test_a_search_that_is_begun_again_plays_nothing_twice(fake: FakeBench):
    search_in(fake).live(fake)  # type: ignore[arg-type]
    played, compared = len(fake.played), len(fake.compared)
    search_in(fake).live(fake)  # type: ignore[arg-type]
    assert (len(fake.played), len(fake.compared)) == (played, compared)
    assert compared == 2 * len(LOADS), "scores of cache and relay at each load"


def test_no_run_begins_that_would_end_after_the_time_and_the_rows_stay(fake: FakeBench):
    with pytest.raises(TimeIsUpError):
        search_in(fake, ends_s=0.0).live(fake)  # type: ignore[arg-type]
    assert not fake.played
    search_in(fake).live(fake)  # type: ignore[arg-type]
    assert fake.played


def test_the_time_bounds_simulations_too(fake: FakeBench):
    on = Machine(PLAN, None, SimpleNamespace(model=LATENCY), fake.folder)  # type: ignore[arg-type]
    with pytest.raises(TimeIsUpError):
        Search(Rows(fake.folder), on, EFFORT, Progress(console=Console(quiet=True)), ends_s=0.0).histories()


def test_scores_are_compared_in_the_next_call_if_the_time_is_up(fake: FakeBench, monkeypatch: pytest.MonkeyPatch):
    later_s = 0.0

    def play_the_last(point: Point, play: Any = fake.play) -> RunRow:
        nonlocal later_s
        found = play(point)
        if point.system is System.CACHE and not found.passed:
            later_s = 1e6
        return found

    monkeypatch.setattr(fake, "play", play_the_last)
    monkeypatch.setattr(search_module, "time", SimpleNamespace(monotonic=lambda: later_s))
    with pytest.raises(TimeIsUpError):
        search_in(fake, ends_s=1e5).live(fake)  # type: ignore[arg-type]
    assert not fake.compared
    search_in(fake).live(fake)  # type: ignore[arg-type]
    assert len(fake.compared) == 2 * len(LOADS)


def test_an_invalid_run_is_played_again_and_ends_its_search_alone(fake: FakeBench):
    fake.invalid = {System.CACHE}
    search_in(fake).live(fake)  # type: ignore[arg-type]
    found = Figures(Rows(fake.folder).runs, [], EFFORT)
    assert found.requests(0.9, System.CACHE).said() == "not measured"
    assert found.requests(0.9, System.RELAY).values
    own = [point for point in fake.played if point.system is System.CACHE]
    assert len(own) == EFFORT.attempts * len(LOADS) * len(EFFORT.seeds)


def test_a_search_that_an_invalid_run_ends_keeps_what_passed_and_compares_its_scores(fake: FakeBench):
    fake.invalid_from = 35.0
    search_in(fake).live(fake)  # type: ignore[arg-type]
    relay = Figures(Rows(fake.folder).runs, [], EFFORT).requests(0.9, System.RELAY)
    assert relay.may_be_more and all(20 < rate < 35 for rate in relay.values)
    assert {point.load for point in fake.compared if point.system is System.RELAY} == set(LOADS)


def test_the_variant_with_the_fewest_late_requests_stands_for_full_inference():
    names = list(TUNED)
    rows = [
        row(asked="tuning", variant=name, late=late, p99_ms=p99_ms, lag_p99_ms=lag_ms)
        for name, late, p99_ms, lag_ms in ((names[0], 3, 90.0, 1.0), (names[1], 2, 95.0, 1.0), (names[2], 0, 9.0, 99.0))
    ]
    assert tuned_variant(rows, "full") == names[1], "an invalid run says nothing"
    assert tuned_variant(rows, "quick") is None


def test_rows_are_read_as_they_were_written_and_others_are_refused(tmp_path: Path):
    rows = Rows(tmp_path)
    rows.add_run(row(over_engine=math.nan))
    rows.add_scores(ScoreRow("full", 0.9, "relay", 240, 0, 1e-7))
    assert repr(Rows(tmp_path).runs) == repr(rows.runs) and Rows(tmp_path).scores == rows.scores
    rows.refuse_others(PLAN.machine, "a broker")
    for machine, broker in (("another machine", "a broker"), (PLAN.machine, "another broker")):
        with pytest.raises(RelayError, match="this is another"):
            rows.refuse_others(machine, broker)
    (tmp_path / "old.csv").write_text("cell,system\nquick,B0\n", encoding="utf-8")
    with pytest.raises(RelayError, match="move it away"):
        read_rows(tmp_path / "old.csv", RunRow)


# -- the report -------------------------------------------------------------------------------------

SCORES = [ScoreRow("full", load, system.value, 240, 0, 1e-7) for load in LOADS for system in LIVE[1:]]


def searched(system: System, load: float, *rates: float) -> list[RunRow]:
    """The last two runs of the search of each seed."""
    return [
        row(system=system.value, load=load, seed=seed, rate_per_s=tried, late=late, over_engine=1.05)
        for seed, rate in enumerate(rates, start=1)
        for tried, late in ((rate, 0), (1.1 * rate, 500))
    ]


def reported() -> list[RunRow]:
    carried = {System.FULL: (10.0, 8.0, 10.0), System.CACHE: (20.0, 20.0, 25.0), System.RELAY: (40.0, 40.0, 30.0)}
    runs = [each for load in LOADS for system, rates in carried.items() for each in searched(system, load, *rates)]
    return [row(asked="tuning", system="full inference", variant=next(iter(TUNED)), over_engine=1.05), *runs]


def test_the_table_has_medians_and_ranges_and_ratios_seed_by_seed():
    header, *lines = table_of(Figures(reported(), SCORES, FULL))
    assert header[1:4] == ["full inference", "cache only", "relay"]
    assert lines[2] == [
        "90%", "10 (8 to 10)", "20 (20 to 25)", "40 (30 to 40)", "4 (3 to 5)", "2 (1.2 to 2)", "85%"
    ]  # fmt: skip


def test_a_search_that_has_not_ended_shows_at_least_what_it_found():
    rows = [each for each in reported() if not (each.system == "relay" and each.rate_per_s > 40)]
    assert Figures(rows, [], FULL).requests(0.9, System.RELAY).said() == "at least 40 (30 to 40)"


@pytest.mark.parametrize(
    ("tried", "told"),
    [
        ({20.0: 0, 22.0: 500}, "20"),
        ({20.0: 0, 24.2: 500}, "at least 20"),
        ({20.0: 0}, "at least 20"),
        ({20.0: 500}, "not ended"),
        ({0.5: 500}, "0"),
    ],
)
def test_a_search_has_ended_if_the_next_rate_or_the_lowest_of_all_failed(tried: dict[float, int], told: str):
    rows = [row(rate_per_s=rate, late=late) for rate, late in tried.items()]
    assert Figures(rows, [], FULL).requests(0.9, System.RELAY).said() == told


def test_a_ratio_is_a_bound_on_the_side_of_the_search_that_has_not_ended():
    def ratio(ours: list[float], theirs: list[float]) -> str:
        tried = [
            row(system=system, rate_per_s=rate, late=500 * place)
            for system, rates in (("relay", ours), ("cache only", theirs))
            for place, rate in enumerate(rates)
        ]
        return Figures(tried, [], FULL).ratio(0.9, System.RELAY, System.CACHE).said()

    assert ratio([40.0, 44.0], [20.0, 22.0]) == "2"
    assert ratio([40.0], [20.0, 22.0]) == "at least 2"
    assert ratio([40.0, 44.0], [20.0]) == "at most 2"
    assert ratio([40.0], [20.0]) == "not ended"


def test_the_longest_history_is_one_below_the_next_length():
    rows = [row(), row(asked="history", history=3_008), row(asked="history", history=3_328, late=500)]
    assert not Figures(rows, [], FULL).longest(0.9, System.RELAY).may_be_more
    assert Figures(rows[:2], [], FULL).longest(0.9, System.RELAY).may_be_more


def test_a_system_that_carries_nothing_has_no_ratio():
    rows = [replace(each, late=500, rate_per_s=0.5) if each.system == "full inference" else each for each in reported()]
    assert table_of(Figures(rows, [], FULL))[3][4] == "full inference carries none"


def test_only_the_rows_of_the_asked_effort_are_reported():
    quick = [
        replace(each, effort="quick", rate_per_s=2 * each.rate_per_s) for each in searched(System.RELAY, 0.9, 30.0)
    ]
    assert Figures([*quick, *reported()], SCORES, QUICK).requests(0.9, System.RELAY).values == (60.0,)


def test_a_report_without_a_live_run_says_so(tmp_path: Path):
    said = io.StringIO()
    write_report(Console(file=said), tmp_path, Rows(tmp_path), QUICK, None)
    assert said.getvalue().startswith("No live run of the effort quick has ended")


def test_the_conditions_name_the_effort_the_length_of_the_runs_and_every_revision():
    rows = [row(rate_per_s=20.0, offered=600), row(rate_per_s=50.0, offered=1_500, code="def")]
    told = conditions(Figures(rows, [], FULL))
    assert "code abc and def; 2 runs, effort full: about 30 to 30 s and 600 to 1500 requests each." in told


def failing(rows: list[RunRow], scores: list[ScoreRow]) -> list[str]:
    return [gate.name.split()[0] for gate in gates_of(Figures(rows, scores, FULL)) if not gate.passed]


def test_the_gates_hold_for_a_sound_run():
    assert failing(reported(), SCORES) == []


@pytest.mark.parametrize(
    ("changed", "of", "gate"),
    [
        ({"over_engine": 1.2}, "tuning", "full"),
        ({"hits": 0.2}, "requests", "users"),
        ({"hits_gained": 0.3}, "requests", "the"),
    ],
)
def test_each_gate_fails_for_its_own_reason(changed: dict[str, float], of: str, gate: str):
    rows = [replace(each, **changed) if each.asked == of else each for each in reported()]
    assert gate in failing(rows, SCORES)


def test_hits_of_the_relay_do_not_show_that_users_who_return_use_cached_kv():
    rows = [replace(each, hits=0.2) if each.system == "cache only" else each for each in reported()]
    assert "users" in failing(rows, SCORES)


def test_scores_that_differ_or_were_not_compared_fail_their_gate():
    assert failing(reported(), SCORES[1:]) == ["each"]
    assert failing(reported(), [replace(SCORES[0], different=1), *SCORES[1:]]) == ["cached"]


@pytest.mark.slow
def test_the_report_fills_the_page_between_its_marks_and_ends_with_a_sentence(tmp_path: Path):
    page, rows, said = tmp_path / "page.md", Rows(tmp_path / "out"), io.StringIO()
    page.write_text(f"before\n{BEGIN}\nthe old text\n{END}\nafter\n", encoding="utf-8")
    for each in [
        *reported(),
        row(asked="history", system="oracle", history=4_096),
        row(asked="history", history=3_008),
    ]:
        rows.add_run(each)
    for each in SCORES:
        rows.add_scores(each)
    write_report(Console(file=said, width=200), tmp_path / "out", rows, FULL, page)
    first = page.read_text(encoding="utf-8")
    assert first.startswith("before") and first.endswith("after\n") and "the old text" not in first
    assert "| 90% | 10 (8 to 10) | 20 (20 to 25) | 40 (30 to 40) |" in first and "3,008" in first
    assert (tmp_path / "images" / "benchmark.png").exists() and (tmp_path / "out" / "requests.png").exists()
    assert said.getvalue().splitlines()[-1].startswith("Where 90% of the impressions are by users who return")
    write_report(Console(file=io.StringIO()), tmp_path / "out", rows, FULL, page)
    assert page.read_text(encoding="utf-8") == first


def test_the_page_of_the_documentation_shows_the_committed_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(ROOT)
    out, shown, page = Path("benchmarks/results/headline"), ROOT / "docs" / "benchmark.md", tmp_path / "benchmark.md"
    page.write_text(shown.read_text(encoding="utf-8"), encoding="utf-8")
    rows = Rows(out)
    fill_page(page, as_markdown(Figures(rows.runs, rows.scores, QUICK), out))
    assert page.read_text(encoding="utf-8") == shown.read_text(encoding="utf-8")


def test_a_page_without_marks_is_refused(tmp_path: Path):
    page = tmp_path / "page.md"
    page.write_text("nothing", encoding="utf-8")
    with pytest.raises(RelayError, match="needs the line"):
        fill_page(page, "text")


# -- in virtual time --------------------------------------------------------------------------------


@pytest.mark.slow
def test_in_virtual_time_each_system_carries_more_than_the_one_before(tmp_path: Path):
    """At twice the rate that fills the device with full inference: a hit takes a tenth of its time."""
    described = MachineDescription(
        "m", "cpu", "a test", "here", 1, "2", KvDtype.FLOAT32, 64, ComputeDtype.FLOAT32, "none"
    )
    calibration = Calibration(described, "2026-01-01T00:00:00Z", LATENCY.coefficients, (), (), (), ())
    on = Machine(PLAN, calibration, calibration, tmp_path)
    save_times(on.times_path(QUICK), NO_TIMES)
    late = [
        play_virtually(on, QUICK, Point(Asked.GUESS, 0.9, system, "", 2 * PLAN.full_rate_per_s, 1, 2_048)).late_share
        for system in System
    ]
    full, cache, relay, oracle = late
    assert full > cache >= relay >= oracle
    assert full > 0.2 and oracle == 0


# -- on this machine --------------------------------------------------------------------------------

HISTORY = 64
SHORT = replace(QUICK, seconds=3.0, least_queries=10, warm_up_s=3.0)


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machine]:
    """A short history, and a deadline that holds on a busy machine."""
    yield measured_machine(tmp_path_factory.mktemp("headline"), HISTORY, 400.0)


@pytest.mark.slow
def test_a_live_run_of_the_relay_hits_and_its_scores_are_full_inferences(small: Machine):
    pytest.importorskip("mlperf_loadgen", reason="no wheel for this platform")
    point = Point(Asked.REQUESTS, 0.9, System.RELAY, "", 30.0, 1, HISTORY)
    with local_broker("embedded") as broker, LiveBench(small, broker, SHORT) as bench:
        played = bench.play(point)
        compared = bench.compare_scores(point)
    assert played.offered == 90 and played.lost == 0
    [summary] = (small.folder / "loadgen").iterdir()
    assert "Test Parameters Used" in summary.read_text(encoding="utf-8")
    assert played.hits > 0.2
    assert compared.compared > 30 and compared.different == 0


@pytest.mark.slow
def test_a_folder_with_the_plan_of_another_question_is_refused(small: Machine):
    assert measured_machine(small.folder, HISTORY, 400.0).plan == small.plan
    with pytest.raises(RelayError, match="--out"):
        measured_machine(small.folder, 2 * HISTORY, 400.0)
