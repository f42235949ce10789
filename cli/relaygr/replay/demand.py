"""Demands: the look-ups and removals of a trace. This part of a trace does not depend on the cache.

A *visit* is a user's request for a prefix. Look-ups of the same history within `VISIT_US` belong to one visit, such as
the look-ups of the pre-infer job and of the ranking request of one impression.

A trace is read once, into columns of about 35 bytes a demand, and every candidate is played from them.
"""

from __future__ import annotations

import enum
from array import array
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from relaygr.worker.cache.events import EventKind
from relaygr.worker.cache.policies import VISIT_US
from relaygr.worker.cache.trace import TraceRow, common_behaviours

SAME = -1
"""In `Demands.shared`: the history is that of the owner's previous demand."""
NO_VISIT = -1
"""In `Demands.reusable`: no visit begins here."""
_CHUNK = 8192


class DemandKind(enum.IntEnum):
    """The kind of request."""

    PREPARE = 0
    """A pre-infer job: prepare the prefix."""
    RANK = 1
    FORGET = 2
    """The prefixes of the user are invalidated."""


_KINDS = {
    EventKind.PREPARE: DemandKind.PREPARE,
    EventKind.ACQUIRE: DemandKind.RANK,
    EventKind.INVALIDATE: DemandKind.FORGET,
}

DemandRow = tuple[int, int, int, int, int, int]
"""`kind`, `at_us`, `owner`, `length`, `shared` and `reusable` of one demand."""


@dataclass(frozen=True, slots=True, eq=False)
class Demands:
    """The demands of a trace, in order. Every array but `users` has the shape [demands].

    An *owner* is a user with one model; owners and users are numbered in the order of their first demands.
    """

    kinds: NDArray[np.uint8]
    """`DemandKind`."""
    at_us: NDArray[np.int64]
    """Times from the start of the trace. They never decrease."""
    owners: NDArray[np.int32]
    lengths: NDArray[np.int32]
    """Behaviours of the requested prefix."""
    shared: NDArray[np.int32]
    """Leading behaviours in common with the owner's previous demand, or SAME."""
    reusable: NDArray[np.int32]
    """Where a visit begins: leading behaviours of its prefix that were in the owner's previous visit; else NO_VISIT."""
    waits: NDArray[np.int32]
    """Where a visit begins: number of look-ups since the last one of the owner's previous visit; 0 without one."""
    users: NDArray[np.int32]
    """The user of each owner, [owners]."""

    def __len__(self) -> int:
        return self.kinds.size

    @property
    def user_count(self) -> int:
        return int(self.users.max()) + 1 if self.users.size else 0

    @property
    def seconds(self) -> float:
        """Time from the first demand to the last."""
        return float(self.at_us[-1] - self.at_us[0]) / 1e6 if len(self) else 0.0

    @property
    def visit_lengths(self) -> NDArray[np.int64]:
        """Behaviours of the prefix of each visit."""
        lengths: NDArray[np.int64] = self.lengths[self.reusable != NO_VISIT].astype(np.int64)
        return lengths

    def rows(self) -> Iterator[DemandRow]:
        """All demands in order."""
        for start in range(0, len(self), _CHUNK):
            part = slice(start, start + _CHUNK)
            columns = (self.kinds, self.at_us, self.owners, self.lengths, self.shared, self.reusable)
            yield from zip(*(column[part].tolist() for column in columns), strict=True)


@dataclass(slots=True)
class _Latest:
    """The latest demand of an owner, and its latest visit. `last`: the number of the visit's last look-up, or -1."""

    owner: int
    behaviours: int
    marks: bytes
    begun_us: int
    last: int


def demands_of(rows: Iterable[TraceRow], limit: int | None = None) -> Demands:
    """The first `limit` demands in the rows of a trace."""
    kinds, times, owners = array("B"), array("q"), array("i")
    lengths, shared, reusable, waits, users = (array("i") for _ in range(5))
    user_numbers: dict[int, int] = {}
    by_owner: dict[tuple[int, bytes], _Latest] = {}
    now_us = lookups = 0
    for name, at_us, user, namespace, behaviours, marks, _ in rows:
        kind = _KINDS.get(name)  # type: ignore[call-overload]
        if kind is None:
            continue
        if len(kinds) == limit:
            break
        if at_us > now_us:
            now_us = at_us
        who = (user, namespace)
        latest = by_owner.get(who)
        common = 0
        if latest is None:
            by_owner[who] = latest = _Latest(len(by_owner), behaviours, marks, now_us, -1)
            users.append(user_numbers.setdefault(user, len(user_numbers)))
        elif latest.behaviours == behaviours and latest.marks == marks:
            common = SAME
        else:
            common = common_behaviours(latest.behaviours, latest.marks, behaviours, marks)
            latest.behaviours, latest.marks = behaviours, marks
        kinds.append(kind)
        times.append(now_us)
        owners.append(latest.owner)
        lengths.append(behaviours)
        shared.append(common)
        reused, wait = NO_VISIT, 0
        if kind is DemandKind.FORGET:
            latest.last = -1
        else:
            if latest.last < 0:
                reused = 0
                latest.begun_us = now_us
            elif common != SAME or now_us - latest.begun_us >= VISIT_US:
                reused = behaviours if common == SAME else common
                wait = lookups - latest.last
                latest.begun_us = now_us
            latest.last = lookups
            lookups += 1
        reusable.append(reused)
        waits.append(wait)
    return Demands(
        np.array(kinds, np.uint8),
        np.array(times, np.int64),
        *(np.array(column, np.int32) for column in (owners, lengths, shared, reusable, waits, users)),
    )
