"""The watermark of finished offsets in a mapped file, for the next process of the same worker (docs/consumer.md).

    header   magic | length u32 | CRC-32 u32 | JSON object, in 4096 bytes
    slots    by topic, in the order of names, then partition; each has two copies, written alternately, of
             arena_epoch u64 | sequence u64 | start u64 | finished u64 | time_ms i64 | leader_epoch i32
             | CRC-32 of these u32

A reader takes the newer copy with a correct checksum. `begin` may be called only while this process is the writer;
after that only the poll thread uses the object.
"""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Final, Protocol

from relaygr.cluster.topic_identity import TopicIdentity
from relaygr.consumer.watermark import Progress, TopicPartition
from relaygr.runtime.errors import RelayError
from relaygr.runtime.private_files import map_private

_MAGIC: Final = b"relaygr.finish.3"
_HEADER: Final = struct.Struct("<16sII")
_HEADER_BYTES: Final = 4096
_VALUES: Final = struct.Struct("<QQQQqi")
_CRC: Final = struct.Struct("<I")
_COPY_BYTES: Final = _VALUES.size + _CRC.size
_NOBODY: Final = 0
_NOTHING: Final = (_NOBODY, 0, Progress(0, 0))


class Writer(Protocol):
    """The right to write the file: a lock that at most one process holds."""

    @property
    def arena_epoch(self) -> int:
        """The number of holders so far; 1 for the first."""

    def is_held(self) -> bool:
        """Whether this process holds the lock."""


class FinishedLog(Protocol):
    """A store in which the consumer loop keeps finished offsets for its successor."""

    def predecessor(self) -> Mapping[TopicPartition, Progress]:
        """The offsets that the process before this one finished. The caller checks them against Kafka."""

    def note(self, progress: Mapping[TopicPartition, Progress]) -> None:
        """Writes the progress of owned partitions."""

    def forget(self, partitions: Iterable[TopicPartition]) -> None:
        """Erases partitions that this process no longer owns, because their next owner commits beyond this progress."""


def is_plausible(progress: Progress, committed: int, end: int) -> bool:
    """Whether a successor may treat [committed, progress.finished) as finished, as far as offsets tell.

    A log that came back shorter may have grown beyond `finished`: `WatermarkTracker.begin` looks at each message.
    """
    return progress.start <= committed <= progress.finished <= end


class FinishedOffsets:
    """A `FinishedLog` in a file. See the module docstring."""

    def __init__(
        self,
        path: Path,
        identity: TopicIdentity,
        partitions: int,
        writer: Writer,
    ) -> None:
        """Maps the file, and creates it if it is missing. Raises RelayError if there is no space for it."""
        self._writer = writer
        topics = sorted(identity.topic_ids)
        self._slots = {
            TopicPartition(topic, partition): _HEADER_BYTES + 2 * _COPY_BYTES * (number * partitions + partition)
            for number, topic in enumerate(topics)
            for partition in range(partitions)
        }
        self._sequences = dict.fromkeys(self._slots, 0)
        self._header = _header(identity, partitions)
        self._file = map_private(path, _HEADER_BYTES + 2 * _COPY_BYTES * len(self._slots), "worker.shared_path")
        self._predecessor: dict[TopicPartition, Progress] = {}

    def begin(self) -> None:
        """Reads the offsets of the predecessor. Raises ValueError unless this process is the writer."""
        if not self._writer.is_held():
            raise ValueError("only the writer may read the offsets of its predecessor")
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
            epoch, sequence, progress = max(copies, key=lambda copy: copy[1])
            self._sequences[tp] = sequence
            if epoch != _NOBODY and epoch == self._writer.arena_epoch - 1:
                self._predecessor[tp] = progress

    def _copy(self, at: int) -> tuple[int, int, Progress]:
        """Epoch, sequence and progress; zeros if the checksum is wrong."""
        values = self._file[at : at + _VALUES.size]
        [crc] = _CRC.unpack_from(self._file, at + _VALUES.size)
        if zlib.crc32(values) != crc:
            return _NOTHING
        epoch, sequence, start, finished, time_ms, leader_epoch = _VALUES.unpack(values)
        return epoch, sequence, Progress(start, finished, leader_epoch, time_ms)

    def _write(self, tp: TopicPartition, epoch: int, progress: Progress) -> None:
        at = self._slots.get(tp)
        if at is None:
            return
        sequence = self._sequences[tp] = self._sequences[tp] + 1
        values = _VALUES.pack(
            epoch, sequence, progress.start, progress.finished, progress.time_ms, progress.leader_epoch
        )
        at += _COPY_BYTES * (sequence % 2)
        self._file[at : at + _COPY_BYTES] = values + _CRC.pack(zlib.crc32(values))


def _header(identity: TopicIdentity, partitions: int) -> bytes:
    text = json.dumps(
        {"cluster_id": identity.cluster_id, "topic_ids": identity.topic_ids, "partitions": partitions}, sort_keys=True
    ).encode()
    if len(text) > _HEADER_BYTES - _HEADER.size:
        raise RelayError("The topic names do not fit into the file of finished offsets: shorten `topic_prefix`.")
    return _HEADER.pack(_MAGIC, len(text), zlib.crc32(text)) + text
