"""Asks the group's coordinator which member holds a static `group.instance.id`, in a child process.

librdkafka can abort its process after an admin request that timed out while the broker was away (librdkafka issue
4605). A worker asks just then, and must not end, so a child process sends the request.
"""

from __future__ import annotations

import pickle
import subprocess
import sys
from concurrent.futures import Future
from typing import Any

import structlog
from confluent_kafka import KafkaException

from relaygr.kafka.clients import make_admin
from relaygr.kafka.settings import KafkaSettings

log = structlog.get_logger()

_START_S = 10.0
"""Time for the start of the child on a busy machine."""


def holder_of(kafka: KafkaSettings, group: str, instance_id: str, timeout_s: float) -> str | None:
    """The member id of the static `instance_id` in `group`; None if there is none or the broker does not report it.

    The request may take `timeout_s`. The settings go through a pipe, so that no secret is in a command line.
    """
    command = [sys.executable, "-m", "relaygr.consumer.membership"]
    question = pickle.dumps((kafka, group, instance_id, timeout_s))
    try:
        child = subprocess.run(command, input=question, capture_output=True, timeout=timeout_s + _START_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        log.info("the members of the group are unknown", group=group, cause=str(error))
        return None
    if child.returncode != 0:
        cause = child.stderr.decode(errors="replace").strip()[-500:]
        log.info("the members of the group are unknown", group=group, cause=cause, exit_code=child.returncode)
        return None
    return child.stdout.decode() or None


def _ask(kafka: KafkaSettings, group: str, instance_id: str, timeout_s: float) -> str | None:
    """In the child. Raises KafkaException or TimeoutError without an answer."""
    admin = make_admin(kafka, f"relaygr-{instance_id}-holder")
    answer: Future[Any] = admin.describe_consumer_groups([group], request_timeout=timeout_s)[group]
    members = answer.result(timeout_s).members
    return next((str(member.member_id) for member in members if member.group_instance_id == instance_id), None)


if __name__ == "__main__":
    try:
        sys.stdout.write(_ask(*pickle.load(sys.stdin.buffer)) or "")
    except (KafkaException, TimeoutError) as error:
        sys.exit(str(error) or type(error).__name__)
