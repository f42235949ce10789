"""SiLU in machine code: of float32, and as exact as bfloat16 needs.

    SiLU(x) = x / (1 + exp(-x))

exp is a power of two, and a polynomial for the rest.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

from llvmlite import ir

from relaygr.worker.model.compiled.emit import I32, Code, splat, vector_of, zeros
from relaygr.worker.model.compiled.form import LANES

_LOG2_E = 1.4426950408889634
_LN2_HIGH, _LN2_LOW = 0.693359375, -2.12194440e-4
_EXP = (1.9875691500e-4, 1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1)
"""The polynomial of Cephes' expf: an error of about one unit in the last place."""
_EXP2 = (0.05517167, 0.24261114, 0.69326099, 0.99992807)
"""2 to the power of -0.5 to 0.5 with the least relative error, 7.5e-5."""
_WIDEST = 87.0
"""exp of it and of its negative are normal numbers."""
_TO_WHOLE = 12_582_912.0
"""1.5 x 2^23: a float32 that is added to it is rounded to a whole number, in the lowest bits of the sum."""


def silu(code: Code, x: ir.Value) -> ir.Value:
    """SiLU of a vector."""
    b, constant = code.builder, functools.partial(splat, x.type.count)
    y = _bounded(code, x)
    power = code.elementwise("rint", b.fmul(y, constant(-_LOG2_E)))
    # In two steps, for the product with the first part is exact.
    rest = code.fma(power, constant(-_LN2_LOW), code.fma(power, constant(-_LN2_HIGH), b.fneg(y)))
    less_one = code.fma(_polynomial(code, rest, _EXP), b.fmul(rest, rest), rest)
    exponent = b.fptosi(power, vector_of(x.type.count, I32))
    return b.fdiv(x, _one_and_power(code, b.fadd(less_one, constant(1.0)), exponent))


def short_silu(code: Code, x: ir.Value) -> ir.Value:
    """The same with a relative error of at most 2e-4, in AVX-512."""
    b, constant = code.builder, functools.partial(splat, x.type.count)
    y = _bounded(code, x)
    shifted = code.fma(y, constant(-_LOG2_E), constant(_TO_WHOLE))
    power = b.fsub(shifted, constant(_TO_WHOLE))
    rest = code.fma(y, constant(-_LOG2_E), b.fneg(power))
    # The bits above those of the whole number are shifted out.
    exponent = b.bitcast(shifted, vector_of(x.type.count, I32))
    under = _one_and_power(code, _polynomial(code, rest, _EXP2), exponent)
    return b.fmul(x, code.by_register(functools.partial(_inverse, code), under))


def _inverse(code: Code, x: ir.Value) -> ir.Value:
    """1 / x of 16 numbers, with a relative error of at most 2^-14."""
    return code.intrinsic("llvm.x86.avx512.rcp14.ps.512", x.type, x, zeros(LANES), ir.IntType(16)(-1))


def _bounded(code: Code, x: ir.Value) -> ir.Value:
    """x within the numbers whose exp is a normal number."""
    lanes = x.type.count
    return code.elementwise("minnum", code.elementwise("maxnum", x, splat(lanes, -_WIDEST)), splat(lanes, _WIDEST))


def _polynomial(code: Code, x: ir.Value, factors: Sequence[float]) -> ir.Value:
    """The factor of the highest power comes first."""
    first, *others = (splat(x.type.count, factor) for factor in factors)
    return functools.reduce(lambda result, factor: code.fma(result, x, factor), others, first)


def _one_and_power(code: Code, fraction: ir.Value, exponent: ir.Value) -> ir.Value:
    """1 + fraction times 2 to the power of `exponent`, a vector of integers."""
    b, whole = code.builder, exponent.type
    shifted = b.shl(exponent, ir.Constant(whole, [23] * whole.count))
    power = b.bitcast(b.add(b.bitcast(fraction, whole), shifted), fraction.type)
    return b.fadd(power, splat(whole.count, 1.0))
