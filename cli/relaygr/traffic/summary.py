"""The figures of a run of any length: counts, and latencies in buckets, so that the memory is bounded."""

from __future__ import annotations

import math
import threading
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from relaygr.runtime.quantiles import quantile_of_counts
from relaygr.traffic.records import ImpressionRecord, ending, in_time

_BUCKETS_A_DOUBLING = 64
"""A bucket is 1.1 % wide, so a percentile is at most 0.6 % off."""


@dataclass(frozen=True, slots=True)
class TrafficFigures:
    """The figures of a run, over all its requests."""

    requests: int
    late: int
    """Requests without an untruncated answer within their deadline."""
    p50_ms: float | None
    """Latency of the answered requests, from the scheduled time; None without an answer."""
    p99_ms: float | None
    endings: Mapping[str, int]
    """The number of requests by path (ranked requests) or by status and reason (the others)."""

    @property
    def late_share(self) -> float:
        return self.late / self.requests if self.requests else 0.0


class TrafficSummary:
    """Adds records up, from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._requests = 0
        self._late = 0
        self._endings: Counter[str] = Counter()
        self._latencies: Counter[int] = Counter()

    def add(self, record: ImpressionRecord) -> None:
        """Counts one record."""
        with self._lock:
            self._requests += 1
            self._late += not in_time(record)
            self._endings[ending(record)] += 1
            if record.latency_us is not None:
                self._latencies[round(_BUCKETS_A_DOUBLING * math.log2(max(1, record.latency_us)))] += 1

    def figures(self) -> TrafficFigures:
        """The figures of the records so far."""
        with self._lock:
            endings = dict(self._endings.most_common())
            p50_ms, p99_ms = self._percentile_ms(0.5), self._percentile_ms(0.99)
            return TrafficFigures(self._requests, self._late, p50_ms, p99_ms, endings)

    def _percentile_ms(self, share: float) -> float | None:
        bucket = quantile_of_counts(self._latencies, share)
        return None if bucket is None else float(2 ** (bucket / _BUCKETS_A_DOUBLING)) / 1000
