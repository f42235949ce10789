"""RecSDK's operator on the CPU, by its published signature and rules, for machines that have no NPU.

Signature: github.com/Ascend/RecSDK, hstu_delta_q.cpp; limits: hstu_dense_forward/README.md; the masks: its tests.
"""

from __future__ import annotations

import functools

import torch
import torch.nn.functional as F  # noqa: N812 - its usual name

SCHEMA = (
    "hstu_jagged.delta(Tensor q, Tensor k, Tensor v, Tensor? mask=None, Tensor? attn_bias=None, int mask_type=0, "
    "int max_seq_len=0, int max_seq_len_k=0, float silu_scale=0.0, Tensor seq_offset=None, "
    "Tensor seq_offset_k=None, Tensor? num_context=None, Tensor? num_target=None, int? target_group_size=0, "
    "float? alpha=1.0, bool deterministic=False) -> Tensor"
)
calls: list[int] = []
"""Mask types of the calls so far."""


@functools.cache
def register_operator() -> torch.library.Library:
    """Makes `torch.ops.mxrec.hstu_jagged.delta` known, once a process."""
    library = torch.library.Library("mxrec", "FRAGMENT")
    library.define(SCHEMA)
    library.impl("hstu_jagged.delta", hstu_jagged_delta, "CPU")
    return library


def hstu_jagged_delta(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None = None,
    attn_bias: torch.Tensor | None = None,
    mask_type: int = 0,
    max_seq_len: int = 0,
    max_seq_len_k: int = 0,
    silu_scale: float = 0.0,
    seq_offset: torch.Tensor | None = None,
    seq_offset_k: torch.Tensor | None = None,
    num_context: torch.Tensor | None = None,
    num_target: torch.Tensor | None = None,
    target_group_size: int | None = 0,
    alpha: float | None = 1.0,
    deterministic: bool = False,
) -> torch.Tensor:
    """Computes the operator's result, after the checks that the operator makes or requires of its callers."""
    calls.append(mask_type)
    assert mask is None and attn_bias is None and num_context is None and num_target is None
    assert mask_type in (0, 2)
    assert seq_offset is not None and seq_offset_k is not None
    assert seq_offset.dtype == seq_offset_k.dtype and seq_offset.dtype in (torch.int32, torch.int64)
    assert q.dtype == k.dtype == v.dtype and q.dtype in (torch.float32, torch.float16, torch.bfloat16)
    assert q.dim() == k.dim() == v.dim() == 3
    assert q.shape[1] == k.shape[1] == v.shape[1] <= 16
    assert all(dim % 16 == 0 and 16 <= dim <= 512 for dim in (q.shape[2], v.shape[2]))
    rows, keys = seq_offset.diff(), seq_offset_k.diff()
    assert bool((rows > 0).all()) and bool((keys > 0).all())
    assert (int(seq_offset[-1]), int(seq_offset_k[-1])) == (q.shape[0], k.shape[0])
    assert int(rows.max()) == max_seq_len <= 20480
    assert int(keys.max()) == max_seq_len_k <= 20480
    out = q.new_empty((q.shape[0], q.shape[1], v.shape[2]))
    for segment in range(rows.numel()):
        own = slice(int(seq_offset[segment]), int(seq_offset[segment + 1]))
        seen = slice(int(seq_offset_k[segment]), int(seq_offset_k[segment + 1]))
        scores = torch.einsum("ihd,jhd->hij", q[own], k[seen]).float() * (1.0 if alpha is None else alpha)
        weights = F.silu(scores) * (silu_scale or 1.0 / max_seq_len)
        if mask_type == 0:
            weights = weights.tril(int(keys[segment] - rows[segment]))
        out[own] = torch.einsum("hij,jhd->ihd", weights.to(v.dtype), v[seen])
    return out
