"""Writes `docs/asyncapi.json`, an AsyncAPI 3 description of the topics and messages, from the classes.

    python -m relaygr.schemas.asyncapi > docs/asyncapi.json

A test compares the committed file with the classes, and checks it against AsyncAPI's own schema.
"""

from __future__ import annotations

import json
import sys
from typing import Any

from relaygr.schemas.headers import MAX_HEADER_BYTES
from relaygr.schemas.json_schema import REFERENCE, Form, schemas_of
from relaygr.schemas.messages import (
    BehaviourEvent,
    History,
    PreInferJob,
    RankingRequest,
    RankingResult,
    RetrievalEvent,
    WorkerStatus,
)
from relaygr.schemas.reference import HEADER_SETS, TRACE_HEADER
from relaygr.schemas.topics import CATALOGUE, DEFAULT_PARTITIONS, Topic, TopicSpec
from relaygr.schemas.version import __version__

_ABOUT = """\
The topics of RelayGR and the messages on them. The operations are those of a gateway and of a publisher of histories;
the other topics are between the relay's own processes. A value is the byte 0x01 (the schema version) and then a
MessagePack map. Fields of format binary are MessagePack bytes: arrays are packed little-endian. Keys are the UTF-8
bytes of an id, and Java's murmur2 of the key selects the partition (librdkafka: partitioner=murmur2_random). The prefix
and the partition counts are settings of a deployment; those shown are the defaults. Test vectors:
relaygr.schemas.vectors."""
_VALUES: dict[Topic, type[Any] | None] = {
    Topic.RETRIEVAL: RetrievalEvent,
    Topic.PREINFER: PreInferJob,
    Topic.PREINFER_POOL: PreInferJob,
    Topic.RANKING: RankingRequest,
    Topic.RESULTS: RankingResult,
    Topic.HISTORY: History,
    Topic.BEHAVIOURS: BehaviourEvent,
    Topic.OVERFLOW: RankingRequest,
    Topic.WORKERS: WorkerStatus,
    Topic.DEAD_LETTERS: None,
}
_DEAD_LETTER = "DeadLetter"
_TRACED = (RetrievalEvent, PreInferJob, RankingRequest, RankingResult)
_OPERATIONS: dict[str, tuple[str, Topic, str]] = {
    "beginImpression": ("send", Topic.RETRIEVAL, "A gateway announces an impression."),
    "rank": ("send", Topic.RANKING, "A gateway asks for scores; the headers say where the result goes."),
    "receiveResult": (
        "receive",
        Topic.RESULTS,
        "A gateway reads the partition that reply_partition named.",
    ),
    "publishHistory": (
        "send",
        Topic.HISTORY,
        "A feature pipeline replaces a history; no value deletes the user.",
    ),
    "publishBehaviours": ("send", Topic.BEHAVIOURS, "A feature pipeline adds behaviours to a user's history."),
}


def document() -> dict[str, Any]:
    """The description."""
    values = [value for value in dict.fromkeys(_VALUES.values()) if value is not None]
    headers = dict(zip(("RankingRequest", "RankingResult", _DEAD_LETTER), HEADER_SETS.values(), strict=True))
    for message in _TRACED:
        headers[message.__name__] = (*headers.get(message.__name__, ()), TRACE_HEADER)
    return {
        "asyncapi": "3.0.0",
        "info": {"title": "RelayGR", "version": __version__, "description": _ABOUT},
        "defaultContentType": "application/msgpack",
        "channels": {topic.value: _channel(CATALOGUE[topic], value) for topic, value in _VALUES.items()},
        "operations": {
            name: {"action": action, "channel": {"$ref": f"#/channels/{topic.value}"}, "summary": summary}
            for name, (action, topic, summary) in _OPERATIONS.items()
        },
        "components": {
            "messages": {
                **{
                    value.__name__: _message(value.__name__, REFERENCE + value.__name__, headers.get(value.__name__))
                    for value in values
                },
                _DEAD_LETTER: _message(_DEAD_LETTER, REFERENCE + _DEAD_LETTER, headers[_DEAD_LETTER]),
            },
            "schemas": {
                **schemas_of(values, Form.MESSAGEPACK),
                _DEAD_LETTER: {
                    "type": "string",
                    "format": "binary",
                    "description": "the original value as it came, or nothing",
                },
            },
        },
    }


def _channel(spec: TopicSpec, value: type[Any] | None) -> dict[str, Any]:
    name = value.__name__ if value is not None else _DEAD_LETTER
    return {
        "address": spec.topic.named(),
        "description": f"Key: {spec.key}. Written by {spec.writers}, read by {spec.readers}.",
        "messages": {name: {"$ref": f"#/components/messages/{name}"}},
        "bindings": {
            "kafka": {
                "topic": spec.topic.named(),
                "partitions": spec.partition_count(DEFAULT_PARTITIONS),
                "topicConfiguration": {
                    "cleanup.policy": [spec.cleanup.value],
                    "retention.ms": spec.retention_ms,
                    "max.message.bytes": spec.max_message_bytes,
                },
                "bindingVersion": "0.5.0",
            }
        },
    }


def _message(name: str, payload: str, headers: tuple[tuple[str, str], ...] | None) -> dict[str, Any]:
    found: dict[str, Any] = {"name": name, "payload": {"$ref": payload}}
    if headers is not None:
        text = {"type": "string", "maxLength": MAX_HEADER_BYTES}
        properties = {header: {**text, "description": meaning} for header, meaning in headers}
        found["headers"] = {"type": "object", "properties": properties}
    if name != _DEAD_LETTER:
        found["bindings"] = {"kafka": {"key": {"type": "string"}, "bindingVersion": "0.5.0"}}
    return found


if __name__ == "__main__":
    sys.stdout.write(json.dumps(document(), indent=1, ensure_ascii=False) + "\n")
