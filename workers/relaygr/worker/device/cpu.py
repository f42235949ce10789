"""The CPU as a device: work runs on the calling thread, and both tiers are ordinary memory."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import math
import mmap
from collections.abc import Iterator

import torch

from relaygr.runtime.limits import available_memory
from relaygr.runtime.processor import instruction_sets, processor_name
from relaygr.worker.device.interface import Device, Event, MemoryInfo, Stream, too_large

_INT8_INSTRUCTIONS = frozenset(("avx512_vnni", "avx_vnni", "amx_int8"))
"""Any of them multiplies int8 and adds into int32. Older instructions add into int16, which overflows."""


class _DoneEvent(Event):
    def done(self) -> bool:
        return True

    def wait(self) -> None:
        return None


class _InlineStream(Stream):
    """Work runs on the calling thread and is complete when the call returns."""

    @contextlib.contextmanager
    def use(self) -> Iterator[None]:
        yield

    def record(self) -> Event:
        return _DoneEvent()

    def wait_for(self, event: Event) -> None:
        event.wait()


class CpuDevice(Device):
    """The CPU. All work is complete when its call returns."""

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"), processor_name())
        _keep_freed_memory()

    def empty_bytes(self, *shape: int) -> torch.Tensor:
        try:
            return large_bytes(math.prod(shape)).view(shape)
        except (RuntimeError, MemoryError, OSError, OverflowError) as error:
            raise too_large(shape, self.name) from error

    def empty_host_bytes(self, *shape: int) -> torch.Tensor:
        return self.empty_bytes(*shape)

    def pinned_bytes(self, size_bytes: int) -> int:
        return size_bytes

    def pin_host(self, memory: torch.Tensor) -> bool:  # noqa: ARG002 - host memory is device memory
        return True

    def stream(self, *, low_priority: bool = False) -> Stream:  # noqa: ARG002 - there is one priority
        return _InlineStream()

    def current_stream(self) -> Stream:
        return _InlineStream()

    def bind_thread(self) -> None:
        # A processor takes some hundred times as long for numbers below 1e-38. Training with weight decay leaves such
        # weights: a product with 512 x 512, of which a third were such, took 679 ms instead of 1.9.
        torch.set_flush_denormal(True)

    def synchronize(self) -> None:
        return None

    @property
    def has_int8_products(self) -> bool:
        return not _INT8_INSTRUCTIONS.isdisjoint(instruction_sets())

    def memory(self) -> MemoryInfo:
        memory = available_memory()
        return MemoryInfo(memory.available_bytes, memory.total_bytes)


_HUGE_PAGE_BYTES = 2 << 20


def large_bytes(size: int) -> torch.Tensor:
    """uint8 [size], not initialised, in pages of 2 MiB if the system has them, and in no core file.

    Memory in pages of 4 KiB has more pages than the processor's TLB holds: attention of 16 rows on 84 MB of K,V spent a
    quarter of its time on TLB misses.
    """
    if size < _HUGE_PAGE_BYTES or not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.empty(size, dtype=torch.uint8)
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    # A process that crashes has its locks until its core is written: a standby would wait for gigabytes of K,V.
    for advice in (mmap.MADV_HUGEPAGE, mmap.MADV_DONTDUMP):
        # A kernel without huge pages refuses.
        with contextlib.suppress(OSError):
            memory.madvise(advice)
    return torch.frombuffer(memory, dtype=torch.uint8)


_KEPT_BYTES = 64 << 20
_LARGEST_FROM_HEAP = 32 << 20
"""The most that glibc takes."""
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3


@functools.cache
def _keep_freed_memory() -> None:
    """Lets each heap of this process keep up to `_KEPT_BYTES` that were freed at its end.

    A forward frees all that it allocates. glibc often gave that back to the system, depending on what a thread had
    allocated before, and the next forward began with up to 2,900 page faults: 3 of 26 ms for a prefix of 1,100 tokens.
    Does nothing with another C library.
    """
    with contextlib.suppress(AttributeError, OSError, TypeError):
        library = ctypes.CDLL(None)
        library.mallopt(_M_MMAP_THRESHOLD, _LARGEST_FROM_HEAP)
        library.mallopt(_M_TRIM_THRESHOLD, _KEPT_BYTES)
