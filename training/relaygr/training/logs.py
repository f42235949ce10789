"""The behaviours of a log, by user and in the order of time, checked for training.

The command line reads the file (`relaygr.interactions`), which sorts each user's behaviours by time, keeps the order of
the file where times are equal, and bounds the number of lines. A row here takes 18 bytes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from typing import Final

import numpy as np
from numpy.typing import NDArray

from relaygr.runtime.errors import RelayError

MIN_BEHAVIOURS: Final = 5
"""Of a user: at least one each for validation and test, and three for training."""
LIKED_CODE: Final = 8
"""The action code of a rating of 4, which is twice the rating."""


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


def usable(log: Log) -> Log:
    """The users with at least `MIN_BEHAVIOURS`. Raises RelayError if the log cannot be split by time."""
    if not log.has_times:
        raise RelayError(
            "The log has no time of the behaviours, so nothing in it comes before anything else: a split into training "
            "and test would be arbitrary. Add a column of times (docs/publishing.md names the known layouts)."
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
