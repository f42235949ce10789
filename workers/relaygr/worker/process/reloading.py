"""Model reload: SIGHUP makes a worker load the checkpoint in `worker.model` again and swap the models.

    main thread      starts the reload, and passes the loaded model on (`ModelReloading.tick`)
    reload thread    loads and tests the new model while the old one serves (`load_beside`), then frees old prefixes
    device thread    swaps between two steps: binds the new engine to the same arena, restarts the work in progress

With `worker.model_poll_s` the main thread also looks at that folder, and reloads when its weights are another file.

A new revision makes every prefix of a worker cold at once. With `worker.reload_spread_s` the workers of a fleet that
get SIGHUP together load it one after the other: each waits for its own part of that time (`reload_delay_s`).

If the checkpoint cannot serve, the worker keeps its model, logs the reason and counts the outcome. A standby swaps at
once, so that it takes over with the model that the active worker was told to load.

`load_beside` refuses a checkpoint that is broken, whose K,V do not fit the existing pages, that needs more memory than
is free beside the present model, or whose scores are not finite numbers. Nothing changes before the swap.

The latency model: with `worker.calibration` the worker uses that file. It must be a calibration of the new checkpoint,
since a restart would refuse another one. Without the setting the present latency model stays and is corrected on-line.
"""

from __future__ import annotations

import enum
import queue
import re
import threading
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import psutil
import structlog
from prometheus_client import REGISTRY, CollectorRegistry, Counter

from relaygr.admission.latency import LatencyModel
from relaygr.runtime.clock import Clock, SystemClock
from relaygr.runtime.errors import RelayError
from relaygr.schemas.messages import Behaviours
from relaygr.worker.calibration import latency_for
from relaygr.worker.measuring import bind_own_arena
from relaygr.worker.memory import HEADROOM, forward_bytes, is_out_of_memory
from relaygr.worker.model.attention.spec import torch_dtype
from relaygr.worker.model.checkpoint import WEIGHTS_FILE, load_checkpoint, resident_bytes
from relaygr.worker.model.config import read_config
from relaygr.worker.model.engine import build_engine
from relaygr.worker.model.interface import Engine, PrefixChunk
from relaygr.worker.process.parts import Parts
from relaygr.worker.process.prepare import Prepared
from relaygr.worker.score_error import require_compute_precision, require_kv_precision, require_precision
from relaygr.worker.settings import WorkerSettings

log = structlog.get_logger()


_TRIAL_BEHAVIOURS = 8
_TRIAL_CANDIDATES = 4


def reload_delay_s(worker_id: str, spread_s: float) -> float:
    """The part of `spread_s` that this worker waits before a reload.

    The numbers at the end of the ids give delays that are spread evenly for any number of workers (multiples of the
    golden ratio); an id without a number gives one by its hash. worker-00 does not wait. An active worker and its
    standby have one id, so both wait for the same time.
    """
    number = re.search(r"[0-9]+$", worker_id)
    if number is None:
        return spread_s * zlib.crc32(worker_id.encode()) / 2**32
    return spread_s * (int(number.group()) * 0.6180339887498949 % 1.0)


class ReloadOutcome(enum.StrEnum):
    """The outcome of a reload: a metric label."""

    SWAPPED = "swapped"
    UNCHANGED = "unchanged"
    BROKEN = "broken"
    UNFIT = "unfit"
    NO_MEMORY = "no_memory"


class ReloadRefusedError(RelayError):
    """The new checkpoint cannot serve; the present model stays."""

    def __init__(self, outcome: ReloadOutcome, message: str) -> None:
        super().__init__(message)
        self.outcome = outcome


@dataclass(frozen=True, slots=True)
class NewModel:
    """A model that may take over. `latency` None: the present latency model stays."""

    engine: Engine
    latency: LatencyModel | None


class ModelReloading:
    """Counts and carries out reloads. Belongs to the main thread."""

    def __init__(
        self,
        settings: WorkerSettings,
        prepared: Prepared,
        registry: CollectorRegistry = REGISTRY,
        clock: Clock | None = None,
    ) -> None:
        self._clock = clock or SystemClock()
        self._delay_us = int(reload_delay_s(settings.worker_id, settings.reload_spread_s) * 1e6)
        self._due_us: int | None = None
        self._settings = settings
        self._prepared = prepared
        self._reloads = Counter(
            "relaygr_model_reloads_total", "Model reloads by outcome", ["outcome"], registry=registry
        )
        for outcome in ReloadOutcome:
            self._reloads.labels(outcome.value)
        self._requested = False
        self._loading = self._swapping = False
        self._loaded: NewModel | None = None
        # One thread for all reloads: each new thread would get its own arena of malloc, which keeps a model's memory.
        self._calls: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="reload", daemon=True)
        self._file = self._loading_file = self._seen_file = _identity(settings.model)
        self._poll_us = int(settings.model_poll_s * 1e6)
        self._poll_at_us = self._clock.monotonic_us() + self._poll_us

    def request(self) -> None:
        """Requests a reload. Takes no lock, so a signal handler may call it."""
        self._requested = True

    @property
    def is_loading(self) -> bool:
        """Whether the reload thread loads a model."""
        return self._loading and self._loaded is None

    def tick(self, parts: Parts | None, *, is_active: bool) -> None:
        """Starts a requested reload, and starts the swap of a loaded model. Does not wait for either.

        `parts` is None while a standby has no memory. `is_active`: the device thread may have work.
        """
        loaded = self._loaded
        if loaded is not None:
            self._loaded = None
            self._hand_over(loaded, parts, is_active)
        self._poll()
        # `load_beside` compares the checkpoint with the serving model, which a swap in progress may replace.
        if self._requested and self._due_us is None:
            self._due_us = self._clock.monotonic_us() + self._delay_us
            if self._delay_us:
                log.info("the reload waits for its turn", delay_s=self._delay_us / 1e6)
        is_due = self._due_us is not None and self._clock.monotonic_us() >= self._due_us
        if is_due and not self._loading and not self._swapping:
            self._requested = False
            self._due_us = None
            self._loading_file = _identity(self._settings.model)
            self._warn_if_overwritten()
            self._loading = True
            self._calls.put(self._load)
            if self._thread.ident is None:
                self._thread.start()

    def _poll(self) -> None:
        """Requests a reload once for each other weights file that is found."""
        now_us = self._clock.monotonic_us()
        if not self._poll_us or now_us < self._poll_at_us:
            return
        self._poll_at_us = now_us + self._poll_us
        found = _identity(self._settings.model)
        if found is not None and found != self._seen_file:
            self._seen_file = found
            self._requested = True

    def close(self) -> None:
        """Ends the reload thread once it has nothing to do. Does not wait for it."""
        self._calls.put(None)

    # -- the reload thread -------------------------------------------------------------------------

    def _run(self) -> None:
        while (call := self._calls.get()) is not None:
            try:
                call()
            except Exception:
                log.exception("the reload thread failed")

    def _load(self) -> None:
        """Leaves a model that may take over in `_loaded`: the main thread hands it over, which ends `_loading`."""
        loaded = None
        try:
            loaded = load_beside(self._prepared.engine, self._settings)
        except ReloadRefusedError as refused:
            log.error("the model is not replaced", outcome=refused.outcome.value, cause=str(refused))
            self._count(refused.outcome)
        else:
            if loaded is None:
                log.info("the checkpoint is the serving model", model_revision=self._prepared.engine.revision)
                self._count(ReloadOutcome.UNCHANGED)
        finally:
            self._loading = loaded is not None
        self._loaded = loaded

    # -- taking over -------------------------------------------------------------------------------

    def _hand_over(self, model: NewModel, parts: Parts | None, is_active: bool) -> None:
        def swap() -> None:
            try:
                self._swap(model, parts)
            finally:
                self._swapping = False

        self._swapping, self._loading = True, False
        if parts is not None and is_active:
            parts.executor.post(swap)
        else:
            swap()

    def _swap(self, model: NewModel, parts: Parts | None) -> None:
        """Runs on the device thread once that thread has work, before that on the main thread. Must not raise."""
        old = self._prepared.engine.revision
        try:
            if parts is not None:
                model.engine.bind(parts.arena)
                parts.executor.serve_with(model.engine)
        except Exception as error:
            log.exception("the new model cannot take over", cause=repr(error))
            return self._count(ReloadOutcome.BROKEN)
        self._prepared.engine = model.engine
        if model.latency is not None:
            self._prepared.corrector.recalibrate(model.latency)
            if parts is not None:
                parts.cache.weigh_by(model.latency.pre_us)
        self._file = self._loading_file
        if parts is not None:
            parts.metrics.bytes_at_most.labels("weights").set(model.engine.weights_bytes)
            parts.housekeeping.warm_up.begin()
            # There may be very many prefixes.
            self._calls.put(partial(self._free_old, parts, model.engine.namespace))
        log.info("another model serves", model_revision=model.engine.revision, instead_of=old)
        return self._count(ReloadOutcome.SWAPPED)

    @staticmethod
    def _free_old(parts: Parts, namespace: bytes) -> None:
        """Runs on the reload thread."""
        freed = parts.cache.keep_only(namespace)
        log.info("prefixes of other models freed", prefixes=freed)

    def _count(self, outcome: ReloadOutcome) -> None:
        self._reloads.labels(outcome.value).inc()

    def _warn_if_overwritten(self) -> None:
        """The serving weights are mapped from their file, so overwriting the file in place changes them."""
        now = self._loading_file
        if self._file is not None and now is not None and now[0] == self._file[0] and now[1:] != self._file[1:]:
            log.critical(
                "the weights file was overwritten in place while the model served: scores since then are wrong. To "
                "replace a checkpoint, rename the new files over the old ones",
                file=str(self._settings.model / WEIGHTS_FILE),
            )


def _identity(folder: Path) -> tuple[int, int, int] | None:
    """Inode, size and modification time of the weights file; None without a file."""
    try:
        found = (folder / WEIGHTS_FILE).stat()
    except OSError:
        return None
    return found.st_ino, found.st_size, found.st_mtime_ns


def load_beside(present: Engine, settings: WorkerSettings) -> NewModel | None:
    """Loads the checkpoint in `worker.model` onto the device of `present`; None if it is the same model.

    The new engine is not bound to an arena yet. Raises ReloadRefusedError.
    """
    folder = settings.model
    try:
        _require_fit(folder, present, settings)
        _require_memory_for_weights(folder, present, settings)
        checkpoint = load_checkpoint(folder)
        if checkpoint.revision == present.revision:
            return None
        present.device.bind_thread()
        engine = build_engine(
            checkpoint,
            present.device,
            present.geometry.dtype,
            settings.page_tokens,
            present.compute_dtype,
            settings.cuda_graphs,
            int(settings.device_table_bytes),
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
    """The pages of both tiers stay, so K,V must have the same shape and no prefix may be longer than before."""
    config = read_config(folder)
    geometry, layout = config.geometry(settings.page_tokens, present.geometry.dtype), config.layout()
    if (geometry, layout) != (present.geometry, present.layout):
        raise ReloadRefusedError(
            ReloadOutcome.UNFIT,
            f"{folder} has K,V of another shape ({geometry}, {layout}) than the allocated pages "
            f"({present.geometry}, {present.layout}): restart the worker to use it.",
        )
    longest, present_longest = config.max_prefix_behaviours, present.limits.max_prefix_behaviours
    if longest > present_longest:
        raise ReloadRefusedError(
            ReloadOutcome.UNFIT,
            f"{folder} has prefixes of up to {longest} behaviours, but memory was planned for {present_longest}: "
            "restart the worker to use it.",
        )


def _require_memory_for_weights(folder: Path, present: Engine, settings: WorkerSettings) -> None:
    """Both models are in memory until the swap. An inexact model is compared with itself in exact types."""
    types = [present.compute_dtype]
    if present.compute_dtype is not present.compute_dtype.of_rows or present.geometry.dtype.is_scaled:
        types.append(present.compute_dtype.of_rows)
    wanted = sum(
        resident_bytes(folder, int(settings.device_table_bytes), torch_dtype(dtype), present.device.torch_device.type)
        for dtype in types
    )
    available = int(psutil.virtual_memory().available * HEADROOM)
    if not present.device.is_cpu:
        available = min(available, present.device.memory().free_bytes)
    _require_memory(folder, wanted, available)


def _require_memory_for_forwards(folder: Path, engine: Engine, present: Engine, settings: WorkerSettings) -> None:
    """Forward memory was planned for the present model; another model with the same K,V may need more."""
    wanted = forward_bytes(engine, settings) - forward_bytes(present, settings)
    _require_memory(folder, wanted, int(engine.device.memory().free_bytes * HEADROOM))


def _require_memory(folder: Path, wanted: int, available: int) -> None:
    if wanted > available:
        raise ReloadRefusedError(
            ReloadOutcome.NO_MEMORY,
            f"{folder} needs about {wanted} bytes beside the serving model, but {available} are free: free memory, or "
            "restart the worker.",
        )


def _try(engine: Engine) -> None:
    """Computes a small prefix and ranks on it, in an arena of its own. Raises ValueError if a score is not finite."""
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
    """Raises ReloadRefusedError if K,V in 8 bits, products in int8 or the DRAM tier's type are too inexact for it."""
    try:
        require_kv_precision(
            engine,
            settings.model,
            settings.kv_max_score_error,
            settings.kv_min_topk_overlap,
            int(settings.device_table_bytes),
        )
        require_compute_precision(
            engine,
            settings.model,
            settings.compute_max_score_error,
            settings.compute_min_topk_overlap,
            int(settings.device_table_bytes),
        )
        if settings.dram_bytes:
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
