"""What the files of `compose/` say, and what our processes can export."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[2]
COMPOSE = ROOT / "compose"
COMPOSE_FILE = COMPOSE / "compose.yaml"
POOL_FILE = COMPOSE / "pool.yaml"
"""It is laid over compose.yaml."""
DOCKERFILE = COMPOSE / "Dockerfile"
ALERTS = COMPOSE / "helm" / "relaygr" / "files" / "alerts.yaml"
PROMETHEUS = COMPOSE / "prometheus" / "prometheus.yaml"
DASHBOARD = COMPOSE / "grafana" / "dashboards" / "relaygr.json"

_VARIABLE = re.compile(r"\$\{(\w+)\}")
_METRIC = re.compile(r"\b(?:relaygr|kafka)_[a-z_]+")
_LAYERS = ("streams", "workers", "cli")
_ENDINGS = {
    "Counter": ("_total",),
    "CounterMetricFamily": ("_total",),
    # The metadata of a counter of the cache.
    "_metric": ("_total",),
    "Gauge": ("",),
    "GaugeMetricFamily": ("",),
    "QuantilesMetricFamily": ("",),
    "Histogram": ("_bucket", "_sum", "_count"),
}
"""What makes a metric -> the endings that its name gets in a scrape."""
_MADE = re.compile(r"\b(" + "|".join(_ENDINGS) + r")\(\s*\"(\w+)\"")


def dot_env() -> dict[str, str]:
    """The lines of `.env`."""
    lines = (COMPOSE / ".env").read_text(encoding="utf-8").splitlines()
    return dict(line.split("=", 1) for line in lines if line and not line.startswith("#"))


@cache
def compose_file(path: Path = COMPOSE_FILE) -> Any:
    """The file with the variables of `.env` in it, read once. Raises KeyError for one that `.env` lacks."""
    given = dot_env()
    return yaml.safe_load(_VARIABLE.sub(lambda match: given[match[1]], path.read_text(encoding="utf-8")))


def services() -> dict[str, Any]:
    return dict(compose_file()["services"])


def our_services() -> dict[str, Any]:
    """Those that run our image."""
    return {name: service for name, service in services().items() if "build" in service}


def image_environment() -> dict[str, str]:
    """The `RELAYGR_` variables that the Dockerfile sets."""
    return dict(re.findall(r"^\s*(?:ENV )?(RELAYGR_\w+)=(\S+)", DOCKERFILE.read_text(encoding="utf-8"), re.MULTILINE))


def environment_of(name: str) -> dict[str, str]:
    """All that a process of this service sees."""
    return {**image_environment(), **services()[name].get("environment", {})}


def alert_expressions() -> dict[str, str]:
    """Alert -> its PromQL, with that of the recorded rates in place of their names."""
    rules = [rule for group in yaml.safe_load(ALERTS.read_text(encoding="utf-8"))["groups"] for rule in group["rules"]]
    recorded = {rule["record"]: rule["expr"] for rule in rules if "record" in rule}

    def written_out(expression: str) -> str:
        for name, rate in recorded.items():
            expression = expression.replace(name, f"({rate})")
        return expression

    return {rule["alert"]: written_out(rule["expr"]) for rule in rules if "alert" in rule}


def dashboard() -> Any:
    return json.loads(DASHBOARD.read_text(encoding="utf-8"))


def panels() -> list[Any]:
    """The panels that show something, rows left out."""
    return [panel for panel in dashboard()["panels"] if panel["type"] != "row"]


def panel_expressions() -> Iterator[tuple[str, str]]:
    """Title and PromQL of every query on the dashboard."""
    for panel in panels():
        for target in panel["targets"]:
            yield panel["title"], target["expr"]


def metrics_in(expression: str) -> set[str]:
    """Names of metrics of ours in PromQL, without what is inside quotes."""
    return set(_METRIC.findall(re.sub(r'"[^"]*"', '""', expression)))


@cache
def exported_metrics() -> set[str]:
    """Every name that a scrape of our processes can hold, read off the sources.

    A name that is put together at run time would be missed, and the tests with it fail: write it out.
    """
    sources = (path.read_text(encoding="utf-8") for layer in _LAYERS for path in (ROOT / layer).rglob("*.py"))
    made = {match.groups() for source in sources for match in _MADE.finditer(source)}
    return {_base(maker, name) + ending for maker, name in made for ending in _ENDINGS[maker]}


def _base(maker: str, name: str) -> str:
    return name.removesuffix("_total") if "_total" in _ENDINGS[maker] else name
