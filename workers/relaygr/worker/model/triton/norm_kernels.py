"""The Triton kernels around an HSTU layer's products. Only `fused.py` imports this file.

    norm_kernel         norm(X), in the type of the next product
    gated_norm_kernel   the input of the output projection, from A and Z, with U = SiLU(Z):
                        KEEPS 0   U * norm(A)
                        KEEPS 1   [U, A, U * norm(A)]
                        KEEPS 2   [U, norm(A), U * norm(A)]

norm is LayerNorm over all columns, or over the columns of each head (GROUP). A program computes one row, in float32.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def norm_kernel(
    x_ptr,  # [rows, D]
    weight_ptr,  # [D]
    bias_ptr,
    out_ptr,
    eps,
    x_stride,
    out_stride,
    D: tl.constexpr,
    PAD_D: tl.constexpr,
    AFFINE: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, PAD_D)
    here = column < D
    x = tl.load(x_ptr + row * x_stride + column, mask=here, other=0.0).to(tl.float32)
    away = tl.where(here, x - tl.sum(x) / D, 0.0)
    normal = away / tl.sqrt(tl.sum(away * away) / D + eps)
    if AFFINE:
        weight = tl.load(weight_ptr + column, mask=here, other=0.0).to(tl.float32)
        bias = tl.load(bias_ptr + column, mask=here, other=0.0).to(tl.float32)
        normal = normal * weight + bias
    tl.store(out_ptr + row * out_stride + column, normal.to(out_ptr.dtype.element_ty), mask=here)


@triton.jit
def gated_norm_kernel(
    a_ptr,  # [rows, HEADS * D]
    z_ptr,
    weight_ptr,  # [HEADS * D], or [HEADS] with GROUP
    bias_ptr,
    out_ptr,  # [rows, HEADS * D], or three times that
    eps,
    a_stride,
    z_stride,
    out_stride,
    HEADS: tl.constexpr,
    D: tl.constexpr,
    PAD_HEADS: tl.constexpr,
    PAD_D: tl.constexpr,
    GROUP: tl.constexpr,
    AFFINE: tl.constexpr,
    KEEPS: tl.constexpr,  # columns before U * norm(A): 0 none, 1 U and A, 2 U and norm(A)
):
    row = tl.program_id(0).to(tl.int64)
    head = tl.arange(0, PAD_HEADS)[:, None]
    place = tl.arange(0, PAD_D)[None, :]
    column = head * D + place
    here = (head < HEADS) & (place < D)
    a = tl.load(a_ptr + row * a_stride + column, mask=here, other=0.0).to(tl.float32)
    z = tl.load(z_ptr + row * z_stride + column, mask=here, other=0.0).to(tl.float32)
    u = z / (1.0 + tl.exp(-z))

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
        tl.store(out_ptr, (u * normal).to(kind), mask=here)
    else:
        kept = a if KEEPS == 1 else normal
        tl.store(out_ptr, u.to(kind), mask=here)
        tl.store(out_ptr + HEADS * D, kept.to(kind), mask=here)
        tl.store(out_ptr + 2 * HEADS * D, (u * normal).to(kind), mask=here)
