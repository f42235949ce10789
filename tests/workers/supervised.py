"""A supervisor and its children for tests, without Kafka and torch: `supervised.py supervise FOLDER | child ...`.

A child loads as long as there is a file FOLDER/loading, waits for flock on FOLDER/lock, and says `took` in FOLDER/log;
told by a file `end-NUMBER`, the active one ends with that code. What it does is what a worker does, as far as a
supervisor can tell.
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
from relaygr.worker.supervisor.beats import Beat, Phase
from relaygr.worker.supervisor.leash import Leash
from relaygr.worker.supervisor.settings import SupervisorSettings
from relaygr.worker.supervisor.supervisor import Supervisor

SILENCE_S = 3.0


def supervise(folder: Path) -> int:
    def make_command(line: int, is_first: bool) -> Sequence[str]:
        role = "first" if is_first else "standby"
        return [sys.executable, "-m", "tests.workers.supervised", "child", str(folder), str(line), role]

    settings = SupervisorSettings(silence_s=SILENCE_S, restart_pause_s=0.1)
    code = Supervisor("worker-00", settings, make_command, "127.0.0.1", int(os.environ["PORT"]), drain_s=2).run()
    note(folder, f"supervisor ended {int(code)} torch {'torch' in sys.modules}")
    return code


def child(folder: Path, line: int, role: str) -> int:
    while (folder / "loading").exists():
        time.sleep(0.02)
    ended: list[int] = []
    signal.signal(signal.SIGTERM, lambda *_: ended.append(1))
    signal.signal(signal.SIGHUP, lambda *_: note(folder, "hangup"))
    leash = Leash(line)
    phase = Phase.STANDBY
    lock = os.open(folder / "lock", os.O_RDWR | os.O_CREAT)
    while not ended and not leash.is_cut:
        if phase is Phase.STANDBY:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                phase = Phase.ACTIVE
                note(folder, f"took {role}")
            except BlockingIOError:
                pass
        leash.tell(Beat(phase, 1, phase is Phase.ACTIVE, ""))
        for wish in folder.glob("end-*") if phase is Phase.ACTIVE else ():
            wish.unlink()
            return int(wish.name.removeprefix("end-"))
        time.sleep(0.02)
    note(folder, f"stopped {phase.value}")
    return Exit.DONE


def note(folder: Path, text: str) -> None:
    with (folder / "log").open("a") as log:
        log.write(f"{os.getpid()} {text}\n")


if __name__ == "__main__":
    mode, name, *rest = sys.argv[1:]
    sys.exit(supervise(Path(name)) if mode == "supervise" else child(Path(name), int(rest[0]), rest[1]))
