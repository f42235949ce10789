"""Records the operations of a running cache in a file, on its own thread.

`on_event` only appends to a bounded queue. It never blocks: when the queue is full it drops the event and counts it.
The file is bounded too: events that do not fit are dropped and counted, and one warning is logged. An error of the
disk ends the recording, not the worker. The file is created at the first event, so a standby leaves the file of the
active worker alone. A file that exists is renamed to `NAME.1`, which replaces an older one. `on_event` records nothing
before `start` and after `close`.
"""

from __future__ import annotations

import errno
import os
import queue
import secrets
import threading
from io import FileIO
from pathlib import Path

import structlog
from prometheus_client import REGISTRY, CollectorRegistry, Counter

from relaygr.runtime.errors import RelayError
from relaygr.runtime.private_files import check_room
from relaygr.worker.cache.events import CacheEvent
from relaygr.worker.cache.trace.format import (
    TraceHeader,
    TraceRecord,
    encode_header,
    encode_record,
    keyed_hash,
    sketch_of,
)

_log = structlog.get_logger()

QUEUE_EVENTS = 8192
_BATCH_EVENTS = 512
_NAMESPACE_BYTES = 4


def require_writable(path: Path) -> None:
    """Raises RelayError if no trace can be written at `path`: its folder is missing, read-only or full."""
    try:
        if path.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        check_room(path.parent)
    except OSError as error:
        raise RelayError(
            f"worker.cache_trace {path} cannot be written ({error.strerror}): its folder must exist, be writable and "
            "have free space. Name another file, or remove the setting."
        ) from error


class TraceRecorder:
    """`on_event` is a `CacheListener`. Raises RelayError if the file cannot be written."""

    def __init__(self, path: Path, max_bytes: int, registry: CollectorRegistry = REGISTRY) -> None:
        require_writable(path)
        self._path = path
        self._max_bytes = max_bytes
        self._queue: queue.SimpleQueue[CacheEvent | None] = queue.SimpleQueue()
        self._key = secrets.token_bytes(16)
        self._thread: threading.Thread | None = None
        self._written_bytes = 0
        self._first_us: int | None = None
        events = Counter(
            "relaygr_cache_trace_events_total",
            "Cache operations offered to the trace, by whether they were written or dropped",
            ["outcome"],
            registry=registry,
        )
        self._written, self._dropped = events.labels("written"), events.labels("dropped")

    def on_event(self, event: CacheEvent) -> None:
        if self._thread is None:
            return
        if self._queue.qsize() >= QUEUE_EVENTS:
            self._dropped.inc()
        else:
            self._queue.put(event)

    def start(self, header: TraceHeader) -> None:
        """Starts the recording."""
        self._thread = threading.Thread(target=self._run, args=(header,), name="cache-trace", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Writes the events in the queue, and ends the recording. May be called again."""
        thread, self._thread = self._thread, None
        if thread is not None:
            self._queue.put(None)
            thread.join()

    def _run(self, header: TraceHeader) -> None:
        file: FileIO | None = None
        ended = full = False
        while not ended:
            batch, ended = self._next_batch()
            if full or not batch:
                self._dropped.inc(len(batch))
                continue
            try:
                file = file if file is not None else self._begin(header)
                full = not self._write(file, batch)
            except OSError as error:
                full = True
                self._dropped.inc(len(batch))
                _log.error("the cache trace cannot be written", path=str(self._path), error=error.strerror)
        if file is not None:
            file.close()

    def _begin(self, header: TraceHeader) -> FileIO:
        if self._path.exists():
            self._path.replace(self._path.with_name(self._path.name + ".1"))
        file = FileIO(str(self._path), "w")
        self._put(file, encode_header(header))
        _log.info("recording cache operations", path=str(self._path), max_bytes=self._max_bytes)
        return file

    def _next_batch(self) -> tuple[list[CacheEvent], bool]:
        """Events from the queue, in the order of the operations, and whether they are the last."""
        batch: list[CacheEvent] = []
        event = self._queue.get()
        while event is not None:
            batch.append(event)
            if len(batch) == _BATCH_EVENTS or self._queue.empty():
                break
            event = self._queue.get()
        batch.sort(key=lambda each: each.sequence)
        return batch, event is None

    def _write(self, file: FileIO, batch: list[CacheEvent]) -> bool:
        """Writes the batch in one call, so that only a crash can tear a record. False once the file is full."""
        parts: list[bytes] = []
        size_bytes = 0
        for event in batch:
            part = encode_record(self._record(event))
            if self._written_bytes + size_bytes + len(part) > self._max_bytes:
                break
            parts.append(part)
            size_bytes += len(part)
        self._put(file, b"".join(parts))
        self._written.inc(len(parts))
        if len(parts) == len(batch):
            return True
        self._dropped.inc(len(batch) - len(parts))
        _log.warning("the cache trace is full; recording ends", path=str(self._path), max_bytes=self._max_bytes)
        return False

    def _put(self, file: FileIO, data: bytes) -> None:
        """Writes all bytes or raises OSError: a raw file may write only a part."""
        if file.write(data) != len(data):
            raise OSError(errno.ENOSPC, "only a part was written")
        self._written_bytes += len(data)

    def _record(self, event: CacheEvent) -> TraceRecord:
        if self._first_us is None:
            self._first_us = event.at_us
        user = keyed_hash(event.user_id.encode(), self._key, 8)
        return TraceRecord(
            event.kind,
            event.at_us - self._first_us,
            int.from_bytes(user, "little"),
            event.namespace[:_NAMESPACE_BYTES],
            sketch_of(event.chain, self._key),
            event.outcome,
        )
