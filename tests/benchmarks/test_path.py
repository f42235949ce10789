"""`python -m benchmarks.path`: the calls of one request are counted, each time the same."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from relaygr.bench.path.__main__ import time_hits, trace_request

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_json_gives_calls_files_and_moves_of_a_hit_and_of_a_miss():
    run = subprocess.run(
        [sys.executable, "-m", "benchmarks.path", "--json"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    figures = json.loads(run.stdout)
    assert list(figures) == ["hit", "miss"]
    assert all(list(one) == ["calls", "files", "moves"] for one in figures.values())
    assert all(type(count) is int and count > 0 for one in figures.values() for count in one.values())
    assert all(figures["miss"][name] > figures["hit"][name] for name in ("calls", "files", "moves"))


def test_two_runs_count_the_same_calls():
    first, second = trace_request(is_cached=True), trace_request(is_cached=True)
    assert first.by_function == second.by_function
    assert first.by_move == second.by_move


def test_the_path_goes_from_the_loop_over_handler_and_executor_to_the_finished_offset():
    trace = trace_request(is_cached=False)
    called = {name for _, name in trace.by_function}
    assert {"ConsumerLoop._receive", "WorkerHandler.on_message", "Executor.step", "PrefixCache.acquire"} <= called
    assert {"ConsumerLoop.finish", "WatermarkTracker.finish"} <= called
    assert not any("bench" in file for file, _ in trace.by_function)


def test_the_cpu_time_of_every_hit_is_measured():
    times_us = time_hits(pause_s=0.001, hits=5)
    assert len(times_us) == 5
    assert min(times_us) > 0
