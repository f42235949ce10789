"""The samples of a run: one row for each impression of its trace, as a Parquet file."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from relaygr.bench.generator.trace import read_table, write_table
from relaygr.runtime.errors import RelayError
from relaygr.schemas.messages import Outcome, StageTimings
from relaygr.schemas.messages import Path as RankingPath

LOST = "lost"


@dataclass(frozen=True, slots=True, eq=False)
class Sample:
    """One impression and its end. Times are in µs; those of gateway and worker are on the wall clock of one machine."""

    row: int
    """Its row in the trace, from 0."""
    part: int
    user_id: str
    history_length: int
    ranking_us: int
    """The scheduled time of the ranking request since the start of the trace."""
    lag_us: int
    """The latest of its messages (a new history, the retrieval event, the ranking request) was sent so long after its
    time.
    """
    latency_us: int | None = None
    """From its scheduled time to its result; None without one."""
    status: str = LOST
    """The outcome of the result, or `lost`."""
    reason: str | None = None
    path: str | None = None
    prefix_source: str | None = None
    prefix_tokens: int = 0
    tokens_cached: int = 0
    history_stale: bool = False
    """Ranked on another version of the history than that of the request, or on none while histories were loading."""
    to_worker_us: int = 0
    """From sending to receipt at the worker."""
    in_worker_us: int = 0
    to_gateway_us: int = 0
    """From the worker's sending to receipt here."""
    queue_us: int = 0
    wait_us: int = 0
    pre_infer_us: int = 0
    reload_us: int = 0
    rank_us: int = 0
    scores: NDArray[np.float32] | None = None

    @property
    def timings(self) -> StageTimings:
        """The stages at the worker; all 0 without any."""
        return StageTimings(
            self.queue_us, self.wait_us, self.pre_infer_us, self.reload_us, self.rank_us, self.in_worker_us
        )

    @property
    def device_us(self) -> int:
        """Device time that the request itself took."""
        return self.pre_infer_us + self.rank_us

    @property
    def is_whole(self) -> bool:
        """Whether it was ranked on the whole history that the request names."""
        return self.status == Outcome.RANKED and self.path != RankingPath.TRUNCATED and not self.history_stale

    def answered_within(self, budget_us: int) -> bool:
        """Whether a result came before the deadline."""
        return self.latency_us is not None and self.latency_us <= budget_us

    def is_late(self, budget_us: int) -> bool:
        """Whether it has no whole answer within the deadline. Every offered request counts."""
        return not (self.is_whole and self.answered_within(budget_us))


_TYPES: dict[str, Any] = {"scores": pa.list_(pa.float32()), "history_stale": pa.bool_()} | {
    name: pa.string() for name in ("user_id", "status", "reason", "path", "prefix_source")
}


def write_samples(samples: Sequence[Sample], path: Path) -> None:
    """Writes the samples. The file gets its name when it is complete."""
    names = [field.name for field in fields(Sample)]
    columns = {
        name: pa.array([getattr(each, name) for each in samples], _TYPES.get(name, pa.int64())) for name in names
    }
    write_table(pa.table(columns), path)


def read_samples(path: Path) -> list[Sample]:
    """Raises RelayError for a file that has no samples."""
    table = read_table(path)
    absent = [field.name for field in fields(Sample) if field.name not in table.column_names]
    if absent:
        raise RelayError(f"{path} has no samples: columns missing: {', '.join(absent)}")
    rows = table.to_pylist()
    for row in rows:
        if row["scores"] is not None:
            row["scores"] = np.array(row["scores"], np.float32)
    return [Sample(**{field.name: row[field.name] for field in fields(Sample)}) for row in rows]
