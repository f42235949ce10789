"""Ids of a log as the messages want them: users stay text, items become 64-bit integers.

An item id that is a plain decimal integer of 64 bits stays that number. Any other text, `007`
included, becomes the first 63 bits of its blake2b hash: the same in every run and every file.
Two texts with one number would be two items in one: that stops the run.
"""

from __future__ import annotations

import re
from hashlib import blake2b
from typing import Final

from relaygr.runtime.errors import RelayError
from relaygr.schemas.fields import FieldError, Text

_PLAIN = re.compile(r"0|-?[1-9][0-9]{0,18}")
_USER_ID = Text(256)
_ITEM_ID = Text(4096)
_INT64: Final = 2**63


class BadIdError(ValueError):
    """A text that can not be an id; the message says why."""


def hashed_item(text: str) -> int:
    """The number of an item id that is not a number itself, 0 to 2**63 - 1."""
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "big") >> 1


class UserIndex(dict[str, int]):
    """User id to its place in the order of first appearance; `index[text]` adds. Raises BadIdError."""

    def __init__(self, latin1: bool) -> None:
        super().__init__()
        self._latin1 = latin1
        self.names: list[str] = []

    def __missing__(self, text: str) -> int:
        name = _cleaned(text, self._latin1)
        if name != text:
            return self[name]
        try:
            _USER_ID.unpack(name)
        except FieldError as error:
            raise BadIdError(f"user id: {error}") from error
        place = self[name] = len(self.names)
        self.names.append(name)
        return place


class ItemIndex(dict[str, int]):
    """Item id to its number; `index[text]` adds. Raises BadIdError, and RelayError for a collision."""

    def __init__(self, latin1: bool) -> None:
        super().__init__()
        self._latin1 = latin1
        self._hashed: dict[int, str] = {}

    @property
    def hashed_count(self) -> int:
        """Items whose id is no number."""
        return len(self._hashed)

    def __missing__(self, text: str) -> int:
        name = _cleaned(text, self._latin1)
        if name != text:
            return self[name]
        try:
            _ITEM_ID.unpack(name)
        except FieldError as error:
            raise BadIdError(f"item id: {error}") from error
        if _PLAIN.fullmatch(name) and -_INT64 <= int(name) < _INT64:
            number = int(name)
            other = self._hashed.get(number)
        else:
            number = hashed_item(name)
            other = self._hashed.get(number) or (str(number) if str(number) in self else None)
            self._hashed[number] = name
        if other is not None:
            raise RelayError(f"items {other!r} and {name!r} have the same number {number}: rename one of them")
        self[name] = number
        return number


def _cleaned(text: str, latin1: bool) -> str:
    """The id without surrounding blanks. Raises BadIdError if it is not text."""
    name = text.strip()
    if not name.isascii():
        try:
            name.encode()
        except UnicodeEncodeError as error:
            if not latin1:
                raise BadIdError("an id is not UTF-8") from error
            name = name.encode("utf-8", "surrogateescape").decode("latin-1")
    if not name:
        raise BadIdError("an id is empty")
    return name
