"""The arena's file as pinned memory of an accelerator."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from workers.device import CpuDevice, open_device
from workers.shared.mapped_file import map_file

SIZE = 1 << 20


def test_on_the_cpu_there_is_nothing_to_pin(tmp_path: Path) -> None:
    assert CpuDevice().pin_host(torch.from_numpy(map_file(tmp_path / "dram", SIZE).bytes))


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
