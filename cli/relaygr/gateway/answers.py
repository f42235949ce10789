"""What the caller gets: the HTTP status, the body and the headers of each outcome and each refusal.

The OpenAPI document (openapi.py) lists them for callers.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any, Final

from relaygr.client import (
    ClientError,
    MessageRefused,
    MessageTooLarge,
    NotRunning,
    QueueFull,
    RankOutcome,
    RequestIdInUse,
)
from relaygr.schemas.ended import Ended, http_status
from relaygr.schemas.json_messages import to_json
from relaygr.schemas.messages import RetrievalEvent

RETRY_AFTER_S: Final = 1
"""Whole seconds are the shortest time that the header can name."""


@dataclass(frozen=True, slots=True)
class Answer:
    """The HTTP status, body and headers of an answer."""

    status: int
    content: dict[str, Any]
    headers: Mapping[str, str] = field(default_factory=dict)


class Refusal(Exception):  # noqa: N818 - it is an answer
    """The gateway answers without the relay."""

    def __init__(self, status: int, reason: str, message: str, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(message)
        self.answer = Answer(status, {"status": "refused", "reason": reason, "message": message}, headers or {})


def retry_later(status: int, reason: str, message: str, headers: Mapping[str, str] | None = None) -> Refusal:
    """A refusal for now."""
    return Refusal(status, reason, message, {**_retry_after(0), **(headers or {})})


def accepted(event: RetrievalEvent) -> Answer:
    """The answer to a retrieval event. Its fields belong into the ranking request of the impression."""
    content = {
        "status": "accepted",
        "request_id": event.request_id,
        "query_time_ms": event.retrieval_at_us // 1000,
    }
    return Answer(HTTPStatus.ACCEPTED, content)


def outcome_answer(outcome: RankOutcome) -> Answer:
    """The answer to a ranking request that was sent."""
    content, result = to_json(outcome), outcome.result
    status = http_status(outcome.status, outcome.reason)
    if outcome.status is not Ended.RANKED:
        content.setdefault("reason", outcome.status.value)
        if result is not None and result.detail is not None:
            content["message"] = result.detail
    backlog_us = result.backlog_us if result is not None else None
    is_for_now = status == HTTPStatus.SERVICE_UNAVAILABLE
    return Answer(status, content, _retry_after(backlog_us or 0) if is_for_now else {})


def refused_by_client(error: ClientError) -> Refusal:
    """The refusal for an error that the client raised before it sent anything."""
    if isinstance(error, QueueFull):
        return retry_later(HTTPStatus.SERVICE_UNAVAILABLE, "queue_full", str(error))
    if isinstance(error, NotRunning):
        return retry_later(HTTPStatus.SERVICE_UNAVAILABLE, "stopping", "the gateway is stopping: ask another one")
    if isinstance(error, RequestIdInUse):
        return Refusal(HTTPStatus.CONFLICT, "request_id_in_use", str(error))
    if isinstance(error, MessageTooLarge):
        return Refusal(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, "too_large", str(error))
    if isinstance(error, MessageRefused):
        return retry_later(HTTPStatus.SERVICE_UNAVAILABLE, "not_sent", str(error))
    raise error


def _retry_after(backlog_us: int) -> dict[str, str]:
    return {"retry-after": str(max(RETRY_AFTER_S, math.ceil(backlog_us / 1e6)))}
