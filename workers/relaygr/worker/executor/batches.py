"""Ranking passes: which ready requests are ranked together, and which chunk of pre-infer runs in the same forward.

A batch takes ready requests in the order of their deadlines, as long as none of them misses its deadline because of
the others, and the batch pays (`BatchPlan`). If the earliest of its deadlines leaves time, the next chunk of
pre-infer runs in the same forward (`worker.mix_chunks`). A few candidates do not fill an accelerator, so both together
take little longer than one.
"""

from __future__ import annotations

from dataclasses import dataclass

import structlog

from relaygr.schemas.record import record
from relaygr.worker.executor.capacity import Capacity
from relaygr.worker.executor.events import SENT, DeviceFailed, NoTimeLeft, Ranked
from relaygr.worker.executor.order import Scheduler
from relaygr.worker.executor.parts import ExecutorParts
from relaygr.worker.executor.prefixes import Chunk, Prefixes
from relaygr.worker.executor.requests import Requests
from relaygr.worker.executor.resolver import PrefixResolver
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

    def __init__(
        self,
        parts: ExecutorParts,
        resolver: PrefixResolver,
        capacity: Capacity,
        scheduler: Scheduler[PrefixWork | RankingWork],
        prefixes: Prefixes,
        requests: Requests,
    ) -> None:
        """`resolver` names the engine."""
        self._results, self._clock, self._settings = parts.results, parts.clock, parts.settings
        self._device_record = parts.device_record
        self._resolver = resolver
        self._capacity = capacity
        self._queue = scheduler.ranking
        self._prefixes = prefixes
        self._requests = requests
        self._mixes = parts.settings.mixes_chunks(resolver.engine.device.is_cpu)

    def rank(self, now_us: int, first: RankingWork | None = None) -> PrefixWork | None:
        """Ranks `first`, if given, and the ready requests that fit beside it. Returns a prefix whose chunk has to run
        by itself now, because the forward with both failed.
        """
        batch = self._take(now_us, first)
        return self._rank(batch, batch.plan.must_end_us - batch.plan.ends_us) if batch.plan is not None else None

    def can_rank_beside_chunk(self) -> bool:
        """Whether a ready request could be ranked in the forward of the next pre-infer chunk."""
        return self._mixes and isinstance(self._queue.peek(), RankingWork) and not self._prefixes.next_runs_alone

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
        now_us = self._clock.monotonic_us()
        for work in works:
            work.started_us = work.started_us or now_us
        chunk = self._chunk_beside(works, slack_us, now_us)
        outputs = self._forward_mixed(works, chunk, now_us) if chunk is not None else None
        is_mixed = outputs is not None
        if outputs is None:
            outputs = self._forward(works)
        ended_us = self._clock.monotonic_us()
        ranked: list[RankingWork] = []
        for work, output in zip(works, outputs, strict=True):
            work.rank_us, work.ranked_us = ended_us - now_us, ended_us
            if isinstance(output, RankOutputs):
                self._requests.advance(work, Ranked(output))
                if work.state is RequestState.ANSWERED:
                    ranked.append(work)
        # Results leave before the rest of the work for their requests, which would delay them.
        self._results.send()
        answered_us = self._clock.monotonic_us()
        if not is_mixed:
            self._capacity.pass_took(works, ended_us - now_us, ended_us)
        for work in ranked:
            work.answered_us = answered_us
            self._requests.advance(work, SENT)
        if ranked:
            self._capacity.answered(ranked, works[0], ended_us, self._clock.monotonic_us())
        for work, output in zip(works, outputs, strict=True):
            if not isinstance(output, RankOutputs):
                self._requests.advance(work, DeviceFailed(output))
        return chunk.work if chunk is not None and not is_mixed else None

    def _chunk_beside(self, works: list[RankingWork], slack_us: float, now_us: int) -> Chunk | None:
        """The chunk that runs in the forward of these requests."""
        if not self._mixes or slack_us <= 0 or self._runs_alone(works[0]) or self._prefixes.next_runs_alone:
            return None
        return self._prefixes.chunk_within(slack_us, now_us)

    def _runs_alone(self, work: RankingWork) -> bool:
        return self._device_record.ends(work.request.user_id, work.request.request_id) > 0

    def _take(self, now_us: int, first: RankingWork | None) -> _Batch:
        """Takes the requests of the next forward out of the queue."""
        settings, queue, capacity = self._settings, self._queue, self._capacity
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
            if works and (self._runs_alone(work) or self._runs_alone(works[0])):
                passed_over.append(work)
                break
            alone_us = capacity.pass_us(work)
            if now_us + alone_us > work.answer_by_us:
                self._requests.advance(work, NoTimeLeft())
                continue
            if plan is None:
                first_must_end_us = min(must_end_us, work.answer_by_us)
                plan = BatchPlan(now_us + alone_us, first_must_end_us, work.scored_tokens, settings.max_batch_rows)
            else:
                # Only here, because a request that is ranked alone needs no latency model of its length.
                further_us, must_pay = capacity.further_us(work)
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
        engine = self._resolver.engine
        self._results.send()
        self._device_record.note(chunk.work.record_ids + [work.impression.record_id for work in batch])
        try:
            outputs = engine.forward([chunk.inputs], [work.inputs for work in batch if work.inputs is not None])
            # A prefix must be written before it is published.
            engine.device.current_stream().record().wait()
        except Exception as error:
            # Requests and chunk run alone next, which shows the cause.
            engine.device.settle()
            log.warning("a mixed batch failed", requests=len(batch), error=repr(error))
            return None
        finally:
            self._device_record.clear()
        ended_us = self._clock.monotonic_us()
        duration_us = ended_us - started_us
        chunk_us = self._capacity.mixed_pass_took(
            batch, chunk.work.done_tokens, chunk.end_tokens, duration_us, ended_us
        )
        self._prefixes.count(chunk, chunk_us, ended_us)
        return list(outputs)

    def _forward(self, batch: list[RankingWork]) -> list[RankOutputs | Exception]:
        """One forward. If it fails, each request is ranked alone, so that one request cannot fail the others."""
        if self._results.unsent:
            self._results.send()
        self._device_record.note([work.impression.record_id for work in batch])
        try:
            return list(self._resolver.engine.rank([work.inputs for work in batch if work.inputs is not None]))
        except Exception as error:
            log.warning("a ranking batch failed", requests=len(batch), error=repr(error))
            if len(batch) == 1:
                return [error]
        finally:
            self._device_record.clear()
        return [output for work in batch for output in self._forward([work])]
