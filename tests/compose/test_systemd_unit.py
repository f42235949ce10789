"""The systemd unit of a worker with a hot standby: what it sets for the supervisor, and that its command is valid."""

from __future__ import annotations

import configparser
import itertools
import shlex
import subprocess

from relaygr.settings import load
from relaygr.worker.exits import Exit
from relaygr.worker.settings import WorkerSettings
from relaygr.worker.supervisor.policy import SupervisorSettings
from relaygr.worker.supervisor.supervisor import _DEATH_S, STANDBY_STOP_S
from tests.promised import program
from tests.worlds.compose import COMPOSE

UNIT = COMPOSE / "systemd" / "relaygr-worker@.service"
INSTANCE = "worker-07"


def unit() -> configparser.ConfigParser:
    parser = configparser.ConfigParser(interpolation=None, delimiters=("=",), strict=True)
    parser.optionxform = str  # type: ignore[assignment,method-assign]
    parser.read_string(UNIT.read_text(encoding="utf-8"))
    return parser


def command() -> list[str]:
    return shlex.split(unit()["Service"]["ExecStart"].replace("%i", INSTANCE))


def test_a_killed_supervisor_leaves_its_processes_and_is_started_again() -> None:
    service = unit()["Service"]
    assert service["KillMode"] == "process"
    assert (service["Restart"], service["OOMPolicy"]) == ("always", "continue")
    assert float(service["RestartSec"]) < WorkerSettings().orphan_s


def test_a_supervisor_that_stands_still_is_killed_and_started_again() -> None:
    """It tells systemd once a second that it is alive, and waits at most twice `_DEATH_S` in between."""
    service = unit()["Service"]
    assert (service["Type"], service["WatchdogSignal"]) == ("notify", "SIGKILL")
    assert 2 * _DEATH_S < float(service["WatchdogSec"]) < WorkerSettings().orphan_s


def test_a_fenced_worker_is_not_started_again() -> None:
    assert int(unit()["Service"]["RestartPreventExitStatus"]) == Exit.FENCED


def test_a_stop_waits_for_the_active_process() -> None:
    # As long as the supervisor waits for it.
    assert float(unit()["Service"]["TimeoutStopSec"]) > WorkerSettings().drain_s + 10 + STANDBY_STOP_S


def test_a_worker_without_a_standby_has_time_to_load_a_large_model() -> None:
    """It is ready after that. By default systemd waits for 90 s, kills it, and starts it again, for ever."""
    assert float(unit()["Service"]["TimeoutStartSec"]) > SupervisorSettings().start_timeout_s


def test_the_command_is_a_worker_with_a_standby_and_valid_settings() -> None:
    program, *arguments = command()
    assert program.endswith("/relaygr")
    assert arguments[:2] == ["worker", "--standby"]
    overrides = [value for flag, value in itertools.pairwise(arguments) if flag == "--set"]
    settings = load(None, {}, overrides).settings.worker
    assert settings.worker_id == INSTANCE
    assert settings.shared_path is not None and settings.shared_path.is_relative_to("/dev/shm")
    assert INSTANCE in settings.history_path.parts


def test_systemd_reads_the_unit_without_a_word() -> None:
    """A missing program is no fault of the unit."""
    result = subprocess.run(
        [program("systemd"), "verify", "--man=no", str(UNIT)], capture_output=True, text=True, timeout=240, check=False
    )
    faults = [line for line in result.stderr.splitlines() if UNIT.name in line and "is not executable" not in line]
    assert faults == []
