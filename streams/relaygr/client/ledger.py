"""The ledger of a gateway's requests: it matches results, fires timers, and counts. It does not use Kafka.

Every request that is opened here ends once for its caller: its future gets a result, or `timed_out` at the
deadline. It also ends once for the gateway: answered, answered late, or lost. Any thread may call any method.
Futures and callbacks run outside the lock, in the calling thread; an exception of a callback is logged.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Final

from relaygr.client.clock_offset import ClockOffset, ClockOffsets, measure
from relaygr.client.metrics import ClientCounts, ClientStatistics, GatewayMetrics
from relaygr.client.outcome import LostRequest, RankOutcome
from relaygr.client.pending import Answer, AnswerMatch, PendingRequest, PendingTable, Timer
from relaygr.client.publisher import notify
from relaygr.client.settings import ClientSettings
from relaygr.kafka.client_errors import LimitedLog
from relaygr.runtime.clock import Clock
from relaygr.schemas.ended import Ended, Reason
from relaygr.schemas.fields import Other
from relaygr.schemas.messages import RankingRequest, RankingResult

OnLate = Callable[[RankOutcome], None]
OnLost = Callable[[LostRequest], None]

MOST_WORKERS: Final = 64
"""Workers whose clock offset and backlog are kept; the one that was heard of least recently is forgotten."""
RETRY_BACKOFF_US: Final = 20_000
"""The wait before a request whose delivery failed is sent again."""


class WorkerBacklogs:
    """When each worker will have done its admitted work, by the hints in its results. Times are monotonic."""

    def __init__(self, most_workers: int) -> None:
        self._most_workers = most_workers
        self._done_us: dict[str, int] = {}
        self._worker_of: dict[int, str] = {}

    def note(self, partition: int, worker_id: str, done_us: int) -> None:
        """Notes a result for a request of this partition."""
        self._worker_of[partition] = worker_id
        # The worker that was heard of least recently is first.
        self._done_us.pop(worker_id, None)
        self._done_us[worker_id] = done_us
        if len(self._done_us) > self._most_workers:
            del self._done_us[next(iter(self._done_us))]

    def done_us(self, partition: int) -> int:
        """When the worker of the partition will have done its work; 0 if that is not known."""
        return self._done_us.get(self._worker_of.get(partition, ""), 0)


class Ledger:
    """The open requests of one client."""

    def __init__(
        self,
        settings: ClientSettings,
        clock: Clock,
        metrics: GatewayMetrics,
        on_late: OnLate | None = None,
        on_lost: OnLost | None = None,
    ) -> None:
        self._clock = clock
        self._metrics = metrics
        self._on_late = on_late
        self._on_lost = on_lost
        self._model_revisions = frozenset(settings.model_revisions)
        self._lock = threading.Lock()
        self._table = PendingTable(
            settings.max_in_flight,
            settings.result_grace_ms * 1000,
            settings.remembered_answers,
            settings.lost_after_ms * 1000,
        )
        # Other programs write results, too, any number of which may not fit.
        self._limited_log = LimitedLog(clock)
        self._offsets = ClockOffsets(MOST_WORKERS)
        self._backlogs = WorkerBacklogs(MOST_WORKERS)
        self._counts = ClientCounts()
        metrics.clocks.add(self)
        # Answered and lost requests that are not told yet: they have left the table.
        self._untold = 0

    def open(self, request: RankingRequest, called_us: int | None = None, partition: int = -1) -> PendingRequest:
        """Opens a request, with its deadline converted to the monotonic clock. Raises QueueFull, MessageRefused.

        Its latency is measured from `called_us` on the monotonic clock (None: now). Results for its `partition` tell
        how long the worker's backlog is.
        """
        entry = self._entry(request, called_us, partition)
        with self._lock:
            self._table.add(entry)
            self._counts.submitted += 1
        return entry

    def fail_fast(self, request: RankingRequest, called_us: int, partition: int) -> PendingRequest | None:
        """Ends a request as failed, `overloaded`, if the backlog of the partition's worker takes longer than its
        budget. None: it may be sent. The predicted backlog shrinks with time, so later requests are sent.
        """
        # The wall clock first, as in `_entry`, which only a refused request needs.
        left_us = request.deadline_us - self._clock.wall_us()
        deadline_us = self._clock.monotonic_us() + left_us
        with self._lock:
            if self._backlogs.done_us(partition) < deadline_us:
                return None
            self._counts.submitted += 1
        entry = self._entry(request, called_us, partition)
        latency_us = self._clock.monotonic_us() - entry.sent_us
        self._tell(entry, RankOutcome(entry.request_id, Ended.FAILED, latency_us, None, Reason.OVERLOADED))
        return entry

    def _entry(self, request: RankingRequest, called_us: int | None, partition: int) -> PendingRequest:
        # With the wall clock read first, the converted deadline can only be a little late, never early.
        wall_us = self._clock.wall_us()
        now_us = self._clock.monotonic_us()
        sent_us = now_us if called_us is None else called_us
        future: Future[RankOutcome] = Future()
        # A request that was sent cannot be withdrawn, so cancel() has no effect.
        future.set_running_or_notify_cancel()
        return PendingRequest(
            request_id=request.request_id,
            sent_us=sent_us,
            deadline_us=now_us + request.deadline_us - wall_us,
            sent_wall_us=wall_us - (now_us - sent_us),
            echo_us=request.sent_at_us,
            candidates=len(request.candidates),
            future=future,
            partition=partition,
        )

    def withdraw(self, entry: PendingRequest) -> None:
        """Removes a request that the producer refused, unless it has ended because the client was closed."""
        with self._lock:
            self._counts.submitted -= self._table.discard(entry)

    def acknowledged(self, entry: PendingRequest) -> None:
        """Records that the broker acknowledged the request."""
        with self._lock:
            self._counts.acknowledged += not entry.acknowledged
            entry.acknowledged = True

    def not_delivered(self, entry: PendingRequest, send_again: Callable[[], None]) -> bool:
        """Plans to send the request again after the back-off. Returns False if its deadline comes first."""
        with self._lock:
            now_us = self._clock.monotonic_us()
            is_planned = self._table.retry(entry, send_again, now_us + RETRY_BACKOFF_US)
            if not is_planned:
                self._table.give_up(entry, now_us)
            return is_planned

    def answered(self, result: RankingResult) -> AnswerMatch:
        """Handles a result. One that does not fit its request ends it as `failed` with `invalid_result`."""
        now_us = self._clock.monotonic_us()
        problem = None
        with self._lock:
            answer = self._take(result.request_id, now_us)
            if answer.entry is not None:
                problem = self._misfit(answer.entry, result)
                if problem is None:
                    self._measure_clock(answer.entry, result, now_us)
                    if answer.entry.partition >= 0 and result.diverted_by is None:
                        self._backlogs.note(answer.entry.partition, result.worker_id, now_us + (result.backlog_us or 0))
                self._counts.invalid += problem is not None
        if problem is None:
            self._end(answer, result.outcome, result, result.reason, now_us)
        else:
            self._limited_log.warning(
                "a result does not fit its request",
                Reason.INVALID_RESULT,
                request_id=result.request_id,
                worker_id=result.worker_id,
                problem=problem,
            )
            self._end(answer, Ended.FAILED, None, Reason.INVALID_RESULT, now_us)
        return answer.match

    def answered_undecodable(self, request_id: str | None) -> None:
        """Handles a result with an undecodable body; `request_id` is None if its headers are undecodable too."""
        now_us = self._clock.monotonic_us()
        with self._lock:
            self._counts.undecodable += 1
            answer = self._take(request_id, now_us) if request_id is not None else Answer(AnswerMatch.UNKNOWN)
        if answer.entry is not None:
            self._end(answer, Ended.FAILED, None, Reason.UNDECODABLE, now_us)

    def refused(self, entry: PendingRequest) -> None:
        """Ends a request that Kafka refused, and would refuse again."""
        now_us = self._clock.monotonic_us()
        with self._lock:
            answer = self._take(entry.request_id, now_us)
        if answer.entry is not None:
            self._end(answer, Ended.FAILED, None, Reason.REFUSED_BY_KAFKA, now_us)

    def foreign(self) -> None:
        """Counts a result on our partition that answers no request of ours."""
        with self._lock:
            self._counts.foreign += 1

    def fire(self) -> list[PendingRequest]:
        """Fires the timers that are due. Returns the requests to send again now."""
        now_us = self._clock.monotonic_us()
        with self._lock:
            fired = self._table.due(now_us)
            self._untold += sum(due.timer is Timer.LOSE for due in fired)
        retries = []
        for due in fired:
            if due.timer is Timer.TIME_OUT:
                self._tell_timed_out(due.entry, now_us)
            elif due.timer is Timer.LOSE:
                self._tell_lost(due.entry)
            else:
                retries.append(due.entry)
        if retries:
            with self._lock:
                self._counts.retries += len(retries)
        return retries

    def time_out(self, entry: PendingRequest) -> None:
        """Ends the wait for a request, if it has not ended yet."""
        now_us = self._clock.monotonic_us()
        with self._lock:
            ended = self._table.time_out(entry)
        if ended:
            self._tell_timed_out(entry, now_us)

    def us_until_due(self, at_most_us: int) -> int:
        """Time until the next timer, at most `at_most_us`."""
        with self._lock:
            next_due_us = self._table.next_due_us
        if next_due_us is None:
            return at_most_us
        return max(0, min(at_most_us, next_due_us - self._clock.monotonic_us()))

    def close(self) -> None:
        """Ends the wait for every request, and removes all requests."""
        now_us = self._clock.monotonic_us()
        with self._lock:
            waiting = self._table.clear()
        for entry in waiting:
            self._tell_timed_out(entry, now_us, Reason.CLOSED)
        self._metrics.clocks.discard(self)

    @property
    def waiting(self) -> int:
        """Requests whose caller still waits."""
        return self._table.waiting

    @property
    def in_flight(self) -> int:
        """Open requests: those whose caller waits, and those past their deadline that are not answered or lost yet."""
        return len(self._table)

    @property
    def is_settled(self) -> bool:
        """Whether every request is answered or lost, and counted, and its callback has returned."""
        with self._lock:
            return not len(self._table) and not self._untold

    def statistics(self) -> ClientStatistics:
        with self._lock:
            return self._counts.snapshot(self._table.waiting, len(self._table) - self._table.waiting)

    def clock_offsets(self) -> dict[str, ClockOffset]:
        """The estimated clock offsets of the workers that answered lately, by worker id."""
        with self._lock:
            return self._offsets.all(self._clock.monotonic_us())

    def _take(self, request_id: str, now_us: int) -> Answer:
        """Takes an answered request out of the table. The lock is held, and `_end` follows."""
        answer = self._table.answer(request_id, now_us)
        self._untold += answer.entry is not None
        return answer

    def _end(
        self,
        answer: Answer,
        status: Ended,
        result: RankingResult | None,
        reason: Reason | Other | None,
        now_us: int,
    ) -> None:
        """Passes an answer to the caller, or a late one to `on_late`; counts an answer to no open request."""
        entry = answer.entry
        if entry is None:
            if answer.match is AnswerMatch.DUPLICATE:
                self._metrics.duplicates.inc()
                with self._lock:
                    self._counts.duplicates += 1
            else:
                self.foreign()
            return
        try:
            latency_us = now_us - entry.sent_us
            self._metrics.observe_answer(latency_us, entry.trace.exemplar if entry.trace is not None else None)
            late = answer.match is AnswerMatch.LATE
            outcome = RankOutcome(entry.request_id, status, latency_us, result, reason, late)
            if answer.untold:
                self._tell_timed_out(entry, now_us)
            if late:
                self._metrics.count_late(status)
                with self._lock:
                    self._counts.late += 1
                if self._on_late is not None:
                    notify(self._on_late, outcome)
            else:
                self._tell(entry, outcome)
        finally:
            self._told()

    def _told(self) -> None:
        with self._lock:
            self._untold -= 1

    def _tell_timed_out(self, entry: PendingRequest, now_us: int, reason: Reason | None = None) -> None:
        if reason is None:
            reason = Reason.NO_ANSWER if entry.acknowledged else Reason.NOT_ACKNOWLEDGED
        latency_us = min(now_us, max(entry.deadline_us, entry.sent_us)) - entry.sent_us
        self._tell(entry, RankOutcome(entry.request_id, Ended.TIMED_OUT, latency_us, reason=reason))

    def _tell(self, entry: PendingRequest, outcome: RankOutcome) -> None:
        with self._lock:
            self._counts.ended[outcome.status] += 1
        self._metrics.count_outcome(outcome)
        if entry.trace is not None:
            entry.trace.told(outcome, entry.sent_wall_us)
        notify(entry.future.set_result, outcome)  # It runs the future's callbacks.

    def _tell_lost(self, entry: PendingRequest) -> None:
        try:
            self._metrics.count_lost(entry.acknowledged)
            with self._lock:
                self._counts.lost += 1
            if self._on_lost is not None:
                notify(self._on_lost, LostRequest(entry.request_id, entry.acknowledged))
        finally:
            self._told()

    def _misfit(self, entry: PendingRequest, result: RankingResult) -> str | None:
        """Why the result cannot be the answer to the request; None if it can.

        A worker that could not decode the request does not know its `sent_at_us`, and writes 0.
        """
        is_ranked = result.outcome is Ended.RANKED
        if result.request_sent_at_us != entry.echo_us and (is_ranked or result.request_sent_at_us != 0):
            return f"request_sent_at_us is {result.request_sent_at_us}, the request was sent at {entry.echo_us}"
        if not is_ranked or result.scores is None:
            return None
        if result.scores.size != entry.candidates * result.num_tasks:
            return f"{result.scores.size} scores for {entry.candidates} candidates and {result.num_tasks} tasks"
        if self._model_revisions and result.model_revision not in self._model_revisions:
            return f"model revision {result.model_revision} is not in client.model_revisions"
        return None

    def _measure_clock(self, entry: PendingRequest, result: RankingResult, now_us: int) -> None:
        if result.request_sent_at_us != entry.echo_us:
            return
        # Computed from the monotonic clock, so that a jump of our wall clock has no effect.
        returned_us = entry.sent_wall_us + now_us - entry.sent_us
        sample = measure(entry.sent_wall_us, result.received_at_us, result.sent_at_us, returned_us)
        if sample is not None:
            self._offsets.add(result.worker_id, sample, now_us)
