"""Unix sockets in private folders: who may open them, where they lie, and who is at the other end."""

from __future__ import annotations

import os
import socket
import stat
import struct
from pathlib import Path
from typing import cast

import pytest

from relaygr.runtime.private_sockets import SocketPeer, address_of, listen_private, peer_of

WAITING = 1


def connected(path: Path) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    with address_of(path) as address:
        connection.connect(address)
    return connection


@pytest.mark.parametrize("name", ["short", "x" * 120])
def test_both_sides_know_the_process_at_the_other_end(tmp_path: Path, name: str) -> None:
    folder = tmp_path / name
    folder.mkdir()
    before = os.umask(0)
    try:
        listener = listen_private(folder / "socket", WAITING)
    finally:
        os.umask(before)
    with listener, connected(folder / "socket") as client, listener.accept()[0] as server:
        assert stat.S_IMODE((folder / "socket").stat().st_mode) == 0o600
        assert peer_of(client) == peer_of(server) == SocketPeer(os.getpid(), os.geteuid())


def test_a_socket_that_was_left_is_replaced(tmp_path: Path) -> None:
    listen_private(tmp_path / "socket", WAITING).close()
    with pytest.raises(ConnectionRefusedError):
        connected(tmp_path / "socket")
    with listen_private(tmp_path / "socket", WAITING), connected(tmp_path / "socket"):
        pass


def test_a_folder_that_is_missing_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        listen_private(tmp_path / "missing" / "socket", WAITING)


def test_the_number_of_a_user_may_have_32_bits() -> None:
    class Connection:
        def getsockopt(self, *_: int) -> bytes:
            return struct.pack("iII", 7, 2**32 - 3, 2**32 - 4)

    assert peer_of(cast(socket.socket, Connection())) == SocketPeer(7, 2**32 - 3)
