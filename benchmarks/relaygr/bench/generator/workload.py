"""Makes a trace from a description of its load. Pure: the same description gives the same trace.

Arrivals are a Poisson process at `rate_per_s`, never rescaled to a total; `burst_factor` multiplies the rate during
`burst_s` of every `burst_every_s`. A share `reuse` of the arrivals is of users who came before: of *returning* users.
These come back after log-normal gaps, of which the popular users have the shorter ones: the mean gap of the user of
rank k is proportional to k^zipf. There are as many returning users as the rate and the gap ask for, so a higher rate
means more users, not users who come more often. All other users come once.

However long a trace is, the lengths of synthetic users have about the same distribution. The history of one who returns
grows from below the user's mean length to above it; then the user leaves, and a new one comes instead. Without this,
runs at low rates, which last longer, would have longer histories. All of them come equally often before they leave.
Each has a stratum of the lengths, so that of three one is short and one is long, whatever the seed. Users of a log and
the hot user stay, and their histories grow to their longest.

Adversarial loads: `hot_user_share` of all arrivals is of one user, and with `hot_partition_share` that share of the
users is in partition 0.
"""

from __future__ import annotations

import bisect
import heapq
import itertools
import json
import math
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from statistics import NormalDist

import numpy as np

from relaygr.bench.generator.trace import MAX_ROWS, MEASURED, WARM_UP, Trace
from relaygr.runtime.errors import RelayError
from relaygr.schemas import partition_for
from relaygr.traffic.population import Population

HOT_USER = "hot"
LIFE_SHARE, LEAST_VISITS = 0.25, 20
"""A returning user stays until the history has grown by this share of the median, and for at least so many visits, but
not until it has grown by more than the median."""


@dataclass(frozen=True, slots=True)
class Workload:
    """A load. Shares are 0 to 1. Raises RelayError for a value that makes no sense."""

    seed: int
    rate_per_s: float
    seconds: float
    """The measured part."""
    warm_up_s: float
    """The part before it."""
    reuse: float
    """The share of the impressions whose user came before; at most that of visits that are not the first."""
    return_gap_s: float
    """The mean gap of returning users."""
    history_median: int
    history_max: int
    """No history is longer, growth included."""
    lead_median_ms: float
    suffix: int = 16
    candidates: int = 128
    return_sigma: float = 0.5
    zipf: float = 0.5
    history_sigma: float = 0.3
    lead_sigma: float = 0.2
    growth: int = 8
    """Behaviours that a history gains between two impressions."""
    burst_factor: float = 1.0
    burst_every_s: float = 10.0
    burst_s: float = 1.0
    hot_user_share: float = 0.0
    hot_partition_share: float = 0.0
    partitions: int = 8
    """Partitions of the topics, for `hot_partition_share`."""

    def __post_init__(self) -> None:
        for name in ("reuse", "hot_user_share", "hot_partition_share"):
            if not 0 <= getattr(self, name) <= 1:
                raise RelayError(f"workload: {name} is {getattr(self, name)}, expected 0 to 1")
        for name in ("rate_per_s", "seconds", "return_gap_s", "history_median", "burst_factor", "burst_every_s"):
            if not getattr(self, name) > 0:
                raise RelayError(f"workload: {name} is {getattr(self, name)}, expected more than 0")
        if not 0 <= self.burst_s <= self.burst_every_s:
            raise RelayError(f"workload: burst_s is {self.burst_s}, expected 0 to burst_every_s")
        if self.rate_per_s * max(1.0, self.burst_factor) * (self.seconds + self.warm_up_s) > MAX_ROWS / 2:
            raise RelayError(f"workload: more than {MAX_ROWS // 2:,} impressions; lower the rate or the time")

    @property
    def visits(self) -> int:
        """The visits of a returning synthetic user. Without growth users stay."""
        if not self.growth:
            return MAX_ROWS
        wanted = max(LEAST_VISITS, round(LIFE_SHARE * self.history_median / self.growth))
        return max(2, min(wanted, self.history_median // self.growth))

    @property
    def returning_share(self) -> float:
        """The share of the arrivals that is of returning synthetic users, the first visits of new ones included."""
        return min(1.0, self.reuse / (1 - 1 / self.visits))

    @property
    def returning_users(self) -> int:
        """The number of returning synthetic users."""
        return self.users_at(self.returning_share)

    def users_at(self, share: float) -> int:
        """The number of users who return at this share of the arrivals, by Little's law."""
        return max(1, round(self.rate_per_s * share * self.return_gap_s))


@dataclass(slots=True)
class _User:
    user_id: str
    length: int
    longest: int
    mean_gap_s: float = 0.0
    visits_left: int = MAX_ROWS
    """A returning user has so many."""


def make_trace(workload: Workload, prefix: str = "", logged: Population | None = None) -> Trace:
    """The trace of a workload. `prefix` begins the ids of synthetic users; `logged` has users with real histories.

    Raises RelayError if the log has too few users.
    """
    random = np.random.default_rng((workload.seed, 10))
    users = _users(workload, prefix, logged)
    returning_share = workload.returning_share if logged is None else workload.reuse
    pool = [next(users) for _ in range(workload.users_at(returning_share))] if workload.reuse else []
    ranks = random.permutation(len(pool)) + 1.0
    weights = ranks**workload.zipf / np.mean(ranks**workload.zipf) if pool else ranks
    due: list[tuple[float, int]] = []
    for number, user in enumerate(pool):
        user.mean_gap_s = workload.return_gap_s * float(weights[number])
        if logged is None:
            past = int(random.random() * workload.visits) if workload.growth else 0
            _live(workload, user, (number + random.random()) / len(pool), past)
        # The rest of a gap that began before the trace.
        heapq.heappush(due, (random.random() * _gap_s(workload, user, random), number))
    hot = _User(prefix + HOT_USER, _length(workload, 0.5), workload.history_max)
    if logged is not None and workload.hot_user_share:
        hot = next(users)
    rows: list[tuple[int, int, str, int, int]] = []
    seen: set[str] = set()
    for at_s in _arrivals(workload, random):
        if workload.hot_user_share and random.random() < workload.hot_user_share:
            user = hot
        elif random.random() < returning_share:
            number = heapq.heappop(due)[1]
            user = pool[number]
            heapq.heappush(due, (at_s + _gap_s(workload, user, random), number))
            if not user.visits_left:
                pool[number] = user = replace(next(users), mean_gap_s=user.mean_gap_s)
                _live(workload, user, (number + random.random()) / len(pool), past=0)
            user.visits_left -= 1
        else:
            user = next(users)
        if user.user_id in seen:
            user.length = max(user.length, min(user.length + workload.growth, user.longest))
        seen.add(user.user_id)
        lead_us = workload.lead_median_ms * 1000 * math.exp(random.normal(0.0, workload.lead_sigma))
        at_us = int(at_s * 1e6)
        part = WARM_UP if at_s < workload.warm_up_s else MEASURED
        rows.append((at_us, at_us + int(lead_us), user.user_id, user.length, part))
    if not any(row[4] == MEASURED for row in rows):
        raise RelayError(f"workload: no impression in {workload.seconds} s at {workload.rate_per_s} a second")
    retrieval, ranking, ids, lengths, parts = zip(*rows, strict=True)
    return Trace(
        np.array(retrieval, np.int64),
        np.array(ranking, np.int64),
        list(ids),
        np.array(lengths, np.int32),
        np.full(len(rows), workload.suffix, np.int32),
        np.full(len(rows), workload.candidates, np.int32),
        np.array(parts, np.int32),
        made_by=json.dumps(asdict(workload)),
    )


def reuse_of(trace: Trace) -> float:
    """The share of the measured impressions whose user came before."""
    seen: set[str] = set()
    again = 0
    for user, part in zip(trace.user_id, trace.part.tolist(), strict=True):
        again += part != WARM_UP and user in seen
        seen.add(user)
    measured = int(np.count_nonzero(trace.part != WARM_UP))
    return again / measured if measured else 0.0


def with_reuse(trace: Trace, reuse: float) -> Trace:
    """The trace with other users, so that about this share of the measured impressions is of users who came before.
    Times, lengths and sizes stay. An impression keeps its user where it can. Else chance chooses among the users of the
    nearest length that is not above its own.
    """
    own_reuse = reuse_of(trace)
    # Fewer returning users: some of their impressions go to new ones. More: some of new users go to those seen before.
    stays = min(1.0, reuse / own_reuse) if own_reuse else 1.0
    joins = max(0.0, (reuse - own_reuse) / (1 - own_reuse)) if own_reuse < 1 else 0.0
    came: set[str] = set()
    random = np.random.default_rng(12)
    prefix = "new-"
    while any(user.startswith(prefix) for user in trace.user_id):
        prefix = f"new-{prefix}"
    seen: dict[str, int] = {}
    shortest_first: list[tuple[int, str]] = []
    users = []
    for row, (own, length) in enumerate(zip(trace.user_id, trace.history_length.tolist(), strict=True)):
        place = bisect.bisect_right(shortest_first, (length, chr(0x10FFFF)))
        comes_again = random.random() < (stays if own in came else joins)
        came.add(own)
        if comes_again and place:
            user = own
            # A history never becomes shorter.
            if seen.get(own, length + 1) > length:
                nearest = shortest_first[place - 1][0]
                first = bisect.bisect_left(shortest_first, (nearest, ""))
                user = shortest_first[int(random.integers(first, place))][1]
            del shortest_first[bisect.bisect_left(shortest_first, (seen[user], user))]
        else:
            user = own if own not in seen else f"{prefix}{row}"
        seen[user] = length
        bisect.insort(shortest_first, (length, user))
        users.append(user)
    return replace(trace, user_id=users, made_by=json.dumps({"from": trace.made_by, "reuse": reuse}))


def _arrivals(workload: Workload, random: np.random.Generator) -> Iterator[float]:
    """Arrival times in seconds. A Poisson process at the highest rate is thinned outside the bursts."""
    bursts = workload.burst_factor != 1 and workload.burst_s > 0
    highest = workload.rate_per_s * (max(1.0, workload.burst_factor) if bursts else 1.0)
    at_s = 0.0
    while True:
        at_s += random.exponential(1 / highest)
        if at_s >= workload.warm_up_s + workload.seconds:
            return
        in_burst = bursts and at_s % workload.burst_every_s < workload.burst_s
        rate = workload.rate_per_s * (workload.burst_factor if in_burst else 1.0)
        if not bursts or random.random() < rate / highest:
            yield at_s


def _gap_s(workload: Workload, user: _User, random: np.random.Generator) -> float:
    """A log-normal gap with the user's mean."""
    sigma = workload.return_sigma
    return user.mean_gap_s * math.exp(random.normal(-sigma * sigma / 2, sigma))


def _live(workload: Workload, user: _User, quantile: float, past: int) -> None:
    """Makes a user one who returns. `quantile`: where the mean length lies among all lengths. `past`: how many of the
    visits were before the trace.
    """
    user.visits_left = workload.visits - past
    user.length = _length(workload, quantile)
    if workload.growth:
        first = user.length - workload.growth * workload.visits // 2
        user.length = min(max(1, first + workload.growth * past), user.longest)


def _length(workload: Workload, quantile: float) -> int:
    """The log-normal length below which this share of all lengths lies."""
    normal = workload.history_sigma * NormalDist().inv_cdf(min(max(quantile, 1e-9), 1 - 1e-9))
    return int(np.clip(workload.history_median * math.exp(normal), 1, workload.history_max))


def _users(workload: Workload, prefix: str, logged: Population | None) -> Iterator[_User]:
    """New users without end, or those of the log."""
    random = np.random.default_rng((workload.seed, 11))
    if logged is not None:
        if workload.hot_partition_share:
            raise RelayError("hot_partition_share chooses the ids of users, so it needs synthetic ones, not a log")
        for index in random.permutation(logged.size).tolist():
            longest = min(workload.history_max, max(1, len(logged.sequence(index)) - workload.suffix))
            first = min(logged.first_length(index), longest)
            yield _User(logged.user_id(index), first, longest)
        raise RelayError(
            f"the log's {logged.size:,} users are too few for this load: raise reuse, or lower the rate or the time"
        )
    for number in itertools.count():
        wants_hot = random.random() < workload.hot_partition_share
        name = f"{prefix}{number:06d}"
        if wants_hot:
            name = _in_partition(name, lambda key: partition_for(key, workload.partitions) == 0)
        yield _User(name, _length(workload, random.random()), workload.history_max)


def _in_partition(name: str, wanted: Callable[[bytes], bool]) -> str:
    return next(text for text in (f"{name}-{n}" for n in itertools.count()) if wanted(text.encode()))
