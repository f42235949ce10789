"""CUDA, NPU and other accelerators of torch, by `torch.accelerator`, `torch.Stream` and `torch.Event`."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch

from relaygr.worker.device.interface import CapturedWork, Device, Event, MemoryInfo, Recorder, Stream, too_large


class _CapturedGraph(CapturedWork):
    def __init__(self, graph: torch.cuda.CUDAGraph) -> None:
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
    """CUDA, NPU or another accelerator of torch."""

    def __init__(self, torch_device: torch.device) -> None:
        super().__init__(torch_device, str(torch_device))
        self._capture_stream: torch.Stream | None = None
        self._capturing = threading.Lock()
        # Without this, cuBLAS may add parts of a long product in bfloat16. Other devices ignore it.
        torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
        self.bind_thread()

    def sent(self, host: torch.Tensor, into: torch.Tensor | None = None) -> torch.Tensor:
        # A copy from pageable memory blocks the thread on CUDA, and may read freed memory on an NPU. torch allocates
        # pinned memory from its own pool, and does not reuse it before the copy has ended.
        pinned = torch.empty(host.shape, dtype=host.dtype, pin_memory=True).copy_(host)
        target = torch.empty(host.shape, dtype=host.dtype, device=self.torch_device) if into is None else into
        return target.copy_(pinned, non_blocking=True)

    def empty_host_bytes(self, *shape: int) -> torch.Tensor:
        try:
            return torch.empty(shape, dtype=torch.uint8, pin_memory=True)
        except (RuntimeError, MemoryError) as error:
            raise too_large(shape, "pinned host memory") from error

    def pinned_bytes(self, size_bytes: int) -> int:
        # torch allocates pinned memory in blocks whose size is a power of two.
        return 1 << (size_bytes - 1).bit_length() if size_bytes else 0

    def pin_host(self, memory: torch.Tensor) -> bool:
        # torch cannot pin memory that it did not allocate. CUDA's runtime can; CANN's function is not exposed.
        if self.torch_device.type != "cuda" or memory.numel() == 0:
            return False
        runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        is_pinned = int(runtime.cudaHostRegister(memory.data_ptr(), memory.nbytes, 0)) == 0
        if not is_pinned:
            # CUDA keeps the error and would report it for the next kernel of this thread; this call clears it.
            with contextlib.suppress(RuntimeError):
                torch.zeros(1, device=self.torch_device)
        return is_pinned

    def stream(self, *, low_priority: bool = False) -> Stream:
        # In torch a lower number is a higher priority, and 0 is the lowest priority.
        return _AcceleratorStream(torch.Stream(self.torch_device, priority=0 if low_priority else -1))

    def current_stream(self) -> Stream:
        return _AcceleratorStream(torch.accelerator.current_stream(self.torch_device))

    def bind_thread(self) -> None:
        torch.accelerator.set_device_index(self.torch_device.index)

    def synchronize(self) -> None:
        torch.accelerator.synchronize(self.torch_device)

    def memory(self) -> MemoryInfo:
        free_bytes, total_bytes = torch.get_device_module(self.torch_device).mem_get_info(self.torch_device)
        return MemoryInfo(int(free_bytes), int(total_bytes))

    @property
    def compute_units(self) -> int:
        properties = torch.get_device_module(self.torch_device).get_device_properties(self.torch_device)
        return int(getattr(properties, "multi_processor_count", 1))

    @property
    def prefers_bfloat16(self) -> bool:
        module = torch.get_device_module(self.torch_device)
        if self.torch_device.type == "cuda":
            # torch counts GPUs that only emulate bfloat16, too.
            return bool(module.is_bf16_supported(including_emulation=False))
        supported = getattr(module, "is_bf16_supported", None)
        return supported is not None and bool(supported())

    def recorder(self) -> Recorder:
        return _GraphRecorder(self)

    @contextlib.contextmanager
    def capture_stream(self) -> Iterator[torch.Stream]:
        """The stream on which graphs are captured. One thread at a time uses it: a model may load while another serves.

        All captures share one stream, because cuBLAS keeps a work space for each stream, tens of MiB on Hopper.
        """
        with self._capturing:
            if self._capture_stream is None:
                self._capture_stream = torch.Stream(self.torch_device)
            yield self._capture_stream


class _GraphRecorder(Recorder):
    """Captures by `torch.cuda.CUDAGraph`: only the kernels for CUDA can be captured."""

    def __init__(self, device: AcceleratorDevice) -> None:
        self._device = device
        self._first: torch.cuda.CUDAGraph | None = None

    def capture(self, work: Callable[[], None]) -> CapturedWork:
        with self._device.capture_stream() as stream:
            caller = torch.accelerator.current_stream(self._device.torch_device)
            stream.wait_stream(caller)
            with stream:
                work()
                if self._first is None:
                    # Kept: torch refuses the memory pool of graphs that are all deleted.
                    self._first = self._captured(lambda: torch.zeros(1, device=self._device.torch_device))
                graph = self._captured(work, self._first.pool())
            caller.wait_stream(stream)
        return _CapturedGraph(graph)

    def _captured(self, work: Callable[[], object], pool: Any = None) -> torch.cuda.CUDAGraph:
        """A graph of the work on the current stream. Its scratch memory is that of all graphs of the pool."""
        graph = torch.cuda.CUDAGraph()
        # During a capture torch can free no memory that it keeps for later use.
        self._device.synchronize()
        torch.cuda.empty_cache()
        # Other threads continue to copy: only the work of this thread is captured, and only this thread must obey the
        # rules of capturing.
        graph.capture_begin(pool=pool, capture_error_mode="thread_local")
        try:
            work()
        finally:
            graph.capture_end()
        return graph
