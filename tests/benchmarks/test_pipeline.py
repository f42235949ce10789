"""The pipeline benchmark: the echo beside it, and the ratios of the two."""

from __future__ import annotations

import json
import math
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from relaygr.bench.null_model import null_settings
from relaygr.bench.pipeline.__main__ import main
from relaygr.bench.pipeline.echo import Echo, read_run
from relaygr.bench.pipeline.run import (
    COLUMNS,
    Plan,
    RoundFigures,
    RunFigures,
    measure_rates,
    medians,
)
from relaygr.bench.rows import refuse_other_columns
from relaygr.bench.window import MeasuredWindow
from relaygr.devbroker import LocalBroker
from relaygr.runtime.errors import RelayError
from relaygr.settings import Settings
from relaygr.traffic.settings import TrafficSettings

PIPELINE = RunFigures(2000, 1000, p50_ms=4.0, p99_ms=20.0, python_cpu=0.9, foreign_cpu=0.3)
ECHO = RunFigures(2000, 2000, p50_ms=1.0, p99_ms=5.0, python_cpu=0.3, foreign_cpu=0.1)


def test_the_ratios_are_the_medians_of_the_rounds() -> None:
    rounds = [
        RoundFigures(replace(PIPELINE, p50_ms=p50_ms, p99_ms=5 * p50_ms), ECHO, ECHO) for p50_ms in (9.0, 2.0, 4.0)
    ]
    row = medians(200.0, rounds)
    assert (row["rate"], row["rounds"]) == (200.0, 3)
    assert (row["p50_ratio"], row["p99_ratio"], row["python_cpu_ratio"]) == (4.0, 4.0, 3.0)
    assert row["foreign_cpu"] == pytest.approx(0.5 / 3, abs=1e-4)
    assert (row["pipeline_answered_share"], row["echo_answered_share"]) == (0.5, 1.0)


def test_the_committed_rows_have_the_columns_that_a_run_appends() -> None:
    committed = Path(__file__).parents[2] / "benchmarks" / "results" / "pipeline" / "ratios.csv"
    refuse_other_columns(committed, COLUMNS)
    assert COLUMNS[4:] == tuple(medians(200.0, [RoundFigures(PIPELINE, ECHO, ECHO)]))


def test_a_file_with_other_columns_is_refused_before_anything_is_measured(tmp_path: Path) -> None:
    (tmp_path / "old.csv").write_text("rate,rounds\n", encoding="utf-8")
    with pytest.raises(RelayError, match="columns of another version"):
        measure_rates([20.0], Plan(2.0, 1, 1.0), "no such broker", tmp_path / "old.csv", None)


@pytest.mark.parametrize("rates", ["x", "", "200,,500", "0", "nan"])
def test_rates_that_are_no_numbers_are_refused_in_a_sentence(rates: str) -> None:
    with pytest.raises(RelayError, match="is not a list of numbers above 0"):
        main(rates=rates)


def test_two_runs_on_one_broker_have_topics_of_their_own(tmp_path: Path) -> None:
    broker: Any = SimpleNamespace(settings=lambda kafka: kafka)
    first, second = (null_settings(broker, tmp_path / name, 200.0, 1.0) for name in "ab")
    assert first.topic_prefix != second.topic_prefix


@pytest.mark.slow
def test_a_run_in_miniature_has_the_figures_of_relay_and_echo(tmp_path: Path) -> None:
    measure_rates([20.0], Plan(2.0, 1, 1.0), "embedded", tmp_path / "ratios.csv", tmp_path / "ratios.json")
    (row,) = json.loads((tmp_path / "ratios.json").read_text(encoding="utf-8"))
    for system in ("pipeline", "echo", "asyncio"):
        assert row[f"{system}_p50_ms"] > 0 and row[f"{system}_cpu"] > 0
        # A machine that others keep busy may be late.
        assert row[f"{system}_answered_share"] > 0


def test_a_window_of_a_run_that_never_began_has_no_figures(tmp_path: Path) -> None:
    window = MeasuredWindow(tmp_path / "never", dict)
    window.sample()
    assert window.cpu_per_second() == {}
    assert window.foreign_cpu_per_second() != window.foreign_cpu_per_second(), "not a number"


@pytest.mark.parametrize(("longest_s", "readings"), [(math.inf, 3), (1.5, 2)])
def test_a_window_takes_no_sample_after_its_end(
    longest_s: float, readings: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, taken = tmp_path / "begun", list[float]()
    begun.write_text("begun")
    monkeypatch.setattr("relaygr.bench.window.busy_s", lambda: taken.append(0.0) or 0.0)
    window = MeasuredWindow(begun, dict, longest_s=longest_s)
    for now_s in (0.0, 1.0, 2.0):
        monkeypatch.setattr("relaygr.bench.window.time.monotonic", lambda at_s=now_s: at_s)
        window.sample()
    assert len(taken) == readings


@pytest.mark.slow
@pytest.mark.parametrize("role", ["gateway", "asyncio"])
def test_the_echo_answers_every_request(embedded_broker: LocalBroker, tmp_path: Path, role: str) -> None:
    traffic = TrafficSettings(rate_per_s=50, duration_s=1.0, users=10, history_median=8, history_max=32)
    base = embedded_broker.settings()
    settings = Settings.model_validate(
        {
            **base.model_dump(),
            "topic_prefix": f"echo-{time.time_ns()}",
            "partitions": 4,
            "traffic": traffic.model_dump(),
        }
    )
    with Echo(tmp_path, embedded_broker, settings) as echo:
        gateway = echo.start_run(tmp_path / "run.json", traffic, role)
        assert gateway.process.wait(60) == 0
        assert sorted(echo.roles().values()) == ["gateway", "trigger", "worker"]
    latencies, offered = read_run(tmp_path / "run.json")
    assert offered > 20
    assert latencies.size == offered
    assert latencies.min() > 0
