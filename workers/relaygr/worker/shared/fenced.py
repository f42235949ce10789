"""A note from a holder of the lock that was fenced: the id is another's, and nobody here may take over from me.

Its death frees the lock, and a standby that waits for it would join under the same id and fence the other in turn.
So the note is written first, under the lock, and says which holder wrote it; the one directly after heeds it.
A process that somebody started since then, by hand, is not meant.
"""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Final

from relaygr.worker.shared.lock import ArenaLock

_NAME: Final = "fenced"


def note_fenced(folder: Path, lock: ArenaLock) -> None:
    """Does nothing without the lock. A folder that cannot be written leaves no note."""
    if lock.is_held():
        with contextlib.suppress(OSError):
            (folder / _NAME).write_text(f"{lock.arena_epoch}\n", encoding="ascii")


def predecessor_was_fenced(folder: Path, lock: ArenaLock) -> bool:
    """Whether the holder directly before this one left its note."""
    try:
        return int((folder / _NAME).read_text(encoding="ascii")) == lock.arena_epoch - 1
    except (OSError, ValueError):
        return False
