"""Lines of a plain or gzipped text file, in blocks of bounded size.

A line ends with LF or CRLF. A line above `MAX_LINE_BYTES` is no interaction: reading stops there,
before a file without line ends fills the memory.
"""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Final, cast

from relaygr.runtime.errors import RelayError

BLOCK_BYTES: Final = 1024 * 1024
MAX_LINE_BYTES: Final = 1024 * 1024
_GZIP = b"\x1f\x8b"
_BOM = b"\xef\xbb\xbf"


@dataclass(frozen=True, slots=True)
class LineBlock:
    """Consecutive lines. `text` has LF between lines; bytes that are not UTF-8 are lone surrogates."""

    first_number: int
    text: str
    bytes_read: int
    """Of the file on disk, up to the end of this block."""

    def lines(self) -> list[str]:
        return self.text.split("\n")


def read_blocks(path: Path, block_bytes: int = BLOCK_BYTES) -> Iterator[LineBlock]:
    """The lines of a file. Raises RelayError if it can not be read or a line is too long."""
    try:
        with path.open("rb") as file:
            yield from _blocks(file, path, block_bytes)
    except (zlib.error, EOFError, gzip.BadGzipFile) as error:
        raise RelayError(f"{path}: broken gzip file: {error}. Fetch or pack it again") from error
    except OSError as error:
        raise RelayError(f"{path} can not be read: {error.strerror or error}") from error


def _blocks(file: IO[bytes], path: Path, block_bytes: int) -> Iterator[LineBlock]:
    packed = file.read(2) == _GZIP
    file.seek(0)
    stream = cast(IO[bytes], gzip.GzipFile(fileobj=file)) if packed else file
    number = 1
    rest = b""
    first = True
    while True:
        data = stream.read(block_bytes)
        if first:
            data = data.removeprefix(_BOM)
            first = False
        whole, found, tail = (rest + data).rpartition(b"\n")
        if not data:
            if rest:
                yield LineBlock(number, _text(rest), file.tell())
            return
        if len(tail) > MAX_LINE_BYTES:
            line = number + whole.count(b"\n") + len(found)
            raise RelayError(
                f"{path}: line {line} is longer than {MAX_LINE_BYTES} bytes: this is no log of interactions"
            )
        rest = tail
        if found:
            text = _text(whole)
            yield LineBlock(number, text, file.tell())
            number += text.count("\n") + 1


def _text(data: bytes) -> str:
    if b"\r" in data:
        data = data.replace(b"\r\n", b"\n").removesuffix(b"\r")
    return data.decode("utf-8", "surrogateescape")
