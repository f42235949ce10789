"""The users of the traffic: their ids and behaviours, oldest first."""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from relaygr.ingest.gather import Interactions
from relaygr.ingest.log_map import log_map
from relaygr.ingest.reading import read_interactions
from relaygr.runtime.errors import RelayError
from relaygr.schemas.messages import Behaviours, History
from relaygr.traffic.settings import TrafficSettings

_OPTION = re.compile(r"--(columns|actions)( (?=\w+=))?")
_EPOCH_MS = 1_700_000_000_000
_GAP_MS = 60_000
KEPT_SEQUENCES = 4096
"""Users whose behaviours are kept in memory."""
FIRST_SHARE = 0.8
"""The share of a logged sequence that is the history at the user's first impression. The history grows by the rest."""


class Population(Protocol):
    """Users by index. User 0 has the most impressions. Indices from `size` on are those of users who come once, of whom
    only synthetic populations have any (`traffic.new_share`).
    """

    @property
    def size(self) -> int:
        """The number of users who return."""

    @property
    def items(self) -> NDArray[np.int64]:
        """The item ids from which candidates are drawn."""

    def user_id(self, index: int) -> str: ...

    def first_length(self, index: int) -> int:
        """The number of behaviours in the history at the user's first impression."""

    def sequence(self, index: int) -> Behaviours:
        """All behaviours of the user."""

    def sequence_length(self, index: int) -> int:
        """The number of all behaviours of the user."""


def history_at(population: Population, index: int, length: int) -> History:
    """The snapshot of the user's first `length` behaviours. Its version number is `length`."""
    return History(population.user_id(index), length, np.empty(0, dtype="<i8"), population.sequence(index)[:length])


class SyntheticPopulation:
    """Users with log-normal history lengths and uniform items, generated from the seed on demand."""

    def __init__(self, settings: TrafficSettings) -> None:
        self._settings = settings
        random = np.random.default_rng((settings.seed, 0))
        self._first_lengths = self._lengths(random, settings.users)
        self._sequences = functools.lru_cache(maxsize=KEPT_SEQUENCES)(self._make_sequence)

    @property
    def size(self) -> int:
        return self._settings.users

    @property
    def items(self) -> NDArray[np.int64]:
        return np.arange(self._settings.items, dtype=np.int64)

    def user_id(self, index: int) -> str:
        return f"user-{index:06d}"

    def first_length(self, index: int) -> int:
        if index < self.size:
            return int(self._first_lengths[index])
        return int(self._lengths(np.random.default_rng((self._settings.seed, 5, index)), 1)[0])

    def _lengths(self, random: np.random.Generator, count: int) -> NDArray[np.int64]:
        settings = self._settings
        lengths = settings.history_median * np.exp(random.normal(0.0, settings.history_sigma, count))
        return np.clip(lengths.astype(np.int64), 1, max(1, int(settings.history_max * FIRST_SHARE)))

    def sequence(self, index: int) -> Behaviours:
        """A pure function of seed and index."""
        return self._sequences(index)

    def sequence_length(self, index: int) -> int:  # noqa: ARG002 - all have the same length
        """The longest history plus a suffix."""
        return self._settings.history_max + self._settings.suffix

    def _make_sequence(self, index: int) -> Behaviours:
        random = np.random.default_rng((self._settings.seed, 1, index))
        count = self.sequence_length(index)
        return Behaviours(
            random.integers(0, self._settings.items, count).astype("<i8"),
            random.integers(0, 4, count).astype("<u2"),
            (_EPOCH_MS + np.arange(count) * _GAP_MS).astype("<i8"),
        )


class LogPopulation:
    """Users of a log, with some behaviours of each."""

    def __init__(
        self,
        names: Sequence[str],
        sequences: Sequence[Behaviours],
        first_lengths: Sequence[int],
        items: NDArray[np.int64],
    ) -> None:
        """`items`: from which candidates are drawn. The others have an entry for each user."""
        self._names, self._sequences, self._first_lengths, self._items = names, sequences, first_lengths, items

    @property
    def size(self) -> int:
        return len(self._names)

    @property
    def items(self) -> NDArray[np.int64]:
        return self._items

    def user_id(self, index: int) -> str:
        return self._names[index]

    def first_length(self, index: int) -> int:
        return self._first_lengths[index]

    def sequence_length(self, index: int) -> int:
        return len(self._sequences[index])

    def sequence(self, index: int) -> Behaviours:
        return self._sequences[index]


def longest_users(interactions: Interactions, settings: TrafficSettings) -> LogPopulation:
    """The users with the longest histories, and the newest behaviours of each.

    Raises ValueError if the log contains no user with at least two behaviours.
    """
    ordered = sorted(range(len(interactions.users)), key=lambda index: -len(interactions.of(index)))
    chosen = [index for index in ordered[: settings.users] if len(interactions.of(index)) > 1]
    if not chosen:
        text = "the log contains no user with at least two behaviours"
        raise ValueError(": ".join(filter(None, (text, interactions.report.left_out))))
    whole, most = [interactions.of(index) for index in chosen], settings.history_max + settings.suffix
    sequences = [each[max(0, len(each) - most) :] for each in whole]
    return LogPopulation(
        [interactions.users[index] for index in chosen],
        sequences,
        [max(1, int(len(each) * FIRST_SHARE)) for each in sequences],
        np.unique(np.concatenate([each.items for each in whole])).astype(np.int64),
    )


def population_of(settings: TrafficSettings) -> Population:
    """The users that the settings describe. Raises RelayError for a log or a run that cannot be used."""
    if settings.held_out is not None:
        try:
            from relaygr.traffic.held_out import held_out_population
        except ModuleNotFoundError as error:
            raise RelayError(
                f"traffic.held_out retrieves with a ranker, which needs {error.name}: pip install 'relaygr[training]'."
            ) from error
        return held_out_population(settings.held_out, settings)
    if settings.interactions is None:
        return SyntheticPopulation(settings)
    if settings.new_share:
        raise RelayError("traffic.new_share makes up users who come once: leave it out, or traffic.interactions.")
    try:
        names = log_map(settings.columns, settings.actions)
        return longest_users(read_interactions(settings.interactions, log_map=names), settings)
    except ValueError as error:
        raise RelayError(f"{settings.interactions}: {error}") from error
    except RelayError as error:
        raise RelayError(_OPTION.sub(_setting, str(error))) from error


def _setting(option: re.Match[str]) -> str:
    """An option of `publish history`, which texts about logs name, as demo and traffic have it."""
    return f"--set traffic.{option[1]}{'=' * bool(option[2])}"
