"""Every Kafka client of the system, with every setting and its reason in one place.

`make_producer`, `make_group_consumer`, `make_assigned_consumer` and `make_admin` build confluent-kafka
clients (librdkafka); `aiokafka_options` gives the trigger's client (aiokafka, under faust) the same
cluster and the same security. Building a client does no I/O: `require_broker` asks the cluster for its
metadata, and raises a RelayError that names the address and the cause.

Each factory takes `options`, librdkafka settings that replace ours for one client: a benchmark's, or a
consumer that is paused often. One client, one polling thread.
"""

from __future__ import annotations

import enum
import re
import time
from collections.abc import Mapping
from typing import Any, Final

from confluent_kafka import Consumer, KafkaError, KafkaException, Producer
from confluent_kafka.admin import AdminClient, ClusterMetadata

from relaygr.kafka.client_errors import PERMANENT, ClientErrors, ErrorCallback
from relaygr.kafka.security import aiokafka_security, librdkafka_security
from relaygr.kafka.settings import GroupProtocol, KafkaSettings, SecurityProtocol
from relaygr.runtime.errors import RelayError
from relaygr.schemas.topics import CATALOGUE

Options = Mapping[str, Any]

PARTITIONER: Final = "murmur2_random"
"""Java's hash. librdkafka's default agrees with it for 8.5 % of keys."""
ASSIGNOR: Final = "range"
"""The one assignor that gives both topics' partitions of a user to one worker in every state."""
LARGEST_MESSAGE_BYTES: Final = max(spec.max_message_bytes for spec in CATALOGUE.values())
LARGEST_QUEUE_BYTES: Final = 16 * 1024 * 1024
"""What one client holds at most in its own queue, sent or received: three messages of the largest size."""


class ProducerKind(enum.StrEnum):
    """What a producer is for; each trades latency against safety in its own way."""

    LATENCY = "latency"
    """Ranking requests and results: late is lost, so it gives up within half a second."""
    PREINFER = "preinfer"
    """Pre-infer jobs: their deadline is the ranking, seconds away at most."""
    DURABLE = "durable"
    """Retrieval events, history, dead letters: nothing is lost or written twice."""


_COMMON: Final[dict[str, Any]] = {
    # A connection that a firewall dropped is noticed before a request needs it.
    "socket.keepalive.enable": True,
    # Small messages leave at once instead of waiting for the last one's acknowledgement.
    "socket.nagle.disable": True,
    # The first try after a fault comes soon, later ones do not storm the broker.
    "reconnect.backoff.ms": 50,
    "reconnect.backoff.max.ms": 1000,
    # After all connections were lost the first success comes after 7 to 245 ms, not after a second.
    "topic.metadata.refresh.interval.ms": 200,
    # Topics are made by `relaygr topics create` alone, with their retention and partition counts.
    "allow.auto.create.topics": False,
    # An idle connection that the broker closes is no error.
    "log.connection.close": False,
    # Errors come through `error_cb`; librdkafka would also print each, up to 40 a second.
    "log_level": 2,
}

_PRODUCER: Final[dict[str, Any]] = {
    "partitioner": PARTITIONER,
    # librdkafka's default of 1 MB would refuse long histories.
    "message.max.bytes": LARGEST_MESSAGE_BYTES,
    # Bounds what waits while the broker is away.
    "queue.buffering.max.messages": 10_000,
    "queue.buffering.max.kbytes": LARGEST_QUEUE_BYTES // 1024,
    "retry.backoff.ms": 20,
    # An unknown topic is reported at once, not after 30 s of hoping that it appears.
    "topic.metadata.propagation.max.ms": 0,
}

_BY_KIND: Final[dict[ProducerKind, dict[str, Any]]] = {
    ProducerKind.LATENCY: {"linger.ms": 0, "acks": "1", "message.timeout.ms": 500},
    ProducerKind.PREINFER: {"linger.ms": 0, "acks": "1", "message.timeout.ms": 5000},
    # With a short time-out an idempotent producer left duplicates in the log after a broker's death.
    ProducerKind.DURABLE: {"linger.ms": 0, "acks": "all", "enable.idempotence": True, "message.timeout.ms": 30_000},
}

_CONSUMER: Final[dict[str, Any]] = {
    # With `latest` and no commit yet, what a dead owner had read would never be delivered again.
    "auto.offset.reset": "earliest",
    "fetch.min.bytes": 1,
    # The default of a second is how long a consumer whose queue ran full would sleep.
    "fetch.queue.backoff.ms": 5,
    "fetch.error.backoff.ms": 50,
    # What is fetched ahead is memory, and is fetched again after every pause.
    "queued.min.messages": 1000,
    "queued.max.messages.kbytes": LARGEST_QUEUE_BYTES // 1024,
    # A record set of one message of the largest size still fits.
    "fetch.max.bytes": max(LARGEST_MESSAGE_BYTES, 16 * 1024 * 1024),
    "isolation.level": "read_uncommitted",
    "statistics.interval.ms": 5000,
}

_GROUP: Final[dict[str, Any]] = {
    # Offsets are stored by the loop, as the contiguous watermark of what is finished.
    "enable.auto.offset.store": False,
    "auto.commit.interval.ms": 1000,
}

_ASSIGNED: Final[dict[str, Any]] = {"enable.auto.offset.store": False, "enable.auto.commit": False}

# A known cause is not waited out: a broker that is starting up has had its time by then.
_PATIENCE_WITH_A_CAUSE: Final = 0.5
_METADATA_TRY_S: Final = 0.5
# A wrong protocol shows as a lost connection; only the text tells.
_ABOUT_SECURITY: Final = re.compile(r"SSL|SASL|security\.protocol")


def make_producer(
    kafka: KafkaSettings,
    kind: ProducerKind,
    client_id: str,
    on_error: ErrorCallback | None = None,
    options: Options | None = None,
) -> Producer:
    """A producer. The caller polls it, and flushes it with a time-out before it goes."""
    return Producer(_config(kafka, client_id, on_error, _PRODUCER, _BY_KIND[kind], options))


def make_group_consumer(
    kafka: KafkaSettings,
    group: str,
    client_id: str,
    instance_id: str | None = None,
    on_error: ErrorCallback | None = None,
    options: Options | None = None,
) -> Consumer:
    """A member of `group`, with a static id if `instance_id` is given.

    Raises RelayError for an assignor other than `range`: it would split a user's topics between workers.
    """
    config = _config(kafka, client_id, on_error, _consumer(kafka), _GROUP, _membership(kafka), options)
    config["group.id"] = group
    if instance_id is not None:
        config["group.instance.id"] = instance_id
    for name in ("partition.assignment.strategy", "group.remote.assignor"):
        if config.get(name, ASSIGNOR) != ASSIGNOR:
            raise RelayError(
                f"{name}={config[name]} would give a user's pre-infer jobs and ranking requests to different "
                f"workers: leave it at {ASSIGNOR}"
            )
    return Consumer(config)


def make_assigned_consumer(
    kafka: KafkaSettings, client_id: str, on_error: ErrorCallback | None = None, options: Options | None = None
) -> Consumer:
    """A consumer for `assign()`: it joins no group and commits nothing. Give each partition its offset."""
    config = _config(kafka, client_id, on_error, _consumer(kafka), _ASSIGNED, options)
    # librdkafka wants the name of a group even where none is joined.
    config["group.id"] = f"{kafka.group_prefix}.unjoined"
    return Consumer(config)


def make_admin(kafka: KafkaSettings, client_id: str, on_error: ErrorCallback | None = None) -> AdminClient:
    """An admin client. Its calls take their own time-outs."""
    return AdminClient(_config(kafka, client_id, on_error))


def aiokafka_options(kafka: KafkaSettings) -> dict[str, Any]:
    """The cluster and its security as keyword arguments of aiokafka's clients."""
    return {"bootstrap_servers": kafka.bootstrap.split(","), **aiokafka_security(kafka.security)}


def require_broker(kafka: KafkaSettings) -> ClusterMetadata:
    """The cluster's metadata, or a RelayError with address and cause within `connect_timeout_s`.

    Bad credentials and TLS errors are told at once; other known causes after a few more tries.
    """
    errors = ClientErrors("relaygr-connect", quiet=True)
    try:
        admin = AdminClient(_config(kafka, "relaygr-connect", errors))
    except KafkaException as error:
        raise RelayError(f"Kafka's settings are not usable: {error.args[0].str()}. Check `security`") from error
    started_s = time.monotonic()
    while True:
        left_s = kafka.connect_timeout_s - (time.monotonic() - started_s)
        try:
            return admin.list_topics(timeout=max(0.01, min(_METADATA_TRY_S, left_s)))
        except KafkaException as error:
            admin.poll(0)
            last = errors.last or error.args[0]
        elapsed_s = time.monotonic() - started_s
        patience_s = kafka.connect_timeout_s * (_PATIENCE_WITH_A_CAUSE if errors.last is not None else 1.0)
        if last.code() in PERMANENT or elapsed_s >= patience_s:
            raise RelayError(_unreachable(kafka, errors.cause, last, elapsed_s))


def _unreachable(kafka: KafkaSettings, cause: str | None, error: KafkaError, elapsed_s: float) -> str:
    cause = cause or f"no answer within {elapsed_s:.1f} s"
    advice = "Check `bootstrap` (--bootstrap, RELAYGR_BOOTSTRAP), and that the broker is running"
    if kafka.security.protocol is not SecurityProtocol.PLAINTEXT:
        # A broker that speaks plaintext may just cut the connection off.
        advice += f", and `security`: its protocol is {kafka.security.protocol}"
    if error.code() == KafkaError._BAD_MSG:
        cause = "what answers there does not speak Kafka's protocol, or speaks it inside TLS"
        advice = f"Check `bootstrap`, and `security`: its protocol is {kafka.security.protocol}"
    elif error.code() == KafkaError._ALL_BROKERS_DOWN:
        # All that librdkafka says of connections that are taken and closed again.
        cause = "connections are closed without an answer; does it want TLS or SASL?"
        advice = f"Check `bootstrap`, and `security`: its protocol is {kafka.security.protocol}"
    elif error.code() in PERMANENT or _ABOUT_SECURITY.search(cause):
        advice = f"Check `security`: its protocol is {kafka.security.protocol}"
    return f"Kafka at {kafka.bootstrap} can not be reached: {cause}. {advice}"


def _consumer(kafka: KafkaSettings) -> dict[str, Any]:
    return {**_CONSUMER, "fetch.wait.max.ms": kafka.fetch_wait_max_ms}


def _membership(kafka: KafkaSettings) -> dict[str, Any]:
    """How the group is formed. Under the consumer protocol session and heartbeat are the broker's settings."""
    if kafka.group_protocol is GroupProtocol.CONSUMER:
        return {"group.protocol": "consumer", "group.remote.assignor": ASSIGNOR}
    return {
        "group.protocol": "classic",
        "partition.assignment.strategy": ASSIGNOR,
        "session.timeout.ms": kafka.session_timeout_ms,
        "heartbeat.interval.ms": kafka.heartbeat_interval_ms,
    }


def _config(
    kafka: KafkaSettings, client_id: str, on_error: ErrorCallback | None, *layers: Options | None
) -> dict[str, Any]:
    """One client's settings; a later layer wins."""
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
