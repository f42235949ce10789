"""`relaygr size`: its arithmetic by hand, and its agreement with `relaygr simulate plan`."""

from __future__ import annotations

import dataclasses
import json
import math
import re
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from relaygr.admission.latency import LatencyModel
from relaygr.cli.app import app
from relaygr.schemas.messages import Path as RankingPath
from relaygr.settings import load_settings
from relaygr.simulate import plan as plan_module
from relaygr.simulate.case import Case, System, case_of, shape_of_tokens
from relaygr.simulate.figures import CODE, PartOutcome, Requests, figures_of
from relaygr.simulate.fleet import Runner
from relaygr.simulate.plan import CapacityPlan, Probe
from relaygr.simulate.size import Kind, message_sizes, returns, size_of
from relaygr.simulate.visit import Tier
from tests.worlds.simulated import COEFFICIENTS, NO_TIMES, calibration_in

PAGE = 64 * 2048
"""Bytes of a page: 64 tokens of 2 KiB."""


def case(*settings: str) -> Case:
    """1,024 behaviours each, 100 impressions a second, a lead of 100 ms and a margin of 200 ms."""
    loaded = load_settings(
        None,
        environment={},
        overrides=(
            "traffic.rate_per_s=100", "traffic.duration_s=10", "traffic.users=1000", "traffic.zipf_exponent=0",
            "traffic.history_median=1024", "traffic.history_sigma=0", "traffic.history_max=2048", "traffic.growth=10",
            "traffic.suffix=0", "traffic.candidates=100", "traffic.lead_median_ms=100", "traffic.lead_sigma=0",
            "admission.lease_margin_ms=200", "admission.footprint_reserve=0.25", "worker.page_tokens=64",
            "worker.hbm_bytes=64MiB", "worker.dram_bytes=256MiB", *settings,
        ),
    )  # fmt: skip
    shape = shape_of_tokens(2048, loaded)
    return case_of(loaded, shape, LatencyModel(COEFFICIENTS), NO_TIMES, on_cpu=True, system=System.RELAY)


def test_hbm_holds_the_prefixes_that_wait_by_littles_law() -> None:
    sized = size_of(case(), workers=2, keep_s=600)
    assert sized.waiting == pytest.approx(100 * 0.3)
    assert sized.prefix_bytes == 16 * PAGE
    assert sized.hbm_bytes == round(30 * 16 * PAGE / 0.75)
    assert sized.hbm_set_bytes == 2 * (64 << 20) and sized.hbm_is_enough
    assert not size_of(case("traffic.rate_per_s=400"), workers=2, keep_s=600).hbm_is_enough


def test_each_worker_holds_the_longest_prefix_at_least() -> None:
    assert size_of(case("traffic.rate_per_s=1"), workers=5, keep_s=60).hbm_bytes == 5 * 32 * PAGE


def test_dram_holds_the_users_who_come_within_the_time() -> None:
    sized = size_of(case(), workers=2, keep_s=20)
    came = 1000 * (1 - math.exp(-100 / 1000 * 20))
    assert sized.users_kept == pytest.approx(came)
    assert sized.dram_bytes == pytest.approx(came * 16 * PAGE, rel=1e-6)
    assert sized.reuse == pytest.approx(came / 1000)
    halved = size_of(case("worker.dram_kv_dtype=int8"), workers=2, keep_s=20)
    assert 0.5 < halved.dram_bytes / sized.dram_bytes < 0.6, "bfloat16 to int8 and its scales"


def test_users_who_come_once_are_kept_as_long_and_never_return() -> None:
    some, all_new = (size_of(case(f"traffic.new_share={each}"), workers=2, keep_s=20) for each in (0.25, 1.0))
    came = 1000 * (1 - math.exp(-75 / 1000 * 20))
    assert some.users_kept == pytest.approx(came + 25 * 20)
    assert some.reuse == pytest.approx(0.75 * came / 1000)
    assert (all_new.users_kept, all_new.reuse, all_new.device_share) == (2000, 0, pytest.approx(1))


def test_returns_agree_with_a_drawn_schedule() -> None:
    random, rate, keep_s, users = np.random.default_rng(1), 50.0, 30.0, 400
    shares = 1.0 / np.arange(1, users + 1)
    shares /= shares.sum()
    times = np.cumsum(random.exponential(1 / rate, 60_000))
    who = random.choice(users, times.size, p=shares)
    last = np.full(users, -np.inf)
    back = []
    for at_s, user in zip(times.tolist(), who.tolist(), strict=True):
        back.append(at_s - last[user] <= keep_s)
        last[user] = at_s
    assert returns(shares, rate, keep_s)[1] == pytest.approx(np.mean(back[10_000:]), abs=0.01)


def test_the_work_of_all_visits_lies_between_first_and_returning_ones() -> None:
    sized = size_of(case("worker.longest_tail=0"), workers=1, keep_s=600)
    full_us = 20 * 1024 + 500  # Pre-infer, and a hit on 100 candidates.
    hit_us, append_us, reload_us = 500, 20 * 10, 50 + 16 * PAGE / 4096
    assert sized.work.work[Tier.NONE] == pytest.approx((20 * 1024 + hit_us) / full_us)
    assert sized.work.work[Tier.DRAM] == pytest.approx((append_us + hit_us + reload_us) / full_us)
    assert size_of(case(), 1, 600, reuse=0).device_share == pytest.approx(1.0)
    appending = size_of(case("worker.longest_tail=0"), 1, 600, reuse=1)
    assert appending.device_share == pytest.approx(sized.work.work[Tier.DRAM])


@pytest.mark.parametrize(
    ("longest_tail", "suffix", "tails", "appended"),
    [(256, 0, (10, 20, 30), 40), (25, 0, (10, 20), 30), (256, 4_084, (10,), 20), (5, 0, (), 10)],
)
def test_a_short_tail_is_ranked_with_the_suffix_until_a_worker_would_append_it(
    longest_tail: int, suffix: int, tails: tuple[int, ...], appended: int
) -> None:
    dear = LatencyModel(dataclasses.replace(COEFFICIENTS, b0=1_200, c1=20))
    # A third of 1,200 + 20 n µs is at least 20 n µs up to n = 30. The longest suffix is 4,096.
    one = case(f"worker.longest_tail={longest_tail}", f"traffic.suffix={suffix}")
    figures = dataclasses.replace(one, model=dataclasses.replace(one.model, latency=dear)).visit()
    visits = len(tails) + 1
    assert figures.append_us == pytest.approx((1_200 + 20 * appended) / visits)
    assert figures.tail_us == pytest.approx(20 * sum(tails) / visits)


def test_messages_grow_by_the_bytes_of_their_entries() -> None:
    small, large = message_sizes(100, 10, 1000), message_sizes(300, 20, 3000)
    assert large[Kind.RANKING] - small[Kind.RANKING] == pytest.approx(200 * 8 + 10 * 18, abs=8)
    assert large[Kind.RESULT] - small[Kind.RESULT] == pytest.approx(200 * 4, abs=8)
    assert large[Kind.HISTORY] - small[Kind.HISTORY] == pytest.approx(2000 * 18, abs=8)
    assert size_of(case(), 1, 60).network_bytes_per_s == 100 * sum(message_sizes(100, 0, 1024).values())


# The command


@pytest.fixture(scope="module")
def calibration(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return calibration_in(tmp_path_factory.mktemp("size"))


def run(*arguments: str) -> str:
    done = CliRunner().invoke(app, arguments, env={"COLUMNS": "80"})
    assert done.exit_code == 0, done.output
    return done.stdout


@pytest.fixture
def planned(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Case, int, int, int]]:
    """What the planner is asked for: the case, sample, seeds and impressions. It says that 3 workers are enough."""
    asked = []

    def plan(one: Case, sample: int, seeds: int, _runner: Runner, _show: object, impressions: int) -> CapacityPlan:
        asked.append((one, sample, seeds, impressions))
        requests = Requests(np.array([1_000]), np.array([CODE[RankingPath.HBM]], np.uint8))
        part = PartOutcome(
            requests=requests, found={}, jobs={}, device_s=0.1, worker_s=1.0,
            impressions=1, took_s=0.1,
        )  # fmt: skip
        return CapacityPlan(Probe(3, figures_of([part], 40), 4.0), ())

    monkeypatch.setattr(plan_module, "plan_capacity", plan)
    return asked


def test_the_number_of_workers_is_that_of_the_plan(
    calibration: Path, tmp_path: Path, planned: list[tuple[Case, int, int, int]]
) -> None:
    load = ["--calibration", str(calibration), "--qps", "60", "--users", "500", "--slo-ms", "40"]
    load += ["--token-bytes", "2KiB"]
    rest = ["--impressions", "600", "--jobs", "1"]
    sized = json.loads(run("size", *load, "--length", "512", "--json", *rest))
    same = ["--set", "traffic.candidates=128", "--set", "traffic.suffix=16", "--json", str(tmp_path / "plan.json")]
    run("simulate", "plan", *load, "--lengths", "512", *same, *rest)
    of_size, of_plan = planned[:2], planned[2:]
    assert [one.relay for one, *_ in of_size] == [True, False]
    assert of_size == of_plan
    found = json.loads((tmp_path / "plan.json").read_text())
    for system in ("relay", "off"):
        for figure in ("workers", "partitions", "hbm_bytes"):
            assert sized["systems"][system][figure] == found["systems"][system][figure]
    assert sized["calculated"]["workers"] == sized["systems"]["relay"]["workers"] == 3


def test_options_win_over_settings_and_settings_over_defaults(
    calibration: Path, planned: list[tuple[Case, int, int, int]]
) -> None:
    said = run(
        "size", "--calibration", str(calibration), "--qps", "20", "--users", "100", "--length", "512", "--token-bytes",
        "2KiB", "--set", "traffic.budget_ms=70", "--set", "traffic.suffix=9", "--set", "traffic.candidates=77",
        "--candidates", "99", "--impressions", "600", "--jobs", "1", "--json",
    )  # fmt: skip
    traffic = json.loads(said)["traffic"]
    assert (traffic["budget_ms"], traffic["suffix"], traffic["candidates"]) == (70, 9, 99)
    asked = planned[0][0].demand.traffic
    assert (asked.budget_ms, asked.suffix, asked.candidates) == (70, 9, 99)


@pytest.mark.slow
def test_the_tables_fit_80_columns(calibration: Path) -> None:
    said = run(
        "size", "--calibration", str(calibration), "--qps", "10", "--users", "200000", "--length", "512:1024",
        "--token-bytes", "2KiB", "--slo-ms", "60", "--impressions", "600", "--jobs", "1",
    )  # fmt: skip
    tables, _, rest = said.partition("Simulated, not measured")
    assert rest
    assert max(len(line.rstrip()) for line in tables.splitlines()) <= 80
    for text in ("with the relay", "DRAM for", "written to Kafka a second", "all visits, "):
        assert text in tables
    last = said.splitlines()[-1]
    assert re.fullmatch(
        r"Workers for 10 impressions a second, 99 % within 60 ms: .* with relay, .* with full inference\.", last
    )


@pytest.mark.parametrize(
    ("option", "value", "complaint", "code"),
    [
        ("--length", "long", "write two whole numbers", 1),
        ("--token-bytes", "3", "multiple of 4", 1),
        ("--hbm", "1MiB", "worker.hbm_bytes", 1),
        ("--keep-s", "inf", "--keep-s", 2),
    ],
)
def test_wrong_options_are_explained(calibration: Path, option: str, value: str, complaint: str, code: int) -> None:
    options = {"--calibration": str(calibration), "--qps": "5", "--users": "10", "--length": "512"} | {option: value}
    done = CliRunner().invoke(app, ["size", *(word for pair in options.items() for word in pair)])
    assert done.exit_code == code
    assert complaint in done.output.replace("\n", " ")
