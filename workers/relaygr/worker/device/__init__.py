"""The device layer, the only package that distinguishes kinds of accelerators.

`open_device(setting)` returns the `Device` of the setting, else of the accelerator that torch finds, else the CPU. A
`Device` makes streams and events, allocates device and host memory, and reports free memory. `CpuDevice` runs
all work immediately, on the calling thread; `AcceleratorDevice` serves CUDA and NPU.

torch_npu is imported only if the setting names `npu`; `relaygr/worker/__init__.py` prevents torch from loading it.
"""

from __future__ import annotations

import importlib

import structlog
import torch

from relaygr.runtime.errors import RelayError
from relaygr.runtime.limits import cpu_quota
from relaygr.worker.device.accelerator import AcceleratorDevice
from relaygr.worker.device.cpu import CpuDevice
from relaygr.worker.device.interface import CapturedWork, Device, Event, MemoryInfo, Recorder, Stream

__all__ = [
    "AcceleratorDevice",
    "CapturedWork",
    "CpuDevice",
    "Device",
    "Event",
    "MemoryInfo",
    "Recorder",
    "Stream",
    "open_device",
    "set_threads",
]

_NPU = "npu"

log = structlog.get_logger()


def open_device(setting: str | None = None) -> Device:
    """The device of the setting; without a setting, the accelerator that torch finds, else the CPU.

    Raises RelayError for a name that torch does not know, and for a missing device.
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
            f"Device {setting!r} is set, but torch {torch.__version__} finds {there}: set the device to cpu, "
            f"or install the build of torch and the driver that {wanted.type} needs."
        )
    count = torch.accelerator.device_count()
    index = wanted.index or 0
    if index >= count:
        raise RelayError(f"Device {setting!r} is set, but there are {count}: the last is {wanted.type}:{count - 1}.")
    return AcceleratorDevice(torch.device(wanted.type, index))


def set_threads(threads: int) -> None:
    """CPU threads that one operator may use, process-wide. Raises ValueError below 1."""
    if threads < 1:
        raise ValueError(f"{threads} threads: at least 1 is needed")
    quota = cpu_quota()
    if quota is not None and threads > quota:
        log.warning(
            "more CPU threads than the CPU quota of the container has cores: the kernel pauses them", threads=threads,
            quota_cores=quota,
        )  # fmt: skip
    torch.set_num_threads(threads)


def _load_npu() -> None:
    try:
        importlib.import_module("torch_npu")
    # A torch_npu without its CANN libraries raises OSError, ImportError or another error.
    except Exception as error:
        raise RelayError(
            f"Device npu needs torch_npu and the CANN libraries, and importing torch_npu failed ({error}): install the "
            "extra `npu`, and source CANN's set_env.sh."
        ) from error
