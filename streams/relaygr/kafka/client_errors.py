"""What librdkafka's `error_cb` says: remembered, and logged at a bearable rate.

Wrong credentials, TLS to a plaintext port and a closed port show nowhere else: every call just times
out. While a broker is away the callback comes up to 40 times a second, so equal errors are logged once
in a while, with the number that were left out.
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
# Errors that no retry mends: the credentials or the protocol are wrong.
PERMANENT: Final = frozenset((KafkaError._AUTHENTICATION, KafkaError._SSL, KafkaError.SASL_AUTHENTICATION_FAILED))

_WHERE = re.compile(r"^(?:\S+?://)?\S+/\S+: ")
_STATE = re.compile(r" \(after \d+ms in state [A-Z_]+(?:, \d+ identical error\(s\) suppressed)?\)\.?$")
_CONNECT = re.compile(r"^Connect to \S+ failed: ")

_log = structlog.get_logger()


def cause_of(error: KafkaError) -> str:
    """The part of the error's text that tells a person something."""
    text = error.str() or error.name()
    for noise in (_WHERE, _STATE, _CONNECT):
        text = noise.sub("", text)
    return text.strip().rstrip(".")


class ClientErrors:
    """An `error_cb` for one client. librdkafka calls it from the thread that polls that client."""

    def __init__(
        self, client_id: str, on_error: ErrorCallback | None = None, clock: Clock | None = None, quiet: bool = False
    ) -> None:
        """`quiet`: remembered only, for a caller that reports them itself."""
        self._client_id = client_id
        self._quiet = quiet
        self._on_error = on_error
        self._clock = clock or SystemClock()
        self._logged_at_us: dict[int, int] = {}
        self._left_out: dict[int, int] = {}
        self.last: KafkaError | None = None
        """The last error that names a cause: "all brokers down" only follows one."""

    def __call__(self, error: KafkaError) -> None:
        if self.last is None or error.code() != KafkaError._ALL_BROKERS_DOWN:
            self.last = error
            if not self._quiet:
                self._log(error)
        if self._on_error is not None:
            self._on_error(error)

    @property
    def cause(self) -> str | None:
        """The last error in words; None: there was none."""
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
