"""What a caller gets back from the client: an outcome for every request that was sent, an error for misuse.

A request that `rank` accepted ends in exactly one `RankOutcome`, whatever the network does. The errors
here are raised before anything is sent: the same call may be made again.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

from relaygr.runtime.errors import RelayError
from relaygr.schemas.fields import Other
from relaygr.schemas.messages import FailureReason, RankingResult


class RankStatus(enum.StrEnum):
    """How a ranking request ended for its caller."""

    RANKED = "ranked"
    EXPIRED = "expired"
    FAILED = "failed"
    TIMED_OUT = "timed_out"


class TimeOutReason(enum.StrEnum):
    """Why there was no answer by the deadline."""

    NO_ANSWER = "no_answer"
    """The broker acknowledged the request; no worker's answer came in time."""
    NOT_ACKNOWLEDGED = "not_acknowledged"
    """The broker did not acknowledge the request. It may have it all the same."""
    CLOSED = "closed"
    """The client was closed before the deadline."""


@dataclass(frozen=True, slots=True)
class RankOutcome:
    """The end of one ranking request.

    `latency_us` runs on the gateway's monotonic clock from the call to the answer (to the deadline, if
    `timed_out`). `result` is the worker's answer: absent if `timed_out`, and where the answer itself could
    not be decoded (`failed`, reason `undecodable`). `late` is true only in what `on_late` is given: the
    answer came after the caller had been told `timed_out`.
    """

    request_id: str
    status: RankStatus
    latency_us: int
    result: RankingResult | None = None
    reason: FailureReason | Other | TimeOutReason | None = None
    late: bool = False


@dataclass(frozen=True, slots=True)
class LostRequest:
    """A request that no worker answered until its deadline and the grace after it had passed."""

    request_id: str
    acknowledged: bool
    """The broker had acknowledged it; else the request itself may never have arrived."""


@dataclass(frozen=True, slots=True)
class DeliveryReport:
    """What became of one published message. After an error it may be in the topic all the same."""

    topic: str
    partition: int | None
    offset: int | None
    error: str | None

    @property
    def delivered(self) -> bool:
        """The broker acknowledged it."""
        return self.error is None


class ClientError(RelayError):
    """The client did not take the call; nothing was sent."""


class NotRunning(ClientError):  # noqa: N818 - named for the state, as queue.Full is
    """The client has not been started, or is closed."""


class QueueFull(ClientError):  # noqa: N818 - named for the state, as queue.Full is
    """A bound of the client is reached: requests in flight, or messages that wait for the broker."""


class MessageRefused(ClientError):  # noqa: N818 - named for the state, as queue.Full is
    """The message can not be sent as it is: too large for the producer, or an id that is in use."""
