"""A worker whose standard output and error nobody reads."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from relaygr.client import Ended
from relaygr.devbroker import LocalBroker
from relaygr.processes import CommandProcess
from tests.waiting import until
from tests.worlds.relay import Relay, candidates_of, new_user, own_topics, reading

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def broker(embedded_broker: LocalBroker) -> LocalBroker:
    """A log that nobody reads does not depend on the broker."""
    return embedded_broker


@pytest.fixture
def relay(broker: LocalBroker, model: Path, tmp_path: Path) -> Iterator[Relay]:
    with own_topics(broker) as kafka, Relay(kafka, tmp_path, model) as relay:
        yield relay


@contextlib.contextmanager
def full_pipe(path: Path) -> Iterator[None]:
    """A named pipe without room for a byte."""
    os.mkfifo(path)
    ends = [os.open(path, flags | os.O_NONBLOCK) for flags in (os.O_RDONLY, os.O_WRONLY)]
    with contextlib.suppress(BlockingIOError):
        while True:
            os.write(ends[1], bytes(4096))
    with contextlib.suppress(BlockingIOError):
        while True:
            os.write(ends[1], b"\0")
    yield
    for end in ends:
        os.close(end)


def test_a_worker_starts_ranks_joins_again_and_stops_though_nobody_reads_its_log(relay: Relay) -> None:
    def owned(worker: CommandProcess) -> float:
        return reading(worker).total("relaygr_consumer_owned_partitions")

    with full_pipe(relay.folder / "worker-00.log"), relay.client() as client:
        unread = relay.start_worker("worker-00")
        relay.await_ready(unread)
        other = relay.start_worker("worker-01")
        relay.await_ready(other)
        until(lambda: owned(unread) == owned(other) == relay.kafka.partitions / 2, "both own partitions")
        for _ in range(20):
            assert client.rank(new_user(), candidates_of(), budget_ms=20_000).status is Ended.RANKED
        assert relay.stop(unread) == 0
