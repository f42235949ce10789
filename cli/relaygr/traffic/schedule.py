"""The schedule of impressions: a pure function of settings and population, equal for all systems that are compared.

Open loop: gaps are exponential, users follow a Zipf distribution, lead times are log-normal. A share of the impressions
(`traffic.new_share`) is by users who come once. The stream is lazy, so it may be endless. Test behaviours
(`traffic.held_out`) are played in the order of each user, users in a random order.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from relaygr.schemas.messages import Behaviours
from relaygr.schemas.record import record
from relaygr.traffic.population import Population
from relaygr.traffic.settings import TrafficSettings


@record(frozen=True, slots=True)
class Impression:
    """One scheduled impression. Times are in µs since the start of the stream."""

    number: int
    user: int
    retrieval_us: int
    ranking_us: int
    history_length: int
    """The length of the history version of its ranking request, which is also the number of the version."""
    next_item: int | None = None
    """The item that the user chose in this impression; None: the log does not say."""


HISTORY_LEAD_US = 200_000
"""Time between the publication of a longer history and the retrieval event that names it."""


def impressions(settings: TrafficSettings, population: Population) -> Iterator[Impression]:
    """The impressions in the order of their retrieval events, until `duration_s` is over."""
    return (_drawn if settings.held_out is None else _held_out)(settings, population)


def _held_out(settings: TrafficSettings, population: Population) -> Iterator[Impression]:
    """Each behaviour after a user's first history, once. A user's next impression begins after the behaviour before
    it was published.
    """
    random = np.random.default_rng((settings.seed, 2))
    lengths = np.array([population.first_length(user) for user in range(population.size)])
    ends = np.array([population.sequence_length(user) for user in range(population.size)])
    back_us = np.zeros(population.size)
    at_us, number = 0.0, 0
    while (left := ends - lengths).any():
        at_us += random.exponential(1e6 / settings.rate_per_s)
        at_us = max(at_us, float(back_us[left > 0].min()))
        if settings.duration_s and at_us > settings.duration_s * 1e6:
            return
        weights = np.cumsum(np.where(back_us <= at_us, left, 0))
        user = int(weights.searchsorted(random.random() * weights[-1], side="right"))
        length = int(lengths[user])
        ranking_us = at_us + _lead_us(random, settings)
        yield Impression(
            number, user, int(at_us), int(ranking_us), length, int(population.sequence(user).items[length])
        )
        lengths[user] += 1
        back_us[user] = ranking_us + settings.budget_ms * 1000 + HISTORY_LEAD_US
        number += 1


def _lead_us(random: np.random.Generator, settings: TrafficSettings) -> float:
    return settings.lead_median_ms * 1000 * float(np.exp(random.normal(0.0, settings.lead_sigma)))


def _drawn(settings: TrafficSettings, population: Population) -> Iterator[Impression]:
    random = np.random.default_rng((settings.seed, 2))
    # With random numbers of its own, so that times and leads are the same at every share.
    random_new, new = np.random.default_rng((settings.seed, 4)), population.size
    cumulative = np.cumsum(user_shares(settings, population.size))
    lengths: dict[int, int] = {}
    ends_us: dict[int, float] = {}
    """Until when an impression of each user is open."""
    at_us, number = 0.0, 0
    while True:
        at_us += random.exponential(1e6 / settings.rate_per_s)
        if settings.duration_s and at_us > settings.duration_s * 1e6:
            return
        user = min(int(cumulative.searchsorted(random.random())), population.size - 1)
        if settings.new_share and random_new.random() < settings.new_share:
            user, new = new, new + 1
        lead_us = _lead_us(random, settings)
        # The tombstone is published so long before the retrieval event, and an open impression names what it deletes.
        is_open = ends_us.get(user, 0.0) > at_us - HISTORY_LEAD_US
        length = next_length(lengths.get(user), settings, population, user, may_start_again=not is_open)
        if user < population.size:
            lengths[user] = length
            if settings.start_again:
                ends_us[user] = max(ends_us.get(user, 0.0), at_us + lead_us + settings.budget_ms * 1000)
        yield Impression(number, user, int(at_us), int(at_us + lead_us), length)
        number += 1


def user_shares(settings: TrafficSettings, users: int) -> NDArray[np.float64]:
    """The expected share of each user who returns in the impressions of all these: Zipf."""
    weights: NDArray[np.float64] = np.arange(1, users + 1, dtype=np.float64) ** -settings.zipf_exponent
    shares: NDArray[np.float64] = weights / weights.sum()
    return shares


def next_length(
    before: int | None, settings: TrafficSettings, population: Population, user: int, *, may_start_again: bool = True
) -> int:
    """The length of the user's history at an impression. `before`: that of the one before; None: it is the first.

    `may_start_again`: no impression is open that names the user's present history.
    """
    if before is None:
        return population.first_length(user)
    first = population.first_length(user)
    most = max(first, population.sequence_length(user) - settings.suffix)
    if settings.start_again and may_start_again and before >= most:
        return first
    return min(before + settings.growth, most)


class CandidateSource(Protocol):
    """Retrieval: the item ids to rank."""

    def begin(self, impression: Impression) -> None:
        """At the time of the retrieval event."""

    def of(self, impression: Impression) -> NDArray[np.int64]:
        """At the time of the ranking request."""

    def close(self) -> None:
        """After the last request."""


def candidate_source(settings: TrafficSettings, population: Population) -> CandidateSource:
    """How the settings retrieve. Raises RelayError for a run without a checkpoint."""
    if settings.held_out is None:
        return Candidates(settings, population)
    from relaygr.traffic.held_out import FoundCandidates, HeldOutPopulation  # It imports torch.

    assert isinstance(population, HeldOutPopulation)
    return FoundCandidates(settings.held_out, settings, population)


class Candidates:
    """The item ids to rank: for each impression another section of one random order of all items.

    The ids are distinct if there are enough items. This is cheap, because the gateway shares the machine with the
    processes that it measures.
    """

    _STRIDE = 7919

    def __init__(self, settings: TrafficSettings, population: Population) -> None:
        items = np.random.default_rng((settings.seed, 3)).permutation(population.items).astype(np.int64)
        self._places = items.size
        self._count = settings.candidates
        self._items = np.resize(items, items.size + settings.candidates)

    def begin(self, impression: Impression) -> None:
        """Nothing has to be searched."""

    def close(self) -> None:
        """Nothing has to be ended."""

    def of(self, impression: Impression) -> NDArray[np.int64]:
        """A pure function of the seed and the impression's number."""
        start = impression.number * self._STRIDE % self._places
        return self._items[start : start + self._count]


def suffix_of(impression: Impression, settings: TrafficSettings, population: Population) -> Behaviours:
    """The short-term behaviours: those that follow the history in the user's sequence."""
    end = impression.history_length + settings.suffix
    return population.sequence(impression.user)[impression.history_length : end]
