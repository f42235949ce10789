"""Whether a group keeps up, by Burrow's rules over the last polls. They need no threshold on lag.

A polled offset does not show *when* it was committed, so "no commit for a whole window" looks like an offset that did
not move. Whether a member owns the partition tells the two cases apart, and comes first: without an owner nothing will
be read, however short the wait was. The first rule that applies gives the status:

    the commit is beyond the end of the log             BEYOND_END
    lag within bounds                                   OK
    no member owns the partition                        STOP (if the offset moves all the same: the rules below)
    the offset went back                                REWIND
    lag was within bounds some polls ago                OK
    ... earlier in the window, and the offset moved     OK
    ... earlier in the window, and it did not move      JUDGING
    the offset did not move for a whole window          STALL
    it moved, and lag is at most some polls' arrivals   OK
    it moved, and lag never fell                        WARN
    else                                                OK

The rules about some polls are not Burrow's. A group commits about once a second, so a group that keeps up always has
about a second of lag, and polls at the same times as the commits, or more often, never see it fall. The polls of two
seconds count, and two at least.

Until the window is full, a partition with an owner that is behind is JUDGING or REWIND, so that a slow start raises no
alarm. A partition without a commit is judged by the messages that wait, and is NO_COMMIT where another one is OK.

Source of the rules: LinkedIn's Burrow, wiki page "Consumer Lag Evaluation Rules". Pure.
"""

from __future__ import annotations

import enum
import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass


class LagStatus(enum.StrEnum):
    """The status of a partition, or of the worst partition of a group. In order of severity."""

    NO_COMMIT = "no_commit"
    OK = "ok"
    JUDGING = "judging"
    """Messages wait, and there were too few polls yet to judge progress."""
    WARN = "warn"
    """The offset moves, and the lag grows."""
    REWIND = "rewind"
    """The offset went back, so messages are read again."""
    BEYOND_END = "beyond_end"
    """The commit is beyond the end of the log, so it is that of another log: the topic was created anew."""
    STALL = "stall"
    """A member owns the partition, and its offset does not move."""
    STOP = "stop"
    """No member owns the partition, and it has unread messages."""
    UNKNOWN = "unknown"
    """The lag could not be measured."""

    @property
    def exit_code(self) -> int:
        """0: keeps up; 1: falls behind; 2: makes no progress, or went back; 3: not measured; 4: not judged yet."""
        return _EXIT_CODES[self]


_EXIT_CODES = {
    LagStatus.OK: 0,
    LagStatus.NO_COMMIT: 0,
    LagStatus.WARN: 1,
    LagStatus.REWIND: 2,
    LagStatus.BEYOND_END: 2,
    LagStatus.STALL: 2,
    LagStatus.STOP: 2,
    LagStatus.UNKNOWN: 3,
    LagStatus.JUDGING: 4,
}
_CADENCE_S = 2.0
"""The arrivals of this time are normal lag: twice the time between two commits of a group."""
_LEAST_CADENCE_POLLS = 2
_SEVERITY = {status: severity for severity, status in enumerate(LagStatus)}


@dataclass(frozen=True, slots=True)
class LagSample:
    """One partition at one poll."""

    committed: int | None
    lag: int | None
    unread: int | None = None
    """Messages that wait for a group without a commit."""
    owned: bool | None = None
    """Whether a member owns the partition; None if that is unknown, which counts as owned."""
    is_beyond_end: bool = False
    """Whether the commit is beyond the end of the log."""

    @property
    def waiting(self) -> int | None:
        """Messages that wait; None if that is unknown."""
        return self.unread if self.committed is None else self.lag

    @property
    def is_orphan(self) -> bool:
        """Whether no member owns the partition."""
        return self.owned is False


def cadence_polls(interval_s: float) -> int:
    """The polls whose arrivals a group that keeps up may have as lag."""
    return max(_LEAST_CADENCE_POLLS, math.ceil(_CADENCE_S / interval_s))


def worst(statuses: Iterable[LagStatus]) -> LagStatus:
    """The most severe status; UNKNOWN if there is none."""
    return max(statuses, key=_SEVERITY.__getitem__, default=LagStatus.UNKNOWN)


def evaluate(
    samples: Sequence[LagSample], window_polls: int, ok_messages: int, cadence: int = _LEAST_CADENCE_POLLS
) -> LagStatus:
    """The status after the last of `samples`, which are at most `window_polls`, oldest first.

    `cadence`: see `cadence_polls`.
    """
    last = samples[-1]
    if last.waiting is None:
        return LagStatus.NO_COMMIT if last.committed is None else LagStatus.UNKNOWN
    if last.is_beyond_end:
        return LagStatus.BEYOND_END
    keeps_up = LagStatus.NO_COMMIT if last.committed is None else LagStatus.OK
    if last.waiting <= ok_messages:
        return keeps_up
    if last.is_orphan and not _moves_without_owner(samples):
        return LagStatus.STOP
    offsets = [sample.committed for sample in samples if sample.committed is not None]
    if any(later < earlier for earlier, later in itertools.pairwise(offsets)):
        return LagStatus.REWIND
    for polls_ago, sample in enumerate(reversed(samples)):
        if sample.waiting is not None and sample.waiting <= ok_messages:
            has_moved = sample.committed != last.committed
            return keeps_up if has_moved or polls_ago <= cadence else LagStatus.JUDGING
    if len(samples) < window_polls:
        return LagStatus.JUDGING
    if last.lag is None or offsets[0] == offsets[-1]:
        return LagStatus.STALL
    lags = [sample.lag for sample in samples if sample.lag is not None]
    arrived_per_poll = (offsets[-1] + lags[-1] - offsets[0] - lags[0]) / (len(samples) - 1)
    if last.lag <= cadence * arrived_per_poll:
        return LagStatus.OK
    if all(later >= earlier for earlier, later in itertools.pairwise(lags)):
        return LagStatus.WARN
    return LagStatus.OK


def _moves_without_owner(samples: Sequence[LagSample]) -> bool:
    """Whether a consumer that is no member of the group reads the partition, and commits for the group."""
    return any(
        earlier.is_orphan and later.is_orphan and (earlier.committed or 0) < (later.committed or 0)
        for earlier, later in itertools.pairwise(samples)
    )
