"""How old tokens are: rows of the time table, by the time between a token and the query.

    row = min(int(max(f(max(query - time, 1e-6) / unit), 0)), rows - 1)        f: square root or logarithm

Messages carry milliseconds, models were trained on seconds: `seconds` is the one place where that is converted.
Contextual tokens have time 0, so they are as old as can be. Source: Meta's generative-recommenders.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from relaygr.worker.model.options import TimeEncoding

Int64Array = NDArray[np.int64]

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
    # In float32 and by torch's functions, as the original has it: near a bucket's edge numpy's exact root differs.
    units = torch.from_numpy(query_time - times).float().clamp_(min=_LEAST_SECONDS).div_(unit_seconds)
    grown = units.log_() if encoding is TimeEncoding.LOG else units.sqrt_()
    ages: Int64Array = grown.clamp_(0, rows - 1).to(torch.int64).numpy()
    return ages


class Ages(Protocol):
    """How times become rows of the time table."""

    def of(self, times: Int64Array, query_time: int) -> Int64Array:
        """Rows of tokens whose times, like the query's, are in seconds."""


class BucketedAges:
    """Square root or logarithm of the age."""

    def __init__(self, encoding: TimeEncoding, unit_seconds: float, rows: int) -> None:
        self._encoding, self._unit_seconds, self._rows = encoding, unit_seconds, rows

    def of(self, times: Int64Array, query_time: int) -> Int64Array:
        return age_rows(times, query_time, self._encoding, self._unit_seconds, self._rows)


class NoAges:
    """For models without a time encoding."""

    def of(self, times: Int64Array, query_time: int) -> Int64Array:  # noqa: ARG002 - not used by such a model
        return np.zeros(times.size, dtype=np.int64)
