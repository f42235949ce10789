"""The poll thread's side of a worker: decodes, checks, answers what needs no work, and hands the rest over.

It never computes and never blocks. A ranking message is looked at in this order: its headers (without a
reply address there is nobody to answer: dead letter), its deadline (after an outage most of a backlog
has expired, and is answered undecoded), its body, its partition. Work goes to the device thread.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Protocol

from relaygr.consumer import Received
from relaygr.kafka.dead_letters import DeadLetterWriter
from relaygr.runtime.clock import Clock
from relaygr.schemas.codec import DecodeError, DecodeReason, decode
from relaygr.schemas.headers import RankingHeaders
from relaygr.schemas.messages import MAX_BUDGET_MS, FailureReason, Outcome, PreInferJob, RankingRequest
from relaygr.schemas.partitioner import partition_for
from relaygr.worker.executor.work import JobOutcome, JobWork, RankingWork
from relaygr.worker.metrics import WorkerMetrics
from relaygr.worker.results import ResultWriter

REWRITE_INTERVAL_US = 1_000_000
FURTHEST_US = MAX_BUDGET_MS * 1000
"""No time of a message is taken to lie further ahead: what waits for it, and its offset, may not wait for years."""


class WorkSink(Protocol):
    """The device thread, as the poll thread sees it. Both calls return at once."""

    def take_ranking(self, work: RankingWork) -> None: ...
    def take_job(self, work: JobWork) -> None: ...


class WorkerHandler:
    """A `relaygr.consumer.loop.Handler` for the pre-infer and ranking topics."""

    def __init__(
        self,
        preinfer_topic: str,
        ranking_topic: str,
        partition_count: int,
        results_topic: str,
        sink: WorkSink,
        answers: ResultWriter,
        dead_letters: DeadLetterWriter,
        metrics: WorkerMetrics,
        clock: Clock,
        max_clock_skew_ms: int,
        reply_margin_ms: float,
        on_ownership: Callable[[frozenset[int]], None],
        on_tick: Callable[[int], None],
    ) -> None:
        self._preinfer_topic = preinfer_topic
        self._ranking_topic = ranking_topic
        self._partition_count = partition_count
        self._results_topic = results_topic
        self._sink = sink
        self._answers = answers
        self._dead_letters = dead_letters
        self._metrics = metrics
        self._clock = clock
        self._skew_us = max_clock_skew_ms * 1000
        self._reply_margin_us = int(reply_margin_ms * 1000)
        self._on_ownership = on_ownership
        self._on_tick = on_tick
        self._unwritten: deque[Callable[[], None]] = deque()
        self._rewrite_at_us = 0

    def on_message(self, message: Received) -> None:
        if message.topic == self._ranking_topic:
            self._ranking(message)
        else:
            self._preinfer(message)

    def on_assigned(self, partitions: frozenset[int], assignment_epoch: int) -> None:  # noqa: ARG002
        self._on_ownership(partitions)

    def on_revoked(self, partitions: frozenset[int]) -> None:
        """Nothing yet: classic range revokes all and gives most back; `on_assigned` tells what stays."""

    def on_lost(self, partitions: frozenset[int]) -> None:
        """As `on_revoked`: what is in flight ends, and touches no offset."""

    def on_tick(self, now_us: int) -> None:
        self._answers.tick(now_us)
        self._dead_letters.poll()
        if self._unwritten and now_us >= self._rewrite_at_us:
            self._rewrite_at_us = now_us + REWRITE_INTERVAL_US
            for _ in range(len(self._unwritten)):
                self._unwritten.popleft()()
        self._on_tick(now_us)

    # -- ranking -----------------------------------------------------------------------------------

    def _ranking(self, received: Received) -> None:
        try:
            reply = RankingHeaders.decode(received.headers)
            if reply.reply_topic != self._results_topic:
                raise DecodeError(DecodeReason.INVALID_FIELD, f"header reply_topic is not {self._results_topic}")
        except DecodeError as error:
            return self._dead_letter(received, error.reason.value, f"nobody to answer: {error}")
        now_wall_us = self._clock.wall_us()
        if now_wall_us > reply.deadline_us + self._skew_us:
            return self._answers.without_work(reply, received, Outcome.EXPIRED)
        try:
            request = decode(RankingRequest, received.value)
            _agree(reply, request)
        except DecodeError as error:
            detail = f"{error.reason}: {error}"
            answer = partial(
                self._answers.without_work, reply, received, Outcome.FAILED, FailureReason.UNDECODABLE, detail
            )
            return self._dead_letter(received, error.reason.value, str(error), answer)
        if not self._routed_right(received, request.user_id):
            return self._answers.without_work(
                reply,
                received,
                Outcome.FAILED,
                FailureReason.WRONG_PARTITIONER,
                f"user {request.user_id!r} belongs to partition {self._partition_of(request.user_id)}, the message "
                f"came on {received.partition}: use murmur2 on the UTF-8 bytes of the user id as the key",
            )
        self._sink.take_ranking(
            RankingWork(
                request=request,
                reply=reply,
                received=received,
                received_wall_us=now_wall_us,
                deadline_us=self._monotonic(request.deadline_us, now_wall_us),
                reply_margin_us=self._reply_margin_us,
            )
        )
        return None

    # -- pre-infer ---------------------------------------------------------------------------------

    def _preinfer(self, received: Received) -> None:
        try:
            job = decode(PreInferJob, received.value)
        except DecodeError as error:
            self._metrics.job_done(JobOutcome.UNDECODABLE)
            return self._dead_letter(received, error.reason.value, str(error))
        now_wall_us = self._clock.wall_us()
        if not self._routed_right(received, job.user_id):
            return self._answers.job_done(received, JobOutcome.MISROUTED)
        if now_wall_us > job.expires_at_us + self._skew_us:
            return self._answers.job_done(received, JobOutcome.EXPIRED)
        self._sink.take_job(
            JobWork(
                job=job,
                received=received,
                expected_ranking_us=self._monotonic(job.expected_ranking_at_us, now_wall_us),
                expires_us=self._monotonic(job.expires_at_us, now_wall_us),
            )
        )
        return None

    # -- both --------------------------------------------------------------------------------------

    def _dead_letter(
        self, received: Received, reason: str, detail: str, then: Callable[[], None] | None = None
    ) -> None:
        """Writes a dead letter, again until it is delivered; only then the offset is finished, or answered.

        How many can wait is bounded by the loop's `max_span` of unfinished messages a partition.
        """

        def written(delivered: bool) -> None:
            if not delivered:
                self._unwritten.append(write)
            elif then is not None:
                then()
            else:
                self._answers.finish(received.token)

        def write() -> None:
            self._dead_letters.write(received.message, reason, detail, on_done=written)

        write()

    def _routed_right(self, received: Received, user_id: str) -> bool:
        return received.key == user_id.encode() and received.partition == self._partition_of(user_id)

    def _partition_of(self, user_id: str) -> int:
        return partition_for(user_id.encode(), self._partition_count)

    def _monotonic(self, wall_us: int, now_wall_us: int) -> int:
        """A wall-clock time of a message on this process's monotonic clock: converted once, then kept to."""
        return self._clock.monotonic_us() + min(wall_us - now_wall_us, FURTHEST_US)


def _agree(reply: RankingHeaders, request: RankingRequest) -> None:
    if (reply.request_id, reply.deadline_us) != (request.request_id, request.deadline_us):
        raise DecodeError(
            DecodeReason.INVALID_FIELD, "RankingRequest: request_id or deadline_us is not what the headers say"
        )
