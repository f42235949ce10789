"""What the trigger remembers of its users."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from relaygr.admission.policy import PrefixHolder
from relaygr.schemas import HistoryVersion
from relaygr.trigger.users import FIRST_VISIT, LEAST_VISITS, LastJob, ReturnGaps, Users, gap_bucket

SECOND_US = 1_000_000
VERSION = HistoryVersion(1, 100, b"\x01" * 16)
HOLDER = PrefixHolder("worker-00", 7, "model-1")
JOB = LastJob(VERSION, HOLDER, 100, ranking_at_us=SECOND_US, until_us=5 * SECOND_US)


def test_of_more_users_than_fit_the_one_with_the_oldest_event_is_forgotten() -> None:
    users = Users(2)
    for number, user in enumerate(("ann", "bob", "ann", "cid")):
        users.seen(user, f"r{number}", number)
    assert len(users) == 2
    assert users.is_repeat("ann", "r2") and users.is_repeat("cid", "r3")
    assert not users.is_repeat("bob", "r1")


def test_a_job_is_live_for_its_owners_process_and_model_until_its_lease_ends() -> None:
    users = Users(2)
    users.seen("ann", "r", 0)
    users.sent("ann", JOB)
    assert users.live_job("ann", HOLDER, JOB.until_us - 1) is JOB
    assert users.live_job("ann", HOLDER, JOB.until_us) is None
    others = [("worker-01", 7, "model-1"), ("worker-00", 8, "model-1"), ("worker-00", 7, "model-2")]
    for other in (*(PrefixHolder(*each) for each in others), None):
        assert users.live_job("ann", other, 0) is None
    assert users.live_job("bob", HOLDER, 0) is None


def test_the_chance_of_a_return_is_the_share_of_visits_that_had_one_in_time() -> None:
    users = Users(1_000)
    for user in range(400):
        users.seen(str(user), "first", 0)
    for user in range(100):
        users.seen(str(user), "soon", 20 * SECOND_US)
    for user in range(100, 200):
        users.seen(str(user), "late", 2_000 * SECOND_US)
    assert users.return_chance("new", 60 * SECOND_US) == pytest.approx(0.25)
    assert users.return_chance("new", 10_000 * SECOND_US) == pytest.approx(0.5)
    assert users.return_chance("new", SECOND_US) == 0


def test_users_who_came_back_soon_have_a_chance_of_their_own() -> None:
    users = Users(1_000)
    for user in range(200):
        for visit in range(5 if user < 100 else 1):
            users.seen(str(user), str(visit), 30 * SECOND_US * visit)
    assert users.return_chance("0", 60 * SECOND_US) == pytest.approx(0.75)
    assert users.return_chance("150", 60 * SECOND_US) == pytest.approx(0.5)


def test_two_events_of_one_visit_are_no_return() -> None:
    users = Users(1_000)
    for user in range(LEAST_VISITS):
        users.seen(str(user), "first", 0)
        users.seen(str(user), "second", SECOND_US // 2)
    assert users.return_chance("0", 10**12) == 0


def test_little_evidence_gives_no_chance() -> None:
    gaps = ReturnGaps()
    for _ in range(LEAST_VISITS - 1):
        gaps.visited(FIRST_VISIT)
        gaps.returned(FIRST_VISIT, SECOND_US)
    assert gaps.chance(FIRST_VISIT, 10**12) == 0


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 10**10)), max_size=300), st.floats(0, 1e12))
def test_a_chance_is_a_share_and_grows_with_the_time(visits: list[tuple[int, int]], within_us: float) -> None:
    users, now_us = Users(4), 0
    for user, gap_us in visits:
        now_us += gap_us
        users.seen(str(user), str(now_us), now_us)
    chance = users.return_chance("0", within_us)
    assert 0 <= chance <= users.return_chance("0", 2 * within_us) <= 1


@given(st.integers(0, 10**13))
def test_the_buckets_of_gaps_are_in_order(gap_us: int) -> None:
    assert gap_bucket(gap_us) <= gap_bucket(2 * gap_us + 1)
