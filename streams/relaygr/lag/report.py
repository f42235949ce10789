"""The lag report: lag in messages and in seconds, status and owner split, from the last polls. Pure.

Lag in seconds is the time for which the next message of a group has been waiting. It comes from one of two sources:

* `interpolated`: the time at which the end of the log passed the committed offset, interpolated between two polls. It
  needs no read and only our own clock. The error is less than one poll interval.
* `record`: the timestamp of the message at the committed offset, read once and compared with our wall clock. The error
  is the difference between our clock and the producer's. A timestamp that cannot be true gives no lag in seconds.
"""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from relaygr.consumer.watermark import TopicPartition
from relaygr.kafka.record_time import is_record_time
from relaygr.lag.model import GroupMember, GroupSnapshot, PartitionOffsets, Snapshot, owner_split
from relaygr.lag.settings import LagSettings
from relaygr.lag.status import LagSample, LagStatus, cadence_polls, evaluate, worst

GroupPartition = tuple[str, TopicPartition]


class TimeLagSource(enum.StrEnum):
    """The source of a lag in seconds."""

    CAUGHT_UP = "caught_up"
    INTERPOLATED = "interpolated"
    RECORD = "record"


@dataclass(frozen=True, slots=True)
class TimeLag:
    """A lag in seconds."""

    seconds: float
    source: TimeLagSource


class EndOffsets:
    """The end offsets of one log at the last polls, at most `capacity` of them."""

    def __init__(self, capacity: int) -> None:
        self._polls: deque[tuple[int, int]] = deque(maxlen=capacity)

    def add(self, polled_at_us: int, end: int) -> None:
        """Adds the end at a monotonic time. A lower end means a recreated topic: earlier ends are dropped."""
        if self._polls and end < self._polls[-1][1]:
            self._polls.clear()
        if len(self._polls) >= 2 and self._polls[-1][1] == self._polls[-2][1] == end:
            # The end did not move. Only the first and the last poll with this end are kept.
            self._polls.pop()
        self._polls.append((polled_at_us, end))

    def time_lag(self, committed: int) -> TimeLag | None:
        """Seconds since the end of the log passed `committed`, as of the last poll.

        None if that was before the oldest poll that is kept; the timestamp of the record is then needed.
        """
        if not self._polls:
            return None
        now_us, end = self._polls[-1]
        if committed >= end:
            return TimeLag(0.0, TimeLagSource.CAUGHT_UP)
        before: tuple[int, int] | None = None
        for polled_at_us, offset in self._polls:
            if offset > committed:
                break
            before = (polled_at_us, offset)
        else:
            raise AssertionError("the last end is beyond the commit")
        if before is None:
            return None
        # The message at `committed` is the (committed - before + 1)-th of those that arrived in between.
        share = (committed - before[1] + 1) / (offset - before[1])
        arrived_us = before[0] + share * (polled_at_us - before[0])
        return TimeLag(max(0.0, (now_us - arrived_us) / 1e6), TimeLagSource.INTERPOLATED)


def record_time_lag(wall_us: int, timestamp_ms: int) -> TimeLag | None:
    """The lag since the timestamp of a record; None if the timestamp cannot be true."""
    if not is_record_time(timestamp_ms, wall_us // 1000):
        return None
    return TimeLag(max(0.0, (wall_us - timestamp_ms * 1000) / 1e6), TimeLagSource.RECORD)


def _longest(times: Sequence[TimeLag | None]) -> TimeLag | None:
    """None if one is unknown: the others can be zero while messages wait."""
    known = [time for time in times if time is not None]
    return max(known, key=lambda time: time.seconds, default=None) if len(known) == len(times) else None


@dataclass(frozen=True, slots=True)
class PartitionReport:
    """One partition of one group."""

    topic: str
    partition: int
    committed: int | None
    end: int | None
    lag: int | None
    time_lag: TimeLag | None
    owner: GroupMember | None
    status: LagStatus
    start: int | None = None
    """The first offset that can still be read."""
    unread: int | None = None
    """Messages that wait, if the group never committed."""
    lost: int = 0
    """Messages that were deleted before the group read them."""


@dataclass(frozen=True, slots=True)
class GroupReport:
    """One group. `lag` is the sum over its partitions, `max_lag` and `max_time_lag` are their maxima; None: unknown."""

    group: str
    state: str
    protocol: str
    assignor: str
    members: int | None
    """None if the cluster does not report members."""
    lag: int | None
    max_lag: int | None
    max_time_lag: TimeLag | None
    """None also if the lag in seconds of one partition that is behind is unknown."""
    without_commit: int
    owner_split: tuple[int, ...]
    status: LagStatus
    problems: tuple[str, ...]
    partitions: tuple[PartitionReport, ...]
    lost: int = 0
    """Messages that were deleted before the group read them."""


@dataclass(frozen=True, slots=True)
class LagReport:
    """All groups at one time."""

    cluster_id: str
    polled_at_us: int
    wall_us: int
    settled: bool
    """Whether there were enough polls to judge progress."""
    groups: tuple[GroupReport, ...]

    @property
    def status(self) -> LagStatus:
        return worst(group.status for group in self.groups)


class LagTracker:
    """Keeps the last polls. Partitions that a snapshot no longer contains are dropped."""

    def __init__(self, settings: LagSettings, co_partitioned: Mapping[str, tuple[str, ...]]) -> None:
        """`co_partitioned`: group name -> topics of which one member must own the same partitions."""
        self._settings = settings
        self._co_partitioned = co_partitioned
        self._histories: dict[GroupPartition, deque[LagSample]] = {}
        self._ends: dict[TopicPartition, EndOffsets] = {}
        self._record_ms: dict[tuple[TopicPartition, int], int] = {}
        """Timestamps of the records that were read, by their offsets: only of those at which a group is."""
        self._polls = 0

    def observe(self, snapshot: Snapshot) -> None:
        """Adds one poll."""
        self._polls += 1
        seen: set[GroupPartition] = set()
        logs: dict[TopicPartition, int] = {}
        positions: set[tuple[TopicPartition, int | None]] = set()
        for group in snapshot.groups:
            for offsets in group.partitions:
                key = (group.group, offsets.tp)
                seen.add(key)
                history = self._histories.get(key)
                if history is None:
                    history = self._histories[key] = deque(maxlen=self._settings.window_polls)
                is_owned = group.is_owned(offsets.tp)
                history.append(
                    LagSample(offsets.committed, offsets.lag, offsets.unread, is_owned, offsets.is_beyond_end)
                )
                positions.add((offsets.tp, offsets.position))
                if offsets.end is not None:
                    logs[offsets.tp] = max(offsets.end, logs.get(offsets.tp, 0))
        for tp, end in logs.items():
            self._ends.setdefault(tp, EndOffsets(10 * self._settings.window_polls)).add(snapshot.polled_at_us, end)
        self._histories = {key: history for key, history in self._histories.items() if key in seen}
        self._ends = {tp: ends for tp, ends in self._ends.items() if tp in logs}
        self._record_ms = {place: time_ms for place, time_ms in self._record_ms.items() if place in positions}

    def unknown_times(self, snapshot: Snapshot) -> dict[TopicPartition, int]:
        """The offsets whose records must be read to know the lag in seconds, the lowest of each partition."""
        wanted: dict[TopicPartition, int] = {}
        for group in snapshot.groups:
            for offsets in group.partitions:
                position = offsets.position
                if position is None or not offsets.lag or (offsets.tp, position) in self._record_ms:
                    continue
                if self._ends[offsets.tp].time_lag(position) is None:
                    wanted[offsets.tp] = min(position, wanted.get(offsets.tp, position))
        return wanted

    def learn(self, timestamps_ms: Mapping[TopicPartition, tuple[int, int]]) -> None:
        """Adds the records that were read: (requested offset, timestamp of the first record from there)."""
        for tp, (offset, timestamp_ms) in timestamps_ms.items():
            self._record_ms[tp, offset] = timestamp_ms

    def report(self, snapshot: Snapshot) -> LagReport:
        """The report of the snapshot, which must be the last one observed."""
        settled = self._polls >= self._settings.window_polls
        groups = tuple(self._group(snapshot, group) for group in snapshot.groups)
        return LagReport(snapshot.cluster_id, snapshot.polled_at_us, snapshot.wall_us, settled, groups)

    def _group(self, snapshot: Snapshot, group: GroupSnapshot) -> GroupReport:
        partitions = tuple(self._partition(snapshot, group, offsets) for offsets in group.partitions)
        lags = [row.lag for row in partitions if row.lag is not None]
        times = [row.time_lag for row in partitions if row.committed is not None]
        status = worst(row.status for row in partitions)
        # A group that could not be measured has no figures. One without commits has no lag.
        is_measured = bool(lags) or status is not LagStatus.UNKNOWN
        split = owner_split(group, self._co_partitioned.get(group.group, ()))
        return GroupReport(
            group=group.group,
            state=group.state,
            protocol=group.protocol,
            assignor=group.assignor,
            members=None if group.members is None else len(group.members),
            lag=sum(lags) if is_measured else None,
            max_lag=max(lags, default=0) if is_measured else None,
            max_time_lag=_longest(times),
            without_commit=sum(row.committed is None for row in partitions),
            owner_split=tuple(sorted(split)),
            status=status,
            problems=group.problems,
            partitions=partitions,
            lost=sum(row.lost for row in partitions),
        )

    def _partition(self, snapshot: Snapshot, group: GroupSnapshot, offsets: PartitionOffsets) -> PartitionReport:
        return PartitionReport(
            topic=offsets.tp.topic,
            partition=offsets.tp.partition,
            committed=offsets.committed,
            end=offsets.end,
            lag=offsets.lag,
            time_lag=self._time_lag(snapshot, offsets),
            owner=group.owner(offsets.tp),
            status=evaluate(
                self._histories[(group.group, offsets.tp)],
                self._settings.window_polls,
                self._settings.ok_messages,
                cadence_polls(self._settings.interval_s),
            ),
            start=offsets.start,
            unread=offsets.unread,
            lost=offsets.lost,
        )

    def _time_lag(self, snapshot: Snapshot, offsets: PartitionOffsets) -> TimeLag | None:
        position = offsets.position
        if position is None or offsets.lag is None:
            return None
        if offsets.lag == 0:
            return TimeLag(0.0, TimeLagSource.CAUGHT_UP)
        interpolated = self._ends[offsets.tp].time_lag(position)
        if interpolated is not None:
            return interpolated
        timestamp_ms = self._record_ms.get((offsets.tp, position))
        return None if timestamp_ms is None else record_time_lag(snapshot.wall_us, timestamp_ms)
