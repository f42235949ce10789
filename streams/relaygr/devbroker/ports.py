"""Free ports for brokers that must know their port before they listen."""

from __future__ import annotations

import random
import socket
from typing import Final

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
