"""Whether a group keeps up, by Burrow's rules over the last polls. They need no threshold on lag.

A polled offset does not show *when* it was committed, so "no commit for a whole window" looks like an offset that did
not move. Whether a member owns the partition tells the two cases apart. The first rule that applies gives the status:

    lag within bounds                                   OK
    the offset went back                                REWIND
    lag was within bounds at some time in the window    OK
    the offset did not move, and no member owns it      STOP
    the offset did not move, and a member owns it       STALL
    it moved, and lag is at most some polls' arrivals   OK
    it moved, and lag never fell                        WARN
    else                                                OK

The rule about some polls is not Burrow's. A group commits about once a second, so a group that keeps up always has
about a second of lag, and polls at the same times as the commits, or more often, never see it fall. The polls of two
seconds count, and two at least.

Until the window is full, a partition that is behind is JUDGING or REWIND, so that a slow start raises no alarm. A
partition without a commit is NO_COMMIT while no messages beyond the bound wait. After they have waited for a whole
window it is STALL with an owner, and STOP without.

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
    STALL = "stall"
    """A member owns the partition, and its offset does not move."""
    STOP = "stop"
    """No member owns the partition, and it has unread messages."""
    UNKNOWN = "unknown"
    """The lag could not be measured."""

    @property
    def exit_code(self) -> int:
        """0: keeps up; 1: falls behind; 2: does not move, or went back; 3: not measured; 4: not judged yet."""
        return _EXIT_CODES[self]


_EXIT_CODES = {
    LagStatus.OK: 0,
    LagStatus.NO_COMMIT: 0,
    LagStatus.WARN: 1,
    LagStatus.REWIND: 2,
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


def cadence_polls(interval_s: float) -> int:
    """The polls whose arrivals a group that keeps up may have as lag."""
    return max(_LEAST_CADENCE_POLLS, math.ceil(_CADENCE_S / interval_s))


def worst(statuses: Iterable[LagStatus]) -> LagStatus:
    """The most severe status; UNKNOWN if there is none."""
    return max(statuses, key=_SEVERITY.__getitem__, default=LagStatus.UNKNOWN)


def evaluate(
    samples: Sequence[LagSample],
    window_polls: int,
    ok_messages: int,
    owned: bool | None,
    cadence: int = _LEAST_CADENCE_POLLS,
) -> LagStatus:
    """The status after the last of `samples`, which are at most `window_polls`, oldest first.

    `owned`: whether a member owns the partition; None if that is unknown, which counts as owned. `cadence`: see
    `cadence_polls`.
    """
    last = samples[-1]
    if last.committed is None:
        if not all((sample.unread or 0) > ok_messages for sample in samples):
            return LagStatus.NO_COMMIT
        if len(samples) < window_polls:
            return LagStatus.JUDGING
        return LagStatus.STOP if owned is False else LagStatus.STALL
    if last.lag is None:
        return LagStatus.UNKNOWN
    if last.lag <= ok_messages:
        return LagStatus.OK
    offsets = [sample.committed for sample in samples if sample.committed is not None]
    lags = [sample.lag for sample in samples if sample.lag is not None]
    if any(later < earlier for earlier, later in itertools.pairwise(offsets)):
        return LagStatus.REWIND
    if any(lag <= ok_messages for lag in lags):
        return LagStatus.OK
    if len(samples) < window_polls:
        return LagStatus.JUDGING
    if offsets[0] == offsets[-1]:
        return LagStatus.STOP if owned is False else LagStatus.STALL
    arrived_per_poll = (offsets[-1] + lags[-1] - offsets[0] - lags[0]) / (len(samples) - 1)
    if last.lag <= cadence * arrived_per_poll:
        return LagStatus.OK
    if all(later >= earlier for earlier, later in itertools.pairwise(lags)):
        return LagStatus.WARN
    return LagStatus.OK
