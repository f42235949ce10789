"""Measures the history store and its follower on one core."""

from __future__ import annotations

import os
import random
import resource
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import numpy as np
from rich.console import Console
from rich.table import Table

from relaygr.bench.rows import append_rows, machine, now
from relaygr.devbroker import local_broker
from relaygr.kafka.clients import ProducerKind, make_producer
from relaygr.kafka.dead_letters import DeadLetterWriter
from relaygr.kafka.settings import KafkaSettings
from relaygr.kafka.topic_identity import identify_topics
from relaygr.runtime.interpreter import tune_interpreter
from relaygr.schemas.codec import encode
from relaygr.schemas.messages import BehaviourEvent, Behaviours, BehavioursOffset, History
from relaygr.schemas.partitioner import partition_for
from relaygr.schemas.topics import Topic
from relaygr.worker.device.cpu import CpuDevice
from relaygr.worker.history.follower import BATCH_RECORDS, HistoryFollower, read_event
from relaygr.worker.history.store import EventRecord, HistoryBatch, HistoryRecord, HistoryStore, StoreOrigin

PARTITIONS: Final = 48
LOOK_UPS: Final = 20_000
_BYTES_PER_BEHAVIOUR: Final = 24
_BYTES_PER_USER: Final = 16_384
_SNAPSHOTS_AT_ONCE: Final = 64
_PATIENCE_S: Final = 600.0
_METADATA_S: Final = 5.0
_LATER: Final = 10**9
"""The offset of the first record that is appended without a broker: after all that a follower read."""


class Filled:
    """A store whose users have histories of one length."""

    def __init__(self, folder: Path, users: int, length: int, events: int, origin: StoreOrigin) -> None:
        self.users = [f"user-{number:07}" for number in range(users)]
        self.partitions = [partition_for(user.encode(), PARTITIONS) for user in self.users]
        max_bytes = 2 * users * (length * _BYTES_PER_BEHAVIOUR + _BYTES_PER_USER) + 512 * events + (1 << 30)
        self.store = HistoryStore.open(folder, max_bytes)
        self.store.trust(origin)
        dice = np.random.default_rng(7)
        self._behaviours = Behaviours(
            dice.integers(0, 2**40, length), dice.integers(0, 8, length).astype("<u2"), np.arange(length) * 1000
        )

    def fill(self) -> None:
        """Stores a snapshot of each user. The follower's offsets stay at the beginning."""
        for start in range(0, len(self.users), _SNAPSHOTS_AT_ONCE):
            batches: dict[int, list[HistoryRecord]] = {}
            for number in range(start, min(start + _SNAPSHOTS_AT_ONCE, len(self.users))):
                history = History(
                    self.users[number],
                    1,
                    np.arange(4),
                    self._behaviours,
                    covers=BehavioursOffset(self.partitions[number], 0),
                )
                batches.setdefault(self.partitions[number], []).append(
                    HistoryRecord(self.users[number], number, history)
                )
            self.store.apply_all([HistoryBatch(partition, tuple(own), 0) for partition, own in batches.items()])


def measure_histories(users: int, length: int, events: int, broker: str | None, folder: Path, out: Path) -> None:
    """Measures, prints the figures and appends them to `out`."""
    console = Console(highlight=False)
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    try:
        if broker is None:
            figures = _figures(folder, users, length, events, None)
        else:
            with local_broker(broker) as started:
                console.print(f"broker: {started.what}", soft_wrap=True)
                kafka = started.settings(KafkaSettings(topic_prefix="histories", partitions=PARTITIONS))
                started.create_topics(kafka)
                figures = _figures(folder, users, length, events, kafka)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    table = Table(title=f"{users:,} users of {length:,} behaviours, one core")
    table.add_column("figure")
    table.add_column("", justify="right")
    for name, value in (figures | _derived(figures, users)).items():
        table.add_row(name, f"{value:,.1f}")
    console.print(table)
    described = {"measured_at": now(), "machine": machine(), "users": users, "length": length, "events": events}
    followed = dict.fromkeys(("follow_us", "cpu_follow_us", "follow_events_per_s"), 0.0)
    append_rows(out, [described | {name: round(value, 2) for name, value in (followed | figures).items()}])
    console.print(f"appended to {out}")


def _derived(figures: dict[str, float], users: int) -> dict[str, float]:
    """Figures of the whole store, and the rate of one core that does nothing else than decode and append."""
    each_us = figures["cpu_decode_us"] + figures["cpu_append_us"]
    return {"store_gib": figures["bytes_per_user"] * users / 2**30, "events_per_core_s": 1e6 / each_us}


def _figures(folder: Path, users: int, length: int, events: int, kafka: KafkaSettings | None) -> dict[str, float]:
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {max(before)})
    origin = StoreOrigin("benchmark", "history", "") if kafka is None else _origin(kafka)
    filled = Filled(folder / "store", users, length, events, origin)
    store, figures = filled.store, dict[str, float]()
    # As in a worker: its device sets how the heaps keep freed memory, and old objects are not collected.
    CpuDevice()
    tune_interpreter()
    try:
        with _timed(figures, "snapshot_us", users):
            filled.fill()
        figures["bytes_per_user"] = store.bytes_used / users
        figures |= _look_ups(filled)
        made = _made(filled, events)
        if kafka is not None:
            figures |= _followed(kafka, filled, made)
        used_before = store.bytes_used
        with _timed(figures, "decode_us", events):
            records = _decoded(made)
        with _timed(figures, "append_us", events):
            _append(store, records)
        figures["bytes_per_append"] = (store.bytes_used - used_before) / events
        began_s = time.monotonic()
        figures["forgotten_users"] = store.forget(filled.partitions[0])
        figures["forget_ms"] = (time.monotonic() - began_s) * 1000
    finally:
        store.close()
        os.sched_setaffinity(0, before)
    return figures


def _origin(kafka: KafkaSettings) -> StoreOrigin:
    names = [kafka.topic(Topic.HISTORY), kafka.topic(Topic.BEHAVIOURS)]
    found = identify_topics(kafka, names, "benchmark-origin", _METADATA_S)
    return StoreOrigin(found.cluster_id, names[0], *(found.topic_ids[name] for name in names))


@contextmanager
def _timed(figures: dict[str, float], name: str, count: int) -> Iterator[None]:
    """Notes the time of this thread's work, and `cpu_` with the time of the whole process on its core."""
    began_s, cpu_s = time.monotonic(), time.process_time()
    yield
    figures[name] = (time.monotonic() - began_s) / count * 1e6
    figures[f"cpu_{name}"] = (time.process_time() - cpu_s) / count * 1e6


def _look_ups(filled: Filled) -> dict[str, float]:
    """Look-ups of random users; the share of them that had to read the disk; and the same look-ups once more.

    The second time shows the store's own time: the first time the system maps the pages, brings those back that it took
    for other files, and may still write others.
    """
    users = random.Random(1).choices(filled.users, k=LOOK_UPS)
    figures: dict[str, float] = {}
    for name in ("look_up", "look_up_again"):
        took_us, reads = np.zeros(LOOK_UPS), np.zeros(LOOK_UPS, np.int64)
        before = resource.getrusage(resource.RUSAGE_THREAD).ru_majflt
        for number, user in enumerate(users):
            began_ns = time.perf_counter_ns()
            filled.store.get(user)
            took_us[number] = (time.perf_counter_ns() - began_ns) / 1000
            after = resource.getrusage(resource.RUSAGE_THREAD).ru_majflt
            reads[number], before = after - before, after
        figures |= {f"{name}_p{part}_us": float(np.percentile(took_us, part)) for part in (50, 99)}
        figures[f"{name}_disk_percent"] = 100 * float((reads > 0).mean())
    return figures


def _made(filled: Filled, events: int) -> list[tuple[int, bytes, bytes]]:
    """Partition, key and value of records of one behaviour, of random users."""
    dice = random.Random(2)
    made = []
    for number in range(events):
        chosen = dice.randrange(len(filled.users))
        new = Behaviours(np.array([number]), np.array([1], "<u2"), np.array([10**12 + number]))
        value = encode(BehaviourEvent(filled.users[chosen], new))
        made.append((filled.partitions[chosen], filled.users[chosen].encode(), value))
    return made


def _decoded(made: list[tuple[int, bytes, bytes]]) -> list[tuple[int, EventRecord]]:
    found = []
    for offset, (partition, key, value) in enumerate(made, _LATER):
        record = read_event(key, value, partition, PARTITIONS, offset, 1)
        assert isinstance(record, EventRecord)
        found.append((partition, record))
    return found


def _append(store: HistoryStore, records: list[tuple[int, EventRecord]]) -> None:
    for start in range(0, len(records), BATCH_RECORDS):
        batches: dict[int, list[EventRecord]] = {}
        for partition, record in records[start : start + BATCH_RECORDS]:
            batches.setdefault(partition, []).append(record)
        store.apply_all(
            [HistoryBatch(partition, (), 0, tuple(own), own[-1].offset + 1) for partition, own in batches.items()]
        )


def _followed(kafka: KafkaSettings, filled: Filled, made: list[tuple[int, bytes, bytes]]) -> dict[str, float]:
    """Publishes the records, and measures a follower that reads all of them into the store."""
    figures: dict[str, float] = {}
    producer = make_producer(kafka, ProducerKind.DURABLE, "benchmark")
    for _, key, value in made:
        while True:
            try:
                producer.produce(kafka.topic(Topic.BEHAVIOURS), value=value, key=key)
                break
            except BufferError:
                producer.poll(0.1)
    producer.flush(_PATIENCE_S)
    follower = HistoryFollower(
        kafka, filled.store, DeadLetterWriter(kafka, "benchmark"), "benchmark", lambda _: None, lambda _: None
    )
    follower.follow(frozenset(range(PARTITIONS)))
    with _timed(figures, "follow_us", len(made)):
        follower.start()
        ends_s = time.monotonic() + _PATIENCE_S
        while follower.loading and time.monotonic() < ends_s:
            time.sleep(0.01)
    assert follower.stop(_PATIENCE_S)
    figures["follow_events_per_s"] = 1e6 / figures["follow_us"]
    return figures
