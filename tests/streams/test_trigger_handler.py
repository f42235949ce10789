"""One event, one decision: from bytes to the bytes of a job, the text of a dead letter, or nothing."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from relaygr.admission.policy import DecisionReason
from relaygr.admission.settings import AdmissionSettings
from relaygr.runtime.clock import ManualClock
from relaygr.schemas import HistoryVersion, LatencyCoefficients, PreInferJob, RetrievalEvent, WorkerState, WorkerStatus
from relaygr.schemas.codec import decode, encode
from relaygr.schemas.messages import LENGTH_BUCKETS, FullPathReport
from relaygr.schemas.partitioner import partition_for
from relaygr.trigger.fleet import Fleet
from relaygr.trigger.handler import EventHandler, TriggerDecision
from relaygr.trigger.settings import TriggerSettings

PARTITIONS = 12
CLOCK = ManualClock()
NOW_US = CLOCK.wall_us()
EVENT = RetrievalEvent(
    request_id="gateway.1.1",
    user_id="user-17",
    retrieval_at_us=NOW_US - 4000,
    expected_ranking_at_us=NOW_US + 200_000,
    ranking_budget_ms=20,
    expected_candidates=100,
    expected_suffix=10,
    history_version=HistoryVersion(3, 4096, b"\x07" * 16),
)
KEY = b"user-17"
PARTITION = partition_for(KEY, PARTITIONS)
STATUS = WorkerStatus(
    worker_id="worker-00",
    state=WorkerState.READY,
    written_at_us=NOW_US,
    assignment_epoch=1,
    partitions=tuple(range(PARTITIONS)),
    model_revision="abc",
    kv_bytes_per_token=1024,
    contextual_tokens=0,
    tokens_per_behaviour=1,
    max_prefix_behaviours=8192,
    hbm_capacity_bytes=2**30,
    hbm_free_bytes=2**30,
    dram_capacity_bytes=0,
    dram_free_bytes=0,
    ranking_queue_p99_us=0,
    preinfer_queue_us=0,
    # 10 µs a token: 2,000 tokens take 20 ms.
    latency=LatencyCoefficients(0, 10, 0, 0, 10, 0, 0, 10, 0, 0, 0),
)


def handler(fleet: Fleet | None = None, **settings: object) -> EventHandler:
    made = EventHandler(TriggerSettings(**settings), AdmissionSettings(), fleet or Fleet(3000), PARTITIONS, CLOCK)  # type: ignore[arg-type]
    made.reassign(frozenset(range(PARTITIONS)))
    return made


def decided(event: RetrievalEvent = EVENT, fleet: Fleet | None = None, **settings: object) -> TriggerDecision:
    return handler(fleet, **settings).decide(KEY, encode(event), PARTITION)


def known_fleet() -> Fleet:
    fleet = Fleet(3000)
    fleet.apply(STATUS.worker_id, STATUS, NOW_US)
    return fleet


def with_length(length: int) -> RetrievalEvent:
    return dataclasses.replace(EVENT, history_version=HistoryVersion(3, length, b"\x07" * 16))


def test_an_at_risk_event_becomes_a_job_that_copies_it() -> None:
    decision = decided(fleet=known_fleet())
    assert decision.reason is DecisionReason.ADMITTED
    job = decode(PreInferJob, decision.job)
    assert job.decided_at_us == NOW_US
    for field in dataclasses.fields(RetrievalEvent):
        assert getattr(job, field.name) == getattr(EVENT, field.name), field.name
    assert decision.age_us == 4000


def test_a_short_history_on_a_known_owner_sends_nothing() -> None:
    assert decided(with_length(500), fleet=known_fleet()) == TriggerDecision(DecisionReason.NOT_AT_RISK, age_us=4000)


def test_without_an_owner_length_alone_decides() -> None:
    assert decided(with_length(1024)).reason is DecisionReason.NO_STATUS_THRESHOLD
    assert decided(with_length(1023)).reason is DecisionReason.BELOW_THRESHOLD


def test_a_stale_owner_falls_back_to_the_length() -> None:
    fleet = Fleet(3000)
    fleet.apply(STATUS.worker_id, dataclasses.replace(STATUS, written_at_us=NOW_US - 4_000_000), NOW_US)
    assert decided(with_length(1024), fleet=fleet).reason is DecisionReason.NO_STATUS_THRESHOLD


def test_a_disabled_trigger_sends_nothing_and_says_so() -> None:
    assert decided(enabled=False) == TriggerDecision(DecisionReason.DISABLED, age_us=4000)


def test_a_key_that_is_not_the_user_is_misrouted() -> None:
    decision = handler().decide(b"user-18", encode(EVENT), PARTITION)
    assert decision.reason is DecisionReason.MISROUTED
    # The detail goes to a dead letter, which outlives the user.
    assert decision.detail == "the key is not the user id of the body"
    assert handler().decide(None, encode(EVENT), PARTITION).reason is DecisionReason.MISROUTED


def test_another_partitioner_is_misrouted_and_the_sentence_says_where_it_belongs() -> None:
    decision = handler().decide(KEY, encode(EVENT), (PARTITION + 1) % PARTITIONS)
    assert decision.reason is DecisionReason.MISROUTED
    assert decision.detail is not None
    assert f"gives {PARTITION}" in decision.detail


@pytest.mark.parametrize("value", [None, b"", b"\x7f", b"\x01\xc0", b"not a message"])
def test_bytes_that_are_no_event_are_undecodable_with_a_reason(value: bytes | None) -> None:
    decision = handler().decide(KEY, value, PARTITION)
    assert decision.reason is DecisionReason.UNDECODABLE
    assert decision.detail
    assert decision.job is None


@given(st.binary(max_size=200) | st.none(), st.binary(max_size=40) | st.none(), st.integers(0, 11))
def test_whatever_the_bytes_there_is_a_verdict(value: bytes | None, key: bytes | None, partition: int) -> None:
    assert handler().decide(key, value, partition).reason in DecisionReason


def test_a_worker_whose_full_path_takes_longer_than_its_model_says_puts_a_shorter_history_at_risk() -> None:
    fleet = Fleet(3000)
    fits = with_length(1700)
    report = FullPathReport(2_000, (1.5,) * LENGTH_BUCKETS, (), (), ())
    assert decided(fits, fleet=known_fleet()).reason is DecisionReason.NOT_AT_RISK
    fleet.apply(STATUS.worker_id, dataclasses.replace(STATUS, full_path=report), NOW_US)
    assert decided(fits, fleet=fleet).reason is DecisionReason.ADMITTED


def test_requests_that_were_cut_after_not_at_risk_are_counted_and_put_their_length_at_risk() -> None:
    fleet, misjudged = known_fleet(), []
    made = EventHandler(TriggerSettings(), AdmissionSettings(), fleet, PARTITIONS, CLOCK, misjudged.append)
    made.reassign(frozenset(range(PARTITIONS)))
    fits = with_length(1700)
    for number in range(20):
        event = dataclasses.replace(fits, request_id=f"gateway.1.{number}")
        assert made.decide(KEY, encode(event), PARTITION).reason is DecisionReason.NOT_AT_RISK
    cut = FullPathReport(0, (), (), (), ("gateway.1.3", "gateway.1.4", "gateway.9.9"))
    fleet.apply(STATUS.worker_id, dataclasses.replace(STATUS, full_path=cut), NOW_US)
    assert made.decide(KEY, encode(fits), PARTITION).reason is DecisionReason.ADMITTED
    assert misjudged == [(1700).bit_length()] * 2


def test_a_flood_is_held_to_the_owners_load() -> None:
    made = handler(known_fleet())
    reasons = [made.decide(KEY, encode(EVENT), PARTITION).reason for _ in range(200)]
    # 41 ms each; the burst is half a second at 0.8 of a device, less the share of ranking.
    assert 3 <= reasons.count(DecisionReason.ADMITTED) <= 10
    assert reasons[-1] in (DecisionReason.LOAD, DecisionReason.LOW_VALUE)


def test_a_returning_user_is_not_refused_for_load_that_a_reload_does_not_take() -> None:
    fleet = Fleet(3000)
    fleet.apply(STATUS.worker_id, dataclasses.replace(STATUS, dram_capacity_bytes=2**30), NOW_US)
    made = handler(fleet)
    reasons = [made.decide(KEY, encode(EVENT), PARTITION).reason for _ in range(50)]
    # Reloads are free in this model, and 50 x 4 MiB for 0.4 s stay within the footprint of a GiB.
    assert reasons == [DecisionReason.ADMITTED] * 50
