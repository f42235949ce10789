"""The load of a fleet: which users belong to a part of it, and their impressions.

A part of the fleet is a set of partitions. Users lie in partitions by murmur2 of their ids, as in the product. The
impressions of a part are those of its users, so a part of a fleet is simulated without the rest. Users, their shares,
lengths and lead times have the distributions of `relaygr traffic` with the same settings; with `traffic.new_share` new
users come, each once.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from relaygr.schemas.partitioner import partition_for
from relaygr.traffic.population import LogPopulation, Population, population_of
from relaygr.traffic.schedule import Impression, next_length, user_shares
from relaygr.traffic.settings import TrafficSettings

_BLOCK: Final = 4096
_NIGHT_SHARE: Final = 0.35
"""The load at night, as a share of the load at the evening's peak."""
COLD_SHARE: Final = 0.25
"""The beginning of a simulated demand, as a share, that no figure counts: caches and corrections are empty then."""
COLD_MOST_OF_DAY_S: Final = 60.0
"""The longest such beginning under a day's load curve: a quarter of a day would be its night."""


@dataclass(frozen=True, slots=True)
class Part:
    """The impressions of some partitions, in order of their retrieval events, and how their users are named."""

    impressions: Iterator[Impression]
    user_id: Callable[[int], str]
    users: NDArray[np.int64]
    """The returning users of these partitions by index."""
    partition_of: dict[int, int]
    """Of users by index. A user who comes once is in it from the user's impression on."""
    first_length: Callable[[int], int]


@dataclass(frozen=True, slots=True)
class Demand:
    """The demand for the whole fleet. `day_s`: the period of a day's load curve; None: a constant load."""

    traffic: TrafficSettings
    partitions: int
    seed: int
    """Of users and impressions, and of the measured times that a simulation draws."""
    day_s: float | None = None

    @property
    def cold_s(self) -> float:
        """The beginning that no figure counts."""
        cold_s = COLD_SHARE * self.traffic.duration_s
        return cold_s if self.day_s is None else min(cold_s, COLD_MOST_OF_DAY_S)

    def load_at(self, at_us: float) -> float:
        """The load at this time as a part of `traffic.rate_per_s`. A day begins at its lowest load."""
        if self.day_s is None:
            return 1.0
        wave = 0.5 - 0.5 * math.cos(2 * math.pi * at_us / (self.day_s * 1e6))
        return _NIGHT_SHARE + (1 - _NIGHT_SHARE) * wave

    def part(self, partitions: frozenset[int]) -> Part:
        """The demand of these partitions. Raises RelayError for an interaction log that cannot be used."""
        population = population_of(self.traffic.model_copy(update={"seed": self.seed}))
        found = self._partitions_of_users(population)
        users = np.flatnonzero(np.isin(found, list(partitions)))
        partition_of = dict(zip(users.tolist(), found[users].tolist(), strict=True))
        drawn = self._drawn(population, users, partitions, partition_of)
        return Part(drawn, population.user_id, users, partition_of, population.first_length)

    def shares(self) -> NDArray[np.float64]:
        """The expected share of the fleet's impressions by partition. Raises RelayError for an interaction log that
        cannot be used.
        """
        # Synthetic users need not be made.
        population = None if self.traffic.interactions is None else population_of(self.traffic)
        found = self._partitions_of_users(population)
        shares = np.bincount(found, user_shares(self.traffic, found.size), self.partitions)
        new = self.traffic.new_share
        return np.asarray((1 - new) * shares + new / self.partitions, np.float64)

    def _partitions_of_users(self, population: Population | None) -> NDArray[np.int64]:
        if not isinstance(population, LogPopulation):
            return _partitions_of_all(self.traffic.users, self.partitions)
        names = (population.user_id(user).encode() for user in range(population.size))
        return np.array([partition_for(name, self.partitions) for name in names], np.int64)

    def _drawn(
        self,
        population: Population,
        users: NDArray[np.int64],
        partitions: frozenset[int],
        partition_of: dict[int, int],
    ) -> Iterator[Impression]:
        """A Poisson process over these users: drawn at the peak's rate, and thinned to the load of each time."""
        traffic = self.traffic
        returning = (1 - traffic.new_share) * user_shares(traffic, population.size)[users].cumsum()
        new = traffic.new_share * len(partitions) / self.partitions
        # The place after the last returning user is that of a new one.
        cumulative = np.append(returning, (returning[-1] if users.size else 0.0) + new)
        last_place = users.size if new else users.size - 1
        if last_place < 0:
            return
        random = np.random.default_rng((self.seed, 2, min(partitions)))
        newcomers = self._users_who_come_once(population.size, partitions, partition_of)
        lengths: dict[int, int] = {}
        begins_us, number = 0.0, 0
        while True:
            times = begins_us + random.exponential(1e6 / (traffic.rate_per_s * cumulative[-1]), _BLOCK).cumsum()
            places = cumulative.searchsorted(random.random(_BLOCK) * cumulative[-1], side="right").clip(max=last_place)
            leads = traffic.lead_median_ms * 1000 * np.exp(random.normal(0.0, traffic.lead_sigma, _BLOCK))
            kept = random.random(_BLOCK)
            begins_us = float(times[-1])
            for at_us, place, lead_us, part in zip(
                times.tolist(), places.tolist(), leads.tolist(), kept.tolist(), strict=True
            ):
                if traffic.duration_s and at_us > traffic.duration_s * 1e6:
                    return
                if part > self.load_at(at_us):
                    continue
                user = int(users[place]) if place < users.size else next(newcomers)
                length = next_length(lengths.get(user), traffic, population, user)
                if place < users.size:
                    lengths[user] = length
                yield Impression(number, user, int(at_us), int(at_us + lead_us), length)
                number += 1

    def _users_who_come_once(
        self, first: int, partitions: frozenset[int], partition_of: dict[int, int]
    ) -> Iterator[int]:
        for begin in itertools.count(first, _BLOCK):
            found = partitions_of(np.arange(begin, begin + _BLOCK), self.partitions).tolist()
            for user, partition in enumerate(found, begin):
                if partition in partitions:
                    partition_of[user] = partition
                    yield user


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
