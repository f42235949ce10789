"""The Triton kernel of norm, gate and concatenation. `fused_output.py` starts it; nothing else imports this file.

    KEEPS 0   U * norm(A)
    KEEPS 1   [U, A, U * norm(A)]
    KEEPS 2   [U, norm(A), U * norm(A)]

norm is LayerNorm over all columns, or over each head's (GROUP). One program takes one row, in float32.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def gated_norm_kernel(
    a_ptr,  # [rows, HEADS * D]
    u_ptr,
    weight_ptr,  # [HEADS * D], or [HEADS] with GROUP
    bias_ptr,
    out_ptr,  # [rows, HEADS * D], or three times that
    eps,
    a_stride,
    u_stride,
    out_stride,
    HEADS: tl.constexpr,
    D: tl.constexpr,
    PAD_HEADS: tl.constexpr,
    PAD_D: tl.constexpr,
    GROUP: tl.constexpr,
    AFFINE: tl.constexpr,
    KEEPS: tl.constexpr,  # what comes before U * norm(A): 0 nothing, 1 U and A, 2 U and norm(A)
):
    row = tl.program_id(0).to(tl.int64)
    head = tl.arange(0, PAD_HEADS)[:, None]
    place = tl.arange(0, PAD_D)[None, :]
    column = head * D + place
    here = (head < HEADS) & (place < D)
    a = tl.load(a_ptr + row * a_stride + column, mask=here, other=0.0).to(tl.float32)
    u = tl.load(u_ptr + row * u_stride + column, mask=here, other=0.0)

    if GROUP:
        mean = tl.sum(a, 1)[:, None] / D
        away = tl.where(here, a - mean, 0.0)
        variance = tl.sum(away * away, 1)[:, None] / D
    else:
        mean = tl.sum(a) / (HEADS * D)
        away = tl.where(here, a - mean, 0.0)
        variance = tl.sum(away * away) / (HEADS * D)
    normal = away / tl.sqrt(variance + eps)
    if AFFINE:
        at = head if GROUP else column
        in_weight = head < HEADS if GROUP else here
        weight = tl.load(weight_ptr + at, mask=in_weight, other=0.0).to(tl.float32)
        bias = tl.load(bias_ptr + at, mask=in_weight, other=0.0).to(tl.float32)
        normal = normal * weight + bias

    out_ptr += row * out_stride + column
    kind = out_ptr.dtype.element_ty
    if KEEPS == 0:
        tl.store(out_ptr, (u.to(tl.float32) * normal).to(kind), mask=here)
    else:
        kept = a if KEEPS == 1 else normal
        tl.store(out_ptr, u.to(kind), mask=here)
        tl.store(out_ptr + HEADS * D, kept.to(kind), mask=here)
        tl.store(out_ptr + 2 * HEADS * D, (u.to(tl.float32) * normal).to(kind), mask=here)
