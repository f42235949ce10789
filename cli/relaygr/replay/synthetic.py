"""Makes traces without a worker: from a log of interactions, or from the schedule of `relaygr traffic`.

Each impression is a pre-infer look-up at the retrieval event and a ranking look-up one lead time later, both for the
history at the time of the retrieval. Users are keyed hashes, as in a recorded trace.
"""

from __future__ import annotations

import heapq
import secrets
from collections.abc import Callable, Iterable, Iterator
from hashlib import blake2b
from pathlib import Path

import numpy as np

from relaygr.interactions import Interactions
from relaygr.runtime.errors import RelayError
from relaygr.schemas.digest import BLOCK
from relaygr.traffic.population import Population
from relaygr.traffic.schedule import impressions
from relaygr.traffic.settings import TrafficSettings
from relaygr.worker.cache.events import EventKind
from relaygr.worker.cache.trace import Sketch, TraceHeader, TraceRecord, encode_header, encode_record
from relaygr.worker.cache.trace.format import MARK_BYTES

_NAMESPACE = b"made"
_MADE = "made"


class Sketches:
    """Makes sketches of histories that only grow. A window of behaviours that slides makes another history."""

    def __init__(self) -> None:
        self._key = secrets.token_bytes(16)

    def user(self, user_id: str) -> int:
        """A 64-bit hash that represents the user, in this trace only."""
        return int.from_bytes(self._mark(user_id, 8), "little")

    def of(self, user_id: str, begins_at: int, behaviours: int) -> Sketch:
        """The sketch of `behaviours` behaviours of the user, from number `begins_at` on."""
        marks = [b""]
        length = BLOCK
        while length <= behaviours:
            marks.append(self._mark(f"{begins_at}|{length}|{user_id}", MARK_BYTES))
            length *= 2
        marks.append(self._mark(f"{begins_at}|{behaviours}|{user_id}", MARK_BYTES))
        return Sketch(behaviours, b"".join(marks))

    def _mark(self, text: str, size_bytes: int) -> bytes:
        return blake2b(text.encode(), key=self._key, digest_size=size_bytes).digest()


def window_start(length: int, max_behaviours: int, anchor_behaviours: int) -> int:
    """Number of oldest behaviours that a worker leaves out: the smallest multiple of the anchor step that is enough."""
    over = max(0, length - max_behaviours)
    return -(-over // anchor_behaviours) * anchor_behaviours


def records_of_schedule(settings: TrafficSettings, population: Population) -> Iterator[TraceRecord]:
    """The look-ups of a worker that owns every user. Raises ValueError for a schedule without an end."""
    if not settings.duration_s:
        raise ValueError("a schedule without a duration has no end")
    sketches = Sketches()
    coming: list[tuple[int, int, TraceRecord]] = []
    for number, impression in enumerate(impressions(settings, population)):
        while coming and coming[0][0] <= impression.retrieval_us:
            yield heapq.heappop(coming)[2]
        user_id = population.user_id(impression.user)
        user, sketch = sketches.user(user_id), sketches.of(user_id, 0, impression.history_length)
        ranks = TraceRecord(EventKind.ACQUIRE, impression.ranking_us, user, _NAMESPACE, sketch, _MADE)
        heapq.heappush(coming, (impression.ranking_us, number, ranks))
        if settings.relay:
            yield TraceRecord(EventKind.PREPARE, impression.retrieval_us, user, _NAMESPACE, sketch, _MADE)
    while coming:
        yield heapq.heappop(coming)[2]


def records_of_interactions(
    interactions: Interactions, lead_us: int, max_behaviours: int, anchor_behaviours: int
) -> Iterator[TraceRecord]:
    """One impression at each time at which a user did something, with the history up to that time."""
    sketches = Sketches()
    counts = np.diff(interactions.starts)
    users = np.repeat(np.arange(counts.size), counts)
    places = np.arange(users.size) - np.repeat(interactions.starts[:-1], counts)
    times_ms = interactions.behaviours.timestamps_ms
    numbers = [sketches.user(user_id) for user_id in interactions.users]
    order = np.lexsort((places, times_ms))
    first_ms = int(times_ms[order[0]]) if order.size else 0
    coming: list[tuple[int, int, TraceRecord]] = []
    for number, place in enumerate(order):
        index, length = int(users[place]), int(places[place])
        same_time = length and times_ms[place] == times_ms[place - 1]
        if not length or same_time:
            # The user has no history yet, or has an impression at this time already.
            continue
        at_us = (int(times_ms[place]) - first_ms) * 1000
        while coming and coming[0][0] <= at_us:
            yield heapq.heappop(coming)[2]
        start = window_start(length, max_behaviours, anchor_behaviours)
        sketch = sketches.of(interactions.users[index], start, length - start)
        yield TraceRecord(EventKind.PREPARE, at_us, numbers[index], _NAMESPACE, sketch, _MADE)
        ranks = TraceRecord(EventKind.ACQUIRE, at_us + lead_us, numbers[index], _NAMESPACE, sketch, _MADE)
        heapq.heappush(coming, (at_us + lead_us, number, ranks))
    while coming:
        yield heapq.heappop(coming)[2]


def write_trace(
    path: Path, header: TraceHeader, records: Iterable[TraceRecord], on_progress: Callable[[int], None]
) -> int:
    """Writes a trace and returns its number of records. `on_progress` gets the number so far. Raises RelayError."""
    written = 0
    try:
        with path.open("wb") as file:
            file.write(encode_header(header))
            for record in records:
                file.write(encode_record(record))
                written += 1
                if written % 1024 == 0:
                    on_progress(written)
    except OSError as error:
        raise RelayError(f"--out {path} cannot be written: {error.strerror}.") from error
    return written
