"""A child's link to its supervisor: without one, with the next one, and the records that both use."""

from __future__ import annotations

import os
import socket
import stat
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from relaygr.runtime.clock import ManualClock
from relaygr.runtime.errors import RelayError
from relaygr.worker.exits import Exit
from relaygr.worker.supervisor.heartbeat import ChildPhase, Heartbeat, HeartbeatReader
from relaygr.worker.supervisor.link import STANDBY_EARLIER_S, SupervisorLink
from relaygr.worker.supervisor.records import ProcessStat, SupervisorEndpoint, delete_record, read_record, read_records

ORPHAN_S = 60.0
HEARTBEAT_S = 0.25


class LinkWorld:
    """A child's link whose first supervisor is `supervisor`, and whose next one a test makes."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.clock = ManualClock()
        self.supervisor, theirs = socket.socketpair()
        self.link = SupervisorLink(theirs.detach(), folder, ORPHAN_S, self.clock)

    def send(self, phase: ChildPhase) -> None:
        self.link.send(Heartbeat(phase, 8080, True, ""))

    def is_over_after(self, seconds: float) -> bool:
        self.clock.advance_us(int(seconds * 1e6))
        return self.link.is_orphaned

    def close(self) -> None:
        self.supervisor.close()
        self.link.close()


@pytest.fixture
def world(tmp_path: Path) -> Iterator[LinkWorld]:
    # Longer than the address of a Unix socket may be.
    folder = tmp_path / ("a" * 120)
    folder.mkdir(mode=0o700)
    with closing(LinkWorld(folder)) as world:
        yield world


@pytest.mark.parametrize(
    ("phase", "bound_s"), [(ChildPhase.ACTIVE, ORPHAN_S), (ChildPhase.STANDBY, ORPHAN_S - STANDBY_EARLIER_S)]
)
def test_a_child_goes_on_for_a_while_without_a_supervisor(world: LinkWorld, phase: ChildPhase, bound_s: float) -> None:
    """The standby ends first, so that it does not take over from an active child that ends too."""
    world.send(phase)
    assert not world.is_over_after(3600)
    world.supervisor.close()
    assert not world.is_over_after(0)
    world.send(phase)
    assert not world.is_over_after(bound_s - 0.1)
    assert world.is_over_after(0.1)


def test_a_child_connects_to_the_next_supervisor(world: LinkWorld) -> None:
    world.send(ChildPhase.ACTIVE)
    world.supervisor.close()
    with closing(SupervisorEndpoint(world.folder, "worker-00")) as endpoint:
        assert stat.S_IMODE((world.folder / "supervisor.socket").stat().st_mode) == 0o600
        assert endpoint.accept() is None
        world.send(ChildPhase.ACTIVE)
        accepted = endpoint.accept()
        assert accepted is not None
        connection, pid = accepted
        with connection:
            assert pid == os.getpid()
            heard = HeartbeatReader().feed(connection.recv(4096))
            assert heard is not None and heard.phase is ChildPhase.ACTIVE
            assert not world.is_over_after(3600)
    assert not world.is_over_after(0)
    assert world.is_over_after(ORPHAN_S)


def test_a_supervisor_that_refuses_a_child_does_not_keep_it_alive(world: LinkWorld) -> None:
    """The child's record may be missing, if the file system was full. The child connects again and again."""
    world.send(ChildPhase.ACTIVE)
    world.supervisor.close()
    assert not world.is_over_after(0)
    ends = []
    with closing(SupervisorEndpoint(world.folder, "worker-00")) as endpoint:
        for _ in range(int(ORPHAN_S / HEARTBEAT_S)):
            world.send(ChildPhase.ACTIVE)
            accepted = endpoint.accept()
            assert accepted is not None
            accepted[0].close()
            ends.append(world.is_over_after(HEARTBEAT_S))
    assert ends == [False] * (len(ends) - 1) + [True]


def test_a_worker_id_has_one_supervisor(world: LinkWorld) -> None:
    refusal = rf"has a supervisor on this machine already, process {os.getpid()}"
    with closing(SupervisorEndpoint(world.folder, "worker-00")), pytest.raises(RelayError, match=refusal):
        SupervisorEndpoint(world.folder, "worker-00")
    SupervisorEndpoint(world.folder, "worker-00").close()


def test_the_record_of_a_child_says_its_phase_and_its_exit_code(world: LinkWorld) -> None:
    world.send(ChildPhase.STANDBY)
    [record] = read_records(world.folder)
    assert (record.pid, record.phase, record.exit_code, record.is_alive) == (os.getpid(), "standby", None, True)
    world.link.note_exit(Exit.STUCK)
    found = read_record(world.folder, os.getpid())
    assert found is not None and found.exit_code == Exit.STUCK
    delete_record(world.folder, os.getpid())
    assert list(world.folder.glob("child-*")) == []


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"phase": "no phase", "started_ticks": 1, "exit_code": null}'])
def test_what_is_no_record_is_ignored(world: LinkWorld, text: str) -> None:
    (world.folder / f"child-{os.getpid()}").write_text(text)
    assert read_records(world.folder) == []


def test_the_kernel_says_when_a_process_started_and_what_it_does() -> None:
    stat = ProcessStat.of(os.getpid())
    assert stat is not None
    assert stat.state in "RS"
    assert stat.started_ticks > 0 and stat.cpu_ticks >= 0
    assert ProcessStat.of(2**22 + 1) is None
