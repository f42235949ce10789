"""Format of a trace file, and its reader. A stream of MessagePack values: the header, then one array for each record.

    header   map: `format` "relaygr-cache-trace", `version` 2, the fields of `TraceHeader`, and `checksum`
    record   [kind, at_us, user, namespace, behaviours, sketch, outcome, checksum]

`checksum` is the CRC-32 of the same value without its checksum. Files of version 1 have no checksums, and are read.

`kind` and `outcome` are the texts of `CacheEvent`. `at_us` counts from the first record. `user` is a 64-bit keyed hash
of the user id; the key is not stored, so nobody can look up a user id. `namespace` is the beginning of the model's
digest. Records are in the order of the operations, except that records of two threads may be swapped.

A *sketch* represents a history. It has a mark of four bytes at 64, 128, 256 ... behaviours and at the end: a hash,
under the same key, of the digest chain there. (The digests themselves travel beside user ids, so they would identify
users.) From two sketches a reader knows where two histories diverge, within a factor of two. A change after the last
common mark looks like growth. That is enough to replay, and a tenth of the size of the chain.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, fields
from hashlib import blake2b
from pathlib import Path
from typing import Any

import msgpack

from relaygr.runtime.errors import RelayError
from relaygr.schemas.digest import BLOCK, DigestChain
from relaygr.schemas.messages import LatencyCoefficients
from relaygr.worker.cache.events import EventKind
from relaygr.worker.cache.policies import PolicyName
from relaygr.worker.kv import DramGeometry, DramKvDtype, KvDtype, KvGeometry, PrefixLayout

FORMAT = "relaygr-cache-trace"
VERSION = 2
_WITHOUT_CHECKSUMS = 1
MARK_BYTES = 4
_CHUNK_BYTES = 1 << 20
_LARGEST_VALUE_BYTES = 1 << 16
_LARGEST_RECORD_BYTES = 512
_KINDS = frozenset(EventKind)
_LATEST_US = 1 << 62
_MOST_BEHAVIOURS = 1 << 31


@dataclass(frozen=True, slots=True)
class TraceHeader:
    """The cache that was recorded, or that a synthetic trace assumes."""

    geometry: DramGeometry
    """The shape of a page in both tiers."""
    layout: PrefixLayout
    hbm_pages: int
    dram_pages: int
    hbm_policy: PolicyName
    dram_policy: PolicyName
    ttl_us: int
    latency: LatencyCoefficients | None
    """Latency of the device, if it was measured."""


@dataclass(frozen=True, slots=True)
class Sketch:
    """Marks of a history of `behaviours` behaviours: see the module."""

    behaviours: int
    marks: bytes

    def common(self, other: Sketch) -> int:
        """Number of leading behaviours that the two histories share, as far as their marks show."""
        return common_behaviours(self.behaviours, self.marks, other.behaviours, other.marks)


def common_behaviours(behaviours: int, marks: bytes, other_behaviours: int, other_marks: bytes) -> int:
    """`Sketch.common` of the sketches of these behaviours and marks."""
    if behaviours == other_behaviours and marks == other_marks:
        return behaviours
    shorter = min(behaviours, other_behaviours)
    common, length, place = 0, BLOCK, 0
    while length <= shorter:
        if marks[place : place + MARK_BYTES] != other_marks[place : place + MARK_BYTES]:
            return common
        common, length, place = length, 2 * length, place + MARK_BYTES
    # Histories of equal length with different ends diverge after the last common mark.
    return common if behaviours == other_behaviours else shorter


TraceRow = tuple[str, int, int, bytes, int, bytes, str]
"""A record as plain values: kind, at_us, user, namespace, behaviours, marks, outcome."""


@dataclass(frozen=True, slots=True)
class TraceRecord:
    """One operation."""

    kind: EventKind
    at_us: int
    user: int
    namespace: bytes
    sketch: Sketch
    outcome: str

    @property
    def row(self) -> TraceRow:
        sketch = self.sketch
        kind = self.kind.value
        return kind, self.at_us, self.user, self.namespace, sketch.behaviours, sketch.marks, self.outcome


class TraceFormatError(ValueError):
    """The bytes are not in the format of this version."""


def keyed_hash(value: bytes, key: bytes, size_bytes: int) -> bytes:
    """A hash that represents `value` in a trace with this key."""
    return blake2b(value, key=key, digest_size=size_bytes).digest()


def sketch_of(chain: DigestChain, key: bytes) -> Sketch:
    """The sketch of the history that the chain covers, in a trace with this key."""
    marks = []
    length = BLOCK
    while length <= chain.length:
        marks.append(keyed_hash(chain.after(length // BLOCK), key, MARK_BYTES))
        length *= 2
    marks.append(keyed_hash(chain.digest, key, MARK_BYTES))
    return Sketch(chain.length, b"".join(marks))


def encode_header(header: TraceHeader) -> bytes:
    """The first value of a file."""
    plain = {"format": FORMAT, "version": VERSION, **asdict(header)}
    packed: bytes = msgpack.packb({**plain, "checksum": _checksum(plain)})
    return packed


def decode_header(value: object) -> TraceHeader:
    """The header from the first value of a file. Raises TraceFormatError that names the fault."""
    if not isinstance(value, Mapping) or value.get("format") != FORMAT:
        raise TraceFormatError("it does not begin with the header of a cache trace")
    if value.get("version") not in (VERSION, _WITHOUT_CHECKSUMS):
        raise TraceFormatError(
            f"it has version {value.get('version')!r}, this program reads versions {_WITHOUT_CHECKSUMS} and {VERSION}"
        )
    plain = {key: part for key, part in value.items() if key != "checksum"}
    if value.get("version") == VERSION and value.get("checksum") != _checksum(plain):
        raise TraceFormatError("its header has another checksum than it states: a byte was changed")
    try:
        given: dict[str, Any] = {field.name: value[field.name] for field in fields(TraceHeader)}
        kv = dict(given["geometry"]["kv"])
        kv["dtype"] = KvDtype(kv["dtype"])
        given["geometry"] = DramGeometry(KvGeometry(**kv), DramKvDtype(given["geometry"]["dtype"]))
        given["layout"] = PrefixLayout(**given["layout"])
        given["hbm_policy"], given["dram_policy"] = PolicyName(given["hbm_policy"]), PolicyName(given["dram_policy"])
        if given["latency"] is not None:
            given["latency"] = LatencyCoefficients(**given["latency"])
        header = TraceHeader(**given)
        if min(header.geometry.page_bytes, header.geometry.kv.page_bytes, header.layout.tokens(1)) < 1:
            raise ValueError("a size is not positive")
    except (KeyError, TypeError, ValueError) as error:
        raise TraceFormatError(f"its header is not complete: {error}") from error
    return header


def encode_record(record: TraceRecord) -> bytes:
    """The value of a record."""
    row = record.row
    packed: bytes = msgpack.packb((*row, _checksum(row)))
    return packed


def decode_row(value: Any, pack: Callable[[object], bytes] | None = msgpack.packb) -> TraceRow:
    """The record of a value, as plain values. Raises TraceFormatError.

    `pack` encodes MessagePack, to check the checksum; None for a record without one.
    """
    if pack is not None:
        if not isinstance(value, tuple) or not value:
            raise TraceFormatError("not a record")
        value, checksum = value[:-1], value[-1]
        if checksum != zlib.crc32(pack(value)):
            raise TraceFormatError("its checksum is wrong: a byte was changed")
    try:
        kind, at_us, user, namespace, behaviours, marks, outcome = value
        is_known = kind in _KINDS
    except (TypeError, ValueError) as error:
        raise TraceFormatError(f"not a record: {error}") from error
    if not is_known:
        raise TraceFormatError(f"not a record: {kind!r} is no operation")
    if not (isinstance(at_us, int) and isinstance(user, int) and isinstance(behaviours, int)):
        raise TraceFormatError("not a record: a number is missing")
    if not (0 <= at_us < _LATEST_US and 0 <= behaviours < _MOST_BEHAVIOURS):
        raise TraceFormatError("not a record: a number is out of range")
    if not (isinstance(marks, bytes) and isinstance(namespace, bytes) and isinstance(outcome, str)):
        raise TraceFormatError("not a record: a text is missing")
    row: TraceRow = value
    return row


class TraceReader:
    """One file. The constructor reads the header, and raises RelayError if the file is not a trace."""

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            self.size_bytes = path.stat().st_size
            with path.open("rb") as file:
                beginning = file.read(_LARGEST_VALUE_BYTES)
        except OSError as error:
            raise RelayError(
                f"The trace {path} cannot be read: {error.strerror}. `relaygr cache trace --out` makes one."
            ) from error
        unpacker = _unpacker()
        unpacker.feed(beginning)
        try:
            value = unpacker.unpack()
            self.header: TraceHeader = decode_header(value)
            self._has_checksums = value["version"] != _WITHOUT_CHECKSUMS
        except msgpack.OutOfData:
            raise RelayError(f"The trace {path} is empty: nothing was recorded yet.") from None
        except (TraceFormatError, ValueError, msgpack.UnpackException) as error:
            raise RelayError(f"{path} is not a trace of `worker.cache_trace`: {error}.") from error
        self._records_at = unpacker.tell()

    def records(self) -> Iterator[TraceRecord]:
        """All records that are complete by now. Raises RelayError as `rows` does."""
        for kind, at_us, user, namespace, behaviours, marks, outcome in self.rows():
            yield TraceRecord(EventKind(kind), at_us, user, namespace, Sketch(behaviours, marks), outcome)

    def rows(self, on_progress: Callable[[int], None] | None = None) -> Iterator[TraceRow]:
        """`records` as plain values, several times as fast. `on_progress` gets the number of bytes read so far.

        A torn record at the end of the file is left out. Raises RelayError, with the number of the record, for bytes
        that are not a record.
        """
        unpacker = _unpacker()
        # A packer of its own costs half as much as `msgpack.packb`.
        pack = msgpack.Packer().pack if self._has_checksums else None
        number = read_bytes = 0
        with self._path.open("rb") as file:
            file.seek(self._records_at)
            while chunk := file.read(_CHUNK_BYTES):
                unpacker.feed(chunk)
                read_bytes += len(chunk)
                try:
                    for value in unpacker:
                        number += 1
                        yield decode_row(value, pack)
                except (TraceFormatError, ValueError, msgpack.UnpackException) as error:
                    raise RelayError(f"The trace {self._path} is damaged at record {number}: {error}.") from error
                if on_progress is not None:
                    on_progress(file.tell())
        if read_bytes - unpacker.tell() > _LARGEST_RECORD_BYTES:
            raise RelayError(f"The trace {self._path} is damaged at record {number + 1}: it does not end.")


def _checksum(plain: object) -> int:
    return zlib.crc32(msgpack.packb(plain))


def _unpacker() -> msgpack.Unpacker:
    return msgpack.Unpacker(
        max_buffer_size=_CHUNK_BYTES + _LARGEST_VALUE_BYTES,
        max_bin_len=4096,
        max_str_len=4096,
        max_array_len=64,
        max_map_len=64,
        use_list=False,
    )
