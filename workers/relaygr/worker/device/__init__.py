"""The device layer: the only package that knows which accelerator is there.

`open_device(setting)` chooses: the `device` setting, else the accelerator that torch reports, else the CPU. It
returns a `Device`, which makes streams and events, allocates device and host memory, and says how much is free.
CPU, CUDA and NPU go through the same two classes: `CpuDevice`, where everything happens at once on the calling
thread, and `AcceleratorDevice`.

torch_npu is imported only when the setting asks for `npu`; `workers/__init__.py` keeps torch from loading it.
"""

from relaygr.worker.device.accelerator import AcceleratorDevice
from relaygr.worker.device.cpu import CpuDevice
from relaygr.worker.device.interface import Device, Event, MemoryInfo, Recorder, Replay, Stream
from relaygr.worker.device.opening import open_device, set_threads

__all__ = [
    "AcceleratorDevice",
    "CpuDevice",
    "Device",
    "Event",
    "MemoryInfo",
    "Recorder",
    "Replay",
    "Stream",
    "open_device",
    "set_threads",
]
