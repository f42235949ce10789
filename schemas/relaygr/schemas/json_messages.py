"""Messages as JSON objects: `from_json(Class, object)` and `to_json(message)`.

The object has the message's fields by name. Arrays are lists of numbers, digests are hexadecimal text, nested
messages are objects, an absent or null field is None. Bytes, which formats such as MessagePack have, are read as packed
arrays and as digests. `from_json` raises FieldError for an unknown field and for a
value that the codec would refuse; the error's text begins with the path of the field.
"""

from __future__ import annotations

import difflib
import enum
from collections.abc import Iterable, Mapping
from dataclasses import fields, is_dataclass
from typing import Any, TypeVar

import numpy as np

from relaygr.schemas.codec import Nested, field_specs
from relaygr.schemas.fields import Digest, FieldError, FieldKind, ListOf, Packed

M = TypeVar("M")


def from_json(message: type[M], content: Any) -> M:
    """The message that a parsed JSON object describes. Raises FieldError."""
    if not isinstance(content, dict):
        raise FieldError(f": expected an object, got {_name_of(content)}")
    specs = field_specs(message)
    refuse_unknown(content, [spec.name for spec in specs])
    values = {}
    for spec in specs:
        value = content.get(spec.name)
        if value is None:
            if not spec.optional:
                raise FieldError(f".{spec.name}: is required")
            continue
        try:
            values[spec.name] = _value(spec.kind, value)
        except FieldError as error:
            text = str(error)
            raise FieldError(
                f".{spec.name}{text}" if text.startswith((".", ":", "[")) else f".{spec.name}: {text}"
            ) from error
    made = message(**values)
    check = getattr(made, "check", None)
    if check is not None:
        check()
    return made


def to_json(message: Any) -> dict[str, Any]:
    """The fields of a message that are not None."""
    content = {field.name: getattr(message, field.name) for field in fields(message)}
    return {name: _plain(value) for name, value in content.items() if value is not None}


def refuse_unknown(content: Mapping[str, Any], known: Iterable[str]) -> None:
    """Raises FieldError for an unknown name, and suggests a known one."""
    known = list(known)
    for name in content:
        if name not in known:
            near = difflib.get_close_matches(name[:80], known, n=1)
            raise FieldError(f".{name[:80]}: there is no such field" + (f"; did you mean {near[0]}?" if near else ""))


def _value(kind: FieldKind, value: Any) -> Any:
    if isinstance(kind, Nested):
        return from_json(kind.message, value)
    if isinstance(kind, Packed):
        return _array(kind, value)
    if isinstance(kind, ListOf):
        if not isinstance(value, list):
            raise FieldError(f"expected a list, got {_name_of(value)}")
        return kind.unpack([_value(kind.item, entry) for entry in value])
    if isinstance(kind, Digest):
        return kind.unpack(_bytes(value))
    return kind.unpack(value)


def _array(kind: Packed, value: Any) -> Any:
    """A list of numbers, or packed bytes, as a read-only array of the field's type."""
    if isinstance(value, bytes):
        return kind.unpack(value)
    if not isinstance(value, list):
        raise FieldError(f"expected a list of numbers, got {_name_of(value)}")
    # Before each entry is looked at.
    if len(value) > kind.max_length:
        raise FieldError(f"{len(value)} entries, expected {kind.min_length} to {kind.max_length}")
    dtype = np.dtype(kind.dtype)
    whole = dtype.kind in "iu"
    for index, entry in enumerate(value):
        if type(entry) is not int and (whole or type(entry) is not float):
            raise FieldError(f"[{index}] is {_name_of(entry)}, expected a {'whole ' if whole else ''}number")
    bounds = np.iinfo(dtype) if whole else np.finfo(dtype)
    # numpy 1 would wrap a number that does not fit.
    if value and not bounds.min <= min(value) <= max(value) <= bounds.max:
        raise FieldError(f"a number does not fit {dtype.name}")
    return kind.unpack(np.array(value, dtype=dtype).tobytes())


def _bytes(value: Any) -> bytes:
    if isinstance(value, bytes):
        return value
    if not isinstance(value, str):
        raise FieldError(f"expected hexadecimal text, got {_name_of(value)}")
    try:
        return bytes.fromhex(value)
    except ValueError as error:
        raise FieldError("not hexadecimal") from error


def _plain(value: Any) -> Any:
    if isinstance(value, enum.Enum):
        return value.value
    if isinstance(value, np.ndarray):
        return value.tolist()
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, tuple):
        return [_plain(entry) for entry in value]
    return to_json(value) if is_dataclass(value) else value


def _name_of(value: Any) -> str:
    """The name of a value's type in JSON's terms."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true or false"
    names = {int: "a whole number", float: "a fraction", str: "text", list: "a list", dict: "an object"}
    return names.get(type(value), type(value).__name__)
