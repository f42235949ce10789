"""`RelayClient`: a gateway's client for threads.

    with RelayClient(kafka, gateway_id="gw-0") as client:
        event = client.publish_retrieval(user, ranking_budget_ms=50, ...)      # retrieval begins
        ...                                                                    # retrieval, pre-processing
        outcome = client.rank(user, candidates, budget_ms=50, request_id=event.request_id,
                              query_time_ms=event.retrieval_at_us // 1000)

The contract:

* `rank` returns at its deadline at the latest, with the outcome `ranked`, `expired`, `failed` or `timed_out`.
  It raises only if nothing was sent: EncodeError, ValueError or TypeError (an argument), NotRunning, QueueFull,
  MessageRefused.
* A client belongs to the process that started it, and needs real threads. In a forked process every call raises
  NotRunning, and `close` does nothing; with gevent or eventlet `start` raises RelayError.
* The client passes an answer that arrives after the deadline to `on_late`, and a request that got no answer
  within `lost_after_ms` after its deadline to `on_lost`; within `result_grace_ms`, if Kafka did not acknowledge it.
  It drops and counts a second answer.
* A result that does not fit its request (number of scores, `sent_at_us`, model) is `failed`, `invalid_result`.
* While the broker is away, outcomes are `timed_out`; there is no exception. librdkafka sends a request again for
  500 ms, and then the client, until the deadline. The request may have arrived although its delivery failed.
* One thread does all I/O, fires timers and runs callbacks, those of futures included. A callback must be short
  and must not block: the thread reads no answers while it runs.

`submit_rank` returns a future instead. Its deadline is exact to about a millisecond, or to `MAX_WAIT_MS` (5) if
the budget is shorter than that.
"""

from __future__ import annotations

import enum
import threading
import time
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from types import TracebackType
from typing import TYPE_CHECKING, Final, NoReturn, Unpack

from numpy.typing import ArrayLike
from prometheus_client import REGISTRY, CollectorRegistry

from relaygr.client.clock_offset import ClockOffset
from relaygr.client.ledger import Ledger, OnLate, OnLost
from relaygr.client.link import GatewayLink
from relaygr.client.metrics import ClientStatistics, gateway_metrics
from relaygr.client.outcome import ClientError, DeliveryReport, NotRunning, RankOutcome
from relaygr.client.pending import PendingRequest
from relaygr.client.process import ProcessOfClient, refuse_green_threads
from relaygr.client.publisher import OnDelivery, require_settings
from relaygr.client.requests import RankFields, RequestIds, RetrievalFields, ranking_request, retrieval_event
from relaygr.client.settings import ClientSettings
from relaygr.cluster.rights import Role, RoleRights
from relaygr.kafka.session import KafkaSession
from relaygr.kafka.settings import KafkaSettings
from relaygr.runtime.clock import Clock, SystemClock
from relaygr.schemas import codec
from relaygr.schemas.messages import MAX_BUDGET_MS, BehaviourEvent, History, RankingRequest, RetrievalEvent
from relaygr.schemas.partitioner import partition_for
from relaygr.schemas.topics import Topic
from relaygr.schemas.trace_context import TraceContext
from relaygr.tracing import Tracer

if TYPE_CHECKING:
    from relaygr.client.tracing import ClientTraces

_STEP_S: Final = 0.002


class _State(enum.StrEnum):
    NEW = "not started"
    STARTING = "starting"
    RUNNING = "running"
    CLOSING = "closing"
    CLOSED = "closed"


class RelayClient:
    """A gateway's client. Call `start` and `close` once, and the other methods in between, from any thread."""

    def __init__(
        self,
        kafka: KafkaSettings,
        gateway_id: str,
        settings: ClientSettings | None = None,
        *,
        on_late: OnLate | None = None,
        on_lost: OnLost | None = None,
        clock: Clock | None = None,
        registry: CollectorRegistry = REGISTRY,
        tracer: Tracer | None = None,
    ) -> None:
        """Does no I/O. Raises ValueError for a gateway id with characters other than `A-Za-z0-9._-`, TypeError if
        `kafka` is not settings.

        `tracer`: of `relaygr.tracing.start_tracing`; the caller closes it after the client.
        """
        require_settings(kafka)
        self._settings = settings or ClientSettings()
        self._clock = clock or SystemClock()
        self._partitions = kafka.partitions
        self._ids = RequestIds(gateway_id, self._clock)
        metrics = gateway_metrics(registry)
        self._ledger = Ledger(self._settings, self._clock, metrics, on_late, on_lost)
        self._traces = _traces(kafka, tracer) if tracer is not None else None
        rights = RoleRights(kafka, Role.GATEWAY)
        session = KafkaSession(kafka, f"relaygr-gateway-{gateway_id}", rights, registry=registry)
        partition = self._settings.results_partition
        self._link = GatewayLink(session, gateway_id, partition, self._ledger, metrics, self._traces)
        self._state = _State.NEW
        self._process = ProcessOfClient()
        # A signal handler may close the client while its own thread starts or closes it.
        self._lifecycle = threading.RLock()

    def start(self) -> None:
        """Connects. When it returns, requests can be sent, and the client will read every answer to them.

        Raises RelayError if the cluster cannot be reached within `connect_timeout_s`, a topic is missing, or the
        results partition does not exist, or with green threads; NotRunning if the client was started before, or if a
        signal handler closes it meanwhile.
        """
        refuse_green_threads()
        self._process.require()
        with self._lifecycle:
            if self._state is not _State.NEW:
                raise NotRunning(f"the client is {self._state}: make a new one to start again")
            self._state = _State.STARTING
            self._process.enter(self._link)
            try:
                self._link.connect()
            except BaseException:
                self._state = _State.CLOSED
                raise
            if self._state is not _State.STARTING:
                self._link.disconnect(0.0)
                raise NotRunning("the client was closed while it started")
            self._state = _State.RUNNING

    def close(self, timeout_s: float | None = None) -> None:
        """Waits for open requests and undelivered messages, at most `timeout_s` and about a second more.

        None: the setting `close_timeout_s`. Callers that still wait then get `timed_out` with reason `closed`,
        and `on_delivery` of an unacknowledged message gets an error. Requests past their deadline are not
        counted as lost; call `drain` first if you need that count. Raises ClientError if called in a callback.
        """
        if self._process.is_forked:
            return
        self._refuse_in_callback("close")
        with self._lifecycle:
            if self._state is _State.CLOSING:
                return  # A signal handler has interrupted the thread that closes the client.
            if self._state is not _State.RUNNING:
                self._state = _State.CLOSED
                return
            self._state = _State.CLOSING
            ends_s = time.monotonic() + (self._settings.close_timeout_s if timeout_s is None else timeout_s)
            try:
                while self._ledger.waiting and time.monotonic() < ends_s:
                    time.sleep(_STEP_S)
            finally:  # Also after a second Ctrl-C: nobody closes the client again.
                self._link.disconnect(max(0.0, ends_s - time.monotonic()))
                self._ledger.close()
                self._state = _State.CLOSED

    def __reduce__(self) -> NoReturn:
        """Programs pickle what they send to other processes (multiprocessing, Ray, Spark)."""
        raise TypeError("a client belongs to the process that made it: send its settings, and make a client there")

    def __enter__(self) -> RelayClient:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def drain(self, timeout_s: float) -> bool:
        """Waits until every request is answered or lost, and its callback was called. Returns False if that takes
        longer than `timeout_s`. Raises ClientError if called in a callback.
        """
        self._process.require()
        self._refuse_in_callback("drain")
        ends_s = time.monotonic() + timeout_s
        while not self._ledger.is_settled:
            if time.monotonic() >= ends_s:
                return False
            time.sleep(_STEP_S)
        return True

    @property
    def results_partition(self) -> int:
        """The partition of the results topic that this client reads; -1 before `start`."""
        return self._link.results_partition

    @property
    def in_flight(self) -> int:
        """Open requests: those whose caller waits, and those past their deadline that are not answered or lost yet."""
        return self._ledger.in_flight

    @property
    def refusal(self) -> str | None:
        """What Kafka refuses this client now, with the remedy, so that it cannot work; None while it refuses nothing.

        The client makes new connections with the files of `security` when they change.
        """
        return self._link.refusal

    @property
    def silence(self) -> str | None:
        """A sentence while Kafka does not answer this client; None while it does. For the readiness of a gateway.

        An idle client is asked, too, so it is None again soon after Kafka is back.
        """
        return self._link.silence

    def statistics(self) -> ClientStatistics:
        """The counters of this client."""
        self._process.require()
        return self._ledger.statistics()

    def clock_offsets(self) -> dict[str, ClockOffset]:
        """The offset of each worker's wall clock from ours, by worker id."""
        self._process.require()
        return self._ledger.clock_offsets()

    def new_request_id(self) -> str:
        """An id `GATEWAY.INCARNATION.SEQUENCE.TOKEN` for a new impression. The token is random."""
        return self._ids.new()

    def publish_retrieval(
        self, user_id: str, *, on_delivery: OnDelivery | None = None, **fields: Unpack[RetrievalFields]
    ) -> RetrievalEvent:
        """Publishes the retrieval event of an impression that begins now. Pass the event's request id to `rank`.

        Does not wait for the broker; `on_delivery` gets the delivery report. Raises EncodeError, TypeError, NotRunning,
        QueueFull, MessageRefused.
        """
        request_id = fields.get("request_id") or self.new_request_id()
        event = retrieval_event(request_id, user_id, self._clock.wall_us(), fields)
        self.publish_event(event, on_delivery, fields.get("traceparent"))
        return event

    def publish_event(
        self, event: RetrievalEvent, on_delivery: OnDelivery | None = None, traceparent: str | None = None
    ) -> None:
        """Publishes a complete retrieval event. Raises EncodeError, NotRunning, QueueFull, MessageRefused."""
        self._require_running()
        given = TraceContext.parse(traceparent)
        if self._traces is None:
            header = given.encode() if given is not None else None
            return self._link.events.publish_retrieval(event, on_delivery, header)
        begun = self._traces.retrieval(event, given)
        if begun is None or (send := begun.trace) is None:
            return self._link.events.publish_retrieval(event, on_delivery, None if begun is None else begun.header)

        def reported(report: DeliveryReport) -> None:
            send.reported(report)
            if on_delivery is not None:
                on_delivery(report)

        return self._link.events.publish_retrieval(event, reported, begun.header)

    def publish_history(self, history: History, on_delivery: OnDelivery | None = None) -> None:
        """Replaces a user's history. Raises EncodeError, NotRunning, QueueFull, MessageRefused."""
        self._require_running()
        self._link.events.publish_history(history, on_delivery)

    def publish_behaviours(self, event: BehaviourEvent, on_delivery: OnDelivery | None = None) -> None:
        """Adds behaviours to a user's history. Raises EncodeError, NotRunning, QueueFull, MessageRefused."""
        self._require_running()
        self._link.events.publish_behaviours(event, on_delivery)

    def tombstone(self, user_id: str, on_delivery: OnDelivery | None = None) -> None:
        """Deletes a user's history, also in the workers. Raises EncodeError, NotRunning, QueueFull, MessageRefused."""
        self._require_running()
        self._link.events.tombstone(user_id, on_delivery)

    def rank(self, user_id: str, candidates: ArrayLike, **fields: Unpack[RankFields]) -> RankOutcome:
        """Ranks `candidates` (item ids, int64, shape [candidates]) and waits at most `budget_ms`.

        Raises EncodeError, ValueError, TypeError, NotRunning, QueueFull, MessageRefused, all before anything is
        sent; ClientError if called in a callback.
        """
        self._refuse_in_callback("rank")
        called_us = self._clock.monotonic_us()
        entry = self._submit(self._request(user_id, candidates, fields), called_us, fields.get("traceparent"))
        left_us = entry.deadline_us - self._clock.monotonic_us()
        try:
            return entry.future.result(timeout=max(0, left_us) / 1e6)
        except FutureTimeoutError:
            # The calling thread enforces the deadline itself, so that a busy I/O thread cannot delay it.
            self._ledger.time_out(entry)
            return entry.future.result()

    def submit_rank(self, user_id: str, candidates: ArrayLike, **fields: Unpack[RankFields]) -> Future[RankOutcome]:
        """`rank` without the wait. The future gets an outcome and never an exception; it cannot be cancelled."""
        called_us = self._clock.monotonic_us()
        request = self._request(user_id, candidates, fields)
        return self._submit(request, called_us, fields.get("traceparent")).future

    def submit_request(self, request: RankingRequest, traceparent: str | None = None) -> Future[RankOutcome]:
        """Sends a complete request; its `deadline_us` is on our wall clock. Raises the errors of `rank`."""
        return self._submit(request, self._clock.monotonic_us(), traceparent).future

    def _request(self, user_id: str, candidates: ArrayLike, fields: RankFields) -> RankingRequest:
        request_id = fields.get("request_id") or self.new_request_id()
        return ranking_request(request_id, user_id, candidates, self._clock.wall_us(), fields)

    def _submit(self, request: RankingRequest, called_us: int, traceparent: str | None) -> PendingRequest:
        self._require_running()
        if request.deadline_us - self._clock.wall_us() > MAX_BUDGET_MS * 1000:
            raise ValueError(f"the deadline is more than {MAX_BUDGET_MS} ms away: is it in microseconds?")
        message = codec.encode(request)
        partition = -1
        if self._settings.fail_fast:
            partition = partition_for(request.user_id.encode(), self._partitions)
            refused = self._ledger.fail_fast(request, called_us, partition)
            if refused is not None:
                return refused
        entry = self._ledger.open(request, called_us, partition)
        if self._traces is not None or traceparent is not None:
            self._trace(entry, request, traceparent)
        try:
            self._link.send(entry, request.user_id.encode(), message, request.deadline_us)
        except ClientError:
            self._ledger.withdraw(entry)
            raise
        return entry

    def _trace(self, entry: PendingRequest, request: RankingRequest, traceparent: str | None) -> None:
        given = TraceContext.parse(traceparent)
        if self._traces is None:
            entry.traceparent = given.encode() if given is not None else None
            return
        begun = self._traces.rank(request, given)
        if begun is not None:
            entry.traceparent, entry.trace = begun.header, begun.trace

    def _refuse_in_callback(self, name: str) -> None:
        if self._link.is_io_thread():
            advice = "use submit_rank()" if name == "rank" else "call it from another thread"
            raise ClientError(f"{name}() in a callback would wait for its own thread: {advice}")

    def _require_running(self) -> None:
        self._process.require()
        if self._state is not _State.RUNNING:
            raise NotRunning(f"the client is {self._state}: use it between start() and close()")


def _traces(kafka: KafkaSettings, tracer: Tracer) -> ClientTraces:
    # Imports opentelemetry, which only a client with a tracer needs.
    from relaygr.client.tracing import ClientTraces

    return ClientTraces(tracer, kafka.topic(Topic.RETRIEVAL), kafka.topic(Topic.RANKING), kafka.topic(Topic.RESULTS))
