"""The Triton kernels of HSTU attention over paged K,V. Only `launch.py` imports this file.

    attend_kernel   A = sum over visible keys of SiLU(alpha q.k) v, times 1/N: one tile of rows, one head, one split
    store_kernel    stores K,V of rows in their pages, rounded to the stored type

There is no soft-max, so no row maximum and no row sum: any part of the keys gives an exact partial sum, and the keys of
a tile may be split over several programs (`plan.py`). SiLU(0) = 0, so a key that is masked at its load adds nothing;
only the causal half of a segment's own rows needs a mask on the weights.

A program loops over blocks of keys twice: first over the context, through the page table, then over the segment's own
rows: the causal rows up to the diagonal and, with groups, the free rows from the beginning of the tile's first group.
Blocks that no row sees are skipped. Without groups, a free row adds its own key at the end. Own rows are rounded to the
stored type at their load, so that a row has the same values before and after it is stored.

Sums are float32; products take the type of q (float32 with `PRECISION` "ieee"). Offsets into the arena are int64.
"""

from __future__ import annotations

import triton
import triton.language as tl

_SILU = tl.constexpr("""{
    .reg .f32 t;
    mul.ftz.f32 t, $1, 0fBFB8AA3B;
    ex2.approx.ftz.f32 t, t;
    add.ftz.f32 t, t, 0f3F800000;
    rcp.approx.ftz.f32 t, t;
    mul.ftz.f32 $0, $1, t;
}""")
"""x / (1 + 2^(-x log2 e)). tl.exp and a division take twice as many instructions, because they handle denormals."""


@triton.jit
def silu(x):
    """x * sigmoid(x), with a relative error of about 2^-21."""
    return tl.inline_asm_elementwise(_SILU, "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)


@triton.jit
def attend_kernel(
    q_ptr,  # [rows, heads, D_QK], like k; v is [rows, heads, D_V]
    k_ptr,
    v_ptr,
    k_pages_ptr,  # one layer: [pages, heads, PAGE_TOKENS, D_QK]
    v_pages_ptr,  # one layer: [pages, heads, PAGE_TOKENS, D_V]
    out_ptr,  # float32 [splits, rows, heads, D_V]
    tiles_ptr,  # int32 [tiles, 2]: segment, first row of the tile in it
    segments_ptr,  # int32 [segments, 5]: first row, causal rows, all rows, context tokens, first entry of the table
    table_ptr,  # int32: the pages of all segments
    alpha,
    scale,
    q_row_stride,
    q_head_stride,
    k_row_stride,
    k_head_stride,
    v_row_stride,
    v_head_stride,
    k_page_stride,
    k_page_head_stride,
    v_page_stride,
    v_page_head_stride,
    out_split_stride,
    out_row_stride,
    out_head_stride,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,  # free rows in a group; each sees the earlier ones
    D_QK: tl.constexpr,
    D_V: tl.constexpr,
    PAD_QK: tl.constexpr,  # powers of two, at least 16
    PAD_V: tl.constexpr,
    PAGE_TOKENS: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    tile = tl.program_id(0) // HEADS
    head = tl.program_id(0) % HEADS
    segment = segments_ptr + 5 * tl.load(tiles_ptr + 2 * tile)
    first = tl.load(tiles_ptr + 2 * tile + 1)
    base = tl.load(segment).to(tl.int64)
    causal = tl.load(segment + 1)
    rows = tl.load(segment + 2)
    context = tl.load(segment + 3)
    table = table_ptr + tl.load(segment + 4)
    if first >= rows:
        return

    row = first + tl.arange(0, BLOCK_M)
    row_at = row[:, None].to(tl.int64)
    at_qk = tl.arange(0, PAD_QK)
    at_v = tl.arange(0, PAD_V)
    in_qk = at_qk < D_QK
    in_v = at_v < D_V
    here = row < rows
    q_ptr += base * q_row_stride + head * q_head_stride
    k_ptr += base * k_row_stride + head * k_head_stride
    v_ptr += base * v_row_stride + head * v_head_stride
    k_pages_ptr += head * k_page_head_stride
    v_pages_ptr += head * v_page_head_stride
    stored = k_pages_ptr.dtype.element_ty

    q = tl.load(q_ptr + row_at * q_row_stride + at_qk[None, :], mask=here[:, None] & in_qk[None, :], other=0.0)
    acc = tl.zeros((BLOCK_M, PAD_V), dtype=tl.float32)

    # The blocks of this program: a part of the tile's blocks, context first, then own rows.
    split = tl.program_id(1)
    splits = tl.num_programs(1)
    context_blocks = tl.cdiv(context, BLOCK_N)
    causal_blocks = tl.cdiv(tl.minimum(first + BLOCK_M, causal), BLOCK_N)
    blocks = context_blocks + causal_blocks
    if GROUP > 1:
        # The beginning of the group of the tile's first free row.
        near = causal + tl.maximum(first - causal, 0) // GROUP * GROUP
        blocks += tl.cdiv(tl.maximum(tl.minimum(first + BLOCK_M, rows) - near, 0), BLOCK_N)
    begin = blocks * split // splits
    end = blocks * (split + 1) // splits

    for block in range(begin, tl.minimum(end, context_blocks)):
        token = block * BLOCK_N + tl.arange(0, BLOCK_N)
        valid = token < context
        if PAGE_TOKENS % BLOCK_N == 0:
            # The block lies in one page: one look-up, and consecutive addresses.
            page = tl.load(table + block * BLOCK_N // PAGE_TOKENS).to(tl.int64)
            place = block * BLOCK_N % PAGE_TOKENS + tl.arange(0, BLOCK_N)
            k_at = page * k_page_stride + place * D_QK
            v_at = page * v_page_stride + place * D_V
        else:
            pages = tl.load(table + token // PAGE_TOKENS, mask=valid, other=0).to(tl.int64)
            k_at = pages * k_page_stride + token % PAGE_TOKENS * D_QK
            v_at = pages * v_page_stride + token % PAGE_TOKENS * D_V
        k = tl.load(k_pages_ptr + k_at[None, :] + at_qk[:, None], mask=valid[None, :] & in_qk[:, None], other=0.0)
        v = tl.load(v_pages_ptr + v_at[:, None] + at_v[None, :], mask=valid[:, None] & in_v[None, :], other=0.0)
        weights = silu(tl.dot(q, k.to(q.dtype), input_precision=PRECISION) * alpha)
        acc = tl.dot(weights.to(q.dtype), v.to(q.dtype), acc, input_precision=PRECISION)

    for block in range(tl.maximum(begin - context_blocks, 0), end - context_blocks):
        key = block * BLOCK_N + tl.arange(0, BLOCK_N)
        limit = causal
        if GROUP > 1:
            is_near = block >= causal_blocks
            key += tl.where(is_near, near - causal_blocks * BLOCK_N, 0)
            limit = tl.where(is_near, rows, causal)
        key_at = key.to(tl.int64)
        valid = key < limit
        k = tl.load(
            k_ptr + key_at[None, :] * k_row_stride + at_qk[:, None], mask=valid[None, :] & in_qk[:, None], other=0.0
        )
        v = tl.load(
            v_ptr + key_at[:, None] * v_row_stride + at_v[None, :], mask=valid[:, None] & in_v[None, :], other=0.0
        )
        k = k.to(stored).to(q.dtype)
        v = v.to(stored).to(q.dtype)
        weights = silu(tl.dot(q, k, input_precision=PRECISION) * alpha)
        # Free rows come after all causal rows, so they see every causal row.
        sees = key[None, :] <= row[:, None]
        if GROUP > 1:
            together = (key - causal)[None, :] // GROUP == (row - causal)[:, None] // GROUP
            sees &= (key < causal)[None, :] | together
        weights = tl.where(sees, weights, 0.0)
        acc = tl.dot(weights.to(q.dtype), v, acc, input_precision=PRECISION)

    if GROUP == 1 and (split == splits - 1) & (first + BLOCK_M > causal):
        free = here & (row >= causal)
        k = tl.load(k_ptr + row_at * k_row_stride + at_qk[None, :], mask=free[:, None] & in_qk[None, :], other=0.0)
        v = tl.load(v_ptr + row_at * v_row_stride + at_v[None, :], mask=free[:, None] & in_v[None, :], other=0.0)
        own = tl.sum(q.to(tl.float32) * k.to(stored).to(tl.float32), 1)
        acc += silu(own * alpha)[:, None] * v.to(stored).to(tl.float32)

    out_ptr += split.to(tl.int64) * out_split_stride + base * out_row_stride + head * out_head_stride
    tl.store(
        out_ptr + row_at * out_row_stride + at_v[None, :],
        acc * scale,
        mask=here[:, None] & in_v[None, :],
    )


# Not specialised on the number of rows: else Triton would compile again for another number, while a request waits.
@triton.jit(do_not_specialize=["rows"])
def store_kernel(
    k_ptr,  # [rows, heads, D_QK]
    v_ptr,
    k_pages_ptr,  # one layer: [pages, heads, PAGE_TOKENS, D_QK]
    v_pages_ptr,
    slots_ptr,  # int32 [rows]: page * PAGE_TOKENS + place; below 0: not stored
    rows,
    k_row_stride,
    k_head_stride,
    v_row_stride,
    v_head_stride,
    k_page_stride,
    k_page_head_stride,
    v_page_stride,
    v_page_head_stride,
    D_QK: tl.constexpr,
    D_V: tl.constexpr,
    PAD_QK: tl.constexpr,
    PAD_V: tl.constexpr,
    PAGE_TOKENS: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    head = tl.program_id(1)
    slot = tl.load(slots_ptr + row, mask=row < rows, other=-1).to(tl.int64)
    stores = (slot >= 0)[:, None]
    page = slot // PAGE_TOKENS
    place = slot % PAGE_TOKENS
    at_qk = tl.arange(0, PAD_QK)[None, :]
    at_v = tl.arange(0, PAD_V)[None, :]
    k_mask = stores & (at_qk < D_QK)
    v_mask = stores & (at_v < D_V)
    k = tl.load(k_ptr + (row * k_row_stride + head * k_head_stride)[:, None] + at_qk, mask=k_mask)
    v = tl.load(v_ptr + (row * v_row_stride + head * v_head_stride)[:, None] + at_v, mask=v_mask)
    k_at = page * k_page_stride + head * k_page_head_stride + place * D_QK
    v_at = page * v_page_stride + head * v_page_head_stride + place * D_V
    tl.store(k_pages_ptr + k_at[:, None] + at_qk, k.to(k_pages_ptr.dtype.element_ty), mask=k_mask)
    tl.store(v_pages_ptr + v_at[:, None] + at_v, v.to(v_pages_ptr.dtype.element_ty), mask=v_mask)
