"""What ranked and refused requests tell: to the triggers' test of the risk, the predictions and the metrics."""

from __future__ import annotations

from relaygr.admission.latency import Stage
from relaygr.schemas.messages import DEFAULT_SCENARIO, Path
from relaygr.worker.executor.context import ExecutorContext
from relaygr.worker.executor.work import RankingWork
from relaygr.worker.metrics import DiscardedWork, DivertedEnd

_FULL_PATHS = (Path.FULL, Path.TRUNCATED)
_PATHS_WITHOUT_WAIT = (Path.FULL, Path.HBM)


class Observations:
    """Belongs to the device thread."""

    def __init__(self, context: ExecutorContext) -> None:
        self._context = context
        self._parts = context.parts

    def taken(self, work: RankingWork) -> None:
        """The request arrived, announced by a job or not."""
        request, arrivals = work.request, self._context.arrivals
        announcement = arrivals.announced.pop(work.impression, None)
        work.was_announced = announcement is not None
        if announcement is None:
            return
        arrivals.seen.append((announcement, work.received.received_us))
        if announcement[3] is not None:
            measured = work.received.received_us, request.sent_at_us, *announcement[3]
            self._context.lead_times.arrived[request.scenario or DEFAULT_SCENARIO].append(measured)

    def found_ready(self, work: RankingWork) -> None:
        """The request needs nothing but its ranking pass: if nobody announced it, it counts for `ExpectedArrivals`."""
        if not work.was_announced and work.lookups == 1:
            self._context.arrivals.seen.append((None, work.received.received_us))

    def sent(self, work: RankingWork) -> None:
        """The request's scores were sent at `answered_us`."""
        self._parts.results.count_ranked(work)
        if work.path is Path.FULL and work.pre_infer_us:
            self._correct_full(work)
        if work.handle is not None and work.handle.approximate:
            self._parts.metrics.ranked_approximately()
        if work.request.diverted is None:
            self._note_full_path(work)
        if work.answered_us > work.deadline_us:
            self._parts.metrics.discarded(DiscardedWork.LATE, int(work.pre_infer_us + work.predicted_us))

    def unranked(self, work: RankingWork) -> None:
        """The request was rejected or expired. That is the trigger's mistake only if it sent no job."""
        if work.impression not in self._context.with_job and work.request.diverted is None:
            self._context.full_path.missed(work.request.request_id, self._parts.clock.monotonic_us())

    def ended(self, work: RankingWork, ranked: bool) -> None:
        """The request ended; counts it if another worker had passed it on."""
        if work.request.diverted is None:
            return
        end = DivertedEnd.RANKED if ranked else DivertedEnd.UNRANKED
        if ranked and work.answered_us > work.deadline_us:
            end = DivertedEnd.LATE
        self._parts.metrics.diverted_received[end].inc()

    def _note_full_path(self, work: RankingWork) -> None:
        """Notes how full inference ended, or would have ended, for the triggers' test of the risk."""
        now_us, observer = work.answered_us, self._context.full_path
        tokens = work.resolved.tokens
        if work.impression in self._context.computed and work.path not in _FULL_PATHS and work.started_us is not None:
            observer.prepared.append((tokens, work.scored_tokens, work.answer_by_us - work.started_us))
        transit_us = work.transit_us
        # One wrong time of sending among a few samples would be their P99, and put every user at risk.
        if work.path in _PATHS_WITHOUT_WAIT and transit_us is not None:
            inside_us = now_us - work.received.received_us - work.pre_infer_us - work.rank_us
            outside = now_us, transit_us + inside_us + work.deadline_us - work.answer_by_us
            observer.outside.append(outside)
            if work.path is Path.FULL and work.pre_infer_us:
                observer.outside_full.append(outside)
        if work.path in _FULL_PATHS and work.pre_infer_us:
            observer.ran(tokens, work.scored_tokens, work.pre_infer_us + work.rank_us, now_us)
        if work.impression in self._context.with_job:
            return
        if work.path is Path.TRUNCATED or (work.path is Path.FULL and now_us > work.answer_by_us):
            observer.missed(work.request.request_id, now_us)

    def _correct_full(self, work: RankingWork) -> None:
        """Corrects the predictions of full inference. The ranking pass counts with its predicted time, since its
        forward may have served other requests too.
        """
        size = work.ranked_prefix_tokens, work.scored_tokens
        corrector = self._parts.corrector
        took_us = work.pre_infer_us + corrector.model_at(size[0]).hit_us(*size)
        corrector.observe(Stage.FULL, corrector.calibrated.full_us(*size), took_us, size[0])
