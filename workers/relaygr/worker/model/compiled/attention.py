"""HSTU attention on K,V in pages in float32, as machine code that LLVM compiles at load: for CPUs with AVX-512 or AVX2.

torch would gather the keys from their pages, multiply, write the scores, apply SiLU, and multiply again. The compiled
function (`kernel.py`) reads each page in place, and keeps 64 keys' weights in the first-level cache. It needs llvmlite
(the extra `compiled`), and no compiler on the machine.

OpenMP's threads, which torch uses, share the heads, and parts of the keys if there are fewer heads. Their sums are
added in a fixed order, so a result is the same on each call with as many threads.
"""

from __future__ import annotations

import contextlib
import functools

import numpy as np
import torch
from numpy.typing import NDArray
from torch.profiler import record_function

from relaygr.worker.kv import KvDtype, KvGeometry
from relaygr.worker.model.compiled.form import (
    LANES,
    Arguments,
    Block,
    Form,
    blocks_of_processor,
    has_bfloat16_products,
)
from relaygr.worker.model.compiled.machine_code import Call, compiled_call

_ROWS = 256
"""Rows of one call: their sums and q of one head fit into the second-level cache."""


class CompiledAttention:
    """Attention of rows on a segment's keys in pages, for one geometry."""

    def __init__(self, geometry: KvGeometry, blocks: tuple[Block, ...] | None = None, bfloat16: bool = False) -> None:
        """`blocks`: None chooses those of this processor. `bfloat16`: as in `Form`, for a processor that has it.

        Raises ImportError without llvmlite, RuntimeError if it cannot compile for this processor.
        """
        chosen = blocks or blocks_of_processor()
        if chosen is None:
            raise RuntimeError("the processor has neither AVX-512 nor AVX2 with FMA")
        self._geometry = geometry
        self._form = Form(geometry, bfloat16)
        self._blocks = chosen
        self._function = _compiled(self._form, chosen)
        self.name = "compiled in bfloat16" if bfloat16 else "compiled"

    @staticmethod
    def fits(geometry: KvGeometry) -> bool:
        """Whether the pages have a form that is compiled, and the processor has the instructions."""
        whole = geometry.page_tokens % LANES == 0 and geometry.hidden_dim % LANES == 0
        return whole and geometry.dtype is KvDtype.FLOAT32 and blocks_of_processor() is not None

    @staticmethod
    def in_bfloat16(geometry: KvGeometry) -> bool:
        """Whether products in bfloat16 can be compiled, too."""
        return CompiledAttention.fits(geometry) and geometry.attention_dim % LANES == 0 and has_bfloat16_products()

    def attend(
        self,
        arena: torch.Tensor,
        layer: int,
        pages: NDArray[np.int64],
        tokens: int,
        q: torch.Tensor,
        out: torch.Tensor,
        alpha: float,
        scale: float,
        causal: bool = False,
    ) -> None:
        """out [rows, heads, hidden_dim] = scale * what alpha * q [rows, heads, attention_dim] see of `pages`.

        Each row sees the first `tokens` tokens. `causal`: row i also sees the next i + 1. `arena`: uint8
        [num_pages, page_bytes], contiguous. q and out: the last dimension is contiguous.
        """
        rows = q.shape[0]
        if not tokens and not causal:
            out.zero_()
            return
        for low in range(0, rows, _ROWS):
            high = min(low + _ROWS, rows)
            visible, last = (tokens + low + 1, tokens + high) if causal else (tokens, tokens)
            with _recorded("attend compiled"):
                self._attend(arena, layer, pages, last, visible, q[low:high], out[low:high], alpha, scale)

    def _attend(
        self,
        arena: torch.Tensor,
        layer: int,
        pages: NDArray[np.int64],
        tokens: int,
        visible: int,
        q: torch.Tensor,
        out: torch.Tensor,
        alpha: float,
        scale: float,
    ) -> None:
        """Row i sees the first `visible` + i of `tokens` tokens."""
        g = self._geometry
        rows, heads, _ = q.shape
        threads = torch.get_num_threads()
        units = -(-tokens // self._form.unit)
        parts = min(units, -(-threads // heads))
        counts = self._counts(rows)
        padded = sum(count * block.rows for block, count in zip(self._blocks, counts, strict=True))
        # The tensors must live until the call returns.
        packed_q = torch.empty(parts, heads, padded, g.attention_dim)
        sums = torch.zeros(parts, heads, padded, g.hidden_dim)
        arguments = Arguments(
            arena=arena.data_ptr() + layer * g.layer_bytes,
            table=pages.ctypes.data,
            q=q.data_ptr(),
            packed_q=packed_q.data_ptr(),
            sums=sums.data_ptr(),
            out=out.data_ptr(),
            units=units,
            tokens=tokens,
            visible=visible,
            parts=parts,
            rows=rows,
            padded=padded,
            q_row=q.stride(0),
            q_head=q.stride(1),
            out_row=out.stride(0),
            out_head=out.stride(1),
            alpha=alpha,
            scale=scale,
            block_counts=tuple(counts),
        )
        self._function(arguments, threads)
        if parts > 1:
            torch.mul(sums.sum(0)[:, :rows].transpose(0, 1), scale, out=out)

    def _counts(self, rows: int) -> list[int]:
        """Blocks of each kind: large ones as long as they are more than half full."""
        *large, small = self._blocks
        if not large:
            return [-(-rows // small.rows)]
        count = (rows + small.rows - 1) // large[0].rows
        return [count, -(-max(0, rows - count * large[0].rows) // small.rows)]


@functools.cache
def _compiled(form: Form, blocks: tuple[Block, ...]) -> Call:
    """The function for a form."""
    from relaygr.worker.model.compiled.kernel import kernel

    return compiled_call(kernel(form, blocks))


_NOT_RECORDED = contextlib.nullcontext()


def _recorded(name: str) -> contextlib.AbstractContextManager[object]:
    """Shows a call of machine code to torch's profiler. Without a profiler, `record_function` takes 4 us, this 0.2."""
    return record_function(name) if torch._C._autograd._profiler_enabled() else _NOT_RECORDED
