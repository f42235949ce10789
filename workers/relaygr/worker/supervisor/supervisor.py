"""The loop that receives heartbeats, carries out the policy's actions, adopts children, and stops them in order.

The loop sleeps until a child sends something or ends, a signal arrives, or `TICK_S` has passed. Everything but the
HTTP pages runs on the main thread.
"""

from __future__ import annotations

import contextlib
import selectors
import signal
import socket
from collections.abc import Iterator
from pathlib import Path

import structlog

from relaygr.runtime.clock import SystemClock
from relaygr.runtime.service_manager import ServiceManager
from relaygr.worker.exits import Exit
from relaygr.worker.settings import WorkerSettings
from relaygr.worker.shared.lock import holder_of
from relaygr.worker.supervisor.children import AdoptedChild, Child, MakeCommand, StartedChild
from relaygr.worker.supervisor.heartbeat import ChildPhase
from relaygr.worker.supervisor.policy import PolicyState, RestartPolicy, SupervisorSettings
from relaygr.worker.supervisor.probes import ChildView, SupervisorProbes, SupervisorView
from relaygr.worker.supervisor.records import (
    ChildRecord,
    ProcessStat,
    SupervisorEndpoint,
    delete_record,
    read_record,
    read_records,
)

log = structlog.get_logger()

TICK_S = 0.2
STANDBY_STOP_S = 3.0
_DEATH_S = 5.0
"""How long the supervisor waits for the system to remove a killed process."""
_PASSED_ON = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


class Supervisor:
    """Implements the package's contract. The main thread calls `run`."""

    def __init__(
        self,
        worker: WorkerSettings,
        settings: SupervisorSettings,
        folder: Path,
        make_command: MakeCommand,
    ) -> None:
        """`worker` gives the id, the address of the HTTP pages, and how long an active child may drain. `folder` is
        the shared folder of the worker id.
        """
        self._worker_id = worker.worker_id
        self._folder = folder
        self._make_command = make_command
        self._drain_s = worker.drain_s
        self._clock = SystemClock()
        # The children do not speak to systemd: it asks for the supervisor.
        self._manager = ServiceManager()
        self._policy = RestartPolicy(settings)
        self._children: dict[int, Child] = {}
        self._started = 0
        self._hangups: set[int] = set()
        """Children that get SIGHUP once they have loaded."""
        self._signals: list[signal.Signals] = []
        self._view = SupervisorView(worker.worker_id)
        self._probes = SupervisorProbes(worker.http_host, worker.http_port, lambda: self._view)
        self._selector = selectors.DefaultSelector()

    def run(self) -> Exit:
        """Returns after a stop signal, or when the policy ends everything.

        Raises RelayError if the port is taken, or if the worker id has a supervisor already.
        """
        with contextlib.closing(SupervisorEndpoint(self._folder, self._worker_id)) as endpoint:
            self._probes.start()
            log.info("supervisor started", worker_id=self._worker_id, port=self._probes.port)
            try:
                with self._woken_by_signals():
                    self._manager.ready()
                    return self._supervise(endpoint)
            finally:
                # After an error here the children go on, as after a kill.
                self._probes.stop()

    def _supervise(self, endpoint: SupervisorEndpoint) -> Exit:
        self._selector.register(endpoint.socket, selectors.EVENT_READ, lambda: self._accept(endpoint))
        if self._adopt_all() is Exit.FENCED:
            self._end_all(Exit.FENCED)
            return Exit.FENCED
        while True:
            self._listen()
            self._manager.alive()
            self._put_back(endpoint)
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

    def _put_back(self, endpoint: SupervisorEndpoint) -> None:
        """Lock and socket, if the shared folder was emptied. The active child says so."""
        before = endpoint.socket
        if endpoint.put_back():
            self._selector.unregister(before)
            self._selector.register(endpoint.socket, selectors.EVENT_READ, lambda: self._accept(endpoint))

    def _listen(self) -> None:
        for key, _ in self._selector.select(TICK_S):
            if isinstance(key.data, Child):
                # A process closes its socket a little before it ends.
                self._receive(key.data)
            else:
                key.data()
        for child in list(self._children.values()):
            self._receive(child)
        for child in self._children.values():
            self._policy.note_stat(child.number, ProcessStat.of(child.pid), self._clock.monotonic_us())

    def _receive(self, child: Child) -> None:
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
            self._remove(child)
            self._hangups.discard(child.number)
            self._policy.note_ended(child.number, code, now_us)
            log.warning("child ended", number=child.number, pid=child.pid, exit_code=code)

    def _start(self) -> None:
        self._started += 1
        now_us = self._clock.monotonic_us()
        try:
            child = StartedChild(self._started, self._make_command, is_first=self._policy.state is PolicyState.STARTING)
        except OSError as error:
            log.error("child cannot be started", error=str(error))
            self._policy.note_started(self._started, now_us)
            self._policy.note_ended(self._started, -1, now_us)
            return
        self._children[child.number] = child
        if child.socket is not None:
            self._selector.register(child.socket, selectors.EVENT_READ, child)
        self._policy.note_started(child.number, now_us)
        log.info("child started", number=child.number, pid=child.pid)

    def _adopt_all(self) -> Exit:
        """Adopts the children that live. Returns FENCED if one has ended so since the last supervisor."""
        code = Exit.DONE
        for record in read_records(self._folder):
            if record.is_alive:
                self._adopt(record)
                continue
            delete_record(self._folder, record.pid)
            log.warning("child ended without a supervisor", pid=record.pid, exit_code=record.exit_code)
            if record.exit_code == Exit.FENCED:
                code = Exit.FENCED
        return code

    def _adopt(self, record: ChildRecord) -> AdoptedChild | None:
        """Takes over a child of an earlier supervisor, which connects soon. None if the child has just ended."""
        self._started += 1
        try:
            child = AdoptedChild(self._started, self._folder, record)
        except ProcessLookupError:
            return None
        self._children[child.number] = child
        self._selector.register(child, selectors.EVENT_READ, child)
        self._policy.note_adopted(child.number, record.phase, self._clock.monotonic_us())
        log.warning("child adopted", number=child.number, pid=child.pid, phase=record.phase.value)
        if record.phase is ChildPhase.ACTIVE and holder_of(self._folder) != str(child.pid):
            # The folder was replaced meanwhile: another process may be active too.
            log.error("an active child does not hold the lock: killed", number=child.number, pid=child.pid)
            child.kill()
        return child

    def _accept(self, endpoint: SupervisorEndpoint) -> None:
        """A child of an earlier supervisor connects. It may have written its record only after this one looked."""
        while (accepted := endpoint.accept()) is not None:
            connection, pid = accepted
            known = next((child for child in self._children.values() if child.pid == pid), None)
            if known is None:
                record = read_record(self._folder, pid)
                known = self._adopt(record) if record is not None and record.is_alive else None
            if not isinstance(known, AdoptedChild):
                log.error("a process that is no child connected: refused", pid=pid)
                connection.close()
                continue
            if known.socket is not None:
                self._selector.unregister(known.socket)
            known.connect(connection)
            self._selector.register(connection, selectors.EVENT_READ, known)

    def _remove(self, child: Child) -> None:
        """The process has ended."""
        if child.socket is not None:
            self._selector.unregister(child.socket)
        if isinstance(child, AdoptedChild):
            self._selector.unregister(child)
        child.close()
        delete_record(self._folder, child.pid)
        del self._children[child.number]

    def _kill(self, number: int) -> None:
        child, state = self._children[number], self._policy.children[number]
        stat, heartbeat = state.stat, state.heartbeat
        log.error(
            "child hangs: killed",
            number=number,
            pid=child.pid,
            phase=state.phase.value,
            process_state=stat.state if stat is not None else None,
            poll_silent_ms=heartbeat.poll_silent_ms if heartbeat is not None else None,
            device_silent_ms=heartbeat.device_silent_ms if heartbeat is not None else None,
        )
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
        self._manager.stopping()
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
        self._remove_all()
        return Exit(code) if code in set(Exit) else Exit.FAILED

    def _end_all(self, code: Exit) -> None:
        self._manager.stopping()
        for child in self._children.values():
            child.kill()
        for child in self._children.values():
            child.wait(_DEATH_S)
        self._remove_all()
        log.error("supervisor ends", worker_id=self._worker_id, exit_code=int(code))

    def _remove_all(self) -> None:
        for child in list(self._children.values()):
            self._remove(child)

    def _show(self) -> None:
        children = tuple(
            ChildView.of(self._policy.children[number], child.pid) for number, child in self._children.items()
        )
        self._view = SupervisorView(self._worker_id, children, self._policy.deaths)

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
