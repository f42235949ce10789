"""The watermark of finished offsets, beside what else outlives the process.

A consumer commits about once a second, so a successor that began at the commit would do up to a second's work
again. The poll thread therefore also writes each partition's watermark into a small mapped file, with plain stores,
whenever it moves. A successor believes it only where

* the file was written for this cluster and these topics (by id: a topic made anew is another one);
* it was written under the `arena_epoch` directly before the successor's own: nobody was in between;
* `start <= committed <= finished <= end`, where all of [start, finished) was finished by the predecessor. A group
  whose offset was set back before that, or a log that was cut, makes it worthless.

What is believed is treated as finished, not skipped over: the messages are delivered from the commit on, and
the tracker answers FINISHED for them.

    header   magic | length u32 | CRC-32 u32 | JSON object, in 4096 bytes
    slots    by topic, in the order of names, then partition: two copies each, written in turn, of
             arena_epoch u64 | sequence u64 | start u64 | finished u64 | CRC-32 of these u32 | unused u32

The newer of the two copies whose checksum is right counts, so a process that dies while it writes one leaves
the one before. `FinishedOffsets` is made whenever one likes, `begin` is for when this process is the writer;
from then on it belongs to the poll thread.
"""

from __future__ import annotations

import json
import mmap
import os
import struct
import zlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Final, Protocol

from relaygr.consumer.watermark import Progress, TopicPartition
from relaygr.kafka.topic_identity import TopicIdentity
from relaygr.runtime.errors import RelayError

_MAGIC: Final = b"relaygr.finish.1"
_HEADER: Final = struct.Struct("<16sII")
_HEADER_BYTES: Final = 4096
_VALUES: Final = struct.Struct("<QQQQ")
_COPY_BYTES: Final = _VALUES.size + 8
_NOBODY: Final = 0


class Writer(Protocol):
    """The right to write the file: a lock that at most one process holds."""

    @property
    def arena_epoch(self) -> int:
        """Counts the holders; 1 for the first."""

    def is_held(self) -> bool:
        """Whether this process may write now."""


class FinishedLog(Protocol):
    """What the consumer loop needs of it."""

    def predecessor(self) -> Mapping[TopicPartition, Progress]:
        """What the process before this one had finished, as far as it may be believed without asking Kafka."""

    def note(self, progress: Mapping[TopicPartition, Progress]) -> None:
        """This is finished now, of partitions that are ours."""

    def forget(self, partitions: Iterable[TopicPartition]) -> None:
        """These are not ours any more: whoever gets them commits past us."""


def believed(progress: Progress, committed: int, end: int) -> bool:
    """Whether a successor may take [committed, progress.finished) for finished."""
    return progress.start <= committed <= progress.finished <= end


class FinishedOffsets:
    """A `FinishedLog` in a file. See the module."""

    def __init__(
        self,
        path: Path,
        identity: TopicIdentity,
        partitions: int,
        writer: Writer,
    ) -> None:
        """Maps the file, which is made if it is not there. Raises RelayError if there is no room for it."""
        self._writer = writer
        topics = sorted(identity.topic_ids)
        self._slots = {
            TopicPartition(topic, partition): _HEADER_BYTES + 2 * _COPY_BYTES * (number * partitions + partition)
            for number, topic in enumerate(topics)
            for partition in range(partitions)
        }
        self._sequences = dict.fromkeys(self._slots, 0)
        self._header = _header(identity, partitions)
        self._file = _map(path, _HEADER_BYTES + 2 * _COPY_BYTES * len(self._slots))
        self._predecessor: dict[TopicPartition, Progress] = {}

    def begin(self) -> None:
        """Reads what the predecessor left. Raises ValueError unless this process is the writer."""
        if not self._writer.is_held():
            raise ValueError("only the writer may take up its predecessor's offsets")
        if self._file[: len(self._header)] == self._header:
            self._read()
        else:
            self._file[:] = bytes(len(self._file))
            self._file[: len(self._header)] = self._header

    def predecessor(self) -> Mapping[TopicPartition, Progress]:
        return self._predecessor

    def note(self, progress: Mapping[TopicPartition, Progress]) -> None:
        if progress and self._writer.is_held():
            for tp, found in progress.items():
                self._write(tp, self._writer.arena_epoch, found)

    def forget(self, partitions: Iterable[TopicPartition]) -> None:
        if self._writer.is_held():
            for tp in partitions:
                self._write(tp, _NOBODY, Progress(0, 0))

    def _read(self) -> None:
        for tp, at in self._slots.items():
            copies = [self._copy(at), self._copy(at + _COPY_BYTES)]
            epoch, sequence, start, finished = max(copies, key=lambda copy: copy[1])
            self._sequences[tp] = sequence
            if epoch != _NOBODY and epoch == self._writer.arena_epoch - 1:
                self._predecessor[tp] = Progress(start, finished)

    def _copy(self, at: int) -> tuple[int, int, int, int]:
        """Epoch, sequence, start, finished; zeros if it is torn."""
        values = self._file[at : at + _VALUES.size]
        [crc] = struct.unpack_from("<I", self._file, at + _VALUES.size)
        if zlib.crc32(values) != crc:
            return (_NOBODY, 0, 0, 0)
        epoch, sequence, start, finished = _VALUES.unpack(values)
        return epoch, sequence, start, finished

    def _write(self, tp: TopicPartition, epoch: int, progress: Progress) -> None:
        at = self._slots.get(tp)
        if at is None:
            return
        sequence = self._sequences[tp] = self._sequences[tp] + 1
        values = _VALUES.pack(epoch, sequence, progress.start, progress.finished)
        at += _COPY_BYTES * (sequence % 2)
        self._file[at : at + _COPY_BYTES] = values + struct.pack("<II", zlib.crc32(values), 0)


def _header(identity: TopicIdentity, partitions: int) -> bytes:
    text = json.dumps(
        {"cluster_id": identity.cluster_id, "topic_ids": identity.topic_ids, "partitions": partitions}, sort_keys=True
    ).encode()
    if len(text) > _HEADER_BYTES - _HEADER.size:
        raise RelayError("The names of the cluster's topics are too long to be kept: shorten `kafka.topic_prefix`.")
    return _HEADER.pack(_MAGIC, len(text), zlib.crc32(text)) + text


def _map(path: Path, size_bytes: int) -> mmap.mmap:
    try:
        file = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            # In full: writing to a hole where no memory is left would end the process.
            os.posix_fallocate(file, 0, size_bytes)
            return mmap.mmap(file, size_bytes)
        finally:
            os.close(file)
    except OSError as error:
        raise RelayError(
            f"{path} can not be used ({error.strerror}): give `worker.shared_path` a folder with room that this user "
            "may write."
        ) from error
