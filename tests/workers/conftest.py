"""One thread for torch's own operations, and Triton's interpreter where there is no GPU.

Triton reads the variable when it is imported.
"""

from __future__ import annotations

import os

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"


@pytest.fixture(autouse=True)
def one_thread() -> None:
    """Resets the number of threads, which an earlier test may have changed."""
    torch.set_num_threads(1)
