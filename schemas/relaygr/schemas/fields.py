"""Kinds of message fields: how each is packed, checked and described.

A message is a `record` (`relaygr.schemas.record`) whose fields are annotated with one of these kinds
(`Annotated[str, Text(max_bytes=128), "what it means"]`). The codec, the validation and the
generated reference in `docs/messages.md` read the same annotation, so that they agree.

Every kind has bounds. `pack` and `unpack` raise `FieldError` for a value outside them, and no other
exception.
"""

from __future__ import annotations

import enum
import functools
import math
import re
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

INT64_MAX = 2**63 - 1
MAX_CHOICE_BYTES: Final = 64
"""The longest text of an open choice."""
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f]")


class FieldError(ValueError):
    """A value does not satisfy its field's type or bounds."""


class FieldKind(ABC):
    """One kind of field. `Any` is a msgpack value: None, bool, int, float, str, bytes, list or dict."""

    @abstractmethod
    def pack(self, value: Any, /) -> Any:
        """The msgpack value for `value`. Raises FieldError."""

    @abstractmethod
    def unpack(self, raw: Any, /) -> Any:
        """The Python value for a decoded msgpack value. Raises FieldError."""

    @abstractmethod
    def describe(self) -> str:
        """Type, bounds, shape and unit, in one line of the reference."""


@dataclass(frozen=True, slots=True)
class Text(FieldKind):
    """UTF-8 text of at least one and at most `max_bytes` bytes, without control characters."""

    max_bytes: int

    def unpack(self, raw: Any) -> str:
        if type(raw) is str and raw.isascii() and raw.isprintable() and 1 <= len(raw) <= self.max_bytes:
            return raw  # Almost every text: a byte a character, and no control character.
        if not isinstance(raw, str):
            raise FieldError(f"expected text, got {type(raw).__name__}")
        try:
            size = len(raw.encode())
        except UnicodeEncodeError as error:
            raise FieldError("not encodable as UTF-8") from error
        if not 1 <= size <= self.max_bytes:
            raise FieldError(f"{size} bytes of text, expected 1 to {self.max_bytes}")
        if _CONTROL.search(raw):
            raise FieldError("text contains control characters")
        return raw

    pack = unpack

    def describe(self) -> str:
        return f"text, 1 to {self.max_bytes} UTF-8 bytes, no control characters"


@dataclass(frozen=True, slots=True)
class UInt(FieldKind):
    """A whole number from `minimum` to `maximum`."""

    unit: str = ""
    maximum: int = INT64_MAX
    minimum: int = 0

    def pack(self, value: Any) -> Any:
        if type(value) is int and self.minimum <= value <= self.maximum:
            return value
        return self.unpack(int(value) if isinstance(value, np.integer) else value)

    def unpack(self, raw: Any) -> int:
        if type(raw) is int and self.minimum <= raw <= self.maximum:
            return raw
        if not isinstance(raw, int) or isinstance(raw, bool):
            raise FieldError(f"expected a whole number, got {type(raw).__name__}")
        if not self.minimum <= raw <= self.maximum:
            raise FieldError(f"{raw} is outside {self.minimum} to {self.maximum}")
        return raw

    def has_all(self, raw: list[Any] | tuple[Any, ...]) -> bool:
        """Whether each is such a number. A list of a worker's partitions takes a tenth of the time of `unpack` each."""
        return {*map(type, raw)} == {int} and self.minimum <= min(raw) and max(raw) <= self.maximum

    def describe(self) -> str:
        bound = "" if self.maximum == INT64_MAX else f" to {self.maximum}"
        return f"whole number from {self.minimum}{bound}" + (f", {self.unit}" if self.unit else "")


@dataclass(frozen=True, slots=True)
class Real(FieldKind):
    """A finite 64-bit float."""

    unit: str = ""

    def unpack(self, raw: Any) -> float:
        if isinstance(raw, bool) or not isinstance(raw, (int, float)):
            raise FieldError(f"expected a number, got {type(raw).__name__}")
        try:
            number = float(raw)
        except OverflowError as error:
            raise FieldError("the number is too large") from error
        if not math.isfinite(number):
            raise FieldError("the number is not finite")
        return number

    pack = unpack

    def describe(self) -> str:
        return "finite number" + (f", {self.unit}" if self.unit else "")


@dataclass(frozen=True, slots=True)
class Flag(FieldKind):
    """True or false."""

    def unpack(self, raw: Any) -> bool:
        if not isinstance(raw, bool):
            raise FieldError(f"expected true or false, got {type(raw).__name__}")
        return raw

    pack = unpack

    def describe(self) -> str:
        return "true or false"


class Other(str):
    """An unknown value of an open choice: the text that a newer version wrote.

    An `Other` equals its text and is not a member of the enum. A message with an `Other` is encoded with that text.
    """

    __slots__ = ()

    @property
    def value(self) -> str:
        """The text; the counterpart of an enum member's `value`."""
        return str(self)


OTHER: Final = "other"
"""The metric label of every `Other`."""


def choice_label(choice: enum.StrEnum | Other) -> str:
    """A metric label for a choice: the member's value, or `other`, so that the labels stay bounded."""
    return OTHER if isinstance(choice, Other) else choice.value


@dataclass(frozen=True, slots=True)
class Choice(FieldKind):
    """A member of a string enum, or one of some of its members, sent as its value. If `is_open`, any other text is read
    as `Other`.
    """

    members: type[enum.StrEnum] | tuple[enum.StrEnum, ...]
    is_open: bool = False
    _by_text: dict[str, enum.StrEnum] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_by_text", {member.value: member for member in self.members})

    def pack(self, value: Any) -> Any:
        if isinstance(value, str) and value in self._by_text:
            return self._by_text[value].value
        if self.is_open and isinstance(value, Other):
            return _OTHER_TEXT.pack(value.value)
        raise self._refusal(value)

    def unpack(self, raw: Any) -> enum.StrEnum | Other:
        if isinstance(raw, str):
            member = self._by_text.get(raw)
            if member is not None:
                return member
            if self.is_open:
                return Other(_OTHER_TEXT.unpack(raw))
        raise self._refusal(raw)

    def _refusal(self, raw: Any) -> FieldError:
        if not isinstance(raw, str):
            return FieldError(f"expected text, got {type(raw).__name__}")
        return FieldError(f"{raw[:40]!r} is not one of {', '.join(self.members)}")

    def describe(self) -> str:
        listed = "one of " + ", ".join(f"`{member}`" for member in self.members)
        return f"{listed}; open: a newer version may write another text" if self.is_open else listed


_OTHER_TEXT: Final = Text(MAX_CHOICE_BYTES)


@dataclass(frozen=True, slots=True)
class Digest(FieldKind):
    """Exactly `size` raw bytes."""

    size: int

    def unpack(self, raw: Any) -> bytes:
        if not isinstance(raw, bytes):
            raise FieldError(f"expected bytes, got {type(raw).__name__}")
        if len(raw) != self.size:
            raise FieldError(f"{len(raw)} bytes, expected {self.size}")
        return raw

    pack = unpack

    def describe(self) -> str:
        return f"{self.size} bytes"


@functools.cache
def _dtype(name: str) -> np.dtype[Any]:
    """The type of this name: numpy takes longer to read a name than to make a small array."""
    return np.dtype(name)


@dataclass(frozen=True, slots=True)
class Packed(FieldKind):
    """A one-dimensional array as packed little-endian bytes, read without a copy (and so read-only).

    `dtype` is a numpy name with its byte order, such as `<i8`.
    """

    dtype: str
    max_length: int
    shape: str
    min_length: int = 0
    finite: bool = False

    def pack(self, value: Any) -> Any:
        try:
            array = np.asarray(value)
        except (ValueError, TypeError, OverflowError) as error:
            raise FieldError(f"not an array of numbers: {error}") from error
        wanted = _dtype(self.dtype)
        if array.ndim != 1:
            raise FieldError(f"expected one dimension, got {array.ndim}")
        if array.dtype != wanted:
            if not _fits(array, wanted):
                raise FieldError(f"values of {array.dtype} do not all fit {wanted}")
            with np.errstate(over="ignore"):
                array = array.astype(wanted)
        self._check(array)
        return array.tobytes()

    def unpack(self, raw: Any) -> NDArray[Any]:
        if not isinstance(raw, bytes):
            raise FieldError(f"expected packed bytes, got {type(raw).__name__}")
        dtype = _dtype(self.dtype)
        if len(raw) % dtype.itemsize:
            raise FieldError(f"{len(raw)} bytes is not a multiple of {dtype.itemsize}")
        array = np.frombuffer(raw, dtype)
        self._check(array)
        return array

    def _check(self, array: NDArray[Any]) -> None:
        if not self.min_length <= array.size <= self.max_length:
            raise FieldError(f"{array.size} entries, expected {self.min_length} to {self.max_length}")
        if self.finite and not _is_finite(array):
            raise FieldError("an entry is not finite")

    def describe(self) -> str:
        finite = ", finite" if self.finite else ""
        return f"packed `{self.dtype}`, shape [{self.shape}], {self.min_length} to {self.max_length} entries{finite}"


FEW: Final = 256
"""At most so many numbers are checked without numpy. A call of numpy takes a microsecond in a loop, but up to 50 in a
process that has rested for milliseconds, because its code and data are not in the processor's caches any more."""


def _is_finite(array: NDArray[Any]) -> bool:
    if array.size <= FEW and math.isfinite(sum(array.tolist())):
        return True
    return bool(np.logical_and.reduce(np.isfinite(array)))


def _fits(array: NDArray[Any], wanted: np.dtype[Any]) -> bool:
    """Whether every value can be converted: whole numbers exactly, floats with rounding."""
    if array.size == 0:
        return True
    if wanted.kind == "f":
        return array.dtype.kind in "fiu"
    if array.dtype.kind not in "iu":
        return False
    bounds = np.iinfo(wanted)
    return int(array.min()) >= bounds.min and int(array.max()) <= bounds.max


@dataclass(frozen=True, slots=True)
class ListOf(FieldKind):
    """Up to `max_length` values of one kind, as a tuple."""

    item: FieldKind
    max_length: int

    def pack(self, value: Any) -> Any:
        self._check(value)
        return [self.item.pack(entry) for entry in value]

    def unpack(self, raw: Any) -> tuple[Any, ...]:
        self._check(raw)
        if isinstance(self.item, UInt) and self.item.has_all(raw):
            return tuple(raw)
        return tuple(self.item.unpack(entry) for entry in raw)

    def _check(self, value: Any) -> None:
        if not isinstance(value, (list, tuple)):
            raise FieldError(f"expected a list, got {type(value).__name__}")
        if len(value) > self.max_length:
            raise FieldError(f"{len(value)} entries, expected at most {self.max_length}")

    def describe(self) -> str:
        return f"list of up to {self.max_length}: {self.item.describe()}"
