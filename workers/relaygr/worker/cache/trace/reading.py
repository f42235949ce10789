"""Reads a trace, while it is written too: what is not whole at its end is left out."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import msgpack

from relaygr.runtime.errors import RelayError
from relaygr.worker.cache.trace.format import TraceFormatError, TraceHeader, TraceRecord, decode_header, decode_record

_CHUNK_BYTES = 1 << 20
_LARGEST_VALUE_BYTES = 1 << 16


class TraceReader:
    """One file. Reads its header at once; raises RelayError if it is no trace."""

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            self.size_bytes = path.stat().st_size
            with path.open("rb") as file:
                beginning = file.read(_LARGEST_VALUE_BYTES)
        except OSError as error:
            raise RelayError(f"The trace {path} can not be read: {error.strerror}.") from error
        unpacker = _unpacker()
        unpacker.feed(beginning)
        try:
            self.header: TraceHeader = decode_header(unpacker.unpack())
        except msgpack.OutOfData:
            raise RelayError(f"The trace {path} is empty: nothing was recorded yet.") from None
        except (TraceFormatError, ValueError, msgpack.UnpackException) as error:
            raise RelayError(f"{path} is not a trace of `worker.cache_trace`: {error}.") from error
        self._records_at = unpacker.tell()

    def records(self, on_progress: Callable[[int], None] | None = None) -> Iterator[TraceRecord]:
        """All records that are whole by now. `on_progress` gets the bytes read so far.

        Raises RelayError, with the place, for bytes that are no record.
        """
        unpacker = _unpacker()
        number = 0
        with self._path.open("rb") as file:
            file.seek(self._records_at)
            while chunk := file.read(_CHUNK_BYTES):
                unpacker.feed(chunk)
                try:
                    for value in unpacker:
                        number += 1
                        yield decode_record(value)
                except (TraceFormatError, ValueError, msgpack.UnpackException) as error:
                    raise RelayError(f"The trace {self._path} is damaged at record {number}: {error}.") from error
                if on_progress is not None:
                    on_progress(file.tell())


def _unpacker() -> msgpack.Unpacker:
    return msgpack.Unpacker(
        max_buffer_size=_CHUNK_BYTES + _LARGEST_VALUE_BYTES, max_bin_len=4096, max_str_len=4096, use_list=False
    )
