"""Errors from librdkafka's `error_cb`: the last one is kept, and equal ones are logged at a limited rate.

Only this callback reports wrong credentials, TLS to a plaintext port or a closed port; the calls themselves just
time out. While a broker is away librdkafka calls back up to 40 times a second. So equal errors are logged once in
`LOG_INTERVAL_US`, with the number of those that were not logged.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable
from typing import Final

from confluent_kafka import KafkaError

from relaygr.runtime.clock import Clock, SystemClock
from relaygr.runtime.loggers import Logger

ErrorCallback = Callable[[KafkaError], None]
LOG_INTERVAL_US: Final = 10_000_000
# Errors that a retry cannot fix: the credentials or the protocol are wrong.
PERMANENT: Final = frozenset((KafkaError._AUTHENTICATION, KafkaError._SSL, KafkaError.SASL_AUTHENTICATION_FAILED))
# What to do if the coordinator refuses a member.
GROUP_REFUSALS: Final = {
    KafkaError.INCONSISTENT_GROUP_PROTOCOL: "the group has members with another assignor: stop them first",
    KafkaError.INVALID_SESSION_TIMEOUT: "raise session_timeout_ms to the broker's minimum (6000 by default)",
}
# A group has no coordinator while its broker is away, and while a new cluster creates its internal topic, which it does
# at the first question about a group. librdkafka asks again until the time-out of the request.
NO_COORDINATOR: Final = frozenset(
    (
        KafkaError.COORDINATOR_LOAD_IN_PROGRESS,
        KafkaError.COORDINATOR_NOT_AVAILABLE,
        KafkaError.NOT_COORDINATOR,
        KafkaError.REQUEST_TIMED_OUT,
        KafkaError._TIMED_OUT,
        KafkaError._TRANSPORT,
    )
)
# Old brokers and some managed clusters do not know a request, or a part of it.
NOT_OFFERED: Final = frozenset((KafkaError._UNSUPPORTED_FEATURE, KafkaError.UNSUPPORTED_VERSION))

# Answers of a broker after which a resend may succeed. It repeats each other answer to each resend.
_RETRIABLE: Final = NO_COORDINATOR | {
    KafkaError.UNKNOWN_TOPIC_OR_PART,
    KafkaError.LEADER_NOT_AVAILABLE,
    KafkaError.NOT_LEADER_FOR_PARTITION,
    KafkaError.BROKER_NOT_AVAILABLE,
    KafkaError.REPLICA_NOT_AVAILABLE,
    KafkaError.NETWORK_EXCEPTION,
    KafkaError.NOT_ENOUGH_REPLICAS,
    KafkaError.NOT_ENOUGH_REPLICAS_AFTER_APPEND,
    KafkaError.NOT_CONTROLLER,
    # These end an idempotent producer, and another one may send the message.
    KafkaError.OUT_OF_ORDER_SEQUENCE_NUMBER,
    KafkaError.DUPLICATE_SEQUENCE_NUMBER,
    KafkaError.INVALID_PRODUCER_EPOCH,
    KafkaError.PRODUCER_FENCED,
    KafkaError.INVALID_PRODUCER_ID_MAPPING,
    KafkaError.UNKNOWN_PRODUCER_ID,
    KafkaError.KAFKA_STORAGE_ERROR,
    KafkaError.LOG_DIR_NOT_FOUND,
    KafkaError.REASSIGNMENT_IN_PROGRESS,
    KafkaError.LISTENER_NOT_FOUND,
    KafkaError.FENCED_LEADER_EPOCH,
    KafkaError.UNKNOWN_LEADER_EPOCH,
    KafkaError.STALE_BROKER_EPOCH,
    KafkaError.OFFSET_NOT_AVAILABLE,
    KafkaError.PREFERRED_LEADER_NOT_AVAILABLE,
    KafkaError.ELIGIBLE_LEADERS_NOT_AVAILABLE,
    KafkaError.THROTTLING_QUOTA_EXCEEDED,
    KafkaError.UNKNOWN_TOPIC_ID,
    KafkaError.INCONSISTENT_TOPIC_ID,
    KafkaError.REBOOTSTRAP_REQUIRED,
}
_REMEDIES: Final = {
    KafkaError._MSG_TIMED_OUT: "not acknowledged in time: run `relaygr topics check`, which names topics that lack "
    "brokers",
    KafkaError.INVALID_TIMESTAMP: "the time of the message is too far from that of the brokers: set the clocks of the "
    "machines, or message.timestamp.after.max.ms of the topic",
    KafkaError.TOPIC_AUTHORIZATION_FAILED: "this user may not write the topic: `relaygr topics acls` prints the "
    "commands that grant it",
    KafkaError.MSG_SIZE_TOO_LARGE: "the message is larger than max.message.bytes of the topic: run `relaygr topics "
    "check`",
}

# A broker refuses a client's certificate after librdkafka's part of the handshake, so the connection counts as lost.
# Only the text has the cause.
_TLS_ALERT: Final = re.compile(r"SSL routines|SSL alert|certificate")

_WHERE = re.compile(r"^(?:\S+?://)?\S+/\S+: ")
_STATE = re.compile(r" \(after \d+ms in state [A-Z_]+(?:, \d+ identical error\(s\) suppressed)?\)\.?$")
_CONNECT = re.compile(r"^Connect to \S+ failed: ")

_log = Logger(__name__)


def cause_of(error: KafkaError) -> str:
    """The cause in the error's text, without addresses, states and counts."""
    text = error.str() or error.name()
    for noise in (_WHERE, _STATE, _CONNECT):
        text = noise.sub("", text)
    return text.strip().rstrip(".")


def why_undelivered(error: KafkaError) -> str:
    """The cause in a delivery report. A message that too few replicas can take waits until its time-out."""
    return _REMEDIES.get(error.code()) or str(error.str())


def is_final(error: KafkaError) -> bool:
    """Whether Kafka refused a message, and would refuse it again. librdkafka's own errors are negative."""
    code = error.code()
    return code == KafkaError._INVALID_ARG or (code > 0 and code not in _RETRIABLE)


def is_refusal(error: KafkaError) -> bool:
    """Whether a broker refused a connection for its certificate or user, or was refused for its own certificate."""
    return error.code() in PERMANENT or _TLS_ALERT.search(error.str() or "") is not None


class LimitedLog:
    """Logs equal events once in `LOG_INTERVAL_US`, with the number of those that were not logged as `left_out`."""

    def __init__(self, clock: Clock | None = None) -> None:
        self._clock = clock or SystemClock()
        self._logged_at_us: dict[Hashable, int] = {}
        self._left_out: dict[Hashable, int] = {}

    def warning(self, event: str, code: Hashable, **fields: object) -> None:
        """Events of one `code`, such as an error of Kafka, are equal. Codes are of a small set."""
        self._log(_log.warning, event, code, fields)

    def error(self, event: str, code: Hashable, **fields: object) -> None:
        """As `warning`."""
        self._log(_log.error, event, code, fields)

    def _log(self, write: Callable[..., object], event: str, code: Hashable, fields: dict[str, object]) -> None:
        now_us = self._clock.monotonic_us()
        logged_at_us = self._logged_at_us.get(code)
        if logged_at_us is not None and now_us - logged_at_us < LOG_INTERVAL_US:
            self._left_out[code] = self._left_out.get(code, 0) + 1
            return
        self._logged_at_us[code] = now_us
        write(event, **fields, left_out=self._left_out.pop(code, 0))


class ClientErrors:
    """An `error_cb` for one client. librdkafka calls it in the thread that polls the client."""

    def __init__(
        self,
        client_id: str,
        on_error: ErrorCallback | None = None,
        limited: LimitedLog | None = None,
        quiet: bool = False,
    ) -> None:
        """`limited`: of several clients. `quiet`: errors are kept and not logged, for a caller that reports them."""
        self._client_id = client_id
        self._quiet = quiet
        self._on_error = on_error
        self._limited = limited or LimitedLog()
        self.last: KafkaError | None = None
        """The last error that names a cause; "all brokers down" only follows such an error."""

    def __call__(self, error: KafkaError) -> None:
        if self.last is None or error.code() != KafkaError._ALL_BROKERS_DOWN:
            self.last = error
            if not self._quiet:
                self._limited.warning(
                    "kafka client error",
                    (self._client_id, error.code()),
                    client_id=self._client_id,
                    error=error.name(),
                    cause=cause_of(error),
                )
        if self._on_error is not None:
            self._on_error(error)

    @property
    def cause(self) -> str | None:
        """The cause of the last error; None if there was no error."""
        return cause_of(self.last) if self.last is not None else None
