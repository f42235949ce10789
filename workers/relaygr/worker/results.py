"""Builds the one result of each ranking request, and produces it until it is delivered.

The offset of a ranking request is finished when the delivery report of its result is a success. After a failed report
the result is produced again, until `RESEND_LATE_US` after deadline + skew, or until Kafka refuses the result for a
reason that a resend cannot cure. Then the offset is finished too, and the result is counted as undelivered: the client
counts the request as lost.

The device thread calls `ranked`. The poll thread calls `tick`, inside which delivery reports arrive. Both, and the poll
thread of diverted requests, call `unranked`, and `job_done`. These calls write results. `send` produces them; each
thread calls it before it computes or waits.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final

from confluent_kafka import KafkaError, KafkaException, Producer

from relaygr.admission.latency import is_long_wait
from relaygr.consumer.interface import Received, Token
from relaygr.kafka.client_errors import LimitedLog, is_final, why_undelivered
from relaygr.runtime.clock import Clock
from relaygr.schemas.codec import EncodeError, Template, encode
from relaygr.schemas.ended import Ended, Reason
from relaygr.schemas.headers import RankingHeaders, ResultHeaders
from relaygr.schemas.messages import DEFAULT_SCENARIO, MAX_BUDGET_MS, Path, RankingResult, StageTimings, StaleCause
from relaygr.tracing.spans import MessagePlace
from relaygr.tracing.worker import RankingTrace, WorkerTraces
from relaygr.worker.executor.work import JobOutcome, JobWork, RankingWork, Unranked
from relaygr.worker.latest_answers import DeliveryTimes, FiniteScores, QueueWaits
from relaygr.worker.metrics import WorkerMetrics
from relaygr.worker.model.interface import RankOutputs
from relaygr.worker.request_traces import RequestTraces

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
    error: KafkaError | None = None
    """Why the last try failed; None if the queue was full."""
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
    ) -> None:
        """`finish` may be called from any thread. `traces`: None while tracing is off."""
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
        self._limited_log = LimitedLog(clock)
        self._traces = RequestTraces(traces, worker_id) if traces is not None else None
        self.unsent: deque[_Outgoing] = deque()
        """Results that were written and not sent. On the path of a hit, callers of `send` look here first."""
        self._failed: deque[_Outgoing] = deque()
        self._ticked_us = 0
        # Above capacity most results are one of these two, so they must take little time. Their timings are 0.
        frequent = (Unranked(Ended.EXPIRED), Unranked(Ended.FAILED, Reason.OVERLOADED, NO_TIME))
        self._templates = {
            (end.ended, end.reason, end.detail): Template(self._undecoded(end), _VARYING) for end in frequent
        }

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
            outcome=Ended.RANKED,
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
            history_stale_cause=prefix.stale_cause,
        )
        try:
            value = encode(result)
        except EncodeError as error:
            # The model, not the request, causes scores that are not finite.
            self.finite_scores.note(are_finite=False)
            end = Unranked(Ended.FAILED, Reason.DEVICE_ERROR, str(error)[:500])
            self.unranked(work.reply, work.received, end, work)
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
        queue_us = 0 if started_us is None else max(0, started_us - received_us - work.history_wait_us)
        metrics.queue_seconds.observe(queue_us / 1e6, work.exemplar)
        if is_long_wait(queue_us, work.deadline_us - received_us):
            metrics.long_waits.inc()
        if work.history_wait_us:
            metrics.history_wait_seconds.observe(work.history_wait_us / 1e6, work.exemplar)
        self._count_history(work)
        self.waits.observe(queue_us)

    def _count_history(self, work: RankingWork) -> None:
        metrics, prefix = self._metrics, work.prefix
        assert prefix is not None
        if work.unknown_actions:
            metrics.unknown_actions.inc(work.unknown_actions)
        if prefix.unknown_features:
            metrics.unknown_features.inc(prefix.unknown_features)
        if prefix.version is None:
            metrics.history_missing.inc()
        if isinstance(prefix.stale_cause, StaleCause):
            metrics.history_stale[prefix.stale_cause].inc()

    def job_done(self, received: Received, outcome: JobOutcome, work: JobWork | None = None) -> None:
        """Counts the outcome of a pre-infer job, and finishes its offset. `work`: None if the executor never got it."""
        self._metrics.jobs[outcome].inc()
        if self._traces is not None and work is not None:
            self._traces.job_ended(work, outcome, self._clock.monotonic_us(), self._clock.wall_us())
        self.finish(received.token)

    # -- any thread --------------------------------------------------------------------------------

    def unranked(
        self, reply: RankingHeaders, received: Received, end: Unranked, work: RankingWork | None = None
    ) -> None:
        """Writes and counts the result of such an end. `work`: None if the executor never got the request."""
        self._metrics.unranked[end.reason or end.ended].inc()
        now_us, now_wall_us = self._clock.monotonic_us(), self._clock.wall_us()
        if work is not None:
            self._metrics.scenario_unranked[work.request.scenario or DEFAULT_SCENARIO].inc()
            result, deadline_us = self._of_work(work, end, now_us, now_wall_us), work.deadline_us
            value = encode(result)
        else:
            deadline_us = now_us + max(0, reply.deadline_us - now_wall_us)
            waited_us = max(0, now_us - received.received_us)
            varying: dict[str, Any] = {
                "request_id": reply.request_id,
                "received_at_us": max(0, now_wall_us - waited_us),
                "sent_at_us": now_wall_us,
                "backlog_us": end.backlog_us,
                "diverted_by": reply.diverted_by,
            }
            template = self._templates.get((end.ended, end.reason, end.detail))
            if template is not None:
                result, value = template.message, template.encode(**varying)
            else:
                result = replace(self._undecoded(end), timings=StageTimings(total_us=waited_us), **varying)
                value = encode(result)
        trace = None
        if self._traces is not None:
            trace = self._traces.ranking(reply, received, result, now_us, now_wall_us, work)
        self._send(reply, value, received.token, deadline_us, now_us, trace)

    def _undecoded(self, end: Unranked) -> RankingResult:
        """The result of a request that is not decoded, without the fields that are different for each request."""
        return RankingResult(
            "-", self._worker_id, end.ended, 0, 0, 0, StageTimings(), reason=end.reason, detail=_printable(end.detail)
        )

    def _of_work(self, work: RankingWork, end: Unranked, now_us: int, now_wall_us: int) -> RankingResult:
        request = work.request
        return RankingResult(
            request_id=request.request_id,
            worker_id=self._worker_id,
            outcome=end.ended,
            request_sent_at_us=request.sent_at_us,
            received_at_us=work.received_wall_us,
            sent_at_us=now_wall_us,
            timings=timings_of(work, now_us),
            reason=end.reason,
            detail=_printable(end.detail),
            backlog_us=work.backlog_us,
            diverted_by=request.diverted.worker_id if request.diverted is not None else None,
        )

    # -- the poll thread ---------------------------------------------------------------------------

    def undecodable_job(self) -> None:
        """Counts a pre-infer job that could not be decoded. Its dead letter finishes the offset."""
        self._metrics.jobs[JobOutcome.UNDECODABLE].inc()

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
                self._metrics.resent.inc()
                self._produce(outgoing)

    def close(self, timeout_s: float) -> None:
        """Sends what is left, and waits for delivery reports, for at most `timeout_s`."""
        self.send()
        self._producer.flush(timeout_s)
        self.tick(self._clock.monotonic_us())

    # -- sending -----------------------------------------------------------------------------------

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
        outgoing.error = error
        if error is not None and error.code() in _NOWHERE:
            outgoing.give_up_us = min(outgoing.due_us, outgoing.first_try_us + RESEND_NOWHERE_US)
        elif error is not None and is_final(error):
            return self._give_up(outgoing)
        outgoing.next_try_us = self._clock.monotonic_us() + RESEND_INTERVAL_US
        self._failed.append(outgoing)

    def _give_up(self, outgoing: _Outgoing) -> None:
        reply, error = outgoing.reply, outgoing.error
        self._limited_log.warning(
            "a result was not delivered",
            error.code() if error is not None else None,
            gateway_id=reply.gateway_id,
            reply_topic=reply.reply_topic,
            reply_partition=reply.reply_partition,
            cause=why_undelivered(error) if error is not None else "the queue of results was full",
        )
        self._metrics.undelivered.inc()
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
        queue_us=max(0, started_us - work.received.received_us - work.history_wait_us),
        wait_us=max(0, ready_us - looked_up_us - work.pre_infer_us),
        pre_infer_us=work.pre_infer_us,
        reload_us=work.reload_us,
        rank_us=work.rank_us,
        total_us=max(0, now_us - work.received.received_us),
        history_wait_us=work.history_wait_us or None,
    )


def _printable(detail: str | None) -> str | None:
    """A sentence that the result's `detail` field accepts."""
    if not detail:
        return None
    text = "".join(character if character.isprintable() else " " for character in detail)
    return text.encode()[:500].decode(errors="ignore") or None
