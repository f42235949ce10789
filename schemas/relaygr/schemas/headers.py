"""Message headers, which a reader can use before it decodes the body, or without decoding it.

A ranking request carries its deadline and reply address in headers. The worker reads the deadline first, so
that it answers a backlog of expired requests without decoding them. It needs the address to answer `failed`
when the body cannot be decoded. A result carries the request's ids, so that gateways that share a partition
skip each other's results without decoding them.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable

from relaygr.schemas.codec import DecodeError, DecodeReason
from relaygr.schemas.fields import INT64_MAX, FieldError, Text
from relaygr.schemas.messages import REQUEST_ID_TEXT
from relaygr.schemas.record import record
from relaygr.schemas.trace_context import TRACEPARENT, VALID_TRACEPARENT

Headers = list[tuple[str, str | bytes | None]]
RawHeaders = Iterable[tuple[str, bytes | str | None]] | None

REQUEST_ID = "request_id"
GATEWAY_ID = "gateway_id"
REPLY_TOPIC = "reply_topic"
REPLY_PARTITION = "reply_partition"
DEADLINE_US = "deadline_us"
DIVERTED_BY = "diverted_by"
"""Header of a ranking request on the overflow topic: the worker that passed it on."""

DEAD_LETTER_REASON = "dead_letter_reason"
DEAD_LETTER_DETAIL = "dead_letter_detail"
ORIGIN_TOPIC = "origin_topic"
ORIGIN_PARTITION = "origin_partition"
ORIGIN_OFFSET = "origin_offset"
ORIGIN_VALUE_DIGEST = "origin_value_digest"
ORIGIN_VALUE_BYTES = "origin_value_bytes"
DEAD_LETTERED_AT_US = "dead_lettered_at_us"

KIND = "kind"
JOB_HEADER = (KIND, b"preinfer")
"""Header of a pre-infer job on the topic of the ranking requests. A ranking request has no header `kind`."""

PREPARED_BY = "prepared_by"
"""Header of a pre-infer job that a pre-infer worker passes on: the worker that wrote the prefix to the pool."""

WORKERS_GROUP = "workers_group"
"""Header of a worker's status: the consumer group of the worker."""

REPEATED_TOMBSTONE = "repeated_tombstone"
"""Header of a tombstone that a worker repeats: next offset, time and topic id, with spaces between."""

MAX_HEADER_BYTES = 512
_HEADER_TEXT = Text(MAX_HEADER_BYTES)
_WORKER_ID = Text(128)
_REPEATED = re.compile(rb"(\d{1,18}) (\d{1,18}) ([!-~]{0,64})")


@record(frozen=True, slots=True)
class RankingHeaders:
    """Headers of a ranking request: reply address, deadline and, if it has one, the trace."""

    request_id: str
    gateway_id: str
    reply_topic: str
    reply_partition: int
    deadline_us: int
    traceparent: bytes | None = None
    """The header of W3C Trace Context, if it is valid."""
    diverted_by: str | None = None
    """The worker that passed the request on, so that a result without its body names it, too."""

    def encode(self) -> Headers:
        headers: Headers = [
            (REQUEST_ID, self.request_id.encode()),
            (GATEWAY_ID, self.gateway_id.encode()),
            (REPLY_TOPIC, self.reply_topic.encode()),
            (REPLY_PARTITION, str(self.reply_partition).encode()),
            (DEADLINE_US, str(self.deadline_us).encode()),
        ]
        if self.traceparent is not None:
            headers.append((TRACEPARENT, self.traceparent))
        if self.diverted_by is not None:
            headers.append((DIVERTED_BY, self.diverted_by.encode()))
        return headers

    @classmethod
    def decode(cls, raw: RawHeaders) -> RankingHeaders:
        """Raises DecodeError if a header is absent, repeated or out of bounds. An optional one is then left out."""
        values = _values(raw)
        traceparent = values.get(TRACEPARENT)
        return cls(
            traceparent=traceparent if traceparent and VALID_TRACEPARENT.fullmatch(traceparent) else None,
            request_id=_text(values, REQUEST_ID, REQUEST_ID_TEXT),
            gateway_id=_repeated_text(GATEWAY_ID, values.get(GATEWAY_ID, b"")),
            reply_topic=_repeated_text(REPLY_TOPIC, values.get(REPLY_TOPIC, b"")),
            reply_partition=_whole(values, REPLY_PARTITION, 2**31 - 1),
            deadline_us=_whole(values, DEADLINE_US, INT64_MAX),
            diverted_by=_optional_text(values, DIVERTED_BY, _WORKER_ID) if DIVERTED_BY in values else None,
        )


@record(frozen=True, slots=True)
class ResultHeaders:
    """Headers of a ranking result: the request, the gateway that sent it and, if it has one, the trace."""

    request_id: str
    gateway_id: str
    traceparent: bytes | None = None
    """The header of W3C Trace Context, if it is valid."""

    def encode(self) -> Headers:
        headers: Headers = [(REQUEST_ID, self.request_id.encode()), (GATEWAY_ID, self.gateway_id.encode())]
        if self.traceparent is not None:
            headers.append((TRACEPARENT, self.traceparent))
        return headers

    @classmethod
    def decode(cls, raw: RawHeaders) -> ResultHeaders:
        """Raises DecodeError if a header is absent, repeated or out of bounds."""
        values = _values(raw)
        traceparent = values.get(TRACEPARENT)
        return cls(
            request_id=_text(values, REQUEST_ID, REQUEST_ID_TEXT),
            gateway_id=_text(values, GATEWAY_ID),
            traceparent=traceparent if traceparent and VALID_TRACEPARENT.fullmatch(traceparent) else None,
        )


@record(frozen=True, slots=True)
class RepeatedTombstone:
    """Header of a tombstone that a worker writes because a snapshot of the deleted user came after the first one."""

    next_offset: int
    """The worker had read this user's records below this offset of the history topic. If another record came since,
    the tombstone deletes nothing."""
    written_at_ms: int
    """The timestamp of the first tombstone; ms since the epoch."""
    topic_id: str
    """The id of the history topic; in another one the offset means nothing."""

    def encode(self) -> Headers:
        return [(REPEATED_TOMBSTONE, f"{self.next_offset} {self.written_at_ms} {self.topic_id}".encode())]

    @classmethod
    def decode(cls, raw: RawHeaders) -> RepeatedTombstone | None:
        """None without the header. Raises DecodeError if it is malformed."""
        data = next((value for name, value in raw or () if name == REPEATED_TOMBSTONE), None)
        if data is None:
            return None
        found = _REPEATED.fullmatch(data if isinstance(data, bytes) else data.encode())
        if found is None:
            raise DecodeError(DecodeReason.INVALID_FIELD, f"header {REPEATED_TOMBSTONE} is malformed")
        next_offset, written_at_ms, topic_id = found.groups()
        return cls(int(next_offset), int(written_at_ms), topic_id.decode())


def is_job(raw: RawHeaders) -> bool:
    """Whether a message on the topic of the ranking requests is a pre-infer job."""
    return JOB_HEADER in (raw or ())


def workers_group_of(raw: RawHeaders) -> str | None:
    """The group of the worker that wrote a status; None if the status does not name it, as in earlier versions."""
    data = next((value for name, value in raw or () if name == WORKERS_GROUP), None)
    return data.decode(errors="replace")[:MAX_HEADER_BYTES] if isinstance(data, bytes) else data


def traceparent_of(raw: RawHeaders) -> bytes | str | None:
    """The header `traceparent` as it came. Of several, none: it is not known which is meant."""
    found = [value for name, value in raw or () if name == TRACEPARENT]
    return found[0] if len(found) == 1 else None


def _values(raw: RawHeaders) -> dict[str, bytes]:
    """Headers by name. Headers of other systems, such as tracing, may repeat; ours only with the same value."""
    values: dict[str, bytes] = {}
    for name, value in raw or ():
        # `_text` decodes a value, because a header of another system need not be UTF-8.
        data = value.encode(errors="surrogatepass") if isinstance(value, str) else value
        if data is None:
            continue
        if name in values and values[name] != data and name in _OURS:
            raise DecodeError(DecodeReason.INVALID_FIELD, f"header {name} is given twice")
        values[name] = data
    return values


def _text(values: dict[str, bytes], name: str, kind: Text = _HEADER_TEXT) -> str:
    data = values.get(name)
    if not data:
        raise DecodeError(DecodeReason.INVALID_FIELD, f"header {name} is absent")
    try:
        return kind.unpack(data.decode())
    except UnicodeDecodeError as error:
        raise DecodeError(DecodeReason.MALFORMED, f"header {name} is not UTF-8") from error
    except FieldError as error:
        raise DecodeError(DecodeReason.INVALID_FIELD, f"header {name}: {error}") from error


def _optional_text(values: dict[str, bytes], name: str, kind: Text) -> str | None:
    """`_text`, or None. A header that only informs must not cost a request its answer."""
    try:
        return _text(values, name, kind)
    except DecodeError:
        return None


@functools.lru_cache(maxsize=1024)
def _repeated_text(name: str, data: bytes) -> str:
    """`_text` for a header that is the same in most messages."""
    return _text({name: data}, name)


def _whole(values: dict[str, bytes], name: str, maximum: int) -> int:
    data = values.get(name, b"")
    if data.isdigit() and len(data) <= 19 and int(data) <= maximum:
        return int(data)
    _text(values, name)  # Raises if the header is not even text.
    raise DecodeError(DecodeReason.INVALID_FIELD, f"header {name} is not a whole number up to {maximum}")


_OURS = frozenset((REQUEST_ID, GATEWAY_ID, REPLY_TOPIC, REPLY_PARTITION, DEADLINE_US, DIVERTED_BY))
