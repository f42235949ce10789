"""The supervisor's metrics page, with children that answer and children that die while they answer."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from relaygr.worker.supervisor.heartbeat import ChildPhase
from relaygr.worker.supervisor.probes import ChildView, SupervisorProbes, SupervisorView

METRICS = b"# TYPE relaygr_worker_things_total counter\nrelaygr_worker_things_total 7\n"


@contextmanager
def child_that_answers(body: bytes, promised_bytes: int) -> Iterator[int]:
    """The port of a child whose `/metrics` ends after `body`."""

    class Answer(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("Content-Length", str(promised_bytes))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            return

    with HTTPServer(("127.0.0.1", 0), Answer) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield server.server_port
        finally:
            server.shutdown()
            thread.join()


def names(port: int, host: str = "127.0.0.1") -> list[str]:
    """The names of the metrics in a scrape, with an active child on `port`. `host`: the setting `http_host`."""
    view = SupervisorView("worker-00", (ChildView(1, 1, ChildPhase.ACTIVE, port, True, ""),))
    return [family.name for family in SupervisorProbes(host, 0, lambda: view).collect()]


OWN = ["relaygr_supervisor_children", "relaygr_supervisor_replaced"]


@pytest.mark.slow
def test_metrics_are_those_of_the_supervisor_and_the_active_child() -> None:
    with child_that_answers(METRICS, len(METRICS)) as port:
        assert names(port) == [*OWN, "relaygr_worker_things"]


@pytest.mark.slow
@pytest.mark.parametrize("host", ["::", "0.0.0.0"])
def test_a_child_on_every_address_is_asked_where_a_container_without_ipv6_has_it(host: str) -> None:
    """As in Docker's networks: the page of each worker with a standby had none of the worker's own metrics there."""
    with child_that_answers(METRICS, len(METRICS)) as port:
        assert names(port, host) == [*OWN, "relaygr_worker_things"]


@pytest.mark.slow
@pytest.mark.parametrize("body", [METRICS, b"relaygr_worker_things_total {"], ids=["cut", "torn"])
def test_a_child_that_dies_while_it_answers_removes_only_its_own_metrics(body: bytes) -> None:
    with child_that_answers(body, len(METRICS) if body != METRICS else len(METRICS) + 1) as port:
        assert names(port) == OWN
