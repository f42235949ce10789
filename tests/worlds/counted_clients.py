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
from relaygr.kafka.durable import DurableProducer


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


def _producer(config: dict[str, Any]) -> confluent_kafka.Producer:
    _Listed.add(f"{config['client.id']} producer")
    return confluent_kafka.Producer(config)


class _ListedDurable(DurableProducer):
    def __init__(self, kafka: Any, client_id: str, *args: Any, **kwargs: Any) -> None:
        super().__init__(kafka, client_id, *args, **kwargs)
        _Listed.add(f"{client_id} producer")


def main() -> None:
    """Runs the command, with the makers of clients replaced."""
    from relaygr.cli.__main__ import main as run_command
    from relaygr.kafka import dead_letters
    from relaygr.worker.history import snapshots

    _Listed.file = Path(sys.argv.pop(1))
    clients.Consumer, clients.Producer = _consumer, _producer  # type: ignore[misc, assignment]
    for module in (dead_letters, snapshots):
        module.DurableProducer = _ListedDurable  # type: ignore[misc]
    run_command()


if __name__ == "__main__":
    main()
