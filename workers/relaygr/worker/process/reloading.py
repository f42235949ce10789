"""SIGHUP: the checkpoint in `worker.model` is loaded again, and takes over between two pieces of work.

    main thread      asks, and hands over what was loaded (`tick`)
    reload thread    loads and tries it, beside the model that serves (`relaygr.worker.process.reloading`)
    device thread    swaps: the new engine on the same arena, everything in flight begins again with it

Whatever is wrong with a checkpoint, the worker goes on with the model that it has, says why, and counts it. A standby
swaps at once, so that it takes over with the model that the active worker was told to load.
"""

from __future__ import annotations

import enum
import threading
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import psutil
import structlog
from prometheus_client import REGISTRY, CollectorRegistry, Counter

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
from relaygr.worker.process.parts import Parts
from relaygr.worker.process.prepare import Prepared
from relaygr.worker.settings import WorkerSettings

log = structlog.get_logger()


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


class ModelReloading:
    """Belongs to the main thread."""

    def __init__(self, settings: WorkerSettings, prepared: Prepared, registry: CollectorRegistry = REGISTRY) -> None:
        self._settings = settings
        self._prepared = prepared
        self._reloads = Counter(
            "relaygr_model_reloads_total", "Wishes for another model by how they ended", ["outcome"], registry=registry
        )
        for outcome in ReloadOutcome:
            self._reloads.labels(outcome.value)
        self._wanted = False
        self._swapping = False
        self._thread: threading.Thread | None = None
        self._loaded: NewModel | None = None
        self._file = self._loading_file = _identity(settings.model)

    def want(self) -> None:
        """The checkpoint may have changed. Takes no lock: a signal handler may call it."""
        self._wanted = True

    def tick(self, parts: Parts | None, *, is_active: bool) -> None:
        """Begins to load if that is wanted, and lets what was loaded take over. Returns at once.

        `parts`: those of the worker, None while a standby has no memory; `is_active`: their device thread has work.
        """
        if self._thread is not None and not self._thread.is_alive():
            self._thread = None
            loaded, self._loaded = self._loaded, None
            if loaded is not None:
                self._hand_over(loaded, parts, is_active)
        # A checkpoint is compared with the model that serves, which is not certain while the device thread may swap.
        if self._wanted and self._thread is None and not self._swapping:
            self._wanted = False
            self._loading_file = _identity(self._settings.model)
            self._warn_if_overwritten()
            self._thread = threading.Thread(target=self._load, name="reload", daemon=True)
            self._thread.start()

    # -- the reload thread -------------------------------------------------------------------------

    def _load(self) -> None:
        try:
            loaded = load_beside(self._prepared.engine, self._settings)
        except ReloadRefusedError as refused:
            log.error("the model stays as it is", outcome=refused.outcome.value, cause=str(refused))
            return self._count(refused.outcome)
        if loaded is None:
            log.info("the checkpoint is the model that serves", model_revision=self._prepared.engine.revision)
            return self._count(ReloadOutcome.UNCHANGED)
        self._loaded = loaded
        return None

    # -- taking over -------------------------------------------------------------------------------

    def _hand_over(self, model: NewModel, parts: Parts | None, is_active: bool) -> None:
        def swap() -> None:
            try:
                self._swap(model, parts)
            finally:
                self._swapping = False

        self._swapping = True
        if parts is not None and is_active:
            parts.device.call(swap)
        else:
            swap()

    def _swap(self, model: NewModel, parts: Parts | None) -> None:
        """On the device thread where that has work: it may not end by this. Before it has any, nothing disturbs it."""
        old = self._prepared.engine.revision
        try:
            if parts is not None:
                model.engine.bind(parts.arena)
                parts.executor.serve_with(model.engine)
        except Exception as error:
            log.exception("the new model could not take over", cause=repr(error))
            return self._count(ReloadOutcome.BROKEN)
        self._prepared.engine = model.engine
        if model.latency is not None:
            self._prepared.corrector.recalibrate(model.latency)
            if parts is not None:
                parts.cache.weigh_by(model.latency.pre_us)
        self._file = self._loading_file
        if parts is not None:
            parts.metrics.bytes_at_most.labels("weights").set(model.engine.weights_bytes)
            threading.Thread(
                target=self._free_old, args=(parts, model.engine.namespace), name="free-old", daemon=True
            ).start()
        log.info("another model serves", model_revision=model.engine.revision, instead_of=old)
        return self._count(ReloadOutcome.SWAPPED)

    @staticmethod
    def _free_old(parts: Parts, namespace: bytes) -> None:
        """Off the device thread: there may be very many."""
        freed = parts.cache.keep_only(namespace)
        log.info("prefixes of other models freed", prefixes=freed)

    def _count(self, outcome: ReloadOutcome) -> None:
        self._reloads.labels(outcome.value).inc()

    def _warn_if_overwritten(self) -> None:
        """The weights that serve are mapped from their file: one that is overwritten in place changes them."""
        now = self._loading_file
        if self._file is not None and now is not None and now[0] == self._file[0] and now[1:] != self._file[1:]:
            log.critical(
                "the weights were overwritten in place while they served: scores since then are of no model. Replace "
                "checkpoint files by renaming others over them",
                file=str(self._settings.model / WEIGHTS_FILE),
            )


def _identity(folder: Path) -> tuple[int, int, int] | None:
    """Inode, size and time of change of the weights; None if there are none."""
    try:
        found = (folder / WEIGHTS_FILE).stat()
    except OSError:
        return None
    return found.st_ino, found.st_size, found.st_mtime_ns


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
