"""Ranking passes: which ready requests are ranked together, and which chunk of pre-infer runs in the same forward.

A batch takes ready requests in the order of their deadlines, as long as none of them misses its deadline because of
the others, and the batch pays (`BatchPlan`). If the earliest of its deadlines leaves time, the next chunk of
pre-infer runs in the same forward (`worker.mix_chunks`). A few candidates do not fill an accelerator, so both together
take little longer than one.
"""

from __future__ import annotations

from dataclasses import dataclass

import structlog

from relaygr.admission.latency import Stage
from relaygr.schemas.record import record
from relaygr.worker.executor.context import ExecutorContext
from relaygr.worker.executor.events import SENT, DeviceFailed, NoTimeLeft, Ranked
from relaygr.worker.executor.measured import SLOWDOWN_SAMPLE_US
from relaygr.worker.executor.prefixes import Chunk, Prefixes
from relaygr.worker.executor.requests import Requests
from relaygr.worker.executor.schedulable import WorkClass
from relaygr.worker.executor.work import PrefixWork, RankingWork, RequestState
from relaygr.worker.model.interface import RankOutputs

log = structlog.get_logger()


@record(frozen=True, slots=True)
class BatchRequest:
    """A ready request. Predicted times in µs, the writing of its result included."""

    alone_us: float
    further_us: float
    """What it adds to a batch that has another request."""
    rows: int
    answer_by_us: int


@dataclass(slots=True)
class BatchPlan:
    """The requests of one ranking pass: one at first, others are taken. Times are on the worker's monotonic clock."""

    ends_us: float
    must_end_us: float
    """When the first of the batch, or other work that follows it, would be late."""
    rows: int
    max_rows: int
    requests: int = 1

    def end_before(self, time_us: float) -> None:
        """Other work must start by then."""
        self.must_end_us = min(self.must_end_us, time_us)

    def take(self, request: BatchRequest, behind: int, *, must_pay: bool) -> bool:
        """Takes one more request, or returns false and changes nothing.

        `behind`: waiting work after the request. `must_pay` false: each request that ends in time is taken.
        """
        ends_us = self.ends_us + request.further_us
        must_end_us = min(self.must_end_us, request.answer_by_us)
        rows = self.rows + request.rows
        if ends_us > must_end_us or rows > self.max_rows or (must_pay and not self._pays(request, behind)):
            return False
        self.requests += 1
        self.ends_us, self.must_end_us, self.rows = ends_us, must_end_us, rows
        return True

    def _pays(self, request: BatchRequest, behind: int) -> bool:
        """Whether the mean time of all requests falls: those of the batch end `further_us` later, the request and those
        behind it end earlier by what a pass of its own takes more.
        """
        saved_us = request.alone_us - request.further_us
        return saved_us * (1 + behind) > self.requests * request.further_us


@dataclass(slots=True)
class _Batch:
    """The requests of one forward. Times are predicted, in µs on the worker's monotonic clock."""

    works: list[RankingWork]
    plan: BatchPlan | None
    """None without works."""


class Batches:
    """Belongs to the device thread."""

    def __init__(self, context: ExecutorContext, prefixes: Prefixes, requests: Requests) -> None:
        self._context = context
        self._parts = context.parts
        self._prefixes = prefixes
        self._requests = requests
        self._mixes = context.parts.settings.mixes_chunks(context.engine.device.is_cpu)

    def rank(self, now_us: int, first: RankingWork | None = None) -> PrefixWork | None:
        """Ranks `first`, if given, and the ready requests that fit beside it. Returns a prefix whose chunk has to run
        by itself now, because the forward with both failed.
        """
        batch = self._take(now_us, first)
        return self._rank(batch, batch.plan.must_end_us - batch.plan.ends_us) if batch.plan is not None else None

    def can_rank_beside_chunk(self) -> bool:
        """Whether a ready request could be ranked in the forward of the next pre-infer chunk."""
        return self._mixes and isinstance(self._context.scheduler.ranking.peek(), RankingWork)

    def rank_beside_chunk(self, now_us: int) -> tuple[bool, PrefixWork | None]:
        """Ranks ready requests in the forward of the next pre-infer chunk, whose turn it is. They end no later than
        they would behind the chunk. Returns whether any request was ranked, and a prefix as `rank` does.
        """
        batch = self._take(now_us, None)
        if not batch.works:
            return False, None
        return True, self._rank(batch, float("inf"))

    def _rank(self, batch: _Batch, slack_us: float) -> PrefixWork | None:
        works = batch.works
        # Read again: rejecting late requests took time, which is not device time.
        now_us = self._parts.clock.monotonic_us()
        for work in works:
            work.started_us = work.started_us or now_us
        chunk = self._prefixes.chunk_within(slack_us, now_us) if self._mixes and slack_us > 0 else None
        outputs = self._forward_mixed(works, chunk, now_us) if chunk is not None else None
        is_mixed = outputs is not None
        if outputs is None:
            outputs = self._forward(works)
        ended_us = self._parts.clock.monotonic_us()
        ranked: list[RankingWork] = []
        for work, output in zip(works, outputs, strict=True):
            work.rank_us, work.ranked_us = ended_us - now_us, ended_us
            if isinstance(output, RankOutputs):
                self._requests.advance(work, Ranked(output))
                if work.state is RequestState.ANSWERED:
                    ranked.append(work)
        # Results leave before the rest of the work for their requests, which would delay them.
        self._parts.results.send()
        answered_us, backlog = self._parts.clock.monotonic_us(), self._context.scheduler.backlog
        if not is_mixed:
            # The requests of a batch may differ in length.
            tokens = works[0].ranked_prefix_tokens if len(works) == 1 else None
            self._parts.corrector.observe(Stage.HIT, self._calibrated_us(works), ended_us - now_us, tokens)
            self._context.charge(WorkClass.RANKING, ended_us - now_us, ended_us)
        for work in ranked:
            work.answered_us = answered_us
            self._requests.advance(work, SENT)
        if ranked:
            now_us = self._parts.clock.monotonic_us()
            answer_us = (now_us - ended_us) / len(ranked)
            for work in ranked:
                backlog.measured.observe(work.path, work.remaining_us, answer_us, answered_us <= work.answer_by_us)
            # The first request of a batch had the fixed part of the pass.
            backlog.measured.done_us += max(0.0, works[0].predicted_us - works[0].remaining_us)
            if backlog.measured.done_us >= SLOWDOWN_SAMPLE_US:
                backlog.measured.observe_slowdown(now_us)
        for work, output in zip(works, outputs, strict=True):
            if not isinstance(output, RankOutputs):
                self._requests.advance(work, DeviceFailed(output))
        return chunk.work if chunk is not None and not is_mixed else None

    def _take(self, now_us: int, first: RankingWork | None) -> _Batch:
        """Takes the requests of the next forward out of the queue."""
        settings, queue = self._parts.settings, self._context.scheduler.ranking
        backlog = self._context.scheduler.backlog
        answer_us = backlog.measured.answer_us
        works: list[RankingWork] = []
        plan: BatchPlan | None = None
        must_end_us = float("inf")
        passed_over: list[PrefixWork | RankingWork] = []
        if first is not None:
            queue.remove(first)
        while max(len(works), len(passed_over)) < settings.max_batch_requests:
            work, first = first if first is not None else queue.pop(), None
            if work is None:
                break
            if isinstance(work, PrefixWork):
                # The prefix continues right after this batch. A longer batch could make it too late.
                passed_over.append(work)
                must_end_us = min(must_end_us, work.latest_start_us)
                continue
            # The last request in the queue delays no other, so it needs no margin.
            margin = backlog.measured.margin if backlog.total_us else 1.0
            if now_us + work.predicted_us * margin + answer_us > work.answer_by_us:
                self._requests.advance(work, NoTimeLeft())
                continue
            # Results are written one after the other.
            alone_us = work.predicted_us * margin + answer_us
            if plan is None:
                first_must_end_us = min(must_end_us, work.answer_by_us)
                plan = BatchPlan(now_us + alone_us, first_must_end_us, work.scored_tokens, settings.max_batch_rows)
            else:
                # Only here, because a request that is ranked alone needs no latency model of its length.
                latency = self._parts.corrector.model_at(work.ranked_prefix_tokens)
                must_pay = latency.shared_us is not None and backlog.measured.wait_limit >= 1.0
                further_us = latency.further_us(work.ranked_prefix_tokens, work.scored_tokens) * margin + answer_us
                plan.end_before(must_end_us)
                request = BatchRequest(alone_us, further_us, work.scored_tokens, work.answer_by_us)
                if not plan.take(request, len(queue), must_pay=must_pay):
                    passed_over.append(work)
                    break
            works.append(work)
        for other in passed_over:
            queue.push(other)
        waiting = queue.peek()
        if plan is not None:
            if waiting is not None:
                must_end_us = min(must_end_us, waiting.latest_start_us)
            plan.must_end_us = min(plan.must_end_us, must_end_us)
        return _Batch(works, plan)

    def _forward_mixed(
        self, batch: list[RankingWork], chunk: Chunk, started_us: int
    ) -> list[RankOutputs | Exception] | None:
        """Requests and chunk in one forward; None if it failed, and the chunk is not computed."""
        engine = self._context.engine
        calibrated = self._parts.corrector.calibrated
        rank_us, chunk_us = self._calibrated_us(batch), chunk.predicted_us(calibrated)
        self._parts.results.send()
        try:
            outputs = engine.forward([chunk.inputs], [work.inputs for work in batch if work.inputs is not None])
            # A prefix must be written before it is published.
            engine.device.current_stream().record().wait()
        except Exception as error:
            # Requests and chunk run alone next, which shows the cause.
            engine.device.settle()
            log.warning("a mixed batch failed", requests=len(batch), error=repr(error))
            return None
        ended_us = self._parts.clock.monotonic_us()
        duration_us = ended_us - started_us
        share = rank_us / (rank_us + chunk_us) if rank_us + chunk_us else 0.5
        self._parts.metrics.mixed_pass()
        self._context.charge(WorkClass.RANKING, round(duration_us * share), ended_us)
        self._prefixes.count(chunk, round(duration_us * (1 - share)), ended_us)
        return list(outputs)

    def _forward(self, batch: list[RankingWork]) -> list[RankOutputs | Exception]:
        """One forward. If it fails, each request is ranked alone, so that one request cannot fail the others."""
        if self._parts.results.unsent:
            self._parts.results.send()
        try:
            return list(self._context.engine.rank([work.inputs for work in batch if work.inputs is not None]))
        except Exception as error:
            log.warning("a ranking batch failed", requests=len(batch), error=repr(error))
            if len(batch) == 1:
                return [error]
        return [output for work in batch for output in self._forward([work])]

    def _calibrated_us(self, batch: list[RankingWork]) -> float:
        """The calibrated time of one forward of these requests."""
        sizes = [(work.ranked_prefix_tokens, work.scored_tokens) for work in batch]
        return self._parts.corrector.calibrated.batch_us(sizes)
