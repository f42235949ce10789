"""SiLU in LLVM's language: of float32, and as exact as bfloat16 needs.

    SiLU(x) = x / (1 + exp(-x))

exp is a power of two, and a polynomial for the rest.
"""

from __future__ import annotations

from relaygr.worker.model.machine_code import LANES, fma, joined, part, registers, same, splat, vector_of

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


def silu_declarations(lanes: int) -> str:
    of = vector_of(lanes)
    return "\n".join(
        f"declare {of} @llvm.{name}.v{lanes}f32({', '.join([of] * count)})"
        for name, count in (("fma", 3), ("rint", 1), ("minnum", 2), ("maxnum", 2))
    )


def silu(lanes: int, tag: str) -> str:
    """%result{tag} = SiLU of %x{tag}."""
    of, whole = vector_of(lanes), vector_of(lanes, "i32")
    lines = [
        _bounded(lanes, tag),
        f"  %scaled{tag} = fmul {of} %y{tag}, {splat(lanes, -_LOG2_E)}",
        f"  %power{tag} = call {of} @llvm.rint.v{lanes}f32({of} %scaled{tag})",
        f"  %minus{tag} = fneg {of} %y{tag}",
        fma(lanes, f"rest_high{tag}", f"%power{tag}", splat(lanes, -_LN2_HIGH), f"%minus{tag}"),
        fma(lanes, f"rest{tag}", f"%power{tag}", splat(lanes, -_LN2_LOW), f"%rest_high{tag}"),
        _polynomial(lanes, tag, _EXP),
        f"  %square{tag} = fmul {of} %rest{tag}, %rest{tag}",
        fma(lanes, f"fraction_less_one{tag}", f"%poly{tag}", f"%square{tag}", f"%rest{tag}"),
        f"  %fraction{tag} = fadd {of} %fraction_less_one{tag}, {splat(lanes, 1.0)}",
        f"  %whole{tag} = fptosi {of} %power{tag} to {whole}",
        _denominator(lanes, tag, f"%fraction{tag}"),
        f"  %result{tag} = fdiv {of} %x{tag}, %under{tag}",
    ]
    return "\n".join(lines)


def short_silu(lanes: int, tag: str) -> str:
    """The same with a relative error of at most 2e-4, in AVX-512."""
    of, whole = vector_of(lanes), vector_of(lanes, "i32")
    lines = [
        _bounded(lanes, tag),
        fma(lanes, f"rounded{tag}", f"%y{tag}", splat(lanes, -_LOG2_E), splat(lanes, _TO_WHOLE)),
        f"  %power{tag} = fsub {of} %rounded{tag}, {splat(lanes, _TO_WHOLE)}",
        f"  %minus{tag} = fneg {of} %power{tag}",
        fma(lanes, f"rest{tag}", f"%y{tag}", splat(lanes, -_LOG2_E), f"%minus{tag}"),
        _polynomial(lanes, tag, _EXP2),
        # Shifted, the bits above those of the whole number are gone.
        f"  %whole{tag} = bitcast {of} %rounded{tag} to {whole}",
        _denominator(lanes, tag, f"%poly{tag}"),
    ]
    for register in registers(lanes):
        lines += [
            part(f"under{tag}_{register}", f"%under{tag}", lanes, register),
            f"  %inverse{tag}_{register} = call {_INVERSE}(<16 x float> %under{tag}_{register}, "
            "<16 x float> zeroinitializer, i16 -1)",
        ]
    return "\n".join([*lines, joined(f"inverse{tag}", lanes), f"  %result{tag} = fmul {of} %x{tag}, %inverse{tag}"])


_INVERSE = f"{vector_of(LANES)} @llvm.x86.avx512.rcp14.ps.512"
SHORT_DECLARATION = f"declare {_INVERSE}(<16 x float>, <16 x float>, i16)"


def _bounded(lanes: int, tag: str) -> str:
    """%y: %x within the numbers whose exp is a normal number."""
    of = vector_of(lanes)
    return f"""  %low{tag} = call {of} @llvm.maxnum.v{lanes}f32({of} %x{tag}, {of} {splat(lanes, -_WIDEST)})
  %y{tag} = call {of} @llvm.minnum.v{lanes}f32({of} %low{tag}, {of} {splat(lanes, _WIDEST)})"""


def _polynomial(lanes: int, tag: str, factors: tuple[float, ...]) -> str:
    """%poly: a polynomial of %rest. The factor of the highest power comes first."""
    before, lines = splat(lanes, factors[0]), []
    for place, factor in enumerate(factors[1:], 1):
        result = f"poly{tag}" if place + 1 == len(factors) else f"poly{place}{tag}"
        lines.append(fma(lanes, result, before, f"%rest{tag}", splat(lanes, factor)))
        before = f"%{result}"
    return "\n".join(lines)


def _denominator(lanes: int, tag: str, fraction: str) -> str:
    """%under = 1 + the fraction times 2 to the power of %whole, which is added to its exponent."""
    of, whole = vector_of(lanes), vector_of(lanes, "i32")
    return f"""  %shifted{tag} = shl {whole} %whole{tag}, {same(lanes, "i32 23")}
  %bits{tag} = bitcast {of} {fraction} to {whole}
  %sum{tag} = add {whole} %bits{tag}, %shifted{tag}
  %exp{tag} = bitcast {whole} %sum{tag} to {of}
  %under{tag} = fadd {of} %exp{tag}, {splat(lanes, 1.0)}"""
