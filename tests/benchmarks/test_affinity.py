"""Fleets whose members join, leave, die and come back under load, in each mode of `affinity`, on a real Kafka."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import pytest
from confluent_kafka import KafkaError

from relaygr.bench.affinity import FleetMode
from relaygr.bench.affinity.fleet import best_new_id, fewest_moves, moved, range_owners
from relaygr.bench.affinity.member import Member
from relaygr.bench.affinity.run import ChangeFigures, Plan, measure_mode
from relaygr.devbroker import LocalBroker
from relaygr.kafka.settings import KafkaSettings

PARTITIONS = 48
MEMBERS = [f"worker-{number:02d}" for number in range(8)]


def moves(before: list[str], after: list[str]) -> int:
    return len(moved(range_owners(before, PARTITIONS), range_owners(after, PARTITIONS)))


def needed(before: list[str], after: list[str]) -> int:
    return fewest_moves(range_owners(before, PARTITIONS), range_owners(after, PARTITIONS))


@pytest.mark.parametrize(
    ("new", "moves_of_range"),
    [(["worker-99"], 15), (["worker-04-b"], 9), ([f"{name}-b" for name in MEMBERS], 24)],
    ids=["last", "after the fifth", "one after each"],
)
def test_how_many_partitions_range_moves_depends_on_where_the_new_ids_sort(new: list[str], moves_of_range: int) -> None:
    after = [*MEMBERS, *new]
    assert moves(MEMBERS, after) == moves_of_range
    assert needed(MEMBERS, after) <= moves_of_range
    assert (len(new) == len(MEMBERS)) == (needed(MEMBERS, after) == moves_of_range)


@pytest.mark.parametrize(
    ("members", "best", "moves_of_best", "moves_of_last"),
    [(2, "worker-00-b", 16, 24), (4, "worker-01-b", 15, 21), (6, "worker-02-b", 15, 21), (8, "worker-04-b", 9, 15)],
)
def test_the_best_place_of_a_new_id_is_found(members: int, best: str, moves_of_best: int, moves_of_last: int) -> None:
    names = MEMBERS[:members]
    assert best_new_id(names, PARTITIONS) == best
    assert moves(names, [*names, best]) == moves_of_best
    assert moves(names, [*names, "worker-99"]) == moves_of_last


def test_a_member_that_comes_back_under_its_id_gets_its_partitions_again() -> None:
    without = [name for name in MEMBERS if name != "worker-03"]
    back = range_owners([*without, "worker-03"], PARTITIONS)
    assert back == range_owners(MEMBERS, PARTITIONS)


class FullProducer:
    """Has room for one answer until its delivery was reported. The first delivery fails."""

    def __init__(self) -> None:
        self.waiting: list[Callable[[KafkaError | None, None], None]] = []
        self.calls = 0

    def produce(self, topic: str, value: bytes, *, partition: int, on_delivery: Callable[..., None]) -> None:
        if self.waiting:
            raise BufferError
        self.waiting.append(on_delivery)

    def poll(self, timeout_s: float) -> int:
        for report in self.waiting[:]:
            self.calls += 1
            # librdkafka makes room after the report.
            report(KafkaError(KafkaError._MSG_TIMED_OUT) if self.calls == 1 else None, None)
            self.waiting.remove(report)
        return 0


def test_a_member_keeps_answers_that_its_producer_has_no_room_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("relaygr.bench.affinity.member.make_producer", lambda *_: FullProducer())
    member = Member(KafkaSettings(), "member")
    finished: list[Any] = []
    monkeypatch.setattr(member.loop, "finish", finished.append)
    for token in ("first", "second", "third"):
        member._answer(cast(Any, token), b"")
    for _ in range(4):
        member.on_batch()
    assert sorted(finished) == ["first", "second", "third"]


@pytest.mark.kafka
@pytest.mark.outage
@pytest.mark.timeout(280)
@pytest.mark.parametrize("mode", list(FleetMode), ids=str)
def test_jobs_and_requests_meet_again_after_each_change_and_only_what_moved_is_lost(
    real_broker: LocalBroker, mode: FleetMode
) -> None:
    """`measure_mode` raises an error if a user's request does not meet its job between two changes."""
    found = {each.change: each for each in measure_mode(real_broker, mode, Plan(3, 12, 40, 1_000))}
    assert list(found) == ["none", "restart", "join", "leave", "death", "return"]
    for each in found.values():
        # Requests to a worker that died are answered by the next owner, some after this run's end.
        assert each.unanswered <= (0.05 * each.requests if each.change == "death" else 0), "no request is lost"
        assert each.kv_lost_mib <= each.kv_of_changed_mib < each.kv_held_mib
    assert found["none"].kv_lost_mib == found["none"].moved == 0
    assert members(found) == [(3, 3), (3, 3), (3, 4), (4, 3), (3, 2), (2, 3)]
    if mode is FleetMode.ONE_TOPIC:
        assert {name: each.moved - each.needed for name, each in found.items() if each.moved != each.needed} == {}
    if mode in (FleetMode.RANGE, FleetMode.RANGE_PLACED):
        assert found["restart"].moved == 0, "a static id within its session keeps its partitions"


def members(found: dict[str, ChangeFigures]) -> list[tuple[int, int]]:
    return [(each.members_before, each.members_after) for each in found.values()]
