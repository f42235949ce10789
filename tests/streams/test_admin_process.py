"""Admin requests in a child process: an abort there, or an outage in mid-request, does not end the caller."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
from confluent_kafka import KafkaException, TopicPartition
from confluent_kafka.admin import AdminClient

import relaygr.cluster.admin
from relaygr.cluster.admin import check_topics, create_topics
from relaygr.cluster.admin_process import AdminProcess, ask
from relaygr.cluster.topic_identity import identify_topics
from relaygr.consumer.membership import holder_of
from relaygr.kafka.clients import make_group_consumer
from relaygr.kafka.session import KafkaSession
from relaygr.kafka.settings import KafkaSettings
from relaygr.lag.monitor import LagMonitor
from relaygr.lag.settings import LagSettings
from relaygr.runtime.errors import RelayError
from relaygr.schemas.topics import Topic
from tests.waiting import PATIENCE_S
from tests.worlds.broker_proxy import BrokerProxy, broker_behind_proxy

NOBODY = KafkaSettings(bootstrap="127.0.0.1:1")
OUTAGES = 10
REQUEST_S = 1.0
# Kafka's numbers of the requests. A group is described by the request of either protocol, a topic by its metadata.
DESCRIBE_GROUPS, LIST_GROUPS, DESCRIBE_CONFIGS, METADATA = {15, 69}, {16}, {32}, {3}


def process_id(_: AdminClient) -> int:
    return os.getpid()


def refuse(_: AdminClient, text: str) -> None:
    raise RelayError(text)


def abort(_: AdminClient) -> None:
    os.write(2, b"Assertion failed: a library is at fault\n")
    os.abort()


def sleep(_: AdminClient, seconds: float) -> None:
    time.sleep(seconds)


@pytest.mark.slow
def test_calls_share_a_child_until_it_aborts_and_the_next_call_starts_another() -> None:
    with AdminProcess(NOBODY, "test") as admin:
        first = admin.call(5, process_id)
        assert first != os.getpid()
        assert admin.call(5, process_id) == first
        with pytest.raises(KafkaException, match=r"ended with -6.*a library is at fault"):
            admin.call(5, abort)
        assert admin.call(5, process_id) not in (first, os.getpid())


@pytest.mark.slow
def test_the_error_of_the_function_is_the_callers_error() -> None:
    with pytest.raises(RelayError, match="no such thing"):
        ask(NOBODY, "test", 5, refuse, "no such thing")


@pytest.mark.slow
def test_a_call_without_an_answer_ends_at_its_time_out() -> None:
    with pytest.raises(KafkaException, match=r"did not answer within 0.2 s"):
        ask(NOBODY, "test", 0.2, sleep, 600)  # Longer than a test may take.


@pytest.mark.slow
def test_closing_ends_a_call_of_another_thread() -> None:
    admin = AdminProcess(NOBODY, "test")
    admin.call(5, process_id)
    with ThreadPoolExecutor(1) as pool:
        call = pool.submit(admin.call, 60, sleep, 60)
        time.sleep(0.1)
        admin.close()
        assert isinstance(call.exception(10), KafkaException)


@pytest.mark.kafka
@pytest.mark.outage
def test_a_request_in_flight_across_each_of_ten_outages_aborts_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """librdkafka aborted 9 of 18 processes that asked for a group across an outage, and a worker in 1 of 14."""
    with broker_behind_proxy("outage") as behind:
        require_no_abort(behind.proxied.model_copy(update={"connect_timeout_s": 30}), behind.proxy, monkeypatch)


def require_no_abort(kafka: KafkaSettings, proxy: BrokerProxy, monkeypatch: pytest.MonkeyPatch) -> None:
    create_topics(kafka)
    # The first request to the coordinator makes the broker create its internal topic.
    with contextlib.closing(make_group_consumer(kafka, kafka.workers_group, "test")) as consumer:
        end_s = time.monotonic() + 60
        while True:
            try:
                consumer.committed([TopicPartition(kafka.topic(Topic.RANKING), 0)], timeout=60)
                break
            except KafkaException:
                assert time.monotonic() < end_s, "the broker has no group coordinator"
                time.sleep(0.1)
    monkeypatch.setattr(relaygr.cluster.admin, "ADMIN_TIMEOUT_S", REQUEST_S)
    monitor = LagMonitor(KafkaSession(kafka, "test"), LagSettings(request_timeout_s=REQUEST_S, record_timeout_s=0))
    # The lag is known as far as Kafka told it before the outage, so a poll may end without an error.
    polled = (RelayError, type(None))
    calls: list[tuple[set[int], Callable[[], object], type | tuple[type, ...]]] = [
        (DESCRIBE_GROUPS, lambda: holder_of(kafka, kafka.workers_group, "worker-00", REQUEST_S), type(None)),
        (LIST_GROUPS, monitor.poll, polled),
        (DESCRIBE_GROUPS, monitor.poll, polled),
        (DESCRIBE_CONFIGS, lambda: check_topics(kafka), RelayError),
        (
            METADATA,
            lambda: identify_topics(kafka, [kafka.topic(Topic.RANKING)], "test", REQUEST_S),
            KafkaException,
        ),
    ]
    with contextlib.ExitStack() as stack:
        stack.callback(monitor.stop)
        pool = stack.enter_context(ThreadPoolExecutor(1))
        for outage in range(OUTAGES):
            api_keys, call, expected = calls[outage % len(calls)]
            in_flight = proxy.hold(api_keys)
            answer = pool.submit(call)
            ends_s = time.monotonic() + PATIENCE_S
            while not in_flight.wait(0.02):
                assert time.monotonic() < ends_s, api_keys
                if answer.done():
                    # Something before the request took too long on a busy machine.
                    answer = pool.submit(call)
            proxy.cut()
            assert isinstance(answer.exception(30), expected), api_keys
            proxy.listen()
        monkeypatch.undo()
        # A connection that is lost, as a slow broker's is after `SILENCE_MS`, is no answer: it asks again.
        in_flight = proxy.hold(METADATA)
        answer = pool.submit(identify_topics, kafka, [kafka.topic(Topic.RANKING)], "test", PATIENCE_S)
        assert in_flight.wait(PATIENCE_S)
        proxy.cut()
        proxy.listen()
        assert answer.result(PATIENCE_S).cluster_id
        assert check_topics(kafka).ok
