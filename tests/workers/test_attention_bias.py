"""Buckets of the bias by time: the edges agree with the formula in float32 for any sizes."""

from __future__ import annotations

import time

import pytest
import torch
from pydantic import ValidationError

from relaygr.worker.model.attention.bias import bucket_edges
from relaygr.worker.model.options import RelativeBias


@pytest.mark.parametrize(
    ("buckets", "log_base"), [(128, 0.301), (3, 0.301), (20, 1.0), (64, 100.0), (65_536, 1e-6), (65_536, 5e-4)]
)
def test_a_time_falls_into_the_bucket_of_the_formula(buckets: int, log_base: float) -> None:
    edges = bucket_edges(RelativeBias(positions=1, time_buckets=buckets, log_base=log_base))
    near = (edges[:, None] + torch.arange(-1, 2)).flatten().clamp(min=0)
    random = torch.randint(0, 2**31, (10_000,), generator=torch.Generator().manual_seed(0))
    seconds = torch.cat((torch.arange(3_000), near, random, torch.tensor([2**53])))
    expected = (torch.log(seconds.clamp(min=1).float()) / log_base).clamp(max=buckets).to(torch.int64)
    assert torch.equal(torch.bucketize(seconds, edges, right=True), expected)


def test_the_edges_of_the_most_buckets_are_computed_quickly() -> None:
    start_s = time.process_time()
    bucket_edges(RelativeBias(positions=1, time_buckets=65_536, log_base=1e-4))
    assert time.process_time() - start_s < 2


def test_a_base_that_is_too_small_for_float32_is_refused() -> None:
    with pytest.raises(ValidationError, match="log_base"):
        RelativeBias(positions=1, time_buckets=9, log_base=1e-46)
