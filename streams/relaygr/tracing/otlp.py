"""Sends spans to a collector over OTLP/HTTP, as OpenTelemetry's variables say.

| variable | meaning here |
|---|---|
| OTEL_SDK_DISABLED, OTEL_TRACES_EXPORTER=none | tracing stays off |
| OTEL_TRACES_SAMPLER, OTEL_TRACES_SAMPLER_ARG | which traces are recorded; by default all |
| OTEL_EXPORTER_OTLP_* | address, headers, TLS and time-out of the collector; the protocol is http/protobuf |
| OTEL_SERVICE_NAME, OTEL_RESOURCE_ATTRIBUTES | name and attributes of the process |
| OTEL_BSP_* | size of the queue (2048 spans), size of a batch (512), time between batches (5 s) |

One daemon thread takes the spans from the tracer's queue. While the collector is away, the queue fills, and further
spans are dropped and counted.
"""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Mapping, Sequence
from typing import Final

import structlog
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import SERVICE_INSTANCE_ID, SERVICE_NAME, SERVICE_VERSION, Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace import sampling as otel_sampling
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.sampling import TraceIdRatioBased
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import Link, NonRecordingSpan, SpanContext, TraceFlags, set_span_in_context
from opentelemetry.trace import SpanKind as OtelKind
from opentelemetry.trace.status import Status, StatusCode

from relaygr.runtime.errors import RelayError
from relaygr.schemas.trace_context import TraceContext
from relaygr.schemas.version import __version__
from relaygr.tracing.spans import Span, SpanKind
from relaygr.tracing.tracer import EXPORT_THREAD, Tracer, TracerMetrics

_KINDS: Final = {
    SpanKind.INTERNAL: OtelKind.INTERNAL,
    SpanKind.PRODUCER: OtelKind.PRODUCER,
    SpanKind.CONSUMER: OtelKind.CONSUMER,
}
_SCOPE: Final = InstrumentationScope("relaygr", __version__)
_FOLLOWS_PARENT: Final = "remoteParentSampled:AlwaysOnSampler,remoteParentNotSampled:AlwaysOffSampler"
_ROOT: Final = re.compile(r"(?:ParentBased\{root:)?(?:TraceIdRatioBased\{([^{}]+)\}|Always(On|Off)Sampler)(?:,.*)?")
_ID_HALF: Final = (1 << 64) - 1
_LAST_WAIT_S: Final = 0.05
log = structlog.get_logger()


class OtelSampler:
    """A sampler of OpenTelemetry's SDK."""

    def __init__(self, sampler: otel_sampling.Sampler) -> None:
        self._sampler = sampler
        # The usual samplers are not asked: that would take longer than all else for a span that is not recorded.
        # Those that OpenTelemetry calls parentbased_:
        description = sampler.get_description()
        self._follows_parent = _FOLLOWS_PARENT in description
        # traceidratio, always_on, always_off, and the same with parentbased_:
        root = _ROOT.fullmatch(description)
        self.root_bound = None if root is None else TraceIdRatioBased.get_bound_for_rate(_rate(root))

    def is_sampled(self, parent: TraceContext | None, trace_id: int, name: str) -> bool:
        if parent is not None and self._follows_parent:
            return parent.is_sampled
        if parent is None and self.root_bound is not None:
            return trace_id & _ID_HALF < self.root_bound
        context = set_span_in_context(NonRecordingSpan(_context(parent))) if parent is not None else None
        decision = self._sampler.should_sample(context, trace_id, name).decision
        return decision is otel_sampling.Decision.RECORD_AND_SAMPLE


class SpanExport:
    """The thread that sends the spans of a tracer. `stop` sends what is left."""

    def __init__(
        self, exporter: SpanExporter, resource: Resource, metrics: TracerMetrics, interval_s: float, batch_spans: int
    ) -> None:
        self._exporter = exporter
        self._resource = resource
        self._metrics = metrics
        self._interval_s = interval_s
        self._batch_spans = batch_spans
        self._stopping = False
        self._wake = threading.Event()
        self._thread: threading.Thread | None = None
        self._failing = False

    def start(self, tracer: Tracer) -> None:
        tracer.on_batch(self._batch_spans, self._wake.set)
        self._thread = threading.Thread(target=self._run, args=(tracer,), name=EXPORT_THREAD, daemon=True)
        self._thread.start()

    def stop(self, timeout_s: float) -> None:
        """Waits at most `timeout_s` for the last batches."""
        self._stopping = True
        self._wake.set()
        if self._thread is not None:
            self._thread.join(timeout_s)
            # Ends the exporter's waits between its retries.
            self._exporter.shutdown()
            self._thread.join(_LAST_WAIT_S)

    def _run(self, tracer: Tracer) -> None:
        while not self._stopping:
            # A thread that looked at the queue many times a second would cost a client more than its spans do.
            self._wake.wait(self._interval_s)
            self._wake.clear()
            self._send(tracer)
        self._send(tracer)

    def _send(self, tracer: Tracer) -> None:
        while spans := tracer.take(self._batch_spans):
            try:
                sent = self._exporter.export(otel_spans(spans, self._resource)) is SpanExportResult.SUCCESS
            except Exception as error:  # A library's error must not end the thread.
                log.warning("spans cannot be exported", error=repr(error))
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
    # The provider reads OTEL_TRACES_SAMPLER.
    sampler = TracerProvider(resource=resource, shutdown_on_exit=False).sampler
    metrics = TracerMetrics()
    export = SpanExport(OTLPSpanExporter(), resource, metrics, interval_s, min(batch_spans, queue_spans))
    tracer = Tracer(OtelSampler(sampler), queue_spans, metrics, on_close=export.stop)
    export.start(tracer)
    log.info("tracing is on", sampler=sampler.get_description(), service=str(resource.attributes.get(SERVICE_NAME)))
    return tracer


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


def _rate(root: re.Match[str]) -> float:
    return float(root[1]) if root[1] is not None else float(root[2] == "On")


def _context(context: TraceContext, *, is_remote: bool = True) -> SpanContext:
    return SpanContext(context.trace_id, context.span_id, is_remote, TraceFlags(int(context.is_sampled)))


def _resource(environment: Mapping[str, str], service: str, instance: str) -> Resource:
    """The process. What the environment says comes first, and then our names, not those that the library makes up."""
    given = {pair.partition("=")[0].strip() for pair in environment.get("OTEL_RESOURCE_ATTRIBUTES", "").split(",")}
    if environment.get("OTEL_SERVICE_NAME"):
        given.add(SERVICE_NAME)
    own = {SERVICE_NAME: service, SERVICE_INSTANCE_ID: instance, SERVICE_VERSION: __version__}
    return Resource.create().merge(Resource({name: value for name, value in own.items() if name not in given}))


def _whole(environment: Mapping[str, str], name: str, default: int) -> int:
    text = environment.get(name, "").strip() or str(default)
    if not text.isdecimal() or not 0 < int(text) < 2**31:
        raise RelayError(f"{name} is {text!r}: expected a whole number above 0.")
    return int(text)
