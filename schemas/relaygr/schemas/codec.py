"""MessagePack codec: `encode(message)` and `decode(Class, data)`.

Wire form: two MessagePack values, one after the other.

1. the schema version, a positive fixint (so exactly one byte, 0x01 to 0x7f);
2. the body, a map from field name to value; nested messages are maps, arrays are packed
   little-endian bytes.

How the schema changes:

* A new *optional* field keeps the version. A reader ignores a field that it does not know (the bounds on
  number and size hold for it too), and takes the default of a field that is absent or nil.
* A new member of an *open* choice keeps the version. The open choices are `reason`, `path`, `prefix_source` and
  `history_stale_cause` of a result and `state` of a worker's status: no other field depends on a new member of them. A
  reader keeps an unknown text as `Other(text)`, encodes it unchanged, and labels its metrics `other`. A writer still
  refuses a plain text that is not a member.
* Everything else takes the next version: a new required field, a changed meaning, unit or bound, and a new
  member of a *closed* choice. `outcome` is closed, because it decides which other fields a result must have
  and what a gateway does next. A reader refuses an unknown version with
  `DecodeError(UNSUPPORTED_VERSION)` and writes the message to dead letters, from where it can be replayed
  after the reader's upgrade. So a new version is deployed to readers before writers.
* Tests in `tests/schemas/` compare the wire form with recorded bytes.

`decode` bounds each length before it allocates, and bounds the number of maps and lists and of their entries, so
that a message cannot expand into much more memory than it takes on the wire. `decode` refuses a map with a repeated
field, and extension types. It raises `DecodeError` for invalid bytes, and no other exception.
"""

from __future__ import annotations

import enum
import types
import typing
from collections.abc import Callable, Collection
from dataclasses import MISSING, dataclass, fields, is_dataclass
from typing import Any, TypeVar

import msgpack

from relaygr.schemas.fields import FieldError, FieldKind
from relaygr.schemas.limits import MAX_MESSAGE_BYTES

SCHEMA_VERSION = 1
_VERSION_BYTE = bytes((SCHEMA_VERSION,))
MAX_MAP_ENTRIES = 64
MAX_LIST_ENTRIES = 4096
MAX_TEXT_BYTES = 4096
SHORT_ENTRIES = 32
"""Maps and lists of at most this length are decoded at once: 1,024 of them, msgpack's deepest nesting, take 0.3 MB."""
MAX_ENTRIES = 2 * MAX_LIST_ENTRIES
"""The largest number of entries in all maps and lists of a message with a longer one. The longest status has 4,400."""
MAX_CONTAINERS = 64
"""The largest number of maps and lists in one message. Our messages have at most 8. An empty map takes one byte on
the wire and 64 bytes in memory."""

M = TypeVar("M")


class DecodeReason(enum.StrEnum):
    """Why a message could not be decoded. The set is bounded: it is a metric label, and a header of dead letters."""

    EMPTY = "empty"
    TOO_LARGE = "too_large"
    UNSUPPORTED_VERSION = "unsupported_version"
    MALFORMED = "malformed"
    INVALID_FIELD = "invalid_field"


class DecodeError(ValueError):
    """The bytes are not a valid message. The text names the field and the cause."""

    def __init__(self, reason: DecodeReason, message: str) -> None:
        super().__init__(message)
        self.reason = reason


class EncodeError(ValueError):
    """A message contains a value outside its field's type or bounds."""


@dataclass(frozen=True, slots=True)
class Nested(FieldKind):
    """A message within a message, encoded as a map."""

    message: type[Any]

    def pack(self, value: Any) -> Any:
        if not isinstance(value, self.message):
            raise FieldError(f"expected {self.message.__name__}, got {type(value).__name__}")
        return _pack(value)

    def unpack(self, raw: Any) -> Any:
        return _unpack(self.message, raw)

    def describe(self) -> str:
        return f"[{self.message.__name__}](#{self.message.__name__.lower()})"


@dataclass(frozen=True, slots=True)
class FieldSpec:
    """One field of a message class, from its annotation."""

    name: str
    kind: FieldKind
    doc: str
    optional: bool


def field_specs(message: type[Any]) -> tuple[FieldSpec, ...]:
    """The fields of a message class in order. Raises TypeError if an annotation contains no FieldKind."""
    specs = _SPECS.get(message)
    if specs is None:
        specs = _SPECS[message] = _read_specs(message)
    return specs


_SPECS: dict[type[Any], tuple[FieldSpec, ...]] = {}


def _read_specs(message: type[Any]) -> tuple[FieldSpec, ...]:
    if not is_dataclass(message):
        raise TypeError(f"{message.__name__} is not a message")
    hints = typing.get_type_hints(message, include_extras=True)
    specs = []
    for field in fields(message):
        annotation = hints[field.name]
        optional = field.default is not MISSING
        if typing.get_origin(annotation) in (typing.Union, types.UnionType):
            annotation = next(arg for arg in typing.get_args(annotation) if arg is not type(None))
        extras = getattr(annotation, "__metadata__", ())
        kind = next((extra for extra in extras if isinstance(extra, FieldKind)), None)
        doc = next((extra for extra in extras if isinstance(extra, str)), "")
        plain = typing.get_args(annotation)[0] if extras else annotation
        if typing.get_origin(plain) in (typing.Union, types.UnionType):
            plain = next(arg for arg in typing.get_args(plain) if arg is not type(None))
        if kind is None and is_dataclass(plain):
            kind = Nested(typing.cast(type[Any], plain))
        if kind is None:
            raise TypeError(f"{message.__name__}.{field.name} has no field kind in its annotation")
        specs.append(FieldSpec(field.name, kind, doc, optional))
    return tuple(specs)


_Fields = tuple[tuple[str, bool, Callable[[Any], Any], Callable[[Any], Any]], ...]
_Plan = tuple[_Fields, Callable[[Any], None] | None]
_PLANS: dict[type[Any], _Plan] = {}
"""The fields of each message class as (name, optional, pack, unpack), and its `check` of rules over several fields:
plain tuples, since every message passes here."""


def _plan(message: type[Any]) -> _Plan:
    listed = tuple((spec.name, spec.optional, spec.kind.pack, spec.kind.unpack) for spec in field_specs(message))
    plan = _PLANS[message] = listed, getattr(message, "check", None)
    return plan


def encode(message: Any) -> bytes:
    """The wire form of a message. Raises EncodeError, which names the field."""
    try:
        body = _pack(message)
    except FieldError as error:
        raise EncodeError(f"{type(message).__name__}{error}") from error
    data = _VERSION_BYTE + typing.cast(bytes, msgpack.packb(body))
    if len(data) > MAX_MESSAGE_BYTES:
        raise EncodeError(f"{type(message).__name__} takes {len(data)} bytes, more than {MAX_MESSAGE_BYTES}")
    return data


class Template:
    """Encodes messages that differ only in the fields `varying`; the other fields are checked and packed once."""

    def __init__(self, message: Any, varying: Collection[str]) -> None:
        """Raises the errors of `encode`."""
        encode(message)
        self.message = message
        self._name = type(message).__name__
        self._varying = [spec for spec in field_specs(type(message)) if spec.name in varying]
        self._body = {name: value for name, value in _pack(message).items() if name not in varying}

    def encode(self, **values: Any) -> bytes:
        """The wire form with these values of the varying fields; None leaves an optional one out. Raises EncodeError.

        Rules over several fields are not checked.
        """
        body = self._body.copy()
        for spec in self._varying:
            value = values[spec.name]
            if value is None and spec.optional:
                continue
            try:
                body[spec.name] = spec.kind.pack(value)
            except FieldError as error:
                raise EncodeError(f"{self._name}.{spec.name}: {error}") from error
        return _VERSION_BYTE + typing.cast(bytes, msgpack.packb(body))


def decode(message: type[M], data: bytes | None) -> M:
    """Decodes a message. Raises DecodeError, and no other exception."""
    if not data:
        raise DecodeError(DecodeReason.EMPTY, f"{message.__name__}: no bytes")
    if len(data) > MAX_MESSAGE_BYTES:
        raise DecodeError(
            DecodeReason.TOO_LARGE, f"{message.__name__}: {len(data)} bytes, more than {MAX_MESSAGE_BYTES}"
        )
    if data[0] != SCHEMA_VERSION:
        raise DecodeError(
            DecodeReason.UNSUPPORTED_VERSION,
            f"{message.__name__}: schema version byte is {data[0]}, this reader supports {SCHEMA_VERSION}",
        )
    try:
        body = _unpack_body(data)
    except (ValueError, TypeError, msgpack.UnpackException, RecursionError, OverflowError) as error:
        text = str(error)[:200] or type(error).__name__
        raise DecodeError(DecodeReason.MALFORMED, f"{message.__name__}: not MessagePack: {text}") from error
    try:
        return _unpack(message, body)
    except FieldError as error:
        raise DecodeError(DecodeReason.INVALID_FIELD, f"{message.__name__}{error}") from error


def _unpack_body(data: bytes) -> Any:
    """The value after the version byte. Raises ValueError and msgpack's exceptions.

    msgpack allocates a map or list at its header, for as many entries as the header claims, and accepts 1,024 of them
    inside each other. So only short ones are accepted at first, which is enough for all messages but a long status.
    """
    packed = memoryview(data)[1:]
    try:
        return unpack_bounded(packed, SHORT_ENTRIES, SHORT_ENTRIES)
    except ValueError:
        # Either the bytes are invalid, or a map or list is longer: the next lines find out.
        pass
    _check_entries(data)
    return unpack_bounded(packed, MAX_MAP_ENTRIES, MAX_LIST_ENTRIES)


def unpack_bounded(packed: bytes | memoryview, max_map_entries: int, max_list_entries: int) -> Any:
    """A MessagePack value of at most `MAX_CONTAINERS` maps and lists, no extension, and no name twice in a map.

    Raises ValueError and msgpack's exceptions. The caller bounds what lists inside each other may claim together.
    """
    map_hook, list_hook = _counting_hooks()
    return msgpack.unpackb(
        packed,
        raw=False,
        strict_map_key=True,
        max_str_len=MAX_TEXT_BYTES,
        max_bin_len=MAX_MESSAGE_BYTES,
        max_array_len=max_list_entries,
        max_map_len=max_map_entries,
        # An extension of no bytes passes this limit, so the hook refuses it.
        max_ext_len=0,
        ext_hook=_refuse_extension,
        object_pairs_hook=map_hook,
        list_hook=list_hook,
    )


_FIXED_BYTES: dict[int, int] = (
    dict.fromkeys((*range(0x80), 0xC0, 0xC2, 0xC3, *range(0xE0, 0x100)), 0)
    | {0xA0 + length: length for length in range(32)}
    | {0xCA: 4, 0xCB: 8, 0xCC: 1, 0xCD: 2, 0xCE: 4, 0xCF: 8, 0xD0: 1, 0xD1: 2, 0xD2: 4, 0xD3: 8}
)
"""Header byte of a number, a truth, nil or a short text -> the number of bytes that follow."""
_LENGTH_BYTES: dict[int, int] = (
    dict.fromkeys(range(0x80, 0xA0), 0)
    | {0xC4: 1, 0xC5: 2, 0xC6: 4, 0xD9: 1, 0xDA: 2, 0xDB: 4}
    | {0xDC: 2, 0xDD: 4, 0xDE: 2, 0xDF: 4}
)
"""Header byte of bytes, a text, a list or a map -> the number of bytes of its length."""
_LISTS = frozenset((*range(0x90, 0xA0), 0xDC, 0xDD))
_MAPS = frozenset((*range(0x80, 0x90), 0xDE, 0xDF))


def _check_entries(data: bytes) -> None:
    """Reads every header of the value after the version byte, and builds nothing.

    Raises ValueError if all maps and lists together claim more than `MAX_ENTRIES` entries, if they are more than
    `MAX_CONTAINERS`, if the value is cut off, and for an extension.
    """
    at = unread = 1
    claimed = containers = 0
    fixed_bytes = _FIXED_BYTES.get
    try:
        while unread:
            code = data[at]
            at += 1
            unread -= 1
            follow = fixed_bytes(code)
            if follow is not None:
                at += follow
                continue
            if code not in _LENGTH_BYTES:
                raise ValueError("an extension or a reserved code")
            width = _LENGTH_BYTES[code]
            length = int.from_bytes(data[at : at + width], "big") if width else code & 0x0F
            at += width
            if code not in _LISTS and code not in _MAPS:
                at += length
                continue
            claimed += length
            if claimed > MAX_ENTRIES:
                raise ValueError(f"maps and lists of more than {MAX_ENTRIES} entries")
            containers += 1
            if containers > MAX_CONTAINERS:
                raise ValueError(_TOO_MANY)
            unread += 2 * length if code in _MAPS else length
    except IndexError:
        raise ValueError("cut off") from None


_TOO_MANY = f"more than {MAX_CONTAINERS} maps and lists"


def _counting_hooks() -> tuple[Callable[[list[tuple[Any, Any]]], dict[Any, Any]], Callable[[list[Any]], list[Any]]]:
    """What msgpack calls for each complete map and list of one message."""
    left = MAX_CONTAINERS

    def of_map(pairs: list[tuple[Any, Any]]) -> dict[Any, Any]:
        nonlocal left
        left -= 1
        body = dict(pairs)
        if left < 0 or len(body) != len(pairs):
            raise ValueError("a map contains a field twice" if left >= 0 else _TOO_MANY)
        return body

    def of_list(entries: list[Any]) -> list[Any]:
        nonlocal left
        left -= 1
        if left < 0:
            raise ValueError(_TOO_MANY)
        return entries

    return of_map, of_list


def _refuse_extension(code: int, _: bytes) -> Any:
    raise ValueError(f"an extension, of type {code}")


def _pack(message: Any) -> dict[str, Any]:
    body = {}
    listed, check = _PLANS.get(type(message)) or _plan(type(message))
    for name, is_optional, pack, _ in listed:
        value = getattr(message, name)
        if value is None:
            if not is_optional:
                raise FieldError(f".{name}: is required")
            continue
        try:
            body[name] = pack(value)
        except FieldError as error:
            raise _within(name, error) from error
    if check is not None:
        check(message)
    return body


def _unpack(message: type[M], raw: Any) -> M:
    if not isinstance(raw, dict):
        raise FieldError(f": expected a map, got {type(raw).__name__}")
    values = {}
    listed, check = _PLANS.get(message) or _plan(message)
    for name, is_optional, _, unpack in listed:
        value = raw.get(name)
        if value is None:
            if not is_optional:
                raise FieldError(f".{name}: is required")
            continue
        try:
            values[name] = unpack(value)
        except FieldError as error:
            raise _within(name, error) from error
    decoded = message(**values)
    if check is not None:
        check(decoded)
    return decoded


def _within(name: str, error: FieldError) -> FieldError:
    text = str(error)
    return FieldError(f".{name}{text}" if text.startswith((".", ":")) else f".{name}: {text}")
