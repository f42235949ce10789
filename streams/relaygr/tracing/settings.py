"""Settings of tracing."""

from __future__ import annotations

from pydantic import Field

from relaygr.runtime.settings import Section


class TracingSettings(Section):
    """Traces of impressions."""

    enabled: bool = Field(
        False,
        description="record OpenTelemetry traces and send them over OTLP; the variables OTEL_* say where to, and how "
        "many (OTEL_TRACES_SAMPLER)",
    )
