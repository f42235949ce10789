"""How many workers of a fleet take the pre-infer jobs of the others, and when to change that. Pure.

Plan        n_pre b_pre / T_pre = n_rank b_rank / (xi + T_rank), as P/D-Serve (arXiv 2408.08147), with the device times
            T of pre-infer and ranking and the time xi of the fetch, each the mean of all visits. A device computes one
            prefix at a time: b_pre is 1. Fetches run beside the device, `READERS` at once. So a ranking worker ends a
            request each max(T_rank, xi / READERS), and by Little's law b_rank = (xi + T_rank) / that time.
Correction  Two signals say which workers a running fleet lacks: the mean time of an answer, and the part of that time
            that belongs to requests whose prefix was not ready. Both up: pre-infer. Time up, part not: ranking.

A correction moves one worker, and goes on while answers are at most `SAME` slower than the fastest so far; else it is
undone. The fleet then holds until answers are slower by `SLOWER` in `WINDOWS` windows in a row.
"""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass, replace
from typing import Final

from relaygr.simulate.case import Case
from relaygr.simulate.size import Sizing
from relaygr.simulate.store import StoreTimes
from relaygr.worker.pool.tier import READERS

SAME: Final = 0.02
SLOWER: Final = 0.1
WINDOWS: Final = 3


@dataclass(frozen=True, slots=True)
class Ratio:
    """The mean times of a visit, in µs, and the lengths for which a pool does not pay."""

    pre_us: float
    """Device time of a job, if no owner has the prefix. The others are the owner's, and count with the ranking."""
    rank_us: float
    fetch_us: float
    """The owner's fetch from the store of what the workers for jobs computed."""
    pays_from: int | None
    """Behaviours from which on a fetch is faster than computing; None: at no length."""

    @property
    def rank_worker_us(self) -> float:
        """The time in which a ranking worker ends a request."""
        return max(self.rank_us, self.fetch_us / READERS)

    @property
    def pre_per_rank(self) -> float:
        """Workers for jobs, for each worker that ranks."""
        return self.pre_us / self.rank_worker_us

    def split(self, workers: int) -> int:
        """How many of two workers or more take the jobs: at least one does, and one ranks."""
        return min(max(1, round(workers * self.pre_per_rank / (1 + self.pre_per_rank))), workers - 1)

    def workers(self, together: int) -> tuple[int, int]:
        """Workers for jobs, and workers that rank, as busy as so many together."""
        ranking = together * self.rank_worker_us / (self.pre_us + self.rank_us)
        return max(1, math.ceil(ranking * self.pre_per_rank)), max(1, math.ceil(ranking))


def ratio_of(case: Case, sizing: Sizing, us_per_byte: float) -> Ratio:
    """The ratio for the median history, and the returning visits of `sizing`."""
    visit, times, new = sizing.work.figures, StoreTimes(case.model, us_per_byte), 1 - sizing.reuse
    return Ratio(
        pre_us=new * visit.pre_us,
        rank_us=sizing.device_share * visit.full_us - new * visit.pre_us,
        fetch_us=new * times.fetch_us(visit.behaviours),
        pays_from=_pays_from(times, case.longest_history) if case.model.rules.is_reusable else None,
    )


def _pays_from(times: StoreTimes, longest: int) -> int | None:
    """The shortest length in whole objects from which on a fetch pays, at each length up to the longest."""
    found = None
    for behaviours in range(longest - longest % times.segments.behaviours, 0, -times.segments.behaviours):
        if not times.pays(behaviours):
            break
        found = behaviours
    return found


class Move(enum.StrEnum):
    """What a fleet lacks. To change the role of a worker is to restart it."""

    PRE_INFER = "more pre-infer workers"
    RANKING = "more ranking workers"
    HOLD = "hold"


OPPOSITE: Final = {Move.PRE_INFER: Move.RANKING, Move.RANKING: Move.PRE_INFER}


@dataclass(frozen=True, slots=True)
class Signals:
    """Of one window, or several."""

    answer_ms: float
    """Mean time from a ranking request to its answer. A request without scores counts with the time limit."""
    prefix_share: float
    """The part of this time that belongs to requests whose prefix was not ready: pending, full or truncated."""


@dataclass(frozen=True, slots=True)
class Correction:
    """A fleet that is corrected. `after` gives the next move and the next state.

    `hit_ms`: the time of an answer on a ready prefix when nothing else waits. Give `settled_ms` for a fleet that is
    right now; without it the policy looks for a better ratio at once.
    """

    hit_ms: float
    settled_ms: float | None = None
    slow_windows: int = 0
    moved: Move | None = None
    """The last move, until its effect is known; HOLD: it was undone."""
    tries: tuple[Move, ...] = ()
    """Moves to try if the last one is undone, or no more is possible; none once answers were faster."""
    fastest_ms: float = math.inf
    """The fastest answers since it began to move workers."""

    def after(self, seen: Signals, possible: frozenset[Move] = frozenset(OPPOSITE)) -> tuple[Correction, Move]:
        """What to do after a window. `possible`: the moves that leave a worker of each role."""
        if self.settled_ms is not None:
            slow = self.slow_windows + 1 if seen.answer_ms > (1 + SLOWER) * self.settled_ms else 0
            if slow < WINDOWS:
                return replace(self, slow_windows=slow), Move.HOLD
        if self.moved in OPPOSITE and seen.answer_ms > (1 + SAME) * self.fastest_ms:
            return replace(self, moved=Move.HOLD), OPPOSITE[self.moved]
        tries = tuple(each for each in self._tries(seen) if each in possible)
        if not tries:
            return Correction(self.hit_ms, seen.answer_ms), Move.HOLD
        fastest_ms = min(self.fastest_ms, seen.answer_ms)
        return Correction(self.hit_ms, None, 0, tries[0], tries[1:], fastest_ms), tries[0]

    def _tries(self, seen: Signals) -> tuple[Move, ...]:
        """The moves to try next, the likeliest first."""
        if self.moved is Move.HOLD:
            return self.tries
        if self.moved is not None:
            # Where all ratios are as slow as the time limit allows, the way may end before answers were faster once.
            return (self.moved, *(self.tries if seen.answer_ms > (1 - SAME) * self.fastest_ms else ()))
        not_ready_ms, beyond_ms = seen.prefix_share * seen.answer_ms, seen.answer_ms - self.hit_ms
        likely = Move.PRE_INFER if not_ready_ms > beyond_ms / 2 else Move.RANKING
        return likely, OPPOSITE[likely]
