"""Makes the message to send from the JSON object of a line.

A line may omit ids and times, and may give a time relative to the moment of sending. `docs/publishing.md` describes
the format.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from relaygr.schemas.codec import field_specs
from relaygr.schemas.fields import FieldError, UInt
from relaygr.schemas.json_messages import from_json, refuse_unknown
from relaygr.schemas.messages import MAX_BUDGET_MS, BehaviourEvent, RankingRequest, RetrievalEvent
from relaygr.schemas.times import wrong_unit

_EXPECTED_IN: Final = "expected_ranking_in_ms"
_DEADLINE_IN: Final = "deadline_in_ms"
_ONE_BEHAVIOUR: Final = ("item", "action", "timestamp_ms")
_TIMES: Final = dict.fromkeys(
    ("retrieval_at_us", "expected_ranking_at_us", "sent_at_us", "deadline_us"), "microseconds"
) | {"query_time_ms": "milliseconds"}


def retrieval_from_line(
    content: dict[str, Any],
    new_id: Callable[[], str],
    now_us: int,
    *,
    ranking_budget_ms: int,
    expected_ranking_in_ms: int,
) -> RetrievalEvent:
    """The retrieval event of a line that is sent now. Raises FieldError."""
    refuse_unknown(content, [*_names(RetrievalEvent), _EXPECTED_IN])
    check_times(content)
    content = with_history_user(content)
    content.setdefault("retrieval_at_us", now_us)
    content.setdefault("ranking_budget_ms", ranking_budget_ms)
    _resolve(content, _EXPECTED_IN, "expected_ranking_at_us", "retrieval_at_us", expected_ranking_in_ms)
    return from_json(RetrievalEvent, _with_id(content, new_id))


def ranking_from_line(
    content: dict[str, Any], new_id: Callable[[], str], now_us: int, *, deadline_in_ms: int
) -> RankingRequest:
    """The ranking request of a line that is sent now. Raises FieldError."""
    refuse_unknown(content, [*_names(RankingRequest), _DEADLINE_IN])
    check_times(content)
    content = with_history_user(content)
    content.setdefault("sent_at_us", now_us)
    content.setdefault("query_time_ms", now_us // 1000)
    content.setdefault("suffix", {"items": [], "actions": [], "timestamps_ms": []})
    _resolve(content, _DEADLINE_IN, "deadline_us", "sent_at_us", deadline_in_ms)
    return from_json(RankingRequest, _with_id(content, new_id))


def behaviours_from_line(content: dict[str, Any], now_ms: int) -> BehaviourEvent:
    """The behaviours of a line: `behaviours`, or one by `item`, `action` (0) and `timestamp_ms` (now).

    Raises FieldError.
    """
    refuse_unknown(content, [*_names(BehaviourEvent), *_ONE_BEHAVIOUR])
    content = {name: value for name, value in content.items() if value is not None}
    given = [name for name in _ONE_BEHAVIOUR if name in content]
    if "behaviours" in content and given:
        raise FieldError(f".{given[0]}: give it or behaviours, not both")
    if "behaviours" not in content:
        if "item" not in content:
            raise FieldError(".item: give it, or behaviours")
        item, action, timestamp_ms = (
            content.pop(name, default) for name, default in zip(_ONE_BEHAVIOUR, (None, 0, now_ms), strict=True)
        )
        content["behaviours"] = {"items": [item], "actions": [action], "timestamps_ms": [timestamp_ms]}
    event = from_json(BehaviourEvent, content)
    for time_ms in event.behaviours.timestamps_ms.tolist():
        if wrong := wrong_unit(time_ms, "milliseconds"):
            raise FieldError(f".{given[-1] if given else 'behaviours.timestamps_ms'}: {wrong}")
    return event


def with_history_user(content: dict[str, Any]) -> dict[str, Any]:
    """A copy without nulls. An inline history without a user id gets the line's user id."""
    content = {name: value for name, value in content.items() if value is not None}
    history = content.get("history")
    if isinstance(history, dict) and "user_id" in content:
        content["history"] = {"user_id": content["user_id"], **history}
    return content


def check_times(content: dict[str, Any]) -> None:
    """Raises FieldError for a time in another unit than its name says, or before 1970."""
    for name, unit in _TIMES.items():
        time = content.get(name)
        if type(time) is int and (wrong := wrong_unit(time, unit)):
            raise FieldError(f".{name}: {wrong}")


def _names(message: type[Any]) -> list[str]:
    return [spec.name for spec in field_specs(message)]


def _with_id(content: dict[str, Any], new_id: Callable[[], str]) -> dict[str, Any]:
    return content if "request_id" in content else {**content, "request_id": new_id()}


def _resolve(content: dict[str, Any], relative: str, absolute: str, start: str, default_ms: int) -> None:
    """Replaces a relative time by the absolute one."""
    if relative in content and absolute in content:
        raise FieldError(f".{relative}: give it or {absolute}, not both")
    if absolute in content:
        return
    try:
        duration_ms = UInt("ms", MAX_BUDGET_MS).unpack(content.pop(relative, default_ms))
    except FieldError as error:
        raise FieldError(f".{relative}: {error}") from error
    try:
        start_us = UInt("µs since the epoch").unpack(content[start])
    except FieldError as error:
        raise FieldError(f".{start}: {error}") from error
    content[absolute] = start_us + duration_ms * 1000
