"""The dense model's positions back from the end, times relative to a query, and relative bias by time.

Sources: Meta's generative-recommenders, the DLRM-v3 positional encoder and the ICML'24 research layer.
"""

from __future__ import annotations

import enum

import torch


class TimeBuckets(enum.StrEnum):
    """The function from a time difference to a row of the time table."""

    SQRT = "sqrt"
    LOG = "log"


def positions_from_end(size: int, num_targets: int, contextual: int, rows: int) -> torch.Tensor:
    """int64 [size]: rows of a position table of `rows` rows, counted back from the history's end.

    Contextual token i takes row i; a history token the number of places to the end, after the contextual rows; all
    targets the row of the end itself.
    """
    places = torch.arange(size)
    end = size - num_targets
    positions = (end - places.clamp(max=end) + contextual).clamp(max=rows - 1)
    first = min(contextual, size)
    positions[:first] = torch.arange(first)
    return positions


def time_rows(timestamps: torch.Tensor, seconds_per_unit: float, fn: TimeBuckets, rows: int) -> torch.Tensor:
    """int64 [tokens]: rows of a time table of `rows` rows, by the time before the last token."""
    if not timestamps.numel():
        return torch.empty(0, dtype=torch.int64)
    units = (timestamps[-1] - timestamps).float().clamp(min=1e-6) / seconds_per_unit
    grown = torch.log(units) if fn is TimeBuckets.LOG else torch.sqrt(units)
    return grown.clamp(min=0).to(torch.int64).clamp(max=rows - 1)


def relative_time_bias(weights: torch.Tensor, timestamps: torch.Tensor, log_base: float) -> torch.Tensor:
    """float [size, size]: by the time from key j to the row after i; of weights [buckets + 1], timestamps [size].

    The last row is its own following row. bucket = int(log(max(|dt|, 1)) / log_base), at most `buckets`.
    """
    following = torch.cat((timestamps[1:], timestamps[-1:]))
    apart = (following[:, None] - timestamps[None, :]).abs().clamp(min=1)
    buckets = (torch.log(apart.float()) / log_base).to(torch.int64).clamp(max=weights.numel() - 1)
    return weights[buckets]
