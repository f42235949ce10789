"""Errors from librdkafka's `error_cb`: the last one is kept, and equal ones are logged at a limited rate.

Only this callback reports wrong credentials, TLS to a plaintext port or a closed port; the calls themselves just
time out. While a broker is away librdkafka calls back up to 40 times a second. So equal errors are logged once in
`LOG_INTERVAL_US`, with the number of those that were not logged.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Final

import structlog
from confluent_kafka import KafkaError

from relaygr.runtime.clock import Clock, SystemClock

ErrorCallback = Callable[[KafkaError], None]

LOG_INTERVAL_US: Final = 10_000_000
# Errors that a retry cannot fix: the credentials or the protocol are wrong.
PERMANENT: Final = frozenset((KafkaError._AUTHENTICATION, KafkaError._SSL, KafkaError.SASL_AUTHENTICATION_FAILED))
# What to do if the coordinator refuses a member.
GROUP_REFUSALS: Final = {
    KafkaError.INCONSISTENT_GROUP_PROTOCOL: "the group has members with another assignor: stop them first",
    KafkaError.INVALID_SESSION_TIMEOUT: "raise session_timeout_ms to the broker's minimum (6000 by default)",
}
# A cluster without any group creates its internal topic at the first question about one.
NO_COORDINATOR_YET: Final = frozenset(
    (KafkaError.COORDINATOR_LOAD_IN_PROGRESS, KafkaError.COORDINATOR_NOT_AVAILABLE, KafkaError.NOT_COORDINATOR)
)

_WHERE = re.compile(r"^(?:\S+?://)?\S+/\S+: ")
_STATE = re.compile(r" \(after \d+ms in state [A-Z_]+(?:, \d+ identical error\(s\) suppressed)?\)\.?$")
_CONNECT = re.compile(r"^Connect to \S+ failed: ")

_log = structlog.get_logger()


def cause_of(error: KafkaError) -> str:
    """The cause in the error's text, without addresses, states and counts."""
    text = error.str() or error.name()
    for noise in (_WHERE, _STATE, _CONNECT):
        text = noise.sub("", text)
    return text.strip().rstrip(".")


def why_undelivered(error: KafkaError) -> str:
    """The cause in a delivery report. A message that too few replicas can take waits until its time-out."""
    if error.code() == KafkaError._MSG_TIMED_OUT:
        return "not acknowledged in time: run `relaygr topics check`, which names topics that lack brokers"
    return str(error.str())


class ClientErrors:
    """An `error_cb` for one client. librdkafka calls it in the thread that polls the client."""

    def __init__(
        self, client_id: str, on_error: ErrorCallback | None = None, clock: Clock | None = None, quiet: bool = False
    ) -> None:
        """`quiet`: errors are kept and not logged, for a caller that reports them itself."""
        self._client_id = client_id
        self._quiet = quiet
        self._on_error = on_error
        self._clock = clock or SystemClock()
        self._logged_at_us: dict[int, int] = {}
        self._left_out: dict[int, int] = {}
        self.last: KafkaError | None = None
        """The last error that names a cause; "all brokers down" only follows such an error."""

    def __call__(self, error: KafkaError) -> None:
        if self.last is None or error.code() != KafkaError._ALL_BROKERS_DOWN:
            self.last = error
            if not self._quiet:
                self._log(error)
        if self._on_error is not None:
            self._on_error(error)

    @property
    def cause(self) -> str | None:
        """The cause of the last error; None if there was no error."""
        return cause_of(self.last) if self.last is not None else None

    def _log(self, error: KafkaError) -> None:
        code = error.code()
        now_us = self._clock.monotonic_us()
        logged_at_us = self._logged_at_us.get(code)
        if logged_at_us is not None and now_us - logged_at_us < LOG_INTERVAL_US:
            self._left_out[code] = self._left_out.get(code, 0) + 1
            return
        self._logged_at_us[code] = now_us
        _log.warning(
            "kafka client error",
            client_id=self._client_id,
            error=error.name(),
            cause=cause_of(error),
            left_out=self._left_out.pop(code, 0),
        )
