"""In a worker's PYTHONPATH: its device hangs as soon as the file RELAYGR_TEST_HANG holds its process id."""

from __future__ import annotations

import os
import sys
import threading
import time
from pathlib import Path


def _watch(wish: Path) -> None:
    while not wish.exists() or wish.read_text() != str(os.getpid()):
        time.sleep(0.05)
    executor = sys.modules["relaygr.worker.executor.executor"].Executor  # type: ignore[attr-defined]
    executor.step = lambda *_: time.sleep(1e6)


if "RELAYGR_TEST_HANG" in os.environ:
    threading.Thread(target=_watch, args=(Path(os.environ["RELAYGR_TEST_HANG"]),), daemon=True).start()
