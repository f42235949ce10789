"""Which users a worker offers for a warm-up, and when."""

from __future__ import annotations

import threading
from functools import partial
from typing import Final

import structlog

from relaygr.worker.executor.executor import Executor
from relaygr.worker.history.store import HistoryStore
from relaygr.worker.settings import WorkerSettings

log = structlog.get_logger()

_SCAN_INTERVAL_US: Final = 1_000_000
_STOP_S: Final = 2.0


class WarmUpOffers:
    """Offers the executor the users who will probably return: those with the newest behaviours.

    A warm-up lasts `worker.warm_up_s`. Meanwhile the store is scanned, on a thread of its own, whenever it has more or
    fewer users than before. The poll thread calls `tick`; any thread may call `begin`.
    """

    def __init__(self, settings: WorkerSettings, executor: Executor, store: HistoryStore) -> None:
        self._settings = settings
        self._executor = executor
        self._store = store
        self._partitions: frozenset[int] = frozenset()
        self._wanted = self._stopping = False
        self._ends_us = 0
        self._scan_at_us = 0
        self._users = 0
        self._thread: threading.Thread | None = None

    def begin(self, partitions: frozenset[int] | None = None) -> None:
        """Begins a warm-up at the next tick. `partitions`: those that the worker owns from now on."""
        if partitions is not None:
            self._partitions = partitions
        self._wanted = self._settings.warm_up_users > 0

    def tick(self, now_us: int) -> None:
        """Never blocks. Monotonic µs."""
        if self._wanted:
            self._wanted = False
            self._ends_us, self._scan_at_us = now_us + int(self._settings.warm_up_s * 1e6), now_us
            self._users = 0
            self._executor.post(self._executor.begin_warm_up)
        if not self._ends_us or self._stopping or (self._thread is not None and self._thread.is_alive()):
            return
        if now_us >= self._ends_us:
            self._ends_us = 0
            self._executor.post(partial(self._executor.offer_warm_ups, ()))
        elif now_us >= self._scan_at_us:
            self._scan_at_us = now_us + _SCAN_INTERVAL_US
            self._thread = threading.Thread(target=self._scan, name="warm-up", daemon=True)
            self._thread.start()

    def stop(self) -> None:
        """Ends the scan, so that the store may be closed."""
        self._stopping = True
        if self._thread is not None:
            self._thread.join(_STOP_S)

    def _scan(self) -> None:
        try:
            users = self._store.user_count
            if users != self._users:
                self._users = users
                wanted = self._settings.warm_up_users
                recent = self._store.recent_users(self._partitions, wanted, lambda: not self._stopping)
                self._executor.post(partial(self._executor.offer_warm_ups, recent))
        except Exception as error:
            log.debug("the store was not scanned for a warm-up", error=repr(error))
