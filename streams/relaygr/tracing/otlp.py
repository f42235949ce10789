"""Sends spans to a collector over OTLP/HTTP, as OpenTelemetry's variables say.

| variable | meaning here |
|---|---|
| OTEL_SDK_DISABLED, OTEL_TRACES_EXPORTER=none | tracing stays off |
| OTEL_TRACES_SAMPLER, OTEL_TRACES_SAMPLER_ARG | which traces are recorded: one of OpenTelemetry's six; by default all |
| OTEL_EXPORTER_OTLP_* | address, headers, TLS and time-out of the collector; the protocol is http/protobuf |
| OTEL_SERVICE_NAME, OTEL_RESOURCE_ATTRIBUTES | name and attributes of the process |
| OTEL_BSP_* | size of the queue (2048 spans), size of a batch (512), time between batches (5 s) |

One daemon thread takes the spans from the tracer's queue. While the collector is away, the queue fills, and further
spans are dropped and counted.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping, Sequence
from typing import Final
from urllib.parse import urlsplit

import requests
import structlog
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import SERVICE_INSTANCE_ID, SERVICE_NAME, SERVICE_VERSION, Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.sampling import TraceIdRatioBased
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import Link, SpanContext, TraceFlags
from opentelemetry.trace import SpanKind as OtelKind
from opentelemetry.trace.status import Status, StatusCode

from relaygr.runtime.direct_http import is_loopback
from relaygr.runtime.errors import RelayError
from relaygr.runtime.masking import masked
from relaygr.schemas.trace_context import TraceContext
from relaygr.schemas.version import __version__
from relaygr.tracing.spans import Span, SpanKind
from relaygr.tracing.tracer import EXPORT_THREAD, Sampler, Tracer, TracerMetrics

_KINDS: Final = {
    SpanKind.INTERNAL: OtelKind.INTERNAL,
    SpanKind.PRODUCER: OtelKind.PRODUCER,
    SpanKind.CONSUMER: OtelKind.CONSUMER,
}
_SCOPE: Final = InstrumentationScope("relaygr", __version__)
_DEFAULT_SAMPLER: Final = "parentbased_always_on"
_DEFAULT_ENDPOINT: Final = "http://localhost:4318"
"""Of the exporter."""
_PARENT_BASED: Final = "parentbased_"
_ROOT_SAMPLERS: Final = ("always_on", "always_off", "traceidratio")
_LAST_WAIT_S: Final = 0.05
log = structlog.get_logger()


class SpanExport:
    """The thread that sends the spans of a tracer. `stop` sends what is left."""

    def __init__(
        self, tracer: Tracer, exporter: SpanExporter, resource: Resource, metrics: TracerMetrics, interval_s: float
    ) -> None:
        self._tracer = tracer
        self._exporter = exporter
        self._resource = resource
        self._metrics = metrics
        self._interval_s = interval_s
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name=EXPORT_THREAD, daemon=True)
        self._failing = False

    def start(self) -> None:
        self._thread.start()

    def stop(self, timeout_s: float) -> None:
        """Waits at most `timeout_s` for the last batches."""
        self._stopping = True
        self._tracer.batch_is_ready.set()
        self._thread.join(timeout_s)
        # Ends the exporter's waits between its retries.
        self._exporter.shutdown()
        self._thread.join(_LAST_WAIT_S)

    def _run(self) -> None:
        while not self._stopping:
            # A thread that looked at the queue many times a second would cost a client more than its spans do.
            self._tracer.batch_is_ready.wait(self._interval_s)
            self._tracer.batch_is_ready.clear()
            self._send()
        self._send()

    def _send(self) -> None:
        while spans := self._tracer.take_batch():
            try:
                sent = self._exporter.export(otel_spans(spans, self._resource)) is SpanExportResult.SUCCESS
            except Exception as error:  # A library's error must not end the thread.
                log.warning("spans cannot be exported", error=masked(repr(error)))
                sent = False
            (self._metrics.exported if sent else self._metrics.failed).inc(len(spans))
            if sent is self._failing:
                self._failing = not sent
                log.info("the collector takes spans again") if sent else log.warning(
                    "the collector does not take spans: they are dropped", spans=len(spans)
                )


def start_exporting(service: str, instance: str) -> Tracer | None:
    """A tracer with its exporter, as the environment says; None if it says that there is none. Raises RelayError."""
    environment = os.environ
    exporter_name = environment.get("OTEL_TRACES_EXPORTER", "otlp").strip() or "otlp"
    if environment.get("OTEL_SDK_DISABLED", "").strip().lower() == "true" or exporter_name == "none":
        log.info("tracing is off by the variables OTEL_*")
        return None
    if exporter_name != "otlp":
        raise RelayError(f"OTEL_TRACES_EXPORTER is {exporter_name}: RelayGR exports with otlp only, or none.")
    for name in ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL"):
        protocol = environment.get(name, "http/protobuf")
        if protocol != "http/protobuf":
            raise RelayError(f"{name} is {protocol}: RelayGR speaks http/protobuf only (port 4318 of a collector).")
    batch_spans = _whole(environment, "OTEL_BSP_MAX_EXPORT_BATCH_SIZE", 512)
    queue_spans = _whole(environment, "OTEL_BSP_MAX_QUEUE_SIZE", 2048)
    interval_s = _whole(environment, "OTEL_BSP_SCHEDULE_DELAY", 5000) / 1000
    resource = _resource(environment, service, instance)
    metrics = TracerMetrics()
    tracer = Tracer(sampler_of(environment), queue_spans, min(batch_spans, queue_spans), metrics)
    export = SpanExport(tracer, OTLPSpanExporter(session=_session(environment)), resource, metrics, interval_s)
    tracer.on_close = export.stop
    export.start()
    log.info("tracing is on", sampler=_sampler_name(environment), service=str(resource.attributes.get(SERVICE_NAME)))
    return tracer


def sampler_of(environment: Mapping[str, str]) -> Sampler:
    """The sampler that the environment names. Raises RelayError."""
    name = _sampler_name(environment)
    root = name.removeprefix(_PARENT_BASED)
    if root not in _ROOT_SAMPLERS:
        known = ", ".join((*_ROOT_SAMPLERS, *(_PARENT_BASED + each for each in _ROOT_SAMPLERS)))
        raise RelayError(f"OTEL_TRACES_SAMPLER is {name}: RelayGR has {known}.")
    rate = _rate(environment) if root == "traceidratio" else float(root == "always_on")
    return Sampler(TraceIdRatioBased.get_bound_for_rate(rate), follows_parent=name.startswith(_PARENT_BASED))


def otel_spans(spans: Sequence[Span], resource: Resource) -> list[ReadableSpan]:
    """The spans as OpenTelemetry's exporters take them."""
    return [
        ReadableSpan(
            name=span.name,
            context=_context(span.context, is_remote=False),
            parent=_context(span.parent) if span.parent is not None else None,
            resource=resource,
            attributes=span.attributes if span.error is None else {**span.attributes, "error.type": span.error},
            links=(Link(_context(span.link)),) if span.link is not None else (),
            kind=_KINDS[span.kind],
            status=Status(StatusCode.ERROR, span.error) if span.error is not None else Status(),
            start_time=span.start_us * 1000,
            end_time=span.end_us * 1000,
            instrumentation_scope=_SCOPE,
        )
        for span in spans
    ]


def _sampler_name(environment: Mapping[str, str]) -> str:
    return environment.get("OTEL_TRACES_SAMPLER", "").strip().lower() or _DEFAULT_SAMPLER


def _rate(environment: Mapping[str, str]) -> float:
    text = environment.get("OTEL_TRACES_SAMPLER_ARG", "").strip() or "1"
    try:
        rate = float(text)
    except ValueError:
        rate = -1.0
    if not 0 <= rate <= 1:
        raise RelayError(f"OTEL_TRACES_SAMPLER_ARG is {text!r}: expected a number from 0 to 1.")
    return rate


def _context(context: TraceContext, *, is_remote: bool = True) -> SpanContext:
    return SpanContext(context.trace_id, context.span_id, is_remote, TraceFlags(int(context.is_sampled)))


def _resource(environment: Mapping[str, str], service: str, instance: str) -> Resource:
    """The process. What the environment says comes first, and then our names, not those that the library makes up."""
    given = {pair.partition("=")[0].strip() for pair in environment.get("OTEL_RESOURCE_ATTRIBUTES", "").split(",")}
    if environment.get("OTEL_SERVICE_NAME"):
        given.add(SERVICE_NAME)
    own = {SERVICE_NAME: service, SERVICE_INSTANCE_ID: instance, SERVICE_VERSION: __version__}
    return Resource.create().merge(Resource({name: value for name, value in own.items() if name not in given}))


def _session(environment: Mapping[str, str]) -> requests.Session | None:
    """One that asks no proxy, for a collector on this machine; None: the exporter makes its own."""
    names = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
    endpoint = next((environment[name] for name in names if environment.get(name)), _DEFAULT_ENDPOINT)
    if not is_loopback(urlsplit(endpoint).hostname or ""):
        return None
    session = requests.Session()
    session.trust_env = False
    return session


def _whole(environment: Mapping[str, str], name: str, default: int) -> int:
    text = environment.get(name, "").strip() or str(default)
    if not text.isdecimal() or not 0 < int(text) < 2**31:
        raise RelayError(f"{name} is {text!r}: expected a whole number above 0.")
    return int(text)
