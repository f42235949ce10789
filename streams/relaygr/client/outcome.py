"""Outcomes of requests and errors of the client's calls.

Every request that `rank` accepts ends with exactly one `RankOutcome`, also when the network fails. The
errors here are raised before anything is sent, so the caller may repeat the call.
"""

from __future__ import annotations

from relaygr.runtime.errors import RelayError
from relaygr.schemas.ended import Ended, Reason
from relaygr.schemas.fields import Other
from relaygr.schemas.messages import RankingResult
from relaygr.schemas.record import record


@record(frozen=True, slots=True)
class RankOutcome:
    """The end of one ranking request.

    `latency_us` is the time on the gateway's monotonic clock from the call to the result, or to the deadline
    if `timed_out`. `result` is absent if `timed_out`, and if the result could not be decoded or does not fit the
    request (`failed` with reason `undecodable` or `invalid_result`), or if the client did not send the request
    (`failed` with reason `overloaded`: the setting `client.fail_fast`), or if Kafka refused the request (`failed` with
    reason `refused_by_kafka`: the log has the cause, such as a clock that is ahead). `reason` is set if `failed` or
    `timed_out`; a reason of a newer worker that this version does not know is an `Other`. `late` is true only in the
    outcomes passed to `on_late`: the result arrived after the caller got `timed_out`.
    """

    request_id: str
    status: Ended
    latency_us: int
    result: RankingResult | None = None
    reason: Reason | Other | None = None
    late: bool = False


@record(frozen=True, slots=True)
class LostRequest:
    """A request without a result `lost_after_ms` after its deadline; `result_grace_ms`, if it was not acknowledged."""

    request_id: str
    acknowledged: bool
    """Whether the broker acknowledged the request. If not, the request may never have reached it."""


@record(frozen=True, slots=True)
class DeliveryReport:
    """Whether one published message was delivered. After an error the message may still be in the topic."""

    topic: str
    partition: int | None
    offset: int | None
    error: str | None

    @property
    def delivered(self) -> bool:
        """Whether the broker acknowledged the message."""
        return self.error is None


class ClientError(RelayError):
    """The client refused the call; nothing was sent."""


class NotRunning(ClientError):  # noqa: N818 - named for the state, as queue.Full is
    """The client has not been started, or is closed."""


class QueueFull(ClientError):  # noqa: N818 - named for the state, as queue.Full is
    """A bound is reached: on requests in flight, or on messages that wait for the broker."""


class MessageRefused(ClientError):  # noqa: N818 - named for the state, as queue.Full is
    """The message cannot be sent, for example because this user has no right to write to the topic."""


class MessageTooLarge(MessageRefused):
    """The message is too large for the producer."""


class RequestIdInUse(MessageRefused):
    """A request with this id is open, or was lately."""
