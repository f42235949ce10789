"""Builds the pool of a worker from its settings."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import structlog

from relaygr.admission.corrector import Corrector
from relaygr.runtime.clock import Clock
from relaygr.runtime.errors import RelayError
from relaygr.runtime.files import read_regular
from relaygr.worker.cache.build import BuiltCache
from relaygr.worker.cache.copies import PageGuard
from relaygr.worker.model.interface import Engine
from relaygr.worker.pool.deletions import Deletions
from relaygr.worker.pool.segments import Segments
from relaygr.worker.pool.settings import PoolSettings
from relaygr.worker.pool.stores import STORES
from relaygr.worker.pool.tier import PoolTier

log = structlog.get_logger()

_LEAST_SECRET_BYTES = 16
_FOLDER = "pool-deletions"


def build_pool(
    settings: PoolSettings,
    engine: Engine,
    built: BuiltCache,
    guard: PageGuard | None,
    corrector: Corrector,
    clock: Clock,
    history_path: Path,
    owns: Callable[[str], bool],
    slots: int = 0,
) -> PoolTier | None:
    """The pool, before `start`; None if the settings have no store. See `PoolTier` for `guard`, `owns` and `slots`.

    Raises RelayError if the store can not be used here, or if there is no DRAM tier or no secret.
    """
    url, prefix = settings.url, settings.prefix
    if url is None or settings.secret_file is None:
        return None
    if settings.address is not None:
        log.warning("worker.pool.address and protocol go with the next release: set worker.pool.store", store=url.text)
    store = STORES[url.scheme]
    lack = store.missing()
    if lack is not None:
        raise RelayError(f"worker.pool.store is set, but {lack}.")
    if built.dram_arena is None:
        raise RelayError("worker.pool.store needs a DRAM tier, into which prefixes are read: set worker.dram_bytes.")
    geometry = built.cache.geometry
    segments = Segments(prefix, read_secret(settings.secret_file), geometry, engine.layout)
    return PoolTier(
        lambda memory: store.open_store(url, prefix, memory),
        segments,
        built.cache,
        built.dram_arena.numpy(),
        Deletions(history_path / _FOLDER),
        corrector,
        clock,
        guard=guard,
        owns=owns,
        visits=settings.visits,
        bytes_per_s=int(settings.bytes_per_s),
        slots=slots,
    )


def read_secret(path: Path) -> bytes:
    """The secret in the file. Raises RelayError if it cannot be read, or is too short."""
    try:
        secret = read_regular(path).strip()
    except OSError as error:
        raise RelayError(f"{path} (worker.pool.secret_file) cannot be read: {error.strerror}.") from error
    if len(secret) < _LEAST_SECRET_BYTES:
        raise RelayError(f"{path} (worker.pool.secret_file) has {len(secret)} bytes: at least {_LEAST_SECRET_BYTES}.")
    return secret
