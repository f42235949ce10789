"""The lifecycle of a worker process: prepare, wait for the lock, activate, serve, stop.

The main thread calls `WorkerProcess.run`. The lock of the worker id (`relaygr.worker.shared.lock`) separates the
phases: a primary worker acquires it before it prepares, a standby gets it from the kernel when the active worker is
dead.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from typing import NoReturn

import structlog

from relaygr.consumer.interface import Loop, LoopState
from relaygr.kafka.session import KafkaSession
from relaygr.runtime.clock import SystemClock
from relaygr.runtime.direct_http import http_address
from relaygr.runtime.errors import RelayError
from relaygr.runtime.interpreter import tune_interpreter, without_collection
from relaygr.runtime.logs import close_logs
from relaygr.runtime.probes import ProbeServer
from relaygr.runtime.readiness import Check, Readiness
from relaygr.runtime.service_manager import ServiceManager
from relaygr.schemas.messages import WorkerState
from relaygr.tracing import start_tracing
from relaygr.worker.exits import Exit
from relaygr.worker.process.allocation import allocate_memory
from relaygr.worker.process.components import Components, OnEnd
from relaygr.worker.process.handover import claim
from relaygr.worker.process.prepare import prepare
from relaygr.worker.process.reloading import ModelReloading
from relaygr.worker.settings import WorkerConfig
from relaygr.worker.shared.lock import ArenaLock, note_fenced, predecessor_was_fenced, shared_folder
from relaygr.worker.supervisor.heartbeat import INTERVAL_S, ChildPhase, Heartbeat
from relaygr.worker.supervisor.link import SupervisorLink

log = structlog.get_logger()

WARM_INTERVAL_S = 30.0
WARM_TIMEOUT_S = 0.2
"""For each of three requests: together less than the time after which a supervisor kills a silent standby."""
RESTORE_WAIT_S = 0.1
REPORTS_S = 0.02
"""How often delivery reports are taken while the loop of diverted requests drains alone."""
READ_AHEAD_INTERVAL_S = 5.0

WAITING = Readiness((Check("active", False, "standby: waits for the active worker's end"),))
"""The readiness of a standby."""
WITHOUT_LOCK = Readiness((Check("active", False, "the worker's lock in worker.shared_path was removed"),))
"""The readiness of an active process while it cannot put its lock back."""


class WorkerProcess:
    """One worker, from its construction to its exit code."""

    def __init__(
        self,
        config: WorkerConfig,
        session: KafkaSession,
        *,
        is_standby: bool = False,
        link: SupervisorLink | None = None,
    ) -> None:
        """Prepares. `link`: the connection to the supervisor. Raises RelayError for a mistake of the user."""
        self._config = config
        self._settings = config.worker
        self._is_standby = is_standby
        self._link = link
        self._clock = SystemClock()
        self._manager = ServiceManager()
        self._end = threading.Event()
        self._signalled = False
        self._exit = Exit.DONE
        self._reload_wanted = False
        # The handler is installed first: without one, SIGHUP would end the process.
        signal.signal(signal.SIGHUP, self._on_hangup)
        self._tracer = start_tracing(config.tracing, "relaygr-worker", self._settings.worker_id)
        self._folder = shared_folder(config)
        self._lock = ArenaLock(self._folder, is_standby=is_standby)
        self._lacks_lock = False
        if not is_standby:
            claim(self._lock, config)
        self._prepared = prepare(
            config,
            session,
            self._folder,
            self._lock,
            is_standby=is_standby,
            keeps_prefixes=self._settings.shared_path is not None or link is not None,
        )
        self._reloading = ModelReloading(self._settings, self._prepared)
        self._components: Components | None = None
        if self._prepared.memory is not None:
            self._components = self._assemble()
        self._probes = ProbeServer(self._settings.http_host, self._settings.http_port, self._readiness, self._health)

    def run(self) -> Exit:
        """Starts every thread, serves until a reason to end, and stops the threads in order."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._on_signal)
        tune_interpreter()
        self._probes.start()
        if not self._is_standby or self._await_lock():
            # The preparation may have taken minutes.
            self._keep_lock()
            components = self._activate()
            self._log_start(components)
            self._manager.ready()
            self._serve(components)
            self._leave_if_fenced()
            self._stop(components)
        if self._link is not None:
            self._link.note_exit(self._exit)
        self._close()
        return self._exit

    # -- the standby -------------------------------------------------------------------------------

    def _await_lock(self) -> bool:
        """Waits until this process holds the lock. False if the process was stopped or must not take over."""
        log.info(
            "standing by for the lock", worker_id=self._settings.worker_id, pid=os.getpid(), active=self._lock.holder()
        )
        # A new client may take seconds: a supervisor waits longer for a child that has not stood by yet.
        self._keep_warm(ChildPhase.PREPARING)
        warm_at_s, read_at_s = time.monotonic() + WARM_INTERVAL_S, 0.0
        while not self._must_stop():
            self._send_heartbeat(ChildPhase.STANDBY, WAITING)
            if time.monotonic() >= warm_at_s:
                self._keep_warm(ChildPhase.STANDBY)
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
            # Allocating memory or restoring a large tier may take longer than a supervisor waits for a standby.
            self._send_heartbeat(ChildPhase.PREPARING, WAITING)
            return True
        return False

    def _keep_warm(self, phase: ChildPhase) -> None:
        """Polls and reconnects the idle clients: brokers close idle connections, and unpolled events accumulate.

        Frees the files of the history store that the active worker has replaced.
        """
        self._prepared.store.refresh()
        self._prepared.producer.poll(0)
        if self._components is not None:
            for loop in self._components.loops:
                loop.connect(WARM_TIMEOUT_S)
                self._send_heartbeat(phase, WAITING)

    # -- active ------------------------------------------------------------------------------------

    def _activate(self) -> Components:
        """Joins the group. From now on the process owns partitions and every thread runs."""
        started_s = time.monotonic()
        components = self._components = self._components or self._assemble()
        components.status.metrics_url = self._settings.metrics_url_at(self._probes.port)
        components.status.active_since_us = self._clock.wall_us()
        self._prepared.handover.begin()
        # The cache is restored while the consumer joins. The device thread waits for the cache, but only for a short
        # time: computing a prefix costs less than a long wait.
        restored = threading.Event()
        components.executor.post(lambda: _wait(restored, RESTORE_WAIT_S))
        components.start_loops()
        with without_collection():
            self._prepared.handover.restore(
                components.cache, self._prepared.engine.namespace, self._clock.monotonic_us()
            )
        restored.set()
        components.open_admin_socket(self._folder)
        components.status.state = WorkerState.READY
        log.info("activated", took_ms=round((time.monotonic() - started_s) * 1e3, 1))
        return components

    def _assemble(self) -> Components:
        prepared = self._prepared
        memory = prepared.memory or allocate_memory(prepared.engine, self._settings, prepared.handover.dram)
        on_end = OnEnd(device_thread=lambda: self._end_with(Exit.FAILED), loop=self._on_loop_end)
        components = Components(self._config, prepared, memory, self._lock, self._clock, on_end, self._tracer)
        # Both threads are idle until there are partitions; by then they are warm and the store is checked.
        components.start_device_and_follower()
        return components

    def _serve(self, components: Components) -> None:
        """Serves until a reason to end. The heartbeats say how long ago each thread made progress."""
        while True:
            if components.device.is_stuck():
                log.critical("the device makes no progress; exiting", watchdog_s=self._settings.watchdog_s)
                self._leave_at_once(Exit.STUCK)
            self._reload(is_active=True)
            if self._keep_lock():
                components.close_admin_socket()
                components.open_admin_socket(self._folder)
            self._manager.alive()
            self._send_heartbeat(ChildPhase.ACTIVE, self._readiness(), components.silence_ms())
            if self._end.wait(INTERVAL_S) or self._must_stop():
                return

    def _keep_lock(self) -> bool:
        """Puts the lock back if the shared folder was emptied. Whether it did."""
        if self._lock.is_held():
            self._lacks_lock = False
            return False
        cause = "another process is the holder"
        try:
            shared_folder(self._config)
            is_back = self._lock.put_back()
        except (OSError, RelayError) as error:
            is_back, cause = False, str(error)
        if is_back:
            log.error(
                "the shared folder of a running worker was emptied: its lock is put back. systemd-logind does that at "
                "the end of a user's last session: run the worker as a system user, or set RemoveIPC=no in logind.conf",
                folder=str(self._folder),
            )
        elif not self._lacks_lock:
            log.error("the lock of a running worker was removed", folder=str(self._folder), cause=cause)
        self._lacks_lock = not is_back
        return is_back

    def _stop(self, components: Components) -> None:
        # After a failure the device thread finishes no work, and a successor waits for the lock.
        drain_s = 0.0 if self._exit is Exit.FAILED else self._settings.drain_s
        log.info("stopping", worker_id=self._settings.worker_id, drain_s=drain_s)
        components.status.state = WorkerState.STOPPING
        self._manager.stopping()
        for loop in components.loops:
            loop.stop(drain_s)
        # The first loop takes the delivery reports of both. When it has ended, this thread does.
        self._await_loop(components.loop, INTERVAL_S)
        if components.overflow is not None:
            self._await_loop(
                components.overflow, REPORTS_S, lambda: components.results.tick(self._clock.monotonic_us())
            )
        self._leave_if_fenced()
        self._send_heartbeat(ChildPhase.STOPPING, self._readiness())
        components.flush()

    def _await_loop(self, loop: Loop, interval_s: float, work: Callable[[], None] = lambda: None) -> None:
        """Waits until the loop has drained, and calls `work` meanwhile. Heartbeats continue, since the supervisor may
        not have sent this stop.
        """
        ends_s = time.monotonic() + self._settings.drain_s + 5
        while not loop.join(interval_s) and time.monotonic() < ends_s:
            work()
            self._keep_lock()
            self._send_heartbeat(ChildPhase.ACTIVE, self._readiness())

    def _close(self) -> None:
        self._send_heartbeat(ChildPhase.STOPPING, WAITING)
        self._reloading.close()
        if self._components is not None:
            self._components.close()
        self._prepared.store.close()
        if self._components is not None and self._components.has_hung_calls:
            # Its thread may still write into the DRAM tier, which belongs to the next holder of the lock.
            log.warning("stopped in a call to the pool that hangs", worker_id=self._settings.worker_id)
            self._leave_at_once(self._exit)
        # A standby need not wait for the probe server, which may wait for its clients, nor for a trace collector.
        self._lock.release()
        if self._tracer is not None:
            self._tracer.close()
        self._probes.stop()
        log.info("stopped", worker_id=self._settings.worker_id, exit_code=int(self._exit))

    # -- reasons to end ----------------------------------------------------------------------------

    def _on_loop_end(self, state: LoopState) -> None:
        if state is LoopState.FENCED:
            note_fenced(self._folder, self._lock)
            self._end_with(Exit.FENCED)
        elif state is LoopState.FAILED:
            components = self._components
            overflow = components.overflow if components is not None else None
            cause = (components and components.loop.error) or (overflow and overflow.error)
            log.error("the consumer loop failed", error=str(cause))
            self._end_with(Exit.FAILED)

    def _leave_if_fenced(self) -> None:
        """Exits at once if another process has the id, so that this one produces, commits and writes nothing more."""
        if self._exit is Exit.FENCED:
            log.critical("fenced; exiting", worker_id=self._settings.worker_id)
            self._leave_at_once(Exit.FENCED)

    def _leave_at_once(self, code: Exit) -> NoReturn:
        if self._link is not None:
            self._link.note_exit(code)
        close_logs()
        os._exit(code)

    def _on_signal(self, *_: object) -> None:
        # A flag, not an event: the main thread may hold the event's lock when the handler runs.
        self._signalled = True

    def _on_hangup(self, *_: object) -> None:
        self._reload_wanted = True

    def _reload(self, *, is_active: bool) -> None:
        if self._reload_wanted:
            self._reload_wanted = False
            self._reloading.request()
        self._reloading.tick(self._components, is_active=is_active)

    def _end_with(self, code: Exit) -> None:
        # A later failure does not replace FENCED: no supervisor may start a fenced worker again.
        self._exit = self._exit if self._exit is Exit.FENCED else code
        self._end.set()

    def _must_stop(self) -> bool:
        return self._signalled or (self._link is not None and self._link.is_orphaned)

    # -- probes, heartbeats, logs ------------------------------------------------------------------

    def _readiness(self) -> Readiness:
        components = self._components
        if components is not None and self._lock.is_held():
            return components.readiness()
        return WITHOUT_LOCK if self._lacks_lock else WAITING

    def _health(self) -> Readiness:
        components = self._components
        return components.health() if components is not None and self._lock.is_held() else Readiness()

    def _send_heartbeat(self, phase: ChildPhase, readiness: Readiness, silence_ms: tuple[int, int] = (0, 0)) -> None:
        """`silence_ms`: of the poll thread and of the device thread."""
        if self._link is not None:
            missing = ", ".join(check.detail or check.name for check in readiness.checks if not check.ok)
            self._link.send(Heartbeat(phase, self._probes.port, readiness.ready, missing, *silence_ms))

    def _log_start(self, components: Components) -> None:
        engine, plan = self._prepared.engine, self._prepared.plan
        for kind, size_bytes in plan.by_kind().items():
            components.metrics.bytes_at_most.labels(kind).set(size_bytes)
        log.info(
            "worker started",
            worker_id=self._settings.worker_id,
            pid=os.getpid(),
            device=engine.device.name,
            model_revision=engine.revision,
            group=self._config.group,
            metrics=f"{http_address(self._probes.host, self._probes.port)}/metrics",
            bytes_at_most=plan.total_bytes,
            **{f"{kind}_bytes": size for kind, size in plan.by_kind().items()},
        )


def _wait(event: threading.Event, timeout_s: float) -> None:
    event.wait(timeout_s)
