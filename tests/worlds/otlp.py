"""A collector: an OTLP/HTTP receiver that decodes what it gets, and spans as tests look at them."""

from __future__ import annotations

import gzip
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)

from relaygr.schemas.trace_context import TraceContext

KINDS = {1: "internal", 3: "client", 4: "producer", 5: "consumer"}
ERROR = 2


@dataclass(frozen=True)
class SeenSpan:
    """One span as it came over the wire. Ids are lower-case hexadecimal digits."""

    name: str
    kind: str
    trace_id: str
    span_id: str
    parent_id: str
    start_us: float
    end_us: float
    attributes: dict[str, Any]
    links: tuple[tuple[str, str], ...]
    is_error: bool
    service: str
    resource: dict[str, Any]


@dataclass
class Collector:
    """Takes spans on a port of its own. `status`: what it answers. `refused`: spans of each request that it refuses."""

    port: int = 0
    status: int = 200
    refused: int = 0
    spans: list[SeenSpan] = field(default_factory=list)
    requests: int = 0

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def of(self, request_id: str) -> list[SeenSpan]:
        """All spans of the traces of an impression, by their start."""
        traces = {s.trace_id for s in self.spans if s.attributes.get("messaging.message.conversation_id") == request_id}
        return sorted((span for span in self.spans if span.trace_id in traces), key=lambda span: span.start_us)

    def take(self, body: bytes) -> None:
        request = ExportTraceServiceRequest.FromString(body)
        for resource in request.resource_spans:
            about = _attributes(resource.resource.attributes)
            for scope in resource.scope_spans:
                assert scope.scope.name == "relaygr"
                self.spans += [_seen(span, about) for span in scope.spans]


@contextmanager
def collector() -> Iterator[Collector]:
    """A collector that runs."""
    seen = Collector()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            if self.headers.get("content-encoding") == "gzip":
                body = gzip.decompress(body)
            assert self.path == "/v1/traces" and self.headers["content-type"] == "application/x-protobuf"
            seen.requests += 1
            if seen.status == 200:
                seen.take(body)
            told = ExportTraceServiceResponse()
            if seen.refused:
                told.partial_success.rejected_spans, told.partial_success.error_message = seen.refused, "no quota"
            answer = told.SerializeToString()
            self.send_response(seen.status)
            self.send_header("content-type", "application/x-protobuf")
            self.send_header("content-length", str(len(answer)))
            self.send_header("location", "https://collector.example/v1/traces")
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, *_: object) -> None:
            return

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    seen.port = server.server_address[1]
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield seen
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def traceparent(trace_id: int = 0xABCDEF, span_id: int = 0x123, is_sampled: bool = True) -> str:
    """A valid header."""
    return TraceContext(trace_id, span_id, is_sampled).encode().decode()


def _seen(span: Any, resource: dict[str, Any]) -> SeenSpan:
    return SeenSpan(
        name=span.name,
        kind=KINDS[span.kind],
        trace_id=span.trace_id.hex(),
        span_id=span.span_id.hex(),
        parent_id=span.parent_span_id.hex(),
        start_us=span.start_time_unix_nano / 1000,
        end_us=span.end_time_unix_nano / 1000,
        attributes=_attributes(span.attributes),
        links=tuple((link.trace_id.hex(), link.span_id.hex()) for link in span.links),
        is_error=span.status.code == ERROR,
        service=resource["service.name"],
        resource=resource,
    )


def _attributes(pairs: Any) -> dict[str, Any]:
    return {pair.key: getattr(pair.value, pair.value.WhichOneof("value")) for pair in pairs}
