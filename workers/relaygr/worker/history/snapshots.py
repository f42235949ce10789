"""Snapshots that the owner of a partition writes, so that a new worker starts from snapshot and tail.

docs/histories.md says which histories are saved and when. Each record names the records that the owner had read
(`Continuation`, `RepeatedTombstone`), since a slow owner may write after the pipeline or after its successor. Kafka
keeps both records meanwhile (`min.compaction.lag.ms`). The follower's thread owns the writer.
"""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from confluent_kafka import KafkaError, KafkaException, Message
from prometheus_client import Counter, Gauge

from relaygr.kafka.client_errors import LimitedLog, why_undelivered
from relaygr.kafka.session import KafkaSession
from relaygr.runtime.clock import Clock
from relaygr.schemas.codec import EncodeError, encode
from relaygr.schemas.headers import Headers, RepeatedTombstone
from relaygr.schemas.record import record
from relaygr.schemas.topics import CATALOGUE, Topic
from relaygr.worker.history.records import Head
from relaygr.worker.history.store import HistoryStore

# No record of the behaviours topic lives longer than its retention and a segment.
LONGEST_EVENT_MS: Final = CATALOGUE[Topic.BEHAVIOURS].retention_ms + CATALOGUE[Topic.BEHAVIOURS].segment_ms
_BURST_S: Final = 4.0
_MOST_WAITING: Final = 8192
_MOST_UNDELIVERED: Final = 32


class SnapshotReason(enum.StrEnum):
    """Why a history is saved."""

    SUPERSEDED = "superseded"
    OLD = "old"
    GROWN = "grown"


@record(frozen=True, slots=True)
class SnapshotLimits:
    """When histories are saved, and how fast."""

    behaviours: int = 1024
    """Unsaved behaviours of a user from which the history is saved."""
    after_ms: int = 5 * 24 * 3600 * 1000
    """Age of an unsaved behaviour from which the history is saved."""
    bytes_per_s: int = 1024 * 1024
    """0: the worker saves no history. It still repeats tombstones."""
    scan_interval_s: float = 300.0
    """Time between two looks at all histories."""


def reason_of(head: Head, limits: SnapshotLimits, now_ms: int) -> SnapshotReason | None:
    """Why this history must be saved now; None: it need not, or has a gap."""
    if head.has_gap and not head.is_deleted:
        return None
    if head.is_superseded:
        return SnapshotReason.SUPERSEDED
    if head.unsaved and now_ms - head.unsaved_since_ms >= limits.after_ms:
        return SnapshotReason.OLD
    return SnapshotReason.GROWN if head.unsaved >= limits.behaviours else None


class ByteBudget:
    """A rate with a burst of a few seconds. A record may overdraw it, so that a large one is written, too."""

    def __init__(self, bytes_per_s: int, now_us: int) -> None:
        self._bytes_per_s = bytes_per_s
        self._left_bytes = bytes_per_s * _BURST_S
        self._at_us = now_us

    def has_room(self, now_us: int) -> bool:
        passed_s = max(0, now_us - self._at_us) / 1e6
        self._at_us = now_us
        self._left_bytes = min(self._left_bytes + self._bytes_per_s * passed_s, self._bytes_per_s * _BURST_S)
        return self._left_bytes > 0

    def spend(self, size_bytes: int) -> None:
        self._left_bytes -= size_bytes


@dataclass(frozen=True, slots=True)
class _Written:
    """What is written for a user: a value, or a tombstone with headers."""

    value: bytes | None
    headers: Headers


_FAILURES = Counter(
    "relaygr_history_snapshot_failures_total", "Histories that could not be saved; the worker tries again"
)
_OLDEST_SECONDS = Gauge(
    "relaygr_history_unsaved_seconds",
    "Age of the oldest behaviour that no snapshot has, when the worker last looked at all its histories; the "
    "behaviours topic keeps 7 days",
)


class SnapshotWriter:
    """Implements the module's contract. No I/O before the first history is due."""

    def __init__(
        self,
        session: KafkaSession,
        store: HistoryStore,
        client_id: str,
        limits: SnapshotLimits,
        clock: Clock,
        is_idle: Callable[[], bool] = lambda: True,
    ) -> None:
        """`is_idle`: whether the worker has nothing urgent to do."""
        self._store = store
        self._topic = session.kafka.topic(Topic.HISTORY)
        self._limits = limits
        self._clock = clock
        self._is_idle = is_idle
        self._producer = session.durable_producer(f"{client_id}-snapshots")
        self._budget = ByteBudget(limits.bytes_per_s, clock.monotonic_us())
        self._urgent: deque[tuple[int, str]] = deque()
        self._grown: deque[tuple[int, str]] = deque(maxlen=_MOST_WAITING)
        self._deleted: deque[tuple[int, str]] = deque()
        """Users whose tombstone must be repeated. It has no bytes, so it waits for no budget."""
        self._after: bytes | None = None
        """Where the present look at all histories goes on; None: it has ended."""
        self._scan_at_us = 0
        self._oldest_ms: int | None = None
        self._limited_log = LimitedLog(clock)

    def turn(self, partitions: frozenset[int]) -> None:
        """Looks at some histories of these partitions, and saves some of those that are due. Takes milliseconds."""
        if not partitions:
            return
        self._producer.poll()
        now_us = self._clock.monotonic_us()
        if self._after is None and now_us >= self._scan_at_us:
            self._after, self._oldest_ms = b"", None
        if self._after is not None and max(len(self._urgent), len(self._deleted)) < _MOST_WAITING:
            self._scan(partitions, now_us)
        while len(self._producer) < _MOST_UNDELIVERED:
            has_room = self._budget.has_room(now_us)
            if self._deleted:
                partition, user_id = self._deleted.popleft()
            elif not has_room:
                return
            elif self._urgent:
                partition, user_id = self._urgent.popleft()
            elif self._grown and self._is_idle():
                partition, user_id = self._grown.popleft()
            else:
                return
            if partition in partitions:
                self._save(partition, user_id)

    def close(self, timeout_s: float) -> None:
        """Waits for the delivery of written snapshots. One that is lost is due again at the next owner."""
        self._producer.flush(timeout_s)

    def _scan(self, partitions: frozenset[int], now_us: int) -> None:
        assert self._after is not None
        now_ms, saves = self._clock.wall_us() // 1000, self._limits.bytes_per_s > 0
        heads, self._after = self._store.heads_after(self._after, partitions)
        for each in heads:
            reason = reason_of(each.head, self._limits, now_ms)
            if each.head.is_deleted and reason is not None:
                self._deleted.append((each.partition, each.user_id))
            if each.head.is_deleted or not saves:
                continue
            if each.head.unsaved:
                since_ms = each.head.unsaved_since_ms
                self._oldest_ms = since_ms if self._oldest_ms is None else min(self._oldest_ms, since_ms)
            if reason is not None:
                (self._grown if reason is SnapshotReason.GROWN else self._urgent).append((each.partition, each.user_id))
        if self._after is None:
            self._scan_at_us = now_us + int(self._limits.scan_interval_s * 1e6)
            _OLDEST_SECONDS.set(0 if self._oldest_ms is None else max(0, now_ms - self._oldest_ms) / 1000)

    def _save(self, partition: int, user_id: str) -> None:
        """Saves a history, if that is due still."""
        now_ms = self._clock.wall_us() // 1000
        head = self._store.head(user_id)
        reason = None if head is None else reason_of(head, self._limits, now_ms)
        if head is None or reason is None or not (head.is_deleted or self._limits.bytes_per_s):
            return
        try:
            written = self._written(user_id, head, now_ms)
            if written is None:
                return
            self._producer.produce(
                self._topic, written.value, user_id.encode(), self._delivered, written.headers, partition
            )
        except (BufferError, KafkaException, EncodeError) as error:
            self._fail(str(error))
            return
        self._budget.spend(len(written.value or b""))

    def _written(self, user_id: str, head: Head, now_ms: int) -> _Written | None:
        if head.is_deleted:
            header = RepeatedTombstone(head.next_snapshot, head.covered_before_ms - 1, self._store.topic_id)
            return _Written(None, header.encode())
        history = self._store.saved(user_id, now_ms - LONGEST_EVENT_MS)
        return None if history is None else _Written(encode(history), [])

    def _delivered(self, error: KafkaError | None, _message: Message | None) -> None:
        if error is not None:
            self._fail(why_undelivered(error))

    def _fail(self, cause: str) -> None:
        _FAILURES.inc()
        self._limited_log.warning("histories cannot be saved; tries again", 0, topic=self._topic, cause=cause)
