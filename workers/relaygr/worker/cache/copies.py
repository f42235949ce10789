"""Copies of pages between the tiers: the request, its order in the queue, and its forecast.

The cache asks for copies and a `Mover` makes them; this module is the contract between the two. It moves no
bytes and imports no torch. Only `LayerArrival` has a lock.
"""

from __future__ import annotations

import enum
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from relaygr.schemas.record import record
from relaygr.worker.cache.results import PageArray, Tier

# Each launch costs the host some microseconds, so the layers of a long prefix are reloaded in groups.
_MOST_LAUNCHES = 2048
# The speed of plain memory, assumed before the first copy is measured.
_FIRST_GUESS_US_PER_BYTE = 1 / 4096
_NEWEST_WEIGHS = 0.2
# A measured speed counts this long without a new measurement. Without a limit, copies that were slow for a moment
# (for example beside a process that starts) would look slow for ever, since a reload that does not pay is not tried.
_MEASUREMENT_LIFE_US = 1_000_000


class CopyPriority(enum.IntEnum):
    """The lower number goes first."""

    RELOAD = 0
    SPILL = 1


@dataclass(slots=True, eq=False)
class Deadline:
    """The monotonic time by which a copy is needed. A request that joins the wait may need the copy earlier."""

    at_us: int

    def bring_forward(self, at_us: int) -> None:
        self.at_us = min(self.at_us, at_us)


class ReloadFailedError(RuntimeError):
    """A layer of a prefix did not arrive. Results computed on the prefix are invalid."""


class LayerArrival:
    """A reload that arrives layer by layer: a request may be ranked on the first layers while the last are copied.

    The copier calls `launch` for every group of layers and `begin` once the first has arrived. A reader of the pages
    calls `wait` just before it reads a layer (the `layer_ready` hook of the engine). Once the reload has `failed`,
    the reader discards its results. Every method may be called from any thread.
    """

    def __init__(self, num_layers: int) -> None:
        self._lock = threading.Lock()
        self._waits: list[Callable[[], None] | None] = [None] * num_layers
        self._begun = False
        self._failed = False
        self._callbacks: list[Callable[[], None]] = []

    @property
    def begun(self) -> bool:
        """Whether the first layer has arrived and no failure is known."""
        return self._begun and not self._failed

    @property
    def failed(self) -> bool:
        return self._failed

    def add_begun_callback(self, callback: Callable[[], None]) -> None:
        """Calls `callback()` once the first layer arrives, at once if it has; not if the reload fails first."""
        with self._lock:
            if self._failed:
                return
            if not self._begun:
                self._callbacks.append(callback)
                return
        callback()

    def launch(self, low: int, high: int, wait: Callable[[], None]) -> None:
        """The copier has launched layers [low, high). `wait()` makes the caller's stream wait for them."""
        with self._lock:
            self._waits[low:high] = [wait] * (high - low)

    def begin(self) -> None:
        """The first layer has arrived, and the copier has launched all others."""
        with self._lock:
            if self._failed or self._begun:
                return
            self._begun = True
            callbacks, self._callbacks = self._callbacks, []
        for callback in callbacks:
            callback()

    def fail(self) -> None:
        """The reload will not be complete."""
        with self._lock:
            self._failed = True
            self._callbacks = []

    def wait(self, layer: int) -> None:
        """Makes the calling thread's stream wait for the layer. Raises ReloadFailedError if the layer will not come."""
        wait = self._waits[layer]
        if self._failed or wait is None:
            raise ReloadFailedError(f"layer {layer} of a prefix was not reloaded")
        try:
            wait()
        except Exception as error:
            self.fail()
            raise ReloadFailedError(f"layer {layer} of a prefix was not reloaded: {error}") from error


class QueuedCopy(Protocol):
    """The part of a copy that its queue needs."""

    @property
    def priority(self) -> CopyPriority: ...

    @property
    def deadline(self) -> Deadline: ...

    def size_bytes(self, page_bytes: int) -> int: ...


CopyT = TypeVar("CopyT", bound=QueuedCopy)


@record(frozen=True, slots=True, eq=False)
class CopyRequest:
    """Copy `source_pages[i]` of one tier to `target_pages[i]` of the other, for all i or not at all.

    The mover calls `on_done(ok)` once, from any thread, without holding a lock. Until then no page changes its owner.
    With an `arrival` (reloads only) the copy is made in `layer_groups`, and the mover reports each to the arrival.
    """

    source: Tier
    target: Tier
    source_pages: PageArray
    target_pages: PageArray
    priority: CopyPriority
    deadline: Deadline
    on_done: Callable[[bool], None]
    arrival: LayerArrival | None = None

    def size_bytes(self, page_bytes: int) -> int:
        return int(self.source_pages.size) * page_bytes


@record(frozen=True, slots=True)
class CopyForecast:
    """Expected time of a copy in the queue, and its own time."""

    wait_us: float
    copy_us: float


class Mover(Protocol):
    """Makes copies. Its queue is bounded: it refuses a copy instead of blocking."""

    def submit(self, request: CopyRequest) -> bool:
        """Queues a copy. False, without a call of `on_done`, if the queue is full or closed."""

    def forecast(self, size_bytes: int, priority: CopyPriority) -> CopyForecast:
        """Forecast for a copy of that size that is submitted now."""

    def close(self) -> None:
        """Completes the copies under way, fails those in the queue, and joins its threads. May be called again."""


class NoMover:
    """The mover of a cache with one tier. It refuses every copy."""

    def submit(self, request: CopyRequest) -> bool:  # noqa: ARG002
        return False

    def forecast(self, size_bytes: int, priority: CopyPriority) -> CopyForecast:  # noqa: ARG002
        return CopyForecast(0.0, 0.0)

    def close(self) -> None:
        return


class PageGuard(Protocol):
    """Checksums of DRAM pages that outlive the process. Copy threads call it, outside the cache's lock."""

    def seal(self, pages: PageArray) -> None:
        """A copy has written these pages in full. Raises if the process may not keep them."""

    def verify(self, pages: PageArray) -> None:
        """A copy is about to read these pages. Raises, which fails the copy, if they have changed since `seal`."""


@record(frozen=True, slots=True)
class CopyLimits:
    """Bounds of a copy queue. A copy larger than `max_bytes` is accepted when the queue is empty."""

    max_in_flight: int = 2
    max_jobs: int = 256
    max_bytes: int = 1 << 30

    def __post_init__(self) -> None:
        if min(self.max_in_flight, self.max_jobs, self.max_bytes) < 1:
            raise ValueError(f"a copy queue needs room for one copy: {self}")


class CopyQueue(Generic[CopyT]):
    """Copies that wait and copies under way. Not thread-safe: its owner guards it, and passes in the time.

    All copies share one link, so running many at once does not finish any of them earlier. At most `max_in_flight`
    run at a time (2, which hides gaps). Reloads go by earliest deadline. Spills run only while no reload waits, one
    at a time. The queue bounds jobs and bytes. Spills may take half of each bound, so they never keep a reload out.
    """

    def __init__(self, page_bytes: int, limits: CopyLimits) -> None:
        self._page_bytes = page_bytes
        self._limits = limits
        self._waiting: list[CopyT] = []
        self._started_us: dict[CopyT, int] = {}
        self._jobs = dict.fromkeys(CopyPriority, 0)
        self._bytes = dict.fromkeys(CopyPriority, 0)
        self._spills_in_flight = 0
        self._last_done_us = 0
        # Measured for each priority: encoding and decoding differ in speed, and so do the two directions of the link.
        self._us_per_byte: dict[CopyPriority, float] = {}
        self._measured_us: dict[CopyPriority, int] = {}

    def __len__(self) -> int:
        """Copies waiting and under way."""
        return sum(self._jobs.values())

    def push(self, request: CopyT) -> bool:
        """Queues a copy. False if that would exceed a bound."""
        size_bytes = request.size_bytes(self._page_bytes)
        jobs, taken_bytes = self._jobs[CopyPriority.SPILL], self._bytes[CopyPriority.SPILL]
        max_jobs, max_bytes = self._limits.max_jobs // 2, self._limits.max_bytes // 2
        if request.priority is CopyPriority.RELOAD:
            # A spill larger than half of the bound counts as half against reloads.
            jobs = min(jobs, max_jobs) + self._jobs[CopyPriority.RELOAD]
            taken_bytes = min(taken_bytes, max_bytes) + self._bytes[CopyPriority.RELOAD]
            max_jobs, max_bytes = self._limits.max_jobs, self._limits.max_bytes
        if jobs and (jobs >= max_jobs or taken_bytes + size_bytes > max_bytes):
            return False
        self._jobs[request.priority] += 1
        self._bytes[request.priority] += size_bytes
        self._waiting.append(request)
        return True

    def start(self, now_us: int) -> CopyT | None:
        """Starts the next copy. None if no copy waits, or `max_in_flight` are under way."""
        if not self._waiting or len(self._started_us) >= self._limits.max_in_flight:
            return None
        # A linear search: the queue is short, and the deadline of a waiting copy may change.
        request = min(self._waiting, key=_urgency)
        is_spill = request.priority is CopyPriority.SPILL
        if is_spill and self._spills_in_flight:
            return None
        self._waiting.remove(request)
        self._spills_in_flight += is_spill
        self._started_us[request] = now_us
        return request

    def end(self, request: CopyT, now_us: int, copied: bool) -> None:
        """Removes a copy under way that has ended. If it succeeded, its speed is measured."""
        started_us = self._started_us.pop(request)
        self._spills_in_flight -= request.priority is CopyPriority.SPILL
        self._leave(request)
        size_bytes = request.size_bytes(self._page_bytes)
        if copied and size_bytes:
            # Copies under way share the link, so the time of each counts from the end of the copy before it.
            busy_us = now_us - max(started_us, self._last_done_us)
            known = self._assumed_rate(request.priority, now_us)
            self._measured_us[request.priority] = now_us
            self._us_per_byte[request.priority] = known + _NEWEST_WEIGHS * (busy_us / size_bytes - known)
        self._last_done_us = now_us

    def drain(self) -> list[CopyT]:
        """Removes and returns all copies that wait."""
        waiting, self._waiting = sorted(self._waiting, key=_urgency), []
        for request in waiting:
            self._leave(request)
        return waiting

    def forecast(self, size_bytes: int, priority: CopyPriority, now_us: int) -> CopyForecast:
        """The time of the copies ahead, and of this copy, at the speed measured lately.

        If no copy of the priority is queued and the last measurement is old, the forecast assumes the first guess
        where that is faster.
        """
        wait_us = 0.0
        reload_bytes, spill_bytes = self._bytes[CopyPriority.RELOAD], self._bytes[CopyPriority.SPILL]
        if reload_bytes:
            wait_us += reload_bytes * self._rate(CopyPriority.RELOAD)
        if spill_bytes and priority is CopyPriority.RELOAD:
            under_way = [each for each in self._started_us if each.priority is CopyPriority.SPILL]
            spill_bytes = sum([each.size_bytes(self._page_bytes) for each in under_way])
        if spill_bytes:
            wait_us += spill_bytes * self._rate(CopyPriority.SPILL)
        return CopyForecast(wait_us, size_bytes * self._assumed_rate(priority, now_us))

    def _rate(self, priority: CopyPriority) -> float:
        """µs a byte: as measured, else as measured for the other priority, else the first guess."""
        known = self._us_per_byte
        if priority in known:
            return known[priority]
        return next(iter(known.values()), _FIRST_GUESS_US_PER_BYTE)

    def _assumed_rate(self, priority: CopyPriority, now_us: int) -> float:
        known = self._rate(priority)
        is_old = now_us - self._measured_us.get(priority, now_us) > _MEASUREMENT_LIFE_US
        return min(known, _FIRST_GUESS_US_PER_BYTE) if is_old and not self._jobs[priority] else known

    def _leave(self, request: CopyT) -> None:
        self._jobs[request.priority] -= 1
        self._bytes[request.priority] -= request.size_bytes(self._page_bytes)


def _urgency(request: QueuedCopy) -> tuple[CopyPriority, int]:
    return request.priority, request.deadline.at_us


def layer_groups(num_layers: int, pages: int) -> int:
    """Number of groups of layers in which `pages` pages are copied, for a copy that goes layer by layer."""
    return min(num_layers, max(1, _MOST_LAUNCHES // max(1, pages)))
