"""Demand: the requests for prefixes, with user and time. This part of a trace does not depend on the cache.

A *visit* is a user's request for a prefix. Look-ups of the same history within `VISIT_US` belong to one visit, such as
the look-ups of the pre-infer job and of the ranking request of one impression.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from relaygr.schemas.digest import BLOCK, DIGEST_BYTES, DigestChain
from relaygr.worker.cache.events import EventKind
from relaygr.worker.cache.identity import Mark, PrefixKey
from relaygr.worker.cache.policies import VISIT_US
from relaygr.worker.cache.trace import Sketch, TraceRecord

SEED = bytes(DIGEST_BYTES)


class DemandKind(enum.StrEnum):
    """The kind of request."""

    PREPARE = "prepare"
    """A pre-infer job: prepare the prefix."""
    RANK = "rank"
    FORGET = "forget"
    """The prefixes of the user are invalidated."""


@dataclass(frozen=True, slots=True)
class Demand:
    """One request to the cache. `at_us` counts from the start of the trace."""

    kind: DemandKind
    at_us: int
    user: int
    namespace: bytes
    sketch: Sketch


_KINDS = {
    EventKind.PREPARE: DemandKind.PREPARE,
    EventKind.ACQUIRE: DemandKind.RANK,
    EventKind.INVALIDATE: DemandKind.FORGET,
}


def demands_of(records: Iterable[TraceRecord]) -> Iterator[Demand]:
    """The demands in a trace, with times that never decrease."""
    latest_us = 0
    for record in records:
        kind = _KINDS.get(record.kind)
        if kind is not None:
            latest_us = max(latest_us, record.at_us)
            yield Demand(kind, latest_us, record.user, record.namespace, record.sketch)


class DemandCounter:
    """Counts the demands that pass through `of`. `users` and `seconds` cover those that have passed so far."""

    def __init__(self) -> None:
        self.demands = 0
        self._users: set[int] = set()
        self._first_us = self._last_us = 0

    @property
    def users(self) -> int:
        return len(self._users)

    @property
    def seconds(self) -> float:
        return (self._last_us - self._first_us) / 1e6

    def of(self, demands: Iterable[Demand]) -> Iterator[Demand]:
        """Yields the demands unchanged."""
        for demand in demands:
            if not self.demands:
                self._first_us = demand.at_us
            self.demands += 1
            self._users.add(demand.user)
            self._last_us = demand.at_us
            yield demand


@dataclass(frozen=True, slots=True)
class Visit:
    """One visit, which begins with look-up `number`.

    `reusable` leading behaviours of its prefix were in the user's previous visit, whose last look-up was number
    `before`; -1 without one.
    """

    number: int
    behaviours: int
    reusable: int
    before: int


class Visits:
    """Finds the visits in a list of demands, and the reusable part of each."""

    def __init__(self) -> None:
        self._latest: dict[tuple[int, bytes], tuple[Sketch, int, int]] = {}
        """(history, start, number of the last look-up) of each user's last visit."""
        self.lookups = 0
        """Number of look-ups so far."""

    def begin(self, demand: Demand) -> Visit | None:
        """The visit that begins with this demand, or None."""
        who = (demand.user, demand.namespace)
        if demand.kind is DemandKind.FORGET:
            self._latest.pop(who, None)
            return None
        number = self.lookups
        self.lookups += 1
        reusable, before = 0, -1
        latest = self._latest.get(who)
        if latest is not None:
            sketch, begun_us, before = latest
            if sketch == demand.sketch and demand.at_us - begun_us < VISIT_US:
                self._latest[who] = (sketch, begun_us, number)
                return None
            reusable = sketch.common(demand.sketch)
        self._latest[who] = (demand.sketch, demand.at_us, number)
        return Visit(number, demand.sketch.behaviours, reusable, before)


class PrefixKeyMaker:
    """Makes keys for the cache from sketches: with invented digest chains that diverge where the sketches do."""

    def __init__(self) -> None:
        self._latest: dict[tuple[int, bytes], tuple[Sketch, PrefixKey]] = {}
        self._made = 0

    def key(self, demand: Demand) -> PrefixKey:
        """The key of the demand's prefix. It agrees with the user's previous key as far as their sketches agree."""
        who = (demand.user, demand.namespace)
        before = self._latest.get(who)
        if before is not None and before[0] == demand.sketch:
            return before[1]
        length = demand.sketch.behaviours
        blocks: tuple[bytes, ...] = ()
        marks: tuple[Mark, ...] = ()
        if before is not None:
            sketch, key = before
            common = sketch.common(demand.sketch)
            blocks = key.chain.blocks[: common // BLOCK]
            known = (*key.marks, Mark(key.length, key.chain.digest))
            marks = tuple(mark for mark in known if mark.length <= common and mark.length < length)
        count = -(-length // BLOCK)
        chain = DigestChain(SEED, blocks + tuple(self._digest() for _ in range(count - len(blocks))), length)
        made = PrefixKey(f"{demand.user:016x}", demand.namespace or b"-", chain, marks=marks).held()
        self._latest[who] = (demand.sketch, made)
        return made

    def _digest(self) -> bytes:
        self._made += 1
        return self._made.to_bytes(DIGEST_BYTES, "big")
