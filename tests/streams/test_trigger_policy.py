"""The admission policy: a case for each reason, and properties of every case."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from relaygr.admission.latency import LatencyModel, Stage, length_bucket
from relaygr.admission.policy import (
    NOTHING_CACHED,
    CachedPrefix,
    Decision,
    DecisionReason,
    Estimate,
    ImpressionFacts,
    OwnerView,
    PolicyCase,
    PolicyLimits,
    PrefixTier,
    Refusal,
    decide,
    estimate,
)
from relaygr.schemas.messages import LENGTH_BUCKETS, LatencyCoefficients

NOW_US = 1_700_000_000_000_000
# 1 µs a token, without quadratic terms: full inference of n + m tokens takes n + m µs, pre-infer n, a hit m.
LINEAR = LatencyModel(LatencyCoefficients(0, 1, 0, 0, 1, 0, 0, 1, 0, 100, 0.01))
OWNER = OwnerView(
    worker_id="worker-00",
    partitions=frozenset(range(4)),
    latency=LINEAR,
    kv_bytes_per_token=10,
    contextual_tokens=0,
    tokens_per_behaviour=1,
    max_prefix_behaviours=50_000,
    hbm_capacity_bytes=10**6,
    dram_capacity_bytes=0,
    ranking_queue_p99_us=0,
    preinfer_queue_us=0,
)
LIMITS = PolicyLimits(fallback_behaviours=1000, assumed_behaviours=0, lead_fraction=1.0, lease_margin_us=0)
AT_RISK = ImpressionFacts(
    expected_ranking_at_us=NOW_US + 50_000,
    ranking_budget_us=20_000,
    history_behaviours=30_000,
    expected_suffix=10,
    expected_candidates=100,
)


class OpenBuckets:
    """Buckets that admit everything, and record the calls."""

    def __init__(self, refusal: Refusal | None = None) -> None:
        self.refusal = refusal
        self.admitted: list[Estimate] = []
        self.ranking_us: list[float] = []

    def admit(self, estimate: Estimate, now_us: int, scenario: str = "default") -> Refusal | None:
        if self.refusal is None:
            self.admitted.append(estimate)
        return self.refusal

    def count_ranking(self, device_us: float, now_us: int) -> None:
        self.ranking_us.append(device_us)


def decided(buckets: OpenBuckets | None = None, owner: OwnerView | None = OWNER, **changes: object) -> Decision:
    impression = dataclasses.replace(AT_RISK, **changes)  # type: ignore[arg-type]
    return decide(PolicyCase(impression, NOW_US, owner, buckets or OpenBuckets()), LIMITS)


CASES = [
    ("full inference would miss the budget", {}, OWNER, DecisionReason.ADMITTED),
    ("full inference just makes the budget", {"history_behaviours": 19_890}, OWNER, DecisionReason.NOT_AT_RISK),
    ("one behaviour more misses it", {"history_behaviours": 19_891}, OWNER, DecisionReason.ADMITTED),
    (
        "a short history behind a long ranking queue",
        {"history_behaviours": 5_000},
        dataclasses.replace(OWNER, ranking_queue_p99_us=16_000),
        DecisionReason.ADMITTED,
    ),
    ("lead and budget are too short", {"expected_ranking_at_us": NOW_US + 10_109}, OWNER, DecisionReason.INFEASIBLE),
    ("they are just long enough", {"expected_ranking_at_us": NOW_US + 10_110}, OWNER, DecisionReason.ADMITTED),
    (
        "the budget is long enough, but the request comes before the job",
        {"history_behaviours": 9_000, "expected_ranking_at_us": NOW_US},
        dataclasses.replace(OWNER, ranking_queue_p99_us=12_000),
        DecisionReason.INFEASIBLE,
    ),
    (
        "queued pre-infer work eats the lead",
        {},
        dataclasses.replace(OWNER, preinfer_queue_us=39_891),
        DecisionReason.INFEASIBLE,
    ),
    ("ranking was due before now", {"expected_ranking_at_us": NOW_US - 1}, OWNER, DecisionReason.INFEASIBLE),
    ("the impression is over", {"expected_ranking_at_us": NOW_US - 20_000}, OWNER, DecisionReason.EXPIRED),
    ("the history is empty", {"history_behaviours": 0}, OWNER, DecisionReason.NO_HISTORY),
    ("no history is named, and none is assumed", {"history_behaviours": None}, OWNER, DecisionReason.NO_HISTORY),
    ("owner unknown, long history", {"history_behaviours": 1000}, None, DecisionReason.NO_STATUS_THRESHOLD),
    ("owner unknown, short history", {"history_behaviours": 999}, None, DecisionReason.BELOW_THRESHOLD),
    ("owner unknown, no history", {"history_behaviours": 0}, None, DecisionReason.NO_HISTORY),
    ("owner unknown, ranking is due", {"expected_ranking_at_us": NOW_US}, None, DecisionReason.INFEASIBLE),
    ("owner unknown, over", {"expected_ranking_at_us": NOW_US - 20_000}, None, DecisionReason.EXPIRED),
]


@pytest.mark.parametrize(("changes", "owner", "reason"), [case[1:] for case in CASES], ids=[case[0] for case in CASES])
def test_an_impression_is_decided_by(changes: dict[str, object], owner: OwnerView | None, reason: str) -> None:
    decision = decided(owner=owner, **changes)
    assert decision.reason == reason
    assert decision.admit is (reason in (DecisionReason.ADMITTED, DecisionReason.NO_STATUS_THRESHOLD))


def test_costs_follow_what_the_owner_measured_at_the_length_of_the_prefix() -> None:
    bucket = length_bucket(30_000)
    ratios = {Stage.PRE: tuple(1.5 if each == bucket else 1.0 for each in range(LENGTH_BUCKETS))}
    owner = dataclasses.replace(OWNER, length_ratios=ratios)
    for behaviours, factor in ((30_000, 1.5), (1000, 1.0)):
        impression = dataclasses.replace(AT_RISK, history_behaviours=behaviours)
        cost, plain = (estimate(impression, behaviours, each, LIMITS, NOW_US) for each in (owner, OWNER))
        assert cost.prepare_us == pytest.approx(factor * plain.prepare_us)
        assert (cost.full_us, cost.hit_us) == (plain.full_us, plain.hit_us)


def test_while_the_owners_predictions_are_off_more_is_at_risk_and_less_is_feasible() -> None:
    off = dataclasses.replace(OWNER, predictions_off=True)
    short = {"history_behaviours": 17_000}
    assert [decided(owner=each, **short).reason for each in (OWNER, off)] == ["not_at_risk", "admitted"]
    tight = {"expected_ranking_at_us": NOW_US + 15_000}
    assert [decided(owner=each, **tight).reason for each in (OWNER, off)] == ["admitted", "infeasible"]


def test_without_the_question_of_risk_only_the_other_rules_refuse() -> None:
    everybody = dataclasses.replace(LIMITS, only_at_risk=False)
    short = dataclasses.replace(AT_RISK, history_behaviours=100)
    late = dataclasses.replace(short, expected_ranking_at_us=NOW_US)
    decisions = [decide(PolicyCase(each, NOW_US, OWNER), everybody) for each in (short, late)]
    assert [each.reason for each in decisions] == ["admitted", "infeasible"]


@pytest.mark.parametrize("refusal", Refusal)
def test_a_bucket_without_room_refuses_under_its_own_name(refusal: Refusal) -> None:
    decision = decided(OpenBuckets(refusal))
    assert not decision.admit
    assert decision.reason.value == refusal.value


def test_what_is_not_at_risk_charges_no_bucket_but_its_ranking_counts_as_load() -> None:
    buckets = OpenBuckets()
    decided(buckets, history_behaviours=100)
    assert buckets.admitted == []
    assert buckets.ranking_us == [100 + 110]


@pytest.mark.parametrize(
    ("cached", "left_us"),
    # Full inference of 5,000 + 110 tokens, a hit and its tail, a hit, and a hit after its reload.
    [
        (NOTHING_CACHED, 5_110),
        (CachedPrefix(PrefixTier.HBM, 4_900), 100 + 110),
        (CachedPrefix(PrefixTier.HBM, 5_000), 110),
        (CachedPrefix(PrefixTier.DRAM, 5_000), 100 + 0.01 * 50_000 + 110),
    ],
)
def test_a_ranking_without_a_job_counts_what_is_not_cached(cached: CachedPrefix, left_us: float) -> None:
    buckets = OpenBuckets()
    short = dataclasses.replace(AT_RISK, history_behaviours=5_000)
    assert decide(PolicyCase(short, NOW_US, OWNER, buckets, cached), LIMITS).reason is DecisionReason.NOT_AT_RISK
    assert buckets.ranking_us == [left_us]


@given(cached=st.integers(0, 40_000), tier=st.sampled_from(PrefixTier), behaviours=st.integers(0, 40_000))
def test_a_ranking_without_a_job_never_counts_more_than_full_inference(
    cached: int, tier: PrefixTier, behaviours: int
) -> None:
    cost = estimate(AT_RISK, behaviours, OWNER, LIMITS, NOW_US, CachedPrefix(tier, cached))
    assert cost.hit_us <= cost.alone_us <= cost.full_us


@pytest.mark.parametrize("refusal", [None, *Refusal])
def test_the_ranking_of_an_impression_at_risk_counts_as_a_hit(refusal: Refusal | None) -> None:
    """Whether admitted or not: a refusal that raised the load would cause the next refusal."""
    buckets = OpenBuckets(refusal)
    decided(buckets)
    assert buckets.ranking_us == [110]


def test_the_ranking_of_a_user_without_history_counts_what_is_computed() -> None:
    buckets, owner = OpenBuckets(), dataclasses.replace(OWNER, contextual_tokens=7)
    assert decided(buckets, owner, history_behaviours=0).reason is DecisionReason.NO_HISTORY
    assert buckets.ranking_us == [7 + 110]


def test_a_history_beyond_the_owners_longest_counts_its_newest_part_only() -> None:
    capped = dataclasses.replace(OWNER, max_prefix_behaviours=10_000)
    cost = estimate(AT_RISK, 30_000, capped, LIMITS, NOW_US)
    assert cost.prefix_tokens == 10_000


def test_an_assumed_length_stands_in_where_no_history_is_named() -> None:
    limits = dataclasses.replace(LIMITS, assumed_behaviours=25_000)
    unnamed = dataclasses.replace(AT_RISK, history_behaviours=None)
    decision = decide(PolicyCase(unnamed, NOW_US, OWNER, OpenBuckets()), limits)
    assert decision.admit
    assert decision.estimate is not None
    assert decision.estimate.prefix_tokens == 25_000


def cost_with(cached: CachedPrefix) -> Estimate:
    return estimate(AT_RISK, 30_000, OWNER, LIMITS, NOW_US, cached)


def test_a_prefix_in_hbm_is_charged_its_tail_only() -> None:
    cost = cost_with(CachedPrefix(PrefixTier.HBM, 29_000))
    assert cost.prepare_us == 1000
    assert cost.new_bytes == 10 * 1000


def test_a_prefix_wholly_in_hbm_costs_nothing() -> None:
    cost = cost_with(CachedPrefix(PrefixTier.HBM, 30_000))
    assert (cost.prepare_us, cost.new_bytes, cost.footprint_byte_us) == (0, 0, 0)


def test_a_prefix_in_dram_is_charged_its_reload_and_its_tail_but_all_of_its_bytes() -> None:
    cost = cost_with(CachedPrefix(PrefixTier.DRAM, 29_000))
    assert cost.prepare_us == 100 + 0.01 * 290_000 + 1000
    assert cost.new_bytes == 10 * 30_000


coefficients = st.builds(
    LatencyCoefficients, **dict.fromkeys(LatencyCoefficients.__dataclass_fields__, st.floats(0, 100))
)
owners = st.builds(
    OwnerView,
    worker_id=st.just("worker-00"),
    partitions=st.just(frozenset({0})),
    latency=st.builds(LatencyModel, coefficients),
    kv_bytes_per_token=st.integers(1, 40_000),
    contextual_tokens=st.integers(0, 8),
    tokens_per_behaviour=st.integers(1, 2),
    max_prefix_behaviours=st.integers(0, 20_000),
    hbm_capacity_bytes=st.integers(0, 2**36),
    dram_capacity_bytes=st.just(0),
    ranking_queue_p99_us=st.integers(0, 100_000),
    preinfer_queue_us=st.integers(0, 100_000),
)
impressions = st.builds(
    ImpressionFacts,
    expected_ranking_at_us=st.integers(NOW_US - 10**6, NOW_US + 10**7),
    ranking_budget_us=st.integers(1000, 1_000_000),
    history_behaviours=st.none() | st.integers(0, 131_072),
    expected_suffix=st.integers(0, 100),
    expected_candidates=st.integers(0, 2000),
)


@given(impressions, owners, st.integers(0, 5000))
def test_a_longer_history_never_stops_being_at_risk(impression: ImpressionFacts, owner: OwnerView, more: int) -> None:
    length = impression.history_behaviours or 1
    shorter, longer = (
        decide(PolicyCase(each, NOW_US, owner, OpenBuckets()), LIMITS)
        for each in (dataclasses.replace(impression, history_behaviours=count) for count in (length, length + more))
    )
    if shorter.admit:
        assert longer.reason in (DecisionReason.ADMITTED, DecisionReason.INFEASIBLE)
    if shorter.reason is DecisionReason.INFEASIBLE:
        assert longer.reason is DecisionReason.INFEASIBLE


@given(impressions, st.integers(0, 5000))
def test_without_an_owner_a_longer_history_is_never_refused_where_a_shorter_one_is_not(
    impression: ImpressionFacts, more: int
) -> None:
    length = impression.history_behaviours or 0
    longer = dataclasses.replace(impression, history_behaviours=length + more)
    shorter = dataclasses.replace(impression, history_behaviours=length)
    if decide(PolicyCase(shorter, NOW_US), LIMITS).admit:
        assert decide(PolicyCase(longer, NOW_US), LIMITS).admit


@given(impressions, owners)
def test_more_in_the_cache_never_costs_more(impression: ImpressionFacts, owner: OwnerView) -> None:
    """Where a cached token takes no longer to read than to compute."""
    assume(owner.latency.coefficients.b3 <= owner.latency.coefficients.b1)
    behaviours = impression.history_behaviours or 0
    tokens = owner.prefix_tokens(behaviours)
    cold = estimate(impression, behaviours, owner, LIMITS, NOW_US)
    warm = estimate(impression, behaviours, owner, LIMITS, NOW_US, CachedPrefix(PrefixTier.HBM, tokens // 2))
    assert warm.prepare_us <= cold.prepare_us * (1 + 1e-12)
    assert warm.new_bytes <= cold.new_bytes


@given(impressions, owners | st.none())
def test_an_admitted_impression_is_never_over_and_has_a_history(
    impression: ImpressionFacts, owner: OwnerView | None
) -> None:
    decision = decide(PolicyCase(impression, NOW_US, owner, OpenBuckets()), LIMITS)
    if decision.admit:
        assert impression.expected_ranking_at_us > NOW_US or (decision.estimate and decision.estimate.prepare_us == 0)
        assert impression.history_behaviours
