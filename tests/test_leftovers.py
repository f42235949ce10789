"""The check that fails a test which leaves threads or processes behind."""

from __future__ import annotations

import subprocess
import threading

from tests.leftovers import Leftovers


def test_a_thread_is_left_until_it_ends() -> None:
    leftovers, stop = Leftovers(), threading.Event()
    thread = threading.Thread(target=stop.wait, name="forgotten", daemon=True)
    thread.start()
    assert leftovers.found() == ["thread forgotten"]
    assert leftovers.found_after(0.05) == ["thread forgotten"]
    threading.Timer(0.05, stop.set).start()
    assert leftovers.found_after() == []


def test_a_process_is_left_until_it_was_waited_for() -> None:
    leftovers = Leftovers()
    process = subprocess.Popen(["sleep", "60"])
    found = leftovers.found()
    process.kill()
    process.wait()
    assert [line.startswith(f"process {process.pid}: ") for line in found] == [True]
    assert leftovers.found() == []
