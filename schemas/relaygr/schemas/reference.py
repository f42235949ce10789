"""Writes `docs/messages.md` from the message classes and the topic catalogue.

    python -m relaygr.schemas.reference > docs/messages.md

A test compares the committed file with the classes.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterable, Iterator
from typing import Any, get_args

from relaygr.schemas import codec, headers, trace_context
from relaygr.schemas.codec import Nested, field_specs
from relaygr.schemas.limits import MAX_MESSAGE_BYTES
from relaygr.schemas.messages import Message
from relaygr.schemas.topics import CATALOGUE, DEFAULT_PARTITIONS, DEFAULT_PREFIX, Topic, TopicSpec

HEADER_SETS: dict[str, tuple[tuple[str, str], ...]] = {
    "A ranking request carries its reply address and deadline, so that a worker can answer it without its body:": (
        (headers.REQUEST_ID, "as in the body, 1 to 128 bytes"),
        (headers.GATEWAY_ID, f"the gateway that waits for the result, 1 to {headers.MAX_HEADER_BYTES} bytes"),
        (headers.REPLY_TOPIC, "topic of the result"),
        (
            headers.REPLY_PARTITION,
            "partition of the result, decimal digits: the one that the gateway reads; of one that reads all, any. If "
            "the topic does not have it, the request is a dead letter, and gets no answer",
        ),
        (headers.DEADLINE_US, "as in the body, µs since the epoch, decimal digits"),
        (headers.DIVERTED_BY, "on `ranking-overflow` only: the worker that passed the request on; workers write it"),
    ),
    "A ranking result carries the request's ids, so that gateways that share a partition filter before decoding:": (
        (headers.REQUEST_ID, "of the request"),
        (headers.GATEWAY_ID, "of the request"),
    ),
    "A dead letter has these headers. With `dead_letter_bodies` it also has the original key, value and headers:": (
        (headers.DEAD_LETTER_REASON, "the reason, one of a bounded set (such as a decode reason above)"),
        (headers.DEAD_LETTER_DETAIL, "explanation for operators"),
        (headers.ORIGIN_TOPIC, "topic of the original message"),
        (headers.ORIGIN_PARTITION, "its partition, decimal digits"),
        (headers.ORIGIN_OFFSET, "its offset, decimal digits"),
        (headers.ORIGIN_VALUE_DIGEST, "BLAKE2b of its value, 16 bytes in hexadecimal digits; absent with a body"),
        (headers.ORIGIN_VALUE_BYTES, "size of its value, decimal digits; absent with a body"),
        (headers.DEAD_LETTERED_AT_US, "when the dead letter was written, µs since the epoch, decimal digits"),
    ),
}

TRACE_HEADER = (trace_context.TRACEPARENT, "the span that sent the message (W3C Trace Context); may be absent")
"""The header of retrieval events, pre-infer jobs, ranking requests and results."""

_OTHER_LANGUAGES = """\
[asyncapi.json](asyncapi.json) describes topics, headers and messages (AsyncAPI 3). The package ships test vectors in
`schemas/relaygr/schemas/vectors/wire.json`: the bytes of each message, bytes that a reader refuses, each step of three
digest chains, and the partitions of 50 user ids. Write what your implementation computes into a file of the same form,
and check it with `python -m relaygr.schemas.vectors --against FILE`. Gateways of one file, which send an impression and
read its result, and which tests run: [Python](examples/gateway.py) without this package, [Java](examples/Gateway.java)
with kafka-clients alone, and [Go](examples/gateway.go). All take the same arguments.

Clients of Kafka differ in two things: how a producer chooses the partition (murmur2 of the key is needed), and how a
consumer reads one partition of the results without a group (`assign`).

| client | partitioner | results |
|---|---|---|
| librdkafka (Python, Go, .NET, Rust, `@confluentinc/kafka-javascript`) | `partitioner=murmur2_random` | `assign` |
| kafka-clients (Java, Kotlin, Scala) | the default | `assign` |
| kafkajs 2 | the default, not `LegacyPartitioner` | has no `assign`: see below |
| sarama (Go) | `NewCustomHashPartitioner` with a murmur2 | `ConsumePartition` |

A client that reads only as a member of a group, such as kafkajs, gives each process a group of its own, which no other
process joins: `consumer({groupId: "relaygr.gateway." + gatewayId})`, and
`subscribe({topics: ["relaygr.results"], fromBeginning: false})`. It sends its first request after the first event
`FETCH`, since results from before are not read. It reads all partitions of the results and drops those whose header
`gateway_id` is not its own. In `reply_partition` it writes any partition of the results, such as murmur2 of its id
modulo their number, which spreads the results of many gateways. Its traffic grows with the whole fleet's. The user
needs Read on that group. Beyond a few gateways use a client with `assign`, or the [HTTP gateway](gateway.md#http)."""


def reference() -> str:
    """The whole page, Markdown."""
    return "\n".join(_lines()) + "\n"


def _lines() -> Iterator[str]:
    yield "# Messages"
    yield ""
    yield "Generated by `python -m relaygr.schemas.reference`; edit the classes in `schemas/`, not this page."
    yield ""
    yield "For gateways in other languages and for tools. Gateways in Python use [the client](gateway.md#python), and"
    yield "pipelines that write JSON, Avro or Protobuf use [the bridge](publishing.md#from-a-topic)."
    yield ""
    yield "## Wire form and changes"
    yield ""
    yield inspect.cleandoc(codec.__doc__ or "")
    yield ""
    yield f"A message has at most {MAX_MESSAGE_BYTES:,} bytes, {codec.MAX_CONTAINERS} maps and lists,"
    yield f"{codec.MAX_MAP_ENTRIES} names in a map, {codec.MAX_LIST_ENTRIES:,} entries in a list and"
    yield f"{codec.MAX_TEXT_BYTES:,} bytes in a text."
    yield ""
    yield "Decode reasons: " + ", ".join(f"`{reason}`" for reason in codec.DecodeReason) + "."
    yield ""
    yield "## Other languages"
    yield ""
    yield _OTHER_LANGUAGES
    yield ""
    yield "## Topics"
    yield ""
    yield f"The prefix `{DEFAULT_PREFIX}` and the partition count N ({DEFAULT_PARTITIONS}) are settings. All topics"
    yield "marked =N must have the same count. Keys are UTF-8 bytes; Java's murmur2 of them selects the partition."
    yield ""
    columns = (
        "topic",
        "key",
        "value",
        "written by",
        "read by",
        "partitions",
        "cleanup",
        "kept",
        "segment closes",
        "largest message",
    )
    yield from _table(columns, (_topic_row(spec) for spec in CATALOGUE.values()))
    yield ""
    yield "Workers read `history` and `behaviours` read committed: producers may write them in transactions. The other"
    yield "topics are read uncommitted, because a job or a request is useless when a transaction ends."
    yield ""
    yield "## Headers"
    for title, rows in HEADER_SETS.items():
        yield ""
        yield title
        yield ""
        yield from _table(("header", "meaning"), ((f"`{name}`", meaning) for name, meaning in rows))
    yield ""
    yield f"With `affinity=one_topic` pre-infer jobs are on `{Topic.RANKING.named()}`, with the header `{headers.KIND}`"
    yield f"= `{headers.JOB_HEADER[1].decode()}`."
    yield ""
    yield f"Events, jobs, requests and results may also carry `{TRACE_HEADER[0]}`: {TRACE_HEADER[1].partition(';')[0]}."
    yield "A reader ignores a value that is not valid. A gateway sends its own span with each message of a recorded"
    yield "trace; the answer then names the span with which the worker sent it ([tracing](monitoring.md#tracing))."
    yield ""
    yield "## Fields"
    yield ""
    yield "A field that is not required may be absent or nil. The last column gives the value that it has then."
    for message in _with_parts(get_args(Message)):
        yield from _message(message)


def _with_parts(messages: Iterable[type[Any]]) -> list[type[Any]]:
    """The messages, and then the parts that they contain, each once."""
    found = list(messages)
    for message in found:
        for spec in field_specs(message):
            if isinstance(spec.kind, Nested) and spec.kind.message not in found:
                found.append(spec.kind.message)
    return found


def _message(message: type[Any]) -> Iterator[str]:
    yield ""
    yield f"### {message.__name__}"
    yield ""
    yield inspect.getdoc(message) or ""
    yield ""
    rows = []
    for spec in field_specs(message):
        default = message.__dataclass_fields__[spec.name].default
        rows.append(
            (f"`{spec.name}`", spec.kind.describe(), spec.doc, _default(default) if spec.optional else "required")
        )
    yield from _table(("field", "type", "meaning", "if absent"), rows)


def _default(value: Any) -> str:
    return "none" if value is None else f"{value}".lower()


def _topic_row(spec: TopicSpec) -> tuple[str, ...]:
    partitions = str(spec.partitions) if spec.partitions is not None else "=N" if spec.co_partitioned else "N"
    return (
        f"`{spec.topic.named()}`",
        spec.key,
        spec.value,
        spec.writers,
        spec.readers,
        partitions,
        spec.cleanup.value,
        _duration(spec.retention_ms),
        f"{_duration(spec.segment_ms)}, {_size(spec.segment_bytes)}",
        _size(spec.max_message_bytes),
    )


def _duration(milliseconds: int) -> str:
    if milliseconds < 0:
        return "forever"
    minutes = milliseconds // 60_000
    return f"{minutes // 1440} d" if minutes % 1440 == 0 else f"{minutes} min"


def _size(size_bytes: int) -> str:
    mebibytes = size_bytes / 2**20
    return f"{mebibytes:g} MiB"


def _table(header: Iterable[str], rows: Iterable[Iterable[str]]) -> Iterator[str]:
    names = list(header)
    yield f"| {' | '.join(names)} |"
    yield f"|{'---|' * len(names)}"
    for row in rows:
        yield f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in row)} |"


if __name__ == "__main__":
    sys.stdout.write(reference())
