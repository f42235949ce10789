"""Reads values of Avro whose schema is known (`relaygr.ingest.registered`).

Only the fields that are used become values. The bytes of the others are passed over, whatever they are: they may name
their own type, and claim more items than there are bytes. fastavro parses the schemas; its reader of values would
follow such claims in machine code, without a bound.
"""

from __future__ import annotations

import json
import struct
import uuid
from collections.abc import Callable, Collection, Mapping, Sequence
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from typing import Any, Final, NoReturn

import fastavro

from relaygr.ingest.registry import Schema
from relaygr.schemas.fields import FieldError
from relaygr.schemas.limits import MAX_BEHAVIOURS

_LONGEST_NUMBER: Final = 10
"""Bytes of an integer of 64 bits."""
_BROKEN: Final = (ValueError, LookupError, TypeError, AttributeError)
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)

Used = Callable[[tuple[str, ...]], Collection[str]]
"""Which of a record's fields are used. Raises ValueError if the record cannot be."""


class AvroReader:
    """Reads the values of one schema."""

    def __init__(self, schema: Schema) -> None:
        """Raises ValueError if the schema cannot be read."""
        named: dict[str, Any] = {}
        parsed: Any = None
        texts = [*(content for _, content in schema.needed), schema.content]
        try:
            for text in texts:
                parsed = fastavro.parse_schema(json.loads(text, object_hook=_as_written), named)
            self._type = _type_of(parsed, named, {})
        except RecursionError as error:
            raise FieldError("is nested too deeply") from error
        # fastavro checks only a part of what it parses.
        except (*_BROKEN, fastavro.schema.SchemaParseException) as error:
            raise FieldError(f"cannot be read: {type(error).__name__} {str(error)[:200]}") from error

    def read(self, content: bytes, at: int, used: Used) -> Any:
        """The value from a position to the end, in types of JSON. Times are texts; a field that is not used is None.

        Raises ValueError for bad bytes.
        """
        kind = self._type
        try:
            if isinstance(kind, _Union):
                kind, at = kind.branch(content, at)
            value, at = kind.fields(content, at, used) if isinstance(kind, _Record) else kind.read(content, at)
        except IndexError as error:
            raise FieldError("not Avro of its schema: bytes are missing") from error
        except RecursionError as error:
            raise FieldError("not Avro of its schema: nested too deeply") from error
        except ArithmeticError as error:  # A time or a decimal may be beyond those of Python.
            raise FieldError(str(error)) from error
        if at != len(content):
            raise FieldError("not Avro of its schema: bytes are left")
        return value


def _as_written(schema: dict[str, Any]) -> dict[str, Any]:
    """A part of a schema without what its values do not depend on.

    Registries keep wrong defaults by their own default, and connectors write `decimal` with the scale 127 for a number
    of any scale. The parser refuses both, and with them every record, though such a field may not be used at all.
    """
    schema.pop("default", None)
    if schema.get("type") == "error":  # The record of a failed call.
        schema["type"] = "record"
    logical = schema.get("logicalType")
    scale = schema.get("scale", 0)
    precision = schema.pop("precision", scale)
    has_scale = isinstance(scale, int) and isinstance(precision, int) and 0 <= scale <= precision
    if not isinstance(logical, str) or (logical == "decimal" and not has_scale):
        schema.pop("logicalType", None)  # Avro: a logical type that is not valid counts as its type.
    return schema


def zigzag(data: bytes, at: int) -> tuple[int, int]:
    """The integer of 64 bits at a position, and the position after it. Raises IndexError if the data ends before."""
    byte = data[at]
    if byte < 0x80:
        return (byte >> 1) ^ -(byte & 1), at + 1
    value, first = byte & 0x7F, at
    while byte >= 0x80:
        at += 1
        if at - first == _LONGEST_NUMBER:
            raise FieldError("an integer has more than 64 bits")
        byte = data[at]
        value |= (byte & 0x7F) << 7 * (at - first)
    return (value >> 1) ^ -(value & 1), at + 1


def _length(data: bytes, at: int) -> tuple[int, int]:
    """A number of bytes, which is not negative."""
    length, at = zigzag(data, at)
    if length < 0:
        raise FieldError("a length is negative")
    return length, at


def _block(data: bytes, at: int) -> tuple[int, int | None, int]:
    """The number of items in the next block of a list, their bytes if they are given, and the position of the items."""
    count, at = zigzag(data, at)
    length = None
    if count < 0:
        count = -count
        length, at = _length(data, at)
    if count > len(data):  # Items without bytes: a record of seven bytes could name 2^40 of them.
        raise FieldError(f"it claims {count:,} items, and the record has {len(data):,} bytes")
    return count, length, at


Convert = Callable[[Any], Any]


class _Type:
    """A type of Avro. Each method takes the bytes and a position, and returns the position after the value.

    All raise IndexError if the bytes end before the value does, and ValueError.
    """

    is_empty = False
    """Whether its values take no bytes."""

    def skip(self, data: bytes, at: int) -> int:
        """Makes no objects, and takes time by the bytes that are there."""
        raise NotImplementedError

    def read(self, data: bytes, at: int) -> tuple[Any, int]:
        raise NotImplementedError


class _Fixed(_Type):
    """Values of one size. Without `convert` they are bytes."""

    def __init__(self, size: int, convert: Convert | None = None) -> None:
        if size < 0:
            raise FieldError("a size is negative")
        self._size, self._convert = size, convert or refuse_bytes
        self.is_empty = size == 0

    def skip(self, data: bytes, at: int) -> int:
        if at + self._size > len(data):
            raise IndexError
        return at + self._size

    def read(self, data: bytes, at: int) -> tuple[Any, int]:
        end = self.skip(data, at)
        return self._convert(data[at:end]), end


class _Number(_Type):
    def __init__(self, convert: Convert | None = None) -> None:
        self._convert = convert

    def skip(self, data: bytes, at: int) -> int:
        return zigzag(data, at)[1]

    def read(self, data: bytes, at: int) -> tuple[Any, int]:
        value, at = zigzag(data, at)
        return value if self._convert is None else self._convert(value), at


class _Sized(_Type):
    """A text or bytes, after their length."""

    def __init__(self, convert: Convert) -> None:
        self._convert = convert

    def skip(self, data: bytes, at: int) -> int:
        length, at = _length(data, at)
        if at + length > len(data):
            raise IndexError
        return at + length

    def read(self, data: bytes, at: int) -> tuple[Any, int]:
        length, at = _length(data, at)
        if at + length > len(data):
            raise IndexError
        return self._convert(data[at : at + length]), at + length


class _Union(_Type):
    def __init__(self, branches: Sequence[_Type]) -> None:
        self._branches = branches

    def branch(self, data: bytes, at: int) -> tuple[_Type, int]:
        index, at = zigzag(data, at)
        if not 0 <= index < len(self._branches):
            raise FieldError(f"it is of branch {index} of a union of {len(self._branches)}")
        return self._branches[index], at

    def skip(self, data: bytes, at: int) -> int:
        kind, at = self.branch(data, at)
        return kind.skip(data, at)

    def read(self, data: bytes, at: int) -> tuple[Any, int]:
        kind, at = self.branch(data, at)
        return kind.read(data, at)


class _List(_Type):
    """An array, or with `keys` a map: blocks of items, each after their number, and a number of 0."""

    def __init__(self, items: _Type, keys: _Type | None = None) -> None:
        self._items, self._keys = items, keys

    def skip(self, data: bytes, at: int) -> int:
        keys, items = self._keys, self._items
        while True:
            count, length, at = _block(data, at)
            if count == 0:
                return at
            if length is not None:
                at += length
            elif keys is not None:
                for _ in range(count):
                    at = items.skip(data, keys.skip(data, at))
            elif not items.is_empty:
                for _ in range(count):
                    at = items.skip(data, at)

    def read(self, data: bytes, at: int) -> tuple[Any, int]:
        if self._keys is not None:
            raise FieldError("it is a map, expected a text, a number or a list")
        values: list[Any] = []
        while True:
            count, _, at = _block(data, at)
            if count == 0:
                return values, at
            if self._items.is_empty:
                raise FieldError("it is a list of nulls, expected texts or numbers")
            check_length(len(values) + count)
            for _ in range(count):
                value, at = self._items.read(data, at)
                values.append(value)


class _Record(_Type):
    def __init__(self) -> None:
        """`define` follows: the types of a record's fields may have fields of this type."""
        self._fields: list[tuple[str, _Type]] = []
        self._names: tuple[str, ...] = ()
        self._with_bytes: list[_Type] = []

    def define(self, fields: list[tuple[str, _Type]]) -> None:
        self._fields = fields
        self._names = tuple(name for name, _ in fields)
        self._with_bytes = [kind for _, kind in fields if not kind.is_empty]
        self.is_empty = not self._with_bytes

    def fields(self, data: bytes, at: int, used: Used) -> tuple[dict[str, Any], int]:
        """Its fields by name; None stands for one that is not used."""
        wanted = used(self._names)
        values = dict.fromkeys(self._names)
        for name, kind in self._fields:
            try:
                if name in wanted:
                    values[name], at = kind.read(data, at)
                else:
                    at = kind.skip(data, at)
            except (ValueError, ArithmeticError) as error:
                raise FieldError(f"{name}: {error}") from error
        return values, at

    def skip(self, data: bytes, at: int) -> int:
        for kind in self._with_bytes:
            at = kind.skip(data, at)
        return at

    def read(self, _data: bytes, _at: int) -> tuple[Any, int]:
        raise FieldError("it is a record, expected a text, a number or a list")


def refuse_bytes(_: object) -> NoReturn:
    """Raises FieldError."""
    raise FieldError("it is bytes, expected a text, a number or a list")


def check_length(count: int) -> None:
    """Raises FieldError for a list that no history has."""
    if count > MAX_BEHAVIOURS:
        raise FieldError(f"it is a list of {count:,} values, expected at most {MAX_BEHAVIOURS:,}")


def time_text(per_second: int) -> Convert:
    """Of a number of units since the epoch."""
    return lambda value: (_EPOCH + timedelta(microseconds=value * 1_000_000 // per_second)).isoformat()


def decimal_text(content: bytes, scale: int) -> str:
    """Of the unscaled value. Raises ValueError or ArithmeticError."""
    return str(Decimal(f"{int.from_bytes(content, 'big', signed=True)}e{-scale}"))


def _decimal(schema: Mapping[str, Any]) -> Convert:
    scale = int(schema.get("scale", 0))
    return lambda content: decimal_text(content, scale)


def _symbol(symbols: Sequence[str]) -> Convert:
    def text(index: int) -> str:
        if not 0 <= index < len(symbols):
            raise FieldError(f"it is symbol {index} of an enum of {len(symbols)}")
        return symbols[index]

    return text


_PRIMITIVES: Final[dict[str, _Type]] = {
    "null": _Fixed(0, lambda _: None),
    "boolean": _Fixed(1, lambda content: content != b"\0"),
    "int": _Number(),
    "long": _Number(),
    "float": _Fixed(4, lambda content: struct.unpack("<f", content)[0]),
    "double": _Fixed(8, lambda content: struct.unpack("<d", content)[0]),
    "bytes": _Sized(refuse_bytes),
    "string": _Sized(bytes.decode),
}
_TIMES: Final[dict[str, _Type]] = {
    f"{zone}timestamp-{unit}": _Number(time_text(per_second))
    for zone in ("", "local-")
    for unit, per_second in (("millis", 1000), ("micros", 1_000_000), ("nanos", 1_000_000_000))
}
_LOGICAL: Final[dict[tuple[str, str], _Type]] = {
    **{("long", name): kind for name, kind in _TIMES.items()},
    ("int", "date"): _Number(lambda days: (date(1970, 1, 1) + timedelta(days)).isoformat()),
    ("string", "uuid"): _Sized(lambda content: str(uuid.UUID(content.decode()))),
}
"""By type and logical type. One that is not here counts as its type, as Avro demands."""


def _type_of(schema: Any, named: Mapping[str, Any], made: dict[str, _Type]) -> _Type:
    """The type of a parsed schema. `named`: types by their names; `made`: what was made of them.

    Raises LookupError, TypeError or ValueError for a schema that is none.
    """
    if isinstance(schema, str):
        known = _PRIMITIVES.get(schema) or made.get(schema)
        return known if known is not None else _type_of(named[schema], named, made)
    if isinstance(schema, list):
        return _Union([_type_of(each, named, made) for each in schema])
    kind, logical = schema["type"], schema.get("logicalType")
    if kind == "array":
        return _List(_type_of(schema["items"], named, made))
    if kind == "map":
        return _List(_type_of(schema["values"], named, made), _PRIMITIVES["string"])
    if kind == "record":
        record = made[schema["name"]] = _Record()
        record.define([(each["name"], _type_of(each["type"], named, made)) for each in schema["fields"]])
        return record
    if kind == "enum":
        own: _Type = _Number(_symbol(schema["symbols"]))
    elif kind == "fixed":
        size = int(schema["size"])
        own = _Fixed(size, _decimal(schema) if logical == "decimal" else None)
        if logical == "uuid":
            own = _Fixed(size, lambda content: str(uuid.UUID(bytes=content)))
    elif kind == "bytes" and logical == "decimal":
        return _Sized(_decimal(schema))
    else:
        return _LOGICAL.get((kind, logical)) or _type_of(kind, named, made)
    made[schema["name"]] = own
    return own
