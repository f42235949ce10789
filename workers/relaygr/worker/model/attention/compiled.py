"""HSTU attention on cached K,V in float32, as machine code that LLVM compiles at load: for CPUs with AVX-512 or AVX2.

An append or a hit has few rows and many keys. torch would gather the keys from their pages, multiply, write the
scores, apply SiLU, and multiply again. The compiled function reads each page once, in place, and keeps 64 keys' weights
in the first-level cache. It needs llvmlite (the extra `compiled`), and no compiler on the machine.

    scores     w[key, 16 rows] = SiLU(sum over d of K[key, d] * q[d, 16 rows])        16 keys at once
    values     a[d, 16 rows] += sum over keys of V[key, d] * w[key, 16 rows]          16 columns of V at once

Each step multiplies one number from memory, broadcast, by a vector of 16 rows. AVX-512 has all 16 sums in registers;
AVX2 computes five or six of them at a time. The next keys are fetched into the second-level cache meanwhile: without,
16 rows take 1.6 to 1.9 times as long on AVX2. The sums of 64 keys are added to those before, which keeps them exact.

OpenMP's threads, which torch uses, share the heads, and parts of the keys if there are fewer heads. Their sums are
added in a fixed order, so a result is the same on each call with as many threads.
"""

from __future__ import annotations

import ctypes
import functools
import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812 - its usual name
from numpy.typing import NDArray
from torch.profiler import record_function

from relaygr.worker.kv import KvDtype, KvGeometry

LANES = 16
"""Rows of a block: float32 numbers in a register."""
WIDE_TILES, NARROW_TILES = (LANES,), (5, 5, 6)
"""How the 16 sums of a block are divided: AVX-512 keeps all in its 32 registers, AVX2 has 16 of half the size."""
_KEYS = 64
"""Keys of a unit. A page is whole units, or one of fewer keys."""
_ROWS = 256
"""Rows of one call: their sums and q of one head fit into the second-level cache."""
_ARGUMENTS = ("q", "arena", "table", "units", "tokens", "blocks", "parts", "sums")
_VECTOR = f"<{LANES} x float>"
_LOG2_E = 1.4426950408889634
_LN2_HIGH, _LN2_LOW = 0.693359375, -2.12194440e-4
_EXP = (1.9875691500e-4, 1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1)
"""The polynomial of Cephes' expf: an error of about one unit in the last place."""
_WIDEST = 87.0
"""exp of it and of its negative are normal numbers."""


class CompiledAttention:
    """Adds what rows see of a segment's context, for one geometry."""

    def __init__(self, geometry: KvGeometry, tiles: tuple[int, ...] | None = None) -> None:
        """`tiles`: None chooses those of this processor.

        Raises ImportError without llvmlite, RuntimeError if it cannot compile for this processor.
        """
        chosen = tiles or tiles_of_processor()
        if chosen is None:
            raise RuntimeError("the processor has neither AVX-512 nor AVX2 with FMA")
        self._geometry = geometry
        self._function = _compiled(geometry, chosen)

    @staticmethod
    def fits(geometry: KvGeometry) -> bool:
        """Whether the pages have a form that is compiled, and the processor has the instructions."""
        whole = geometry.page_tokens % LANES == 0 and geometry.hidden_dim % LANES == 0
        return whole and geometry.dtype is KvDtype.FLOAT32 and tiles_of_processor() is not None

    def add(
        self,
        arena: torch.Tensor,
        layer: int,
        pages: NDArray[np.int64],
        tokens: int,
        q: torch.Tensor,
        sums: torch.Tensor,
    ) -> None:
        """sums [heads, rows, hidden_dim] += what q [heads, rows, attention_dim] see of the first tokens of `pages`.

        q is scaled. `arena`: uint8 [num_pages, page_bytes], contiguous.
        """
        for low in range(0, q.shape[1] if tokens else 0, _ROWS):
            rows = slice(low, low + _ROWS)
            with record_function("attend compiled"):
                sums[:, rows] += self._sums(arena, layer, pages, tokens, q[:, rows])

    def _sums(
        self, arena: torch.Tensor, layer: int, pages: NDArray[np.int64], tokens: int, q: torch.Tensor
    ) -> torch.Tensor:
        g = self._geometry
        heads, rows, _ = q.shape
        blocks = -(-rows // LANES)
        padded = F.pad(q, (0, 0, 0, blocks * LANES - rows)).view(heads, blocks, LANES, g.attention_dim)
        by_lane = padded.permute(1, 0, 3, 2).contiguous()
        threads = torch.get_num_threads()
        units = -(-tokens // _unit(g))
        parts = min(units, -(-threads // heads))
        sums = torch.zeros(parts, blocks, heads, g.hidden_dim, LANES)
        arguments = (ctypes.c_int64 * len(_ARGUMENTS))(
            by_lane.data_ptr(),
            arena.data_ptr() + layer * g.layer_bytes,
            pages.ctypes.data,
            units,
            tokens,
            blocks,
            parts,
            sums.data_ptr(),
        )
        self._function(arguments, threads)
        total = sums.sum(0) if parts > 1 else sums[0]
        return total.permute(1, 0, 3, 2).reshape(heads, blocks * LANES, g.hidden_dim)[:, :rows]


@functools.cache
def tiles_of_processor() -> tuple[int, ...] | None:
    """None: the processor does not have the instructions."""
    able = torch.cpu.get_capabilities()
    if able.get("avx512_f"):
        return WIDE_TILES
    return NARROW_TILES if able.get("avx2") and able.get("fma3") else None


def _unit(geometry: KvGeometry) -> int:
    """Keys of a unit."""
    return _KEYS if geometry.page_tokens % _KEYS == 0 else LANES


Call = Callable[[ctypes.Array[ctypes.c_int64], int], None]


@functools.cache
def _compiled(geometry: KvGeometry, tiles: tuple[int, ...]) -> Call:
    """The function for a geometry."""
    import llvmlite.binding as llvm

    team = _team()
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    machine = llvm.Target.from_default_triple().create_target_machine(
        cpu=llvm.get_host_cpu_name(),
        # LLVM prefers registers of half the size on processors whose clock once depended on it.
        features=llvm.get_host_cpu_features().flatten() + ",-prefer-256-bit",
        opt=3,
    )
    module = llvm.parse_assembly(source(geometry, team, tiles))
    module.verify()
    engine = llvm.create_mcjit_compiler(module, machine)
    engine.finalize_object()
    alone = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(engine.get_function_address("alone"))
    member = engine.get_function_address("member") if team is not None else 0

    def call(arguments: ctypes.Array[ctypes.c_int64], threads: int) -> None:
        if threads == 1 or team is None:
            alone(arguments)
        else:
            team.start(member, arguments, threads, 0)

    # The machine code lives as long as its engine.
    call.engine = engine  # type: ignore[attr-defined]
    return call


@dataclass(frozen=True, slots=True)
class _Team:
    """Entry points of the OpenMP library that torch has loaded (GNU's, on Linux)."""

    start: Any
    number_at: int
    """Address of the function that returns the number of the calling thread, and of that which returns their count."""
    count_at: int


def _team() -> _Team | None:
    """None if the library is another one: then one thread does all."""
    try:
        library = ctypes.CDLL(None)
        start = library.GOMP_parallel
        number, count = library.omp_get_thread_num, library.omp_get_num_threads
    except (AttributeError, TypeError):
        return None
    start.argtypes, start.restype = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint], None
    number_at, count_at = (int(ctypes.cast(each, ctypes.c_void_p).value or 0) for each in (number, count))
    return _Team(start, number_at, count_at)


def source(geometry: KvGeometry, team: _Team | None, tiles: tuple[int, ...]) -> str:
    """The functions in LLVM's language. `alone(arguments)` does all; each thread of a team calls `member`."""
    parts = [_DECLARATIONS, _silu(), _scores(geometry, tiles), _values(geometry, tiles), _work(geometry)]
    parts.append("define void @alone(ptr %to) {\n  call void @work(ptr %to, i64 0, i64 1)\n  ret void\n}")
    if team is not None:
        # The team may be smaller than what was asked for.
        parts.append(f"""
define void @member(ptr %to) {{
  %number = call i32 inttoptr (i64 {team.number_at} to ptr)()
  %count = call i32 inttoptr (i64 {team.count_at} to ptr)()
  %wide_number = sext i32 %number to i64
  %wide_count = sext i32 %count to i64
  call void @work(ptr %to, i64 %wide_number, i64 %wide_count)
  ret void
}}""")
    return "\n".join(parts)


_DECLARATIONS = "\n".join(
    f"declare {_VECTOR} @llvm.{name}.v{LANES}f32({', '.join([_VECTOR] * count)})"
    for name, count in (("fma", 3), ("rint", 1), ("minnum", 2), ("maxnum", 2))
)
_DECLARATIONS += "\ndeclare void @llvm.prefetch.p0(ptr, i32, i32, i32)"


def _splat(number: float) -> str:
    """A vector of one number, which LLVM writes as the bits of a float64."""
    (bits,) = struct.unpack("<Q", struct.pack("<d", float(np.float32(number))))
    return "<" + ", ".join([f"float 0x{bits:016X}"] * LANES) + ">"


def _fma(result: str, a: str, b: str, c: str) -> str:
    return f"  %{result} = call {_VECTOR} @llvm.fma.v{LANES}f32({_VECTOR} {a}, {_VECTOR} {b}, {_VECTOR} {c})"


def _silu() -> str:
    """x / (1 + exp(-x)): exp by the power of two next to it, and a polynomial for the rest."""
    lines = [
        f"define internal {_VECTOR} @silu({_VECTOR} %x) alwaysinline {{",
        f"  %low = call {_VECTOR} @llvm.maxnum.v{LANES}f32({_VECTOR} %x, {_VECTOR} {_splat(-_WIDEST)})",
        f"  %y = call {_VECTOR} @llvm.minnum.v{LANES}f32({_VECTOR} %low, {_VECTOR} {_splat(_WIDEST)})",
        f"  %scaled = fmul {_VECTOR} %y, {_splat(-_LOG2_E)}",
        f"  %power = call {_VECTOR} @llvm.rint.v{LANES}f32({_VECTOR} %scaled)",
        f"  %minus = fneg {_VECTOR} %y",
        _fma("rest0", "%power", _splat(-_LN2_HIGH), "%minus"),
        _fma("rest", "%power", _splat(-_LN2_LOW), "%rest0"),
        _fma("p1", _splat(_EXP[0]), "%rest", _splat(_EXP[1])),
    ]
    lines += [_fma(f"p{place}", f"%p{place - 1}", "%rest", _splat(_EXP[place])) for place in range(2, len(_EXP))]
    lines += [
        f"  %square = fmul {_VECTOR} %rest, %rest",
        _fma("near1", f"%p{len(_EXP) - 1}", "%square", "%rest"),
        f"  %fraction = fadd {_VECTOR} %near1, {_splat(1.0)}",
        f"  %whole = fptosi {_VECTOR} %power to <{LANES} x i32>",
        f"  %shifted = shl <{LANES} x i32> %whole, <{', '.join(['i32 23'] * LANES)}>",
        f"  %bits = bitcast {_VECTOR} %fraction to <{LANES} x i32>",
        f"  %sum = add <{LANES} x i32> %bits, %shifted",
        f"  %exp = bitcast <{LANES} x i32> %sum to {_VECTOR}",
        f"  %under = fadd {_VECTOR} %exp, {_splat(1.0)}",
        f"  %result = fdiv {_VECTOR} %x, %under",
        f"  ret {_VECTOR} %result\n}}",
    ]
    return "\n".join(lines)


def _broadcast_product(index: int, address: str, vector: str) -> str:
    """sum += the number at an address, for all lanes, times a vector: one instruction."""
    return f"""  %n{index} = load float, ptr {address}, align 4
  %i{index} = insertelement {_VECTOR} poison, float %n{index}, i32 0
  %v{index} = shufflevector {_VECTOR} %i{index}, {_VECTOR} poison, <{LANES} x i32> zeroinitializer
{_fma(f"new{index}", f"%v{index}", vector, f"%sum{index}")}"""


def _fetched(name: str, address: str) -> str:
    """Fetches the line at an address into the second-level cache: the first one holds what is being read."""
    return f"""  %{name} = getelementptr float, ptr {address}
  call void @llvm.prefetch.p0(ptr %{name}, i32 0, i32 2, i32 1)"""


def _tiles(tiles: tuple[int, ...], steps: str, body: Callable[[int, int, str, str], str]) -> str:
    """Loops of `steps` steps one after the other, one for each tile: from label `loop0` to label `done`.

    `body(first, count, step, tag)` is a step of the tile that begins at `first`: its LLVM code. It adds to %sum and
    makes %new, by index in the block.
    """
    parts = []
    for number, count in enumerate(tiles):
        first, tag = sum(tiles[:number]), f"{number}"
        before = "block" if number == 0 else f"loop{number - 1}"
        after = "done" if number + 1 == len(tiles) else f"loop{number + 1}"
        sums = "\n".join(
            f"  %sum{i} = phi {_VECTOR} [zeroinitializer, %{before}], [%new{i}, %loop{tag}]"
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


def _scores(g: KvGeometry, tiles: tuple[int, ...]) -> str:
    """Weights of the keys at `k`, rounded up to 16. Fetches as many keys at `next`, evenly over the steps."""

    def step(first: int, count: int, d: str, tag: str) -> str:
        products = "\n".join(
            f"  %o{i} = add i64 {d}, {i * g.attention_dim}\n  %p{i} = getelementptr float, ptr %keys_at, i64 %o{i}\n"
            + _broadcast_product(i, f"%p{i}", f"%row{tag}")
            for i in range(first, first + count)
        )
        return f"""  %row_at{tag} = mul i64 {d}, {LANES}
  %row_ptr{tag} = getelementptr float, ptr %q, i64 %row_at{tag}
  %row{tag} = load {_VECTOR}, ptr %row_ptr{tag}, align 64
  %fetch_in{tag} = mul i64 {d}, {count}
  %fetch{tag} = add i64 %fetch_in{tag}, {first * g.attention_dim}
{_fetched(f"line{tag}", f"%next_at, i64 %fetch{tag}")}
{products}"""

    results = "\n".join(
        f"  %s{i} = call {_VECTOR} @silu({_VECTOR} %new{i})\n"
        f"  %to{i} = getelementptr float, ptr %weights_at, i64 {i * LANES}\n"
        f"  store {_VECTOR} %s{i}, ptr %to{i}, align 64"
        for i in range(LANES)
    )
    return f"""
define internal void @scores(ptr noalias %q, ptr noalias %k, ptr noalias %weights, i64 %keys, ptr %next) {{
entry:
  br label %block
block:
  %key = phi i64 [0, %entry], [%key_next, %done]
  %key_at = mul i64 %key, {g.attention_dim}
  %keys_at = getelementptr float, ptr %k, i64 %key_at
  %next_at = getelementptr float, ptr %next, i64 %key_at
  %weight_at = mul i64 %key, {LANES}
  %weights_at = getelementptr float, ptr %weights, i64 %weight_at
  br label %loop0
{_tiles(tiles, str(g.attention_dim), step)}
done:
{results}
  %key_next = add i64 %key, {LANES}
  %more = icmp ult i64 %key_next, %keys
  br i1 %more, label %block, label %end
end:
  ret void
}}"""


def _values(g: KvGeometry, tiles: tuple[int, ...]) -> str:
    """Adds the weighted rows of V. Reads exactly `keys` rows: those behind may hold anything, even NaN."""

    def step(first: int, count: int, key: str, tag: str) -> str:
        products = "\n".join(
            f"  %p{i} = getelementptr float, ptr %value{tag}, i64 {i}\n"
            + _broadcast_product(i, f"%p{i}", f"%weight{tag}")
            for i in range(first, first + count)
        )
        # Each tile fetches its part of the keys: a line holds all columns of a block.
        return f"""  %weight_at{tag} = mul i64 {key}, {LANES}
  %weight_ptr{tag} = getelementptr float, ptr %weights, i64 %weight_at{tag}
  %weight{tag} = load {_VECTOR}, ptr %weight_ptr{tag}, align 64
  %key_at{tag} = mul i64 {key}, {g.hidden_dim}
  %value{tag} = getelementptr float, ptr %columns, i64 %key_at{tag}
  %part{tag} = mul i64 {key}, {count}
  %fetched{tag} = lshr i64 %part{tag}, {LANES.bit_length() - 1}
  %fetch_key{tag} = add i64 %fetched{tag}, {first * _unit(g) // LANES}
  %fetch{tag} = mul i64 %fetch_key{tag}, {g.hidden_dim}
{_fetched(f"line{tag}", f"%columns_next, i64 %fetch{tag}")}
{products}"""

    results = "\n".join(
        f"  %to{i} = getelementptr float, ptr %sums_at, i64 {i * LANES}\n"
        f"  %old{i} = load {_VECTOR}, ptr %to{i}, align 64\n"
        f"  %total{i} = fadd {_VECTOR} %old{i}, %new{i}\n"
        f"  store {_VECTOR} %total{i}, ptr %to{i}, align 64"
        for i in range(LANES)
    )
    return f"""
define internal void @values(ptr noalias %sums, ptr noalias %v, ptr noalias %weights, i64 %keys, ptr %next) {{
entry:
  br label %block
block:
  %d = phi i64 [0, %entry], [%d_next, %done]
  %columns = getelementptr float, ptr %v, i64 %d
  %columns_next = getelementptr float, ptr %next, i64 %d
  %sum_at = mul i64 %d, {LANES}
  %sums_at = getelementptr float, ptr %sums, i64 %sum_at
  br label %loop0
{_tiles(tiles, "%keys", step)}
done:
{results}
  %d_next = add i64 %d, {LANES}
  %more = icmp ult i64 %d_next, {g.hidden_dim}
  br i1 %more, label %block, label %end
end:
  ret void
}}"""


def _work(g: KvGeometry) -> str:
    """Items are heads of parts of the keys; thread `number` takes every item with that remainder."""
    loads = "\n".join(
        f"  %{name}_ptr = getelementptr i64, ptr %arguments, i64 {place}\n"
        + (
            f"  %{name} = load ptr, ptr %{name}_ptr"
            if name in ("q", "arena", "table", "sums")
            else f"  %{name} = load i64, ptr %{name}_ptr"
        )
        for place, name in enumerate(_ARGUMENTS)
    )
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

    return f"""
define internal void @work(ptr %arguments, i64 %number, i64 %threads) {{
entry:
  %weights = alloca [{unit * LANES} x float], align 64
{loads}
  %items = mul i64 %parts, {g.num_heads}
  %any = icmp ult i64 %number, %items
  br i1 %any, label %item, label %end
item:
  %index = phi i64 [%number, %entry], [%index_next, %item_end]
  %head = urem i64 %index, {g.num_heads}
  %part = udiv i64 %index, {g.num_heads}
  %k_of_head = mul i64 %head, {g.page_tokens * g.attention_dim}
  %v_in_layer = mul i64 %head, {g.page_tokens * g.hidden_dim}
  %v_of_head = add i64 %v_in_layer, {v_start}
  %before = mul i64 %part, %units
  %first = udiv i64 %before, %parts
  %after = add i64 %before, %units
  %last = udiv i64 %after, %parts
  %final = sub i64 %last, 1
  %head_q = mul i64 %head, {g.attention_dim * LANES}
  %head_sum = mul i64 %head, {g.hidden_dim * LANES}
  %part_blocks = mul i64 %part, %blocks
  %part_sum = mul i64 %part_blocks, {g.num_heads * g.hidden_dim * LANES}
  %item_sum = add i64 %head_sum, %part_sum
  %item_q = getelementptr float, ptr %q, i64 %head_q
  %item_sums = getelementptr float, ptr %sums, i64 %item_sum
  br label %unit
unit:
  %u = phi i64 [%first, %item], [%u_next, %unit_end]
  %u_next = add i64 %u, 1
  %is_final = icmp eq i64 %u, %final
  %coming = select i1 %is_final, i64 %u, i64 %u_next
{unit_at("now", "%u")}
{unit_at("then", "%coming")}
  %behind = mul i64 %u, {unit}
  %left = sub i64 %tokens, %behind
  %is_short = icmp ult i64 %left, {unit}
  %keys = select i1 %is_short, i64 %left, i64 {unit}
  br label %rows
rows:
  %b = phi i64 [0, %unit], [%b_next, %rows]
  %q_at = mul i64 %b, {g.num_heads * g.attention_dim * LANES}
  %sum_at = mul i64 %b, {g.num_heads * g.hidden_dim * LANES}
  %q_of = getelementptr float, ptr %item_q, i64 %q_at
  %sums_of = getelementptr float, ptr %item_sums, i64 %sum_at
  call void @scores(ptr %q_of, ptr %now_k, ptr %weights, i64 %keys, ptr %then_k)
  call void @values(ptr %sums_of, ptr %now_v, ptr %weights, i64 %keys, ptr %then_v)
  %b_next = add i64 %b, 1
  %more_rows = icmp ult i64 %b_next, %blocks
  br i1 %more_rows, label %rows, label %unit_end
unit_end:
  br i1 %is_final, label %item_end, label %unit
item_end:
  %index_next = add i64 %index, %threads
  %more_items = icmp ult i64 %index_next, %items
  br i1 %more_items, label %item, label %end
end:
  ret void
}}"""
