"""A CPU device with streams, in virtual time: copies and computations overlap, and every run of a test is the same.

Each stream is a thread. A piece of work takes `delay_us` and its bytes over the link's `bytes_per_us`. It runs, and its
bytes change, at the virtual time at which it ends, so a reader that is too early reads the old bytes. All streams share
one link.

Time moves only when the driver (the thread that made the device: the test, which is also the device thread) spends it,
advances it, or waits for an event. An event wakes other threads that wait for it. `await_waiters` makes the driver
wait, in real time, until a number of threads wait. After work that raises, the next event raises.
"""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from relaygr.worker.device import CpuDevice, Event, Stream

_REAL_PATIENCE_S = 20.0


@dataclass(slots=True)
class _Work:
    run: Callable[[], None]
    delay_us: float
    on_link: bool
    given_us: float


class SimulatedEvent(Event):
    """An event that the timeline completes."""

    def __init__(self, timeline: Timeline) -> None:
        self._timeline = timeline
        self.at_us: float | None = None
        self.stream: SimulatedStream | None = None
        self.error: BaseException | None = None

    def done(self) -> bool:
        return self.at_us is not None

    def wait(self) -> None:
        self._timeline.wait(self)
        if self.error is not None:
            if self.stream is not None:
                self.stream.error = None
            raise RuntimeError("the stream's work failed") from self.error


class Timeline:
    """Virtual time, and the work of the streams of one device."""

    def __init__(self) -> None:
        self._driver = threading.current_thread()
        self._changed = threading.Condition(threading.RLock())
        self._waiters = 0
        self._streams: list[SimulatedStream] = []
        self._link_free_us = 0.0
        self.now_us = 0.0
        self._failing: set[int] = set()

    def advance(self, duration_us: float) -> None:
        """Advances the time, and ends the work whose time has come."""
        until_us = self.now_us + duration_us
        with self._changed:
            while self._end_next(until_us):
                pass
            self.now_us = until_us
            self._changed.notify_all()

    def fail(self, *works: int) -> None:
        """Makes the named pieces of work fail, counted from now on: 0 is the next."""
        self._failing = set(works)

    def stall_link(self, duration_us: float) -> None:
        """Starts no copies for the given time from now."""
        self._link_free_us = self.now_us + duration_us

    def step(self) -> bool:
        """Advances the time until the next work ends. False if there is none."""
        with self._changed:
            return self._end_next(float("inf"))

    def finish(self) -> None:
        """Advances the time until no work is left."""
        with self._changed:
            while self._end_next(float("inf")):
                pass

    def wait(self, event: SimulatedEvent) -> None:
        with self._changed:
            if threading.current_thread() is self._driver:
                while not event.done():
                    if not self._end_next(float("inf")):
                        raise AssertionError("a wait for what nobody will do")
                return
            self._waiters += 1
            self._changed.notify_all()
            try:
                while not event.done():
                    self._changed.wait()
            finally:
                self._waiters -= 1

    def await_waiters(self, count: int = 1) -> None:
        """Waits in real time until that many threads wait for events that are not complete."""
        with self._changed:
            assert self._changed.wait_for(lambda: self._waiters >= count, _REAL_PATIENCE_S), "nobody waits"

    def give(self, stream: SimulatedStream, item: _Work | SimulatedEvent) -> None:
        """Adds work, an event that the stream records, or an event of another stream that this stream waits for."""
        with self._changed:
            stream.queue.append(item)
            self._settle()
            self._changed.notify_all()

    def add(self, stream: SimulatedStream) -> None:
        with self._changed:
            self._streams.append(stream)

    def _settle(self) -> None:
        """Passes events: completes the stream's own, and stops at those of other streams until they complete."""
        moved = True
        while moved:
            moved = False
            for stream in self._streams:
                while stream.queue and isinstance(stream.queue[0], SimulatedEvent):
                    event = stream.queue[0]
                    if event.stream is stream and not event.done():
                        event.at_us, event.error = max(self.now_us, stream.free_us), stream.error
                    elif not event.done():
                        break
                    else:
                        stream.free_us = max(stream.free_us, event.at_us or 0.0)
                    stream.queue.popleft()
                    moved = True

    def _end_next(self, until_us: float) -> bool:
        """Ends the work that ends first, if it ends by that time."""
        self._settle()
        first: tuple[float, SimulatedStream, _Work] | None = None
        for stream in self._streams:
            if stream.queue and isinstance(work := stream.queue[0], _Work):
                start_us = max(stream.free_us, work.given_us, self._link_free_us if work.on_link else 0.0)
                if first is None or start_us + work.delay_us < first[0]:
                    first = start_us + work.delay_us, stream, work
        if first is None or first[0] > until_us:
            return False
        ends_us, stream, work = first
        self.now_us = max(self.now_us, ends_us)
        stream.free_us = ends_us
        if work.on_link:
            self._link_free_us = ends_us
        stream.queue.popleft()
        try:
            if self._is_to_fail():
                raise OSError("the link broke")
            # On a thread that ends with the work: a pool of the stream would outlive the test.
            with ThreadPoolExecutor(1, "simulated-stream") as thread:
                thread.submit(work.run).result()
        except BaseException as error:
            stream.error = error
        self._settle()
        self._changed.notify_all()
        return True

    def _is_to_fail(self) -> bool:
        fails = 0 in self._failing
        self._failing = {work - 1 for work in self._failing if work}
        return fails


class SimulatedStream(Stream):
    """A stream whose work runs on another thread than the caller's."""

    def __init__(self, timeline: Timeline, delay_us: float, bytes_per_us: float) -> None:
        self._timeline = timeline
        self._delay_us = delay_us
        self._bytes_per_us = bytes_per_us
        self.queue: deque[_Work | SimulatedEvent] = deque()
        self.free_us = 0.0
        self.error: BaseException | None = None
        timeline.add(self)

    @contextlib.contextmanager
    def use(self) -> Iterator[None]:
        raise AssertionError("work reaches a simulated stream by `run`")
        yield

    def run(self, work: Callable[[], None], size_bytes: int = 0) -> None:
        takes_us = self._delay_us + size_bytes / self._bytes_per_us
        self._timeline.give(self, _Work(work, takes_us, size_bytes > 0, self._timeline.now_us))

    def record(self) -> SimulatedEvent:
        event = SimulatedEvent(self._timeline)
        event.stream = self
        self._timeline.give(self, event)
        return event

    def wait_for(self, event: Event) -> None:
        assert isinstance(event, SimulatedEvent)
        self._timeline.give(self, event)


class _DriversStream(Stream):
    """The stream of the driver thread: its work is complete when the call returns, and `wait_for` blocks the thread."""

    def __init__(self, timeline: Timeline) -> None:
        self._timeline = timeline

    @contextlib.contextmanager
    def use(self) -> Iterator[None]:
        yield

    def record(self) -> SimulatedEvent:
        event = SimulatedEvent(self._timeline)
        event.at_us = self._timeline.now_us
        return event

    def wait_for(self, event: Event) -> None:
        event.wait()


class SimulatedDevice(CpuDevice):
    """See the module. The device is also the clock of its virtual time."""

    def __init__(self, delay_us: float = 0.0, bytes_per_us: float = float("inf")) -> None:
        super().__init__()
        self.timeline = Timeline()
        self._delay_us = delay_us
        self._bytes_per_us = bytes_per_us

    @property
    def has_streams(self) -> bool:
        return True

    def stream(self, *, low_priority: bool = False) -> Stream:
        return SimulatedStream(self.timeline, self._delay_us, self._bytes_per_us)

    def current_stream(self) -> Stream:
        return _DriversStream(self.timeline)

    def synchronize(self) -> None:
        self.timeline.finish()

    def monotonic_us(self) -> int:
        return 1_000_000 + int(self.timeline.now_us)

    def wall_us(self) -> int:
        return 1_700_000_000_000_000 + int(self.timeline.now_us)
