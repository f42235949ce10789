"""Makes messages of JSON objects that have the fields of a log (`--columns`, `--actions`)."""

from __future__ import annotations

import json
from typing import Any, Final

import numpy as np

from relaygr.interactions.gather import item_number, user_name
from relaygr.interactions.layouts import NamedColumns, column_of, json_text, named_columns
from relaygr.interactions.mapping import LogMap, time_number
from relaygr.publishing.json_lines import parse_object
from relaygr.runtime.errors import RelayError
from relaygr.schemas.fields import FieldError
from relaygr.schemas.messages import BehaviourEvent, Behaviours, History
from relaygr.schemas.times import UNITS_MS, unit_of

_KEPT_FORMS: Final = 64


class MappedObjects:
    """A field may be a list, which then has one value for each behaviour of the user."""

    def __init__(self, names: LogMap) -> None:
        self._names = names
        self._found: dict[tuple[str, ...], NamedColumns] = {}

    def event(self, content: dict[str, Any], now_ms: int) -> BehaviourEvent:
        """New behaviours; `now_ms` is their time if the object has none. Raises ValueError."""
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

    def deleted_user(self, key: bytes) -> str:
        """The user whom the key of a record without a value names: a text, a text of JSON, or an object of JSON.

        Raises ValueError.
        """
        try:
            named: Any = key.decode()
            if key.lstrip().startswith(b"{"):
                content = parse_object(key)
                at = column_of("user", list(content), self._names)
                if at is None:
                    seen = ", ".join(content)[:200]
                    raise FieldError(f"no field for the user among {seen}: name it by --columns user=NAME")
                named = list(content.values())[at]
            elif key.lstrip().startswith(b'"'):
                named = json.loads(named)
            return user_name(json_text(named))
        except UnicodeDecodeError as error:
            raise FieldError("the key: not UTF-8") from error
        except ValueError as error:
            raise FieldError(f"the key: {error}") from error

    def _take(self, content: dict[str, Any], now_ms: int) -> tuple[str, Behaviours]:
        found, values = self._columns(tuple(content)), list(content.values())

        def texts(column: int) -> list[str]:
            value = values[column]
            return [json_text(each) for each in (value if isinstance(value, list) else [value])]

        items = [item_number(text) for text in texts(found.item)]
        times, actions = [now_ms] * len(items), [0] * len(items)
        if found.time is not None:
            times = [_time_ms(time_number(text), found.time_is_ms) for text in texts(found.time)]
        if found.action is not None:
            actions = [self._names.code(text) for text in texts(found.action)]
        elif found.rating is not None:
            actions = [self._names.code(str(np.rint(2 * float(text)))) for text in texts(found.rating)]
        if not len(items) == len(times) == len(actions):
            raise FieldError(f"{len(items)} items, {len(actions)} actions, {len(times)} times: give as many of each")
        order = np.argsort(times, kind="stable")
        behaviours = Behaviours(
            np.array(items, "<i8")[order], np.array(actions, "<u2")[order], np.array(times, "<i8")[order]
        )
        behaviours.check_unit("")
        return user_name(json_text(values[found.user])), behaviours

    def _columns(self, fields: tuple[str, ...]) -> NamedColumns:
        if (found := self._found.get(fields)) is None:
            try:
                found = named_columns("the object", fields, self._names)
            except RelayError as error:
                raise FieldError(str(error)) from error
            if len(self._found) >= _KEPT_FORMS:
                self._found.clear()
            self._found[fields] = found
        return found


def _time_ms(value: float, is_ms: bool) -> int:
    return round(value * UNITS_MS[(not is_ms and unit_of(value)) or "milliseconds"])
