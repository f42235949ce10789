"""The end of a request: its one result, what it gives back, and what it tells to predictions, triggers and metrics."""

from __future__ import annotations

from relaygr.admission.risk import FullPathObserver
from relaygr.schemas.ended import Ended, Reason
from relaygr.schemas.messages import Path
from relaygr.worker.cache import WasteReason
from relaygr.worker.executor.capacity import Capacity
from relaygr.worker.executor.impressions import ExpectedArrivals, Impressions
from relaygr.worker.executor.parts import ExecutorParts
from relaygr.worker.executor.prefixes import Prefixes
from relaygr.worker.executor.work import HeldMemory, RankingWork, RequestState, Unranked

_FULL_PATHS = (Path.FULL, Path.TRUNCATED)
_PATHS_WITHOUT_WAIT = (Path.FULL, Path.HBM)


class Ends:
    """Belongs to the device thread. Any thread may read `ended`."""

    def __init__(
        self,
        parts: ExecutorParts,
        capacity: Capacity,
        impressions: Impressions,
        arrivals: ExpectedArrivals,
        prefixes: Prefixes,
        held: HeldMemory,
    ) -> None:
        """`held`: the memory of requests."""
        self._cache, self._pool, self._clock = parts.cache, parts.pool, parts.clock
        self._results, self._metrics = parts.results, parts.metrics
        self._spills = parts.settings.dram_bytes > 0
        self._capacity = capacity
        self._impressions = impressions
        self._arrivals = arrivals
        self._prefixes = prefixes
        self._held = held
        self.full_path = FullPathObserver()
        """How full inference ended, or would have ended, for the triggers' test of the risk."""
        self.ended = 0
        """Requests that have ended."""

    def sent(self, work: RankingWork) -> None:
        """The request's scores were sent at `answered_us`."""
        self._results.count_ranked(work)
        if work.path is Path.FULL and work.pre_infer_us:
            self._capacity.observe_full(work)
        if work.handle is not None and work.handle.approximate:
            self._metrics.approximate.inc()
        if work.request.diverted is None:
            self._note_full_path(work)
        self.end(work, ranked=True)

    def unranked(self, work: RankingWork, end: Unranked) -> None:
        """The request ends without scores: writes its result."""
        if end.ended is Ended.EXPIRED or end.reason is Reason.OVERLOADED:
            self._note_missed(work)
        if end.reason is Reason.OVERLOADED:
            work.backlog_us = self._capacity.backlog.predicted_us + int(work.remaining_us)
        self._results.unranked(work.reply, work.received, end, work)
        self.end(work, ranked=False)

    def end(self, work: RankingWork, ranked: bool) -> None:
        """The request gives back all that it holds. Its result is written."""
        work.state = RequestState.ENDED
        self._capacity.drop(work)
        self._prefixes.reloads.end_wait(work)
        self.ended += 1
        self._count_diverted(work, ranked)
        self._held.end(work)
        cache, user_id, request_id = self._cache, work.request.user_id, work.request.request_id
        work.impression.is_answered = True
        if work.impression.announced is not None:
            self._arrivals.withdraw(work.impression)
        # Counts a wasted pre-infer: the request was ranked before it, or was not ranked in time.
        cache.end_lease(user_id, request_id, WasteReason.OVERTAKEN if ranked else WasteReason.REQUEST_EXPIRED)
        if ranked and work.handle is not None and work.prefix is not None:
            if work.prefix.for_one_impression:
                cache.demote([user_id])
            elif self._spills:
                cache.transfers.spill(work.handle)
                if self._pool is not None:
                    self._pool.visited(work.handle.pin.entry.key, work.received.received_us)
        self.let_go(work)

    def let_go(self, work: RankingWork) -> None:
        """The request gives back its prefix."""
        if work.handle is not None:
            self._cache.release(work.handle)
            work.handle = None
        self._prefixes.free_scratch(work)

    def no_time(self, user_id: str, request_id: str) -> None:
        """Notes that the poll thread had no time for this request, whose prefix is not needed any more."""
        self._capacity.refused()
        impression = self._impressions.of(user_id, request_id, self._clock.monotonic_us())
        self._impressions.take_prefix(impression)
        impression.is_answered = True
        self._cache.end_lease(user_id, request_id, WasteReason.REQUEST_EXPIRED)

    def _count_diverted(self, work: RankingWork, ranked: bool) -> None:
        """Counts the request if another worker had passed it on."""
        if work.request.diverted is None:
            return
        end = Ended.RANKED if ranked else Ended.FAILED
        if ranked and work.answered_us > work.deadline_us:
            end = Ended.EXPIRED
        self._metrics.diverted_received[end].inc()

    def _note_missed(self, work: RankingWork) -> None:
        """The request was rejected or expired. That is the trigger's mistake only if it sent no job."""
        if not work.impression.has_job and work.request.diverted is None:
            self.full_path.missed(work.request.request_id, self._clock.monotonic_us())

    def _note_full_path(self, work: RankingWork) -> None:
        """Notes how full inference ended, or would have ended."""
        now_us, observer = work.answered_us, self.full_path
        tokens = work.resolved.tokens
        if work.impression.is_computed and work.path not in _FULL_PATHS and work.started_us is not None:
            left_us = work.answer_by_us - work.started_us + work.history_wait_us
            observer.prepared.append((tokens, work.scored_tokens, left_us))
        transit_us = work.transit_us
        # One wrong time of sending among a few samples would be their P99, and put every user at risk.
        if work.path in _PATHS_WITHOUT_WAIT and transit_us is not None:
            inside_us = now_us - work.received.received_us - work.pre_infer_us - work.rank_us - work.history_wait_us
            outside = now_us, transit_us + inside_us + work.deadline_us - work.answer_by_us
            observer.outside.append(outside)
            if work.path is Path.FULL and work.pre_infer_us:
                observer.outside_full.append(outside)
        if work.path in _FULL_PATHS and work.pre_infer_us:
            observer.ran(tokens, work.scored_tokens, work.pre_infer_us + work.rank_us, now_us)
        if work.impression.has_job:
            return
        if work.path is Path.TRUNCATED or (work.path is Path.FULL and now_us > work.answer_by_us):
            observer.missed(work.request.request_id, now_us)
