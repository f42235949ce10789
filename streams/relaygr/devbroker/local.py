"""The description of a running local broker, and free ports: used by all kinds of brokers."""

from __future__ import annotations

import random
import socket
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from relaygr.devbroker.choose import BrokerChoice
from relaygr.kafka.settings import KafkaSettings, Security


@dataclass(frozen=True, slots=True)
class LocalBroker:
    """A broker that answers requests, and its properties."""

    kind: BrokerChoice
    """Never AUTO."""
    bootstrap: str
    what: str
    """The kind of broker and the reason for the choice, for the user."""
    limits: tuple[str, ...]
    """Sentences about the limits of a run on this broker."""
    create_topics: Callable[[KafkaSettings], object]
    """Creates the topics of the catalogue with the prefix of these settings."""
    delete_topics: Callable[[KafkaSettings], object]
    """Deletes these topics and their data."""
    fetch_wait_max_ms: int
    session_timeout_ms: int
    restart: Callable[[], None] | None = None
    """Kills the broker and starts it again with its data, and waits until it answers; None: not possible here."""

    @property
    def ours(self) -> bool:
        """Whether the broker was started here, and ends with all its topics when the block ends."""
        return self.kind is not BrokerChoice.EXTERNAL

    def settings(self, kafka: KafkaSettings | None = None) -> KafkaSettings:
        """The settings `kafka`, changed for this broker. A broker that was started here has no security."""
        kafka = kafka or KafkaSettings()
        return kafka.model_copy(
            update={
                "bootstrap": self.bootstrap,
                "fetch_wait_max_ms": self.fetch_wait_max_ms,
                "session_timeout_ms": self.session_timeout_ms,
                "replication_factor": 1 if self.ours else kafka.replication_factor,
                "min_insync_replicas": None if self.ours else kafka.min_insync_replicas,
                "security": Security() if self.ours else kafka.security,
            }
        )


# Below the range of outgoing connections, which could take a port before it is used.
_PORTS: Final = range(20_000, 32_000)
_MOST_RESERVED: Final = 64
_reserved: deque[socket.socket] = deque()
"""UDP sockets with the numbers of the ports that were given last. A process that starts takes seconds until it listens
on its port, and another program of ours would be given the same one meanwhile: of thousands, some met.
"""


def free_ports(count: int) -> list[int]:
    """Distinct ports of 127.0.0.1 that are free now, and that no other call is given while this process has not asked
    for `_MOST_RESERVED` more.

    A program that is not ours may take one before it is used, so the caller must be ready to try again.
    """
    ports: list[int] = []
    while len(ports) < count:
        port = random.choice(_PORTS)
        reserved = socket.socket(type=socket.SOCK_DGRAM)
        try:
            reserved.bind(("127.0.0.1", port))
            with socket.socket() as candidate:
                candidate.bind(("127.0.0.1", port))
        except OSError:
            reserved.close()
            continue
        _reserved.append(reserved)
        ports.append(port)
    while len(_reserved) > max(count, _MOST_RESERVED):
        _reserved.popleft().close()
    return ports
