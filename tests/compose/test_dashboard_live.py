"""Every query of the dashboard and every rule, asked of a Prometheus that scrapes a relay under traffic."""

from __future__ import annotations

import os
import signal
import subprocess
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass

import pytest

from relaygr.devbroker import LocalBroker
from relaygr.metrics_reference import metrics_by_process
from relaygr.schemas.topics import Topic
from tests.leftovers import owned_by_a_fixture
from tests.promised import program
from tests.waiting import until
from tests.worlds.compose import ALERTS, panel_expressions
from tests.worlds.pair import await_pair
from tests.worlds.prometheus import LivePrometheus, live_prometheus
from tests.worlds.relay import START_TIMEOUT_S, RawGateway, Relay, make_model, own_topics

pytestmark = [pytest.mark.kafka, pytest.mark.outage]

VARIABLES = {"$__rate_interval": "30s", "$worker": ".*", "$deadline_ms": "2000"}
"""What Grafana puts into a query."""
TRAFFIC = {
    "rate_per_s": 20,
    "users": 24,
    "items": 500,
    "history_median": 200,
    "history_max": 512,
    "candidates": 32,
    "suffix": 8,
    "budget_ms": 2000,
    "settle_s": 0,
}
EMPTY = {
    'sum by (outcome) (rate(relaygr_worker_unranked_total{instance=~"$worker"}[$__rate_interval]))': (
        "every request may be ranked"
    ),
    'sum by (reason) (rate(relaygr_cache_no_room_total{instance=~"$worker"}[$__rate_interval]))': (
        "leased and pinned prefixes may leave room for each new one"
    ),
    'sum by (reason) (rate(relaygr_cache_reloads_declined_total{instance=~"$worker"}[$__rate_interval]))': (
        "a reload is declined only if it is slower than the computation, or if too many wait"
    ),
    'sum by (reason) (rate(relaygr_cache_preinfers_wasted_total{instance=~"$worker"}[$__rate_interval]))': (
        "a ranking request may follow each pre-infer job"
    ),
}
"""Query -> why it may have no series in a healthy relay. All others must have something to draw."""


ALL = "Gateways, triggers and workers"
SECTIONS = {
    "worker": (ALL, "Workers", "The supervisor of a worker with a standby"),
    "trigger": (ALL, "Triggers"),
    "lag": ("The lag monitor",),
    "traffic": (ALL, "Gateways"),
    "gateway": (ALL, "Gateways", "The HTTP gateway"),
}
"""Process -> the sections of docs/metrics.md that have its metrics."""


@dataclass(frozen=True)
class Watched:
    """A relay, and the Prometheus that scrapes it. `ports`: of the metrics, by job."""

    prometheus: LivePrometheus
    ports: dict[str, int]


@pytest.fixture(scope="module")
def watched(real_broker: LocalBroker, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Watched]:
    """It scrapes a worker whose standby has taken over, a trigger, the lag monitor, traffic and the HTTP gateway."""
    program("prometheus")
    folder = tmp_path_factory.mktemp("dashboard")
    model = make_model(folder / "model", contextual_features=())
    with ExitStack() as stack:
        kafka = stack.enter_context(own_topics(real_broker))
        # HBM holds a few users' prefixes, so that some are spilled and reloaded.
        relay = stack.enter_context(Relay(kafka, folder / "relay", model))
        worker = relay.start_worker(command=["worker", "--standby"])
        trigger = relay.start_trigger()
        lag = relay.processes.start("lag", ["lag", "serve"], "lag")
        gateway = relay.processes.start("gateway", ["gateway"], "gateway", ["gateway.listen_port=0"])
        relay.await_ready(worker, trigger, lag, gateway)
        # At its end traffic waits so long for the answers that died with the worker.
        settings = ["client.lost_after_ms=5000", *(f"traffic.{name}={value}" for name, value in TRAFFIC.items())]
        traffic = relay.processes.start("traffic", ["traffic"], "traffic", settings)
        stack.enter_context(owned_by_a_fixture(relay.process_ids))
        children = (worker, trigger, lag, traffic, gateway)
        targets = {child.name.partition("-")[0]: {child.name: child.port} for child in children}
        live = stack.enter_context(live_prometheus(folder, targets, [ALERTS]))
        # What healthy processes never show: a dead letter, and a successor.
        raw_gateway = stack.enter_context(closing(RawGateway(kafka)))
        raw_gateway.send(Topic.RANKING, b"no request")
        for needed in ("relaygr_dead_letters_total", 'relaygr_cache_entries{tier="dram"} > 0'):
            until(lambda needed=needed: live.shows(needed), needed)
        os.kill(await_pair(worker.port, START_TIMEOUT_S).active, signal.SIGKILL)
        # The successor counts its own.
        raw_gateway.send(Topic.RANKING, b"no request either")
        yield Watched(live, {job: port for job, instances in targets.items() for port in instances.values()})


@pytest.fixture(scope="module")
def prometheus(watched: Watched) -> LivePrometheus:
    return watched.prometheus


def test_every_panel_has_something_to_draw_or_a_reason_for_not(prometheus: LivePrometheus) -> None:
    waiting = {expression: title for title, expression in panel_expressions()}

    def has_points(expression: str) -> bool:
        for name, value in VARIABLES.items():
            expression = expression.replace(name, value)
        return prometheus.shows(expression)

    def empty() -> dict[str, str]:
        for expression in [each for each in waiting if has_points(each) or each in EMPTY]:
            del waiting[expression]
        return waiting

    with suppress(AssertionError):
        until(lambda: not empty(), "every panel has something to draw")
    assert waiting == {}, "these queries of panels have no points"


def test_every_rule_is_evaluated(prometheus: LivePrometheus) -> None:
    until(lambda: all(rule["health"] != "unknown" for rule in prometheus.rules()), "every rule was evaluated")
    rules = prometheus.rules()
    assert rules
    assert {rule["name"]: rule["lastError"] for rule in rules if rule["health"] != "ok"} == {}


@pytest.mark.parametrize("job", SECTIONS)
def test_a_process_serves_metrics_of_its_page_that_promtool_accepts(watched: Watched, job: str) -> None:
    with urllib.request.urlopen(f"http://127.0.0.1:{watched.ports[job]}/metrics", timeout=10) as answer:
        page = answer.read().decode()
    kinds = dict(line.split()[2:4] for line in page.splitlines() if line.startswith("# TYPE "))
    sections = metrics_by_process()
    documented = {each.name: each.kind for section in SECTIONS[job] for each in sections[section]}
    own = {name: kind for name, kind in kinds.items() if name.startswith(("relaygr_", "kafka_"))}
    assert len(own) > 5
    assert own.items() <= documented.items()
    promtool = program("promtool")
    checked = subprocess.run(
        [promtool, "check", "metrics"], input=page, capture_output=True, text=True, timeout=240, check=False
    )
    assert (checked.returncode, checked.stdout, checked.stderr) == (0, "", "")


def test_only_queries_of_the_dashboard_are_explained() -> None:
    assert set(EMPTY) <= {expression for _, expression in panel_expressions()}
