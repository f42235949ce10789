"""The stories of docs/testing.md and the boundaries of CONTRIBUTING.md: each has the tests that the page names."""

from __future__ import annotations

import ast
import functools
import re
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry

from relaygr.client.metrics import GatewayMetrics
from relaygr.traffic.settings import TrafficSettings
from relaygr.trigger.metrics import TriggerMetrics
from relaygr.worker.metrics import WorkerMetrics

ROOT = Path(__file__).parents[1]
ROW = re.compile(r"^\| (\d+)\. .*\| (.*) \|$")
STORIES = 19


def told() -> list[tuple[int, str]]:
    """(story, test) of every test that the table names, as `path::Class::name` below tests/."""
    rows = (ROW.match(line) for line in (ROOT / "docs" / "testing.md").read_text(encoding="utf-8").splitlines())
    return [(int(row[1]), test) for row in rows if row for test in re.findall(r"`([^`]+)`", row[2])]


@functools.cache
def names_in(path: Path) -> set[str]:
    """Every test of a file, those of a class as `Class::name`."""
    names = set()
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            names.add(node.name)
        elif isinstance(node, ast.ClassDef):
            names |= {f"{node.name}::{each.name}" for each in node.body if isinstance(each, ast.FunctionDef)}
    return names


def boundaries() -> list[tuple[str, list[str]]]:
    """(boundary, the four cells) of each row of the table."""
    page = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    section = page.partition("\n## Boundaries\n")[2].partition("\n## ")[0]
    rows = [line[2:-2].split(" | ") for line in section.splitlines() if line.startswith("| ")]
    return [(boundary, cells) for boundary, *cells in rows[1:]]


def test_every_story_has_a_test() -> None:
    assert sorted({story for story, _ in told()}) == list(range(1, STORIES + 1))


@pytest.mark.parametrize(("story", "test"), told())
def test_the_test_that_tells_a_story_is_there(story: int, test: str) -> None:
    path, _, name = test.partition("::")
    assert name in names_in(ROOT / "tests" / path), f"story {story}"


@pytest.mark.parametrize(("boundary", "cells"), boundaries())
def test_each_question_at_a_boundary_has_a_test_that_is_there_or_was_not_tried(boundary: str, cells: list[str]) -> None:
    assert len(cells) == 4
    for cell in cells:
        tests = re.findall(r"`([^`]+)`", cell)
        assert (cell == "not tried" or cell.startswith("does not arise: ")) != bool(tests), cell
        for path, _, name in (test.partition("::") for test in tests):
            assert name in names_in(ROOT / "tests" / path), cell


@pytest.mark.parametrize("slo_ms", [10, TrafficSettings().budget_ms])
def test_at_least_ten_buckets_of_every_latency_lie_below_the_slo(slo_ms: int) -> None:
    """17. With the library's default buckets, 5 ms, 10 ms, 25 ms, 50 ms, a P99 of 30 ms could be anything."""
    registry = CollectorRegistry()
    WorkerMetrics(registry)
    TriggerMetrics(registry)
    GatewayMetrics(registry)
    seen = []
    for collector in list(registry._collector_to_names):
        bounds = getattr(collector, "_upper_bounds", None)
        if bounds is not None and collector._name.endswith("seconds"):
            seen.append(collector._name)
            assert sum(bound <= slo_ms / 1000 for bound in bounds) >= 10, collector._name
    assert len(seen) >= 5
