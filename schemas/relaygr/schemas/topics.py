"""The topic catalogue: the key, partitions, retention, writers and readers of every topic.

`retrieval`, `preinfer`, `ranking`, `history` and `behaviours` have the same partition count, so that the consumer that
owns a partition receives all of a user's messages. Kafka deletes only closed segments, so every
topic sets its segment time as well as its retention.
"""

from __future__ import annotations

import enum
import re
from dataclasses import dataclass, replace

from relaygr.schemas.limits import MAX_MESSAGE_BYTES

DEFAULT_PARTITIONS = 48
DEFAULT_PREFIX = "relaygr"
_PREFIX = re.compile(r"[a-zA-Z0-9][a-zA-Z0-9._-]{0,99}")

_MINUTE_MS = 60_000
_DAY_MS = 24 * 60 * _MINUTE_MS
_MIB = 1024 * 1024
# Room for headers, key and record overhead around a message of the largest size.
_RECORD_OVERHEAD_BYTES = 64 * 1024


class Cleanup(enum.StrEnum):
    """A topic's `cleanup.policy`."""

    DELETE = "delete"
    COMPACT = "compact"


class Topic(enum.StrEnum):
    """The topics. The value is the part of the name after the prefix."""

    RETRIEVAL = "retrieval"
    PREINFER = "preinfer"
    PREINFER_POOL = "preinfer-pool"
    RANKING = "ranking"
    RESULTS = "results"
    HISTORY = "history"
    BEHAVIOURS = "behaviours"
    OVERFLOW = "ranking-overflow"
    WORKERS = "workers"
    DEAD_LETTERS = "dead-letters"

    def named(self, prefix: str = DEFAULT_PREFIX) -> str:
        """The topic's full name. Raises ValueError if Kafka would refuse the prefix."""
        return f"{check_prefix(prefix)}.{self.value}"


@dataclass(frozen=True, slots=True)
class TopicSpec:
    """One topic: its key, value, writers and readers, and the settings that it is created and checked with."""

    topic: Topic
    key: str
    writers: str
    readers: str
    value: str
    cleanup: Cleanup
    retention_ms: int
    segment_ms: int
    segment_bytes: int
    max_message_bytes: int
    co_partitioned: bool = False
    partitions: int | None = None
    """A fixed partition count; None: the deployment's partition count."""
    max_compaction_lag_ms: int | None = None
    min_compaction_lag_ms: int | None = None
    """How long a compacted topic keeps a record after a newer one of its key; None: the cluster's default, not at all.
    """
    delete_retention_ms: int | None = None
    """How long a compacted topic keeps a tombstone; None: the cluster's default, a day."""
    durable: bool = False
    """Whether an acknowledged message must survive the loss of a broker. The others are useless after minutes, and are
    rather accepted by the last broker than refused.
    """

    def partition_count(self, partitions: int) -> int:
        """The topic's partition count in a deployment whose partition count is `partitions`."""
        return self.partitions if self.partitions is not None else partitions

    def config(self, min_insync_replicas: int = 1) -> dict[str, str]:
        """The topic's settings, by Kafka's names. `min_insync_replicas`: of the durable topics; the others have 1."""
        config = {
            "cleanup.policy": self.cleanup.value,
            "retention.ms": str(self.retention_ms),
            "segment.ms": str(self.segment_ms),
            "segment.bytes": str(self.segment_bytes),
            "max.message.bytes": str(self.max_message_bytes),
            "min.insync.replicas": str(min_insync_replicas if self.durable else 1),
        }
        if self.cleanup is Cleanup.DELETE:
            # Against a default of the brokers, which would delete messages long before their time.
            config["retention.bytes"] = "-1"
        if self.max_compaction_lag_ms is not None:
            config["max.compaction.lag.ms"] = str(self.max_compaction_lag_ms)
        if self.min_compaction_lag_ms is not None:
            config["min.compaction.lag.ms"] = str(self.min_compaction_lag_ms)
        if self.delete_retention_ms is not None:
            config["delete.retention.ms"] = str(self.delete_retention_ms)
        return config


def _minutes(topic: Topic, key: str, writers: str, readers: str, value: str, co_partitioned: bool) -> TopicSpec:
    return TopicSpec(
        topic, key, writers, readers, value, Cleanup.DELETE,
        retention_ms=10 * _MINUTE_MS, segment_ms=5 * _MINUTE_MS, segment_bytes=256 * _MIB,
        max_message_bytes=MAX_MESSAGE_BYTES + _RECORD_OVERHEAD_BYTES, co_partitioned=co_partitioned,
    )  # fmt: skip


CATALOGUE: dict[Topic, TopicSpec] = {
    spec.topic: spec
    for spec in (
        _minutes(Topic.RETRIEVAL, "user id", "gateway", "trigger (group)", "RetrievalEvent", True),
        _minutes(Topic.PREINFER, "user id", "trigger", "workers (group)", "PreInferJob", True),
        # One partition: every member of a share group reads it, so none waits for the session of a dead one to end.
        replace(
            _minutes(Topic.PREINFER_POOL, "user id", "trigger", "pre-infer workers (group)", "PreInferJob", False),
            partitions=1,
        ),
        _minutes(Topic.RANKING, "user id", "gateway", "workers (group)", "RankingRequest", True),
        _minutes(Topic.RESULTS, "request id", "workers", "gateway (assign, no group)", "RankingResult", False),
        TopicSpec(
            Topic.HISTORY, "user id", "feature pipeline, workers", "workers (assign, no group)", "History",
            Cleanup.COMPACT, retention_ms=-1, segment_ms=60 * _MINUTE_MS, segment_bytes=256 * _MIB,
            max_message_bytes=MAX_MESSAGE_BYTES + _RECORD_OVERHEAD_BYTES, co_partitioned=True,
            # An owner has that long to repeat a record that an older snapshot of a worker came after.
            max_compaction_lag_ms=2 * 60 * _MINUTE_MS, min_compaction_lag_ms=30 * _MINUTE_MS, durable=True,
            # Longer than a record stays in `behaviours` (retention and a segment): a worker that reads an old record
            # must find the tombstone that came after it.
            delete_retention_ms=9 * _DAY_MS,
        ),
        TopicSpec(
            Topic.BEHAVIOURS, "user id", "feature pipeline", "workers (assign, no group)", "BehaviourEvent",
            Cleanup.DELETE, retention_ms=7 * _DAY_MS, segment_ms=_DAY_MS, segment_bytes=256 * _MIB,
            max_message_bytes=_MIB, co_partitioned=True, durable=True,
        ),
        _minutes(Topic.OVERFLOW, "user id", "workers", "workers (a separate group)", "RankingRequest", False),
        TopicSpec(
            Topic.WORKERS, "worker id", "workers", "triggers and monitors (assign, no group)", "WorkerStatus",
            Cleanup.COMPACT, retention_ms=-1, segment_ms=5 * _MINUTE_MS, segment_bytes=16 * _MIB,
            max_message_bytes=_MIB, partitions=1, max_compaction_lag_ms=10 * _MINUTE_MS,
        ),
        TopicSpec(
            Topic.DEAD_LETTERS, "none", "all", "operators", "reason, origin and digest in headers; bodies by a setting",
            Cleanup.DELETE, retention_ms=7 * _DAY_MS, segment_ms=_DAY_MS, segment_bytes=256 * _MIB,
            max_message_bytes=MAX_MESSAGE_BYTES + _RECORD_OVERHEAD_BYTES, durable=True,
        ),
    )
}  # fmt: skip

CO_PARTITIONED: tuple[Topic, ...] = tuple(topic for topic, spec in CATALOGUE.items() if spec.co_partitioned)


def check_prefix(prefix: str) -> str:
    """Returns the prefix. Raises ValueError if Kafka would refuse it."""
    if not _PREFIX.fullmatch(prefix):
        raise ValueError(
            f"topic prefix {prefix!r}: use 1 to 100 of a-z, A-Z, 0-9, '.', '_' and '-', "
            "beginning with a letter or digit"
        )
    return prefix
