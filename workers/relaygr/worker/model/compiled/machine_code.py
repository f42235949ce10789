"""Machine code that LLVM compiles at load. It needs llvmlite (the extra `compiled`), and no compiler on the machine."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

Call = Callable[[ctypes.Structure, int], None]
"""Takes the arguments and the number of threads."""


def compiled_call(functions: str) -> Call:
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
    module = llvm.parse_assembly(functions + _entries(team))
    module.verify()
    engine = llvm.create_mcjit_compiler(module, machine)
    engine.finalize_object()
    alone = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(engine.get_function_address("alone"))
    member = engine.get_function_address("member") if team is not None else 0

    def call(arguments: ctypes.Structure, threads: int) -> None:
        if threads == 1 or team is None:
            alone(ctypes.byref(arguments))
        else:
            team.start(member, ctypes.byref(arguments), threads, 0)

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
