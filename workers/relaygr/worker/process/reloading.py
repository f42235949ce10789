"""Model reload: SIGHUP makes a worker load the checkpoint in `worker.model` again and swap the models.

docs/architecture.md describes the steps. If the checkpoint cannot serve, the worker keeps its model, logs the reason
and counts the outcome. A standby swaps at once, so that it takes over with the model that the active worker was told to
load. An active worker keeps the previous model until the new one has proved itself (`latest_answers.FiniteScores`).
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

import structlog
from prometheus_client import REGISTRY, CollectorRegistry, Counter

from relaygr.admission.latency import LatencyModel
from relaygr.runtime.clock import Clock, SystemClock
from relaygr.runtime.errors import RelayError
from relaygr.runtime.limits import available_memory
from relaygr.worker.calibration import latency_for
from relaygr.worker.history.store import HistoryStore
from relaygr.worker.memory import HEADROOM, forward_bytes, is_out_of_memory
from relaygr.worker.model.config import WEIGHTS_FILE, is_ranker
from relaygr.worker.model.description import read_description
from relaygr.worker.model.engine import build_engine, load_model, memory_bytes, weights_identity
from relaygr.worker.model.interface import Engine
from relaygr.worker.process.components import Components
from relaygr.worker.process.prepare import Prepared
from relaygr.worker.process.trial import require_finite_scores, require_precisions, require_rules
from relaygr.worker.settings import WorkerSettings

log = structlog.get_logger()


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
    RESTORED = "restored"
    """The previous model serves again, since the scores of its successor were not finite numbers."""


class ReloadState(enum.Enum):
    """The state of a reload: each follows the one before, and IDLE follows also a load that found nothing to swap."""

    IDLE = enum.auto()
    LOADING = enum.auto()
    """On the reload thread."""
    LOADED = enum.auto()
    SWAPPING = enum.auto()
    """On the device thread, or on the main thread before that one has work."""


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
    outcome: ReloadOutcome = ReloadOutcome.SWAPPED
    """The outcome that its swap is counted as."""


def reloads_counter(registry: CollectorRegistry) -> Counter:
    """The metric `relaygr_model_reloads_total`, with a series for each outcome."""
    reloads = Counter("relaygr_model_reloads_total", "Model reloads by outcome", ["outcome"], registry=registry)
    for outcome in ReloadOutcome:
        reloads.labels(outcome.value)
    return reloads


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
        self._reloads = reloads_counter(registry)
        self._requested = False
        self._state = ReloadState.IDLE
        self._loaded: NewModel | None = None
        self._previous: NewModel | None = None
        """Serves again if the present model diverges. None once that one has proved itself."""
        self._is_diverged = False
        # One thread for all reloads: each new thread would get its own arena of malloc, which keeps a model's memory.
        self._calls: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="reload", daemon=True)
        self._file = self._loading_file = self._seen_file = weights_identity(prepared.model)
        self._poll_us = int(settings.model_poll_s * 1e6)
        self._poll_at_us = self._clock.monotonic_us() + self._poll_us

    def request(self) -> None:
        """Requests a reload. Takes no lock, so a signal handler may call it."""
        self._requested = True

    @property
    def is_loading(self) -> bool:
        """Whether the reload thread loads a model."""
        return self._state is ReloadState.LOADING

    def tick(self, components: Components | None, *, is_active: bool) -> None:
        """Starts a requested reload, and starts the swap of a loaded model. Does not wait for either.

        `components` is None while a standby has no memory. `is_active`: the device thread may have work.
        """
        if self._state is ReloadState.LOADED and self._loaded is not None:
            loaded, self._loaded = self._loaded, None
            self._hand_over(loaded, components, is_active)
        if components is not None and is_active:
            self._watch_scores(components)
        self._poll()
        # `load_beside` compares the checkpoint with the serving model, which a swap in progress may replace.
        if self._requested and self._due_us is None:
            self._due_us = self._clock.monotonic_us() + self._delay_us
            if self._delay_us:
                log.info("the reload waits for its turn", delay_s=self._delay_us / 1e6)
        is_due = self._due_us is not None and self._clock.monotonic_us() >= self._due_us
        if is_due and self._state is ReloadState.IDLE:
            self._requested = False
            self._due_us = None
            # There was memory for two models.
            self._previous = None
            self._loading_file = weights_identity(self._settings.model)
            self._warn_if_overwritten()
            self._state = ReloadState.LOADING
            self._calls.put(self._load)
            if self._thread.ident is None:
                self._thread.start()

    def _poll(self) -> None:
        """Requests a reload once for each other weights file that is found."""
        now_us = self._clock.monotonic_us()
        if not self._poll_us or now_us < self._poll_at_us:
            return
        self._poll_at_us = now_us + self._poll_us
        found = weights_identity(self._settings.model)
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
        """Leaves a model that may take over in `_loaded`: the main thread hands it over."""
        try:
            self._loaded = load_beside(self._prepared.engine, self._settings, self._prepared.store)
        except ReloadRefusedError as refused:
            log.error("the model is not replaced", outcome=refused.outcome.value, cause=str(refused))
            self._count(refused.outcome)
        else:
            if self._loaded is None:
                log.info("the checkpoint is the serving model", model_revision=self._prepared.engine.revision)
                self._count(ReloadOutcome.UNCHANGED)
        finally:
            self._state = ReloadState.IDLE if self._loaded is None else ReloadState.LOADED

    # -- taking over -------------------------------------------------------------------------------

    def _hand_over(self, model: NewModel, components: Components | None, is_active: bool) -> None:
        def swap() -> None:
            try:
                self._swap(model, components, is_active=is_active)
            finally:
                self._state = ReloadState.IDLE

        self._state = ReloadState.SWAPPING
        if components is not None and is_active:
            components.executor.post(swap)
        else:
            swap()

    def _watch_scores(self, components: Components) -> None:
        """Restores the previous model if the present one diverges, and drops it if that one has proved itself."""
        scores, previous = components.results.finite_scores, self._previous
        if scores.is_diverged and not self._is_diverged:
            log.critical(
                "the model's scores are not finite numbers: not ready. Deploy another checkpoint",
                model_revision=self._prepared.engine.revision,
                restores=previous.engine.revision if previous is not None else None,
            )
        self._is_diverged = scores.is_diverged
        if previous is None or self._state is not ReloadState.IDLE:
            return
        if scores.is_diverged or scores.is_proven:
            self._previous = None
        if scores.is_diverged:
            self._hand_over(previous, components, is_active=True)

    def _swap(self, model: NewModel, components: Components | None, *, is_active: bool) -> None:
        """Runs on the device thread once that thread has work, before that on the main thread. Must not raise."""
        present, calibrated = self._prepared.engine, self._prepared.corrector.calibrated
        old = present.revision
        try:
            if components is not None:
                model.engine.bind(components.arena)
                components.executor.serve_with(model.engine)
        except Exception as error:
            log.exception("the new model cannot take over", cause=repr(error))
            return self._count(ReloadOutcome.BROKEN)
        self._prepared.engine = model.engine
        if model.latency is not None:
            self._prepared.corrector.recalibrate(model.latency)
        is_restored = model.outcome is ReloadOutcome.RESTORED
        self._previous = None
        if is_active and not is_restored:
            latency = calibrated if model.latency is not None else None
            self._previous = NewModel(present, latency, ReloadOutcome.RESTORED)
        # The files of a restored model are no longer those in the folder.
        self._file = None if is_restored else self._loading_file
        if components is not None:
            components.results.finite_scores.begin()
            components.metrics.bytes_at_most.labels("weights").set(model.engine.weights_bytes)
            components.periodic.warm_up.begin()
            # There may be very many prefixes.
            self._calls.put(partial(self._free_old, components, model.engine.namespace))
        log.info("another model serves", model_revision=model.engine.revision, instead_of=old)
        return self._count(model.outcome)

    @staticmethod
    def _free_old(components: Components, namespace: bytes) -> None:
        """Runs on the reload thread."""
        freed = components.cache.keep_only(namespace)
        log.info("prefixes of other models freed", prefixes=freed)

    def _count(self, outcome: ReloadOutcome) -> None:
        self._reloads.labels(outcome.value).inc()

    def _warn_if_overwritten(self) -> None:
        """The serving weights are mapped from their file, so overwriting the file in place changes them. What a ranker
        of a team does with its files is not known.
        """
        if is_ranker(self._settings.model):
            return
        now = self._loading_file
        if self._file is not None and now is not None and now[0] == self._file[0] and now[1:] != self._file[1:]:
            log.critical(
                "the weights file was overwritten in place while the model served: scores since then are wrong. To "
                "replace a checkpoint, rename the new files over the old ones",
                file=str(self._settings.model / WEIGHTS_FILE),
            )


def load_beside(present: Engine, settings: WorkerSettings, store: HistoryStore | None = None) -> NewModel | None:
    """Loads the checkpoint in `worker.model` onto the device of `present`; None if it is the same model.

    The new engine is not bound to an arena yet. `store`: users for its trial. Raises ReloadRefusedError.
    """
    # `worker.model` may be a link that a deploy points at another revision meanwhile.
    folder = settings.model.resolve()
    settings = settings.model_copy(update={"model": folder})
    try:
        _require_fit(folder, present, settings)
        _require_memory_for_weights(folder, present, settings)
        model = load_model(folder)
        if model.revision == present.revision:
            return None
        present.device.bind_thread()
        engine = build_engine(
            model,
            present.device,
            present.geometry.dtype,
            settings.page_tokens,
            present.compute_dtype,
            settings.cuda_graphs,
            int(settings.device_table_bytes),
            settings.ranker_modules,
        )
        _require_memory_for_forwards(folder, engine, present, settings)
        require_finite_scores(engine, folder, store)
        require_rules(engine, folder)
        return NewModel(engine, _fitting_latency(engine, settings))
    except ReloadRefusedError:
        raise
    except Exception as error:
        if is_out_of_memory(error):
            message = f"{folder} does not fit into memory: {error}."
            raise ReloadRefusedError(ReloadOutcome.NO_MEMORY, message) from error
        raise ReloadRefusedError(ReloadOutcome.BROKEN, f"{folder} cannot be used: {error}") from error


def _require_fit(folder: Path, present: Engine, settings: WorkerSettings) -> None:
    """The pages of both tiers stay, so K,V must have the same shape and no prefix may be longer than before."""
    described = read_description(folder)
    geometry, layout = described.geometry(settings.page_tokens, present.geometry.dtype), described.layout
    if (geometry, layout) != (present.geometry, present.layout):
        raise ReloadRefusedError(
            ReloadOutcome.UNFIT,
            f"{folder} has K,V of another shape ({geometry}, {layout}) than the allocated pages "
            f"({present.geometry}, {present.layout}): restart the worker to use it.",
        )
    longest, present_longest = described.limits.max_prefix_behaviours, present.limits.max_prefix_behaviours
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
    wanted = sum(memory_bytes(folder, int(settings.device_table_bytes), dtype, present.device) for dtype in types)
    available = int(available_memory().available_bytes * HEADROOM)
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


def _fitting_latency(engine: Engine, settings: WorkerSettings) -> LatencyModel | None:
    """The calibration that the settings name. Raises ReloadRefusedError if it, or the precision, does not fit."""
    try:
        require_precisions(engine, settings)
        return None if settings.calibration is None else latency_for(engine, settings.calibration)
    except RelayError as error:
        raise ReloadRefusedError(ReloadOutcome.UNFIT, str(error)) from error
