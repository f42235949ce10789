"""Compiles the Triton kernels for Hopper without a GPU, and prints the results as JSON, in a separate process."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from typing import Any

import triton
import triton.language as tl
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from relaygr.worker.kv import KvDtype
from relaygr.worker.model.attention.spec import SCALED
from relaygr.worker.model.triton.attention_kernels import attend_kernel, join_kernel, round_kernel, store_kernel
from relaygr.worker.model.triton.norm_kernels import gated_norm_kernel, norm_kernel

HOPPER = GPUTarget("cuda", 90, 32)
_TYPES = {
    "items_ptr": "*i32",
    "joins_ptr": "*i32",
    "segments_ptr": "*i32",
    "key_times_ptr": "*i64",
    "following_ptr": "*i64",
    "edges_ptr": "*i64",
    "positions_ptr": "*fp32",
    "times_ptr": "*fp32",
    "sums_ptr": "*fp32",
    "bucket_rate": "fp32",
    "table_ptr": "*i32",
    "slots_ptr": "*i32",
    "k_exponents_ptr": "*u8",
    "v_exponents_ptr": "*u8",
    "a_ptr": "*fp32",
    "x_ptr": "*fp32",
    "weight_ptr": "*fp32",
    "bias_ptr": "*fp32",
    "eps": "fp32",
    "alpha": "fp32",
    "scale": "fp32",
}
_SCALES = ("k_exponents_ptr", "v_exponents_ptr")
_SCALED = {"i8": SCALED[KvDtype.INT8], "fp8e4nv": SCALED[KvDtype.FLOAT8]}
_BIAS: dict[str, object] = {"POSITIONS": 8191, "TIMES": True, "EDGES": 124}


def compiled(kernel: Any, constants: dict[str, object], own: str, stored: str, warps: int, stages: int) -> Any:
    """A kernel for rows of one type and pages of another; pointers and strides are multiples of 16, as they are."""

    def kind(name: str) -> str:
        if name in constants:
            return "constexpr"
        if name in _TYPES:
            return _TYPES[name]
        if name == "out_ptr" and kernel is attend_kernel:
            return "*fp32"
        if name.endswith("_ptr"):
            return f"*{stored}" if "pages" in name else f"*{own}"
        return "i32"

    names = kernel.arg_names
    aligned = {
        (index,): [["tt.divisibility", 16]]
        for index, name in enumerate(names)
        if name.endswith(("_ptr", "_stride")) and name not in constants
    }
    source = ASTSource(
        kernel,
        {name: kind(name) for name in names},
        constexprs={(names.index(name),): value for name, value in constants.items()},
        attrs=aligned,
    )
    return triton.compile(source, target=HOPPER, options={"num_warps": warps, "num_stages": stages})


def described(made: Any) -> dict[str, int]:
    """Registers and spilled bytes a thread, shared memory, and the counts of important instructions."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(made.asm["cubin"])
        file.flush()
        usage = subprocess.run(
            [knobs.nvidia.cuobjdump.path, "-res-usage", file.name], capture_output=True, text=True, check=True
        ).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+)", usage)
    assert found is not None, usage
    ptx = made.asm["ptx"]
    return {
        "registers": int(found[1]),
        "spilled_bytes": int(found[2]),
        "shared_bytes": made.metadata.shared,
        "wgmma": ptx.count("wgmma.mma_async"),
        "async_copies": ptx.count("cp.async.c"),
    }


def attend(
    own: str,
    stored: str,
    dim: int,
    page_tokens: int,
    block_rows: int,
    keys: int,
    warps: int,
    stages: int,
    **options: object,
) -> dict[str, int]:
    """`options`: constants of a mask or a bias."""
    pad = max(16, triton.next_power_of_2(dim))
    constants: dict[str, object] = {
        "HEADS": 4,
        "GROUP": 1,
        "CONTEXTUAL": 0,
        "WINDOW": 0,
        "FULL_LAST": 0,
        "POSITIONS": 0,
        "TIMES": False,
        "EDGES": 0,
        "D_QK": dim,
        "D_V": dim,
        "PAD_QK": pad,
        "PAD_V": pad,
        "PAGE_TOKENS": page_tokens,
        "PRECISION": "ieee" if own == "fp32" else "tf32",
        "BLOCK_M": block_rows,
        "BLOCK_N": keys,
    }
    constants |= options
    absent = without_scales(stored)
    absent |= {"positions_ptr": None} if not constants["POSITIONS"] else {}
    if not constants["TIMES"]:
        absent |= dict.fromkeys(("key_times_ptr", "following_ptr", "times_ptr", "edges_ptr"))
    return described(compiled(attend_kernel, constants | absent, own, stored, warps, stages))


def join() -> dict[str, int]:
    sizes = {"COLUMNS": 512, "PAD_COLUMNS": 512, "BLOCK_M": 64, "ROWS": 8}
    return described(compiled(join_kernel, sizes, "fp32", "fp32", 4, 3))


def store(own: str, stored: str) -> dict[str, int]:
    assert store_kernel.params[store_kernel.arg_names.index("rows")].do_not_specialize, "compiled anew for other rows"
    sizes = {"D_QK": 128, "D_V": 128, "PAD_QK": 128, "PAD_V": 128, "PAGE_TOKENS": 64, "BLOCK_M": 32}
    return described(compiled(store_kernel, sizes | scaling(stored) | without_scales(stored), own, stored, 4, 3))


def rounded(own: str, stored: str) -> dict[str, int]:
    kind = tl.int8 if stored == "i8" else tl.float8e4nv
    sizes = {"HEADS": 4, "D": 128, "PAD_D": 128, "STORED": kind, "BLOCK_M": 32}
    return described(compiled(round_kernel, sizes | scaling(stored), own, stored, 4, 3))


def scaling(stored: str) -> dict[str, object]:
    of_type = _SCALED.get(stored)
    return {"POWER": of_type.power if of_type else 0, "ROUND_UP": of_type.round_up if of_type else 0}


def without_scales(stored: str) -> dict[str, object]:
    return {} if stored in _SCALED else dict.fromkeys(_SCALES)


def output(own: str, keeps: int, affine: bool) -> dict[str, int]:
    sizes = {"HEADS": 4, "D": 128, "PAD_HEADS": 4, "PAD_D": 128, "GROUP": False, "KEEPS": keeps}
    return described(compiled(gated_norm_kernel, sizes | affinity(affine), own, own, 1, 3))


def norm(own: str, affine: bool) -> dict[str, int]:
    return described(compiled(norm_kernel, {"D": 512, "PAD_D": 512} | affinity(affine), own, own, 1, 3))


def affinity(affine: bool) -> dict[str, object]:
    """Without weight and bias the kernels are given None."""
    return {"AFFINE": affine} | ({} if affine else {"weight_ptr": None, "bias_ptr": None})


def main() -> None:
    report = {
        "bfloat16, ranking": attend("bf16", "bf16", 128, 64, 64, 64, 4, 3),
        "bfloat16, chunk": attend("bf16", "bf16", 128, 64, 128, 64, 8, 3),
        "bfloat16, pages of 24": attend("bf16", "bf16", 128, 24, 64, 64, 4, 3),
        "bfloat16, dimension 100": attend("bf16", "bf16", 100, 64, 64, 64, 4, 3),
        "bfloat16, dimension 256": attend("bf16", "bf16", 256, 64, 64, 32, 8, 2),
        "float16 on bfloat16 pages": attend("fp16", "bf16", 128, 64, 64, 64, 4, 3),
        "float32": attend("fp32", "fp32", 128, 64, 32, 16, 4, 2),
        "float32, dimension 256": attend("fp32", "fp32", 256, 64, 16, 16, 4, 2),
        "store bfloat16": store("bf16", "bf16"),
        "store float32 as bfloat16": store("fp32", "bf16"),
        "bfloat16, every mask": attend(
            "bf16", "bf16", 128, 64, 64, 64, 4, 3, GROUP=3, CONTEXTUAL=5, WINDOW=512, FULL_LAST=64
        ),
        "bfloat16, bias by position and time": attend("bf16", "bf16", 128, 64, 64, 64, 8, 2, **_BIAS),
        "float32, bias by position and time": attend("fp32", "fp32", 64, 64, 16, 16, 4, 2, **_BIAS),
        "bfloat16 on float8 pages, ranking": attend("bf16", "fp8e4nv", 128, 64, 64, 64, 4, 3),
        "bfloat16 on float8 pages, chunk": attend("bf16", "fp8e4nv", 128, 64, 128, 64, 8, 3),
        "bfloat16 on float8 pages, dimension 256": attend("bf16", "fp8e4nv", 256, 64, 64, 16, 8, 2),
        "bfloat16 on int8 pages, ranking": attend("bf16", "i8", 128, 64, 64, 64, 4, 3),
        "bfloat16 on int8 pages, chunk": attend("bf16", "i8", 128, 64, 128, 64, 8, 3),
        "store bfloat16 as float8": store("bf16", "fp8e4nv"),
        "store bfloat16 as int8": store("bf16", "i8"),
        "round to float8": rounded("bf16", "fp8e4nv"),
        "round to int8": rounded("fp32", "i8"),
        "join": join(),
        "input norm": norm("bf16", True),
        "input norm without weights": norm("bf16", False),
        "output": output("bf16", 1, True),
        "output without weights": output("bf16", 0, False),
    }
    json.dump(report, sys.stdout)


main()
