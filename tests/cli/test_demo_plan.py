"""The plan of the demo: what it makes of the calibration and of the machine's free cores."""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from rich.console import Console

from relaygr import machine
from relaygr.admission.latency import LatencyModel
from relaygr.demo.plan import LEAST_IMPRESSIONS, LONGEST_S, DemoPlan, PlanOverrides, plan_demo
from relaygr.demo.run import DemoOptions, run_demo
from relaygr.devbroker import LocalBroker
from relaygr.machine import Cores, CoreWatch
from relaygr.runtime.errors import RelayError
from relaygr.schemas.messages import LatencyCoefficients
from relaygr.settings import load_settings
from relaygr.worker.kv import KvDtype, KvGeometry, PrefixLayout
from tests.worlds.toy_rankers import MODULE, checked

LATENCY = LatencyModel(LatencyCoefficients(1000, 40, 0.005, 1000, 35, 0.004, 500, 20, 0.01, 20, 0.0001))
GEOMETRY = KvGeometry(num_layers=4, num_heads=3, attention_dim=32, hidden_dim=32, page_tokens=64, dtype=KvDtype.FLOAT32)
QUIET = Cores(usable=2, foreign=0.0)


def plan(cores: Cores = QUIET, duration_s: float = 24.0, overrides: PlanOverrides | None = None) -> DemoPlan:
    lengths = [600, 1000, 1400]
    layout = PrefixLayout(contextual_tokens=0, tokens_per_behaviour=1)
    return plan_demo(LATENCY, GEOMETRY, layout, lengths, 48, cores, duration_s, overrides or PlanOverrides())


def test_cores_that_others_use_lower_the_rate_and_leave_the_deadline() -> None:
    quiet, half = plan(), plan(Cores(usable=2, foreign=1.0))
    assert half.rate_per_s == pytest.approx(quiet.rate_per_s / 2, rel=0.02)
    assert replace(half, rate_per_s=0, duration_s=0, cores=QUIET) == replace(quiet, rate_per_s=0, duration_s=0)
    assert plan(Cores(usable=1, foreign=0.0)).rate_per_s == half.rate_per_s


@pytest.mark.parametrize(("usable", "workers"), [(1, 1), (2, 2), (64, 2)])
def test_there_are_two_workers_but_on_one_core_only_one(usable: int, workers: int) -> None:
    assert plan(Cores(usable, foreign=0.0)).workers == workers


def test_a_run_at_a_low_rate_lasts_until_there_is_enough_to_compare() -> None:
    slow = plan(Cores(usable=1, foreign=0.0))
    assert slow.rate_per_s * slow.duration_s == pytest.approx(LEAST_IMPRESSIONS, rel=0.02)
    assert plan(Cores(usable=2, foreign=2.0)).duration_s == LONGEST_S
    assert plan(duration_s=50.0).duration_s == 50.0
    assert plan(Cores(usable=1, foreign=0.0), overrides=PlanOverrides(duration_s=3.0)).duration_s == 3.0


def test_the_machine_is_busy_when_others_use_more_than_a_quarter_of_it() -> None:
    assert not Cores(usable=2, foreign=0.5).is_busy
    assert Cores(usable=2, foreign=0.6).is_busy


@pytest.mark.parametrize(("busy_s", "own_s", "foreign"), [(3.0, 2.0, 0.5), (2.0, 2.1, 0.0), (9.0, 0.0, 2.0)])
def test_the_watch_leaves_out_what_this_process_uses(
    monkeypatch: pytest.MonkeyPatch, busy_s: float, own_s: float, foreign: float
) -> None:
    """In two seconds on two cores. The clocks of the system differ a little, so a share stays within its bounds."""
    usable = frozenset((0, 1))
    busy, own, now = iter((10.0, 10.0 + busy_s)), iter((5.0, 5.0 + own_s)), iter((100.0, 102.0))
    monkeypatch.setattr(machine, "own_cores", lambda: usable)
    monkeypatch.setattr(machine, "usable_cores", lambda: 2)
    monkeypatch.setattr(machine, "busy_s", lambda cores: next(busy))
    monkeypatch.setattr(machine, "_own_s", lambda: next(own))
    monkeypatch.setattr(machine, "time", SimpleNamespace(monotonic=lambda: next(now)))
    with CoreWatch() as watch:
        pass
    assert watch.cores == Cores(2, foreign)


def test_the_time_of_the_processor_only_grows() -> None:
    usable = machine.own_cores()
    before = machine.busy_s(usable), machine.busy_s(), machine._own_s()
    after = machine.busy_s(usable), machine.busy_s(), machine._own_s()
    assert 0 < before[0] <= before[1] + 1e-6
    assert all(0 < earlier <= later for earlier, later in zip(before, after, strict=True))


@pytest.mark.parametrize("pool", [False, True])
@pytest.mark.parametrize(("broker", "cause"), [("127.0.0.1:1", "127.0.0.1:1"), ("banana", "banana")])
def test_a_wrong_broker_is_refused_before_anything_is_measured(
    broker: str, cause: str, pool: bool, tmp_path: Path
) -> None:
    said, kept = Console(file=io.StringIO()), tmp_path / "kept"
    options = DemoOptions(broker, PlanOverrides(), None, kept, True, False, False, pool)
    with pytest.raises(RelayError, match=cause):
        run_demo(said, load_settings(None, overrides=["connect_timeout_s=2"]), options)
    assert not kept.exists()


@pytest.mark.parametrize("pool", [False, True])
def test_a_cluster_that_nobody_may_confirm_is_refused_before_anything_is_measured(
    pool: bool, embedded_broker: LocalBroker, tmp_path: Path
) -> None:
    said, kept = Console(file=io.StringIO()), tmp_path / "kept"
    options = DemoOptions(embedded_broker.bootstrap, PlanOverrides(), None, kept, False, False, False, pool)
    with pytest.raises(RelayError, match=f"Nothing was created on {embedded_broker.bootstrap}. Run with --yes"):
        run_demo(said, load_settings(None, environment={}), options)
    assert not kept.exists()


@pytest.mark.slow
@pytest.mark.parametrize("setting", ["traffic.candidates=33", "traffic.suffix=17"])
def test_requests_that_are_larger_than_the_model_takes_are_refused_before_anything_is_measured(
    setting: str, embedded_broker: LocalBroker, tmp_path: Path
) -> None:
    """Each of them failed, and a demo on a busy machine ended with no gate that did."""
    said, model = Console(file=io.StringIO()), checked(tmp_path / "model")
    options = DemoOptions(embedded_broker.bootstrap, PlanOverrides(), model, None, True, False, False)
    fits = ["traffic.candidates=32", "traffic.suffix=16", f"worker.ranker_modules=[{MODULE}]"]
    with pytest.raises(
        RelayError, match=r"takes 32 candidates and a suffix of 16: lower traffic\.candidates or traffic"
    ):
        run_demo(said, load_settings(None, overrides=[*fits, setting], environment={}), options)
    assert "plan" not in said.file.getvalue()
