"""Protobuf as producers with Confluent's serialisers write it, and as registries describe it."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from typing import Any

from google.protobuf import descriptor_pool, message_factory
from google.protobuf.descriptor_pb2 import DescriptorProto, FieldDescriptorProto, FileDescriptorProto

_TYPES = {
    name.removeprefix("TYPE_").lower(): number
    for name, number in FieldDescriptorProto.Type.items()
    if name not in ("TYPE_MESSAGE", "TYPE_ENUM", "TYPE_GROUP")
}


def message(name: str, *nested: DescriptorProto, **fields: str) -> DescriptorProto:
    """A message with the fields `NAME="[repeated|optional ]TYPE"`, numbered from 1."""
    made = DescriptorProto(name=name, nested_type=nested)
    for number, (field, text) in enumerate(fields.items(), 1):
        label, _, kind = text.rpartition(" ")
        added = made.field.add(name=field, number=number, label=FieldDescriptorProto.LABEL_OPTIONAL)
        if label == "repeated":
            added.label = FieldDescriptorProto.LABEL_REPEATED
        if kind in _TYPES:
            added.type = _TYPES[kind]
        else:
            added.type_name = kind
        if label == "optional":
            added.proto3_optional = True
            added.oneof_index = len(made.oneof_decl)
            made.oneof_decl.add(name=f"_{field}")
    return made


def file(
    *messages: DescriptorProto,
    enums: Mapping[str, Sequence[str]] | None = None,
    imports: Sequence[str] = (),
    name: str = "shop.proto",
    syntax: str = "proto3",
) -> FileDescriptorProto:
    made = FileDescriptorProto(name=name, package="shop", syntax=syntax, message_type=messages, dependency=imports)
    for enum, values in (enums or {}).items():
        added = made.enum_type.add(name=enum)
        for number, value in enumerate(values):
            added.value.add(name=value, number=number)
    return made


def answer(described: FileDescriptorProto, *references: tuple[str, str, int], schema_id: int = 0) -> dict[str, Any]:
    """What a registry has of a file. References: name, subject and version."""
    names = ("name", "subject", "version")
    return {
        "schema": f'syntax = "{described.syntax}";\npackage shop;\n',
        "serialized": base64.b64encode(described.SerializeToString()).decode(),
        "schemaType": "PROTOBUF",
        "id": schema_id,
        "references": [dict(zip(names, each, strict=True)) for each in references],
    }


def written(name: str, content: Mapping[str, Any], *files: FileDescriptorProto) -> bytes:
    """A message of one of these files, each after those that it imports."""
    pool = descriptor_pool.DescriptorPool()
    for each in files:
        pool.AddSerializedFile(each.SerializeToString())
    made = message_factory.GetMessageClass(pool.FindMessageTypeByName(f"shop.{name}"))
    return bytes(made(**content).SerializeToString())
