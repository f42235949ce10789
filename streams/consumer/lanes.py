"""Bounded hand-over from the poll thread to the device thread, one lane per class of work.

The poll thread offers, the device thread takes; neither ever waits for the other. `Doorbell` wakes a device
thread that has nothing to do, whichever lane the work came in by. What is bounded is work that has not
*started*, wherever it stands: in the lane, or already in the scheduler's queue. So the device thread says when
it starts a piece of work or gives it up (`claim`, `leave`).

* `SheddingLane` (pre-infer) is never paused. Full, it sheds what is expired, and if nothing is, what has the
  least value, the newcomer included. Work shed while it stood in the scheduler's queue fails its `claim`, and
  is dropped there. The caller of `offer` finishes the offsets of what is shed.
* `PausingLane` (ranking) never sheds. Full, its partitions pause until half of it is gone; what the client
  delivers before the pause takes effect is still let in.
"""

from __future__ import annotations

import enum
import heapq
import itertools
import threading
from collections import deque
from dataclasses import dataclass
from typing import Generic, TypeVar

from prometheus_client import Counter, Gauge

from streams.errors import RelayError

T = TypeVar("T")

DEPTH = Gauge("relaygr_lane_depth", "Work received and not started", ["lane"])
SHED = Counter("relaygr_lane_shed_total", "Work given up at the lane's bound", ["lane", "reason"])


class Doorbell:
    """Wakes the one thread that waits. A ring while nobody waits is kept for the next `wait`."""

    def __init__(self) -> None:
        self._event = threading.Event()

    def ring(self) -> None:
        """Never blocks."""
        if not self._event.is_set():
            self._event.set()

    def wait(self, timeout_s: float) -> bool:
        """Until a ring or the time-out; whether it rang. Look at all lanes after it, whatever it says."""
        rang = self._event.wait(timeout_s)
        self._event.clear()
        return rang


class ShedReason(enum.StrEnum):
    """Why a piece of work was given up."""

    EXPIRED = "expired"
    LEAST_VALUE = "least_value"


@dataclass(frozen=True, slots=True)
class Shed(Generic[T]):
    """Work that was given up, by identity what was offered."""

    work: T
    reason: ShedReason


@dataclass(slots=True)
class _Entry(Generic[T]):
    work: T
    alive: bool = True


class SheddingLane(Generic[T]):
    """At most `capacity` pieces of work that have not started. Thread-safe; work is known by its identity."""

    def __init__(self, name: str, capacity: int, doorbell: Doorbell) -> None:
        self._name = name
        self._capacity = _checked(name, capacity)
        self._doorbell = doorbell
        self._lock = threading.Lock()
        self._entries: dict[int, _Entry[T]] = {}
        self._arrived: deque[_Entry[T]] = deque()
        # Both heaps keep dead entries until they come up, or until there are too many of them.
        self._by_value: list[tuple[float, int, _Entry[T]]] = []
        self._by_expiry: list[tuple[int, int, _Entry[T]]] = []
        self._sequence = itertools.count()

    def offer(self, work: T, value: float, expires_us: int, now_us: int) -> list[Shed[T]]:
        """Takes the work in; what has to go for it, which may be the work itself. Of equal value, the older goes."""
        with self._lock:
            entry = _Entry(work)
            self._entries[id(work)] = entry
            sequence = next(self._sequence)
            heapq.heappush(self._by_value, (value, sequence, entry))
            heapq.heappush(self._by_expiry, (expires_us, sequence, entry))
            self._arrived.append(entry)
            shed = self._shed(now_us) if len(self._entries) > self._capacity else []
            self._compact()
        for victim in shed:
            SHED.labels(self._name, victim.reason.value).inc()
        self._doorbell.ring()
        return shed

    def take(self) -> list[T]:
        """What arrived since the last call, oldest first, for the scheduler's queue."""
        with self._lock:
            taken = [entry.work for entry in self._arrived if entry.alive]
            self._arrived.clear()
        return taken

    def claim(self, work: T) -> bool:
        """The work starts or is given up by its holder; False if it was shed meanwhile, or claimed before."""
        with self._lock:
            entry = self._entries.pop(id(work), None)
            if entry is None or entry.work is not work:
                return False
            entry.alive = False
            return True

    @property
    def depth(self) -> int:
        """Work that has not started."""
        return len(self._entries)

    def observe(self) -> None:
        """Sets the gauge: for a tick, not for every message."""
        DEPTH.labels(self._name).set(self.depth)

    def _shed(self, now_us: int) -> list[Shed[T]]:
        shed = []
        while self._by_expiry and (self._by_expiry[0][0] <= now_us or not self._by_expiry[0][2].alive):
            entry = heapq.heappop(self._by_expiry)[2]
            if entry.alive:
                shed.append(self._give_up(entry, ShedReason.EXPIRED))
        while len(self._entries) > self._capacity:
            entry = heapq.heappop(self._by_value)[2]
            if entry.alive:
                shed.append(self._give_up(entry, ShedReason.LEAST_VALUE))
        return shed

    def _give_up(self, entry: _Entry[T], reason: ShedReason) -> Shed[T]:
        entry.alive = False
        del self._entries[id(entry.work)]
        return Shed(entry.work, reason)

    def _compact(self) -> None:
        limit = 64 + 2 * len(self._entries)
        if len(self._by_value) > limit:
            self._by_value = [item for item in self._by_value if item[2].alive]
            heapq.heapify(self._by_value)
        if len(self._by_expiry) > limit:
            self._by_expiry = [item for item in self._by_expiry if item[2].alive]
            heapq.heapify(self._by_expiry)
        if len(self._arrived) > limit:
            self._arrived = deque(entry for entry in self._arrived if entry.alive)


class PauseChange(enum.StrEnum):
    """What the lane's partitions must do now."""

    NONE = "none"
    PAUSE = "pause"
    RESUME = "resume"


class PausingLane(Generic[T]):
    """Pauses its partitions while `capacity` pieces of work have not started. Thread-safe."""

    def __init__(self, name: str, capacity: int, doorbell: Doorbell) -> None:
        self._name = name
        self._capacity = _checked(name, capacity)
        self._doorbell = doorbell
        self._lock = threading.Lock()
        self._arrived: deque[T] = deque()
        self._depth = 0
        self._paused = False

    def offer(self, work: T) -> None:
        """Takes the work in, always."""
        with self._lock:
            self._depth += 1
            self._arrived.append(work)
        self._doorbell.ring()

    def take(self) -> list[T]:
        """What arrived since the last call, oldest first, for the scheduler's queue."""
        with self._lock:
            taken = list(self._arrived)
            self._arrived.clear()
        return taken

    def leave(self, count: int = 1) -> None:
        """So many pieces of work that were taken have started, or were given up."""
        with self._lock:
            if count > self._depth:
                raise ValueError(f"{count} leave lane {self._name}, but only {self._depth} are in it")
            self._depth -= count

    @property
    def depth(self) -> int:
        """Work that has not started."""
        return self._depth

    def pause_change(self) -> PauseChange:
        """What changed since the last call: pause at the bound, resume at half of it. For the poll thread's tick."""
        if not self._paused and self._depth >= self._capacity:
            self._paused = True
            return PauseChange.PAUSE
        if self._paused and self._depth * 2 <= self._capacity:
            self._paused = False
            return PauseChange.RESUME
        return PauseChange.NONE

    def observe(self) -> None:
        """Sets the gauge: for a tick, not for every message."""
        DEPTH.labels(self._name).set(self.depth)


def _checked(name: str, capacity: int) -> int:
    if capacity < 1:
        raise RelayError(f"lane {name} has capacity {capacity}: at least 1 is needed")
    return capacity
