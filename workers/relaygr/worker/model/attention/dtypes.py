"""torch's names of our element types."""

from __future__ import annotations

from collections.abc import Callable

import torch

from relaygr.worker.kv import KvDtype
from relaygr.worker.model.precision import ComputeDtype

_BY_NAME = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def torch_dtype(dtype: KvDtype | ComputeDtype) -> torch.dtype:
    """torch's name of an element type."""
    return _BY_NAME[dtype.value]


def rounding(dtype: KvDtype) -> Callable[[torch.Tensor], torch.Tensor]:
    """What storing and reading back does to K or V: nothing, or a round trip through bfloat16.

    Rows that are never stored (suffix, candidates) take it too, so that they count as much in ranking as they
    would in a prefix.
    """
    if dtype is KvDtype.FLOAT32:
        return lambda x: x
    return lambda x: x.to(torch.bfloat16).to(x.dtype)
