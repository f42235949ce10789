"""The pipeline benchmark: the echo beside it, and the ratios of the two."""

from __future__ import annotations

import math
import time
from dataclasses import replace
from pathlib import Path

import pytest

from relaygr.bench.pipeline.echo import Echo, read_run
from relaygr.bench.pipeline.run import EchoFigures, MeasuredWindow, RateFigures, RoundFigures, medians
from relaygr.devbroker import LocalBroker
from relaygr.settings import Settings
from relaygr.traffic.settings import TrafficSettings

PIPELINE = RateFigures(
    measured_at="2026-01-01T00:00:00Z", machine="one", broker="Kafka", rate_per_s=200, seconds=10, offered=2000,
    answered=1000, p50_ms=4.0, p99_ms=20.0, p999_ms=30.0, growth_ms=0.0, preinfer_jobs=2000, preinfer_start_p50_ms=3.0,
    preinfer_start_p99_ms=15.0, generator_lag_p99_ms=1.0, cpu_gateway=0.2, cpu_trigger=0.3, cpu_worker=0.4,
    cpu_broker=0.5,
)  # fmt: skip
ECHO = EchoFigures(2000, 2000, p50_ms=1.0, p99_ms=5.0, cpu_python=0.3, foreign_cpu=0.1)


def test_the_ratios_are_the_medians_of_the_rounds() -> None:
    rounds = [
        RoundFigures(replace(PIPELINE, p50_ms=p50_ms, p99_ms=5 * p50_ms), 0.3, ECHO) for p50_ms in (9.0, 2.0, 4.0)
    ]
    row = medians(200.0, rounds)
    assert (row["rate"], row["rounds"]) == (200.0, 3)
    assert (row["p50_ratio"], row["p99_ratio"], row["python_cpu_ratio"]) == (4.0, 4.0, 3.0)
    assert row["foreign_cpu"] == pytest.approx(0.2)
    assert (row["pipeline_answered_share"], row["echo_answered_share"]) == (0.5, 1.0)


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
    monkeypatch.setattr("relaygr.bench.pipeline.run.busy_s", lambda: taken.append(0.0) or 0.0)
    window = MeasuredWindow(begun, dict, longest_s=longest_s)
    for now_s in (0.0, 1.0, 2.0):
        monkeypatch.setattr("relaygr.bench.pipeline.run.time.monotonic", lambda at_s=now_s: at_s)
        window.sample()
    assert len(taken) == readings


@pytest.mark.slow
def test_the_echo_answers_every_request(embedded_broker: LocalBroker, tmp_path: Path) -> None:
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
        gateway = echo.start_run(tmp_path / "run.json", traffic)
        assert gateway.wait(60) == 0
        assert sorted(echo.roles().values()) == ["gateway", "trigger", "worker"]
    latencies, offered = read_run(tmp_path / "run.json")
    assert offered > 20
    assert latencies.size == offered
    assert latencies.min() > 0
