"""A model that computes nothing, and the settings of a relay that serves it: for benchmarks of what is around it."""

from __future__ import annotations

import secrets
from pathlib import Path

from relaygr.bench.rows import now
from relaygr.devbroker import LocalBroker
from relaygr.kafka.settings import KafkaSettings
from relaygr.schemas.messages import LatencyCoefficients
from relaygr.settings import Settings
from relaygr.worker.calibration import Calibration, describe, save_calibration
from relaygr.worker.model.checkpoint import random_checkpoint, save_checkpoint
from relaygr.worker.model.config import ModelConfig
from relaygr.worker.model.engine import load_engine
from relaygr.worker.model.options import Family

BUDGET_MS = 1_000
CANDIDATES = 128
HISTORY = 512
PARTITIONS = 8
"""The least number of partitions for one worker."""
SLOW_FULL = LatencyCoefficients(a0=10_000_000, a1=0, a2=0, b0=1, b1=0, b2=0, c0=1, c1=0, c2=0, d0=1, d1=0)
"""A latency model by which every impression is at risk and feasible."""


def null_settings(broker: LocalBroker, folder: Path, rate_per_s: float, seconds: float) -> Settings:
    """Settings with a null model that is said to take the times of `SLOW_FULL`."""
    config = ModelConfig(
        family=Family.NULL,
        embedding_dim=64,
        num_heads=1,
        attention_dim=16,
        hidden_dim=16,
        num_layers=1,
        normalizer=1024.0,
        vocabulary_size=10_000,
        max_prefix_behaviours=HISTORY * 2,
        max_suffix_behaviours=32,
        max_candidates=CANDIDATES,
    )
    model = folder / "model"
    save_checkpoint(model, config, random_checkpoint(config, seed=0).tensors)
    engine = load_engine(model, "cpu", threads=1)
    made = Calibration(describe(engine), now(), SLOW_FULL, (), (), (), ())
    save_calibration(made, folder / "calibration.json")
    # The topics are deleted at the end: another's run on the same cluster keeps its own.
    prefix = f"bench-{secrets.token_hex(3)}"
    kafka = broker.settings(KafkaSettings(topic_prefix=prefix, group_prefix=prefix, partitions=PARTITIONS))
    return Settings.model_validate(
        {
            **kafka.model_dump(),
            "log": {"level": "warning"},
            "worker": {
                "model": model,
                "calibration": folder / "calibration.json",
                "hbm_bytes": 256 << 20,
                "dram_bytes": 0,
                "history_max_bytes": 256 << 20,
            },
            "traffic": {
                "duration_s": seconds,
                "rate_per_s": rate_per_s,
                "users": 1_000,
                "history_median": HISTORY,
                "history_sigma": 0.0,
                "history_max": HISTORY * 2,
                "growth": 0,
                "candidates": CANDIDATES,
                "lead_median_ms": 200.0,
                "budget_ms": BUDGET_MS,
            },
        }
    )
