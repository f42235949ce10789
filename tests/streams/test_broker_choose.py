"""The choice of a broker."""

from __future__ import annotations

from pathlib import Path

import pytest

from relaygr.devbroker import available_brokers
from relaygr.devbroker.choose import SERVER_SCRIPT, STORAGE_SCRIPT, AvailableBrokers, BrokerChoice, choose
from relaygr.runtime.errors import RelayError


@pytest.fixture
def kafka_home(tmp_path: Path) -> Path:
    for script in (SERVER_SCRIPT, STORAGE_SCRIPT):
        (tmp_path / script).parent.mkdir(exist_ok=True)
        (tmp_path / script).touch()
    return tmp_path


JAVA = Path("/usr/bin/java")


def test_auto_takes_the_cluster_that_the_user_named_first(kafka_home: Path) -> None:
    chosen = choose("auto", AvailableBrokers("kafka.example:9092", kafka_home, JAVA))
    assert (chosen.kind, chosen.bootstrap) == (BrokerChoice.EXTERNAL, "kafka.example:9092")


def test_auto_takes_a_real_kafka_before_the_embedded_cluster(kafka_home: Path) -> None:
    chosen = choose("auto", AvailableBrokers(None, kafka_home, JAVA))
    assert (chosen.kind, chosen.kafka_home) == (BrokerChoice.KAFKA, kafka_home)


@pytest.mark.parametrize("java", [None, JAVA])
def test_auto_ends_at_the_embedded_cluster_and_says_what_was_missing(java: Path | None, kafka_home: Path) -> None:
    available = AvailableBrokers(None, None if java else kafka_home, java)
    chosen = choose("auto", available)
    assert chosen.kind is BrokerChoice.EMBEDDED
    assert ("KAFKA_HOME is not set" if java else "no Java runtime") in chosen.why


@pytest.mark.parametrize("choice", ["localhost:9092", "10.0.0.1:9092,10.0.0.2:9092", "[::1]:9092"])
def test_an_address_is_taken_as_it_is(choice: str) -> None:
    chosen = choose(choice, AvailableBrokers("other:9092"))
    assert (chosen.kind, chosen.bootstrap) == (BrokerChoice.EXTERNAL, choice)


@pytest.mark.parametrize("choice", ["", "real", "localhost", "host:", "host:port", "http://a:1"])
def test_a_word_that_is_no_choice_is_refused_with_the_choices(choice: str) -> None:
    with pytest.raises(RelayError, match="auto, embedded, kafka, docker, HOST:PORT"):
        choose(choice, AvailableBrokers())


@pytest.mark.parametrize("choice", ["embedded", "docker"])
def test_a_choice_by_name_does_not_look_around(choice: str, kafka_home: Path) -> None:
    assert choose(choice, AvailableBrokers("other:9092", kafka_home, JAVA)).kind == choice


def test_kafka_without_its_home_without_scripts_or_without_java_says_which(kafka_home: Path, tmp_path: Path) -> None:
    with pytest.raises(RelayError, match="KAFKA_HOME is not set"):
        choose("kafka", AvailableBrokers(None, None, JAVA))
    with pytest.raises(RelayError, match="17 or later"):
        choose("kafka", AvailableBrokers(None, kafka_home, None))
    (tmp_path / STORAGE_SCRIPT).unlink()
    with pytest.raises(RelayError, match=f"contains no {STORAGE_SCRIPT}"):
        choose("kafka", AvailableBrokers(None, kafka_home, JAVA))


def test_the_available_brokers_are_read_from_the_environment_but_never_the_users_cluster(tmp_path: Path) -> None:
    java = tmp_path / "bin" / "java"
    java.parent.mkdir()
    java.touch(mode=0o755)
    available = available_brokers(
        environ={"KAFKA_HOME": "/opt/kafka", "JAVA_HOME": str(tmp_path), "RELAYGR_BOOTSTRAP": "prod:9092"}
    )
    assert available == AvailableBrokers(None, Path("/opt/kafka"), java)
    assert available_brokers(environ={"PATH": ""}) == AvailableBrokers()
