"""The header `traceparent` of W3C Trace Context: the trace that a message belongs to, and the span that sent it.

Every message may carry it. A reader ignores a header that is not valid: no work depends on a trace.
"""

from __future__ import annotations

import re
from typing import Final

from relaygr.schemas.record import record

TRACEPARENT: Final = "traceparent"
VALID_TRACEPARENT: Final = re.compile(
    # Version ff and ids of zeros are invalid. Only versions after 00 may append fields.
    rb"(?!ff|00.{54})[0-9a-f]{2}-(?!0{32})([0-9a-f]{32})-(?!0{16})([0-9a-f]{16})-([0-9a-f]{2})(?:-.{0,400})?",
    re.DOTALL,
)
_SAMPLED: Final = 1
_FLAGS_END: Final = 54
_ODD_DIGITS: Final = b"13579bdf"


@record(frozen=True, slots=True)
class TraceContext:
    """One span: its trace (16 bytes), its id (8 bytes), and whether the trace is recorded."""

    trace_id: int
    span_id: int
    is_sampled: bool

    @classmethod
    def parse(cls, header: bytes | str | None) -> TraceContext | None:
        """The context that a header names; None if the header is absent or invalid. Raises no exception."""
        if header is None:
            return None
        data = header.encode(errors="replace") if isinstance(header, str) else header
        found = VALID_TRACEPARENT.fullmatch(data)
        if found is None:
            return None
        return cls(int(found[1], 16), int(found[2], 16), bool(int(found[3], 16) & _SAMPLED))

    def encode(self) -> bytes:
        """The value of the header, version 00."""
        return b"00-%032x-%016x-%02x" % (self.trace_id, self.span_id, _SAMPLED if self.is_sampled else 0)


def is_sampled(header: bytes | None) -> bool:
    """Whether a header that is valid or absent says that its trace is recorded. Much faster than `parse`."""
    return header is not None and header[_FLAGS_END] in _ODD_DIGITS
