"""`relaygr gateway` as a process, with a worker that answers as a test tells it: calls, refusals, bounds, the stop."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import signal
import socket
import threading
import time
import tracemalloc
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import count
from types import SimpleNamespace
from typing import Any, cast

import jsonschema
import msgpack
import numpy as np
import pytest
from prometheus_client import CollectorRegistry
from pydantic import ByteSize, SecretStr, ValidationError

from relaygr.client import (
    AsyncRelayClient,
    ClientError,
    ClientSettings,
    MessageRefused,
    MessageTooLarge,
    NotRunning,
    QueueFull,
    RankOutcome,
    RequestIdInUse,
)
from relaygr.devbroker import LocalBroker
from relaygr.devbroker.local import free_ports
from relaygr.gateway import server as gateway_server
from relaygr.gateway.answers import refused_by_client
from relaygr.gateway.app import GatewayApp
from relaygr.gateway.bodies import BadBody, Encoding, RankBody, RetrievalBody, read_body
from relaygr.gateway.openapi import document, page
from relaygr.gateway.server import run_gateway
from relaygr.gateway.settings import GatewaySettings
from relaygr.kafka.settings import KafkaSettings
from relaygr.processes import CommandProcess, Processes, write_config
from relaygr.runtime.errors import RelayError
from relaygr.runtime.http_server import ConnectionLimits, HttpServer
from relaygr.schemas import codec
from relaygr.schemas.ended import Ended, Reason
from relaygr.schemas.messages import RankingRequest, RankingResult, RetrievalEvent
from relaygr.schemas.topics import Topic
from relaygr.settings import Settings
from tests.echo_worker import EchoWorker, answer_once, echo_worker, ranked, read_topic
from tests.leftovers import owned_by_a_fixture
from tests.waiting import until
from tests.worlds.otlp import traceparent
from tests.worlds.relay import own_topics

JSON = "application/json"
MSGPACK = "application/msgpack"
TOKEN = "a-token-of-some-length"
MAX_BODY_BYTES = 64 << 10
MAX_REQUESTS = 4
RANK: dict[str, Any] = {"user_id": "ann", "candidates": [101, 102, 103], "budget_ms": 9_000}
RETRIEVAL: dict[str, Any] = {"user_id": "ann", "expected_ranking_in_ms": 150, "expected_candidates": 3}


@dataclass(frozen=True)
class Reply:
    """An answer of the gateway."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def content(self) -> Any:
        return msgpack.unpackb(self.body) if self.headers["content-type"] == MSGPACK else json.loads(self.body)

    @property
    def reason(self) -> str:
        return str(self.content["reason"])


@dataclass
class Door:
    """A running gateway and the worker behind it."""

    process: CommandProcess
    port: int
    kafka: KafkaSettings
    worker: EchoWorker

    def connect(self) -> http.client.HTTPConnection:
        return http.client.HTTPConnection("127.0.0.1", self.port, timeout=20)

    def post(self, path: str, body: Any, connection: http.client.HTTPConnection | None = None, **headers: str) -> Reply:
        """Sends a body, encoded as its content type says unless it is bytes. `_` in header names stands for `-`."""
        given = {"content-type": JSON} | {name.replace("_", "-"): value for name, value in headers.items()}
        if not isinstance(body, bytes):
            body = msgpack.packb(body) if "msgpack" in given["content-type"] else json.dumps(body).encode()
        used = connection or self.connect()
        used.request("POST", path, body, {name: value for name, value in given.items() if value})
        got = used.getresponse()
        reply = Reply(got.status, {name.lower(): value for name, value in got.getheaders()}, got.read())
        if connection is None:
            used.close()
        return reply

    def rank(self, **changes: Any) -> Reply:
        return self.post("/v1/rank", RANK | changes)


@pytest.fixture(scope="module")
def kafka(embedded_broker: LocalBroker) -> Iterator[KafkaSettings]:
    with own_topics(embedded_broker) as settings:
        yield settings


@pytest.fixture(scope="module")
def processes(kafka: KafkaSettings, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Processes]:
    folder = tmp_path_factory.mktemp("gateway")
    write_config(Settings(**kafka.model_dump()), folder / "settings.yaml")
    with Processes(folder, folder / "settings.yaml") as processes:
        yield processes


def start(
    processes: Processes, name: str, *settings: str, module: Sequence[str] = ("relaygr",)
) -> tuple[CommandProcess, int]:
    (port,) = free_ports(1)
    chosen = [f"gateway.{setting}" for setting in (f"listen_port={port}", f"gateway_id={name}", *settings)]
    return processes.start(name, ["gateway"], "gateway", chosen, module), port


@pytest.fixture(scope="module")
def door(kafka: KafkaSettings, processes: Processes) -> Iterator[Door]:
    bounds = (
        f"max_body_bytes={MAX_BODY_BYTES}",
        f"max_requests={MAX_REQUESTS}",
        "body_timeout_s=0.3",
        "keep_alive_s=1",
    )
    process, port = start(processes, "open", *bounds)
    with owned_by_a_fixture(lambda: {child.process.pid for child in processes.running}), echo_worker(kafka) as worker:
        processes.await_ready([process], 60)
        yield Door(process, port, kafka, worker)


@pytest.fixture
def answers(door: Door) -> Iterator[Callable[[Any], None]]:
    """Sets what the worker answers for the rest of a test."""

    def answer(value: Any) -> None:
        door.worker.answer = value

    yield answer
    door.worker.answer = answer_once


def result_of(request: RankingRequest, outcome: Ended, reason: Reason | None = None, **more: Any) -> list[bytes]:
    plain = replace(ranked(request), outcome=outcome, reason=reason, path=None, scores=None, num_tasks=0)
    return [codec.encode(replace(plain, model_revision=None, **more))]


@pytest.mark.slow
class TestCalls:
    @pytest.mark.parametrize("media_type", [JSON, MSGPACK, "application/x-msgpack"])
    def test_scores_are_a_list_in_both_encodings_and_the_connection_is_kept(self, door: Door, media_type: str) -> None:
        connection = door.connect()
        for _ in range(3):
            reply = door.post("/v1/rank", RANK, connection, content_type=media_type)
            assert (reply.status, reply.headers["content-type"]) == (200, JSON if media_type == JSON else MSGPACK)
            assert reply.content["result"]["scores"] == [101.0, 102.0, 103.0]
            assert (reply.content["status"], reply.content["result"]["path"]) == ("ranked", "full")
            sock = connection.sock
            assert sock is not None
        connection.close()

    def test_accept_chooses_the_encoding_of_the_answer(self, door: Door) -> None:
        assert door.post("/v1/rank", RANK, accept=MSGPACK).headers["content-type"] == MSGPACK
        assert door.post("/v1/rank", RANK, accept="text/html, */*;q=0.1").headers["content-type"] == JSON
        assert door.post("/v1/rank", RANK, accept="text/html").reason == "not_acceptable"

    def test_in_messagepack_arrays_and_digests_may_be_bytes_as_on_the_topics(self, door: Door) -> None:
        version = {"number": 1, "length": 2, "digest": bytes(16)}
        body = RANK | {"candidates": np.array([7, 9], "<i8").tobytes(), "history_version": version}
        assert door.post("/v1/rank", body, content_type=MSGPACK).content["result"]["scores"] == [7.0, 9.0]
        assert door.worker.seen[-1].history_version is not None

    def test_what_is_sent_reaches_the_worker_field_by_field(self, door: Door) -> None:
        behaviours = {"items": [5, 6], "actions": [1, 0], "timestamps_ms": [1_700_000_000_000, 1_700_000_000_001]}
        history = {"number": 3, "features": [2], "behaviours": behaviours}
        reply = door.rank(suffix=behaviours, history=history, query_time_ms=17, request_id="mine-1")
        assert reply.status == 200 and reply.content["request_id"] == "mine-1"
        seen = door.worker.seen[-1]
        assert (seen.request_id, seen.query_time_ms, seen.suffix.items.tolist()) == ("mine-1", 17, [5, 6])
        assert seen.history is not None and seen.history.user_id == "ann"

    def test_a_retrieval_event_is_published_with_the_budget_of_the_header(self, door: Door) -> None:
        reply = door.post("/v1/retrieval", RETRIEVAL, x_relaygr_budget_ms="75")
        assert (reply.status, reply.content["status"]) == (202, "accepted")
        message = read_topic(door.kafka, Topic.RETRIEVAL, 1)[0]
        event = codec.decode(RetrievalEvent, message.value())
        assert (event.request_id, event.ranking_budget_ms) == (reply.content["request_id"], 75)
        assert event.retrieval_at_us // 1000 == reply.content["query_time_ms"]

    def test_the_messages_carry_the_span_of_the_caller_on(self, door: Door) -> None:
        given = traceparent()
        assert door.post("/v1/rank", RANK, traceparent=given).status == 200
        assert door.worker.headers[-1].traceparent == given.encode()
        assert door.post("/v1/rank", RANK, traceparent="garbage").status == 200
        assert door.worker.headers[-1].traceparent is None

        body = RETRIEVAL | {"ranking_budget_ms": 50, "request_id": "traced-1"}
        assert door.post("/v1/retrieval", body, traceparent=given).status == 202
        events = read_topic(door.kafka, Topic.RETRIEVAL, 10, timeout_s=3)
        [event] = [each for each in events if codec.decode(RetrievalEvent, each.value()).request_id == "traced-1"]
        assert event.headers() == [("traceparent", given.encode())]

    def test_the_deadline_of_the_header_is_the_one_that_the_worker_gets(self, door: Door) -> None:
        body = {name: value for name, value in RANK.items() if name != "budget_ms"}
        assert door.post("/v1/rank", body, x_relaygr_budget_ms="5000.5").status == 200
        seen = door.worker.seen[-1]
        # What the gateway itself took is off the budget.
        assert 1_000_000 < seen.deadline_us - seen.sent_at_us < 5_000_500


@pytest.mark.slow
class TestRefusals:
    @pytest.mark.parametrize(
        ("changes", "said"),
        [
            ({"candidates": [1, "2"]}, "candidates[1] is text, expected a whole number"),
            ({"candidates": []}, "candidates: 0 entries, expected 1 to 16384"),
            ({"candidates": None}, "candidates: is required"),
            ({"candidats": [1]}, "candidats: there is no such field; did you mean candidates?"),
            ({"user_id": ""}, "user_id: 0 bytes of text"),
            ({"budget_ms": 0}, "budget_ms is 0: expected more than 0"),
            ({"budget_ms": None}, "budget_ms is required: give it in the body or in the header x-relaygr-budget-ms"),
            ({"suffix": {"items": [1], "actions": [], "timestamps_ms": []}}, "suffix: 1 items, 0 actions"),
            ({"history_version": {"number": 1, "length": 1, "digest": "00"}}, "history_version.digest: 1 bytes"),
            ({"history": {"number": 1}}, "history.features: is required"),
        ],
    )
    def test_a_bad_field_is_named(self, door: Door, changes: dict[str, Any], said: str) -> None:
        reply = door.rank(**changes)
        assert (reply.status, reply.reason) == (400, "invalid_body")
        assert reply.content["message"].startswith(said)

    @pytest.mark.parametrize(
        ("media_type", "body", "said"),
        [
            (JSON, b"{", "the body is not JSON"),
            (JSON, b"[]", "the body is not a JSON object"),
            (JSON, b'{"user_id": "a", "user_id": "b"}', "user_id is given twice"),
            (JSON, b'{"budget_ms": NaN}', "NaN is not a number"),
            (JSON, b"\xff", "the body is not UTF-8"),
            (JSON, b"[" * 4_000, "nested too deeply"),
            (
                JSON,
                b'{"a": [' + b"[]," * 5_000 + b"0]}",
                "the body is not a message: more than 4096 objects and lists",
            ),
            (JSON, b'{"user_id": "\\ud800"}', "user_id: not encodable as UTF-8"),
            (MSGPACK, b"\xc1", "the body is not MessagePack"),
            (MSGPACK, b"\x91\x01", "the body is not a MessagePack map"),
            (MSGPACK, b"\x81\xa1a\xdd\xff\xff\xff\xff", "the body is not MessagePack"),
            (MSGPACK, b"", "the body is not MessagePack"),
            (MSGPACK, msgpack.packb({"a": [[]] * 5_000}), "the body is not MessagePack: more than 64 maps and lists"),
            (MSGPACK, msgpack.packb({"a": [{}] * 5_000}), "the body is not MessagePack: more than 64 maps and lists"),
            (MSGPACK, b"\x81\xa1a\xc7\x00\x05", "the body is not MessagePack: an extension, of type 5"),
            (MSGPACK, msgpack.packb({b"user_id": "a"}), "b'user_id': there is no such field"),
        ],
    )
    def test_a_body_that_is_no_object_is_refused(self, door: Door, media_type: str, body: bytes, said: str) -> None:
        reply = door.post("/v1/rank", body, content_type=media_type, accept=JSON)
        assert (reply.status, reply.reason) == (400, "invalid_body")
        assert reply.content["message"].startswith(said)

    @pytest.mark.parametrize(
        ("header", "said"), [("soon", "expected a number"), ("0", "more than 0"), ("nan", "is nan")]
    )
    def test_a_bad_header_is_named_and_one_beside_the_field_is_refused(
        self, door: Door, header: str, said: str
    ) -> None:
        body = {name: value for name, value in RANK.items() if name != "budget_ms"}
        message = door.post("/v1/rank", body, x_relaygr_budget_ms=header).content["message"]
        assert message.startswith("x-relaygr-budget-ms") and said in message
        assert "both given" in door.post("/v1/rank", RANK, x_relaygr_budget_ms="5").content["message"]

    def test_a_large_body_is_refused_whether_or_not_its_length_is_told_and_the_connection_goes_on(
        self, door: Door
    ) -> None:
        connection = door.connect()
        large = b" " * (4 * MAX_BODY_BYTES)
        assert door.post("/v1/rank", large, connection).reason == "too_large"
        connection.request("POST", "/v1/rank", iter([large, large]), {"content-type": JSON}, encode_chunked=True)
        got = connection.getresponse()
        assert (got.status, json.loads(got.read())["reason"]) == (413, "too_large")
        assert door.post("/v1/rank", RANK, connection).status == 200
        connection.close()

    def test_a_body_that_comes_too_slowly_is_refused(self, door: Door) -> None:
        with socket.create_connection(("127.0.0.1", door.port), timeout=10) as slow:
            head = f"POST /v1/rank HTTP/1.1\r\nhost: localhost\r\ncontent-type: {JSON}\r\ncontent-length: 10\r\n\r\n{{"
            slow.sendall(head.encode())
            assert slow.recv(100).startswith(b"HTTP/1.1 408 ")

    def test_slow_bodies_keep_no_other_call_out(self, door: Door) -> None:
        """Each took one of the places of `max_requests` until its time was over."""
        head = f"POST /v1/rank HTTP/1.1\r\nhost: localhost\r\ncontent-type: {JSON}\r\ncontent-length: 90\r\n\r\n{{"
        for _ in range(3):
            with contextlib.ExitStack() as slow:
                for _ in range(3 * MAX_REQUESTS):
                    connection = slow.enter_context(socket.create_connection(("127.0.0.1", door.port), timeout=10))
                    connection.sendall(head.encode())
                assert [door.rank().status for _ in range(3)] == [200] * 3

    def test_connections_that_send_nothing_or_half_a_head_are_closed(self, door: Door) -> None:
        for sent in (b"", b"POST /v1/rank HTTP/1.1\r\nhost: loc"):
            with socket.create_connection(("127.0.0.1", door.port), timeout=10) as idle:
                idle.sendall(sent)
                with contextlib.suppress(ConnectionResetError):
                    assert idle.recv(100) == b""

    def test_a_head_without_an_end_closes_the_connection(self, door: Door) -> None:
        with socket.create_connection(("127.0.0.1", door.port), timeout=10) as endless:
            endless.sendall(b"POST /v1/rank HTTP/1.1\r\nx: ")
            with pytest.raises((ConnectionResetError, BrokenPipeError)):
                for _ in range(1_000):
                    endless.sendall(b"a" * 65_536)

    def test_a_trailer_without_an_end_closes_the_connection(self, door: Door) -> None:
        sent = 0
        with socket.create_connection(("127.0.0.1", door.port), timeout=10) as endless:
            head = f"POST /v1/rank HTTP/1.1\r\nhost: localhost\r\ncontent-type: {JSON}\r\ntransfer-encoding: chunked"
            endless.sendall(f"{head}\r\n\r\n1\r\n{{\r\n0\r\nx: ".encode())
            with pytest.raises((ConnectionResetError, BrokenPipeError)):
                while sent < 2**30:
                    endless.sendall(b"a" * 65_536)
                    sent += 65_536
        # The buffers of the sockets, but not what would come until the time limit of the body.
        assert sent < 16 << 20

    def test_media_types_paths_and_methods(self, door: Door) -> None:
        assert door.post("/v1/rank", b"{}", content_type="text/plain").status == 415
        assert door.post("/v1/rank", b"{}", content_type="").status == 415
        assert door.post("/v1/rank", b"{}", content_encoding="gzip").status == 415
        assert door.post("/v1/other", RANK).reason == "not_found"
        # Not a redirect to a name that the caller gives.
        assert door.post("/v1/rank/", RANK, host="evil.example").reason == "not_found"
        assert door.post("/openapi.json", RANK).reason == "method_not_allowed"

    def test_a_page_of_another_site_that_names_this_machine_is_refused(self, door: Door) -> None:
        assert door.post("/v1/rank", RANK, host="evil.example").reason == "forbidden_host"
        assert door.post("/v1/rank", RANK, host=f"localhost:{door.port}").status == 200

    def test_a_request_id_that_is_open_is_refused(self, door: Door, answers: Callable[[Any], None]) -> None:
        answers(lambda _: [])
        with ThreadPoolExecutor() as pool:
            first = pool.submit(door.rank, request_id="twice", budget_ms=2_000)
            until(lambda: door.worker.seen[-1:] != [] and door.worker.seen[-1].request_id == "twice", "received")
            assert door.rank(request_id="twice", budget_ms=2_000).reason == "request_id_in_use"
            assert first.result().status == 504


@pytest.mark.slow
class TestOutcomes:
    def test_without_an_answer_the_deadline_is_the_end(self, door: Door, answers: Callable[[Any], None]) -> None:
        answers(lambda _: [])
        # Long enough for the broker's acknowledgement.
        reply = door.rank(budget_ms=1_500)
        assert (reply.status, reply.content["status"], reply.reason) == (504, "timed_out", "no_answer")

    @pytest.mark.parametrize(
        ("outcome", "reason", "more", "status", "retry_after"),
        [
            (Ended.EXPIRED, None, {}, 504, None),
            (Ended.FAILED, Reason.OVERLOADED, {}, 503, "1"),
            (Ended.FAILED, Reason.OVERLOADED, {"backlog_us": 2_100_000}, 503, "3"),
            (Ended.FAILED, Reason.TOO_LONG, {"detail": "500 candidates"}, 400, None),
            (Ended.FAILED, Reason.DEVICE_ERROR, {}, 502, None),
        ],
    )
    def test_each_outcome_has_its_status(
        self,
        door: Door,
        answers: Callable[[Any], None],
        outcome: Ended,
        reason: Reason | None,
        more: dict[str, Any],
        status: int,
        retry_after: str | None,
    ) -> None:
        answers(lambda request: result_of(request, outcome, reason, **more))
        reply = door.rank()
        assert (reply.status, reply.content["status"]) == (status, outcome.value)
        assert reply.reason == (reason or outcome).value
        assert reply.headers.get("retry-after") == retry_after
        assert reply.content.get("message") == more.get("detail")

    def test_requests_beyond_the_bound_are_answered_429_and_the_others_are_served(
        self, door: Door, answers: Callable[[Any], None]
    ) -> None:
        go = threading.Event()

        def when_told(request: RankingRequest) -> list[bytes]:
            go.wait(15)
            return answer_once(request)

        def held() -> Reply:
            while True:
                # A question whether the bound is reached may be counted at this moment.
                reply = door.rank(budget_ms=18_000)
                if reply.status != 429:
                    return reply

        answers(when_told)
        with ThreadPoolExecutor(MAX_REQUESTS) as pool:
            open_calls = [pool.submit(held) for _ in range(MAX_REQUESTS)]
            refused: list[Reply] = []

            def is_full() -> bool:
                refused[:] = [door.rank(budget_ms=1) for _ in range(5)]
                return {reply.status for reply in refused} == {429}

            until(is_full, "the bound is reached, and stays so", 15)
            go.set()
            assert [call.result().status for call in open_calls] == [200] * MAX_REQUESTS
        assert refused[-1].reason == "too_many_requests" and refused[-1].headers["retry-after"] == "1"
        assert "gateway.max_requests" in refused[-1].content["message"]


@pytest.mark.slow
def test_with_a_token_each_call_needs_it_and_a_stop_serves_what_was_received(
    door: Door, processes: Processes, answers: Callable[[Any], None]
) -> None:
    process, port = start(processes, "closed", f"token={TOKEN}")
    processes.await_ready([process], 60)
    guarded = replace(door, process=process, port=port)
    for wrong in ("", "Bearer nonsense", f"Basic {TOKEN}"):
        reply = guarded.post("/v1/rank", RANK, authorization=wrong)
        assert (reply.status, reply.headers["www-authenticate"]) == (401, "Bearer")
    allowed = {"authorization": f"Bearer {TOKEN}"}
    assert guarded.post("/v1/rank", RANK, host="relay.example", **allowed).status == 200

    def slowly(request: RankingRequest) -> list[bytes]:
        time.sleep(0.5)
        return answer_once(request)

    answers(slowly)
    with ThreadPoolExecutor() as pool:
        call = pool.submit(guarded.post, "/v1/rank", RANK | {"request_id": "last"}, **allowed)
        until(lambda: door.worker.seen[-1].request_id == "last", "received")
        process.process.send_signal(signal.SIGTERM)
        assert call.result().status == 200
    assert process.process.wait(60) == 0
    with pytest.raises(ConnectionRefusedError):
        guarded.rank()
    processes.stop([process])


def test_with_few_open_files_idle_connections_keep_nothing_from_its_answer(door: Door, processes: Processes) -> None:
    """The bound was above the limit: no connection was accepted any more, not even one of a probe."""
    process, port = start(processes, "few-files", module=("tests.worlds.few_files", "90", "260", "relaygr"))
    processes.await_ready([process], 60)
    crowded = replace(door, process=process, port=port)
    with contextlib.ExitStack() as stack:
        for each in [port] * 400 + [process.port] * 300:
            stack.enter_context(contextlib.closing(socket.create_connection(("127.0.0.1", each), 20)))
        assert [crowded.rank(request_id=f"few-{number}").status for number in range(3)] == [200] * 3
        assert readiness(process) == 200
    log = process.log.read_text(encoding="utf-8")
    assert "open files bound the connections" in log and "out of system resource" not in log
    # The soft limit alone would leave 8.
    assert '"max_connections": 50' in log
    processes.stop([process])


def readiness(process: CommandProcess) -> int:
    """The status of `/readyz`."""
    with contextlib.closing(http.client.HTTPConnection("127.0.0.1", process.port, timeout=10)) as connection:
        connection.request("GET", "/readyz")
        return connection.getresponse().status


@pytest.mark.slow
def test_after_sigterm_the_gateway_serves_on_but_is_not_ready_until_the_second_signal(
    door: Door, processes: Processes
) -> None:
    """A load balancer sends new connections until it has noticed."""
    process, port = start(processes, "leaving", "stop_delay_s=600")
    processes.await_ready([process], 60)
    leaving = replace(door, process=process, port=port)
    kept = leaving.connect()
    assert "connection" not in leaving.post("/v1/rank", RANK | {"request_id": "before"}, kept).headers
    process.process.send_signal(signal.SIGTERM)
    until(lambda: readiness(process) == 503, "not ready")
    assert leaving.post("/v1/rank", RANK | {"request_id": "kept"}, kept).status == 200
    numbers = count()

    def closes() -> bool:
        reply = leaving.post("/v1/rank", RANK | {"request_id": f"new-{next(numbers)}"})
        assert reply.status == 200
        return reply.headers.get("connection") == "close"

    until(closes, "answers close their connections")
    process.process.send_signal(signal.SIGTERM)
    assert process.process.wait(60) == 0
    processes.stop([process])


@pytest.mark.slow
@pytest.mark.parametrize(("number", "delay_s"), [(signal.SIGTERM, 0.5), (signal.SIGINT, 600)])
def test_the_gateway_stops_by_itself_after_the_delay_and_at_once_by_ctrl_c(
    door: Door, processes: Processes, number: signal.Signals, delay_s: float
) -> None:
    process, _ = start(processes, f"stopping-{number}", f"stop_delay_s={delay_s}")
    processes.await_ready([process], 60)
    process.process.send_signal(number)
    assert process.process.wait(60) == 0
    processes.stop([process])


@pytest.mark.slow
def test_answers_examples_and_the_page_agree_with_the_document(door: Door) -> None:
    connection = door.connect()
    connection.request("GET", "/openapi.json")
    found = json.loads(connection.getresponse().read())
    assert found == document(needs_token=False)

    def validate(name: str, content: Any) -> None:
        schema = {"$ref": f"#/components/schemas/{name}", "components": found["components"]}
        jsonschema.Draft202012Validator(schema).validate(content)

    for path, name in (("/v1/rank", "RankOutcome"), ("/v1/retrieval", "Accepted")):
        post = found["paths"][path]["post"]
        media = post["requestBody"]["content"][JSON]
        validate(media["schema"]["$ref"].rpartition("/")[2], media["example"])
        reply = door.post(path, media["example"] | ({"budget_ms": 9_000} if name == "RankOutcome" else {}))
        assert str(reply.status) in post["responses"]
        validate(name, reply.content)
    validate("Refusal", door.rank(user_id="").content)
    connection.request("GET", "/")
    page = connection.getresponse().read().decode()
    connection.close()
    assert f"curl -s http://127.0.0.1:{door.port}/v1/rank" in page
    assert "http://" not in page.replace(f"http://127.0.0.1:{door.port}", "") and "<script" not in page


def test_the_page_names_fixed_values_as_json_writes_them() -> None:
    """It said `one of False`."""
    shown = page(document(needs_token=False), "http://gateway")
    assert "always <code>false</code>" in shown and "False" not in shown
    assert "one of <code>&quot;ranked&quot;</code>, <code>&quot;expired&quot;</code>" in shown


def test_tools_learn_of_the_document_where_to_send_calls_by_which_name_and_with_what_token() -> None:
    for needs_token, security in ((False, []), (True, [{"token": []}])):
        found = document(needs_token)
        assert [server["url"] for server in found["servers"]] == ["/"]
        assert found["security"] == security
        schemes = found["components"].get("securitySchemes", {})
        assert {name: (each["type"], each["scheme"]) for name, each in schemes.items()} == (
            {"token": ("http", "bearer")} if needs_token else {}
        )
        names = [call["operationId"] for path in found["paths"].values() for call in path.values()]
        assert names == ["announceImpression", "rankCandidates"]


def test_the_schemas_of_the_document_are_schemas() -> None:
    for schema in document(needs_token=True)["components"]["schemas"].values():
        jsonschema.Draft202012Validator.check_schema(schema)


@pytest.mark.parametrize(
    ("error", "status", "reason"),
    [
        (RequestIdInUse("used already"), 409, "request_id_in_use"),
        (MessageTooLarge("too large"), 413, "too_large"),
        (MessageRefused("no right to write"), 503, "not_sent"),
        (QueueFull("broker away"), 503, "queue_full"),
        (NotRunning("closed"), 503, "stopping"),
    ],
)
def test_each_refusal_of_the_client_has_its_own_status(error: ClientError, status: int, reason: str) -> None:
    """Any message that Kafka did not take was told as a request id in use."""
    answer = refused_by_client(error).answer
    assert (answer.status, answer.content["reason"]) == (status, reason)
    assert ("retry-after" in answer.headers) == (status == 503)


@pytest.mark.slow
def test_the_bytes_of_all_bodies_under_way_are_bounded_and_the_oldest_goes() -> None:
    settings = GatewaySettings(max_requests=3, max_body_bytes=ByteSize(40_000), body_timeout_s=60)
    app = GatewayApp(cast(AsyncRelayClient, None), settings, CollectorRegistry())
    server = HttpServer("test-gateway", "127.0.0.1", 0, app.asgi, ConnectionLimits(16, 60))
    server.start()
    head = f"POST /v1/rank HTTP/1.1\r\nhost: localhost\r\ncontent-type: {JSON}\r\ncontent-length: 40000\r\n\r\n"
    try:
        with contextlib.ExitStack() as stack:
            bodies = [
                stack.enter_context(socket.create_connection(("127.0.0.1", server.port), timeout=60)) for _ in range(4)
            ]
            for number, body in enumerate(bodies[:3], 1):
                body.sendall(head.encode() + b" " * 39_000)
                until(lambda number=number: app._body_bytes == number * 39_000, "it is received")
            bodies[3].sendall(head.encode() + b" " * 39_000)
            refused = b""
            while part := bodies[0].recv(65_536):
                refused += part
            assert refused.startswith(b"HTTP/1.1 429 ") and b"connection: close" in refused
            assert b"gateway.max_body_bytes" in refused
            assert app._body_bytes == 3 * 39_000
            for body in bodies[1:]:
                body.sendall(b" " * 1_000)
                assert body.recv(65_536).startswith(b"HTTP/1.1 400 "), "its body is read, and holds no fields"
            until(lambda: app._body_bytes == 0 and not app._bodies, "nothing is kept")
    finally:
        server.stop()


def test_a_body_that_makes_room_while_the_time_of_the_oldest_is_over_is_served() -> None:
    """The oldest cannot be ended twice: the call of the other one failed with 500."""
    settings = GatewaySettings(max_requests=1, max_body_bytes=ByteSize(40_000), body_timeout_s=60)
    app = GatewayApp(cast(AsyncRelayClient, None), settings, CollectorRegistry())
    scope = {
        "type": "http",
        "method": "POST",
        "path": "/v1/rank",
        "query_string": b"",
        "headers": [(b"host", b"localhost"), (b"content-type", JSON.encode())],
    }

    async def call(parts: list[bytes], more: asyncio.Future[None]) -> int:
        sent: list[Any] = []

        async def receive() -> dict[str, Any]:
            if len(parts) == 1:
                await more
            return {"type": "http.request", "body": parts.pop(0), "more_body": bool(parts)}

        async def send(message: Any) -> None:
            sent.append(message)

        await app.asgi(scope, receive, send)
        return int(sent[0]["status"])

    async def both() -> tuple[int, int]:
        loop = asyncio.get_running_loop()
        never, more = loop.create_future(), loop.create_future()
        oldest = asyncio.create_task(call([b" " * 30_000, b""], never))
        other = asyncio.create_task(call([b" " * 5_000, b" " * 10_000], more))
        while app._body_bytes < 35_000:
            assert not oldest.done() and not other.done()
            await asyncio.sleep(0)
        next(iter(app._bodies)).reschedule(loop.time())
        more.set_result(None)
        return await oldest, await other

    assert asyncio.run(both()) == (429, 400)
    assert app._body_bytes == 0 and not app._bodies


class EndsAtOnce:
    """A client of the relay whose requests expire at once."""

    def __init__(self) -> None:
        self.users: list[str] = []

    async def rank(self, user_id: str, candidates: Any, **_: Any) -> RankOutcome:
        self.users.append(user_id)
        return RankOutcome("id", Ended.EXPIRED, 1)


@pytest.mark.parametrize("in_pieces", [False, True], ids=["at once", "in pieces"])
def test_a_client_that_offers_http_2_is_served_by_http_1_and_no_body_of_its_is_a_request(in_pieces: bool) -> None:
    """Java's HttpClient offers it with each first request: the body was lost, or was read as the next request."""
    client = EndsAtOnce()
    app = GatewayApp(cast(AsyncRelayClient, client), GatewaySettings(), CollectorRegistry())
    server = HttpServer("test-gateway", "127.0.0.1", 0, app.asgi, ConnectionLimits(16, 60))
    server.start()
    offer = "connection: Upgrade, HTTP2-Settings\r\nupgrade: h2c\r\nhttp2-settings: AAEAAEAAAAIAAAAB\r\n"

    def call(content: bytes, lines: str, chunked: bool = False) -> list[bytes]:
        framing = "transfer-encoding: chunked" if chunked else f"content-length: {len(content)}"
        head = f"POST /v1/rank HTTP/1.1\r\nhost: localhost\r\ncontent-type: {JSON}\r\n{lines}{framing}\r\n\r\n"
        return [head.encode(), b"%x\r\n%s\r\n0\r\n\r\n" % (len(content), content) if chunked else content]

    bodies = [json.dumps(RANK | {"user_id": name}).encode() for name in ("ann", "bob", "eve", "zoe")]
    pieces = [
        *call(bodies[0], offer),
        *call(bodies[1], offer, chunked=True),
        *call(b"GET /openapi.json HTTP/1.1\r\nhost: localhost\r\n\r\n", offer),
        *call(bodies[2], ""),
        *call(bodies[3], offer.replace("Upgrade,", "Upgrade, close,")),
    ]
    try:
        with socket.create_connection(("127.0.0.1", server.port), timeout=60) as connection:
            for piece in pieces if in_pieces else [b"".join(pieces)]:
                connection.sendall(piece)
                time.sleep(0.01)
            answers = b""
            while part := connection.recv(65_536):
                answers += part
    finally:
        server.stop()
    statuses = [answer[:3] for answer in answers.split(b"HTTP/1.1 ")[1:]]
    assert statuses == [b"504", b"504", b"400", b"504", b"504"]
    assert client.users == ["ann", "bob", "eve", "zoe"]


def test_two_budgets_in_the_head_are_refused() -> None:
    """Such as the caller's and that of a proxy: the first was taken."""
    app = GatewayApp(cast(AsyncRelayClient, EndsAtOnce()), GatewaySettings(token=SecretStr(TOKEN)), CollectorRegistry())
    body = json.dumps({name: value for name, value in RANK.items() if name != "budget_ms"}).encode()

    async def call(*budgets: str) -> tuple[int, bytes]:
        lines = [
            ("content-type", JSON),
            ("authorization", f"Bearer {TOKEN}"),
            *(("x-relaygr-budget-ms", b) for b in budgets),
        ]
        headers = [(name.encode(), value.encode()) for name, value in lines]
        scope = {"type": "http", "method": "POST", "path": "/v1/rank", "query_string": b"", "headers": headers}
        sent: list[Any] = []

        async def receive() -> dict[str, Any]:
            return {"type": "http.request", "body": body, "more_body": False}

        async def send(message: Any) -> None:
            sent.append(message)

        await app.asgi(scope, receive, send)
        return sent[0]["status"], sent[1]["body"]

    assert asyncio.run(call("9000"))[0] == 504
    status, said = asyncio.run(call("9000", "50"))
    assert status == 400 and b"x-relaygr-budget-ms is '9000, 50': expected a number" in said


def test_an_address_that_others_reach_needs_a_token() -> None:
    with pytest.raises(RelayError, match=r"0\.0\.0\.0, which other machines can reach.*set gateway\.token"):
        run_gateway(KafkaSettings(), ClientSettings(), GatewaySettings(listen_host="0.0.0.0"), lambda _: None)
    assert GatewaySettings(listen_host="::1").is_local and not GatewaySettings(listen_host="gw.example").is_local


def test_a_signal_while_the_gateway_starts_stops_it(monkeypatch: pytest.MonkeyPatch) -> None:
    class Starting:
        def __init__(self, *_: object) -> None:
            self.closed = False

        async def start(self) -> None:
            signal.raise_signal(signal.SIGTERM)

        async def close(self) -> None:
            self.closed = True

    def told(address: str) -> None:
        raise AssertionError(f"it serves {address}")

    client = Starting()
    monkeypatch.setattr(gateway_server, "AsyncRelayClient", lambda *_, **__: client)
    monkeypatch.setattr(gateway_server, "GatewayApp", lambda *_: SimpleNamespace(asgi=None))
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        run_gateway(KafkaSettings(), ClientSettings(), GatewaySettings(listen_port=0), told)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    assert client.closed


def test_a_gateway_that_kafka_refuses_is_not_ready_and_names_the_cause() -> None:
    server = SimpleNamespace(started=True, is_stopping=False)
    accepted = SimpleNamespace(refusal=None, silence=None)
    refused = SimpleNamespace(refusal="certificate expired", silence=None)
    assert gateway_server._readiness(server, accepted).ready  # type: ignore[arg-type]
    readiness = gateway_server._readiness(server, refused)  # type: ignore[arg-type]
    [check] = [each for each in readiness.checks if not each.ok]
    assert not readiness.ready and check.detail == "certificate expired"


@pytest.mark.parametrize("token", ["short", "a token with spaces in it", "umlauts-äöü-äöü-äöü"])
def test_a_token_that_cannot_be_sent_or_is_guessed_is_refused(token: str) -> None:
    with pytest.raises(ValidationError, match="at least 16 characters"):
        GatewaySettings(token=token)  # type: ignore[arg-type]


@pytest.mark.parametrize("before", [b"", b"\x92\xc7\x00\x05", b"\x95\xa0\xc4\x00\x90\x80"], ids=["", "ext", "empty"])
@pytest.mark.parametrize("beside", [b"", b"\xc7\x00\x05", b"\xc9\x00\x00\x00\x00\x05", b"\xa0"], ids=bytes.hex)
@pytest.mark.parametrize("entries", [2**12, 10**8])
def test_a_short_body_that_claims_many_entries_allocates_nothing_for_them(
    before: bytes, beside: bytes, entries: int
) -> None:
    """msgpack allocates a list when it reads the header. 1,000 nested headers of 100 million entries are 5 kB."""
    claims = b"\x81\xa7user_id" + before + (b"\xdd" + entries.to_bytes(4, "big") + beside) * 1_000
    tracemalloc.start()
    try:
        with pytest.raises(BadBody, match="not MessagePack"):
            read_body(RankBody, Encoding.MESSAGEPACK, claims)
        assert tracemalloc.get_traced_memory()[1] < 1_000_000
    finally:
        tracemalloc.stop()


def test_one_of_many_names_that_is_given_twice_is_found() -> None:
    names = b",".join(b'"%d":0' % number for number in (*range(2_000), 1_999))
    with pytest.raises(BadBody, match="1999 is given twice"):
        read_body(RankBody, Encoding.JSON, b"{" + names + b"}")


@pytest.mark.parametrize("texts", [b"%s", b'{"user_id":[%s]}', b'{"user_id":{"a":%s}}'])
@pytest.mark.parametrize("text", [b'"%d":0', b'"%d"', b'"":%d', b'"\\"%d"'])
def test_a_body_of_many_names_is_refused_before_they_are_read(texts: bytes, text: bytes) -> None:
    """A megabyte of 100,000 names took 0.3 s, in which the gateway served nobody else."""
    with pytest.raises(BadBody, match="more than 2048 names and texts"):
        read_body(RankBody, Encoding.JSON, texts % b",".join(text % number for number in range(100_000)))


@pytest.mark.parametrize("query_time", [1_700_000_000, 1_700_000_000_000_000, -1])
@pytest.mark.parametrize("encoding", Encoding)
def test_a_query_time_in_another_unit_is_refused_with_the_unit(encoding: Encoding, query_time: int) -> None:
    body = {"user_id": "u", "candidates": [1], "query_time_ms": query_time}
    data = json.dumps(body).encode() if encoding is Encoding.JSON else msgpack.packb(body)
    with pytest.raises(BadBody, match=r"^query_time_ms: .* in milliseconds since the epoch"):
        read_body(RankBody, encoding, data)


def test_a_long_name_and_a_long_list_are_refused() -> None:
    name = "ab" * 500_000
    with pytest.raises(BadBody, match=r"^(ab){40}: there is no such field$"):
        read_body(RankBody, Encoding.JSON, json.dumps({name: 0}).encode())
    with pytest.raises(BadBody, match="candidates: 500000 entries, expected 1 to 16384"):
        read_body(RankBody, Encoding.JSON, json.dumps({"user_id": "u", "candidates": [None] * 500_000}).encode())


def test_both_encodings_read_the_same_fields() -> None:
    body = RETRIEVAL | {"ranking_budget_ms": 50, "request_id": "r"}
    as_json = read_body(RetrievalBody, Encoding.JSON, json.dumps(body).encode())
    assert as_json == read_body(RetrievalBody, Encoding.MESSAGEPACK, msgpack.packb(body))
    with_a_mark = b"\xef\xbb\xbf" + json.dumps(body).encode()
    assert as_json == read_body(RetrievalBody, Encoding.JSON, with_a_mark), "as programs on Windows write UTF-8"
    assert RankingResult.__name__ in document(False)["components"]["schemas"]
