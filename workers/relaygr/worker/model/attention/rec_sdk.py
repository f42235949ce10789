"""The NPU back end: Ascend RecSDK's HSTU operator behind the attention interface.

`torch.ops.mxrec.hstu_jagged.delta` computes SiLU(alpha q k^T) * scale * mask, times v, over jagged q and k of different
lengths. Two calls in each layer compute our mask, by the mask rules in RecSDK's own tests:

* causal rows against [context, causal rows], mask type 0: the lower triangle, aligned at the end of the keys;
* candidates against [context, causal rows], mask type 2: no mask.

Plain torch adds the term of a candidate's own key: there is no row sum, so partial sums are exact. The operator needs
contiguous keys, so the context is gathered from its pages once in each layer. RecSDK's paged operator is not used: its
pages are [tokens, heads, dim] of one layer, ours are [heads, tokens, dim] of all layers, and it would copy all of them.

Sources (RecSDK, github.com/Ascend/RecSDK): the signature in cust_op/framework/torch_plugin/torch_library/hstu/
hstu_delta_q.cpp, the limits in cust_op/ascendc_op/ai_core_op/hstu_dense_forward/README.md, the masks in
cust_op/test/hstu_dense/torch/test_hstu_deltaqk_forward.py. docs/npu.md lists what was checked without the hardware.
"""

from __future__ import annotations

import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812 - its usual name
from numpy.typing import NDArray

from relaygr.worker.model.attention.blocked import BlockedAttention
from relaygr.worker.model.attention.interface import AttentionPass
from relaygr.worker.model.attention.paged_kv import PagedKv
from relaygr.worker.model.attention.segments import Placed, Segment, place
from relaygr.worker.model.attention.spec import AttentionSpec

OPERATOR_LIBRARY = "libfbgemm_npu_api.so"
"""RecSDK's build installs its operators in this library, beside the Python packages."""
MAX_HEADS = 16
MAX_DIM = 512
DIM_STEP = 16
MAX_TOKENS = 20480
"""The most rows, and the most keys, of one segment."""

_OPERATORS: Any = torch.ops
_LOWER_TRIANGLE = 0
_NO_MASK = 2
_Int64Array = NDArray[np.int64]


def load_operators() -> bool:
    """Whether RecSDK's operator is registered. First loads its library from the place where RecSDK's build installs it.

    Raises OSError if the library exists and cannot be loaded.
    """
    library = Path(sysconfig.get_path("purelib")) / OPERATOR_LIBRARY
    if not _registered() and library.is_file():
        _OPERATORS.load_library(str(library))
    return _registered()


def _registered() -> bool:
    operators = _OPERATORS.mxrec
    return hasattr(operators, "hstu_jagged") and "delta" in operators.hstu_jagged.overloads()


class RecSdkAttention:
    """Contract: `interface.AttentionBackend`. Plain torch computes segments that are too long for the operator."""

    name = "RecSDK hstu_jagged"

    def __init__(self, spec: AttentionSpec) -> None:
        """Raises ValueError for a mask or sizes that the operator does not compute."""
        if not self.fits(spec):
            raise ValueError("RecSDK's operator does not support this mask or these sizes")
        self._spec = spec
        self._longer = BlockedAttention(spec)

    @staticmethod
    def fits(spec: AttentionSpec) -> bool:
        """Whether the operator computes this mask in these sizes."""
        dims = (spec.attention_dim, spec.hidden_dim)
        return (
            spec.is_plain
            and spec.num_heads <= MAX_HEADS
            and all(dim <= MAX_DIM and dim % DIM_STEP == 0 for dim in dims)
        )

    def begin(self, kv: PagedKv, segments: Sequence[Segment]) -> AttentionPass:
        if any(max(segment.rows, segment.causal_tokens) > MAX_TOKENS for segment in segments):
            return self._longer.begin(kv, segments)
        return _RecSdkPass(self._spec, kv, segments)

    def scratch_bytes(self, rows: int, max_tokens: int) -> int:
        s = self._spec
        # The gathered context, and a copy joined with the segments' own rows; keys of each call; q and the result.
        gathered = 3 * (rows + max_tokens) * (s.key_width + s.row_width)
        own = rows * (s.key_width + 3 * s.row_width)
        return max((gathered + own) * s.compute_dtype.itemsize, self._longer.scratch_bytes(rows, max_tokens))


@dataclass(frozen=True, slots=True)
class _Plan:
    """One call of the operator: its rows, its keys, and the offsets of its segments. int64, on the host."""

    rows: _Int64Array
    """Indices into the rows of the forward."""
    keys: _Int64Array
    """Indices into [all contexts, rows of the forward]."""
    row_offsets: _Int64Array
    key_offsets: _Int64Array
    max_rows: int
    max_keys: int
    mask_type: int


@dataclass(frozen=True, slots=True)
class _OperatorCall:
    """A plan with its arrays on the device."""

    plan: _Plan
    rows: torch.Tensor
    keys: torch.Tensor
    row_offsets: torch.Tensor
    key_offsets: torch.Tensor


class _RecSdkPass:
    def __init__(self, spec: AttentionSpec, kv: PagedKv, segments: Sequence[Segment]) -> None:
        assert spec.normalizer is not None
        kv.check(segments)
        self._spec = spec
        self._kv = kv
        self._scale = 1.0 / spec.normalizer
        self._slots = kv.slots(segments)
        placed = list(place(segments))
        size = kv.geometry.page_tokens
        tokens = [np.arange(segment.context_tokens, dtype=np.int64) for segment in segments]
        pages = [segment.pages[own // size] for segment, own in zip(segments, tokens, strict=True)]
        found = (
            _plan(placed, [one.causal for one in placed], _LOWER_TRIANGLE),
            _plan(placed, [one.free for one in placed], _NO_MASK),
        )
        plans = [plan for plan in found if plan is not None]
        free = [np.arange(one.free.start, one.free.stop) for one in placed]
        arrays: list[_Int64Array] = [np.concatenate(pages, dtype=np.int64)]
        arrays += [np.concatenate(tokens) % size, np.concatenate(free)]
        for plan in plans:
            arrays += [plan.rows, plan.keys, plan.row_offsets, plan.key_offsets]
        sent = iter(kv.sent_together(arrays))
        self._context_pages, self._context_places, self._free = islice(sent, 3)
        self._calls = [_OperatorCall(plan, *islice(sent, 4)) for plan in plans]

    def attend(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        self._kv.write(layer, self._slots, k, v)
        keys, values = self._with_context(self._kv.k(layer), k), self._with_context(self._kv.v(layer), v)
        out = torch.zeros(v.shape, dtype=torch.float32, device=v.device)
        for call in self._calls:
            out[call.rows] = _OPERATORS.mxrec.hstu_jagged.delta(
                q[call.rows],
                keys[call.keys],
                values[call.keys],
                mask=None,
                attn_bias=None,
                mask_type=call.plan.mask_type,
                max_seq_len=call.plan.max_rows,
                max_seq_len_k=call.plan.max_keys,
                silu_scale=self._scale,
                seq_offset=call.row_offsets,
                seq_offset_k=call.key_offsets,
                alpha=self._spec.alpha,
            ).float()
        q, k, v = q[self._free].float(), k[self._free].float(), v[self._free].float()
        out[self._free] += F.silu((q * k).sum(-1, keepdim=True) * self._spec.alpha) * self._scale * v
        return out.flatten(1)

    def _with_context(self, pages: torch.Tensor, own: torch.Tensor) -> torch.Tensor:
        """[tokens of all contexts, then rows of the forward; heads; dim]"""
        return torch.cat((pages[self._context_pages, :, self._context_places].to(own.dtype), own))


def _plan(placed: Sequence[Placed], rows: Sequence[slice], mask_type: int) -> _Plan | None:
    """The plan for these rows of each segment against its context and causal rows. None if no row sees a key."""
    contexts = np.cumsum([0] + [one.segment.context_tokens for one in placed])
    chosen_rows, chosen_keys = [], []
    for one, own, context in zip(placed, rows, contexts, strict=False):
        if own.stop > own.start and one.segment.causal_tokens:
            chosen_rows.append(np.arange(own.start, own.stop))
            causal = np.arange(one.causal.start, one.causal.stop) + contexts[-1]
            chosen_keys.append(np.concatenate((np.arange(context, context + one.segment.context_tokens), causal)))
    if not chosen_rows:
        return None
    return _Plan(
        np.concatenate(chosen_rows),
        np.concatenate(chosen_keys),
        _offsets(chosen_rows),
        _offsets(chosen_keys),
        max(part.size for part in chosen_rows),
        max(part.size for part in chosen_keys),
        mask_type,
    )


def _offsets(parts: Sequence[_Int64Array]) -> _Int64Array:
    return np.cumsum([0] + [part.size for part in parts])
