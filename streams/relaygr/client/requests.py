"""Makes request ids, and messages from a gateway's keyword arguments."""

from __future__ import annotations

import itertools
import re
import secrets
from collections.abc import Mapping, Sequence
from typing import Any, Final, Required, TypedDict, get_origin, get_type_hints

import numpy as np
from numpy.typing import ArrayLike

from relaygr.runtime.clock import Clock
from relaygr.schemas.codec import EncodeError
from relaygr.schemas.fields import FieldError, UInt
from relaygr.schemas.messages import MAX_BUDGET_MS, Behaviours, History, HistoryVersion, RankingRequest, RetrievalEvent
from relaygr.schemas.record import record

_LEAD_MS: Final = UInt("ms", MAX_BUDGET_MS)
_GATEWAY_ID: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


HISTORY_AND_SCENARIO: Final = ("history_version", "history", "history_exactly", "history_at_least", "scenario")
"""The optional fields that retrieval events and ranking requests have in common."""


class RetrievalFields(TypedDict, total=False):
    """Keyword arguments of `publish_retrieval`."""

    ranking_budget_ms: Required[int]
    """Time limit of the ranking stage."""
    expected_ranking_in_ms: Required[int]
    """Time from now to the ranking request, at most `MAX_BUDGET_MS`: the usual duration of retrieval and
    pre-processing."""
    expected_candidates: Required[int]
    expected_suffix: Required[int]
    """Number of short-term behaviours in the ranking request."""
    history_version: HistoryVersion | None
    """The history to use; absent: the newest that the worker has."""
    history: History | None
    """The history itself, if the history topic does not carry it."""
    history_exactly: int | None
    """Instead of a version: N, for exactly the first N behaviours."""
    history_at_least: int | None
    """Instead of a version: N, for the newest history with at least N behaviours."""
    scenario: str | None
    """The scenario, such as `home`; absent: `default`."""
    request_id: str | None
    """Absent: a new one."""
    traceparent: str | None
    """The caller's span, as W3C Trace Context writes it; ignored if invalid."""


class RankFields(TypedDict, total=False):
    """Keyword arguments of `rank`."""

    budget_ms: Required[float]
    """Time from now to the deadline; more than 0, at most `MAX_BUDGET_MS`."""
    suffix: Behaviours | Sequence[tuple[int, int, int]] | None
    """Short-term behaviours that follow the prefix; a sequence has `(item, action, timestamp_ms)` of each."""
    query_time_ms: int | None
    """`retrieval_at_us // 1000` of the impression's retrieval event; absent: now."""
    history_version: HistoryVersion | None
    """The history to use; absent: the newest that the worker has."""
    history: History | None
    """The history itself, if the history topic does not carry it."""
    history_exactly: int | None
    """Instead of a version: N, for exactly the first N behaviours."""
    history_at_least: int | None
    """Instead of a version: N, for the newest history with at least N behaviours."""
    scenario: str | None
    """The scenario, such as `home`; absent: `default`."""
    request_id: str | None
    """The request id of the impression's retrieval event; absent: a new one."""
    traceparent: str | None
    """The caller's span, as W3C Trace Context writes it; ignored if invalid."""


class RequestIds:
    """Ids `GATEWAY.INCARNATION.SEQUENCE.TOKEN`: unique over gateways, restarts and calls. Thread-safe.

    The incarnation is the start time in milliseconds and 32 random bits, in hexadecimal. The token has 64 random
    bits, so that a writer that knows one id cannot send a result for the next. Raises ValueError for
    a gateway id that is not 1 to 64 characters of `A-Za-z0-9._-`, or does not begin with a letter or digit.
    """

    def __init__(self, gateway_id: str, clock: Clock) -> None:
        if not _GATEWAY_ID.fullmatch(gateway_id):
            raise ValueError(
                f"gateway id {gateway_id!r}: allowed are 1 to 64 of a-z, A-Z, 0-9, '.', '_' and '-', "
                "beginning with a letter or digit"
            )
        self._prefix = f"{gateway_id}.{clock.wall_us() // 1000:x}{secrets.token_hex(4)}."
        self._sequence = itertools.count(1)

    def new(self) -> str:
        """The next id."""
        return f"{self._prefix}{next(self._sequence)}.{secrets.token_hex(8)}"


def retrieval_event(request_id: str, user_id: str, now_us: int, fields: RetrievalFields) -> RetrievalEvent:
    """The event of an impression that begins now.

    Raises EncodeError for a lead time out of bounds, TypeError for a field that is missing or unknown.
    """
    _RETRIEVAL_NAMES.check(fields)
    try:
        lead_ms = _LEAD_MS.pack(fields["expected_ranking_in_ms"])
    except FieldError as error:
        raise EncodeError(f"expected_ranking_in_ms: {error}") from error
    return RetrievalEvent(
        request_id=request_id,
        user_id=user_id,
        retrieval_at_us=now_us,
        expected_ranking_at_us=now_us + lead_ms * 1000,
        ranking_budget_ms=fields["ranking_budget_ms"],
        expected_candidates=fields["expected_candidates"],
        expected_suffix=fields["expected_suffix"],
        **_optional(fields),
    )


def ranking_request(
    request_id: str, user_id: str, candidates: ArrayLike, now_us: int, fields: RankFields
) -> RankingRequest:
    """A ranking request that is sent now.

    Raises ValueError for a budget out of bounds or a wrong suffix, TypeError for a field that is missing or unknown.
    """
    _RANK_NAMES.check(fields)
    if not 0 < fields["budget_ms"] <= MAX_BUDGET_MS:
        raise ValueError(f"budget_ms is {fields['budget_ms']}: expected more than 0 and at most {MAX_BUDGET_MS}")
    query_time_ms = fields.get("query_time_ms")
    return RankingRequest(
        request_id=request_id,
        user_id=user_id,
        sent_at_us=now_us,
        deadline_us=now_us + round(float(fields["budget_ms"]) * 1000),
        query_time_ms=now_us // 1000 if query_time_ms is None else query_time_ms,
        candidates=np.asarray(candidates),
        suffix=_behaviours(fields.get("suffix")),
        **_optional(fields),
    )


def _optional(fields: RetrievalFields | RankFields) -> dict[str, Any]:
    return {name: fields.get(name) for name in HISTORY_AND_SCENARIO}


def _behaviours(given: Behaviours | Sequence[tuple[int, int, int]] | None) -> Behaviours:
    if isinstance(given, Behaviours):
        return given
    try:
        return Behaviours.of(given) if given is not None else Behaviours.empty()
    except (TypeError, ValueError) as error:
        raise ValueError(f"suffix: give Behaviours, or (item, action, timestamp_ms) of each one: {error}") from None


@record(frozen=True, slots=True)
class _Names:
    """The names of a TypedDict. `__required_keys__` ignores `Required` in annotations that are strings."""

    required: frozenset[str]
    allowed: frozenset[str]

    @classmethod
    def of(cls, fields: type[Any]) -> _Names:
        hints = get_type_hints(fields, include_extras=True)
        required = frozenset(name for name, hint in hints.items() if get_origin(hint) is Required)
        return cls(required, frozenset(hints))

    def check(self, given: Mapping[str, object]) -> None:
        """Raises TypeError for an unknown or a missing name, which Python does not do for `**fields`."""
        if not given.keys() <= self.allowed:
            unknown = min(given.keys() - self.allowed)
            raise TypeError(f"there is no argument {unknown!r}; the arguments are {', '.join(sorted(self.allowed))}")
        if not given.keys() >= self.required:
            raise TypeError(f"the argument {min(self.required - given.keys())!r} is missing")


_RETRIEVAL_NAMES: Final = _Names.of(RetrievalFields)
_RANK_NAMES: Final = _Names.of(RankFields)
