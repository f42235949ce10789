"""A Kafka cluster on this machine whose brokers can be killed, stopped and started again, with their ports and data.

One broker is its own controller. More have a controller process beside them, so that the controller survives the loss
of any broker. The cluster ends with its context. Its processes end with the thread that started them, and
`relaygr.devbroker.guard` removes its folder when this process dies.
"""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Final

from confluent_kafka import KafkaException
from confluent_kafka.admin import ClusterMetadata

from relaygr.devbroker import guard
from relaygr.devbroker.choose import SERVER_SCRIPT, STORAGE_SCRIPT
from relaygr.devbroker.kafka import BRIEF_JVM, PROPERTIES, memory_folder, new_cluster_id
from relaygr.devbroker.local import free_ports
from relaygr.kafka.client_errors import ClientErrors
from relaygr.kafka.clients import make_admin
from relaygr.kafka.settings import KafkaSettings
from relaygr.runtime.errors import RelayError

HEAP_MIB: Final = 256
START_TIMEOUT_S: Final = 180.0
MOST_REPLICAS: Final = 3
_CONTROLLER: Final = 100
_STOP_TIMEOUT_S: Final = 30.0
_POLL_S: Final = 0.05
_LOG_TAIL_BYTES: Final = 3000
_PR_SET_PDEATHSIG: Final = 1
# Formats the data folder at the first start, and then becomes the server.
_FORMAT_AND_START: Final = '[ -e "$6" ] || "$1" format "$3" -t "$4" -c "$5" || exit; exec "$2" "$5"'


class KafkaCluster:
    """Brokers are numbered from 1. A context manager: all brokers are up when it begins."""

    def __init__(
        self, home: Path, brokers: int = 3, properties: Mapping[str, str | int] | None = None, heap_mib: int = HEAP_MIB
    ) -> None:
        """`home`: an unpacked Apache Kafka. `properties` override those of our local brokers. Use it as a context."""
        self.numbers = range(1, brokers + 1)
        self.replicas = min(MOST_REPLICAS, brokers)
        *ports, controller_port = free_ports(brokers + 1)
        self._addresses = {number: f"127.0.0.1:{port}" for number, port in zip(self.numbers, ports, strict=True)}
        self._controller = f"127.0.0.1:{controller_port}"
        self._home = home
        self._properties = {
            **PROPERTIES,
            "offsets.topic.replication.factor": self.replicas,
            "transaction.state.log.replication.factor": self.replicas,
            "share.coordinator.state.topic.replication.factor": self.replicas,
            **(properties or {}),
        }
        self._id = new_cluster_id()
        self._environment = {"KAFKA_HEAP_OPTS": f"-Xmx{heap_mib}m", **BRIEF_JVM, **os.environ}
        self._folder = Path(tempfile.mkdtemp(prefix="relaygr-cluster-", dir=memory_folder()))
        self._guard = subprocess.Popen(
            [sys.executable, "-I", guard.__file__, str(self._folder), os.devnull, "sleep", "infinity"],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            start_new_session=True,
        )
        self._running: dict[int, subprocess.Popen[bytes]] = {}
        # Connections are refused while brokers are away, so client errors are not logged.
        errors = ClientErrors("relaygr-cluster", quiet=True)
        self._admin = make_admin(KafkaSettings(bootstrap=self.bootstrap), "relaygr-cluster", errors)

    @property
    def bootstrap(self) -> str:
        """The addresses of all brokers."""
        return ",".join(self._addresses.values())

    def __enter__(self) -> KafkaCluster:
        try:
            if len(self.numbers) > 1:
                self._spawn(_CONTROLLER)
            self.start(*self.numbers)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.kill(*self._running)
        self._guard.communicate()

    def start(self, *numbers: int) -> None:
        """Starts brokers, and waits until clients find them. Raises RelayError with the end of a log."""
        for number in numbers:
            self._spawn(number)
        self._await(
            "the brokers are up",
            # A broker that was killed is known to the others for a while.
            lambda seen: set(numbers) <= set(seen.brokers) and all(_listens(self._addresses[each]) for each in numbers),
        )

    def kill(self, *numbers: int) -> None:
        """kill -9."""
        self._signal(signal.SIGKILL, numbers)

    def stop(self, *numbers: int) -> None:
        """SIGTERM: a broker gives its partitions to others before it ends."""
        self._signal(signal.SIGTERM, numbers)

    def freeze(self, number: int) -> None:
        """SIGSTOP: the broker keeps its connections and answers nobody, until it is killed."""
        os.killpg(self._running[number].pid, signal.SIGSTOP)

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
        folder = self._folder / str(number)
        folder.mkdir(exist_ok=True)
        config = folder / "server.properties"
        config.write_text("".join(f"{key}={value}\n" for key, value in self._config(number, folder).items()))
        is_controller = number == _CONTROLLER or len(self.numbers) == 1
        arguments = (
            str(self._home / STORAGE_SCRIPT),
            str(self._home / SERVER_SCRIPT),
            "--standalone" if is_controller else "--no-initial-controllers",
            self._id,
            str(config),
            str(folder / "data" / "meta.properties"),
        )
        with (folder / "broker.log").open("ab") as log:
            self._running[number] = subprocess.Popen(
                ["/bin/sh", "-c", _FORMAT_AND_START, "sh", *arguments],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**self._environment, "LOG_DIR": str(folder / "logs")},
                process_group=0,  # Ctrl-C must not end a broker before its clients.
                preexec_fn=_die_with_the_parent if sys.platform == "linux" else None,
            )

    def _config(self, number: int, folder: Path) -> dict[str, str | int]:
        listeners = {"CONTROLLER": self._controller} if number == _CONTROLLER or len(self.numbers) == 1 else {}
        if number != _CONTROLLER:
            listeners["PLAINTEXT"] = self._addresses[number]
        roles = {"CONTROLLER": "controller", "PLAINTEXT": "broker"}
        return {
            **self._properties,
            "node.id": number,
            "process.roles": ",".join(roles[name] for name in listeners),
            "controller.quorum.bootstrap.servers": self._controller,
            "listeners": ",".join(f"{name}://{address}" for name, address in listeners.items()),
            "log.dirs": str(folder / "data"),
        }

    def _signal(self, number_of_signal: signal.Signals, numbers: tuple[int, ...]) -> None:
        processes = [self._running.pop(number) for number in numbers]
        for process in processes:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, number_of_signal)
        for process in processes:
            try:
                process.wait(_STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()

    def _await(self, what: str, is_so: Callable[[ClusterMetadata], bool]) -> ClusterMetadata:
        ends_s = time.monotonic() + START_TIMEOUT_S
        while time.monotonic() < ends_s:
            with suppress(KafkaException):
                seen = self._admin.list_topics(timeout=1)
                if is_so(seen):
                    return seen
            for number, process in self._running.items():
                if process.poll() is not None:
                    raise RelayError(f"Broker {number} ended. The end of its log:\n{self._log_of(number)}")
            time.sleep(_POLL_S)
        logs = "\n".join(self._log_of(number) for number in self._running)
        raise RelayError(f"Not within {START_TIMEOUT_S:.0f} s: {what}. The ends of the logs:\n{logs}")

    def _log_of(self, number: int) -> str:
        log = (self._folder / str(number) / "broker.log").read_bytes()
        return log[-_LOG_TAIL_BYTES:].decode(errors="replace").strip()


def _listens(address: str) -> bool:
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host, int(port)), 1).close()
    except OSError:
        return False
    return True


def _die_with_the_parent() -> None:
    """Has the kernel kill the broker when the thread that started it ends."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
