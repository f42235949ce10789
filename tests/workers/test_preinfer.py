"""The decision of a pre-infer worker, and its sources."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from confluent_kafka import AcknowledgeType, KafkaError
from hypothesis import given
from hypothesis import strategies as st

from relaygr.worker.preinfer.decision import (
    FIRST_FACTOR,
    IDLE_US,
    MOST_REMEMBERED,
    Slowness,
    Verdict,
    decide,
)
from relaygr.worker.preinfer.source import ShareSource

NOW_US, NEEDED_US = 1_000_000, 50_000


def at(lead_us: float, wait_us: float = 0.0, may_release: bool = True) -> Verdict:
    return decide(NOW_US, NOW_US + lead_us, NEEDED_US, wait_us, may_release=may_release)


@pytest.mark.parametrize(
    ("lead_us", "wait_us", "may_release", "verdict"),
    [
        (50_000, 0, True, Verdict.ACCEPT),
        (49_999, 0, True, Verdict.REJECT),
        (-1, 0, True, Verdict.REJECT),
        (80_000, 30_000, False, Verdict.ACCEPT),
        (79_999, 30_000, True, Verdict.RELEASE),
        (79_999, 30_000, False, Verdict.PASS_ON),
    ],
)
def test_a_job_is_taken_given_back_passed_on_or_finished_by_its_time(
    lead_us: float, wait_us: float, may_release: bool, verdict: Verdict
) -> None:
    assert at(lead_us, wait_us, may_release) is verdict


@given(st.floats(-1e6, 1e6), st.floats(0, 1e6), st.booleans())
def test_a_job_that_an_idle_worker_could_end_is_not_finished(lead_us: float, wait_us: float, may_release: bool) -> None:
    idle, busy = at(lead_us, 0.0, may_release), at(lead_us, wait_us, may_release)
    assert idle in (Verdict.ACCEPT, Verdict.REJECT)
    assert (busy is Verdict.REJECT) == (idle is Verdict.REJECT)


def test_the_slowest_of_the_last_jobs_counts() -> None:
    slowness = Slowness()
    assert slowness.factor(NOW_US) == FIRST_FACTOR
    slowness.observe(10_000, 40_000, NOW_US)
    assert slowness.factor(NOW_US) == 4
    for _ in range(MOST_REMEMBERED - 1):
        slowness.observe(10_000, 5_000, NOW_US)
    assert slowness.factor(NOW_US) == 4
    slowness.observe(10_000, 5_000, NOW_US)
    assert slowness.factor(NOW_US) == 1


def test_a_worker_that_was_interrupted_once_does_not_refuse_jobs_for_long() -> None:
    slowness = Slowness()
    for took_us in (*[20_000] * 14, 5_000_000, 10_000_000):
        slowness.observe(10_000, took_us, NOW_US)
    assert slowness.factor(NOW_US + IDLE_US) == 1000
    assert slowness.factor(NOW_US + IDLE_US + 1) == 2, "both are forgotten, and the others are not"


def test_a_worker_that_was_slow_tries_again_at_last() -> None:
    slowness, now_us = Slowness(), NOW_US
    for _ in range(MOST_REMEMBERED):
        slowness.observe(10_000, 10_000_000, now_us)
    while slowness.factor(now_us) != FIRST_FACTOR:
        now_us += IDLE_US + 1
    assert now_us - NOW_US <= 30 * IDLE_US


@dataclass
class Record:
    value: str
    failure: KafkaError | None = None

    def error(self) -> KafkaError | None:
        return self.failure


@dataclass
class Member:
    """A member of a share group."""

    batches: list[list[Record]]
    acknowledged: list[tuple[str, AcknowledgeType]] = field(default_factory=list)

    def subscribe(self, topics: list[str]) -> None:
        assert topics == ["jobs"]

    def poll(self, timeout: float) -> list[Record]:
        return self.batches.pop(0) if self.batches else []

    def acknowledge(self, record: Record, kind: AcknowledgeType) -> None:
        self.acknowledged.append((record.value, kind))

    def commit_async(self) -> None: ...


def test_a_slot_gets_one_job_of_a_batch_and_gives_the_others_back() -> None:
    member = Member([[Record("first"), Record("second"), Record("third")], []])
    source = ShareSource(member, "jobs", lambda *_: None)  # type: ignore[arg-type]
    job = source.next(0.1)
    assert isinstance(job, Record) and job.value == "first"
    assert member.acknowledged == [("second", AcknowledgeType.RELEASE), ("third", AcknowledgeType.RELEASE)]
    source.end(job, Verdict.REJECT)
    assert member.acknowledged[-1] == ("first", AcknowledgeType.REJECT)
    assert source.next(0.1) is None


def test_an_error_is_reported_and_is_no_job() -> None:
    noted: list[tuple[str, KafkaError | None]] = []
    refused = KafkaError(KafkaError.TOPIC_AUTHORIZATION_FAILED)
    source = ShareSource(Member([[Record("", refused)]]), "jobs", lambda *error: noted.append(error))  # type: ignore[arg-type]
    assert source.next(0.1) is None
    assert noted == [("jobs", refused)]
