"""`relaygr topics`: what it prints, and its exit codes."""

from __future__ import annotations

import json
import re
import shlex
import uuid
from pathlib import Path

import pytest
import yaml
from click.testing import Result
from confluent_kafka import Message
from typer.testing import CliRunner

from relaygr.cli.topics import app
from relaygr.cluster.rights import Resource, Role, rights_of
from relaygr.devbroker import LocalBroker
from relaygr.devbroker.local import free_ports
from relaygr.kafka.clients import ProducerKind, make_producer
from relaygr.kafka.session import KafkaSession
from relaygr.kafka.settings import KafkaSettings
from relaygr.runtime.errors import RelayError
from relaygr.schemas.headers import (
    DEAD_LETTER_REASON,
    DEAD_LETTERED_AT_US,
    ORIGIN_OFFSET,
    ORIGIN_PARTITION,
    ORIGIN_TOPIC,
)
from relaygr.schemas.topics import CATALOGUE, Topic


def run(kafka: KafkaSettings, *arguments: str) -> Result:
    common = ["--bootstrap", kafka.bootstrap, "--set", f"topic_prefix={kafka.topic_prefix}"]
    return CliRunner().invoke(app, [*arguments, *common, "--set", f"partitions={kafka.partitions}"])


def fresh(broker: LocalBroker) -> KafkaSettings:
    return broker.settings(KafkaSettings(topic_prefix=f"test-{uuid.uuid4().hex[:12]}", partitions=4))


def test_dead_letters_that_cannot_be_read_are_told_with_the_cure(broker: LocalBroker) -> None:
    """A wrong port gave librdkafka's words alone."""
    nobody = run(
        KafkaSettings(bootstrap=f"127.0.0.1:{free_ports(1)[0]}"), "dead-letters", "--set", "connect_timeout_s=1"
    )
    assert "cannot be reached: Connection refused. Check `bootstrap`" in str(nobody.exception)
    absent = str(run(fresh(broker), "dead-letters").exception)
    assert "dead-letters cannot be read: " in absent and "`relaygr topics create`" in absent


@pytest.mark.parametrize("with_bodies", [True, False])
def test_dead_letters_are_shown_with_origin_reason_and_size(kafka_settings: KafkaSettings, with_bodies: bool) -> None:
    kafka = kafka_settings.model_copy(update={"dead_letter_bodies": with_bodies})
    assert "0 of 0 dead letters" in run(kafka, "dead-letters").stdout
    writer = KafkaSession(kafka, "test").dead_letters
    for offset in range(5):
        message = Message("relaygr.ranking", 7, offset, key=b"ann", value=b"x" * 100)
        writer.write(message, "undecodable", f"field {offset} is \x1b[31mred")
    assert writer.flush(30) == 0
    done = run(kafka, "dead-letters", "--last", "2")
    lines = done.stdout.splitlines()
    assert done.exit_code == 0 and len(lines) == 5
    assert lines[-1].startswith("2 of 5 dead letters in ")
    shown = [line for line in lines if "relaygr.ranking[7]@" in line]
    assert all(line.endswith("100 B, key ann" if with_bodies else "100 B") for line in shown)
    assert next(line.strip() for line in lines if "undecodable" in line).endswith("is \\x1b[31mred")
    listed = json.loads(run(kafka, "dead-letters", "--json").stdout)
    assert sorted(each["offset"] for each in listed) == [0, 1, 2, 3, 4]
    assert {each["key"] for each in listed} == {"ann" if with_bodies else None}


def test_a_dead_letter_that_others_wrote_neither_moves_the_cursor_nor_hides_the_rest(
    kafka_settings: KafkaSettings,
) -> None:
    """A number of thousands of digits ended the command in a traceback, while such a letter was among the newest."""
    producer = make_producer(kafka_settings, ProducerKind.DURABLE, "vandal")
    title = b"\x1b]2;title\x07\x1b[1A\nforged line"
    for origin in (
        {},
        {ORIGIN_OFFSET: b"8" * 6_000},
        {ORIGIN_PARTITION: b"1" * 4_400, DEAD_LETTERED_AT_US: b"9" * 9_000},
    ):
        headers = {
            ORIGIN_TOPIC: title,
            ORIGIN_PARTITION: b"3",
            ORIGIN_OFFSET: b"41",
            DEAD_LETTER_REASON: title,
        } | origin
        producer.produce(kafka_settings.topic(Topic.DEAD_LETTERS), b"", title, headers=list(headers.items()))
    assert producer.flush(30) == 0
    done = run(kafka_settings, "dead-letters")
    assert done.exit_code == 0 and "3 of 3 dead letters" in done.stdout
    assert len(done.stdout.splitlines()) == 7
    assert not any(each in done.stdout for each in "\x1b\x07")
    listed = json.loads(run(kafka_settings, "dead-letters", "--json").stdout)
    assert sorted((each["partition"], each["offset"]) for each in listed) == [(-1, 41), (3, -1), (3, 41)]


def test_check_succeeds_where_all_topics_are_as_they_should_be(kafka_settings: KafkaSettings) -> None:
    done = run(kafka_settings, "check", "--workers", "1")
    assert done.exit_code == 0
    assert all(kafka_settings.topic(topic) in done.stdout for topic in CATALOGUE)
    assert "missing" not in done.stdout


def test_check_fails_where_topics_are_missing_and_names_the_command(broker: LocalBroker) -> None:
    done = run(fresh(broker), "check")
    assert done.exit_code == 1
    assert re.search(r"error: .* do not exist\. To fix: run `relaygr topics create`", done.stdout)


def test_the_report_as_json_holds_rows_and_findings(broker: LocalBroker) -> None:
    done = run(fresh(broker), "check", "--json")
    assert done.exit_code == 1
    report = json.loads(done.stdout)
    assert report["ok"] is False
    assert {row["topic"] for row in report["rows"]} == {str(topic) for topic in CATALOGUE}
    assert report["findings"][0]["severity"] == "error"


def test_too_few_partitions_for_the_workers_is_a_warning_that_does_not_fail(kafka_settings: KafkaSettings) -> None:
    done = run(kafka_settings, "check", "--workers", "2")
    assert done.exit_code == 0
    assert "warning: 12 partitions for 2 workers" in done.stdout


@pytest.mark.kafka
def test_create_says_what_it_would_make_then_makes_it_and_then_finds_it(real_broker: LocalBroker) -> None:
    kafka = fresh(real_broker)
    planned = run(kafka, "create", "--dry-run")
    assert (planned.exit_code, planned.stdout.count("to create"), "error" in planned.stdout) == (0, len(Topic), False)
    made = run(kafka, "create")
    assert (made.exit_code, made.stdout.count("created")) == (0, len(Topic))
    again = run(kafka, "create")
    assert (again.exit_code, again.stdout.count("exists")) == (0, len(Topic))
    real_broker.delete_topics(kafka)


@pytest.mark.kafka
def test_create_refuses_another_partition_count(real_broker: LocalBroker) -> None:
    kafka = fresh(real_broker)
    real_broker.create_topics(kafka)
    refused = run(kafka.model_copy(update={"partitions": 6}), "create")
    assert isinstance(refused.exception, RelayError)
    assert "have 4 partitions each, the setting is 6" in str(refused.exception)
    real_broker.delete_topics(kafka)


@pytest.mark.parametrize("role", Role)
def test_acls_prints_commands_and_a_user_of_strimzi_with_the_same_rights(role: Role) -> None:
    """Without a broker: nothing listens on port 1."""
    kafka = KafkaSettings(bootstrap="127.0.0.1:1", topic_prefix="mine", group_prefix="mine")
    printed = run(kafka, "acls", "--role", role.value, "--principal", "User:x y", "--set", "group_prefix=mine")
    assert printed.exit_code == 0, printed.output
    commands, _, user = printed.stdout.partition("---\n")
    found = set()
    for line in commands.splitlines():
        words = shlex.split(line)
        assert words[:5] == [
            "kafka-acls.sh",
            "--bootstrap-server",
            "127.0.0.1:1",
            "--command-config",
            "admin.properties",
        ]
        assert words[5:8] == ["--add", "--allow-principal", "User:x y"]
        operations = [words[place + 1] for place, word in enumerate(words) if word == "--operation"]
        found |= {(words[-2].removeprefix("--"), words[-1], operation) for operation in operations}
    acls = yaml.safe_load(user)["spec"]["authorization"]["acls"]
    assert found == {
        (acl["resource"]["type"], acl["resource"]["name"], operation) for acl in acls for operation in acl["operations"]
    }
    assert found == {
        (right.resource.value, right.name, operation)
        for right in rights_of(role, kafka)
        for operation in right.operations
    }


def test_acls_of_a_user_with_a_certificate_prints_a_name_that_kubernetes_takes() -> None:
    done = run(KafkaSettings(), "acls", "--role", "lag", "--principal", "User:CN=Lag Monitor,O=us", "--as", "strimzi")
    user = yaml.safe_load(done.stdout)
    assert user["metadata"]["name"] == "lag-monitor"
    assert user["spec"]["authentication"] == {"type": "tls"}


def test_acls_refuses_a_principal_that_kafka_would_not_know() -> None:
    done = run(KafkaSettings(), "acls", "--role", "lag", "--principal", "x")
    assert isinstance(done.exception, RelayError) and "write User:NAME" in str(done.exception)


def test_the_table_of_rights_in_the_docs_is_that_of_the_code() -> None:
    page = (Path(__file__).parents[2] / "docs" / "operations.md").read_text(encoding="utf-8")
    kafka = KafkaSettings()
    for role in Role:
        cells = ["", ""]
        for resource, column in ((Resource.TOPIC, 0), (Resource.GROUP, 1)):
            by_operations: dict[str, list[str]] = {}
            for right in rights_of(role, kafka):
                if right.resource is resource:
                    by_operations.setdefault(", ".join(right.operations), []).append(
                        right.name.removeprefix(f"{kafka.topic_prefix}.")
                    )
            cells[column] = "; ".join(
                f"{operations}: {', '.join(names)}" for operations, names in by_operations.items()
            )
        assert f"| {role} | {cells[0]} | {cells[1]} |" in page, f"| {role} | {cells[0]} | {cells[1]} |"
