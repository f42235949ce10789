"""`relaygr publish --from kafka:TOPIC --schema-registry URL`: Avro of a pipeline becomes behaviours and histories."""

from __future__ import annotations

import base64
import io
import json
import struct
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

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


@dataclass
class Registry:
    """The one path of a registry that is read, with a password."""

    url: str = ""
    asked: list[str] = field(default_factory=list)
    fails: bool = False

    def answer(self, path: str, password: str | None) -> tuple[int, Any]:
        self.asked.append(path)
        if password != "Basic " + base64.b64encode(b"ann:se:cret").decode():
            return 401, {}
        number = int(path.removeprefix("/schemas/ids/"))
        if self.fails or number not in SCHEMAS:
            return (500 if self.fails else 404), {"error_code": 40403}
        return 200, {"schema": json.dumps(SCHEMAS[number])}


@pytest.fixture
def registry() -> Iterator[Registry]:
    served = Registry()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            status, content = served.answer(self.path, self.headers.get("Authorization"))
            self.send_response(status)
            self.end_headers()
            self.wfile.write(json.dumps(content).encode())

        def log_message(self, *_: object) -> None:
            """Says nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        served.url = f"http://ann:se%3Acret@127.0.0.1:{server.server_port}"
        yield served
        server.shutdown()
        thread.join()


def avro(number: int, value: Any, schema: int | None = None) -> bytes:
    stream = io.BytesIO(struct.pack(">bI", 0, number))
    stream.seek(0, io.SEEK_END)
    fastavro.schemaless_writer(stream, fastavro.parse_schema(SCHEMAS[schema or number]), value)
    return stream.getvalue()


def event(user: str, item: int | None = 7) -> dict[str, Any]:
    return {"uid": user, "sku": item, "at": datetime.fromtimestamp(T0 / 1000, UTC), "event": "buy"}


def bridge(
    kafka: KafkaSettings, what: str, registry: Registry, records: Sequence[tuple[bytes, bytes | None]]
) -> Result:
    source = kafka.topic(Topic.RETRIEVAL)
    producer = make_producer(kafka, ProducerKind.DURABLE, "pipeline")
    for key, value in records:
        producer.produce(source, value, key)
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
    assert registry.asked.count("/schemas/ids/1") == 1


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


def test_a_registry_that_fails_ends_the_bridge_and_no_record_is_lost(
    kafka_settings: KafkaSettings, registry: Registry
) -> None:
    registry.fails = True
    done = bridge(kafka_settings, "behaviours", registry, [(b"k", avro(1, event("ann")))])
    said = " ".join(done.output.split())
    assert (
        done.exit_code == 1 and "did not give schema 1: HTTP Error 500" in said and "goes on where it stopped" in said
    )
    registry.fails = False
    done = bridge(kafka_settings, "behaviours", registry, [])
    assert "1 records published, 0 bad ones left out, lag 0" in done.output


@pytest.mark.parametrize("url", ["registry:8081", "ftp://registry"])
def test_an_address_that_is_none_of_a_registry_is_refused(kafka_settings: KafkaSettings, url: str) -> None:
    done = bridge(kafka_settings, "behaviours", Registry(url), [])
    assert done.exit_code == 1 and "expected such as http://registry:8081" in done.output
