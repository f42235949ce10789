"""The Triton kernels of HSTU attention over paged K,V. Only `launch.py` imports this file.

    attend_kernel   A = sum over visible keys of SiLU(alpha q.k + bias) v, times 1/N: one item (`plan.py`), one head
    join_kernel     adds the partial sums of the tiles whose keys are split
    store_kernel    stores K,V of rows in their pages, rounded to the stored type
    round_kernel    rounds K or V of rows to a scaled type

There is no soft-max, so no row maximum and no row sum: any part of the keys gives an exact partial sum, and the keys of
a tile may be split over several programs. A key that is masked at its load has V = 0 and adds nothing; the causal half
of a segment's own rows, and a window, need a mask on the weights.

A program loops over blocks of keys twice: first over the context, through the page table, then over the segment's own
rows: the causal rows up to the diagonal and, with groups, the free rows from the beginning of the tile's first group.
Blocks that no row sees are skipped. Without groups, a free row adds its own key at the end. Own rows are rounded to the
stored type at their load, so that a row has the same values before and after it is stored; for a scaled type
(`KvGeometry`), `round_kernel` has rounded them. The scale of a key in a page is a power of two: it multiplies scores
and weights, and gives the same bits as if it had multiplied K and V.

Mask and bias are those of `attention/mask.py` and `attention/bias.py`, computed for each pair of a row and a key from
their places and times. The options are compile-time constants: a model without one has no instruction for it.

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
def scale_of(exponents):
    """2^(exponent - 127)"""
    return (exponents.to(tl.int32) << 23).to(tl.float32, bitcast=True)


@triton.jit
def scaled(x, POWER: tl.constexpr, ROUND_UP: tl.constexpr):
    """Rows [rows, dim] as whole numbers or 8-bit floats, still float32, and their exponents: `spec.scaled`."""
    x = x.to(tl.float32)
    bits = tl.max(tl.abs(x), 1).to(tl.int32, bitcast=True)
    exponents = tl.minimum(tl.maximum(((bits + ROUND_UP) >> 23) - POWER, 1), 254)
    exponents = tl.where(bits >= 0x7F800000, 255, exponents)
    return x * scale_of(254 - exponents)[:, None], exponents


@triton.jit
def rounded(numbers, stored: tl.constexpr):
    """Numbers of `scaled` in the stored type."""
    if stored == tl.int8:
        # Adding 1.5 * 2^23 rounds to whole numbers, halves to even ones.
        numbers = (numbers + 12582912.0) - 12582912.0
    return numbers.to(stored)


@triton.jit
def weigh(
    scores,  # float32, for pairs of a row and a key, like the next two
    apart,  # place of the key - place of the row
    seconds,  # int64: time of the key - time of the token after the row
    positions_ptr,
    times_ptr,
    edges_ptr,  # int64 [EDGES + 1]: the fewest seconds of buckets 1, 2, ...; then a number above all times
    bucket_rate,  # buckets in a doubling of the time, a little less
    POSITIONS: tl.constexpr,
    TIMES: tl.constexpr,
    EDGES: tl.constexpr,
):
    """SiLU(scores + bias)."""
    if POSITIONS > 0:
        scores += tl.load(positions_ptr + tl.minimum(tl.maximum(apart + POSITIONS // 2, 0), POSITIONS - 1))
    if TIMES:
        seconds = tl.abs(seconds)
        # The logarithm finds the bucket or the one before it; the first second of the next one decides.
        guess = tl.log2(tl.maximum(seconds, 1).to(tl.float32)) * bucket_rate
        bucket = tl.minimum(guess, EDGES).to(tl.int32)
        bucket += (seconds >= tl.load(edges_ptr + bucket)).to(tl.int32)
        scores += tl.load(times_ptr + bucket)
    return silu(scores)


@triton.jit
def attend_kernel(
    q_ptr,  # [rows, heads, D_QK], like k; v is [rows, heads, D_V]
    k_ptr,
    v_ptr,
    k_pages_ptr,  # one layer: [pages, heads, PAGE_TOKENS, D_QK]
    v_pages_ptr,  # one layer: [pages, heads, PAGE_TOKENS, D_V]
    k_exponents_ptr,  # of a scaled type: uint8 [pages, heads, PAGE_TOKENS], the pages as far apart as those of K and V
    v_exponents_ptr,
    out_ptr,  # float32 [rows and partial sums, heads, D_V]
    items_ptr,  # int32 [items, 5]: `plan.ITEM_FIELDS`
    segments_ptr,  # int32 [segments, 7]: `plan.SEGMENT_FIELDS`
    table_ptr,  # int32: the pages of all segments
    key_times_ptr,  # int64, with TIMES: the time of each key of each segment
    following_ptr,  # int64 [rows], with TIMES: the time of the token after each row
    positions_ptr,  # float32 [POSITIONS], if that is not 0
    times_ptr,  # float32, with TIMES: the bias of each bucket; edges_ptr: see `weigh`
    edges_ptr,
    alpha,
    scale,
    bucket_rate,
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
    out_row_stride,
    out_head_stride,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,  # free rows in a group; each sees the earlier ones
    CONTEXTUAL: tl.constexpr,  # tokens at the beginning that see the whole history; 0: none
    WINDOW: tl.constexpr,  # places back that a row sees; 0: all
    FULL_LAST: tl.constexpr,  # history rows at the end that ignore the window
    POSITIONS: tl.constexpr,
    TIMES: tl.constexpr,
    EDGES: tl.constexpr,  # the highest bucket that a time can fall into
    D_QK: tl.constexpr,
    D_V: tl.constexpr,
    PAD_QK: tl.constexpr,  # powers of two, at least 16
    PAD_V: tl.constexpr,
    PAGE_TOKENS: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Writes the sums of one item for one head."""
    # Tokens that share place 0 with the first one.
    folded: tl.constexpr = CONTEXTUAL - 1 if CONTEXTUAL > 0 else 0
    has_bias: tl.constexpr = POSITIONS > 0 or TIMES
    # The fields of the item and of its segment: `plan.ITEM_FIELDS`, `plan.SEGMENT_FIELDS`.
    item = items_ptr + 5 * (tl.program_id(0) // HEADS)
    head = tl.program_id(0) % HEADS
    segment = segments_ptr + 7 * tl.load(item)
    first = tl.load(item + 1)
    split = tl.load(item + 2)
    splits = tl.load(item + 3)
    target = tl.load(item + 4).to(tl.int64)
    base = tl.load(segment).to(tl.int64)
    causal = tl.load(segment + 1)
    rows = tl.load(segment + 2)
    context = tl.load(segment + 3)
    table = table_ptr + tl.load(segment + 4)

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
    is_scaled: tl.constexpr = k_exponents_ptr is not None
    # Own rows of a scaled type are rounded before.
    stored: tl.constexpr = q_ptr.dtype.element_ty if is_scaled else k_pages_ptr.dtype.element_ty
    if is_scaled:
        k_exponents_ptr += head * PAGE_TOKENS
        v_exponents_ptr += head * PAGE_TOKENS

    q = tl.load(q_ptr + row_at * q_row_stride + at_qk[None, :], mask=here[:, None] & in_qk[None, :], other=0.0)
    acc = tl.zeros((BLOCK_M, PAD_V), dtype=tl.float32)

    # The place of each row, the first place that it sees, and the first token that any row sees.
    low = 0
    row_place = row
    sees_from = row
    if WINDOW > 0 or has_bias:
        end = tl.load(segment + 5) - folded
        row_place = tl.where(row >= causal, end, tl.maximum(context + row - folded, 0))
    if WINDOW > 0:
        sees_from = row_place - WINDOW
        if FULL_LAST > 0:
            sees_from = tl.where(row_place >= end - FULL_LAST, 0, sees_from)
        # Place 0 is several tokens if the mask is contextual.
        low = tl.min(tl.where(here, sees_from, end), 0)
        low = tl.where(low <= 0, 0, low + folded)
    following = row
    key_times_at = key_times_ptr
    if TIMES:
        following = tl.load(following_ptr + base + row, mask=here, other=0)
        key_times_at = key_times_ptr + tl.load(segment + 6)

    # The blocks of this program: a part of the tile's blocks, context first, then own rows.
    first_context = tl.minimum(low, context) // BLOCK_N
    context_blocks = tl.cdiv(context, BLOCK_N) - first_context
    first_own = tl.maximum(low - context, 0) // BLOCK_N
    own_end = tl.minimum(first + BLOCK_M, causal)
    if CONTEXTUAL > 0:
        own_end = tl.where(context + first < CONTEXTUAL, causal, own_end)
    causal_blocks = tl.maximum(tl.cdiv(own_end, BLOCK_N) - first_own, 0)
    blocks = context_blocks + causal_blocks
    if GROUP > 1:
        # The beginning of the group of the tile's first free row.
        near = causal + tl.maximum(first - causal, 0) // GROUP * GROUP
        blocks += tl.cdiv(tl.maximum(tl.minimum(first + BLOCK_M, rows) - near, 0), BLOCK_N)
    begin = blocks * split // splits
    end_block = blocks * (split + 1) // splits

    # The context: keys in pages.
    for block in range(begin + first_context, tl.minimum(end_block, context_blocks) + first_context):
        token = block * BLOCK_N + tl.arange(0, BLOCK_N)
        valid = token < context
        if PAGE_TOKENS % BLOCK_N == 0:
            # The block lies in one page: one look-up, and consecutive addresses.
            page = tl.load(table + block * BLOCK_N // PAGE_TOKENS).to(tl.int64)
            place = block * BLOCK_N % PAGE_TOKENS + tl.arange(0, BLOCK_N)
        else:
            page = tl.load(table + token // PAGE_TOKENS, mask=valid, other=0).to(tl.int64)
            place = token % PAGE_TOKENS
        k_at = page * k_page_stride + place * D_QK
        v_at = page * v_page_stride + place * D_V
        exponents_at = page * k_page_stride + place
        k = tl.load(k_pages_ptr + k_at[None, :] + at_qk[:, None], mask=valid[None, :] & in_qk[:, None], other=0.0)
        v = tl.load(v_pages_ptr + v_at[:, None] + at_v[None, :], mask=valid[:, None] & in_v[None, :], other=0.0)
        if is_scaled:
            k, v = k.to(tl.float32), v.to(tl.float32)
        scores = tl.dot(q, k.to(q.dtype), input_precision=PRECISION) * alpha
        if is_scaled:
            scores *= scale_of(tl.load(k_exponents_ptr + exponents_at, mask=valid, other=0))[None, :]
        key_place = tl.maximum(token - folded, 0)
        times = key_place
        if TIMES:
            times = tl.load(key_times_at + token, mask=valid, other=0)
        weights = weigh(
            scores,
            key_place[None, :] - row_place[:, None],
            times[None, :] - following[:, None],
            positions_ptr,
            times_ptr,
            edges_ptr,
            bucket_rate,
            POSITIONS,
            TIMES,
            EDGES,
        )
        if WINDOW > 0:
            weights = tl.where(key_place[None, :] >= sees_from[:, None], weights, 0.0)
        if is_scaled:
            weights *= scale_of(tl.load(v_exponents_ptr + exponents_at, mask=valid, other=0))[None, :]
        acc = tl.dot(weights.to(q.dtype), v.to(q.dtype), acc, input_precision=PRECISION)

    # The segment's own rows.
    for block in range(tl.maximum(begin - context_blocks, 0), end_block - context_blocks):
        key = (block + first_own) * BLOCK_N + tl.arange(0, BLOCK_N)
        limit = causal
        if GROUP > 1:
            is_near = block >= causal_blocks
            key += tl.where(is_near, near - (causal_blocks + first_own) * BLOCK_N, 0)
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
        scores = tl.dot(q, k, input_precision=PRECISION) * alpha
        key_place = key
        if WINDOW > 0 or has_bias:
            key_place = tl.where(key >= causal, end, tl.maximum(context + key - folded, 0))
        times = key_place
        if TIMES:
            times = tl.load(key_times_at + context + key, mask=valid, other=0)
        weights = weigh(
            scores,
            key_place[None, :] - row_place[:, None],
            times[None, :] - following[:, None],
            positions_ptr,
            times_ptr,
            edges_ptr,
            bucket_rate,
            POSITIONS,
            TIMES,
            EDGES,
        )
        # Free rows come after all causal rows, so they see every causal row.
        sees = key[None, :] <= row[:, None]
        if WINDOW > 0:
            sees &= key_place[None, :] >= sees_from[:, None]
        if CONTEXTUAL > 0:
            sees |= (key < causal)[None, :] & (context + row < CONTEXTUAL)[:, None]
        if GROUP > 1:
            together = (key - causal)[None, :] // GROUP == (row - causal)[:, None] // GROUP
            sees &= (key < causal)[None, :] | together
        weights = tl.where(sees, weights, 0.0)
        acc = tl.dot(weights.to(q.dtype), v, acc, input_precision=PRECISION)

    # Without groups, a free row sees no other free row than itself.
    if GROUP == 1 and (split == splits - 1) & (first + BLOCK_M > causal):
        free = here & (row >= causal)
        k = tl.load(k_ptr + row_at * k_row_stride + at_qk[None, :], mask=free[:, None] & in_qk[None, :], other=0.0)
        v = tl.load(v_ptr + row_at * v_row_stride + at_v[None, :], mask=free[:, None] & in_v[None, :], other=0.0)
        own = tl.sum(q.to(tl.float32) * k.to(stored).to(tl.float32), 1) * alpha
        times = following
        if TIMES:
            times = tl.load(key_times_at + context + row, mask=free, other=0)
        weights = weigh(
            own,
            row_place - row_place,
            times - following,
            positions_ptr,
            times_ptr,
            edges_ptr,
            bucket_rate,
            POSITIONS,
            TIMES,
            EDGES,
        )
        acc += weights[:, None] * v.to(stored).to(tl.float32)

    out_ptr += (target - first) * out_row_stride + head * out_head_stride
    tl.store(
        out_ptr + row_at * out_row_stride + at_v[None, :],
        acc * scale,
        mask=here[:, None] & in_v[None, :],
    )


@triton.jit
def join_kernel(
    sums_ptr,  # float32 [rows and partial sums, COLUMNS]
    joins_ptr,  # int32 [joins, 4]: `plan.JOIN_FIELDS`
    COLUMNS: tl.constexpr,
    PAD_COLUMNS: tl.constexpr,
    BLOCK_M: tl.constexpr,  # rows of a tile
    ROWS: tl.constexpr,  # rows of a program
):
    """Some rows of one tile."""
    join = joins_ptr + 4 * tl.program_id(0)
    rows = tl.load(join + 3)
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, PAD_COLUMNS)
    here = (row < rows)[:, None] & (column < COLUMNS)[None, :]
    if tl.program_id(1) * ROWS < rows:
        at = row[:, None].to(tl.int64) * COLUMNS + column[None, :]
        part_ptr = sums_ptr + tl.load(join).to(tl.int64) * COLUMNS + at
        total = tl.zeros((ROWS, PAD_COLUMNS), dtype=tl.float32)
        for _ in range(tl.load(join + 1)):
            total += tl.load(part_ptr, mask=here, other=0.0)
            part_ptr += BLOCK_M * COLUMNS
        tl.store(sums_ptr + tl.load(join + 2).to(tl.int64) * COLUMNS + at, total, mask=here)


# Not specialised on the number of rows: else Triton would compile again for another number, while a request waits.
@triton.jit(do_not_specialize=["rows"])
def store_kernel(
    k_ptr,  # [rows, heads, D_QK]
    v_ptr,
    k_pages_ptr,  # one layer: [pages, heads, PAGE_TOKENS, D_QK]
    v_pages_ptr,
    k_exponents_ptr,  # of a scaled type: as for `attend_kernel`
    v_exponents_ptr,
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
    POWER: tl.constexpr,  # of a scaled type: `spec.ScaledType`
    ROUND_UP: tl.constexpr,
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
    k = tl.load(k_ptr + (row * k_row_stride + head * k_head_stride)[:, None] + at_qk, mask=k_mask, other=0.0)
    v = tl.load(v_ptr + (row * v_row_stride + head * v_head_stride)[:, None] + at_v, mask=v_mask, other=0.0)
    if k_exponents_ptr is not None:
        k, k_exponents = scaled(k, POWER, ROUND_UP)
        v, v_exponents = scaled(v, POWER, ROUND_UP)
        at = page * k_page_stride + head * PAGE_TOKENS + place
        tl.store(k_exponents_ptr + at, k_exponents.to(tl.uint8), mask=slot >= 0)
        tl.store(v_exponents_ptr + at, v_exponents.to(tl.uint8), mask=slot >= 0)
    k_at = page * k_page_stride + head * k_page_head_stride + place * D_QK
    v_at = page * v_page_stride + head * v_page_head_stride + place * D_V
    tl.store(k_pages_ptr + k_at[:, None] + at_qk, rounded(k, k_pages_ptr.dtype.element_ty), mask=k_mask)
    tl.store(v_pages_ptr + v_at[:, None] + at_v, rounded(v, v_pages_ptr.dtype.element_ty), mask=v_mask)


# Not specialised on the number of rows either.
@triton.jit(do_not_specialize=["rows"])
def round_kernel(
    x_ptr,  # [rows, heads, D]
    out_ptr,  # [rows, heads, D], contiguous
    rows,
    row_stride,
    head_stride,
    HEADS: tl.constexpr,
    D: tl.constexpr,
    PAD_D: tl.constexpr,
    STORED: tl.constexpr,  # the scaled type
    POWER: tl.constexpr,
    ROUND_UP: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    """Rounds some rows of one head as storing them does."""
    row = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    head = tl.program_id(1)
    at = tl.arange(0, PAD_D)[None, :]
    here = (row < rows)[:, None] & (at < D)
    x = tl.load(x_ptr + (row * row_stride + head * head_stride)[:, None] + at, mask=here, other=0.0)
    numbers, exponents = scaled(x, POWER, ROUND_UP)
    values = rounded(numbers, STORED).to(tl.float32) * scale_of(exponents)[:, None]
    tl.store(out_ptr + ((row * HEADS + head) * D)[:, None] + at, values.to(x.dtype), mask=here)
