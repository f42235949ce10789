"""The demo of several scenarios: its settings, and its gates."""

from __future__ import annotations

from dataclasses import replace
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from relaygr.admission.corrector import PredictionQuality
from relaygr.admission.latency import Stage
from relaygr.admission.scenarios import ScenarioSettings
from relaygr.demo.scenarios import ScenarioDemo, ScenarioRun, gates, print_scenarios
from relaygr.demo.summary import PredictionFigures, summarise
from relaygr.processes import write_config
from relaygr.settings import Settings, load
from relaygr.traffic.records import LOST
from tests.cli.test_demo_summary import record

REFUSED = "failed: unknown_scenario"


def a_run(name: str, prefix: str = "shop", revision: str = "m1", **changes: object) -> ScenarioRun:
    run = summarise([record(number) for number in range(10)], 0.0)
    whole = ScenarioRun(name, ScenarioSettings(), prefix, run, frozenset({revision}), jobs=5, events=9, lead_ms=80)
    return replace(whole, **changes)  # type: ignore[arg-type]


RUNS = (a_run("home"), a_run("search"), a_run("ads", "shop-ads", "m2"))
LOSING = summarise([record(0), record(1, status=LOST, latency_us=None, late=True, path=None)], 0.0)


def failed(runs: tuple[ScenarioRun, ...], refusal: str = REFUSED) -> list[str]:
    return [gate.name for gate in gates(runs, refusal) if not gate.passed]


def test_scenarios_that_ran_as_they_should_pass_every_gate() -> None:
    assert failed(RUNS) == []


@pytest.mark.parametrize(
    ("changed", "name"),
    [
        (a_run("ads", "shop-ads", "m1"), "one model for each set of topics"),
        (a_run("ads", "shop-ads", "m2", revisions=frozenset({"m2", "m3"})), "one model for each set of topics"),
        (a_run("ads", "shop-ads", "m2", jobs=0), "each scenario got pre-infer jobs"),
        (a_run("ads", "shop-ads", "m2", run=LOSING), "no request lost"),
    ],
)
def test_a_gate_fails_for_its_reason(changed: ScenarioRun, name: str) -> None:
    assert name in failed((*RUNS[:2], changed))


def test_an_unknown_scenario_that_is_served_fails_a_gate() -> None:
    assert failed(RUNS, "ranked: no reason") == ["an unknown scenario is refused"]


def test_a_failed_gate_of_a_machine_that_was_slower_than_when_it_was_measured_says_what_to_do() -> None:
    slow = PredictionFigures({Stage.PRE: PredictionQuality(2.4, 0.5, 1.0, 1.5)})
    runs = (*RUNS[:2], a_run("ads", "shop-ads", "m2", jobs=0, run=replace(RUNS[2].run, predictions=slow)))
    shown = StringIO()
    print_scenarios(Console(file=shown, width=200), ScenarioDemo(runs, gates(runs, REFUSED)))
    assert "pre-infer took 2.40 times its calibrated time" in shown.getvalue()


def test_the_children_read_the_scenarios_that_the_demo_writes(tmp_path: Path) -> None:
    scenarios = {
        "home": ScenarioSettings(share=2, budget_ms=40),
        "ads": ScenarioSettings(topic_prefix="shop-ads", model=tmp_path, budget_ms=25),
    }
    written = Settings(topic_prefix="shop", scenarios=scenarios)
    file = tmp_path / "settings.yaml"
    write_config(written, file)
    assert load(file, {}).settings.scenarios == scenarios
    ads = load(file, {}, ["scenario=ads"]).settings
    assert (ads.topic_prefix, ads.history_prefix, ads.traffic.budget_ms) == ("shop-ads", "shop", 25)
    # A process that is started from the settings of another one of the same scenario has the same settings.
    write_config(ads, file)
    assert load(file, {}).settings == ads
