"""The life of a worker process: prepare, wait for its turn, activate, run, stop.

`WorkerProcess.run` is the main thread's. Between the phases lies the lock of the worker's id
(`relaygr.worker.shared.lock`): a primary worker has it before it prepares anything, a standby gets it from the kernel
when the active worker is dead.
"""

from __future__ import annotations

import os
import signal
import threading
import time

import structlog

from relaygr.consumer import LoopState
from relaygr.runtime.clock import Clock, SystemClock
from relaygr.runtime.interpreter import tune_interpreter, without_collection
from relaygr.runtime.probes import Check, ProbeServer, Readiness
from relaygr.schemas.messages import WorkerState
from relaygr.worker.cache.metrics import CacheCollector
from relaygr.worker.exits import Exit
from relaygr.worker.process.handover import claim, shared_folder
from relaygr.worker.process.memory import take_memory
from relaygr.worker.process.parts import Parts
from relaygr.worker.process.prepare import prepare
from relaygr.worker.process.reloading import ModelReloading
from relaygr.worker.settings import WorkerConfig
from relaygr.worker.shared.lock import ArenaLock, note_fenced, predecessor_was_fenced
from relaygr.worker.supervisor.heartbeat import INTERVAL_S, ChildPhase, Heartbeat, SupervisorLink

log = structlog.get_logger()

WARM_INTERVAL_S = 30.0
WARM_TIMEOUT_S = 0.3
RESTORE_PATIENCE_S = 0.1
READ_AHEAD_INTERVAL_S = 5.0
LONGEST_SILENCE_US = 30_000_000
"""A poll thread that was not heard of for so long hangs."""

WAITING = Readiness((Check("active", False, "standby: waits for the active worker's end"),))
"""A standby's answer."""


class WorkerProcess:
    """One worker, from its parts to its exit code."""

    def __init__(self, config: WorkerConfig, *, is_standby: bool = False, link: SupervisorLink | None = None) -> None:
        """Prepares. Raises RelayError for what the user can mend. `link`: the line to its supervisor."""
        self._config = config
        self._settings = config.worker
        self._is_standby = is_standby
        self._link = link
        self._clock = SystemClock()
        self._end = threading.Event()
        self._signalled = False
        self._exit = Exit.DONE
        self._reload_wanted = False
        # Early: before there is a handler, the signal would end the process.
        signal.signal(signal.SIGHUP, self._on_hangup)
        self._folder = shared_folder(config)
        self._lock = ArenaLock(self._folder)
        if not is_standby:
            claim(self._lock, config)
        self._prepared = prepare(
            config,
            self._folder,
            self._lock,
            is_standby=is_standby,
            keeps_prefixes=self._settings.shared_path is not None or link is not None,
        )
        self._reloading = ModelReloading(self._settings, self._prepared)
        self._parts: Parts | None = None
        if self._prepared.memory is not None:
            self._parts = self._assemble()
        self._probes = ProbeServer(self._settings.http_host, self._settings.http_port, self._readiness, self._health)

    def run(self) -> Exit:
        """Starts every thread, waits for the end, and stops them in order."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._on_signal)
        tune_interpreter()
        self._probes.start()
        if not self._is_standby or self._await_turn():
            parts = self._activate()
            self._say_hello(parts)
            self._serve(parts)
            self._leave_if_fenced()
            self._stop(parts)
        self._put_away()
        return self._exit

    # -- the standby -------------------------------------------------------------------------------

    def _await_turn(self) -> bool:
        """Until this process holds the lock: True. False when told to stop, or when nobody here may take over."""
        log.info("stands by", worker_id=self._settings.worker_id, pid=os.getpid(), active=self._lock.holder())
        warm_at_s = read_at_s = 0.0
        while not self._is_over():
            self._beat(ChildPhase.STANDBY, WAITING)
            if time.monotonic() >= warm_at_s:
                self._keep_warm()
                warm_at_s = time.monotonic() + WARM_INTERVAL_S
            if time.monotonic() >= read_at_s:
                self._prepared.handover.read_ahead()
                read_at_s = time.monotonic() + READ_AHEAD_INTERVAL_S
            self._reload(is_active=False)
            if self._lock.acquire(timeout_s=INTERVAL_S) is None:
                continue
            if predecessor_was_fenced(self._folder, self._lock):
                log.error(
                    "another process has this worker's id: does not take over", worker_id=self._settings.worker_id
                )
                self._exit = Exit.FENCED
                return False
            log.warning("takes over", worker_id=self._settings.worker_id, arena_epoch=self._lock.arena_epoch)
            # Taking memory or restoring a large tier may be slower than a supervisor's patience with a standby.
            self._beat(ChildPhase.PREPARING, WAITING)
            return True
        return False

    def _keep_warm(self) -> None:
        """Connections that nothing uses are closed by brokers, and what the clients have to say piles up."""
        self._prepared.producer.poll(0)
        if self._parts is not None:
            self._parts.loop.connect(WARM_TIMEOUT_S)

    # -- active ------------------------------------------------------------------------------------

    def _activate(self) -> Parts:
        """Owns from here on: joins the group, and every thread runs."""
        started_s = time.monotonic()
        parts = self._parts = self._parts or self._assemble()
        self._prepared.handover.begin()
        # Joining takes a while, and meanwhile the cache is restored. A long restoring holds requests up no longer
        # than what it saves them: they are computed then.
        restored = threading.Event()
        parts.device.call(lambda: _wait(restored, RESTORE_PATIENCE_S))
        parts.loop.start()
        with without_collection():
            self._prepared.handover.restore(parts.cache, self._prepared.engine.namespace, self._clock.monotonic_us())
        restored.set()
        parts.report.state = WorkerState.READY
        log.info("activated", took_ms=round((time.monotonic() - started_s) * 1e3, 1))
        return parts

    def _assemble(self) -> Parts:
        prepared = self._prepared
        parts = Parts(
            self._config,
            prepared,
            prepared.memory or take_memory(prepared.engine, self._settings, prepared.handover.dram),
            self._lock,
            self._clock,
            on_device_death=lambda: self._end_with(Exit.FAILED),
            on_loop_end=self._loop_ended,
        )
        CacheCollector(parts.cache.stats)
        # Idle until there are partitions; the store is checked and both threads are warm by then.
        parts.device.start()
        parts.follower.start()
        return parts

    def _serve(self, parts: Parts) -> None:
        """Until the end. A supervisor hears of a worker that moves, and of no other."""
        while not (self._end.wait(INTERVAL_S) or self._is_over()):
            if parts.device.is_stuck():
                log.critical("the device makes no progress; exiting", watchdog_s=self._settings.watchdog_s)
                os._exit(Exit.STUCK)
            self._reload(is_active=True)
            if self._health().ready:
                self._beat(ChildPhase.ACTIVE, self._readiness())

    def _stop(self, parts: Parts) -> None:
        # Without its device thread it finishes nothing, and a successor waits for the lock.
        drain_s = 0.0 if self._exit is Exit.FAILED else self._settings.drain_s
        log.info("stopping", worker_id=self._settings.worker_id, drain_s=drain_s)
        parts.report.state = WorkerState.STOPPING
        parts.loop.stop(drain_s)
        self._await_loop(parts)
        self._leave_if_fenced()
        parts.device.stop(2)
        parts.report.publish()
        parts.answers.close(1)
        self._prepared.dead_letters.flush(1)
        parts.follower.stop()
        self._prepared.follower_letters.flush(1)

    def _await_loop(self, parts: Parts) -> None:
        """Until it has drained. A supervisor that did not ask for this stop would take silence for a hang."""
        ends_s = time.monotonic() + self._settings.drain_s + 5
        while not parts.loop.join(INTERVAL_S) and time.monotonic() < ends_s:
            self._beat(ChildPhase.ACTIVE, self._readiness())

    def _put_away(self) -> None:
        if self._parts is not None:
            self._parts.device.stop(2)
            self._parts.follower.stop()
            self._parts.cache.close()
            if self._parts.recorder is not None:
                self._parts.recorder.close()
        self._prepared.store.close()
        self._probes.stop()
        self._lock.release()
        log.info("stopped", worker_id=self._settings.worker_id, exit_code=int(self._exit))

    # -- what ends it ------------------------------------------------------------------------------

    def _loop_ended(self, state: LoopState) -> None:
        if state is LoopState.FENCED:
            note_fenced(self._folder, self._lock)
            self._end_with(Exit.FENCED)
        elif state is LoopState.FAILED:
            log.error("the consumer loop failed", error=str(self._parts and self._parts.loop.error))
            self._end_with(Exit.FAILED)

    def _leave_if_fenced(self) -> None:
        """The id is another's: nothing more is answered, committed or written."""
        if self._exit is Exit.FENCED:
            log.critical("fenced; exiting", worker_id=self._settings.worker_id)
            os._exit(Exit.FENCED)

    def _on_signal(self, *_: object) -> None:
        # No event: a signal handler may not take the lock that the main thread waits with.
        self._signalled = True

    def _on_hangup(self, *_: object) -> None:
        self._reload_wanted = True

    def _reload(self, *, is_active: bool) -> None:
        if self._reload_wanted:
            self._reload_wanted = False
            self._reloading.want()
        self._reloading.tick(self._parts, is_active=is_active)

    def _end_with(self, code: Exit) -> None:
        # Whatever else goes wrong while a fenced one ends: nobody may start it again.
        self._exit = self._exit if self._exit is Exit.FENCED else code
        self._end.set()

    def _is_over(self) -> bool:
        return self._signalled or (self._link is not None and self._link.is_closed)

    # -- what others see ---------------------------------------------------------------------------

    def _readiness(self) -> Readiness:
        parts = self._parts
        return readiness(parts) if parts is not None and self._lock.is_held() else WAITING

    def _health(self) -> Readiness:
        parts = self._parts
        return health(parts, self._clock) if parts is not None and self._lock.is_held() else Readiness()

    def _beat(self, phase: ChildPhase, told: Readiness) -> None:
        if self._link is not None:
            missing = ", ".join(check.detail or check.name for check in told.checks if not check.ok)
            self._link.send(Heartbeat(phase, self._probes.port, told.ready, missing))

    def _say_hello(self, parts: Parts) -> None:
        engine, plan = self._prepared.engine, self._prepared.plan
        for kind, size_bytes in plan.by_kind().items():
            parts.metrics.bytes_at_most.labels(kind).set(size_bytes)
        log.info(
            "worker started",
            worker_id=self._settings.worker_id,
            pid=os.getpid(),
            device=engine.device.name,
            model_revision=engine.revision,
            group=self._config.kafka.workers_group,
            metrics=f"http://{self._probes.host}:{self._probes.port}/metrics",
            bytes_at_most=plan.total_bytes,
            **{f"{kind}_bytes": size for kind, size in plan.by_kind().items()},
        )


def _wait(event: threading.Event, timeout_s: float) -> None:
    event.wait(timeout_s)


def readiness(parts: Parts) -> Readiness:
    """Ready = assigned, history caught up, model warm, broker reachable."""
    loop = parts.loop.status()
    loading = parts.follower.loading
    state = parts.report.state
    return Readiness(
        (
            Check("assigned", loop.assigned, f"{len(loop.partitions)} partitions"),
            Check("history", not loading, f"{len(loading)} partitions still loading" if loading else ""),
            Check("broker", loop.broker_reachable),
            Check("consumer", not loop.stalled and loop.state is LoopState.RUNNING, loop.state.value),
            Check("running", state is WorkerState.READY, state.value),
        )
    )


def health(parts: Parts, clock: Clock) -> Readiness:
    """Healthy = device and poll thread move."""
    silent_us = clock.monotonic_us() - parts.loop.status().last_poll_us
    return Readiness(
        (
            Check("device", not parts.device.is_stuck()),
            Check("poll thread", silent_us < LONGEST_SILENCE_US, f"last poll {silent_us // 1000} ms ago"),
        )
    )
