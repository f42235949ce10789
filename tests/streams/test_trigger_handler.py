"""One event, one decision: from bytes to the bytes of a job, the text of a dead letter, or nothing."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from relaygr.admission.policy import MAX_JOB_LIFETIME_US, DecisionReason
from relaygr.admission.scenarios import PreInferBy, ScenarioSettings
from relaygr.admission.settings import AdmissionSettings
from relaygr.runtime.clock import ManualClock
from relaygr.schemas import HistoryVersion, LatencyCoefficients, PreInferJob, RetrievalEvent, WorkerState, WorkerStatus
from relaygr.schemas.codec import decode, encode
from relaygr.schemas.messages import LENGTH_BUCKETS, FullPathReport, LeadTimeReport, PreInferSlots
from relaygr.schemas.partitioner import partition_for
from relaygr.trigger.fleet import Fleet
from relaygr.trigger.handler import EventHandler, TriggerDecision, job_of
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


def request(number: int, **changes: object) -> bytes:
    """The event of another request of the user, with another version of the history."""
    version = HistoryVersion(3, 4096, number.to_bytes(16, "big"))
    changed = {"request_id": f"gateway.1.{number}", "history_version": version, **changes}
    return encode(dataclasses.replace(EVENT, **changed))  # type: ignore[arg-type]


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
    decision = decided(with_length(500), fleet=known_fleet())
    assert (decision.reason, decision.job, decision.age_us) == (DecisionReason.NOT_AT_RISK, None, 4000)


def test_without_an_owner_length_alone_decides() -> None:
    assert decided(with_length(1024)).reason is DecisionReason.NO_STATUS_THRESHOLD
    assert decided(with_length(1023)).reason is DecisionReason.BELOW_THRESHOLD


def test_a_stale_owner_falls_back_to_the_length() -> None:
    fleet = Fleet(3000)
    fleet.apply(STATUS.worker_id, dataclasses.replace(STATUS, written_at_us=NOW_US - 4_000_000), NOW_US)
    assert decided(with_length(1024), fleet=fleet).reason is DecisionReason.NO_STATUS_THRESHOLD


def test_a_disabled_trigger_sends_nothing_and_says_so() -> None:
    decision = decided(enabled=False)
    assert (decision.reason, decision.job, decision.age_us) == (DecisionReason.DISABLED, None, 4000)


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


@pytest.mark.parametrize(
    ("full_outside_us", "reason"),
    # 1,500 behaviours take 16.1 ms of the 20.
    [
        (None, DecisionReason.NOT_AT_RISK),
        (1_000, DecisionReason.NOT_AT_RISK),
        (3_800, DecisionReason.NOT_AT_RISK),
        (3_950, DecisionReason.ADMITTED),
    ],
)
def test_a_history_is_at_risk_if_its_full_inference_would_wait_behind_shorter_work(
    full_outside_us: int | None, reason: DecisionReason
) -> None:
    report = FullPathReport(2_000, (), (), (), (), full_outside_us)
    assert decided(with_length(1_500), fleet=lasting_fleet(full_path=report)).reason is reason


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
    longer = request(20, history_version=fits.history_version)
    assert made.decide(KEY, longer, PARTITION).reason is DecisionReason.ADMITTED
    assert misjudged == [(1700).bit_length()] * 2


def test_a_flood_is_held_to_the_owners_load() -> None:
    made = handler(known_fleet())
    users = [f"user-{number}" for number in range(2_000) if partition_for(f"user-{number}".encode(), PARTITIONS) == 0]
    reasons = [made.decide(user.encode(), request(0, user_id=user), 0).reason for user in users]
    # 41 ms each; two bursts are a second at 0.95 of a device, less the share of ranking.
    assert 6 <= reasons.count(DecisionReason.ADMITTED) <= 22
    assert reasons[-1] is DecisionReason.LOAD


def lasting_fleet(**changes: object) -> Fleet:
    """Its worker's status stays fresh for as long as a test lasts."""
    fleet = Fleet(100_000)
    fleet.apply(STATUS.worker_id, dataclasses.replace(STATUS, **changes), NOW_US)  # type: ignore[arg-type]
    return fleet


class Later:
    """A handler whose clock the test sets, and its user's events one after the other."""

    def __init__(self, fleet: Fleet | None = None, **settings: object) -> None:
        self.clock = ManualClock()
        fleet = fleet or lasting_fleet(dram_capacity_bytes=2**30)
        trigger = TriggerSettings(**settings)  # type: ignore[arg-type]
        self.handler = EventHandler(trigger, AdmissionSettings(), fleet, PARTITIONS, self.clock)
        self.handler.reassign(frozenset(range(PARTITIONS)))
        self.requests = 0

    def event(self, after_ms: int, digest: int = 0, length: int = 4096, **changes: object) -> DecisionReason:
        """The decision about the user's next event, `after_ms` after the one before."""
        self.clock.advance_us(after_ms * 1000)
        self.requests += 1
        now_us = self.clock.wall_us()
        usual = {
            "retrieval_at_us": now_us,
            "expected_ranking_at_us": now_us + 80_000,
            "history_version": HistoryVersion(3, length, digest.to_bytes(16, "big")),
        }
        return self.handler.decide(KEY, request(self.requests, **{**usual, **changes}), PARTITION).reason


def test_an_event_that_comes_twice_makes_one_job() -> None:
    later = Later()
    assert later.event(0) is DecisionReason.ADMITTED
    assert later.event(10, request_id="gateway.1.1") is DecisionReason.REPEATED


def test_an_event_within_the_lead_time_of_the_same_version_makes_no_second_job() -> None:
    later = Later()
    assert later.event(0) is DecisionReason.ADMITTED
    assert later.event(40) is DecisionReason.UNDER_WAY
    # The lease holds for 80 + 20 + 200 ms. Later the prefix may have left HBM: the job is the signal to reload it.
    assert later.event(400) is DecisionReason.ADMITTED


def test_a_job_that_the_worker_may_have_refused_holds_back_nothing_once_its_request_has_come() -> None:
    """The trigger does not hear of the refusal. If the prefix is in HBM, the second job costs nothing."""
    later = Later()
    later.event(0)
    assert later.event(79) is DecisionReason.UNDER_WAY
    assert later.event(2) is DecisionReason.ADMITTED


def test_a_lease_that_ends_before_the_next_request_holds_back_nothing() -> None:
    later = Later()
    later.event(0)
    far_us = later.clock.wall_us() + 1_000_000
    assert later.event(10, expected_ranking_at_us=far_us) is DecisionReason.ADMITTED


def test_a_gateway_whose_clock_is_far_ahead_holds_back_its_user_for_a_minute_at_most() -> None:
    later = Later()
    far = {"expected_ranking_at_us": NOW_US + 10**15}
    assert [later.event(0, **far), later.event(10, **far)] == [DecisionReason.ADMITTED] * 2
    later.clock.advance_us(MAX_JOB_LIFETIME_US)
    assert later.event(300) is DecisionReason.ADMITTED


def test_another_version_gets_a_job_that_is_charged_for_its_tail() -> None:
    later = Later(lasting_fleet())
    assert later.event(0) is DecisionReason.ADMITTED
    # Without DRAM, 41 ms each would fill the bucket of about 400 ms: here each adds ten tokens.
    reasons = [later.event(1, number, 4096 + 10 * number) for number in range(1, 60)]
    assert reasons == [DecisionReason.ADMITTED] * 59


def test_prefixes_for_one_impression_only_get_a_job_each() -> None:
    later = Later(lasting_fleet(reuses_prefixes=False))
    assert [later.event(0), later.event(40)] == [DecisionReason.ADMITTED] * 2


def test_a_job_for_the_former_owner_holds_back_nothing() -> None:
    fleet = lasting_fleet()
    later = Later(fleet)
    later.event(0)
    moved = dataclasses.replace(STATUS, worker_id="worker-01", assignment_epoch=9, written_at_us=NOW_US + 10_000)
    fleet.apply("worker-01", moved, NOW_US + 10_000)
    assert later.event(20) is DecisionReason.ADMITTED


def test_a_job_that_kafka_did_not_take_holds_back_nothing() -> None:
    later = Later()
    later.event(0)
    later.handler.unsent(EVENT.user_id)
    assert later.event(10) is DecisionReason.ADMITTED


def test_no_user_is_remembered_if_the_setting_is_0() -> None:
    later = Later(remembered_users=0)
    assert [later.event(0), later.event(10, request_id="gateway.1.1")] == [DecisionReason.ADMITTED] * 2


def test_an_earlier_job_that_is_read_again_counts_like_one_of_its_own() -> None:
    later = Later()
    now_us = later.clock.wall_us()
    event = decode(RetrievalEvent, request(7, expected_ranking_at_us=now_us + 80_000, retrieval_at_us=now_us))
    later.handler.restore(job_of(event, now_us), PARTITION)
    assert later.event(10, request_id=event.request_id) is DecisionReason.REPEATED
    assert later.event(10, history_version=event.history_version) is DecisionReason.UNDER_WAY


def test_an_old_job_that_is_read_late_changes_nothing() -> None:
    later = Later()
    later.event(0)
    old_us = later.clock.wall_us() - 50_000
    event = decode(RetrievalEvent, request(9, retrieval_at_us=old_us, expected_ranking_at_us=old_us + 80_000))
    later.handler.restore(job_of(event, old_us), PARTITION)
    assert later.event(10) is DecisionReason.UNDER_WAY


def test_measured_lead_times_decide_what_is_feasible() -> None:
    # The pre-infer takes 41 ms; 0.8 of 80 ms are enough for it, and so are 32 ms with a budget of 20 ms.
    assert Later(lasting_fleet()).event(0) is DecisionReason.ADMITTED
    for share, reason in ((0.2, DecisionReason.INFEASIBLE), (0.4, DecisionReason.ADMITTED)):
        report = LeadTimeReport(("default",), (share,), (round(share * 80_000),), (80_000,))
        assert Later(lasting_fleet(lead_times=report)).event(0) is reason


def test_a_returning_user_is_not_refused_for_load_that_a_reload_does_not_take() -> None:
    later = Later()
    reasons = [later.event(400, number) for number in range(50)]
    # Reloads are free in this model; 50 pre-infers of 41 ms would take a tenth of the device.
    assert reasons == [DecisionReason.ADMITTED] * 50


def made_returns(fleet: Fleet, visits: int, length: int = 1_500) -> EventHandler:
    """A handler that has seen as many visits of each of eight users, one every 15 ms, whom full inference serves."""
    clock = ManualClock()
    made = EventHandler(TriggerSettings(), AdmissionSettings(), fleet, PARTITIONS, clock)
    made.reassign(frozenset(range(PARTITIONS)))
    for number in range(8 * visits):
        clock.advance_us(15_000)
        user, now_us = f"user-{number % 8}", clock.wall_us()
        event = dataclasses.replace(
            with_length(length), request_id=f"g.{number}", user_id=user, retrieval_at_us=now_us,
            expected_ranking_at_us=now_us + 80_000,
        )  # fmt: skip
        decision = made.decide(user.encode(), encode(event), partition_for(user.encode(), PARTITIONS))
        assert decision.reason in (DecisionReason.NOT_AT_RISK, DecisionReason.LOAD)
    return made


def ranking_load(made: EventHandler, fleet: Fleet) -> float:
    now_us = made._clock.wall_us()
    owner = fleet.owner_of(PARTITION, now_us)
    assert owner is not None
    return made._buckets.of(owner, now_us).ranking_load(now_us)


def test_users_whom_full_inference_serves_count_as_hits_when_they_return() -> None:
    # 16 ms each on an owner that knows nothing of them would be more than all of its time.
    for dram_bytes, least, most in ((0, 0.9, 1.2), (2**30, 0.05, 0.1)):
        fleet = lasting_fleet(dram_capacity_bytes=dram_bytes)
        assert least < ranking_load(made_returns(fleet, 60), fleet) < most


def guessed_tokens(later: Later, fleet: Fleet) -> int:
    """What the owner's DRAM probably holds of the user's prefix."""
    owner = fleet.owner_of(PARTITION, later.clock.wall_us())
    assert owner is not None
    return later.handler._recent.guess(owner, EVENT.user_id).tokens


@pytest.mark.parametrize(
    ("change", "tokens"), [({"active_since_us": NOW_US + 1}, 1_500), ({"model_revision": "new"}, 0)]
)
def test_prefixes_that_full_inference_left_are_forgotten_with_the_model_and_not_with_the_process(
    change: dict[str, object], tokens: int
) -> None:
    fleet = lasting_fleet(dram_capacity_bytes=2**30)
    later = Later(fleet)
    assert later.event(0, length=1_500) is DecisionReason.NOT_AT_RISK
    assert guessed_tokens(later, fleet) == 1_500
    new = dataclasses.replace(STATUS, dram_capacity_bytes=2**30, **change)  # type: ignore[arg-type]
    fleet.apply(STATUS.worker_id, new, NOW_US)
    assert guessed_tokens(later, fleet) == tokens


def test_a_user_for_whom_full_inference_may_have_no_time_leaves_no_prefix() -> None:
    fleet = lasting_fleet(dram_capacity_bytes=2**30)
    later = Later(fleet)
    assert later.event(0, expected_ranking_at_us=NOW_US) is DecisionReason.INFEASIBLE
    assert guessed_tokens(later, fleet) == 0


def test_a_job_for_a_process_that_died_holds_back_nothing() -> None:
    fleet = lasting_fleet(active_since_us=NOW_US)
    later = Later(fleet)
    assert [later.event(0), later.event(5)] == [DecisionReason.ADMITTED, DecisionReason.UNDER_WAY]
    successor = dataclasses.replace(STATUS, active_since_us=NOW_US + 6_000, written_at_us=NOW_US + 6_000)
    fleet.apply(STATUS.worker_id, successor, NOW_US + 6_000)
    assert later.event(10) is DecisionReason.ADMITTED


def test_a_job_from_before_the_owners_process_is_not_taken_for_one_that_is_under_way() -> None:
    later = Later(lasting_fleet(active_since_us=NOW_US))
    old_us = NOW_US - 1_000
    event = decode(RetrievalEvent, request(7, expected_ranking_at_us=old_us + 80_000, retrieval_at_us=old_us))
    later.handler.restore(job_of(event, old_us), PARTITION)
    assert later.event(10, history_version=event.history_version) is DecisionReason.ADMITTED


SCENARIOS = {
    "default": ScenarioSettings(),
    "home": ScenarioSettings(share=3, fallback_behaviours=64),
    "ads": ScenarioSettings(budget_ms=5, assumed_behaviours=0),
}


def scenario_handler(fleet: Fleet | None = None, admission: AdmissionSettings | None = None) -> EventHandler:
    made = EventHandler(
        TriggerSettings(),
        admission or AdmissionSettings(),
        fleet or Fleet(3000),
        PARTITIONS,
        CLOCK,
        scenarios=SCENARIOS,
    )
    made.reassign(frozenset(range(PARTITIONS)))
    return made


def test_the_scenario_is_copied_into_the_job() -> None:
    event = dataclasses.replace(EVENT, scenario="home")
    decision = scenario_handler(known_fleet()).decide(KEY, encode(event), PARTITION)
    assert decode(PreInferJob, decision.job).scenario == "home"
    assert decision.scenario == "home"


def test_an_event_of_an_unknown_scenario_sends_nothing() -> None:
    event = dataclasses.replace(EVENT, scenario="news")
    decision = scenario_handler(known_fleet()).decide(KEY, encode(event), PARTITION)
    assert (decision.reason, decision.job, decision.scenario) == (DecisionReason.UNKNOWN_SCENARIO, None, None)
    assert decided(event).reason is DecisionReason.UNKNOWN_SCENARIO, "without settings there is only the default one"


@pytest.mark.parametrize(
    ("scenario", "reason"),
    # 10 µs a token: full inference of 1,000 behaviours takes 11 ms.
    [(None, DecisionReason.NOT_AT_RISK), ("home", DecisionReason.NOT_AT_RISK), ("ads", DecisionReason.ADMITTED)],
)
def test_the_time_limit_of_the_scenario_decides_about_the_risk(scenario: str | None, reason: DecisionReason) -> None:
    event = dataclasses.replace(with_length(1_000), scenario=scenario)
    assert scenario_handler(known_fleet()).decide(KEY, encode(event), PARTITION).reason is reason


@pytest.mark.parametrize(
    ("scenario", "length", "reason"),
    [
        (None, 1_000, DecisionReason.BELOW_THRESHOLD),
        ("home", 64, DecisionReason.NO_STATUS_THRESHOLD),
        ("home", 63, DecisionReason.BELOW_THRESHOLD),
        (None, None, DecisionReason.NO_STATUS_THRESHOLD),
        ("ads", None, DecisionReason.NO_HISTORY),
    ],
)
def test_a_scenario_has_lengths_of_its_own(scenario: str | None, length: int | None, reason: DecisionReason) -> None:
    event = EVENT if length is None else with_length(length)
    event = dataclasses.replace(event, scenario=scenario, **({"history_version": None} if length is None else {}))
    assert scenario_handler().decide(KEY, encode(event), PARTITION).reason is reason


def test_each_scenario_has_the_lead_times_that_were_measured_for_it() -> None:
    fleet = Fleet(3000)
    late = dataclasses.replace(STATUS, lead_times=LeadTimeReport(("ads", "home"), (0.05, 1.0), (1, 1), (1, 1)))
    fleet.apply(STATUS.worker_id, late, NOW_US)
    of_ads, of_home = (
        scenario_handler(fleet).decide(KEY, encode(dataclasses.replace(EVENT, scenario=name)), PARTITION)
        for name in ("ads", "home")
    )
    assert (of_ads.reason, of_home.reason) == (DecisionReason.INFEASIBLE, DecisionReason.ADMITTED)


def test_a_scenario_that_floods_the_trigger_leaves_the_others_their_share() -> None:
    flooded = scenario_handler(known_fleet())

    def reason_of(number: int, scenario: str) -> DecisionReason:
        user = f"user-{number}"
        event = dataclasses.replace(EVENT, user_id=user, request_id=f"g.{number}", scenario=scenario)
        return flooded.decide(user.encode(), encode(event), partition_for(user.encode(), PARTITIONS)).reason

    reasons = [reason_of(number, "ads") for number in range(60)]
    assert reasons[0] is DecisionReason.ADMITTED
    assert reasons[-1] in (DecisionReason.LOAD, DecisionReason.FOOTPRINT)
    assert reason_of(60, "home") is DecisionReason.ADMITTED


def pooled(fleet: Fleet) -> EventHandler:
    """A trigger whose jobs go to pre-infer workers, if there are any."""
    scenarios = {"default": ScenarioSettings(pre_infer=PreInferBy.POOL)}
    made = EventHandler(TriggerSettings(), AdmissionSettings(), fleet, PARTITIONS, CLOCK, scenarios=scenarios)
    made.reassign(frozenset(range(PARTITIONS)))
    return made


def with_pool(fleet: Fleet, owner: WorkerStatus = STATUS) -> Fleet:
    fleet.apply(owner.worker_id, owner, NOW_US)
    member = dataclasses.replace(STATUS, worker_id="pre-00", partitions=(), pre_infer=PreInferSlots(2, 2, 0, 0))
    fleet.apply(member.worker_id, member, NOW_US)
    return fleet


def test_jobs_of_a_scenario_go_to_its_pre_infer_workers_and_to_the_owner_without_them() -> None:
    there, absent = with_pool(Fleet(3000)), known_fleet()
    event = encode(EVENT)
    for fleet, by_pool in ((there, True), (absent, False)):
        decision = pooled(fleet).decide(KEY, event, PARTITION)
        assert (decision.reason, decision.by_pool) == (DecisionReason.ADMITTED, by_pool)
        assert decode(PreInferJob, decision.job).history_version == EVENT.history_version
    assert not handler(there).decide(KEY, event, PARTITION).by_pool


def test_a_job_of_the_pool_does_not_wait_for_its_owners_device() -> None:
    busy = dataclasses.replace(STATUS, preinfer_queue_us=150_000)
    fleet = Fleet(3000)
    fleet.apply(busy.worker_id, busy, NOW_US)
    assert pooled(fleet).decide(KEY, encode(EVENT), PARTITION).reason is DecisionReason.INFEASIBLE
    decision = pooled(with_pool(Fleet(3000), busy)).decide(KEY, encode(EVENT), PARTITION)
    assert (decision.reason, decision.by_pool) == (DecisionReason.ADMITTED, True)


def test_a_user_whose_prefix_the_owner_has_stays_with_the_owner() -> None:
    owner = dataclasses.replace(STATUS, dram_capacity_bytes=2**30)
    trigger = pooled(with_pool(Fleet(3000), owner))
    assert trigger.decide(KEY, request(1), PARTITION).by_pool
    assert not trigger.decide(KEY, request(2), PARTITION).by_pool


def test_an_impression_that_is_not_at_risk_goes_nowhere() -> None:
    decision = pooled(with_pool(Fleet(3000))).decide(KEY, encode(with_length(500)), PARTITION)
    assert (decision.reason, decision.job) == (DecisionReason.NOT_AT_RISK, None)
