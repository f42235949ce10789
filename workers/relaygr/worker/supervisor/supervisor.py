"""The loop: hears the children, asks the judge, carries out what it says, and stops them in order.

It sleeps until a child says something or ends, a signal comes, or `TICK_S` has passed. Everything but the HTTP
pages runs on the main thread.
"""

from __future__ import annotations

import contextlib
import selectors
import signal
import socket
from collections.abc import Iterator

import structlog

from relaygr.runtime.clock import Clock, SystemClock
from relaygr.worker.exits import Exit
from relaygr.worker.supervisor.beats import Phase
from relaygr.worker.supervisor.child import ChildProcess, MakeCommand
from relaygr.worker.supervisor.judge import Judge
from relaygr.worker.supervisor.pages import ChildPage, Pages, View
from relaygr.worker.supervisor.settings import SupervisorSettings

log = structlog.get_logger()

TICK_S = 0.2
STANDBY_STOP_S = 3.0
_DEATH_S = 5.0
"""How long the system may take to remove a killed process before we go on without having seen it."""
_PASSED_ON = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


class Supervisor:
    """See the package. `run` is the main thread's."""

    def __init__(
        self,
        worker_id: str,
        settings: SupervisorSettings,
        make_command: MakeCommand,
        http_host: str,
        http_port: int,
        drain_s: float,
        clock: Clock | None = None,
    ) -> None:
        """`drain_s`: what an active worker takes to stop, beside a few seconds."""
        self._worker_id = worker_id
        self._make_command = make_command
        self._drain_s = drain_s
        self._clock = clock or SystemClock()
        self._judge = Judge(settings)
        self._children: dict[int, ChildProcess] = {}
        self._started = 0
        self._hangups: set[int] = set()
        self._signals: list[signal.Signals] = []
        self._view = View(worker_id)
        self._pages = Pages(http_host, http_port, lambda: self._view)
        self._selector = selectors.DefaultSelector()

    def run(self) -> Exit:
        """Until told to stop, or until the judge ends it. Raises RelayError if its port is taken."""
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
            verdict = self._judge.decide(self._clock.monotonic_us())
            if verdict.end is not None:
                self._end_all(verdict.end)
                return verdict.end
            for silent in verdict.kill:
                self._kill(silent)
            if verdict.start:
                self._start()
            self._show()

    def _listen(self) -> None:
        for key, _ in self._selector.select(TICK_S):
            if isinstance(key.data, ChildProcess):
                # The end of a line comes before the end of its process, by a little.
                self._hear(key.data)
            else:
                key.data()
        for child in list(self._children.values()):
            self._hear(child)

    def _hear(self, child: ChildProcess) -> None:
        if child.number not in self._children:
            return
        beat = child.hear()
        now_us = self._clock.monotonic_us()
        if beat is not None:
            before = self._judge.children[child.number].phase
            self._judge.note_beat(child.number, beat, now_us)
            if beat.phase is not before:
                if child.number in self._hangups:
                    self._hangups.discard(child.number)
                    child.send(signal.SIGHUP)
                log.info("child", number=child.number, pid=child.pid, phase=beat.phase.value, port=beat.port)
        code = child.wait(0.001) if child.line_is_closed else child.exit_code()
        if code is not None:
            self._selector.unregister(child.line)
            child.bury()
            del self._children[child.number]
            self._hangups.discard(child.number)
            self._judge.note_ended(child.number, code, now_us)
            log.warning("child ended", number=child.number, pid=child.pid, exit_code=code)

    def _start(self) -> None:
        self._started += 1
        now_us = self._clock.monotonic_us()
        try:
            child = ChildProcess(self._started, self._make_command, is_first=not self._judge.was_well)
        except OSError as error:
            log.error("no child could be started", error=str(error))
            self._judge.note_started(self._started, now_us)
            self._judge.note_ended(self._started, -1, now_us)
            return
        self._children[child.number] = child
        self._selector.register(child.line, selectors.EVENT_READ, child)
        self._judge.note_started(child.number, now_us)
        log.info("child started", number=child.number, pid=child.pid)

    def _kill(self, number: int) -> None:
        child = self._children[number]
        log.error("child gives no sign of life: killed", number=number, pid=child.pid)
        child.kill()

    def _pass_on_hangup(self) -> None:
        """A child that still loads has no handler perhaps, and would die of it: it gets the signal when it is ready."""
        for child in self._children.values():
            if self._judge.children[child.number].phase is Phase.PREPARING:
                self._hangups.add(child.number)
            else:
                child.send(signal.SIGHUP)

    def _stop(self, number: signal.Signals) -> Exit:
        """The standby first, so that it takes over nothing. Answers how the active one ended."""
        active = self._judge.active
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
            ChildPage.of(self._judge.children[number], child.pid) for number, child in self._children.items()
        )
        self._view = View(self._worker_id, children, self._judge.deaths)

    @contextlib.contextmanager
    def _woken_by_signals(self) -> Iterator[None]:
        """Signals are noted, and end the sleep."""
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
