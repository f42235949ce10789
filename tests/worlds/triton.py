"""Triton in tests: on a GPU as it is, elsewhere under its interpreter.

`conftest.py` chooses the interpreter. Triton 3.7's interpreter keeps bfloat16 as bare 16-bit integers: it multiplies
them as such, and truncates where a GPU rounds to even, as it does for 8-bit floats. This module mends that, and teaches
the interpreter the few instructions of a GPU that the kernels name, so that what is tested is what a GPU does.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from relaygr.worker.device import Device, open_device
from relaygr.worker.kv import KvGeometry
from relaygr.worker.model.attention.bias import RelativeBiases
from relaygr.worker.model.attention.spec import AttentionSpec

DEVICE: Device = open_device()
INTERPRETED = DEVICE.torch_device.type != "cuda"
if INTERPRETED:
    # Triton reads it when it is imported.
    os.environ["TRITON_INTERPRET"] = "1"

pytest.importorskip("triton", reason="the kernels need Triton, which is there for Linux only")

import triton.language as tl  # noqa: E402 - the interpreter is chosen above
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle, interpreter_builder  # noqa: E402

from relaygr.worker.model.triton.attention import TritonAttention  # noqa: E402
from relaygr.worker.model.triton.launch import Blocks  # noqa: E402
from relaygr.worker.model.triton.plan import MaskOptions, PlanShape, pack  # noqa: E402
from tests.worlds.attention import LAYER, RaggedForward, SegmentRows  # noqa: E402

BLOCKS = Blocks(keys=16)
"""The interpreter has no clock to tune by, and a GPU would tune for minutes: each small shape is a kind of its own."""


def choose_triton(
    spec: AttentionSpec, biases: RelativeBiases | None, geometry: KvGeometry, device: Device
) -> TritonAttention:
    """An `AttentionChooser`."""
    return TritonAttention(spec, device, biases, BLOCKS)


@contextmanager
def nan_memory() -> Iterator[None]:
    """New memory is NaN, so that a row which no program writes is found."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    assert torch.empty(1).isnan()
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


class Forward(RaggedForward):
    """One forward on the device that runs the kernels."""

    def __init__(self, runs: list[SegmentRows], **options: Any) -> None:
        super().__init__(runs, device=DEVICE, **options)

    def attend(self) -> torch.Tensor:
        """With the programs that the back end chooses."""
        back_end = TritonAttention(self.spec, DEVICE, self.biases, BLOCKS)
        return back_end.begin(self.kv, self.segments).attend(LAYER, self.q, self.k, self.v)

    def attend_by(self, shape: PlanShape, blocks: Blocks = BLOCKS, rows: slice = slice(None)) -> torch.Tensor:
        """With programs of that shape: [rows, heads, dv]. `rows`: the rows of the segments, if those were changed."""
        spec = self.spec
        attention = TritonAttention(spec, DEVICE, self.biases, blocks)
        arrays = attention.arrays(self.kv, self.segments)
        mask = MaskOptions(spec.contextual_tokens, spec.max_attn_len, spec.min_full_attn_len, spec.target_group_size)
        plan = pack(arrays, self.kv.geometry.page_tokens, shape, arrays.capacity, mask, least_keys=8)
        out = attention.started(self.kv, plan).attend(LAYER, self.q[rows], self.k[rows], self.v[rows])
        return out.unflatten(1, (spec.num_heads, spec.hidden_dim))


_cast, _dot = InterpreterBuilder.cast_impl, InterpreterBuilder.create_dot
_fp_to_fp = InterpreterBuilder.create_fp_to_fp


def _widened(handle: Any) -> Any:
    if handle.dtype.scalar != tl.bfloat16:
        return handle
    return TensorHandle((handle.data.astype(np.uint32) << 16).view(np.float32), tl.float32)


_ROUNDED = {tl.bfloat16: (torch.bfloat16, torch.uint16), tl.float8e4nv: (torch.float8_e4m3fn, torch.uint8)}


def _cast_rounding(self: Any, source: Any, target: Any) -> Any:
    if source.dtype.scalar == tl.float8e4nv:
        numbers = torch.from_numpy(np.ascontiguousarray(source.data)).view(torch.float8_e4m3fn).float().numpy()
        source = TensorHandle(numbers.reshape(source.data.shape), tl.float32)
        return source if target.scalar == tl.float32 else _cast_rounding(self, source, target)
    if source.dtype.scalar != tl.float32 or target.scalar not in _ROUNDED:
        return _cast(self, source, target)
    dtype, bits = _ROUNDED[target.scalar]
    rounded = torch.from_numpy(np.ascontiguousarray(source.data)).to(dtype).view(bits)
    return TensorHandle(rounded.numpy().reshape(source.data.shape), target.scalar)


def _convert(self: Any, source: Any, target: Any, rounding_mode: Any) -> Any:
    if tl.float8e4nv in (source.dtype.scalar, target.scalar):
        return _cast_rounding(self, source, target)
    return _fp_to_fp(self, source, target, rounding_mode)


class _Result:
    def __init__(self, handle: Any) -> None:
        self._handle = handle

    def get_result(self, index: int) -> Any:
        return self._handle


_PTX: dict[str, Callable[..., Any]] = {
    "mul": np.multiply,
    "add": np.add,
    "ex2": np.exp2,
    "rcp": np.reciprocal,
}


def _inline_asm(self: Any, asm: str, constraints: str, values: list[Any], types: Any, pure: bool, pack: int) -> Any:
    """One float32 in, one out: each line an instruction, `0f` before the bits of a number."""
    registers = {f"${place}": value.data for place, value in enumerate(values, 1)}

    def of(name: str) -> Any:
        if name.startswith("0f"):
            return np.array(int(name[2:], 16), dtype=np.uint32).view(np.float32)
        return registers[name]

    for line in asm.strip().strip("{}").split(";"):
        operation, _, names = line.strip().partition(" ")
        if operation and not operation.startswith(".reg"):
            target, *sources = names.replace(" ", "").split(",")
            with np.errstate(over="ignore"):
                registers[target] = _PTX[operation.split(".")[0]](*map(of, sources))
    return _Result(TensorHandle(registers["$0"], tl.float32))


def _dot_of_numbers(self: Any, a: Any, b: Any, *rest: Any) -> Any:
    return _dot(self, _widened(a), _widened(b), *rest)


if INTERPRETED:
    # Else it computes every sum of integers twice, and throws the second away: only its debug mode asserts.
    interpreter_builder.options = replace(interpreter_builder.options, sanitize_overflow=False)
    InterpreterBuilder.cast_impl = _cast_rounding
    InterpreterBuilder.create_fp_to_fp = _convert
    InterpreterBuilder.create_dot = _dot_of_numbers
    InterpreterBuilder.create_inline_asm = _inline_asm
