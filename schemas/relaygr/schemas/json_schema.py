"""JSON Schema of the messages, for descriptions that other tools read.

A field has two forms. On the topics it is MessagePack: arrays and digests are bytes. As JSON, arrays are lists of
numbers and digests are hexadecimal text.
"""

from __future__ import annotations

import enum
import inspect
from collections.abc import Iterable
from typing import Any

import numpy as np

from relaygr.schemas.codec import Nested, field_specs
from relaygr.schemas.fields import Choice, Digest, FieldKind, Flag, ListOf, Packed, Real, Text, UInt

REFERENCE = "#/components/schemas/"


class Form(enum.Enum):
    """How arrays and digests are written."""

    MESSAGEPACK = "messagepack"
    JSON = "json"


def schemas_of(messages: Iterable[type[Any]], form: Form, closed: bool = False) -> dict[str, Any]:
    """The schemas of these messages and of the messages within them, by name. `closed`: no other fields."""
    found: dict[str, Any] = {}
    pending = list(messages)
    for message in pending:
        specs = field_specs(message)
        found[message.__name__] = {
            "type": "object",
            "description": inspect.cleandoc(message.__doc__ or ""),
            "properties": {spec.name: _described(spec.kind, spec.doc, form) for spec in specs},
            "required": [spec.name for spec in specs if not spec.optional],
            **({"additionalProperties": False} if closed else {}),
        }
        inner = (_message_in(spec.kind) for spec in specs)
        pending += [each for each in inner if each is not None and each not in pending]
    return found


def schema_of(kind: FieldKind, form: Form) -> dict[str, Any]:
    """The schema of one kind of field."""
    match kind:
        case Nested():
            return {"$ref": REFERENCE + kind.message.__name__}
        case Text():
            return {"type": "string", "minLength": 1, "maxLength": kind.max_bytes}
        case UInt():
            return {"type": "integer", "minimum": kind.minimum, "maximum": kind.maximum}
        case Real():
            return {"type": "number"}
        case Flag():
            return {"type": "boolean"}
        case Choice():
            known = [member.value for member in kind.members]
            return {"type": "string", "examples": known} if kind.is_open else {"type": "string", "enum": known}
        case ListOf():
            return {"type": "array", "maxItems": kind.max_length, "items": schema_of(kind.item, form)}
        case Digest() if form is Form.JSON:
            return {"type": "string", "pattern": f"^[0-9a-fA-F]{{{2 * kind.size}}}$"}
        case Packed() if form is Form.JSON:
            bounds = {"minItems": kind.min_length, "maxItems": kind.max_length}
            return {"type": "array", **bounds, "items": _number(np.dtype(kind.dtype))}
        case Digest() | Packed():
            return {"type": "string", "format": "binary"}
    raise TypeError(f"there is no schema of {type(kind).__name__}")


def _described(kind: FieldKind, doc: str, form: Form) -> dict[str, Any]:
    schema = schema_of(kind, form)
    if "$ref" in schema:
        # Beside a reference, some tools ignore everything else.
        return {"allOf": [schema], "description": doc}
    if form is Form.JSON and isinstance(kind, Packed | Digest):
        return {**schema, "description": doc}
    return {**schema, "description": f"{doc} ({kind.describe()})"}


def _message_in(kind: FieldKind) -> type[Any] | None:
    if isinstance(kind, ListOf):
        return _message_in(kind.item)
    return kind.message if isinstance(kind, Nested) else None


def _number(dtype: np.dtype[Any]) -> dict[str, Any]:
    if dtype.kind == "f":
        return {"type": "number"}
    bounds = np.iinfo(dtype)
    return {"type": "integer", "minimum": int(bounds.min), "maximum": int(bounds.max)}
