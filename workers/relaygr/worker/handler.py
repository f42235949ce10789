"""The poll thread's part of a worker: decodes and checks messages, and hands them to the executor.

The handler never blocks. It checks a ranking message in this order. A check that says no raises `Unranked`, and
`_ranking` alone answers:

1. its headers: without a reply address that exists no result can be sent, so the message becomes a dead letter;
2. its deadline: after an outage most of a backlog has expired, and gets its results without being decoded;
3. admission, by its deadline and the backlog of admitted work: above capacity most requests cannot be answered in
   time, and are refused here, for a few microseconds each and without being decoded;
4. its body;
5. how far ahead its deadline lies;
6. its partition;
7. its scenario.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Container
from dataclasses import dataclass
from functools import partial

from confluent_kafka import TIMESTAMP_NOT_AVAILABLE

from relaygr.consumer.interface import Received
from relaygr.kafka.client_errors import LimitedLog
from relaygr.kafka.dead_letters import DeadLetterWriter
from relaygr.runtime.clock import Clock
from relaygr.schemas.codec import DecodeError, DecodeReason, decode
from relaygr.schemas.ended import Ended, Reason
from relaygr.schemas.headers import RankingHeaders, is_job
from relaygr.schemas.messages import DEFAULT_SCENARIO, MAX_BUDGET_MS, PreInferJob, RankingRequest
from relaygr.schemas.partitioner import partition_for
from relaygr.schemas.times import wrong_unit
from relaygr.worker.divert import Diverter
from relaygr.worker.executor.executor import Executor
from relaygr.worker.executor.work import NO_MEMORY, JobOutcome, JobWork, RankingWork, Unranked, transit_us
from relaygr.worker.metrics import WorkerMetrics
from relaygr.worker.results import NO_TIME, ResultWriter

REWRITE_INTERVAL_US = 1_000_000
FURTHEST_US = MAX_BUDGET_MS * 1000
"""Times in messages are cut to this far ahead, so that no work and no offset waits for years."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HandlerSettings:
    """The topics and times of a handler. Every topic of pre-infer jobs and rankings has `partitions` partitions.

    `has_one_topic`: jobs come on the ranking topic, with a header.
    """

    ranking_topic: str
    results_topic: str
    partitions: int
    max_clock_skew_ms: int
    reply_margin_ms: float
    grace_ms: float = 0.0
    max_deadline_ms: int = 60_000
    has_one_topic: bool = False
    scenarios: Container[str] = (DEFAULT_SCENARIO,)


class WorkerHandler:
    """A `relaygr.consumer.loop.Handler` for the pre-infer and ranking topics."""

    def __init__(
        self,
        settings: HandlerSettings,
        executor: Executor,
        results: ResultWriter,
        dead_letters: DeadLetterWriter,
        clock: Clock,
        *,
        on_work: Callable[[], bool],
        on_ownership: Callable[[frozenset[int]], None],
        on_tick: Callable[[int], None],
        results_partitions: Callable[[], int | None],
        diverter: Diverter | None = None,
    ) -> None:
        """`on_work` is called after messages were given to the executor, and says whether work is left for this thread.
        `results_partitions`: those of the topic of results; None while they are unknown. `diverter`: None without
        `worker.divert`.
        """
        self._settings = settings
        self._results_partitions = results_partitions
        # Gateways of other makers may write any number of wrong requests.
        self._limited_log = LimitedLog(clock)
        self._executor = executor
        self._results = results
        self._dead_letters = dead_letters
        self._clock = clock
        self._skew_us = settings.max_clock_skew_ms * 1000
        self._furthest_us = (settings.max_deadline_ms + settings.max_clock_skew_ms) * 1000
        self._grace_us = int(settings.grace_ms * 1000)
        self._reply_margin_us = int(settings.reply_margin_ms * 1000)
        self._on_work = on_work
        self._on_ownership = on_ownership
        self._on_tick = on_tick
        self._diverter = diverter
        self._unwritten: deque[Callable[[], None]] = deque()
        self._rewrite_at_us = 0

    def on_message(self, message: Received) -> None:
        settings = self._settings
        if message.topic != settings.ranking_topic or (settings.has_one_topic and is_job(message.headers)):
            self._preinfer(message)
        else:
            self._ranking(message)

    def on_batch(self) -> bool:
        if self._results.unsent:
            self._results.send()
        return self._on_work()

    def on_rebalance(self) -> None:
        self._executor.work_arrived.set()

    def on_assigned(self, partitions: frozenset[int], assignment_epoch: int) -> None:  # noqa: ARG002
        self._on_ownership(partitions)

    def on_revoked(self, partitions: frozenset[int]) -> None:
        """Does nothing: the classic protocol revokes all partitions and returns most of them in `on_assigned`."""

    def on_lost(self, partitions: frozenset[int]) -> None:
        """Does nothing. The work in flight ends, and commits no offset."""

    def on_tick(self, now_us: int) -> None:
        self._rewrite(now_us)
        # Dead letters that were delivered meanwhile have written answers.
        self._results.tick(now_us)
        self._on_tick(now_us)

    def _rewrite(self, now_us: int) -> None:
        self._dead_letters.poll()
        if self._unwritten and now_us >= self._rewrite_at_us:
            self._rewrite_at_us = now_us + REWRITE_INTERVAL_US
            for _ in range(len(self._unwritten)):
                self._unwritten.popleft()()

    # -- ranking -----------------------------------------------------------------------------------

    def _ranking(self, received: Received) -> None:
        try:
            reply = RankingHeaders.decode(received.headers)
            self._require_address(reply)
        except DecodeError as error:
            self._limited_log.warning(
                "a ranking request gets no answer: it has no reply address", error.reason, reason=error.reason,
                detail=str(error), topic=received.topic, partition=received.partition, offset=received.offset,
            )  # fmt: skip
            return self._dead_letter(received, error.reason.value, f"no reply address: {error}")
        try:
            self._take(reply, received)
        except Unranked as end:
            self._results.unranked(reply, received, end)
        except DecodeError as error:
            undecodable = Unranked(Ended.FAILED, Reason.UNDECODABLE, f"{error.reason}: {error}")
            answer = partial(self._results.unranked, reply, received, undecodable)
            self._dead_letter(received, error.reason.value, str(error), answer)

    def _require_address(self, reply: RankingHeaders) -> None:
        """Raises DecodeError if no gateway can read the result."""
        topic, partitions = self._settings.results_topic, self._results_partitions()
        if reply.reply_topic != topic:
            raise DecodeError(DecodeReason.INVALID_FIELD, f"header reply_topic is not {topic}")
        if partitions is not None and reply.reply_partition >= partitions:
            raise DecodeError(
                DecodeReason.INVALID_FIELD,
                f"header reply_partition is {reply.reply_partition}, and {topic} has the partitions 0 to "
                f"{partitions - 1}",
            )

    def _take(self, reply: RankingHeaders, received: Received) -> None:
        """Hands the request to the executor, or passes it on to another worker. Raises Unranked, DecodeError."""
        now_wall_us = self._clock.wall_us()
        self._require_unexpired(reply, received, now_wall_us)
        last_us = reply.deadline_us + self._grace_us
        deadline_us = _monotonic(received, last_us, now_wall_us)
        answer_by_us = deadline_us - max(self._reply_margin_us, self._results.deliveries.median_us)
        if now_wall_us <= last_us and self._is_hopeless(reply, received, answer_by_us, now_wall_us):
            if self._is_diverted(reply, received, answer_by_us):
                return
            raise self._refused(reply, received, Unranked(Ended.FAILED, Reason.OVERLOADED, NO_TIME))
        request = self._decode(reply, received)
        self._require_near(request, now_wall_us)
        self._require_routed(request, received)
        self._require_scenario(request)
        work = RankingWork(request, reply, received, now_wall_us, deadline_us, answer_by_us)
        if not self._executor.take_ranking(work):
            raise Unranked(Ended.FAILED, Reason.OVERLOADED, NO_MEMORY)

    def _require_unexpired(self, reply: RankingHeaders, received: Received, now_wall_us: int) -> None:
        if now_wall_us <= reply.deadline_us + self._grace_us + self._skew_us:
            return
        if wrong := wrong_unit(reply.deadline_us, "microseconds"):
            raise Unranked(Ended.FAILED, Reason.INVALID_DEADLINE, f"header deadline_us: {wrong}")
        raise self._refused(reply, received, Unranked(Ended.EXPIRED))

    def _require_near(self, request: RankingRequest, now_wall_us: int) -> None:
        ahead_us = request.deadline_us - now_wall_us
        if ahead_us > self._furthest_us:
            raise Unranked(
                Ended.FAILED,
                Reason.INVALID_DEADLINE,
                f"the deadline lies {ahead_us / 1e6:.1f} s ahead of this worker's clock, the limit is "
                f"{self._furthest_us / 1e6:.1f} s (worker.max_deadline_ms). The clock offset (this "
                f"worker's clock minus the gateway's) is about {(now_wall_us - request.sent_at_us) / 1e6:+.3f} s",
            )

    def _require_routed(self, request: RankingRequest, received: Received) -> None:
        if not self._is_routed_here(request.user_id, received):
            raise Unranked(
                Ended.FAILED,
                Reason.WRONG_PARTITIONER,
                f"user {request.user_id!r} belongs to partition {self._partition_of(request.user_id)} of "
                f"{self._settings.partitions}, the message came on {received.partition}: use murmur2 on the UTF-8 "
                "bytes of the user id as the key, and check that the topic still has "
                f"{self._settings.partitions} partitions (relaygr topics check)",
            )

    def _require_scenario(self, request: RankingRequest) -> None:
        scenario = request.scenario or DEFAULT_SCENARIO
        if scenario not in self._settings.scenarios:
            raise Unranked(
                Ended.FAILED,
                Reason.UNKNOWN_SCENARIO,
                f"this worker does not serve the scenario {scenario!r}: check `scenarios` in its settings, and the "
                "topics that the gateway writes to",
            )

    def _is_hopeless(self, reply: RankingHeaders, received: Received, answer_by_us: int, now_wall_us: int) -> bool:
        """Whether the admitted work leaves no time for a request that is not decoded. A worker without a backlog
        decides on the device thread, when it knows the cost.
        """
        return self._executor.backlog.is_busy and self._executor.is_hopeless(
            _user_of(received), reply.request_id, answer_by_us, received.received_us, _sent_us(received, now_wall_us)
        )

    def _refused(self, reply: RankingHeaders, received: Received, end: Unranked) -> Unranked:
        """The end of a request that is refused by its headers, with the hint of overload. The executor forgets it."""
        self._executor.note_no_time(_user_of(received), reply.request_id)
        end.backlog_us = self._executor.backlog.predicted_us or None
        return end

    def _decode(self, reply: RankingHeaders, received: Received) -> RankingRequest:
        """Raises DecodeError."""
        request = decode(RankingRequest, received.value)
        if (reply.request_id, reply.deadline_us) != (request.request_id, request.deadline_us):
            raise DecodeError(
                DecodeReason.INVALID_FIELD,
                "RankingRequest: request_id or deadline_us differs from the headers",
            )
        return request

    def _is_routed_here(self, user_id: str, received: Received) -> bool:
        return _is_routed_to(self._partition_of(user_id), received, user_id)

    def _is_diverted(self, reply: RankingHeaders, received: Received, answer_by_us: int) -> bool:
        """Whether another worker answers a request that is not decoded yet and finds no time here."""
        diverter = self._diverter
        if diverter is None or not diverter.may_divert():
            return False
        try:
            request = self._decode(reply, received)
        except DecodeError:
            return False
        if not self._is_routed_here(request.user_id, received) or request.diverted is not None:
            return False
        if not diverter.divert(request, reply, received, answer_by_us):
            return False
        self._executor.note_no_time(request.user_id, request.request_id)
        return True

    # -- pre-infer ---------------------------------------------------------------------------------

    def _preinfer(self, received: Received) -> None:
        try:
            job = decode(PreInferJob, received.value)
        except DecodeError as error:
            self._results.undecodable_job()
            return self._dead_letter(received, error.reason.value, str(error))
        now_wall_us = self._clock.wall_us()
        if not _is_routed_to(self._partition_of(job.user_id), received, job.user_id):
            return self._results.job_done(received, JobOutcome.MISROUTED)
        if (job.scenario or DEFAULT_SCENARIO) not in self._settings.scenarios:
            return self._results.job_done(received, JobOutcome.UNKNOWN_SCENARIO)
        if now_wall_us > job.expires_at_us + self._skew_us:
            return self._results.job_done(received, JobOutcome.EXPIRED)
        expected_us = _monotonic(received, job.expected_ranking_at_us, now_wall_us)
        work = JobWork(job, received, expected_us, _monotonic(received, job.expires_at_us, now_wall_us))
        if not self._executor.take_job(work):
            self._results.job_done(received, JobOutcome.SHED)
        return None

    # -- both --------------------------------------------------------------------------------------

    def _dead_letter(
        self, received: Received, reason: str, detail: str, then: Callable[[], None] | None = None
    ) -> None:
        """Writes a dead letter, again until it is delivered. Only then calls `then`, or finishes the offset.

        The loop's `max_span` of unfinished messages a partition bounds how many dead letters wait.
        """

        def written(delivered: bool) -> None:
            if not delivered:
                self._unwritten.append(write)
            elif then is not None:
                then()
            else:
                self._results.finish(received.token)

        def write() -> None:
            self._dead_letters.write(received.message, reason, detail, on_done=written)

        write()

    def _partition_of(self, user_id: str) -> int:
        return partition_for(user_id.encode(), self._settings.partitions)


class OverflowHandler(WorkerHandler):
    """A `relaygr.consumer.loop.Handler` for ranking requests that other workers divert to this one, on a poll thread of
    its own. They are never diverted again. The key is the user id, but says nothing about the partition.
    """

    def __init__(
        self,
        settings: HandlerSettings,
        executor: Executor,
        results: ResultWriter,
        dead_letters: DeadLetterWriter,
        clock: Clock,
        metrics: WorkerMetrics,
        *,
        on_refused: Callable[[], None],
        on_user_partition: Callable[[int], None],
        results_partitions: Callable[[], int | None],
    ) -> None:
        """`on_user_partition` gets the partition of each user on the other topics, which is another worker's."""
        super().__init__(
            settings,
            executor,
            results,
            dead_letters,
            clock,
            on_work=lambda: False,
            on_ownership=lambda _: None,
            on_tick=lambda _: None,
            results_partitions=results_partitions,
        )
        self._metrics = metrics
        self._on_refused = on_refused
        self._on_user_partition = on_user_partition

    def on_message(self, message: Received) -> None:
        self._ranking(message)

    def on_batch(self) -> bool:
        self._executor.work_arrived.set()
        return super().on_batch()

    def on_tick(self, now_us: int) -> None:
        """The other poll thread takes the delivery reports of results."""
        self._rewrite(now_us)
        self._results.send()

    def _decode(self, reply: RankingHeaders, received: Received) -> RankingRequest:
        request = super()._decode(reply, received)
        if request.diverted is None or request.history is None:
            raise DecodeError(DecodeReason.INVALID_FIELD, "RankingRequest: not diverted, or without its history")
        return request

    def _is_routed_here(self, user_id: str, received: Received) -> bool:
        self._on_user_partition(self._partition_of(user_id))
        return received.key == user_id.encode()

    def _refused(self, reply: RankingHeaders, received: Received, end: Unranked) -> Unranked:
        self._metrics.diverted_received[end.ended].inc()
        if end.reason is Reason.OVERLOADED:
            self._on_refused()
        return super()._refused(reply, received, end)


def _user_of(received: Received) -> str:
    """The user of a request that is not decoded, whose prefix may be leased for it: the message's key."""
    return (received.key or b"").decode(errors="replace")


def _sent_us(received: Received, now_wall_us: int) -> int:
    """When a request that is not decoded was sent, on the monotonic clock: by the message's time stamp; when it was
    received, without one or with a wrong one.
    """
    kind, sent_wall_ms = received.message.timestamp()
    if kind == TIMESTAMP_NOT_AVAILABLE:
        return received.received_us
    return received.received_us - (transit_us(sent_wall_ms * 1000, now_wall_us) or 0)


def _is_routed_to(partition: int, received: Received, user_id: str) -> bool:
    return received.partition == partition and received.key == user_id.encode()


def _monotonic(received: Received, wall_us: int, now_wall_us: int) -> int:
    """A wall-clock time of a message on the monotonic clock of this process. The message was received now."""
    return received.received_us + min(wall_us - now_wall_us, FURTHEST_US)
