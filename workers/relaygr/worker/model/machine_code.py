"""Machine code that LLVM compiles at load. It needs llvmlite (the extra `compiled`), and no compiler on the machine."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.profiler import record_function

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
