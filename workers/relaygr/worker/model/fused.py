"""Where kernels of our own take the place of plain torch: on CUDA, if Triton is there and they compile and run."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TypeVar

import structlog
import torch

WARP_COLUMNS = 512
"""Columns of a row that one warp takes: 16 for each thread."""

T = TypeVar("T")
log = structlog.get_logger(__name__)


def if_it_runs(what: str, device: torch.device, make: Callable[[], T]) -> T | None:
    """What `make` makes, and tries once. None on other devices, and where it fails: with one warning for all layers."""
    if device.type != "cuda":
        return None
    try:
        return make()
    # A compiler fails in ways of its own, and plain torch is always there.
    except Exception as error:
        _warn(what, str(device), repr(error))
        return None


@functools.cache
def _warn(kernel: str, device: str, error: str) -> None:
    log.warning("no fused kernel, plain torch instead", kernel=kernel, device=device, error=error)


def warps_of(columns: int) -> int:
    """Warps for a row of so many columns."""
    return min(8, max(1, columns // WARP_COLUMNS))
