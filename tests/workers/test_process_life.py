"""What a worker process tells its supervisor while it is busy with its own start or end."""

from __future__ import annotations

import signal
import socket
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest

from relaygr.admission.settings import AdmissionSettings
from relaygr.consumer import ConsumerSettings
from relaygr.kafka.settings import KafkaSettings
from relaygr.worker.exits import Exit
from relaygr.worker.process import WorkerConfig, life
from relaygr.worker.process.handover import shared_folder
from relaygr.worker.settings import WorkerSettings
from relaygr.worker.supervisor.heartbeat import ChildPhase, Heartbeat, HeartbeatReader, SupervisorLink

SIGNALS = (signal.SIGHUP, signal.SIGTERM, signal.SIGINT)


class TookOverError(Exception):
    """Ends a life that has come so far."""


class World:
    """A standby whose model, broker and memory are nobody's, on a leash that the test holds."""

    def __init__(self, folder: Path) -> None:
        self.ours, theirs = socket.socketpair()
        self.ours.setblocking(False)
        worker = WorkerSettings(shared_path=folder, http_host="127.0.0.1", http_port=0, drain_s=30)
        config = WorkerConfig(KafkaSettings(), worker, AdmissionSettings(), ConsumerSettings())
        self.process = life.WorkerProcess(config, is_standby=True, link=SupervisorLink(theirs.detach()))

    def heard(self) -> Heartbeat | None:
        """The newest sign of life."""
        try:
            return HeartbeatReader().feed(self.ours.recv(65536))
        except BlockingIOError:
            return None


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    handlers = {number: signal.getsignal(number) for number in SIGNALS}
    monkeypatch.setattr(life, "prepare", lambda *_, **__: MagicMock(memory=None))
    monkeypatch.setattr(life, "ModelReloading", MagicMock())
    monkeypatch.setattr(life, "tune_interpreter", lambda: None)
    world = World(tmp_path)
    yield world
    world.ours.close()
    for number, handler in handlers.items():
        signal.signal(number, handler)


def test_a_standby_that_takes_over_says_so_before_it_does_what_may_take_long(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its supervisor would kill a standby that is silent, and so the last one that is left."""
    heard: list[Heartbeat | None] = []

    def activate() -> None:
        heard.append(world.heard())
        raise TookOverError

    monkeypatch.setattr(world.process, "_activate", activate)
    with pytest.raises(TookOverError):
        world.process.run()
    [beat] = heard
    assert beat is not None and beat.phase is ChildPhase.PREPARING


def test_a_worker_that_drains_shows_that_it_lives(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Somebody sent the active process SIGTERM: its supervisor has not asked for it, and waits for signs of life."""
    heard: list[Heartbeat | None] = []

    def join(timeout_s: float) -> bool:
        heard.append(world.heard())
        return len(heard) == 3

    world.process._stop(MagicMock(loop=SimpleNamespace(stop=lambda _: None, join=join)))
    assert [beat and beat.phase for beat in heard] == [None, ChildPhase.ACTIVE, ChildPhase.ACTIVE]


class LeftError(Exception):
    """In the place of os._exit."""


def test_a_worker_that_is_fenced_while_it_drains_says_nothing_more(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stopped process that wakes up finds its supervisor gone and its id taken, in either order."""

    def join(timeout_s: float) -> bool:
        world.process._end_with(Exit.FENCED)
        return True

    def leave(code: int) -> None:
        raise LeftError(code)

    monkeypatch.setattr("os._exit", leave)
    parts = MagicMock(loop=SimpleNamespace(stop=lambda _: None, join=join))
    with pytest.raises(LeftError, match=str(int(Exit.FENCED))):
        world.process._stop(parts)
    parts.report.publish.assert_not_called()


@pytest.mark.parametrize(("ends_as", "drain_s"), [(Exit.DONE, 30), (Exit.FAILED, 0)])
def test_a_worker_that_cannot_finish_anything_does_not_drain(world: World, ends_as: Exit, drain_s: float) -> None:
    """Its device thread is dead: what it has is answered by a successor, who waits for the lock."""
    world.process._end_with(ends_as)
    drains: list[float] = []
    world.process._stop(MagicMock(loop=SimpleNamespace(stop=drains.append, join=lambda _: True)))
    assert drains == [drain_s]


def test_a_fenced_worker_ends_as_fenced_whatever_else_fails(world: World) -> None:
    world.process._end_with(Exit.FENCED)
    world.process._end_with(Exit.FAILED)
    assert world.process._exit is Exit.FENCED


def test_a_user_without_a_name_has_a_folder_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """A container's process may run under a number that stands in no list of users."""

    def nameless() -> str:
        raise KeyError("getpwuid(): uid not found: 4711")

    monkeypatch.setattr("getpass.getuser", nameless)
    config = WorkerConfig(KafkaSettings(), WorkerSettings(), AdmissionSettings(), ConsumerSettings())
    assert "relaygr-" in str(shared_folder(config))
