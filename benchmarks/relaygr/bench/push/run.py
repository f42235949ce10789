"""One run of the relay with a push in its middle, and the figures of each phase."""

from __future__ import annotations

import math
import os
import signal
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from rich.console import Console
from rich.table import Table

from relaygr.bench.rows import append_rows, machine, now
from relaygr.cli.demo import DEFAULTS
from relaygr.demo.plan import PlanOverrides
from relaygr.demo.prepare import (
    CALIBRATION_FILE,
    make_model,
    plan_for_this_machine,
    planned_settings,
    settle_s,
)
from relaygr.demo.stack import DemoStack
from relaygr.demo.summary import COLD_SHARE, latency_summary
from relaygr.devbroker import local_broker
from relaygr.settings import load_settings
from relaygr.traffic.population import population_of
from relaygr.traffic.records import ImpressionRecord, read_records
from relaygr.traffic.schedule import impressions
from relaygr.worker.calibration import load_calibration, save_calibration
from relaygr.worker.model.checkpoint import load_checkpoint, random_checkpoint, save_checkpoint
from relaygr.worker.model.inputs.lookup import IDS_TENSOR

PUSH_AT_SHARE = 0.5
RELOAD_S = 5.0
"""Time for loading a checkpoint and warming it up, on a machine that serves meanwhile."""


@dataclass(frozen=True, slots=True)
class PhaseFigures:
    """The requests of one phase."""

    phase: str
    offered: int
    late_share: float
    """Requests without an untruncated answer within the deadline, as a share."""
    offered_p99_ms: float
    """The P99 over all offered requests. One without an untruncated answer counts as infinite."""
    new_revision: int
    """Requests that the new revision ranked."""


def phases(
    records: Sequence[ImpressionRecord], at_s: Sequence[float], pushed_s: float, push_ends_s: float, new_revision: str
) -> list[PhaseFigures]:
    """Before (without the cold start), during and after the push. `at_s`: the scheduled times of the requests, by the
    numbers of the impressions.
    """
    bounds = {
        "before": (COLD_SHARE * pushed_s, pushed_s),
        "push": (pushed_s, push_ends_s),
        "after": (push_ends_s, math.inf),
    }
    found = []
    for phase, (begin_s, end_s) in bounds.items():
        own = [record for record in records if begin_s <= at_s[record.number] < end_s]
        summary = latency_summary(own)
        ranked = sum(record.model_revision == new_revision for record in own)
        found.append(PhaseFigures(phase, summary.offered, summary.late_share, summary.offered_p99_ms, ranked))
    return found


def measure_push(seconds: float, spread_s: float, warm_up: bool, broker: str, out: Path) -> None:
    """Measures one push, prints the figures and appends them to `out`."""
    console = Console(highlight=False)
    settings = load_settings(overrides=[*DEFAULTS, f"traffic.duration_s={seconds}"])
    population = population_of(settings.traffic)
    with tempfile.TemporaryDirectory(prefix="relaygr-push-") as name, local_broker(broker) as started:
        folder = Path(name)
        console.print(f"broker: {started.what}", soft_wrap=True)
        model = make_model(folder / "model", settings, population)
        plan = plan_for_this_machine(console, model, model, settings, population, PlanOverrides(duration_s=seconds))
        planned = planned_settings(settings, plan, model, model, started, population.size)
        worker = {"reload_spread_s": spread_s, **({} if warm_up else {"warm_up_users": 0})}
        own = {"topic_prefix": "push", "group_prefix": "push", "worker": planned.worker.model_copy(update=worker)}
        planned = planned.model_copy(update=own)
        warming_s = settle_s(planned, plan, population.size)
        pushed_s = PUSH_AT_SHARE * seconds
        push_ends_s = pushed_s + spread_s + RELOAD_S + warming_s
        records = folder / "records.jsonl"
        revisions: list[str] = []
        with DemoStack(console, folder, started, planned, relay=True, workers=plan.workers, observed=False) as stack:
            begun_s: list[float] = []

            def watch() -> None:
                if not begun_s and records.exists() and records.stat().st_size:
                    begun_s.append(time.monotonic())
                if begun_s and not revisions and time.monotonic() - begun_s[0] >= pushed_s:
                    revisions.append(replace_model(model, settings.traffic.seed + 1))
                    for process_id, role in stack.roles().items():
                        if role == "worker":
                            os.kill(process_id, signal.SIGHUP)

            with console.status(f"the relay under load for {seconds:g} s, with a push in the middle"):
                stack.play_unobserved(records, watch, [f"traffic.settle_s={warming_s}"])
        at_s = [each.ranking_us / 1e6 for each in impressions(planned.traffic, population)]
        found = phases(list(read_records(records)), at_s, pushed_s, push_ends_s, revisions[0])
        described = {
            "measured_at": now(),
            "machine": machine(),
            "broker": started.what.split(" at ")[0],
            "seconds": seconds,
            "rate_per_s": plan.rate_per_s,
            "budget_ms": plan.budget_ms,
            "spread_s": spread_s,
            "warm_up": warm_up,
        }
    console.print(_table(found, plan.budget_ms))
    append_rows(out, [described | asdict(each) for each in found])
    console.print(f"appended to {out}")


def replace_model(folder: Path, seed: int) -> str:
    """Puts a checkpoint with other weights, and the calibration under its revision, into the folder. Returns the
    revision.
    """
    present = load_checkpoint(folder)
    item_ids = present.tensors[IDS_TENSOR].numpy() if IDS_TENSOR in present.tensors else None
    other = random_checkpoint(present.config, seed, item_ids)
    save_checkpoint(folder, present.config, other.tensors)
    revision = load_checkpoint(folder).revision
    calibration = load_calibration(folder / CALIBRATION_FILE)
    own = replace(calibration, machine=replace(calibration.machine, model_revision=revision))
    save_calibration(own, folder / CALIBRATION_FILE)
    return revision


def _table(figures: Sequence[PhaseFigures], budget_ms: int) -> Table:
    table = Table(title=f"A push of a new model revision, deadline {budget_ms} ms")
    for name in ("phase", "requests", "late or cut", "P99 of all offered", "ranked by the new revision"):
        table.add_column(name, justify="right")
    for each in figures:
        table.add_row(
            each.phase,
            str(each.offered),
            f"{each.late_share:.1%}",
            f"{each.offered_p99_ms:.1f} ms",
            str(each.new_revision),
        )
    return table
