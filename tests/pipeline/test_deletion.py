"""A tombstone deletes a user everywhere: no file of any worker and no page of a tier keeps a byte of the user."""

from __future__ import annotations

import json
import re
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from relaygr.client import Ended, RelayClient
from relaygr.devbroker import LocalBroker
from relaygr.processes import CommandProcess
from relaygr.schemas.messages import Behaviours, History, RankingResult
from relaygr.schemas.messages import Path as RankPath
from relaygr.schemas.partitioner import partition_for
from tests.waiting import until
from tests.worlds.disk import fill
from tests.worlds.relay import (
    PARTITIONS,
    Relay,
    candidates_of,
    history_of,
    new_user,
    own_topics,
    reading,
)

pytestmark = pytest.mark.slow

LENGTH = 300
MOVED_S, ERASE_WITHIN_S = 1.0, 2.0


class User:
    """A user with bytes that nobody else has."""

    def __init__(self, partitions: range) -> None:
        self.user_id = next(
            user for _ in iter(int, 1) if partition_for((user := new_user()).encode(), PARTITIONS) in partitions
        )
        random = np.random.default_rng(abs(hash(self.user_id)))
        items = random.integers(2**61, 2**62, LENGTH)
        items[::2] = random.integers(0, 500, LENGTH // 2)  # In the vocabulary: K,V that differ.
        times = 1_700_000_000_000 + np.cumsum(random.integers(1, 2**30, LENGTH))
        behaviours = Behaviours(items.astype("<i8"), np.ones(LENGTH, "<u2"), times.astype("<i8"))
        self.history = History(self.user_id, 1, np.array([3], "<i8"), behaviours)
        self.marks = [self.user_id.encode(), items[1::2].tobytes()[:8], times.astype("<i8").tobytes()[-16:]]
        self.pages: list[bytes] = []
        """The K,V of the user's whole pages."""


def files_with(folder: Path, marks: list[bytes]) -> list[str]:
    """Names of the workers' files that hold one of the byte strings."""
    found = []
    for path in sorted(folder.rglob("*")):
        try:
            content = path.read_bytes() if path.is_file() else b""
        except FileNotFoundError:
            continue  # Deleted meanwhile.
        if any(mark in content for mark in marks):
            found.append(str(path.relative_to(folder)))
    return found


def dram_pages(folder: Path, worker_id: str) -> set[bytes]:
    """The content of the DRAM tier's pages in use."""
    [path] = (path for path in folder.rglob("*") if worker_id in path.parts and re.match(r"dram-\d+x\d+-", path.name))
    page_bytes = int(path.name.split("x")[1].split("-")[0])
    content = path.read_bytes()
    pages = (content[start : start + page_bytes] for start in range(0, len(content), page_bytes))
    return {page for page in pages if page[0:64].strip(b"\0") and page[-64:].strip(b"\0")}


def memory_holds(worker: CommandProcess, pages: list[bytes]) -> bool:
    """Whether one of the pages is in the private memory of the process. On the CPU, the HBM tier is there."""
    process = Path("/proc") / str(worker.process.pid)
    with (process / "mem").open("rb", buffering=0) as memory:
        for line in (process / "maps").read_text().splitlines():
            place, rights, _, _, inode, *_ = line.split()
            if not rights.startswith("rw") or inode != "0" or "[v" in line:
                continue
            start, end = (int(part, 16) for part in place.split("-"))
            memory.seek(start)
            try:
                content = memory.read(end - start)
            except OSError:
                continue
            if any(page in content for page in pages):
                return True
    return False


@pytest.fixture(scope="module")
def broker(embedded_broker: LocalBroker) -> LocalBroker:
    """Deletion does not depend on the broker."""
    return embedded_broker


@pytest.fixture
def relay(broker: LocalBroker, model: Path, tmp_path: Path) -> Iterator[Relay]:
    with (
        own_topics(broker) as kafka,
        Relay(kafka, tmp_path / "relay", model, moved_prefix_s=MOVED_S, erase_within_s=ERASE_WITHIN_S) as relay,
    ):
        yield relay


@pytest.fixture
def client(relay: Relay) -> Iterator[RelayClient]:
    with relay.client() as client:
        yield client


def readiness(worker: CommandProcess) -> dict[str, str]:
    """The details of `/readyz`, by check."""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{worker.port}/readyz", timeout=5) as answer:
            body = answer.read()
    except urllib.error.HTTPError as error:
        body = error.read()
    return {check["name"]: check["detail"] for check in json.loads(body)["checks"]}


def rank(client: RelayClient, user: User) -> None:
    outcome = client.rank(user.user_id, candidates_of(), history_version=user.history.version(), budget_ms=20_000)
    assert outcome.status is Ended.RANKED, outcome


def owned(worker: CommandProcess) -> float:
    return reading(worker).total("relaygr_consumer_owned_partitions")


def test_after_the_stated_time_no_byte_of_a_deleted_user_is_left(relay: Relay, client: RelayClient) -> None:
    """One user's partition stays with its worker, the other's moves: its former owner does not read the tombstone."""
    first = relay.start_worker("worker-00")
    relay.await_ready(first)
    stays, moves, kept = User(range(6)), User(range(6, 12)), User(range(6))
    for user in (stays, moves, kept):
        known = dram_pages(relay.folder, "worker-00")
        client.publish_history(user.history)
        rank(client, user)
        until(lambda known=known: len(dram_pages(relay.folder, "worker-00") - known) >= 4, "the prefix is in DRAM")
        user.pages = sorted(dram_pages(relay.folder, "worker-00") - known)
        assert "worker-00/data.mdb" in files_with(relay.folder, user.marks)
        assert memory_holds(first, user.pages)
    second = relay.start_worker("worker-01")
    relay.await_ready(second)
    until(lambda: owned(first) == owned(second) == 6, "both own partitions")
    rank(client, moves)
    until(lambda: dram_pages(relay.folder, "worker-01"), "its prefix is in DRAM")
    moves.pages += sorted(dram_pages(relay.folder, "worker-01"))
    assert memory_holds(second, moves.pages)
    assert "worker-01/data.mdb" in files_with(relay.folder, moves.marks)

    for user in (stays, moves):
        client.tombstone(user.user_id)
    for user in (stays, moves):
        until(
            lambda user=user: not files_with(relay.folder, [*user.marks, *user.pages]),
            "no file holds a byte of the user",
        )
        until(
            lambda user=user: not any(memory_holds(worker, user.pages) for worker in (first, second)),
            "no page holds a byte of the user",
        )
    assert files_with(relay.folder, kept.marks)
    assert memory_holds(first, kept.pages)
    rank(client, kept)


def test_a_deleted_user_is_ranked_from_no_cache_while_the_history_disk_is_full(
    broker: LocalBroker, model: Path, tmp_path: Path, small_disk: Path
) -> None:
    with (
        own_topics(broker) as kafka,
        Relay(kafka, tmp_path / "relay", model) as relay,
        relay.client() as client,
    ):
        worker = relay.start_worker(store=str(small_disk / "history"))
        relay.await_ready(worker)
        user = User(range(PARTITIONS))
        client.publish_history(user.history)
        rank(client, user)

        def ranked() -> RankingResult:
            outcome = client.rank(user.user_id, candidates_of(), budget_ms=20_000)
            assert outcome.status is Ended.RANKED and outcome.result is not None, outcome
            return outcome.result

        assert ranked().path is RankPath.HBM
        filler = fill(small_disk)
        for number in range(10):
            client.publish_history(history_of(new_user(), 1000, seed=number))
        client.tombstone(user.user_id)
        until(lambda: ranked().history_version is None, "the user's history is not used")
        assert ranked().prefix_tokens < LENGTH
        until(lambda: "No space left on device" in readiness(worker)["history"], "/readyz names the disk")
        filler.unlink()
        relay.await_ready(worker)
        assert ranked().history_version is None
