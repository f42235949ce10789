"""The few fields of a message that the page needs. Histories, candidates and scores are skipped, not decoded.

Only the first `HEAD_BYTES` of a message are read. Our encoders write the large fields last, so all that the page needs
is there; a message of another encoder may lack some. Pure; any bytes give a result or None, and no exception.
"""

from __future__ import annotations

from typing import Any, Final

import msgpack

from relaygr.schemas.codec import SCHEMA_VERSION
from relaygr.schemas.fields import INT64_MAX
from relaygr.schemas.headers import DEADLINE_US, REQUEST_ID, RawHeaders
from relaygr.schemas.messages import FailureReason, Outcome, Path, PrefixSource
from relaygr.schemas.record import record

HEAD_BYTES: Final = 8 * 1024
MAX_FIELDS: Final = 64
MAX_TEXT: Final = 256
OTHER: Final = "other"

_PATHS: Final = frozenset(str(path) for path in Path)
_OUTCOMES: Final = frozenset(str(outcome) for outcome in Outcome)
_REASONS: Final = frozenset(str(reason) for reason in FailureReason)
_SOURCES: Final = frozenset(str(source) for source in PrefixSource)


@record(frozen=True, slots=True)
class RetrievalSeen:
    """A retrieval event. Times are µs since the epoch."""

    request_id: str
    retrieval_at_us: int


@record(frozen=True, slots=True)
class JobSeen:
    """A pre-infer job."""

    request_id: str
    retrieval_at_us: int
    decided_at_us: int


@record(frozen=True, slots=True)
class RankingSeen:
    """A ranking request, by its headers and its key."""

    request_id: str
    user: bytes
    sent_at_us: int
    """The record's time stamp; 0: unknown."""
    deadline_us: int


@record(frozen=True, slots=True)
class ResultSeen:
    """A ranking result. `path`, `reason` and `source` are known names or `other`."""

    request_id: str
    worker_id: str
    outcome: str
    request_sent_at_us: int
    received_at_us: int
    sent_at_us: int
    reason: str | None
    path: str | None
    source: str | None
    prefix_tokens: int
    queue_us: int
    wait_us: int
    pre_infer_us: int
    reload_us: int
    rank_us: int
    total_us: int


def read_retrieval(value: bytes | None) -> RetrievalSeen | None:
    """None if the message cannot be read."""
    found = _fields(value, _RETRIEVAL)
    request_id = _text(found.get("request_id"))
    return RetrievalSeen(request_id, _whole(found.get("retrieval_at_us"))) if request_id else None


def read_job(value: bytes | None) -> JobSeen | None:
    """None if the message cannot be read."""
    found = _fields(value, _JOB)
    request_id = _text(found.get("request_id"))
    if not request_id:
        return None
    return JobSeen(request_id, _whole(found.get("retrieval_at_us")), _whole(found.get("decided_at_us")))


def read_ranking(key: bytes | None, headers: RawHeaders, at_us: int) -> RankingSeen | None:
    """From key, headers and time stamp alone. None if they cannot be read."""
    values = {name: value for name, value in headers or () if isinstance(value, bytes)}
    deadline = values.get(DEADLINE_US, b"")
    try:
        request_id = _text(values.get(REQUEST_ID, b"").decode())
    except UnicodeDecodeError:
        return None
    if not request_id or not (deadline.isdigit() and len(deadline) <= 19):
        return None
    return RankingSeen(request_id, bytes(key or b"")[:MAX_TEXT], at_us, int(deadline))


def read_result(value: bytes | None) -> ResultSeen | None:
    """None if the message cannot be read."""
    found = _fields(value, _RESULT)
    request_id, outcome = _text(found.get("request_id")), found.get("outcome")
    if not request_id or not isinstance(outcome, str) or outcome not in _OUTCOMES:
        return None
    timings = found.get("timings")
    if not isinstance(timings, dict):
        timings = {}
    return ResultSeen(
        request_id=request_id,
        worker_id=_text(found.get("worker_id")),
        outcome=outcome,
        request_sent_at_us=_whole(found.get("request_sent_at_us")),
        received_at_us=_whole(found.get("received_at_us")),
        sent_at_us=_whole(found.get("sent_at_us")),
        reason=_name(found.get("reason"), _REASONS),
        path=_name(found.get("path"), _PATHS),
        source=_name(found.get("prefix_source"), _SOURCES),
        prefix_tokens=_whole(found.get("prefix_tokens")),
        queue_us=_whole(timings.get("queue_us")),
        wait_us=_whole(timings.get("wait_us")),
        pre_infer_us=_whole(timings.get("pre_infer_us")),
        reload_us=_whole(timings.get("reload_us")),
        rank_us=_whole(timings.get("rank_us")),
        total_us=_whole(timings.get("total_us")),
    )


_RETRIEVAL: Final = frozenset(("request_id", "retrieval_at_us"))
_JOB: Final = _RETRIEVAL | {"decided_at_us"}
_RESULT: Final = frozenset(
    (
        "request_id", "worker_id", "outcome", "request_sent_at_us", "received_at_us", "sent_at_us", "timings",
        "reason", "path", "prefix_source", "prefix_tokens",
    )
)  # fmt: skip


def _fields(value: bytes | None, wanted: frozenset[str]) -> dict[str, Any]:
    """The wanted fields in the first bytes of a message; what could be read before the end or an error."""
    found: dict[str, Any] = {}
    if not value or value[0] != SCHEMA_VERSION:
        return found
    unpacker = msgpack.Unpacker(raw=False, max_buffer_size=HEAD_BYTES, max_map_len=MAX_FIELDS, max_array_len=MAX_FIELDS)
    unpacker.feed(memoryview(value)[1 : 1 + HEAD_BYTES])
    unpack, skip, left = unpacker.unpack, unpacker.skip, len(wanted)
    try:
        for _ in range(min(MAX_FIELDS, unpacker.read_map_header())):
            name = unpack()
            if name in wanted:
                found[name] = unpack()
                left -= 1
                if not left:
                    break
            else:
                skip()
    except (ValueError, TypeError, RecursionError, OverflowError, msgpack.UnpackException):
        # The rest is cut off, or is no message.
        pass
    return found


def _text(value: object) -> str:
    return value if isinstance(value, str) and len(value) <= MAX_TEXT and value.isprintable() else ""


def _whole(value: object) -> int:
    return value if type(value) is int and 0 <= value <= INT64_MAX else 0


def _name(value: object, known: frozenset[str]) -> str | None:
    """A label out of a bounded set."""
    if value is None:
        return None
    return value if isinstance(value, str) and value in known else OTHER
