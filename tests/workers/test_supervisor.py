"""A supervisor with real child processes that die, stop or get signals."""

from __future__ import annotations

import json
import os
import select
import shutil
import signal
import socket
import stat
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from relaygr.devbroker.local import free_ports
from relaygr.worker.exits import Exit
from relaygr.worker.supervisor.records import connect, read_records
from tests.waiting import becomes

pytestmark = pytest.mark.slow

TIMEOUT_S = 120.0


class SupervisorWorld:
    """A supervisor in a process of its own."""

    def __init__(self, folder: Path, orphan_s: float = 60.0, **variables: str) -> None:
        """Children load while the file `loading` exists in `folder`, and go on for `orphan_s` without a supervisor."""
        self._variables = variables
        self.folder = folder
        self.shared = folder / "shared"
        self._orphan_s = orphan_s
        self.process = self.start()

    def start(self) -> subprocess.Popen[bytes]:
        (self.port,) = free_ports(1)
        return subprocess.Popen(
            [sys.executable, "-m", "tests.workers.supervised", "supervise", str(self.folder)],
            env=os.environ | {"PORT": str(self.port), "ORPHAN_S": str(self._orphan_s)} | self._variables,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )

    def kill(self) -> None:
        """Sends kill -9 to the supervisor alone."""
        self.process.kill()
        self.process.wait(TIMEOUT_S)

    def restart(self) -> None:
        self.process = self.start()

    def get(self, path: str) -> Any:
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}{path}", timeout=5) as answer:
            return answer.read()

    def children(self) -> dict[str, int]:
        """Phase -> pid; empty while the supervisor does not serve yet."""
        try:
            return {child["phase"]: child["pid"] for child in json.loads(self.get("/children"))["children"]}
        except OSError:
            return {}

    def both(self) -> tuple[int, int]:
        """Waits for both children. The pids of the active one and the standby."""
        found: dict[str, int] = {}

        def has_both() -> bool:
            found.clear()
            found.update(self.children())
            return found.keys() >= {"active", "standby"}

        self.wait(has_both)
        return found["active"], found["standby"]

    def is_ready(self) -> bool:
        try:
            return bool(json.loads(self.get("/readyz"))["ok"])
        except OSError:
            return False

    def wait(self, is_so: Callable[[], bool]) -> None:
        assert becomes(is_so, TIMEOUT_S), self.log()

    def log(self) -> list[str]:
        path = self.folder / "log"
        return path.read_text().splitlines() if path.exists() else []

    def said(self, text: str) -> list[int]:
        """The pids of the processes that wrote this text into the log."""
        return [int(line.split(" ", 1)[0]) for line in self.log() if line.split(" ", 1)[1] == text]

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.terminate()
            self.process.wait(TIMEOUT_S)
        for record in read_records(self.shared):
            if record.is_alive:
                os.kill(record.pid, signal.SIGKILL)
        self.wait(lambda: not any(record.is_alive for record in read_records(self.shared)))


@pytest.fixture
def world(tmp_path: Path) -> Iterator[SupervisorWorld]:
    with closing(SupervisorWorld(tmp_path)) as world:
        yield world


def state_of(pid: int) -> str:
    """The kernel's state letter, such as R, S, or T for stopped; Z if the process is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except OSError:
        return "Z"


def is_alive(pid: int) -> bool:
    return state_of(pid) != "Z"


def test_a_killed_active_child_is_followed_by_the_standby_and_a_new_standby_comes_up(world: SupervisorWorld) -> None:
    active, standby = world.both()
    os.kill(active, signal.SIGKILL)
    world.wait(lambda: world.children().get("active") == standby)
    new_active, new_standby = world.both()
    assert new_active == standby
    assert new_standby not in (active, standby)
    assert world.said("took first") == [active]
    assert world.said("took standby") == [standby]
    assert b"relaygr_supervisor_replaced_total 1.0" in world.get("/metrics")


def test_a_stopped_active_child_is_killed_before_the_standby_takes_over(world: SupervisorWorld) -> None:
    active, standby = world.both()
    os.kill(active, signal.SIGSTOP)
    world.wait(lambda: world.children().get("active") == standby)
    assert not is_alive(active)


def test_a_first_child_that_was_killed_while_it_loaded_is_followed_by_another_first_one(tmp_path: Path) -> None:
    """A first child acquires the lock before it loads, and calibrates. A standby would do neither."""
    loading = tmp_path / "loading"
    loading.touch()
    with closing(SupervisorWorld(tmp_path)) as world:
        world.wait(lambda: "preparing" in world.children())
        os.kill(world.children()["preparing"], signal.SIGKILL)
        loading.unlink()
        active, _ = world.both()
        assert world.said("took first") == [active]


def test_a_dead_standby_is_replaced_and_the_active_one_stays(world: SupervisorWorld) -> None:
    active, standby = world.both()
    os.kill(standby, signal.SIGKILL)
    world.wait(lambda: world.children().get("standby") not in (standby, None))
    assert world.both()[0] == active


def test_a_fenced_child_ends_all_of_it_with_its_code(world: SupervisorWorld) -> None:
    active, standby = world.both()
    (world.folder / f"end-{int(Exit.FENCED)}").touch()
    assert world.process.wait(TIMEOUT_S) == Exit.FENCED
    assert not is_alive(active)
    assert not is_alive(standby)


def test_a_stop_ends_the_standby_first_so_that_it_takes_over_nothing(world: SupervisorWorld) -> None:
    active, standby = world.both()
    world.process.terminate()
    assert world.process.wait(TIMEOUT_S) == Exit.DONE
    stops = [line for line in world.log() if "stopped" in line]
    assert stops == [f"{standby} stopped standby", f"{active} stopped active"]


def test_a_hangup_reaches_both_children(world: SupervisorWorld) -> None:
    pids = world.both()
    world.process.send_signal(signal.SIGHUP)
    world.wait(lambda: sorted(world.said("hangup")) == sorted(pids))
    assert world.both() == pids


@pytest.mark.parametrize("stopped", [0, 1, 2])
def test_children_that_nobody_adopts_stop_by_themselves(tmp_path: Path, stopped: int) -> None:
    """This includes stopped children, which would keep the lock for ever, or wake up later and write."""
    with closing(SupervisorWorld(tmp_path, orphan_s=1.2)) as world:
        active, standby = pids = world.both()
        for pid in pids[:stopped]:
            os.kill(pid, signal.SIGSTOP)
        world.wait(lambda: all(state_of(pid) == "T" for pid in pids[:stopped]))
        world.kill()
        world.wait(lambda: not any(is_alive(pid) for pid in pids))
        assert world.said("took standby") == [], "the standby stops first"
        assert {record.pid: record.exit_code for record in read_records(world.shared)} == {active: 0, standby: 0}


def test_both_children_outlive_their_supervisor_and_the_next_one_adopts_them(world: SupervisorWorld) -> None:
    pids = active, standby = world.both()
    world.kill()
    world.restart()
    assert world.both() == pids
    world.wait(world.is_ready)
    assert world.said("took first") == [active]
    os.kill(active, signal.SIGKILL)
    world.wait(lambda: world.children().get("active") == standby)
    assert world.both()[1] not in pids
    assert b"relaygr_supervisor_replaced_total 1.0" in world.get("/metrics")
    world.process.terminate()
    assert world.process.wait(TIMEOUT_S) == Exit.DONE
    assert not is_alive(standby)


def test_the_standby_takes_over_while_there_is_no_supervisor(world: SupervisorWorld) -> None:
    active, standby = world.both()
    world.kill()
    os.kill(active, signal.SIGKILL)
    world.wait(lambda: world.said("took standby") == [standby])
    world.restart()
    new_active, new_standby = world.both()
    assert new_active == standby
    assert new_standby not in (active, standby)


def test_an_adopted_child_that_stops_is_killed(world: SupervisorWorld) -> None:
    active, standby = world.both()
    world.kill()
    os.kill(active, signal.SIGSTOP)
    world.restart()
    world.wait(lambda: world.children().get("active") == standby)
    assert not is_alive(active)


def test_a_child_that_loads_while_its_supervisor_dies_is_adopted(tmp_path: Path) -> None:
    loading = tmp_path / "loading"
    loading.touch()
    with closing(SupervisorWorld(tmp_path)) as world:
        world.wait(lambda: "preparing" in world.children() and bool(read_records(world.shared)))
        first = world.children()["preparing"]
        world.kill()
        world.restart()
        world.wait(lambda: world.children().get("preparing") == first)
        loading.unlink()
        assert world.both()[0] == first


def test_a_supervisor_ends_if_a_child_was_fenced_while_there_was_none(world: SupervisorWorld) -> None:
    """Another machine has the id. A later start by hand is allowed, so the reason counts once."""
    active, standby = world.both()
    world.kill()
    (world.folder / f"end-{int(Exit.FENCED)}").touch()
    world.wait(lambda: not is_alive(active))
    world.restart()
    assert world.process.wait(TIMEOUT_S) == Exit.FENCED
    assert not is_alive(standby)
    world.restart()
    world.both()


def test_the_exit_code_of_an_adopted_child_ends_the_supervisor_if_it_was_fenced(world: SupervisorWorld) -> None:
    pids = world.both()
    world.kill()
    world.restart()
    assert world.both() == pids
    (world.folder / f"end-{int(Exit.FENCED)}").touch()
    assert world.process.wait(TIMEOUT_S) == Exit.FENCED


def test_a_second_supervisor_of_the_id_is_refused(world: SupervisorWorld) -> None:
    pids = world.both()
    second = world.start()
    assert second.wait(TIMEOUT_S) == Exit.FAILED
    [refusal] = [line for line in world.log() if "refused" in line]
    assert f"worker-00 has a supervisor on this machine already, process {world.process.pid}: stop" in refusal
    assert all(is_alive(pid) for pid in pids)


def test_an_active_child_that_does_not_hold_the_lock_is_not_adopted(world: SupervisorWorld) -> None:
    active, standby = world.both()
    world.kill()
    os.kill(active, signal.SIGSTOP)
    (world.folder / "lock").touch()
    (world.folder / "lock").replace(world.shared / "lock")
    world.wait(lambda: world.said("took standby") == [standby])
    os.kill(active, signal.SIGCONT)
    world.restart()
    world.wait(lambda: not is_alive(active))
    assert world.both()[0] == standby


def test_an_emptied_shared_folder_costs_neither_process_nor_the_standby(world: SupervisorWorld) -> None:
    """systemd-logind does that (RemoveIPC). The standby took a new lock, and both ended with 3, not to be restarted."""
    pids = active, standby = world.both()
    for number in range(1, 3):
        shutil.rmtree(world.shared, ignore_errors=True)  # Files are put back while it removes others.
        world.wait(lambda expected=number: len(world.said("put back")) >= expected)
    # Whatever finds the processes of a supervisor is there again.
    world.wait(lambda: {record.pid for record in read_records(world.shared)} == set(pids))
    world.wait(lambda: (world.shared / "supervisor.socket").exists())
    port = world.port
    assert world.start().wait(TIMEOUT_S) == Exit.FAILED, "a second supervisor is refused"
    world.port = port
    assert world.both() == pids and world.said("took standby") == []
    world.kill()
    world.restart()
    assert world.both() == pids
    os.kill(active, signal.SIGKILL)
    world.wait(lambda: world.children().get("active") == standby)
    assert world.said("took standby") == [standby]
    assert world.process.poll() is None


def test_systemd_hears_of_a_supervisor_that_serves_and_nothing_of_one_that_stands_still(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as systemd:
        systemd.bind(str(tmp_path / "notify"))
        systemd.settimeout(TIMEOUT_S)

        def heard() -> set[str]:
            """What was said since the last call."""
            found: set[str] = set()
            while select.select([systemd], [], [], 0)[0]:
                found.add(systemd.recv(4096).decode())
            return found

        with closing(SupervisorWorld(tmp_path, NOTIFY_SOCKET=str(tmp_path / "notify"))) as world:
            assert systemd.recv(4096) == b"READY=1"
            world.both()
            assert heard() == {"WATCHDOG=1"}
            world.process.send_signal(signal.SIGSTOP)
            world.wait(lambda: state_of(world.process.pid) == "T")
            heard()
            time.sleep(2.5)
            assert heard() == set(), "its children are silent, too"
            world.process.send_signal(signal.SIGCONT)
            assert systemd.recv(4096) == b"WATCHDOG=1"
            world.process.terminate()
            assert world.process.wait(TIMEOUT_S) == Exit.DONE
            assert "STOPPING=1" in heard()


def test_a_record_of_another_process_with_the_same_id_is_not_believed(tmp_path: Path) -> None:
    """Process ids are used again: the process of the id may be anybody's."""
    shared = tmp_path / "shared"
    shared.mkdir(mode=0o700)
    other = os.getpid()
    (shared / f"child-{other}").write_text(json.dumps({"started_ticks": 1, "phase": "active", "exit_code": None}))
    (shared / "child-x").write_text("no record")
    with closing(SupervisorWorld(tmp_path)) as world:
        assert other not in world.both()
        assert {record.pid for record in read_records(shared)} == set(world.both())


def test_a_process_that_is_no_child_cannot_connect(world: SupervisorWorld) -> None:
    pids = world.both()
    assert stat.S_IMODE((world.shared / "supervisor.socket").stat().st_mode) == 0o600
    connection = connect(world.shared)
    assert connection is not None
    with connection:
        connection.settimeout(TIMEOUT_S)
        assert connection.recv(1) == b"", "closed by the supervisor"
    assert world.both() == pids


def test_it_is_ready_when_the_active_child_is_and_never_imports_torch(world: SupervisorWorld) -> None:
    world.both()
    world.wait(lambda: json.loads(world.get("/readyz"))["ok"])
    assert json.loads(world.get("/healthz"))["ok"]
    world.process.terminate()
    assert world.process.wait(TIMEOUT_S) == Exit.DONE
    assert [line.split(" ", 1)[1] for line in world.log() if "torch" in line] == ["supervisor ended 0 torch False"]
