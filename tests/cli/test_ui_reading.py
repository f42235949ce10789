"""The fields that the live page reads of a message, and the metrics pages that it reads."""

from __future__ import annotations

import contextlib
import dataclasses
import http.server
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import msgpack
import numpy as np
import pytest
from confluent_kafka import KafkaError
from hypothesis import given
from hypothesis import strategies as st

from relaygr.kafka.settings import KafkaSettings
from relaygr.runtime.errors import RelayError
from relaygr.schemas import encode
from relaygr.schemas.codec import SCHEMA_VERSION
from relaygr.schemas.headers import RankingHeaders
from relaygr.schemas.messages import (
    Behaviours,
    History,
    Outcome,
    Path,
    PrefixSource,
    PreInferJob,
    RankingResult,
    RetrievalEvent,
    StageTimings,
)
from relaygr.ui import scrape
from relaygr.ui.reader import TopicReader
from relaygr.ui.reading import (
    HEAD_BYTES,
    JobSeen,
    RankingSeen,
    RetrievalSeen,
    read_job,
    read_ranking,
    read_result,
    read_retrieval,
)
from relaygr.ui.scrape import Scraper, check_url, parse_reading, read_page, wanted_lines
from tests.worlds.ui import UiWorld

LONG = 100_000
HISTORY = History("ann", 3, np.zeros(2, "<i8"), Behaviours(np.arange(LONG), np.zeros(LONG, "<u2"), np.arange(LONG)))


def test_an_event_and_a_job_are_read_without_their_history() -> None:
    event = RetrievalEvent("g.1.2.t", "ann", 1000, 2000, 50, 10, 0, HISTORY.version(), HISTORY)
    job = PreInferJob("g.1.2.t", "ann", 1000, 2000, 50, 10, 0, 1500, HISTORY.version(), HISTORY)
    assert len(encode(event)) > 100 * HEAD_BYTES
    assert read_retrieval(encode(event)) == RetrievalSeen("g.1.2.t", 1000)
    assert read_job(encode(job)) == JobSeen("g.1.2.t", 1000, 1500)


def test_a_ranking_request_is_read_by_its_headers_alone() -> None:
    headers = RankingHeaders("g.1.2.t", "g", "relaygr.results", 0, 5000).encode()
    assert read_ranking(b"ann", headers, 4000) == RankingSeen("g.1.2.t", b"ann", 4000, 5000)


@pytest.mark.parametrize(
    "headers", [None, [], [("request_id", b"\xff")], [("request_id", b"a"), ("deadline_us", b"-1")]]
)
def test_a_ranking_request_without_its_headers_is_not_read(headers: list[tuple[str, bytes]] | None) -> None:
    assert read_ranking(b"ann", headers, 4000) is None


def test_a_result_is_read_without_its_scores() -> None:
    result = RankingResult(
        "g.1.2.t", "worker-00", Outcome.RANKED, 1000, 2000, 9000, StageTimings(1, 2, 3, 4, 5, 6), path=Path.DRAM,
        prefix_source=PrefixSource.DRAM, num_tasks=16, scores=np.zeros(16_000, "<f4"), model_revision="m",
    )  # fmt: skip
    seen = read_result(encode(result))
    assert seen is not None
    assert (seen.worker_id, seen.outcome, seen.path, seen.source) == ("worker-00", "ranked", "dram", "dram")
    assert (seen.queue_us, seen.wait_us, seen.pre_infer_us, seen.reload_us, seen.rank_us, seen.total_us) == (
        1,
        2,
        3,
        4,
        5,
        6,
    )


def test_a_name_that_a_newer_version_wrote_is_other() -> None:
    body = {"request_id": "g.1", "outcome": "ranked", "path": "teleported", "timings": 7, "sent_at_us": -1}
    seen = read_result(bytes([SCHEMA_VERSION]) + msgpack.packb(body))
    assert seen is not None
    assert (seen.path, seen.total_us, seen.sent_at_us) == ("other", 0, 0)


@given(st.binary(max_size=200), st.booleans())
def test_no_bytes_raise_an_exception(data: bytes, is_message: bool) -> None:
    value = bytes([SCHEMA_VERSION]) + data if is_message else data
    for read in (read_retrieval, read_job, read_result):
        read(value)


@pytest.mark.parametrize("outcome", [[], {}, ["ranked"], 7, None])
def test_an_outcome_that_is_no_text_is_no_result(outcome: object) -> None:
    """A list cannot be looked up in a set: one such message would have ended the reader's thread."""
    packed = msgpack.packb({"request_id": "g.1.2.t", "outcome": outcome})
    assert read_result(bytes([SCHEMA_VERSION]) + packed) is None


def test_deeply_nested_bytes_are_no_message() -> None:
    assert read_result(bytes([SCHEMA_VERSION, 0x81]) + b"\x91" * 5000) is None


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


@dataclasses.dataclass
class Received:
    """A ranking request as the reader gets it."""

    at_ms: int
    headers_: object
    refusal: KafkaError | None = None

    def error(self) -> KafkaError | None:
        return self.refusal

    def topic(self) -> str:
        return "relaygr.ranking"

    def partition(self) -> int:
        return 0

    def offset(self) -> int:
        return 0

    def key(self) -> bytes:
        return b"ann"

    def headers(self) -> object:
        return self.headers_

    def timestamp(self) -> tuple[int, int]:
        return 1, self.at_ms


@pytest.mark.parametrize("per_second", [0, 1, 1000, 10**6, 10**9])
def test_only_a_time_stamp_that_can_be_true_dates_a_message(per_second: int) -> None:
    """With time stamps in seconds, requests had a budget of 56 years, and the reader skipped all that it could."""
    world = UiWorld()
    now_us = world.clock.wall_us()
    reader = TopicReader(KafkaSettings(), world.model, threading.Lock(), world.clock.monotonic_us, world.clock.wall_us)
    headers = RankingHeaders("g.1.1.t", "g", "results", 0, now_us + 50_000).encode()
    message: Any = Received(now_us * per_second // 10**6, headers)
    is_true = per_second == 1000
    assert reader._fold([message]) == (message.at_ms if is_true else None)
    world.wait(4)
    shown = world.snapshot()
    assert [late.kind for late in shown.late] == ["unanswered"]
    assert (shown.latency.budget_ms is not None) is is_true


def test_a_topic_that_may_be_read_again_is_no_problem_any_more() -> None:
    """The page named the right until it was started again."""
    world = UiWorld()
    reader = TopicReader(KafkaSettings(), world.model, threading.Lock(), world.clock.monotonic_us, world.clock.wall_us)
    headers = RankingHeaders("g.1.1.t", "g", "results", 0, world.clock.wall_us() + 50_000).encode()
    message: Any = Received(world.clock.wall_us() // 1000, headers)
    refused: Any = Received(0, [], KafkaError(KafkaError.TOPIC_AUTHORIZATION_FAILED))
    reader._fold([refused])
    assert any("may not read relaygr.ranking" in text for text in world.snapshot().problems)
    reader._fold([message])
    assert not world.snapshot().problems
