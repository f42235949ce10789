"""Looks at Kafka, the fleet, this machine and the model, and sends one impression. Every call is bounded in time."""

from __future__ import annotations

import importlib.metadata
import logging
import os
import re
import secrets
import threading
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
from confluent_kafka import KafkaException
from prometheus_client import CollectorRegistry

from relaygr.admission.worker_table import WorkerTable
from relaygr.client import ClientSettings, DeliveryReport, RankOutcome, RelayClient
from relaygr.client.clock_offset import ClockOffset
from relaygr.cluster.admin import is_embedded
from relaygr.cluster.admin_process import AdminProcess
from relaygr.cluster.rights import Role, missing_rights
from relaygr.doctor.judge import Diagnosis, SeenBroker, SeenFolder, SeenWorker, Verdict
from relaygr.kafka.clients import make_admin, require_broker
from relaygr.kafka.session import KafkaSession
from relaygr.kafka.settings import KafkaSettings
from relaygr.kafka.statistics import kafka_statistics
from relaygr.lag.collector import LagCollector
from relaygr.lag.settings import LagSettings
from relaygr.runtime.clock import SystemClock
from relaygr.runtime.errors import RelayError
from relaygr.runtime.limits import available_memory
from relaygr.schemas.messages import WorkerState, WorkerStatus
from relaygr.schemas.partitioner import partition_for
from relaygr.trigger.fleet import MAX_WORKERS
from relaygr.trigger.fleet_reader import FleetReader
from relaygr.ui.live import LiveCluster
from relaygr.ui.model import LiveSnapshot
from relaygr.ui.scrape import THROTTLE, can_reach, read_page
from relaygr.ui.settings import UiSettings
from relaygr.worker.calibration import load_calibration
from relaygr.worker.pool.stores import STORES
from relaygr.worker.pool.stores.contract import StoreUrl
from relaygr.worker.settings import WorkerSettings
from relaygr.worker.shared.lock import worker_folder

BUDGET_MS: Final = 5_000
CANDIDATES: Final = 4
_USER: Final = "relaygr-doctor"
_MOST_USERS: Final = 1_000
_API: Final = re.compile(r"ApiKey \S+ \((\d+)\) Versions (\d+)\.\.(\d+)")
_API_S: Final = 3.0
_QUIET_TURNS: Final = 4
_TURN_S: Final = 0.05
_STATUSES: Final = 2
"""Statuses of a worker that were written while we read: with one, it may have just ended."""
_STATUS_DELAY_US: Final = 10_000_000
"""How late a status may come if Kafka holds back what its worker writes, or what we read."""
_MOST_PAGES: Final = 16
_PAGES_S: Final = 5.0
"""The most metrics pages that are read, and the time that reading them takes at most, but for the last."""
_REPORT_MS: Final = 500
"""How often our own clients report, of which the impression lets them little time."""
TRAFFIC_S: Final = 6.0
"""How long the traffic is followed: three polls of the lag, and three reads of metrics pages by default."""
SILENT_S: Final = 60.0
"""The age above which the status is of a worker that may be gone: the topic keeps the last one of each."""


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
    collector = LagCollector(KafkaSession(kafka, "relaygr-doctor"), settings, (kafka.trigger_group,))
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
    """Its wall clock minus ours, less the time for which the quickest status was on its way."""

    @property
    def offset(self) -> ClockOffset | None:
        """A clock that seems to be ahead is. One that seems to be behind may be, or its statuses come late."""
        if self.offset_us is None:
            return None
        return ClockOffset(self.offset_us, 0 if self.offset_us >= 0 else _STATUS_DELAY_US)

    @property
    def written_at_us(self) -> int:
        return self.status.written_at_us


class Statuses:
    """Keeps the last status of each worker, and how much later than its time stamp it came."""

    def __init__(self) -> None:
        self.heard: WorkerTable[_Heard] = WorkerTable(MAX_WORKERS, round(SILENT_S * 1e6))
        self.is_live = threading.Event()
        """Set once the topic was read to its end: later statuses were written while we read."""

    def apply(self, worker_id: str, status: WorkerStatus | None, now_us: int) -> None:
        if status is None or status.state is WorkerState.STOPPING:
            self.heard.pop(worker_id, None)
            return
        self.heard.make_room(worker_id, now_us)
        # It stays in the table meanwhile: another thread asks it whether every worker was heard.
        before = self.heard.get(worker_id)
        now = _Heard(status)
        if self.is_live.is_set():
            offset_us = status.written_at_us - now_us
            known = before.offset_us if before is not None else None
            # The status that came quickest has the least delay in it.
            now.offset_us = offset_us if known is None else max(known, offset_us)
            now.live = 1 + (before.live if before is not None else 0)
        self.heard.put(worker_id, now)

    def workers(self, now_us: int) -> list[SeenWorker]:
        """The workers. Fresh is one that is ready and wrote a status while we read, whatever its clock says."""
        return [
            SeenWorker(
                worker_id,
                str(each.status.state),
                each.live > 0 and each.status.state is WorkerState.READY,
                max(0, now_us - each.status.written_at_us) / 1e6,
                frozenset(each.status.partitions),
                each.offset,
                each.status.pre_infer is not None,
                each.status.pre_infer is None or each.status.pre_infer.slots > 0,
                _page_of(each.status),
            )
            for worker_id, each in sorted(self.heard.items())
        ]


def _page_of(status: WorkerStatus) -> str | None:
    url = status.metrics_url
    return url if url is not None and can_reach(url, status.host) else None


def held_back(pages: Mapping[str, str]) -> dict[str, float]:
    """The longest time for which a broker lately held back an answer to the process of each page that can be read, by
    its name. `pages`: name -> address.
    """
    found = {}
    ends_s = time.monotonic() + _PAGES_S
    for name, url in list(pages.items())[:_MOST_PAGES]:
        reading = read_page(url) if time.monotonic() < ends_s else None
        if reading is not None:
            found[name] = reading.largest(THROTTLE)
    return found


def fleet(kafka: KafkaSettings, status_interval_ms: int) -> list[SeenWorker]:
    """The workers by their statuses, read for some intervals. Raises RelayError if they cannot be read."""
    statuses, clock = Statuses(), SystemClock()
    reader = FleetReader(KafkaSession(kafka, "relaygr-doctor"), statuses, clock, "relaygr-doctor")
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


def traffic(kafka: KafkaSettings, settings: UiSettings) -> LiveSnapshot:
    """What the live page shows after `TRAFFIC_S`. That the topics cannot be read is one of its problems."""
    with LiveCluster(KafkaSession(kafka, "relaygr-doctor"), settings) as live:
        time.sleep(TRAFFIC_S)
    return live.snapshot()


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


def pool(url: StoreUrl) -> tuple[str | None, str | None]:
    """What this machine lacks for the pool's store, and why it cannot reach it."""
    store = STORES[url.scheme]
    return store.missing(), store.unreachable(url, _API_S)


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


def checkpoint(folder: Path, ranker_modules: Sequence[str]) -> list[Diagnosis]:
    """Reads all weights and compares them with their digests. Changes nothing. Raises RelayError for a broken one, and
    for a ranker whose code may not run.
    """
    if not folder.exists():
        return [Diagnosis("model", Verdict.SKIP, f"worker.model is {folder}, and no such folder is on this machine")]
    from relaygr.worker.model.checkpoint import verify_checkpoint
    from relaygr.worker.model.config import is_ranker
    from relaygr.worker.model.rankers import read_ranker, require_allowed

    if is_ranker(folder):
        ranker = read_ranker(folder)
        require_allowed(ranker.config.ranker, ranker_modules)
        what = f"{folder} is revision {ranker.revision} of the ranker {ranker.config.ranker}"
        return [Diagnosis("model", Verdict.OK, what)]
    found = verify_checkpoint(folder, trust=False)
    if found.changed:
        what = f"{folder} was changed after it was written: {', '.join(found.changed[:4])}"
        return [Diagnosis("model", Verdict.FAIL, what, "copy the checkpoint again")]
    if not found.has_digests:
        return [Diagnosis("model", Verdict.OK, f"{folder} has right shapes and values, and no digests")]
    return [Diagnosis("model", Verdict.OK, f"{folder} agrees with its digests")]


def calibration(file: Path | None) -> list[Diagnosis]:
    """Whether the fits of `worker.calibration`, if it is set, are good. Raises RelayError for a broken file."""
    if file is None:
        return []
    if not file.exists():
        what = f"worker.calibration is {file}, and no such file is on this machine"
        return [Diagnosis("calibration", Verdict.SKIP, what)]
    found = load_calibration(file)
    if (problem := found.fit_problem) is not None:
        mend = "run `relaygr calibrate` again on a quiet machine"
        return [Diagnosis("calibration", Verdict.WARN, f"{file}: {problem}", mend)]
    worst = max(found.fit_errors.values())
    return [Diagnosis("calibration", Verdict.OK, f"the fits of {file} are at most {worst:.0%} off")]


def no_answer(error: KafkaException) -> str:
    """Kafka's error as a sentence."""
    return str(error.args[0].str())


@dataclass(frozen=True, slots=True)
class SeenImpression:
    """How the impression ended."""

    undelivered: str | None
    """Why the retrieval event was not delivered; None if the broker acknowledged it."""
    outcome: RankOutcome
    offsets: dict[str, ClockOffset]
    """The clock of each worker that answered minus ours."""
    held_back_s: float
    """The longest time for which a broker held back an answer to our clients."""


def send_impression(kafka: KafkaSettings, owned: Collection[int], scenario: str | None = None) -> SeenImpression:
    """Sends the impression of a user without a history, whose partition is in `owned`. Takes `BUDGET_MS` and some more.

    Raises RelayError if the client cannot start, and ClientError if it cannot send.
    """
    user = next(
        (name for name in _names() if partition_for(name.encode(), kafka.partitions) in owned),
        _USER,
    )
    reports: list[DeliveryReport] = []
    reported = threading.Event()

    def keep(report: DeliveryReport) -> None:
        reports.append(report)
        reported.set()

    settings = ClientSettings(close_timeout_s=1.0, lost_after_ms=0)
    kafka = kafka.model_copy(update={"statistics_interval_ms": _REPORT_MS})
    registry = CollectorRegistry()
    client = RelayClient(kafka, f"doctor-{secrets.token_hex(4)}", settings, registry=registry)
    with client:
        event = client.publish_retrieval(
            user,
            on_delivery=keep,
            ranking_budget_ms=BUDGET_MS,
            expected_ranking_in_ms=100,
            expected_candidates=CANDIDATES,
            expected_suffix=0,
            scenario=scenario,
        )
        outcome = client.rank(
            user,
            np.arange(CANDIDATES),
            budget_ms=BUDGET_MS,
            request_id=event.request_id,
            query_time_ms=event.retrieval_at_us // 1000,
            scenario=scenario,
        )
        reported.wait(BUDGET_MS / 1000)
        offsets = client.clock_offsets()
    undelivered = reports[0].error if reports else "the broker gave no answer in time"
    return SeenImpression(undelivered, outcome, offsets, kafka_statistics(registry).longest_throttle_s)


def _names() -> list[str]:
    return [_USER, *(f"{_USER}-{number}" for number in range(1, _MOST_USERS))]
