"""Traces of impressions, as OpenTelemetry spans. Off by default; `start_tracing` turns them on for a process.

    gateway   send RETRIEVAL <---link--- relaygr.rank - send RANKING                    receive RESULTS
                    |                                         |                               |
    trigger   process RETRIEVAL - send PREINFER               |                               |
                                       |                      |                               |
    worker                 process PREINFER <---link--- process RANKING ----------------- send RESULTS
                           queue, reload, pre_infer     queue, reload, full, append, hit

An impression has two traces, one for each of its messages to the relay. The spans of the ranking link to those of the
retrieval, because no stage of the ranking is a part of the retrieval. A message carries its trace in the header
`traceparent` (`relaygr.schemas.trace_context`). The two trace ids of an impression end with the same 8 bytes, so a
sampler by ratio records both traces or none.

Only a client begins traces. A trace that it begins and does not record has no header, because at a low ratio the
headers would cost more than all the rest. So a trigger or a worker must not begin a trace for a message without one:
it would sample a second time what the client has decided. An unrecorded trace of the client's caller keeps its header.

A thread that serves requests makes a `Span` from times that it has, and puts it into a bounded queue. One thread of the
exporter sends the queue in batches. While tracing is off, nothing of this package is called.

spans.py      spans and their attributes
tracer.py     ids, sampling, the queue, and why it is not OpenTelemetry's
stages.py     the stages of a ranking request from its times
worker.py     the spans of a worker
otlp.py       sampler, and the thread of OpenTelemetry's exporter, from the variables OTEL_*; needs opentelemetry
"""

from pydantic import Field

from relaygr.runtime.settings import Section
from relaygr.tracing.tracer import Tracer

__all__ = ["Tracer", "TracingSettings", "start_tracing"]


class TracingSettings(Section):
    """Traces of impressions."""

    enabled: bool = Field(
        False,
        description="record OpenTelemetry traces and send them over OTLP; the variables OTEL_* say where to, and how "
        "many (OTEL_TRACES_SAMPLER)",
    )


def start_tracing(settings: TracingSettings, service: str, instance: str) -> Tracer | None:
    """The tracer of this process, which runs; None if tracing is off. The caller closes it.

    `service` and `instance` name the process unless OTEL_SERVICE_NAME or OTEL_RESOURCE_ATTRIBUTES do. Raises RelayError
    for variables that cannot be followed, and if opentelemetry is not installed.
    """
    if not settings.enabled:
        return None
    # opentelemetry is imported only where it is needed.
    from relaygr.tracing.otlp import start_exporting

    return start_exporting(service, instance)
