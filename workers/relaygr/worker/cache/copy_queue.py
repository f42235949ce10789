"""The order of copies, and how long the next one will take. Pure: no bytes, no threads; the time is passed in.

Copies share one link, so running many at once ends none of them earlier: at most `max_in_flight` (2, to hide
gaps) are under way, reloads by earliest deadline, spills only while no reload waits and one at a time. Jobs
and bytes are bounded, and spills may take half of either, so that they never keep a reload out.
"""

from __future__ import annotations

from dataclasses import dataclass

from relaygr.worker.cache.copies import CopyForecast, CopyPriority, CopyRequest

# Before the first copy is measured: what plain memory does.
_FIRST_GUESS_US_PER_BYTE = 1 / 4096
_NEWEST_WEIGHS = 0.2
# How long a speed is believed that nothing measures again. Copies that were slow for a moment, beside a process that
# starts up say, would else look slow for good: what does not pay is not tried.
_BELIEVED_US = 1_000_000


@dataclass(frozen=True, slots=True)
class CopyLimits:
    """Bounds of a queue. A copy larger than `max_bytes` is taken when nothing else is there."""

    max_in_flight: int = 2
    max_jobs: int = 256
    max_bytes: int = 1 << 30

    def __post_init__(self) -> None:
        if min(self.max_in_flight, self.max_jobs, self.max_bytes) < 1:
            raise ValueError(f"a copy queue needs room for one copy: {self}")


class CopyQueue:
    """Copies that wait and that are under way. Its owner guards it."""

    def __init__(self, page_bytes: int, limits: CopyLimits) -> None:
        self._page_bytes = page_bytes
        self._limits = limits
        self._waiting: list[CopyRequest] = []
        self._started_us: dict[CopyRequest, int] = {}
        self._jobs = dict.fromkeys(CopyPriority, 0)
        self._bytes = dict.fromkeys(CopyPriority, 0)
        self._spills_in_flight = 0
        self._last_done_us = 0
        # Encoding takes another time than decoding, and the way there than the way back.
        self._us_per_byte: dict[CopyPriority, float] = {}
        self._measured_us: dict[CopyPriority, int] = {}

    def __len__(self) -> int:
        """Copies waiting and under way."""
        return sum(self._jobs.values())

    def push(self, request: CopyRequest) -> bool:
        """Queues a copy; False if it is over the bounds."""
        size_bytes = request.size_bytes(self._page_bytes)
        jobs, taken_bytes = self._jobs[CopyPriority.SPILL], self._bytes[CopyPriority.SPILL]
        max_jobs, max_bytes = self._limits.max_jobs // 2, self._limits.max_bytes // 2
        if request.priority is CopyPriority.RELOAD:
            # Also a spill that is larger than its half takes no more than that from reloads.
            jobs = min(jobs, max_jobs) + self._jobs[CopyPriority.RELOAD]
            taken_bytes = min(taken_bytes, max_bytes) + self._bytes[CopyPriority.RELOAD]
            max_jobs, max_bytes = self._limits.max_jobs, self._limits.max_bytes
        if jobs and (jobs >= max_jobs or taken_bytes + size_bytes > max_bytes):
            return False
        self._jobs[request.priority] += 1
        self._bytes[request.priority] += size_bytes
        self._waiting.append(request)
        return True

    def start(self, now_us: int) -> CopyRequest | None:
        """The copy to do next; None if there is none, or as many as may be are under way."""
        if not self._waiting or len(self._started_us) >= self._limits.max_in_flight:
            return None
        # They are few, and one that waits may become more urgent.
        request = min(self._waiting, key=_urgency)
        is_spill = request.priority is CopyPriority.SPILL
        if is_spill and self._spills_in_flight:
            return None
        self._waiting.remove(request)
        self._spills_in_flight += is_spill
        self._started_us[request] = now_us
        return request

    def end(self, request: CopyRequest, now_us: int, copied: bool) -> None:
        """A copy under way ended; one that went well is measured."""
        started_us = self._started_us.pop(request)
        self._spills_in_flight -= request.priority is CopyPriority.SPILL
        self._leave(request)
        size_bytes = request.size_bytes(self._page_bytes)
        if copied and size_bytes:
            # Copies under way together share the link: each is charged from where the one before ended.
            busy_us = now_us - max(started_us, self._last_done_us)
            known = self._hoped_rate(request.priority, now_us)
            self._measured_us[request.priority] = now_us
            self._us_per_byte[request.priority] = known + _NEWEST_WEIGHS * (busy_us / size_bytes - known)
        self._last_done_us = now_us

    def drain(self) -> list[CopyRequest]:
        """Removes and returns all that wait."""
        waiting, self._waiting = sorted(self._waiting, key=_urgency), []
        for request in waiting:
            self._leave(request)
        return waiting

    def forecast(self, size_bytes: int, priority: CopyPriority, now_us: int) -> CopyForecast:
        """What goes before it, and its own time, at the speed measured lately.

        With no copy of its kind there, and none measured for a while, the first one is forecast as quick.
        """
        ahead_bytes = {each: self._bytes[each] if each <= priority else 0 for each in CopyPriority}
        if priority is CopyPriority.RELOAD:
            under_way = (each for each in self._started_us if each.priority is CopyPriority.SPILL)
            ahead_bytes[CopyPriority.SPILL] = sum(each.size_bytes(self._page_bytes) for each in under_way)
        return CopyForecast(
            wait_us=sum(size * self._rate(each) for each, size in ahead_bytes.items()),
            copy_us=size_bytes * self._hoped_rate(priority, now_us),
        )

    def _rate(self, priority: CopyPriority) -> float:
        """µs a byte: as measured, else as the other kind was, else a guess."""
        known = self._us_per_byte
        return known.get(priority, next(iter(known.values()), _FIRST_GUESS_US_PER_BYTE))

    def _hoped_rate(self, priority: CopyPriority, now_us: int) -> float:
        known = self._rate(priority)
        is_old = now_us - self._measured_us.get(priority, now_us) > _BELIEVED_US
        return min(known, _FIRST_GUESS_US_PER_BYTE) if is_old and not self._jobs[priority] else known

    def _leave(self, request: CopyRequest) -> None:
        self._jobs[request.priority] -= 1
        self._bytes[request.priority] -= request.size_bytes(self._page_bytes)


def _urgency(request: CopyRequest) -> tuple[CopyPriority, int]:
    return request.priority, request.deadline.at_us
