"""The worker process: builds its components, publishes its status, serves, and stops its threads in order.

docs/architecture.md describes start, end and reload.

    allocation     the memory of a worker: planned, checked, allocated
    handover       prefixes and finished offsets, from a predecessor to its successor
    trial          what a model must do before it serves
    prepare        the slow part of the start
    components     all components, connected to each other
    periodic       the poll thread's work between messages; `status` and `warm_up_offers` belong to it
    reloading      SIGHUP: loads another checkpoint and swaps the models
    lifecycle      prepare, wait, activate, serve, stop
"""

from __future__ import annotations

from relaygr.cluster.admin import require_topics
from relaygr.kafka.session import KafkaSession
from relaygr.runtime.errors import RelayError
from relaygr.runtime.interpreter import without_collection
from relaygr.worker.exits import Exit
from relaygr.worker.model.config import require_model
from relaygr.worker.settings import WorkerConfig
from relaygr.worker.supervisor.link import SupervisorLink

__all__ = ["run_worker"]


def run_worker(
    config: WorkerConfig, session: KafkaSession, *, is_standby: bool = False, link: SupervisorLink | None = None
) -> Exit:
    """Runs until the process is stopped. `link`: the connection to a supervisor, if there is one.

    Raises RelayError for a mistake that the user can correct.
    """
    # A wrong path, broker or right is told at once, whatever else the start would wait for.
    require_model(config.worker.model)
    if config.is_pre_infer and config.worker.pool.url is None:
        raise RelayError("A pre-infer worker writes prefixes to the pool: set worker.pool.store (docs/pool.md).")
    require_topics(config.kafka, config.rights)
    # Imports torch: 2.3 s of CPU time on a slow core, and 3.2 s with the collections that its many objects cause.
    with without_collection():
        from relaygr.worker.process.lifecycle import WorkerProcess

    return WorkerProcess(config, session, is_standby=is_standby, link=link).run()
