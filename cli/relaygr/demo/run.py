"""The phases of the demo.

    calibrate -> plan -> broker -> relay on -> relay off, same schedule -> reference scores -> summary

Each run has its own topics, groups and processes: trigger, workers and gateway, which communicate only through the
broker. This process shows their `/metrics`.
"""

from __future__ import annotations

import os
import secrets
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from pydantic import ByteSize
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.prompt import Confirm

from relaygr.demo.board import print_plan, print_summary
from relaygr.demo.plan import CROWDING, HBM_SHARE, DemoPlan, PlanOverrides, plan_demo
from relaygr.demo.stack import DemoStack
from relaygr.demo.summary import Gate, RunSummary, ScoreComparison, compare_scores, gates
from relaygr.devbroker import LocalBroker, local_broker
from relaygr.runtime.errors import RelayError
from relaygr.settings import Settings
from relaygr.traffic.population import Population, population_of
from relaygr.traffic.records import read_records
from relaygr.worker.calibration import QUICK_BUDGET_S, calibrate, save_calibration
from relaygr.worker.measuring import bind_own_arena
from relaygr.worker.model.checkpoint import random_checkpoint, save_checkpoint
from relaygr.worker.model.config import ModelConfig
from relaygr.worker.model.engine import load_engine

WORKERS = 2
DEMO_PARTITIONS = 12
LONGEST_WARM_UP_S = 15.0
CALIBRATION_FILE = "calibration.json"


@dataclass(frozen=True, slots=True)
class DemoOptions:
    """The options of the command."""

    broker: str
    overrides: PlanOverrides
    model: Path | None
    keep: Path | None
    assume_yes: bool


@dataclass(frozen=True, slots=True)
class DemoResult:
    """Both runs, the comparison of their scores, and the gates."""

    plan: DemoPlan
    relay: RunSummary
    full: RunSummary
    comparison: ScoreComparison
    gates: tuple[Gate, ...]

    @property
    def passed(self) -> bool:
        return all(gate.passed for gate in self.gates)


def run_demo(console: Console, settings: Settings, options: DemoOptions) -> DemoResult:
    """Runs all phases and prints their progress. Raises RelayError for errors that the user can fix."""
    with _folder(options.keep) as folder:
        population = population_of(settings.gateway)
        model = options.model or _make_model(folder / "model", settings, population)
        plan = _plan(console, folder, model, settings, population, options.overrides)
        print_plan(console, plan, WORKERS, population.size)
        known = settings.bootstrap if "bootstrap" in settings.model_fields_set else None
        with local_broker(options.broker, known_bootstrap=known, kafka=settings) as broker:
            console.print(f"broker     {broker.what}")
            for limit in broker.limits:
                console.print(f"           limit: {limit}", style="dim")
            prefix = _own_prefix(console, broker, options.assume_yes)
            planned = _planned(settings, plan, model, folder, broker, population.size)
            relay_file, full_file, reference_file = (
                folder / f"{name}.jsonl" for name in ("relay", "full", "reference")
            )
            with DemoStack(
                console, folder, broker, _named(planned, f"{prefix}-relay"), relay=True, workers=WORKERS
            ) as stack:
                pause = f"gateway.settle_s={_settle_s(planned, plan, population.size)}"
                relay = stack.play("relay on", relay_file, overrides=[pause])
            with DemoStack(
                console, folder, broker, _named(planned, f"{prefix}-full"), relay=False, workers=WORKERS
            ) as stack:
                full = stack.play("relay off", full_file)
                stack.play_reference(reference_file, relay_file)
        comparison = compare_scores(read_records(relay_file), read_records(reference_file))
        result = DemoResult(plan, relay, full, comparison, gates(relay, full, comparison))
        print_summary(console, relay, full, plan.budget_ms, comparison, result.gates)
        return result


# -- before the first run ------------------------------------------------------------------------


@contextmanager
def _folder(keep: Path | None) -> Iterator[Path]:
    if keep is None:
        with tempfile.TemporaryDirectory(prefix="relaygr-demo-", ignore_cleanup_errors=True) as name:
            yield Path(name)
        return
    if keep.exists() and any(keep.iterdir()):
        raise RelayError(f"{keep} is not empty: give --keep a folder of its own.")
    keep.mkdir(parents=True, exist_ok=True)
    yield keep


def _make_model(folder: Path, settings: Settings, population: Population) -> Path:
    """Makes a random model for the items of the population and the length of its longest history."""
    longest = max(8, *(len(population.sequence(index)) for index in range(population.size)))
    suffix = settings.gateway.suffix
    config = ModelConfig(
        embedding_dim=96,
        num_heads=3,
        attention_dim=32,
        hidden_dim=32,
        num_layers=4,
        normalizer=float(longest + suffix),
        vocabulary_size=int(population.items.size),
        num_actions=64,
        num_positions=longest + suffix + 1,
        max_prefix_behaviours=longest,
        max_suffix_behaviours=suffix,
        max_candidates=settings.gateway.candidates,
    )
    checkpoint = random_checkpoint(config, settings.gateway.seed, population.items)
    save_checkpoint(folder, config, checkpoint.tensors)
    return folder


def _plan(
    console: Console, folder: Path, model: Path, settings: Settings, population: Population, overrides: PlanOverrides
) -> DemoPlan:
    """Calibrates this machine while nothing else runs, and makes the plan from the result."""
    worker = settings.worker
    engine = load_engine(
        model, worker.device, worker.kv_dtype, worker.page_tokens, worker.threads, worker.compute_dtype
    )
    bind_own_arena(engine)
    columns = (TextColumn("calibrating"), BarColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        bar = progress.add_task("", total=1.0)
        calibration = calibrate(
            engine, QUICK_BUDGET_S, lambda share, text: progress.update(bar, completed=share, description=text)
        )
    save_calibration(calibration, folder / CALIBRATION_FILE)
    longest = engine.limits.max_prefix_behaviours
    lengths = [min(population.first_length(index), longest) for index in range(population.size)]
    scored = settings.gateway.suffix * engine.layout.tokens_per_behaviour + settings.gateway.candidates
    return plan_demo(
        calibration.model, engine.geometry, engine.layout, lengths, scored, WORKERS, os.cpu_count() or 1, overrides
    )


def _settle_s(settings: Settings, plan: DemoPlan, users: int) -> float:
    """The pause before the first impression: long enough for the workers to warm up as many prefixes as fit in HBM."""
    if not settings.worker.warm_up_users:
        return settings.gateway.settle_s
    device_s = HBM_SHARE * users * plan.pre_infer_p90_ms / 1000 * CROWDING
    warm_up_s = device_s / WORKERS / settings.worker.warm_up_share
    return round(settings.gateway.settle_s + min(LONGEST_WARM_UP_S, warm_up_s), 1)


def _planned(
    settings: Settings, plan: DemoPlan, model: Path, folder: Path, broker: LocalBroker, users: int
) -> Settings:
    """The settings of every process: those of the user, of the plan, and of the broker."""
    on_broker = broker.settings(settings)
    gateway = settings.gateway.model_copy(
        update={"budget_ms": plan.budget_ms, "lead_median_ms": float(plan.lead_ms), "rate_per_s": plan.rate_per_s}
    )
    worker_set = settings.worker.model_fields_set
    worker = settings.worker.model_copy(
        update={
            "model": model,
            "calibration": folder / CALIBRATION_FILE,
            "hbm_bytes": ByteSize(plan.hbm_bytes),
            "dram_bytes": ByteSize(plan.dram_bytes),
            "history_max_bytes": ByteSize(256 << 20),
            "warm_up_users": users if "warm_up_users" not in worker_set else settings.worker.warm_up_users,
        }
    )
    return settings.model_copy(
        update={
            "bootstrap": on_broker.bootstrap,
            "fetch_wait_max_ms": on_broker.fetch_wait_max_ms,
            "session_timeout_ms": on_broker.session_timeout_ms,
            "replication_factor": on_broker.replication_factor,
            "partitions": DEMO_PARTITIONS,
            "gateway": gateway,
            "worker": worker,
        }
    )


def _named(settings: Settings, prefix: str) -> Settings:
    return settings.model_copy(update={"topic_prefix": prefix, "group_prefix": prefix})


def _own_prefix(console: Console, broker: LocalBroker, assume_yes: bool) -> str:
    """The prefix of topics and groups. On a cluster that was not started here it is unique and must be confirmed."""
    if broker.ours:
        return "relaygr"
    prefix = f"relaygr-demo-{secrets.token_hex(3)}"
    question = f"Create topics {prefix}-* on {broker.bootstrap}, and delete them at the end?"
    if not assume_yes and not (console.is_terminal and Confirm.ask(question, console=console)):
        raise RelayError(f"Nothing was created on {broker.bootstrap}. Run with --yes to use topics {prefix}-* there.")
    return prefix
