"""The socket for operators: who may ask, and what a slow or hostile client can do."""

from __future__ import annotations

import json
import os
import socket
import stat
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from relaygr.runtime.clock import SystemClock
from relaygr.runtime.errors import RelayError
from relaygr.runtime.private_sockets import SocketPeer, listen_private
from relaygr.worker.admin_socket import (
    MAX_REQUEST_BYTES,
    SOCKET_NAME,
    WAITING,
    AdminSocket,
    ask,
)
from relaygr.worker.cache.admin import (
    CacheAdmin,
    CacheReport,
    ServingModel,
    Show,
    decode_report,
    encode_request,
)
from relaygr.worker.executor.thread import DeviceThread
from tests.worlds.real_executor import RealExecutorWorld

PATIENCE_S = 60.0
SHORT_S = 1.0
"""For clients that are to be dropped. The others must send and read within it, on a busy machine too."""


def echo(line: bytes) -> bytes:
    return json.dumps({"asked": line.decode()}).encode()


@contextmanager
def serving(
    folder: Path, answer: Callable[[bytes], bytes] = echo, client_timeout_s: float = PATIENCE_S
) -> Iterator[Path]:
    path = folder / SOCKET_NAME
    served = AdminSocket(path, answer, client_timeout_s)
    served.start()
    try:
        yield path
    finally:
        served.close()


def connected(path: Path) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.settimeout(PATIENCE_S)
    connection.connect(str(path))
    return connection


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Has a short name, which a plain `connect` needs."""
    monkeypatch.chdir(tmp_path)
    return Path()


def rest_of(connection: socket.socket) -> bytes:
    parts = []
    while part := connection.recv(65_536):
        parts.append(part)
    return b"".join(parts)


def test_the_socket_is_for_its_user_alone(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        with serving(tmp_path) as path:
            assert stat.S_IMODE(path.stat().st_mode) == 0o600
            answer = json.loads(ask(path, b"hello", PATIENCE_S))
    finally:
        os.umask(before)
    assert answer == {"asked": "hello"}
    assert not path.exists()


def test_a_folder_with_a_long_path_is_no_obstacle(tmp_path: Path) -> None:
    folder = tmp_path / ("x" * 120)
    folder.mkdir()
    with serving(folder) as path:
        assert b"hello" in ask(path, b"hello", PATIENCE_S)


def test_the_socket_of_a_dead_process_is_replaced(folder: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as left:
        left.bind(SOCKET_NAME)
    with pytest.raises(ConnectionRefusedError):
        ask(folder / SOCKET_NAME, b"hello", PATIENCE_S)
    with serving(folder) as path:
        assert b"hello" in ask(path, b"hello", PATIENCE_S)


def test_another_user_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[bytes] = []
    with serving(tmp_path, lambda line: asked.append(line) or b"{}") as path:
        monkeypatch.setattr("relaygr.worker.admin_socket.peer_of", lambda connection: SocketPeer(1, os.geteuid() + 1))
        monkeypatch.setattr("relaygr.worker.admin_socket._ROOT", os.geteuid())
        assert b"Only the worker's own user" in ask(path, b"hello", PATIENCE_S)
    assert asked == []


def test_a_client_does_not_ask_a_socket_that_another_user_serves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[bytes] = []
    with serving(tmp_path, lambda line: asked.append(line) or b"{}") as path:
        monkeypatch.setattr("relaygr.worker.admin_socket._ROOT", -1)
        monkeypatch.setattr("relaygr.worker.admin_socket.peer_of", lambda connection: SocketPeer(1, os.geteuid() + 1))
        with pytest.raises(RelayError, match="belongs to user"):
            ask(path, b"hello", PATIENCE_S)
    assert asked == []


@pytest.mark.parametrize("size", [MAX_REQUEST_BYTES + 1, 10 * MAX_REQUEST_BYTES, 1 << 20])
def test_a_request_that_is_too_long_is_refused(tmp_path: Path, size: int) -> None:
    with serving(tmp_path) as path:
        assert b"at most 4096 bytes" in ask(path, b"x" * size, PATIENCE_S)
        assert b"hello" in ask(path, b"hello", PATIENCE_S)


@pytest.mark.parametrize("size", [5, 1 << 20])
def test_a_refusal_is_read_though_the_server_closed_before_the_request_was_sent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    path = tmp_path / SOCKET_NAME
    with listen_private(path, WAITING) as listener:

        def refuse(_: socket.socket) -> SocketPeer:
            with listener.accept()[0] as server:
                server.sendall(b"refused\n")
            return SocketPeer(os.getpid(), os.geteuid())

        # The client asks who serves before it sends.
        monkeypatch.setattr("relaygr.worker.admin_socket.peer_of", refuse)
        assert ask(path, b"x" * size, PATIENCE_S) == b"refused"


@contextmanager
def closing_early(folder: Path, answer: bytes) -> Iterator[Path]:
    """A server that reads one byte of a request, answers and closes."""
    with listen_private(folder / SOCKET_NAME, WAITING) as listener:

        def serve() -> None:
            with listener.accept()[0] as server:
                server.recv(1)
                server.sendall(answer)

        serves = threading.Thread(target=serve)
        serves.start()
        yield folder / SOCKET_NAME
        serves.join(PATIENCE_S)


@pytest.mark.parametrize("size", [5, 1 << 20])
def test_a_refusal_is_read_though_the_server_did_not_read_the_request(tmp_path: Path, size: int) -> None:
    with closing_early(tmp_path, b"refused\n") as path:
        assert ask(path, b"x" * size, PATIENCE_S) == b"refused"


@pytest.mark.parametrize("size", [5, 1 << 20])
def test_a_connection_that_ends_without_an_answer_is_said(tmp_path: Path, size: int) -> None:
    with closing_early(tmp_path, b"") as path, pytest.raises(RelayError, match="closed the connection without"):
        ask(path, b"x" * size, PATIENCE_S)


def test_a_client_that_sends_nothing_or_too_slowly_is_dropped_and_the_next_is_served(folder: Path) -> None:
    with serving(folder, client_timeout_s=SHORT_S) as path, connected(path) as silent, connected(path) as slow:
        assert rest_of(silent) == b""
        try:
            for _ in range(1000):
                slow.sendall(b" ")
                time.sleep(0.01)
        except (BrokenPipeError, ConnectionResetError):
            pass
        else:
            pytest.fail("one byte each 10 ms kept the connection")
        assert b"hello" in ask(path, b"hello", PATIENCE_S)


def test_a_client_that_does_not_read_its_answer_is_dropped(folder: Path) -> None:
    with serving(folder, lambda line: b"x" * (4 << 20), SHORT_S) as path, connected(path) as deaf:
        deaf.sendall(b"hello\n")
        assert len(ask(path, b"hello", PATIENCE_S)) == 4 << 20


def test_clients_beyond_the_waiting_ones_wait_outside(folder: Path) -> None:
    with serving(folder, client_timeout_s=0.1) as path:
        silent = [connected(path)]
        try:
            silent += [connected(path) for _ in range(WAITING)]
            assert b"hello" in ask(path, b"hello", PATIENCE_S)
        finally:
            for each in silent:
                each.close()


def test_an_answer_that_fails_is_said_and_the_next_is_served(tmp_path: Path) -> None:
    def fails_once(line: bytes, failed: list[bool] = []) -> bytes:  # noqa: B006
        if not failed:
            failed.append(True)
            raise RuntimeError("a bug")
        return b"{}"

    with serving(tmp_path, fails_once) as path:
        assert b"its log has the error" in ask(path, b"hello", PATIENCE_S)
        assert ask(path, b"hello", PATIENCE_S) == b"{}"


def test_closing_ends_a_connection_under_way(folder: Path) -> None:
    with serving(folder) as path, connected(path) as client:
        client.sendall(b"not a whole li")
    assert [each.name for each in threading.enumerate() if each.name == "admin"] == []
    assert not path.exists()


def test_operators_reach_the_real_cache_while_the_device_thread_runs(tmp_path: Path) -> None:
    world = RealExecutorWorld("plain")
    version = world.put("ann", 200)
    world.rank("ann", version)
    device = DeviceThread(world.executor, lambda: None, SystemClock(), 10.0, on_death=lambda: None)
    serves = ServingModel(world.engine.revision, world.engine.namespace)
    admin = CacheAdmin("w-00", world.cache, lambda: serves, world.clock)
    device.start()
    try:
        with serving(tmp_path, admin.answer) as path:
            report = decode_report(CacheReport, ask(path, encode_request(Show()), PATIENCE_S))
    finally:
        device.stop(PATIENCE_S)
    assert [share.user_id for share in report.top] == ["ann"]
    assert report.model_revision == world.engine.revision
