"""Records that aiokafka can not read are passed over, where it would raise for ever.

Kafka lets a header's name be any bytes; aiokafka raises for one that is not UTF-8, at the same record after every
restart. One such record on the retrieval topic would end all pre-infer. aiokafka reads batches from their start,
so the rest of its batch is passed over with it: those users' ranking requests take the full path. A batch whose
checksum is wrong was damaged on its way, and is refused as before.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import structlog
from aiokafka.consumer import fetcher
from aiokafka.errors import CorruptRecordException
from prometheus_client import Counter

_PASSED_OVER = Counter(
    "relaygr_trigger_unreadable_records_total", "records passed over because aiokafka can not read their batch"
)

_DAMAGED: Final = "Invalid CRC"
"""What aiokafka says of a wrong checksum; a batch that was read into can not be asked again."""

log = structlog.get_logger()


class _Batches:
    """A fetch's batches, and the last one that was handed out."""

    def __init__(self, batches: Any) -> None:
        self._batches = batches
        self.last: Any = None

    def has_next(self) -> bool:
        return bool(self._batches.has_next())

    def next_batch(self) -> Any:
        self.last = self._batches.next_batch()
        return self.last


class _ReadableRecords(fetcher.PartitionRecords):  # type: ignore[misc]
    """aiokafka's records of one fetch, without what it can not read."""

    _records: Any
    next_fetch_offset: int

    def _unpack_records(self) -> Iterator[Any]:
        self._records = batches = _Batches(self._records)
        while True:
            try:
                yield from super()._unpack_records()
            except (CorruptRecordException, UnicodeDecodeError) as error:
                batch = batches.last
                if batch is None or _DAMAGED in str(error):
                    raise
                passed_over = batch.next_offset - self.next_fetch_offset
                _PASSED_OVER.inc(passed_over)
                log.error(
                    "records can not be read and are passed over",
                    topic=self._tp.topic,
                    partition=self._tp.partition,
                    offset=self.next_fetch_offset,
                    records=passed_over,
                    error=str(error),
                )
                self.next_fetch_offset = batch.next_offset
            else:
                return


def pass_over_unreadable() -> None:
    """Makes the aiokafka consumers of this process do so. Safe to call again."""
    fetcher.PartitionRecords = _ReadableRecords
