"""The trial of a model before it serves: its scores must be finite numbers, and as exact as the settings demand.

Finite weights do not suffice: those of a training that diverged overflow in the forward. So the model ranks items of
its vocabulary, for some users of the history store, for made-up users, because a new store is empty, and for a user of
whom it knows nothing. Other requests may still have scores that are not finite: `latest_answers.FiniteScores` watches
those.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
import structlog

from relaygr.runtime.errors import RelayError
from relaygr.worker.history.store import HistoryStore
from relaygr.worker.kv import DramGeometry, DramKvDtype, KvDtype
from relaygr.worker.measuring import bind_own_arena
from relaygr.worker.model.inference import full_inference
from relaygr.worker.model.interface import Engine
from relaygr.worker.model.options import ComputeDtype
from relaygr.worker.model.ranker_engine import RankerEngine
from relaygr.worker.model.rankers import RECORD_FILE
from relaygr.worker.model_check import TOLERANCE, ModelCheck, Rule
from relaygr.worker.score_error import (
    TOP_K,
    SampleUser,
    ScoreError,
    exact_kv,
    made_sample,
    measure_dram_error,
    measure_engine_error,
    other_engine,
    unknown_inputs,
    unknown_user,
    with_unknown,
)
from relaygr.worker.settings import WorkerSettings

log = structlog.get_logger()

_STORED_USERS: Final = 4
_MADE_USERS: Final = 2
_LONGEST: Final = 256
"""The most behaviours of a user. A serving model may share the device, and most of its memory is taken."""
_CHUNK_TOKENS: Final = 128
_CHECK_S: Final = 5.0
_NOT_CLAIMED: Final = (Rule.HISTORY, Rule.CANDIDATES, Rule.QUERY_TIME)
"""No K,V are used again because of these: to a ranker whose K,V do not depend on the time, none is given."""
_NARROW: Final = 0.05
"""Types of fewer bits round the K,V of each row when they are stored."""


class DivergedModelError(RelayError):
    """A model's scores are not finite numbers."""


def require_finite_scores(engine: Engine, model: Path, store: HistoryStore | None = None) -> None:
    """Ranks on the engine, which was loaded from the folder `model`. Raises DivergedModelError.

    Binds the engine to a new arena, so the caller must bind it again.
    """
    made, candidates = made_sample(engine, _MADE_USERS)
    users = [*made, *(_stored_users(store) if store is not None else ())]
    longest = min(_LONGEST, engine.limits.max_prefix_behaviours)
    arena = bind_own_arena(engine, longest_tokens=engine.layout.tokens(longest))
    pages = np.arange(arena.shape[0], dtype=np.int32)
    requests = [
        SampleUser(user.features, user.behaviours[max(0, len(user.behaviours) - longest) :]).request(candidates)
        for user in users
    ]
    # Chunks are so short that another model's requests do not wait long for the device.
    with unknown_inputs():
        unknown = unknown_user(longest).request(with_unknown(candidates))
        found = [full_inference(engine, unknown, pages, _CHUNK_TOKENS)]
    found += [full_inference(engine, request, pages, _CHUNK_TOKENS) for request in requests]
    for inference in found:
        if not np.isfinite(inference.outputs.scores).all():
            raise DivergedModelError(
                f"The scores of {model} are not finite numbers: its training diverged, or it needs element types with "
                "a larger range (worker.compute_dtype, worker.kv_dtype). Serve another checkpoint; `relaygr model "
                "rollback` goes back to the previous one."
            )


def require_rules(engine: Engine, model: Path) -> None:
    """Tries for a few seconds whether a team's own ranker is as `relaygr model check` found it. Raises RelayError.

    Binds the engine to a new arena, so the caller must bind it again.
    """
    if not isinstance(engine, RankerEngine) or engine.record is None:
        return
    narrow = engine.geometry.dtype is not KvDtype.FLOAT32 or engine.compute_dtype is not ComputeDtype.FLOAT32
    made, candidates = made_sample(engine, _MADE_USERS)
    users = [SampleUser(user.features, user.behaviours[:_LONGEST]) for user in made]
    check = ModelCheck(engine, users, candidates, _CHECK_S, _NARROW if narrow else TOLERANCE)
    for found in check.run():
        if found.smallest is not None and found.rule not in _NOT_CLAIMED:
            raise RelayError(
                f"{model} is refused. By its {RECORD_FILE} {found.rule.text}, but {found.case}: run `relaygr model "
                f"check {model}` again."
            )


def require_precisions(engine: Engine, settings: WorkerSettings) -> None:
    """Logs by how much inexact element types change scores of generated histories: see `GATES`.

    The model is loaded once more meanwhile for each of K,V and products that are inexact. Binds the engine to a new
    arena, so the caller must bind it again. Raises RelayError if a type changes scores by more than the settings allow.
    """
    for gate in GATES:
        measured = gate.measure(engine, settings)
        if measured is not None:
            gate.require(measured, settings)


@dataclass(frozen=True, slots=True)
class Measured:
    """The error of the present value of a setting, and the values to use if it is too large."""

    value: str
    remedy: str
    error: ScoreError


@dataclass(frozen=True, slots=True)
class Gate:
    """The limits of a setting that makes scores inexact.

    `name`: of its limits, `worker.NAME_max_score_error` and `worker.NAME_min_topk_overlap`. `measure` returns None if
    the setting is exact.
    """

    name: str
    setting: str
    event: str
    measure: Callable[[Engine, WorkerSettings], Measured | None]

    def require(self, measured: Measured, settings: WorkerSettings) -> None:
        """Logs the error. Raises RelayError if it is beyond the limits."""
        max_error = float(getattr(settings, f"{self.name}_max_score_error"))
        min_overlap = float(getattr(settings, f"{self.name}_min_topk_overlap"))
        error = measured.error
        if not error.is_within(max_error, min_overlap):
            options = [f"--{self.setting.replace('_', '-')} {measured.value}", "--interactions LOG"]
            options += [f"--ranker-module {name}" for name in settings.ranker_modules]
            raise RelayError(
                f"worker.{self.setting} {measured.value} is too inexact for this model: scores change by up to "
                f"{error.max_score_error:.2%} of their spread ({max_error:.2%} allowed), and {error.topk_overlap:.1%} "
                f"of the top {TOP_K} stay ({min_overlap:.1%} required), for {error.users} generated users. Set "
                f"worker.{self.setting} to {measured.remedy}. Or measure the error on your own histories with `relaygr "
                f"model check {settings.model} {' '.join(options)}`, and set "
                f"worker.{self.name}_max_score_error and worker.{self.name}_min_topk_overlap."
            )
        log.info(
            self.event,
            **{self.setting: measured.value},
            max_score_error=round(error.max_score_error, 6),
            mean_score_error=round(error.mean_score_error, 6),
            top10_overlap=round(error.topk_overlap, 4),
        )


def _kv(engine: Engine, settings: WorkerSettings) -> Measured | None:
    if not engine.geometry.dtype.is_scaled:
        return None
    exact = exact_kv(engine.compute_dtype)
    error = _error_against(engine, settings, exact, engine.compute_dtype)
    return Measured(engine.geometry.dtype.value, exact.value, error)


def _products(engine: Engine, settings: WorkerSettings) -> Measured | None:
    if engine.compute_dtype is not ComputeDtype.INT8:
        return None
    exact = ComputeDtype.FLOAT32
    error = _error_against(engine, settings, engine.geometry.dtype, exact)
    return Measured(engine.compute_dtype.value, exact.value, error)


def _error_against(engine: Engine, settings: WorkerSettings, kv: KvDtype, compute: ComputeDtype) -> ScoreError:
    """The error of the engine against the same model in these types."""
    tables_bytes = int(settings.device_table_bytes)
    exact = other_engine(engine, settings.model, kv, compute, tables_bytes, settings.ranker_modules)
    return measure_engine_error(engine, exact, *made_sample(engine))


def _dram_tier(engine: Engine, settings: WorkerSettings) -> Measured | None:
    dtype = settings.dram_kv_dtype
    if not settings.dram_bytes or DramGeometry(engine.geometry, dtype).is_exact:
        return None
    remedy = "bfloat16 or same" if dtype is DramKvDtype.INT8 else "same"
    return Measured(dtype.value, remedy, measure_dram_error(engine, dtype, *made_sample(engine)))


GATES: Final = (
    Gate("kv", "kv_dtype", "scores on K,V in 8 bits are approximate", _kv),
    Gate("compute", "compute_dtype", "scores by products in int8 are approximate", _products),
    Gate("dram", "dram_kv_dtype", "scores on reloaded prefixes are approximate", _dram_tier),
)


def _stored_users(store: HistoryStore) -> list[SampleUser]:
    histories = store.some_histories(_STORED_USERS)
    return [SampleUser(history.features, history.behaviours) for history in histories]
