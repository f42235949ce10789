"""A supervisor and its children for tests, without Kafka and torch: `supervised.py supervise FOLDER | child ...`.

A child loads while the file FOLDER/loading exists, then waits for the worker's lock, and writes `took` into FOLDER/log.
A file `end-NUMBER` makes the active child end with that exit code. A supervisor cannot tell such a child from a worker.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from relaygr.runtime.errors import RelayError
from relaygr.runtime.private_files import private_folder
from relaygr.worker.exits import Exit
from relaygr.worker.shared.lock import ArenaLock
from relaygr.worker.supervisor.heartbeat import ChildPhase, Heartbeat
from relaygr.worker.supervisor.link import SupervisorLink

SILENCE_S = 3.0


def supervise(folder: Path) -> int:
    # A child starts sooner without them.
    from relaygr.worker.settings import WorkerSettings
    from relaygr.worker.supervisor.policy import SupervisorSettings
    from relaygr.worker.supervisor.supervisor import Supervisor

    def make_command(descriptor: int, is_first: bool) -> Sequence[str]:
        role = "first" if is_first else "standby"
        return [sys.executable, "-m", "tests.workers.supervised", "child", str(folder), str(descriptor), role]

    private_folder(folder / "shared", "worker.shared_path")
    settings = SupervisorSettings(silence_s=SILENCE_S, restart_pause_s=0.1)
    worker = WorkerSettings(http_host="127.0.0.1", http_port=int(os.environ["PORT"]), drain_s=2)
    try:
        code = Supervisor(worker, settings, folder / "shared", make_command).run()
    except RelayError as refused:
        note(folder, f"refused {refused}")
        return Exit.FAILED
    note(folder, f"supervisor ended {int(code)} torch {'torch' in sys.modules}")
    return code


def child(folder: Path, descriptor: int, role: str) -> int:
    link = SupervisorLink(descriptor, folder / "shared", float(os.environ["ORPHAN_S"]))
    while (folder / "loading").exists():
        time.sleep(0.02)
    ended: list[int] = []
    signal.signal(signal.SIGTERM, lambda *_: ended.append(1))
    signal.signal(signal.SIGHUP, lambda *_: note(folder, "hangup"))
    phase = ChildPhase.STANDBY
    lock = ArenaLock(folder / "shared", is_standby=role == "standby")
    while not ended and not link.is_orphaned:
        if phase is ChildPhase.STANDBY and lock.try_acquire() is not None:
            phase = ChildPhase.ACTIVE
            note(folder, f"took {role}")
        if phase is ChildPhase.ACTIVE and not lock.is_held():
            private_folder(folder / "shared", "worker.shared_path")
            if lock.put_back():
                note(folder, "put back")
        link.send(Heartbeat(phase, 1, phase is ChildPhase.ACTIVE, ""))
        for order in folder.glob("end-*") if phase is ChildPhase.ACTIVE else ():
            order.unlink()
            code = Exit(int(order.name.removeprefix("end-")))
            link.note_exit(code)
            return code
        time.sleep(0.02)
    note(folder, f"stopped {phase.value}")
    link.note_exit(Exit.DONE)
    return Exit.DONE


def note(folder: Path, text: str) -> None:
    with (folder / "log").open("a") as log:
        log.write(f"{os.getpid()} {text}\n")


if __name__ == "__main__":
    mode, name, *rest = sys.argv[1:]
    sys.exit(supervise(Path(name)) if mode == "supervise" else child(Path(name), int(rest[0]), rest[1]))
