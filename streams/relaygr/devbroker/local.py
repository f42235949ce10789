"""What a local broker is to the one who started it."""

from __future__ import annotations

import random
import socket
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from relaygr.devbroker.choose import BrokerChoice
from relaygr.kafka.settings import KafkaSettings, Security


@dataclass(frozen=True, slots=True)
class LocalBroker:
    """A broker that answers, and what to know about it."""

    kind: BrokerChoice
    """Never AUTO."""
    bootstrap: str
    what: str
    """Which one it is and why it was taken, for the user."""
    limits: tuple[str, ...]
    """Sentences: what a run on this broker can not show."""
    create_topics: Callable[[KafkaSettings], object]
    """Creates the catalogue's topics under these settings' prefix."""
    delete_topics: Callable[[KafkaSettings], object]
    """Deletes them, with all that they hold."""
    fetch_wait_max_ms: int
    session_timeout_ms: int

    @property
    def ours(self) -> bool:
        """Whether it was started here, and goes with all its topics at the end."""
        return self.kind is not BrokerChoice.EXTERNAL

    def settings(self, kafka: KafkaSettings | None = None) -> KafkaSettings:
        """`kafka`'s settings for this broker. One of ours speaks plaintext, whatever the user's own cluster does."""
        kafka = kafka or KafkaSettings()
        return kafka.model_copy(
            update={
                "bootstrap": self.bootstrap,
                "fetch_wait_max_ms": self.fetch_wait_max_ms,
                "session_timeout_ms": self.session_timeout_ms,
                "replication_factor": 1 if self.ours else kafka.replication_factor,
                "security": Security() if self.ours else kafka.security,
            }
        )


# Below the ports that operating systems give to outgoing connections, which could take one in between.
_PORTS: Final = range(20_000, 32_000)


def free_ports(count: int) -> list[int]:
    """Ports of 127.0.0.1 that nobody listens on now, held together while they are searched.

    Another process may still take one before it is used: be ready to try again.
    """
    doors: list[socket.socket] = []
    try:
        while len(doors) < count:
            door = socket.socket()
            try:
                door.bind(("127.0.0.1", random.choice(_PORTS)))
            except OSError:
                door.close()
                continue
            doors.append(door)
        return [int(door.getsockname()[1]) for door in doors]
    finally:
        for door in doors:
            door.close()
