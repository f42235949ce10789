"""Asks a schema registry for schemas: Confluent's, Redpanda's, Karapace or Apicurio, which serve the same paths.

    GET /schemas/ids/ID                       the schema with which a record was written, and its type
    GET /schemas/guids/GUID                   the same, of a record that names it in a header
    GET /schemas/ids/ID?format=serialized     of Protobuf: the descriptor, in base64, instead of the text
    GET /subjects/SUBJECT/versions/VERSION    a schema to which another one refers, and its id

No text of Protobuf is parsed, and a registry that gives nothing else is refused. Karapace gives descriptors at the
paths of ids only, so those of references are asked for there, too.

A schema never changes. A schema that the registry says it does not have, or that cannot be read, is the fault of the
records that name it. A registry that does not answer, or refuses, is an outage, and so is a 404 without the registry's
own error code: it comes from a proxy before the registry, or from an address that is none of a registry.
"""

from __future__ import annotations

import base64
import binascii
import json
import time
import urllib.error
import urllib.parse
import urllib.request
import uuid
from dataclasses import dataclass
from enum import StrEnum
from http import HTTPStatus
from http.client import HTTPException
from typing import Any, Final

from relaygr.ingest.settings import RegistrySettings
from relaygr.kafka.security import read_secret
from relaygr.runtime.direct_http import NO_PROXY, is_loopback
from relaygr.runtime.errors import RelayError
from relaygr.runtime.masking import masked
from relaygr.schemas.fields import FieldError

_TIMEOUT_S: Final = 10.0
"""Of one wait for bytes."""
_ANSWER_S: Final = 30.0
"""Of a whole body, which may come in small parts."""
_MAX_SCHEMA_BYTES: Final = 1 << 20
_MAX_REFERENCES: Final = 64
"""Of one schema and those to which it refers."""
_PAUSES_S: Final = (0.2, 1.0)
"""After answers that a schema is unknown: a copy of a registry may be behind the one that the producer asked."""
_PATIENT_EVERY_S: Final = 5.0
"""From one wait to the next: records may name any number of unknown schemas, and the bridge must not wait for each."""
_UNKNOWN_CODES: Final = (40401, 40402, 40403)
"""The error codes of a subject, a version and a schema that the registry does not have."""


Answer = dict[str, Any]


class SchemaType(StrEnum):
    """What a registry calls the types of its schemas."""

    AVRO = "AVRO"
    PROTOBUF = "PROTOBUF"
    JSON = "JSON"


@dataclass(frozen=True, slots=True)
class Schema:
    """A text of JSON; of Protobuf the bytes of a `FileDescriptorProto`."""

    kind: SchemaType
    content: bytes
    needed: tuple[tuple[str, bytes], ...] = ()
    """Name and content of all to which it refers, each after those that it needs itself. Of Protobuf the name is that
    of the import. Of JSON Schema there are none: its values are read without their schema.
    """


class UnknownSchemaError(FieldError):
    """The registry does not have the schema. It may have it later."""


class SchemaRegistry:
    """The caller asks for one schema at a time."""

    def __init__(self, url: str, settings: RegistrySettings) -> None:
        """User and password in `url` go before those of `settings`.

        Raises RelayError if `url` is no address of HTTP, or if the file of the password cannot be read.
        """
        parts = _address(url)
        if parts is None:
            raise RelayError(f"--schema-registry is {masked(url)!r}, expected such as http://registry:8081.")
        user, at, host = parts.netloc.rpartition("@")
        self._url = parts._replace(netloc=host, query="", fragment="").geturl().rstrip("/")
        login = urllib.parse.unquote(user) if at else _login(settings)
        self._headers = {"Authorization": f"Basic {base64.b64encode(login.encode()).decode()}"} if login else {}
        # A registry may be behind the proxy of the environment; one on this machine is not.
        direct = (NO_PROXY,) if is_loopback(parts.hostname or "") else ()
        self._opener = urllib.request.build_opener(_SameOrigin, *direct)
        self._patient_from_s = 0.0

    def schema(self, key: int | uuid.UUID) -> Schema:
        """The schema of an id or a GUID.

        Raises UnknownSchemaError, a ValueError, if there is no such schema, ValueError if its type is unknown, and
        RelayError if the registry does not answer, or has only the text of Protobuf.
        """
        what = f"schema {key}"
        path = f"/schemas/ids/{key}" if isinstance(key, int) else f"/schemas/guids/{key}"
        described = self._asked(what, path)
        try:
            kind = SchemaType(described.get("schemaType") or SchemaType.AVRO)  # Confluent's names all but Avro.
        except ValueError as error:
            shown = str(described["schemaType"])[:40]
            raise FieldError(f"{what} is {shown}, and only Avro, Protobuf and JSON Schema are read") from error
        if kind is SchemaType.JSON:
            return Schema(kind, b"")
        needed: list[tuple[str, bytes]] = []
        self._collect(what, kind, described, set(), needed)
        is_protobuf = kind is SchemaType.PROTOBUF
        content = self._descriptor(what, path) if is_protobuf else self._text(what, described)
        return Schema(kind, content, tuple(needed))

    def _collect(
        self,
        what: str,
        kind: SchemaType,
        described: Answer,
        seen: set[tuple[str, int]],
        needed: list[tuple[str, bytes]],
    ) -> None:
        """Appends all to which a schema refers."""
        try:
            found = [
                (str(each["name"]), str(each["subject"]), int(each["version"]))
                for each in described.get("references") or ()
            ]
        except (LookupError, TypeError, ValueError) as error:
            raise self._refused(what, error) from error
        for name, subject, version in found:
            if (subject, version) in seen:  # Needed twice; or it refers to itself, and then its types are not found.
                continue
            if len(seen) >= _MAX_REFERENCES:
                raise FieldError(f"{what} needs more than {_MAX_REFERENCES} other schemas")
            seen.add((subject, version))
            other = f"version {version} of subject {subject[:80]}"
            answer = self._asked(other, f"/subjects/{urllib.parse.quote(subject, safe='')}/versions/{version}")
            self._collect(other, kind, answer, seen, needed)
            if kind is SchemaType.PROTOBUF:
                if not isinstance(schema_id := answer.get("id"), int):
                    raise self._refused(other, TypeError("the answer has no id of the schema"))
                needed.append((name, self._descriptor(other, f"/schemas/ids/{schema_id}")))
            else:
                needed.append((name, self._text(other, answer)))

    def _text(self, what: str, described: Answer) -> bytes:
        if not isinstance(text := described.get("schema"), str):
            raise self._refused(what, TypeError("the answer has no text of a schema"))
        return text.encode(errors="surrogatepass")

    def _descriptor(self, what: str, path: str) -> bytes:
        text = self._text(what, self._asked(what, f"{path}?format=serialized"))
        try:
            return base64.b64decode(text, validate=True)
        except binascii.Error as error:
            raise RelayError(
                f"the registry {self._url} gives {what}, which is of Protobuf, as text only, and the bridge reads what "
                "registries give for ?format=serialized: Confluent's from 5.5 on, Redpanda's from 25.2 on, Karapace, "
                "and Apicurio since the end of 2025. Use one of these, or write the topic as Avro or JSON."
            ) from error

    def _asked(self, what: str, path: str) -> Answer:
        """The object at a path. Raises UnknownSchemaError, FieldError if it is too long, and RelayError."""
        pauses = iter(_PAUSES_S if time.monotonic() >= self._patient_from_s else ())
        request = urllib.request.Request(self._url + path, headers=self._headers)
        while True:
            try:
                with self._opener.open(request, timeout=_TIMEOUT_S) as answer:
                    body = _body(answer)
                if len(body) > _MAX_SCHEMA_BYTES:
                    break
                described = json.loads(body)
                if not isinstance(described, dict):
                    raise TypeError("the answer is no object of JSON")
                return described
            except urllib.error.HTTPError as error:
                if not _is_unknown(error):
                    raise self._refused(what, error) from error
            except (OSError, ValueError, TypeError, RecursionError, HTTPException) as error:
                raise self._refused(what, error) from error
            if (pause_s := next(pauses, None)) is None:
                raise UnknownSchemaError(f"the registry has no {what}")
            time.sleep(pause_s)
            self._patient_from_s = time.monotonic() + _PATIENT_EVERY_S
        raise FieldError(f"{what} is longer than {_MAX_SCHEMA_BYTES:,} bytes")

    def _refused(self, what: str, error: Exception) -> RelayError:
        cause = masked(str(error))
        if isinstance(error, urllib.error.HTTPError) and error.code == HTTPStatus.NOT_FOUND:
            cause += ", without the error code of a registry: it is from a proxy, or the address is wrong"
        return RelayError(
            f"the registry {self._url} did not give {what}: {cause}. Start the bridge again when it does: it goes on "
            "where it stopped."
        )


class _SameOrigin(urllib.request.HTTPRedirectHandler):
    """A redirect elsewhere would take the password along."""

    def redirect_request(
        self, req: urllib.request.Request, fp: Any, code: int, msg: str, headers: Any, newurl: str
    ) -> urllib.request.Request | None:
        there, here = urllib.parse.urlsplit(newurl), urllib.parse.urlsplit(req.full_url)
        if (there.scheme, there.netloc) != (here.scheme, here.netloc):
            raise OSError(f"it redirects to {masked(f'{there.scheme}://{there.netloc}')}, which is not asked")
        return super().redirect_request(req, fp, code, msg, headers, newurl)


def _login(settings: RegistrySettings) -> str:
    """`USER:PASSWORD`; empty without them. Raises RelayError."""
    if settings.username is None:
        return ""
    if settings.password_file is not None:
        password = read_secret(settings.password_file, "schema_registry.password_file")
    else:
        password = settings.password.get_secret_value() if settings.password is not None else ""
    return f"{settings.username}:{password}"


def _address(url: str) -> urllib.parse.SplitResult | None:
    """The parts of an address of HTTP; None for another text."""
    try:
        parts = urllib.parse.urlsplit(url)
        port = parts.port
    except ValueError:
        return None
    return parts if parts.scheme in ("http", "https") and parts.hostname and port != 0 else None


def _is_unknown(error: urllib.error.HTTPError) -> bool:
    """Whether the registry itself says that it does not have what was asked for."""
    if error.code != HTTPStatus.NOT_FOUND:
        return False
    try:
        return json.loads(_body(error))["error_code"] in _UNKNOWN_CODES
    except (OSError, ValueError, TypeError, LookupError, RecursionError, HTTPException):
        return False


def _body(answer: Any) -> bytes:
    """The body, or of a longer one than a schema may have the beginning. Raises TimeoutError."""
    ends_s, body = time.monotonic() + _ANSWER_S, bytearray()
    while len(body) <= _MAX_SCHEMA_BYTES and (part := answer.read1(_MAX_SCHEMA_BYTES)):
        body += part
        if time.monotonic() > ends_s:
            raise TimeoutError(f"the answer takes more than {_ANSWER_S:.0f} s")
    return bytes(body)
