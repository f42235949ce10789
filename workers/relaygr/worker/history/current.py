"""Marks partitions as current: stored up to the ends that their two logs had when the follower asked.

A store that was current long ago may have missed deletions. At the same intervals, old hashes of deleted users expire.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import structlog
from confluent_kafka import KafkaException

from relaygr.kafka.log_reader import LogReader
from relaygr.runtime.clock import Clock
from relaygr.schemas.topics import CATALOGUE, Topic
from relaygr.worker.history.partitions import FollowedPartition, LogEnds
from relaygr.worker.history.store import HistoryStore

log = structlog.get_logger()

# An older store may have missed deletions: topics that an earlier version created keep a tombstone for a day
# (`delete.retention.ms`).
MAX_STORE_AGE_MS: Final = 20 * 3600 * 1000
# No record of the behaviours topic outlives the tombstones of the history topic.
DELETED_KEPT_MS: Final = CATALOGUE[Topic.HISTORY].delete_retention_ms or MAX_STORE_AGE_MS
METADATA_S: Final = 2.0
_INTERVAL_US: Final = 300 * 1_000_000
_EXPIRY_US: Final = 24 * 3600 * 1_000_000
"""Time in which the follower looks once at the hash of every deleted user."""


class CurrentMarks:
    """Belongs to the follower's thread."""

    def __init__(self, store: HistoryStore, clock: Clock) -> None:
        self._store = store
        self._clock = clock
        self._asked_at_us = clock.monotonic_us()

    def turn(self, reader: LogReader, followed: Mapping[int, FollowedPartition]) -> None:
        """Asks for ends when it is time, and marks the partitions that are stored up to their ends, as of the time when
        these were asked for.

        A log with steady records is never stored up to its end of now: the next record comes meanwhile.
        """
        now_us = self._clock.monotonic_us()
        if now_us - self._asked_at_us >= _INTERVAL_US:
            self._asked_at_us = now_us
            asked_ms = self._clock.wall_us() // 1000
            self._ask_ends(reader, followed, asked_ms)
            self._store.expire(asked_ms - DELETED_KEPT_MS, _INTERVAL_US / _EXPIRY_US)
        current: dict[int, list[int]] = {}
        for number, partition in followed.items():
            if partition.ends is not None and partition.reached_ends:
                current.setdefault(partition.ends.asked_ms, []).append(number)
                partition.ends = None
        for asked_ms, partitions in current.items():
            self._store.mark_current(partitions, asked_ms)

    def _ask_ends(self, reader: LogReader, followed: Mapping[int, FollowedPartition], asked_ms: int) -> None:
        """Asks the broker for the ends of both logs, of partitions that are stored up to their earlier ends."""
        # A partition keeps its ends until it is stored up to them. With new ends at each interval, a partition that is
        # further behind than an interval would never be marked.
        asked = [partition for partition in followed.values() if partition.ends is None]
        try:
            ends = reader.ends([each for partition in asked for each in partition.logs], METADATA_S)
        except KafkaException as error:
            log.info("ends of the history logs not known", cause=error.args[0].str())
            return
        for partition in asked:
            history, behaviours = (ends.get(each) for each in partition.logs)
            if history is not None and behaviours is not None:
                partition.ends = LogEnds(asked_ms, history, behaviours)
