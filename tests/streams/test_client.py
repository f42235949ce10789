"""RelayClient and AsyncRelayClient against a broker, with a worker that only echoes."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NoReturn, cast

import numpy as np
import pytest
import structlog
import structlog.testing
from confluent_kafka import TopicPartition
from prometheus_client import CollectorRegistry

from relaygr.client import (
    AsyncRelayClient,
    ClientError,
    ClientSettings,
    DeliveryReport,
    Ended,
    EventPublisher,
    LostRequest,
    MessageRefused,
    NotRunning,
    QueueFull,
    RankOutcome,
    Reason,
    RelayClient,
)
from relaygr.client.requests import RetrievalFields, ranking_request, retrieval_event
from relaygr.devbroker import BrokerChoice, LocalBroker, local_broker
from relaygr.kafka.clients import ProducerKind, make_assigned_consumer, make_producer
from relaygr.kafka.settings import KafkaSettings
from relaygr.runtime.errors import RelayError
from relaygr.schemas import codec
from relaygr.schemas.codec import EncodeError
from relaygr.schemas.headers import DEAD_LETTER_REASON, RankingHeaders, ResultHeaders
from relaygr.schemas.messages import (
    BehaviourEvent,
    Behaviours,
    History,
    HistoryVersion,
    RankingRequest,
    RankingResult,
    RetrievalEvent,
)
from relaygr.schemas.partitioner import partition_for
from relaygr.schemas.topics import Topic
from relaygr.tracing.tracer import Sampler, Tracer, TracerMetrics
from tests.echo_worker import answer_once, echo_worker, ranked, read_topic
from tests.waiting import becomes

# Enough for the first request on a busy machine; tests of deadlines take their own.
BUDGET_MS = 8_000


@pytest.fixture(scope="module")
def broker(embedded_broker: LocalBroker) -> LocalBroker:
    """The tests of whole relays use the client on a real Kafka."""
    return embedded_broker


def client(kafka: KafkaSettings, gateway_id: str = "gw-0", **settings: int | float) -> RelayClient:
    return RelayClient(kafka, gateway_id, ClientSettings.model_validate(settings), registry=CollectorRegistry())


def closed_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return cast(int, probe.getsockname()[1])


def test_a_request_is_ranked_and_reaches_the_partition_of_its_user(kafka_settings: KafkaSettings) -> None:
    with echo_worker(kafka_settings) as worker, client(kafka_settings) as gateway:
        suffix = Behaviours(np.array([7]), np.array([1]), np.array([1_700_000_000_000]))
        version = HistoryVersion(3, 100, bytes(16))
        outcome = gateway.rank("ünïcode user", [3, 1, 2], budget_ms=BUDGET_MS, suffix=suffix, history_version=version)
        assert outcome.status is Ended.RANKED
        assert outcome.result is not None and outcome.result.scores is not None
        assert outcome.result.scores.tolist() == [3.0, 1.0, 2.0]
        assert 0 < outcome.latency_us < BUDGET_MS * 1000
        (seen,), (headers,) = worker.seen, worker.headers
        assert (seen.user_id, seen.suffix, seen.history_version) == ("ünïcode user", suffix, version)
        assert seen.deadline_us - seen.sent_at_us == BUDGET_MS * 1000
        assert seen.query_time_ms == seen.sent_at_us // 1000
        reply_to = (kafka_settings.topic(Topic.RESULTS), gateway.results_partition)
        assert headers == RankingHeaders(outcome.request_id, "gw-0", *reply_to, seen.deadline_us)
        (message,) = read_topic(kafka_settings, Topic.RANKING, 1)
        key = "ünïcode user".encode()
        assert (message.key(), message.partition()) == (key, partition_for(key, kafka_settings.partitions))
        assert set(gateway.clock_offsets()) == {"echo"}


@pytest.mark.parametrize(
    "suffix",
    [
        [(7, 1, 1_700_000_000_000), (8, 2, 1_700_000_001_000)],
        Behaviours([7, 8], (1, 2), [1_700_000_000_000, 1_700_000_001_000]),  # type: ignore[arg-type]
    ],
    ids=["rows", "columns"],
)
def test_a_suffix_may_be_plain_sequences(kafka_settings: KafkaSettings, suffix: Any) -> None:
    with echo_worker(kafka_settings) as worker, client(kafka_settings) as gateway:
        for given in (suffix, []):
            assert gateway.rank("u", (3, 1), budget_ms=BUDGET_MS, suffix=given).status is Ended.RANKED
    times = np.array([1_700_000_000_000, 1_700_000_001_000])
    assert [seen.suffix for seen in worker.seen] == [
        Behaviours(np.array([7, 8]), np.array([1, 2], np.uint16), times),
        Behaviours.empty(),
    ]


def test_request_ids_name_gateway_incarnation_and_sequence_and_cannot_be_guessed(kafka_settings: KafkaSettings) -> None:
    first, second = client(kafka_settings, "gw.a"), client(kafka_settings, "gw.a")
    gateway, incarnation, sequence, token = first.new_request_id().rsplit(".", 3)
    assert (gateway, sequence) == ("gw.a", "1")
    start, second_token = first.new_request_id().rsplit(".", 1)
    assert start == f"gw.a.{incarnation}.2"
    for text in (token, second_token):
        assert len(text) == 16 and set(text) <= set("0123456789abcdef")
    assert token != second_token
    assert incarnation not in second.new_request_id()


def test_the_results_partition_is_murmur2_of_the_gateway_unless_it_is_configured(kafka_settings: KafkaSettings) -> None:
    with client(kafka_settings, "gw-7") as gateway:
        assert gateway.results_partition == partition_for(b"gw-7", kafka_settings.partitions)
    with client(kafka_settings, "gw-7", results_partition=11) as gateway:
        assert gateway.results_partition == 11
    with pytest.raises(RelayError, match=r"results_partition is 12, but .* has 12 partitions"):
        client(kafka_settings, "gw-7", results_partition=12).start()


def test_many_threads_share_one_client(kafka_settings: KafkaSettings) -> None:
    with echo_worker(kafka_settings), client(kafka_settings) as gateway:
        outcomes: list[RankOutcome] = []

        def work(thread: int) -> None:
            for number in range(20):
                outcome = gateway.rank(f"u{thread}", [thread, number], budget_ms=BUDGET_MS)
                assert outcome.result is not None and outcome.result.scores is not None
                assert outcome.result.scores.tolist() == [thread, number]
                outcomes.append(outcome)

        threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len({outcome.request_id for outcome in outcomes}) == 160
        assert gateway.statistics().ranked == 160
        assert gateway.in_flight == 0


@pytest.mark.slow
def test_without_an_answer_rank_returns_at_its_deadline_and_the_request_is_lost(kafka_settings: KafkaSettings) -> None:
    lost: list[LostRequest] = []
    gateway = RelayClient(
        kafka_settings,
        "gw-0",
        ClientSettings(result_grace_ms=100, lost_after_ms=100),
        on_lost=lost.append,
        registry=CollectorRegistry(),
    )
    with echo_worker(kafka_settings, lambda request: []), gateway:
        # The first request opens the connections; the test checks the deadline of the second. A busy broker
        # acknowledges it later than after 150 ms.
        gateway.rank("u", [1], budget_ms=2_000)
        outcome = gateway.rank("u", [1], budget_ms=1_000)
        assert (outcome.status, outcome.reason) == (Ended.TIMED_OUT, Reason.NO_ANSWER)
        assert outcome.latency_us >= 1_000_000
        assert gateway.drain(5)
        assert [request.acknowledged for request in lost] == [True, True]
        assert lost[1].request_id == outcome.request_id


def test_a_client_fails_fast_without_sending_while_its_worker_has_no_time(kafka_settings: KafkaSettings) -> None:
    with (
        echo_worker(kafka_settings) as worker,
        client(kafka_settings, fail_fast=True) as gateway,
        client(kafka_settings, "gw-1") as patient,
    ):
        assert gateway.rank("u", [1], budget_ms=BUDGET_MS).status is Ended.RANKED
        partition = partition_for(b"u", kafka_settings.partitions)
        gateway._ledger._backlogs.note(partition, "echo", time.monotonic_ns() // 1000 + 20_000_000)
        refused = gateway.rank("u", [1], budget_ms=BUDGET_MS)
        assert (refused.status, refused.result, refused.reason) == (Ended.FAILED, None, Reason.OVERLOADED)
        with pytest.raises(EncodeError, match="user_id: expected text, got int"):
            gateway.rank(cast(str, 7), [1], budget_ms=BUDGET_MS)
        assert patient.rank("u", [1], budget_ms=BUDGET_MS).status is Ended.RANKED
        assert len(worker.seen) == 2


def test_an_answer_after_the_deadline_reaches_on_late(kafka_settings: KafkaSettings) -> None:
    release, late = threading.Event(), []

    def answer(request: RankingRequest) -> list[bytes]:
        release.wait(10)
        return answer_once(request)

    gateway = RelayClient(
        kafka_settings,
        "gw-0",
        ClientSettings(result_grace_ms=20_000),
        on_late=late.append,
        registry=CollectorRegistry(),
    )
    with echo_worker(kafka_settings, answer), gateway:
        outcome = gateway.rank("u", [5], budget_ms=100)
        assert outcome.status is Ended.TIMED_OUT
        release.set()
        assert gateway.drain(15)
        assert [(o.request_id, o.status, o.late) for o in late] == [(outcome.request_id, Ended.RANKED, True)]
        assert gateway.statistics().lost == 0


def test_a_second_answer_is_dropped_and_counted(kafka_settings: KafkaSettings) -> None:
    with echo_worker(kafka_settings, lambda request: answer_once(request) * 2), client(kafka_settings) as gateway:
        assert gateway.rank("u", [1], budget_ms=BUDGET_MS).status is Ended.RANKED
        assert becomes(lambda: gateway.statistics().duplicates == 1)


def test_two_gateways_share_a_partition_and_get_their_own_answers(kafka_settings: KafkaSettings) -> None:
    with (
        echo_worker(kafka_settings),
        client(kafka_settings, "gw-a", results_partition=0) as one,
        client(kafka_settings, "gw-b", results_partition=0) as two,
    ):
        futures = [
            (number, gateway.submit_rank("u", [number], budget_ms=BUDGET_MS))
            for number, gateway in enumerate([one, two] * 10)
        ]
        for number, future in futures:
            result = future.result(BUDGET_MS / 1000).result
            assert result is not None and result.scores is not None and result.scores.tolist() == [number]
        assert becomes(lambda: one.statistics().foreign == two.statistics().foreign == 10)


def test_a_new_incarnation_does_not_read_the_old_ones_answers(kafka_settings: KafkaSettings) -> None:
    with echo_worker(kafka_settings):
        with client(kafka_settings) as before:
            for _ in range(3):
                assert before.rank("u", [1], budget_ms=BUDGET_MS).status is Ended.RANKED
        with client(kafka_settings) as after:
            assert after.rank("u", [1], budget_ms=BUDGET_MS).status is Ended.RANKED
            assert after.statistics().foreign == 0


@pytest.mark.slow
def test_an_undecodable_answer_fails_its_request_and_goes_to_dead_letters(kafka_settings: KafkaSettings) -> None:
    garbage = b"\x01\xc1"
    with echo_worker(kafka_settings, lambda request: [garbage]), client(kafka_settings) as gateway:
        outcome = gateway.rank("u", [1], budget_ms=BUDGET_MS)
        assert (outcome.status, outcome.reason) == (Ended.FAILED, Reason.UNDECODABLE)
        (letter,) = read_topic(kafka_settings, Topic.DEAD_LETTERS, 1)
        assert letter.value() == garbage
        assert dict(letter.headers() or [])[DEAD_LETTER_REASON] == b"malformed"


@pytest.mark.slow
def test_garbage_on_the_results_topic_does_not_stop_the_answers(kafka_settings: KafkaSettings) -> None:
    results = kafka_settings.topic(Topic.RESULTS)
    with echo_worker(kafka_settings) as worker, client(kafka_settings) as gateway:
        producer = make_producer(kafka_settings, ProducerKind.DURABLE, "vandal")
        theirs = [*ResultHeaders("no-such-request", "gw-0").encode()]
        other = codec.encode(ranked(RankingRequest("not-it", "u", 1, 2, 3, np.array([1]), Behaviours.empty())))
        for value, headers in (
            (b"", None),
            (b"\xff" * 100, None),
            (b"\x02\x80", theirs),
            (None, theirs),
            (other, theirs),
        ):
            producer.produce(results, partition=gateway.results_partition, value=value, headers=headers)
        assert producer.flush(5) == 0
        assert gateway.rank("u", [1], budget_ms=BUDGET_MS).status is Ended.RANKED
        assert becomes(lambda: gateway.statistics().undecodable == 5)
        assert len(worker.seen) == 1


@pytest.mark.slow
def test_a_line_of_the_log_that_cannot_be_written_costs_no_answers(kafka_settings: KafkaSettings) -> None:
    """In a program whose standard output is a pipe without a reader, or is closed, the first line ended the thread that
    reads answers.
    """

    def broken(*_: object) -> NoReturn:
        raise BrokenPipeError

    structlog.configure(processors=[broken])
    wrong = 0

    def answer(request: RankingRequest) -> list[bytes]:
        return [b"garbage"] if request.user_id == "bad" else answer_once(request)

    with echo_worker(kafka_settings, answer), client(kafka_settings) as gateway:
        for _ in range(2):
            wrong += gateway.rank("bad", [1], budget_ms=BUDGET_MS).reason is Reason.UNDECODABLE
        assert gateway.rank("u", [1], budget_ms=BUDGET_MS).status is Ended.RANKED
    assert wrong == 2


def test_many_bad_results_make_few_lines_in_the_log_of_the_program_that_has_the_client(
    kafka_settings: KafkaSettings,
) -> None:
    """Each made a line, and the time of that was taken from the answers of others."""
    with echo_worker(kafka_settings), client(kafka_settings) as gateway, structlog.testing.capture_logs() as lines:
        producer = make_producer(kafka_settings, ProducerKind.DURABLE, "vandal")
        for number in range(700):
            value = b"\x01\xc1%d" % number
            producer.produce(kafka_settings.topic(Topic.RESULTS), value, partition=gateway.results_partition)
        assert producer.flush(20) == 0
        assert gateway.rank("u", [1], budget_ms=BUDGET_MS).status is Ended.RANKED
        assert becomes(lambda: gateway.statistics().undecodable == 700), "all are counted"
    told = [line for line in lines if line["event"] == "a result could not be decoded"]
    # Again after ten seconds, if that takes so long.
    assert 1 <= len(told) < 20


def test_an_event_carries_its_impression_to_the_ranking(kafka_settings: KafkaSettings) -> None:
    reports: list[DeliveryReport] = []
    with echo_worker(kafka_settings) as worker, client(kafka_settings) as gateway:
        event = gateway.publish_retrieval(
            "u",
            ranking_budget_ms=50,
            expected_ranking_in_ms=120,
            expected_candidates=10,
            expected_suffix=2,
            on_delivery=reports.append,
        )
        gateway.rank(
            "u",
            [1],
            budget_ms=BUDGET_MS,
            request_id=event.request_id,
            query_time_ms=event.retrieval_at_us // 1000,
        )
        assert becomes(lambda: bool(reports))
    (message,) = read_topic(kafka_settings, Topic.RETRIEVAL, 1)
    assert codec.decode(RetrievalEvent, message.value()) == event
    assert event.expected_ranking_at_us - event.retrieval_at_us == 120_000
    assert (message.key(), message.partition()) == (b"u", partition_for(b"u", kafka_settings.partitions))
    assert (worker.seen[0].request_id, worker.seen[0].query_time_ms) == (
        event.request_id,
        event.retrieval_at_us // 1000,
    )
    (report,) = reports
    assert (report.delivered, report.partition, report.offset) == (True, message.partition(), message.offset())


def test_a_history_is_published_and_deleted_under_its_users_key(kafka_settings: KafkaSettings) -> None:
    history = History("u", 4, np.array([9]), Behaviours(np.array([1, 2]), np.array([0, 1]), np.array([10, 20])))
    with client(kafka_settings) as gateway:
        gateway.publish_history(history)
        gateway.tombstone("u")
    snapshot, tombstone = read_topic(kafka_settings, Topic.HISTORY, 2)
    assert codec.decode(History, snapshot.value()) == history
    assert (tombstone.key(), tombstone.value()) == (b"u", None)
    assert snapshot.partition() == tombstone.partition() == partition_for(b"u", kafka_settings.partitions)


def test_misuse_raises_before_anything_is_sent(kafka_settings: KafkaSettings) -> None:
    with client(kafka_settings, max_in_flight=1, result_grace_ms=60_000) as gateway:
        with pytest.raises(EncodeError, match="candidates"):
            gateway.rank("u", [], budget_ms=10)
        with pytest.raises(EncodeError, match="user_id"):
            gateway.rank("", [1], budget_ms=10)
        with pytest.raises(EncodeError, match=r"suffix\.items: values of <U4 do not all fit"):
            gateway.rank("u", [1], budget_ms=10, suffix=Behaviours(["item"], [1], [1]))  # type: ignore[arg-type]
        for wrong in ([7, 8], [(7, 1)], 7):
            with pytest.raises(ValueError, match=r"suffix: give Behaviours, or \(item, action, timestamp_ms\)"):
                gateway.rank("u", [1], budget_ms=10, suffix=wrong)  # type: ignore[arg-type]
        with pytest.raises(EncodeError, match="user_id"):
            gateway.tombstone("")
        with pytest.raises(ValueError, match="budget_ms is 0"):
            gateway.rank("u", [1], budget_ms=0)
        assert (gateway.in_flight, gateway.statistics().submitted) == (0, 0)
        first = gateway.submit_rank("u", [1], budget_ms=10)
        with pytest.raises(QueueFull):
            gateway.rank("u", [1], budget_ms=10)
        assert first.result(10).status is Ended.TIMED_OUT


@pytest.mark.parametrize("unit", ["seconds", "microseconds"])
def test_behaviours_with_times_in_another_unit_are_refused_wherever_they_are_given(
    kafka_settings: KafkaSettings, unit: str
) -> None:
    wrong = {"seconds": 1_700_000_000, "microseconds": 1_700_000_000_000_000}[unit]
    told = f"timestamps_ms: {wrong} is a time in {unit}: give it in milliseconds"
    behaviours = Behaviours.of([(7, 1, wrong)])
    history = History("u", 1, np.empty(0, "<i8"), behaviours)
    with client(kafka_settings) as gateway:
        with pytest.raises(EncodeError, match=f"suffix.{told}"):
            gateway.rank("u", [1], budget_ms=BUDGET_MS, suffix=behaviours)
        with pytest.raises(EncodeError, match=f"history.behaviours.{told}"):
            gateway.rank("u", [1], budget_ms=BUDGET_MS, history=history)
        with pytest.raises(EncodeError, match=f"history.behaviours.{told}"):
            gateway.publish_retrieval(
                "u",
                ranking_budget_ms=50,
                expected_ranking_in_ms=9,
                expected_candidates=1,
                expected_suffix=0,
                history=history,
            )
        with pytest.raises(EncodeError, match=f"behaviours.{told}"):
            gateway.publish_history(history)
        with pytest.raises(EncodeError, match=f"behaviours.{told}"):
            gateway.publish_behaviours(BehaviourEvent("u", behaviours))
        assert gateway.statistics().submitted == 0


def test_a_misspelt_or_missing_argument_is_named(kafka_settings: KafkaSettings) -> None:
    """A misspelt argument used to be ignored: a request with a misspelt `history_version` ran on another history."""
    with client(kafka_settings) as gateway:
        with pytest.raises(TypeError, match="no argument 'history_verison'"):
            gateway.rank("u", [1], budget_ms=10, history_verison=None)  # type: ignore[call-arg]
        with pytest.raises(TypeError, match="'budget_ms' is missing"):
            gateway.rank("u", [1])  # type: ignore[call-arg]
        with pytest.raises(TypeError, match="'expected_suffix' is missing"):
            gateway.publish_retrieval(  # type: ignore[call-arg]
                "u", ranking_budget_ms=50, expected_ranking_in_ms=50, expected_candidates=1
            )
        assert gateway.statistics().submitted == 0


@pytest.mark.parametrize("kind", [np.int16, np.int32, np.int64])
def test_times_may_be_numpy_integers_of_any_size(kind: type[np.signedinteger[Any]]) -> None:
    """Those of few bits overflowed in microseconds: an error in numpy's words, or a deadline in the past."""
    now_us = 1_790_000_000_000_000
    event = retrieval_event(
        "id", "u", now_us,
        {
            "ranking_budget_ms": cast(int, kind(50)), "expected_ranking_in_ms": cast(int, kind(3_000)),
            "expected_candidates": cast(int, kind(1)), "expected_suffix": cast(int, kind(0)),
        },
    )  # fmt: skip
    assert codec.decode(RetrievalEvent, codec.encode(event)).expected_ranking_at_us == now_us + 3_000_000
    request = ranking_request("id", "u", [1], now_us, {"budget_ms": cast(float, kind(50))})
    assert codec.decode(RankingRequest, codec.encode(request)).deadline_us == now_us + 50_000


@pytest.mark.parametrize(
    ("lead_ms", "said"),
    [(-5, "-5 is outside 0 to 600000"), (150_000_000, "outside 0 to 600000"), (1.5, "a whole number, got float")],
)
def test_a_lead_time_that_cannot_be_meant_is_refused_by_the_name_of_its_argument(lead_ms: Any, said: str) -> None:
    fields: RetrievalFields = {
        "ranking_budget_ms": 50, "expected_ranking_in_ms": lead_ms, "expected_candidates": 1, "expected_suffix": 0,
    }  # fmt: skip
    with pytest.raises(EncodeError, match=f"^expected_ranking_in_ms: .*{said}"):
        retrieval_event("id", "u", 1_790_000_000_000_000, fields)


def test_a_request_id_is_used_once(kafka_settings: KafkaSettings) -> None:
    with echo_worker(kafka_settings), client(kafka_settings) as gateway:
        gateway.rank("u", [1], budget_ms=BUDGET_MS, request_id="mine")
        with pytest.raises(MessageRefused, match="mine was used already"):
            gateway.rank("u", [1], budget_ms=BUDGET_MS, request_id="mine")


def test_outside_its_life_a_client_takes_nothing(kafka_settings: KafkaSettings) -> None:
    gateway = client(kafka_settings)
    with pytest.raises(NotRunning, match="not started"):
        gateway.rank("u", [1], budget_ms=10)
    gateway.start()
    with pytest.raises(NotRunning, match="running"):
        gateway.start()
    gateway.close()
    gateway.close()
    with pytest.raises(NotRunning, match="closed"):
        gateway.tombstone("u")


@pytest.mark.parametrize("call", ["rank", "close", "drain"])
def test_what_waits_is_refused_inside_a_callback_instead_of_waiting_for_itself(
    kafka_settings: KafkaSettings, call: str
) -> None:
    problems: list[BaseException] = []
    with echo_worker(kafka_settings), client(kafka_settings) as gateway:
        calls: dict[str, Callable[[], object]] = {
            "rank": lambda: gateway.rank("u", [2], budget_ms=BUDGET_MS),
            "close": gateway.close,
            "drain": lambda: gateway.drain(1.0),
        }

        def wait_for_itself(_done: object) -> None:
            try:
                calls[call]()
            except ClientError as error:
                problems.append(error)

        gateway.submit_rank("u", [1], budget_ms=BUDGET_MS).add_done_callback(wait_for_itself)
        assert becomes(lambda: bool(problems))
        assert gateway.rank("u", [3], budget_ms=BUDGET_MS).status is Ended.RANKED


@contextmanager
def on_signal(handler: Callable[[], object], once: Callable[[], bool]) -> Iterator[None]:
    """Runs `handler` in the main thread, between two steps of what it does, as soon as `once` is true."""

    def send() -> None:
        if becomes(once):
            os.kill(os.getpid(), signal.SIGUSR1)

    sender, before = threading.Thread(target=send), signal.signal(signal.SIGUSR1, lambda *_: handler())
    sender.start()
    try:
        yield
    finally:
        sender.join()
        signal.signal(signal.SIGUSR1, before)


def test_a_signal_handler_may_close_a_client_that_is_being_closed(kafka_settings: KafkaSettings) -> None:
    """What stops a service may signal it twice: the second close waited for ever for the first."""
    answered = threading.Event()
    gateway = client(kafka_settings, close_timeout_s=60)

    def handler() -> None:
        gateway.close()
        answered.set()

    with echo_worker(kafka_settings, lambda request: answer_once(request) if answered.wait(60) else []):
        gateway.start()
        waiting = gateway.submit_rank("u", [1], budget_ms=60_000)
        with on_signal(handler, lambda: gateway._state == "closing"):
            gateway.close()
    assert waiting.result(0).status is Ended.RANKED


def test_a_close_that_is_interrupted_leaves_nothing_open(kafka_settings: KafkaSettings) -> None:
    """A second Ctrl-C, while `with` closes the client: no later call closed it."""

    def handler() -> None:
        raise KeyboardInterrupt

    gateway = client(kafka_settings)
    gateway.start()
    waiting = gateway.submit_rank("u", [1], budget_ms=60_000)
    with on_signal(handler, lambda: gateway._state == "closing"), pytest.raises(KeyboardInterrupt):
        gateway.close(60)
    gateway.close()
    assert waiting.result(0).reason is Reason.CLOSED
    assert all("gw-0" not in thread.name for thread in threading.enumerate())


def test_a_client_that_a_signal_handler_closes_while_it_starts_does_not_run(
    kafka_settings: KafkaSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    gateway = client(kafka_settings)
    connect = gateway._link.connect
    monkeypatch.setattr(gateway._link, "connect", lambda: (connect(), gateway.close()))
    with pytest.raises(NotRunning, match="closed while it started"):
        gateway.start()
    with pytest.raises(NotRunning, match="closed"):
        gateway.tombstone("u")
    assert all("gw-0" not in thread.name for thread in threading.enumerate())


def test_no_thread_is_left_behind(kafka_settings: KafkaSettings) -> None:
    with client(kafka_settings, "gw-left"):
        assert [t for t in threading.enumerate() if "gw-left" in t.name] != []
    assert [t for t in threading.enumerate() if "gw-left" in t.name] == []


def test_a_missing_topic_says_which_command_mends_it(broker: LocalBroker) -> None:
    kafka = broker.settings(KafkaSettings(topic_prefix="nobody-made-these"))
    with pytest.raises(RelayError, match=r"nobody-made-these\.\w+ is missing: .*relaygr topics create"):
        client(kafka).start()


@pytest.mark.slow
def test_a_broker_that_is_not_there_is_said_with_its_address_and_the_client_can_be_closed() -> None:
    address = f"127.0.0.1:{closed_port()}"
    gateway = client(KafkaSettings(bootstrap=address, connect_timeout_s=0.5))
    with pytest.raises(RelayError, match=address):
        gateway.start()
    gateway.close()


def test_a_gateway_id_of_strange_letters_is_refused() -> None:
    with pytest.raises(ValueError, match="gateway id 'a b'"):
        client(KafkaSettings(), "a b")


@pytest.mark.asyncio
async def test_from_asyncio_many_requests_are_awaited_at_once(kafka_settings: KafkaSettings) -> None:
    with echo_worker(kafka_settings):
        async with AsyncRelayClient(kafka_settings, "gw-aio", registry=CollectorRegistry()) as gateway:
            outcomes = await asyncio.gather(
                *(gateway.rank(f"u{number}", [number], budget_ms=BUDGET_MS) for number in range(50))
            )
            assert [cast(RankingResult, outcome.result).request_id for outcome in outcomes] == [
                outcome.request_id for outcome in outcomes
            ]
            assert gateway.statistics().ranked == 50


@pytest.mark.slow
@pytest.mark.asyncio
async def test_in_asyncio_callbacks_run_in_the_loop(kafka_settings: KafkaSettings) -> None:
    loop_thread, threads = threading.get_ident(), []
    lost = asyncio.Event()

    def on_lost(_request: LostRequest) -> None:
        threads.append(threading.get_ident())
        lost.set()

    def on_delivery(_report: DeliveryReport) -> None:
        threads.append(threading.get_ident())

    settings = ClientSettings(result_grace_ms=50, lost_after_ms=50)
    async with AsyncRelayClient(
        kafka_settings, "gw-aio", settings, on_lost=on_lost, registry=CollectorRegistry()
    ) as gateway:
        gateway.publish_retrieval(
            "u",
            ranking_budget_ms=50,
            expected_ranking_in_ms=100,
            expected_candidates=1,
            expected_suffix=0,
            on_delivery=on_delivery,
        )
        assert (await gateway.rank("u", [1], budget_ms=20)).status is Ended.TIMED_OUT
        await asyncio.wait_for(lost.wait(), 10)
        assert (await gateway.tombstone("u")).delivered
    assert set(threads) == {loop_thread} and len(threads) == 2


@pytest.mark.asyncio
async def test_cancelling_an_await_leaves_the_client_whole(kafka_settings: KafkaSettings) -> None:
    release = threading.Event()

    def answer(request: RankingRequest) -> list[bytes]:
        release.wait(10)
        return answer_once(request)

    with echo_worker(kafka_settings, answer):
        async with AsyncRelayClient(kafka_settings, "gw-aio", registry=CollectorRegistry()) as gateway:
            waiting = asyncio.create_task(gateway.rank("u", [1], budget_ms=BUDGET_MS))
            await asyncio.sleep(0.05)
            waiting.cancel()
            release.set()
            with pytest.raises(asyncio.CancelledError):
                await waiting
            assert (await gateway.rank("u", [2], budget_ms=BUDGET_MS)).status is Ended.RANKED
            assert gateway.statistics().ranked == 2


@pytest.mark.asyncio
async def test_a_start_that_is_cancelled_leaves_no_client_behind(
    kafka_settings: KafkaSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such as by `asyncio.timeout` around `async with`: the start went on, and nobody could close the client."""
    gateway = AsyncRelayClient(kafka_settings, "gw-left", registry=CollectorRegistry())
    link, connecting, go = gateway._client._link, threading.Event(), threading.Event()
    connect = link.connect

    def slow_connect() -> None:
        connecting.set()
        go.wait(60)
        connect()

    monkeypatch.setattr(link, "connect", slow_connect)
    starting = asyncio.create_task(gateway.start())
    assert await asyncio.to_thread(connecting.wait, 60)
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    go.set()
    assert await asyncio.to_thread(becomes, lambda: gateway._client._state == "closed")
    with pytest.raises(NotRunning, match="closed"):
        await gateway.rank("u", [1], budget_ms=BUDGET_MS)


def test_a_callback_that_nothing_would_await_is_refused() -> None:
    """A coroutine function as a callback was called, and its coroutine dropped."""

    async def on_late(_outcome: RankOutcome) -> None: ...

    late = cast(Callable[[RankOutcome], None], on_late)
    with pytest.raises(TypeError, match=r"on_late is a coroutine function, and callbacks are not awaited"):
        AsyncRelayClient(KafkaSettings(), "gw-aio", on_late=late, registry=CollectorRegistry())
    gateway = AsyncRelayClient(KafkaSettings(), "gw-aio", registry=CollectorRegistry())
    with pytest.raises(TypeError, match="is a coroutine function"):
        gateway.publish_retrieval(
            "u", ranking_budget_ms=50, expected_ranking_in_ms=9, expected_candidates=1, expected_suffix=0,
            on_delivery=partial(cast(Any, on_late)),
        )  # fmt: skip


def test_the_end_of_the_partition_is_known_before_start_returns(kafka_settings: KafkaSettings) -> None:
    """An answer that is written right after `start` is read, although no fetch has been sent by then."""
    with client(kafka_settings) as gateway:
        producer = make_producer(kafka_settings, ProducerKind.DURABLE, "early")
        place = TopicPartition(kafka_settings.topic(Topic.RESULTS), gateway.results_partition)
        producer.produce(place.topic, partition=place.partition, value=b"x")
        assert producer.flush(5) == 0
        assert becomes(lambda: gateway.statistics().undecodable == 1)
    reader = make_assigned_consumer(kafka_settings, "reader")
    assert reader.get_watermark_offsets(place, timeout=5) == (0, 1)
    reader.close()


@pytest.mark.slow
def test_a_broker_that_goes_away_makes_time_outs_and_no_exception() -> None:
    registry = CollectorRegistry()
    with local_broker(BrokerChoice.EMBEDDED) as broker:
        kafka = broker.settings(KafkaSettings(partitions=4))
        broker.create_topics(kafka)
        settings = ClientSettings(result_grace_ms=100, lost_after_ms=100, close_timeout_s=0.5)
        tracer = Tracer(Sampler(2**64), 100, 100, TracerMetrics(registry))
        gateway = RelayClient(kafka, "gw-0", settings, registry=registry, tracer=tracer)
        gateway.start()
        with echo_worker(kafka):
            assert gateway.rank("u", [1], budget_ms=BUDGET_MS).status is Ended.RANKED
    assert becomes(lambda: registry.get_sample_value("relaygr_gateway_broker_reachable") == 0)
    outcome = gateway.rank("u", [1], budget_ms=50)
    assert (outcome.status, outcome.reason) == (Ended.TIMED_OUT, Reason.NOT_ACKNOWLEDGED)
    assert becomes(lambda: gateway.statistics().lost == 1)
    reports: list[DeliveryReport] = []
    gateway.tombstone("u", reports.append)
    patient = gateway.submit_rank("u", [1], budget_ms=60_000, request_id="patient")
    assert becomes(lambda: gateway.statistics().retries >= 1), "the delivery failed long before the deadline"
    assert not patient.done()
    spans = [span.attributes["messaging.message.conversation_id"] for span in tracer.take_batch()]
    assert spans and "patient" not in spans, "it is being sent still"
    gateway.close()
    assert registry.get_sample_value("relaygr_gateway_broker_reachable") == 1, "a client that is closed misses none"
    assert patient.result(0).reason is Reason.CLOSED
    assert [report.delivered for report in reports] == [False], "the caller gets an error when the client closes"
    assert [thread for thread in threading.enumerate() if "gw-0" in thread.name] == []


@pytest.mark.parametrize("kind", [RelayClient, EventPublisher])
def test_an_address_instead_of_settings_is_refused_with_what_to_give(kind: Callable[..., Any]) -> None:
    with pytest.raises(TypeError, match=r"'kafka-1:9092': give settings, such as load_settings\(bootstrap="):
        kind("kafka-1:9092", "gw-0")
