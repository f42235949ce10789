"""The interface of devices: memory, streams, events, and captured work that can be replayed."""

from __future__ import annotations

import contextlib
import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

import torch

from relaygr.runtime.errors import RelayError


@dataclass(frozen=True, slots=True)
class MemoryInfo:
    """Memory of a device, in bytes."""

    free_bytes: int
    total_bytes: int


class Event(ABC):
    """A point in the work of a stream."""

    @abstractmethod
    def done(self) -> bool:
        """Whether all work before the event has completed. Never blocks."""

    @abstractmethod
    def wait(self) -> None:
        """Blocks the calling thread until all work before the event has completed."""


class Stream(ABC):
    """An ordered queue of device work."""

    @abstractmethod
    def use(self) -> contextlib.AbstractContextManager[None]:
        """A context in which the calling thread enqueues its work on this stream."""

    def run(self, work: Callable[[], None], size_bytes: int = 0) -> None:  # noqa: ARG002 - simulated devices use it
        """Enqueues the work that `work` launches. The work copies `size_bytes` between host and device."""
        with self.use():
            work()

    @abstractmethod
    def record(self) -> Event:
        """An event after all work enqueued so far."""

    @abstractmethod
    def wait_for(self, event: Event) -> None:
        """Work enqueued from now on starts after `event`. Does not block the thread."""


class CapturedWork(ABC):
    """Device work that was captured once, and can be enqueued again at the cost of one launch."""

    @abstractmethod
    def run(self) -> None:
        """Enqueues the work on the calling thread's current stream: the same kernels on the same memory."""


class Recorder:
    """Captures work. All work of one recorder shares scratch memory, so only one thread at a time may replay it."""

    def capture(self, work: Callable[[], None]) -> CapturedWork:
        """Runs `work` once, which compiles its kernels, then captures the work that it enqueues.

        `work` may use only memory that outlives the captured work, and must start the same kernels for any contents. A
        device that cannot capture calls `work` again at each replay. Raises RuntimeError if `work` does something that
        cannot be captured, such as waiting for the device.
        """
        work()
        return _RepeatedCall(work)


class _RepeatedCall(CapturedWork):
    def __init__(self, work: Callable[[], None]) -> None:
        self._work = work

    def run(self) -> None:
        self._work()


class Device(ABC):
    """One device."""

    def __init__(self, torch_device: torch.device, description: str) -> None:
        self.torch_device = torch_device
        self.description = description

    @property
    def name(self) -> str:
        """`cpu`, `cuda:0`, `npu:1`."""
        return str(self.torch_device)

    @property
    def is_cpu(self) -> bool:
        return self.torch_device.type == "cpu"

    @property
    def has_streams(self) -> bool:
        """Whether enqueued work runs asynchronously to the calling thread."""
        return not self.is_cpu

    def empty_bytes(self, *shape: int) -> torch.Tensor:
        """Uninitialised uint8 memory on the device. Raises RelayError if it does not fit."""
        try:
            return torch.empty(shape, dtype=torch.uint8, device=self.torch_device)
        except (RuntimeError, MemoryError) as error:
            raise too_large(shape, self.name) from error

    def sent(self, host: torch.Tensor, into: torch.Tensor | None = None) -> torch.Tensor:
        """A copy of `host` on the device: in `into`, or in new memory; on a CPU it may be `host` itself.

        The copy is enqueued on the calling thread's stream and does not block. `host` may be freed at once.
        """
        return host if into is None else into.copy_(host)

    @abstractmethod
    def empty_host_bytes(self, *shape: int) -> torch.Tensor:
        """Uninitialised uint8 host memory that is pinned for fast copies. Raises RelayError if it does not fit."""

    @abstractmethod
    def pinned_bytes(self, size_bytes: int) -> int:
        """The memory that `empty_host_bytes` allocates for `size_bytes` bytes."""

    @abstractmethod
    def pin_host(self, memory: torch.Tensor) -> bool:
        """Pins existing host memory until the process ends. Returns whether it is pinned now."""

    @abstractmethod
    def stream(self, *, low_priority: bool = False) -> Stream:
        """A new stream."""

    @abstractmethod
    def current_stream(self) -> Stream:
        """The stream on which the calling thread enqueues its work."""

    @abstractmethod
    def bind_thread(self) -> None:
        """Makes this device the current one of the calling thread. Each thread that uses the device calls it first."""

    @abstractmethod
    def synchronize(self) -> None:
        """Blocks until all work enqueued on the device has completed."""

    def settle(self) -> None:
        """After an error: blocks until the device has finished the work enqueued before, successfully or not.

        Kernels that were launched before the error may still write to memory that the caller is about to free. Raises
        nothing, because the caller already handles an error.
        """
        with contextlib.suppress(Exception):
            self.synchronize()

    @abstractmethod
    def memory(self) -> MemoryInfo:
        """Free and total memory now."""

    @property
    def has_int8_products(self) -> bool:
        """Whether the device has instructions for products in int8 with exact sums, and the engine uses them."""
        return False

    @property
    def compute_units(self) -> int:
        """The number of multiprocessors of the device; 1 if it does not report one."""
        return 1

    @property
    def prefers_bfloat16(self) -> bool:
        """Whether products in bfloat16 are several times as fast as in float32, on hardware made for them."""
        return False

    def recorder(self) -> Recorder:
        """A new recorder."""
        return Recorder()


def too_large(shape: tuple[int, ...], where: str) -> RelayError:
    """The error for memory that cannot be allocated."""
    size_mib = math.prod(shape) / 2**20
    return RelayError(f"{size_mib:,.0f} MiB do not fit into {where}: lower the tier sizes, or free memory there.")
