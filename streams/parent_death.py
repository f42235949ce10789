"""A signal from the kernel to this process when its parent is dead, however that died. Linux; elsewhere it never comes.

The parent is the thread that started this process: only a main thread may.
"""

from __future__ import annotations

import ctypes
import signal
import sys
from typing import Final

_PR_SET_PDEATHSIG: Final = 1


def signal_when_parent_dies(number: signal.Signals) -> None:
    """From now on. A parent that is dead already is not told of."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number)
