"""HSTU attention on K,V in pages in float32, as machine code that LLVM compiles at load: for CPUs with AVX-512 or AVX2.

torch would gather the keys from their pages, multiply, write the scores, apply SiLU, and multiply again. The compiled
function reads each page in place, and keeps 64 keys' weights in the first-level cache. It needs llvmlite (the extra
`compiled`), and no compiler on the machine.

    scores     w[key, rows] = SiLU(sum over d of K[key, d] * q[d, rows])        16 keys at once
    values     a[rows, d] += sum over keys of w[key, rows] * V[key, d]          8 rows and 48 columns of V at once

Each step multiplies numbers from memory, broadcast, by vectors: of 16 or 32 rows for scores, of columns for values.
Meanwhile the numbers of the next block are fetched into the first-level cache, and the next 64 keys into the second: 16
rows take three times as long without. The sums of 64 keys are added to those before, which keeps them exact.

In bfloat16 (`pairs.py`), each step multiplies two numbers instead of one, and K and V of a unit of keys are converted
once for all rows. Sums stay in float32.

OpenMP's threads, which torch uses, share the heads, and parts of the keys if there are fewer heads. Their sums are
added in a fixed order, so a result is the same on each call with as many threads.
"""

from __future__ import annotations

import ctypes
import functools
import struct
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray

from relaygr.runtime.processor import instruction_sets
from relaygr.worker.kv import KvDtype, KvGeometry
from relaygr.worker.model.attention import pairs
from relaygr.worker.model.attention.silu import SHORT_DECLARATION, short_silu, silu, silu_declarations
from relaygr.worker.model.machine_code import (
    LANES,
    TO_FIRST,
    Call,
    compiled_call,
    fetched,
    fetched_evenly,
    fma,
    loaded,
    recorded,
    spread,
    vector_of,
)


@dataclass(frozen=True, slots=True)
class Block:
    """Rows that are computed together, and their division into tiles.

    The sums of a tile are in registers: AVX-512 has 32 of 16 numbers, AVX2 has 16 of 8.
    """

    rows: int
    tiles: tuple[int, ...]
    """Keys of each tile of scores: 16 in total."""
    row_tiles: tuple[int, ...]
    """Rows of each tile of values."""
    vectors: int
    """The most vectors of 16 columns in a tile of values."""

    @property
    def vector(self) -> str:
        return vector_of(self.rows)


WIDE_BLOCKS = (Block(2 * LANES, (8, 8), (8, 8, 8, 8), 3), Block(LANES, (LANES,), (8, 8), 3))
"""Of AVX-512, the larger block first. In a large one, two vectors share a number that was read."""
NARROW_BLOCKS = (Block(LANES, (5, 5, 6), (5, 5, 6), 1),)
"""Of AVX2."""


@dataclass(frozen=True, slots=True)
class Form:
    """What the machine code depends on."""

    geometry: KvGeometry
    bfloat16: bool
    """Whether q, K, V and weights are rounded to bfloat16 and multiplied in pairs."""

    @property
    def numbers(self) -> int:
        """Numbers in a lane of 32 bits."""
        return 2 if self.bfloat16 else 1

    @property
    def k_lanes(self) -> int:
        """Lanes of a row of K."""
        return self.geometry.attention_dim // self.numbers

    def multiply(self, lanes: int, result: str, a: str, b: str, c: str) -> str:
        """%result = c + a times b."""
        return (pairs.dot if self.bfloat16 else fma)(lanes, result, a, b, c)


_KEYS = 64
"""Keys of a unit. A page is whole units, or one of fewer keys."""
_NO_ROW = 2**31 - 1
"""The first row that sees a key which is none."""
_ROWS = 256
"""Rows of one call: their sums and q of one head fit into the second-level cache."""
_POINTERS = ("arena", "table", "q", "lanes", "sums", "out")
_NUMBERS = ("units", "tokens", "visible", "parts", "rows", "padded", "q_row", "q_head", "out_row", "out_head")
_FACTORS = ("alpha", "scale")
"""The arguments of a call; the number of blocks of each kind follows. `padded`: rows of whole blocks. `lanes`: of each
head of a part, memory for q by block and dimension. `q_row` to `out_head`: strides."""


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
        self._blocks = chosen
        self._function = _compiled(Form(geometry, bfloat16), chosen)
        self.name = "compiled in bfloat16" if bfloat16 else "compiled"

    @staticmethod
    def fits(geometry: KvGeometry) -> bool:
        """Whether the pages have a form that is compiled, and the processor has the instructions."""
        whole = geometry.page_tokens % LANES == 0 and geometry.hidden_dim % LANES == 0
        return whole and geometry.dtype is KvDtype.FLOAT32 and blocks_of_processor() is not None

    @staticmethod
    def in_bfloat16(geometry: KvGeometry) -> bool:
        """Whether products in bfloat16 can be compiled, too."""
        return (
            CompiledAttention.fits(geometry)
            and geometry.attention_dim % LANES == 0
            and blocks_of_processor() is WIDE_BLOCKS
            and pairs.has_bfloat16_products()
        )

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
            with recorded("attend compiled"):
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
        units = -(-tokens // _unit(g))
        parts = min(units, -(-threads // heads))
        counts = self._counts(rows)
        padded = sum(count * block.rows for block, count in zip(self._blocks, counts, strict=True))
        # The tensors must live until the call returns.
        lanes = torch.empty(parts, heads, padded, g.attention_dim)
        sums = torch.zeros(parts, heads, padded, g.hidden_dim)
        pointers = (
            arena.data_ptr() + layer * g.layer_bytes,
            pages.ctypes.data,
            *(each.data_ptr() for each in (q, lanes, sums, out)),
        )
        numbers = (units, tokens, visible, parts, rows, padded, *q.stride()[:2], *out.stride()[:2])
        arguments = (*pointers, *numbers, _bits(alpha), _bits(scale), *counts)
        self._function((ctypes.c_int64 * len(arguments))(*arguments), threads)
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
def blocks_of_processor() -> tuple[Block, ...] | None:
    """None: the processor does not have the instructions."""
    able = instruction_sets()
    if "avx512f" in able:
        return WIDE_BLOCKS
    return NARROW_BLOCKS if {"avx2", "fma"} <= able else None


def _bits(number: float) -> int:
    """A float32 as an argument of machine code."""
    (bits,) = struct.unpack("<i", struct.pack("<f", number))
    return int(bits)


def _unit(geometry: KvGeometry) -> int:
    """Keys of a unit."""
    return _KEYS if geometry.page_tokens % _KEYS == 0 else LANES


@functools.cache
def _compiled(form: Form, blocks: tuple[Block, ...]) -> Call:
    """The function for a form."""
    return compiled_call(source(form, blocks))


def source(form: Form, blocks: tuple[Block, ...]) -> list[str]:
    """The functions in LLVM's language."""
    parts = [pairs.DOT_DECLARATION, SHORT_DECLARATION, pairs.conversion(form.geometry)] if form.bfloat16 else []
    for block in blocks:
        parts += [silu_declarations(block.rows), _scores(form, block), _values(form, block)]
    return [*parts, "declare i64 @llvm.umin.i64(i64, i64)", _work(form, blocks)]


def _broadcast_product(form: Form, block: Block, index: int, address: str, vector: str) -> str:
    """sum += the lane at an address, for all rows, times a vector."""
    return f"""  %n{index} = load float, ptr {address}, align 4
{spread(block.rows, f"v{index}", f"%n{index}")}
{form.multiply(block.rows, f"new{index}", f"%v{index}", vector, f"%sum{index}")}"""


def _tiles(block: Block, steps: str, body: Callable[[int, int, str, str], str]) -> str:
    """Loops of `steps` steps one after the other, one for each tile: from label `loop0` to label `done`.

    `body(first, count, step, tag)` is a step of the tile that begins at `first`: its LLVM code. It adds to %sum and
    makes %new, by index in the block.
    """
    parts = []
    for number, count in enumerate(block.tiles):
        first, tag = sum(block.tiles[:number]), f"{number}"
        before = "block" if number == 0 else f"loop{number - 1}"
        after = "done" if number + 1 == len(block.tiles) else f"loop{number + 1}"
        sums = "\n".join(
            f"  %sum{i} = phi {block.vector} [zeroinitializer, %{before}], [%new{i}, %loop{tag}]"
            for i in range(first, first + count)
        )
        parts.append(f"""loop{tag}:
  %step{tag} = phi i64 [0, %{before}], [%step_next{tag}, %loop{tag}]
{sums}
{body(first, count, f"%step{tag}", tag)}
  %step_next{tag} = add i64 %step{tag}, 1
  %more_steps{tag} = icmp ult i64 %step_next{tag}, {steps}
  br i1 %more_steps{tag}, label %loop{tag}, label %{after}""")
    return "\n".join(parts)


def _scores(form: Form, block: Block) -> str:
    """Weights of the keys at `k`, rounded up to 16: 0 for those that a row does not see.

    Row i sees the first `visible` + i. Fetches the next 16 keys, and as many keys at `next`, evenly over the steps.
    """
    g = form.geometry

    def step(first: int, count: int, d: str, tag: str) -> str:
        products = "\n".join(
            f"  %o{i} = add i64 {d}, {i * form.k_lanes}\n  %p{i} = getelementptr float, ptr %keys_at, i64 %o{i}\n"
            + _broadcast_product(form, block, i, f"%p{i}", f"%row{tag}")
            for i in range(first, first + count)
        )
        # Converted keys are in the cache.
        near = "" if form.bfloat16 else fetched(f"near{tag}", f"%near_at, i64 %fetch{tag}", TO_FIRST)
        far = "\n".join(
            f"""  %far_line{tag}_{line} = add i64 %far_first{tag}, {line}
{fetched_evenly(f"{tag}_{line}", "%next", f"%far_line{tag}_{line}", f"{_unit(g) * g.attention_dim // LANES}")}"""
            for line in range(-(-count * form.numbers // LANES))
        )
        return f"""  %row_at{tag} = mul i64 {d}, {block.rows}
  %row_ptr{tag} = getelementptr float, ptr %q, i64 %row_at{tag}
  %row{tag} = load {block.vector}, ptr %row_ptr{tag}, align 64
  %fetch_in{tag} = mul i64 {d}, {count * form.numbers}
  %fetch{tag} = add i64 %fetch_in{tag}, {first * g.attention_dim}
{near}
  %far{tag} = add i64 %fetch{tag}, %fetch_key
  %far_first{tag} = lshr i64 %far{tag}, 4
{far}
{products}"""

    near_at = f"""  %following = getelementptr float, ptr %keys_at, i64 {LANES * g.attention_dim}
  %near_at = select i1 %more, ptr %following, ptr %next"""
    pairs_at = """  %weight_pair_at = lshr i64 %weight_at, 1
  %pairs_at = getelementptr float, ptr %weights, i64 %weight_pair_at"""
    results = "\n".join(
        f"  %to{i} = getelementptr float, ptr %weights_at, i64 {i * block.rows}\n"
        f"  store {block.vector} %new{i}, ptr %to{i}, align 64"
        for i in range(LANES)
    )
    return f"""
define internal void @scores{block.rows}(ptr noalias %q, ptr noalias %k, ptr noalias %weights, i64 %keys,
                                         i64 %visible, ptr %next) {{
entry:
  br label %block
block:
  %key = phi i64 [0, %entry], [%key_next, %block_end]
  %key_next = add i64 %key, {LANES}
  %more = icmp ult i64 %key_next, %keys
  %key_at = mul i64 %key, {form.k_lanes}
  %fetch_key = mul i64 %key, {g.attention_dim}
  %keys_at = getelementptr float, ptr %k, i64 %key_at
{"" if form.bfloat16 else near_at}
  %weight_at = mul i64 %key, {block.rows}
  %weights_at = getelementptr float, ptr %weights, i64 %weight_at
{pairs_at if form.bfloat16 else ""}
  %behind = sub i64 %key, %visible
  %behind_too = add i64 %behind, 1
  %hidden = trunc i64 %behind_too to i32
  br label %loop0
{_tiles(block, str(form.k_lanes), step)}
done:
{results}
  br label %activate
activate:
  %place = phi i64 [0, %done], [%place_next, %activate]
{_activated(form, block)}
  %place_next = add i64 %place, {form.numbers}
  %more_places = icmp ult i64 %place_next, {LANES}
  br i1 %more_places, label %activate, label %block_end
block_end:
  br i1 %more, label %block, label %end
end:
  ret void
}}"""


def _activated(form: Form, block: Block) -> str:
    """Weights of the scores of key `place`, in their place; of a pair of keys in bfloat16, in the place of the pair.

    The pairs of a unit follow one another, and take half the room, so no pair overwrites a score that is still needed.
    The last pair may have one key.
    """
    of, lanes = block.vector, ", ".join(f"i32 {row}" for row in range(block.rows))
    parts = [
        f"""  %place{number} = add i64 %place, {number}
  %at{number} = mul i64 %place{number}, {block.rows}
  %from{number} = getelementptr float, ptr %weights_at, i64 %at{number}
  %x_{number} = load {of}, ptr %from{number}, align 64
{(short_silu if form.bfloat16 else silu)(block.rows, f"_{number}")}
  %place32_{number} = trunc i64 %place{number} to i32
  %first_of{number} = add i32 %hidden, %place32_{number}
  %key{number} = add i64 %key, %place{number}
  %is_key{number} = icmp ult i64 %key{number}, %keys
  %first_row{number} = select i1 %is_key{number}, i32 %first_of{number}, i32 {_NO_ROW}
{spread(block.rows, f"first_rows{number}", f"%first_row{number}", "i32")}
  %sees{number} = icmp sge {vector_of(block.rows, "i32")} <{lanes}>, %first_rows{number}
  %weight{number} = select {vector_of(block.rows, "i1")} %sees{number}, {of} %result_{number}, {of} zeroinitializer"""
        for number in range(form.numbers)
    ]
    if not form.bfloat16:
        return f"{parts[0]}\n  store {block.vector} %weight0, ptr %from0, align 64"
    return "\n".join(
        [
            *parts,
            pairs.paired(block.rows, "weights_of_pair", "%weight0", "%weight1"),
            "  %pair_at = lshr i64 %at0, 1",
            "  %to = getelementptr float, ptr %pairs_at, i64 %pair_at",
            f"  store {block.vector} %weights_of_pair, ptr %to, align 64",
        ]
    )


def _values(form: Form, block: Block) -> str:
    """Adds the weighted rows of V. Reads exactly `keys` rows: those behind may hold anything, even NaN.

    In bfloat16, rows are pairs. Fetches V at `next`, evenly over the steps.
    """
    g = form.geometry
    vectors = g.hidden_dim // LANES
    count = -(-vectors // block.vectors)
    bounds = [vectors * number // count for number in range(count + 1)]
    tiles = []
    lines_before = 0
    for first_vector, last_vector in pairwise(bounds):
        first_row = 0
        for number, rows in enumerate(block.row_tiles):
            share, rest = divmod((last_vector - first_vector) * form.numbers, len(block.row_tiles))
            lines = share + (number < rest)
            tiles.append((range(first_row, first_row + rows), range(first_vector, last_vector), lines_before, lines))
            lines_before += lines
            first_row += rows
    loops = [
        _values_tile(form, block, *tile, f"{number}", f"loop{number + 1}" if number + 1 < len(tiles) else "end")
        for number, tile in enumerate(tiles)
    ]
    return f"""
define internal void @values{block.rows}(ptr noalias %sums, ptr noalias %v, ptr noalias %weights, i64 %keys,
                                         ptr %next) {{
entry:
  br label %loop0
{"".join(loops)}
end:
  ret void
}}"""


def _values_tile(
    form: Form, block: Block, rows: range, vectors: range, lines_before: int, lines: int, tag: str, after: str
) -> str:
    """Sums of some rows and vectors of columns, over all keys: from label `loopTAG` to `after`."""
    g, steps = form.geometry, _unit(form.geometry) // form.numbers
    of = vector_of(LANES)
    before = "entry" if tag == "0" else f"done{int(tag) - 1}"
    places = [(row, vector) for row in rows for vector in vectors]

    def name(kind: str, row: int, vector: int) -> str:
        return f"{kind}{tag}_{row}_{vector}"

    body = [
        f"  %key{tag} = phi i64 [0, %{before}], [%key_next{tag}, %loop{tag}]",
        *(
            f"  %{name('sum', *place)} = phi {of} [zeroinitializer, %{before}], [%{name('new', *place)}, %loop{tag}]"
            for place in places
        ),
        f"  %v_in{tag} = mul i64 %key{tag}, {g.hidden_dim}",
        f"  %v_at{tag} = getelementptr float, ptr %v, i64 %v_in{tag}",
        f"  %w_in{tag} = mul i64 %key{tag}, {block.rows}",
        f"  %w_at{tag} = getelementptr float, ptr %weights, i64 %w_in{tag}",
        f"  %line_in{tag} = mul i64 %key{tag}, {lines}",
    ]
    for vector in vectors:
        body.append(f"  %v_at{tag}_{vector} = getelementptr float, ptr %v_at{tag}, i64 {vector * LANES}")
        body.append(f"  %v{tag}_{vector} = load {of}, ptr %v_at{tag}_{vector}, align 4")
    for row in rows:
        body.append(f"  %w_at{tag}_{row} = getelementptr float, ptr %w_at{tag}, i64 {row}")
        body.append(f"  %n{tag}_{row} = load float, ptr %w_at{tag}_{row}, align 4")
        body.append(spread(LANES, f"w{tag}_{row}", f"%n{tag}_{row}"))
        for vector in vectors:
            old, new = f"%{name('sum', row, vector)}", name("new", row, vector)
            body.append(form.multiply(LANES, new, f"%w{tag}_{row}", f"%v{tag}_{vector}", old))
    for line in range(lines):
        body.append(f"  %l{tag}_{line} = add i64 %line_in{tag}, {lines_before * steps + line}")
        all_lines = _unit(g) * g.hidden_dim // LANES
        body.append(fetched_evenly(f"{tag}_{line}", "%next", f"%l{tag}_{line}", f"{all_lines}"))
    results = [
        f"""  %to{at} = getelementptr float, ptr %sums, i64 {row * g.hidden_dim + vector * LANES}
  %old{at} = load {of}, ptr %to{at}, align 4
  %total{at} = fadd {of} %old{at}, %{name("new", row, vector)}
  store {of} %total{at}, ptr %to{at}, align 4"""
        for row, vector in places
        for at in (name("", row, vector),)
    ]
    return f"""
loop{tag}:
{chr(10).join(body)}
  %key_next{tag} = add i64 %key{tag}, 1
  %more{tag} = icmp ult i64 %key_next{tag}, %keys
  br i1 %more{tag}, label %loop{tag}, label %done{tag}
done{tag}:
{chr(10).join(results)}
  br label %{after}"""


def _packed(form: Form, block: Block, after: str, first: str) -> str:
    """From label `packN` to `after`: alpha * q of all blocks of a kind, by block and dimension or pair of dimensions.

    The first block begins at row `first`. Rows that are missing are copies of the last one.
    """
    g, n = form.geometry, block.rows
    unrolled = 4 if g.attention_dim % 4 == 0 else 1

    def stored(place: int) -> str:
        if not form.bfloat16:
            return f"  store float %y{n}_{place}, ptr %to{n}_{place}, align 4"
        return f"""  %short{n}_{place} = fptrunc float %y{n}_{place} to bfloat
  %half{n}_{place} = getelementptr bfloat, ptr %to{n}_{place}, i64 {place % 2}
  store bfloat %short{n}_{place}, ptr %half{n}_{place}, align 2"""

    numbers = "\n".join(
        f"""  %d{n}_{place} = add i64 %d{n}, {place}
  %from{n}_{place} = getelementptr float, ptr %from{n}, i64 %d{n}_{place}
  %x{n}_{place} = load float, ptr %from{n}_{place}, align 4
  %y{n}_{place} = fmul float %x{n}_{place}, %alpha
  %step{n}_{place} = udiv i64 %d{n}_{place}, {form.numbers}
  %to_in{n}_{place} = mul i64 %step{n}_{place}, {n}
  %to{n}_{place} = getelementptr float, ptr %to{n}, i64 %to_in{n}_{place}
{stored(place)}"""
        for place in range(unrolled)
    )
    return f"""pack{n}:
  %packs{n} = icmp ugt i64 %blocks{n}, 0
  br i1 %packs{n}, label %pack_row{n}, label %{after}
pack_row{n}:
  %p{n} = phi i64 [0, %pack{n}], [%p_next{n}, %pack_row_end{n}]
  %p_next{n} = add i64 %p{n}, 1
  %row_or_more{n} = add i64 %p{n}, {first}
  %q_number{n} = call i64 @llvm.umin.i64(i64 %row_or_more{n}, i64 %last_row)
  %from_in{n} = mul i64 %q_number{n}, %q_row
  %from{n} = getelementptr float, ptr %q_of, i64 %from_in{n}
  %lane{n} = and i64 %p{n}, {n - 1}
  %block_row{n} = sub i64 %row_or_more{n}, %lane{n}
  %block_in{n} = mul i64 %block_row{n}, {g.attention_dim}
  %to_in{n} = add i64 %block_in{n}, %lane{n}
  %to{n} = getelementptr float, ptr %lanes_of, i64 %to_in{n}
  br label %pack_number{n}
pack_number{n}:
  %d{n} = phi i64 [0, %pack_row{n}], [%d_next{n}, %pack_number{n}]
{numbers}
  %d_next{n} = add i64 %d{n}, {unrolled}
  %more_numbers{n} = icmp ult i64 %d_next{n}, {g.attention_dim}
  br i1 %more_numbers{n}, label %pack_number{n}, label %pack_row_end{n}
pack_row_end{n}:
  %more_packs{n} = icmp ult i64 %p_next{n}, %rows_of{n}
  br i1 %more_packs{n}, label %pack_row{n}, label %{after}"""


def _work(form: Form, blocks: tuple[Block, ...]) -> str:
    """Items are heads of parts of the keys; thread `number` takes every item with that remainder.

    If the keys are in one part, an item writes its part of `out`; else the caller adds the sums of the parts.
    """
    names = [*_POINTERS, *_NUMBERS, *(f"{name}_bits" for name in _FACTORS)]
    names += [f"blocks{block.rows}" for block in blocks]
    factors = "\n".join(
        f"  %{name}_low = trunc i64 %{name}_bits to i32\n  %{name} = bitcast i32 %{name}_low to float"
        for name in _FACTORS
    )
    g = form.geometry
    unit = _unit(g)
    in_page = g.page_tokens // unit
    k_elements, v_elements = unit * g.attention_dim, unit * g.hidden_dim
    v_start = g.num_heads * g.page_tokens * g.attention_dim

    def unit_at(name: str, number: str) -> str:
        """%NAME_k and %NAME_v: K and V of a unit, of the present head."""
        return f"""  %{name}_page = udiv i64 {number}, {in_page}
  %{name}_place = urem i64 {number}, {in_page}
  %{name}_entry = getelementptr i64, ptr %table, i64 %{name}_page
  %{name}_number = load i64, ptr %{name}_entry
  %{name}_bytes = mul i64 %{name}_number, {g.page_bytes}
  %{name}_base = getelementptr i8, ptr %arena, i64 %{name}_bytes
  %{name}_k_in = mul i64 %{name}_place, {k_elements}
  %{name}_k_at = add i64 %{name}_k_in, %k_of_head
  %{name}_k = getelementptr float, ptr %{name}_base, i64 %{name}_k_at
  %{name}_v_in = mul i64 %{name}_place, {v_elements}
  %{name}_v_at = add i64 %{name}_v_in, %v_of_head
  %{name}_v = getelementptr float, ptr %{name}_base, i64 %{name}_v_at"""

    k, v, room, conversion = "%now_k", "%now_v", "", ""
    if form.bfloat16:
        k, v = "%k_pairs", "%v_pairs"
        room = f"""  %k_pairs = alloca [{k_elements // 2} x float], align 64
  %v_pairs = alloca [{v_elements // 2} x float], align 64"""
        conversion = "  call void @convert(ptr %now_k, ptr %now_v, ptr %k_pairs, ptr %v_pairs, i64 %keys)"

    def values(n: int) -> str:
        steps, rounded = f"%keys{n}", ""
        if form.bfloat16:
            steps = f"%pairs{n}"
            rounded = f"  %even{n} = add i64 %keys{n}, 1\n  %pairs{n} = lshr i64 %even{n}, 1\n"
        return f"{rounded}  call void @values{n}(ptr %sums_of{n}, ptr {v}, ptr %weights, i64 {steps}, ptr %then_v)"

    def rows(block: Block, after: str, first: str) -> str:
        """From label `rowsN` to `after`: all blocks of a kind on the present unit, the first at row `first`."""
        n = block.rows
        return f"""rows{n}:
  %any{n} = icmp ugt i64 %blocks{n}, 0
  br i1 %any{n}, label %row{n}, label %{after}
row{n}:
  %b{n} = phi i64 [0, %rows{n}], [%b_next{n}, %row_end{n}]
  %b_next{n} = add i64 %b{n}, 1
  %row_in{n} = mul i64 %b{n}, {n}
  %row_at{n} = add i64 %row_in{n}, {first}
  %seen{n} = add i64 %left_visible, %row_at{n}
  %most{n} = add i64 %seen{n}, {n - 1}
  %sees_any{n} = icmp sgt i64 %most{n}, 0
  br i1 %sees_any{n}, label %sees{n}, label %row_end{n}
sees{n}:
  %is_less{n} = icmp slt i64 %most{n}, %keys
  %keys{n} = select i1 %is_less{n}, i64 %most{n}, i64 %keys
  %q_at{n} = mul i64 %row_at{n}, {g.attention_dim}
  %q_of{n} = getelementptr float, ptr %lanes_of, i64 %q_at{n}
  %sum_of{n} = add i64 %sum_row, %row_at{n}
  %sum_at{n} = mul i64 %sum_of{n}, {g.hidden_dim}
  %sums_of{n} = getelementptr float, ptr %sums, i64 %sum_at{n}
  call void @scores{n}(ptr %q_of{n}, ptr {k}, ptr %weights, i64 %keys{n}, i64 %seen{n}, ptr %then_k)
{values(n)}
  br label %row_end{n}
row_end{n}:
  %more{n} = icmp ult i64 %b_next{n}, %blocks{n}
  br i1 %more{n}, label %row{n}, label %{after}"""

    loops, packing, first = [], [], "0"
    for number, block in enumerate(blocks):
        is_last = number + 1 == len(blocks)
        following = "" if is_last else f"{blocks[number + 1].rows}"
        loops.append(rows(block, "unit_end" if is_last else f"rows{following}", first))
        packing.append(_packed(form, block, "packed" if is_last else f"pack{following}", first))
        first = f"%rows_of{block.rows}"
    row_counts = "\n".join(f"  %rows_of{block.rows} = mul i64 %blocks{block.rows}, {block.rows}" for block in blocks)
    all_rows = "\n".join(loops)
    of = vector_of(LANES)
    scaled_vectors = [
        f"""  %column_sum_at{at} = getelementptr float, ptr %sum_at, i64 {at}
  %column_sum{at} = load {of}, ptr %column_sum_at{at}, align 4
  %column_scaled{at} = fmul {of} %column_sum{at}, %scales
  %column_out_at{at} = getelementptr float, ptr %out_at, i64 {at}
  store {of} %column_scaled{at}, ptr %column_out_at{at}, align 4"""
        for at in range(0, g.hidden_dim, LANES)
    ]
    return f"""
define internal void @work(ptr %arguments, i64 %number, i64 %threads) {{
entry:
  %weights = alloca [{unit * max(block.rows for block in blocks)} x float], align 64
{room}
{loaded(names, _POINTERS)}
{factors}
{row_counts}
  %last_row = sub i64 %rows, 1
  %is_whole = icmp eq i64 %parts, 1
  %items = mul i64 %parts, {g.num_heads}
  %any = icmp ult i64 %number, %items
  br i1 %any, label %item, label %end
item:
  %index = phi i64 [%number, %entry], [%index_next, %item_end]
  %head = urem i64 %index, {g.num_heads}
  %part = udiv i64 %index, {g.num_heads}
  %part_heads = mul i64 %part, {g.num_heads}
  %heads_before = add i64 %part_heads, %head
  %sum_row = mul i64 %heads_before, %padded
  %k_of_head = mul i64 %head, {g.page_tokens * g.attention_dim}
  %v_in_layer = mul i64 %head, {g.page_tokens * g.hidden_dim}
  %v_of_head = add i64 %v_in_layer, {v_start}
  %before = mul i64 %part, %units
  %first = udiv i64 %before, %parts
  %after = add i64 %before, %units
  %last = udiv i64 %after, %parts
  %final = sub i64 %last, 1
  %lanes_in = mul i64 %sum_row, {g.attention_dim}
  %lanes_of = getelementptr float, ptr %lanes, i64 %lanes_in
  %q_in = mul i64 %head, %q_head
  %q_of = getelementptr float, ptr %q, i64 %q_in
  br label %pack{blocks[0].rows}
{chr(10).join(packing)}
packed:
  br label %unit
unit:
  %u = phi i64 [%first, %packed], [%u_next, %unit_end]
  %u_next = add i64 %u, 1
  %is_final = icmp eq i64 %u, %final
  %coming = select i1 %is_final, i64 %u, i64 %u_next
{unit_at("now", "%u")}
{unit_at("then", "%coming")}
  %behind = mul i64 %u, {unit}
  %left = sub i64 %tokens, %behind
  %left_visible = sub i64 %visible, %behind
  %is_short = icmp ult i64 %left, {unit}
  %keys = select i1 %is_short, i64 %left, i64 {unit}
{conversion}
  br label %rows{blocks[0].rows}
{all_rows}
unit_end:
  br i1 %is_final, label %summed, label %unit
summed:
  %sums_in = mul i64 %sum_row, {g.hidden_dim}
  %sums_of = getelementptr float, ptr %sums, i64 %sums_in
  %out_in = mul i64 %head, %out_head
  %out_of = getelementptr float, ptr %out, i64 %out_in
{spread(LANES, "scales", "%scale")}
  br i1 %is_whole, label %written, label %item_end
written:
  %r = phi i64 [0, %summed], [%r_next, %written]
  %r_next = add i64 %r, 1
  %sum_in = mul i64 %r, {g.hidden_dim}
  %sum_at = getelementptr float, ptr %sums_of, i64 %sum_in
  %row_in = mul i64 %r, %out_row
  %out_at = getelementptr float, ptr %out_of, i64 %row_in
{chr(10).join(scaled_vectors)}
  %more_rows = icmp ult i64 %r_next, %rows
  br i1 %more_rows, label %written, label %item_end
item_end:
  %index_next = add i64 %index, %threads
  %more_items = icmp ult i64 %index_next, %items
  br i1 %more_items, label %item, label %end
end:
  ret void
}}"""
