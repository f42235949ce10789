"""`relaygr trigger` runs the trigger as a process until SIGTERM or Ctrl-C."""

from __future__ import annotations

import asyncio
import logging
import signal

import structlog

from relaygr.cli.options import BootstrapOption, ConfigOption, SetOption, command_settings
from relaygr.kafka.admin import require_topics
from relaygr.kafka.clients import require_broker
from relaygr.runtime.interpreter import tune_interpreter
from relaygr.runtime.probes import ProbeServer
from relaygr.schemas.topics import Topic
from relaygr.settings import Settings
from relaygr.trigger.app import TriggerApp

log = structlog.get_logger()


def trigger(config: ConfigOption = None, bootstrap: BootstrapOption = None, overrides: SetOption = None) -> None:
    """Decide, for each retrieval event, whether its user's history is computed ahead of ranking."""
    settings = command_settings(config, bootstrap, overrides)
    for chatty in ("faust", "mode"):
        logging.getLogger(chatty).setLevel(logging.WARNING)
    require_broker(settings)
    for finding in require_topics(settings).findings:
        log.warning("topics are not quite as they should be", topic=finding.topic, what=finding.what, mend=finding.mend)
    _announce(settings)
    asyncio.run(_run(settings))


def _announce(settings: Settings) -> None:
    mine = settings.trigger
    log.info(
        "trigger starts",
        bootstrap=settings.bootstrap,
        reads=settings.topic(Topic.RETRIEVAL),
        writes=settings.topic(Topic.PREINFER) if mine.enabled else "nothing (trigger.enabled is false)",
        follows=settings.topic(Topic.WORKERS),
        group=settings.trigger_group,
        partitions=settings.partitions,
        without_status=f"histories of {mine.fallback_behaviours} behaviours and more",
        load_limit=settings.admission.load_limit,
        footprint_reserve=settings.admission.footprint_reserve,
    )


async def _run(settings: Settings) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    tune_interpreter()
    app = TriggerApp(settings, settings.trigger, settings.admission)
    with ProbeServer(settings.trigger.http_host, settings.trigger.http_port, app.readiness):
        await app.run(stop)
    log.info("trigger stopped", **app.decision_counts())
