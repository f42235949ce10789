"""The risk of the full path: quantiles of the worker, margins of the trigger, and both in a closed loop."""

from __future__ import annotations

import dataclasses
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from relaygr.admission.latency import LatencyModel
from relaygr.admission.risk import (
    CALM_US,
    EVIDENCE,
    HORIZON_US,
    LEAST_MARGIN,
    LEAST_OUTSIDE,
    LEAST_SAMPLES,
    MISSED_FOR_US,
    MOST_MARGIN,
    NO_FACTORS,
    OLDEST_US,
    RAISE,
    SETTLE_US,
    FullPathObserver,
    RiskFeedback,
    RiskTargets,
    factors_of,
    full_path_us,
    length_bucket,
    risky_us,
)
from relaygr.schemas.messages import LENGTH_BUCKETS, FullPathReport, LatencyCoefficients

LINEAR = LatencyModel(LatencyCoefficients(0, 10, 0, 0, 10, 0, 0, 10, 0, 0, 0))
"""10 µs a token, by either formula."""
SHORT, LONG = 300, 3_000
TARGETS = RiskTargets(missed_share=0.01)
DECISIONS = round(EVIDENCE / TARGETS.missed_share)
SHORT_BUCKET, LONG_BUCKET = length_bucket(SHORT), length_bucket(LONG)


def report(
    missed: tuple[str, ...] = (), prepared: dict[int, int] | None = None, needless: dict[int, int] | None = None
) -> FullPathReport:
    counts = [tuple((each or {}).get(bucket, 0) for bucket in range(LENGTH_BUCKETS)) for each in (prepared, needless)]
    return FullPathReport(0, (), counts[0], counts[1], missed)


# -- the prediction --------------------------------------------------------------------------------


def test_the_full_path_is_predicted_by_the_later_of_the_formula_and_the_workers_plan():
    planned_later = LatencyModel(dataclasses.replace(LINEAR.coefficients, b1=20))
    measured_later = LatencyModel(dataclasses.replace(LINEAR.coefficients, a1=20))
    assert full_path_us(LINEAR, 100, 10) == 1_100
    assert full_path_us(planned_later, 100, 10) == 2_100
    assert full_path_us(measured_later, 100, 10) == 2_200


def test_a_factor_counts_for_its_own_bucket_and_bounds_all_longer_ones_from_below():
    factors = [*NO_FACTORS]
    factors[SHORT_BUCKET] = 3.0
    assert risky_us(LINEAR, factors, NO_FACTORS, SHORT, 0) == 3 * 10 * SHORT
    just_longer = 1 << SHORT_BUCKET
    assert risky_us(LINEAR, factors, NO_FACTORS, just_longer, 0) == 3 * 10 * (just_longer - 1)
    assert risky_us(LINEAR, factors, NO_FACTORS, LONG, 0) == 10 * LONG


coefficients = st.builds(
    LatencyCoefficients, **dict.fromkeys(LatencyCoefficients.__dataclass_fields__, st.floats(0, 100))
)
all_factors = st.lists(st.floats(0.1, 10), min_size=LENGTH_BUCKETS, max_size=LENGTH_BUCKETS)


@given(coefficients, all_factors, st.integers(0, 200_000), st.integers(0, 200_000), st.integers(0, 1000))
def test_a_longer_prefix_is_never_less_risky(
    latency: LatencyCoefficients, factors: list[float], tokens: int, more: int, scored: int
):
    model = LatencyModel(latency)
    assert risky_us(model, factors, NO_FACTORS, tokens, scored) <= risky_us(
        model, factors, NO_FACTORS, tokens + more, scored
    ) * (1 + 1e-12)


@given(coefficients, all_factors, st.integers(0, 200_000), st.integers(0, 1000), st.integers(0, LENGTH_BUCKETS - 1))
def test_a_larger_factor_is_never_less_risky(
    latency: LatencyCoefficients, factors: list[float], tokens: int, scored: int, bucket: int
):
    model = LatencyModel(latency)
    larger = [*factors]
    larger[bucket] *= 1.5
    assert risky_us(model, factors, NO_FACTORS, tokens, scored) <= risky_us(model, larger, NO_FACTORS, tokens, scored)


@given(coefficients, all_factors, st.integers(0, 200_000), st.integers(0, 1000))
def test_the_risk_is_the_largest_over_the_own_and_all_shorter_buckets(
    latency: LatencyCoefficients, factors: list[float], tokens: int, scored: int
):
    model, own = LatencyModel(latency), length_bucket(tokens)
    shorter = [factors[bucket] * full_path_us(model, (1 << bucket) - 1, scored) for bucket in range(own)]
    worst_us = max([factors[own] * full_path_us(model, tokens, scored), *shorter])
    assert risky_us(model, factors, NO_FACTORS, tokens, scored) == worst_us


def test_unknown_and_absent_ratios_are_one_and_wild_ones_are_bounded():
    assert factors_of((0.0, 100.0, 0.01, 1.5)) == (1.0, 8.0, 0.5, 1.5, *[1.0] * (LENGTH_BUCKETS - 4))
    assert len(factors_of((2.0,) * 100)) == LENGTH_BUCKETS


# -- the worker ------------------------------------------------------------------------------------


def test_the_time_outside_is_a_high_quantile_and_not_a_mean():
    observer = FullPathObserver()
    for number in range(100):
        observer.outside.append((number, 20_000 if number % 50 == 0 else 1_000))
    assert observer.report(LINEAR, 100).outside_us == 20_000


def outside_after(recent: int, later_us: int = HORIZON_US) -> int:
    """The time outside after a load at which requests waited, and so many that did not, so much later."""
    observer = FullPathObserver()
    for number in range(100):
        observer.outside.append((number, 50_000))
    for number in range(recent):
        observer.outside.append((later_us + 1_000 + number, 1_000))
    return observer.report(LINEAR, later_us + 2_000).outside_us


def test_the_time_outside_follows_the_present_load():
    assert outside_after(LEAST_OUTSIDE) == 1_000


def test_if_few_requests_are_young_older_ones_count_too_but_not_for_ever():
    # At a low rate 99 % of few requests find no queue, and the next one may find one.
    assert outside_after(LEAST_OUTSIDE - 2) == 50_000
    assert outside_after(LEAST_OUTSIDE - 2, later_us=OLDEST_US) == 1_000


def waits_of(full_us: int, others_us: int, samples: int = LEAST_SAMPLES) -> FullPathObserver:
    """One request in two hundred takes the full path."""
    observer = FullPathObserver(window=200 * samples)
    for number in range(200 * samples):
        waited = number, full_us if number % 200 == 0 else others_us
        observer.outside.append(waited)
        if number % 200 == 0:
            observer.outside_full.append(waited)
    return observer


def test_the_full_path_waits_for_longer_than_the_work_that_overtakes_it():
    sent = waits_of(97_000, 21_000).report(LINEAR, 5_000)
    assert (sent.outside_us, sent.full_outside_us) == (21_000, 97_000)


def test_the_wait_of_the_full_path_is_known_only_while_it_is_measured():
    """An old one would put all at risk, so that no new one is measured."""
    observer = waits_of(97_000, 21_000)
    assert observer.report(LINEAR, HORIZON_US).full_outside_us == 97_000
    assert observer.report(LINEAR, 2 * HORIZON_US).full_outside_us is None
    assert waits_of(97_000, 21_000, samples=LEAST_SAMPLES - 1).report(LINEAR, 5_000).full_outside_us is None


def test_a_prepared_request_is_not_needless_if_full_inference_would_have_waited_for_too_long():
    for full_us, needless in ((21_000, 1), (97_000, 0)):
        observer = waits_of(full_us, 21_000)
        observer.prepared.append((SHORT, 0, 10 * SHORT + 10_000))
        assert observer.report(LINEAR, 5_000).needless[SHORT_BUCKET] == needless


def test_without_observations_nothing_is_known():
    first = FullPathObserver().report(LINEAR, 0)
    assert (first.outside_us, first.full_outside_us) == (0, None)
    assert factors_of(first.ratios) == NO_FACTORS


def test_a_ratio_is_by_length_and_a_length_with_few_runs_takes_the_common_one():
    observer = FullPathObserver()
    for _ in range(LEAST_SAMPLES):
        observer.ran(SHORT, 0, 20 * SHORT, 0)
    observer.ran(LONG, 0, 10 * LONG, 0)
    ratios = observer.report(LINEAR, 0).ratios
    assert ratios[SHORT_BUCKET] == 2.0
    assert ratios[LONG_BUCKET] == 2.0
    for _ in range(LEAST_SAMPLES):
        observer.ran(LONG, 0, 10 * LONG, 0)
    assert observer.report(LINEAR, 0).ratios[LONG_BUCKET] == 1.0


def test_a_single_outlier_does_not_count_and_old_runs_do_not():
    """At risk, a length has no new runs: two slow ones would keep it so for good."""
    observer = FullPathObserver()
    for _ in range(62):
        observer.ran(SHORT, 0, 10 * SHORT, 0)
    observer.ran(SHORT, 0, 80 * SHORT, 0)
    assert observer.report(LINEAR, 1).ratios[SHORT_BUCKET] == 1.0
    observer.ran(SHORT, 0, 80 * SHORT, 0)
    assert observer.report(LINEAR, OLDEST_US).ratios[SHORT_BUCKET] == 8.0
    assert observer.report(LINEAR, OLDEST_US + 1).ratios[SHORT_BUCKET] == 0.0


def test_ratios_are_of_the_model_of_the_same_status():
    observer = FullPathObserver()
    for _ in range(LEAST_SAMPLES):
        observer.ran(SHORT, 0, 20 * SHORT, 0)
    corrected = LatencyModel(LatencyCoefficients(0, 20, 0, 0, 20, 0, 0, 20, 0, 0, 0))
    assert observer.report(corrected, 0).ratios[SHORT_BUCKET] == 1.0


def test_a_prepared_request_is_needless_if_full_inference_would_have_had_the_time():
    observer = FullPathObserver()
    observer.prepared.append((SHORT, 0, 10 * SHORT))
    observer.prepared.append((SHORT, 0, 10 * SHORT - 1))
    sent = observer.report(LINEAR, 0)
    assert (sent.prepared[SHORT_BUCKET], sent.needless[SHORT_BUCKET]) == (2, 1)


def test_a_missed_request_is_named_for_a_while_since_a_status_may_get_lost():
    observer = FullPathObserver()
    observer.missed("r1", 1_000)
    assert observer.report(LINEAR, 1_000).missed == ("r1",)
    assert observer.report(LINEAR, MISSED_FOR_US).missed == ("r1",)
    assert observer.report(LINEAR, MISSED_FOR_US + 1_001).missed == ()


# -- the trigger -----------------------------------------------------------------------------------


def judged(feedback: RiskFeedback, count: int, now_us: int, tokens: int = SHORT, name: str = "r") -> list[str]:
    names = [f"{name}{number}" for number in range(count)]
    for each in names:
        feedback.judged(each, tokens, now_us)
    return names


def test_only_requests_that_this_trigger_judged_are_misjudged_and_each_once():
    feedback = RiskFeedback(TARGETS)
    names = judged(feedback, 3, 0)
    assert feedback.take("w", report(missed=(names[0], "of-another-trigger")), 1) == [SHORT_BUCKET]
    assert feedback.take("w", report(missed=(names[0],)), 2) == []


def test_misjudged_requests_raise_the_margin_of_their_length_only():
    feedback = RiskFeedback(TARGETS)
    names = judged(feedback, 50, 0)
    feedback.take("w", report(missed=tuple(names[:2])), 1)
    assert feedback.margins[SHORT_BUCKET] == RAISE
    assert [margin for margin in feedback.margins if margin != 1.0] == [RAISE]


def test_one_missed_request_or_few_of_many_change_nothing():
    feedback = RiskFeedback(TARGETS)
    names = judged(feedback, 1, 0)
    feedback.take("w", report(missed=tuple(names)), 1)
    names = judged(feedback, 400, 2, LONG, "l")
    feedback.take("w", report(missed=tuple(names[:3])), 3)
    assert list(feedback.margins) == list(NO_FACTORS)


def test_outcomes_of_decisions_before_a_change_do_not_change_the_margin_again():
    feedback = RiskFeedback(TARGETS)
    names = judged(feedback, 50, 0)
    feedback.take("w", report(missed=tuple(names[:2])), 1)
    assert feedback.take("w", report(missed=tuple(names[2:12])), SETTLE_US) == [SHORT_BUCKET] * 10
    assert feedback.margins[SHORT_BUCKET] == RAISE


def prepared(feedback: RiskFeedback, total: int, needless: int, now_us: int) -> None:
    feedback.take("w", report(prepared={SHORT_BUCKET: total}, needless={SHORT_BUCKET: needless}), now_us)


def test_needlessly_prepared_requests_lower_the_margin_and_the_first_status_is_only_the_baseline():
    feedback = RiskFeedback(TARGETS)
    prepared(feedback, 1_000, 1_000, 0)
    assert feedback.margins[SHORT_BUCKET] == 1.0
    prepared(feedback, 1_340, 1_034, 1)
    assert feedback.margins[SHORT_BUCKET] == 1.0
    prepared(feedback, 1_360, 1_054, 2)
    assert feedback.margins[SHORT_BUCKET] < 1.0


def test_the_margin_falls_only_after_so_many_decisions_that_a_missed_one_would_have_shown():
    """It fell with 20 needless ones, again and again, while only a few requests an hour went without a job."""
    feedback = RiskFeedback(TARGETS)
    prepared(feedback, 0, 0, 0)
    prepared(feedback, 100, 100, 1)
    judged(feedback, DECISIONS - 101, 2)
    feedback.take("v", report(), 3)
    assert feedback.margins[SHORT_BUCKET] == 1.0
    judged(feedback, 1, 4, name="last")
    feedback.take("v", report(), 5)
    assert feedback.margins[SHORT_BUCKET] < 1.0


@pytest.mark.parametrize("missed_share", [0.0, 0.0005])
def test_the_margin_falls_for_the_smallest_targets_too(missed_share: float):
    feedback = RiskFeedback(RiskTargets(missed_share))
    for step in range(60):
        prepared(feedback, 100 * step, 100 * step, step)
    assert feedback.margins[SHORT_BUCKET] < 1.0


def test_the_totals_of_a_restarted_worker_are_a_new_baseline():
    feedback = RiskFeedback(TARGETS)
    prepared(feedback, 1_000, 0, 0)
    prepared(feedback, 500, 500, 1)
    assert feedback.margins[SHORT_BUCKET] == 1.0


def test_after_a_rise_the_margin_does_not_fall_for_a_while():
    feedback = RiskFeedback(TARGETS)
    names = judged(feedback, 50, 0)
    prepared(feedback, 0, 0, 0)
    feedback.take("w", report(missed=tuple(names[:2])), 1)
    prepared(feedback, 300, 300, SETTLE_US + 1)
    prepared(feedback, 320, 320, CALM_US)
    assert feedback.margins[SHORT_BUCKET] == RAISE
    prepared(feedback, 340, 340, CALM_US + 1)
    assert feedback.margins[SHORT_BUCKET] < RAISE


steps = st.lists(
    st.tuples(
        st.integers(0, 3_000_000),
        st.integers(0, 60),
        st.integers(0, 60),
        st.integers(0, 100),
        st.integers(0, 100),
    ),
    max_size=40,
)


@given(steps)
def test_for_any_outcomes_a_margin_stays_in_its_bounds_and_falls_only_without_misses(
    outcomes: list[tuple[int, int, int, int, int]],
):
    feedback = RiskFeedback(TARGETS)
    now_us, total, wasted = 0, 0, 0
    raised_us: int | None = None
    for step, (wait_us, decided, missed, ready, needless) in enumerate(outcomes):
        now_us += wait_us
        names = judged(feedback, decided, now_us, name=f"{step}-")
        total, wasted = total + ready, wasted + min(ready, needless)
        before = feedback.margins[SHORT_BUCKET]
        found = feedback.take("w", report(tuple(names[:missed]), {SHORT_BUCKET: total}, {SHORT_BUCKET: wasted}), now_us)
        after = feedback.margins[SHORT_BUCKET]
        assert len(found) == min(decided, missed)
        assert LEAST_MARGIN <= after <= MOST_MARGIN
        if after < before:
            assert min(decided, missed) <= 0.005 * 1_000 + 1
            assert raised_us is None or now_us - raised_us >= CALM_US
        if after > before:
            assert min(decided, missed) > 0
            raised_us = now_us


@pytest.mark.parametrize(
    ("slowness", "spread", "needless_share"), [(1.0, 0.01, 0.25), (1.6, 0.01, 0.25), (2.5, 0.01, 0.25), (1.6, 0.1, 0.5)]
)
def test_in_a_closed_loop_few_are_missed_and_few_are_prepared_needlessly(
    slowness: float, spread: float, needless_share: float
):
    """Full inference takes `slowness` times its prediction. Where its time spreads, a low risk costs preparations."""
    rng = random.Random(1)
    feedback, observer = RiskFeedback(TARGETS), FullPathObserver()
    budget_us, now_us = 32_000.0, 0
    decided = missed = ready = needless = 0
    sent = observer.report(LINEAR, now_us)
    for number in range(5_000):
        now_us += 20_000
        if number % 25 == 0:
            sent = observer.report(LINEAR, now_us)
            feedback.take("w", sent, now_us)
        tokens = rng.randint(200, 4_000)
        outside_us = rng.uniform(500, 1_500)
        took_us = full_path_us(LINEAR, tokens, 100) * slowness * rng.lognormvariate(0, spread)
        factors = [ratio * margin for ratio, margin in zip(factors_of(sent.ratios), feedback.margins, strict=True)]
        observer.outside.append((now_us, outside_us))
        ends_in_time = outside_us + took_us <= budget_us
        is_warm = number >= 2_500
        if sent.outside_us + risky_us(LINEAR, factors, NO_FACTORS, tokens, 100) > budget_us:
            observer.prepared.append((tokens, 100, (budget_us - outside_us) / slowness))
            ready += is_warm
            needless += is_warm and ends_in_time
            continue
        feedback.judged(f"r{number}", tokens, now_us)
        decided += is_warm
        missed += is_warm and not ends_in_time
        if ends_in_time:
            observer.ran(tokens, 100, took_us, now_us)
        else:
            observer.missed(f"r{number}", now_us)
    assert missed <= 0.01 * 2_500
    assert needless <= needless_share * ready
