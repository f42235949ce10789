"""Breaks a cluster in four ways under load, and measures each. `__main__` describes the figures."""

from __future__ import annotations

import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Final

import numpy as np
from prometheus_client import CollectorRegistry
from rich.console import Console
from rich.table import Table

from relaygr.bench.rows import append_rows, machine, now
from relaygr.bench.small_relay import CANDIDATES, history_of, small_config, small_settings
from relaygr.bench.standby.traffic import Asked, Traffic
from relaygr.client import ClientSettings, LostRequest, RankStatus, RelayClient
from relaygr.demo.processes import Processes, write_config
from relaygr.devbroker import available_brokers
from relaygr.devbroker.cluster import KafkaCluster
from relaygr.kafka.admin import create_topics
from relaygr.kafka.settings import Acks, KafkaSettings
from relaygr.runtime.errors import RelayError
from relaygr.schemas.topics import Topic
from relaygr.settings import Settings
from relaygr.worker.model.checkpoint import random_checkpoint, save_checkpoint
from relaygr.worker.shared.lock import memory_folder

BROKERS: Final = 3
PARTITIONS: Final = 12
USERS: Final = 100
HISTORY: Final = 128
START_TIMEOUT_S: Final = 120.0
LOST_AFTER_MS: Final = 15_000
TABLE_WIDTH: Final = 130
QUIET_S: Final = 3.0
"""Load before and after what happens."""


@dataclass(frozen=True, slots=True)
class Load:
    """What is offered, and how the cluster is set."""

    rate_per_s: float
    budget_ms: float
    acks: Acks
    broker_session_ms: int


@dataclass(frozen=True, slots=True)
class OutageFigures:
    """The figures of one outage. Times in ms."""

    measured_at: str
    machine: str
    outage: str
    acks: str
    broker_session_ms: int
    rate_per_s: float
    budget_ms: float
    requests: int
    ranked: int
    expired: int
    failed: int
    timed_out: int
    late: int
    """Timed-out requests that were answered later."""
    lost: int
    """Acknowledged requests that were never answered."""
    never_accepted: int
    """Requests that Kafka did not acknowledge, and that were never answered."""
    repeated: int
    """Results of requests that had a result already."""
    p50_ms: float
    longest_ms: float
    """Longest wait for a ranked result."""
    longest_gap_ms: float
    """Longest time without a ranked result."""


def measure_outages(rounds: int, load: Load, out: Path) -> None:
    """Measures each outage `rounds` times, prints the figures and appends them to `out`. Raises RelayError."""
    home = available_brokers().kafka_home
    if home is None:
        raise RelayError("This benchmark starts a cluster: set KAFKA_HOME to the folder of an unpacked Apache Kafka")
    console = Console(highlight=False)
    console.width = max(console.width, TABLE_WIDTH)
    figures: list[OutageFigures] = []
    properties = {"broker.session.timeout.ms": load.broker_session_ms}
    with (
        tempfile.TemporaryDirectory(prefix="relaygr-brokers-", dir=memory_folder()) as name,
        KafkaCluster(home, BROKERS, properties) as cluster,
    ):
        settings = _settings(cluster, Path(name), load)
        create_topics(settings)
        write_config(settings, Path(name) / "settings.yaml")
        with Processes(Path(name), Path(name) / "settings.yaml") as processes:
            worker = processes.start("worker-00", ["worker"], "worker")
            processes.await_ready([worker], START_TIMEOUT_S)
            for _ in range(rounds):
                for outage, happen in _outages(cluster, settings).items():
                    figures.append(_measure(outage, happen, settings, load))
                    append_rows(out, [asdict(figures[-1])])
                    processes.require_running()
                    cluster.await_in_sync()
                    console.print(f"{outage}: {figures[-1].longest_gap_ms:.0f} ms without a result")
    _print(console, figures)
    console.print(f"appended to {out}")


def _outages(cluster: KafkaCluster, settings: Settings) -> dict[str, Callable[[], None]]:
    def again(end: Callable[..., None], count: int) -> None:
        leader = cluster.leader(settings.topic(Topic.RANKING))
        # The coordinator of the workers' group is one of them or not, as it happens.
        numbers = [leader, *(number for number in cluster.numbers if number != leader)][:count]
        end(*numbers)
        time.sleep(2 * QUIET_S + settings.session_timeout_ms / 1e3)
        cluster.start(*numbers)

    def rolling() -> None:
        for number in cluster.numbers:
            cluster.stop(number)
            cluster.start(number)
            cluster.await_in_sync()

    return {
        "kill": lambda: again(cluster.kill, 1),
        "stop": lambda: again(cluster.stop, 1),
        "rolling": rolling,
        "two_stopped": lambda: again(cluster.stop, 2),
    }


def _measure(outage: str, happen: Callable[[], None], settings: Settings, load: Load) -> OutageFigures:
    clients: list[RelayClient] = []

    def make_client(on_lost: Callable[[LostRequest], None]) -> RelayClient:
        clients.append(
            RelayClient(
                settings, f"bench-{time.monotonic_ns()}", ClientSettings(lost_after_ms=LOST_AFTER_MS),
                registry=CollectorRegistry(), on_lost=on_lost,
            )
        )  # fmt: skip
        return clients[-1]

    users = [f"user-{number:05d}" for number in range(USERS)]
    candidates = np.arange(CANDIDATES, dtype=np.int64)
    histories = partial(history_of, length=HISTORY)
    with Traffic(make_client, users, histories, candidates, 1 / load.rate_per_s, load.budget_ms) as traffic:
        # Every user's prefix is cached before.
        time.sleep(USERS / load.rate_per_s + QUIET_S)
        begun_s = time.monotonic()
        happen()
        time.sleep(QUIET_S)
        asked = [each for each in traffic.stop() if each.sent_s >= begun_s - QUIET_S]
        clients[0].drain(2 * LOST_AFTER_MS / 1e3)
        counts = clients[0].statistics()
        lost = sum(each.acknowledged for each in traffic.lost)
    ends = Counter(each.outcome.status for each in asked)
    ranked = [each for each in asked if each.outcome.status is RankStatus.RANKED]
    return OutageFigures(
        measured_at=now(),
        machine=machine(),
        outage=outage,
        acks=load.acks.value,
        broker_session_ms=load.broker_session_ms,
        rate_per_s=load.rate_per_s,
        budget_ms=load.budget_ms,
        requests=len(asked),
        ranked=ends[RankStatus.RANKED],
        expired=ends[RankStatus.EXPIRED],
        failed=ends[RankStatus.FAILED],
        timed_out=ends[RankStatus.TIMED_OUT],
        late=counts.late,
        lost=lost,
        never_accepted=counts.lost - lost,
        repeated=counts.duplicates,
        p50_ms=round(float(np.median([each.took_ms for each in ranked])), 2),
        longest_ms=round(max(each.took_ms for each in ranked), 2),
        longest_gap_ms=round(_longest_gap_ms(ranked), 2),
    )


def _longest_gap_ms(ranked: Sequence[Asked]) -> float:
    ends_s = np.sort([each.answered_s for each in ranked])
    return float(np.diff(ends_s).max() * 1e3)


def _settings(cluster: KafkaCluster, folder: Path, load: Load) -> Settings:
    config = small_config(HISTORY, width=32, layers=2)
    save_checkpoint(folder / "model", config, random_checkpoint(config, seed=0).tensors)
    kafka = KafkaSettings(
        bootstrap=cluster.bootstrap,
        topic_prefix="brokers",
        group_prefix="brokers",
        partitions=PARTITIONS,
        replication_factor=cluster.replicas,
        # Three brokers and the others share the machine.
        connect_timeout_s=30,
        request_acks=load.acks,
    )
    return small_settings(kafka, folder, {"hbm_bytes": 16 << 20, "dram_bytes": 64 << 20})


def _print(console: Console, figures: Sequence[OutageFigures]) -> None:
    columns = ("requests", "ranked", "expired", "failed", "timed_out", "late", "lost", "never_accepted", "repeated")
    times = ("p50_ms", "longest_ms", "longest_gap_ms")
    table = Table(title="Outages of brokers under load")
    for name in ("outage", *columns, *times):
        table.add_column(name, justify="right")
    for one in figures:
        row = asdict(one)
        table.add_row(one.outage, *(str(row[name]) for name in columns), *(f"{row[name]:.0f}" for name in times))
    console.print(table)
