"""A gateway's link to Kafka: its producers, its partition of the results topic, and one I/O thread.

`GatewayLink` sends and receives messages; the ledger keeps the requests. `connect` finds the end of the results
partition before it returns, and the link reads from there. So the link misses no answer to a later request,
and reads no answers to requests of an earlier process with the same gateway id.

In each turn the thread fires timers, waits for a result with `poll`, takes further results with `consume`
without waiting, and serves delivery reports. A new request cannot wake the thread, so it waits `MAX_WAIT_MS` at
most: 200 turns a second when idle.
"""

from __future__ import annotations

import functools
import threading
import time
from typing import TYPE_CHECKING, Final

import structlog
from confluent_kafka import Consumer, KafkaError, KafkaException, Message, Producer, TopicPartition

from relaygr.client.ledger import Ledger
from relaygr.client.metrics import GatewayMetrics
from relaygr.client.outcome import ClientError, NotRunning
from relaygr.client.pending import PendingRequest
from relaygr.client.publisher import EventPublisher, delivery_report, produce, warm_up
from relaygr.kafka.clients import (
    QUICK_RECONNECT,
    ProducerKind,
    make_assigned_consumer,
    make_producer,
    require_broker,
)
from relaygr.kafka.dead_letters import DeadLetterWriter
from relaygr.kafka.message_headers import headers_of
from relaygr.kafka.rights import Role, require_rights
from relaygr.kafka.settings import KafkaSettings, SecurityProtocol
from relaygr.kafka.statistics import KafkaStatistics
from relaygr.runtime.errors import RelayError
from relaygr.schemas import codec
from relaygr.schemas.codec import DecodeError, DecodeReason
from relaygr.schemas.headers import RankingHeaders, ResultHeaders
from relaygr.schemas.messages import RankingResult
from relaygr.schemas.partitioner import partition_for
from relaygr.schemas.topics import Topic
from relaygr.schemas.trace_context import is_sampled
from relaygr.tracing.spans import MessagePlace

if TYPE_CHECKING:
    from relaygr.client.tracing import ClientTraces

MAX_WAIT_MS: Final = 5
_BATCH: Final = 64
# The pause keeps the thread from spinning when every turn fails.
_PAUSE_AFTER_ERROR_S: Final = 0.01
_JOIN_TIMEOUT_S: Final = 1.0
_OTHER_GATEWAY: Final = "other_gateway"
# Errors after which a retry cannot succeed.
_FINAL_ERRORS: Final = frozenset(
    (
        KafkaError.MSG_SIZE_TOO_LARGE,
        KafkaError.INVALID_MSG,
        KafkaError.TOPIC_AUTHORIZATION_FAILED,
        KafkaError.POLICY_VIOLATION,
    )
)

_log = structlog.get_logger()


class GatewayLink:
    """Sends ranking requests, reads results into the ledger, and polls the event publisher."""

    def __init__(
        self,
        kafka: KafkaSettings,
        gateway_id: str,
        results_partition: int | None,
        ledger: Ledger,
        metrics: GatewayMetrics,
        statistics: KafkaStatistics,
        traces: ClientTraces | None = None,
    ) -> None:
        self._kafka = kafka
        self._traces = traces
        self._reporting = statistics.options(kafka.statistics_interval_ms)
        self._gateway_id = gateway_id
        self._client_id = f"relaygr-gateway-{gateway_id}"
        self._wanted_partition = results_partition
        self._ledger = ledger
        self._metrics = metrics
        self._ranking_topic = kafka.topic(Topic.RANKING)
        self._results_topic = kafka.topic(Topic.RESULTS)
        self.events = EventPublisher(kafka, self._client_id, self._on_error, metrics)
        self.results_partition = -1
        self._producer: Producer | None = None
        self._consumer: Consumer | None = None
        self._dead_letters = DeadLetterWriter(kafka, self._client_id)
        self._reachable = False
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name=self._client_id, daemon=True)

    def connect(self) -> None:
        """Checks the cluster, finds the end of the results partition, connects, starts the thread.

        Raises RelayError if the cluster cannot be reached, a topic is missing, or the results partition does
        not exist, after it has closed the clients that it opened.
        """
        try:
            self._check_topics()
            self._position()
            self._producer = make_producer(
                self._kafka,
                ProducerKind.LATENCY,
                self._client_id,
                self._on_error,
                self._reporting,
            )
            warm_up(self._producer, self._ranking_topic, self._kafka.connect_timeout_s)
            self.events.start()
        except BaseException:
            self._close_clients(0.0)
            raise
        self._set_reachable(True)
        self._thread.start()

    def disconnect(self, timeout_s: float) -> None:
        """Stops the thread, waits at most `timeout_s` for published messages to be delivered, closes the clients.

        The I/O thread itself must not call it.
        """
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join(timeout=_JOIN_TIMEOUT_S)
            if self._thread.is_alive():
                # Closing a consumer while a thread polls it would crash the process.
                _log.error("a callback does not return, so the gateway's clients stay open", client_id=self._client_id)
                return
        self._close_clients(timeout_s)

    def is_io_thread(self) -> bool:
        """Whether the caller runs in the I/O thread, which means within a callback."""
        return threading.current_thread() is self._thread

    def send(self, entry: PendingRequest, key: bytes, message: bytes, deadline_us: int) -> None:
        """Hands an encoded ranking request to the producer. Raises NotRunning, QueueFull, MessageRefused."""
        producer = self._producer  # Read once: another thread may set it to None.
        if producer is None:
            raise NotRunning("the gateway's link is closed")
        headers = RankingHeaders(
            entry.request_id,
            self._gateway_id,
            self._results_topic,
            self.results_partition,
            deadline_us,
            entry.traceparent,
        )
        report = functools.partial(self._on_ranking_report, entry, deadline_us)
        produce(producer, self._ranking_topic, key, message, headers.encode(), report)

    def _check_topics(self) -> None:
        known = require_broker(self._kafka).topics
        # Without authentication a cluster rarely has ACLs, and the check starts a child process.
        if self._kafka.security.protocol is not SecurityProtocol.PLAINTEXT:
            require_rights(self._kafka, Role.GATEWAY)
        for topic in (Topic.RETRIEVAL, Topic.RANKING, Topic.RESULTS):
            name = self._kafka.topic(topic)
            if name not in known:
                raise RelayError(f"topic {name} is missing: create the topics with `relaygr topics create`")
        count = len(known[self._results_topic].partitions)
        partition = self._wanted_partition
        if partition is None:
            partition = partition_for(self._gateway_id.encode(), count)
        if partition >= count:
            raise RelayError(
                f"results_partition is {partition}, but {self._results_topic} has {count} partitions: "
                f"set it to a partition from 0 to {count - 1}, or unset it"
            )
        self.results_partition = partition

    def _position(self) -> None:
        self._consumer = make_assigned_consumer(
            self._kafka, self._client_id, self._on_error, {**QUICK_RECONNECT, **self._reporting}
        )
        end = self._end_of_results(self._consumer)
        self._consumer.assign([TopicPartition(self._results_topic, self.results_partition, end)])

    def _end_of_results(self, consumer: Consumer) -> int:
        """The next offset of our partition. It retries while the partition has no leader."""
        place = TopicPartition(self._results_topic, self.results_partition)
        ends_s = time.monotonic() + self._kafka.connect_timeout_s
        while True:
            try:
                return consumer.get_watermark_offsets(place, timeout=max(0.01, ends_s - time.monotonic()))[1]
            except KafkaException as error:
                if time.monotonic() >= ends_s:
                    raise RelayError(
                        f"the end of {self._results_topic} [{self.results_partition}] could not be read within "
                        f"{self._kafka.connect_timeout_s:g} s: {error.args[0].str()}. Is its leader up?"
                    ) from error
            time.sleep(_PAUSE_AFTER_ERROR_S)

    def _close_clients(self, timeout_s: float) -> None:
        self.events.close(timeout_s)
        self._dead_letters.flush(timeout_s)
        if self._producer is not None:
            # No caller waits for these requests any more.
            self._producer.purge()
            self._producer.flush(0.1)
            self._producer = None
        if self._consumer is not None:
            self._consumer.close()
            self._consumer = None

    def _run(self) -> None:
        while not self._stop.is_set():
            try:
                self._turn()
            except Exception:
                _log.exception("the gateway's I/O thread continues after an error", client_id=self._client_id)
                time.sleep(_PAUSE_AFTER_ERROR_S)

    def _turn(self) -> None:
        assert self._consumer is not None and self._producer is not None
        for entry in self._ledger.fire():
            self._send_again(entry)
        wait_us = self._ledger.us_until_due(MAX_WAIT_MS * 1000)
        # librdkafka rounds down to whole milliseconds, and a wait of 0 would spin: round up.
        message = self._consumer.poll(-(-wait_us // 1000) / 1000)
        if message is not None:
            self._take(message)
            for message in self._consumer.consume(_BATCH - 1, 0):
                self._take(message)
        self._producer.poll(0)
        self.events.poll()
        self._dead_letters.poll()

    def _take(self, message: Message) -> None:
        error = message.error()
        if error is not None:
            _log.warning("results cannot be read", client_id=self._client_id, error=error.str())
            return
        self._set_reachable(True)
        request_id = None
        began_us = 0
        try:
            headers = ResultHeaders.decode(headers_of(message))
            is_traced = self._traces is not None and is_sampled(headers.traceparent)
            if self._traces is not None and is_traced:
                began_us = self._traces.tracer.clock.wall_us()
            if headers.gateway_id != self._gateway_id:
                self._ledger.foreign(_OTHER_GATEWAY)
                return
            request_id = headers.request_id
            result = codec.decode(RankingResult, message.value())
            if result.request_id != request_id:
                raise DecodeError(DecodeReason.INVALID_FIELD, f"header and body name {request_id}, {result.request_id}")
        except DecodeError as problem:
            self._ledger.answered_undecodable(request_id)
            self._write_dead_letter(message, problem)
            return
        self._ledger.answered(result)
        if self._traces is not None and is_traced:
            place = MessagePlace(self._results_topic, self.results_partition, message.offset())
            self._traces.received(headers, place, began_us)

    def _write_dead_letter(self, message: Message, problem: DecodeError) -> None:
        _log.warning(
            "a result could not be decoded", client_id=self._client_id, reason=problem.reason, detail=str(problem)
        )
        self._dead_letters.write(message, problem.reason.value, str(problem))

    def _on_ranking_report(
        self, entry: PendingRequest, deadline_us: int, error: KafkaError | None, message: Message
    ) -> None:
        if error is None:
            self._ledger.acknowledged(entry)
            self._set_reachable(True)
        elif error.code() in _FINAL_ERRORS:
            _log.error("the broker refused a ranking request", request_id=entry.request_id, error=error.str())
        else:
            key, value = message.key(), message.value()
            if key is not None and value is not None:
                is_sent_again = self._ledger.not_delivered(entry, lambda: self.send(entry, key, value, deadline_us))
                if is_sent_again:
                    return  # Its span ends with a later report.
        if entry.trace is not None:
            entry.trace.send.reported(delivery_report(error, message))

    def _send_again(self, entry: PendingRequest) -> None:
        if entry.send_again is None:
            return
        send_again, entry.send_again = entry.send_again, None
        try:
            send_again()
        except ClientError:
            # The producer's queue is full: retry after the back-off.
            self._ledger.not_delivered(entry, send_again)

    def _on_error(self, error: KafkaError) -> None:
        if error.code() == KafkaError._ALL_BROKERS_DOWN:
            self._set_reachable(False)

    def _set_reachable(self, reachable: bool) -> None:
        if reachable is not self._reachable:
            self._reachable = reachable
            self._metrics.broker_reachable.set(1 if reachable else 0)
