"""Makes messages of JSON objects that have the fields of a log (`--columns`, `--actions`)."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, Final

import numpy as np

from relaygr.ingest.gather import item_number, user_name
from relaygr.ingest.json_lines import parse_log_object
from relaygr.ingest.layouts import (
    FLAG_VALUES,
    SAMPLE_LINES,
    NamedColumns,
    column_of,
    id_text,
    json_text,
    named_columns,
)
from relaygr.ingest.log_map import LogMap, rating_code, time_number
from relaygr.runtime.errors import RelayError
from relaygr.schemas.fields import FieldError
from relaygr.schemas.limits import MAX_BEHAVIOURS
from relaygr.schemas.messages import BehaviourEvent, Behaviours, History
from relaygr.schemas.times import UNITS_MS, unit_of, wrong_unit

_KEPT_FORMS: Final = 64


class MappedObjects:
    """A field may be a list, which then has one value for each behaviour of the user.

    Values mean what they mean in a log; each time has a unit of its own, and is from 1990 to 2100.
    """

    def __init__(self, names: LogMap) -> None:
        self._names = names
        self._sampled = 0
        self._has_actions = False
        """Whether one of the first objects had an action: as in a log, then each has one."""
        self._found: dict[tuple[str, ...], NamedColumns] = {}

    def event(self, content: dict[str, Any], now_ms: int) -> BehaviourEvent:
        """New behaviours; `now_ms` is their time if the object has none, or null. Raises ValueError."""
        return BehaviourEvent(*self._take(content, now_ms))

    def history(self, content: dict[str, Any], now_ms: int) -> History:
        """A snapshot up to its newest behaviour, whose time is its number, too. Raises ValueError."""
        found = self._columns(tuple(content))
        if not isinstance(content[found.fields[found.item]], list):
            raise FieldError(
                f"{found.fields[found.item]} is no list, so the object is one behaviour and no history: pass such a "
                "topic on by `relaygr publish behaviours`"
            )
        user, behaviours = self._take(content, now_ms)
        if not len(behaviours):
            raise FieldError("the object has no behaviours: delete a user by a record without a value")
        newest_ms = int(behaviours.timestamps_ms[-1])
        return History(user, newest_ms, np.empty(0, "<i8"), behaviours, cut_ms=newest_ms)

    def used(self, fields: tuple[str, ...]) -> frozenset[str]:
        """Those of an object's fields that are read. Raises FieldError if one that is needed is missing."""
        found = self._columns(fields)
        return frozenset(fields[column] for column in found.used)

    def used_of_key(self, fields: tuple[str, ...]) -> frozenset[str]:
        """The field of a deleted user's key that is read; none if the key has none."""
        at = column_of("user", fields, self._names)
        return frozenset() if at is None else frozenset((fields[at],))

    def deleted_user(self, key: bytes) -> str:
        """The user whom the key of a record without a value names: a text, a text of JSON, or an object of JSON.

        Raises ValueError.
        """
        try:
            named: Any = key.decode()
            if key.lstrip().startswith(b"{"):
                content = parse_log_object(key)
                at = column_of("user", list(content), self._names)
                if at is None:
                    seen = ", ".join(content)[:200]
                    raise FieldError(f"no field for the user among {seen}: name it by --columns user=NAME")
                named = list(content.values())[at]
            elif key.lstrip().startswith(b'"'):
                named = json.loads(named)
            return user_name(id_text(named, "user"))
        except UnicodeDecodeError as error:
            raise FieldError("the key: not UTF-8") from error
        except ValueError as error:
            raise FieldError(f"the key: {error}") from error

    def _take(self, content: dict[str, Any], now_ms: int) -> tuple[str, Behaviours]:
        found, values = self._columns(tuple(content)), list(content.values())

        def texts(column: int, text_of: Callable[[object, str], str] = json_text) -> list[str]:
            value = values[column]
            if isinstance(value, list) and len(value) > MAX_BEHAVIOURS:
                raise FieldError(
                    f"{found.fields[column]} is a list of {len(value):,} values, expected at most {MAX_BEHAVIOURS:,}"
                )
            return [text_of(each, found.fields[column]) for each in (value if isinstance(value, list) else [value])]

        items = [item_number(text) for text in texts(found.item, id_text)]
        times, actions = [now_ms] * len(items), [0] * len(items)
        if found.time is not None and values[found.time] is not None:
            times = [_time_ms(text, bool(found.time_is_ms)) for text in texts(found.time)]
        if found.action is not None:
            actions = [self._names.code(text) for text in texts(found.action)]
        elif found.rating is not None:
            actions = [rating_code(text) for text in texts(found.rating)]
        elif found.flags:
            flags = [[bit * _flag(text) for text in texts(column)] for column, bit in found.flags]
            if len(set(map(len, flags))) > 1:
                raise FieldError("the lists of flags have several lengths: give as many of each")
            actions = list(map(sum, zip(*flags, strict=True)))
        elif self._has_actions:
            raise FieldError("the object has no action, and the first objects have one: give one to each")
        if not len(items) == len(times) == len(actions):
            raise FieldError(f"{len(items)} items, {len(actions)} actions, {len(times)} times: give as many of each")
        order = np.argsort(times, kind="stable")
        behaviours = Behaviours(
            np.array(items, "<i8")[order], np.array(actions, "<u2")[order], np.array(times, "<i8")[order]
        )
        behaviours.check_unit("")
        user = user_name(id_text(values[found.user], found.fields[found.user]))
        if self._sampled < SAMPLE_LINES:  # A stray object later must not make all others bad.
            self._sampled += 1
            self._has_actions |= found.has_actions
        return user, behaviours

    def _columns(self, fields: tuple[str, ...]) -> NamedColumns:
        if (found := self._found.get(fields)) is None:
            try:
                found = named_columns("the object", fields, self._names)
            except RelayError as error:
                if {"schema", "payload"} <= set(fields):
                    raise FieldError(
                        "the object is an envelope of Kafka Connect (schema, payload): set "
                        "value.converter.schemas.enable=false in the connector"
                    ) from error
                raise FieldError(str(error)) from error
            if len(self._found) >= _KEPT_FORMS:
                self._found.clear()
            self._found[fields] = found
        return found


def _time_ms(text: str, is_ms: bool) -> int:
    value = time_number(text)
    unit = unit_of(value)
    if unit is None:
        raise FieldError(f"timestamp is {text[:40]!r}, expected a time from 1990 to 2100 since the epoch")
    if is_ms and (wrong := wrong_unit(round(value), "milliseconds")):
        raise FieldError(wrong)
    return round(value * UNITS_MS[unit])


def _flag(text: str) -> bool:
    if text not in FLAG_VALUES:
        raise FieldError(f"flag is {text[:40]!r}, expected 0 or 1")
    return FLAG_VALUES[text]
