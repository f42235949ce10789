"""The trial of a model before it serves: its scores must be finite numbers, and as exact as the settings demand.

Finite weights do not suffice: those of a training that diverged overflow in the forward. So the model ranks items of
its vocabulary, for some users of the history store, for made-up users, because a new store is empty, and for a user of
whom it knows nothing. Other requests may still have scores that are not finite: `results.FiniteScores` watches those.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

import numpy as np
import structlog
from numpy.typing import NDArray

from relaygr.runtime.errors import RelayError
from relaygr.schemas.messages import Behaviours
from relaygr.worker.history.store import HistoryStore
from relaygr.worker.measuring import bind_own_arena
from relaygr.worker.model.config import read_config
from relaygr.worker.model.interface import Engine, PrefixChunk
from relaygr.worker.score_error import (
    SampleUser,
    ScoreError,
    made_users,
    require_compute_precision,
    require_kv_precision,
    require_precision,
)
from relaygr.worker.settings import WorkerSettings

log = structlog.get_logger()

_STORED_USERS: Final = 4
_MADE_USERS: Final = 2
_SAMPLED_ITEMS: Final = 1024
"""The whole vocabulary of a large model would take much memory."""
_LONGEST: Final = 256
"""The most behaviours of a user. A serving model may share the device, and most of its memory is taken."""
_CHUNK_TOKENS: Final = 128
_UNKNOWN_BEHAVIOURS: Final = 8
_NO_ITEM: Final = -1
_NO_ACTION: Final = np.iinfo(np.uint16).max


class DivergedModelError(RelayError):
    """A model's scores are not finite numbers."""


def require_finite_scores(engine: Engine, model: Path, store: HistoryStore | None = None) -> None:
    """Ranks on the engine, which was loaded from the folder `model`. Raises DivergedModelError.

    Binds the engine to a new arena, so the caller must bind it again.
    """
    items = np.unique(engine.known_items(_SAMPLED_ITEMS, np.random.default_rng(0)))
    made, candidates = made_users(read_config(model), items, _MADE_USERS)
    users = [*made, _unknown_user(), *(_stored_users(store) if store is not None else ())]
    longest = min(_LONGEST, engine.limits.max_prefix_behaviours)
    bind_own_arena(engine, longest_tokens=engine.layout.tokens(longest))
    for user in users:
        newest = user.behaviours[max(0, len(user.behaviours) - longest) :]
        if not np.isfinite(_scores(engine, SampleUser(user.features, newest), candidates)).all():
            raise DivergedModelError(
                f"The scores of {model} are not finite numbers: its training diverged, or it needs element types with "
                "a larger range (worker.compute_dtype, worker.kv_dtype). Serve another checkpoint; `relaygr model "
                "rollback` goes back to the previous one."
            )


def require_precisions(engine: Engine, settings: WorkerSettings) -> None:
    """Logs by how much inexact element types change scores: of K,V, of products, and of K,V in the DRAM tier.

    Raises RelayError if one of them changes scores by more than the settings allow.
    """
    table_bytes = int(settings.device_table_bytes)
    error = require_kv_precision(
        engine, settings.model, settings.kv_max_score_error, settings.kv_min_topk_overlap, table_bytes
    )
    if error is not None:
        _log_error("scores on K,V in 8 bits are approximate", error, kv_dtype=engine.geometry.dtype.value)
    error = require_compute_precision(
        engine, settings.model, settings.compute_max_score_error, settings.compute_min_topk_overlap, table_bytes
    )
    if error is not None:
        _log_error("scores by products in int8 are approximate", error)
    if not settings.dram_bytes:
        return
    error = require_precision(
        engine, settings.model, settings.dram_kv_dtype, settings.dram_max_score_error, settings.dram_min_topk_overlap
    )
    if error is not None:
        what = "scores on reloaded prefixes are approximate"
        _log_error(what, error, dram_kv_dtype=settings.dram_kv_dtype.value)


def _log_error(event: str, error: ScoreError, **setting: str) -> None:
    log.info(
        event,
        **setting,
        max_score_error=round(error.max_score_error, 6),
        mean_score_error=round(error.mean_score_error, 6),
        top10_overlap=round(error.topk_overlap, 4),
    )


def _unknown_user() -> SampleUser:
    """A user whose items and actions are not in the model's tables, without features."""
    count = _UNKNOWN_BEHAVIOURS
    behaviours = Behaviours(np.full(count, _NO_ITEM), np.full(count, _NO_ACTION, np.uint16), np.zeros(count, np.int64))
    return SampleUser(np.empty(0, np.int64), behaviours)


def _stored_users(store: HistoryStore) -> list[SampleUser]:
    histories = store.some_histories(_STORED_USERS)
    return [SampleUser(history.features, history.behaviours) for history in histories]


def _scores(engine: Engine, user: SampleUser, candidates: NDArray[np.int64]) -> NDArray[np.float32]:
    """Full inference, in chunks so short that another model's requests do not wait long for the device."""
    behaviours = user.behaviours
    query_time_ms = int(behaviours.timestamps_ms[-1]) + 1 if len(behaviours) else 0
    features = engine.shown_features(user.features, len(behaviours), candidates.size)
    inputs = engine.prefix_inputs(features, behaviours, query_time_ms=query_time_ms)
    pages = np.arange(engine.geometry.pages_for(inputs.tokens), dtype=np.int32)
    step = _CHUNK_TOKENS if engine.rules.chunks else max(1, inputs.tokens)
    for start in range(0, inputs.tokens, step):
        engine.pre_infer(PrefixChunk(inputs, start, min(start + step, inputs.tokens), pages))
    request = engine.rank_inputs(
        inputs.tokens, pages, Behaviours.empty(), candidates, query_time_ms, behaviours.timestamps_ms
    )
    (outputs,) = engine.rank([request])
    return outputs.scores
