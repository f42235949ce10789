"""The figures of an event: pure functions of the records of the traffic."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from relaygr.traffic.records import LOST, NOT_SENT, OPEN, UNDELIVERED, ImpressionRecord, in_time, is_whole

BACK_WINDOW_S = 3.0
"""The level of before is back once no window of this length is worse."""
DEVICE_S = 10.0
"""Device seconds are counted for so long after a worker has joined."""


@dataclass(frozen=True, slots=True)
class Phase:
    """The requests that were scheduled within a time."""

    requests: int
    late: int
    """Answered in whole, after their deadline."""
    not_whole: int
    """Truncated, expired, failed, or not sent."""
    lost: int
    """Without an answer."""

    @property
    def bad(self) -> int:
        return self.late + self.not_whole + self.lost

    def __str__(self) -> str:
        return f"{self.late} / {self.not_whole} / {self.lost} of {self.requests}"


@dataclass(frozen=True, slots=True)
class HandOver:
    """What it took to hand users over to a worker that joined."""

    worker_id: str
    histories_s: float
    """From its first partitions until it had their histories, and each partition an owner."""
    pre_infer_s: float
    """Device seconds of all workers in the first `DEVICE_S`, for jobs and requests."""
    warm_up_s: float
    """The same for warm-ups."""
    sources: Mapping[str, int] = field(default_factory=dict)
    """The first visits to it of users who had come to another worker, by the source of their prefix."""

    def __str__(self) -> str:
        sources = ", ".join(f"{count} {source}" for source, count in sorted(self.sources.items()))
        device = f"{self.pre_infer_s:.1f} s of pre-infer and {self.warm_up_s:.1f} s of warm-up in {DEVICE_S:.0f} s"
        return f"prefixes of moved users: {sources}; {device}; histories after {self.histories_s:.2f} s"


@dataclass(frozen=True, slots=True)
class EventRow:
    """What one event cost. Times are in seconds of the run, or from the event on."""

    event: str
    at_s: float
    ready_s: float
    """Until every process was ready again."""
    before: Phase
    during: Phase
    """From the event until the processes were ready."""
    after: Phase
    longest_ms: float
    """The longest wait for an answer, of the requests during and after the event."""
    back_s: float
    """Until the share of bad requests was that of before; 0 if it never was higher."""
    hand_over: HandOver | None
    """None: no worker joined."""


@dataclass(frozen=True, slots=True)
class Happened:
    """An event, by the monotonic clock."""

    event: str
    at_s: float
    ready_s: float
    hand_over: HandOver | None = None
    """Without `sources`."""


def is_lost(record: ImpressionRecord) -> bool:
    """Whether nobody answered the request."""
    return record.status in (LOST, OPEN, UNDELIVERED)


def row_of(happened: Happened, records: Sequence[ImpressionRecord], window_s: float, begun_s: float) -> EventRow:
    """The figures of an event, with a window of `window_s` before and after it."""
    at_s, ready_s = happened.at_s, happened.ready_s
    before = _between(records, at_s - window_s, at_s)
    during = _between(records, at_s, ready_s)
    after = _between(records, ready_s, ready_s + window_s)
    waits_us = [record.latency_us for record in (*during, *after) if record.latency_us is not None]
    return EventRow(
        event=happened.event,
        at_s=round(at_s - begun_s, 1),
        ready_s=round(ready_s - at_s, 2),
        before=_phase(before),
        during=_phase(during),
        after=_phase(after),
        longest_ms=max(waits_us, default=0) / 1000,
        back_s=round(_back_s(at_s, _phase(before), [*during, *after]), 2),
        hand_over=_with_sources(happened.hand_over, records) if happened.hand_over else None,
    )


def _with_sources(hand_over: HandOver, records: Sequence[ImpressionRecord]) -> HandOver:
    before: set[str] = set()
    moved: dict[str, str] = {}
    for record in sorted(records, key=lambda record: record.scheduled_us):
        if record.worker_id != hand_over.worker_id:
            before.add(record.user_id)
        elif record.user_id in before:
            moved.setdefault(record.user_id, record.prefix_source or record.path or record.status)
    return replace(hand_over, sources=dict(Counter(moved.values())))


def _between(records: Sequence[ImpressionRecord], from_s: float, to_s: float) -> list[ImpressionRecord]:
    return [record for record in records if from_s <= record.scheduled_us / 1e6 < to_s]


def _phase(records: Sequence[ImpressionRecord]) -> Phase:
    lost = sum(is_lost(record) for record in records)
    whole = [record for record in records if is_whole(record)]
    late = sum(not in_time(record) for record in whole)
    return Phase(len(records), late, len(records) - len(whole) - lost, lost)


def _back_s(at_s: float, before: Phase, records: Sequence[ImpressionRecord]) -> float:
    """When the last bad request of the last bad window was due. One request more than before is no bad window."""
    share = before.bad / before.requests if before.requests else 0.0
    due = sorted((record.scheduled_us / 1e6, not in_time(record)) for record in records)
    due_s = [second for second, _ in due]
    bad_s = [second for second, is_bad in due if is_bad]
    last_s = at_s
    for place, begin_s in enumerate(bad_s):
        ends_s = begin_s + BACK_WINDOW_S
        bad_end, requests = bisect_left(bad_s, ends_s), bisect_left(due_s, ends_s) - bisect_left(due_s, begin_s)
        if bad_end - place > share * requests + 1:
            last_s = bad_s[bad_end - 1]
    return last_s - at_s


def lost_outside(records: Sequence[ImpressionRecord], outages: Sequence[tuple[float, float]], margin_s: float) -> int:
    """Lost requests that were not under way while the broker was away. An answer can be away for `margin_s` more."""
    return sum(
        is_lost(record)
        and not any(begin_s - margin_s <= record.scheduled_us / 1e6 <= end_s + margin_s for begin_s, end_s in outages)
        for record in records
    )


def not_sent(records: Sequence[ImpressionRecord]) -> int:
    """Requests that the client's full queue refused."""
    return sum(record.status == NOT_SENT for record in records)
