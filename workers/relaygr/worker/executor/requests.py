"""The state machine of ranking requests, from their receipt to their one result (docs/scheduling.md).

    taken -> look_up -> serving -> a batch ranks it -> ends

`advance` takes each event to the step that follows it. A step that can not go on raises `Unranked`, which ends the
request here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import assert_never

import structlog

from relaygr.admission.lead import LeadTimes
from relaygr.schemas.ended import Ended, Reason
from relaygr.schemas.messages import DEFAULT_SCENARIO, Path, PrefixSource, RankingRequest
from relaygr.worker.cache import Handle, PendingKind
from relaygr.worker.executor.capacity import Capacity
from relaygr.worker.executor.device_record import MOST_ENDS
from relaygr.worker.executor.ends import Ends
from relaygr.worker.executor.events import (
    ComputedTooLate,
    CopyEnded,
    DeviceFailed,
    Displaced,
    FirstLayerCopied,
    HistoryChanged,
    ModelChanged,
    NoRoomToAppend,
    NoTimeLeft,
    PrefixComputed,
    PrefixLeft,
    Ranked,
    RequestEvent,
    Sent,
    Taken,
    WaitedTooLong,
)
from relaygr.worker.executor.impressions import ExpectedArrivals, Impressions
from relaygr.worker.executor.look_up import LookUps
from relaygr.worker.executor.order import Scheduler
from relaygr.worker.executor.parts import ExecutorParts
from relaygr.worker.executor.prefixes import Prefixes
from relaygr.worker.executor.resolver import PrefixResolver
from relaygr.worker.executor.serving import Serving
from relaygr.worker.executor.waits import HistoryWaits, Timers
from relaygr.worker.executor.work import (
    NO_PAGES,
    CopyWait,
    HeldMemory,
    PassedOn,
    PrefixWork,
    RankingWork,
    RequestState,
    Unranked,
)
from relaygr.worker.memory import is_out_of_memory
from relaygr.worker.model.interface import EngineLimits, RankOutputs

log = structlog.get_logger()


class Requests:
    """Belongs to the device thread."""

    def __init__(
        self,
        parts: ExecutorParts,
        resolver: PrefixResolver,
        capacity: Capacity,
        scheduler: Scheduler[PrefixWork | RankingWork],
        impressions: Impressions,
        arrivals: ExpectedArrivals,
        waits: HistoryWaits,
        timers: Timers,
        prefixes: Prefixes,
        held: HeldMemory,
        post: Callable[[Callable[[], None]], None],
    ) -> None:
        """`held`: the memory of requests."""
        self._cache, self._clock, self._results = parts.cache, parts.clock, parts.results
        self._device_record = parts.device_record
        self._resolver = resolver
        self._capacity = capacity
        self._impressions = impressions
        self._arrivals = arrivals
        self._reloads = prefixes.reloads
        self._look_ups = LookUps(
            parts, resolver, capacity, scheduler, impressions, arrivals, waits, timers, prefixes, held, post,
            self.advance,
        )  # fmt: skip
        self._serving = Serving(parts, resolver, capacity, scheduler, arrivals, self._look_ups, prefixes, held)
        self.ends = Ends(parts, capacity, impressions, arrivals, prefixes, held)
        self.lead_times = LeadTimes()
        """How long before their requests jobs came, for the triggers."""

    def advance(self, work: RankingWork, event: RequestEvent) -> None:
        """Takes the request to its next state. Its result goes to the result writer. A request that has ended stays so.

        One request that fails must not end the process and all other requests.
        """
        if work.has_ended:
            return
        try:
            self._advance(work, event)
        except Exception as error:
            log.error("a ranking request failed", request_id=work.request.request_id, exc_info=error)
            self._end_after(work, error)

    def _end_after(self, work: RankingWork, error: Exception) -> None:
        """Ends the request after an exception, or looks it up once more if a reload failed."""
        if work.state is RequestState.ANSWERED:
            # Its scores are on their way.
            return self.ends.end(work, ranked=True)
        if work.has_ended:
            return None
        try:
            self._advance(work, DeviceFailed(error))
        except Exception as second:
            if not work.has_ended:
                self.ends.unranked(work, _failed(second))

    def _advance(self, work: RankingWork, event: RequestEvent) -> None:
        """Takes the step that follows the event, and ends the request if the step says so."""
        try:
            match event:
                case Taken():
                    self._take(work)
                case Ranked(outputs):
                    self._ranked(work, outputs)
                case Sent():
                    self.ends.sent(work)
                case PrefixComputed():
                    if not self._serving.continue_on(work, event):
                        self._look_up(work)
                case HistoryChanged():
                    self._look_ups.end_history_wait(work)
                    self._look_up(work)
                case PrefixLeft():
                    self._look_up(work)
                case CopyEnded(wait) if wait is work.wait:
                    self._copy_ended(work, wait)
                case FirstLayerCopied(wait) if wait is work.wait:
                    handle = self._look_ups.arriving(work, wait)
                    if handle is not None:
                        self._serving.rank_on(work, handle, work.reloaded_us)
                case WaitedTooLong(wait) if wait is work.wait:
                    self._waited_too_long(work, wait)
                case NoRoomToAppend(handle):
                    self._serving.rank_on(work, handle, self._clock.monotonic_us())
                case ComputedTooLate(at_us):
                    self._capacity.missed()
                    self._serving.cut_short(work, at_us)
                case Displaced(at_us):
                    self._serving.displaced(work, at_us)
                case ModelChanged():
                    # The first look-up stays counted.
                    work.lookups = min(1, work.lookups)
                    self._look_up_again(work)
                case NoTimeLeft():
                    self._capacity.missed()
                    raise self._serving.rejection(work)
                case DeviceFailed(error):
                    self._device_failed(work, error)
                case CopyEnded() | FirstLayerCopied() | WaitedTooLong():
                    pass  # Of a wait that has ended.
                case _:
                    assert_never(event)
        except Unranked as end:
            self.ends.unranked(work, end)
        except PassedOn:
            self.ends.end(work, ranked=False)

    def _take(self, work: RankingWork) -> None:
        request, received_us = work.request, work.received.received_us
        work.impression = self._impressions.of(request.user_id, request.request_id, received_us)
        work.pages, work.suffix = NO_PAGES, request.suffix
        self._capacity.backlog.take_over()
        announcement = self._arrivals.arrived(work.impression, received_us)
        work.was_announced = announcement is not None
        if announcement is not None and announcement.stated_us is not None:
            measured = received_us, request.sent_at_us, *announcement.stated_us
            self.lead_times.arrived[request.scenario or DEFAULT_SCENARIO].append(measured)
        too_long = _too_long(request, self._resolver.engine.limits)
        if too_long is not None:
            raise Unranked(Ended.FAILED, Reason.TOO_LONG, too_long)
        ends = self._device_record.ends(request.user_id, request.request_id)
        if ends >= MOST_ENDS:
            raise Unranked(Ended.FAILED, Reason.DEVICE_ERROR, f"{ends} processes ended while they computed it")
        self._look_up(work)

    def _look_up(self, work: RankingWork) -> None:
        """Looks the request up, and serves it with what is found, unless it waits."""
        found = self._look_ups.look_up(work)
        if found is not None:
            self._serving.serve(work, found)

    def _look_up_again(self, work: RankingWork) -> None:
        """The request lost its prefix, and begins anew."""
        self.ends.let_go(work)
        self._capacity.drop(work)
        work.pages, work.inputs, work.unknown_items = NO_PAGES, None, 0
        work.path, work.prefix_source, work.tokens_cached = Path.FULL, PrefixSource.COMPUTED, 0
        self._look_up(work)

    def _copy_ended(self, work: RankingWork, wait: CopyWait) -> None:
        """Looks the request up again, whatever became of the copy."""
        self._look_ups.end_copy_wait(work)
        waited_for = work.path
        if wait.pending.kind is PendingKind.LOAD:
            work.reloaded_us = self._clock.monotonic_us()
            work.reload_us += work.reloaded_us - wait.started_us
        self._look_up(work)
        if work.path is Path.HBM:
            work.path = waited_for

    def _waited_too_long(self, work: RankingWork, wait: CopyWait) -> None:
        """There is no time left to wait."""
        self._look_ups.end_copy_wait(work)
        self._reloads.end_wait_for_room(wait.pending)
        if work.resolved.revision != self._resolver.engine.revision:
            return self._look_up(work)
        return self._serving.compute(work, None, self._clock.monotonic_us())

    def _ranked(self, work: RankingWork, outputs: RankOutputs) -> None:
        """Writes the scores as the result, if they are finite and the request still had its prefix. They are sent with
        those of the whole batch.
        """
        if work.handle is not None and _lost_its_prefix(work.handle):
            return self._look_up_again(work)
        work.backlog_us = self._capacity.backlog.queued_us or None
        if self._results.ranked(work, outputs):
            work.state = RequestState.ANSWERED
            return None
        # The cause may be the cached prefix: the next request would fail, too.
        self._cache.invalidate_user(work.request.user_id)
        return self.ends.end(work, ranked=False)

    def _device_failed(self, work: RankingWork, error: Exception) -> None:
        """Fails the request with the device's error. If a reload failed, looks the request up again instead."""
        if work.handle is not None and _lost_its_prefix(work.handle):
            return self._look_up_again(work)
        raise _failed(error)


def _failed(error: Exception) -> Unranked:
    reason = Reason.OUT_OF_MEMORY if is_out_of_memory(error) else Reason.DEVICE_ERROR
    return Unranked(Ended.FAILED, reason, str(error)[:500] or repr(error))


def _lost_its_prefix(handle: Handle) -> bool:
    """Whether the handle was revoked, or the rest of its prefix did not arrive."""
    return not handle.is_held or (handle.arrival is not None and handle.arrival.failed)


def _too_long(request: RankingRequest, limits: EngineLimits) -> str | None:
    """The limit of the model that the request exceeds. Checked before anything is computed for the request."""
    for count, limit, what in (
        (int(request.candidates.size), limits.max_candidates, "candidates"),
        (int(request.suffix.items.size), limits.max_suffix_behaviours, "suffix behaviours"),
    ):
        if count > limit:
            return f"{count} {what}, the model takes {limit}"
    return None
