"""The relay of benchmarks that measure the processes around the model: a small model, histories and settings."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from relaygr.devbroker import LocalBroker
from relaygr.kafka.settings import KafkaSettings
from relaygr.schemas.messages import Behaviours, History
from relaygr.settings import Settings
from relaygr.worker.model.config import ModelConfig

VOCABULARY = 10_000
SUFFIX = 16
CANDIDATES = 64
NO_RESTART_LIMIT = {"restarts_max": 1_000, "restart_window_s": 1.0}
"""The section `supervisor` of a benchmark whose kills must not use up the restart policy's limit."""


def small_config(history: int, width: int = 64, layers: int = 4) -> ModelConfig:
    """A model with two heads for prefixes of `history` behaviours."""
    return ModelConfig(
        embedding_dim=width,
        num_heads=2,
        attention_dim=width // 2,
        hidden_dim=width // 2,
        num_layers=layers,
        normalizer=float(history),
        vocabulary_size=VOCABULARY,
        num_positions=history + 128,
        max_prefix_behaviours=history,
        max_suffix_behaviours=SUFFIX,
        max_candidates=CANDIDATES,
    )


def small_settings(kafka: KafkaSettings, folder: Path, worker: Mapping[str, Any], **sections: object) -> Settings:
    """Settings with the checkpoint in `folder / "model"` and all other files of the worker in `folder`."""
    files = {
        "model": folder / "model",
        "history_path": folder / "history",
        "history_max_bytes": 64 << 20,
        "shared_path": folder / "shared",
    }
    return Settings.model_validate({**kafka.model_dump(), "worker": {**files, **worker}, **sections})


def own_prefix(broker: LocalBroker, name: str) -> str:
    """The prefix of a benchmark's topics and groups. On a cluster that was not started here nobody else has it."""
    return name if broker.ours else f"{name}-{secrets.token_hex(3)}"


def history_of(user: str, length: int) -> History:
    """The history of a user whose id ends in `-NUMBER`, the same in every run."""
    random = np.random.default_rng(int(user.rpartition("-")[2]))
    behaviours = Behaviours(
        random.integers(0, VOCABULARY, length).astype("<i8"),
        random.integers(0, 4, length).astype("<u2"),
        1_700_000_000_000 + np.arange(length, dtype="<i8") * 60_000,
    )
    return History(user, length, np.empty(0, "<i8"), behaviours)
