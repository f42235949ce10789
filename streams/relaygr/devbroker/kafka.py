"""A real Apache Kafka as child processes: brokers in KRaft mode in temporary folders, on free ports.

    kafka_broker   one broker, as `LocalBroker`
    KafkaCluster   one or several brokers, which can be killed, stopped, frozen and started again with their data

One broker is its own controller. More have a controller process beside them, so that the controller survives the loss
of any broker. `relaygr.devbroker.guard` kills each process and removes its folder when the block ends or this process
dies. Ctrl-C reaches only this process.
"""

from __future__ import annotations

import base64
import os
import re
import selectors
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

from confluent_kafka import KafkaException
from confluent_kafka.admin import ClusterMetadata

from relaygr.cluster.admin import create_topics, delete_topics
from relaygr.devbroker import guard
from relaygr.devbroker.choose import SERVER_SCRIPT, STORAGE_SCRIPT, BrokerChoice
from relaygr.devbroker.local import LocalBroker, free_ports
from relaygr.kafka.client_errors import ClientErrors
from relaygr.kafka.clients import make_admin
from relaygr.kafka.settings import KafkaSettings
from relaygr.runtime.errors import RelayError

LIMITS: Final = (
    "one Kafka broker on this machine: no replication, no network between machines, and it shares the machine's cores",
    "its data is in memory if there is space (TMPDIR chooses another folder): the figures include no disk",
)
START_TIMEOUT_S: Final = 60.0
CLUSTER_TIMEOUT_S: Final = 180.0
MOST_REPLICAS: Final = 3
_HEAP_MIB: Final = 512
_HEAP_OF_SEVERAL_MIB: Final = 256
_BRIEF_JVM: Final = {"KAFKA_OPTS": "-XX:TieredStopAtLevel=1"}
"""Without Java's second compiler, which takes more than half of a core for 20 seconds, and is worth it only after that:
at 500 requests a second the broker then takes 0.55 of a core instead of 0.83. The variable overrides it."""
_CONTROLLER: Final = 100
"""The number of the controller process beside several brokers."""
_ATTEMPTS: Final = 3
_MEMORY_FOLDER: Final = "/dev/shm"
_MEMORY_FREE_BYTES: Final = 4 * 1024**3
_LOG_TAIL_BYTES: Final = 3000
_STOP_TIMEOUT_S: Final = 30.0
_METADATA_TIMEOUT_S: Final = 0.5
_POLL_S: Final = 0.02

_PROPERTIES: Final[dict[str, str | int]] = {
    "controller.listener.names": "CONTROLLER",
    "transaction.state.log.min.isr": 1,
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
    start_timeout_s: float = START_TIMEOUT_S,
    properties: Mapping[str, str | int] | None = None,
    is_brief: bool = False,
) -> Iterator[LocalBroker]:
    """One broker while the block runs, with the parameters of `KafkaCluster`.

    Raises RelayError, with the end of the broker's log, if it is not ready in time.
    """
    with KafkaCluster(home, 1, properties, start_timeout_s, is_brief) as cluster:

        def restart() -> None:
            cluster.kill(1)
            cluster.start(1)

        defaults = KafkaSettings()
        yield LocalBroker(
            BrokerChoice.KAFKA,
            cluster.bootstrap,
            f"Apache Kafka{_version(home)} of KAFKA_HOME at {cluster.bootstrap}, started here ({why})",
            LIMITS,
            create_topics,
            delete_topics,
            fetch_wait_max_ms=defaults.fetch_wait_max_ms,
            session_timeout_ms=defaults.session_timeout_ms,
            restart=restart,
        )


class KafkaCluster:
    """Brokers are numbered from 1. A context manager: all brokers are up when it begins."""

    def __init__(
        self,
        home: Path,
        brokers: int = 3,
        properties: Mapping[str, str | int] | None = None,
        timeout_s: float = CLUSTER_TIMEOUT_S,
        is_brief: bool = True,
    ) -> None:
        """`home`: an unpacked Apache Kafka. `properties` override those of this module. `timeout_s`: for each start,
        and for each wait. `is_brief`: the brokers live for a few minutes, with few messages a second.
        """
        self.numbers = range(1, brokers + 1)
        self.replicas = min(MOST_REPLICAS, brokers)
        self._home = home
        self._own_properties = properties or {}
        self._timeout_s = timeout_s
        heap_mib = _HEAP_MIB if brokers == 1 else _HEAP_OF_SEVERAL_MIB
        self._jvm = {"KAFKA_HEAP_OPTS": f"-Xmx{heap_mib}m"} | (_BRIEF_JVM if is_brief else {})
        self._id = _new_cluster_id()
        self._addresses: dict[int, str] = {}
        self._controller = ""
        self._servers: dict[int, _Server] = {}
        self._running: set[int] = set()

    @property
    def bootstrap(self) -> str:
        """The addresses of all brokers."""
        return ",".join(self._addresses.values())

    def __enter__(self) -> KafkaCluster:
        for _ in range(_ATTEMPTS):
            *ports, controller_port = free_ports(len(self.numbers) + 1)
            self._addresses = {number: f"127.0.0.1:{port}" for number, port in zip(self.numbers, ports, strict=True)}
            self._controller = f"127.0.0.1:{controller_port}"
            # Connections are refused while brokers are away, so client errors are not logged.
            errors = ClientErrors("relaygr-cluster", quiet=True)
            self._admin = make_admin(KafkaSettings(bootstrap=self.bootstrap), "relaygr-cluster", errors)
            try:
                if len(self.numbers) > 1:
                    self._spawn(_CONTROLLER)
                self.start(*self.numbers)
            except _PortTakenError:
                self.__exit__()
            except BaseException:
                self.__exit__()
                raise
            else:
                return self
        raise RelayError(f"Kafka found its ports in use {_ATTEMPTS} times: are there free ports on 127.0.0.1?")

    def __exit__(self, *_: object) -> None:
        self._running.clear()
        for server in self._servers.values():
            server.begin_close()
        while self._servers:
            self._servers.popitem()[1].close()

    def start(self, *numbers: int) -> None:
        """Starts brokers, and waits until clients find them. Raises RelayError with the end of a log."""
        for number in numbers:
            self._spawn(number)
        self._await(
            "all brokers answer",
            # A broker that was killed is known to the others for a while.
            lambda seen: set(numbers) <= set(seen.brokers) and all(_listens(self._addresses[each]) for each in numbers),
        )

    def kill(self, *numbers: int) -> None:
        """kill -9."""
        self._end(guard.KILL, numbers)

    def stop(self, *numbers: int) -> None:
        """SIGTERM: a broker gives its partitions to others before it ends."""
        self._end(guard.STOP, numbers)

    def data(self, number: int) -> Path:
        """The folder of a broker's data. It may be copied and replaced while the broker is stopped."""
        return self._servers[number].data

    def freeze(self, number: int) -> None:
        """SIGSTOP: the broker keeps its connections and answers nobody, until it is killed."""
        self._servers[number].tell(guard.FREEZE)

    def leader(self, topic: str, partition: int = 0) -> int:
        """The broker that leads a partition."""
        seen = self._await(
            f"{topic} [{partition}] has a leader",
            lambda seen: topic in seen.topics and seen.topics[topic].partitions[partition].leader > 0,
        )
        return seen.topics[topic].partitions[partition].leader

    def await_in_sync(self) -> None:
        """Waits until every replica of every topic is in sync."""
        self._await(
            "all replicas are in sync",
            lambda seen: all(
                len(partition.isrs) == len(partition.replicas)
                for topic in seen.topics.values()
                for partition in topic.partitions.values()
            ),
        )

    def _spawn(self, number: int) -> None:
        self._running.add(number)
        if number in self._servers:
            self._servers[number].start()
            return
        is_controller = number == _CONTROLLER or len(self.numbers) == 1
        format_data = ["--standalone" if is_controller else "--no-initial-controllers", "-t", self._id]
        self._servers[number] = _Server(self._home, self._properties(number, is_controller), format_data, self._jvm)

    def _properties(self, number: int, is_controller: bool) -> dict[str, str | int]:
        listeners = {"CONTROLLER": self._controller} if is_controller else {}
        if number != _CONTROLLER:
            listeners["PLAINTEXT"] = self._addresses[number]
        roles = {"CONTROLLER": "controller", "PLAINTEXT": "broker"}
        return {
            **_PROPERTIES,
            "offsets.topic.replication.factor": self.replicas,
            "transaction.state.log.replication.factor": self.replicas,
            "share.coordinator.state.topic.replication.factor": self.replicas,
            "node.id": number,
            "process.roles": ",".join(roles[name] for name in listeners),
            "controller.quorum.bootstrap.servers": self._controller,
            "listeners": ",".join(f"{name}://{address}" for name, address in listeners.items()),
            **self._own_properties,
        }

    def _end(self, line: bytes, numbers: tuple[int, ...]) -> None:
        self._running -= set(numbers)
        servers = [self._servers[number] for number in numbers]
        for server in servers:
            server.tell(line)
        ends_s = time.monotonic() + _STOP_TIMEOUT_S
        for server in servers:
            while not server.has_exited():
                if time.monotonic() > ends_s:
                    server.tell(guard.KILL)
                time.sleep(_POLL_S)

    def _await(self, what: str, is_so: Callable[[ClusterMetadata], bool]) -> ClusterMetadata:
        """Raises RelayError, or _PortTakenError, if a process ends or the time is over before."""
        ends_s = time.monotonic() + self._timeout_s
        while time.monotonic() < ends_s:
            with suppress(KafkaException):
                seen = self._admin.list_topics(timeout=_METADATA_TIMEOUT_S)
                if is_so(seen):
                    return seen
            for number in self._running:
                if self._servers[number].has_exited():
                    raise _failure(f"Kafka ended before {what}", self._servers[number].log())
            time.sleep(_POLL_S)
        logs = "\n".join(self._servers[number].log() for number in self._running)
        raise _failure(f"Kafka was not ready within {self._timeout_s:.0f} s, until {what}", logs)


class _Server:
    """One process of Kafka, a broker or a controller, under its guard."""

    def __init__(
        self, home: Path, properties: Mapping[str, str | int], format_data: list[str], jvm: Mapping[str, str]
    ) -> None:
        """Starts it. `format_data`: options of the command that makes its data folder."""
        self._folder = folder = Path(tempfile.mkdtemp(prefix="relaygr-kafka-", dir=_memory_folder()))
        self._log = folder / "broker.log"
        self._has_exited = False
        config = folder / "server.properties"
        self.data = folder / "data"
        settings = {**properties, "log.dirs": str(self.data)}
        config.write_text("".join(f"{key}={value}\n" for key, value in settings.items()))
        make_data = [str(home / STORAGE_SCRIPT), "format", *format_data, "-c", str(config)]
        run = [str(home / SERVER_SCRIPT), str(config)]
        self._guard = subprocess.Popen(
            [sys.executable, "-I", guard.__file__, str(folder), str(self._log), *make_data, guard.THEN, *run],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            # A new session: Ctrl-C in the terminal must not end the broker before its clients.
            start_new_session=True,
            env={**jvm, **os.environ, "LOG_DIR": str(folder / "logs")},
        )

    def start(self) -> None:
        """Starts the process again, on the same ports and data. It has exited."""
        self._has_exited = False
        self.tell(guard.START)

    def tell(self, line: bytes) -> None:
        """Sends the guard a line."""
        assert self._guard.stdin is not None
        self._guard.stdin.write(line)
        self._guard.stdin.flush()

    def has_exited(self) -> bool:
        """Whether the guard reported the exit of the process, or has ended itself."""
        assert self._guard.stdout is not None
        with selectors.DefaultSelector() as selector:
            selector.register(self._guard.stdout, selectors.EVENT_READ)
            while not self._has_exited and selector.select(0):
                said = os.read(self._guard.stdout.fileno(), 4096)
                self._has_exited = not said or b"exited" in said
        return self._has_exited

    def log(self) -> str:
        """The log of the process so far."""
        try:
            return self._log.read_bytes().decode(errors="replace")
        except OSError:
            return ""

    def begin_close(self) -> None:
        """Has the guard kill the process and remove the folder."""
        assert self._guard.stdin is not None
        self._guard.stdin.close()

    def close(self) -> None:
        """Waits for the end after `begin_close`."""
        assert self._guard.stdout is not None
        try:
            self._guard.wait(timeout=20.0)
        except subprocess.TimeoutExpired:
            # On Linux the process dies with its guard.
            self._guard.kill()
            self._guard.wait()
            shutil.rmtree(self._folder, ignore_errors=True)
        self._guard.stdout.close()


def _failure(what: str, log: str) -> Exception:
    if _PORT_TAKEN.search(log):
        return _PortTakenError()
    hint = next((f": {hint}" for word, hint in _HINTS.items() if word in log), "")
    return RelayError(f"{what}{hint}. The end of its log:\n{log[-_LOG_TAIL_BYTES:].strip() or '(empty)'}")


def _listens(address: str) -> bool:
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host, int(port)), 1).close()
    except OSError:
        return False
    return True


def _memory_folder() -> str | None:
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


def _new_cluster_id() -> str:
    """A Kafka id: 16 random bytes in URL-safe base 64, without a leading '-', which would look like an option."""
    while (text := base64.urlsafe_b64encode(uuid.uuid4().bytes).decode().rstrip("=")).startswith("-"):
        pass
    return text


def _version(home: Path) -> str:
    """The version, from the names of the jar files; empty if it cannot be found."""
    for jar in sorted((home / "libs").glob("kafka-clients-*.jar")):
        return f" {jar.stem.removeprefix('kafka-clients-')}"
    return ""
