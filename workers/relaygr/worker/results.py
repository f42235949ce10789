"""Builds the one result of each ranking request, and produces it until it is delivered.

The offset of a ranking request is finished when the delivery report of its result is a success. After a failed report
the result is produced again, until `RESEND_LATE_US` after deadline + skew, or until Kafka refuses the result for a
reason that a resend cannot cure. Then the offset is finished too, and the result is counted as undelivered: the client
counts the request as lost.

The device thread calls `ranked`, `expired`, `failed` and `job_done`. The poll thread calls `refused`, `without_work`
and `tick`; delivery reports arrive inside `tick`. The poll thread of diverted requests calls the first two as well.
These calls write results. `send` produces them; each thread calls it before it computes or waits.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final

import structlog
from confluent_kafka import KafkaError, KafkaException, Producer

from relaygr.consumer.interface import Received, Token
from relaygr.kafka.client_errors import NoteError, is_final, no_note
from relaygr.runtime.clock import Clock
from relaygr.schemas.codec import EncodeError, Template, encode
from relaygr.schemas.headers import RankingHeaders, ResultHeaders
from relaygr.schemas.messages import (
    DEFAULT_SCENARIO,
    MAX_BUDGET_MS,
    FailureReason,
    Outcome,
    Path,
    RankingResult,
    StageTimings,
)
from relaygr.tracing.spans import MessagePlace
from relaygr.tracing.worker import RankingTrace, WorkerTraces
from relaygr.worker.executor.work import JobOutcome, JobWork, RankingWork
from relaygr.worker.latest_answers import DeliveryTimes, FiniteScores, QueueWaits
from relaygr.worker.metrics import WorkerMetrics
from relaygr.worker.model.interface import RankOutputs
from relaygr.worker.request_traces import RequestTraces

log = structlog.get_logger()

RESEND_INTERVAL_US = 20_000
LONGEST_RESENDING_US = MAX_BUDGET_MS * 1000
"""An offset waits for its result as if the deadline were at most this far ahead."""
RESEND_LATE_US = 12_000_000
"""How long past its deadline a result is produced again, so that no client counts its request as lost. A partition
whose leader died has a new one after broker.session.timeout.ms, by default 9 s. A client waits `client.lost_after_ms`.
"""
RESEND_NOWHERE_US = 5_000_000
"""How long a reply topic or partition may be unknown. A broker that has just started does not know its topics yet, nor
the rights on them.
"""
NO_TIME: Final = "the work that was admitted before leaves no time for this request"
_VARYING: Final = ("request_id", "received_at_us", "sent_at_us", "backlog_us", "diverted_by")
_NOWHERE: Final = frozenset(
    (
        KafkaError._UNKNOWN_TOPIC,
        KafkaError._UNKNOWN_PARTITION,
        KafkaError.UNKNOWN_TOPIC_OR_PART,
        KafkaError.TOPIC_EXCEPTION,
        KafkaError.TOPIC_AUTHORIZATION_FAILED,
    )
)


@dataclass(slots=True, eq=False)
class _Outgoing:
    """A result that is not delivered yet. Times are monotonic."""

    reply: RankingHeaders
    value: bytes
    token: Token
    due_us: int
    """Deadline + skew."""
    give_up_us: int
    first_try_us: int
    next_try_us: int = 0
    trace: RankingTrace | None = None


class ResultWriter:
    """Builds results, produces them, and finishes offsets."""

    def __init__(
        self,
        producer: Producer,
        worker_id: str,
        max_clock_skew_ms: int,
        finish: Callable[[Token], None],
        metrics: WorkerMetrics,
        clock: Clock,
        traces: WorkerTraces | None = None,
        note_error: NoteError = no_note,
    ) -> None:
        """`finish` may be called from any thread. `traces`: None while tracing is off. `note_error` gets the error of
        each result that was not delivered.
        """
        self._note_error = note_error
        self.finish = finish
        """Finishes an offset that needs no result."""
        self.waits = QueueWaits()
        self.finite_scores = FiniteScores()
        self.deliveries = DeliveryTimes()
        self._producer = producer
        self._worker_id = worker_id
        self._skew_us = max_clock_skew_ms * 1000
        self._metrics = metrics
        self._clock = clock
        self._traces = RequestTraces(traces, worker_id) if traces is not None else None
        self.unsent: deque[_Outgoing] = deque()
        """Results that were written and not sent. On the path of a hit, callers of `send` look here first."""
        self._failed: deque[_Outgoing] = deque()
        self._ticked_us = 0
        # Above capacity most results are one of these two, so they must take little time.
        self._expired = Template(self._undecoded(Outcome.EXPIRED, None, None), _VARYING)
        self._refused = Template(self._undecoded(Outcome.FAILED, FailureReason.OVERLOADED, NO_TIME), _VARYING)

    # -- the device thread -------------------------------------------------------------------------

    def ranked(self, work: RankingWork, outputs: RankOutputs) -> bool:
        """Writes a result with scores, path and timings; or one of a failure, and returns False, if the scores are not
        finite numbers. The caller sends the result, and counts a ranked one with `count_ranked`.
        """
        prefix, scores = work.prefix, outputs.scores
        assert prefix is not None
        now_us, now_wall_us = self._clock.monotonic_us(), self._clock.wall_us()
        diverted = work.request.diverted
        result = RankingResult(
            request_id=work.request.request_id,
            worker_id=self._worker_id,
            outcome=Outcome.RANKED,
            request_sent_at_us=work.request.sent_at_us,
            received_at_us=work.received_wall_us,
            sent_at_us=now_wall_us,
            timings=timings_of(work, now_us),
            path=_path_of(work),
            prefix_source=work.prefix_source if prefix.tokens > 0 else None,
            num_tasks=int(scores.shape[1]),
            scores=scores.reshape(-1),
            prefix_tokens=prefix.tokens,
            tokens_cached=work.tokens_cached,
            history_version=prefix.version,
            history_stale=prefix.stale,
            history_loading=prefix.loading,
            unknown_items=work.unknown_items,
            model_revision=prefix.revision,
            backlog_us=work.backlog_us,
            diverted_by=diverted.worker_id if diverted is not None else None,
            unknown_actions=work.unknown_actions or None,
            unknown_features=prefix.unknown_features or None,
            history_missing=prefix.version is None or None,
        )
        try:
            value = encode(result)
        except EncodeError as error:
            # The model, not the request, causes scores that are not finite.
            self.finite_scores.note(are_finite=False)
            self.failed(work, FailureReason.DEVICE_ERROR, str(error)[:500])
            return False
        self.finite_scores.note(are_finite=True)
        trace = None
        if self._traces is not None:
            trace = self._traces.ranking(work.reply, work.received, result, now_us, now_wall_us, work)
            work.exemplar = trace.exemplar if trace is not None else None
        self._send(work.reply, value, work.received.token, work.deadline_us, now_us, trace)
        return True

    def count_ranked(self, work: RankingWork) -> None:
        """Counts a ranked request, whose result was sent at `answered_us`."""
        metrics, received_us, started_us = self._metrics, work.received.received_us, work.started_us
        path, total_s = _path_of(work), (work.answered_us - received_us) / 1e6
        metrics.ranked[path].inc()
        metrics.ranking_seconds[path].observe(total_s, work.exemplar)
        metrics.scenario_seconds[work.request.scenario or DEFAULT_SCENARIO].observe(total_s, work.exemplar)
        queue_us = 0 if started_us is None else max(0, started_us - received_us)
        metrics.queue_seconds.observe(queue_us / 1e6, work.exemplar)
        self._count_unknown(work)
        self.waits.observe(queue_us)

    def _count_unknown(self, work: RankingWork) -> None:
        metrics, prefix = self._metrics, work.prefix
        assert prefix is not None
        if work.unknown_actions:
            metrics.unknown_actions.inc(work.unknown_actions)
        if prefix.unknown_features:
            metrics.unknown_features.inc(prefix.unknown_features)
        if prefix.version is None:
            metrics.history_missing.inc()

    def expired(self, work: RankingWork) -> None:
        """Writes the result of a request whose deadline passed before it was ranked."""
        self._metrics.expired()
        self._unranked(work, Outcome.EXPIRED, None, None)

    def failed(self, work: RankingWork, reason: FailureReason, detail: str) -> None:
        """Writes the result of a request that failed."""
        self._metrics.failed(reason)
        self._unranked(work, Outcome.FAILED, reason, detail)

    def job_done(self, received: Received, outcome: JobOutcome, work: JobWork | None = None) -> None:
        """Counts the outcome of a pre-infer job, and finishes its offset. `work`: None if the executor never got it."""
        self._metrics.job_done(outcome)
        if self._traces is not None and work is not None:
            self._traces.job_ended(work, outcome, self._clock.monotonic_us(), self._clock.wall_us())
        self.finish(received.token)

    # -- the poll thread ---------------------------------------------------------------------------

    def refused(
        self, reply: RankingHeaders, received: Received, backlog_us: int | None, is_expired: bool = False
    ) -> None:
        """Writes the result of a request for which there is no time, or whose deadline has passed. It had no stages, so
        its timings are 0.
        """
        if is_expired:
            self._metrics.expired()
        else:
            self._metrics.failed(FailureReason.OVERLOADED)
        now_us, now_wall_us = self._clock.monotonic_us(), self._clock.wall_us()
        waited_us = max(0, now_us - received.received_us)
        value = (self._expired if is_expired else self._refused).encode(
            request_id=reply.request_id,
            received_at_us=max(0, now_wall_us - waited_us),
            sent_at_us=now_wall_us,
            backlog_us=backlog_us,
            diverted_by=reply.diverted_by,
        )
        trace = None
        if self._traces is not None:
            outcome, reason = (Outcome.EXPIRED, None) if is_expired else (Outcome.FAILED, FailureReason.OVERLOADED)
            trace = self._traces.ranking(reply, received, self._undecoded(outcome, reason, None), now_us, now_wall_us)
        deadline_us = now_us + max(0, reply.deadline_us - now_wall_us)
        self._send(reply, value, received.token, deadline_us, now_us, trace)

    def without_work(self, reply: RankingHeaders, received: Received, reason: FailureReason, detail: str) -> None:
        """Writes the result of a request that never reached the executor: no memory, undecodable, misrouted, or with
        an invalid deadline.
        """
        self._metrics.failed(reason)
        now_us, now_wall_us = self._clock.monotonic_us(), self._clock.wall_us()
        waited_us = max(0, now_us - received.received_us)
        result = replace(
            self._undecoded(Outcome.FAILED, reason, detail),
            request_id=reply.request_id,
            received_at_us=max(0, now_wall_us - waited_us),
            sent_at_us=now_wall_us,
            timings=StageTimings(total_us=waited_us),
            diverted_by=reply.diverted_by,
        )
        trace = None
        if self._traces is not None:
            trace = self._traces.ranking(reply, received, result, now_us, now_wall_us)
        deadline_us = now_us + max(0, reply.deadline_us - now_wall_us)
        self._send(reply, encode(result), received.token, deadline_us, now_us, trace)

    def _undecoded(self, outcome: Outcome, reason: FailureReason | None, detail: str | None) -> RankingResult:
        """A result without the fields that are different for each request."""
        return RankingResult(
            request_id="-",
            worker_id=self._worker_id,
            outcome=outcome,
            request_sent_at_us=0,
            received_at_us=0,
            sent_at_us=0,
            timings=StageTimings(),
            reason=reason,
            detail=_printable(detail),
        )

    def undecodable_job(self) -> None:
        """Counts a pre-infer job that could not be decoded. Its dead letter finishes the offset."""
        self._metrics.job_done(JobOutcome.UNDECODABLE)

    def tick(self, now_us: int) -> None:
        """Takes delivery reports, and produces new results, and failed ones again that still have time."""
        self._ticked_us = now_us
        self._producer.poll(0)
        self.send()
        self.deliveries.update(now_us)
        for _ in range(len(self._failed)):
            outgoing = self._failed.popleft()
            if now_us > outgoing.give_up_us:
                self._give_up(outgoing)
            elif now_us < outgoing.next_try_us:
                self._failed.append(outgoing)
            else:
                self._metrics.result_resent()
                self._produce(outgoing)

    def close(self, timeout_s: float) -> None:
        """Sends what is left, and waits for delivery reports, for at most `timeout_s`."""
        self.send()
        self._producer.flush(timeout_s)
        self.tick(self._clock.monotonic_us())

    # -- sending -----------------------------------------------------------------------------------

    def _unranked(self, work: RankingWork, outcome: Outcome, reason: FailureReason | None, detail: str | None) -> None:
        self._metrics.scenario_unranked[work.request.scenario or DEFAULT_SCENARIO].inc()
        now_us, now_wall_us = self._clock.monotonic_us(), self._clock.wall_us()
        result = RankingResult(
            request_id=work.request.request_id,
            worker_id=self._worker_id,
            outcome=outcome,
            request_sent_at_us=work.request.sent_at_us,
            received_at_us=work.received_wall_us,
            sent_at_us=now_wall_us,
            timings=timings_of(work, now_us),
            reason=reason,
            detail=_printable(detail),
            backlog_us=work.backlog_us,
            diverted_by=work.request.diverted.worker_id if work.request.diverted is not None else None,
        )
        trace = None
        if self._traces is not None:
            trace = self._traces.ranking(work.reply, work.received, result, now_us, now_wall_us, work)
        self._send(work.reply, encode(result), work.received.token, work.deadline_us, now_us, trace)

    def _send(
        self,
        reply: RankingHeaders,
        value: bytes,
        token: Token,
        deadline_us: int,
        now_us: int,
        trace: RankingTrace | None,
    ) -> None:
        due_us = min(deadline_us, now_us + LONGEST_RESENDING_US) + self._skew_us
        self.unsent.append(_Outgoing(reply, value, token, due_us, due_us + RESEND_LATE_US, now_us, trace=trace))

    def send(self) -> None:
        """Produces the results that were written since the last call. Any thread may call it.

        The first message wakes the producer's thread, which takes ten times as long as the message; the others go with
        it. So results that are written one after the other are sent together.
        """
        unsent = self.unsent
        while unsent:
            try:
                outgoing = unsent.popleft()
            except IndexError:  # Another thread took the last one.
                return
            self._produce(outgoing)

    def _produce(self, outgoing: _Outgoing) -> None:
        reply, trace = outgoing.reply, outgoing.trace
        traceparent = trace.header if trace is not None else reply.traceparent
        try:
            self._producer.produce(
                reply.reply_topic,
                outgoing.value,
                reply.request_id.encode(),
                partition=reply.reply_partition,
                headers=ResultHeaders(reply.request_id, reply.gateway_id, traceparent).encode(),
                on_delivery=partial(self._reported, outgoing),
            )
        except BufferError:
            self._retry_later(outgoing)
        except KafkaException as exception:
            self._retry_later(outgoing, exception.args[0])

    def _reported(self, outgoing: _Outgoing, error: Any, _: Any) -> None:
        """The delivery report of one result."""
        if error is None:
            self.deliveries.delivered(outgoing.first_try_us, self._ticked_us)
            if outgoing.trace is not None:
                outgoing.trace.delivered(_reply_place(outgoing.reply), None)
            self.finish(outgoing.token)
        else:
            self._retry_later(outgoing, error)

    def _retry_later(self, outgoing: _Outgoing, error: KafkaError | None = None) -> None:
        if error is not None:
            self._note_error(outgoing.reply.reply_topic, error)
        if error is not None and error.code() in _NOWHERE:
            outgoing.give_up_us = min(outgoing.due_us, outgoing.first_try_us + RESEND_NOWHERE_US)
        elif error is not None and is_final(error):
            return self._give_up(outgoing)
        outgoing.next_try_us = self._clock.monotonic_us() + RESEND_INTERVAL_US
        self._failed.append(outgoing)

    def _give_up(self, outgoing: _Outgoing) -> None:
        log.debug("a result was not delivered", reply_topic=outgoing.reply.reply_topic)
        self._metrics.result_undelivered()
        if outgoing.trace is not None:
            outgoing.trace.delivered(_reply_place(outgoing.reply), "not_delivered")
        self.finish(outgoing.token)


def _reply_place(reply: RankingHeaders) -> MessagePlace:
    return MessagePlace(reply.reply_topic, reply.reply_partition)


def _path_of(work: RankingWork) -> Path:
    """The path that the result names."""
    diverted = work.request.diverted
    return Path.TRUNCATED if diverted is not None and diverted.left_out else work.path


def timings_of(work: RankingWork, now_us: int) -> StageTimings:
    """The stages of a request that is answered now."""
    started_us = work.started_us if work.started_us is not None else now_us
    ready_us = work.ready_us if work.ready_us is not None else now_us
    looked_up_us = work.looked_up_us if work.looked_up_us is not None else now_us
    return StageTimings(
        queue_us=max(0, started_us - work.received.received_us),
        wait_us=max(0, ready_us - looked_up_us - work.pre_infer_us),
        pre_infer_us=work.pre_infer_us,
        reload_us=work.reload_us,
        rank_us=work.rank_us,
        total_us=max(0, now_us - work.received.received_us),
    )


def _printable(detail: str | None) -> str | None:
    """A sentence that the result's `detail` field accepts."""
    if not detail:
        return None
    text = "".join(character if character.isprintable() else " " for character in detail)
    return text.encode()[:500].decode(errors="ignore") or None
