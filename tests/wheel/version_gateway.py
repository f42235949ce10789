"""A gateway of some version: ranks twice, reads the worker's status, and prints what it understood as JSON."""

from __future__ import annotations

import enum
import json
import sys
import time
from typing import Any

from confluent_kafka import TopicPartition

from relaygr.client import RelayClient
from relaygr.kafka.clients import make_assigned_consumer
from relaygr.kafka.settings import KafkaSettings
from relaygr.schemas import Topic, WorkerStatus, decode

BUDGET_MS = 20_000


def shown(choice: Any) -> str:
    """Whether a choice is known here, and its text."""
    return f"{'member' if isinstance(choice, enum.Enum) else 'other'} {choice.value}"


def read_state(kafka: KafkaSettings) -> str:
    """The state in the first status on the workers topic."""
    consumer = make_assigned_consumer(kafka, "status-reader")
    name = kafka.topic(Topic.WORKERS)
    partition = consumer.list_topics(name, timeout=10).topics[name].partitions[0].id
    consumer.assign([TopicPartition(name, partition, 0)])
    ends_s = time.monotonic() + 20
    while time.monotonic() < ends_s:
        message = consumer.poll(0.1)
        if message is not None and message.error() is None:
            consumer.close()
            return shown(decode(WorkerStatus, message.value()).state)
    raise TimeoutError("no status of a worker")


def main() -> None:
    kafka = KafkaSettings.model_validate_json(sys.argv[1])
    with RelayClient(kafka, "gw-0") as client:
        ranked = client.rank("ranked", [1, 2], budget_ms=BUDGET_MS)
        failed = client.rank("failed", [1, 2], budget_ms=BUDGET_MS)
    assert ranked.result is not None
    sys.stdout.write(
        json.dumps(
            {
                "path": shown(ranked.result.path),
                "prefix_source": shown(ranked.result.prefix_source),
                "reason": shown(failed.reason),
                "state": read_state(kafka),
            }
        )
    )


if __name__ == "__main__":
    main()
