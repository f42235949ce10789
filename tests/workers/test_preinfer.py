"""The decision of a pre-infer worker, and its sources."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, cast

import pytest
import structlog
from confluent_kafka import AcknowledgeType, KafkaError
from hypothesis import given
from hypothesis import strategies as st

from relaygr.kafka.settings import KafkaSettings
from relaygr.runtime.clock import ManualClock
from relaygr.schemas.topics import Topic
from relaygr.worker.preinfer.decision import (
    FIRST_FACTOR,
    IDLE_US,
    MOST_REMEMBERED,
    Slowness,
    Verdict,
    decide,
)
from relaygr.worker.preinfer.slots import SlotLoop
from relaygr.worker.preinfer.source import ShareSource
from tests.waiting import PATIENCE_S, until

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
    noted: list[tuple[str, KafkaError]] = field(default_factory=list)

    def source(self) -> ShareSource:
        """The source of a session whose client it is."""
        session = SimpleNamespace(
            kafka=KafkaSettings(), share_consumer=self._made, note=lambda *error: self.noted.append(error)
        )
        return ShareSource(cast(Any, session), "pre-00")

    def _made(self, _group: str, _client_id: str, on_statistics: Callable[[str], None]) -> Member:
        self.report = on_statistics
        return self

    def subscribe(self, topics: list[str]) -> None:
        assert topics == [KafkaSettings().topic(Topic.PREINFER_POOL)]

    def poll(self, timeout: float) -> list[Record]:
        return self.batches.pop(0) if self.batches else []

    def acknowledge(self, record: Record, kind: AcknowledgeType) -> None:
        self.acknowledged.append((record.value, kind))

    def commit_async(self) -> None: ...


def test_a_slot_gets_one_job_of_a_batch_and_gives_the_others_back() -> None:
    member = Member([[Record("first"), Record("second"), Record("third")], []])
    source = member.source()
    job = source.next(0.1)
    assert isinstance(job, Record) and job.value == "first"
    assert member.acknowledged == [("second", AcknowledgeType.RELEASE), ("third", AcknowledgeType.RELEASE)]
    source.end(job, Verdict.REJECT)
    assert member.acknowledged[-1] == ("first", AcknowledgeType.REJECT)
    assert source.next(0.1) is None


def test_an_error_is_reported_and_is_no_job() -> None:
    refused = KafkaError(KafkaError.TOPIC_AUTHORIZATION_FAILED)
    member = Member([[Record("", refused)]])
    assert member.source().next(0.1) is None
    assert member.noted == [(KafkaSettings().topic(Topic.PREINFER_POOL), refused)]


def test_a_source_has_jobs_once_kafka_has_given_it_a_partition_and_as_long() -> None:
    member = Member([[], [Record("early")]])
    source = member.source()
    source.next(0.1)
    assert not source.has_jobs
    for partitions in (0, 1, 0):
        member.report(json.dumps({"cgrp": {"assignment_size": partitions}}))
        assert source.has_jobs is (partitions > 0)
    # A job comes with the partition, and the figures come later.
    source.next(0.1)
    assert source.has_jobs


class Unassigned(Member):
    """A member that Kafka gives no partition."""

    def poll(self, timeout: float) -> list[Record]:
        time.sleep(timeout)
        return []

    def close(self) -> None: ...


def test_kafka_is_blamed_for_no_partition_only_while_the_slots_ask_for_jobs() -> None:
    """A store that was away for a while at the start made the worker name settings of the brokers."""
    clock, may_take, ticks = ManualClock(monotonic_us=1), False, 0

    def tick(_: int) -> None:
        nonlocal ticks
        ticks += 1

    parts = SimpleNamespace(
        clock=clock, may_take=lambda: may_take, on_start=lambda _: None, on_tick=tick, on_end=lambda _: None,
        producer=SimpleNamespace(poll=time.sleep), dead_letters=SimpleNamespace(poll=lambda: None),
    )  # fmt: skip
    config = SimpleNamespace(
        kafka=KafkaSettings(), worker=SimpleNamespace(pre_infer_slots=2, worker_id="pre-00"), scenarios=None
    )
    loop = SlotLoop(cast(Any, config), cast(Any, parts), lambda _: Unassigned([]).source())

    def pass_time() -> None:
        clock.advance_us(20_000_000)
        after = ticks + 2
        until(lambda: ticks >= after, "the loop has seen the time")

    with structlog.testing.capture_logs() as lines:
        loop.start()
        pass_time()
        pass_time()
        assert not lines
        may_take = True
        pass_time()
        until(lambda: lines, "it says so")
        pass_time()
        loop.stop(0)
        assert loop.join(PATIENCE_S)
    assert ["topics check" in line["event"] for line in lines] == [True]
    assert not loop.status().assigned
    assert loop.error is None
