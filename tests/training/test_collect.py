"""`relaygr train collect`: the folder is what a worker would rank with, whatever kills the process; deleted users are
nowhere in it.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from confluent_kafka import KafkaError
from typer.testing import CliRunner

from relaygr.cli.app import app
from relaygr.cluster.topic_identity import TopicIdentity
from relaygr.devbroker import LocalBroker
from relaygr.devbroker.local import free_ports
from relaygr.ingest.gather import Interactions
from relaygr.ingest.reading import read_interactions
from relaygr.kafka.settings import KafkaSettings
from relaygr.runtime.errors import RelayError
from relaygr.runtime.stop_signals import SIGNALS
from relaygr.schemas.codec import encode
from relaygr.schemas.messages import BehaviourEvent, Behaviours
from relaygr.schemas.topics import Topic
from relaygr.training import collect as module
from relaygr.training.collect import MANIFEST, Collected
from relaygr.training.collect import collect as collect_histories
from relaygr.training.logs import Log, usable
from relaygr.training_progress import training_log
from tests.training.made_logs import cyclic_log, write_inter
from tests.waiting import until
from tests.workers.test_history_follower import MIB, Publisher, history

pytestmark = pytest.mark.slow

Row = tuple[int, int, int]
AT_MS = 1_700_000_000_000


@pytest.fixture(scope="module")
def broker(any_broker: LocalBroker) -> LocalBroker:
    """What is collected does not depend on the broker."""
    return any_broker


class Source(Publisher):
    """Writes to both topics."""

    def events(self, user_id: str, count: int, first: int = 0) -> None:
        """Records of one behaviour each, whose item is its position, in one flush."""
        errors: list[KafkaError | None] = []
        for position in range(first, first + count):
            event = BehaviourEvent(user_id, Behaviours.of([(position, 1, AT_MS + position)]), position)
            self._producer.produce(
                self.kafka.topic(Topic.BEHAVIOURS),
                key=user_id.encode(),
                value=encode(event),
                on_delivery=lambda error, _: errors.append(error),
            )
        assert self._producer.flush(60) == 0
        assert errors == [None] * count, "a flush does not tell of a message that was given up"


@pytest.fixture
def source(kafka: KafkaSettings) -> Source:
    return Source(kafka)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "collected"


@pytest.fixture
def kafka(broker: LocalBroker) -> Iterator[KafkaSettings]:
    with topics_of(broker) as settings:
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
    ratings: bool | None = None,
    max_bytes: int = 16 * MIB,
    follow_s: float | None = None,
    is_stopping: Callable[[], bool] = lambda: False,
) -> Collected:
    return collect_histories(
        kafka,
        folder,
        has_ratings=ratings,
        max_bytes=max_bytes,
        max_ahead_ms=24 * 3600 * 1000,
        follow_s=follow_s,
        is_stopping=is_stopping,
    )


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


def same(one: Interactions, other: Interactions) -> bool:
    return sorted(one.users) == sorted(other.users) and all(rows_of(one, u) == rows_of(other, u) for u in one.users)


def publish(kafka: KafkaSettings, what: str, log: Path, *options: str) -> None:
    called = ["publish", what, "--interactions", str(log), *options, *words(kafka, Path())[3:]]
    done = CliRunner().invoke(app, called, catch_exceptions=False)
    assert done.exit_code == 0, done.output


def test_what_is_collected_is_the_log_that_was_published(kafka: KafkaSettings, folder: Path, tmp_path: Path) -> None:
    """Twice: the folder has each behaviour once."""
    log = write_inter(tmp_path / "log.inter", cyclic_log(users=20, length=60))
    publish(kafka, "behaviours", log)
    assert "ratings" not in command(kafka, folder), "codes first"
    printed, wanted = command(kafka, folder, "--ratings"), read_interactions(log)
    assert printed == f"{folder} has {len(wanted.behaviours):,} behaviours of 20 users."
    found = read_interactions(folder)
    assert same(wanted, found)
    assert found.report.actions == wanted.report.actions
    assert found.report.layout.has_ratings and found.report.layout.has_times
    publish(kafka, "behaviours", log)
    assert command(kafka, folder) == command(kafka, folder, "--ratings") == printed, "a folder of ratings stays one"
    publish(kafka, "history", folder, "--dry-run")


def test_a_second_log_whose_positions_begin_again_is_appended(
    kafka: KafkaSettings, folder: Path, tmp_path: Path
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
    publish(kafka, "history", parts[0])
    collect(kafka, folder, ratings=True)
    publish(kafka, "behaviours", parts[1])
    publish(kafka, "behaviours", parts[1])
    collect(kafka, folder)
    assert same(read_interactions(write_inter(tmp_path / "whole.inter", whole)), read_interactions(folder))


def test_a_run_goes_on_and_writes_only_the_files_that_changed(source: Source, folder: Path) -> None:
    assert collect(source.kafka, folder) == Collected(reached_end=True, written_files=4)
    source.events("ann", 3)
    assert collect(source.kafka, folder) == Collected(behaviours=3, users=1, written_files=1, reached_end=True)
    source.events("ann", 2, first=3)
    assert collect(source.kafka, folder) == Collected(behaviours=5, users=1, written_files=1, reached_end=True)
    assert collect(source.kafka, folder).written_files == 0
    assert items(folder, "ann") == list(range(5))
    (folder / f"histories-{source.partition('ann'):05}.parquet").unlink()
    assert collect(source.kafka, folder).behaviours == 5
    assert items(folder, "ann") == list(range(5))


def test_many_users_are_written_in_groups_of_rows(
    source: Source, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of one partition at a time, and with rows that wait for a part of a history only."""
    monkeypatch.setattr(module, "_FILES_AT_ONCE", 1)
    monkeypatch.setattr(module, "_ROWS_WAITING", 1)
    users = [f"user-{number}" for number in range(60)]
    source.send(*(history(user, number=1 + at % 7, length=60) for at, user in enumerate(users)))
    found = collect(source.kafka, folder)
    assert (found.users, found.behaviours, found.written_files) == (60, 60 * 60, 4)
    read = read_interactions(folder)
    assert all(
        [row[0] for row in rows_of(read, user)] == list(range(1 + at % 7, 61 + at % 7)) for at, user in enumerate(users)
    )


def test_a_deleted_user_is_nowhere_in_the_folder_and_others_stay(source: Source, folder: Path) -> None:
    source.events("ann-of-the-north", 3)
    source.events("bob", 3)
    collect(source.kafka, folder)
    source.send_raw(b"ann-of-the-north", None)
    assert holds(folder, b"ann-of-the-north")
    found = collect(source.kafka, folder)
    assert (found.deleted_users, found.users, found.behaviours) == (1, 1, 3)
    assert not holds(folder, b"ann-of-the-north")
    assert items(folder, "bob") == [0, 1, 2]


def holds(folder: Path, text: bytes) -> bool:
    return any(text in each.read_bytes() for each in folder.rglob("*") if each.is_file())


def test_bad_messages_are_counted_said_and_skipped(source: Source, folder: Path) -> None:
    source.events("ann", 2)
    source.send_raw(b"ann", b"garbage", topic=source.kafka.topic(Topic.BEHAVIOURS))
    source.send_raw(b"ann", b"garbage")
    said = command(source.kafka, folder)
    assert said.startswith(f"{folder} has 2 behaviours of 1 users. Skipped 2 bad messages (2 ")
    source.events("ann", 1, first=2)
    assert json.loads(command(source.kafka, folder, "--json"))["bad"] == {}, "those are read once"
    assert items(folder, "ann") == [0, 1, 2]


def test_users_for_whom_there_is_no_room_are_said_and_come_with_more_of_it(source: Source, folder: Path) -> None:
    source.send(*(history(f"user-{number}", length=5_000) for number in range(40)))
    found = collect(source.kafka, folder, max_bytes=2 * MIB)
    assert found.refused_users and found.users + found.refused_users == 40
    assert collect(source.kafka, folder, max_bytes=64 * MIB).users == 40


def test_a_process_that_is_killed_again_and_again_collects_each_behaviour_once(source: Source, folder: Path) -> None:
    users = [f"user-{number}" for number in range(20)]
    for user in users:
        source.events(user, 100)
    for turn in range(2):
        with process(source.kafka, folder, "--follow", "--every-s", "0.1") as started:
            until(lambda: any(folder.glob("histories-*.parquet")), "files are written")
            started.send_signal(signal.SIGKILL)
            started.wait()
        for user in users:
            source.events(user, 10, first=100 + 10 * turn)
    command(source.kafka, folder)
    read = read_interactions(folder)
    assert all([row[0] for row in rows_of(read, user)] == list(range(120)) for user in users)
    assert not list(folder.glob(".*.partial"))


def test_a_follower_writes_what_came_since_and_all_of_it_at_its_end(source: Source, folder: Path) -> None:
    source.events("ann", 7)
    with process(source.kafka, folder, "--follow", "--every-s", "0.2") as started:
        until(lambda: collected(folder, "ann") == 7, "the first behaviours")
        source.events("ann", 2, first=7)
        until(lambda: collected(folder, "ann") == 9, "the next ones")
        started.send_signal(signal.SIGTERM)
        printed, errors = started.communicate(timeout=60)
    assert started.returncode == 0, errors
    assert printed.strip() == f"{folder} has 9 behaviours of 1 users."


def collected(folder: Path, user_id: str) -> int:
    return len(items(folder, user_id)) if any(folder.glob("histories-*.parquet")) else 0


def test_a_copy_of_other_topics_is_refused(broker: LocalBroker, source: Source, folder: Path, tmp_path: Path) -> None:
    source.events("ann", 5)
    collect(source.kafka, folder)
    for changed in ({"partitions": 2}, {"topic_prefix": source.kafka.topic_prefix + "-other"}):
        other = source.kafka.model_copy(update=changed)
        if "topic_prefix" in changed:
            broker.create_topics(other)
        with pytest.raises(RelayError, match=r"is a copy of other topics .* give another folder"):
            collect(other, folder)
    broker.delete_topics(other)
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "cat.png").write_bytes(b"")
    with pytest.raises(RelayError, match="has other files"):
        collect(source.kafka, tmp_path / "photos")
    for broken in ("{", "[]", '{"layout": 2}'):
        (folder / MANIFEST).write_text(broken)
        with pytest.raises(RelayError, match="collect into a new folder"):
            collect(source.kafka, folder)
    assert items(folder, "ann") == list(range(5))


@pytest.mark.kafka
def test_topics_that_are_created_again_end_a_follower_and_are_refused_by_the_next_run(
    real_broker: LocalBroker, folder: Path
) -> None:
    with topics_of(real_broker) as kafka:
        Source(kafka).events("ann", 5)
        with process(kafka, folder, "--follow", "--every-s", "0.2") as started:
            until(lambda: collected(folder, "ann") == 5, "read")
            real_broker.delete_topics(kafka)
            real_broker.create_topics(kafka)
            _, errors = started.communicate(timeout=90)
        assert started.returncode == 1 and "deleted and created again" in errors
        with pytest.raises(RelayError, match="is a copy of other topics"):
            collect(kafka, folder)
        assert items(folder, "ann") == list(range(5))


def test_a_folder_that_may_have_missed_deletions_is_read_anew(
    source: Source, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kafka keeps tombstones for some days. Each run that reads to the end counts as current."""
    source.events("ann", 5)
    collect(source.kafka, folder)
    monkeypatch.setattr(module, "_MAX_AGE_MS", 3_600_000)
    assert collect(source.kafka, folder).written_files == 0
    monkeypatch.setattr(module, "_MAX_AGE_MS", -1000)
    assert collect(source.kafka, folder) == Collected(behaviours=5, users=1, written_files=4, reached_end=True)
    assert items(folder, "ann") == list(range(5))


def test_a_run_that_ends_before_the_end_writes_no_part_and_says_so(source: Source, folder: Path) -> None:
    source.events("ann", 5)
    collect(source.kafka, folder)
    source.events("ann", 5, first=5)
    assert not collect(source.kafka, folder, is_stopping=lambda: True).reached_end
    assert items(folder, "ann") == list(range(5))
    assert collect(source.kafka, folder).behaviours == 10


def test_a_file_of_another_program_is_written_anew(source: Source, folder: Path) -> None:
    source.events("ann", 5)
    collect(source.kafka, folder)
    path = folder / f"histories-{source.partition('ann'):05}.parquet"
    path.write_bytes(path.read_bytes()[:-20])
    assert collect(source.kafka, folder) == Collected(behaviours=5, users=1, written_files=1, reached_end=True)
    assert items(folder, "ann") == list(range(5))


def test_a_run_whose_broker_is_gone_ends(source: Source, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_SILENT_S", 1.0)
    monkeypatch.setattr(module, "_identified", lambda _: TopicIdentity("c", {"history": "1", "behaviours": "2"}))
    (port,) = free_ports(1)
    with pytest.raises(RelayError, match="has sent nothing for 1 s"):
        collect(source.kafka.model_copy(update={"bootstrap": f"127.0.0.1:{port}"}), folder)


def test_one_process_uses_a_folder_at_a_time(source: Source, folder: Path) -> None:
    def is_stopping() -> bool:
        with pytest.raises(RelayError, match="is in use"):
            collect(source.kafka, folder)
        return True

    collect(source.kafka, folder, is_stopping=is_stopping)


def test_a_disk_without_space_ends_the_run_with_a_sentence_and_the_next_one_goes_on(
    source: Source, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source.events("ann", 5)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    for place in (module, "write_whole"), (module, "put_in_place"):
        with monkeypatch.context() as patch:
            patch.setattr(*place, full)
            with pytest.raises(RelayError, match=r"No space left on device.*free space"):
                collect(source.kafka, folder)
    collect(source.kafka, folder)
    assert items(folder, "ann") == list(range(5))
    assert not list(folder.glob(".*.partial"))


def test_the_training_log_of_a_collected_folder_is_that_of_the_source_log(
    kafka: KafkaSettings, folder: Path, tmp_path: Path
) -> None:
    """Users, items, action codes, times, and whether there are ratings: all that `relaygr train ranker` takes."""
    log = write_inter(tmp_path / "log.inter", cyclic_log(users=20, length=60))
    publish(kafka, "behaviours", log)
    collect(kafka, folder, ratings=True)
    wanted, found = (usable(training_log([read_interactions(path)])) for path in (log, folder))
    assert (found.has_times, found.has_ratings) == (wanted.has_times, wanted.has_ratings) == (True, True)
    assert histories_of(found) == histories_of(wanted)


def histories_of(log: Log) -> dict[str, list[Row]]:
    rows = list(zip(log.items.tolist(), log.actions.tolist(), log.times_ms.tolist(), strict=True))
    starts = log.starts.tolist()
    return {user: rows[start:end] for user, start, end in zip(log.users, starts[:-1], starts[1:], strict=True)}
