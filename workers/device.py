"""The device layer: the only module that knows which accelerator is there.

`open_device(setting)` chooses: the `device` setting, else the accelerator that torch reports, else the CPU. It
returns a `Device`, which makes streams and events, allocates device and host memory, and says how much is free.
CPU, CUDA and NPU go through the same two classes: `CpuDevice`, where everything happens at once on the calling
thread, and `AcceleratorDevice`, which uses `torch.accelerator`, `torch.Stream` and `torch.Event` only.

torch_npu is imported only when the setting asks for `npu`; `workers/__init__.py` keeps torch from loading it.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import platform
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import torch

from streams.errors import RelayError

_NPU = "npu"


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


class Replay(ABC):
    """Device work that was recorded once, and can be given to the device again at the cost of one launch."""

    @abstractmethod
    def run(self) -> None:
        """Gives the work to the calling thread's current stream: the same kernels on the same memory."""


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
            raise _too_large(shape, self.name) from error

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

    def capture(self, work: Callable[[], None]) -> Replay:
        """Runs `work` once, so that nothing is compiled later, records what it gives to the device, and returns that.

        `work` may read and write only memory that outlives the replay, and must give the device the same kernels
        whatever is in it. A device that cannot record runs `work` again each time. Raises RuntimeError if `work` does
        what cannot be recorded, such as waiting for the device.
        """
        work()
        return _CallReplay(work)


class _CallReplay(Replay):
    def __init__(self, work: Callable[[], None]) -> None:
        self._work = work

    def run(self) -> None:
        self._work()


class _GraphReplay(Replay):
    def __init__(self, graph: torch.accelerator.Graph) -> None:
        self._graph = graph

    def run(self) -> None:
        self._graph.replay()


class _DoneEvent(Event):
    def done(self) -> bool:
        return True

    def wait(self) -> None:
        return None


class _InlineStream(Stream):
    """Work runs on the calling thread and is done when the call returns."""

    @contextlib.contextmanager
    def use(self) -> Iterator[None]:
        yield

    def record(self) -> Event:
        return _DoneEvent()

    def wait_for(self, event: Event) -> None:
        event.wait()


class CpuDevice(Device):
    """The CPU: every piece of work is complete when its call returns."""

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"), _cpu_name())

    def empty_host_bytes(self, *shape: int) -> torch.Tensor:
        return self.empty_bytes(*shape)

    def pinned_bytes(self, size_bytes: int) -> int:
        return size_bytes

    def pin_host(self, memory: torch.Tensor) -> bool:  # noqa: ARG002 - all memory is the device's own
        return True

    def stream(self, *, low_priority: bool = False) -> Stream:  # noqa: ARG002 - one thread has one priority
        return _InlineStream()

    def current_stream(self) -> Stream:
        return _InlineStream()

    def bind_thread(self) -> None:
        return None

    def synchronize(self) -> None:
        return None

    def memory(self) -> MemoryInfo:
        memory = psutil.virtual_memory()
        return MemoryInfo(int(memory.available), int(memory.total))


class _AcceleratorEvent(Event):
    def __init__(self, event: torch.Event) -> None:
        self.event = event

    def done(self) -> bool:
        return bool(self.event.query())

    def wait(self) -> None:
        self.event.synchronize()


class _AcceleratorStream(Stream):
    def __init__(self, stream: torch.Stream) -> None:
        self.stream = stream

    @contextlib.contextmanager
    def use(self) -> Iterator[None]:
        with self.stream:
            yield

    def record(self) -> Event:
        return _AcceleratorEvent(self.stream.record_event())

    def wait_for(self, event: Event) -> None:
        if isinstance(event, _AcceleratorEvent):
            self.stream.wait_event(event.event)
        else:
            event.wait()


class AcceleratorDevice(Device):
    """CUDA, NPU and whatever else torch calls an accelerator."""

    def __init__(self, torch_device: torch.device) -> None:
        super().__init__(torch_device, str(torch_device))
        self._first_graph: torch.accelerator.Graph | None = None
        self._capture_stream: torch.Stream | None = None
        self._capturing = threading.Lock()
        # cuBLAS may else add parts of a long product in bfloat16. Other devices do not look at it.
        torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
        self.bind_thread()

    def sent(self, host: torch.Tensor, into: torch.Tensor | None = None) -> torch.Tensor:
        # From pageable memory a copy stops the thread on CUDA, and on an NPU may read what was freed. torch takes
        # pinned memory from a pool of its own, and gives it to nobody else before the copy has ended.
        pinned = torch.empty(host.shape, dtype=host.dtype, pin_memory=True).copy_(host)
        target = torch.empty(host.shape, dtype=host.dtype, device=self.torch_device) if into is None else into
        return target.copy_(pinned, non_blocking=True)

    def empty_host_bytes(self, *shape: int) -> torch.Tensor:
        try:
            return torch.empty(shape, dtype=torch.uint8, pin_memory=True)
        except (RuntimeError, MemoryError) as error:
            raise _too_large(shape, "pinned host memory") from error

    def pinned_bytes(self, size_bytes: int) -> int:
        # torch's allocator of pinned memory gives blocks of a power of two.
        return 1 << (size_bytes - 1).bit_length() if size_bytes else 0

    def pin_host(self, memory: torch.Tensor) -> bool:
        # torch has no call of its own for memory that it did not allocate; CUDA's runtime does, CANN's is not exposed.
        if self.torch_device.type != "cuda" or memory.numel() == 0:
            return False
        runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        return int(runtime.cudaHostRegister(memory.data_ptr(), memory.nbytes, 0)) == 0

    def stream(self, *, low_priority: bool = False) -> Stream:
        # torch: a lower number is more urgent, and 0 the least urgent of all.
        return _AcceleratorStream(torch.Stream(self.torch_device, priority=0 if low_priority else -1))

    def current_stream(self) -> Stream:
        return _AcceleratorStream(torch.accelerator.current_stream(self.torch_device))

    def bind_thread(self) -> None:
        torch.accelerator.set_device_index(self.torch_device.index)

    def synchronize(self) -> None:
        torch.accelerator.synchronize(self.torch_device)

    def memory(self) -> MemoryInfo:
        free_bytes, total_bytes = torch.accelerator.get_memory_info(self.torch_device)
        return MemoryInfo(int(free_bytes), int(total_bytes))

    @property
    def compute_units(self) -> int:
        properties = torch.get_device_module(self.torch_device).get_device_properties(self.torch_device)
        return int(getattr(properties, "multi_processor_count", 1))

    def capture(self, work: Callable[[], None]) -> Replay:
        # A model may be loaded, and captured, while another is.
        with self._capturing:
            # One stream for all: cuBLAS keeps a work space for each that it has seen, tens of MiB on Hopper.
            if self._capture_stream is None:
                self._capture_stream = torch.Stream(self.torch_device)
            stream, caller = self._capture_stream, torch.accelerator.current_stream(self.torch_device)
            stream.wait_stream(caller)
            with stream:
                work()
                graph = self._empty_graph()
                with graph:
                    work()
            caller.wait_stream(stream)
        return _GraphReplay(graph)

    def _empty_graph(self) -> torch.accelerator.Graph:
        """A graph to capture into, on the current stream.

        Replays follow one another on one thread, so they share their scratch memory. A small first graph, which is
        kept, holds it: torch refuses memory whose graphs are all gone. Other threads' copies go on meanwhile: only
        what this thread does is recorded, and held to the rules of recording.
        """
        if self._first_graph is None:
            first = torch.accelerator.Graph(capture_error_mode="thread_local")
            with first:
                torch.zeros(1, device=self.torch_device)
            self._first_graph = first
        return torch.accelerator.Graph(pool=self._first_graph.pool(), capture_error_mode="thread_local")


def open_device(setting: str | None = None) -> Device:
    """The device that the setting names; with none, the accelerator that is there, else the CPU.

    Raises RelayError for a name that torch does not know, and for a device that is not there.
    """
    if setting is None:
        found = torch.accelerator.current_accelerator(check_available=True)
        return CpuDevice() if found is None else AcceleratorDevice(torch.device(found.type, 0))
    if setting.split(":", 1)[0] == _NPU:
        _load_npu()
    try:
        wanted = torch.device(setting)
    except RuntimeError as error:
        raise RelayError(f"{setting!r} is not a device; write cpu, cuda, cuda:1 or npu.") from error
    if wanted.type == "cpu":
        return CpuDevice()
    present = torch.accelerator.current_accelerator(check_available=True)
    if present is None or present.type != wanted.type:
        there = "no accelerator at all" if present is None else present.type
        raise RelayError(
            f"Device {setting!r} was asked for, but torch {torch.__version__} finds {there}: set the device to cpu, "
            f"or install the build of torch and the driver that {wanted.type} needs."
        )
    count = torch.accelerator.device_count()
    index = wanted.index or 0
    if index >= count:
        raise RelayError(
            f"Device {setting!r} was asked for, but there are {count}: the last is {wanted.type}:{count - 1}."
        )
    return AcceleratorDevice(torch.device(wanted.type, index))


def set_threads(threads: int) -> None:
    """CPU threads that one operator may use, process-wide. Raises ValueError below 1."""
    if threads < 1:
        raise ValueError(f"{threads} threads: at least 1 is needed")
    torch.set_num_threads(threads)


def _load_npu() -> None:
    try:
        importlib.import_module("torch_npu")
    # A torch_npu without its CANN libraries raises OSError, ImportError or worse from deep inside.
    except Exception as error:
        raise RelayError(
            f"Device npu needs torch_npu and the CANN libraries, and importing torch_npu failed ({error}): install the "
            "extra `npu`, and source CANN's set_env.sh."
        ) from error


def _too_large(shape: tuple[int, ...], where: str) -> RelayError:
    size_mib = torch.Size(shape).numel() / 2**20
    return RelayError(f"{size_mib:,.0f} MiB do not fit into {where}: lower the tier sizes, or free memory there.")


def _cpu_name() -> str:
    model = platform.processor() or platform.machine()
    with contextlib.suppress(OSError), Path("/proc/cpuinfo").open(encoding="utf-8") as lines:
        for line in lines:
            if line.startswith("model name"):
                model = line.split(":", 1)[1].strip()
                break
    return f"{model}, {os.cpu_count()} cores"
