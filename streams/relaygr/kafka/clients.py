"""Makes every Kafka client of the system. All client settings are here, with their reasons.

`make_producer`, `make_group_consumer`, `make_assigned_consumer` and `make_admin` build confluent-kafka
clients (librdkafka). Making a client does no I/O, but with SASL/OAUTHBEARER it takes a second, or ten without a valid
token: never make one on a thread that must not wait. Each factory raises RelayError for settings that no client can
use. `require_broker` asks the cluster for its metadata, and raises a RelayError that names the address and the cause if
there is no answer.

Each factory takes `options`: librdkafka settings that override ours for one client. Only one thread may poll a
client; of a `DurableProducer` any thread may.
"""

from __future__ import annotations

import enum
import re
import socket
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from functools import partial
from typing import Any, Final, TypeVar

from confluent_kafka import Consumer, KafkaError, KafkaException, Message, Producer, ShareConsumer, TopicPartition
from confluent_kafka.admin import AdminClient, ClusterMetadata

from relaygr.kafka.client_errors import PERMANENT, ClientErrors, ErrorCallback
from relaygr.kafka.security import librdkafka_security
from relaygr.kafka.settings import Acks, GroupProtocol, KafkaSettings, SecurityProtocol
from relaygr.runtime.errors import RelayError
from relaygr.schemas.topics import CATALOGUE

C = TypeVar("C")

Options = Mapping[str, Any]
NoteError = Callable[[str, KafkaError], None]
"""Gets the topic and the error of a message."""

PARTITIONER: Final = "murmur2_random"
"""Java's hash. librdkafka's default gives the same partition for 8.5 % of keys only."""
ASSIGNOR: Final = "range"
"""The assignor of all groups but the workers', whose assignor the setting `affinity` gives."""
LARGEST_MESSAGE_BYTES: Final = max(spec.max_message_bytes for spec in CATALOGUE.values())
LARGEST_QUEUE_BYTES: Final = 16 * 1024 * 1024
"""Bound on a client's own queue, sent or received: three messages of the largest size."""
MOST_QUEUED: Final = 10_000
"""Bound on the messages that wait in a producer."""
DURABLE_S: Final = 30
"""How long a durable message may wait for its delivery."""
SILENCE_MS: Final = 3_000
"""How long a client waits for the answer to a request before it takes the connection for dead and makes another one.

librdkafka's default is a minute. For so long nothing was answered after a firewall or a router had forgotten the
connections, which then stay open and pass nothing. A fetch waits as long after its own wait, and a request to join a
group has a time of its own (`_REBALANCE_MS`).
"""
_SETUP_MS: Final = 5_000
"""How long a connection may take until it can be used: TCP, TLS and SASL. librdkafka's default is half a minute."""
_PREINFER_MS: Final = 5_000
_DURABLE_SILENCE_MS: Final = DURABLE_S * 1000 // 3
"""Longer, so that a broker may acknowledge slowly: of a message that is sent again, the next answer is as slow."""
_ADMIN_SILENCE_MS: Final = 10_000
"""Brokers may take seconds to list groups or settings, and librdkafka does not repeat such a request."""


class ProducerKind(enum.StrEnum):
    """The purpose of a producer, which decides between latency and safety."""

    LATENCY = "latency"
    """Ranking requests and results: they are useless when late, so delivery is given up after half a second."""
    PREINFER = "preinfer"
    """Pre-infer jobs: they are useless after the ranking request, which is seconds away at most."""
    DURABLE = "durable"
    """Retrieval events, histories, dead letters: no message is lost or written twice. `relaygr.kafka.durable` replaces
    the client after a fatal error."""


_COMMON: Final[dict[str, Any]] = {
    # For a connection without requests: Linux asks after two hours.
    "socket.keepalive.enable": True,
    "socket.timeout.ms": SILENCE_MS,
    "socket.connection.setup.timeout.ms": _SETUP_MS,
    # Small messages are sent at once, without waiting for the previous acknowledgement.
    "socket.nagle.disable": True,
    # The first reconnect comes soon; later ones do not overload the broker.
    "reconnect.backoff.ms": 50,
    "reconnect.backoff.max.ms": 1000,
    # With sparse connections, librdkafka forgets the back-off while no broker is connected: a gateway made 190
    # connections a second to a port that accepts and closes, and makes 20 now.
    "enable.sparse.connections": False,
    # After all connections were lost, the first success comes after 7 to 245 ms instead of a second.
    "topic.metadata.refresh.interval.ms": 200,
    # Only `relaygr topics create` creates topics, with their retention and partition counts.
    "allow.auto.create.topics": False,
    # A broker that closes an idle connection is not an error.
    "log.connection.close": False,
    # `error_cb` reports errors; librdkafka would print each as well, up to 40 a second.
    "log_level": 2,
}

_PRODUCER: Final[dict[str, Any]] = {
    "partitioner": PARTITIONER,
    # librdkafka's default of 1 MB would refuse long histories.
    "message.max.bytes": LARGEST_MESSAGE_BYTES,
    # Bounds the messages that wait while the broker is away.
    "queue.buffering.max.messages": MOST_QUEUED,
    "queue.buffering.max.kbytes": LARGEST_QUEUE_BYTES // 1024,
    "retry.backoff.ms": 20,
    # An unknown topic is reported at once; by default librdkafka waits 30 s for it to appear.
    "topic.metadata.propagation.max.ms": 0,
}

QUICK_RECONNECT: Final[dict[str, Any]] = {
    # For clients on the path of a ranking request: a connection lost for 150 ms must not cost a budget of 300 ms.
    # librdkafka tries again after these times with a jitter of -25 to +50 %, and doubles the time for each failure.
    "reconnect.backoff.ms": 10,
    "reconnect.backoff.max.ms": 100,
    # With no connection left, librdkafka forgets all brokers, and needs their metadata before it sends again. Measured
    # with reconnects every 50 ms from the loss of 150 ms to the result: 170 to 210 ms, and 310 to 600 ms with a refresh
    # every 200 ms. It costs 20 small requests a second for each client.
    "topic.metadata.refresh.interval.ms": 50,
}

_BY_KIND: Final[dict[ProducerKind, dict[str, Any]]] = {
    # librdkafka itself sends a message again until its time-out. While two produce requests are under way, further
    # messages are collected for the next one. So the slower a broker answers, the larger are the batches: the broker of
    # two cores carries 6,000 requests a second and their results, instead of 3,500.
    ProducerKind.LATENCY: {"linger.ms": 0, "max.in.flight": 2, "message.timeout.ms": 500, **QUICK_RECONNECT},
    # A job is not sent again because its acknowledgement is late: it would be in the log twice.
    ProducerKind.PREINFER: {
        "linger.ms": 0,
        "message.timeout.ms": _PREINFER_MS,
        "socket.timeout.ms": _PREINFER_MS,
    },
    # With a shorter time-out an idempotent producer left duplicates in the log after a broker died.
    ProducerKind.DURABLE: {
        "linger.ms": 0,
        "acks": "all",
        "enable.idempotence": True,
        "message.timeout.ms": DURABLE_S * 1000,
        "socket.timeout.ms": _DURABLE_SILENCE_MS,
    },
}

_CONSUMER: Final[dict[str, Any]] = {
    # With `latest`, messages that a worker read before its first commit would be lost if it died.
    "auto.offset.reset": "earliest",
    "fetch.min.bytes": 1,
    # How long a consumer sleeps when its queue is full; the default is a second.
    "fetch.queue.backoff.ms": 5,
    "fetch.error.backoff.ms": 50,
    # Prefetched messages take memory, and are fetched again after every pause.
    "queued.min.messages": 1000,
    "queued.max.messages.kbytes": LARGEST_QUEUE_BYTES // 1024,
    # Leaves room for a message of the largest size.
    "fetch.max.bytes": max(LARGEST_MESSAGE_BYTES, 16 * 1024 * 1024),
    # A job or a request is useless once a transaction ends.
    "isolation.level": "read_uncommitted",
}

READ_COMMITTED: Final[dict[str, Any]] = {"isolation.level": "read_committed"}
"""For readers of histories and behaviours, which pipelines may write in transactions."""

_GROUP: Final[dict[str, Any]] = {
    **QUICK_RECONNECT,
    # The consumer loop stores offsets itself: the watermark of finished messages.
    "enable.auto.offset.store": False,
    # Not every offset holds a message, so offsets alone do not show that everything was read.
    "enable.partition.eof": True,
    "auto.commit.interval.ms": 1000,
}

_SHARE: Final[dict[str, Any]] = {
    "fetch.min.bytes": 1,
    "fetch.max.bytes": _CONSUMER["fetch.max.bytes"],
    "share.acknowledgement.mode": "explicit",
    # Brokers hand out whole batches, however many records these have.
    "max.poll.records": 1,
}
ONE_A_BATCH: Final[dict[str, Any]] = {"batch.num.messages": 1}
"""For the producer of a topic that a share group reads: each record can then go to another member."""

_ASKING_FETCH_WAIT_MS: Final = 50
_ASSIGNMENT_MS: Final = 500

_REBALANCE_MS: Final = 30_000
"""How long a rebalance may wait for a member, and how long a member waits for the answer to its request to join.

librdkafka's default is five minutes. For so long a member was without partitions after a broker had been restarted,
since no answer came. No member polls less often: the watchdogs end a process whose poll thread stands still for 20 s.
"""

_ASSIGNED: Final[dict[str, Any]] = {"enable.auto.offset.store": False, "enable.auto.commit": False}

# If the cause is known, wait for this share of the time-out only: a broker that starts up needs no longer.
_SHARE_WITH_A_CAUSE: Final = 0.5
_METADATA_TRY_S: Final = 0.5
_NO_BROKER_S: Final = 0.1
_REACHED_S: Final = 2.0
_MOST_NAMED: Final = 3
_LEADERS_S: Final = 2.0
_LEADER_PAUSE_S: Final = 0.05
# A wrong protocol is reported as a lost connection; only the text names the cause.
_ABOUT_SECURITY: Final = re.compile(r"SSL|SASL|security\.protocol")


def make_producer(
    kafka: KafkaSettings,
    kind: ProducerKind,
    client_id: str,
    on_error: ErrorCallback | None = None,
    options: Options | None = None,
    note_error: NoteError | None = None,
) -> Producer:
    """A producer. The caller polls it, and flushes it with a time-out before it exits.

    `note_error` gets the error of each message that is not delivered, before the message's own callback.
    """
    acks = {"acks": "1" if kafka.request_acks is Acks.LEADER else "all"}
    config = _config(kafka, client_id, on_error, _PRODUCER, acks, _BY_KIND[kind], options)
    return _made(Producer if note_error is None else partial(_NotingProducer, note_error), config)


_produce: Final[Callable[..., None]] = Producer.produce


class _NotingProducer(Producer):
    """See `make_producer`."""

    def __init__(self, note_error: NoteError, config: dict[str, Any]) -> None:
        super().__init__(config)
        self._note_error = note_error

    def produce(self, topic: str, *args: Any, on_delivery: Any = None, **kwargs: Any) -> None:
        """See `Producer.produce`."""

        def reported(error: KafkaError | None, message: Message) -> None:
            if error is not None:
                self._note_error(topic, error)
            if on_delivery is not None:
                on_delivery(error, message)

        try:
            _produce(self, topic, *args, on_delivery=reported, **kwargs)
        except KafkaException as exception:
            self._note_error(topic, exception.args[0])
            raise


def make_group_consumer(
    kafka: KafkaSettings,
    group: str,
    client_id: str,
    instance_id: str | None = None,
    on_error: ErrorCallback | None = None,
    options: Options | None = None,
) -> Consumer:
    """A consumer in `group`, with static membership if `instance_id` is given.

    Raises RelayError for an assignor other than that of `affinity`: it could split a user's partitions between workers.
    """
    assignor = kafka.affinity.assignor if group == kafka.workers_group else ASSIGNOR
    membership = _membership(kafka, assignor)
    config = _config(kafka, client_id, on_error, _consumer(asking_fetch_wait_ms(kafka)), _GROUP, membership, options)
    config["group.id"] = group
    if instance_id is not None:
        config["group.instance.id"] = instance_id
    for name in ("partition.assignment.strategy", "group.remote.assignor"):
        if config.get(name, assignor) != assignor:
            raise RelayError(
                f"{name}={config[name]} could give a user's pre-infer jobs and ranking requests to different "
                f"workers: leave it at {assignor}, or set `affinity`"
            )
    return _made(Consumer, config)


def make_share_consumer(
    kafka: KafkaSettings, group: str, client_id: str, on_statistics: Callable[[str], None]
) -> ShareConsumer:
    """A member of a share group, which gets one record at a time if records were written one to a batch.

    `on_statistics` gets librdkafka's statistics, in `poll`, since only they have the member's assignment.
    """
    config = _config(kafka, client_id, None, QUICK_RECONNECT, _SHARE)
    # This kind of consumer refuses the setting; it creates no topics.
    del config["allow.auto.create.topics"]
    config |= {"statistics.interval.ms": _ASSIGNMENT_MS, "stats_cb": on_statistics}
    return _made(ShareConsumer, {**config, "group.id": group, "fetch.wait.max.ms": asking_fetch_wait_ms(kafka)})


def make_assigned_consumer(
    kafka: KafkaSettings, client_id: str, on_error: ErrorCallback | None = None, options: Options | None = None
) -> Consumer:
    """A consumer for `assign()`. It joins no group and commits no offsets; the caller gives each partition's offset."""
    config = _config(kafka, client_id, on_error, _consumer(kafka.fetch_wait_max_ms), _ASSIGNED, options)
    config["group.id"] = kafka.unjoined_group
    return _made(Consumer, config)


def learn_leaders(consumer: Consumer, topics: Iterable[str]) -> None:
    """Asks for topics before their partitions are assigned. Waits `_LEADERS_S` at most.

    librdkafka looks for the leader of an assigned partition only a second later if it does not know the topic yet.
    """
    with suppress(KafkaException):  # The broker is away: librdkafka looks again by itself.
        for topic in topics:
            consumer.list_topics(topic, timeout=_LEADERS_S)


def read_watermarks(consumer: Consumer, place: TopicPartition, timeout_s: float) -> tuple[int, int]:
    """The first and the next offset of a partition. It retries while the partition has no leader.

    Raises KafkaException with the last error in time.
    """
    ends_s = time.monotonic() + timeout_s
    while True:
        try:
            return consumer.get_watermark_offsets(place, timeout=max(0.01, ends_s - time.monotonic()))
        except KafkaException:
            if time.monotonic() >= ends_s:
                raise
        time.sleep(_LEADER_PAUSE_S)


def asking_fetch_wait_ms(kafka: KafkaSettings) -> int:
    """The longest wait of a fetch of a consumer that also asks for offsets, or pauses and resumes partitions.

    A broker answers the requests of a connection in turn, so such a request waits until the fetch before it ends. A
    resumed partition waits for that, too.
    """
    return min(kafka.fetch_wait_max_ms, _ASKING_FETCH_WAIT_MS)


def make_admin(
    kafka: KafkaSettings, client_id: str, on_error: ErrorCallback | None = None, options: Options | None = None
) -> AdminClient:
    """An admin client. Each of its calls takes a time-out. `options`: librdkafka's, which override ours.

    No request takes longer than `socket.timeout.ms`, whatever time-out the call is given.
    """
    patient = {"socket.timeout.ms": _ADMIN_SILENCE_MS}
    return _made(AdminClient, _config(kafka, client_id, on_error, patient, options))


def fetch_metadata(producer: Producer, topic: str, timeout_s: float) -> None:
    """Fetches the topic's metadata, so that its first message need not wait for it. Raises RelayError in time."""
    try:
        producer.list_topics(topic, timeout=timeout_s)
    except KafkaException as error:
        raise RelayError(f"no metadata of {topic} within {timeout_s:g} s: {error.args[0].str()}") from error


def await_metadata(admin: AdminClient, timeout_s: float, topic: str | None = None) -> ClusterMetadata:
    """The metadata of all topics, or of one. Asks again, within the time, after a connection was lost, which librdkafka
    does not, and while no broker is listed: a controller may take those of a busy machine for dead for a moment.

    Raises KafkaException.
    """
    named = () if topic is None else (topic,)
    ends_s = time.monotonic() + timeout_s
    while True:
        left_s = ends_s - time.monotonic()
        try:
            found = admin.list_topics(*named, timeout=max(_NO_BROKER_S, left_s))
            if found.brokers:
                return found
            if left_s <= _NO_BROKER_S:
                raise KafkaException(KafkaError(KafkaError.BROKER_NOT_AVAILABLE, "it lists no broker"))
        except KafkaException as error:
            if error.args[0].code() != KafkaError._TRANSPORT or left_s <= _NO_BROKER_S:
                raise
        time.sleep(_NO_BROKER_S)


def require_broker(
    kafka: KafkaSettings, stopping: threading.Event | None = None, on_error: ErrorCallback | None = None
) -> ClusterMetadata:
    """The cluster's metadata. Raises RelayError with the address and the cause after `connect_timeout_s`.

    It raises at once for wrong credentials and TLS errors, and after a few retries for other known causes. It gives up
    early once `stopping` is set. One of the brokers that the metadata names must accept a connection: the address of
    `bootstrap` may answer, while clients can use only those of the metadata.
    """
    errors = ClientErrors("relaygr-connect", on_error, quiet=True)
    admin = _made(AdminClient, _config(kafka, "relaygr-connect", errors))
    started_s = time.monotonic()
    failed_s: float | None = None
    unreached = ""
    while True:
        left_s = kafka.connect_timeout_s - (time.monotonic() - started_s)
        try:
            found = admin.list_topics(timeout=max(0.01, min(_METADATA_TRY_S, left_s)))
            unreached = _unreached(kafka, found)
            if found.brokers and not unreached:
                return found
            # The controller may take the only broker of a busy machine for dead for a moment.
            last = KafkaError(KafkaError.BROKER_NOT_AVAILABLE)
            time.sleep(_NO_BROKER_S)
        except KafkaException as error:
            admin.poll(0)
            last = errors.last or error.args[0]
        elapsed_s = time.monotonic() - started_s
        if failed_s is None and errors.last is not None:
            failed_s = elapsed_s
        # librdkafka reports only this, at once when connections are closed, and later when nothing answers.
        is_silent = last.code() == KafkaError._ALL_BROKERS_DOWN and (failed_s or 0.0) >= SILENCE_MS / 1000
        has_cause = bool(unreached) or (errors.last is not None and not is_silent)
        limit_s = kafka.connect_timeout_s * (_SHARE_WITH_A_CAUSE if has_cause else 1.0)
        stopped = stopping is not None and stopping.is_set()
        if last.code() in PERMANENT or elapsed_s >= limit_s or stopped:
            raise RelayError(unreached or _unreachable(kafka, errors.cause, last, elapsed_s, is_silent))


def _unreached(kafka: KafkaSettings, found: ClusterMetadata) -> str:
    """A sentence if no broker that the metadata names accepts a connection; else empty."""
    given = {address.strip() for address in kafka.bootstrap.split(",")}
    brokers = {f"{each.host}:{each.port}": each for each in found.brokers.values()}
    causes, ends_s = list[str](), time.monotonic() + kafka.connect_timeout_s
    for address in sorted(brokers, key=lambda address: address not in given):
        if causes and time.monotonic() >= ends_s:
            break
        try:
            socket.create_connection((brokers[address].host, brokers[address].port), _REACHED_S).close()
        except OSError as error:
            causes.append(f"{address} ({error.strerror or error})")
        else:
            return ""
    if not causes:
        return ""
    return (
        f"Kafka at {kafka.bootstrap} answers, but its brokers cannot be reached at the addresses that they advertise: "
        f"{', '.join(causes[:_MOST_NAMED])}. Set advertised.listeners of the brokers to addresses that this machine "
        "can reach"
    )


def _unreachable(kafka: KafkaSettings, cause: str | None, error: KafkaError, elapsed_s: float, is_silent: bool) -> str:
    cause = cause or f"no answer within {elapsed_s:.1f} s"
    advice = "Check `bootstrap` (--bootstrap, RELAYGR_BOOTSTRAP), and that the broker is running"
    if kafka.security.protocol is not SecurityProtocol.PLAINTEXT:
        # A plaintext broker may close the connection without an error.
        advice += f", and `security`: its protocol is {kafka.security.protocol}"
    if error.code() == KafkaError._BAD_MSG:
        cause = "the server does not speak Kafka's protocol, or speaks it inside TLS"
        advice = f"Check `bootstrap`, and `security`: its protocol is {kafka.security.protocol}"
    elif is_silent:
        cause = f"it accepts connections and answered nothing within {elapsed_s:.1f} s: it is overloaded or stopped"
    elif error.code() == KafkaError._ALL_BROKERS_DOWN:
        cause = "the broker closes connections without an answer; does it require TLS or SASL?"
        advice = f"Check `bootstrap`, and `security`: its protocol is {kafka.security.protocol}"
    elif error.code() in PERMANENT or _ABOUT_SECURITY.search(cause):
        advice = f"Check `security`: its protocol is {kafka.security.protocol}"
    return f"Kafka at {kafka.bootstrap} cannot be reached: {cause}. {advice}"


def _made(kind: Callable[[dict[str, Any]], C], config: dict[str, Any]) -> C:
    try:
        return kind(config)
    except KafkaException as error:
        raise RelayError(f"The settings for Kafka are invalid: {error.args[0].str()}. Check `security`") from error


def _consumer(fetch_wait_ms: int) -> dict[str, Any]:
    return {**_CONSUMER, "fetch.wait.max.ms": fetch_wait_ms}


def _membership(kafka: KafkaSettings, assignor: str) -> dict[str, Any]:
    """The group protocol's settings. With the consumer protocol, the broker sets session time-out and heartbeat."""
    # librdkafka refuses a session that is longer.
    rebalance = {"max.poll.interval.ms": max(_REBALANCE_MS, kafka.session_timeout_ms)}
    if kafka.group_protocol is GroupProtocol.CONSUMER:
        return {"group.protocol": "consumer", "group.remote.assignor": assignor, **rebalance}
    return {
        **rebalance,
        "group.protocol": "classic",
        "partition.assignment.strategy": assignor,
        "session.timeout.ms": kafka.session_timeout_ms,
        "heartbeat.interval.ms": kafka.heartbeat_interval_ms,
    }


def _config(
    kafka: KafkaSettings, client_id: str, on_error: ErrorCallback | None, *layers: Options | None
) -> dict[str, Any]:
    """One client's settings; later layers override earlier ones."""
    errors = on_error if isinstance(on_error, ClientErrors) else ClientErrors(client_id, on_error)
    config: dict[str, Any] = {
        "bootstrap.servers": kafka.bootstrap,
        "client.id": client_id,
        "error_cb": errors,
        **_COMMON,
        **librdkafka_security(kafka.security),
    }
    for layer in layers:
        config.update(layer or {})
    return config
