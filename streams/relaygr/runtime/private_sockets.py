"""Unix sockets in private folders, and who is at their other end.

The name of a Unix socket may have 107 bytes only, and the folder's path may be longer. So both sides open the folder,
and name the socket by the number of the open file.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

_MODE: Final = 0o600
_CREDENTIALS: Final = struct.Struct("iII")
"""The kernel's `struct ucred`: process, user and group."""


@dataclass(frozen=True, slots=True)
class SocketPeer:
    """The process at the other end of a connection."""

    pid: int
    uid: int


def peer_of(connection: socket.socket) -> SocketPeer:
    """The process that connected or, for a client, that listens. The kernel vouches for it (SO_PEERCRED)."""
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, uid, _ = _CREDENTIALS.unpack(credentials)
    return SocketPeer(pid, uid)


def listen_private(path: Path, waiting: int) -> socket.socket:
    """A socket with mode 0600 that listens at `path`. At most `waiting` connections wait to be accepted.

    Replaces a socket that another process left there: the caller knows that this process is dead. Raises OSError.
    """
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        # The mode that the new socket file gets, so that it has no other one for a moment.
        os.fchmod(listener.fileno(), _MODE)
        path.unlink(missing_ok=True)
        with address_of(path) as address:
            listener.bind(address)
        listener.listen(waiting)
    except BaseException:
        listener.close()
        raise
    return listener


@contextlib.contextmanager
def address_of(path: Path) -> Iterator[str]:
    """The name by which to bind or to connect, inside the context. Raises OSError without the folder."""
    folder = os.open(path.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{folder}/{path.name}"
    finally:
        os.close(folder)
