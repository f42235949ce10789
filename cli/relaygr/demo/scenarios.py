"""`relaygr demo --scenarios`: three scenarios at the same time, each with figures of its own.

    home, search   the same topics, trigger, worker and model; other time limits, candidates and shares
    ads            topics, trigger, worker and a smaller model of its own, and the same histories

All processes read the same entries of `scenarios`, and the setting `scenario` says which of them is theirs.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

from rich.console import Console
from rich.table import Table

from relaygr.admission.scenarios import ScenarioSettings
from relaygr.client import RelayClient
from relaygr.demo.board import print_gates, print_plan
from relaygr.demo.plan import DemoPlan, PlanOverrides
from relaygr.demo.prepare import CALIBRATION_FILE, make_model, plan_for_this_machine, planned_settings, settle_s
from relaygr.demo.stack import DemoStack
from relaygr.demo.summary import LEAST_RANKED_SHARE, Gate, RunSummary, summarise
from relaygr.devbroker import LocalBroker
from relaygr.schemas.messages import FailureReason
from relaygr.settings import Settings
from relaygr.traffic.population import Population
from relaygr.traffic.records import read_records

SHARES = {"home": 2.0, "search": 1.0, "ads": 1.0}
"""Of the budgets and of the impressions, where scenarios share a worker."""
FEWER_CANDIDATES = 4
MORE_CANDIDATES = 2
TIGHTER = 0.9
"""The time limit of the search, relative to that of the home feed."""
_SMALL_LAYERS = 2
_UNKNOWN = "unheard-of"
_UNKNOWN_BUDGET_MS = 10_000


@dataclass(frozen=True, slots=True)
class ScenarioRun:
    """One scenario's settings and what became of its requests."""

    name: str
    settings: ScenarioSettings
    topic_prefix: str
    run: RunSummary
    revisions: frozenset[str]
    """Of the models that ranked its requests."""
    jobs: int
    events: int
    lead_ms: float
    """The low quantile of the measured lead times; 0: too few."""


@dataclass(frozen=True, slots=True)
class ScenarioDemo:
    """The scenarios that ran, and the gates."""

    scenarios: tuple[ScenarioRun, ...]
    gates: tuple[Gate, ...]

    @property
    def passed(self) -> bool:
        return not any(gate.failed for gate in self.gates)


@dataclass(frozen=True, slots=True)
class PlannedDeployment:
    """The model of one set of workers, and the plan for it."""

    model: Path
    folder: Path
    plan: DemoPlan


def plan_deployments(
    console: Console, folder: Path, settings: Settings, population: Population, overrides: PlanOverrides
) -> Mapping[str, PlannedDeployment]:
    """Makes and calibrates both models: `home`, which the search uses too, and `ads`."""
    deployments = {}
    for name, layers in (("home", None), ("ads", _SMALL_LAYERS)):
        own = folder / name
        own.mkdir()
        traffic = settings.traffic
        if name == "ads":
            traffic = traffic.model_copy(update={"candidates": MORE_CANDIDATES * traffic.candidates})
        of_deployment = settings.model_copy(update={"traffic": traffic})
        model = make_model(own / "model", of_deployment, population, layers)
        console.print(f"model      of {name}")
        plan = plan_for_this_machine(console, own / CALIBRATION_FILE, model, of_deployment, population, overrides)
        shutil.copy(own / CALIBRATION_FILE, model)
        # One worker for each model, and half of the rate.
        plan = replace(plan, workers=1, rate_per_s=round(plan.rate_per_s / 2, 1))
        print_plan(console, plan, population.size)
        deployments[name] = PlannedDeployment(model, own, plan)
    return deployments


def scenarios_of(
    settings: Settings, deployments: Mapping[str, PlannedDeployment], prefix: str
) -> dict[str, ScenarioSettings]:
    """The entries of `scenarios`, as a user would write them."""
    home, ads, candidates = deployments["home"].plan, deployments["ads"], settings.traffic.candidates
    return {
        "home": ScenarioSettings(share=SHARES["home"], budget_ms=home.budget_ms, candidates=candidates),
        "search": ScenarioSettings(
            share=SHARES["search"],
            budget_ms=max(1, round(TIGHTER * home.budget_ms)),
            candidates=max(1, candidates // FEWER_CANDIDATES),
        ),
        "ads": ScenarioSettings(
            share=SHARES["ads"],
            budget_ms=ads.plan.budget_ms,
            candidates=MORE_CANDIDATES * candidates,
            topic_prefix=f"{prefix}-ads",
            model=ads.model,
        ),
    }


def run_scenarios(
    console: Console,
    settings: Settings,
    broker: LocalBroker,
    prefix: str,
    folder: Path,
    population: Population,
    deployments: Mapping[str, PlannedDeployment],
) -> ScenarioDemo:
    """Starts the processes of both deployments, plays all scenarios at the same time, and prints the figures."""
    scenarios = scenarios_of(settings, deployments, prefix)
    planned = {
        name: _settings_of(name, settings, scenarios, deployment, broker, population, prefix)
        for name, deployment in deployments.items()
    }
    records = {name: folder / f"{name}.jsonl" for name in scenarios}
    with ExitStack() as cleanup:
        stacks = {
            name: cleanup.enter_context(DemoStack(console, folder, broker, own, relay=True, workers=1, observed=False))
            for name, own in planned.items()
        }
        of = {name: stacks.get(name, stacks["home"]) for name in scenarios}
        console.print(f"playing    {', '.join(scenarios)} at the same time")
        gateways = {
            name: of[name].begin(records[name], _traffic_of(name, deployments, population, planned))
            for name in scenarios
        }
        while not all(of[name].has_ended(gateway) for name, gateway in gateways.items()):
            time.sleep(0.2)
        refusal = _ask_for_an_unknown_scenario(planned["home"], population)
        runs = tuple(
            _run_of(name, scenario, scenario.topic_prefix or prefix, records[name], of[name])
            for name, scenario in scenarios.items()
        )
    is_busy = any(deployment.plan.cores.is_busy for deployment in deployments.values())
    result = ScenarioDemo(runs, gates(runs, refusal, is_busy))
    print_scenarios(console, result)
    return result


def _settings_of(
    name: str,
    settings: Settings,
    scenarios: dict[str, ScenarioSettings],
    deployment: PlannedDeployment,
    broker: LocalBroker,
    population: Population,
    prefix: str,
) -> Settings:
    planned = planned_settings(
        settings, deployment.plan, deployment.model, deployment.folder / CALIBRATION_FILE, broker, population.size
    )
    topics = scenarios[name].topic_prefix or prefix
    # The histories of all scenarios are the same ones, and no gateway may be ahead of another.
    traffic = planned.traffic.model_copy(update={"growth": 0})
    return planned.model_copy(
        update={
            "scenario": name,
            "scenarios": scenarios,
            "topic_prefix": topics,
            "group_prefix": topics,
            "history_prefix": prefix,
            "traffic": traffic,
        }
    )


def _traffic_of(
    name: str, deployments: Mapping[str, PlannedDeployment], population: Population, planned: Mapping[str, Settings]
) -> list[str]:
    deployment = deployments.get(name, deployments["home"])
    together = [other for other in SHARES if deployments.get(other, deployments["home"]) is deployment]
    part = SHARES[name] / sum(SHARES[other] for other in together)
    pause_s = settle_s(planned.get(name, planned["home"]), deployment.plan, population.size)
    return [
        f"scenario={name}",
        f"traffic.gateway_id=gateway-{name}",
        f"traffic.rate_per_s={max(0.5, part * deployment.plan.rate_per_s):.2f}",
        f"traffic.duration_s={deployments['home'].plan.duration_s}",
        f"traffic.settle_s={pause_s}",
    ]


def _ask_for_an_unknown_scenario(settings: Settings, population: Population) -> str:
    """How a request ends that names a scenario which no settings have."""
    with RelayClient(settings, "gateway-unknown", settings.client) as client:
        user = population.user_id(0)
        outcome = client.rank(user, population.items[:1], budget_ms=_UNKNOWN_BUDGET_MS, scenario=_UNKNOWN)
    return f"{outcome.status.value}: {outcome.reason.value if outcome.reason is not None else 'no reason'}"


def _run_of(name: str, scenario: ScenarioSettings, prefix: str, records: Path, stack: DemoStack) -> ScenarioRun:
    read = list(read_records(records))
    workers, trigger = stack.worker_readings(), stack.trigger_reading()
    events = "relaygr_trigger_scenario_events_total"
    return ScenarioRun(
        name,
        scenario,
        prefix,
        summarise(read, 0.0, predictions=stack.predictions()),
        frozenset(record.model_revision for record in read if record.model_revision is not None),
        jobs=int(trigger.total(events, scenario=name, admitted="yes")),
        events=int(trigger.total(events, scenario=name)),
        lead_ms=1000
        * sum(reading.total("relaygr_worker_lead_seconds", scenario=name, quantile="0.1") for reading in workers),
    )


def gates(runs: tuple[ScenarioRun, ...], refusal: str, busy: bool = False) -> tuple[Gate, ...]:
    """The conditions that the demo must fulfil. `busy`: those that depend on the machine's speed are not judged."""
    models: dict[str, frozenset[str]] = {}
    for each in runs:
        models[each.topic_prefix] = models.get(each.topic_prefix, frozenset()) | each.revisions
    distinct = frozenset[str]().union(*models.values())
    return (
        Gate("no request lost", not any(each.run.lost for each in runs), str(sum(each.run.lost for each in runs))),
        *(
            Gate(
                f"{each.name}: at least {LEAST_RANKED_SHARE:.0%} ranked",
                each.run.share(each.run.ranked) >= LEAST_RANKED_SHARE,
                f"{each.run.share(each.run.ranked):.1%}",
                depends_on_speed=True,
                is_busy=busy,
            )
            for each in runs
        ),
        Gate(
            "each scenario got pre-infer jobs",
            all(each.jobs for each in runs),
            ", ".join(str(each.jobs) for each in runs),
            depends_on_speed=True,
            is_busy=busy,
        ),
        Gate(
            "one model for each set of topics",
            len(distinct) == len(models) and all(len(found) == 1 for found in models.values()),
            f"{len(distinct)} models on {len(models)} sets of topics",
        ),
        Gate(
            "an unknown scenario is refused",
            refusal == f"failed: {FailureReason.UNKNOWN_SCENARIO.value}",
            refusal,
        ),
    )


def print_scenarios(console: Console, result: ScenarioDemo) -> None:
    """Prints the figures, one column for each scenario, and the gates."""
    found = result.scenarios
    table = Table(title="The scenarios, at the same time", title_justify="left")
    table.add_column("")
    for each in found:
        table.add_column(each.name, justify="right")
    table.add_row("topics", *(f"{each.topic_prefix}.*" for each in found))
    table.add_row("time limit", *(f"{each.settings.budget_ms} ms" for each in found))
    table.add_row("candidates", *(str(each.settings.candidates) for each in found))
    table.add_row("share", *(f"{each.settings.share:g}" for each in found))
    table.add_section()
    table.add_row("requests offered", *(str(each.run.offered) for each in found))
    table.add_row("late, truncated, failed or expired", *(f"{each.run.whole.late_share:.1%}" for each in found))
    table.add_row("P50", *(f"{each.run.whole.p50_ms:.1f} ms" for each in found))
    table.add_row("P99", *(f"{each.run.whole.p99_ms:.1f} ms" for each in found))
    table.add_section()
    for ending in sorted({ending for each in found for ending in each.run.endings}):
        table.add_row(ending, *(str(each.run.endings.get(ending, 0)) for each in found))
    table.add_section()
    table.add_row("jobs of events", *(f"{each.jobs} of {each.events}" for each in found))
    table.add_row("lead time, P10", *(f"{each.lead_ms:.0f} ms" if each.lead_ms else "-" for each in found))
    console.print()
    console.print(table)
    print_gates(console, result.gates, [each.run for each in found])
