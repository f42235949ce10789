"""The worker process: builds every part, says what it owns and holds, runs, and ends cleanly.

Threads: the poll thread (Kafka), the device thread (compute), the history follower, the cache's mover,
and the probe server's. The main thread waits for a signal or for one of them to end.

It ends
* on SIGTERM or SIGINT: reads no more, finishes what it has within `drain_s`, commits, closes;
* with Exit.FENCED if another process took over its id (no supervisor may restart it);
* with Exit.STUCK, at once, if the device makes no progress: what is in flight is delivered again;
* with Exit.FAILED if a thread failed.

It starts in two phases: *prepare* (slow: model, memory, calibration, store, connections) and *activate* (quick: from
there on it owns partitions). Between them lies the lock of its worker id. A primary worker takes it first of all; a
standby prepares, and then waits for it: the kernel frees it when the active worker is dead, never before.

    config         the settings of one worker
    shared_folder  what outlives the process, and the right to write it
    memory         what it takes: planned, checked, taken
    outliving      prefixes and finished offsets, from predecessor to successor
    warm           the latency model, and a device that has done its first work
    prepare        the first phase
    parts          the parts, wired to each other
    duties         what the poll thread does beside messages
    report         the status message
    readiness      what the probes say
    life           prepare, wait, activate, run, stop
"""

from __future__ import annotations

from relaygr.kafka.admin import require_topics
from relaygr.kafka.clients import require_broker
from relaygr.worker.exits import Exit
from relaygr.worker.process.life import WorkerProcess
from relaygr.worker.process.memory import queues_bytes
from relaygr.worker.settings import WorkerConfig
from relaygr.worker.supervisor.heartbeat import SupervisorLink

__all__ = ["Exit", "WorkerConfig", "WorkerProcess", "queues_bytes", "run_worker"]


def run_worker(config: WorkerConfig, *, is_standby: bool = False, link: SupervisorLink | None = None) -> Exit:
    """Runs until told to stop. Raises RelayError for what the user can mend. `link`: the line to a supervisor."""
    require_broker(config.kafka)
    require_topics(config.kafka)
    return WorkerProcess(config, is_standby=is_standby, link=link).run()
