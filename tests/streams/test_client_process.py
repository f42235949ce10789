"""A client in a forked process, in a second event loop, and with green threads."""

from __future__ import annotations

import asyncio
import os
import pickle
import subprocess
import sys
import threading
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from prometheus_client import CollectorRegistry

from relaygr.client import AsyncRelayClient, ClientSettings, Ended, LostRequest, RelayClient
from relaygr.devbroker import LocalBroker
from relaygr.kafka.settings import KafkaSettings
from relaygr.runtime.errors import RelayError
from relaygr.schemas.messages import Behaviours, History
from tests.echo_worker import echo_worker

BUDGET_MS = 8_000

_BEGIN = """
import gc, os, sys
from relaygr.client import EventPublisher, NotRunning, RelayClient
from relaygr.kafka.settings import KafkaSettings

kafka = KafkaSettings.model_validate_json(sys.argv[1])

def in_child(work):
    sys.stdout.flush()
    child = os.fork()
    if child:
        _, status = os.waitpid(child, 0)
        print("child", status)
        return
    work()
    sys.exit()  # With the clean-up of an interpreter that ends.

def refusal(call):
    try:
        return f"no error: {call()}"
    except NotRunning as error:
        return f"start one: {'each process, after the fork' in str(error)}"

def ranked(client):
    return client.rank("ann", [1, 2], budget_ms=8_000).status
"""
RELAY_CLIENT = """
client = RelayClient(kafka, "gw-fork")
client.start()

def work():
    fields = {"ranking_budget_ms": 50, "expected_ranking_in_ms": 5, "expected_candidates": 1, "expected_suffix": 0}
    for call in (
        lambda: client.rank("ann", [1], budget_ms=50),
        lambda: client.submit_rank("ann", [1], budget_ms=50),
        lambda: client.publish_retrieval("ann", **fields),
        lambda: client.tombstone("ann"),
        lambda: client.drain(1),
        lambda: client.statistics(),
        lambda: client.start(),
    ):
        print(refusal(call))
    client.close()
    with RelayClient(kafka, "gw-child") as own:
        print("in the child", ranked(own))

in_child(work)
print("in the parent", ranked(client))
client.close()
"""
PRELOADED = """
prepared = RelayClient(kafka, "gw-fork")

def work():
    with prepared:
        print("in the child", ranked(prepared))

in_child(work)
"""
PUBLISHER = """
publisher = EventPublisher(kafka, "publisher")
publisher.start()

def work():
    global publisher
    print(refusal(lambda: publisher.tombstone("ann")), publisher.close(1))
    del publisher
    gc.collect()

in_child(work)
publisher.tombstone("ann")
print("left", publisher.close(30))
"""

FORGOTTEN = """
publisher = EventPublisher(kafka, "publisher")
publisher.start()
publisher.tombstone("ann")
"""
AT_EXIT = """
import asyncio, atexit
from relaygr.client import AsyncRelayClient

client = AsyncRelayClient(kafka, "gw-exit")

def close():
    asyncio.run(client.close())
    print("closed", client.in_flight)

asyncio.run(client.start())
atexit.register(close)
"""


@pytest.fixture(scope="module")
def broker(any_broker: LocalBroker) -> LocalBroker:
    """A fork does not depend on the broker."""
    return any_broker


def run(program: str, kafka: KafkaSettings) -> list[str]:
    """The lines that a program of its own process prints. One that hangs or crashes fails the test."""
    given = kafka.model_dump_json(include=set(KafkaSettings.model_fields) - {"security"})
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", _BEGIN + program, given],
        capture_output=True, text=True, timeout=90, check=True,
    )  # fmt: skip
    return done.stdout.splitlines()


@pytest.mark.slow
def test_a_client_that_was_started_before_a_fork_says_so_in_the_child(kafka_settings: KafkaSettings) -> None:
    with echo_worker(kafka_settings):
        lines = run(RELAY_CLIENT, kafka_settings)
    assert lines == [*["start one: True"] * 7, "in the child ranked", "child 0", "in the parent ranked"]


@pytest.mark.slow
def test_a_client_that_is_started_after_a_fork_works(kafka_settings: KafkaSettings) -> None:
    with echo_worker(kafka_settings):
        assert run(PRELOADED, kafka_settings) == ["in the child ranked", "child 0"]


@pytest.mark.slow
def test_a_publisher_that_was_started_before_a_fork_says_so_in_the_child(kafka_settings: KafkaSettings) -> None:
    assert run(PUBLISHER, kafka_settings) == ["start one: True 0", "child 0", "left 0"]


@pytest.mark.slow
def test_messages_that_a_program_does_not_wait_for_are_named_when_it_ends(kafka_settings: KafkaSettings) -> None:
    """A program that published histories and ended without `close` lost the last of them without a word."""
    (line,) = run(FORGOTTEN, kafka_settings)
    assert "published messages may be lost: call close() before the program ends" in line


@pytest.mark.slow
def test_an_asynchronous_client_may_be_closed_when_the_interpreter_exits(kafka_settings: KafkaSettings) -> None:
    """It was left open, with `cannot schedule new futures after interpreter shutdown`."""
    assert run(AT_EXIT, kafka_settings) == ["closed 0"]


def test_a_client_may_be_used_in_one_event_loop_after_the_other(kafka_settings: KafkaSettings) -> None:
    lost_in: list[asyncio.AbstractEventLoop] = []
    lost = threading.Event()

    def on_lost(_: LostRequest) -> None:
        lost_in.append(asyncio.get_running_loop())
        lost.set()

    settings = ClientSettings(result_grace_ms=0, lost_after_ms=0)
    gateway = AsyncRelayClient(kafka_settings, "gw-aio", settings, on_lost=on_lost, registry=CollectorRegistry())

    async def lose() -> asyncio.AbstractEventLoop:
        await gateway.rank("ann", [1], budget_ms=1)
        assert await asyncio.to_thread(lost.wait, 30)
        return asyncio.get_running_loop()

    history = History("ann", 1, np.array([], np.int64), Behaviours([7], [1], [1_700_000_000_000]))  # type: ignore[arg-type]
    asyncio.run(gateway.start())
    assert asyncio.run(gateway.publish_history(history)).delivered
    assert asyncio.run(gateway.tombstone("ann")).delivered
    used = asyncio.run(lose())
    with echo_worker(kafka_settings):
        outcome = asyncio.run(gateway.rank("ann", [1], budget_ms=BUDGET_MS))
    asyncio.run(gateway.close())
    assert outcome.status is Ended.RANKED
    assert lost_in == [used]


def test_a_delivery_is_reported_in_the_loop_and_the_context_of_its_publisher(monkeypatch: pytest.MonkeyPatch) -> None:
    """It was the loop of the latest call, in whose thread a future of another loop wakes nobody."""
    gateway = AsyncRelayClient(KafkaSettings(), "gw-aio", registry=CollectorRegistry())
    caller: ContextVar[str] = ContextVar("caller", default="nobody")
    reports: list[Any] = []
    monkeypatch.setattr(gateway._client, "publish_retrieval", lambda _, on_delivery, **__: reports.append(on_delivery))
    found: list[object] = []

    async def publish(name: str) -> asyncio.AbstractEventLoop:
        caller.set(name)
        gateway.publish_retrieval(
            "ann", ranking_budget_ms=50, expected_ranking_in_ms=5, expected_candidates=1, expected_suffix=0,
            on_delivery=lambda report: found.extend((report, caller.get(), asyncio.get_running_loop())),
        )  # fmt: skip
        return asyncio.get_running_loop()

    async def report_first() -> None:
        await asyncio.to_thread(reports[0], "delivered")
        await asyncio.sleep(0)

    with asyncio.Runner() as first, asyncio.Runner() as second:
        loop = first.run(publish("first"))
        second.run(publish("second"))
        first.run(report_first())
    assert found == ["delivered", "first", loop]


def test_a_cancelled_publish_is_delivered(kafka_settings: KafkaSettings) -> None:
    async def cancel() -> bool:
        async with AsyncRelayClient(kafka_settings, "gw-aio", registry=CollectorRegistry()) as gateway:
            publishing = asyncio.create_task(gateway.tombstone("ann"))
            await asyncio.sleep(0)
            publishing.cancel()
            with pytest.raises(asyncio.CancelledError):
                await publishing
            return (await gateway.tombstone("bob")).delivered

    assert asyncio.run(cancel())


@pytest.mark.parametrize("kind", [RelayClient, AsyncRelayClient])
def test_a_client_that_is_sent_to_another_process_says_what_to_send(kind: type[RelayClient | AsyncRelayClient]) -> None:
    """Pickle said "cannot pickle '_thread.lock' object"."""
    kafka, settings = KafkaSettings(bootstrap="127.0.0.1:1"), ClientSettings()
    with pytest.raises(TypeError, match="send its settings, and make a client there"):
        pickle.dumps(kind(kafka, "gw-sent", settings, registry=CollectorRegistry()))
    assert pickle.loads(pickle.dumps((kafka, settings))) == (kafka, settings)


def test_green_threads_are_refused_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """gevent and eventlet put functions of their own into the module `threading`."""
    kafka = KafkaSettings(bootstrap="127.0.0.1:1")
    with monkeypatch.context() as patched:
        real = threading.get_ident
        patched.setattr(threading, "get_ident", lambda: real())
        with pytest.raises(RelayError, match=r"green threads.*use real threads"):
            RelayClient(kafka, "gw-green", registry=CollectorRegistry()).start()
        with pytest.raises(RelayError, match="green threads"):
            asyncio.run(AsyncRelayClient(kafka, "gw-green", registry=CollectorRegistry()).start())


@pytest.mark.parametrize("made", ["RelayClient(KafkaSettings(), 'g')", "EventPublisher(KafkaSettings(), 'g')"])
@pytest.mark.parametrize("variable", ["PROMETHEUS_MULTIPROC_DIR", "prometheus_multiproc_dir"])
def test_a_missing_folder_of_metrics_is_named_with_its_variable(tmp_path: Path, variable: str, made: str) -> None:
    """The library says "No such file or directory" of a file that nobody knows."""
    program = f"from relaygr.client import *; from relaygr.kafka.settings import KafkaSettings; {made}"
    missing = tmp_path / "metrics"
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=os.environ | {variable: str(missing)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert f"RelayError: {variable} is {missing}, which is no folder: make the folder" in done.stderr
