"""What a worker holds at most, said before it is taken."""

from __future__ import annotations

from dataclasses import dataclass, fields

import psutil

from relaygr.runtime.errors import RelayError
from relaygr.worker.model.interface import Engine
from relaygr.worker.settings import WorkerSettings

HEADROOM = 0.9
"""Part of the available host memory that the plan may take."""


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Bytes at most, by kind. `weights`, `hbm` and `scratch` lie on the device, the others on the host.

    `process` is what interpreter and libraries took before anything else was. `history` is a memory-mapped
    file: the page cache may hold as much of it, and gives it back.
    """

    weights_bytes: int
    hbm_bytes: int
    scratch_bytes: int
    dram_bytes: int
    queues_bytes: int
    history_bytes: int
    process_bytes: int

    @property
    def total_bytes(self) -> int:
        return sum(getattr(self, field.name) for field in fields(self))

    def by_kind(self) -> dict[str, int]:
        """Kind -> bytes, in the order above."""
        return {field.name.removesuffix("_bytes"): getattr(self, field.name) for field in fields(self)}


def forward_bytes(engine: Engine, settings: WorkerSettings) -> int:
    """What one forward of the executor takes at most, beside weights and arena."""
    longest = engine.layout.tokens(engine.limits.max_prefix_behaviours)
    # A model whose rows see later rows gets its prefix in one piece; of others a piece is a page at least.
    piece = max(settings.max_chunk_tokens, settings.page_tokens) if engine.rules.chunks else longest
    suffix = engine.limits.max_suffix_behaviours * engine.layout.tokens_per_behaviour
    rows = max(engine.limits.max_candidates + suffix, settings.max_batch_rows)
    piece = min(piece, longest)
    if settings.mixes_chunks(engine.device.is_cpu):
        return engine.scratch_bytes(piece, rows)
    return max(engine.scratch_bytes(piece, 0), engine.scratch_bytes(0, rows))


def process_bytes(loaded_on_host: int) -> int:
    """Resident memory of this process now, less the `loaded_on_host` bytes in it that are counted elsewhere."""
    return max(0, psutil.Process().memory_info().rss - loaded_on_host)


def require_host_memory(plan: MemoryPlan, device_is_host: bool, taken_bytes: int = 0) -> None:
    """Raises RelayError if the host cannot give what the plan takes at once.

    `taken_bytes` of it are taken already: an arena on tmpfs that an earlier process made.
    """
    wanted = plan.dram_bytes + plan.queues_bytes - taken_bytes
    if device_is_host:
        wanted += plan.weights_bytes + plan.hbm_bytes + plan.scratch_bytes
    available = int(psutil.virtual_memory().available * HEADROOM)
    if wanted > available:
        raise RelayError(
            f"The worker would take {_gib(wanted)} of host memory, but {_gib(available)} are available "
            f"({int(HEADROOM * 100)} % of what is free). Lower `worker.dram_bytes`"
            + (" or `worker.hbm_bytes`" if device_is_host else "")
            + ", or free memory."
        )


def is_out_of_memory(error: Exception) -> bool:
    """Of the host, or of a device, which may have an error of its own by that name."""
    return isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError"


def _gib(size_bytes: int) -> str:
    return f"{size_bytes / 2**30:.2f} GiB"
