"""One thread for torch's own operations, and Triton's interpreter where there is no GPU.

Triton reads the variable when it is imported.
"""

from __future__ import annotations

import os

import pytest
import torch

from relaygr.worker.device import CpuDevice
from relaygr.worker.model import layer_parts

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"


@pytest.fixture(autouse=True)
def one_thread() -> None:
    """Resets the number of threads, which an earlier test may have changed."""
    torch.set_num_threads(1)


@pytest.fixture
def exact_int8(monkeypatch: pytest.MonkeyPatch) -> None:
    """Products in int8 that are exact on this CPU: without VNNI the weights have 7 bits. Workers refuse such a CPU."""
    if not CpuDevice().has_int8_products:
        monkeypatch.setattr(layer_parts, "LARGEST_WEIGHT", 63.0)
        monkeypatch.setattr(CpuDevice, "has_int8_products", True)
