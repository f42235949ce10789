"""What happens to the ranking requests and jobs that the executor holds: the events of their state machines.

`Requests.advance` and `Jobs.advance` take each to its next state. Prefixes under computation never call them: they
append a `Change`, and the executor hands it on. Copies post their events to the device thread; timers and changes of
histories come on it.
"""

from __future__ import annotations

from collections.abc import Sequence

from relaygr.schemas.record import record
from relaygr.worker.cache import Handle
from relaygr.worker.executor.work import CopyWait, JobWork, PrefixWork, RankingWork, ResolvedPrefix
from relaygr.worker.model.interface import RankOutputs


@record(frozen=True, slots=True)
class Taken:
    """The worker has taken the request or job from its topic; or takes the job again, for another model."""


@record(frozen=True, slots=True)
class HistoryChanged:
    """The awaited version of the user's history may be there, or the time to wait for it is over."""


@record(frozen=True, slots=True)
class ModelChanged:
    """Another model serves now."""


@record(frozen=True, slots=True)
class PrefixLeft:
    """The computation that stood in the way ended, without this prefix or with another version, or it serves another
    request: the prefix is looked up again.
    """

    prefix: ResolvedPrefix


@record(frozen=True, slots=True)
class PrefixComputed:
    """The prefix is complete at `at_us`. `handle` pins it in the cache until the event is handled; None: it lies on
    the scratch pages.
    """

    computation: PrefixWork
    handle: Handle | None
    at_us: int


@record(frozen=True, slots=True)
class ComputedTooLate:
    """Prediction at `at_us`: the prefix will be complete too late for this request."""

    at_us: int


@record(frozen=True, slots=True)
class Displaced:
    """At `at_us` the computation of the request's prefix was given up for a shorter request."""

    at_us: int


@record(frozen=True, slots=True)
class NoRoomToAppend:
    """The request can be ranked on the cached part that `handle` pins, and which the request releases."""

    handle: Handle


@record(frozen=True, slots=True)
class FirstLayerCopied:
    """The first layer of the prefix is in HBM."""

    wait: CopyWait


@record(frozen=True, slots=True)
class CopyEnded:
    """The copy or fill ended, with any outcome, or the copy may begin."""

    wait: CopyWait


@record(frozen=True, slots=True)
class WaitedTooLong:
    """There is no time left to wait for the copy."""

    wait: CopyWait


@record(frozen=True, slots=True)
class PrefixReloaded:
    """The copy for which the job waited ended, with any outcome."""

    prefix: ResolvedPrefix


@record(frozen=True, slots=True)
class Ranked:
    """The ranking pass returned these scores."""

    outputs: RankOutputs


@record(frozen=True, slots=True)
class Sent:
    """The scores were sent."""


@record(frozen=True, slots=True)
class NoTimeLeft:
    """The ranking pass could not end in time."""


@record(frozen=True, slots=True)
class DeviceFailed:
    """The device failed in the ranking pass, or in the computation of the prefix."""

    error: Exception


PrefixEvent = PrefixLeft | PrefixComputed | ComputedTooLate | Displaced | NoRoomToAppend | DeviceFailed
RequestEvent = (
    Taken
    | HistoryChanged
    | ModelChanged
    | FirstLayerCopied
    | CopyEnded
    | WaitedTooLong
    | Ranked
    | Sent
    | NoTimeLeft
    | PrefixEvent
)
JobEvent = Taken | PrefixReloaded | PrefixEvent
"""A job is told only of PrefixLeft and PrefixComputed: it has no deadline of its own, and ends if its prefix fails."""


TAKEN = Taken()
HISTORY_CHANGED = HistoryChanged()
SENT = Sent()


@record(frozen=True, slots=True)
class Change:
    """An event of these requests and jobs, in this order."""

    requests: Sequence[RankingWork]
    jobs: Sequence[JobWork]
    event: PrefixEvent
