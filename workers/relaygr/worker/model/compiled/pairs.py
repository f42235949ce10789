"""bfloat16 in pairs, in machine code: for AVX-512's products that add two numbers of bfloat16 into one of float32.

A lane of 32 bits holds two neighbours in the sum: of K and q two dimensions, of weights and V two keys. An instruction
multiplies 16 lanes by 16 others. On an AMD Zen 5 it takes the time of 16 products of float32, and attention of 128 and
of 2,048 rows took 0.55 of the time in float32; Intel CPUs are not measured. `vpdpwssd` does it with int16, as fast, but
its numbers need a scale for each row, and its sums another pass.

Vectors of pairs have the type of float32, as memory does.
"""

from __future__ import annotations

from llvmlite import ir

from relaygr.worker.kv import KvGeometry
from relaygr.worker.model.compiled.emit import Code, Int, vector_of, zeros
from relaygr.worker.model.compiled.form import LANES


class _BFloat16(ir.types.Type):  # type: ignore[misc]
    """The type, which llvmlite's builder does not have."""

    def _to_string(self) -> str:
        return "bfloat"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _BFloat16)

    def __hash__(self) -> int:
        return hash(_BFloat16)


BFLOAT16 = _BFloat16()
_PAIRS = vector_of(2 * LANES, BFLOAT16)
_FIRST_AND_SECOND_IN_TURN = [lane + half for lane in range(LANES) for half in (0, LANES)]


def dot(code: Code, a: ir.Value, b: ir.Value, c: ir.Value) -> ir.Value:
    """c + the products of the pairs of a and b."""

    def of_register(a: ir.Value, b: ir.Value, c: ir.Value) -> ir.Value:
        pairs = (code.builder.bitcast(each, _PAIRS) for each in (a, b))
        return code.intrinsic("llvm.x86.avx512bf16.dpbf16ps.512", vector_of(LANES), c, *pairs)

    return code.by_register(of_register, a, b, c)


def paired(code: Code, first: ir.Value, second: ir.Value) -> ir.Value:
    """Each number of a vector of float32 and that of another one as a pair."""

    def of_register(first: ir.Value, second: ir.Value) -> ir.Value:
        both = code.shuffled(first, second, range(2 * LANES))
        short = code.builder.fptrunc(both, _PAIRS)
        return code.builder.bitcast(code.shuffled(short, short, _FIRST_AND_SECOND_IN_TURN), vector_of(LANES))

    return code.by_register(of_register, first, second)


def conversion(module: ir.Module, g: KvGeometry) -> ir.Function:
    """`convert(k, v, k_pairs, v_pairs, keys)`: K [keys, attention_dim] and V [keys, hidden_dim] as pairs.

    Those of K are pairs of dimensions, those of V pairs of keys. An odd number of keys is made even with zeros.
    """
    code = Code(module, "convert", pointers=4, ints=1)
    (k, v, k_pairs, v_pairs), (keys,) = code.pointers, code.ints
    b = code.builder

    def of_k(place: Int) -> None:
        short = b.fptrunc(k.at(place).load_vector(LANES), vector_of(LANES, BFLOAT16))
        k_pairs.of(BFLOAT16).at(place).store(short, align=32)

    def of_v(key: Int) -> None:
        has_partner = key + 1 < keys
        # A missing key is not read.
        partner = Int(b, b.select(has_partner, (key + 1).value, key.value))
        for column in range(0, g.hidden_dim, LANES):
            first = v.at(key * g.hidden_dim + column).load_vector(LANES)
            second = v.at(partner * g.hidden_dim + column).load_vector(LANES)
            pair = paired(code, first, b.select(has_partner, second, zeros(LANES)))
            v_pairs.at(key // 2 * g.hidden_dim + column).store(pair, align=64)

    code.loop(0, keys * g.attention_dim, LANES, of_k)
    code.loop(0, keys, 2, of_v)
    return code.end()
