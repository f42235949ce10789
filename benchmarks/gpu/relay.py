"""Plays the demo's schedule with the relay on and off, on the embedded cluster.

    python -m benchmarks.gpu.relay OUT [--dry]

The model has the shape of DLRM-v3. The schedule comes at the rate that the demo plans, and at three times that rate
with the same deadline. `--dry` plays one small schedule.
"""

from __future__ import annotations

import json
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console

from relaygr.bench.engine.shapes import SHAPES
from relaygr.cli.demo import DEFAULTS
from relaygr.cli.options import command_settings
from relaygr.demo.plan import DemoPlan, PlanOverrides
from relaygr.demo.prepare import TAIL_ROOM
from relaygr.demo.run import DemoOptions, DemoResult, run_demo
from relaygr.runtime.stop_signals import exit_on_sigterm
from relaygr.settings import Settings
from relaygr.traffic.population import population_of
from relaygr.worker.device import open_device
from relaygr.worker.model.checkpoint import random_checkpoint, save_checkpoint


@dataclass(frozen=True, slots=True)
class Schedule:
    """What is played."""

    shape: str
    users: int
    history_behaviours: int
    """The median; the longest history is twice as long."""
    seconds: float
    rates: tuple[float, ...]
    """Multiples of the rate that the demo plans, which is the first one."""


ON_GPU = Schedule("dlrm-v3", 60, 4096, 12.0, (1.0, 3.0))
DRY = Schedule("tiny", 8, 64, 4.0, (1.0,))


@dataclass(frozen=True, slots=True)
class Row:
    """One run of the schedule."""

    system: str
    rate_per_s: float
    deadline_ms: int
    offered: int
    late_share: float
    p50_ms: float
    p99_ms: float
    device_idle_share: float
    worst_score_error: float
    """Of the relay's scores against those of full inference, as a share of the largest score of a request."""


def play(schedule: Schedule, out: Path) -> None:
    """Plays both systems at each rate, and writes the rows so far after each."""
    settings = command_settings(
        overrides=[
            *DEFAULTS,
            f"traffic.users={schedule.users}",
            f"traffic.history_median={schedule.history_behaviours}",
            f"traffic.history_max={2 * schedule.history_behaviours}",
        ]
    )
    rows: list[Row] = []
    plan: DemoPlan | None = None
    with tempfile.TemporaryDirectory(prefix="relaygr-gpu-") as name:
        model = written_model(Path(name), schedule.shape, settings)
        for rate in schedule.rates:
            overrides = PlanOverrides(duration_s=schedule.seconds)
            if plan is not None:
                overrides = PlanOverrides(plan.budget_ms, plan.lead_ms, rate * plan.rate_per_s, schedule.seconds)
            options = DemoOptions("embedded", overrides, model, None, assume_yes=True, serve_page=False, stay=False)
            result = run_demo(Console(highlight=False), settings, options)
            assert isinstance(result, DemoResult)
            plan = plan or result.plan
            rows += rows_of(result)
            out.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n", encoding="utf-8")


def written_model(folder: Path, shape: str, settings: Settings) -> Path:
    """A random model of this shape for the demo's users and items."""
    traffic, population = settings.traffic, population_of(settings.traffic)
    longest = traffic.history_max + traffic.suffix + TAIL_ROOM
    config = SHAPES[shape].config(longest, traffic.candidates)
    config = config.model_copy(
        update={
            "vocabulary_size": int(population.items.size),
            "num_actions": 64,
            "max_suffix_behaviours": traffic.suffix + TAIL_ROOM,
        }
    )
    save_checkpoint(folder, config, random_checkpoint(config, traffic.seed, population.items).tensors)
    return folder


def rows_of(result: DemoResult) -> list[Row]:
    """A row for each of the two runs."""
    plan = result.plan
    # The workers share one accelerator.
    devices = plan.workers if open_device().is_cpu else 1
    return [
        Row(
            system=system,
            rate_per_s=plan.rate_per_s,
            deadline_ms=plan.budget_ms,
            offered=run.offered,
            late_share=run.whole.late_share,
            p50_ms=run.whole.p50_ms,
            p99_ms=run.whole.p99_ms,
            device_idle_share=1 - (run.device_seconds - run.warm_up_seconds) / plan.duration_s / devices,
            worst_score_error=result.comparison.worst_error,
        )
        for system, run in (("relay", result.relay), ("full inference", result.full))
    ]


if __name__ == "__main__":
    exit_on_sigterm()
    play(DRY if "--dry" in sys.argv else ON_GPU, Path(sys.argv[1]))
