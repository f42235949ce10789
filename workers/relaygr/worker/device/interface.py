"""What the rest of the code sees of a device: memory, streams, events, and work that can be replayed."""

from __future__ import annotations

import contextlib
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
    """A point in a stream's work."""

    @abstractmethod
    def done(self) -> bool:
        """Whether all work before it has completed. Never blocks."""

    @abstractmethod
    def wait(self) -> None:
        """Blocks the calling thread until all work before it has completed."""


class Stream(ABC):
    """An ordered queue of device work."""

    @abstractmethod
    def use(self) -> contextlib.AbstractContextManager[None]:
        """Within it, the calling thread's work goes to this stream."""

    def run(self, work: Callable[[], None], size_bytes: int = 0) -> None:  # noqa: ARG002 - a real link knows
        """Gives the stream what `work` launches; `size_bytes` of it cross the link to the host."""
        with self.use():
            work()

    @abstractmethod
    def record(self) -> Event:
        """An event after all work given to the stream so far."""

    @abstractmethod
    def wait_for(self, event: Event) -> None:
        """Work given to the stream from now on starts after `event`. Does not block the thread."""


class CapturedWork(ABC):
    """Device work that was recorded once, and can be given to the device again at the cost of one launch."""

    @abstractmethod
    def run(self) -> None:
        """Gives the work to the calling thread's current stream: the same kernels on the same memory."""


class Recorder:
    """Records work. All that one recorder recorded shares scratch memory: one thread at a time replays it."""

    def capture(self, work: Callable[[], None]) -> CapturedWork:
        """Runs `work` once, so that nothing is compiled later, records what it gives to the device, and returns that.

        `work` may read and write only memory that outlives the replay, and must give the device the same kernels
        whatever is in it. A device that cannot record runs `work` again each time. Raises RuntimeError if `work` does
        what cannot be recorded, such as waiting for the device.
        """
        work()
        return _RepeatedCall(work)


class _RepeatedCall(CapturedWork):
    def __init__(self, work: Callable[[], None]) -> None:
        self._work = work

    def run(self) -> None:
        self._work()


class Device(ABC):
    """One device, as the rest of the code sees it."""

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
        """Whether work given to a stream goes on beside the thread that gave it."""
        return not self.is_cpu

    def empty_bytes(self, *shape: int) -> torch.Tensor:
        """Uninitialised uint8 memory on the device. Raises RelayError if it does not fit."""
        try:
            return torch.empty(shape, dtype=torch.uint8, device=self.torch_device)
        except (RuntimeError, MemoryError) as error:
            raise too_large(shape, self.name) from error

    def sent(self, host: torch.Tensor, into: torch.Tensor | None = None) -> torch.Tensor:
        """What `host` holds, on the device: in `into`, or in memory of its own; on a CPU it may be `host` itself.

        The copy is given to the calling thread's stream, and the thread goes on. `host` may be freed at once.
        """
        return host if into is None else into.copy_(host)

    @abstractmethod
    def empty_host_bytes(self, *shape: int) -> torch.Tensor:
        """Uninitialised uint8 host memory that the device copies from at full speed. Raises RelayError."""

    @abstractmethod
    def pinned_bytes(self, size_bytes: int) -> int:
        """What `empty_host_bytes` takes for so many bytes."""

    @abstractmethod
    def pin_host(self, memory: torch.Tensor) -> bool:
        """Makes host memory that is there already copy at full speed, until the process ends; whether it does now."""

    @abstractmethod
    def stream(self, *, low_priority: bool = False) -> Stream:
        """A new stream."""

    @abstractmethod
    def current_stream(self) -> Stream:
        """The stream that the calling thread's work goes to now."""

    @abstractmethod
    def bind_thread(self) -> None:
        """Makes this device the calling thread's current one. Call it first in each thread that uses the device."""

    @abstractmethod
    def synchronize(self) -> None:
        """Blocks until all work given to the device has completed."""

    def settle(self) -> None:
        """After work that raised: blocks until the device has done, well or ill, what it was given before.

        Kernels that were launched by then still write to the memory that is given back next. Raises nothing: who
        calls has an error already.
        """
        with contextlib.suppress(Exception):
            self.synchronize()

    @abstractmethod
    def memory(self) -> MemoryInfo:
        """Free and total memory now."""

    @property
    def compute_units(self) -> int:
        """Processors of the device that work side by side; 1 where it does not say."""
        return 1

    def recorder(self) -> Recorder:
        """A new recorder."""
        return Recorder()


def too_large(shape: tuple[int, ...], where: str) -> RelayError:
    """What to say of memory that is not there."""
    size_mib = torch.Size(shape).numel() / 2**20
    return RelayError(f"{size_mib:,.0f} MiB do not fit into {where}: lower the tier sizes, or free memory there.")
