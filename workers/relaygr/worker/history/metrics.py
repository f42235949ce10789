"""Metrics of the history store and its follower."""

from __future__ import annotations

from prometheus_client import Counter, Gauge, Histogram

RECORDS = Counter(
    "relaygr_history_records_total",
    "Records read from the history topic: applied, deleted (tombstones), older or repeated (skipped), "
    "refused (the store is full), rejected (to dead letters)",
    ["outcome"],
)
REJECTED = Counter("relaygr_history_rejected_total", "Records sent to dead letters", ["reason"])
FAILURES = Counter("relaygr_history_failures_total", "Times the follower began again from the store's offsets")
RESTARTED_PARTITIONS = Counter(
    "relaygr_history_restarted_partitions_total", "Partitions read again from their beginning", ["reason"]
)
APPLY_SECONDS = Histogram(
    "relaygr_history_apply_seconds",
    "One transaction of the store",
    buckets=(0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5),
)
PARTITIONS = Gauge("relaygr_history_partitions", "Followed partitions by state", ["state"])
USERS = Gauge("relaygr_history_users", "Users in the store")
BYTES = Gauge("relaygr_history_bytes", "Bytes of the store that hold records")
CAPACITY_BYTES = Gauge("relaygr_history_capacity_bytes", "Size limit of the store")
UNDELIVERED = Gauge("relaygr_history_undelivered_dead_letters", "Dead letters without a delivery report yet")
