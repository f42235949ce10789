"""Local brokers: they answer, they describe themselves, and they leave nothing behind."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
from confluent_kafka.admin import AdminClient

from relaygr.devbroker import BrokerChoice, LocalBroker, available_brokers, check_broker, local, local_broker
from relaygr.devbroker.choose import SERVER_SCRIPT, STORAGE_SCRIPT
from relaygr.devbroker.kafka import kafka_broker
from relaygr.devbroker.local import free_ports
from relaygr.kafka.clients import require_broker
from relaygr.kafka.settings import KafkaSettings, Security, SecurityProtocol
from relaygr.runtime.errors import RelayError
from relaygr.schemas.topics import CATALOGUE
from tests.waiting import becomes
from tests.worlds.closing_port import ClosingPort

HOLD = """
import sys
from relaygr.devbroker import local_broker
with local_broker(sys.argv[1]) as broker:
    print(broker.bootstrap, flush=True)
    sys.stdin.read()
"""


def refuses(bootstrap: str) -> bool:
    host, _, port = bootstrap.rpartition(":")
    with socket.socket() as door:
        return door.connect_ex((host, int(port))) != 0


def gone(pids: list[int]) -> bool:
    return not any(psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE for pid in pids)


def test_a_broker_says_what_it_is_and_what_it_can_not_show(broker: LocalBroker) -> None:
    assert broker.bootstrap in broker.what
    assert broker.limits
    assert require_broker(broker.settings()).brokers


def test_its_settings_fit_the_broker(embedded_broker: LocalBroker) -> None:
    kafka = embedded_broker.settings(KafkaSettings(partitions=12, replication_factor=3))
    assert (kafka.bootstrap, kafka.partitions, kafka.replication_factor) == (embedded_broker.bootstrap, 12, 1)
    assert kafka.fetch_wait_max_ms <= 5


def test_a_broker_of_ours_takes_plaintext_whatever_the_users_own_cluster_takes(embedded_broker: LocalBroker) -> None:
    theirs = KafkaSettings(security=Security(protocol=SecurityProtocol.SSL))
    assert embedded_broker.settings(theirs).security == Security()
    external = replace(embedded_broker, kind=BrokerChoice.EXTERNAL)
    assert external.settings(theirs).security == theirs.security


def test_topics_come_and_go(broker: LocalBroker) -> None:
    kafka = broker.settings(KafkaSettings(topic_prefix="come-and-go", partitions=12))
    broker.create_topics(kafka)
    broker.create_topics(kafka)
    counts = {name: len(topic.partitions) for name, topic in require_broker(kafka).topics.items()}
    assert {topic: counts[kafka.topic(topic)] for topic in CATALOGUE} == {
        topic: spec.partition_count(12) for topic, spec in CATALOGUE.items()
    }
    broker.delete_topics(kafka)
    assert becomes(lambda: not any(kafka.topic(topic) in require_broker(kafka).topics for topic in CATALOGUE))


def test_the_embedded_cluster_refuses_another_count_for_a_topic_that_exists(embedded_broker: LocalBroker) -> None:
    kafka = embedded_broker.settings(KafkaSettings(topic_prefix="recount", partitions=12))
    embedded_broker.create_topics(kafka)
    with pytest.raises(RelayError, match="already exists"):
        embedded_broker.create_topics(kafka.model_copy(update={"partitions": 6}))


def test_an_address_is_checked_and_left_alone(embedded_broker: LocalBroker) -> None:
    with local_broker(embedded_broker.bootstrap) as broker:
        assert (broker.kind, broker.ours) == (BrokerChoice.EXTERNAL, False)
    assert not refuses(embedded_broker.bootstrap)


@pytest.mark.slow
def test_an_address_where_nobody_answers_is_refused() -> None:
    with socket.socket() as door:
        door.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{door.getsockname()[1]}"
        with (
            pytest.raises(RelayError, match=f"{address} cannot be reached: Connection refused"),
            local_broker(address),
        ):
            pass


@pytest.mark.parametrize("choice", ["embedded", pytest.param("kafka", marks=pytest.mark.kafka)])
@pytest.mark.parametrize("way", ["end", "interrupt", "terminate", "kill"])
@pytest.mark.slow
def test_nothing_is_left_however_the_process_ends(choice: str, way: str, real_broker_or_skip: None) -> None:
    """Ctrl-C reaches the whole foreground group; kill -9 gives the process no chance to clean up."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, choice], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
        start_new_session=True,
    )  # fmt: skip
    assert process.stdin is not None and process.stdout is not None
    try:
        bootstrap = process.stdout.readline().decode().strip()
        children = [child.pid for child in psutil.Process(process.pid).children(recursive=True)]
        folders = broker_folders(children)
        assert not refuses(bootstrap)
        assert children
        if way == "end":
            process.stdin.close()
        elif way == "interrupt":
            os.killpg(process.pid, signal.SIGINT)
        else:
            process.send_signal(signal.SIGTERM if way == "terminate" else signal.SIGKILL)
        process.wait(20)
    finally:
        process.kill()
        process.wait()
        process.stdin.close()
        process.stdout.close()
    assert becomes(lambda: gone(children))
    assert refuses(bootstrap)
    assert becomes(lambda: not any(folder.exists() for folder in folders))


@pytest.mark.kafka
def test_a_kafka_that_is_restarted_keeps_its_address_and_its_topics(real_broker: LocalBroker) -> None:
    home = available_brokers().kafka_home
    if home is None:
        pytest.skip("tests run on a Kafka that they did not start")
    with kafka_broker(home, "a test", start_timeout_s=180.0) as broker:
        kafka = broker.settings(KafkaSettings(topic_prefix="kept", partitions=12))
        broker.create_topics(kafka)
        before = set(psutil.Process().children(recursive=True))
        assert broker.restart is not None
        broker.restart()
        after = set(psutil.Process().children(recursive=True))
        assert before - after and after - before, "another process"
        assert {kafka.topic(topic) for topic in CATALOGUE} <= require_broker(kafka).topics.keys()
    assert becomes(lambda: gone([process.pid for process in after - before]))


@pytest.mark.parametrize("own", [None, "-Down=1"], ids=["by default", "unless the user sets options"])
def test_a_brief_kafka_starts_without_the_second_compiler(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, own: str | None
) -> None:
    monkeypatch.delenv("KAFKA_OPTS", raising=False)
    if own is not None:
        monkeypatch.setenv("KAFKA_OPTS", own)
    for script in (STORAGE_SCRIPT, SERVER_SCRIPT):
        path = tmp_path / script
        path.parent.mkdir(exist_ok=True, parents=True)
        path.write_text('#!/bin/sh\necho "with $KAFKA_OPTS" >&2\nexit 1\n')
        path.chmod(0o755)
    with (
        pytest.raises(RelayError, match=f"with {own or '-XX:TieredStopAtLevel=1'}"),
        kafka_broker(tmp_path, "a test", is_brief=True),
    ):
        pass


def test_only_a_kafka_that_was_started_here_can_be_restarted(embedded_broker: LocalBroker) -> None:
    assert embedded_broker.restart is None


def broker_folders(pids: list[int]) -> list[Path]:
    """The temporary folders in the command lines of brokers."""
    words = [word for pid in pids for word in psutil.Process(pid).cmdline()]
    return [Path(word) for word in words if Path(word).name.startswith("relaygr-kafka-") and Path(word).is_dir()]


@pytest.fixture
def real_broker_or_skip(request: pytest.FixtureRequest) -> None:
    """Skips the test unless a real Kafka can be started. The test starts its own broker."""
    if request.node.callspec.params["choice"] == "kafka":
        broker: LocalBroker = request.getfixturevalue("real_broker")
        if broker.kind is not BrokerChoice.KAFKA:
            pytest.skip("tests run on a Kafka that they did not start")


def fake_home(folder: Path, server: str, storage: str = "exit 0") -> Path:
    for script, body in ((SERVER_SCRIPT, server), (STORAGE_SCRIPT, storage)):
        path = folder / script
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"#!/bin/sh\n{body}\n")
        path.chmod(0o755)
    return folder


def start_failure(home: Path, timeout_s: float = 20.0) -> str:
    with pytest.raises(RelayError) as error, kafka_broker(home, "a test", start_timeout_s=timeout_s):
        pass
    return str(error.value)


def test_a_broker_that_ends_at_its_start_shows_the_end_of_its_log(tmp_path: Path) -> None:
    text = start_failure(fake_home(tmp_path, "echo first; echo the reason; exit 3"))
    assert "Kafka ended before all brokers answer" in text
    assert text.endswith("the reason")


def test_a_failed_format_shows_its_log_too(tmp_path: Path) -> None:
    assert "bad cluster id" in start_failure(fake_home(tmp_path, "sleep 60", "echo bad cluster id; exit 1"))


def test_an_old_java_is_named_as_the_cause(tmp_path: Path) -> None:
    line = "java.lang.UnsupportedClassVersionError: kafka/Kafka has been compiled by a more recent version"
    assert "needs 17 or later" in start_failure(fake_home(tmp_path, f"echo '{line}'; exit 1"))


@pytest.mark.slow
def test_ports_that_are_taken_each_time_are_reported(tmp_path: Path) -> None:
    line = "org.apache.kafka.common.KafkaException: Socket server failed to bind: Address already in use"
    assert "ports in use 3 times" in start_failure(fake_home(tmp_path, f"echo '{line}'; exit 1"))


@pytest.mark.slow
def test_a_broker_that_does_not_come_up_is_given_up_and_killed(tmp_path: Path) -> None:
    text = start_failure(fake_home(tmp_path, f"echo $$ > {tmp_path}/pid; echo thinking; exec sleep 60"), timeout_s=1.0)
    assert "was not ready within 1 s" in text
    assert "thinking" in text
    assert becomes(lambda: gone([int((tmp_path / "pid").read_text())]))


def test_free_ports_are_different_and_free() -> None:
    ports = free_ports(5)
    assert len(set(ports)) == 5
    assert all(refuses(f"127.0.0.1:{port}") for port in ports)


def test_no_port_is_given_again_while_whoever_asked_for_it_has_not_used_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A gateway ended with a port that was in use: it was the one that a worker beside it was about to use."""
    narrow = range(local._PORTS.start, local._PORTS.start + 40)
    monkeypatch.setattr(local, "_PORTS", narrow)
    ours = [*free_ports(4), *free_ports(4)]
    program = f"from relaygr.devbroker import local; local._PORTS = {narrow!r}; print(local.free_ports(8))"
    theirs = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    assert len({*ours, *json.loads(theirs)}) == 16


@pytest.mark.slow
def test_docker_without_a_daemon_is_a_clear_refusal(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("testcontainers")
    monkeypatch.setenv("DOCKER_HOST", "unix:///nowhere/docker.sock")
    with pytest.raises(RelayError, match="Is the Docker daemon running"), local_broker("docker"):
        pass
    # The demo asks before it measures.
    with pytest.raises(RelayError, match="Is the Docker daemon running"):
        check_broker("docker")


def test_a_cluster_that_lists_no_broker_for_a_moment_is_asked_again(
    embedded_broker: LocalBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A controller takes the only broker of a busy machine for dead: there were then no brokers to choose from."""
    answers = [SimpleNamespace(brokers={}), SimpleNamespace(brokers={})]
    list_topics = AdminClient.list_topics

    def answer(admin: AdminClient, **options: float) -> object:
        return answers.pop() if answers else list_topics(admin, **options)

    monkeypatch.setattr(AdminClient, "list_topics", answer)
    assert require_broker(embedded_broker.settings()).brokers and not answers


def test_a_cluster_that_lists_no_broker_at_all_does_not_answer(
    embedded_broker: LocalBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(AdminClient, "list_topics", lambda *_, **__: SimpleNamespace(brokers={}))
    settings = embedded_broker.settings().model_copy(update={"connect_timeout_s": 0.3})
    with pytest.raises(RelayError, match="bootstrap"):
        require_broker(settings)


def test_a_broker_that_answers_nothing_is_told_from_one_that_closes_connections() -> None:
    """librdkafka reports the same of both: that all brokers are down."""
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen(100)
        port = silent.getsockname()[1]
        with pytest.raises(RelayError, match=r"answered nothing within 6.* s: it is overloaded or stopped"):
            require_broker(KafkaSettings(bootstrap=f"127.0.0.1:{port}", connect_timeout_s=6.0))
    with ClosingPort(port), pytest.raises(RelayError, match="closes connections without an answer"):
        require_broker(KafkaSettings(bootstrap=f"127.0.0.1:{port}", connect_timeout_s=6.0))
