"""What a process tells systemd about itself (`Type=notify`, `WatchdogSec`).

systemd gives the address of a socket in NOTIFY_SOCKET. Without it, nothing is told. A process that stands still tells
nothing either, and then systemd kills and restarts it.
"""

from __future__ import annotations

import contextlib
import os
import socket
import time
from typing import Final

_VARIABLE: Final = "NOTIFY_SOCKET"
_ALIVE_EVERY_S: Final = 1.0
_TIMEOUT_S: Final = 1.0


class ServiceManager:
    """Belongs to the main thread of a service's main process."""

    def __init__(self) -> None:
        """Takes the variable away: processes that this one starts are not the service's main process."""
        address = os.environ.pop(_VARIABLE, "")
        # `@` stands for a name without a file.
        self._address = f"\0{address[1:]}" if address.startswith("@") else address
        self._alive_s = 0.0

    def ready(self) -> None:
        """The start is complete. From now on `alive` is expected within `WatchdogSec`."""
        self._tell("READY=1")

    def alive(self) -> None:
        """Call it at each turn of the main loop: it is told once a second."""
        now_s = time.monotonic()
        if now_s - self._alive_s >= _ALIVE_EVERY_S:
            self._alive_s = now_s
            self._tell("WATCHDOG=1")

    def stopping(self) -> None:
        """The process ends: `alive` is not expected any more."""
        self._tell("STOPPING=1")

    def _tell(self, state: str) -> None:
        if self._address:
            with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
                sender.settimeout(_TIMEOUT_S)
                sender.sendto(state.encode(), self._address)
