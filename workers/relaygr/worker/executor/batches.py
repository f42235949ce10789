"""The ranking pass: which ready requests go together, what else fits beside them, and what comes of it.

A batch is ready requests in laxity order, as long as none misses its deadline for company. Where the earliest of
its deadlines leaves time, the next piece of pre-infer work may run in the same forward (`worker.mix_chunks`): an
accelerator that a few candidates do not fill does both in the time of one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import structlog

from relaygr.admission.latency import Stage
from relaygr.worker.executor.context import Shared
from relaygr.worker.executor.order import WorkClass
from relaygr.worker.executor.pieces import Piece, PieceFlow
from relaygr.worker.executor.work import PrefixWork, RankingWork
from relaygr.worker.model.interface import RankOutputs

log = structlog.get_logger()


class Answering(Protocol):
    """What becomes of a request of a batch (`relaygr.worker.executor.requests`)."""

    def ranked(self, work: RankingWork, outputs: RankOutputs) -> None: ...
    def reject(self, work: RankingWork) -> None: ...
    def fail_on(self, work: RankingWork, error: Exception) -> None: ...


@dataclass(slots=True)
class _Batch:
    """Requests of one forward. Times predicted, in µs on the worker's monotonic clock."""

    works: list[RankingWork]
    ends_us: float
    must_end_us: float
    """When the first of them, or of those that are left in the queue, would be late."""


class BatchFlow:
    """Belongs to the device thread."""

    def __init__(self, shared: Shared, pieces: PieceFlow, requests: Answering) -> None:
        self._shared = shared
        self._pieces = pieces
        self._requests = requests
        self._mixes = shared.settings.mixes_chunks(shared.engine.device.is_cpu)

    def rank_batch(self, now_us: int, first: RankingWork | None = None) -> None:
        """Ranks `first`, if one is given, and what goes with it."""
        batch = self._take(now_us, first)
        self._rank(batch, batch.must_end_us - batch.ends_us)

    def rank_beside(self, now_us: int) -> bool:
        """It is pre-infer's turn: whether requests that are ready could go with its next piece, and did.

        They end no later than behind that piece, which they would else have waited for.
        """
        if not self._mixes or not isinstance(self._shared.scheduler.ranking.peek(), RankingWork):
            return False
        return self._rank(self._take(now_us, None), float("inf"))

    def _rank(self, batch: _Batch, slack_us: float) -> bool:
        if not batch.works:
            return False
        started_us = self._shared.now_us()
        for work in batch.works:
            work.started_us = work.started_us or started_us
        piece = self._pieces.within(slack_us, started_us) if self._mixes and slack_us > 0 else None
        outputs = self._forward_mixed(batch.works, piece, started_us) if piece is not None else None
        mixed = outputs is not None
        if outputs is None:
            outputs = self._forward(batch.works)
        ended_us = self._shared.now_us()
        if not mixed:
            self._shared.corrector.observe(Stage.HIT, self._predicted_us(batch.works), ended_us - started_us)
            self._shared.charge(WorkClass.RANKING, ended_us - started_us, ended_us)
        for work, output in zip(batch.works, outputs, strict=True):
            work.rank_us = ended_us - started_us
            if isinstance(output, RankOutputs):
                self._requests.ranked(work, output)
            else:
                self._requests.fail_on(work, output)
        if piece is not None and not mixed:
            self._pieces.run(piece.prefix, ended_us)
        return True

    def _take(self, now_us: int, first: RankingWork | None) -> _Batch:
        settings, queue = self._shared.settings, self._shared.scheduler.ranking
        batch = _Batch([], float(now_us), float("inf"))
        passed_over: list[PrefixWork | RankingWork] = []
        rows = 0
        while max(len(batch.works), len(passed_over)) < settings.max_batch_requests:
            work: PrefixWork | RankingWork | None = first if first is not None else queue.pop()
            if first is not None:
                queue.remove(first)
                first = None
            if work is None:
                break
            if isinstance(work, PrefixWork):
                # It goes on right after this batch, which may not grow until that is too late.
                passed_over.append(work)
                batch.must_end_us = min(batch.must_end_us, work.latest_start_us)
                continue
            if now_us + work.predicted_us > work.deadline_us:
                self._requests.reject(work)
                continue
            # The fixed part of a pass is paid once.
            shared_us = self._shared.latency.coefficients.c0 if batch.works else 0.0
            ends_us = batch.ends_us + work.predicted_us - shared_us
            must_end_us = min(batch.must_end_us, work.answer_by_us)
            rows += work.scored_tokens
            if batch.works and (ends_us > must_end_us or rows > settings.max_batch_rows):
                passed_over.append(work)
                break
            batch.works.append(work)
            batch.ends_us, batch.must_end_us = ends_us, must_end_us
        for other in passed_over:
            queue.push(other)
        waiting = queue.peek()
        if waiting is not None:
            batch.must_end_us = min(batch.must_end_us, waiting.latest_start_us)
        return batch

    def _forward_mixed(
        self, batch: list[RankingWork], piece: Piece, started_us: int
    ) -> list[RankOutputs | Exception] | None:
        """Requests and piece in one forward; None if it failed, and the piece is as before."""
        shared = self._shared
        calibrated = shared.corrector.calibrated
        rank_us, piece_us = self._predicted_us(batch), piece.predicted_us(calibrated)
        try:
            outputs = shared.engine.forward([piece.chunk], [work.inputs for work in batch if work.inputs is not None])
            # What is published must be written.
            shared.engine.device.current_stream().record().wait()
        except Exception as error:
            # Whose fault it was shows when each runs alone.
            shared.engine.device.settle()
            log.warning("a mixed batch failed", requests=len(batch), error=repr(error))
            return None
        ended_us = shared.now_us()
        duration_us = ended_us - started_us
        share = rank_us / (rank_us + piece_us) if rank_us + piece_us else 0.5
        shared.metrics.mixed_pass()
        shared.charge(WorkClass.RANKING, round(duration_us * share), ended_us)
        self._pieces.computed(piece, round(duration_us * (1 - share)), ended_us)
        return list(outputs)

    def _forward(self, batch: list[RankingWork]) -> list[RankOutputs | Exception]:
        """One forward; if it fails, each request alone, so that one cannot fail its neighbours."""
        try:
            return list(self._shared.engine.rank([work.inputs for work in batch if work.inputs is not None]))
        except Exception as error:
            log.warning("a ranking batch failed", requests=len(batch), error=repr(error))
            if len(batch) == 1:
                return [error]
        return [output for work in batch for output in self._forward([work])]

    def _predicted_us(self, batch: list[RankingWork]) -> float:
        """What the calibration says of one forward of these."""
        model = self._shared.corrector.calibrated
        each = [model.hit_us(work.ranked_prefix_tokens, work.scored_tokens) for work in batch]
        return sum(each) - model.coefficients.c0 * (len(batch) - 1)
