"""`relaygr trigger` runs the trigger as a process until SIGTERM or Ctrl-C."""

from __future__ import annotations

from relaygr.cli.options import BootstrapOption, ConfigOption, SetOption, command_settings


def trigger(
    config: ConfigOption = None,
    bootstrap: BootstrapOption = None,
    overrides: SetOption = None,
) -> None:
    """Run the trigger: decide, for each retrieval event, whether a pre-infer job is sent."""
    import asyncio
    import logging
    import signal

    import structlog

    from relaygr.cluster.admin import require_topics
    from relaygr.cluster.rights import RoleRights
    from relaygr.kafka.session import KafkaSession
    from relaygr.runtime.interpreter import tune_interpreter
    from relaygr.runtime.probes import ProbeServer
    from relaygr.schemas.topics import Topic
    from relaygr.tracing import start_tracing
    from relaygr.trigger.app import TriggerApp, trigger_role

    log = structlog.get_logger()
    settings = command_settings(config, bootstrap, overrides)
    own = settings.trigger
    for chatty in ("faust", "mode"):
        logging.getLogger(chatty).setLevel(logging.WARNING)

    async def run() -> None:
        stop = asyncio.Event()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, stop.set)
        tune_interpreter()
        tracer = start_tracing(settings.tracing, "relaygr-trigger", own.instance_id)
        try:
            app = TriggerApp(session, own, settings.admission, tracer=tracer, scenarios=settings.served)
            with ProbeServer(own.http_host, own.http_port, app.readiness):
                await app.run(stop)
        finally:
            if tracer is not None:
                tracer.close()
        log.info("trigger stopped", **app.decision_counts())

    for finding in require_topics(settings, trigger_role(settings.served)).findings:
        log.warning("a topic differs from the catalogue", topic=finding.topic, what=finding.what, mend=finding.mend)
    log.info(
        "trigger starts",
        bootstrap=settings.bootstrap,
        reads=settings.topic(Topic.RETRIEVAL),
        writes=settings.topic(settings.jobs_topic) if own.enabled else "nothing (trigger.enabled is false)",
        follows=settings.topic(Topic.WORKERS),
        group=settings.trigger_group,
        policy=own.policy,
        partitions=settings.partitions,
        without_status=f"histories of {own.fallback_behaviours} behaviours and more",
        load_limit=settings.admission.load_limit,
        footprint_reserve=settings.admission.footprint_reserve,
    )
    session = KafkaSession(settings, own.instance_id, RoleRights(settings, trigger_role(settings.served)))
    with session.ends_for_new_files():
        asyncio.run(run())
