"""A schema registry on this machine, with the paths that the bridge asks."""

from __future__ import annotations

import json
import random
import struct
import threading
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from relaygr.ingest.registered import RegisteredValues


@dataclass
class Registry:
    """What it answers, and what it was asked."""

    url: str = ""
    schemas: dict[int | str, Any] = field(default_factory=dict)
    """By number or GUID; a dict with the key `schema` is the whole answer. Its key `serialized` is what is given
    instead of the schema for `?format=serialized`; without it that is ignored, as by registries that do not know it.
    """
    subjects: dict[str, Any] = field(default_factory=dict)
    """The same, by `SUBJECT/versions/VERSION` as it is in the path."""
    authorization: str | None = None
    """The header that it demands."""
    redirect: str | None = None
    """Where all is that is asked without `/moved` before it."""
    failures: dict[str, tuple[int, bytes]] = field(default_factory=dict)
    """By path: status and body of what is not an answer."""
    asked: list[tuple[str, str | None]] = field(default_factory=list)
    """Path and authorization of each request."""

    @property
    def paths(self) -> list[str]:
        return [path for path, _ in self.asked]

    def answer(self, path: str, authorization: str | None) -> tuple[int, bytes]:
        if self.authorization is not None and authorization != self.authorization:
            return 401, b"{}"
        if path in self.failures:
            return self.failures[path]
        path, _, query = path.partition("?")
        found, unknown = self.subjects.get(path.removeprefix("/subjects/")), b'{"error_code": 40402}'
        if path.startswith("/schemas/"):
            _, _, kind, name = path.split("/")
            found, unknown = self.schemas.get(int(name) if kind == "ids" else name), b'{"error_code": 40403}'
        if found is None:
            return 404, unknown
        if isinstance(found, bytes):
            return 200, found
        whole = dict(found) if isinstance(found, dict) and "schema" in found else {"schema": json.dumps(found)}
        serialized = whole.pop("serialized", whole["schema"])
        if query == "format=serialized":
            whole["schema"] = serialized
        return 200, json.dumps(whole).encode()


@contextmanager
def served_registry() -> Iterator[Registry]:
    """A registry that answers until the end of the context."""
    registry = Registry()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            authorization = self.headers.get("Authorization")
            registry.asked.append((self.path, authorization))
            path = self.path.removeprefix("/moved")
            if registry.redirect is not None and path == self.path:
                self.send_response(302)
                self.send_header("Location", f"{registry.redirect}{path}")
                self.end_headers()
                return
            status, body = registry.answer(path, authorization)
            self.send_response(status)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            """Says nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        registry.url = f"http://127.0.0.1:{server.server_port}"
        try:
            yield registry
        finally:
            server.shutdown()
            thread.join()


def endings_of_broken_bytes(values: RegisteredValues, schema_id: int, good: bytes) -> dict[bool, int]:
    """How often some bytes of a schema, broken in 3,000 ways and read for some fields, were a record, and a bad one."""
    draw, ended = random.Random(11), {True: 0, False: 0}

    def used(names: tuple[str, ...]) -> Collection[str]:
        return draw.sample(names, draw.randint(0, 2))

    for _ in range(3000):
        body = bytearray(good)
        for _ in range(draw.randint(0, 3)):
            body[draw.randrange(len(body))] = draw.choice((0, 1, 2, 0x7F, 0x80, 0xFF, draw.randrange(256)))
        cut = body[: draw.choice((len(body), draw.randrange(len(body))))]
        try:
            values.object(struct.pack(">bI", 0, schema_id) + cut, None, used)
            ended[True] += 1
        except ValueError:
            ended[False] += 1
    return ended
