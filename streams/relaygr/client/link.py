"""A gateway's link to Kafka: its producers, its partition of the results topic, and one I/O thread.

`GatewayLink` sends and receives messages; the ledger keeps the requests. `connect` finds the end of the results
partition before it returns, and the link reads from there. So the link misses no answer to a later request,
and reads no answers to requests of an earlier process with the same gateway id.

When the files of `security` change, the session's thread makes new clients, and the I/O thread takes them over: the old
ones keep the certificates and passwords that they read.

In each turn the thread fires timers, waits for a result with `poll`, takes further results with `consume`
without waiting, and serves delivery reports. A new request cannot wake the thread, so it waits `MAX_WAIT_MS` at
most: 200 turns a second when idle.
"""

from __future__ import annotations

import functools
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from confluent_kafka import Consumer, KafkaError, KafkaException, Message, Producer, TopicPartition
from confluent_kafka.admin import ClusterMetadata

from relaygr.client.ledger import Ledger
from relaygr.client.metrics import GatewayMetrics
from relaygr.client.outcome import ClientError, MessageRefused, NotRunning
from relaygr.client.pending import PendingRequest
from relaygr.client.publisher import EventPublisher, client_errors, delivery_report
from relaygr.cluster.admin_process import AdminProcess
from relaygr.cluster.rights import Role, require_rights
from relaygr.cluster.watch import ClusterWatch
from relaygr.kafka.client_errors import LimitedLog, is_final
from relaygr.kafka.clients import QUICK_RECONNECT, ProducerKind, fetch_metadata, read_watermarks
from relaygr.kafka.message_headers import headers_of
from relaygr.kafka.session import KafkaSession
from relaygr.kafka.settings import SecurityProtocol
from relaygr.runtime.errors import RelayError
from relaygr.runtime.loggers import Logger
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
_LAST_REPORTS_S: Final = 5.0
"""Longer than a ranking request may wait in its producer."""

_log = Logger(__name__)


@dataclass(frozen=True, slots=True)
class _Clients:
    """The clients that read the files of `security` at the same time."""

    consumer: Consumer
    producer: Producer


class GatewayLink:
    """Sends ranking requests, reads results into the ledger, and polls the event publisher."""

    def __init__(
        self,
        session: KafkaSession,
        gateway_id: str,
        results_partition: int | None,
        ledger: Ledger,
        metrics: GatewayMetrics,
        traces: ClientTraces | None = None,
    ) -> None:
        """`session`: the link's own, which `disconnect` closes."""
        self._session = session
        self._kafka = kafka = session.kafka
        self._traces = traces
        self._gateway_id = gateway_id
        self._client_id = session.name
        self._wanted_partition = results_partition
        self._ledger = ledger
        self._metrics = metrics
        self._ranking_topic = kafka.topic(Topic.RANKING)
        self._results_topic = kafka.topic(Topic.RESULTS)
        self.events = EventPublisher(kafka, self._client_id, metrics=metrics, session=session)
        session.on_new_files(self._renew)
        self.results_partition = -1
        self._producer: Producer | None = None
        self._consumer: Consumer | None = None
        # Other programs write results, too, any number of which may be bad.
        self._limited_log = LimitedLog()
        self._reachable = False
        self._watch = ClusterWatch(self._client_id, self._ask_topic, [self._ranking_topic], None)
        self._next_offset = 0
        self._fresh: _Clients | None = None
        self._retired: list[_Clients] = []
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name=self._client_id, daemon=True)

    def connect(self) -> None:
        """Checks the cluster, finds the end of the results partition, connects, starts the thread.

        Raises RelayError if the cluster cannot be reached, a topic is missing, or the results partition does
        not exist, after it has closed the clients that it opened.
        """
        self._session.follow_files()
        try:
            self._make_clients()
            self._position()
            assert self._producer is not None
            fetch_metadata(self._producer, self._ranking_topic, self._kafka.connect_timeout_s)
            self.events.start()
        except BaseException:
            self._session.close()
            self._close_clients(0.0)
            raise
        self._set_reachable(True)
        self._watch.ask(self._ranking_topic)
        self._watch.start()
        self._thread.start()

    def disconnect(self, timeout_s: float) -> None:
        """Stops the thread, waits at most `timeout_s` for published messages to be delivered, closes the clients.

        The I/O thread itself must not call it.
        """
        self._stop.set()
        self._watch.stop(0)
        if self._thread.is_alive():
            self._thread.join(timeout=_JOIN_TIMEOUT_S)
            if self._thread.is_alive():
                # Closing a consumer while a thread polls it would crash the process.
                _log.error("a callback does not return, so the gateway's clients stay open", client_id=self._client_id)
                self._session.close()
                return
        # Its thread closes the clients that it is making, which may take longer than this.
        self._session.close()
        self._close_clients(timeout_s)
        self._metrics.note_broker(self, misses_it=False)

    @property
    def refusal(self) -> str | None:
        """What Kafka refuses this gateway, with the remedy: its certificate or user, or a right. None if nothing."""
        cause = self._session.rejection
        if cause is not None:
            return f"{cause}: renew the files of `security`, or the user's password"
        return self._session.refusal

    @property
    def silence(self) -> str | None:
        """A sentence while Kafka does not answer, or has not answered yet."""
        return self._watch.silence

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
        with client_errors(self._ranking_topic, producer):
            try:
                producer.produce(
                    self._ranking_topic, value=message, key=key, headers=headers.encode(), on_delivery=report
                )
            except KafkaException as error:
                if is_final(error.args[0]):
                    raise
                # The metadata of a broker that has just started may lack the topic for a moment.
                self._ledger.not_delivered(entry, lambda: self.send(entry, key, message, deadline_us))

    def _make_clients(self) -> None:
        """Makes all clients at once, and checks the cluster meanwhile: with SASL/OAUTHBEARER each takes a second."""
        makers = (self._make_consumer, self._make_producer, self.events.make)
        with ThreadPoolExecutor(len(makers), f"{self._client_id}-connect") as pool:
            made = [pool.submit(maker) for maker in makers]
            # Its errors name the cause best.
            self._check_topics()
            for each in made:
                each.result()

    def _make_consumer(self) -> None:
        self._consumer = self._new_consumer()

    def _make_producer(self) -> None:
        self._producer = self._new_producer()

    def _new_consumer(self) -> Consumer:
        options = {**QUICK_RECONNECT, **self._session.reporting}
        return self._session.assigned_consumer(self._client_id, self._results_topic, self._on_error, options)

    def _new_producer(self) -> Producer:
        return self._session.producer(ProducerKind.LATENCY, self._client_id, self._on_error)

    def _ask_topic(self, topic: str, timeout: float) -> ClusterMetadata:
        """Asks through the connections of the ranking requests. Raises KafkaException."""
        producer = self._producer  # Another thread may set it to None.
        if producer is None:
            raise KafkaException(KafkaError(KafkaError._DESTROY, "the gateway's link is closed"))
        metadata: ClusterMetadata = producer.list_topics(topic, timeout=timeout)
        return metadata

    def _check_topics(self) -> None:
        with AdminProcess(self._kafka, f"{self._client_id}-rights") as admin:
            # Without authentication a cluster rarely has ACLs, and the check starts a child process.
            has_users = self._kafka.security.protocol is not SecurityProtocol.PLAINTEXT
            if has_users:
                admin.start(require_rights.__module__)
            known = self._session.require_broker().topics
            if has_users:
                require_rights(self._kafka, Role.GATEWAY, admin)
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
        assert self._consumer is not None
        self._next_offset = self._end_of_results(self._consumer)
        self._consumer.assign([TopicPartition(self._results_topic, self.results_partition, self._next_offset)])

    def _end_of_results(self, consumer: Consumer) -> int:
        """The next offset of our partition. It retries while the partition has no leader."""
        place = TopicPartition(self._results_topic, self.results_partition)
        try:
            return read_watermarks(consumer, place, self._kafka.connect_timeout_s)[1]
        except KafkaException as error:
            raise RelayError(
                f"the end of {self._results_topic} [{self.results_partition}] could not be read within "
                f"{self._kafka.connect_timeout_s:g} s: {error.args[0].str()}. Is its leader up?"
            ) from error

    def _close_clients(self, timeout_s: float) -> None:
        self.events.close(timeout_s)
        self._session.dead_letters.flush(timeout_s)
        if self._producer is not None:
            # No caller waits for these requests any more.
            self._producer.purge()
            self._producer.flush(0.1)
            self._producer = None
        if self._consumer is not None:
            self._consumer.close()
            self._consumer = None
        for old in self._retired:
            old.producer.purge()
            old.producer.flush(0.1)

    # -- new files ---------------------------------------------------------------------------------

    def _renew(self) -> None:
        """Runs on the session's thread, because new clients take time to connect. Raises RelayError, KafkaException."""
        if self._stop.is_set() or not self._thread.is_alive():
            raise RelayError("the gateway is not connected")
        self._hand_over(self._connected())
        # Kafka may have refused the clients before until they were gone.
        self._session.accepted()

    def _connected(self) -> _Clients:
        """New clients, which Kafka accepts. Raises RelayError and KafkaException."""
        consumer = self._new_consumer()
        try:
            self._end_of_results(consumer)
            producer = self._new_producer()
            fetch_metadata(producer, self._ranking_topic, self._kafka.connect_timeout_s)
            return _Clients(consumer, producer)
        except BaseException:
            consumer.close()
            raise

    def _hand_over(self, fresh: _Clients) -> None:
        """Lets the I/O thread take the clients, and drops those before when the last reports of theirs have come.

        If the I/O thread ends without taking them, this thread closes them.
        """
        self._fresh = fresh
        while self._fresh is not None and not self._stop.wait(_PAUSE_AFTER_ERROR_S):
            pass
        if self._stop.is_set():
            self._thread.join()
            if self._fresh is not None:
                self._fresh.consumer.close()
                return
        for old in self._retired:
            old.consumer.close()
        ends_s = time.monotonic() + _LAST_REPORTS_S
        while not self._stop.wait(_JOIN_TIMEOUT_S):
            if time.monotonic() > ends_s or not any(len(old.producer) for old in self._retired):
                self._retired = []
                return

    def _take_over(self, fresh: _Clients) -> None:
        assert self._consumer is not None and self._producer is not None
        fresh.consumer.assign([TopicPartition(self._results_topic, self.results_partition, self._next_offset)])
        self._retired = [_Clients(self._consumer, self._producer)]
        self._consumer, self._producer, self._fresh = fresh.consumer, fresh.producer, None
        self._session.accepted()
        _log.info("new clients read the new files of `security`", client_id=self._client_id)

    # -- the I/O thread ----------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._stop.is_set():
            try:
                self._turn()
            except Exception as error:
                self._limited_log.error(
                    "the gateway's I/O thread continues after an error",
                    type(error).__name__,
                    client_id=self._client_id,
                    exc_info=True,
                )
                time.sleep(_PAUSE_AFTER_ERROR_S)

    def _turn(self) -> None:
        if self._fresh is not None:
            self._take_over(self._fresh)
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
        self._session.dead_letters.poll()
        for old in self._retired:
            old.producer.poll(0)

    def _take(self, message: Message) -> None:
        error = message.error()
        if error is not None:
            self._session.note(self._results_topic, error)
            self._limited_log.warning(
                "results cannot be read", error.code(), client_id=self._client_id, error=error.str()
            )
            return
        self._set_reachable(True)
        self._session.accepted()
        offset = message.offset()
        assert offset is not None  # Only an error has none.
        self._next_offset = offset + 1
        request_id = None
        began_us = 0
        try:
            headers = ResultHeaders.decode(headers_of(message))
            is_traced = self._traces is not None and is_sampled(headers.traceparent)
            if self._traces is not None and is_traced:
                began_us = self._traces.tracer.clock.wall_us()
            if headers.gateway_id != self._gateway_id:
                self._ledger.foreign()
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
        self._limited_log.warning(
            "a result could not be decoded", problem.reason, client_id=self._client_id, reason=problem.reason,
            detail=str(problem),
        )  # fmt: skip
        self._session.dead_letters.write(message, problem.reason.value, str(problem))

    def _on_ranking_report(
        self, entry: PendingRequest, deadline_us: int, error: KafkaError | None, message: Message
    ) -> None:
        if error is None:
            self._ledger.acknowledged(entry)
            self._set_reachable(True)
            self._session.accepted()
        elif is_final(error):
            self._ledger.refused(entry)
        else:
            key, value = message.key(), message.value()
            if key is not None and value is not None:
                is_sent_again = self._ledger.not_delivered(entry, lambda: self.send(entry, key, value, deadline_us))
                if is_sent_again:
                    return  # Its span ends with a later report.
        if entry.trace is not None:
            entry.trace.send.reported(delivery_report(self._ranking_topic, error, message))

    def _send_again(self, entry: PendingRequest) -> None:
        if entry.send_again is None:
            return
        send_again, entry.send_again = entry.send_again, None
        try:
            send_again()
        except MessageRefused:
            self._ledger.refused(entry)
        except ClientError:
            # The producer's queue is full: retry after the back-off.
            self._ledger.not_delivered(entry, send_again)

    def _on_error(self, error: KafkaError) -> None:
        # Kafka may go on to refuse a client that is being replaced.
        if error.code() == KafkaError._ALL_BROKERS_DOWN and not self._retired:
            self._set_reachable(False)

    def _set_reachable(self, reachable: bool) -> None:
        if reachable is not self._reachable:
            self._reachable = reachable
            self._metrics.note_broker(self, misses_it=not reachable)
