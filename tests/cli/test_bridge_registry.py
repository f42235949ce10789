"""`relaygr publish --from kafka:TOPIC --schema-registry URL`: Avro, Protobuf and JSON Schema of a pipeline become
behaviours and histories.
"""

from __future__ import annotations

import base64
import io
import json
import struct
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from typing import Any
from uuid import UUID

import fastavro
import pytest
from typer.testing import CliRunner, Result

from relaygr.cli.app import app
from relaygr.devbroker import LocalBroker
from relaygr.kafka.clients import ProducerKind, make_producer
from relaygr.kafka.settings import KafkaSettings
from relaygr.schemas.codec import decode
from relaygr.schemas.messages import BehaviourEvent, History
from relaygr.schemas.topics import Topic
from tests.echo_worker import read_topic
from tests.worlds.protobuf import answer, file, message, written
from tests.worlds.registry import Registry, served_registry

pytestmark = pytest.mark.slow

T0 = 1_600_000_000_000
MAP = ["--columns", "user=uid,item=sku,time=at,action=event", "--actions", "view=1,buy=2"]
MILLIS = {"type": "long", "logicalType": "timestamp-millis"}
EVENT = {
    "type": "record",
    "name": "Event",
    "fields": [
        {"name": "uid", "type": "string"},
        {"name": "sku", "type": ["null", "long"]},
        {"name": "at", "type": MILLIS},
        {"name": "event", "type": {"type": "enum", "name": "Kind", "symbols": ["view", "buy"]}},
    ],
}
HISTORY = {
    "type": "record",
    "name": "Visits",
    "fields": [
        {"name": "uid", "type": "string"},
        *(
            {"name": name, "type": {"type": "array", "items": items}}
            for name, items in (("sku", "long"), ("at", MILLIS))
        ),
        {"name": "event", "type": {"type": "array", "items": "string"}},
    ],
}
SCHEMAS: dict[int, Any] = {1: EVENT, 2: HISTORY, 3: "string"}


@pytest.fixture(scope="module")
def broker(any_broker: LocalBroker) -> LocalBroker:
    """The records do not depend on the broker."""
    return any_broker


@pytest.fixture
def registry() -> Iterator[Registry]:
    with served_registry() as served:
        served.schemas |= SCHEMAS
        served.authorization = "Basic " + base64.b64encode(b"ann:se:cret").decode()
        served.url = served.url.replace("//", "//ann:se%3Acret@")
        yield served


def avro(number: int, value: Any, schema: int | None = None) -> bytes:
    stream = io.BytesIO(struct.pack(">bI", 0, number))
    stream.seek(0, io.SEEK_END)
    fastavro.schemaless_writer(stream, fastavro.parse_schema(SCHEMAS[schema or number]), value)
    return stream.getvalue()


def event(user: str, item: int | None = 7) -> dict[str, Any]:
    return {"uid": user, "sku": item, "at": datetime.fromtimestamp(T0 / 1000, UTC), "event": "buy"}


Records = Sequence[tuple[bytes, bytes | None] | tuple[bytes, bytes | None, list[tuple[str, bytes]]]]
"""Key, value and headers."""


def bridge(kafka: KafkaSettings, what: str, registry: Registry, records: Records) -> Result:
    source = kafka.topic(Topic.RETRIEVAL)
    producer = make_producer(kafka, ProducerKind.DURABLE, "pipeline")
    for key, value, *headers in records:
        producer.produce(source, value, key, headers=headers[0] if headers else [])
    assert producer.flush(30) == 0
    given = [f"--set={name}={getattr(kafka, name)}" for name in ("topic_prefix", "group_prefix", "partitions")]
    words = ["publish", what, "--from", f"kafka:{source}", "--bootstrap", kafka.bootstrap, *given, *MAP, "--until-end"]
    return CliRunner().invoke(app, [*words, "--schema-registry", registry.url], catch_exceptions=False)


def test_avro_becomes_behaviours_and_a_schema_is_asked_for_once(
    kafka_settings: KafkaSettings, registry: Registry
) -> None:
    whole = avro(1, event("ann"))
    bad = [b"", b"{}", whole[:-1], whole + b"x", avro(9, event("ann"), 1), avro(3, "x"), avro(1, event("ann", None))]
    records = [(b"k", value) for value in (whole, *bad, avro(1, event("bob")))]
    done = bridge(kafka_settings, "behaviours", registry, records)
    assert done.exit_code == 0, done.output
    assert "2 records published, 7 bad ones left out, lag 0" in done.output
    assert "the registry has no schema 9" in done.output and "the first byte is not 0" in done.output
    assert "secret" not in done.output and "se:cret" not in done.output
    found = [
        decode(BehaviourEvent, message.value() or b"") for message in read_topic(kafka_settings, Topic.BEHAVIOURS, 2)
    ]
    assert sorted(each.user_id for each in found) == ["ann", "bob"]
    for each in found:
        behaviours = each.behaviours
        assert (behaviours.items[0], behaviours.actions[0], behaviours.timestamps_ms[0]) == (7, 2, T0)
    assert registry.paths.count("/schemas/ids/1") == 1


def test_avro_becomes_histories_and_an_avro_key_deletes(kafka_settings: KafkaSettings, registry: Registry) -> None:
    times = [datetime.fromtimestamp((T0 + offset) / 1000, UTC) for offset in (5, 0)]
    visits = {"uid": "ann", "sku": [2, 1], "at": times, "event": ["buy", "view"]}
    done = bridge(
        kafka_settings, "history", registry, [(b"ann", avro(2, visits)), (avro(3, "bob"), None), (b"eve", None)]
    )
    assert "3 records published, 0 bad ones left out" in done.output, done.output
    messages = {
        (message.key() or b"").decode(): message.value() for message in read_topic(kafka_settings, Topic.HISTORY, 3)
    }
    assert messages["bob"] is None and messages["eve"] is None
    history = decode(History, messages["ann"] or b"")
    assert (history.behaviours.items.tolist(), history.behaviours.actions.tolist()) == ([1, 2], [1, 2])
    assert history.behaviours.timestamps_ms.tolist() == [T0, T0 + 5]


KINDS = file(enums={"Kind": ["view", "buy"]}, name="shop/kinds.proto")
VISIT = file(
    message("Ping"),
    message("Visit", uid="string", sku="optional int64", at="int64", event="Kind"),
    imports=[KINDS.name],
)
LATER = file(
    message("Ping"),
    message("Visit", uid="string", sku="optional int64", at="int64", event="Kind", tags="repeated string"),
    imports=[KINDS.name],
)
VISITS = file(
    message("Visits", uid="string", sku="repeated int64", at="repeated int64", event="repeated Kind"),
    imports=[KINDS.name],
)
KINDS_REFERENCE = "shop/kinds.proto", "kinds", 1
SECOND = b"\2\2"
GUID = UUID(int=77)


def with_protobuf(registry: Registry) -> None:
    registry.subjects["kinds/versions/1"] = answer(KINDS, schema_id=20)
    registry.schemas |= {
        20: answer(KINDS),
        21: answer(VISIT, KINDS_REFERENCE),
        22: answer(LATER, KINDS_REFERENCE),
        23: answer(VISITS, KINDS_REFERENCE),
        str(GUID): answer(VISIT, KINDS_REFERENCE),
        30: {"schema": '{"type": "object"}', "schemaType": "JSON"},
    }


def visit(user: str, described: Any = VISIT, **more: Any) -> bytes:
    return written("Visit", {"uid": user, "sku": 7, "at": T0, "event": 1, **more}, KINDS, described)


def of(number: int, body: bytes) -> bytes:
    return struct.pack(">bI", 0, number) + body


def test_protobuf_and_json_schema_become_behaviours_and_each_bad_record_is_counted(
    kafka_settings: KafkaSettings, registry: Registry
) -> None:
    """Several schemas in one topic: a later one of the same message, one that is named in a header, and JSON."""
    with_protobuf(registry)
    whole = of(21, SECOND + visit("ann"))
    text = json.dumps({"uid": "eve", "sku": 7, "at": T0, "event": "buy"}).encode()
    bad = [
        whole[:-1],
        of(21, b"\0"),
        of(21, b"\2\4" + visit("ann")),
        of(9, SECOND + visit("ann")),
        of(21, SECOND + visit("ann")[:6]),
        of(21, SECOND + visit("ann", event=5)),
        of(30, text[:-1]),
        of(30, b"[]"),
    ]
    header = [("trace", b"x"), ("__value_schema_id", b"\1" + GUID.bytes + SECOND)]
    done = bridge(
        kafka_settings,
        "behaviours",
        registry,
        [
            (b"k", whole),
            *((b"k", value) for value in bad),
            (b"k", of(22, SECOND + visit("bob", LATER, tags=["new"]))),
            (b"k", visit("cat"), header),
            (b"k", of(30, text)),
            (b"k", whole),
        ],
    )
    assert done.exit_code == 0, done.output
    assert "5 records published, 8 bad ones left out, lag 0" in done.output, done.output
    for said in (
        "no schema 9",
        "message 2 of a schema of 2",
        "not Protobuf of its schema",
        "action is '5'",
        "not JSON",
    ):
        assert said in " ".join(done.output.split()), done.output
    found = [
        decode(BehaviourEvent, message.value() or b"") for message in read_topic(kafka_settings, Topic.BEHAVIOURS, 5)
    ]
    assert sorted(each.user_id for each in found) == ["ann", "ann", "bob", "cat", "eve"]
    for each in found:
        behaviours = each.behaviours
        assert (behaviours.items[0], behaviours.actions[0], behaviours.timestamps_ms[0]) == (7, 2, T0)
    for path in ("/schemas/ids/21", "/schemas/ids/21?format=serialized", "/schemas/ids/30"):
        assert registry.paths.count(path) == 1


def test_protobuf_becomes_histories_and_keys_of_each_type_delete(
    kafka_settings: KafkaSettings, registry: Registry
) -> None:
    with_protobuf(registry)
    visits = {"uid": "ann", "sku": [2, 1], "at": [T0 + 5, T0], "event": [1, 0]}
    key = [("__key_schema_id", b"\1" + GUID.bytes + SECOND)]
    records: Records = [
        (b"ann", of(23, b"\0" + written("Visits", visits, KINDS, VISITS))),
        (of(21, SECOND + visit("bob")), None),
        (of(30, b'"cat"'), None),
        (of(30, b'{"uid": "dan"}'), None),
        (visit("eve"), None, key),
    ]
    done = bridge(kafka_settings, "history", registry, records)
    assert "5 records published, 0 bad ones left out" in done.output, done.output
    messages = {
        (message.key() or b"").decode(): message.value() for message in read_topic(kafka_settings, Topic.HISTORY, 5)
    }
    assert [user for user, value in sorted(messages.items()) if value is None] == ["bob", "cat", "dan", "eve"]
    history = decode(History, messages["ann"] or b"")
    assert (history.behaviours.items.tolist(), history.behaviours.actions.tolist()) == ([1, 2], [1, 2])


def test_a_registry_with_the_text_of_protobuf_only_ends_the_bridge_and_no_record_is_lost(
    kafka_settings: KafkaSettings, registry: Registry
) -> None:
    with_protobuf(registry)
    serialized = registry.schemas[21].pop("serialized")
    records = [(b"k", avro(1, event("ann"))), (b"k", of(21, SECOND + visit("bob")))]
    done = bridge(kafka_settings, "behaviours", registry, records)
    assert done.exit_code == 1 and "gives schema 21, which is of Protobuf, as text only" in " ".join(
        done.output.split()
    )
    registry.schemas[21]["serialized"] = serialized
    done = bridge(kafka_settings, "behaviours", registry, [])
    assert done.exit_code == 0 and "0 bad ones left out, lag 0" in done.output
    assert len(read_topic(kafka_settings, Topic.BEHAVIOURS, 2)) == 2


def test_no_record_ends_the_bridge_and_each_poisonous_one_is_counted(
    kafka_settings: KafkaSettings, registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Records that name themselves without end, or claim more than there is, are passed and not met again."""
    fields = {field["name"]: field for field in EVENT["fields"]}
    comment = {"type": "record", "name": "Comment", "fields": [{"name": "on", "type": ["null", "Comment"]}]}
    mirror = {"type": "record", "name": "Mirror", "fields": [{"name": "own", "type": "Mirror"}]}
    unused = [("comment", comment), ("raw", ["null", "bytes"]), ("holes", {"type": "array", "items": "null"})]
    wide = {**EVENT, "fields": [*({"name": name, "type": kind} for name, kind in unused), *EVENT["fields"]]}
    referring = {**EVENT, "fields": [*EVENT["fields"][:3], {**fields["event"], "type": "shop.Kind"}]}
    kinds = {"type": "enum", "name": "shop.Kind", "symbols": ["view", "buy"]}
    reference = {"name": "shop.Kind", "subject": "kinds", "version": 2}
    registry.subjects["kinds/versions/2"] = {"schema": json.dumps(kinds)}
    registry.schemas |= {
        10: wide,
        11: {"schema": json.dumps(referring), "references": [reference]},
        12: {"schema": json.dumps(referring), "references": [{**reference, "version": 9}]},
        13: mirror,
        14: {"schema": "[" * 90_000 + "]" * 90_000},
        15: {**EVENT, "fields": [{"name": "uid", "type": "bytes"}, *EVENT["fields"][1:]]},
    }
    plain = avro(1, event("ann"))[5:]
    link, nothing, end = b"\2", b"\0", b"\0"
    good = [of(10, link * 20 + end + nothing + end + plain), of(10, end + b"\2\4\xff\xfe" + end + plain), of(11, plain)]
    poison = [
        of(10, link * 7000 + end + nothing + end + plain),
        of(10, link * 600 + end + nothing + end + plain),
        of(10, end + nothing + b"\x80\x80\x80\x80\x80\x80\x08" + end + plain),
        *(of(number, plain) for number in (12, 13, 14, 15)),
    ]
    # The login is not on the command line, which other users of the machine can read.
    monkeypatch.setenv("RELAYGR_SCHEMA_REGISTRY__USERNAME", "ann")
    monkeypatch.setenv("RELAYGR_SCHEMA_REGISTRY__PASSWORD", "se:cret")
    registry.url = registry.url.replace("ann:se%3Acret@", "")
    done = bridge(kafka_settings, "behaviours", registry, [(b"k", each) for each in (good[0], *poison, *good[1:])])
    assert done.exit_code == 0, done.output
    assert "3 records published, 7 bad ones left out, lag 0" in done.output, done.output
    for reason in ("nested too deeply", "holes: it claims", "no version 9 of subject kinds", "uid: it is bytes"):
        assert reason in done.output, done.output
    assert len(read_topic(kafka_settings, Topic.BEHAVIOURS, 3)) == 3
    done = bridge(kafka_settings, "behaviours", registry, [])
    assert "0 records published, 0 bad ones left out, lag 0" in done.output, done.output


@pytest.mark.parametrize("failure", [(500, b"{}"), (404, b"default backend - 404")], ids=str)
def test_a_registry_that_fails_ends_the_bridge_and_no_record_is_lost(
    kafka_settings: KafkaSettings, registry: Registry, failure: tuple[int, bytes]
) -> None:
    """A proxy answers 404 while no registry is behind it. All records of the schema were passed over as bad."""
    registry.schemas[4] = EVENT
    registry.failures["/schemas/ids/4"] = failure
    records = [(b"k", avro(1, event("ann"))), (b"k", avro(4, event("bob"), 1))]
    done = bridge(kafka_settings, "behaviours", registry, records)
    said = " ".join(done.output.split())
    assert done.exit_code == 1 and "goes on where it stopped" in said
    assert f"did not give schema 4: HTTP Error {failure[0]}" in said
    registry.failures.clear()
    done = bridge(kafka_settings, "behaviours", registry, [])
    assert done.exit_code == 0 and "0 bad ones left out, lag 0" in done.output
    found = [
        decode(BehaviourEvent, message.value() or b"") for message in read_topic(kafka_settings, Topic.BEHAVIOURS, 2)
    ]
    assert sorted(each.user_id for each in found) == ["ann", "bob"]


@pytest.mark.parametrize("url", ["registry:8081", "ftp://registry"])
def test_an_address_that_is_none_of_a_registry_is_refused(kafka_settings: KafkaSettings, url: str) -> None:
    done = bridge(kafka_settings, "behaviours", Registry(url), [])
    assert done.exit_code == 1 and "expected such as http://registry:8081" in done.output
