"""How a log is read: its own columns and event names, `--columns` and `--actions`, and the order of ties, `--ties`.

A role without a column in `--columns` is found by the names that are known (`relaygr.ingest.layouts`).
"""

from __future__ import annotations

import datetime
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import Any, Final

from relaygr.runtime.errors import RelayError
from relaygr.training.logs import Ties

ROLES: Final = ("user", "item", "time", "action", "rating")
LARGEST_CODE: Final = 65_535
LARGEST_RATING: Final = 32_767
LARGEST_TIME: Final = 4e18
"""Larger times are no nanoseconds of this century."""
_NEAR: Final = 0.75
"""How like a name must be to be suggested: of less like ones all are listed."""
_EXPONENT = re.compile(r"\+?[0-9](?:\.([0-9]*))?[eE]\+([0-9]{1,3})")
"""As `printf` and spreadsheets write it. 1.7E9, without a sign, is how Java writes all digits of a float."""
_FLOATS_FROM: Final = 16
"""From 1e16 on programs write all floats with an exponent, and without zeros at the end."""
_EPOCH: Final = datetime.datetime(1970, 1, 1, tzinfo=datetime.UTC)


@dataclass(frozen=True, slots=True)
class LogMap:
    """What a log calls its columns and events."""

    columns: Mapping[str, str] = field(default_factory=dict)
    """Role -> column."""
    actions: Mapping[str, int] = field(default_factory=dict)
    """Event name -> action code; empty: the column of the action has codes. It may have these codes beside names."""
    ties: Ties = Ties.HASH
    """What orders a user's behaviours of equal time."""

    @property
    def has_names(self) -> bool:
        """Whether it names any column or event."""
        return bool(self.columns or self.actions)

    @property
    def wants_actions(self) -> bool:
        """Whether the action comes from the column of the action, even if there is one of ratings."""
        return bool(self.actions) or "action" in self.columns

    def code(self, event: str) -> int:
        """The action code of an event, or of a code that is one of `actions`. Raises ValueError with the cure."""
        if (code := self.actions.get(event)) is not None:
            return code
        try:
            value = float(event)
        except ValueError:
            value = -1.0
        if self.actions and value not in self.actions.values():
            raise ValueError(f"action is {event[:40]!r}, which --actions gives no code")
        if not 0 <= value <= LARGEST_CODE or value % 1:
            raise ValueError(
                f"action is {event[:40]!r}, expected a code of 0 to {LARGEST_CODE}: give names a code by --actions"
            )
        return int(value)

    def require(self, source: object, fields: Iterable[str]) -> None:
        """Raises RelayError for a column that a log does not have."""
        names = list(fields)
        for role, name in self.columns.items():
            if name not in names:
                near = get_close_matches(name, names, 1, _NEAR)
                raise RelayError(
                    f"{source}: --columns {role}={name}: there is no such column"
                    + (f"; did you mean {near[0]}?" if near else f" among {', '.join(names)[:200]}.")
                )


NO_MAP: Final = LogMap()


def log_map(columns: str | None, actions: str | None, ties: str = Ties.HASH) -> LogMap:
    """The map of the options. Raises RelayError."""
    named = _pairs("--columns", columns, "user=uid,item=sku,time=ts")
    if unknown := [role for role in named if role not in ROLES]:
        raise RelayError(f"--columns: {unknown[0]!r} is no role: give {', '.join(ROLES)}, such as user=uid.")
    if {"action", "rating"} <= named.keys():
        raise RelayError("--columns names an action and a rating: the action code comes from one of them.")
    codes = {}
    for event, code in _pairs("--actions", actions, "view=1,click=2").items():
        if not code.isdecimal() or int(code) > LARGEST_CODE:
            raise RelayError(f"--actions: the code of {event!r} is {code!r}, expected 0 to {LARGEST_CODE}.")
        codes[event] = int(code)
    if ties not in list(Ties):
        raise RelayError(f"--ties is {ties!r}: give {' or '.join(Ties)}.")
    return LogMap(named, codes, Ties(ties))


def recorded_map(run: Mapping[str, Any]) -> LogMap:
    """The map with which a training read its log, from the content of its `run.json`. Raises RelayError.

    Earlier releases kept the order of the file, and did not record it.
    """
    try:
        return LogMap(run.get("columns", {}), run.get("actions", {}), Ties(run.get("ties", Ties.FILE)))
    except ValueError as error:
        raise RelayError(f"run.json: {error}: the run is not of this release. Train again.") from error


def _pairs(option: str, text: str | None, example: str) -> dict[str, str]:
    found: dict[str, str] = {}
    for part in (text or "").split(",") if text is not None else ():
        name, is_pair, value = (each.strip() for each in part.partition("="))
        if not (name and is_pair and value):
            raise RelayError(f"{option} is {text!r}: give NAME=VALUE between commas, such as {example}.")
        if name in found:
            raise RelayError(f"{option} gives {name!r} twice.")
        found[name] = value
    return found


def rating_code(text: str) -> int:
    """The action code of a rating: twice its stars. Raises ValueError, with the reason."""
    try:
        value = float(text)
    except ValueError as error:
        raise ValueError(f"rating is {text[:40]!r}, expected a number") from error
    if not 0 <= value <= LARGEST_RATING:  # In this form the comparison is false for NaN too.
        raise ValueError(f"rating is {text[:40]!r}, expected 0 to {LARGEST_RATING}")
    return round(2 * value)


def lost_digits(text: str) -> bool:
    """Whether a number is written with an exponent and too few digits to be a time, such as 1.700e+09."""
    found = _EXPONENT.fullmatch(text.strip())
    if found is None:
        return False
    return len(found[1] or "") < int(found[2]) < _FLOATS_FROM


def time_number(text: str) -> float:
    """A time as a number in its own unit; one of ISO 8601 in ms. Raises ValueError, with the reason."""
    if lost_digits(text):
        raise ValueError(f"timestamp {text[:40]!r} has lost its last digits: write whole numbers")
    try:
        value = float(text)
    except ValueError:
        try:
            value = float(iso_ms(text))
        except ValueError as error:
            raise ValueError(f"timestamp is {text[:40]!r}, expected a number or 2026-11-27T08:30:00Z") from error
    if not 0 <= value <= LARGEST_TIME:  # In this form the comparison is false for NaN too.
        raise ValueError(f"timestamp is {text[:40]!r}, expected 0 to {LARGEST_TIME:.0f}")
    return value


def lacks_zone(text: str) -> bool:
    """Whether it is a time of ISO 8601 without a zone."""
    try:
        return _named(text).tzinfo is None and not text.strip().endswith(" UTC") and not text.strip().isdecimal()
    except ValueError:
        return False


def _named(text: str) -> datetime.datetime:
    """Raises ValueError."""
    return datetime.datetime.fromisoformat(text.strip().removesuffix(" UTC"))


def iso_ms(text: str) -> int:
    """The ms since the epoch of a time of ISO 8601, in UTC unless it says otherwise. Raises ValueError."""
    named = _named(text)
    named = named if named.tzinfo else named.replace(tzinfo=datetime.UTC)
    # Whole numbers: the product of a float would be a millisecond less at times.
    return (named - _EPOCH) // datetime.timedelta(milliseconds=1)
