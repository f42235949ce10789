"""The records of a gateway: one JSON line for each impression, in a file that other processes can read."""

from __future__ import annotations

import base64
import json
import os
import time
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import fields
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from relaygr.runtime.errors import RelayError
from relaygr.schemas.ended import Ended, Reason
from relaygr.schemas.messages import Path as RankingPath
from relaygr.schemas.messages import StageTimings
from relaygr.schemas.record import record

LOST: Final = Reason.NO_ANSWER.row.in_traffic
"""The status of a request that Kafka acknowledged and no worker answered."""
UNDELIVERED: Final = Reason.NOT_ACKNOWLEDGED.row.in_traffic
"""The status of a request that was not answered, and whose delivery Kafka did not acknowledge within its deadline."""
NOT_SENT: Final = "not_sent"
"""The status of a request that the client refused because its queue was full. This happens in an outage of Kafka."""
OPEN: Final = "open"
"""The status of a request without an answer when the traffic was stopped. A worker may still answer it."""


@record(frozen=True, slots=True)
class ImpressionRecord:
    """The outcome of one impression, by the gateway's monotonic clock.

    `latency_us` is the time from the *scheduled* ranking request to the answer, so that a delay of the gateway counts;
    None without an answer. `send_lag_us` is the part of it that the gateway itself caused.
    """

    number: int
    request_id: str
    user_id: str
    status: str
    latency_us: int | None
    send_lag_us: int
    late: bool
    reason: str | None = None
    path: str | None = None
    prefix_source: str | None = None
    worker_id: str | None = None
    prefix_tokens: int = 0
    tokens_cached: int = 0
    history_number: int | None = None
    history_length: int | None = None
    history_stale: bool = False
    history_loading: bool = False
    model_revision: str | None = None
    timings: StageTimings | None = None
    scheduled_us: int = 0
    """When the ranking request was due."""
    to_worker_us: int | None = None
    """From the sending to the receipt at the worker, by the wall clocks of both."""
    scores: str | None = None
    """float32, little-endian, base64."""
    next_retrieved: bool | None = None
    """Whether the item that the user chose was among the candidates; None: not known."""
    next_place: int | None = None
    """Its place among them, from 0, in the order of retrieval; None: not known, or not retrieved."""
    next_rank: int | None = None
    """How many candidates the answer puts before that item, by the first task; None: not ranked, or not retrieved."""

    def score_array(self) -> NDArray[np.float32] | None:
        """The scores, float32 [candidates * tasks]."""
        return None if self.scores is None else np.frombuffer(base64.b64decode(self.scores), dtype="<f4")


def is_whole(record: ImpressionRecord) -> bool:
    """Whether the request got an untruncated answer."""
    return record.status == Ended.RANKED and record.path != RankingPath.TRUNCATED


def in_time(record: ImpressionRecord) -> bool:
    """Whether the request got an untruncated answer within its deadline."""
    return is_whole(record) and not record.late


def ending(record: ImpressionRecord) -> str:
    """The path of a ranked request, or the status and the reason of another one."""
    if record.status == Ended.RANKED and record.path is not None:
        return record.path
    return f"{record.status}: {record.reason}" if record.reason else record.status


FLUSH_INTERVAL_S: Final = 0.05
_ENCODER: Final = json.JSONEncoder(separators=(",", ":"))
_FIELDS = tuple(field.name for field in fields(ImpressionRecord))
_TIMINGS = tuple(field.name for field in fields(StageTimings))


def pack_scores(scores: NDArray[np.float32]) -> str:
    """The text form of `ImpressionRecord.scores`."""
    return base64.b64encode(scores.astype("<f4", copy=False).tobytes()).decode()


class RecordWriter:
    """Writes each record as a line. The file gets it with the next record after `FLUSH_INTERVAL_S`, or at `close`.

    Several threads may write. After an error of the file system the writer drops what comes, and keeps the whole lines
    that the file has: the run that it records goes on.
    """

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._path = path
        self.problem: str | None = None
        """Why the file lacks records; None: it has them all."""
        self._whole_bytes = 0
        # So large that only `flush` writes, which comes after whole lines: a reader may come at any time.
        self._file = path.open("w", encoding="utf-8", buffering=1 << 20)
        self._waiting: deque[ImpressionRecord] = deque()
        self._flush_at_s = 0.0

    def write(self, record: ImpressionRecord) -> None:
        if self.problem is not None:
            return
        if self._file.closed:
            raise ValueError("the file of records is closed")
        # Encoded together, records take a fraction of the time that each takes alone, with cold caches. The gateway
        # shares the machine with the processes that it measures.
        self._waiting.append(record)
        if (now_s := time.monotonic()) >= self._flush_at_s:
            self._flush_at_s = now_s + FLUSH_INTERVAL_S
            self._flush()

    def _flush(self) -> None:
        written = self._whole_bytes
        try:
            while self._waiting:
                try:
                    oldest = self._waiting.popleft()
                except IndexError:  # Another thread took the last one.
                    break
                # All characters are ASCII.
                written += self._file.write(_line(oldest))
            self._file.flush()
        except OSError as error:
            self._give_up(error)
        else:
            self._whole_bytes = written

    def _give_up(self, error: OSError) -> None:
        self.problem = f"{self._path} lacks records: {error.strerror}"
        self._waiting.clear()
        with suppress(OSError):  # What the buffer still holds cannot be written either.
            self._file.close()
        with suppress(OSError):  # It may be no file.
            os.truncate(self._path, self._whole_bytes)

    def close(self) -> None:
        if self.problem is None:
            self._flush()
            self._file.close()


def _line(record: ImpressionRecord) -> str:
    # Not `asdict`, which copies deeply.
    plain = {name: getattr(record, name) for name in _FIELDS}
    if record.timings is not None:
        plain["timings"] = {name: getattr(record.timings, name) for name in _TIMINGS}
    return _ENCODER.encode(plain) + "\n"


def parse_record(line: str | bytes) -> ImpressionRecord:
    """The record of one line. Raises ValueError or TypeError for a line that is not a record."""
    fields: dict[str, Any] = json.loads(line)
    timings = fields.pop("timings", None)
    return ImpressionRecord(**fields, timings=None if timings is None else StageTimings(**timings))


def read_records(path: Path) -> Iterator[ImpressionRecord]:
    """The records of a file. Raises RelayError for a file that cannot be read, and for a line that is not a record."""
    try:
        lines = path.open(encoding="utf-8")
    except OSError as error:
        raise RelayError(f"{path} cannot be read: {error.strerror}") from error
    with lines:
        for number, line in enumerate(lines, 1):
            try:
                yield parse_record(line)
            except (ValueError, TypeError) as error:
                raise RelayError(f"{path}, line {number}: not a record of `relaygr traffic`: {error}") from error


def numbers_to_compare(path: Path, size: int) -> frozenset[int]:
    """At most `size` numbers of impressions that were ranked untruncated by the run's first model, spread evenly."""
    ranked = sorted(
        (record.number, record.model_revision)
        for record in read_records(path)
        if record.scores is not None and record.path != "truncated" and not record.history_stale
    )
    numbers = [number for number, revision in ranked if revision == ranked[0][1]]
    step = max(1.0, len(numbers) / size)
    return frozenset(numbers[int(place * step)] for place in range(min(size, len(numbers))))
