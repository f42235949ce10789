"""The load of a fleet: which users belong to a part of it, and their impressions.

`Load` is what a simulation plays: `Demand`, which draws impressions, or a trace that others recorded.

A part of the fleet is a set of partitions. Users lie in partitions by murmur2 of their ids, as in the product. The
impressions of a part are those of its users, so a part of a fleet is simulated without the rest. Up to `MOST_NAMED`
users, and under a constant load, they are those of `relaygr traffic` with the same settings, one by one; beyond, they
have the same distributions.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final, Protocol

import numpy as np
from numpy.typing import NDArray

from relaygr.schemas.messages import Behaviours
from relaygr.schemas.partitioner import partition_for
from relaygr.traffic.population import FIRST_SHARE, LogPopulation, Population, population_of
from relaygr.traffic.schedule import Impression, impressions
from relaygr.traffic.settings import TrafficSettings

MOST_NAMED: Final = 20_000
_BLOCK: Final = 4096
_NIGHT_SHARE: Final = 0.35
"""The load at night, as a share of the load at the evening's peak."""
COLD_SHARE: Final = 0.25
"""The beginning of a simulated demand, as a share, that no figure counts: caches and corrections are empty then."""
COLD_MOST_OF_DAY_S: Final = 60.0
"""The longest such beginning under a day's load curve: a quarter of a day would be its night."""


class Load(Protocol):
    """The impressions of the whole fleet."""

    @property
    def traffic(self) -> TrafficSettings:
        """Sizes, lead time and deadline of all requests, and how long impressions come."""

    @property
    def partitions(self) -> int:
        """Partitions of the topics."""

    @property
    def seed(self) -> int:
        """The seed of the measured times that a simulation draws."""

    @property
    def cold_s(self) -> float:
        """The beginning that no figure of a simulation counts."""

    def part(self, partitions: frozenset[int]) -> Part:
        """The impressions of these partitions."""


@dataclass(frozen=True, slots=True)
class Demand:
    """The demand for the whole fleet. `day_s`: the period of a day's load curve; None: a constant load."""

    traffic: TrafficSettings
    partitions: int
    seed: int
    day_s: float | None = None

    @property
    def cold_s(self) -> float:
        cold_s = COLD_SHARE * self.traffic.duration_s
        return cold_s if self.day_s is None else min(cold_s, COLD_MOST_OF_DAY_S)

    def part(self, partitions: frozenset[int]) -> Part:
        """See `part_of`."""
        return part_of(self, partitions)

    def load_at(self, at_us: float) -> float:
        """The load at this time as a part of `traffic.rate_per_s`. A day begins at its lowest load."""
        if self.day_s is None:
            return 1.0
        wave = 0.5 - 0.5 * math.cos(2 * math.pi * at_us / (self.day_s * 1e6))
        return _NIGHT_SHARE + (1 - _NIGHT_SHARE) * wave


@dataclass(frozen=True, slots=True)
class Part:
    """The impressions of some partitions, in order of their retrieval events, and how their users are named."""

    impressions: Iterator[Impression]
    user_id: Callable[[int], str]
    users: NDArray[np.int64]
    """The users of these partitions by index."""
    partition_of: dict[int, int]
    share: float
    """The expected share of the fleet's impressions."""
    first_length: Callable[[int], int]


def part_of(demand: Demand, partitions: frozenset[int]) -> Part:
    """The demand of these partitions. Raises RelayError for an interaction log that cannot be used."""
    traffic = demand.traffic.model_copy(update={"seed": demand.seed})
    if traffic.users <= MOST_NAMED or traffic.interactions is not None:
        return _named_part(demand, traffic, partitions)
    found = _partitions_of_all(traffic.users, demand.partitions)
    users = np.flatnonzero(np.isin(found, list(partitions)))
    weights = weights_of(traffic.users, traffic)
    share = float(weights[users].sum() / weights.sum())
    lengths = _first_lengths(traffic)[users]
    places = {user: place for place, user in enumerate(users.tolist())}
    return Part(
        _drawn(demand, traffic, users, weights[users], share, lengths),
        name_of,
        users,
        dict(zip(users.tolist(), found[users].tolist(), strict=True)),
        share,
        lambda user: int(lengths[places[user]]),
    )


def _named_part(demand: Demand, traffic: TrafficSettings, partitions: frozenset[int]) -> Part:
    population: Population = population_of(traffic)
    # A log's sequences have lengths of their own; synthetic ones need no content.
    lengths: Population = population if isinstance(population, LogPopulation) else _Lengths(population, traffic)
    weights = weights_of(population.size, traffic)
    partition_of = {
        user: partition
        for user in range(population.size)
        if (partition := partition_for(population.user_id(user).encode(), demand.partitions)) in partitions
    }
    users = np.fromiter(partition_of, np.int64, len(partition_of))
    share = float(weights[users].sum() / weights.sum())
    if demand.day_s is None:
        stream: Iterator[Impression] = (each for each in impressions(traffic, lengths) if each.user in partition_of)
    else:
        firsts = np.array([population.first_length(user) for user in partition_of], np.int64)
        stream = _drawn(demand, traffic, users, weights[users], share, firsts)
    return Part(stream, population.user_id, users, partition_of, share, population.first_length)


class _Lengths:
    """A population whose sequences have lengths and no content: the schedule looks at nothing else."""

    def __init__(self, population: Population, traffic: TrafficSettings) -> None:
        self._population = population
        nothing = np.broadcast_to(np.int64(0), traffic.history_max + traffic.suffix)
        self._sequence = Behaviours(nothing, nothing, nothing)  # type: ignore[arg-type]
        self.size, self.items = population.size, population.items
        self.user_id, self.first_length = population.user_id, population.first_length

    def sequence(self, index: int) -> Behaviours:  # noqa: ARG002 - all have the same length
        return self._sequence


def _drawn(
    demand: Demand,
    traffic: TrafficSettings,
    users: NDArray[np.int64],
    weights: NDArray[np.float64],
    share: float,
    first_lengths: NDArray[np.int64],
) -> Iterator[Impression]:
    """A Poisson process over these users: drawn at the peak's rate, and thinned to the load of each time."""
    if not users.size:
        return
    random = np.random.default_rng((demand.seed, 2, int(users[0])))
    cumulative = np.cumsum(weights) / weights.sum()
    lengths = first_lengths.copy()
    seen = np.zeros(users.size, np.bool_)
    most = np.maximum(first_lengths, traffic.history_max)
    gap_us = 1e6 / (traffic.rate_per_s * share)
    begins_us, number = 0.0, 0
    while True:
        times = begins_us + np.cumsum(random.exponential(gap_us, _BLOCK))
        places = np.minimum(np.searchsorted(cumulative, random.random(_BLOCK)), users.size - 1)
        leads = traffic.lead_median_ms * 1000 * np.exp(random.normal(0.0, traffic.lead_sigma, _BLOCK))
        kept = random.random(_BLOCK)
        begins_us = float(times[-1])
        for at_us, place, lead_us, part in zip(
            times.tolist(), places.tolist(), leads.tolist(), kept.tolist(), strict=True
        ):
            if traffic.duration_s and at_us > traffic.duration_s * 1e6:
                return
            if part > demand.load_at(at_us):
                continue
            if seen[place]:
                grown = lengths[place] + traffic.growth
                again = traffic.start_again and lengths[place] >= most[place]
                lengths[place] = first_lengths[place] if again else min(grown, most[place])
            seen[place] = True
            yield Impression(number, int(users[place]), int(at_us), int(at_us + lead_us), int(lengths[place]))
            number += 1


def weights_of(users: int, traffic: TrafficSettings) -> NDArray[np.float64]:
    """How often each user comes, relative to the first: as the schedule of the gateway."""
    places: NDArray[np.float64] = np.arange(1, users + 1, dtype=np.float64)
    weights: NDArray[np.float64] = places**-traffic.zipf_exponent
    return weights


def shares_of(demand: Demand) -> NDArray[np.float64]:
    """The expected share of the fleet's impressions by partition. Raises RelayError for an interaction log that cannot
    be used.
    """
    traffic = demand.traffic
    if traffic.interactions is None:
        found = _partitions_of_all(traffic.users, demand.partitions)
    else:
        population = population_of(traffic)
        names = (population.user_id(user).encode() for user in range(population.size))
        found = np.array([partition_for(name, demand.partitions) for name in names], np.int64)
    weights = weights_of(found.size, traffic)
    shares: NDArray[np.float64] = np.bincount(found, weights, demand.partitions) / weights.sum()
    return shares


def _first_lengths(traffic: TrafficSettings) -> NDArray[np.int64]:
    """As `SyntheticPopulation`."""
    random = np.random.default_rng((traffic.seed, 0))
    lengths = traffic.history_median * np.exp(random.normal(0.0, traffic.history_sigma, traffic.users))
    return np.clip(lengths.astype(np.int64), 1, max(1, int(traffic.history_max * FIRST_SHARE)))


def name_of(user: int) -> str:
    """As `SyntheticPopulation`."""
    return f"user-{user:06d}"


def partitions_of(users: NDArray[np.int64], partitions: int) -> NDArray[np.int64]:
    """The partition of each synthetic user: `partition_for` of the names, for millions of users at once."""
    found = np.empty(users.size, np.int64)
    digits = np.maximum(6, np.floor(np.log10(np.maximum(users, 1))).astype(np.int64) + 1)
    for width in np.unique(digits).tolist():
        chosen = np.flatnonzero(digits == width)
        powers = 10 ** np.arange(width - 1, -1, -1, dtype=np.int64)
        numbers = (users[chosen, None] // powers % 10 + ord("0")).astype(np.uint8)
        prefix = np.frombuffer(b"user-", np.uint8)
        keys = np.hstack([np.broadcast_to(prefix, (chosen.size, prefix.size)), numbers])
        found[chosen] = (_murmur2(keys) & np.uint32(0x7FFFFFFF)).astype(np.int64) % partitions
    return found


@functools.lru_cache(maxsize=1)
def _partitions_of_all(users: int, partitions: int) -> NDArray[np.int64]:
    """Kept for the next seed or part of the same fleet: a second for two million users."""
    found = partitions_of(np.arange(users), partitions)
    found.flags.writeable = False
    return found


def _murmur2(keys: NDArray[np.uint8]) -> NDArray[np.uint32]:
    """`relaygr.schemas.partitioner.murmur2` of keys of one length, uint8 [keys, length]."""
    count, length = keys.shape
    whole, multiplier = length & ~3, np.uint32(0x5BD1E995)
    state = np.full(count, np.uint32(0x9747B28C ^ length), np.uint32)
    words = np.ascontiguousarray(keys[:, :whole]).view("<u4")
    for column in range(whole // 4):
        word = words[:, column] * multiplier
        state = (state * multiplier) ^ ((word ^ (word >> np.uint32(24))) * multiplier)
    if length > whole:
        tail = np.zeros(count, np.uint32)
        for place in range(whole, length):
            tail |= keys[:, place].astype(np.uint32) << np.uint32(8 * (place - whole))
        state = (state ^ tail) * multiplier
    state = (state ^ (state >> np.uint32(13))) * multiplier
    return state ^ (state >> np.uint32(15))
