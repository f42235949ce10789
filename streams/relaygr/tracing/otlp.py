"""Sends spans to a collector over OTLP/HTTP, as OpenTelemetry's variables say.

| variable | meaning here |
|---|---|
| OTEL_SDK_DISABLED, OTEL_TRACES_EXPORTER=none | tracing stays off |
| OTEL_TRACES_SAMPLER, OTEL_TRACES_SAMPLER_ARG | which traces are recorded: one of OpenTelemetry's six; by default all |
| OTEL_EXPORTER_OTLP_* | address, headers, TLS and time-out of the collector; the protocol is http/protobuf |
| OTEL_SERVICE_NAME, OTEL_RESOURCE_ATTRIBUTES | name and attributes of the process |
| OTEL_BSP_* | size of the queue (2048 spans), size of a batch (512), time between batches (5 s) |

One daemon thread takes the spans from the tracer's queue. While the collector is away, the queue fills, and further
spans are dropped and counted. The exporter takes a redirect for a success, and does not read in the answer how many
spans the collector refused: `Answers` does both.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping, Sequence
from typing import Any, Final
from urllib.parse import urlsplit

import requests
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceResponse
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
from relaygr.runtime.loggers import Logger
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
_PROTOBUF: Final = "application/x-protobuf"
_CREDENTIAL_PROVIDERS: Final = (
    "OTEL_PYTHON_EXPORTER_OTLP_HTTP_CREDENTIAL_PROVIDER",
    "OTEL_PYTHON_EXPORTER_OTLP_HTTP_TRACES_CREDENTIAL_PROVIDER",
)
log = Logger(__name__)


class Answers(requests.Session):
    """The session of the exporter. It reads what the exporter does not read of a collector's answers."""

    def __init__(self) -> None:
        super().__init__()
        self.refused_spans = 0
        """Spans of the last request that the collector refused in an answer of success."""
        self.reason = ""
        """The collector's words for it."""

    def request(self, *args: Any, **kwargs: Any) -> requests.Response:
        """The answer. Raises RelayError for a redirect, at whose end nobody would get the spans."""
        self.refused_spans, self.reason = 0, ""
        response = super().request(*args, **{**kwargs, "allow_redirects": False})
        if 300 <= response.status_code < 400:
            location = masked(response.headers.get("location", "another address"))
            raise RelayError(f"it redirects to {location}: set OTEL_EXPORTER_OTLP_ENDPOINT to the collector's address")
        if response.ok and response.headers.get("content-type", "").startswith(_PROTOBUF):
            told = ExportTraceServiceResponse.FromString(response.content).partial_success
            self.refused_spans, self.reason = told.rejected_spans, told.error_message
        return response


class SpanExport:
    """The thread that sends the spans of a tracer. `stop` sends what is left."""

    def __init__(
        self,
        tracer: Tracer,
        exporter: SpanExporter,
        answers: Answers,
        resource: Resource,
        metrics: TracerMetrics,
        interval_s: float,
    ) -> None:
        """`answers`: the exporter's session."""
        self._tracer = tracer
        self._exporter = exporter
        self._answers = answers
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
            refused = min(self._answers.refused_spans, len(spans)) if sent else len(spans)
            self._metrics.exported.inc(len(spans) - refused)
            self._metrics.failed.inc(refused)
            if (refused > 0) is not self._failing:
                self._failing = refused > 0
                log.warning(
                    "the collector does not take spans: they are dropped",
                    spans=refused,
                    reason=masked(self._answers.reason) or "the line of the exporter before this one",
                ) if refused else log.info("the collector takes spans again")


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
    answers = _answers(environment)
    # A provider of credentials brings a session of its own, whose answers nobody reads.
    session = None if any(environment.get(name) for name in _CREDENTIAL_PROVIDERS) else answers
    export = SpanExport(tracer, OTLPSpanExporter(session=session), answers, resource, metrics, interval_s)
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


def _answers(environment: Mapping[str, str]) -> Answers:
    """The exporter's session. It asks no proxy for a collector on this machine."""
    names = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
    endpoint = next((environment[name] for name in names if environment.get(name)), _DEFAULT_ENDPOINT)
    answers = Answers()
    answers.trust_env = not is_loopback(urlsplit(endpoint).hostname or "")
    return answers


def _whole(environment: Mapping[str, str], name: str, default: int) -> int:
    text = environment.get(name, "").strip() or str(default)
    if not text.isdecimal() or not 0 < int(text) < 2**31:
        raise RelayError(f"{name} is {text!r}: expected a whole number above 0.")
    return int(text)
