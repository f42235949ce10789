"""The traces of requests and jobs: their stages, from the times that their work has kept."""

from __future__ import annotations

from typing import Final

from relaygr.consumer.interface import Received
from relaygr.schemas.ended import Ended
from relaygr.schemas.headers import RankingHeaders
from relaygr.schemas.messages import Path, RankingResult
from relaygr.tracing.spans import MessagePlace
from relaygr.tracing.stages import RankingTimes, StageSpan, TraceStage, stages_of
from relaygr.tracing.worker import RankingTrace, WorkerTraces
from relaygr.worker.executor.work import JobOutcome, JobWork, RankingWork

_STAGE_OF_JOB: Final = {
    JobOutcome.COMPUTED: TraceStage.PRE_INFER,
    JobOutcome.JOINED: TraceStage.PRE_INFER,
    JobOutcome.NO_ROOM: TraceStage.PRE_INFER,
    JobOutcome.FAILED: TraceStage.PRE_INFER,
    JobOutcome.RELOADED: TraceStage.RELOAD,
}
"""The stage of a job that has begun, by its outcome."""


class RequestTraces:
    """Any thread may call it."""

    def __init__(self, traces: WorkerTraces, worker_id: str) -> None:
        self._traces = traces
        self._worker_id = worker_id

    def ranking(
        self,
        reply: RankingHeaders,
        received: Received,
        result: RankingResult,
        now_us: int,
        now_wall_us: int,
        work: RankingWork | None = None,
    ) -> RankingTrace | None:
        """The trace of a request that is answered now; None if it is not recorded. `work`: its stages."""
        trace = self._traces.ranking(reply)
        if trace is None:
            return None
        times = RankingTimes(received.received_us, now_us) if work is None else _times(work, now_us)
        attributes: dict[str, str | int | bool] = {
            "relaygr.worker_id": self._worker_id,
            "relaygr.outcome": result.outcome.value,
            "relaygr.prefix_tokens": result.prefix_tokens,
            "relaygr.tokens_cached": result.tokens_cached,
        }
        if result.path is not None:
            attributes["relaygr.path"] = str(result.path)
        error = None if result.outcome is Ended.RANKED else str(result.reason or result.outcome.value)
        trace.answered(
            _place(received),
            received.received_us,
            times.ranked_us or now_us,
            now_us,
            stages_of(times, _computed(work)),
            now_wall_us - now_us,
            attributes,
            error,
        )
        return trace

    def job_ended(self, work: JobWork, outcome: JobOutcome, now_us: int, now_wall_us: int) -> None:
        """Records a job that ends now."""
        received = work.received
        trace = self._traces.job(received.headers, work.job.request_id)
        if trace is None:
            return
        ahead_us = now_wall_us - now_us
        begun_us = work.begun_wall_us - ahead_us if work.begun_wall_us else now_us
        stages = [StageSpan(TraceStage.QUEUE, received.received_us, begun_us)]
        if outcome in _STAGE_OF_JOB and work.begun_wall_us:
            stages.append(StageSpan(_STAGE_OF_JOB[outcome], begun_us, now_us))
        error = outcome.value if outcome is JobOutcome.FAILED else None
        trace.ended(_place(received), received.received_us, now_us, stages, ahead_us, outcome.value, error)


def _times(work: RankingWork, now_us: int) -> RankingTimes:
    return RankingTimes(
        work.received.received_us,
        now_us,
        work.started_us,
        work.reload_us,
        work.reloaded_us,
        work.pre_infer_us,
        work.ready_us,
        work.rank_us,
        work.ranked_us,
        work.history_wait_us,
        work.history_waited_us,
    )


def _computed(work: RankingWork | None) -> TraceStage:
    """What the computation of the request's prefix was."""
    if work is None or work.path in (Path.FULL, Path.TRUNCATED):
        return TraceStage.FULL
    return TraceStage.PRE_INFER if work.path is Path.PENDING else TraceStage.APPEND


def _place(received: Received) -> MessagePlace:
    return MessagePlace(received.topic, received.partition, received.offset)
