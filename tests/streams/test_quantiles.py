"""Quantiles: one rule, that of numpy's `inverted_cdf`, for values and for counts of them."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from relaygr.runtime.quantiles import quantile, quantile_of_counts


@given(st.lists(st.integers(-5, 5), min_size=1, max_size=40), st.integers(0, 100))
def test_it_is_the_inverse_of_the_distribution(values: list[int], percent: int) -> None:
    share = percent / 100
    found = quantile(values, share)
    assert found == quantile_of_counts(Counter(values), share)
    assert found in values
    assert sum(each <= found for each in values) >= share * len(values) - 1e-6
    assert sum(each < found for each in values) < max(share * len(values), 1)


@pytest.mark.parametrize("percent", [10, 50, 90, 99, 100])
def test_of_a_hundred_values_it_is_the_one_at_its_percent(percent: int) -> None:
    values = np.random.default_rng(1).permutation(np.arange(1, 101)).tolist()
    assert quantile(values, 0.07) == 7
    assert quantile(values, percent / 100) == percent == np.percentile(values, percent, method="inverted_cdf")


def test_without_counts_there_is_none() -> None:
    assert quantile_of_counts({}, 0.5) is quantile_of_counts({3: 0}, 0.5) is None
