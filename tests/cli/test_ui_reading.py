"""The messages and the metrics pages that the live page reads."""

from __future__ import annotations

import contextlib
import dataclasses
import http.server
import inspect
import re
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
from confluent_kafka import KafkaError
from hypothesis import given
from hypothesis import strategies as st

from relaygr.kafka.log_reader import Batch, Failure
from relaygr.kafka.session import KafkaSession
from relaygr.kafka.settings import KafkaSettings
from relaygr.runtime.errors import RelayError
from relaygr.schemas.codec import SCHEMA_VERSION
from relaygr.schemas.ended import Ended
from relaygr.schemas.fields import Other
from relaygr.schemas.headers import RankingHeaders
from relaygr.ui import model, scrape
from relaygr.ui.reader import TopicReader
from relaygr.ui.scrape import Scraper, check_url, pages_at, parse_reading, read_page, wanted_lines
from tests.waiting import until
from tests.worlds.ui import UiWorld

# Metrics pages


class Target(http.server.BaseHTTPRequestHandler):
    """A metrics page, a page that leads elsewhere, and one that is no metrics."""

    def do_GET(self) -> None:
        if self.path == "/redirect/metrics":
            self.send_response(302)
            self.send_header("location", "/metrics")
            self.end_headers()
            return
        self.send_response(200)
        self.end_headers()
        text = 'relaygr_cache_hits_total{coverage="complete"} 3\nrelaygr_else_total 9\n'
        self.wfile.write(b"\x00{{{" if self.path == "/broken/metrics" else text.encode())

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def target() -> Iterator[str]:
    server = http.server.HTTPServer(("127.0.0.1", 0), Target)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


def test_of_a_metrics_page_only_the_wanted_metrics_are_parsed(target: str) -> None:
    reading = read_page(f"{target}/metrics")
    assert reading is not None
    assert reading.samples == {"relaygr_cache_hits_total": {(("coverage", "complete"),): 3.0}}


@pytest.mark.parametrize(
    ("url", "addresses", "pages"),
    [
        ("http://triggers:81/metrics", ["10.0.0.2", "10.0.0.1", "fd00::1"], ["http://10.0.0.1:81/metrics", "http://10.0.0.2:81/metrics"]),
        ("http://triggers/metrics", ["fd00::1", "fd00::2"], ["http://[fd00::1]/metrics", "http://[fd00::2]/metrics"]),
        ("http://trigger:81/metrics", ["10.0.0.1"], ["http://trigger:81/metrics"]),
        ("https://triggers/metrics", ["10.0.0.1", "10.0.0.2"], ["https://triggers/metrics"]),
        ("http://localhost:81/metrics", ["::1", "127.0.0.1"], ["http://localhost:81/metrics"]),
        ("http://unknown:81/metrics", [], ["http://unknown:81/metrics"]),
        ("http://triggers:many/metrics", ["10.0.0.1", "10.0.0.2"], ["http://triggers:many/metrics"]),
    ],
)  # fmt: skip
def test_a_name_of_many_processes_is_read_at_each(
    monkeypatch: pytest.MonkeyPatch, url: str, addresses: list[str], pages: list[str]
) -> None:
    """The name of a Service leads to another process at each read, and their counters would be mixed."""

    def found(*_: object, **__: object) -> list[Any]:
        if not addresses:
            raise socket.gaierror
        return [(socket.AF_INET6 if ":" in each else socket.AF_INET, 1, 6, "", (each, 81)) for each in addresses]

    monkeypatch.setattr(socket, "getaddrinfo", found)
    assert pages_at(url) == pages


def test_a_redirect_is_not_followed(target: str) -> None:
    """A status may name any address, which may lead to any other."""
    assert read_page(f"{target}/redirect/metrics") is None


def test_a_page_that_is_no_metrics_has_no_reading(target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = read_page(f"{target}/broken/metrics")
    assert broken is not None and broken.samples == {}
    monkeypatch.setattr(scrape, "wanted_lines", lambda text: text)
    assert read_page(f"{target}/broken/metrics") is None
    assert read_page("http://127.0.0.1:1/metrics") is None


@pytest.mark.parametrize("answer", [b"SSH-2.0-x\r\n", b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\nz"])
def test_an_address_where_no_web_server_answers_has_no_reading(answer: bytes) -> None:
    """A worker's status may name any port. An error of http.client would have ended the scraper's thread."""
    with socket.create_server(("127.0.0.1", 0)) as other:

        def serve() -> None:
            connection, _ = other.accept()
            with connection:
                connection.recv(4096)
                connection.sendall(answer)

        thread = threading.Thread(target=serve)
        thread.start()
        assert read_page(f"http://127.0.0.1:{other.getsockname()[1]}/metrics") is None
        thread.join()
    assert read_page("http://127.0.0.1:1/a b/metrics") is None


def test_an_answer_that_does_not_end_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each read of it is quick, so the time-out of the socket does not end it."""
    monkeypatch.setattr(scrape, "BODY_S", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as slow:

        def serve() -> None:
            connection, _ = slow.accept()
            with connection, contextlib.suppress(OSError):
                connection.recv(4096)
                connection.sendall(b"HTTP/1.1 200 OK\r\n\r\n")
                # It ends when the reader has closed the connection.
                while True:
                    connection.sendall(b"x")
                    time.sleep(0.02)

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        assert read_page(f"http://127.0.0.1:{slow.getsockname()[1]}/metrics") is None
        thread.join()


def test_values_without_a_whole_number_are_left_out_and_lines_are_bounded() -> None:
    name = "relaygr_gateway_lost_requests_total"
    lines = [f'{name}{{a="{place}"}} {value}' for place, value in enumerate(("NaN", "+Inf", "-Inf", "1e300", "7"))]
    assert parse_reading("\n".join(lines) + "\n").samples == {name: {(("a", "4"),): 7.0}}
    assert len(wanted_lines(f"{name} 1\n" * 2 * scrape.MAX_LINES).splitlines()) == scrape.MAX_LINES


def test_lines_of_other_metrics_are_left_out() -> None:
    text = "# HELP relaygr_cache_bytes x\nrelaygr_cache_bytes 1\nprocess_cpu_seconds_total 2\n"
    assert wanted_lines(text) == "relaygr_cache_bytes 1\n"


def test_every_metric_that_the_page_asks_for_is_read() -> None:
    """The pool was on no page, since its lines were left out."""
    asked = set(re.findall(r'"(relaygr_[a-z_]+)"', inspect.getsource(model) + inspect.getsource(scrape.Reading)))
    assert {"relaygr_pool_fetches_total", "relaygr_cache_hits_total"} <= asked <= set(scrape.WANTED)


@pytest.mark.parametrize("url", ["ftp://a/metrics", "trigger-0:9100", "http:///metrics", ""])
def test_an_address_that_is_not_one_of_http_is_refused(url: str) -> None:
    with pytest.raises(RelayError, match="write the address of a metrics page"):
        check_url(url)


def test_the_scraper_delivers_what_each_target_says(target: str) -> None:
    heard: dict[str, object] = {}
    both = threading.Event()

    def deliver(name: str, reading: object) -> None:
        heard[name] = reading
        if len(heard) == 2:
            both.set()

    targets = {f"{target}/metrics": "worker-00", "http://127.0.0.1:1/metrics": "worker-01"}
    scraper = Scraper(0.1, lambda: targets, deliver)
    scraper.start()
    assert both.wait(10)
    scraper.stop()
    assert heard["worker-00"] is not None and heard["worker-01"] is None


def test_a_target_that_is_named_between_two_rounds_is_read_at_once(target: str) -> None:
    """A worker's pool was seen only after `ui.scrape_interval_s`."""
    targets: dict[str, str] = {}
    heard: list[str] = []
    scraper = Scraper(600, lambda: targets, lambda name, _: heard.append(name), named=lambda: len(targets))
    scraper.start()
    try:
        time.sleep(0.3)
        assert heard == []
        targets[f"{target}/metrics"] = "worker-00"
        until(lambda: heard, "the new page is read")
        time.sleep(1.5)
        assert heard == ["worker-00"], "the others wait for their time"
    finally:
        scraper.stop()


# Messages


@dataclasses.dataclass
class Received:
    """A message as the reader gets it: a ranking request, unless said."""

    at_ms: int
    headers_: object
    topic_: str = "relaygr.ranking"
    body: bytes | None = b"not read"

    def topic(self) -> str:
        return self.topic_

    def partition(self) -> int:
        return 0

    def offset(self) -> int:
        return 0

    def key(self) -> bytes:
        return b"ann"

    def value(self) -> bytes | None:
        return self.body

    def headers(self) -> object:
        return self.headers_

    def timestamp(self) -> tuple[int, int]:
        return 1, self.at_ms


def reader_of(world: UiWorld) -> TopicReader:
    return TopicReader(
        KafkaSession(KafkaSettings(), "test"),
        world.model,
        threading.Lock(),
        world.clock.monotonic_us,
        world.clock.wall_us,
    )


TOPICS = [f"relaygr.{name}" for name in ("retrieval", "preinfer", "ranking", "results", "workers")]


@given(st.binary(max_size=200), st.booleans(), st.sampled_from(TOPICS))
def test_a_message_that_cannot_be_decoded_is_counted(data: bytes, is_message: bool, topic: str) -> None:
    """An exception would end the reader's thread."""
    world = UiWorld()
    body = bytes([SCHEMA_VERSION]) + data if is_message else data
    if topic == "relaygr.workers" and not body:
        return  # A tombstone.
    message: Any = Received(world.clock.wall_us() // 1000, [("request_id", data)], topic_=topic, body=body)
    reader_of(world)._fold(Batch([message]))
    assert world.snapshot().unreadable == 1


@pytest.mark.parametrize(
    "headers", [None, [], [("request_id", b"\xff")], [("request_id", b"a"), ("deadline_us", b"-1")]]
)
def test_a_ranking_request_without_its_headers_cannot_be_read(headers: list[tuple[str, bytes]] | None) -> None:
    world = UiWorld()
    message: Any = Received(world.clock.wall_us() // 1000, headers)
    reader_of(world)._fold(Batch([message]))
    assert world.snapshot().unreadable == 1


def test_a_path_and_a_reason_of_a_newer_version_are_other() -> None:
    world = UiWorld()
    world.ask("g.1.1.t")
    world.answer("g.1.1.t", 70, Other("teleported"))
    world.ask("g.1.2.t")
    world.answer("g.1.2.t", 70, None, Ended.FAILED, Other("bored"))
    assert {(late.kind, late.reason) for late in world.snapshot().late} == {("other", None), ("failed", "other")}


@pytest.mark.parametrize("per_second", [0, 1, 1000, 10**6, 10**9])
def test_only_a_time_stamp_that_can_be_true_dates_a_message(per_second: int) -> None:
    """With time stamps in seconds, requests had a budget of 56 years, and the reader skipped all that it could."""
    world = UiWorld()
    now_us = world.clock.wall_us()
    reader = reader_of(world)
    headers = RankingHeaders("g.1.1.t", "g", "results", 0, now_us + 50_000).encode()
    message: Any = Received(now_us * per_second // 10**6, headers)
    is_true = per_second == 1000
    assert reader._fold(Batch([message])) == (message.at_ms if is_true else None)
    world.wait(4)
    shown = world.snapshot()
    assert [late.kind for late in shown.late] == ["unanswered"]
    assert (shown.latency.budget_ms is not None) is is_true


def test_a_topic_that_may_be_read_again_is_no_problem_any_more() -> None:
    """The page named the right until it was started again."""
    world = UiWorld()
    reader = reader_of(world)
    headers = RankingHeaders("g.1.1.t", "g", "results", 0, world.clock.wall_us() + 50_000).encode()
    message: Any = Received(world.clock.wall_us() // 1000, headers)
    refused = Failure(KafkaError(KafkaError.TOPIC_AUTHORIZATION_FAILED), "relaygr.ranking", 0)
    reader._fold(Batch(failures=[refused]))
    assert any("may not read relaygr.ranking" in text for text in world.said())
    reader._fold(Batch([message]))
    assert not world.snapshot().problems
