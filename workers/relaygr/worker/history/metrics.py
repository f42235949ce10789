"""What the history follower counts, and the gauges of the store."""

from __future__ import annotations

from prometheus_client import Counter, Gauge

from relaygr.kafka.log_reader import Loss
from relaygr.runtime.clock import Clock
from relaygr.schemas.topics import Topic
from relaygr.worker.history.batches import ApplyOutcome
from relaygr.worker.history.partitions import Restart
from relaygr.worker.history.store import HistoryStore

_RECORDS = Counter(
    "relaygr_history_records_total",
    "Records read from the history topic: applied, deleted (tombstones), older or repeated (skipped; of both topics), "
    "superseded (written by a worker, but overtaken), refused (the store is full), rejected (to dead letters)",
    ["outcome"],
)
_EVENTS = Counter(
    "relaygr_behaviour_records_total",
    "Records read from the behaviours topic: appended, after_gap (appended, though earlier ones are missing), late "
    "(left out, since later ones are stored), covered (by a snapshot or a deletion), duplicate, too_long (the history "
    "is full), rejected (to dead letters)",
    ["outcome"],
)
_AHEAD = Counter(
    "relaygr_history_ahead_total",
    "Stored records of both topics with the time of a behaviour that lies further ahead of the record's timestamp than "
    "worker.history_max_ahead_s: that time is not used",
)
_FAILURES = Counter(
    "relaygr_history_failures_total", "Failures after which the follower read again from the stored offsets"
)
_RESTARTS = Counter(
    "relaygr_history_restarts_total",
    "Partitions that were deleted from the history store and read from the beginning again, by reason: log_replaced "
    "(the log came back shorter, and may have grown again), offset_out_of_range (records were gone before they were "
    "read), deletions_may_be_missing (the store was not read for too long), refused_before (the store had no room), "
    "damaged (a stored history was not as it was stored: look after the disk)",
    ["reason"],
)
_UNCOVERED = Counter(
    "relaygr_history_uncovered_total",
    "Histories that named an offset beyond the end of the behaviours topic, which has lost its end: they take what "
    "comes from its present end on. What came between the loss and that moment is in none of them",
)
_PARTITIONS = Gauge("relaygr_history_partitions", "Followed history partitions by state", ["state"])
_USERS = Gauge("relaygr_history_users", "Users in the history store")
_BYTES = Gauge("relaygr_history_bytes", "Bytes in use in the history store")
_CAPACITY_BYTES = Gauge("relaygr_history_capacity_bytes", "Size limit of the history store")
_UNERASED_SECONDS = Gauge(
    "relaygr_history_unerased_seconds",
    "Time since the first deletion of a user whose bytes may still be in the files of the history store",
)
_BEHIND = Gauge(
    "relaygr_history_behind_offsets",
    "Offsets between the last record that was read and the end of the followed logs, by topic (history or behaviours). "
    "It grows while a transaction is open: what is behind its first record is read when it ends",
    ["topic"],
)


def count_applied(outcome: ApplyOutcome) -> None:
    """Counts what became of stored records."""
    for name, count in (
        ("applied", outcome.snapshots),
        ("deleted", len(outcome.deleted)),
        ("refused", len(outcome.refused)),
        ("older", outcome.older),
        ("superseded", outcome.superseded),
        ("repeated", outcome.repeated),
    ):
        _RECORDS.labels(name).inc(count)
    _AHEAD.inc(outcome.ahead)
    for added, count in outcome.added.items():
        _EVENTS.labels(added.value).inc(count)


def count_rejected(topic: Topic) -> None:
    """Counts a record of the history or the behaviours topic that cannot be used."""
    (_EVENTS if topic is Topic.BEHAVIOURS else _RECORDS).labels("rejected").inc()


def count_failure() -> None:
    _FAILURES.inc()


def count_restart(reason: Restart | Loss) -> None:
    _RESTARTS.labels(reason.value).inc()


def count_uncovered(histories: int) -> None:
    """Counts histories whose coverage was ended."""
    _UNCOVERED.inc(histories)


def show_store(store: HistoryStore, clock: Clock) -> None:
    _USERS.set(store.user_count)
    _BYTES.set(store.bytes_used)
    _CAPACITY_BYTES.set(store.max_bytes)
    removed_at_ms = store.removed_at_ms
    unerased_ms = 0 if removed_at_ms is None else clock.wall_us() // 1000 - removed_at_ms
    _UNERASED_SECONDS.set(max(0, unerased_ms) / 1000)


def show_reading(loading: int, caught_up: int, history_behind: int, behaviours_behind: int) -> None:
    """Partitions by state, and offsets that are not read yet."""
    _PARTITIONS.labels("loading").set(loading)
    _PARTITIONS.labels("caught_up").set(caught_up)
    _BEHIND.labels("history").set(history_behind)
    _BEHIND.labels("behaviours").set(behaviours_behind)
