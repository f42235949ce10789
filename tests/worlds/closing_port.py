"""A port that accepts connections and closes them at once, as a proxy without a broker behind it does."""

from __future__ import annotations

import socket
import threading
import time
from contextlib import suppress


class ClosingPort:
    """Counts the connections that it closes."""

    def __init__(self, port: int) -> None:
        self.closed = 0
        self._over = threading.Event()
        self._listener = socket.socket()
        self._listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._bind(port)
        self._listener.settimeout(0.1)
        self._thread = threading.Thread(target=self._close_each)

    def _bind(self, port: int) -> None:
        """Waits for the listener before, which is closing."""
        ends_s = time.monotonic() + 10
        while True:
            try:
                self._listener.bind(("127.0.0.1", port))
                return self._listener.listen(1000)
            except OSError:
                if time.monotonic() > ends_s:
                    raise
                time.sleep(0.01)

    def _close_each(self) -> None:
        while not self._over.is_set():
            with suppress(TimeoutError):
                connection, _ = self._listener.accept()
                self.closed += 1
                connection.close()

    def __enter__(self) -> ClosingPort:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()
        self._listener.close()
