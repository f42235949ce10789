"""The child processes, and the loop that receives heartbeats, carries out the policy's actions, and stops in order.

The loop sleeps until a child sends something or ends, a signal arrives, or `TICK_S` has passed. Everything but the
HTTP pages runs on the main thread.
"""

from __future__ import annotations

import contextlib
import selectors
import signal
import socket
import subprocess
from collections.abc import Callable, Iterator, Sequence

import structlog

from relaygr.runtime.clock import Clock, SystemClock
from relaygr.worker.exits import Exit
from relaygr.worker.settings import WorkerSettings
from relaygr.worker.supervisor.heartbeat import ChildPhase, Heartbeat, HeartbeatReader
from relaygr.worker.supervisor.pages import ChildPage, Pages, View
from relaygr.worker.supervisor.policy import RestartPolicy, SupervisorSettings

log = structlog.get_logger()

MakeCommand = Callable[[int, bool], Sequence[str]]
"""Makes the command of a child from its socket's descriptor, and from whether it is the first to get ready."""

TICK_S = 0.2
STANDBY_STOP_S = 3.0
_DEATH_S = 5.0
"""How long the supervisor waits for the system to remove a killed process."""
_PASSED_ON = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
_RECEIVE_BYTES = 65536


class ChildProcess:
    """One child: its process and the supervisor's end of its socket. Belongs to the main thread; only `wait` blocks."""

    def __init__(self, number: int, make_command: MakeCommand, *, is_first: bool) -> None:
        """Starts the process. Raises OSError if the system cannot start one."""
        self.number = number
        self._reader = HeartbeatReader()
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                # Each child has a process group of its own, for two reasons. The terminal's Ctrl-C goes to the
                # supervisor alone, which stops the children in order. And when the supervisor dies, the kernel wakes
                # stopped processes in a group that is left without a parent: the child finds its socket closed, and
                # stops.
                self._process = subprocess.Popen(
                    make_command(theirs.fileno(), is_first),
                    stdin=subprocess.DEVNULL,
                    pass_fds=(theirs.fileno(),),
                    process_group=0,
                )
            except OSError:
                ours.close()
                raise
        ours.setblocking(False)
        self.socket = ours
        self.socket_is_closed = False
        """The process is about to end: a live process keeps its socket open."""

    @property
    def pid(self) -> int:
        return self._process.pid

    def receive(self) -> Heartbeat | None:
        """The newest heartbeat that has arrived since the last call."""
        newest = None
        while True:
            try:
                data = self.socket.recv(_RECEIVE_BYTES)
            except OSError:
                return newest
            if not data:
                self.socket_is_closed = True
                return newest
            newest = self._reader.feed(data) or newest

    def exit_code(self) -> int | None:
        """None while the process lives; negative for a signal."""
        return self._process.poll()

    def send(self, number: signal.Signals) -> None:
        """Does nothing if the process is gone."""
        self._process.send_signal(number)

    def kill(self) -> None:
        """Sends SIGKILL, which ends a stopped process too."""
        self._process.kill()

    def wait(self, timeout_s: float) -> int | None:
        """The exit code, or None if the process still lives after `timeout_s`."""
        try:
            return self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return None

    def close(self) -> None:
        """Closes the socket. The process has ended."""
        self.socket.close()


class Supervisor:
    """Implements the package's contract. The main thread calls `run`."""

    def __init__(
        self,
        worker: WorkerSettings,
        settings: SupervisorSettings,
        make_command: MakeCommand,
        clock: Clock | None = None,
    ) -> None:
        """`worker` gives the id, the address of the HTTP pages, and how long an active child may drain."""
        self._worker_id = worker.worker_id
        self._make_command = make_command
        self._drain_s = worker.drain_s
        self._clock = clock or SystemClock()
        self._policy = RestartPolicy(settings)
        self._children: dict[int, ChildProcess] = {}
        self._started = 0
        self._hangups: set[int] = set()
        self._signals: list[signal.Signals] = []
        self._view = View(worker.worker_id)
        self._pages = Pages(worker.http_host, worker.http_port, lambda: self._view)
        self._selector = selectors.DefaultSelector()

    def run(self) -> Exit:
        """Returns after a stop signal, or when the policy ends everything. Raises RelayError if the port is taken."""
        self._pages.start()
        log.info("supervisor started", worker_id=self._worker_id, port=self._pages.port)
        try:
            with self._woken_by_signals():
                return self._supervise()
        finally:
            for child in self._children.values():
                child.kill()
            self._pages.stop()

    def _supervise(self) -> Exit:
        while True:
            self._listen()
            while self._signals:
                number = self._signals.pop(0)
                if number is not signal.SIGHUP:
                    return self._stop(number)
                self._pass_on_hangup()
            action = self._policy.decide(self._clock.monotonic_us())
            if action.end is not None:
                self._end_all(action.end)
                return action.end
            for silent in action.kill:
                self._kill(silent)
            if action.start:
                self._start()
            self._show()

    def _listen(self) -> None:
        for key, _ in self._selector.select(TICK_S):
            if isinstance(key.data, ChildProcess):
                # A process closes its socket a little before it ends.
                self._receive(key.data)
            else:
                key.data()
        for child in list(self._children.values()):
            self._receive(child)

    def _receive(self, child: ChildProcess) -> None:
        if child.number not in self._children:
            return
        heartbeat = child.receive()
        now_us = self._clock.monotonic_us()
        if heartbeat is not None:
            before = self._policy.children[child.number].phase
            self._policy.note_heartbeat(child.number, heartbeat, now_us)
            if heartbeat.phase is not before:
                if child.number in self._hangups:
                    self._hangups.discard(child.number)
                    child.send(signal.SIGHUP)
                log.info(
                    "child changed its phase",
                    number=child.number,
                    pid=child.pid,
                    phase=heartbeat.phase.value,
                    port=heartbeat.port,
                )
        code = child.wait(0.001) if child.socket_is_closed else child.exit_code()
        if code is not None:
            self._selector.unregister(child.socket)
            child.close()
            del self._children[child.number]
            self._hangups.discard(child.number)
            self._policy.note_ended(child.number, code, now_us)
            log.warning("child ended", number=child.number, pid=child.pid, exit_code=code)

    def _start(self) -> None:
        self._started += 1
        now_us = self._clock.monotonic_us()
        try:
            child = ChildProcess(self._started, self._make_command, is_first=not self._policy.was_well)
        except OSError as error:
            log.error("child cannot be started", error=str(error))
            self._policy.note_started(self._started, now_us)
            self._policy.note_ended(self._started, -1, now_us)
            return
        self._children[child.number] = child
        self._selector.register(child.socket, selectors.EVENT_READ, child)
        self._policy.note_started(child.number, now_us)
        log.info("child started", number=child.number, pid=child.pid)

    def _kill(self, number: int) -> None:
        child = self._children[number]
        log.error("child sends no heartbeat: killed", number=number, pid=child.pid)
        child.kill()

    def _pass_on_hangup(self) -> None:
        """Passes SIGHUP to the children. A child that still loads gets it later: without a handler it would end."""
        for child in self._children.values():
            if self._policy.children[child.number].phase is ChildPhase.PREPARING:
                self._hangups.add(child.number)
            else:
                child.send(signal.SIGHUP)

    def _stop(self, number: signal.Signals) -> Exit:
        """Stops the standby first, so that it does not take over. Returns the exit code of the active child."""
        active = self._policy.active
        log.info("supervisor stops", worker_id=self._worker_id, signal=number.name)
        code: int = Exit.DONE
        for child in sorted(self._children.values(), key=lambda child: child.number == (active and active.number)):
            is_active = active is not None and child.number == active.number
            child.send(number)
            ended = child.wait(self._drain_s + 10 if is_active else STANDBY_STOP_S)
            if ended is None:
                log.error("child did not stop in time: killed", number=child.number, pid=child.pid)
                child.kill()
                ended = child.wait(_DEATH_S) or Exit.FAILED
            if is_active:
                code = ended
        self._children.clear()
        return Exit(code) if code in set(Exit) else Exit.FAILED

    def _end_all(self, code: Exit) -> None:
        for child in self._children.values():
            child.kill()
        for child in self._children.values():
            child.wait(_DEATH_S)
        self._children.clear()
        log.error("supervisor ends", worker_id=self._worker_id, exit_code=int(code))

    def _show(self) -> None:
        children = tuple(
            ChildPage.of(self._policy.children[number], child.pid) for number, child in self._children.items()
        )
        self._view = View(self._worker_id, children, self._policy.deaths)

    @contextlib.contextmanager
    def _woken_by_signals(self) -> Iterator[None]:
        """Signal handlers record the signal and end the sleep."""
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        theirs.setblocking(False)

        def empty() -> None:
            with contextlib.suppress(BlockingIOError):
                ours.recv(1024)

        self._selector.register(ours, selectors.EVENT_READ, empty)
        before = {
            number: signal.signal(number, lambda given, _: self._signals.append(signal.Signals(given)))
            for number in _PASSED_ON
        }
        signal.set_wakeup_fd(theirs.fileno())
        try:
            yield
        finally:
            signal.set_wakeup_fd(-1)
            for number, handler in before.items():
                signal.signal(number, handler)
            self._selector.close()
            ours.close()
            theirs.close()
