"""SIGHUP: the checkpoint in `worker.model` is loaded again, and takes over between two pieces of work.

    main thread      asks, and hands over what was loaded (`tick`)
    reload thread    loads and tries it, beside the model that serves (`relaygr.worker.model_reload`)
    device thread    swaps: the new engine on the same arena, everything in flight begins again with it

Whatever is wrong with a checkpoint, the worker goes on with the model that it has, says why, and counts it. A standby
swaps at once, so that it takes over with the model that the active worker was told to load.
"""

from __future__ import annotations

import threading
from pathlib import Path

import structlog
from prometheus_client import REGISTRY, CollectorRegistry, Counter

from relaygr.worker.model.checkpoint import WEIGHTS_FILE
from relaygr.worker.model_reload import NewModel, ReloadOutcome, ReloadRefusedError, load_beside
from relaygr.worker.process.parts import Parts
from relaygr.worker.process.prepare import Prepared
from relaygr.worker.settings import WorkerSettings

log = structlog.get_logger()


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
