"""The HTTP server of probes and metrics."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from http.client import HTTPResponse
from typing import Any, cast

import psutil
import pytest
from prometheus_client import CollectorRegistry, Counter
from starlette.requests import Request
from starlette.responses import PlainTextResponse

from relaygr.runtime import probes
from relaygr.runtime.direct_http import http_address
from relaygr.runtime.errors import RelayError
from relaygr.runtime.http_server import ANY_ADDRESS, ConnectionLimits, HttpServer
from relaygr.runtime.probes import ProbeServer
from relaygr.runtime.readiness import Check, Readiness
from tests.waiting import until


class Subject:
    """A probe server whose checks a test sets."""

    def __init__(self) -> None:
        self.checks: tuple[Check, ...] = ()
        self.registry = CollectorRegistry()
        self.server = ProbeServer("127.0.0.1", 0, lambda: Readiness(self.checks), registry=self.registry)

    def get(self, path: str) -> tuple[int, str, bytes]:
        try:
            url = f"http://127.0.0.1:{self.server.port}{path}"
            with cast(HTTPResponse, urllib.request.urlopen(url, timeout=10)) as answer:
                return answer.status, answer.headers["content-type"], answer.read()
        except urllib.error.HTTPError as error:
            return error.code, error.headers["content-type"], error.read()

    def open_connections(self) -> int:
        """Those that the server has not closed."""
        found = psutil.net_connections("tcp")
        own = [each for each in found if each.laddr.port == self.server.port and each.raddr]
        return sum(each.pid == os.getpid() for each in own)

    def get_json(self, path: str) -> tuple[int, Any]:
        status, content_type, body = self.get(path)
        assert content_type == "application/json"
        return status, json.loads(body)


@pytest.fixture
def subject() -> Iterator[Subject]:
    subject = Subject()
    with subject.server:
        yield subject


def test_port_zero_becomes_the_port_that_is_bound(subject: Subject) -> None:
    assert subject.server.port > 0


def test_a_process_is_ready_when_every_check_passes(subject: Subject) -> None:
    subject.checks = (Check("assigned", True), Check("model", True, "rev-1"))
    assert subject.get_json("/readyz") == (
        200,
        {
            "ok": True,
            "checks": [
                {"name": "assigned", "ok": True, "detail": ""},
                {"name": "model", "ok": True, "detail": "rev-1"},
            ],
        },
    )


def test_a_failing_check_is_named_and_asked_again_each_time(subject: Subject) -> None:
    subject.checks = (Check("assigned", True), Check("history", False, "3,000 messages behind"))
    status, body = subject.get_json("/readyz")
    assert status == 503
    assert [check for check in body["checks"] if not check["ok"]] == [
        {"name": "history", "ok": False, "detail": "3,000 messages behind"}
    ]
    subject.checks = (Check("assigned", True), Check("history", True))
    assert subject.get_json("/readyz")[0] == 200


def test_a_process_that_is_not_ready_is_healthy(subject: Subject) -> None:
    subject.checks = (Check("assigned", False),)
    assert subject.get_json("/healthz") == (200, {"ok": True, "checks": []})


def test_a_check_that_raises_is_a_failing_check() -> None:
    def broken() -> Readiness:
        raise KeyError("status")

    subject = Subject()
    subject.server = ProbeServer("127.0.0.1", 0, broken, health=broken, registry=subject.registry)
    with subject.server:
        for path in ("/readyz", "/healthz"):
            status, body = subject.get_json(path)
            assert status == 503
            assert body["checks"] == [{"name": "check", "ok": False, "detail": "KeyError: 'status'"}]


def test_the_registry_is_exposed_as_text(subject: Subject) -> None:
    Counter("relaygr_things", "Things.", registry=subject.registry).inc(3)
    status, content_type, body = subject.get("/metrics")
    assert status == 200
    assert content_type.startswith("text/plain")
    assert b"\nrelaygr_things_total 3.0\n" in body
    assert b"_created" not in body


def test_another_path_is_not_found(subject: Subject) -> None:
    assert subject.get("/")[0] == 404


def test_a_port_that_is_taken_is_said_in_a_sentence(subject: Subject) -> None:
    second = ProbeServer("127.0.0.1", subject.server.port, Readiness, registry=subject.registry)
    with pytest.raises(RelayError, match=rf"Port {subject.server.port} of 127\.0\.0\.1 is in use.*choose another"):
        second.start()
    second.stop()
    assert subject.get("/healthz")[0] == 200


def test_an_address_that_is_not_ours_is_said_in_a_sentence() -> None:
    # 192.0.2.0/24 is kept for documentation: no machine has it.
    with pytest.raises(RelayError, match=r"Cannot listen on 192\.0\.2\.1:0"):
        ProbeServer("192.0.2.1", 0, Readiness).start()


@pytest.mark.parametrize("has_ipv6", [True, False])
def test_in_a_container_every_address_of_the_machine_answers_whatever_its_family(
    monkeypatch: pytest.MonkeyPatch, has_ipv6: bool
) -> None:
    if has_ipv6 and not socket.has_dualstack_ipv6():
        pytest.skip("this machine has no IPv6")
    monkeypatch.setattr(socket, "has_dualstack_ipv6", lambda: has_ipv6)
    with ProbeServer(ANY_ADDRESS, 0, Readiness) as server:
        for address in ("127.0.0.1", "::1") if has_ipv6 else ("127.0.0.1",):
            with urllib.request.urlopen(f"{http_address(address, server.port)}/healthz", timeout=10) as answer:
                assert answer.status == 200


def test_stop_ends_the_thread_and_frees_the_port_even_with_a_client_that_hangs_on() -> None:
    subject = Subject()
    subject.server.start()
    port = subject.server.port
    threads = {thread for thread in threading.enumerate() if thread.name == "probes"}
    with socket.create_connection(("127.0.0.1", port)) as idle:
        idle.sendall(b"GET /healthz HTTP/1.1\r\n")
        subject.server.stop()
    assert not any(thread.is_alive() for thread in threads)
    socket.create_server(("127.0.0.1", port)).close()


def test_stop_before_start_and_stop_twice_do_nothing() -> None:
    subject = Subject()
    subject.server.stop()
    subject.server.start()
    subject.server.stop()
    subject.server.stop()


def test_it_can_be_started_in_a_thread_that_may_not_touch_signals() -> None:
    subject = Subject()
    starter = threading.Thread(target=subject.server.start)
    starter.start()
    starter.join(10)
    assert subject.get("/healthz")[0] == 200
    subject.server.stop()


# -- clients that do harm --------------------------------------------------------------------------

REQUEST = b"GET /healthz HTTP/1.1\r\nhost: worker\r\n"


@contextlib.contextmanager
def connections(subject: Subject, count: int, beginning: bytes = b"") -> Iterator[list[socket.socket]]:
    """Connections that have sent only `beginning`."""
    with contextlib.ExitStack() as stack:
        opened = []
        for _ in range(count):
            opened.append(stack.enter_context(socket.create_connection(("127.0.0.1", subject.server.port), 10)))
            opened[-1].sendall(beginning)
        yield opened


def is_closed(connection: socket.socket) -> bool:
    """Whether the server closes the connection, waited for. Discards what it sends."""
    try:
        while connection.recv(65536):
            pass
    except ConnectionResetError:
        pass
    except TimeoutError:
        return False
    return True


@pytest.mark.parametrize("beginning", [b"", REQUEST], ids=["idle", "in the middle of a request"])
@pytest.mark.parametrize("count", [31, 200, 300])
def test_probes_are_answered_while_many_connections_are_open(subject: Subject, count: int, beginning: bytes) -> None:
    with connections(subject, count, beginning):
        for path in ("/healthz", "/readyz", "/metrics"):
            assert subject.get(path)[0] == 200


def test_the_oldest_of_too_many_connections_are_closed(subject: Subject) -> None:
    with connections(subject, probes.MAX_CONNECTIONS + 20) as opened:
        assert subject.get("/healthz")[0] == 200
        assert all(is_closed(connection) for connection in opened[:20])


def test_a_connection_that_sends_nothing_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probes, "WAIT_S", 0.05)
    subject = Subject()
    with subject.server, connections(subject, 1) as opened:
        assert is_closed(opened[0])


def test_a_connection_that_sends_its_request_slowly_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A byte now and then does not extend the time."""
    # The probes below end within it, on a busy machine too.
    monkeypatch.setattr(probes, "WAIT_S", 1.0)
    subject = Subject()
    with subject.server, connections(subject, 20, b"GET /healthz HTTP/1.1\r\nx: ") as opened:
        left = list(opened)

        def send_a_byte_on_each() -> None:
            for connection in list(left):
                connection.settimeout(0)
                try:
                    connection.sendall(b"x")
                    if not connection.recv(1):
                        left.remove(connection)
                except BlockingIOError:
                    pass
                except OSError:
                    left.remove(connection)
            assert subject.get("/healthz")[0] == 200

        until(lambda: not left, "all are closed", meanwhile=send_a_byte_on_each)


def test_a_connection_whose_client_does_not_read_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probes, "WAIT_S", 0.2)
    subject = Subject()
    large = "x" * (16 << 20)
    subject.checks = (Check("large", True, large),)
    with subject.server, connections(subject, 1, b"GET /readyz HTTP/1.1\r\nhost: worker\r\n\r\n") as opened:
        with contextlib.suppress(ConnectionResetError):
            opened[0].recv(1, socket.MSG_PEEK)  # The server has accepted the connection.
        until(lambda: not subject.open_connections(), "the server has closed it")
        received = 0
        with contextlib.suppress(ConnectionResetError):
            while part := opened[0].recv(1 << 20):
                received += len(part)
        assert received < len(large)


async def length_of_body(scope: Any, receive: Any, send: Any) -> None:
    """An application that answers later than the server lets a connection wait."""
    body = await Request(scope, receive).body()
    await asyncio.sleep(0.5)
    await PlainTextResponse(str(len(body)))(scope, receive, send)


def test_a_connection_waits_for_its_answer_but_not_for_a_body_that_does_not_come() -> None:
    server = HttpServer("server", "127.0.0.1", 0, length_of_body, ConnectionLimits(max_connections=8, wait_s=0.1))
    server.start()
    head = b"POST / HTTP/1.1\r\nhost: server\r\ncontent-length: 2\r\n\r\n"
    try:
        with (
            socket.create_connection(("127.0.0.1", server.port), 10) as complete,
            socket.create_connection(("127.0.0.1", server.port), 10) as partial,
        ):
            complete.sendall(head + b"{}")
            partial.sendall(head + b"{")
            assert complete.recv(65536).startswith(b"HTTP/1.1 200 OK\r\n")
            assert is_closed(partial)
    finally:
        server.stop()


def test_a_connection_is_closed_after_its_response(subject: Subject) -> None:
    with connections(subject, 1, REQUEST + b"\r\n") as opened:
        answer = b"".join(iter(lambda: opened[0].recv(65536), b""))
    assert answer.startswith(b"HTTP/1.1 200 OK\r\n")
    assert b"connection: close" in answer.lower()
