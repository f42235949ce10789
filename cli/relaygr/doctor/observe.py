"""Looks at Kafka, the fleet, this machine and the model. Every call is bounded in time."""

from __future__ import annotations

import importlib.metadata
import logging
import os
import re
import resource
import socket
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from confluent_kafka import KafkaException

from relaygr.doctor.findings import Diagnosis, Verdict
from relaygr.doctor.judge import SeenBroker, SeenFolder, SeenWorker
from relaygr.kafka.admin import is_embedded
from relaygr.kafka.admin_process import AdminProcess
from relaygr.kafka.clients import make_admin, require_broker
from relaygr.kafka.rights import Role, missing_rights
from relaygr.kafka.settings import KafkaSettings
from relaygr.lag.collector import LagCollector
from relaygr.lag.settings import LagSettings
from relaygr.runtime.clock import SystemClock
from relaygr.runtime.errors import RelayError
from relaygr.runtime.limits import available_memory
from relaygr.schemas.messages import WorkerState, WorkerStatus
from relaygr.trigger.fleet_reader import FleetReader
from relaygr.worker.pool.mooncake import missing
from relaygr.worker.settings import WorkerSettings
from relaygr.worker.shared.lock import worker_folder

_API: Final = re.compile(r"ApiKey \S+ \((\d+)\) Versions (\d+)\.\.(\d+)")
_API_S: Final = 3.0
_QUIET_TURNS: Final = 4
_TURN_S: Final = 0.05
_STATUSES: Final = 2
"""Statuses of a worker that were written while we read: with one, it may have just ended."""


def broker(kafka: KafkaSettings) -> SeenBroker:
    """Raises RelayError if the cluster does not answer within `connect_timeout_s`."""
    cluster = require_broker(kafka)
    embedded = is_embedded(cluster)
    return SeenBroker(kafka.bootstrap, len(cluster.brokers), embedded, {} if embedded else _apis(kafka))


def _apis(kafka: KafkaSettings) -> dict[int, tuple[int, int]]:
    """The requests that a broker knows, with their versions. librdkafka tells them in its log only."""
    lines: list[str] = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(record.getMessage())

    logger = logging.Logger("relaygr-doctor")
    logger.addHandler(Keep())
    admin = make_admin(kafka, "relaygr-doctor", options={"debug": "feature", "log_level": 7, "logger": logger})
    ends_s, quiet = time.monotonic() + _API_S, 0
    # The list of one broker comes at once, but a poll hands over a part of it only.
    while time.monotonic() < ends_s and quiet < _QUIET_TURNS:
        before = len(lines)
        admin.poll(_TURN_S)
        quiet = quiet + 1 if len(lines) == before and any(map(_API.search, lines)) else 0
    found = [match for line in lines if (match := _API.search(line)) is not None]
    return {int(match[1]): (int(match[2]), int(match[3])) for match in found}


def rights(kafka: KafkaSettings, roles: Sequence[Role]) -> dict[Role, tuple[str, ...]]:
    """The rights that this user lacks, by role. Not for the embedded cluster. Raises RelayError without an answer."""
    with AdminProcess(kafka, "relaygr-doctor") as admin:
        return {role: missing_rights(kafka, role, admin) for role in roles}


def trigger_members(kafka: KafkaSettings, settings: LagSettings) -> tuple[str, ...] | None:
    """The members of the trigger's group; None if the cluster does not tell. Raises RelayError without an answer."""
    collector = LagCollector(kafka, settings, (kafka.trigger_group,))
    try:
        groups = collector.poll().groups
    finally:
        collector.close()
    found = next((group for group in groups if group.group == kafka.trigger_group), None)
    if found is None:
        return ()
    return None if found.members is None else tuple(member.name for member in found.members)


@dataclass(slots=True)
class _Heard:
    """What was heard of one worker."""

    status: WorkerStatus
    live: int = 0
    offset_us: int | None = None


class Statuses:
    """Keeps the last status of each worker, and how much later than its time stamp it came."""

    def __init__(self) -> None:
        self.heard: dict[str, _Heard] = {}
        self.is_live = threading.Event()
        """Set once the topic was read to its end: later statuses were written while we read."""

    def apply(self, worker_id: str, status: WorkerStatus | None, now_us: int) -> None:
        if status is None or status.state is WorkerState.STOPPING:
            self.heard.pop(worker_id, None)
            return
        # It stays in the table meanwhile: another thread asks it whether every worker was heard.
        before = self.heard.get(worker_id)
        now = _Heard(status)
        if self.is_live.is_set():
            offset_us = status.written_at_us - now_us
            known = before.offset_us if before is not None else None
            # The status that came quickest has the least delay in it.
            now.offset_us = offset_us if known is None else max(known, offset_us)
            now.live = 1 + (before.live if before is not None else 0)
        self.heard[worker_id] = now

    def workers(self, now_us: int) -> list[SeenWorker]:
        """The workers. Fresh is one that is ready and wrote a status while we read, whatever its clock says."""
        return [
            SeenWorker(
                worker_id,
                str(each.status.state),
                each.live > 0 and each.status.state is WorkerState.READY,
                max(0, now_us - each.status.written_at_us) / 1e6,
                frozenset(each.status.partitions),
                each.offset_us,
                each.status.pre_infer is not None,
            )
            for worker_id, each in sorted(self.heard.items())
        ]


def fleet(kafka: KafkaSettings, status_interval_ms: int) -> list[SeenWorker]:
    """The workers by their statuses, read for some intervals. Raises RelayError if they cannot be read."""
    statuses, clock = Statuses(), SystemClock()
    reader = FleetReader(kafka, statuses, clock, "relaygr-doctor")
    reader.start()
    try:
        ends_s = time.monotonic() + kafka.connect_timeout_s
        while not reader.caught_up:
            if reader.refusal is not None or time.monotonic() > ends_s:
                raise RelayError(reader.refusal or "the workers topic could not be read to its end")
            time.sleep(_TURN_S)
        statuses.is_live.set()
        ends_s = time.monotonic() + (_STATUSES + 2) * status_interval_ms / 1000
        while time.monotonic() < ends_s and not all(each.live >= _STATUSES for each in [*statuses.heard.values()]):
            time.sleep(_TURN_S)
    finally:
        reader.stop()
    return statuses.workers(clock.wall_us())


def installed(requirements: Sequence[str]) -> dict[str, str]:
    """The versions of the libraries that are installed, by name in lower case."""
    names = [re.split(r"[^A-Za-z0-9._-]", text, maxsplit=1)[0] for text in requirements]
    found = {}
    for name in ("relaygr", *names):
        try:
            found[name.lower()] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def requirements() -> list[str]:
    """Those of the package, of all extras; none if it is not installed."""
    try:
        return importlib.metadata.requires("relaygr") or []
    except importlib.metadata.PackageNotFoundError:
        return []


def pool(address: str) -> tuple[str | None, bool]:
    """What keeps this machine from using the pool's store, and whether something listens at its address."""
    host, _, port = address.rpartition(":")
    try:
        with socket.create_connection((host, int(port)), _API_S):
            return missing(), True
    except OSError:
        return missing(), False


def shared_folder(settings: WorkerSettings, group: str) -> SeenFolder:
    """The folder of the DRAM tier, which is not created."""
    import psutil

    path, _ = worker_folder(settings.shared_path, group, settings.worker_id)
    while not path.exists() and path != path.parent:
        path = path.parent
    space = os.statvfs(path)
    mounts = [part for part in psutil.disk_partitions(all=True) if path.is_relative_to(part.mountpoint)]
    mount = max(mounts, key=lambda part: len(part.mountpoint), default=None)
    is_memory = mount is None or mount.fstype in ("tmpfs", "ramfs", "hugetlbfs")
    free_bytes = space.f_bavail * space.f_frsize
    if is_memory:
        free_bytes = min(free_bytes, available_memory().available_bytes)
    return SeenFolder(str(path), free_bytes, is_memory)


def open_files() -> int:
    """The most open files of a process that starts here."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return soft if soft != resource.RLIM_INFINITY else 1 << 30


def checkpoint(folder: Path) -> list[Diagnosis]:
    """Reads all weights and compares them with their digests. Changes nothing. Raises RelayError for a broken one."""
    if not folder.exists():
        return [Diagnosis("model", Verdict.SKIP, f"worker.model is {folder}, and no such folder is on this machine")]
    from relaygr.worker.model.checkpoint import verify_checkpoint

    found = verify_checkpoint(folder, trust=False)
    if found.changed:
        what = f"{folder} was changed after it was written: {', '.join(found.changed[:4])}"
        return [Diagnosis("model", Verdict.FAIL, what, "copy the checkpoint again")]
    if not found.has_digests:
        return [Diagnosis("model", Verdict.OK, f"{folder} has right shapes and values, and no digests")]
    return [Diagnosis("model", Verdict.OK, f"{folder} agrees with its digests")]


def no_answer(error: KafkaException) -> str:
    """Kafka's error as a sentence."""
    return str(error.args[0].str())
