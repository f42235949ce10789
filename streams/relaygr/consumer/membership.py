"""Who holds a static group.instance.id now, as the group's coordinator knows it."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any

import structlog
from confluent_kafka import KafkaException

from relaygr.kafka.clients import make_admin
from relaygr.kafka.settings import KafkaSettings

log = structlog.get_logger()


def holder_of(kafka: KafkaSettings, group: str, instance_id: str, timeout_s: float) -> str | None:
    """The member id under which `instance_id` is in `group`; None: nobody's, or the broker does not say."""
    try:
        admin = make_admin(kafka, f"relaygr-{instance_id}-holder")
        answer: Future[Any] = admin.describe_consumer_groups([group], request_timeout=timeout_s)[group]
        members = answer.result(timeout_s).members
    except (KafkaException, TimeoutError) as error:
        log.info("the group's members are not known", group=group, cause=str(error))
        return None
    return next((str(member.member_id) for member in members if member.group_instance_id == instance_id), None)
