"""Where a worker keeps what outlives it (`relaygr.worker.shared`), and its right to be the one that writes there."""

from __future__ import annotations

import getpass
import os
from pathlib import Path

import structlog

from relaygr.runtime.errors import RelayError
from relaygr.worker.process.config import WorkerConfig
from relaygr.worker.shared.lock import ArenaLock
from relaygr.worker.shared.place import memory_folder

log = structlog.get_logger()

_PATIENCE_S = 5.0
"""Beside `drain_s`: how long a predecessor that was told to stop may take."""


def shared_folder(config: WorkerConfig) -> Path:
    """The folder of this worker id."""
    root = config.worker.shared_path or memory_folder() / f"relaygr-{_user()}"
    return root / config.kafka.workers_group / config.worker.worker_id


def claim(lock: ArenaLock, config: WorkerConfig) -> None:
    """Takes the lock; waits a while for a predecessor that is stopping. Raises RelayError if it stays."""
    if lock.try_acquire() is not None:
        return
    log.info("waits for its predecessor to end", worker_id=config.worker.worker_id, pid=lock.holder())
    if lock.acquire(timeout_s=config.worker.drain_s + _PATIENCE_S) is None:
        raise RelayError(
            f"{config.worker.worker_id} runs already on this machine, as process {lock.holder() or 'unknown'}: stop it "
            "first, or give this one a `worker.worker_id` of its own. For workers of two clusters set "
            "`worker.shared_path` apart."
        )


def _user() -> str:
    """A container may run as a number that has no name."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return str(os.getuid())
