"""Triton in tests: on a GPU as it is, elsewhere under its interpreter.

Triton reads TRITON_INTERPRET when it is imported, so this module must be imported before anything imports Triton; it
says so if it was not. Triton 3.7's interpreter keeps bfloat16 as bare 16-bit integers: it multiplies them as such, and
truncates where a GPU rounds to even. Both are mended here, and it is taught the one instruction that the kernels name,
no more exact than NVIDIA promises, so that what is tested is what a GPU does.
"""

from __future__ import annotations

import os
import sys
from typing import Any

import numpy as np
import pytest
import torch

from workers.device import Device, open_device
from workers.kv import KvGeometry
from workers.model.attention.bias import RelativeBiases
from workers.model.attention.spec import AttentionSpec

DEVICE: Device = open_device()
INTERPRETED = DEVICE.torch_device.type != "cuda"

if INTERPRETED:
    if "triton" in sys.modules and os.environ.get("TRITON_INTERPRET") != "1":
        raise RuntimeError("Triton was imported before tests.workers.triton_world: set TRITON_INTERPRET=1")
    os.environ["TRITON_INTERPRET"] = "1"
pytest.importorskip("triton", reason="the kernels need Triton, which is there for Linux only")

import triton.language as tl  # noqa: E402 - the interpreter is chosen above
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle  # noqa: E402

from workers.model.attention.triton_attention import TritonAttention  # noqa: E402
from workers.model.attention.triton_launch import Blocks  # noqa: E402

BLOCKS = Blocks(keys=16)
"""The interpreter has no clock to tune by, and a GPU would tune for minutes: each small shape is a kind of its own."""


def choose_triton(
    spec: AttentionSpec, biases: RelativeBiases | None, geometry: KvGeometry, device: Device
) -> TritonAttention:
    """An `AttentionChooser`."""
    return TritonAttention(spec, device, BLOCKS)


_cast, _dot = InterpreterBuilder.cast_impl, InterpreterBuilder.create_dot


def _widened(handle: Any) -> Any:
    if handle.dtype.scalar != tl.bfloat16:
        return handle
    return TensorHandle((handle.data.astype(np.uint32) << 16).view(np.float32), tl.float32)


def _cast_rounding(self: Any, source: Any, target: Any) -> Any:
    if source.dtype.scalar != tl.float32 or target.scalar != tl.bfloat16:
        return _cast(self, source, target)
    rounded = torch.from_numpy(np.ascontiguousarray(source.data)).to(torch.bfloat16).view(torch.int16)
    return TensorHandle(rounded.numpy().view(np.uint16).reshape(source.data.shape), tl.bfloat16)


class _Result:
    def __init__(self, handle: Any) -> None:
        self._handle = handle

    def get_result(self, index: int) -> Any:
        return self._handle


def _tanh_approx(self: Any, asm: str, constraints: str, values: list[Any], types: Any, pure: bool, pack: int) -> Any:
    """tanh with 11 bits after the first, cut off: always the largest error that is promised, and all to one side."""
    if asm != "tanh.approx.f32 $0, $1;":
        raise NotImplementedError(asm)
    fraction, exponent = np.frexp(np.tanh(values[0].data.astype(np.float64)))
    cut = np.ldexp(np.trunc(fraction * 2.0**12) / 2.0**12, exponent)
    return _Result(TensorHandle(cut.astype(np.float32), tl.float32))


def _dot_of_numbers(self: Any, a: Any, b: Any, *rest: Any) -> Any:
    return _dot(self, _widened(a), _widened(b), *rest)


if INTERPRETED:
    InterpreterBuilder.cast_impl = _cast_rounding
    InterpreterBuilder.create_dot = _dot_of_numbers
    InterpreterBuilder.create_inline_asm = _tanh_approx
