"""The memory plan: the most bytes that a worker allocates, known before it allocates them."""

from __future__ import annotations

from dataclasses import dataclass, fields

import psutil

from relaygr.runtime.errors import RelayError
from relaygr.runtime.limits import available_memory
from relaygr.worker import COMPILED_PRODUCTS
from relaygr.worker.model.interface import Engine
from relaygr.worker.settings import WorkerSettings

HEADROOM = 0.9
"""Share of the available memory (`relaygr.runtime.limits`) that the plan may use."""
PRODUCT_BYTES = 640 * 1024
"""Memory of one compiled product. Measured for widths of 64 to 1024: 110 KiB in int8, 320 to 590 in the others."""
LATER_BYTES = 64 * 1024 * 1024
"""Memory that a process takes after the model is loaded, beside the other kinds: for threads, Kafka clients, and the
requests, deletions and jobs that the executor remembers."""


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """The most bytes of each kind. `weights`, `hbm` and `scratch` are device memory, the others host memory.

    `process` is the memory of interpreter and libraries, measured when the model is loaded, and `LATER_BYTES`.
    `products` are those that oneDNN compiles on a CPU. `history` is a memory-mapped file: the page cache may hold all
    of it, and frees it when memory is short.
    """

    weights_bytes: int
    hbm_bytes: int
    scratch_bytes: int
    dram_bytes: int
    queues_bytes: int
    history_bytes: int
    process_bytes: int
    products_bytes: int

    @property
    def total_bytes(self) -> int:
        return sum(getattr(self, field.name) for field in fields(self))

    def by_kind(self) -> dict[str, int]:
        """Kind -> bytes, in the order above."""
        return {field.name.removesuffix("_bytes"): getattr(self, field.name) for field in fields(self)}


def forward_bytes(engine: Engine, settings: WorkerSettings) -> int:
    """Most bytes that one forward of the executor allocates, in addition to weights and arena."""
    longest = engine.layout.tokens(engine.limits.max_prefix_behaviours)
    # If rows attend to later rows, a prefix is one chunk. Otherwise a chunk is at least a page.
    chunk = max(settings.max_chunk_tokens, settings.page_tokens) if engine.rules.chunks else longest
    suffix = engine.limits.max_suffix_behaviours * engine.layout.tokens_per_behaviour
    rows = max(engine.limits.max_candidates + suffix, settings.max_batch_rows)
    chunk = min(chunk, longest)
    if settings.mixes_chunks(engine.device.is_cpu):
        return engine.scratch_bytes(chunk, rows)
    return max(engine.scratch_bytes(chunk, 0), engine.scratch_bytes(0, rows))


def products_bytes(engine: Engine) -> int:
    """Most bytes of the products that oneDNN compiles and keeps."""
    return COMPILED_PRODUCTS * PRODUCT_BYTES if engine.device.is_cpu else 0


def resident_bytes() -> int:
    """Present resident memory of this process."""
    return int(psutil.Process().memory_info().rss)


def process_bytes(before_bytes: int, engine: Engine) -> int:
    """Most memory of interpreter and libraries, after `engine` was loaded and used once.

    `before_bytes`: resident memory before that. Libraries load and compile code with the engine: 100 MiB on a CPU, more
    with an accelerator. Weights are counted elsewhere; of mapped ones not all may be resident.
    """
    host_weights = engine.weights_bytes if engine.device.is_cpu else 0
    return max(before_bytes, resident_bytes() - host_weights) + LATER_BYTES


def require_host_memory(plan: MemoryPlan, device_is_host: bool, taken_bytes: int = 0) -> None:
    """Raises RelayError if the plan needs more memory than the host, and the limits of the container, leave.

    `taken_bytes` of the plan are allocated already, by an arena on tmpfs that an earlier process created.
    """
    wanted = plan.dram_bytes + plan.queues_bytes - taken_bytes
    if device_is_host:
        wanted += plan.weights_bytes + plan.hbm_bytes + plan.scratch_bytes + plan.products_bytes
    available = int(available_memory().available_bytes * HEADROOM)
    if wanted > available:
        raise RelayError(
            f"The worker needs {_gib(wanted)} of host memory, but {_gib(available)} are available "
            f"({int(HEADROOM * 100)} % of what the machine and its container have free). Lower `worker.dram_bytes`"
            + (" or `worker.hbm_bytes`" if device_is_host else "")
            + ", free memory, or raise the container's limit."
        )


def is_out_of_memory(error: Exception) -> bool:
    """Whether host or device memory is exhausted. Devices may have an error type of their own with this name."""
    return isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError"


def _gib(size_bytes: int) -> str:
    return f"{size_bytes / 2**30:.2f} GiB"
