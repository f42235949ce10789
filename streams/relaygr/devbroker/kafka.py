"""A real Apache Kafka as a child process: one KRaft broker in a temporary folder, on free ports.

The broker is ready when it answers a metadata request. `relaygr.devbroker.guard` kills the broker and removes its
folder when the block ends or this process dies. Ctrl-C reaches only this process.
"""

from __future__ import annotations

import base64
import os
import re
import selectors
import shutil
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

from confluent_kafka import KafkaException

from relaygr.devbroker import guard
from relaygr.devbroker.choose import SERVER_SCRIPT, STORAGE_SCRIPT, BrokerChoice
from relaygr.devbroker.local import LocalBroker, free_ports
from relaygr.kafka.admin import create_topics, delete_topics
from relaygr.kafka.client_errors import ClientErrors
from relaygr.kafka.clients import make_admin
from relaygr.kafka.settings import KafkaSettings
from relaygr.runtime.errors import RelayError

LIMITS: Final = (
    "one Kafka broker on this machine: no replication, no network between machines, and it shares the machine's cores",
    "its data is in memory if there is space (TMPDIR chooses another folder): the figures include no disk",
)
START_TIMEOUT_S: Final = 60.0
HEAP_MIB: Final = 512
BRIEF_JVM: Final = {"KAFKA_OPTS": "-XX:TieredStopAtLevel=1"}
"""Without Java's second compiler, which takes more than half of a core for 20 seconds, and is worth it only after that:
at 500 requests a second the broker then takes 0.55 of a core instead of 0.83. The variable overrides it."""
_ATTEMPTS: Final = 3
_MEMORY_FOLDER: Final = "/dev/shm"
_MEMORY_FREE_BYTES: Final = 4 * 1024**3
_LOG_TAIL_BYTES: Final = 3000
_EXIT_POLL_S: Final = 0.02

PROPERTIES: Final[dict[str, str | int]] = {
    "process.roles": "broker,controller",
    "node.id": 1,
    "controller.listener.names": "CONTROLLER",
    # One broker holds the only replica of everything.
    "offsets.topic.replication.factor": 1,
    "transaction.state.log.replication.factor": 1,
    "transaction.state.log.min.isr": 1,
    "share.coordinator.state.topic.replication.factor": 1,
    "share.coordinator.state.topic.min.isr": 1,
    # Internal topics are created on first use. Few partitions make that quick.
    "offsets.topic.num.partitions": 8,
    "transaction.state.log.num.partitions": 2,
    "share.coordinator.state.topic.num.partitions": 2,
    # The first member of a group does not wait for others.
    "group.initial.rebalance.delay.ms": 0,
    # Tests may choose short sessions.
    "group.min.session.timeout.ms": 1000,
    # The new group protocol rebalances one step a heartbeat, and the broker sets the heartbeat (default 5 s).
    "group.consumer.heartbeat.interval.ms": 200,
    "group.consumer.min.heartbeat.interval.ms": 200,
    "group.consumer.session.timeout.ms": 3000,
    "group.consumer.min.session.timeout.ms": 3000,
    # A broker that was killed can join again sooner.
    "broker.session.timeout.ms": 2000,
    "broker.heartbeat.interval.ms": 500,
    "auto.create.topics.enable": "false",
    # For a broker that runs for minutes: less memory, small indexes, early deletion of files.
    "log.cleaner.dedupe.buffer.size": 16 * 1024 * 1024,
    "log.index.size.max.bytes": 1024 * 1024,
    "log.segment.delete.delay.ms": 1000,
    "log.retention.check.interval.ms": 10_000,
}
_HINTS: Final = {
    "UnsupportedClassVersionError": "this Java is too old, Kafka 4 needs 17 or later (java on PATH, or JAVA_HOME)",
    "Could not reserve enough space": "there is not enough free memory for its heap (KAFKA_HEAP_OPTS)",
    "No space left on device": "the disk of the temporary folder is full (TMPDIR)",
    "java: not found": "no Java runtime found: put `java` (17 or later) on PATH, or set JAVA_HOME",
}
_PORT_TAKEN: Final = re.compile(r"Address already in use|SocketServer failed to bind|BindException")


class _PortTakenError(Exception):
    """Another process took a port before the broker bound it."""


@contextmanager
def kafka_broker(
    home: Path,
    why: str,
    heap_mib: int = HEAP_MIB,
    start_timeout_s: float = START_TIMEOUT_S,
    properties: Mapping[str, str | int] | None = None,
    is_brief: bool = False,
) -> Iterator[LocalBroker]:
    """A broker while the block runs. `properties` override the defaults of this module. `is_brief`: `BRIEF_JVM`.

    Raises RelayError, with the end of the broker's log, if it is not ready within `start_timeout_s`.
    """
    jvm = {"KAFKA_HEAP_OPTS": f"-Xmx{heap_mib}m"} | (BRIEF_JVM if is_brief else {})
    server = _start(home, jvm, start_timeout_s, properties or {})
    try:
        defaults = KafkaSettings()
        yield LocalBroker(
            BrokerChoice.KAFKA,
            server.bootstrap,
            f"Apache Kafka{_version(home)} of KAFKA_HOME at {server.bootstrap}, started here ({why})",
            LIMITS,
            create_topics,
            delete_topics,
            fetch_wait_max_ms=defaults.fetch_wait_max_ms,
            session_timeout_ms=defaults.session_timeout_ms,
            restart=lambda: server.restart(start_timeout_s),
        )
    finally:
        server.stop()


def _start(home: Path, jvm: Mapping[str, str], start_timeout_s: float, properties: Mapping[str, str | int]) -> _Server:
    for _ in range(_ATTEMPTS):
        server = _Server(home, jvm, properties)
        try:
            server.await_ready(start_timeout_s)
        except _PortTakenError:
            server.stop()
        except BaseException:
            server.stop()
            raise
        else:
            return server
    raise RelayError(f"Kafka found its ports in use {_ATTEMPTS} times: are there free ports on 127.0.0.1?")


class _Server:
    """One broker process under its guard."""

    def __init__(self, home: Path, jvm: Mapping[str, str], properties: Mapping[str, str | int]) -> None:
        port, controller_port = free_ports(2)
        self.bootstrap = f"127.0.0.1:{port}"
        self._folder = folder = Path(tempfile.mkdtemp(prefix="relaygr-kafka-", dir=memory_folder()))
        self._log = folder / "broker.log"
        config = folder / "server.properties"
        settings = PROPERTIES | {
            "controller.quorum.bootstrap.servers": f"127.0.0.1:{controller_port}",
            "listeners": f"PLAINTEXT://{self.bootstrap},CONTROLLER://127.0.0.1:{controller_port}",
            "log.dirs": str(folder / "data"),
        }
        config.write_text("".join(f"{key}={value}\n" for key, value in {**settings, **properties}.items()))
        format_data = [str(home / STORAGE_SCRIPT), "format", "--standalone", "-t", new_cluster_id(), "-c", str(config)]
        run = [str(home / SERVER_SCRIPT), str(config)]
        environment = {**jvm, **os.environ, "LOG_DIR": str(folder / "logs")}
        self._guard = subprocess.Popen(
            [sys.executable, "-I", guard.__file__, str(folder), str(self._log), *format_data, guard.THEN, *run],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            # A new session: Ctrl-C in the terminal must not end the broker before its clients.
            start_new_session=True,
            env=environment,
        )

    def await_ready(self, timeout_s: float) -> None:
        """Raises RelayError, or _PortTakenError, if the broker does not get ready."""
        kafka = KafkaSettings(bootstrap=self.bootstrap)
        # Connections are refused while the broker starts, so client errors are not logged.
        admin = make_admin(kafka, "relaygr-broker-start", ClientErrors("relaygr-broker-start", quiet=True))
        ends_s = time.monotonic() + timeout_s
        while time.monotonic() < ends_s:
            with suppress(KafkaException):
                if admin.list_topics(timeout=0.2).brokers:
                    return
            if self._exited():
                raise self._failure("ended while it started")
        raise self._failure(f"was not ready within {timeout_s:.0f} s")

    def restart(self, timeout_s: float) -> None:
        """Kills the broker and starts it again, on the same ports and data. Raises RelayError if it is not ready."""
        self._tell(guard.KILL)
        while not self._exited():
            time.sleep(_EXIT_POLL_S)
        self._tell(guard.START)
        self.await_ready(timeout_s)

    def _tell(self, line: bytes) -> None:
        assert self._guard.stdin is not None
        self._guard.stdin.write(line)
        self._guard.stdin.flush()

    def stop(self) -> None:
        """Kills the broker and removes its folder."""
        assert self._guard.stdin is not None and self._guard.stdout is not None
        self._guard.stdin.close()
        try:
            self._guard.wait(timeout=20.0)
        except subprocess.TimeoutExpired:
            # On Linux the broker dies with its guard.
            self._guard.kill()
            self._guard.wait()
            shutil.rmtree(self._folder, ignore_errors=True)
        self._guard.stdout.close()

    def _exited(self) -> bool:
        """Whether the guard reported the exit of the broker, or has ended itself."""
        assert self._guard.stdout is not None
        with selectors.DefaultSelector() as selector:
            selector.register(self._guard.stdout, selectors.EVENT_READ)
            while selector.select(0):
                said = os.read(self._guard.stdout.fileno(), 4096)
                if not said or b"exited" in said:
                    return True
        return False

    def _failure(self, what: str) -> Exception:
        try:
            log = self._log.read_bytes().decode(errors="replace")
        except OSError:
            log = ""
        if _PORT_TAKEN.search(log):
            return _PortTakenError()
        hint = next((f": {hint}" for word, hint in _HINTS.items() if word in log), "")
        return RelayError(f"Kafka {what}{hint}. The end of its log:\n{log[-_LOG_TAIL_BYTES:].strip() or '(empty)'}")


def memory_folder() -> str | None:
    """A file system in memory with enough space; None: the default temporary folder, or that of TMPDIR.

    Creating a topic syncs several files of each partition, which takes seconds on a disk for hundreds of partitions.
    """
    if "TMPDIR" in os.environ:
        return None
    try:
        roomy = shutil.disk_usage(_MEMORY_FOLDER).free >= _MEMORY_FREE_BYTES
    except OSError:
        return None
    return _MEMORY_FOLDER if roomy else None


def new_cluster_id() -> str:
    """A Kafka id: 16 random bytes in URL-safe base 64, without a leading '-', which would look like an option."""
    while (text := base64.urlsafe_b64encode(uuid.uuid4().bytes).decode().rstrip("=")).startswith("-"):
        pass
    return text


def _version(home: Path) -> str:
    """The version, from the names of the jar files; empty if it cannot be found."""
    for jar in sorted((home / "libs").glob("kafka-clients-*.jar")):
        return f" {jar.stem.removeprefix('kafka-clients-')}"
    return ""
