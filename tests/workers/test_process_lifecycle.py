"""The lifecycle of a worker process: its heartbeats during a start and a stop, how long it drains, and its exit code.

The process, its lock, its link to the supervisor and its signals are real. Model, broker and memory are small fakes.
"""

from __future__ import annotations

import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client import CollectorRegistry
from structlog.testing import capture_logs

from relaygr.admission.settings import AdmissionSettings
from relaygr.consumer.interface import LoopState
from relaygr.consumer.settings import ConsumerSettings
from relaygr.kafka.session import KafkaSession
from relaygr.kafka.settings import KafkaSettings
from relaygr.runtime.errors import RelayError
from relaygr.runtime.readiness import Readiness
from relaygr.schemas.messages import WorkerState
from relaygr.worker.exits import Exit
from relaygr.worker.latest_answers import FiniteScores
from relaygr.worker.memory import MemoryPlan
from relaygr.worker.metrics import WorkerMetrics
from relaygr.worker.process import lifecycle
from relaygr.worker.process.components import Components, OnEnd
from relaygr.worker.process.reloading import ModelReloading
from relaygr.worker.settings import WorkerConfig, WorkerSettings
from relaygr.worker.shared.lock import ArenaLock, shared_folder
from relaygr.worker.supervisor.heartbeat import ChildPhase, Heartbeat, HeartbeatReader
from relaygr.worker.supervisor.link import SupervisorLink
from relaygr.worker.supervisor.records import ChildRecord, read_record
from tests.waiting import becomes

SIGNALS = (signal.SIGHUP, signal.SIGTERM, signal.SIGINT)
DRAIN_S = 30.0


def stop() -> None:
    """Stops the process as an operator does."""
    os.kill(os.getpid(), signal.SIGTERM)


def nothing() -> None:
    pass


class FakeHandover:
    """No predecessor left anything."""

    dram = None

    def __init__(self) -> None:
        self.on_begin: Callable[[], None] = nothing
        self.on_restore: Callable[[], None] = nothing

    def read_ahead(self) -> None:
        pass

    def begin(self) -> None:
        self.on_begin()

    def restore(self, *_: object) -> None:
        self.on_restore()


class FakeLoop:
    """A consumer loop without a broker, whose events a test triggers."""

    error = None

    def __init__(self) -> None:
        self.on_start: Callable[[], None] = stop
        self.on_join: Callable[[], bool] = lambda: True
        self.on_stop: Callable[[float], object] = lambda drain_s: None

        self.on_connect: Callable[[], object] = lambda: None

    def connect(self, timeout_s: float) -> None:
        self.on_connect()

    def start(self) -> None:
        self.on_start()

    def stop(self, drain_s: float) -> None:
        self.on_stop(drain_s)

    def join(self, timeout_s: float) -> bool:
        return self.on_join()


class FakeComponents:
    """The components of a healthy worker."""

    cache = None
    overflow: FakeLoop | None = None
    has_hung_calls = False

    def __init__(self, loop: FakeLoop, on_end: OnEnd) -> None:
        self.loop = loop
        self.on_end = on_end
        self.executor = SimpleNamespace(post=lambda work: None)
        self.device = SimpleNamespace(is_stuck=lambda: False)
        self.status = SimpleNamespace(state=WorkerState.STARTING)
        self.metrics = WorkerMetrics(CollectorRegistry())
        self.reports_taken = 0
        self.results = SimpleNamespace(tick=self._take_reports, finite_scores=FiniteScores())
        self.flushed = False
        self.admin_folder: Path | None = None

    @property
    def loops(self) -> tuple[FakeLoop, ...]:
        return (self.loop,) if self.overflow is None else (self.loop, self.overflow)

    def open_admin_socket(self, folder: Path) -> None:
        self.admin_folder = folder

    def close_admin_socket(self) -> None:
        self.admin_folder = None

    def _take_reports(self, now_us: int) -> None:
        self.reports_taken += 1

    def start_device_and_follower(self) -> None:
        pass

    def start_loops(self) -> None:
        self.loop.start()

    def flush(self) -> None:
        self.flushed = True

    def close(self) -> None:
        pass

    def readiness(self) -> Readiness:
        return Readiness()

    health = readiness

    def silence_ms(self) -> tuple[int, int]:
        return 7, 8


class FakeProbes:
    """Serves nothing."""

    host, port = "127.0.0.1", 1

    def __init__(self, *_: object) -> None:
        pass

    def start(self) -> None:
        pass

    stop = start


class LeftError(Exception):
    """Raised in the place of os._exit."""


class ProcessWorld:
    """A standby whose lock is free, and the supervisor's end of its link."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.handover = FakeHandover()
        self.loop = FakeLoop()
        self._components: FakeComponents | None = None
        self._socket, theirs = socket.socketpair()
        self._socket.setblocking(False)
        for name, replacement in (
            ("prepare", self._prepare),
            ("Components", self._assemble),
            ("ProbeServer", FakeProbes),
            ("ModelReloading", partial(ModelReloading, registry=CollectorRegistry())),
            ("tune_interpreter", nothing),
        ):
            monkeypatch.setattr(lifecycle, name, replacement)
        settings = WorkerSettings(shared_path=folder, drain_s=DRAIN_S)
        config = WorkerConfig(KafkaSettings(), settings, AdmissionSettings(), ConsumerSettings())
        self.folder = shared_folder(config)
        ArenaLock(self.folder)  # The file that its predecessor made.
        self.link = SupervisorLink(theirs.detach(), self.folder)
        session = KafkaSession(config.kafka, config.client_id)
        self.process = lifecycle.WorkerProcess(config, session, is_standby=True, link=self.link)

    @property
    def components(self) -> FakeComponents:
        assert self._components is not None
        return self._components

    def heard(self) -> Heartbeat | None:
        """The newest heartbeat since the last call."""
        try:
            return HeartbeatReader().feed(self._socket.recv(65536))
        except BlockingIOError:
            return None

    @property
    def record(self) -> ChildRecord:
        """What the process has recorded about itself."""
        found = read_record(self.folder, os.getpid())
        assert found is not None
        return found

    def close(self) -> None:
        self._socket.close()
        self.link.close()

    def _prepare(self, *_: object, **__: object) -> SimpleNamespace:
        return SimpleNamespace(
            memory=SimpleNamespace(),
            handover=self.handover,
            producer=SimpleNamespace(poll=lambda timeout_s: 0),
            engine=SimpleNamespace(device=SimpleNamespace(name="cpu"), revision="model-1", namespace=b"model-1"),
            model=Path("model"),
            plan=MemoryPlan(0, 0, 0, 0, 0, 0, 0, 0),
            store=SimpleNamespace(close=nothing, refresh=nothing),
        )

    def _assemble(self, *arguments: object) -> FakeComponents:
        *_, on_end, _tracer = arguments
        assert isinstance(on_end, OnEnd)
        self._components = FakeComponents(self.loop, on_end)
        return self._components


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ProcessWorld]:
    handlers = {number: signal.getsignal(number) for number in SIGNALS}

    def leave(code: int) -> None:
        raise LeftError(code)

    monkeypatch.setattr("os._exit", leave)
    world = ProcessWorld(tmp_path / "shared", monkeypatch)
    yield world
    world.close()
    for number, handler in handlers.items():
        signal.signal(number, handler)


def test_a_standby_that_takes_over_sends_a_heartbeat_before_it_does_anything_slow(world: ProcessWorld) -> None:
    """Its supervisor would kill a silent standby, which is the last process that is left."""
    heard: list[Heartbeat | None] = []
    world.handover.on_begin = lambda: heard.append(world.heard())
    assert world.process.run() is Exit.DONE
    [heartbeat] = heard
    assert heartbeat is not None and heartbeat.phase is ChildPhase.PREPARING


def test_a_standby_makes_every_consumer_while_its_supervisor_still_waits_for_it_to_prepare(world: ProcessWorld) -> None:
    """With SASL/OAUTHBEARER each takes a second, or ten without a valid token."""
    overflow = world.components.overflow = FakeLoop()
    heard: list[Heartbeat | None] = []
    world.loop.on_connect = overflow.on_connect = lambda: heard.append(world.heard())
    assert world.process.run() is Exit.DONE
    assert [beat is None or beat.phase is ChildPhase.PREPARING for beat in heard[:2]] == [True, True]


def test_operators_reach_a_worker_that_holds_the_lock_and_has_restored_its_cache(
    world: ProcessWorld, tmp_path: Path
) -> None:
    before: list[Path | None] = []
    world.handover.on_restore = lambda: before.append(world.components.admin_folder)
    assert world.process.run() is Exit.DONE
    assert (before, world.components.admin_folder) == ([None], tmp_path / "shared" / "relaygr.workers" / "worker-00")


def test_a_worker_that_drains_sends_heartbeats(world: ProcessWorld) -> None:
    """The SIGTERM did not come from the supervisor, which therefore still expects heartbeats."""
    heard: list[Heartbeat | None] = []

    def join() -> bool:
        heard.append(world.heard())
        return len(heard) == 3

    world.loop.on_stop = lambda drain_s: world.heard()
    world.loop.on_join = join
    assert world.process.run() is Exit.DONE
    assert [heartbeat and heartbeat.phase for heartbeat in heard] == [None, ChildPhase.ACTIVE, ChildPhase.ACTIVE]


def test_a_worker_that_is_fenced_while_it_drains_sends_nothing_more(world: ProcessWorld) -> None:
    """A stopped process that wakes up finds its supervisor gone and its id taken, in either order."""

    def join() -> bool:
        world.components.on_end.loop(LoopState.FENCED)
        return True

    world.loop.on_join = join
    with pytest.raises(LeftError, match=str(int(Exit.FENCED))):
        world.process.run()
    assert not world.components.flushed


def test_a_worker_that_is_stopped_drains(world: ProcessWorld) -> None:
    drains: list[float] = []
    world.loop.on_stop = drains.append
    assert world.process.run() is Exit.DONE
    assert drains == [DRAIN_S]
    assert world.components.flushed


def test_both_loops_drain_at_once_and_the_last_one_still_gets_its_delivery_reports(world: ProcessWorld) -> None:
    stopped: list[str] = []
    overflow = world.components.overflow = FakeLoop()
    world.loop.on_stop = lambda _: stopped.append("first")
    overflow.on_stop = lambda _: stopped.append("overflow")

    def join_first() -> bool:
        assert set(stopped) == {"first", "overflow"} and not world.components.reports_taken
        return True

    world.loop.on_join = join_first
    overflow.on_join = lambda: world.components.reports_taken == 3
    assert world.process.run() is Exit.DONE
    assert world.components.reports_taken == 3


def test_a_worker_whose_device_thread_died_does_not_drain(world: ProcessWorld) -> None:
    """It can finish no work: a successor, which waits for the lock, gets its messages again."""
    drains: list[float] = []
    world.loop.on_start = lambda: world.components.on_end.device_thread()
    world.loop.on_stop = drains.append
    assert world.process.run() is Exit.FAILED
    assert drains == [0.0]


def test_a_fenced_worker_ends_as_fenced_whatever_else_fails(world: ProcessWorld) -> None:
    def fail_twice() -> None:
        world.components.on_end.loop(LoopState.FENCED)
        world.components.on_end.device_thread()

    world.loop.on_start = fail_twice
    with pytest.raises(LeftError, match=str(int(Exit.FENCED))):
        world.process.run()


def test_a_worker_records_its_phase_and_how_it_ended(world: ProcessWorld) -> None:
    """A supervisor that adopted it can not wait for its exit code."""
    assert (world.record.phase, world.record.exit_code) == (ChildPhase.PREPARING, None)
    assert world.record.is_alive
    world.loop.on_stop = lambda _: phases.append(world.record.phase)
    phases: list[ChildPhase] = []
    assert world.process.run() is Exit.DONE
    assert phases == [ChildPhase.ACTIVE]
    assert world.record.exit_code == Exit.DONE


def test_a_worker_with_a_call_that_hangs_leaves_at_once_and_only_its_end_frees_the_lock(world: ProcessWorld) -> None:
    """The call may still write into the DRAM tier, which belongs to the next holder."""

    def stop_with_a_hung_call() -> None:
        world.components.has_hung_calls = True
        stop()

    world.loop.on_start = stop_with_a_hung_call
    with pytest.raises(LeftError, match=str(int(Exit.DONE))):
        world.process.run()
    assert world.components.flushed and world.process._lock.is_held()
    assert world.record.exit_code == Exit.DONE


def test_a_fenced_worker_records_it_before_it_leaves_at_once(world: ProcessWorld) -> None:
    world.loop.on_start = lambda: world.components.on_end.loop(LoopState.FENCED)
    with pytest.raises(LeftError):
        world.process.run()
    assert world.record.exit_code == Exit.FENCED


def test_a_worker_whose_shared_folder_is_emptied_is_ready_again_and_says_why_once(
    world: ProcessWorld, tmp_path: Path
) -> None:
    """It was never ready again, and a standby beside it fenced it."""
    ready: list[bool] = []

    def empty_and_stop() -> None:
        for number in range(2):
            # At once: the worker puts files back into a folder that is still being removed.
            world.folder.parent.rename(tmp_path / f"removed-{number}")
            ready.append(becomes(lambda: (world.folder / "lock").exists() and world.process._readiness().ready, 30))
        stop()

    emptying = threading.Thread(target=empty_and_stop)
    world.loop.on_start = emptying.start
    with capture_logs() as logs:
        assert world.process.run() is Exit.DONE
    emptying.join()
    assert ready == [True, True]
    said = [entry["event"] for entry in logs if entry["log_level"] == "error"]
    assert len(said) == 2 and all("RemoveIPC" in event for event in said)
    assert world.components.admin_folder == world.folder
    assert world.record.exit_code == Exit.DONE
    assert ArenaLock(world.folder).acquire(timeout_s=1) == 2


def test_a_worker_whose_lock_another_process_has_is_not_ready_and_does_not_take_it(
    world: ProcessWorld, tmp_path: Path
) -> None:
    other = ArenaLock(tmp_path / "other")
    for _ in range(3):
        other.release()
        other.acquire()
    seen: list[Readiness] = []

    def replace_and_stop() -> None:
        for name in ("epoch", "lock"):
            (tmp_path / "other" / name).replace(world.folder / name)
        becomes(lambda: world.process._readiness() == lifecycle.WITHOUT_LOCK, 30)
        seen.append(world.process._readiness())
        stop()

    replacing = threading.Thread(target=replace_and_stop)
    world.loop.on_start = replacing.start
    assert world.process.run() is Exit.DONE
    replacing.join()
    assert seen == [lifecycle.WITHOUT_LOCK]
    assert ArenaLock(world.folder).try_acquire() is None
    other.release()


def test_a_user_without_a_name_has_a_folder_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A container's process may run under a user number without a name."""

    def nameless() -> str:
        raise KeyError("getpwuid(): uid not found: 4711")

    monkeypatch.setattr("getpass.getuser", nameless)
    assert "relaygr-" in str(shared_folder(in_memory(tmp_path, monkeypatch)))


def in_memory(folder: Path, monkeypatch: pytest.MonkeyPatch) -> WorkerConfig:
    """Settings without `worker.shared_path`, on a machine where `folder` has the place of /dev/shm."""
    folder.chmod(0o1777)
    monkeypatch.setattr("relaygr.worker.shared.lock.memory_folder", lambda: folder)
    return WorkerConfig(KafkaSettings(), WorkerSettings(), AdmissionSettings(), ConsumerSettings())


def test_a_shared_folder_that_another_user_made_first_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its owner could read the K,V of all users."""
    config = in_memory(tmp_path, monkeypatch)
    folder = shared_folder(config)
    assert [path.stat().st_mode & 0o777 for path in (folder, folder.parent, folder.parent.parent)] == [0o700] * 3
    another = os.geteuid() + 1
    monkeypatch.setattr(os, "geteuid", lambda: another)
    with pytest.raises(RelayError, match=r"belongs to user .*`worker\.shared_path`"):
        shared_folder(config)


@pytest.mark.parametrize(("silent_ms", "ready"), [(9_999, True), (10_000, False)])
def test_a_worker_whose_poll_thread_stands_still_is_not_ready(silent_ms: int, ready: bool) -> None:
    status = SimpleNamespace(
        assigned=True, partitions=(1,), broker_reachable=True, stalled=False, state=LoopState.RUNNING
    )
    components: Any = SimpleNamespace(
        loop=SimpleNamespace(status=lambda: status),
        overflow=None,
        _pool=None,
        follower=SimpleNamespace(loading=frozenset(), fault=""),
        status=SimpleNamespace(state=WorkerState.READY),
        watch=SimpleNamespace(checks=tuple),
        silence_ms=lambda: (silent_ms, 0),
        results=SimpleNamespace(finite_scores=SimpleNamespace(is_diverged=False)),
        _session=SimpleNamespace(refusal=None),
    )
    assert Components.readiness(components).ready is ready
