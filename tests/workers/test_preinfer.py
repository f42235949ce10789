"""The decision of a pre-infer worker, and its sources."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from confluent_kafka import AcknowledgeType, KafkaError
from hypothesis import given
from hypothesis import strategies as st

from relaygr.kafka.admin import MOST_DELIVERIES
from relaygr.worker.preinfer.decision import FIRST_FACTOR, REMEMBERED, Slowness, Verdict, decide
from relaygr.worker.preinfer.source import ShareSource

NOW_US, NEEDED_US = 1_000_000, 50_000


def at(lead_us: float, wait_us: float = 0.0, deliveries: int = 1) -> Verdict:
    return decide(NOW_US, NOW_US + lead_us, NEEDED_US, wait_us, deliveries)


@pytest.mark.parametrize(
    ("lead_us", "wait_us", "deliveries", "verdict"),
    [
        (50_000, 0, 1, Verdict.ACCEPT),
        (49_999, 0, 1, Verdict.REJECT),
        (-1, 0, 1, Verdict.REJECT),
        (80_000, 30_000, 1, Verdict.ACCEPT),
        (79_999, 30_000, 1, Verdict.RELEASE),
        (79_999, 30_000, MOST_DELIVERIES - 1, Verdict.RELEASE),
        (79_999, 30_000, MOST_DELIVERIES, Verdict.REJECT),
        (80_000, 30_000, MOST_DELIVERIES, Verdict.ACCEPT),
    ],
)
def test_a_job_is_taken_given_back_or_finished_by_its_time(
    lead_us: float, wait_us: float, deliveries: int, verdict: Verdict
) -> None:
    assert at(lead_us, wait_us, deliveries) is verdict


@given(st.floats(-1e6, 1e6), st.floats(0, 1e6), st.integers(1, 2 * MOST_DELIVERIES))
def test_what_an_idle_worker_could_end_is_only_given_back(lead_us: float, wait_us: float, deliveries: int) -> None:
    idle, busy = at(lead_us, 0.0, deliveries), at(lead_us, wait_us, deliveries)
    assert idle is not Verdict.RELEASE
    if idle is Verdict.REJECT:
        assert busy is Verdict.REJECT
    elif deliveries < MOST_DELIVERIES:
        assert busy is not Verdict.REJECT


def test_the_slowest_of_the_last_jobs_counts() -> None:
    slowness = Slowness()
    assert slowness.factor == FIRST_FACTOR
    slowness.observe(10_000, 40_000)
    assert slowness.factor == 4
    for _ in range(REMEMBERED - 1):
        slowness.observe(10_000, 5_000)
    assert slowness.factor == 4
    slowness.observe(10_000, 5_000)
    assert slowness.factor == 1


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
