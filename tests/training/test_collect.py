"""`relaygr train collect`: what it collects is the published log, whatever kills it; deleted users are in no file."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from confluent_kafka import OFFSET_BEGINNING, Consumer, Message, Producer, TopicPartition
from confluent_kafka.admin import AlterConfigOpType, ConfigEntry, ConfigResource
from structlog.testing import capture_logs
from typer.testing import CliRunner

from relaygr.cli.app import app
from relaygr.devbroker import LocalBroker
from relaygr.interactions import Interactions, Limits, parquet, read_interactions, recognise
from relaygr.kafka.clients import PARTITIONER, make_admin
from relaygr.kafka.settings import KafkaSettings
from relaygr.kafka.topic_identity import TopicIdentity, identify_topics
from relaygr.runtime import files as runtime_files
from relaygr.runtime.errors import RelayError
from relaygr.runtime.stop_signals import SIGNALS
from relaygr.schemas.codec import encode
from relaygr.schemas.headers import RepeatedTombstone
from relaygr.schemas.messages import BehaviourEvent, Behaviours, History
from relaygr.schemas.partitioner import partition_for
from relaygr.schemas.topics import Topic
from relaygr.training.collect import collector as collector_module
from relaygr.training.collect import deletions as deletions_module
from relaygr.training.collect import files as files_module
from relaygr.training.collect import folder as folder_module
from relaygr.training.collect.collector import Collected, Collector, FileLimits, manifest_of
from relaygr.training.collect.deletions import DELETIONS
from relaygr.training.collect.files import opened
from relaygr.training.collect.folder import Kind, Manifest, Part, parts_of
from relaygr.training.logs import Log, usable
from relaygr.training_progress import training_log
from relaygr.worker.history.rules import TimeRules
from relaygr.worker.history.store import HistoryStore
from tests.training.made_logs import cyclic_log, write_inter
from tests.workers.test_history_follower import MIB, Publisher, following, history, until

pytestmark = pytest.mark.slow

Row = tuple[int, int, int]
DAY_MS = 24 * 3600 * 1000
RULES = TimeRules(DAY_MS)


class Source(Publisher):
    """Writes to both topics."""

    def event(self, user_id: str, *rows: Row, position: int | None = None, written_at_ms: int = 0) -> None:
        """One record of behaviours (item, action, time)."""
        self._producer.produce(
            self.kafka.topic(Topic.BEHAVIOURS),
            key=user_id.encode(),
            value=encode(BehaviourEvent(user_id, Behaviours.of(rows), position)),
            **({"timestamp": written_at_ms} if written_at_ms else {}),
        )
        assert self._producer.flush(30) == 0

    def events(self, user_id: str, count: int, first: int = 0) -> None:
        """Records of one behaviour, in one flush."""
        for position in range(first, first + count):
            one = Behaviours.of([(position, 1, 1_700_000_000_000 + position)])
            value = encode(BehaviourEvent(user_id, one, position))
            while True:
                try:
                    self._producer.produce(self.kafka.topic(Topic.BEHAVIOURS), key=user_id.encode(), value=value)
                    break
                except BufferError:
                    self._producer.poll(0.1)
        assert self._producer.flush(30) == 0

    def tombstone(self, user_id: str, at_ms: int = 0, repeated: RepeatedTombstone | None = None) -> None:
        self._producer.produce(
            self.topic,
            key=user_id.encode(),
            value=None,
            headers=[] if repeated is None else repeated.encode(),
            **({"timestamp": at_ms} if at_ms else {}),
        )
        assert self._producer.flush(30) == 0


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """A poll waits for as long as it has nothing, and each question for the ids of topics takes a process."""
    monkeypatch.setattr(collector_module, "POLL_S", 0.02)
    asked: dict[str, TopicIdentity] = {}

    def identify(kafka: KafkaSettings, names: tuple[str, ...], *options: Any) -> TopicIdentity:
        if names[0] not in asked:
            asked[names[0]] = identify_topics(kafka, names, *options)
        return asked[names[0]]

    monkeypatch.setattr(collector_module, "identify_topics", identify)


@pytest.fixture
def source(embedded_kafka: KafkaSettings) -> Source:
    return Source(embedded_kafka)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "collected"


@pytest.fixture
def store(tmp_path: Path) -> Iterator[HistoryStore]:
    opened_store = HistoryStore.open(tmp_path / "history", 16 * MIB)
    yield opened_store
    opened_store.close()


@pytest.fixture
def kafka(real_broker: LocalBroker) -> Iterator[KafkaSettings]:
    """Topics of a real Kafka. Tests that take them carry the marker."""
    with topics_of(real_broker) as settings:
        yield settings


@pytest.fixture
def embedded_kafka(embedded_broker: LocalBroker) -> Iterator[KafkaSettings]:
    """Topics of the embedded cluster, which has no ids of topics, deletes no records and knows no transactions."""
    with topics_of(embedded_broker) as settings:
        yield settings


@contextmanager
def topics_of(broker: LocalBroker) -> Iterator[KafkaSettings]:
    prefix = f"test-{uuid.uuid4().hex[:12]}"
    settings = broker.settings(KafkaSettings(topic_prefix=prefix, group_prefix=prefix, partitions=4))
    broker.create_topics(settings)
    yield settings
    broker.delete_topics(settings)


def collect(
    kafka: KafkaSettings,
    folder: Path,
    *,
    file_rows: int = 100_000,
    file_s: float = 60,
    ratings: bool = False,
    follow: bool = False,
    is_stopping: Callable[[], bool] = lambda: False,
    manifest: Manifest | None = None,
) -> Collected:
    with opened(folder, manifest or manifest_of(kafka, ratings), file_rows) as folder_of_rows:
        return Collector(kafka, folder_of_rows, FileLimits(file_rows, file_s), RULES, is_stopping).run(follow)


def words(kafka: KafkaSettings, folder: Path, *options: str) -> list[str]:
    found = ["train", "collect", str(folder), *options, "--bootstrap", kafka.bootstrap]
    for name in ("topic_prefix", "partitions", "fetch_wait_max_ms"):
        found += ["--set", f"{name}={getattr(kafka, name)}"]
    return found


@contextmanager
def process(kafka: KafkaSettings, folder: Path, *options: str) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-m", "relaygr", *words(kafka, folder, *options)]
    environment = {**os.environ, "COLUMNS": "300", "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    ) as started:
        try:
            yield started
        finally:
            started.kill()


def command(kafka: KafkaSettings, folder: Path, *options: str) -> str:
    """What the command prints, which succeeds."""
    handlers = {number: signal.getsignal(number) for number in SIGNALS}
    try:
        done = CliRunner().invoke(app, words(kafka, folder, *options), catch_exceptions=False)
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    assert done.exit_code == 0, done.output
    return done.stdout.strip()


def rows_of(read: Interactions, user_id: str) -> list[Row]:
    """(item, action, time) of a user, oldest first; [] for a user who is not there."""
    if user_id not in read.users:
        return []
    one = read.of(read.users.index(user_id))
    return list(zip(one.items.tolist(), one.actions.tolist(), one.timestamps_ms.tolist(), strict=True))


def items(folder: Path, user_id: str) -> list[int]:
    return [item for item, _, _ in rows_of(read_interactions(folder), user_id)]


def offsets(folder: Path, kind: Kind) -> list[tuple[int, int]]:
    """(partition, offset) of each row of the live files, sorted."""
    return sorted(
        (part.partition, offset)
        for part in parts_of(folder).live
        if part.kind is kind
        for offset in pq.read_table(folder / part.name).column("offset").to_pylist()
    )


def same(one: Interactions, other: Interactions) -> bool:
    return sorted(one.users) == sorted(other.users) and all(rows_of(one, u) == rows_of(other, u) for u in one.users)


def publish(kafka: KafkaSettings, what: str, log: Path, *options: str) -> None:
    called = ["publish", what, "--interactions", str(log), *options, *words(kafka, Path())[3:]]
    done = CliRunner().invoke(app, called, catch_exceptions=False)
    assert done.exit_code == 0, done.output


# The log that was published.


def test_what_is_collected_is_the_log_that_was_published(
    embedded_kafka: KafkaSettings, folder: Path, tmp_path: Path
) -> None:
    """Twice: as histories, and as behaviours."""
    log = write_inter(tmp_path / "log.inter", cyclic_log(users=20, length=60))
    publish(embedded_kafka, "history", log, "--max-behaviours", "20")
    publish(embedded_kafka, "behaviours", log)
    printed = command(embedded_kafka, folder, "--ratings")
    assert printed.startswith("Collected ") and printed.endswith(f"into {folder}.") and "\n" not in printed
    wanted, found = read_interactions(log), read_interactions(folder)
    assert same(wanted, found)
    assert found.report.actions == wanted.report.actions and found.report.layout.has_ratings
    assert found.report.layout.has_times
    publish(embedded_kafka, "history", folder, "--dry-run")
    assert any("rows repeat others" in note for note in found.report.notes)


def test_a_second_log_whose_positions_begin_again_is_appended(
    embedded_kafka: KafkaSettings, folder: Path, tmp_path: Path
) -> None:
    whole = cyclic_log(users=8, length=40)
    late = np.concatenate([np.arange(count) >= count // 2 for count in whole.lengths])
    parts = []
    for name, kept in (("old", ~late), ("new", late)):
        starts = np.concatenate(([0], np.cumsum(kept)))[whole.starts]
        part = replace(
            whole, starts=starts, items=whole.items[kept], actions=whole.actions[kept], times_ms=whole.times_ms[kept]
        )
        parts.append(write_inter(tmp_path / f"{name}.inter", part))
    publish(embedded_kafka, "history", parts[0])
    collect(embedded_kafka, folder)
    publish(embedded_kafka, "behaviours", parts[1])
    publish(embedded_kafka, "behaviours", parts[1])
    collect(embedded_kafka, folder)
    assert same(read_interactions(write_inter(tmp_path / "whole.inter", whole)), read_interactions(folder))


def test_empty_topics_make_a_folder_without_rows(embedded_kafka: KafkaSettings, folder: Path) -> None:
    found = collect(embedded_kafka, folder)
    assert found == Collected(reached_end=True)
    assert read_interactions(folder).users == [] and parts_of(folder).live == ()


def test_a_run_goes_on_where_the_folder_ends_and_small_files_are_joined(source: Source, folder: Path) -> None:
    for turn in range(4):
        source.events("ann", 3, first=3 * turn)
        assert collect(source.kafka, folder).records == 3
    assert items(folder, "ann") == list(range(12))
    [part] = parts_of(folder).live
    assert (part.first, part.last) == (0, 11)


def test_a_file_has_no_more_rows_than_asked(source: Source, folder: Path) -> None:
    source.events("ann", 25)
    collect(source.kafka, folder, file_rows=5)
    sizes = [pq.read_metadata(folder / part.name).num_rows for part in parts_of(folder).live]
    assert sizes == [5] * 5


def test_rows_that_wait_are_bounded_over_all_partitions(
    source: Source, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(collector_module, "MOST_ROWS", 7)
    written: list[int] = []
    write = files_module.CollectedFolder.write

    def noted(self: files_module.CollectedFolder, *content: Any) -> int:
        written.append(len(content[2]))
        return write(self, *content)

    monkeypatch.setattr(files_module.CollectedFolder, "write", noted)
    users = [f"user-{number}" for number in range(10)]
    for user in users:
        source.events(user, 3)
    collect(source.kafka, folder)
    assert sum(written) == 30 and max(written) <= 8
    assert all(items(folder, user) == [0, 1, 2] for user in users)


def test_a_folder_is_read_while_its_files_are_joined(
    source: Source, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another run joins all files as soon as the first batch is read."""
    other = next(user for user in map(str, range(99)) if source.partition(user) > source.partition("ann"))
    source.events("ann", 3)
    source.events(other, 3)
    collect(source.kafka, folder)
    source.events("ann", 2, first=3)
    source.events(other, 2, first=3)
    take = parquet._FileReader.take
    joined: list[Collected] = []

    def then_join(self: parquet._FileReader, batch: object) -> None:
        take(self, batch)
        if not joined:
            joined.append(collect(source.kafka, folder))

    monkeypatch.setattr(parquet._FileReader, "take", then_join)
    assert items(folder, other) == [0, 1, 2] and joined[0].behaviours == 4
    assert items(folder, other) == [0, 1, 2, 3, 4]


def test_a_listing_that_lacks_a_file_is_made_again(
    source: Source, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source.events("ann", 4)
    collect(source.kafka, folder, file_rows=2)
    listings = iter([parquet.parquet_files(folder)[1:]])
    real = parquet.parquet_files
    monkeypatch.setattr(parquet, "parquet_files", lambda path: next(listings, None) or real(path))
    rows = parquet.read_parquet(folder, parquet.recognise_parquet(folder), Limits())
    assert rows.finish().report.interactions == 4


def test_more_files_than_a_process_may_open_end_in_advice(source: Source, folder: Path) -> None:
    source.events("ann", 12)
    collect(source.kafka, folder, file_rows=1)
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    taken: list[int] = []
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(before[0], 1024), before[1]))
        with suppress(OSError):
            while True:
                taken.append(os.open(os.devnull, os.O_RDONLY))
        for _ in range(6):  # So many files may be opened.
            os.close(taken.pop())
        assert recognise(folder).is_collected
        with pytest.raises(RelayError, match=r"all 12 are open while they are read. Raise the limit \(ulimit -n\)"):
            read_interactions(folder)
    finally:
        for each in taken:
            os.close(each)
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_bad_messages_are_counted_said_and_skipped(source: Source, folder: Path) -> None:
    source.events("ann", 2)
    source.send_raw(b"ann", b"\xff", topic=source.kafka.topic(Topic.BEHAVIOURS))
    wrong = (source.partition("ann") + 1) % source.kafka.partitions
    value = encode(BehaviourEvent("ann", Behaviours.of([(7, 1, 7)])))
    source.send_raw(b"ann", value, partition=wrong, topic=source.kafka.topic(Topic.BEHAVIOURS))
    source.send_raw(b"bob", encode(history("ann")))
    source.send_raw(b"ann", b"\xff", topic=source.kafka.topic(Topic.BEHAVIOURS))
    with capture_logs() as lines:
        collect(source.kafka, folder.with_name("logged"))
    reasons = [line["reason"] for line in lines if "bad message" in line["event"]]
    assert len(reasons) == 3 and set(reasons) > {"key_mismatch", "wrong_partitioner"}
    printed = command(source.kafka, folder)
    assert "Skipped 4 bad messages (1 key_mismatch, 2 " in printed and "1 wrong_partitioner)" in printed
    assert items(folder, "ann") == [0, 1]
    again = json.loads(command(source.kafka, folder, "--json"))
    assert again["records"] == 0 and again["bad"] == {}


def test_times_are_those_that_the_worker_uses(source: Source, folder: Path, store: HistoryStore) -> None:
    """Behaviours that are dated a year ahead, in a record and in a snapshot."""
    now_ms = int(time.time() * 1000)
    year = 365 * DAY_MS
    source.send(History("ann", 1, np.empty(0, "<i8"), Behaviours.of([(1, 1, 5000), (2, 1, now_ms + year)])))
    source.event("bob", (1, 1, 5000), (2, 1, now_ms + year), position=0, written_at_ms=now_ms - 10_000)
    source.event("eve", (1, 1, now_ms + DAY_MS // 2), position=0)
    with following(source.kafka, store):
        until(lambda: all(store.get(user) for user in ("ann", "bob", "eve")), "stored")
        collect(source.kafka, folder)
        read = read_interactions(folder)
        for user in ("ann", "bob", "eve"):
            stored = store.get(user)
            assert stored is not None
            assert [row[2] for row in rows_of(read, user)] == stored.history.behaviours.timestamps_ms.tolist(), user


# Crashes.


class Crash(BaseException):
    """The process dies."""


class Dying:
    """Dies before or after the n-th change of a file's name."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, at: int) -> None:
        self.left = at
        self._wrap(monkeypatch, files_module, "put_in_place")
        self._wrap(monkeypatch, runtime_files, "put_in_place")
        self._wrap(monkeypatch, Path, "unlink")

    def _wrap(self, monkeypatch: pytest.MonkeyPatch, owner: object, name: str) -> None:
        real = getattr(owner, name)

        def step(*args: object, **options: object) -> object:
            self._die()
            found = real(*args, **options)
            self._die()
            return found

        monkeypatch.setattr(owner, name, step)

    def _die(self) -> None:
        self.left -= 1
        if self.left == 0:
            raise Crash


def test_a_death_at_any_step_loses_and_doubles_nothing_and_keeps_no_deleted_user(
    embedded_kafka: KafkaSettings, tmp_path: Path
) -> None:
    """Three runs write, join and clean the same files: each dies once at each of its steps.

    The user who is deleted has rows in two files of each log, the other one is in a partition of its own.
    """
    kafka = embedded_kafka
    source = Source(kafka)
    ann = next(user for user in ("ann", "bob", "eve", "pat") if source.partition(user) != source.partition("gone"))
    acts: list[Callable[[], None]] = [
        lambda: (source.send(history(ann, length=3), history("gone", length=9)), source.act("gone", 50, 51, 52)),
        lambda: (
            source.send(history("gone", length=9)),
            source.act("gone", 60, 61, 62),
            source.act(ann, 61, position=4),
        ),
        lambda: (source.tombstone("gone"), source.act(ann, 70, position=5)),
    ]
    died = 0
    base = tmp_path / "base"
    for turn, act in enumerate(acts):
        act()
        whole = tmp_path / f"turn-{turn}"
        copy(base, whole)
        collect(kafka, whole, file_rows=3)
        at = 1
        while True:
            tried = tmp_path / f"turn-{turn}-{at}"
            copy(base, tried)
            with pytest.MonkeyPatch.context() as patch:
                dying = Dying(patch, at)
                try:
                    collect(kafka, tried, file_rows=3)
                except Crash:
                    died += 1
            collect(kafka, tried, file_rows=3)
            rows = raw_rows(tried)
            assert rows == raw_rows(whole) and len(rows) == len(set(rows)), at
            assert not any(each.name.startswith(".") for each in tried.iterdir())
            assert parts_of(tried).leftover == ()
            if turn == 2:
                assert not any(b"gone" in each.read_bytes() for each in tried.iterdir())
            if dying.left > 0:
                break
            at += 1
        assert items(whole, ann) == [1, 2, 3, 61, 70][: 3 + turn]
        gone = [part for part in parts_of(whole).live if part.partition == source.partition("gone")]
        assert len(items(whole, "gone")) == (12, 15, 0)[turn] and len(gone) >= (2, 4, 3)[turn]
        base = whole
    assert died > 20


def raw_rows(folder: Path) -> list[tuple[object, ...]]:
    """Where each row of the live files comes from, and its place in its record, sorted."""
    found: list[tuple[object, ...]] = []
    for part in parts_of(folder).live:
        columns = pq.read_table(folder / part.name).select(["offset", "user", "position", "item"]).to_pydict()
        found += [(part.kind, part.partition, *row) for row in zip(*columns.values(), strict=True)]
    return sorted(found, key=repr)


def copy(origin: Path, target: Path) -> None:
    if origin.exists():
        target.mkdir()
        for each in origin.iterdir():
            (target / each.name).write_bytes(each.read_bytes())


def test_a_process_that_is_killed_again_and_again_collects_each_record_once(source: Source, folder: Path) -> None:
    users = [f"user-{number}" for number in range(20)]
    for user in users:
        source.events(user, 100)
    for turn in range(2):
        before = offsets_read(folder)
        with process(source.kafka, folder, "--follow", "--file-rows", "50", "--file-s", "0.1") as started:
            until(lambda before=before: offsets_read(folder) > before, "files are written")
            started.send_signal(signal.SIGKILL)
            started.wait()
        for user in users:
            source.events(user, 10, first=100 + 10 * turn)
    command(source.kafka, folder)
    rows = offsets(folder, Kind.BEHAVIOURS)
    assert len(rows) == len(set(rows)) == 20 * 120
    read = read_interactions(folder)
    assert all([row[0] for row in rows_of(read, user)] == list(range(120)) for user in users)


def offsets_read(folder: Path) -> int:
    """By the names of the files."""
    return sum(part.last + 1 - part.first for part in parts_of(folder).live) if folder.exists() else 0


def test_sigterm_ends_a_follower_with_what_was_read_written(source: Source, folder: Path) -> None:
    """A file ends after five rows, or after ten minutes."""
    source.events("ann", 7)
    with process(source.kafka, folder, "--follow", "--file-rows", "5", "--file-s", "600") as started:
        until(lambda: offsets_read(folder) >= 5, "a file is written")
        started.send_signal(signal.SIGTERM)
        printed, errors = started.communicate(timeout=60)
    assert started.returncode == 0, errors
    found = items(folder, "ann")
    assert found == list(range(len(found))) and len(found) >= 5
    assert printed.startswith(f"Collected {len(found)} behaviours of {len(found)} records")


def test_what_was_read_is_written_when_a_follower_is_stopped(
    source: Source, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source.events("ann", 7)
    received = received_offsets(monkeypatch)
    found = collect(source.kafka, folder, follow=True, is_stopping=lambda: len(received) == 7)
    assert found.behaviours == 7 and items(folder, "ann") == list(range(7))


def received_offsets(monkeypatch: pytest.MonkeyPatch) -> list[int | None]:
    """Grows by each record that a collector has received."""
    receive, received = Collector._receive, []

    def noted(self: Collector, consumer: Consumer, message: Message) -> None:
        receive(self, consumer, message)
        if message.error() is None:
            received.append(message.offset())

    monkeypatch.setattr(Collector, "_receive", noted)
    return received


def items_or_none(folder: Path, user_id: str) -> list[int] | None:
    """The folder changes while it is read."""
    try:
        return items(folder, user_id)
    except RelayError:
        return None


# Deletions.


def test_a_deleted_user_is_in_no_file_and_others_stay(source: Source, folder: Path) -> None:
    source.send(history("gone", length=30), history("stays", length=3))
    source.events("gone", 10, first=100)
    collect(source.kafka, folder)
    assert len(items(folder, "gone")) == 40
    written = time.time_ns() // 1_000_000
    source.tombstone("gone")
    found = collect(source.kafka, folder)
    assert (found.deleted_users, found.deleted_rows) == (1, 40)
    assert items(folder, "gone") == [] and items(folder, "stays") == [1, 2, 3]
    # Older records that come later do not bring the user back, newer ones do.
    source.event("gone", (7, 1, 7), position=0, written_at_ms=written - 1000)
    assert collect(source.kafka, folder).deleted_rows == 1
    assert not any(b"gone" in each.read_bytes() for each in folder.iterdir())
    source.event("gone", (8, 1, 8), position=0)
    collect(source.kafka, folder)
    assert items(folder, "gone") == [8]


def test_behaviours_after_a_deletion_that_are_read_in_the_same_run_stay(source: Source, folder: Path) -> None:
    source.send(history("ann", length=3))
    source.act("ann", 10, position=3)
    source.tombstone("ann")
    time.sleep(0.01)  # Kafka's timestamps are whole milliseconds.
    source.act("ann", 20, position=0)
    source.send(History("ann", 9, np.empty(0, "<i8"), Behaviours.of([(5, 1, 5)])))
    found = collect(source.kafka, folder)
    assert items(folder, "ann") == [5, 20] and (found.deleted_users, found.deleted_rows) == (1, 4)


def test_a_tombstone_that_a_worker_repeats_spares_what_came_since(source: Source, folder: Path) -> None:
    source.send(history("ann", length=3))
    source.tombstone("ann")
    first_at_ms = time.time_ns() // 1_000_000
    time.sleep(0.01)
    source.send(History("ann", 9, np.empty(0, "<i8"), Behaviours.of([(5, 1, 5)])))
    source.act("ann", 20, position=1)
    collect(source.kafka, folder)
    topic_id = folder_module.read_manifest(folder).origin.history_id
    source.tombstone("ann", repeated=RepeatedTombstone(2, first_at_ms, topic_id))
    collect(source.kafka, folder)
    assert items(folder, "ann") == [5, 20]


def test_a_late_snapshot_of_a_worker_does_not_bring_a_deleted_user_back(
    source: Source, folder: Path, store: HistoryStore
) -> None:
    source.send(history("ann", length=3))
    with following(source.kafka, store) as follower:
        until(lambda: follower.caught_up(source.partition("ann")) and store.get("ann"), "stored")
        late = store.saved("ann", 0)
    assert late is not None
    source.tombstone("ann")
    source.send(late)
    found = collect(source.kafka, folder)
    assert found.repeats == 1 and items(folder, "ann") == []


def test_the_hashes_of_deletions_expire(source: Source, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for user in ("ann", "bob"):
        source.tombstone(user)
        collect(source.kafka, folder)
        monkeypatch.setattr("relaygr.training.collect.deletions.KEPT_MS", -1)
    assert json.loads((folder / DELETIONS).read_text()) == {}


def test_deletions_in_several_partitions_are_noted_in_one_go(
    source: Source, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written: list[bytes] = []
    monkeypatch.setattr(deletions_module, "write_whole", lambda _, content: written.append(content))
    users = [f"user-{number}" for number in range(8)]
    for user in users:
        source.tombstone(user)
    assert len({source.partition(user) for user in users}) > 1
    assert collect(source.kafka, folder).deleted_users == 8
    assert len(written) == 1 and len(json.loads(written[0])) == 8


def test_a_folder_that_may_have_missed_tombstones_is_refused(source: Source, folder: Path) -> None:
    source.send(history("ann", length=3))
    collect(source.kafka, folder)
    manifest = folder_module.read_manifest(folder)
    assert 0 <= time.time() * 1000 - manifest.current_at_ms < 60_000
    folder_module.write_manifest(folder, replace(manifest, current_at_ms=manifest.current_at_ms - 9 * DAY_MS))
    with pytest.raises(RelayError, match="read to the end 9 days ago, and Kafka keeps tombstones for 9"):
        collect(source.kafka, folder)


def test_a_folder_is_current_to_the_last_time_that_all_tombstones_were_written(
    source: Source, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A follower asks again and again; a run that is stopped before the end changes nothing."""
    monkeypatch.setattr(collector_module, "CURRENT_INTERVAL_MS", 1)
    collect(source.kafka, folder)
    first_ms = folder_module.read_manifest(folder).current_at_ms
    source.tombstone("ann")
    collect(source.kafka, folder, is_stopping=lambda: True)
    assert folder_module.read_manifest(folder).current_at_ms == first_ms
    until_s = time.monotonic() + 20
    collect(
        source.kafka,
        folder,
        file_s=0.01,
        follow=True,
        is_stopping=lambda: has_become_current(folder, first_ms) or time.monotonic() > until_s,
    )
    assert has_become_current(folder, first_ms) and json.loads((folder / DELETIONS).read_text())


def has_become_current(folder: Path, since_ms: int) -> bool:
    return folder_module.read_manifest(folder).current_at_ms > since_ms


# Snapshots of workers.


def saved(source: Source, store: HistoryStore, user_id: str, length: int, fold_ms: int = 0) -> History:
    """The snapshot of a history with so many behaviours, as its owner writes it. Records from before `fold_ms` are in
    its base.
    """
    with following(source.kafka, store):
        until(lambda: (kept := store.get(user_id)) and len(kept.history.behaviours) == length, "stored")
        found = store.saved(user_id, fold_ms)
    assert found is not None
    return found


def test_snapshots_of_workers_add_nothing_to_what_was_read(source: Source, folder: Path, store: HistoryStore) -> None:
    source.send(history("ann", length=3))
    source.act("ann", 10, 11, position=3)
    source.send(saved(source, store, "ann", 5))
    collect(source.kafka, folder)
    assert items(folder, "ann") == [1, 2, 3, 10, 11]
    source.act("ann", 12, position=5)
    source.send(saved(source, store, "ann", 6))
    found = collect(source.kafka, folder)
    assert found.repeats == 1 and found.behaviours == 1
    assert items(folder, "ann") == [1, 2, 3, 10, 11, 12]


@pytest.mark.kafka
def test_snapshots_of_workers_carry_the_past_that_the_topics_have_lost(
    kafka: KafkaSettings, folder: Path, store: HistoryStore
) -> None:
    """The pipeline's snapshot was compacted away, and the first behaviours have left their topic."""
    source = Source(kafka)
    source.send(history("ann", length=3))
    source.act("ann", 10, position=3)
    source.act("ann", 11, position=4)
    source.send(saved(source, store, "ann", 5))
    place = source.partition("ann")
    delete_records(kafka, (Topic.HISTORY, place, 1), (Topic.BEHAVIOURS, place, 1))
    collect(kafka, folder)
    assert items(folder, "ann") == [1, 2, 3, 10, 11]
    assert offsets(folder, Kind.BEHAVIOURS) == [(place, 1)]


@pytest.mark.kafka
def test_behaviours_that_kafka_deleted_unread_are_said_and_come_from_snapshots(
    kafka: KafkaSettings, folder: Path, store: HistoryStore
) -> None:
    source = Source(kafka)
    source.act("ann", 10, position=0)
    collect(kafka, folder)
    source.act("ann", 11, position=1)
    source.act("ann", 12, position=2)
    source.send(saved(source, store, "ann", 3))
    place = source.partition("ann")
    delete_records(kafka, (Topic.BEHAVIOURS, place, 2))
    source.act("ann", 13, position=3)
    printed = command(kafka, folder)
    assert f"Kafka had deleted 1 offsets of {kafka.topic(Topic.BEHAVIOURS)} before they were read" in printed
    assert items(folder, "ann") == [10, 11, 12, 13]
    assert json.loads(command(kafka, folder, "--json"))["lost"] == {}


@pytest.mark.kafka
def test_a_snapshot_that_kafka_dropped_unread_is_made_up_for_by_the_one_that_replaced_it(
    kafka: KafkaSettings, folder: Path, store: HistoryStore
) -> None:
    source = Source(kafka)
    collect(kafka, folder)
    source.send(history("ann", length=3))
    source.send(saved(source, store, "ann", 3))
    delete_records(kafka, (Topic.HISTORY, source.partition("ann"), 1))
    assert collect(kafka, folder).repeats == 0
    assert items(folder, "ann") == [1, 2, 3]


def lose(monkeypatch: pytest.MonkeyPatch, source: Source, user_id: str, before: int) -> None:
    """The embedded cluster deletes no records: the log of the user's behaviours begins at this offset from now on."""
    real, place = collector_module._offsets, source.partition(user_id)

    def later(consumer: Consumer, topic: str, partitions: Any, at: int) -> dict[int, int]:
        found = real(consumer, topic, partitions, at)
        if topic == source.kafka.topic(Topic.BEHAVIOURS) and at == OFFSET_BEGINNING and place in found:
            found[place] = before
        return found

    monkeypatch.setattr(collector_module, "_offsets", later)


def test_behaviours_that_are_lost_before_the_folder_has_a_file_are_said_once_and_come_from_a_snapshot(
    source: Source, folder: Path, store: HistoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    collect(source.kafka, folder)
    source.act("ann", 10, 11, position=0)
    source.act("ann", 12, position=2)
    source.send(saved(source, store, "ann", 3))
    lose(monkeypatch, source, "ann", 2)
    with capture_logs() as lines:
        assert collect(source.kafka, folder).lost == {source.kafka.topic(Topic.BEHAVIOURS): 2}
    assert [(line["first"], line["last"]) for line in lines if "before they were read" in line["event"]] == [(0, 1)]
    assert items(folder, "ann") == [10, 11, 12]
    assert collect(source.kafka, folder).lost == {}
    source.act("ann", 13, position=3)
    assert collect(source.kafka, folder).lost == {} and items(folder, "ann") == [10, 11, 12, 13]


def test_a_snapshot_that_was_read_before_its_behaviours_were_lost_is_read_again(
    source: Source, folder: Path, store: HistoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first run ends between histories and behaviours."""
    source.send(history("ann", length=2))
    source.act("ann", 10, position=2)
    source.act("ann", 11, position=3)
    source.send(saved(source, store, "ann", 4))
    read, ended = Collector._read, []

    def read_histories(self: Collector, consumer: Consumer, kind: Kind) -> None:
        ended.append(kind)
        if kind is Kind.HISTORIES:
            read(self, consumer, kind)

    with monkeypatch.context() as patch:
        patch.setattr(Collector, "_read", read_histories)
        collect(source.kafka, folder, is_stopping=lambda: Kind.BEHAVIOURS in ended)
    assert items(folder, "ann") == [1, 2]
    source.act("ann", 12, position=4)
    lose(monkeypatch, source, "ann", 1)
    found = collect(source.kafka, folder)
    assert found.lost == {source.kafka.topic(Topic.BEHAVIOURS): 1} and found.records == 2
    assert items(folder, "ann") == [1, 2, 10, 11, 12]
    assert [part.kind for part in parts_of(folder).live] == [Kind.HISTORIES, Kind.BEHAVIOURS]


def test_a_time_that_a_worker_raised_doubles_nothing(
    source: Source, folder: Path, store: HistoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second behaviour is dated before the first, and the third is lost. The snapshot has the times of old ones as
    they were raised, and not as they were sent.
    """
    at_ms = time.time_ns() // 1_000_000 - 10 * DAY_MS
    source.event("ann", (10, 1, at_ms), position=0, written_at_ms=at_ms)
    source.event("ann", (11, 1, at_ms - 100), position=1, written_at_ms=at_ms)
    collect(source.kafka, folder)
    source.event("ann", (12, 1, at_ms + 100), position=2)
    source.send(saved(source, store, "ann", 3, at_ms + DAY_MS))
    lose(monkeypatch, source, "ann", 3)
    collect(source.kafka, folder)
    assert rows_of(read_interactions(folder), "ann") == [(11, 1, at_ms - 100), (10, 1, at_ms), (12, 1, at_ms + 100)]


def test_a_follower_takes_the_snapshot_that_replaced_one_that_was_compacted_away(
    source: Source, folder: Path, store: HistoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The follower had read the log to its end, and the embedded cluster compacts nothing: one is dropped here."""
    collect(source.kafka, folder)
    source.send(history("ann", length=3))
    late = saved(source, store, "ann", 3)
    begin, receive = Collector._begin, Collector._receive

    def begin_at_the_end(self: Collector, consumer: Consumer) -> None:
        begin(self, consumer)
        self._unread.clear()
        source.send(late)

    def receive_compacted(self: Collector, consumer: Consumer, message: Message) -> None:
        if message.error() is not None or message.offset() != 0:
            receive(self, consumer, message)

    monkeypatch.setattr(Collector, "_begin", begin_at_the_end)
    monkeypatch.setattr(Collector, "_receive", receive_compacted)
    received = received_offsets(monkeypatch)
    assert collect(source.kafka, folder, follow=True, is_stopping=lambda: 1 in received).repeats == 0
    assert items(folder, "ann") == [1, 2, 3]


def test_the_next_run_takes_the_snapshot_that_replaced_one_that_was_compacted_away(
    source: Source, folder: Path, store: HistoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first run ends between the two: the log grew while it was read."""
    collect(source.kafka, folder)
    source.send(history("ann", length=3))
    late = saved(source, store, "ann", 3)
    source.send_raw(b"bob", encode(history("bob")), partition=source.partition("ann"))
    begin, receive = Collector._begin, Collector._receive

    def begin_before(self: Collector, consumer: Consumer) -> None:
        begin(self, consumer)
        source.send(late)

    def receive_second(self: Collector, consumer: Consumer, message: Message) -> None:
        if message.error() is None and message.offset() == 1:
            receive(self, consumer, message)

    with monkeypatch.context() as patch:
        patch.setattr(Collector, "_begin", begin_before)
        patch.setattr(Collector, "_receive", receive_second)
        assert collect(source.kafka, folder).records == 1
    assert collect(source.kafka, folder).repeats == 0
    assert items(folder, "ann") == [1, 2, 3]


def delete_records(kafka: KafkaSettings, *places: tuple[Topic, int, int]) -> None:
    admin = make_admin(kafka, "test-admin")
    # Kafka deletes no records of a topic that is only compacted.
    policy = ConfigEntry("cleanup.policy", "compact,delete", incremental_operation=AlterConfigOpType.SET)
    resource = ConfigResource(ConfigResource.Type.TOPIC, kafka.topic(Topic.HISTORY), incremental_configs=[policy])
    if any(topic is Topic.HISTORY for topic, _, _ in places):
        for changed in admin.incremental_alter_configs([resource]).values():
            changed.result(10)
    wanted = [TopicPartition(kafka.topic(topic), partition, before) for topic, partition, before in places]
    for deleted in admin.delete_records(wanted).values():
        deleted.result(10)


# Transactions, other logs, other folders.


@pytest.mark.kafka
def test_what_was_aborted_is_not_collected(kafka: KafkaSettings, folder: Path) -> None:
    producer = Producer(
        {"bootstrap.servers": kafka.bootstrap, "transactional.id": uuid.uuid4().hex, "partitioner": PARTITIONER}
    )
    producer.init_transactions(30)

    def send(*behaviours: int, deletes: bool) -> None:
        producer.begin_transaction()
        for item in behaviours:
            value = encode(BehaviourEvent("ann", Behaviours.of([(item, 1, item)])))
            producer.produce(kafka.topic(Topic.BEHAVIOURS), key=b"ann", value=value)
        if deletes:
            producer.produce(kafka.topic(Topic.HISTORY), key=b"ann", value=None)

    send(1, 2, deletes=False)
    producer.commit_transaction(30)
    send(3, 4, deletes=True)
    producer.abort_transaction(30)
    found = collect(kafka, folder)
    assert found.reached_end and items(folder, "ann") == [1, 2] and found.deleted_users == 0
    send(5, deletes=False)
    producer.commit_transaction(30)
    found = collect(kafka, folder)
    assert found.reached_end and items(folder, "ann") == [1, 2, 5] and found.lost == {}
    # The last records of the log are markers. Retention may remove them and all before them.
    delete_records(kafka, (Topic.BEHAVIOURS, partition_for(b"ann", kafka.partitions), -1))
    assert collect(kafka, folder).lost == {}


def test_a_folder_of_another_log_is_refused(
    broker: LocalBroker, kafka_settings: KafkaSettings, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The topics were deleted and created again; the embedded cluster knows no ids, but its logs are shorter."""
    source = Source(kafka_settings)
    source.events("ann", 5)
    collect(kafka_settings, folder)
    broker.delete_topics(kafka_settings)
    broker.create_topics(kafka_settings)
    Source(kafka_settings).events("ann", 2)
    monkeypatch.setattr(collector_module, "identify_topics", identify_topics)
    with pytest.raises(RelayError, match=r"deleted and created again|it is another log"):
        collect(kafka_settings, folder)
    assert items(folder, "ann") == [0, 1, 2, 3, 4]


@pytest.mark.kafka
def test_a_topic_that_is_created_again_while_it_is_followed_ends_the_run(
    real_broker: LocalBroker, kafka: KafkaSettings, folder: Path
) -> None:
    Source(kafka).events("ann", 5)
    with process(kafka, folder, "--follow", "--file-s", "0.2") as started:
        until(lambda: folder.exists() and items_or_none(folder, "ann") == list(range(5)), "read")
        real_broker.delete_topics(kafka)
        real_broker.create_topics(kafka)
        _, errors = started.communicate(timeout=60)
    assert started.returncode == 1
    assert "deleted and created again" in errors or "cannot be read any more" in errors
    assert items(folder, "ann") == list(range(5))


def test_other_partitions_topics_and_files_are_refused(source: Source, folder: Path, tmp_path: Path) -> None:
    collect(source.kafka, folder)
    manifest = folder_module.read_manifest(folder)
    for changed, said in (
        ({"partitions": 2}, "of 4 partitions, which now have 2"),
        ({"behaviours_topic": "b"}, "not b"),
        ({"cluster_id": "c"}, "not c"),
    ):
        other = replace(manifest, origin=replace(manifest.origin, **changed))
        with pytest.raises(RelayError, match=said), opened(folder, other, 10):
            pass
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "cat.png").write_bytes(b"")
    with pytest.raises(RelayError, match="has other files"), opened(tmp_path / "photos", manifest, 10):
        pass
    with opened(folder, manifest, 10), pytest.raises(RelayError, match="is in use"), opened(folder, manifest, 10):
        pass
    with pytest.raises(RelayError, match="records in common"):
        folder_module.sorted_parts([Part(Kind.HISTORIES, 0, 0, 5), Part(Kind.HISTORIES, 0, 3, 9)])


def test_a_disk_without_space_ends_the_run_with_a_sentence_and_the_next_one_goes_on(
    source: Source, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source.events("ann", 5)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(runtime_files, "put_in_place", full)
        with pytest.raises(RelayError, match=r"cannot be used \(No space left on device\): free space"):
            collect(source.kafka, folder)
    with monkeypatch.context() as patch:
        patch.setattr(files_module.pq, "write_table", full)
        with pytest.raises(RelayError, match=r"No space left on device.*run the command again"):
            collect(source.kafka, folder)
    collect(source.kafka, folder)
    assert items(folder, "ann") == list(range(5))


# From the running system to a model.


def test_the_training_log_of_a_collected_folder_is_that_of_the_source_log(
    embedded_kafka: KafkaSettings, folder: Path, tmp_path: Path
) -> None:
    """Users, items, action codes, times, and whether there are ratings: all that `relaygr train ranker` takes."""
    log = write_inter(tmp_path / "log.inter", cyclic_log(users=20, length=60))
    publish(embedded_kafka, "behaviours", log)
    collect(embedded_kafka, folder, ratings=True)
    wanted, found = (usable(training_log([read_interactions(path)])) for path in (log, folder))
    assert (found.has_times, found.has_ratings) == (wanted.has_times, wanted.has_ratings) == (True, True)
    assert histories_of(found) == histories_of(wanted)


def histories_of(log: Log) -> dict[str, list[Row]]:
    rows = list(zip(log.items.tolist(), log.actions.tolist(), log.times_ms.tolist(), strict=True))
    starts = log.starts.tolist()
    return {user: rows[start:end] for user, start, end in zip(log.users, starts[:-1], starts[1:], strict=True)}
