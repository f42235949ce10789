"""Recordings of what a trigger sees: a file of JSON lines, for `relaygr trigger replay`.

The first line names format and version. Each other line has `kind`, `at_us` (wall time) and

    status      `message`: a WorkerStatus
    retrieval   `partition` and `message`: a RetrievalEvent without the behaviours of an inline history
    ranking     `request_id`, and how many `candidates` and `suffix` behaviours the request has

The user id of an event is replaced by a keyed hash whose key is not stored. Lines need not be in order of time.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from hashlib import blake2b
from pathlib import Path
from typing import Any, Final, TextIO

from relaygr.runtime.errors import RelayError
from relaygr.schemas.fields import FieldError
from relaygr.schemas.json_messages import from_json, to_json
from relaygr.schemas.messages import HistoryVersion, RankingRequest, RetrievalEvent, WorkerStatus

FORMAT: Final = "relaygr-trigger-recording"
VERSION: Final = 1
MOST_LINES: Final = 5_000_000
_LONGEST_LINE: Final = 1 << 20
_NO_DIGEST: Final = b"\x00" * 16


@dataclass(frozen=True, slots=True)
class StatusLine:
    """A worker's status, when it was written."""

    at_us: int
    status: WorkerStatus


@dataclass(frozen=True, slots=True)
class RetrievalLine:
    """A retrieval event, when it was written to its partition."""

    at_us: int
    partition: int
    event: RetrievalEvent


@dataclass(frozen=True, slots=True)
class RankingLine:
    """A ranking request, when it was sent."""

    at_us: int
    request_id: str
    candidates: int
    suffix: int


RecordedLine = StatusLine | RetrievalLine | RankingLine


class RecordingWriter:
    """Writes the lines of one recording."""

    def __init__(self, file: TextIO, key: bytes) -> None:
        """`key`: 16 random bytes, which the caller forgets."""
        self._file = file
        self._key = key
        self._put({"format": FORMAT, "version": VERSION})

    def status(self, status: WorkerStatus) -> None:
        self._put({"kind": "status", "at_us": status.written_at_us, "message": to_json(status)})

    def retrieval(self, event: RetrievalEvent, partition: int, at_us: int) -> None:
        version = event.history_version
        if event.history is not None and version is None:
            version = HistoryVersion(event.history.number, len(event.history.behaviours), _NO_DIGEST)
        user = blake2b(event.user_id.encode(), key=self._key, digest_size=8).hexdigest()
        plain = replace(event, user_id=user, history=None, history_version=version)
        self._put({"kind": "retrieval", "at_us": at_us, "partition": partition, "message": to_json(plain)})

    def ranking(self, request: RankingRequest) -> None:
        self._put(
            {
                "kind": "ranking",
                "at_us": request.sent_at_us,
                "request_id": request.request_id,
                "candidates": int(request.candidates.size),
                "suffix": len(request.suffix),
            }
        )

    def _put(self, line: dict[str, Any]) -> None:
        self._file.write(json.dumps(line, separators=(",", ":")) + "\n")


def read_recording(path: Path) -> list[RecordedLine]:
    """The lines in order of time. Raises RelayError, with the number of the line, for what is not a recording."""
    lines: list[RecordedLine] = []
    try:
        with path.open(encoding="utf-8") as file:
            for number, content in _numbered(path, file):
                lines.append(_line(path, number, content))
                if len(lines) > MOST_LINES:
                    raise RelayError(f"{path} has more than {MOST_LINES:,} lines: record a shorter time.")
    except OSError as error:
        raise RelayError(f"The recording {path} cannot be read: {error.strerror}.") from error
    except UnicodeDecodeError as error:
        raise RelayError(f"{path} is not a recording of `relaygr trigger record`: it is no text.") from error
    return sorted(lines, key=lambda line: line.at_us)


def _numbered(path: Path, file: TextIO) -> Iterator[tuple[int, Any]]:
    """The number and the object of each line after the first."""
    number = 0
    while text := file.readline(_LONGEST_LINE):
        number += 1
        try:
            content = json.loads(text)
        except ValueError as error:
            raise RelayError(f"{path}, line {number}: not a line of `relaygr trigger record`: {error}.") from error
        if number > 1:
            yield number, content
        elif not isinstance(content, dict) or content.get("format") != FORMAT or content.get("version") != VERSION:
            raise RelayError(f"{path} is not a recording of `relaygr trigger record` of version {VERSION}.")
    if not number:
        raise RelayError(f"The recording {path} is empty.")


def _line(path: Path, number: int, content: Any) -> RecordedLine:
    try:
        kind, at_us = content["kind"], _whole(content["at_us"])
        if kind == "status":
            return StatusLine(at_us, from_json(WorkerStatus, content["message"]))
        if kind == "retrieval":
            return RetrievalLine(at_us, _whole(content["partition"]), from_json(RetrievalEvent, content["message"]))
        if kind == "ranking":
            name, counts = str(content["request_id"]), (_whole(content["candidates"]), _whole(content["suffix"]))
            return RankingLine(at_us, name, *counts)
    except (KeyError, TypeError, FieldError) as error:
        raise RelayError(f"{path}, line {number}: not a line of `relaygr trigger record`: {error}.") from error
    raise RelayError(f"{path}, line {number}: {str(kind)[:40]!r} is no kind of line.")


def _whole(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise TypeError(f"{str(value)[:40]!r} is not a whole number of at least 0")
    return value
