"""CUDA, NPU and whatever else torch calls an accelerator: `torch.accelerator`, `torch.Stream` and `torch.Event`."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch

from workers.device.interface import Device, Event, MemoryInfo, Replay, Stream, too_large


class _GraphReplay(Replay):
    def __init__(self, graph: torch.accelerator.Graph) -> None:
        self._graph = graph

    def run(self) -> None:
        self._graph.replay()


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
            raise too_large(shape, "pinned host memory") from error

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
