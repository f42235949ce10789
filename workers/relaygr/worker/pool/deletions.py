"""Deletions that the store has still to carry out. A file for each outlives the process, since the tombstone that asked
for it is not read again.

Each is carried out twice: at once, and after `SECOND_PASS_US` for objects that another process was writing then. A file
has the name of the part of the keys that names the user, a keyed hash. A file with any other name is no deletion: it is
left alone, and logged.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import structlog
from prometheus_client import Gauge

from relaygr.runtime.errors import RelayError
from relaygr.runtime.private_files import private_folder
from relaygr.worker.pool.segments import USER_PART

log = structlog.get_logger()

SECOND_PASS_US: Final = 90_000_000
"""No put lasts as long."""
MOST: Final = 65_536
"""With more, everything is deleted."""
EVERYONE: Final = "[0-9a-f]+"
"""The name of the deletion of all users: the pattern that earlier versions gave to their store."""
_AT_ONCE: Final = 32
"""Deletions in one call of the store."""
_MOST_NAMED: Final = 8
_NEVER_US: Final = 2**62

_WAITING = Gauge("relaygr_pool_deletions", "Deletions of users that the pool has still to carry out once or twice")


@dataclass(slots=True, eq=False)
class _Deletion:
    due_us: int = 0
    was_passed: bool = False


class Deletions:
    """Thread-safe. A deletion is named by the part of the keys that names the user."""

    def __init__(self, folder: Path) -> None:
        """Raises RelayError if the folder cannot be used."""
        private_folder(folder, "worker.history_path")
        self._folder = folder
        self._lock = threading.Lock()
        self._all: dict[str, _Deletion] = {name: _Deletion() for name in _kept(folder)}
        _WAITING.set(len(self._all))

    def add(self, part: str) -> None:
        """Notes a deletion. It outlives the process unless the disk is full, which is logged."""
        with self._lock:
            replaced: set[str] = set()
            if len(self._all) >= MOST and part not in self._all:
                replaced, self._all, part = self._all.keys() - {EVERYONE}, {}, EVERYONE
            self._all[part] = _Deletion()
            _WAITING.set(len(self._all))
            try:
                (self._folder / part).touch(mode=0o600)
                for each in replaced:
                    (self._folder / each).unlink(missing_ok=True)
            except OSError as error:
                log.error("a deletion in the pool is not kept for a restart", error=str(error))

    def take(self, now_us: int) -> dict[str, _Deletion]:
        """Some deletions that are due, by part, for `passed`."""
        with self._lock:
            due = [(part, each) for part, each in self._all.items() if each.due_us <= now_us]
            return dict(due[:_AT_ONCE])

    def passed(self, carried_out: dict[str, _Deletion], now_us: int) -> None:
        """The store has nothing of these any more."""
        with self._lock:
            for part, each in carried_out.items():
                if self._all.get(part) is not each or each.due_us > now_us:
                    continue  # Asked for again meanwhile, or passed by another thread.
                if each.was_passed:
                    del self._all[part]
                    try:
                        (self._folder / part).unlink(missing_ok=True)
                    except OSError as error:
                        log.warning("a deletion in the pool is carried out again after a restart", error=str(error))
                each.was_passed, each.due_us = True, now_us + SECOND_PASS_US
            _WAITING.set(len(self._all))

    def due_us(self) -> int:
        """When the next one is due; far in the future without any."""
        with self._lock:
            return min((each.due_us for each in self._all.values()), default=_NEVER_US)


def _kept(folder: Path) -> Iterator[str]:
    """The names of deletions in the folder. Raises RelayError if it cannot be read."""
    strange: list[str] = []
    try:
        with os.scandir(folder) as entries:
            for entry in entries:
                is_name = entry.name == EVERYONE or USER_PART.fullmatch(entry.name)
                if is_name and entry.is_file(follow_symlinks=False):
                    yield entry.name
                elif len(strange) < _MOST_NAMED:
                    strange.append(entry.name)
    except OSError as error:
        raise RelayError(
            f"{folder} cannot be read ({error.strerror}): deletions in the pool are kept there."
        ) from error
    if strange:
        log.warning("not a deletion in the pool: move it elsewhere", folder=str(folder), names=strange)
