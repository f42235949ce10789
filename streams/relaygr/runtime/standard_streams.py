"""Standard streams that are closed when a process starts.

The next file that the process opens, such as the history store, gets the number of a closed stream. A library that then
writes a line to standard error would write it into that file.
"""

from __future__ import annotations

import os
import sys
from typing import Final

_STREAMS: Final = (("stdin", "r"), ("stdout", "w"), ("stderr", "w"))


def open_closed_streams() -> None:
    """Opens /dev/null in the place of each closed one. The first call of a process: no other file may be open."""
    for name, mode in _STREAMS:
        if getattr(sys, name) is None:
            # The lowest number that is free, so it is the stream's own.
            descriptor = os.open(os.devnull, os.O_RDWR)
            os.set_inheritable(descriptor, True)
            setattr(sys, name, open(descriptor, mode, encoding="utf-8", closefd=False))  # noqa: SIM115
