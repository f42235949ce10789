"""Copies the histories of the running system into a folder of Parquet files, one for each partition.

    FOLDER/histories-00007.parquet   the behaviours of the users of partition 7, each user's in order
    FOLDER/collected.json            the topics that the folder is a copy of, and whether its action codes are ratings
    FOLDER/.store                    a history store, as a worker has one

The store follows the topics with the code of a worker (`relaygr.worker.history.follower`). So the files hold what a
worker would rank with: each behaviour once, corrected by later snapshots, and nothing of a deleted user. A file is
written anew, as a whole, when its partition was read to the end and has other records than the file's metadata say. A
run may end anywhere: the next one goes on in the store, and writes the files that differ from it.
"""

from __future__ import annotations

import json
import os
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any, Final

import lmdb
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import structlog
from confluent_kafka import KafkaException, Message

from relaygr.cluster.topic_identity import TopicIdentity, TopicIdentityWatch, identify_topics
from relaygr.kafka.dead_letters import OnDone
from relaygr.kafka.session import KafkaSession
from relaygr.kafka.settings import KafkaSettings
from relaygr.runtime.clock import SystemClock
from relaygr.runtime.errors import RelayError
from relaygr.runtime.files import (
    has_files,
    locked_folder,
    partial_of,
    put_in_place,
    remove_partials,
    removed_on_failure,
    write_whole,
)
from relaygr.schemas.messages import Behaviours
from relaygr.schemas.topics import Topic
from relaygr.worker.history.apply import UNREAD
from relaygr.worker.history.current import DELETED_KEPT_MS
from relaygr.worker.history.follower import HistoryFollower
from relaygr.worker.history.store import HistoryStore

_log = structlog.get_logger(__name__)

CLIENT_ID: Final = "relaygr-collect"
MANIFEST: Final = "collected.json"
STORE: Final = ".store"
LAYOUT: Final = 3
_CONTENT: Final = b"relaygr.content"
"""The key in a file's metadata of its `_Content`."""
_ROWS_WAITING: Final = 4_000_000
"""Rows of all files that are being written, which wait for their row groups."""
_FILES_AT_ONCE: Final = 256
_WAIT_S: Final = 0.1
_ANSWER_S: Final = 10.0
_SILENT_S: Final = 120.0
"""A run that does not follow ends if it reads nothing for so long."""
_MAX_AGE_MS: Final = DELETED_KEPT_MS - 24 * 3600 * 1000
"""A folder that was not read for so long is read anew: it may have missed tombstones, which Kafka drops a day later."""
_STOP_S: Final = 600.0
"""The store must not be closed before its follower has ended."""


@dataclass(slots=True)
class Collected:
    """What a run did, and what the folder holds after it."""

    behaviours: int = 0
    users: int = 0
    incomplete_users: int = 0
    """Users of whose histories behaviours are missing, which Kafka deleted before they were read."""
    refused_users: int = 0
    """Users for whom the store had no room."""
    written_files: int = 0
    deleted_users: int = 0
    """Tombstones that were read."""
    bad: Counter[str] = field(default_factory=Counter)
    """Bad messages by reason."""
    reached_end: bool = False
    """Every partition was read to an end of its logs."""


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a run has come."""

    users: int
    read_partitions: int
    """Partitions that were read to an end of their logs, of `partitions`."""
    partitions: int


class _BadMessages:
    """Counts bad messages in the place of writing dead letters: the workers write those."""

    def __init__(self, counts: Counter[str]) -> None:
        self._counts = counts

    def write(self, message: Message, reason: str, detail: str, on_done: OnDone | None = None) -> None:
        self._counts[reason] += 1
        if self._counts[reason] == 1:
            place = {"topic": message.topic(), "partition": message.partition(), "offset": message.offset()}
            _log.warning("a bad message was skipped; more of this reason are counted", cause=detail, **place)
        if on_done is not None:
            on_done(True)

    def poll(self, timeout_s: float = 0.0) -> int:  # noqa: ARG002
        return 0

    def flush(self, timeout_s: float) -> int:  # noqa: ARG002
        return 0


def collect(
    kafka: KafkaSettings,
    folder: Path,
    *,
    has_ratings: bool | None,
    max_bytes: int,
    max_ahead_ms: int,
    follow_s: float | None,
    is_stopping: Callable[[], bool],
    on_progress: Callable[[Progress], object] = lambda _: None,
) -> Collected:
    """Reads to the ends of the logs and writes the files.

    `has_ratings`: the action codes are ratings, twice the stars; None: as before. `max_bytes`: of the store.
    `max_ahead_ms`: see `HistoryStore.open`. `follow_s`: go on until it shall stop, and write the files so often.

    Raises RelayError if the folder is of other topics, in use, full or not to be written, or Kafka does not answer.
    """
    identity = _identified(kafka)
    with _opened(folder) as path:
        manifest = _agreed(path, identity, kafka.partitions, has_ratings)
        store = HistoryStore.open(path / STORE, max_bytes, max_ahead_ms=max_ahead_ms)
        try:
            return _Run(kafka, manifest, store, identity, on_progress).run(follow_s, is_stopping)
        except (OSError, pa.ArrowException, lmdb.Error) as error:
            raise RelayError(
                f"{folder} cannot be written ({error}): free space, or repair it, and run the command again. It goes "
                "on where it was."
            ) from error
        finally:
            store.close()


class _Run:
    def __init__(
        self,
        kafka: KafkaSettings,
        manifest: _Manifest,
        store: HistoryStore,
        identity: TopicIdentity,
        on_progress: Callable[[Progress], object],
    ) -> None:
        self._kafka = kafka
        self._manifest = manifest
        self._store = store
        self._identity = identity
        self._on_progress = on_progress
        self._partitions = frozenset(range(kafka.partitions))
        self._found = Collected()
        self._renewed: frozenset[str] = frozenset()
        self._looked_s = self._progress_s = time.monotonic()
        self._read_offsets = -1
        """The offsets that were read at `_looked_s`, summed up."""

    def run(self, follow_s: float | None, is_stopping: Callable[[], bool]) -> Collected:
        began_ms = SystemClock().wall_us() // 1000
        session = KafkaSession(self._kafka, CLIENT_ID)
        follower = HistoryFollower(
            session,
            self._store,
            _BadMessages(self._found.bad),
            CLIENT_ID,
            on_changed=lambda _: None,
            on_deleted=self._note_deleted,
            on_missed=self._note_read_anew,
            max_age_ms=_MAX_AGE_MS,
        )
        watch = TopicIdentityWatch(session, self._identity, f"{CLIENT_ID}-ids", self._note_renewed)
        # The store may have been emptied by a process that died before it noted that.
        self._manifest.note_read_anew(
            each for each in self._partitions if (content := self._manifest.content(each)) and self._is_behind(content)
        )
        watch.start()
        follower.follow(self._partitions)
        follower.start()
        try:
            self._read(follower, follow_s, is_stopping)
            caught_up = {each for each in self._partitions if follower.caught_up(each)}
        finally:
            watch.stop()
            follower.stop(_STOP_S)
        if self._renewed:
            # What was received last may be of the new log.
            raise RelayError(
                f"{', '.join(sorted(self._renewed))} was deleted and created again: collect into another folder."
            )
        self._store.mark_current(caught_up, began_ms)
        self._write(caught_up)
        while self._store.removed_at_ms is not None and not self._store.compact():
            pass  # No byte of a deleted user stays in the store.
        return self._found

    def _read(self, follower: HistoryFollower, follow_s: float | None, is_stopping: Callable[[], bool]) -> None:
        write_at_s = 0.0
        while not self._renewed:
            loading, now_s = len(follower.loading), time.monotonic()
            self._found.reached_end = not loading
            self._on_progress(Progress(self._store.user_count, len(self._partitions) - loading, len(self._partitions)))
            if follower.fault:
                raise RelayError(f"{follower.fault}. The same command goes on where it was.")
            if is_stopping() or (follow_s is None and not loading):
                return
            if follow_s is not None and not loading and now_s >= write_at_s:
                self._write(self._partitions)
                write_at_s = time.monotonic() + follow_s
            if follow_s is None:
                self._require_progress(now_s)
            time.sleep(_WAIT_S)

    def _require_progress(self, now_s: float) -> None:
        """Raises RelayError if nothing was read for long. Looks each second, since it asks the store."""
        if now_s - self._looked_s < 1:
            return
        self._looked_s, before = now_s, self._read_offsets
        self._read_offsets = sum(sum(self._read_to(each)) for each in self._partitions)
        if self._read_offsets != before:
            self._progress_s = now_s
        elif now_s - self._progress_s > _SILENT_S:
            raise RelayError(
                f"Kafka at {self._kafka.bootstrap} has sent nothing for {_SILENT_S:.0f} s. The same command goes "
                "on where it was."
            )

    def _note_deleted(self, _user_id: str) -> None:
        self._found.deleted_users += 1

    def _note_renewed(self, topics: frozenset[str]) -> None:
        self._renewed = topics

    def _note_read_anew(self, partitions: frozenset[int]) -> None:
        """The follower has emptied these partitions and reads their logs, which may be others, from the beginning."""
        ids = _identified(self._kafka).topic_ids
        self._renewed = frozenset(name for name, known in self._identity.topic_ids.items() if ids[name] != known)
        if not self._renewed:
            self._manifest.note_read_anew(partitions)

    def _is_behind(self, content: _Content) -> bool:
        next_offset, next_event = self._read_to(content.partition)
        return next_offset < content.next_offset or next_event < content.next_event

    def _read_to(self, partition: int) -> tuple[int, int]:
        state = self._store.state(partition) or UNREAD
        return state.next_offset, state.next_event

    def _write(self, partitions: Iterable[int]) -> None:
        """Writes the files of those of the partitions that have other records than their files."""
        manifest = self._manifest
        wanted = {
            each: _Content(each, manifest.read_anew.get(each, 0), manifest.has_ratings, *self._read_to(each))
            for each in sorted(partitions)
        }
        stale = iter([each for each in wanted.values() if each != manifest.content(each.partition)])
        while group := list(islice(stale, _FILES_AT_ONCE)):
            with ExitStack() as stack:
                group_rows = max(1024, _ROWS_WAITING // len(group))
                files = {
                    each.partition: stack.enter_context(_File(manifest.path(each.partition), each, group_rows))
                    for each in group
                }
                after: bytes | None = b""
                while after is not None:
                    heads, after = self._store.heads_after(after, files)
                    for head in heads:
                        stored = self._store.get(head.user_id)
                        if stored is not None and len(stored.history.behaviours):
                            files[head.partition].add(head.user_id, stored.history.behaviours, stored.has_gap)
            self._found.written_files += len(group)
        self._count()

    def _count(self) -> None:
        """Sums up the files, those of earlier runs included."""
        files = [content for each in self._partitions if (content := self._manifest.content(each)) is not None]
        self._found.users = sum(each.users for each in files)
        self._found.incomplete_users = sum(each.incomplete_users for each in files)
        self._found.behaviours = sum(each.rows for each in files)
        self._found.refused_users = sum((self._store.state(each) or UNREAD).refused for each in self._partitions)


@dataclass(frozen=True, slots=True)
class _Content:
    """What is in a file."""

    partition: int
    read_anew: int
    """How often the partition had been read from its beginning again."""
    has_ratings: bool
    next_offset: int
    """The records before this offset of the history topic are in it, and those before `next_event` of the other."""
    next_event: int
    users: int = field(default=0, compare=False)
    incomplete_users: int = field(default=0, compare=False)
    rows: int = field(default=0, compare=False)


@dataclass(slots=True)
class _Manifest:
    """`collected.json`."""

    folder: Path
    origin: dict[str, Any]
    """The ids of the cluster and the topics."""
    has_ratings: bool
    read_anew: dict[int, int]
    """How often each partition was read from its beginning again. Offsets do not tell what a log has lost since."""

    def path(self, partition: int) -> Path:
        """Of the file of a partition."""
        return self.folder / f"histories-{partition:05}.parquet"

    def content(self, partition: int) -> _Content | None:
        """What is in the file of a partition; None: there is none, or another program wrote it."""
        try:
            found = pq.read_metadata(self.path(partition)).metadata or {}
            return _Content(**json.loads(found[_CONTENT]))
        except (OSError, KeyError, ValueError, TypeError, pa.ArrowException):
            return None

    def note_read_anew(self, partitions: Iterable[int]) -> None:
        """The store reads these partitions from their beginning. Their files stay until it has caught up."""
        for partition in partitions:
            self.read_anew[partition] = self.read_anew.get(partition, 0) + 1
        self.save()

    def save(self) -> None:
        """Raises OSError."""
        content = {**self.origin, "has_ratings": self.has_ratings, "read_anew": self.read_anew}
        write_whole(self.folder / MANIFEST, json.dumps(content, indent=2).encode())


class _File:
    """A file that is being written. It gets its name when the context ends without an exception."""

    def __init__(self, path: Path, content: _Content, group_rows: int) -> None:
        self._path = path
        self._content = content
        self._group_rows = group_rows
        self._schema = pa.schema(
            [
                pa.field("user", pa.string(), nullable=False),
                pa.field("item", pa.int64(), nullable=False),
                pa.field("rating", pa.float32(), nullable=False)
                if content.has_ratings
                else pa.field("action", pa.uint16(), nullable=False),
                pa.field("time_ms", pa.int64(), nullable=False),
            ]
        )
        self._waiting: list[tuple[str, Behaviours]] = []
        self._rows_waiting = 0
        self._users = self._incomplete = self._rows = 0

    def __enter__(self) -> _File:
        with removed_on_failure(partial_of(self._path)):
            self._file = partial_of(self._path).open("wb")
            self._writer = pq.ParquetWriter(self._file, self._schema)
        return self

    def add(self, user_id: str, behaviours: Behaviours, is_incomplete: bool) -> None:
        """Adds a user's history."""
        self._waiting.append((user_id, behaviours))
        self._rows_waiting += len(behaviours)
        self._users += 1
        self._incomplete += is_incomplete
        if self._rows_waiting >= self._group_rows:
            self._write_group()

    def _write_group(self) -> None:
        if not self._waiting:
            return
        lengths = [len(behaviours) for _, behaviours in self._waiting]
        numbers = pa.array(np.repeat(np.arange(len(lengths), dtype=np.int32), lengths))
        users = pa.DictionaryArray.from_arrays(numbers, pa.array([user for user, _ in self._waiting], pa.string()))
        items, actions, times_ms = (
            np.concatenate([getattr(behaviours, name) for _, behaviours in self._waiting])
            for name in ("items", "actions", "timestamps_ms")
        )
        codes = (actions / 2).astype(np.float32) if self._content.has_ratings else actions
        columns = [users.dictionary_decode(), pa.array(items), pa.array(codes), pa.array(times_ms)]
        self._writer.write_table(pa.table(columns, schema=self._schema))
        self._rows += self._rows_waiting
        self._waiting, self._rows_waiting = [], 0

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            with self._file, self._writer:
                if kind is None:
                    self._write_group()
                    content = replace(
                        self._content, users=self._users, incomplete_users=self._incomplete, rows=self._rows
                    )
                    self._writer.add_key_value_metadata({_CONTENT: json.dumps(asdict(content))})
                    self._writer.close()
                    self._file.flush()
                    os.fsync(self._file.fileno())
            if kind is None:
                put_in_place(self._path)
        finally:
            partial_of(self._path).unlink(missing_ok=True)


def _identified(kafka: KafkaSettings) -> TopicIdentity:
    names = kafka.topic(Topic.HISTORY), kafka.topic(Topic.BEHAVIOURS)
    try:
        found = identify_topics(kafka, names, CLIENT_ID, _ANSWER_S)
    except KafkaException as error:
        raise RelayError(
            f"Kafka at {kafka.bootstrap} does not describe its topics: {error.args[0].str()}. Check that its "
            "brokers run, and that the user has the rights of the role collector."
        ) from error
    if found.cluster_id in found.topic_ids.values():  # Both are made up.
        raise RelayError(
            "The ids of the topics cannot be asked for, since this process may start no other: a folder without them "
            "could mix two logs. Raise the limit of processes (ulimit -u)."
        )
    return found


@contextmanager
def _opened(folder: Path) -> Iterator[Path]:
    """Makes the folder, and keeps other processes off it."""
    with ExitStack() as held:
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            held.enter_context(locked_folder(folder, f"{folder} is in use: another `relaygr train collect` writes it."))
        except OSError as error:
            raise RelayError(
                f"{folder} cannot be used ({error.strerror}): give a folder that you may write."
            ) from error
        yield folder


def _agreed(folder: Path, identity: TopicIdentity, partitions: int, has_ratings: bool | None) -> _Manifest:
    """Checks that the folder is a copy of these topics, or makes it one."""
    path = folder / MANIFEST
    if not path.is_file() and has_files(folder):
        raise RelayError(f"{folder} has other files, and no {MANIFEST}: give an empty or a new folder.")
    origin = {
        "layout": LAYOUT,
        "cluster_id": identity.cluster_id,
        "topic_ids": dict(sorted(identity.topic_ids.items())),
        "partitions": partitions,
    }
    manifest = _Manifest(folder, origin, bool(has_ratings), {})
    try:
        if path.is_file():
            found = json.loads(path.read_bytes())
            if found["layout"] != LAYOUT:
                raise RelayError(f"{folder} was collected by another version: collect into a new folder.")
            differing = [
                f"{name}: {found.get(name)}, not {wanted}"
                for name, wanted in origin.items()
                if found.get(name) != wanted
            ]
            if differing:
                raise RelayError(f"{folder} is a copy of other topics ({', '.join(differing)}): give another folder.")
            if has_ratings is None:
                manifest.has_ratings = bool(found["has_ratings"])
            manifest.read_anew = {int(partition): int(count) for partition, count in found["read_anew"].items()}
        remove_partials(folder)
        manifest.save()
    except OSError as error:
        raise RelayError(
            f"{path} cannot be used ({error.strerror}): free space, or give a folder that you may write."
        ) from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise RelayError(f"{path} cannot be read ({error!r}): collect into a new folder.") from error
    return manifest
