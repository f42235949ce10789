"""The behaviours of a log, by user and in the order of time, checked for training.

The command line reads the file (`relaygr.ingest`), sorts each user's behaviours by `order_in_time`, and bounds
the number of lines. A row here takes 18 bytes.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from relaygr.runtime.errors import RelayError

MIN_BEHAVIOURS: Final = 5
"""Of a user: at least one each for validation and test, and three for training."""
LIKED_CODE: Final = 8
"""The action code of a rating of 4, which is twice the rating."""
MOST_TIED: Final = 0.5
"""The share of behaviours of equal time above which `ties_note` says that most have no order."""
_SORTED_AT_ONCE: Final = 1 << 18
"""Rows of equal time, so that sorting them takes no memory for each row of the log."""


class Ties(enum.StrEnum):
    """What orders a user's behaviours of equal time."""

    HASH = "hash"
    """A hash of the row: the same for the same rows in every file, and nothing can be learnt from it."""
    FILE = "file"
    """Their order in the file."""

    @property
    def said(self) -> str:
        return "by a hash of the row" if self is Ties.HASH else "as in the file"


@dataclass(frozen=True, slots=True)
class Log:
    """The behaviours of all users. `items[starts[i]:starts[i + 1]]` are those of user i, oldest first."""

    users: list[str]
    starts: NDArray[np.int64]
    """[users + 1]"""
    items: NDArray[np.int64]
    """Item ids as in messages."""
    actions: NDArray[np.uint16]
    times_ms: NDArray[np.int64]
    has_times: bool
    has_ratings: bool
    """The action codes are ratings: twice the stars."""
    columns: Mapping[str, str] = field(default_factory=dict)
    """Role -> the column that has it, where the reader was told."""
    action_names: Mapping[str, int] = field(default_factory=dict)
    """Event name in the log -> action code; empty: the log has codes."""
    ties: Ties = Ties.HASH
    """What ordered behaviours of equal time."""

    @property
    def lengths(self) -> NDArray[np.int64]:
        """Behaviours of each user."""
        return np.diff(self.starts)

    def digest(self) -> str:
        """32 hex digits: a hash of all behaviours. The same log gives the same digest in every layout."""
        found = blake2b(digest_size=16)
        for user in self.users:
            found.update(user.encode() + b"\0")
        for array in (self.starts, self.items, self.actions, self.times_ms):
            found.update(np.ascontiguousarray(array).data)
        return found.hexdigest()

    def ties_share(self) -> float:
        """The share of behaviours whose time equals that of the same user's behaviour before or after it."""
        same = np.zeros(len(self.items), dtype=bool)
        same[1:] = self.times_ms[1:] == self.times_ms[:-1]
        same[self.starts[:-1][self.lengths > 0]] = False
        return float((same | np.append(same[1:], False)).mean()) if same.size else 0.0

    def ties_note(self) -> str:
        """A sentence about a log of which most behaviours have no order in time; empty: it is another log."""
        share = self.ties_share()
        if share <= MOST_TIED:
            return ""
        cure = (
            "Give finer times; or, if the file has an order of its own that is the order in time, --ties file"
            if self.ties is Ties.HASH
            else "If the file is sorted by anything else than time, the test part and its metrics follow from that"
        )
        return (
            f"{share:.0%} of the behaviours share their time with the user's behaviour before or after: they are "
            f"ordered {self.ties.said}, so what comes next among them is no evidence. {cure}."
        )


def order_in_time(
    names: Sequence[str],
    owners: NDArray[np.signedinteger[Any]],
    times_ms: NDArray[np.int64],
    *others: NDArray[np.integer[Any]],
    ties: Ties,
) -> NDArray[np.int64]:
    """The places of rows, by owner and time. `owners`: each row's place in `names`, the users; `others`: the columns of
    items and actions.

    A user's rows of one time are ordered by a hash of the whole row: were it of the item alone, a model would learn
    that one item comes before another.
    """
    order: NDArray[np.int64] = np.lexsort((times_ms, owners))
    if ties is Ties.FILE:
        return order
    is_first = changes(owners, times_ms, order=order)
    tied = np.flatnonzero(~is_first | np.append(~is_first[1:], False))
    begins = np.flatnonzero(is_first[tied])
    # Parts that begin with a row of another user or time than the one before.
    cuts = np.unique(begins[np.searchsorted(begins, np.arange(0, tied.size, _SORTED_AT_ONCE), side="right") - 1])
    for places in np.split(tied, cuts[1:]):
        rows = order[places]
        users, place_of = np.unique(owners[rows], return_inverse=True)
        seeds = [int.from_bytes(blake2b(names[user].encode(), digest_size=8).digest(), "big") for user in users]
        hashes = np.array(seeds, np.uint64)[place_of]
        for column in (times_ms, *others):
            hashes = mixed(hashes ^ column[rows].astype(np.uint64))
        order[places] = rows[np.lexsort((hashes, np.cumsum(is_first[places])))]
    return order


def changes(*columns: NDArray[Any], order: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Which rows in this order differ from the row before them in one of the columns."""
    found = np.zeros(len(order), bool)
    found[:1] = True
    for column in columns:
        values = column[order]
        found[1:] |= values[1:] != values[:-1]
    return found


def mixed(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """A step of SplitMix64: every bit of a result depends on every bit of its number."""
    values = values + np.uint64(0x9E3779B97F4A7C15)
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def usable(log: Log) -> Log:
    """The users with at least `MIN_BEHAVIOURS`. Raises RelayError if the log cannot be split by time."""
    if not log.has_times:
        raise RelayError(
            "The log has no time of the behaviours, so nothing in it comes before anything else: a split into training "
            "and test would be arbitrary. Name the column of times by --columns time=NAME, or add one."
        )
    lengths = log.lengths
    kept = lengths >= MIN_BEHAVIOURS
    if not kept.any():
        raise RelayError(
            f"The log has {len(log.items):,} behaviours of {len(log.users):,} users, and no user has "
            f"{MIN_BEHAVIOURS}: there are no histories to learn from. Check that the column of the user is right, and "
            "not the id of a session or a row."
        )
    rows = np.repeat(kept, lengths)
    times_ms, starts = log.times_ms[rows], np.concatenate(([0], np.cumsum(lengths[kept]))).astype(np.int64)
    if bool((times_ms[starts[:-1]] == times_ms[starts[1:] - 1]).all()):
        raise RelayError(
            "All behaviours of each user have the same time: the log has no order. Give a log with the time of each "
            "behaviour, and not that of the export or of the user."
        )
    return replace(
        log,
        users=[user for user, is_kept in zip(log.users, kept.tolist(), strict=True) if is_kept],
        starts=starts,
        items=log.items[rows],
        actions=log.actions[rows],
        times_ms=times_ms,
    )
