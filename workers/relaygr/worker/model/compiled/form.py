"""What the machine code of attention is compiled for, and what it is given.

How many numbers are computed together is decided here: `Block`.
"""

from __future__ import annotations

import ctypes
import functools
from dataclasses import dataclass

from relaygr.runtime.processor import instruction_sets
from relaygr.worker.kv import KvGeometry

LANES = 16
"""Float32 numbers in a register of AVX-512, and in a line of the caches. For AVX2, LLVM divides a vector into two."""


@dataclass(frozen=True, slots=True)
class Block:
    """Rows that are computed together, and their division into tiles.

    The sums of a tile are in registers: AVX-512 has 32 of 16 numbers, AVX2 has 16 of 8.
    """

    rows: int
    """Also the width of a vector of scores. 16, or 32, whose halves share a number of K that was read."""
    key_tiles: tuple[int, ...]
    """Keys of each tile of scores: 16 in total."""
    row_tiles: tuple[int, ...]
    """Rows of each tile of values."""
    column_vectors: int
    """The most vectors of 16 columns in a tile of values."""


WIDE_BLOCKS = (Block(2 * LANES, (8, 8), (8, 8, 8, 8), 3), Block(LANES, (LANES,), (8, 8), 3))
"""Of AVX-512, the larger block first."""
NARROW_BLOCKS = (Block(LANES, (5, 5, 6), (5, 5, 6), 1),)
"""Of AVX2."""


@functools.cache
def blocks_of_processor() -> tuple[Block, ...] | None:
    """None: the processor does not have the instructions."""
    able = instruction_sets()
    if "avx512f" in able:
        return WIDE_BLOCKS
    return NARROW_BLOCKS if {"avx2", "fma"} <= able else None


def has_bfloat16_products() -> bool:
    """Whether the processor has them: AMD's since Zen 4, Intel's Cooper Lake and those since Sapphire Rapids."""
    return {"avx512f", "avx512_bf16"} <= instruction_sets()


@dataclass(frozen=True, slots=True)
class Form:
    """What a function is compiled for, beside the blocks."""

    geometry: KvGeometry
    bfloat16: bool
    """Whether q, K, V and weights are rounded to bfloat16 and multiplied in pairs."""

    @property
    def unit(self) -> int:
        """Keys that are computed together: their weights stay in the first-level cache. A page is whole units.

        Keys behind the last one are read up to the next multiple of 16, but not used.
        """
        return 64 if self.geometry.page_tokens % 64 == 0 else LANES

    @property
    def per_lane(self) -> int:
        """Numbers in a lane of 32 bits."""
        return 2 if self.bfloat16 else 1

    @property
    def k_lanes(self) -> int:
        """Lanes of a row of K."""
        return self.geometry.attention_dim // self.per_lane


POINTERS = ("arena", "table", "q", "packed_q", "sums", "out")
INTS = ("units", "tokens", "visible", "parts", "rows", "padded", "q_row", "q_head", "out_row", "out_head")
FACTORS = ("alpha", "scale")


class Arguments(ctypes.Structure):
    """What a call is given.

    `arena`: K of the layer in page 0. `table`: the pages, int64. `packed_q`: [parts, heads, padded, attention_dim],
    room for q by block and dimension. `sums`: zeros [parts, heads, padded, hidden_dim]. `units`: of keys, divided into
    `parts`. `visible`: row i sees the first `visible` + i of `tokens` tokens. `padded`: rows of whole blocks.
    `q_row` to `out_head`: strides. `block_counts`: the number of blocks of each kind.
    """

    _fields_ = (
        *((name, ctypes.c_void_p) for name in POINTERS),
        *((name, ctypes.c_int64) for name in INTS),
        *((name, ctypes.c_float) for name in FACTORS),
        ("block_counts", ctypes.c_int64 * 2),
    )
