"""Which impressions are on the device, in a mapped file for the next process of this worker.

A message whose work ends the process (a model's code that crashes or takes all memory, a device that hangs) is not
finished. It is delivered again, and would end one process after the other. So the ids of the impressions are written
here before each piece of device work. What the next process finds was on the device at the end, and is *accused*:

    accused once     its work runs alone, and the process waits for its end, so that only the cause is accused again
    MOST_ENDS times  its work is not run: a request is answered `failed`, a job and a warm-up end

    magic | count of ids on the device u64 | these ids | the accused: id, ends u64; an id has 16 bytes, ends 0 is none
"""

from __future__ import annotations

import struct
from collections.abc import Collection
from hashlib import blake2b
from mmap import mmap
from typing import Final

import structlog

log = structlog.get_logger()

MOST_ENDS: Final = 2
MOST_IDS: Final = 2048
"""Most ids of a piece of work: of the largest batch, and of those that wait for a chunk beside it. Likewise most of the
accused, of whom the newest stay."""
_MAGIC: Final = b"relaygr.device.1"
_ID_BYTES: Final = 16
_COUNT: Final = struct.Struct("<Q")
_ACCUSED: Final = struct.Struct(f"<{_ID_BYTES}sQ")
_COUNT_AT: Final = len(_MAGIC)
_IDS_AT: Final = _COUNT_AT + _COUNT.size
_ACCUSED_AT: Final = _IDS_AT + MOST_IDS * _ID_BYTES
RECORD_BYTES: Final = _ACCUSED_AT + MOST_IDS * _ACCUSED.size


def impression_id(user_id: str, request_id: str = "") -> bytes:
    """The id of an impression in the record; without a request, of the work that a user's prefix takes for nobody."""
    return blake2b(f"{user_id}\0{request_id}".encode(), digest_size=_ID_BYTES).digest()


class DeviceRecord:
    """Written by the device thread. `file`: RECORD_BYTES, mapped; None without a process that follows."""

    def __init__(self, file: mmap | None = None) -> None:
        self._file = file if file is not None else bytearray(RECORD_BYTES)
        self._accused: dict[bytes, int] = {}

    def begin(self) -> None:
        """Reads what the process before left. Only for the holder of the worker's lock."""
        file = self._file
        if file[: len(_MAGIC)] != _MAGIC:
            file[:] = _MAGIC + bytes(RECORD_BYTES - len(_MAGIC))
            return
        accused = (_ACCUSED.unpack_from(file, _ACCUSED_AT + n * _ACCUSED.size) for n in range(MOST_IDS))
        self._accused = {each: ends for each, ends in accused if ends}
        found = set(self._ids())
        if not found:
            return
        for each in found:
            # Accused last, kept longest.
            self._accused[each] = self._accused.pop(each, 0) + 1
        log.warning("the process before ended while it computed", impressions=len(found), ends=self._most(found))
        self._write_accused()
        self.clear()

    @property
    def any_accused(self) -> bool:
        """Whether any impression is accused."""
        return bool(self._accused)

    def ends(self, user_id: str, request_id: str = "") -> int:
        """How many processes ended while this impression, or the user's work for nobody, was on the device."""
        return self._accused.get(impression_id(user_id, request_id), 0) if self._accused else 0

    def has_accused(self, impressions: Collection[bytes]) -> bool:
        """Whether any of them is accused, so that their work runs alone."""
        return not self._accused.keys().isdisjoint(impressions)

    def note(self, impressions: Collection[bytes]) -> None:
        """A piece of work for these impressions begins."""
        ids = b"".join(list(impressions)[:MOST_IDS])
        self._file[_COUNT_AT : _IDS_AT + len(ids)] = _COUNT.pack(len(ids) // _ID_BYTES) + ids

    def clear(self) -> None:
        """The device has nothing left to compute."""
        self._file[_COUNT_AT:_IDS_AT] = _COUNT.pack(0)

    def _ids(self) -> list[bytes]:
        [count] = _COUNT.unpack_from(self._file, _COUNT_AT)
        ends = range(_IDS_AT + _ID_BYTES, _IDS_AT + (min(count, MOST_IDS) + 1) * _ID_BYTES, _ID_BYTES)
        return [bytes(self._file[end - _ID_BYTES : end]) for end in ends]

    def _most(self, impressions: Collection[bytes]) -> int:
        return max(self._accused[each] for each in impressions)

    def _write_accused(self) -> None:
        self._accused = dict(list(self._accused.items())[-MOST_IDS:])
        packed = b"".join(_ACCUSED.pack(each, ends) for each, ends in self._accused.items())
        self._file[_ACCUSED_AT:] = packed.ljust(MOST_IDS * _ACCUSED.size, b"\0")
