"""The latency model: its shape, its fits, and its on-line correction."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from relaygr.admission.corrector import MOST_LENGTH_RATIO, RECENT_MEASUREMENTS, Corrector
from relaygr.admission.fit import (
    AppendPoint,
    BatchPoint,
    RankPoint,
    ReloadPoint,
    fit,
    fit_append,
    fit_full,
    fit_shared,
    non_negative_least_squares,
)
from relaygr.admission.latency import LatencyModel, Stage, length_bucket
from relaygr.schemas.messages import LatencyCoefficients

MODEL = LatencyModel(LatencyCoefficients(300, 2, 0.001, 200, 1.5, 0.0008, 250, 3, 0.002, 20, 0.0001, 0.05))

coefficient = st.floats(0, 1e4, allow_nan=False)
models = st.builds(
    LatencyModel, st.builds(LatencyCoefficients, **dict.fromkeys(LatencyCoefficients.__dataclass_fields__, coefficient))
)
tokens = st.integers(0, 20_000)


@pytest.mark.parametrize("shared_us", [None, 40.0])
def test_the_time_of_a_pass_is_that_of_the_corrected_model(shared_us: float | None) -> None:
    calibrated = replace(MODEL, shared_us=shared_us)
    corrector = Corrector(calibrated)
    for number in range(50):
        size = 100 + 20 * number, 10 + number
        corrector.observe(Stage.HIT, calibrated.hit_us(*size), 1.3 * calibrated.hit_us(*size) + 80, size[0])
    for size in ((0, 1), (100, 10), (700, 128), (5000, 64)):
        model, time = corrector.model_at(size[0]), corrector.pass_time(*size)
        assert (time.alone_us, time.further_us) == pytest.approx((model.hit_us(*size), model.further_us(*size)))


@given(models, tokens, tokens, st.integers(0, 5_000))
def test_more_tokens_never_take_less_time(model: LatencyModel, n: int, m: int, more: int) -> None:
    assert model.full_us(n + more, m) >= model.full_us(n, m)
    assert model.full_us(n, m + more) >= model.full_us(n, m)
    assert model.pre_us(n + more) >= model.pre_us(n)
    assert model.append_us(n, m + more) >= model.append_us(n, m)
    assert model.append_us(n + more, m) >= model.append_us(n, m)
    assert model.hit_us(n + more, m) >= model.hit_us(n, m)
    assert model.hit_us(n, m + more) >= model.hit_us(n, m)
    assert model.reload_us(n + more) >= model.reload_us(n)


sizes = st.lists(st.tuples(tokens, tokens), min_size=1, max_size=8)


@given(models, sizes, st.none() | coefficient)
def test_a_batch_takes_no_longer_than_its_requests_one_by_one_and_no_less_than_one_of_them(
    model: LatencyModel, batch: list[tuple[int, int]], shared_us: float | None
) -> None:
    model = replace(model, shared_us=shared_us)
    alone = [model.hit_us(*size) for size in batch]
    assert alone[0] <= model.batch_us(batch) <= sum(alone) * (1 + 1e-9)
    assert model.batch_us(batch[:1]) == alone[0]
    assert model.batch_us([]) == 0.0
    assert model.batch_us([*batch, (0, 1)]) >= model.batch_us(batch)


@given(models, coefficient, st.floats(0.1, 8), st.floats(0, 1e4))
def test_what_a_batch_shares_is_corrected_like_the_fixed_part_of_a_hit(
    model: LatencyModel, shared_us: float, factor: float, extra_us: float
) -> None:
    model = replace(model, shared_us=shared_us)
    corrected = model.scaled({Stage.HIT: factor}, {Stage.HIT: extra_us})
    saved = corrected.hit_us(900, 40) - corrected.further_us(900, 40)
    assert saved == pytest.approx(min(shared_us * factor + extra_us, corrected.hit_us(900, 40)), rel=1e-6, abs=1e-3)


def test_what_a_batch_shares_is_the_median_of_the_measured_batches() -> None:
    def point(saved_us: float) -> BatchPoint:
        return BatchPoint(100, 24, 8, duration_us=8 * 500 - 7 * saved_us, alone_us=500)

    assert [point(saved).saved_us for saved in (0, 120)] == [0, 120]
    assert fit_shared([point(120), point(150), point(90)]) == 120
    assert fit_shared([point(-30)]) == 0.0, "a batch that is slower shares nothing"
    assert fit_shared([]) is None


def test_an_append_on_nothing_is_a_pre_infer() -> None:
    assert MODEL.append_us(0, 777) == MODEL.pre_us(777)


@given(tokens, tokens)
def test_a_prefix_in_two_pieces_costs_only_the_fixed_part_more(first: int, second: int) -> None:
    pieces = MODEL.append_us(0, first) + MODEL.append_us(first, second)
    assert pieces == pytest.approx(MODEL.pre_us(first + second) + MODEL.coefficients.b0)


@given(tokens, tokens, st.floats(0, 10))
def test_a_second_piece_also_reads_the_first(first: int, second: int, b3: float) -> None:
    model = LatencyModel(replace(MODEL.coefficients, b3=b3))
    more_us = model.append_us(0, first) + model.append_us(first, second) - model.pre_us(first + second)
    assert more_us == pytest.approx(MODEL.coefficients.b0 + b3 * first, abs=1e-3)


@given(models, tokens, st.floats(0, 1e6), st.integers(0, 30_000))
def test_the_longest_append_fits_and_one_more_token_does_not(
    model: LatencyModel, cached: int, budget_us: float, limit: int
) -> None:
    longest = model.longest_append(cached, budget_us, limit)
    if longest is None:
        assert model.coefficients.b0 + model.coefficients.b3 * cached > budget_us
    else:
        assert model.append_us(cached, longest) <= budget_us or longest == 0
        assert longest == limit or model.append_us(cached, longest + 1) > budget_us


def test_the_longest_append_of_a_budget_below_the_fixed_part_is_none() -> None:
    assert MODEL.longest_append(1000, 199.0, 512) is None
    assert MODEL.longest_append(0, MODEL.pre_us(100), 512) == 100


@pytest.mark.parametrize("bad", [-0.1, float("nan"), float("inf")])
def test_a_coefficient_that_is_negative_or_not_finite_is_refused_by_name(bad: float) -> None:
    values = {name: getattr(MODEL.coefficients, name) for name in LatencyCoefficients.__dataclass_fields__}
    with pytest.raises(ValueError, match="c1"):
        LatencyModel(LatencyCoefficients(**{**values, "c1": bad}))


def test_a_fit_of_exact_measurements_gives_the_coefficients_back() -> None:
    sizes = [(n, m) for n in (0, 128, 512, 2048, 4096) for m in (16, 64, 256)]
    fitted = fit(
        full=[RankPoint(n, m, MODEL.full_us(n, m)) for n, m in sizes],
        append=[AppendPoint(n, m, MODEL.append_us(n, m)) for n, m in sizes],
        hit=[RankPoint(n, m, MODEL.hit_us(n, m)) for n, m in sizes],
        reload=[ReloadPoint(b, MODEL.reload_us(b)) for b in (1 << 12, 1 << 16, 1 << 20)],
    )
    for name in LatencyCoefficients.__dataclass_fields__:
        assert getattr(fitted.coefficients, name) == pytest.approx(getattr(MODEL.coefficients, name), rel=1e-6), name


@given(st.lists(st.tuples(st.integers(1, 8192), st.floats(1, 1e6)), min_size=3, max_size=20, unique_by=lambda p: p[0]))
def test_a_fit_of_any_noise_is_never_negative(measured: list[tuple[int, float]]) -> None:
    assert all(value >= 0 for value in fit_append([AppendPoint(0, k, us) for k, us in measured]))


def test_a_fit_of_falling_times_is_flat_rather_than_negative() -> None:
    constant, linear, quadratic = fit_full([RankPoint(n, 0, 1000.0 - n / 10) for n in range(0, 1000, 100)])
    assert constant == pytest.approx(950, rel=0.05)
    assert linear == quadratic == 0


def test_too_few_sizes_or_a_duration_of_zero_is_refused() -> None:
    with pytest.raises(ValueError, match="2 distinct sizes"):
        fit_full([RankPoint(1, 1, 5.0), RankPoint(2, 2, 6.0), RankPoint(2, 2, 7.0)])
    with pytest.raises(ValueError, match="positive"):
        fit_full([RankPoint(1, 1, 5.0), RankPoint(2, 2, 0.0), RankPoint(3, 2, 7.0)])


@given(st.integers(0, 2**32 - 1))
def test_non_negative_least_squares_satisfies_its_optimality_conditions(seed: int) -> None:
    random = np.random.default_rng(seed)
    matrix, target = random.normal(size=(9, 3)), random.normal(size=9)
    solution = non_negative_least_squares(matrix, target)
    gradient = matrix.T @ (matrix @ solution - target)
    assert (solution >= 0).all()
    assert (gradient >= -1e-9).all(), "an unused column would have helped"
    assert abs(gradient @ solution) < 1e-9, "a used column is not at its optimum"


def test_ranking_few_candidates_pays_for_the_length_of_its_prefix() -> None:
    """Without the coefficient c3, the cost of reading a long prefix was charged to the candidates, or not at all."""
    measured = [RankPoint(n, m, 200 + 0.4 * n + 2 * m) for n in (256, 1024, 4096) for m in (16, 128)]
    model = fit(
        full=measured,
        append=[AppendPoint(0, k, 10.0 * k) for k in (64, 128, 256)],
        hit=measured,
        reload=[ReloadPoint(b, float(b)) for b in (1, 2, 3)],
    )
    assert model.coefficients.c3 == pytest.approx(0.4, rel=1e-6)
    assert model.hit_us(8192, 1) - model.hit_us(0, 1) == pytest.approx(0.4 * 8192, rel=1e-6)


def test_a_chunk_pays_for_the_cached_tokens_that_it_reads() -> None:
    """Without the coefficient b3, small chunks of a long prefix were predicted too short."""
    measured = [
        AppendPoint(n, k, 300 + 8.0 * k + 0.01 * k * (2 * n + k) + 4.0 * n) for n in (0, 512, 2048) for k in (64, 512)
    ]
    ranked = [RankPoint(n, 16, 10.0 * n) for n in (64, 128, 256)]
    model = fit(full=ranked, append=measured, hit=ranked, reload=[ReloadPoint(b, float(b)) for b in (1, 2, 3)])
    assert model.append_us(4096, 64) == pytest.approx(300 + 8 * 64 + 0.01 * 64 * (2 * 4096 + 64) + 4 * 4096, rel=1e-3)
    assert model.coefficients.b3 == pytest.approx(4.0, rel=1e-3)


def test_the_corrector_follows_a_device_that_became_slower() -> None:
    corrector = Corrector(MODEL, weight=0.1)
    for _ in range(100):
        corrector.observe(Stage.HIT, MODEL.hit_us(1000, 50), 1.5 * MODEL.hit_us(1000, 50))
    assert corrector.model.hit_us(400, 10) == pytest.approx(1.5 * MODEL.hit_us(400, 10), rel=0.01)
    assert corrector.model.full_us(400, 10) == MODEL.full_us(400, 10)


def test_the_corrector_tells_a_constant_from_a_factor_where_sizes_differ() -> None:
    """Predicted by one factor, large chunks seemed as dear as small ones, or small ones as cheap."""
    corrector = Corrector(MODEL)
    sizes = np.random.default_rng(0).integers(16, 2_000, 1_000).tolist()
    for tokens in sizes:
        calibrated_us = MODEL.pre_us(tokens)
        corrector.observe(Stage.PRE, calibrated_us, 1.3 * calibrated_us + 500)
    for tokens in (64, 400, 4_000):
        assert corrector.model.pre_us(tokens) == pytest.approx(1.3 * MODEL.pre_us(tokens) + 500, rel=0.05)
        assert corrector.model.append_us(900, tokens) == pytest.approx(
            1.3 * MODEL.append_us(900, tokens) + 500, rel=0.05
        )
    assert corrector.model.hit_us(400, 10) == MODEL.hit_us(400, 10)


def test_the_quality_of_predictions_is_that_of_each_moment_and_the_slowdown_that_of_the_calibration() -> None:
    corrector = Corrector(MODEL)
    assert corrector.quality(Stage.HIT) is None
    for _ in range(RECENT_MEASUREMENTS):
        corrector.observe(Stage.HIT, 1000.0, 1600.0)
    quality = corrector.quality(Stage.HIT)
    assert quality is not None
    assert quality.slowdown == 1.6
    # The first predictions were the calibrated times; the later ones are right.
    assert quality.ratio_p10 < 1
    assert (quality.ratio_p50, quality.ratio_p90) == pytest.approx((1, 1), abs=0.01)
    assert corrector.quality(Stage.PRE) is None


def test_lengths_at_which_the_formula_is_off_are_corrected_one_by_one() -> None:
    """A fit of three terms was off by -19 to +31 % at some lengths."""
    corrector, truth = Corrector(MODEL), {100: 1.3, 1000: 0.8, 8000: 1.0}
    for _ in range(300):
        for tokens, off in truth.items():
            calibrated_us = MODEL.pre_us(tokens)
            corrector.observe(Stage.PRE, calibrated_us, off * calibrated_us, tokens)
    for tokens, off in truth.items():
        assert corrector.model_at(tokens).pre_us(tokens) == pytest.approx(off * MODEL.pre_us(tokens), rel=0.05)
    assert corrector.model.pre_us(1000) != pytest.approx(0.8 * MODEL.pre_us(1000), rel=0.08), "the formula alone"
    assert corrector.model_at(1000).hit_us(1000, 50) == MODEL.hit_us(1000, 50)
    assert corrector.length_ratios(Stage.PRE)[length_bucket(30_000)] == 0, "it was not measured"


def test_a_length_without_measurements_is_predicted_as_on_average() -> None:
    corrector = Corrector(MODEL)
    for _ in range(100):
        corrector.observe(Stage.FULL, 1000.0, 1500.0, 500)
    assert corrector.model_at(5).full_us(5, 5) == pytest.approx(corrector.model.full_us(5, 5))


def test_one_stall_at_one_length_moves_its_correction_a_little() -> None:
    corrector = Corrector(MODEL)
    corrector.observe(Stage.HIT, 1000.0, 1e9, 500)
    assert corrector.length_ratios(Stage.HIT)[length_bucket(500)] < 1.15


def test_predictions_are_off_where_no_correction_reaches() -> None:
    corrector = Corrector(MODEL)
    for off in (False, True):
        for _ in range(RECENT_MEASUREMENTS):
            corrector.observe(Stage.HIT, 1000.0, 40_000.0 if off else 1000.0, 500)
        quality = corrector.quality(Stage.HIT)
        assert quality is not None and quality.is_off is off


@given(st.lists(st.tuples(st.floats(1, 1e6), st.floats(0, 1e7), st.integers(0, 2**26)), min_size=1), st.floats(0.01, 1))
def test_every_length_has_a_model_whatever_is_measured(measured: list[tuple[float, float, int]], weight: float) -> None:
    corrector = Corrector(MODEL, weight=weight)
    for calibrated_us, measured_us, tokens in measured:
        corrector.observe(Stage.PRE, calibrated_us, measured_us, tokens)
        model = corrector.model_at(tokens)
        assert model.pre_us(100) <= model.pre_us(200)
        ratio = corrector.length_ratios(Stage.PRE)[length_bucket(tokens)]
        assert 1 / MOST_LENGTH_RATIO <= ratio <= MOST_LENGTH_RATIO


@given(st.lists(st.tuples(st.floats(1, 1e6), st.floats(0, 1e7)), min_size=1), st.floats(0.01, 1))
def test_a_corrected_model_is_a_model_whatever_is_measured(pairs: list[tuple[float, float]], weight: float) -> None:
    corrector = Corrector(MODEL, weight=weight)
    for calibrated_us, measured_us in pairs:
        corrector.observe(Stage.PRE, calibrated_us, measured_us)
        model = corrector.model
        assert model.pre_us(100) <= model.pre_us(200)


def test_one_stall_moves_the_correction_by_its_weight_at_most() -> None:
    corrector = Corrector(MODEL, weight=0.05)
    corrector.observe(Stage.FULL, 1000.0, 1e9)
    assert corrector.factor(Stage.FULL) == pytest.approx(1.05)


@given(st.lists(st.floats(allow_nan=True, allow_infinity=True)))
def test_the_correction_stays_within_its_bounds_whatever_is_measured(measured: list[float]) -> None:
    corrector = Corrector(MODEL, weight=1.0, max_factor=4.0)
    for duration in measured:
        corrector.observe(Stage.PRE, 100.0, duration)
    assert 0.25 <= corrector.factor(Stage.PRE) <= 4.0


class ObservedMeanwhile(Corrector):
    """Resets the model as soon as it is made, as an observation on the device thread can."""

    def __setattr__(self, name: str, value: object) -> None:
        object.__setattr__(self, name, None if name == "_model" else value)


def test_the_corrected_model_may_be_read_while_the_device_is_observed() -> None:
    """The status thread once found no model for a moment."""
    assert ObservedMeanwhile(MODEL).model == MODEL
