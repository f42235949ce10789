"""A supervisor and its children for tests, without Kafka and torch: `supervised.py supervise FOLDER | child ...`.

A child loads while the file FOLDER/loading exists, then waits for flock on FOLDER/lock, and writes `took` into
FOLDER/log. A file `end-NUMBER` makes the active child end with that exit code. A supervisor cannot tell such a
child from a worker.
"""

from __future__ import annotations

import fcntl
import os
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from relaygr.worker.exits import Exit
from relaygr.worker.settings import WorkerSettings
from relaygr.worker.supervisor.heartbeat import ChildPhase, Heartbeat, SupervisorLink
from relaygr.worker.supervisor.policy import SupervisorSettings
from relaygr.worker.supervisor.supervisor import Supervisor

SILENCE_S = 3.0


def supervise(folder: Path) -> int:
    def make_command(descriptor: int, is_first: bool) -> Sequence[str]:
        role = "first" if is_first else "standby"
        return [sys.executable, "-m", "tests.workers.supervised", "child", str(folder), str(descriptor), role]

    settings = SupervisorSettings(silence_s=SILENCE_S, restart_pause_s=0.1)
    worker = WorkerSettings(http_host="127.0.0.1", http_port=int(os.environ["PORT"]), drain_s=2)
    code = Supervisor(worker, settings, make_command).run()
    note(folder, f"supervisor ended {int(code)} torch {'torch' in sys.modules}")
    return code


def child(folder: Path, descriptor: int, role: str) -> int:
    while (folder / "loading").exists():
        time.sleep(0.02)
    ended: list[int] = []
    signal.signal(signal.SIGTERM, lambda *_: ended.append(1))
    signal.signal(signal.SIGHUP, lambda *_: note(folder, "hangup"))
    link = SupervisorLink(descriptor)
    phase = ChildPhase.STANDBY
    lock = os.open(folder / "lock", os.O_RDWR | os.O_CREAT)
    while not ended and not link.is_closed:
        if phase is ChildPhase.STANDBY:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                phase = ChildPhase.ACTIVE
                note(folder, f"took {role}")
            except BlockingIOError:
                pass
        link.send(Heartbeat(phase, 1, phase is ChildPhase.ACTIVE, ""))
        for order in folder.glob("end-*") if phase is ChildPhase.ACTIVE else ():
            order.unlink()
            return int(order.name.removeprefix("end-"))
        time.sleep(0.02)
    note(folder, f"stopped {phase.value}")
    return Exit.DONE


def note(folder: Path, text: str) -> None:
    with (folder / "log").open("a") as log:
        log.write(f"{os.getpid()} {text}\n")


if __name__ == "__main__":
    mode, name, *rest = sys.argv[1:]
    sys.exit(supervise(Path(name)) if mode == "supervise" else child(Path(name), int(rest[0]), rest[1]))
