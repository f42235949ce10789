"""The lanes between poll thread and device thread."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streams.consumer.lanes import Doorbell, PauseChange, PausingLane, Shed, SheddingLane, ShedReason
from streams.errors import RelayError


class Job:
    def __init__(self, name: str) -> None:
        self.name = name

    def __repr__(self) -> str:
        return self.name


def shedding(capacity: int) -> SheddingLane[Job]:
    return SheddingLane("preinfer", capacity, Doorbell())


def test_work_comes_out_in_the_order_in_which_it_arrived_and_only_once() -> None:
    lane = shedding(8)
    jobs = [Job(str(i)) for i in range(4)]
    for job in jobs:
        assert lane.offer(job, value=1.0, expires_us=100, now_us=0) == []
    assert lane.take() == jobs
    assert lane.take() == []


def test_a_full_lane_sheds_the_expired_before_the_cheap() -> None:
    lane = shedding(2)
    expired, cheap, newcomer = Job("expired"), Job("cheap"), Job("newcomer")
    lane.offer(expired, value=9.0, expires_us=10, now_us=0)
    lane.offer(cheap, value=1.0, expires_us=100, now_us=0)
    assert lane.offer(newcomer, value=5.0, expires_us=100, now_us=10) == [Shed(expired, ShedReason.EXPIRED)]
    assert lane.take() == [cheap, newcomer]


def test_a_full_lane_sheds_the_least_value_be_it_the_newcomer() -> None:
    lane = shedding(2)
    first, second, cheap, dear = Job("first"), Job("second"), Job("cheap"), Job("dear")
    lane.offer(first, value=3.0, expires_us=100, now_us=0)
    lane.offer(second, value=2.0, expires_us=100, now_us=0)
    assert lane.offer(cheap, value=1.0, expires_us=100, now_us=0) == [Shed(cheap, ShedReason.LEAST_VALUE)]
    assert lane.offer(dear, value=4.0, expires_us=100, now_us=0) == [Shed(second, ShedReason.LEAST_VALUE)]
    assert lane.take() == [first, dear]


def test_work_in_the_schedulers_queue_still_counts_and_can_be_shed_there() -> None:
    lane = shedding(1)
    queued, better = Job("queued"), Job("better")
    lane.offer(queued, value=1.0, expires_us=100, now_us=0)
    assert lane.take() == [queued]
    assert lane.offer(better, value=2.0, expires_us=100, now_us=0) == [Shed(queued, ShedReason.LEAST_VALUE)]
    assert not lane.claim(queued)
    assert lane.claim(better)
    assert not lane.claim(better)
    assert lane.depth == 0


def test_started_work_makes_room() -> None:
    lane = shedding(1)
    first, second = Job("first"), Job("second")
    lane.offer(first, value=9.0, expires_us=100, now_us=0)
    lane.take()
    assert lane.claim(first)
    assert lane.offer(second, value=1.0, expires_us=100, now_us=0) == []


@given(
    capacity=st.integers(1, 5),
    steps=st.lists(st.tuples(st.integers(0, 9), st.integers(0, 30), st.booleans()), max_size=60),
)
def test_all_work_is_taken_claimed_or_shed_and_the_bound_holds(
    capacity: int, steps: list[tuple[int, int, bool]]
) -> None:
    lane = shedding(capacity)
    offered: list[Job] = []
    shed: list[Job] = []
    claimed: list[Job] = []
    held: list[Job] = []
    for now_us, (value, lives_us, take) in enumerate(steps):
        job = Job(str(now_us))
        offered.append(job)
        shed += [victim.work for victim in lane.offer(job, float(value), now_us + lives_us, now_us)]
        assert lane.depth <= capacity
        if take:
            held += lane.take()
            if held and lane.claim(held[0]):
                claimed.append(held[0])
            held = held[1:]
    held += lane.take()
    claimed += [job for job in held if lane.claim(job)]
    assert sorted(map(id, shed + claimed)) == sorted(map(id, offered))
    assert lane.depth == 0


def test_a_ranking_lane_pauses_at_its_bound_and_resumes_at_half() -> None:
    lane: PausingLane[int] = PausingLane("ranking", 4, Doorbell())
    for i in range(3):
        lane.offer(i)
    assert lane.pause_change() is PauseChange.NONE
    lane.offer(3)
    assert lane.pause_change() is PauseChange.PAUSE
    lane.offer(4)  # delivered before the pause took effect
    assert lane.pause_change() is PauseChange.NONE
    assert lane.take() == [0, 1, 2, 3, 4]
    lane.leave(2)
    assert lane.pause_change() is PauseChange.NONE
    lane.leave()
    assert lane.pause_change() is PauseChange.RESUME
    assert lane.depth == 2


def test_leaving_a_lane_twice_is_a_bug_that_is_told() -> None:
    lane: PausingLane[int] = PausingLane("ranking", 4, Doorbell())
    lane.offer(1)
    lane.leave()
    with pytest.raises(ValueError, match="only 0 are in it"):
        lane.leave()


def test_a_lane_without_room_is_refused() -> None:
    with pytest.raises(RelayError, match="at least 1"):
        shedding(0)


def test_a_ring_while_nobody_waits_is_not_forgotten() -> None:
    doorbell = Doorbell()
    doorbell.ring()
    assert doorbell.wait(0)
    assert not doorbell.wait(0)
