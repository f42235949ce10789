"""Prepares the first run of the demo: makes a model, a calibration, the plan from it, and the processes' settings."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from pydantic import ByteSize
from rich.console import Console

from relaygr.demo.plan import CROWDING, HBM_SHARE, NEW_SHARE, DemoPlan, PlanOverrides, plan_demo
from relaygr.devbroker import LocalBroker
from relaygr.machine import CoreWatch
from relaygr.progress import progress_bars
from relaygr.settings import Settings
from relaygr.simulate.case import require_taken
from relaygr.traffic.population import Population
from relaygr.worker.calibration import QUICK_BUDGET_S, calibrate, save_calibration
from relaygr.worker.measuring import bind_own_arena
from relaygr.worker.model.checkpoint import random_checkpoint, save_checkpoint
from relaygr.worker.model.config import ModelConfig
from relaygr.worker.model.engine import load_engine

DEMO_PARTITIONS = 12
LONGEST_WARM_UP_S = 15.0
LONGEST_HELD_OUT_S = 600.0
"""Of a run that plays held-out behaviours."""
CALIBRATION_FILE = "calibration.json"
TAIL_ROOM = 64
"""Room in the longest suffix, beside the request's own behaviours, for those that came since the prefix was made."""


def make_model(folder: Path, settings: Settings, population: Population) -> Path:
    """Makes a random model for the items of the population and the length of its longest history."""
    longest = max(8, *(len(population.sequence(index)) for index in range(population.size)))
    suffix = settings.traffic.suffix + TAIL_ROOM
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
        max_candidates=settings.traffic.candidates,
    )
    checkpoint = random_checkpoint(config, settings.traffic.seed, population.items)
    save_checkpoint(folder, config, checkpoint.tensors)
    return folder


def plan_for_this_machine(
    console: Console,
    calibration: Path,
    model: Path,
    settings: Settings,
    population: Population,
    overrides: PlanOverrides,
) -> DemoPlan:
    """Calibrates this machine before anything else runs, and makes the plan from the result and the free cores.
    Writes the calibration that workers use. Raises RelayError for requests that are larger than the model takes.

    The deadline comes from the times of the engine alone, pass after pass. Workers predict with times between which the
    caches are used for other data. Those are longer, and would make the deadline easier.
    """
    worker = settings.worker
    engine = load_engine(
        model,
        worker.device,
        worker.kv_dtype,
        worker.page_tokens,
        worker.threads,
        worker.compute_dtype,
        ranker_modules=worker.ranker_modules,
    )
    require_taken(settings.traffic, engine.limits)
    bind_own_arena(engine)
    with progress_bars(console) as bars, CoreWatch() as watch:
        bars.began("calibrating", 2)
        alone = calibrate(engine, QUICK_BUDGET_S, bars.share, rest=lambda: None)
        predicting = calibrate(engine, QUICK_BUDGET_S, lambda share, text: bars.share(1 + share, text))
    if (problem := alone.fit_problem or predicting.fit_problem) is not None:
        console.print(f"unsteady   {problem}: deadline and rate may not suit this machine", style="yellow")
    save_calibration(predicting, calibration)
    longest = engine.limits.max_prefix_behaviours
    lengths = [min(population.first_length(index), longest) for index in range(population.size)]
    scored = settings.traffic.suffix * engine.layout.tokens_per_behaviour + settings.traffic.candidates
    held_out = held_out_count(settings, population)
    plan = plan_demo(
        alone.model, engine.geometry, engine.layout, lengths, scored, watch.cores,
        settings.traffic.duration_s, overrides, population.size / held_out if held_out else NEW_SHARE,
    )  # fmt: skip
    # All held-out behaviours are played, if that does not take too long.
    return replace(plan, duration_s=overrides.duration_s or LONGEST_HELD_OUT_S) if held_out else plan


def expected_count(plan: DemoPlan, settings: Settings, population: Population) -> int:
    """The requests of a run, as far as they are known before; 0: its impressions are drawn."""
    return min(held_out_count(settings, population), round(plan.rate_per_s * plan.duration_s))


def held_out_count(settings: Settings, population: Population) -> int:
    """The test behaviours of the users; 0: impressions are drawn."""
    if settings.traffic.held_out is None:
        return 0
    return sum(population.sequence_length(user) - population.first_length(user) for user in range(population.size))


def settle_s(settings: Settings, plan: DemoPlan, users: int) -> float:
    """The pause before the first impression: long enough for the workers to warm up as many prefixes as fit in HBM."""
    if not settings.worker.warm_up_users:
        return settings.traffic.settle_s
    device_s = HBM_SHARE * users * plan.pre_infer_p90_ms / 1000 * CROWDING
    warm_up_s = device_s / plan.workers / settings.worker.warm_up_share
    return round(settings.traffic.settle_s + min(LONGEST_WARM_UP_S, warm_up_s), 1)


def planned_settings(
    settings: Settings, plan: DemoPlan, model: Path, calibration: Path, broker: LocalBroker, users: int
) -> Settings:
    """The settings of every process: those of the user, of the plan, and of the broker."""
    on_broker = broker.settings(settings)
    traffic = settings.traffic.model_copy(
        update={
            "budget_ms": plan.budget_ms,
            "lead_median_ms": float(plan.lead_ms),
            "rate_per_s": plan.rate_per_s,
            "duration_s": plan.duration_s,
        }
    )
    worker_set = settings.worker.model_fields_set
    worker = settings.worker.model_copy(
        update={
            "model": model,
            "calibration": calibration,
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
            "min_insync_replicas": on_broker.min_insync_replicas,
            "partitions": DEMO_PARTITIONS,
            "traffic": traffic,
            "worker": worker,
        }
    )
