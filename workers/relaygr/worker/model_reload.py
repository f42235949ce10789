"""Another checkpoint for a running worker: loaded beside the model that serves, and tried before it takes over.

`load_beside` is called off the device thread. It refuses, with the reason in its error, what could not serve in the
present one's place: a checkpoint that is broken, one whose K,V do not fit the pages that are there, one for which
there is no memory beside the present model, and one that does not compute. Until the caller swaps the engines
nothing has changed.

The latency model: with `worker.calibration` the file must be of the new checkpoint (a restart would refuse it else),
and is used; without, what was measured stays in use, and is corrected on-line as ever.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import psutil

from relaygr.admission.latency import LatencyModel
from relaygr.runtime.errors import RelayError
from relaygr.schemas.messages import Behaviours
from relaygr.worker.calibration import latency_for
from relaygr.worker.dram_check import require_precision
from relaygr.worker.measuring import bind_own_arena
from relaygr.worker.memory import HEADROOM, forward_bytes, is_out_of_memory
from relaygr.worker.model.checkpoint import WEIGHTS_FILE, load_checkpoint
from relaygr.worker.model.config import read_config
from relaygr.worker.model.engine import build_engine
from relaygr.worker.model.interface import Engine, PrefixChunk
from relaygr.worker.settings import WorkerSettings

_TRIAL_BEHAVIOURS = 8
_TRIAL_CANDIDATES = 4


class ReloadOutcome(enum.StrEnum):
    """How a wish for another model ended: a metric label."""

    SWAPPED = "swapped"
    UNCHANGED = "unchanged"
    BROKEN = "broken"
    UNFIT = "unfit"
    NO_MEMORY = "no_memory"


class ReloadRefusedError(RelayError):
    """The new checkpoint cannot serve; the old one goes on."""

    def __init__(self, outcome: ReloadOutcome, message: str) -> None:
        super().__init__(message)
        self.outcome = outcome


@dataclass(frozen=True, slots=True)
class NewModel:
    """What may take over. `latency` None: the one in use stays."""

    engine: Engine
    latency: LatencyModel | None


def load_beside(present: Engine, settings: WorkerSettings) -> NewModel | None:
    """The checkpoint in `worker.model`, on the device of `present`, not yet bound; None if it is the same model.

    Raises ReloadRefusedError.
    """
    folder = settings.model
    try:
        _require_fit(folder, present, settings)
        _require_memory_for_weights(folder, present)
        checkpoint = load_checkpoint(folder)
        if checkpoint.revision == present.revision:
            return None
        present.device.bind_thread()
        engine = build_engine(
            checkpoint,
            present.device,
            settings.kv_dtype,
            settings.page_tokens,
            settings.compute_dtype,
            settings.cuda_graphs,
        )
        _require_memory_for_forwards(folder, engine, present, settings)
        _try(engine)
        _require_precision(engine, settings)
        return NewModel(engine, _latency(engine, settings))
    except ReloadRefusedError:
        raise
    except Exception as error:
        if is_out_of_memory(error):
            message = f"{folder} does not fit into memory: {error}."
            raise ReloadRefusedError(ReloadOutcome.NO_MEMORY, message) from error
        raise ReloadRefusedError(ReloadOutcome.BROKEN, f"{folder} cannot be used: {error}") from error


def _require_fit(folder: Path, present: Engine, settings: WorkerSettings) -> None:
    """Pages, tiers and scratch pages stay: K,V must have their form, and no prefix may be longer."""
    config = read_config(folder)
    geometry, layout = config.geometry(settings.page_tokens, settings.kv_dtype), config.layout()
    if (geometry, layout) != (present.geometry, present.layout):
        raise ReloadRefusedError(
            ReloadOutcome.UNFIT,
            f"{folder} has K,V of another form ({geometry}, {layout}) than the pages that are there "
            f"({present.geometry}, {present.layout}): start the worker anew for it.",
        )
    longest, present_longest = config.max_prefix_behaviours, present.limits.max_prefix_behaviours
    if longest > present_longest:
        raise ReloadRefusedError(
            ReloadOutcome.UNFIT,
            f"{folder} takes prefixes of {longest} behaviours, the memory was planned for {present_longest}: "
            "start the worker anew for it.",
        )


def _require_memory_for_weights(folder: Path, present: Engine) -> None:
    """Both models are in memory for a while."""
    weights = folder / WEIGHTS_FILE
    # Stored in 16 bits they take twice as much as their file: the present model's size is the better guess then.
    wanted = max(weights.stat().st_size, present.weights_bytes) if weights.exists() else 0
    available = int(psutil.virtual_memory().available * HEADROOM)
    if not present.device.is_cpu:
        available = min(available, present.device.memory().free_bytes)
    _require_memory(folder, wanted, available)


def _require_memory_for_forwards(folder: Path, engine: Engine, present: Engine, settings: WorkerSettings) -> None:
    """What a forward takes was planned for the present model; another one of the same K,V may take more."""
    wanted = forward_bytes(engine, settings) - forward_bytes(present, settings)
    _require_memory(folder, wanted, int(engine.device.memory().free_bytes * HEADROOM))


def _require_memory(folder: Path, wanted: int, available: int) -> None:
    if wanted > available:
        raise ReloadRefusedError(
            ReloadOutcome.NO_MEMORY,
            f"{folder} needs about {wanted} bytes beside the model that serves, and {available} are free: free "
            "memory, or restart the worker.",
        )


def _try(engine: Engine) -> None:
    """One small prefix and one request, on pages of its own. Raises ValueError for scores that are no numbers."""
    count = min(_TRIAL_BEHAVIOURS, engine.limits.max_prefix_behaviours)
    numbers = np.arange(count)
    behaviours = Behaviours(numbers.astype("<i8"), np.zeros(count, "<u2"), (numbers * 60_000).astype("<i8"))
    candidates = np.arange(min(_TRIAL_CANDIDATES, engine.limits.max_candidates), dtype=np.int64)
    tokens = engine.layout.tokens(count)
    pages = np.arange(engine.geometry.pages_for(tokens), dtype=np.int32)
    bind_own_arena(engine, longest_tokens=tokens)
    query_time_ms = count * 60_000
    prefix = engine.prefix_inputs(np.empty(0, np.int64), behaviours, query_time_ms=query_time_ms)
    engine.pre_infer(PrefixChunk(prefix, 0, tokens, pages))
    request = engine.rank_inputs(tokens, pages, Behaviours.empty(), candidates, query_time_ms, behaviours.timestamps_ms)
    (outputs,) = engine.rank([request])
    if not np.isfinite(outputs.scores).all():
        raise ValueError("its scores for a small request are not finite numbers")


def _require_precision(engine: Engine, settings: WorkerSettings) -> None:
    """The DRAM tier's element type must do for this model, too."""
    if not settings.dram_bytes:
        return
    try:
        require_precision(
            engine,
            settings.model,
            settings.dram_kv_dtype,
            settings.dram_max_score_error,
            settings.dram_min_topk_overlap,
        )
    except RelayError as error:
        raise ReloadRefusedError(ReloadOutcome.UNFIT, str(error)) from error


def _latency(engine: Engine, settings: WorkerSettings) -> LatencyModel | None:
    if settings.calibration is None:
        return None
    try:
        return latency_for(engine, settings.calibration)
    except RelayError as error:
        raise ReloadRefusedError(ReloadOutcome.UNFIT, str(error)) from error
