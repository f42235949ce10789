"""Reads values whose schemas are in a registry, for `relaygr publish --from kafka:TOPIC --schema-registry URL`.

    byte 0 | schema id, 4 bytes big-endian | the value              (Confluent's wire format)
    byte 1 | GUID of the schema, 16 bytes  | the value

What stands before the value may be in a header of the record instead, message indexes of Protobuf included. The
registry says of each schema whether it is Avro, Protobuf or JSON Schema: a topic may have all three.
"""

from __future__ import annotations

import json
import math
import struct
import time
import uuid
from typing import Any, Final

from relaygr.ingest.avro import AvroReader, Used
from relaygr.ingest.json_lines import MAX_LIST_TEXTS, parse_log_object
from relaygr.ingest.layouts import id_text
from relaygr.ingest.protobuf import ProtobufReader
from relaygr.ingest.registry import Schema, SchemaRegistry, SchemaType, UnknownSchemaError
from relaygr.schemas.fields import FieldError

_ID: Final = struct.Struct(">bI")
_GUID_END: Final = 17
_KEPT_SCHEMAS: Final = 256
_UNKNOWN_S: Final = 10.0
"""A schema that the registry does not have is asked for again after this time: it may be registered later."""


class JsonReader:
    """Reads JSON as it is: the bridge checks the fields that it uses, and not the others."""

    def read(self, content: bytes, at: int, used: Used) -> dict[str, Any]:
        """The object from a position to the end. Raises ValueError."""
        del used
        return parse_log_object(content[at:], MAX_LIST_TEXTS)


Reader = AvroReader | ProtobufReader | JsonReader


class RegisteredValues:
    """Asks for each schema once, and now and then for one that the registry does not have."""

    def __init__(self, registry: SchemaRegistry) -> None:
        self._registry = registry
        self._readers: dict[int | uuid.UUID, Reader | str] = {}
        """The reader of a schema, or why there is none."""
        self._unknown_since_s: dict[int | uuid.UUID, float] = {}
        """When the registry said that it does not have a schema."""

    def object(self, content: bytes, header: bytes | None, used: Used) -> dict[str, Any]:
        """The object of a value, in types of JSON. Times are texts; a field that is not used is None.

        `header` is what the header of the value's schema has. Raises ValueError for bad bytes, and RelayError if the
        registry does not answer, or gives only the text of Protobuf.
        """
        reader, framed, at = self._reader(content, header)
        value = reader.read(framed, at, used)
        if not isinstance(value, dict):
            raise FieldError("not a record of Avro")
        return value

    def key_text(self, key: bytes, header: bytes | None, used: Used) -> bytes:
        """A key with a schema as JSON; another one as it is. Raises as `object` does."""
        if header is None and key[:1] != b"\0":
            return key
        reader, framed, at = self._reader(key, header)
        if isinstance(reader, JsonReader):
            return framed[at:]
        value = reader.read(framed, at, used)
        return json.dumps(value if isinstance(value, dict) else id_text(value, "it")).encode()

    def _reader(self, content: bytes, header: bytes | None) -> tuple[Reader, bytes, int]:
        """The reader, the content with what stands before it, and the position after the id."""
        framed = content if header is None else header + content
        own = len(framed if header is None else header)
        if framed[:1] == b"\0" and own >= _ID.size:
            return self._known(_ID.unpack_from(framed)[1]), framed, _ID.size
        if framed[:1] == b"\1" and own >= _GUID_END:
            return self._known(uuid.UUID(bytes=framed[1:_GUID_END])), framed, _GUID_END
        where = "the value" if header is None else "the header with its schema"
        raise FieldError(
            f"{where} does not begin with the id of a schema: the first byte is not 0, or bytes are missing"
        )

    def _known(self, key: int | uuid.UUID) -> Reader:
        if time.monotonic() - self._unknown_since_s.get(key, math.inf) >= _UNKNOWN_S:
            del self._readers[key], self._unknown_since_s[key]
        if (reader := self._readers.get(key)) is None:
            if len(self._readers) >= _KEPT_SCHEMAS:
                self._readers.clear()
                self._unknown_since_s.clear()
            try:
                reader = self._made(key)
            except UnknownSchemaError as error:
                reader = str(error)
                self._unknown_since_s[key] = time.monotonic()
            except ValueError as error:
                reader = str(error)
            self._readers[key] = reader
        if isinstance(reader, str):
            raise FieldError(reader)
        return reader

    def _made(self, key: int | uuid.UUID) -> Reader:
        schema = self._registry.schema(key)
        try:
            return _reader_of(schema)
        except FieldError as error:
            raise FieldError(f"schema {key} {error}") from error


def _reader_of(schema: Schema) -> Reader:
    if schema.kind is SchemaType.AVRO:
        return AvroReader(schema)
    return ProtobufReader(schema) if schema.kind is SchemaType.PROTOBUF else JsonReader()
