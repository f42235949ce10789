"""Histogram buckets of every latency that we count, in seconds."""

from __future__ import annotations

from typing import Final

LATENCY_BUCKETS_S: Final = (
    *(ms / 1000 for ms in range(1, 21)),
    *(ms / 1000 for ms in (25, 30, 40, 50, 60, 75, 100, 150, 200, 300, 500, 1000, 2500, 5000, 10_000)),
)
"""1 ms steps up to 20 ms: deadlines are tens of milliseconds, and a P99 is read off the buckets."""
