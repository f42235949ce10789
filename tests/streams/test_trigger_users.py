"""What the trigger remembers of its users."""

from __future__ import annotations

from relaygr.admission.policy import PrefixHolder
from relaygr.schemas import HistoryVersion
from relaygr.trigger.users import LastJob, Users

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
