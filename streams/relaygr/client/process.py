"""A client needs the threads of the process that started it.

A child that was forked has the memory of a client and none of its threads: librdkafka then drops messages without an
error, and crashes or waits for ever when a client is closed or freed. Green threads (gevent, eventlet) stand still
while the client's I/O thread waits in librdkafka.
"""

from __future__ import annotations

import ctypes
import os
import threading
from types import BuiltinFunctionType
from typing import TYPE_CHECKING, Final
from weakref import WeakSet

from relaygr.client.outcome import NotRunning
from relaygr.runtime.errors import RelayError

if TYPE_CHECKING:
    from relaygr.client.link import GatewayLink
    from relaygr.client.publisher import EventPublisher


class ProcessOfClient:
    """The process that started a client."""

    def __init__(self) -> None:
        self._pid: int | None = None

    def enter(self, holder: GatewayLink | EventPublisher) -> None:
        """This process starts the client. `holder` has its librdkafka clients."""
        self._pid = os.getpid()
        _HOLDERS.add(holder)

    @property
    def is_forked(self) -> bool:
        """Whether this process was forked after the start."""
        # Not a hook after the fork: a server in C (uWSGI) forks without Python's hooks.
        return self._pid is not None and self._pid != os.getpid()

    def require(self) -> None:
        """Raises NotRunning in a forked process."""
        if self.is_forked:
            raise NotRunning(
                f"the client was started in process {self._pid}, and this is a fork of it (process {os.getpid()}) "
                "without its threads: start a client of its own in each process, after the fork (gunicorn: in "
                "post_fork, or without --preload)"
            )


def refuse_green_threads() -> None:
    """Raises RelayError if a library has replaced Python's threads by green threads."""
    if not isinstance(threading.get_ident, BuiltinFunctionType):
        raise RelayError(
            f"{threading.get_ident.__module__} has replaced threads by green threads, which stand still while the "
            "client waits for Kafka: use real threads (gunicorn: --worker-class gthread), or `relaygr gateway` by HTTP"
        )


_HOLDERS: Final[WeakSet[GatewayLink | EventPublisher]] = WeakSet()


def _keep_in_child() -> None:
    """Keeps the clients of the parent for ever, since librdkafka cannot free them here."""
    for holder in _HOLDERS:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(holder))


os.register_at_fork(after_in_child=_keep_in_child)
