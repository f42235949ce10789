"""Writes functions of machine code through llvmlite's IR builder: integers with operators, memory, loops and vectors.

    (total,) = code.loop(0, count, 1, lambda i, total: (code.fma(a.at(i).load(), b.at(i).load(), total),), zero)

is `for i in range(0, count): total += a[i] * b[i]`. The values that a loop adds up are passed from step to step, and so
stay in registers. LLVM only translates: it moves nothing out of loops, and joins no functions. A loop of Python writes
its body once for each step.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from llvmlite import binding, ir

from relaygr.worker.model.compiled.form import LANES

I64, I32, I8, F32, POINTER = ir.IntType(64), ir.IntType(32), ir.IntType(8), ir.FloatType(), ir.PointerType()
TO_FIRST, TO_SECOND = 3, 2
"""LLVM's numbers of the caches."""


def vector_of(lanes: int, element: ir.Type = F32) -> ir.VectorType:
    return ir.VectorType(element, lanes)


def splat(lanes: int, number: float) -> ir.Constant:
    """A vector of one float32."""
    return ir.Constant(vector_of(lanes), [number] * lanes)


def zeros(lanes: int) -> ir.Constant:
    return ir.Constant(vector_of(lanes), None)


@dataclass(frozen=True, slots=True, eq=False)
class Int:
    """A 64-bit integer. Operators write instructions. One that is divided must not be negative."""

    builder: ir.IRBuilder
    value: ir.Value

    def __add__(self, other: Int | int) -> Int:
        return Int(self.builder, self.builder.add(self.value, _value(other)))

    def __sub__(self, other: Int | int) -> Int:
        return Int(self.builder, self.builder.sub(self.value, _value(other)))

    def __mul__(self, other: Int | int) -> Int:
        return Int(self.builder, self.builder.mul(self.value, _value(other)))

    def __floordiv__(self, other: Int | int) -> Int:
        return Int(self.builder, self.builder.udiv(self.value, _value(other)))

    def __mod__(self, other: Int | int) -> Int:
        return Int(self.builder, self.builder.urem(self.value, _value(other)))

    def __lt__(self, other: Int | int) -> ir.Value:
        return self.builder.icmp_signed("<", self.value, _value(other))

    def __gt__(self, other: Int | int) -> ir.Value:
        return self.builder.icmp_signed(">", self.value, _value(other))

    def at_most(self, other: Int | int) -> Int:
        """The smaller one."""
        return Int(self.builder, self.builder.select(self < other, self.value, _value(other)))

    def low_bits(self) -> ir.Value:
        """As a 32-bit integer."""
        return self.builder.trunc(self.value, I32)


def _value(number: Int | int) -> ir.Value:
    return number.value if isinstance(number, Int) else I64(number)


@dataclass(frozen=True, slots=True, eq=False)
class Memory:
    """Numbers of one type, float32 if nothing else is said, from an address on."""

    builder: ir.IRBuilder
    pointer: ir.Value
    element: ir.Type = F32

    def at(self, place: Int | int) -> Memory:
        """From number `place` on."""
        moved = self.builder.gep(self.pointer, [_value(place)], source_etype=self.element)
        return Memory(self.builder, moved, self.element)

    def of(self, element: ir.Type) -> Memory:
        """The same address, for numbers of another type."""
        return Memory(self.builder, self.pointer, element)

    def load(self) -> ir.Value:
        """One number."""
        return self.builder.load(self.pointer, typ=self.element)

    def load_int(self) -> Int:
        """One 64-bit integer."""
        return Int(self.builder, self.builder.load(self.pointer, typ=I64))

    def load_pointer(self) -> Memory:
        """The float32 numbers at an address that is kept here."""
        return Memory(self.builder, self.builder.load(self.pointer, typ=POINTER))

    def load_vector(self, lanes: int, align: int = 4) -> ir.Value:
        return self.builder.load(self.pointer, align=align, typ=vector_of(lanes, self.element))

    def store(self, value: ir.Value, align: int = 4) -> None:
        self.builder.store(value, self.pointer, align=align)


class Code:
    """Writes one function, which returns nothing. Memory that it writes to must not overlap what it reads."""

    def __init__(self, module: ir.Module, name: str, pointers: int, ints: int) -> None:
        """The function takes so many pointers, then so many integers: `pointers` and `ints`."""
        types = [POINTER] * pointers + [I64] * ints
        self._function = ir.Function(module, ir.FunctionType(ir.VoidType(), types), name)
        self._function.linkage = "internal"
        self.builder = ir.IRBuilder(self._function.append_basic_block())
        arguments = self._function.args
        for argument in arguments[:pointers]:
            argument.add_attribute("noalias")
        self.pointers = [Memory(self.builder, argument) for argument in arguments[:pointers]]
        self.ints = [Int(self.builder, argument) for argument in arguments[pointers:]]

    def end(self) -> ir.Function:
        """Returns from the function."""
        self.builder.ret_void()
        return self._function

    def room(self, numbers: int) -> Memory:
        """Memory for float32 numbers, as long as the function runs. Only before the first loop."""
        memory = self.builder.alloca(ir.ArrayType(F32, numbers))
        memory.align = 64
        return Memory(self.builder, memory)

    def either(self, condition: ir.Value, one: Memory, other: Memory) -> Memory:
        """`one` if the condition holds, else `other`."""
        return Memory(self.builder, self.builder.select(condition, one.pointer, other.pointer), one.element)

    def when(self, condition: ir.Value) -> contextlib.AbstractContextManager[object]:
        """What is written within runs if the condition holds."""
        branch: contextlib.AbstractContextManager[object] = self.builder.if_then(condition)
        return branch

    def loop(
        self,
        first: Int | int,
        last: Int | int,
        step: Int | int,
        body: Callable[..., Sequence[ir.Value] | None],
        *carried: ir.Value,
    ) -> Sequence[ir.Value]:
        """`for index in range(first, last, step): carried = body(index, *carried)`; but the first step always runs."""
        b = self.builder
        before, top = b.block, b.append_basic_block()
        b.branch(top)
        b.position_at_end(top)
        index = b.phi(I64)
        now = [b.phi(value.type) for value in carried]
        results = body(Int(b, index), *now) or ()
        following = Int(b, index) + step
        bottom, after = b.block, b.append_basic_block()
        b.cbranch(following < last, top, after)
        starts, ends = (_value(first), *carried), (following.value, *results)
        for phi, start, end in zip((index, *now), starts, ends, strict=True):
            phi.add_incoming(start, before)
            phi.add_incoming(end, bottom)
        b.position_at_end(after)
        return results

    def call(self, function: ir.Function, *arguments: Memory | Int) -> None:
        self.builder.call(function, [each.pointer if isinstance(each, Memory) else each.value for each in arguments])

    def intrinsic(self, name: str, result: ir.Type, *arguments: ir.Value) -> ir.Value:
        """Calls a function that LLVM provides."""
        module = self.builder.module
        known = module.globals.get(name)
        if known is None:
            known = ir.Function(module, ir.FunctionType(result, [each.type for each in arguments]), name)
        return self.builder.call(known, arguments)

    def elementwise(self, name: str, *vectors: ir.Value) -> ir.Value:
        """LLVM's function for vectors of float32, such as `rint`."""
        of = vectors[0].type
        return self.intrinsic(f"llvm.{name}.v{of.count}f32", of, *vectors)

    def fma(self, a: ir.Value, b: ir.Value, c: ir.Value) -> ir.Value:
        """c + a times b."""
        return self.elementwise("fma", a, b, c)

    def spread(self, number: ir.Value, lanes: int) -> ir.Value:
        """A vector of copies of a number."""
        nothing = ir.Constant(vector_of(lanes, number.type), ir.Undefined)
        one = self.builder.insert_element(nothing, number, I32(0))
        return self.builder.shuffle_vector(one, nothing, ir.Constant(vector_of(lanes, I32), None))

    def shuffled(self, first: ir.Value, second: ir.Value, places: Sequence[int]) -> ir.Value:
        """A vector of the numbers at some places of two vectors of one length, one after the other."""
        return self.builder.shuffle_vector(first, second, ir.Constant(vector_of(len(places), I32), list(places)))

    def by_register(self, function: Callable[..., ir.Value], *vectors: ir.Value) -> ir.Value:
        """A function of vectors of 16 float32, for vectors of 16 or 32: for instructions that LLVM does not divide."""
        if vectors[0].type.count == LANES:
            return function(*vectors)
        low, high = range(LANES), range(LANES, 2 * LANES)
        halves = [function(*(self.shuffled(each, each, half) for each in vectors)) for half in (low, high)]
        return self.shuffled(halves[0], halves[1], range(2 * LANES))

    def fetch(self, memory: Memory, cache: int) -> None:
        """Brings the line at an address into a cache."""
        self.intrinsic("llvm.prefetch.p0", ir.VoidType(), memory.pointer, I32(0), I32(cache), I32(1))

    def fetch_evenly(self, memory: Memory, line: Int, lines: int) -> None:
        """Brings line number `line` of `lines` lines into the second-level cache, from some places in turn.

        If `lines` is no multiple of the number of places, the last lines are not fetched.
        """
        places = _fetched_places()
        self.fetch(memory.at((line % places * (lines // places) + line // places) * LANES), TO_SECOND)


_PLACES, _PLACES_OF_AMD = 8, 1
"""Places of a range that are fetched in turn. On an Intel CPU, the hardware prefetcher continues each place: 8 or 4
places gave 14 GB/s, 1 or 32 gave 12. On an AMD Zen 5, 1 place gave 24 GB/s, 8 places 17 to 19."""


@functools.cache
def _fetched_places() -> int:
    return _PLACES_OF_AMD if binding.get_host_cpu_name().startswith("znver") else _PLACES
