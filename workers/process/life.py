"""The life of a worker process: prepare, activate, run, stop. `WorkerProcess.run` is the main thread's."""

from __future__ import annotations

import os
import signal
import threading

import structlog

from schemas.messages import WorkerState
from streams.clock import SystemClock
from streams.consumer import LoopState
from streams.interpreter import settle
from streams.probes import ProbeServer
from workers.cache.metrics import CacheCollector
from workers.exits import Exit
from workers.process.config import WorkerConfig
from workers.process.parts import Parts
from workers.process.prepare import prepare
from workers.process.readiness import health, readiness

log = structlog.get_logger()


class WorkerProcess:
    """One worker, from its parts to its exit code."""

    def __init__(self, config: WorkerConfig) -> None:
        """Prepares. Raises RelayError for what the user can mend."""
        self._config = config
        self._settings = config.worker
        self._clock = SystemClock()
        self._end = threading.Event()
        self._signalled = False
        self._exit = Exit.DONE
        self._prepared = prepare(config)
        self._parts = Parts(
            config,
            self._prepared,
            self._clock,
            on_device_death=lambda: self._end_with(Exit.FAILED),
            on_loop_end=self._loop_ended,
        )
        CacheCollector(self._parts.cache.stats)
        self._probes = ProbeServer(
            self._settings.http_host,
            self._settings.http_port,
            lambda: readiness(self._parts),
            lambda: health(self._parts, self._clock),
        )

    def run(self) -> Exit:
        """Starts every thread, waits for the end, and stops them in order."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._on_signal)
        settle()
        self._probes.start()
        self._activate()
        self._say_hello()
        while not (self._end.wait(0.2) or self._signalled):
            if self._parts.device.is_stuck():
                log.critical("the device makes no progress; exiting", watchdog_s=self._settings.watchdog_s)
                os._exit(Exit.STUCK)
        self._stop()
        return self._exit

    def _activate(self) -> None:
        """Owns from here on: joins the group, and every thread runs."""
        self._parts.device.start()
        self._parts.follower.start()
        self._parts.loop.start()
        self._parts.report.state = WorkerState.READY

    def _stop(self) -> None:
        log.info("stopping", worker_id=self._settings.worker_id, drain_s=self._settings.drain_s)
        parts, prepared = self._parts, self._prepared
        parts.report.state = WorkerState.STOPPING
        parts.loop.stop(self._settings.drain_s)
        parts.loop.join(self._settings.drain_s + 5)
        parts.device.stop(2)
        if self._exit is not Exit.FENCED:
            # The id is another's by then, and so is its status.
            parts.report.publish()
        parts.answers.close(1)
        prepared.dead_letters.flush(1)
        parts.follower.stop()
        prepared.follower_letters.flush(1)
        parts.cache.close()
        prepared.store.close()
        self._probes.stop()
        log.info("stopped", worker_id=self._settings.worker_id, exit_code=int(self._exit))

    def _loop_ended(self, state: LoopState) -> None:
        if state is LoopState.FENCED:
            self._end_with(Exit.FENCED)
        elif state is LoopState.FAILED:
            log.error("the consumer loop failed", error=str(self._parts.loop.error))
            self._end_with(Exit.FAILED)

    def _on_signal(self, *_: object) -> None:
        # No event: a signal handler may not take the lock that the main thread waits with.
        self._signalled = True

    def _end_with(self, code: Exit) -> None:
        self._exit = code
        self._end.set()

    def _say_hello(self) -> None:
        engine, plan = self._prepared.engine, self._prepared.plan
        for kind, size_bytes in plan.by_kind().items():
            self._parts.metrics.bytes_at_most.labels(kind).set(size_bytes)
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
