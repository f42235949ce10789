"""Splits each user's behaviours in training, validation and test, in the order of time.

| protocol | training | validation | test |
|---|---|---|---|
| `time` | first 80 % | the 10 % after | last 10 % |
| `leave-one-out` | all but two | last but one | last |
| `global-time` | before a time | until a later one | from then on |

The history of a validation is the training part, that of a test training and validation part. The first two give each
user at least one behaviour in every part. `global-time` splits all users at the two times before which 80 and 90 % of
the log's behaviours are, so that nothing that is learnt is later than what judges it; a part judges the users who have
behaviours in it and before it. All that is learnt or counted (the vocabulary, action codes, popularity, whether users
come back to an item) is from the training part: an item that is not in it is a miss for every model.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from relaygr.runtime.errors import RelayError
from relaygr.training.logs import LIKED_CODE, Log
from relaygr.training.options import Protocol

REPEATS_BELOW = 0.01
"""With a smaller share of repeated items in the training part, items of the history are not ranked again."""
LEAST_LIKED: Final = 0.001
"""With a smaller share of training behaviours that are liked, or that are not, `liked` would be a constant."""
_LARGEST_STARS: Final = 5
_CUTS_PERCENT: Final = (80, 90)
"""Shares of the log's behaviours before the two times of `global-time`."""


class Part(enum.StrEnum):
    """The behaviours that a model is judged by."""

    VALIDATION = "validation"
    TEST = "test"


@dataclass(frozen=True, slots=True)
class Split:
    """A log's behaviours as rows of the vocabulary, and where the parts of each user end."""

    protocol: Protocol
    users: list[str]
    starts: NDArray[np.int64]
    """[users + 1], as in the log."""
    train_ends: NDArray[np.int64]
    validation_ends: NDArray[np.int64]
    """[users]: places in `rows`."""
    item_ids: NDArray[np.int64]
    """The vocabulary, ascending: the items of the training part."""
    behaviour_ids: NDArray[np.int64]
    """Each behaviour's item id, as in messages."""
    rows: NDArray[np.int32]
    """Each behaviour's row of the vocabulary; `len(item_ids)`: not in it."""
    actions: NDArray[np.uint16]
    liked: NDArray[np.bool_]
    """Whether each behaviour is a rating of at least 4."""
    num_actions: int
    """One more than the largest action code of the training part; 0: all are 0."""
    liked_share: float | None
    """The share of training behaviours that are ratings of at least 4; None: the log has no ratings."""
    repeats_share: float
    """The share of training behaviours whose item the user had before."""
    cuts_ms: tuple[int, int] | None = None
    """The times at which validation and test begin, for all users; None: each user has its own."""

    @property
    def num_items(self) -> int:
        """The size of the vocabulary."""
        return len(self.item_ids)

    @property
    def leaves_out_seen(self) -> bool:
        """Whether items of a user's history are no candidates, since users do not come back to them."""
        return self.repeats_share < REPEATS_BELOW

    @property
    def has_liked(self) -> bool:
        """Whether `liked` is a task: the log has ratings, and it would not be a constant."""
        return self.liked_share is not None and LEAST_LIKED <= self.liked_share <= 1 - LEAST_LIKED

    def liked_note(self) -> str:
        """A sentence about ratings that are probably not of up to 5 stars; empty: they may be, or there are none."""
        if self.liked_share is None:
            return ""
        largest = (self.num_actions - 1) / 2
        cure = "If the log has another scale, convert it to stars of up to 5"
        if not self.has_liked:
            return (
                f"The ranker has no task `liked`: {self.liked_share:.1%} of the ratings to train on are at least 4, so "
                f"it would always answer the same. {cure}."
            )
        if largest > _LARGEST_STARS:
            return f"Ratings go up to {largest:g}, and `liked` is a rating of at least 4 on every scale. {cure}."
        return ""

    def history_end(self, user: int, part: Part) -> int:
        """The place after the history that predicts this part."""
        return int(self.train_ends[user] if part is Part.VALIDATION else self.validation_ends[user])

    def targets(self, user: int, part: Part) -> slice:
        """The places of the behaviours of this part."""
        end = self.validation_ends[user] if part is Part.VALIDATION else self.starts[user + 1]
        return slice(self.history_end(user, part), int(end))

    def judged_users(self, part: Part) -> NDArray[np.int64]:
        """The users who have behaviours in this part and before it, ascending; all, unless the split is of all users at
        one time.
        """
        begins = self.train_ends if part is Part.VALIDATION else self.validation_ends
        ends = self.validation_ends if part is Part.VALIDATION else self.starts[1:]
        return np.flatnonzero((begins > self.starts[:-1]) & (ends > begins))

    def training_places(self) -> NDArray[np.bool_]:
        """Whether each behaviour is of the training part."""
        places = np.arange(len(self.rows))
        return places < np.repeat(self.train_ends, np.diff(self.starts))


def split_log(log: Log, protocol: Protocol) -> Split:
    """Splits a log that `usable` has checked. Raises RelayError if a part would be empty."""
    lengths, cuts_ms = log.lengths, None
    if protocol is Protocol.GLOBAL_TIME:
        cuts_ms = _cuts_ms(log)
        train_ends, validation_ends = (_ends_before(log, cut_ms) for cut_ms in cuts_ms)
    else:
        held = np.maximum(1, lengths // 10) if protocol is Protocol.TIME else np.ones_like(lengths)
        validation_ends = log.starts[1:] - held
        train_ends = validation_ends - held
    if int((train_ends - log.starts[:-1]).max()) < 2:
        raise _not_splittable("no user has two behaviours in the training part")
    in_training = np.arange(len(log.items)) < np.repeat(train_ends, lengths)
    item_ids = np.unique(log.items[in_training])
    places = np.searchsorted(item_ids, log.items)
    known = item_ids[np.minimum(places, len(item_ids) - 1)] == log.items
    rows = np.where(known, places, len(item_ids)).astype(np.int32)
    largest = int(log.actions[in_training].max())
    owners = np.repeat(np.arange(len(log.users)), lengths)[in_training]
    pairs = np.unique(owners * np.int64(len(item_ids)) + rows[in_training]).size
    split = Split(
        protocol,
        log.users,
        log.starts,
        train_ends,
        validation_ends,
        item_ids,
        log.items,
        rows,
        log.actions,
        log.actions >= LIKED_CODE,
        largest + 1 if largest else 0,
        float((log.actions[in_training] >= LIKED_CODE).mean()) if log.has_ratings else None,
        1.0 - pairs / max(1, int(in_training.sum())),
        cuts_ms,
    )
    for part in Part:
        if not split.judged_users(part).size:
            raise _not_splittable(f"no user has behaviours in the {part} part and before it")
    return split


def _cuts_ms(log: Log) -> tuple[int, int]:
    """The times at which validation and test begin. Behaviours of one time are in one part."""
    at = [len(log.times_ms) * percent // 100 for percent in _CUTS_PERCENT]
    first, second = np.partition(log.times_ms, at)[at].tolist()
    return first, second


def _ends_before(log: Log, cut_ms: int) -> NDArray[np.int64]:
    """[users]: the place after each user's behaviours before this time."""
    before = np.concatenate(([0], np.cumsum(log.times_ms < cut_ms)))
    ends: NDArray[np.int64] = log.starts[:-1] + before[log.starts[1:]] - before[log.starts[:-1]]
    return ends


def _not_splittable(why: str) -> RelayError:
    return RelayError(
        f"The log cannot be split at one time for all users: {why}. Its users come for a short time, or its times are "
        "coarse: use --protocol time, which splits each user by itself."
    )
