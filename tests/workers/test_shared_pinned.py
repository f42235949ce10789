"""The arena's file as pinned memory of an accelerator."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from relaygr.worker.device import AcceleratorDevice, CpuDevice, open_device
from relaygr.worker.shared.dram_tier import map_file

SIZE = 1 << 20


def test_on_the_cpu_there_is_nothing_to_pin(tmp_path: Path) -> None:
    assert CpuDevice().pin_host(torch.from_numpy(map_file(tmp_path / "dram", SIZE).bytes))


def test_a_refusal_to_pin_does_not_fail_the_next_kernel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA keeps the error of a call and reports it at the next kernel launch."""
    kept: list[str] = []
    zeros = torch.zeros

    def register(*_: int) -> int:
        kept.append("cudaErrorMemoryAllocation")
        return 2

    def launch(*shape: int, device: torch.device) -> torch.Tensor:
        if kept:
            raise RuntimeError(kept.pop())
        return zeros(*shape)

    monkeypatch.setattr(torch.cuda, "cudart", lambda: SimpleNamespace(cudaHostRegister=register))
    monkeypatch.setattr(torch.accelerator, "set_device_index", lambda index: None)
    monkeypatch.setattr(torch, "zeros", launch)
    device = AcceleratorDevice(torch.device("cuda", 0))
    assert not device.pin_host(torch.from_numpy(map_file(tmp_path / "dram", SIZE).bytes))
    assert torch.zeros(3, device=device.torch_device).tolist() == [0.0, 0.0, 0.0]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_cuda_copies_from_the_file_itself(tmp_path: Path) -> None:
    device = open_device("cuda")
    file = map_file(tmp_path / "dram", SIZE)
    file.bytes[:] = 7
    memory = torch.from_numpy(file.bytes)
    assert device.pin_host(memory)
    assert memory.is_pinned()
    copied = torch.empty(SIZE, dtype=torch.uint8, device=device.torch_device)
    copied.copy_(memory, non_blocking=True)
    device.synchronize()
    assert int(copied.sum()) == 7 * SIZE
