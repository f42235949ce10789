"""The worker process: builds its parts, publishes its status, serves, and stops its threads in order.

Threads: the poll thread (Kafka), the device thread (compute), the history follower, the cache's copy threads, and those
of the probe server and of the admin socket. The main thread waits for a signal or for the end of another thread.

The process ends

* on SIGTERM or SIGINT: it reads no more messages, finishes its work within `drain_s`, commits, and closes;
* with Exit.FENCED if another process took over its id (no supervisor may restart it);
* with Exit.STUCK, at once, if the device makes no progress: the unfinished messages are delivered again;
* with Exit.FAILED if a thread failed.

A start has two phases. *Prepare* is slow: model, memory, calibration, history store, connections. *Activate* is quick:
from then on the process owns partitions. A process activates only with the lock of its worker id. A primary worker
acquires the lock before it prepares. A standby prepares first and then waits for the lock, which the kernel frees only
when the active worker is dead.

    memory         the memory of a worker: planned, checked, allocated
    handover       prefixes and finished offsets, from a predecessor to its successor
    prepare        the first phase
    parts          all parts, connected to each other
    housekeeping   the poll thread's work between messages, and the status message
    reloading      SIGHUP: loads another checkpoint and swaps the models
    life           prepare, wait, activate, serve, stop
"""

from __future__ import annotations

from relaygr.kafka.admin import require_topics
from relaygr.kafka.rights import Role
from relaygr.worker.exits import Exit
from relaygr.worker.process.life import WorkerProcess
from relaygr.worker.process.memory import queues_bytes
from relaygr.worker.settings import WorkerConfig
from relaygr.worker.supervisor.link import SupervisorLink

__all__ = ["WorkerProcess", "queues_bytes", "run_worker"]


def run_worker(config: WorkerConfig, *, is_standby: bool = False, link: SupervisorLink | None = None) -> Exit:
    """Runs until the process is stopped. `link`: the connection to a supervisor, if there is one.

    Raises RelayError for a mistake that the user can correct.
    """
    require_topics(config.kafka, Role.WORKER_DIVERT if config.worker.divert else Role.WORKER)
    return WorkerProcess(config, is_standby=is_standby, link=link).run()
