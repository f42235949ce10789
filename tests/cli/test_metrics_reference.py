"""The page of metrics is of the code, is complete, and promtool finds nothing to say about any metric."""

from __future__ import annotations

import subprocess
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, Metric
from prometheus_client.exposition import generate_latest
from prometheus_client.registry import Collector

from relaygr.metrics_reference import MetricDefinition, metrics_by_process, reference
from tests.promised import program
from tests.worlds.compose import exported_metrics

PAGE = Path(__file__).parents[2] / "docs" / "metrics.md"
ENDINGS = {"histogram": ("_bucket", "_sum", "_count")}
SAMPLES = {
    "histogram": (("_bucket", {"le": "+Inf"}), ("_sum", {}), ("_count", {})),
    "summary": (("", {"quantile": "0.5"}),),
}
BY_PROCESS = metrics_by_process()


class Defined(Collector):
    """One series of each metric, so that also those are judged which a healthy process never shows."""

    def __init__(self, definitions: Iterable[MetricDefinition]) -> None:
        self._definitions = definitions

    def collect(self) -> Iterator[Metric]:
        for each in self._definitions:
            metric = Metric(
                each.name.removesuffix("_total") if each.kind == "counter" else each.name, each.meaning, each.kind
            )
            for ending, labels in SAMPLES.get(each.kind, (("", {}),)):
                metric.add_sample(each.name + ending, {**dict.fromkeys(each.labels, "x"), **labels}, 1)
            yield metric


def complaints(definitions: Iterable[MetricDefinition]) -> str:
    """What `promtool check metrics` says about a page with these metrics."""
    promtool = program("promtool")
    registry = CollectorRegistry()
    registry.register(Defined(definitions))
    checked = subprocess.run(
        [promtool, "check", "metrics"], input=generate_latest(registry), capture_output=True, timeout=240, check=False
    )
    assert checked.returncode in (0, 3), checked.stderr
    return (checked.stdout + checked.stderr).decode()


def test_the_committed_page_is_what_the_metrics_generate() -> None:
    assert PAGE.read_text(encoding="utf-8") == reference(), "run: python -m relaygr.metrics_reference > docs/metrics.md"


def test_the_page_has_every_metric_of_the_sources_and_each_once() -> None:
    definitions = [each for section in BY_PROCESS.values() for each in section]
    names = [each.name + ending for each in definitions for ending in ENDINGS.get(each.kind, ("",))]
    assert sorted(names) == sorted(exported_metrics())
    assert all(each.meaning for each in definitions)


@pytest.mark.parametrize("process", BY_PROCESS)
def test_promtool_has_nothing_to_say_about_a_metric(process: str) -> None:
    assert complaints(BY_PROCESS[process]) == ""


def test_promtool_would_refuse_a_gauge_by_quantile_or_a_name_with_another_unit() -> None:
    """Our quantiles were gauges."""
    assert "quantile" in complaints([MetricDefinition("relaygr_lead_seconds", "gauge", ("quantile",), "Lead time")])
    assert "seconds" in complaints([MetricDefinition("relaygr_lead_milliseconds", "gauge", (), "Lead time")])
