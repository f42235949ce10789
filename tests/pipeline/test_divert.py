"""Three workers, of which one is slow: requests that it has no time for are answered by the others."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from confluent_kafka import TopicPartition
from pydantic import ByteSize

from relaygr.client import Ended, RankOutcome
from relaygr.devbroker import LocalBroker
from relaygr.kafka.clients import make_assigned_consumer
from relaygr.processes import CommandProcess
from relaygr.schemas import codec
from relaygr.schemas.headers import RankingHeaders
from relaygr.schemas.messages import RankingRequest, RankingResult
from relaygr.schemas.partitioner import partition_for
from relaygr.schemas.topics import Topic
from tests.waiting import becomes, until
from tests.worlds.paced import make_paced_model, set_pace
from tests.worlds.relay import (
    PARTITIONS,
    RawGateway,
    Relay,
    candidates_of,
    history_of,
    new_user,
    own_topics,
    reading,
)

pytestmark = pytest.mark.outage

SLOW = 6.0
LENGTH = 500
"""The paced model takes about 60 ms for it, and more where it is slow."""
BUDGET_MS = 15_000
"""The slow worker answers about 40 requests in this time."""


@dataclass
class Fleet:
    """Workers whose times the test sets. The first is the one that gets the requests."""

    relay: Relay
    folder: Path
    workers: list[CommandProcess] = field(default_factory=list)

    def start(self, number: int) -> CommandProcess:
        name = f"worker-{number:02d}"
        pace = ["tests.worlds.paced", str(self.pace_file(number))]
        own = [f"worker.worker_id={name}", f"worker.history_path={self.folder / name}"]
        worker = self.relay.processes.start(name, ["worker"], "worker", own, module=pace)
        self.workers.append(worker)
        return worker

    def pace_file(self, number: int) -> Path:
        return self.folder / f"pace-{number}"

    def users_of(self, worker: CommandProcess, count: int) -> list[str]:
        """New users of partitions that the worker owns: it answers a request of each, calmly sent, itself."""
        owned: set[int] = set()
        with self.relay.client() as client:
            probed: set[int] = set()
            while len(probed) < PARTITIONS:
                user = new_user("probe")
                partition = partition_for(user.encode(), PARTITIONS)
                if partition in probed:
                    continue
                probed.add(partition)
                outcome = client.rank(user, candidates_of(), budget_ms=30_000, history=history_of(user, 10))
                assert outcome.result is not None
                if outcome.result.worker_id == worker.name:
                    owned.add(partition)
        users: list[str] = []
        while len(users) < count:
            user = new_user("hot")
            if partition_for(user.encode(), PARTITIONS) in owned:
                users.append(user)
        return users

    def diverted(self, worker: CommandProcess, outcome: str = "delivered") -> float:
        """Requests that this worker passed on, or tried to."""
        return reading(worker).total("relaygr_worker_diverted_total", outcome=outcome)

    def assignments(self) -> int:
        """Of all workers so far. A partition that moves takes its unfinished requests along, which two may answer."""
        return sum(worker.log.read_text(encoding="utf-8").count('"event": "assigned"') for worker in self.workers)

    def overflow(self) -> list[RankingRequest]:
        """Every message of the overflow topic so far."""
        kafka = self.relay.kafka
        consumer = make_assigned_consumer(kafka, "test-overflow", options={"enable.partition.eof": True})
        name = kafka.topic(Topic.OVERFLOW)
        places = [TopicPartition(name, partition, 0) for partition in range(kafka.partitions)]
        consumer.assign(places)
        found, ends = [], 0
        while ends < len(places):
            for message in consumer.consume(500, 0.2):
                if message.error() is not None:
                    ends += 1
                else:
                    found.append(codec.decode(RankingRequest, message.value()))
        consumer.close()
        return found


@pytest.fixture
def fleet(any_broker: LocalBroker, tmp_path: Path) -> Iterator[Fleet]:
    """Three ready workers that divert, all of them quick."""
    model = make_paced_model(tmp_path / "model")
    options = {"hbm_bytes": ByteSize(256 << 20), "dram_bytes": 0, "divert": True, "status_interval_ms": 300}
    with own_topics(any_broker) as kafka, Relay(kafka, tmp_path / "relay", model, **options) as relay:
        fleet = Fleet(relay, tmp_path)
        for number in range(3):
            fleet.start(number)
        relay.await_ready(*fleet.workers)

        def owns_some(worker: CommandProcess) -> bool:
            owned = reading(worker).by_label("relaygr_consumer_owned_partitions", "loop")
            return owned.get("workers", 0) > 0 and owned.get("overflow", 0) > 0

        until(lambda: all(map(owns_some, fleet.workers)), "each has partitions of both groups")
        yield fleet


def rank(gateway: RawGateway, user: str) -> RankingHeaders:
    """Sends a request, and does not wait for its answer."""
    headers = gateway.headers(BUDGET_MS)
    request = gateway.request(headers, user, history=history_of(user, LENGTH))
    partition = partition_for(user.encode(), PARTITIONS)
    gateway.send(Topic.RANKING, codec.encode(request), user.encode(), headers.encode(), partition)
    return headers


def results_of(outcomes: Sequence[RankOutcome]) -> list[RankingResult]:
    return [outcome.result for outcome in outcomes if outcome.result is not None]


def test_what_a_slow_worker_has_no_time_for_is_answered_by_the_others_once(fleet: Fleet) -> None:
    slow = fleet.workers[0]
    first, *users = fleet.users_of(slow, 201)
    set_pace(fleet.pace_file(0), SLOW)
    gateway = RawGateway(fleet.relay.kafka)
    # It learns how slow it is. Later it finds no time for a request when it comes, and passes it on with nearly the
    # whole time left.
    for _ in range(20):
        gateway.answer(rank(gateway, first))
    gateway.answers.clear()
    assignments = fleet.assignments()
    assert assignments > 0
    sent = [rank(gateway, user) for user in users]
    for headers in sent:
        gateway.answer(headers)
    set_pace(fleet.pace_file(0), 1.0)
    time.sleep(1)
    gateway.read()
    answers = gateway.answers
    twice = {results[0].request_id: results for results in answers.values() if len(results) > 1}
    # What Kafka does not acknowledge within half a second may be in its log nevertheless: on a busy machine, some are.
    may_be_twice = fleet.diverted(slow, "undelivered")
    assert len(twice) <= may_be_twice or fleet.assignments() > assignments, twice
    diverted = [results[0] for results in answers.values() if results[0].diverted_by is not None]
    assert {result.diverted_by for result in diverted} == {slow.name}
    assert slow.name not in {result.worker_id for result in diverted}
    ranked = [result for result in diverted if result.outcome == "ranked"]
    deadlines = {headers.request_id: headers.deadline_us for headers in sent}
    in_time = [result for result in ranked if result.sent_at_us <= deadlines[result.request_id]]
    assert len(in_time) >= max(5, len(diverted) // 2), [f"{each.outcome} {each.reason}" for each in diverted]
    passed_on = [request.request_id for request in fleet.overflow()]
    assert len(passed_on) == len(set(passed_on)), "a request was diverted twice"
    assert len(passed_on) >= len(diverted)
    gateway.close()
    # It has time again, and keeps its requests.
    before = fleet.diverted(slow)
    with fleet.relay.client() as client:
        for user in users[:20]:
            outcome = client.rank(user, candidates_of(), budget_ms=10_000, history=history_of(user, LENGTH))
            assert outcome.status is Ended.RANKED
            assert outcome.result is not None and outcome.result.worker_id == slow.name
    assert fleet.diverted(slow) == before
    fleet.relay.await_all_committed(Topic.RANKING)


@pytest.mark.parametrize("killed", ["the one that took them", "the one that passed them on"])
def test_a_killed_worker_loses_no_diverted_request_and_the_caller_gets_one_answer(fleet: Fleet, killed: str) -> None:
    """Its unfinished messages are delivered again, to another worker: then two may answer, and the client takes one."""
    slow = fleet.workers[0]
    users = fleet.users_of(slow, 260)
    set_pace(fleet.pace_file(0), SLOW)
    late: list[str] = []
    with fleet.relay.client(on_late=lambda outcome: late.append(outcome.request_id)) as client:
        futures = []
        # On a busy machine all workers may be slow at first, and the first requests end before one is diverted.
        for _ in range(4):
            futures += [
                client.submit_rank(user, candidates_of(), budget_ms=BUDGET_MS, history=history_of(user, LENGTH))
                for user in users
            ]
            if becomes(lambda: fleet.diverted(slow) >= 5, within_s=BUDGET_MS / 1000):
                break
        assert fleet.diverted(slow) >= 5
        fleet.relay.kill(slow if killed == "the one that passed them on" else fleet.workers[1])
        set_pace(fleet.pace_file(0), 1.0)
        outcomes = [future.result(timeout=90) for future in futures]
        # After the kill even the worker that passed a request on may own the partition on which it lies.
        assert any(result.diverted_by is not None for result in results_of(outcomes))
        told = {outcome.request_id for outcome in outcomes if outcome.result is not None}
        timed_out = {outcome.request_id for outcome in outcomes if outcome.status is Ended.TIMED_OUT}
        assert len(told) + len(timed_out) == len(futures)
        until(lambda: timed_out <= set(late), "the others are answered too", 30)
        assert len(late) == len(set(late)) and not told & set(late), "the caller got an answer twice"
