"""Recorded cache operations: which prefixes were asked for, when, and what came of it. No tensors, no user ids.

`format` says what a trace holds, `recorder` writes one beside a running cache, `reading` reads one, even while
it is written.
"""

from relaygr.worker.cache.trace.format import (
    Sketch,
    TraceHeader,
    TraceReader,
    TraceRecord,
    encode_header,
    encode_record,
    sketch_of,
)
from relaygr.worker.cache.trace.recorder import TraceRecorder

__all__ = [
    "Sketch",
    "TraceHeader",
    "TraceReader",
    "TraceRecord",
    "TraceRecorder",
    "encode_header",
    "encode_record",
    "sketch_of",
]
