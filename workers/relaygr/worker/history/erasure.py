"""The erasure of deleted users' bytes from the files of the history store."""

from __future__ import annotations

from typing import Final

import lmdb
import structlog

from relaygr.runtime.clock import Clock
from relaygr.runtime.errors import RelayError
from relaygr.worker.history.store import HistoryStore

log = structlog.get_logger()

ERASE_RETRY_US: Final = 30_000_000


class Erasure:
    """Compacts the store within `within_s` after a deletion, a slice at a time: requests and new histories need not
    wait.
    """

    def __init__(self, store: HistoryStore, within_s: float, clock: Clock) -> None:
        self._store, self._clock = store, clock
        self._after_ms = int(within_s * 1000 / 2)
        self._try_at_us = 0

    def turn(self) -> None:
        now_us = self._clock.monotonic_us()
        if now_us < self._try_at_us:
            return
        if not self._store.is_compacting:
            removed_at_ms = self._store.removed_at_ms
            # A time in the future means that the clock was set back.
            if removed_at_ms is None or 0 <= self._clock.wall_us() // 1000 - removed_at_ms < self._after_ms:
                return
        try:
            if self._store.compact():
                log.info("history store compacted: no byte of deleted users is left in it", path=str(self._store.path))
        except (OSError, RelayError, lmdb.Error) as error:
            self._try_at_us = now_us + ERASE_RETRY_US
            log.warning(
                "bytes of deleted users are still in the history store: it needs free disk space for its live records",
                path=str(self._store.path),
                cause=str(error),
            )
