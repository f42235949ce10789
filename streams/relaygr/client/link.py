"""A gateway's link to Kafka: its producers, its partition of the results topic, and one I/O thread.

`GatewayLink` moves bytes and keeps no account of requests: that is the ledger's. It knows the end of the
results partition before `connect` returns, so that no answer to a later request can be missed, and reads
from there: answers to an earlier incarnation of the gateway are none of ours.

The thread's turn: fire timers, wait for a result (`poll`, woken by the first one), take what else is there
(`consume` with no wait), run delivery reports. A new request can not wake it, so it sleeps `MAX_WAIT_MS`
at most: 200 turns a second when idle.
"""

from __future__ import annotations

import functools
import threading
import time
from typing import Final

import structlog
from confluent_kafka import Consumer, KafkaError, KafkaException, Message, Producer, TopicPartition

from relaygr.client.ledger import Ledger
from relaygr.client.metrics import GatewayMetrics
from relaygr.client.outcome import ClientError, NotRunning
from relaygr.client.pending import PendingRequest
from relaygr.client.publisher import EventPublisher, produce, warm_up
from relaygr.kafka.clients import ProducerKind, make_assigned_consumer, make_producer, require_broker
from relaygr.kafka.dead_letters import DeadLetterWriter
from relaygr.kafka.message_headers import headers_of
from relaygr.kafka.settings import KafkaSettings
from relaygr.runtime.errors import RelayError
from relaygr.schemas import codec
from relaygr.schemas.codec import DecodeError, DecodeReason
from relaygr.schemas.headers import RankingHeaders, ResultHeaders
from relaygr.schemas.messages import RankingResult
from relaygr.schemas.partitioner import partition_for
from relaygr.schemas.topics import Topic

MAX_WAIT_MS: Final = 5
_BATCH: Final = 64
# After an error of ours the thread goes on, but not in a tight loop.
_PAUSE_AFTER_ERROR_S: Final = 0.01
_JOIN_TIMEOUT_S: Final = 1.0
_OTHER_GATEWAY: Final = "other_gateway"
# Sending these again can not help.
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
    ) -> None:
        self._kafka = kafka
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
        self._dead_letters: DeadLetterWriter | None = None
        self._reachable = False
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name=self._client_id, daemon=True)

    def connect(self) -> None:
        """Checks the cluster, finds the end of the results partition, connects, starts the thread.

        Raises RelayError if the cluster can not be reached, a topic is missing, or the results partition
        does not exist. Nothing stays open then.
        """
        try:
            self._check_topics()
            self._position()
            self._producer = make_producer(self._kafka, ProducerKind.LATENCY, self._client_id, self._on_error)
            warm_up(self._producer, self._ranking_topic, self._kafka.connect_timeout_s)
            self.events.start()
        except BaseException:
            self._close_clients(0.0)
            raise
        self._set_reachable(True)
        self._thread.start()

    def disconnect(self, timeout_s: float) -> None:
        """Stops the thread, delivers what was published within `timeout_s`, closes the clients.

        Not from the I/O thread itself.
        """
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join(timeout=_JOIN_TIMEOUT_S)
            if self._thread.is_alive():
                # Closing a consumer under a thread that polls it would crash the process.
                _log.error("a callback does not return: the gateway's clients stay open", client_id=self._client_id)
                return
        self._close_clients(timeout_s)

    def is_io_thread(self) -> bool:
        """Whether the caller runs in the I/O thread: inside a callback."""
        return threading.current_thread() is self._thread

    def send(self, entry: PendingRequest, key: bytes, message: bytes, deadline_us: int) -> None:
        """Hands an encoded ranking request to the producer. Raises NotRunning, QueueFull, MessageRefused."""
        producer = self._producer  # Another thread may be closing it.
        if producer is None:
            raise NotRunning("the gateway's link is closed")
        headers = RankingHeaders(
            entry.request_id, self._gateway_id, self._results_topic, self.results_partition, deadline_us
        )
        report = functools.partial(self._on_ranking_report, entry, deadline_us)
        produce(producer, self._ranking_topic, key, message, headers.encode(), report)

    def _check_topics(self) -> None:
        known = require_broker(self._kafka).topics
        for topic in (Topic.RETRIEVAL, Topic.RANKING, Topic.RESULTS, Topic.HISTORY):
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
                f"take one from 0 to {count - 1}, or leave it out"
            )
        self.results_partition = partition

    def _position(self) -> None:
        self._consumer = make_assigned_consumer(self._kafka, self._client_id, self._on_error)
        end = self._end_of_results(self._consumer)
        self._consumer.assign([TopicPartition(self._results_topic, self.results_partition, end)])

    def _end_of_results(self, consumer: Consumer) -> int:
        """The next offset of our partition. A topic just made, or a leader that moves, takes a few tries."""
        place = TopicPartition(self._results_topic, self.results_partition)
        ends_s = time.monotonic() + self._kafka.connect_timeout_s
        while True:
            try:
                return consumer.get_watermark_offsets(place, timeout=max(0.01, ends_s - time.monotonic()))[1]
            except KafkaException as error:
                if time.monotonic() >= ends_s:
                    raise RelayError(
                        f"the end of {self._results_topic} [{self.results_partition}] is not known within "
                        f"{self._kafka.connect_timeout_s:g} s: {error.args[0].str()}. Is its leader up?"
                    ) from error
            time.sleep(_PAUSE_AFTER_ERROR_S)

    def _close_clients(self, timeout_s: float) -> None:
        self.events.close(timeout_s)
        if self._dead_letters is not None:
            self._dead_letters.flush(timeout_s)
            self._dead_letters = None
        if self._producer is not None:
            # Nobody waits for these requests any more.
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
                _log.exception("the gateway's I/O thread goes on after an error", client_id=self._client_id)
                time.sleep(_PAUSE_AFTER_ERROR_S)

    def _turn(self) -> None:
        assert self._consumer is not None and self._producer is not None
        for entry in self._ledger.fire():
            self._send_again(entry)
        wait_us = self._ledger.us_until_due(MAX_WAIT_MS * 1000)
        # librdkafka cuts to whole milliseconds, and 0 would spin: wait for the next whole one.
        message = self._consumer.poll(-(-wait_us // 1000) / 1000)
        if message is not None:
            self._take(message)
            for message in self._consumer.consume(_BATCH - 1, 0):
                self._take(message)
        self._producer.poll(0)
        self.events.poll()
        if self._dead_letters is not None:
            self._dead_letters.poll()

    def _take(self, message: Message) -> None:
        error = message.error()
        if error is not None:
            _log.warning("reading results", client_id=self._client_id, error=error.str())
            return
        self._set_reachable(True)
        request_id = None
        try:
            headers = ResultHeaders.decode(headers_of(message))
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

    def _write_dead_letter(self, message: Message, problem: DecodeError) -> None:
        if self._dead_letters is None:
            # Most gateways never need one.
            self._dead_letters = DeadLetterWriter(self._kafka, self._client_id)
        _log.warning("undecodable result", client_id=self._client_id, reason=problem.reason, detail=str(problem))
        self._dead_letters.write(message, problem.reason.value, str(problem))

    def _on_ranking_report(
        self, entry: PendingRequest, deadline_us: int, error: KafkaError | None, message: Message
    ) -> None:
        if error is None:
            self._ledger.acknowledged(entry)
            self._set_reachable(True)
            return
        if error.code() in _FINAL_ERRORS:
            _log.error("a ranking request is refused", request_id=entry.request_id, error=error.str())
            return
        key, value = message.key(), message.value()
        if key is not None and value is not None:
            self._ledger.not_delivered(entry, lambda: self.send(entry, key, value, deadline_us))

    def _send_again(self, entry: PendingRequest) -> None:
        if entry.send_again is None:
            return
        send_again, entry.send_again = entry.send_again, None
        try:
            send_again()
        except ClientError:
            # The producer's queue is full: the same again, after the back-off.
            self._ledger.not_delivered(entry, send_again)

    def _on_error(self, error: KafkaError) -> None:
        if error.code() == KafkaError._ALL_BROKERS_DOWN:
            self._set_reachable(False)

    def _set_reachable(self, reachable: bool) -> None:
        if reachable is not self._reachable:
            self._reachable = reachable
            self._metrics.broker_reachable.set(1 if reachable else 0)
