"""How a ranking request ends: one vocabulary for wire, client, worker, gateway, page, simulation and traffic.

A request ends once: as ranked, on a `Path`, or with another `Ended` and, if that needs one, a `Reason`. Each member has
its `row`: the HTTP status, and the names that it has elsewhere. Counters, metrics, schemas, legends and summaries
iterate over the members. So a new end is declared here.

The wire keeps its texts: a reader refuses an unknown end, and keeps an unknown reason as `Other`.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Final, Self


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """An end or a reason elsewhere. An empty name: an end has its own text there, a reason the name of its end."""

    is_on_wire: bool = True
    """Whether a result may have it."""
    needs_reason: bool = False
    http_status: int = 0
    """Of the gateway's answer; 0 in a reason: that of its end. 503 comes with the time after which to try again."""
    on_page: str = ""
    """On the live page."""
    in_simulation: str = ""
    """In `relaygr simulate`."""
    in_traffic: str = ""
    """The status in the records of `relaygr traffic`, if no result came after the deadline either."""


class _Declared(enum.StrEnum):
    """Members are declared as a text and a row."""

    row: Row

    def __new__(cls, text: str, row: Row = Row()) -> Self:
        member = str.__new__(cls, text)
        member._value_, member.row = text, row
        return member


class Ended(_Declared):
    """How a ranking request ended."""

    RANKED = "ranked", Row(http_status=200)
    EXPIRED = "expired", Row(http_status=504)
    FAILED = "failed", Row(http_status=502, needs_reason=True)
    TIMED_OUT = (
        "timed_out",
        Row(http_status=504, needs_reason=True, is_on_wire=False, on_page="unanswered", in_simulation="lost"),
    )
    """No result arrived by the deadline. Only the caller gets this end."""

    @property
    def on_page(self) -> str:
        """The name of an unranked end on the live page. A ranked request has the name of its path there."""
        return self.row.on_page or self.value


class Reason(_Declared):
    """Why a ranking request failed, or timed out."""

    OVERLOADED = "overloaded", Row(http_status=503, in_simulation="refused")
    UNDECODABLE = "undecodable"
    WRONG_PARTITIONER = "wrong_partitioner"
    UNKNOWN_SCENARIO = "unknown_scenario"
    """The worker's settings have no scenario of this name."""
    INVALID_DEADLINE = "invalid_deadline"
    TOO_LONG = "too_long", Row(http_status=400)
    OUT_OF_MEMORY = "out_of_memory"
    DEVICE_ERROR = "device_error"
    INVALID_RESULT = "invalid_result"
    """Set by the gateway's client: the result does not fit the request."""
    REFUSED_BY_KAFKA = "refused_by_kafka"
    """Set by the gateway's client: Kafka refused the request, and would refuse it again."""
    NO_ANSWER = "no_answer", Row(is_on_wire=False, in_traffic="lost")
    """Timed out: the broker acknowledged the request; no result arrived by the deadline."""
    NOT_ACKNOWLEDGED = "not_acknowledged", Row(is_on_wire=False, in_traffic="undelivered")
    """Timed out: the broker did not acknowledge the request, though it may have received it."""
    CLOSED = "closed", Row(is_on_wire=False, http_status=503)
    """Timed out: the client was closed before the deadline."""


UNRANKED: Final[tuple[Ended, ...]] = tuple(end for end in Ended if end is not Ended.RANKED)
WIRE_ENDS: Final = tuple(end for end in Ended if end.row.is_on_wire)
WIRE_REASONS: Final = tuple(reason for reason in Reason if reason.row.is_on_wire)


def http_status(ended: Ended, reason: str | None) -> int:
    """The status of the gateway's answer. The reason may be of a newer worker."""
    own = reason.row.http_status if isinstance(reason, Reason) else 0
    return own or ended.row.http_status


def in_simulation(ended: Ended, reason: Reason | None = None) -> str:
    """The name of an unranked end in a simulation. A ranked request has the name of its path there."""
    own = reason.row.in_simulation if reason is not None else ""
    return own or ended.row.in_simulation or ended.value
