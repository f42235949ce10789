"""A worker that writes the id of each Kafka client that it may make to a file, one a line.

`python -m tests.worlds.counted_clients FILE worker --config ...` runs `relaygr worker`. A durable producer makes its
client for its first message, and is listed without one. Admin clients have no queue of messages and are not listed.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import confluent_kafka

from relaygr.kafka import clients
from relaygr.kafka.clients import ProducerKind
from relaygr.kafka.durable import DurableProducer
from relaygr.kafka.session import KafkaSession


class _Listed:
    """Appends ids to the file."""

    file: Path

    @classmethod
    def add(cls, client_id: str) -> None:
        with cls.file.open("a", encoding="utf-8") as lines:
            lines.write(f"{client_id}\n")


def _consumer(config: dict[str, Any]) -> confluent_kafka.Consumer:
    _Listed.add(f"{config['client.id']} consumer")
    return confluent_kafka.Consumer(config)


def main() -> None:
    """Runs the command, with the makers of clients replaced."""
    from relaygr.cli.__main__ import main as run_command

    make_producer, make_durable = KafkaSession.producer, KafkaSession.durable_producer

    def producer(self: KafkaSession, kind: ProducerKind, client_id: str, *args: Any, **kwargs: Any) -> Any:
        _Listed.add(f"{client_id} producer")
        return make_producer(self, kind, client_id, *args, **kwargs)

    def durable_producer(self: KafkaSession, client_id: str) -> DurableProducer:
        _Listed.add(f"{client_id} producer")
        return make_durable(self, client_id)

    _Listed.file = Path(sys.argv.pop(1))
    clients.Consumer = _consumer  # type: ignore[misc, assignment]
    KafkaSession.producer = producer  # type: ignore[method-assign]
    KafkaSession.durable_producer = durable_producer  # type: ignore[method-assign]
    run_command()


if __name__ == "__main__":
    main()
