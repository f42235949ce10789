"""Topics of other systems with the schemas of a registry, into rankings."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from pathlib import Path as FilePath

import numpy as np
import pytest
from typer.testing import CliRunner

from relaygr.cli.app import app
from relaygr.client import Ended, RelayClient
from relaygr.devbroker import LocalBroker
from relaygr.kafka.clients import ProducerKind, make_producer
from relaygr.kafka.settings import KafkaSettings
from relaygr.schemas.messages import History, RankingResult
from relaygr.schemas.topics import Topic
from tests.worlds.protobuf import answer, file, message, written
from tests.worlds.registry import Registry, served_registry
from tests.worlds.relay import Relay, candidates_of, history_of, make_model, new_user, own_topics

pytestmark = pytest.mark.slow

SNAPSHOT, WHOLE = 200, 240
TOLERANCE = 2e-5
KINDS = file(enums={"Kind": ["VIEW", "CLICK", "CART", "BUY"]}, name="shop/kinds.proto")
VISITS = file(
    message("Visits", uid="string", sku="repeated int64", at="repeated int64", event="repeated Kind"),
    imports=[KINDS.name],
)
MAP = ["--columns", "user=uid,item=sku,time=at,action=event", "--actions", "VIEW=0,CLICK=1,CART=2,BUY=3"]


@pytest.fixture
def registry() -> Iterator[Registry]:
    with served_registry() as served:
        served.schemas |= {
            1: answer(VISITS, (KINDS.name, "kinds", 1)),
            2: answer(KINDS),
            3: {"schema": '{"type": "object"}', "schemaType": "JSON"},
        }
        served.subjects["kinds/versions/1"] = answer(KINDS, schema_id=2)
        yield served


@pytest.fixture
def relay(embedded_broker: LocalBroker, tmp_path: FilePath) -> Iterator[Relay]:
    model = make_model(tmp_path / "model", contextual_features=())
    with own_topics(embedded_broker) as kafka, Relay(kafka, tmp_path, model) as relay:
        yield relay


def passed_on(kafka: KafkaSettings, what: str, topic: Topic, registry: Registry, key: str, values: list[bytes]) -> str:
    """Writes a topic, which no other process reads here, and passes it on."""
    source = kafka.topic(topic)
    producer = make_producer(kafka, ProducerKind.DURABLE, "pipeline")
    for value in values:
        producer.produce(source, value, key)
    assert producer.flush(30) == 0
    given = [f"--set={name}={getattr(kafka, name)}" for name in ("topic_prefix", "group_prefix", "partitions")]
    words = ["publish", what, "--from", f"kafka:{source}", "--bootstrap", kafka.bootstrap, *given, *MAP, "--until-end"]
    done = CliRunner().invoke(app, [*words, "--schema-registry", registry.url], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.output


def ranked(client: RelayClient, user: str) -> RankingResult:
    outcome = client.rank(user, candidates_of(), history_at_least=WHOLE, budget_ms=20_000)
    assert outcome.status is Ended.RANKED and outcome.result is not None, outcome
    return outcome.result


def test_histories_of_protobuf_and_behaviours_of_json_schema_are_ranked_as_those_of_the_client(
    relay: Relay, registry: Registry
) -> None:
    worker = relay.start_worker()
    relay.await_ready(worker)
    user, other = new_user("theirs"), new_user("ours")
    behaviours = history_of(user, WHOLE, seed=3).behaviours
    columns = {"sku": behaviours.items, "at": behaviours.timestamps_ms, "event": behaviours.actions}
    snapshot = {name: column[:SNAPSHOT].tolist() for name, column in columns.items()}
    body = written("Visits", {"uid": user, **snapshot}, KINDS, VISITS)
    said = passed_on(relay.kafka, "history", Topic.RETRIEVAL, registry, user, [struct.pack(">bIb", 0, 1, 0) + body])
    assert "1 records published, 0 bad ones left out" in said
    later = [
        {"uid": user, **{name: int(column[at]) for name, column in columns.items()}} for at in range(SNAPSHOT, WHOLE)
    ]
    values = [struct.pack(">bI", 0, 3) + json.dumps(each).encode() for each in later]
    said = passed_on(relay.kafka, "behaviours", Topic.DEAD_LETTERS, registry, user, values)
    assert f"{len(later)} records published, 0 bad ones left out" in said
    with relay.client() as client:
        theirs = ranked(client, user)
        client.publish_history(History(other, WHOLE, np.empty(0, "<i8"), behaviours))
        ours = ranked(client, other)
    assert theirs.scores is not None and ours.scores is not None
    assert np.abs(theirs.scores - ours.scores).max() <= TOLERANCE * np.abs(ours.scores).max()
    assert theirs.prefix_tokens == ours.prefix_tokens == WHOLE
