"""Traces of cache operations: which prefixes were requested, when, and with which outcome. No tensors, no user ids.

`format` defines and reads the file format, also while the file is written. `recorder` records a running cache.
"""

from relaygr.worker.cache.trace.format import (
    Sketch,
    TraceHeader,
    TraceReader,
    TraceRecord,
    TraceRow,
    common_behaviours,
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
    "TraceRow",
    "common_behaviours",
    "encode_header",
    "encode_record",
    "sketch_of",
]
