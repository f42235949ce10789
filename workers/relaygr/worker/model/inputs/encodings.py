"""Rows of the position table (places) and of the time table (ages).

With C contextual tokens, T candidates, H tokens of contextual part and history, and P rows, places are

    from the start   p(i) = min(i, P - 1), candidates all at min(H, P - 1): valid for any later request
    from the end     p(i) = i for i < C, else min(H - i + C, P - 1), candidates all at min(C, P - 1): valid for one
                     impression only, since one more behaviour moves every row

Sources: NVIDIA's recsys-examples (start), Meta's generative-recommenders (end). The age of a token is the time between
the token and the query; with f the square root or the logarithm,

    row = min(int(max(f(max(query - time, 1e-6) / unit), 0)), rows - 1)

Messages carry milliseconds, models were trained on seconds: `seconds` and `query_seconds` convert. Contextual tokens
have time 0, so their age is the largest. Source: Meta's generative-recommenders.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from relaygr.worker.model.options import TimeEncoding

Int64Array = NDArray[np.int64]


class Places(Protocol):
    """Computes rows of the position table."""

    def of_prefix(self, tokens: int) -> Int64Array:
        """Places [tokens] of a prefix, contextual tokens first."""

    def of_scored(self, prefix_tokens: int, suffix_tokens: int, candidates: int) -> Int64Array:
        """Places [suffix tokens + candidates] after a prefix of `prefix_tokens`."""


class FromStart:
    """Counts from the start. All candidates have the place after the last behaviour."""

    def __init__(self, rows: int) -> None:
        self._last = rows - 1

    def of_prefix(self, tokens: int) -> Int64Array:
        return np.minimum(np.arange(tokens, dtype=np.int64), self._last)

    def of_scored(self, prefix_tokens: int, suffix_tokens: int, candidates: int) -> Int64Array:
        places = np.arange(prefix_tokens, prefix_tokens + suffix_tokens + candidates, dtype=np.int64)
        return np.minimum(places, min(prefix_tokens + suffix_tokens, self._last), out=places)


class FromEnd:
    """Counts back from the end of the history. A suffix would change the places of the prefix, so it is refused."""

    def __init__(self, rows: int, contextual_tokens: int) -> None:
        self._last = rows - 1
        self._contextual = contextual_tokens

    def of_prefix(self, tokens: int) -> Int64Array:
        places = tokens - np.arange(tokens, dtype=np.int64) + self._contextual
        np.minimum(places, self._last, out=places)
        places[: self._contextual] = np.arange(min(tokens, self._contextual))
        return places

    def of_scored(self, prefix_tokens: int, suffix_tokens: int, candidates: int) -> Int64Array:  # noqa: ARG002
        if suffix_tokens:
            raise ValueError("positions count from the history's end: send the short-term behaviours in the history")
        return np.full(candidates, min(self._contextual, self._last), dtype=np.int64)


class NoPlaces:
    """For models without positions."""

    def of_prefix(self, tokens: int) -> Int64Array:
        return np.zeros(tokens, dtype=np.int64)

    def of_scored(self, prefix_tokens: int, suffix_tokens: int, candidates: int) -> Int64Array:  # noqa: ARG002
        return np.zeros(suffix_tokens + candidates, dtype=np.int64)


_LEAST_SECONDS = 1e-6
_MS_PER_SECOND = 1000


def seconds(times_ms: Int64Array) -> Int64Array:
    """Whole seconds of times in milliseconds."""
    return times_ms // _MS_PER_SECOND


def query_seconds(query_time_ms: int) -> int:
    """Whole seconds of a query time in milliseconds."""
    return query_time_ms // _MS_PER_SECOND


def age_rows(times: Int64Array, query_time: int, encoding: TimeEncoding, unit_seconds: float, rows: int) -> Int64Array:
    """int64 [tokens]: rows of a time table of `rows` rows. times, query_time: seconds."""
    # Meta's code computes in float32 with torch, too. Near the edge of a bucket, numpy's exact root differs.
    units = torch.from_numpy(query_time - times).float().clamp_(min=_LEAST_SECONDS).div_(unit_seconds)
    grown = units.log_() if encoding is TimeEncoding.LOG else units.sqrt_()
    ages: Int64Array = grown.clamp_(0, rows - 1).to(torch.int64).numpy()
    return ages


class Ages(Protocol):
    """Computes rows of the time table."""

    def of(self, times: Int64Array, query_time: int) -> Int64Array:
        """Rows of tokens. The times of tokens and query are in seconds."""


class BucketedAges:
    """Rows by the square root or logarithm of the age."""

    def __init__(self, encoding: TimeEncoding, unit_seconds: float, rows: int) -> None:
        self._encoding, self._unit_seconds, self._rows = encoding, unit_seconds, rows

    def of(self, times: Int64Array, query_time: int) -> Int64Array:
        return age_rows(times, query_time, self._encoding, self._unit_seconds, self._rows)


class NoAges:
    """For models without a time encoding."""

    def of(self, times: Int64Array, query_time: int) -> Int64Array:  # noqa: ARG002 - this model does not use it
        return np.zeros(times.size, dtype=np.int64)
