"""The dead letters of records that cannot be used, until each is delivered.

The offset of such a record stays in the log's `undelivered` meanwhile, so that a restart reads it again.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Final, Protocol

from confluent_kafka import Message

from relaygr.kafka.dead_letters import OnDone
from relaygr.runtime.clock import Clock
from relaygr.worker.history.decode import Rejected
from relaygr.worker.history.partitions import FollowedLog

RETRY_S: Final = 1.0


class DeadLetters(Protocol):
    """Takes the records that cannot be used; `relaygr.kafka.dead_letters.DeadLetterWriter` is one."""

    def write(self, message: Message, reason: str, detail: str, on_done: OnDone | None = None) -> None: ...

    def poll(self, timeout_s: float = 0.0) -> int: ...

    def flush(self, timeout_s: float) -> int: ...


@dataclass(frozen=True, slots=True)
class _Invalid:
    """A record whose dead letter is not delivered yet."""

    log: FollowedLog
    message: Message
    rejected: Rejected
    offset: int


class UndeliveredLetters:
    """Writes dead letters, and again those that could not be delivered. One thread uses it."""

    def __init__(self, dead_letters: DeadLetters, clock: Clock) -> None:
        self._dead_letters, self._clock = dead_letters, clock
        self._reports: deque[tuple[_Invalid, bool]] = deque()
        """Filled by the producer's callbacks."""
        self._failed: list[_Invalid] = []
        self._retry_at_us = 0

    def write(self, log: FollowedLog, message: Message, offset: int, rejected: Rejected) -> None:
        log.undelivered.add(offset)
        self._write(_Invalid(log, message, rejected, offset))

    def turn(self) -> None:
        """Takes reports of deliveries, and writes failed letters again after `RETRY_S`."""
        self._collect()
        if not self._failed or self._clock.monotonic_us() < self._retry_at_us:
            return
        failed, self._failed = self._failed, []
        for invalid in failed:
            # A partition that is not followed any more has left its letters to its next reader.
            if invalid.offset in invalid.log.undelivered:
                self._write(invalid)

    def flush(self) -> None:
        self._dead_letters.flush(RETRY_S)
        self._collect()

    def _write(self, invalid: _Invalid) -> None:
        def report(delivered: bool) -> None:
            self._reports.append((invalid, delivered))

        self._dead_letters.write(invalid.message, invalid.rejected.reason, invalid.rejected.detail, report)

    def _collect(self) -> None:
        self._dead_letters.poll()
        while self._reports:
            invalid, delivered = self._reports.popleft()
            if delivered:
                invalid.log.undelivered.discard(invalid.offset)
            else:
                if not self._failed:
                    self._retry_at_us = self._clock.monotonic_us() + int(RETRY_S * 1e6)
                self._failed.append(invalid)
