"""MLPerf's load generator: its summary, and a short test through a real worker."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest

from relaygr.bench.generator.trace import read_trace
from relaygr.bench.headline.grid import BY_NAME, CENTRE
from relaygr.bench.loadgen import run
from relaygr.bench.loadgen.run import LEAST_REQUESTS, USERS, read_summary, run_loadgen
from relaygr.runtime.errors import RelayError

SUMMARY = """
Completed samples per second    : 14.85
Result is : INVALID
  Performance constraints satisfied : NO
  Early stopping satisfied: Yes
50.00 percentile latency (ns)   : 21000000
99.00 percentile latency (ns)   : 95500000
"""


def test_the_figures_of_a_summary_are_read() -> None:
    found = read_summary(SUMMARY)
    assert found == {
        "result": "INVALID", "limit_met": False, "enough_requests": True,
        "completed_per_s": 14.85, "p50_ms": 21.0, "p99_ms": 95.5,
    }  # fmt: skip


def test_a_summary_without_its_figures_is_refused() -> None:
    with pytest.raises(RelayError, match="no p99_ns: the test did not end"):
        read_summary(SUMMARY.replace("99.00", "98.00"))


def test_an_unknown_cell_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RelayError, match="no cell has the name 'none'"):
        run_loadgen("none", 0.3, 1.0, "embedded", tmp_path)


def test_a_missing_load_generator_is_told_before_anything_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "mlperf_loadgen", None)
    monkeypatch.setattr(run, "local_broker", lambda _: pytest.fail("a broker was asked for"))
    with pytest.raises(RelayError, match="pip install mlcommons-loadgen"):
        run_loadgen("dlrm-v3-cpu", 0.3, 1.0, "embedded", tmp_path)


@pytest.mark.slow
def test_each_of_its_requests_is_answered_in_full_and_kept_in_a_trace(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("mlperf_loadgen")
    mini = replace(CENTRE, name="mini", history=128, heads=1, head_width=16, layers=1, candidates=16)
    monkeypatch.setitem(BY_NAME, "mini", replace(mini, least_deadline_ms=20_000))
    assert run_loadgen("mini", 0.2, 1.0, "embedded", tmp_path)
    trace = read_trace(tmp_path / "trace.parquet")
    assert len(set(trace.user_id)) == USERS and len(trace) >= LEAST_REQUESTS
    (line,) = (tmp_path / "results.csv").read_text(encoding="utf-8").splitlines()[1:]
    assert ",0,VALID,True,True," in line
