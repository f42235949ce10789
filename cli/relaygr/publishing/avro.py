"""Reads Avro values whose schemas are in a registry, for `relaygr publish --from kafka:TOPIC --schema-registry URL`.

    byte 0 | schema id, 4 bytes big-endian | the value, by that schema       (Confluent's wire format)

Karapace and Apicurio serve the same path, GET /schemas/ids/ID. A schema never changes, so each is asked for once.
"""

from __future__ import annotations

import base64
import io
import json
import struct
import time
import urllib.error
import urllib.parse
import urllib.request
from datetime import datetime
from http import HTTPStatus
from typing import Any, Final

from relaygr.runtime.errors import RelayError
from relaygr.schemas.fields import FieldError

_HEADER: Final = struct.Struct(">bI")
_TIMEOUT_S: Final = 10.0
_KEPT_SCHEMAS: Final = 256
_MAX_SCHEMA_BYTES: Final = 1 << 20
_PAUSES_S: Final = (0.2, 1.0, 0.0)
"""After each answer that a schema is unknown: a copy of a registry may be behind the one that the producer asked."""


class AvroValues:
    """`url` of the registry, with user and password if it asks for them: https://user:password@host:8081.

    Raises RelayError if it is no such address.
    """

    def __init__(self, url: str) -> None:
        # Asked for at once: a bridge without it would count every record as bad.
        import fastavro

        self._fastavro = fastavro
        parts = urllib.parse.urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise RelayError(f"--schema-registry is {url!r}, expected such as http://registry:8081.")
        user, at, host = parts.netloc.rpartition("@")
        self._url = parts._replace(netloc=host).geturl().rstrip("/")
        credentials = urllib.parse.unquote(user).encode()
        self._headers = {"Authorization": f"Basic {base64.b64encode(credentials).decode()}"} if at else {}
        self._schemas: dict[int, Any] = {}

    def object(self, content: bytes) -> dict[str, Any]:
        """The record in these bytes, in types of JSON; times are texts.

        Raises ValueError for bad bytes, and RelayError if the registry does not answer.
        """
        value = self._value(content)
        if not isinstance(value, dict):
            raise FieldError("not a record of Avro")
        return value

    def key_text(self, key: bytes) -> bytes:
        """A key as JSON if it is Avro; another one as it is. Raises as `object` does."""
        return json.dumps(self._value(key)).encode() if key[:1] == b"\0" else key

    def _value(self, content: bytes) -> Any:
        if len(content) < _HEADER.size or content[0] != 0:
            raise FieldError("not Avro with a schema id: the first byte is not 0")
        schema = self._schema(_HEADER.unpack_from(content)[1])
        stream = io.BytesIO(content[_HEADER.size :])
        try:
            value = self._fastavro.schemaless_reader(stream, schema, None)
        except (ValueError, EOFError, IndexError, TypeError, OverflowError, MemoryError, RecursionError) as error:
            raise FieldError(f"not Avro of its schema: {type(error).__name__} {error}".rstrip()) from error
        if stream.read(1):
            raise FieldError("not Avro of its schema: bytes are left")
        return _plain(value)

    def _schema(self, number: int) -> Any:
        if number not in self._schemas:
            if len(self._schemas) >= _KEPT_SCHEMAS:
                self._schemas.clear()
            self._schemas[number] = self._ask(number)
        if self._schemas[number] is None:
            raise FieldError(f"the registry has no schema {number}")
        return self._schemas[number]

    def _ask(self, number: int) -> Any:
        """The parsed schema; None if the registry has none of this number."""
        request = urllib.request.Request(f"{self._url}/schemas/ids/{number}", headers=self._headers)
        for pause_s in _PAUSES_S:
            try:
                with urllib.request.urlopen(request, timeout=_TIMEOUT_S) as answer:
                    described = json.loads(answer.read(_MAX_SCHEMA_BYTES))
                if described.get("schemaType", "AVRO") != "AVRO":
                    raise FieldError(f"schema {number} is {described['schemaType']}, and only Avro is read")
                return self._fastavro.parse_schema(json.loads(described["schema"]))
            except urllib.error.HTTPError as error:
                if error.code != HTTPStatus.NOT_FOUND:
                    raise self._refused(number, error) from error
            except FieldError:
                raise
            except (OSError, ValueError, KeyError, self._fastavro.schema.SchemaParseException) as error:
                raise self._refused(number, error) from error
            time.sleep(pause_s)
        return None

    def _refused(self, number: int, error: Exception) -> RelayError:
        return RelayError(
            f"the registry {self._url} did not give schema {number}: {error}. Start the bridge again when it does: it "
            "goes on where it stopped."
        )


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _plain(each) for name, each in value.items()}
    if isinstance(value, list):
        return [_plain(each) for each in value]
    if isinstance(value, datetime):
        return value.isoformat()
    if isinstance(value, bytes):
        raise FieldError("a field is bytes, expected a text or a number")
    return value if isinstance(value, str | int | float | None) else str(value)
