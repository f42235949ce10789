"""The dashboard and the alerts ask for metrics that our processes export."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.worlds.compose import (
    ALERTS,
    COMPOSE,
    PROMETHEUS,
    ROOT,
    alert_expressions,
    dashboard,
    exported_metrics,
    metrics_in,
    our_services,
    panel_expressions,
    panels,
)

EXPORTED = exported_metrics()


def test_the_scan_finds_metrics_of_every_kind() -> None:
    assert {
        "relaygr_worker_ranked_total",
        "relaygr_worker_ranking_seconds_bucket",
        "relaygr_cache_bytes",
        "relaygr_cache_misses_total",
        "relaygr_trigger_decisions_total",
        "relaygr_gateway_lost_requests_total",
        "relaygr_dead_letters_total",
        "kafka_consumergroup_group_max_lag_seconds",
        "relaygr_lag_owner_split_partitions",
    } <= EXPORTED


@pytest.mark.parametrize(("title", "expression"), list(panel_expressions()))
def test_a_panel_shows_what_is_exported(title: str, expression: str) -> None:
    assert metrics_in(expression) - EXPORTED == set(), title


@pytest.mark.parametrize(("alert", "expression"), list(alert_expressions().items()))
def test_an_alert_watches_what_is_exported(alert: str, expression: str) -> None:
    used = metrics_in(expression)
    assert used - EXPORTED == set(), alert
    assert used or "up{" in expression


def test_the_dashboard_covers_what_an_operator_asks_first() -> None:
    asked = set().union(*(metrics_in(expression) for _, expression in panel_expressions()))
    assert {
        "relaygr_worker_ranked_total",
        "relaygr_gateway_latency_seconds_bucket",
        "relaygr_cache_hits_total",
        "relaygr_cache_bytes",
        "relaygr_trigger_decisions_total",
        "kafka_consumergroup_group_max_lag_seconds",
        "relaygr_worker_device_seconds_total",
        "relaygr_lag_owner_split_partitions",
        "relaygr_dead_letters_total",
    } <= asked


def test_panels_have_ids_of_their_own_and_do_not_overlap() -> None:
    everything = dashboard()["panels"]
    assert len({panel["id"] for panel in everything}) == len(everything)
    taken: set[tuple[int, int]] = set()
    for panel in everything:
        at = panel["gridPos"]
        cells = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
        assert not cells & taken, panel["title"]
        assert max(x for x, _ in cells) < 24
        taken |= cells


def sources(part: Any) -> Iterator[Any]:
    """Every data source that a part of the dashboard names: of its panels, queries and variables."""
    if isinstance(part, dict):
        for key, value in part.items():
            if key == "datasource":
                yield value
            else:
                yield from sources(value)
    elif isinstance(part, list):
        for value in part:
            yield from sources(value)


def test_the_dashboard_takes_any_prometheus() -> None:
    """Each Grafana gives its sources ids of its own, so only the variable may name one."""
    variables = {variable["name"]: variable for variable in dashboard()["templating"]["list"]}
    chosen = variables["datasource"]
    assert (chosen["type"], chosen["query"], chosen["current"]) == ("datasource", "prometheus", {})
    found = list(sources(dashboard()))
    assert len(found) > len(panels())
    assert all(source == {"type": "prometheus", "uid": "${datasource}"} for source in found)
    assert all(panel["datasource"] for panel in panels())
    # The variable comes first, since the query of another one needs it.
    assert next(iter(variables)) == "datasource"


def test_the_dashboard_can_be_narrowed_to_one_of_several_relays() -> None:
    """Grafana adds the filters of such a variable, as `namespace = prod`, to each query of the data source."""
    [narrowing] = [each for each in dashboard()["templating"]["list"] if each["type"] == "adhoc"]
    assert narrowing["filters"] == []


def test_compose_provides_a_prometheus_for_the_dashboard() -> None:
    given = yaml.safe_load((COMPOSE / "grafana/provisioning/datasources/prometheus.yaml").read_text(encoding="utf-8"))
    assert [(source["type"], source["isDefault"]) for source in given["datasources"]] == [("prometheus", True)]


def test_the_queries_of_a_panel_have_names_of_their_own() -> None:
    for panel in panels():
        references = [target["refId"] for target in panel["targets"]]
        assert len(set(references)) == len(references)


def test_prometheus_scrapes_every_process_that_stays() -> None:
    jobs = yaml.safe_load(PROMETHEUS.read_text(encoding="utf-8"))["scrape_configs"]
    names = {name for job in jobs for discovery in job["dns_sd_configs"] for name in discovery["names"]}
    assert names == set(our_services()) - {"topics", "model", "ui"}


def test_prometheus_reads_the_rules_of_the_chart_in_its_container_as_in_the_repository() -> None:
    [rules] = yaml.safe_load(PROMETHEUS.read_text(encoding="utf-8"))["rule_files"]
    assert (PROMETHEUS.parent / rules).resolve() == ALERTS
    service = yaml.safe_load((COMPOSE / "compose.yaml").read_text(encoding="utf-8"))["services"]["prometheus"]
    mounted = {target: COMPOSE / source for source, target, *_ in (each.split(":") for each in service["volumes"])}
    in_container = Path(os.path.normpath(Path("/etc/prometheus") / rules))
    assert (mounted[str(in_container.parent)] / in_container.name).resolve() == ALERTS


def alerts() -> list[Any]:
    groups = yaml.safe_load(ALERTS.read_text(encoding="utf-8"))["groups"]
    return [rule for group in groups for rule in group["rules"] if "alert" in rule]


def test_every_alert_says_how_grave_it_is_and_what_happened() -> None:
    for rule in alerts():
        assert rule["labels"]["severity"] in {"warning", "critical"}, rule["alert"]
        assert rule["annotations"]["summary"], rule["alert"]


def test_every_alert_has_a_runbook_that_says_what_it_means_what_to_look_at_and_what_to_do() -> None:
    page = (ROOT / "docs" / "alerts.md").read_text(encoding="utf-8")
    sections = dict(re.findall(r"^### (\w+)\n\n(.*?)(?=\n##|\Z)", page, re.DOTALL | re.MULTILINE))
    assert list(sections) == [rule["alert"] for rule in alerts()]
    for rule in alerts():
        # Forges and the site both make the anchor of a heading of one word by writing it small.
        assert rule["annotations"]["runbook_url"] == f"docs/alerts.md#{rule['alert'].lower()}"
        assert re.findall(r"^\* \*\*(.*?):\*\*", sections[rule["alert"]], re.MULTILINE) == ["Means", "Look at", "Do"]
