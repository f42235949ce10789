"""Where memory that outlives a process can lie: a folder that is memory where the system has one, else any other."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Final

_TMPFS: Final = Path("/dev/shm")


def memory_folder() -> Path:
    """A folder that this user may write. Not on tmpfs, what lies there is written to a disk as well."""
    in_memory = _TMPFS.is_dir() and os.access(_TMPFS, os.W_OK)
    return _TMPFS if in_memory else Path(tempfile.gettempdir())
