"""Machine code that LLVM compiles at load, and the float32 products of layers in it, for CPUs with AVX-512.

This module needs llvmlite (the extra `compiled`), and no compiler on the machine.

A weight [K, N] is kept in panels of 48 columns. A tile multiplies 8 rows by one panel: its 24 sums are in registers,
and each step reads one row of the panel and a number of each row. Meanwhile, the first tiles of a panel fetch the next
one into the second-level cache.

With few rows, a product is limited by reading the weight. On one thread of an Intel Cascade Lake and a weight of 512 x
2,048, MKL took 2 times as long for 16 rows, 1.6 times for 144, and the same time for 2,048; oneDNN 1.6, 1 and 0.94
times. With MKL's products, hits of 64 and 128 candidates on 2,048 tokens took 1.1 to 1.2 times as long, pre-infer of a
tail of 16 tokens 1.4 to 1.5 times, of all tokens the same time. On an AMD Zen 5, 16 and 1,024 rows by that weight
reached 87 and 117 GF/s with MKL, 239 and 268 with oneDNN, 267 and 265 to 280 with this code.

A row's sums are added in one order, so its result does not depend on the rows beside it, nor on the threads.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import structlog
import torch
import torch.nn.functional as F  # noqa: N812 - its usual name
from torch.profiler import record_function

from relaygr.runtime.processor import instruction_sets
from relaygr.worker.device.cpu import large_bytes

log = structlog.get_logger(__name__)

Call = Callable[[ctypes.Array[ctypes.c_int64], int], None]
"""Takes the array of arguments and the number of threads."""
LANES = 16
"""Float32 numbers in a register."""
TO_FIRST, TO_SECOND = 3, 2
"""LLVM's numbers of the caches."""


def compiled_call(functions: Sequence[str]) -> Call:
    """Machine code of functions in LLVM's language.

    One of them is `void @work(ptr arguments, i64 number, i64 threads)`, which each thread calls. Raises ImportError
    without llvmlite, RuntimeError if LLVM cannot compile them.
    """
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
    module = llvm.parse_assembly("\n".join([*functions, _entries(team)]))
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


def _entries(team: _Team | None) -> str:
    """`alone(arguments)` does all; each thread of a team calls `member`."""
    alone = """
declare void @llvm.prefetch.p0(ptr, i32, i32, i32)
define void @alone(ptr %to) {
  call void @work(ptr %to, i64 0, i64 1)
  ret void
}"""
    if team is None:
        return alone
    # The team may be smaller than what was asked for.
    return f"""{alone}
define void @member(ptr %to) {{
  %number = call i32 inttoptr (i64 {team.number_at} to ptr)()
  %count = call i32 inttoptr (i64 {team.count_at} to ptr)()
  %wide_number = sext i32 %number to i64
  %wide_count = sext i32 %count to i64
  call void @work(ptr %to, i64 %wide_number, i64 %wide_count)
  ret void
}}"""


_NOT_RECORDED = contextlib.nullcontext()


def recorded(name: str) -> contextlib.AbstractContextManager[object]:
    """Shows a call of machine code to torch's profiler. Without a profiler, `record_function` takes 4 us, this 0.2."""
    return record_function(name) if torch._C._autograd._profiler_enabled() else _NOT_RECORDED


def vector_of(lanes: int, of: str = "float") -> str:
    return f"<{lanes} x {of}>"


def spread(lanes: int, result: str, number: str, of: str = "float") -> str:
    """A vector of copies of a number."""
    vector = vector_of(lanes, of)
    return f"""  %{result}_one = insertelement {vector} poison, {of} {number}, i32 0
  %{result} = shufflevector {vector} %{result}_one, {vector} poison, {vector_of(lanes, "i32")} zeroinitializer"""


def splat(lanes: int, number: float) -> str:
    """A vector of one float32, which LLVM writes as the bits of a float64."""
    (bits,) = struct.unpack("<Q", struct.pack("<d", float(np.float32(number))))
    return same(lanes, f"float 0x{bits:016X}")


def same(lanes: int, text: str) -> str:
    """A vector of equal constants."""
    return f"<{', '.join([text] * lanes)}>"


def registers(lanes: int) -> range:
    """Numbers of the registers that hold a vector, for instructions that LLVM does not split by itself."""
    return range(lanes // LANES)


def part(result: str, vector: str, lanes: int, register: int) -> str:
    """%result: the lanes of a vector in one register."""
    of, numbers = vector_of(lanes), ", ".join(f"i32 {register * LANES + lane}" for lane in range(LANES))
    return f"  %{result} = shufflevector {of} {vector}, {of} poison, <{LANES} x i32> <{numbers}>"


def joined(result: str, lanes: int) -> str:
    """%result of %result_0 and, if the vector takes two registers, %result_1."""
    of, numbers = vector_of(LANES), ", ".join(f"i32 {lane}" for lane in range(lanes))
    second = f"%{result}_1" if lanes > LANES else "poison"
    return f"  %{result} = shufflevector {of} %{result}_0, {of} {second}, {vector_of(lanes, 'i32')} <{numbers}>"


def fma(lanes: int, result: str, a: str, b: str, c: str) -> str:
    of = vector_of(lanes)
    return f"  %{result} = call {of} @llvm.fma.v{lanes}f32({of} {a}, {of} {b}, {of} {c})"


def fetched(name: str, address: str, cache: int) -> str:
    """Fetches the line at an address into a cache."""
    return f"""  %{name} = getelementptr float, ptr {address}
  call void @llvm.prefetch.p0(ptr %{name}, i32 0, i32 {cache}, i32 1)"""


_STREAMS, _STREAMS_OF_AMD = 8, 1
"""Places of a range that are fetched in turn. On an Intel CPU, the hardware prefetcher continues each place: 8 or 4
places gave 14 GB/s, 1 or 32 gave 12. On an AMD Zen 5, 1 place gave 24 GB/s, 8 places 17 to 19."""


@functools.cache
def _streams() -> int:
    import llvmlite.binding as llvm

    return _STREAMS_OF_AMD if llvm.get_host_cpu_name().startswith("znver") else _STREAMS


def fetched_evenly(tag: str, base: str, line: str, lines: str) -> str:
    """Fetches line number `line` of the `lines` lines from `base` on into the second-level cache, from some places.

    If `lines` is no multiple of the number of places, the last lines are not fetched.
    """
    streams = _streams()
    return f"""  %stream{tag} = and i64 {line}, {streams - 1}
  %in_stream{tag} = lshr i64 {line}, {streams.bit_length() - 1}
  %of_stream{tag} = lshr i64 {lines}, {streams.bit_length() - 1}
  %before{tag} = mul i64 %stream{tag}, %of_stream{tag}
  %place{tag} = add i64 %before{tag}, %in_stream{tag}
  %number{tag} = shl i64 %place{tag}, 4
{fetched(f"line_ptr{tag}", f"{base}, i64 %number{tag}", TO_SECOND)}"""


def loaded(names: Sequence[str], pointers: Sequence[str]) -> str:
    """The arguments of `work` by name; those of `pointers` are addresses."""
    return "\n".join(
        f"  %{name}_ptr = getelementptr i64, ptr %arguments, i64 {place}\n"
        f"  %{name} = load {'ptr' if name in pointers else 'i64'}, ptr %{name}_ptr"
        for place, name in enumerate(names)
    )


_ROWS = 512
"""The most rows of a call. They stay in the second-level cache while a thread multiplies them by each of its panels:
2,048 rows in one call take a tenth longer."""
_TILE_ROWS = 8
_PANEL = 3
"""Vectors of columns of a panel. The last panel may have fewer."""
_ARGUMENTS = ("rows", "weight", "added", "out", "tiles", "last_row", "added_stride", "columns", "steps")
_UNROLLED = 2


class CompiledProduct:
    """rows @ weight for one weight [K, N] float32, which is copied."""

    def __init__(self, weight: torch.Tensor) -> None:
        """Raises ImportError without llvmlite, RuntimeError if it cannot compile for this processor."""
        self._steps, self._columns = weight.shape
        self._call = _compiled_product()
        width = _PANEL * LANES
        self._panels = large_bytes(weight.numel() * weight.itemsize).view(weight.dtype)
        for number, panel in enumerate(torch.split(weight, width, dim=1)):
            first = number * width * self._steps
            self._panels[first : first + panel.numel()].view(panel.shape).copy_(panel)

    @staticmethod
    def fits(shape: Sequence[int]) -> bool:
        """Whether a weight of this shape is whole vectors, and machine code for it can be compiled here."""
        return len(shape) == 2 and not shape[0] % _UNROLLED and not shape[1] % LANES and compiles_products()

    def __call__(self, rows: torch.Tensor, added: torch.Tensor) -> torch.Tensor:
        """added + rows @ weight as a new tensor [M, N]. `rows` is [M, K]; `added` is [N] or [M, N].

        Raises ValueError for other shapes or types.
        """
        count = rows.shape[0]
        if (
            rows.shape != (count, self._steps)
            or added.shape not in ((self._columns,), (count, self._columns))
            or not rows.dtype is added.dtype is torch.float32
        ):
            raise ValueError(
                f"rows {rows.dtype} {list(rows.shape)} and added {added.dtype} {list(added.shape)} do not fit a weight "
                f"[{self._steps}, {self._columns}]"
            )
        if count < _TILE_ROWS:
            return self._padded(rows, added)
        with recorded("multiply compiled"):
            return self._product(rows.contiguous(), added.contiguous())

    def _product(self, rows: torch.Tensor, added: torch.Tensor) -> torch.Tensor:
        count = rows.shape[0]
        out = rows.new_empty(count, self._columns)
        added_stride = self._columns if added.dim() == 2 else 0
        # Each call reads the whole weight, so calls have equally many rows.
        tiles = -(-count // _TILE_ROWS)
        step = -(-tiles // -(-count // _ROWS)) * _TILE_ROWS
        for first in range(0, count, step):
            # The last rows may be fewer than a tile.
            first = min(first, count - _TILE_ROWS)
            block = min(step, count - first)
            arguments = (
                rows.data_ptr() + first * self._steps * rows.itemsize,
                self._panels.data_ptr(),
                added.data_ptr() + first * added_stride * added.itemsize,
                out.data_ptr() + first * self._columns * out.itemsize,
                -(-block // _TILE_ROWS),
                block - _TILE_ROWS,
                added_stride,
                self._columns,
                self._steps,
            )
            self._call((ctypes.c_int64 * len(arguments))(*arguments), torch.get_num_threads())
        return out

    def _padded(self, rows: torch.Tensor, added: torch.Tensor) -> torch.Tensor:
        """The same for less than a tile of rows."""
        count = rows.shape[0]
        if not count:
            return rows.new_empty(0, self._columns)
        more = (0, 0, 0, _TILE_ROWS - count)
        return self(F.pad(rows, more), F.pad(added, more) if added.dim() == 2 else added)[:count]


@functools.cache
def compiles_products() -> bool:
    """Whether products can be compiled here. Logs a warning if LLVM fails."""
    if "avx512f" not in instruction_sets():
        return False
    try:
        _compiled_product()
    except ImportError:
        return False
    # LLVM may raise any error, and torch's own products always work.
    except Exception as error:
        log.warning("products are not compiled, those of torch instead", error=repr(error))
        return False
    return True


@functools.cache
def _compiled_product() -> Call:
    """The function for any weight."""
    # One tile fetches the whole next panel, or two tiles fetch half of it each.
    tiles = [_tile(vectors, lines) for vectors in range(1, _PANEL + 1) for lines in (_UNROLLED * vectors, vectors, 0)]
    of = vector_of(LANES)
    return compiled_call([f"declare {of} @llvm.fma.v{LANES}f32({of}, {of}, {of})", *tiles, _product_work()])


def _tile(vectors: int, lines: int) -> str:
    """8 rows times a panel. Each two steps fetch `lines` lines from `next` on."""
    of = vector_of(LANES)
    places = [(row, column) for row in range(_TILE_ROWS) for column in range(vectors)]
    starts = "\n".join(
        f"  %row_in{row} = mul i64 %steps, {row}\n  %row{row} = getelementptr float, ptr %rows, i64 %row_in{row}"
        for row in range(_TILE_ROWS)
    )
    sums = "\n".join(
        f"  %sum{row}_{column} = phi {of} [zeroinitializer, %entry], [%s{_UNROLLED - 1}_{row}_{column}, %loop]"
        for row, column in places
    )
    steps = []
    for step in range(_UNROLLED):
        steps.append(f"  %k{step} = add i64 %k, {step}\n  %w_in{step} = mul i64 %k{step}, {vectors * LANES}")
        steps.append(f"  %w_at{step} = getelementptr float, ptr %weight, i64 %w_in{step}")
        for column in range(vectors):
            steps.append(f"  %w_at{step}_{column} = getelementptr float, ptr %w_at{step}, i64 {column * LANES}")
            steps.append(f"  %w{step}_{column} = load {of}, ptr %w_at{step}_{column}, align 4")
        for row in range(_TILE_ROWS):
            steps.append(f"  %x_at{step}_{row} = getelementptr float, ptr %row{row}, i64 %k{step}")
            steps.append(f"  %x{step}_{row} = load float, ptr %x_at{step}_{row}, align 4")
            steps.append(spread(LANES, f"v{step}_{row}", f"%x{step}_{row}"))
            for column in range(vectors):
                before = f"%s{step - 1}_{row}_{column}" if step else f"%sum{row}_{column}"
                steps.append(fma(LANES, f"s{step}_{row}_{column}", f"%v{step}_{row}", f"%w{step}_{column}", before))
    lines_of_all = ""
    if lines:
        lines_of_all = f"  %line_steps = mul i64 %steps, {lines}\n  %lines = udiv i64 %line_steps, {_UNROLLED}"
        steps.append(f"  %line_in = mul i64 %k, {lines}\n  %line = udiv i64 %line_in, {_UNROLLED}")
    for line in range(lines):
        steps.append(f"  %line{line} = add i64 %line, {line}")
        steps.append(fetched_evenly(f"{line}", "%next", f"%line{line}", "%lines"))
    stores = "\n".join(
        f"""  %a_in{row}_{column} = add i64 %added_in{row}, {column * LANES}
  %a_at{row}_{column} = getelementptr float, ptr %added, i64 %a_in{row}_{column}
  %a{row}_{column} = load {of}, ptr %a_at{row}_{column}, align 4
  %total{row}_{column} = fadd {of} %a{row}_{column}, %s{_UNROLLED - 1}_{row}_{column}
  %o_in{row}_{column} = add i64 %out_in{row}, {column * LANES}
  %o_at{row}_{column} = getelementptr float, ptr %out, i64 %o_in{row}_{column}
  store {of} %total{row}_{column}, ptr %o_at{row}_{column}, align 4"""
        for row, column in places
    )
    ends = "\n".join(
        f"  %added_in{row} = mul i64 %added_stride, {row}\n  %out_in{row} = mul i64 %columns, {row}"
        for row in range(_TILE_ROWS)
    )
    return f"""
define internal void @tile{vectors}_{lines}(ptr noalias %rows, ptr noalias %weight, ptr noalias %added,
    ptr noalias %out, i64 %added_stride, i64 %columns, i64 %steps, ptr %next) {{
entry:
{starts}
{lines_of_all}
  br label %loop
loop:
  %k = phi i64 [0, %entry], [%k_next, %loop]
{sums}
{chr(10).join(steps)}
  %k_next = add i64 %k, {_UNROLLED}
  %more = icmp ult i64 %k_next, %steps
  br i1 %more, label %loop, label %done
done:
{ends}
{stores}
  ret void
}}"""


def _product_work() -> str:
    """Items are tiles of panels, and each thread takes items that follow one another: panels, or a part of one.

    The last tile overlaps the one before if rows are missing.
    """
    width = _PANEL * LANES

    def call(vectors: int, lines: int) -> str:
        return (
            f"  call void @tile{vectors}_{lines}(ptr %rows_at, ptr %weight_at, ptr %added_at, ptr %out_at, "
            "i64 %added_stride, i64 %columns, i64 %steps, ptr %next_at)"
        )

    kinds = "".join(
        f"""
vectors{vectors}:
  br i1 %is_only, label %only{vectors}, label %several{vectors}
only{vectors}:
{call(vectors, _UNROLLED * vectors)}
  br label %tile_end
several{vectors}:
  br i1 %fetches, label %half{vectors}, label %none{vectors}
half{vectors}:
{call(vectors, vectors)}
  br label %tile_end
none{vectors}:
{call(vectors, 0)}
  br label %tile_end"""
        for vectors in range(1, _PANEL + 1)
    )
    others = " ".join(f"i64 {vectors}, label %vectors{vectors}" for vectors in range(1, _PANEL))
    return f"""
define internal void @work(ptr %arguments, i64 %number, i64 %threads) {{
entry:
{loaded(_ARGUMENTS, ("rows", "weight", "added", "out"))}
  %rounded = add i64 %columns, {width - 1}
  %panels = udiv i64 %rounded, {width}
  %items = mul i64 %panels, %tiles
  %before = mul i64 %items, %number
  %first = udiv i64 %before, %threads
  %after = add i64 %before, %items
  %last = udiv i64 %after, %threads
  %is_only = icmp eq i64 %tiles, 1
  %panel_size = mul i64 %steps, {width}
  %half_size = mul i64 %steps, {width // 2}
  %any = icmp ult i64 %first, %last
  br i1 %any, label %tile, label %end
tile:
  %item = phi i64 [%first, %entry], [%item_next, %tile_end]
  %item_next = add i64 %item, 1
  %panel = udiv i64 %item, %tiles
  %t = urem i64 %item, %tiles
  %column = mul i64 %panel, {width}
  %weight_in = mul i64 %column, %steps
  %weight_at = getelementptr float, ptr %weight, i64 %weight_in
  %left = sub i64 %columns, %column
  %is_narrow = icmp ult i64 %left, {width}
  %vectors_left = udiv i64 %left, {LANES}
  %vectors = select i1 %is_narrow, i64 %vectors_left, i64 {_PANEL}
  %even_row = mul i64 %t, {_TILE_ROWS}
  %is_over = icmp ugt i64 %even_row, %last_row
  %row = select i1 %is_over, i64 %last_row, i64 %even_row
  %rows_in = mul i64 %row, %steps
  %rows_at = getelementptr float, ptr %rows, i64 %rows_in
  %added_in = mul i64 %row, %added_stride
  %added_column = add i64 %added_in, %column
  %added_at = getelementptr float, ptr %added, i64 %added_column
  %out_in = mul i64 %row, %columns
  %out_column = add i64 %out_in, %column
  %out_at = getelementptr float, ptr %out, i64 %out_column
  %panel_next = add i64 %panel, 1
  %item_of_next = mul i64 %panel_next, %tiles
  %has_next = icmp ult i64 %item_of_next, %last
  %is_first = icmp ult i64 %t, {_UNROLLED}
  %fetches = and i1 %has_next, %is_first
  %following = getelementptr float, ptr %weight_at, i64 %panel_size
  %next_panel = select i1 %has_next, ptr %following, ptr %weight_at
  %next_in = mul i64 %t, %half_size
  %next_at = getelementptr float, ptr %next_panel, i64 %next_in
  switch i64 %vectors, label %vectors{_PANEL} [{others}]
{kinds}
tile_end:
  %more = icmp ult i64 %item_next, %last
  br i1 %more, label %tile, label %end
end:
  ret void
}}"""
