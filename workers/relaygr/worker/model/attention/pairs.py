"""bfloat16 in pairs, in LLVM's language: for AVX-512's products that add two numbers of bfloat16 into one of float32.

A lane of 32 bits holds two neighbours in the sum: of K and q two dimensions, of weights and V two keys. An instruction
multiplies 16 lanes by 16 others. On an AMD Zen 5 it takes the time of 16 products of float32, and attention of 128 and
of 2,048 rows took 0.55 of the time in float32; Intel CPUs are not measured. `vpdpwssd` does it with int16, as fast, but
its numbers need a scale for each row, and its sums another pass.
"""

from __future__ import annotations

from relaygr.runtime.processor import instruction_sets
from relaygr.worker.kv import KvGeometry
from relaygr.worker.model.machine_code import LANES, joined, part, registers

_DOT = "<16 x float> @llvm.x86.avx512bf16.dpbf16ps.512"
DOT_DECLARATION = f"declare {_DOT}(<16 x float>, <32 x bfloat>, <32 x bfloat>)"
_IN_TURN = [number + half for number in range(LANES) for half in (0, LANES)]


def has_bfloat16_products() -> bool:
    """Whether the processor has them: AMD's since Zen 4, Intel's Cooper Lake and those since Sapphire Rapids."""
    return "avx512_bf16" in instruction_sets()


def dot(lanes: int, result: str, a: str, b: str, c: str) -> str:
    """%result = c + the products of the pairs of a and b. All are vectors of `lanes` float32."""
    lines = []
    for register in registers(lanes):
        own = {name: f"{result}_{name}{register}" for name in "abc"}
        lines += [part(own[name], vector, lanes, register) for name, vector in (("a", a), ("b", b), ("c", c))]
        lines += [f"  %{own[name]}_pairs = bitcast <16 x float> %{own[name]} to <32 x bfloat>" for name in "ab"]
        arguments = f"<16 x float> %{own['c']}, <32 x bfloat> %{own['a']}_pairs, <32 x bfloat> %{own['b']}_pairs"
        lines.append(f"  %{result}_{register} = call {_DOT}({arguments})")
    return "\n".join([*lines, joined(result, lanes)])


def paired(lanes: int, result: str, first: str, second: str) -> str:
    """%result: each number of a vector of `lanes` float32 and that of another one as a pair."""
    both, in_turn = (", ".join(f"i32 {number}" for number in order) for order in (range(2 * LANES), _IN_TURN))
    lines = []
    for register in registers(lanes):
        name = f"{result}_{register}"
        lines += [
            part(f"{name}_first", first, lanes, register),
            part(f"{name}_second", second, lanes, register),
            f"  %{name}_both = shufflevector <16 x float> %{name}_first, <16 x float> %{name}_second, "
            f"<32 x i32> <{both}>",
            f"  %{name}_short = fptrunc <32 x float> %{name}_both to <32 x bfloat>",
            f"  %{name}_pairs = shufflevector <32 x bfloat> %{name}_short, <32 x bfloat> poison, "
            f"<32 x i32> <{in_turn}>",
            f"  %{name} = bitcast <32 x bfloat> %{name}_pairs to <16 x float>",
        ]
    return "\n".join([*lines, joined(result, lanes)])


def conversion(g: KvGeometry) -> str:
    """@convert: K [keys, attention_dim] and V [keys, hidden_dim] of some keys as pairs, of dimensions and of keys.

    An odd number of keys is made even with a row of zeros.
    """
    vectors = []
    for at in range(0, g.hidden_dim, LANES):
        vectors += [
            f"  %first_at{at} = getelementptr float, ptr %first, i64 {at}",
            f"  %first{at} = load <16 x float>, ptr %first_at{at}, align 4",
            f"  %second_at{at} = getelementptr float, ptr %second, i64 {at}",
            f"  %other{at} = load <16 x float>, ptr %second_at{at}, align 4",
            f"  %second{at} = select i1 %is_pair, <16 x float> %other{at}, <16 x float> zeroinitializer",
            paired(LANES, f"pair{at}", f"%first{at}", f"%second{at}"),
            f"  %pair_at{at} = getelementptr float, ptr %pairs, i64 {at}",
            f"  store <16 x float> %pair{at}, ptr %pair_at{at}, align 64",
        ]
    return f"""
define internal void @convert(ptr noalias %k, ptr noalias %v, ptr noalias %k_pairs, ptr noalias %v_pairs, i64 %keys) {{
entry:
  %numbers = mul i64 %keys, {g.attention_dim}
  br label %dimensions
dimensions:
  %at = phi i64 [0, %entry], [%at_next, %dimensions]
  %from = getelementptr float, ptr %k, i64 %at
  %wide = load <16 x float>, ptr %from, align 4
  %short = fptrunc <16 x float> %wide to <16 x bfloat>
  %to = getelementptr bfloat, ptr %k_pairs, i64 %at
  store <16 x bfloat> %short, ptr %to, align 32
  %at_next = add i64 %at, {LANES}
  %more_numbers = icmp ult i64 %at_next, %numbers
  br i1 %more_numbers, label %dimensions, label %keys_of_pair
keys_of_pair:
  %key = phi i64 [0, %dimensions], [%key_next, %keys_of_pair]
  %key_next = add i64 %key, 2
  %partner = add i64 %key, 1
  %is_pair = icmp ult i64 %partner, %keys
  %first_in = mul i64 %key, {g.hidden_dim}
  %first = getelementptr float, ptr %v, i64 %first_in
  %step = select i1 %is_pair, i64 {g.hidden_dim}, i64 0
  %second = getelementptr float, ptr %first, i64 %step
  %pair = lshr i64 %key, 1
  %pair_in = mul i64 %pair, {g.hidden_dim}
  %pairs = getelementptr float, ptr %v_pairs, i64 %pair_in
{chr(10).join(vectors)}
  %more_keys = icmp ult i64 %key_next, %keys
  br i1 %more_keys, label %keys_of_pair, label %end
end:
  ret void
}}"""
