"""Asks the group's coordinator which member holds a static `group.instance.id`.

A worker asks just when the broker may be away, so the request is made in a child process
(`relaygr.kafka.admin_process`).
"""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any

import structlog
from confluent_kafka import KafkaException
from confluent_kafka.admin import AdminClient

from relaygr.kafka.admin_process import ask
from relaygr.kafka.settings import KafkaSettings

log = structlog.get_logger()

_MARGIN_S = 2.0
"""The request ends by its own time-out. The child has this much longer, for a client that hangs."""


def holder_of(kafka: KafkaSettings, group: str, instance_id: str, timeout_s: float) -> str | None:
    """The member id of the static `instance_id` in `group`; None if there is none or the broker does not report it.

    The request may take `timeout_s`.
    """
    client_id = f"relaygr-{instance_id}-holder"
    try:
        return ask(kafka, client_id, timeout_s + _MARGIN_S, _holder, group, instance_id, timeout_s)
    except (KafkaException, OSError) as error:
        log.info("the members of the group are unknown", group=group, cause=str(error))
        return None


def _holder(admin: AdminClient, group: str, instance_id: str, timeout_s: float) -> str | None:
    answer: Future[Any] = admin.describe_consumer_groups([group], request_timeout=timeout_s)[group]
    members = answer.result(timeout_s + _MARGIN_S / 2).members
    return next((str(member.member_id) for member in members if member.group_instance_id == instance_id), None)
