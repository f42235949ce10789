"""Compiles the Triton kernels for a GPU without one, and prints what the compiler says of each as JSON.

python -m tests.workers.compiled_kernels sm_90 [KERNELS | table]

KERNELS is a name of `TUNED`, for all blocks from which the tuner may choose; else one configuration of each kernel is
compiled. `table`: as Markdown. Needs a process of its own, without Triton's interpreter.
"""

from __future__ import annotations

import contextlib
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from relaygr.worker.kv import KvDtype
from relaygr.worker.model.attention.spec import SCALED
from relaygr.worker.model.triton.attention_kernels import attend_kernel, join_kernel, round_kernel, store_kernel
from relaygr.worker.model.triton.launch import choose_block_rows, fitting_configs, tuned_attend
from relaygr.worker.model.triton.norm_kernels import gated_norm_kernel, norm_kernel

_REGISTERS = 65_536
_WARPS = 64
_RESERVED_BYTES = 1024
"""Shared memory that the system takes of each program."""


@dataclass(frozen=True, slots=True)
class Gpu:
    """One kind of GPU."""

    target: GPUTarget
    shared_bytes: int
    """Of one program; all programs of a multiprocessor share 1 KiB more."""
    own_product: str
    """The instruction for tensor cores that this GPU is faster by, as a pattern."""


GPUS = {
    "sm_80": Gpu(GPUTarget("cuda", 80, 32), 163 * 1024, r"mma\.sync"),
    "sm_90": Gpu(GPUTarget("cuda", 90, 32), 227 * 1024, r"wgmma\.mma_async"),
    "sm_100": Gpu(GPUTarget("cuda", 100, 32), 227 * 1024, r"tcgen05\.mma|mma\.sync"),
}


@dataclass(frozen=True, slots=True)
class Compiled:
    """What the compiler says of a kernel."""

    registers: int
    spilled_bytes: int
    """Of a thread."""
    shared_bytes: int
    tensor_products: int
    """Instructions for tensor cores."""
    own_products: int
    """Of these, the fastest kind of this GPU."""
    async_copies: int
    notes: list[str]
    """Of ptxas, on performance."""
    programs: int
    """That run at once on a multiprocessor, as registers, warps and shared memory allow."""
    fits: bool
    """Its shared memory is there. The tuner passes over what does not fit."""


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
_SCALED = {"i8": SCALED[KvDtype.INT8], "fp8e4nv": SCALED[KvDtype.FLOAT8]}


def compiled(
    gpu: Gpu, kernel: Any, constants: dict[str, object], own: str, stored: str, warps: int, stages: int
) -> Compiled:
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
    with heard() as said:
        made = triton.compile(source, target=gpu.target, options={"num_warps": warps, "num_stages": stages})
    return described(gpu, made, "".join(said), warps)


@contextlib.contextmanager
def heard() -> Iterator[list[str]]:
    """What ptxas says while Triton compiles, which some versions of Triton show only for errors."""
    run, said = subprocess.run, list[str]()

    def hears(command: Any, **options: Any) -> Any:
        done = run(command, **options)
        if "-v" in command:
            said.append(Path(options["stderr"].name).read_text(encoding="utf-8"))
        return done

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("triton.backends.nvidia.compiler.subprocess.run", hears)
        yield said


def described(gpu: Gpu, made: Any, said: str, warps: int) -> Compiled:
    """`said`: by ptxas."""
    registers = re.search(r"Used (\d+) registers", said)
    spilled = re.search(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", said)
    assert registers is not None and spilled is not None, said
    shared, used = made.metadata.shared, int(registers[1])
    rooms = [_REGISTERS // (32 * warps * (-(-used // 8) * 8)), _WARPS // warps]
    rooms.append((gpu.shared_bytes + _RESERVED_BYTES) // (shared + _RESERVED_BYTES))
    return Compiled(
        registers=used,
        spilled_bytes=max(map(int, spilled.groups())),
        shared_bytes=shared,
        tensor_products=len(re.findall(r"mma\.sync|wgmma\.mma_async|tcgen05\.mma", made.asm["ptx"])),
        own_products=len(re.findall(gpu.own_product, made.asm["ptx"])),
        async_copies=made.asm["ptx"].count("cp.async.c"),
        notes=re.findall(r".*[Pp]erformance.*", said),
        programs=min(rooms),
        fits=shared <= gpu.shared_bytes,
    )


@dataclass(frozen=True, slots=True)
class Attention:
    """A kind of attention kernel: types of the rows and of the pages, and constants of mask and bias."""

    own: str
    stored: str
    dim: int = 128
    page_tokens: int = 64
    options: tuple[tuple[str, object], ...] = ()

    @property
    def has_bias(self) -> bool:
        return any(name == "POSITIONS" for name, _ in self.options)

    def constants(self, block_rows: int) -> dict[str, object]:
        """All of the kernel, except the block of keys."""
        pad = max(16, triton.next_power_of_2(self.dim))
        sizes = {"HEADS": 4, "D_QK": self.dim, "D_V": self.dim, "PAD_QK": pad, "PAD_V": pad, "BLOCK_M": block_rows}
        plain = {"GROUP": 1, "CONTEXTUAL": 0, "WINDOW": 0, "FULL_LAST": 0, "POSITIONS": 0, "TIMES": False, "EDGES": 0}
        precision = {"PRECISION": "ieee" if self.own == "fp32" else "tf32", "PAGE_TOKENS": self.page_tokens}
        return plain | sizes | precision | dict(self.options)

    def block_rows(self, longest: int) -> int:
        """Rows of a tile, if the longest segment has so many."""
        dtype = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}[self.own]
        return choose_block_rows(dtype, longest, self.dim, self.has_bias, self.stored in _SCALED)

    def compiled(self, gpu: Gpu, block_rows: int, keys: int, warps: int, stages: int) -> Compiled:
        """With these blocks."""
        constants = self.constants(block_rows) | {"BLOCK_N": keys} | without_scales(self.stored)
        constants |= {} if constants["POSITIONS"] else {"positions_ptr": None}
        if not constants["TIMES"]:
            constants |= dict.fromkeys(("key_times_ptr", "following_ptr", "times_ptr", "edges_ptr"))
        return compiled(gpu, attend_kernel, constants, self.own, self.stored, warps, stages)

    def ranking(self, gpu: Gpu, keys: int, warps: int, stages: int) -> Compiled:
        """For requests, with tiles as the launch chooses them."""
        return self.compiled(gpu, self.block_rows(SHORT), keys, warps, stages)

    def chunk(self, gpu: Gpu, keys: int, warps: int, stages: int) -> Compiled:
        """For chunks, with tiles as the launch chooses them."""
        return self.compiled(gpu, self.block_rows(LONG), keys, warps, stages)

    def tuned(self, gpu: Gpu) -> dict[str, Compiled]:
        """With all blocks from which the tuner may choose, for requests and for chunks."""
        found, named = {}, {"k_exponents_ptr": True if self.stored in _SCALED else None}
        for rows in sorted({self.block_rows(longest) for longest in (SHORT, LONG)}):
            for config in fitting_configs(tuned_attend.configs, named, **self.constants(rows)):
                blocks = (config.kwargs["BLOCK_N"], config.num_warps, config.num_stages)
                name = f"{rows} rows, {blocks[0]} keys, {blocks[1]} warps, {blocks[2]} stages"
                found[name] = self.compiled(gpu, rows, *blocks)
        return found


SHORT, LONG = 64, 2048
"""Rows of a request and of a chunk."""
_MASKS = (("GROUP", 3), ("CONTEXTUAL", 5), ("WINDOW", 512), ("FULL_LAST", 64))
_BIASES = (("POSITIONS", 8191), ("TIMES", True), ("EDGES", 124))
TUNED = {
    f"{name}, dimension {dim}": Attention(own, stored, dim, options=options)
    for dim in (64, 128, 256)
    for name, own, stored, options in (
        ("bfloat16", "bf16", "bf16", ()),
        ("float16 on bfloat16 pages", "fp16", "bf16", ()),
        ("float32", "fp32", "fp32", ()),
        ("bfloat16 on float8 pages", "bf16", "fp8e4nv", ()),
        ("bfloat16 on int8 pages", "bf16", "i8", ()),
        ("bfloat16 on int8 pages, every bias", "bf16", "i8", _BIASES),
        ("bfloat16, every mask", "bf16", "bf16", _MASKS),
        ("bfloat16, every bias", "bf16", "bf16", _BIASES),
        ("bfloat16, every mask and bias", "bf16", "bf16", _MASKS + _BIASES),
        ("float32, every bias", "fp32", "fp32", _BIASES),
    )
}


def join(gpu: Gpu) -> Compiled:
    sizes: dict[str, object] = {"COLUMNS": 512, "PAD_COLUMNS": 512, "BLOCK_M": 64, "ROWS": 8}
    return compiled(gpu, join_kernel, sizes, "fp32", "fp32", 4, 3)


def store(gpu: Gpu, own: str, stored: str) -> Compiled:
    assert store_kernel.params[store_kernel.arg_names.index("rows")].do_not_specialize, "compiled anew for other rows"
    sizes: dict[str, object] = {"D_QK": 128, "D_V": 128, "PAD_QK": 128, "PAD_V": 128, "PAGE_TOKENS": 64, "BLOCK_M": 32}
    return compiled(gpu, store_kernel, sizes | scaling(stored) | without_scales(stored), own, stored, 4, 3)


def rounded(gpu: Gpu, own: str, stored: str) -> Compiled:
    kind = tl.int8 if stored == "i8" else tl.float8e4nv
    sizes = {"HEADS": 4, "D": 128, "PAD_D": 128, "STORED": kind, "BLOCK_M": 32}
    return compiled(gpu, round_kernel, sizes | scaling(stored), own, stored, 4, 3)


def scaling(stored: str) -> dict[str, object]:
    of_type = _SCALED.get(stored)
    return {"POWER": of_type.power if of_type else 0, "ROUND_UP": of_type.round_up if of_type else 0}


def without_scales(stored: str) -> dict[str, object]:
    return {} if stored in _SCALED else dict.fromkeys(("k_exponents_ptr", "v_exponents_ptr"))


def output(gpu: Gpu, own: str, keeps: int, affine: bool) -> Compiled:
    sizes = {"HEADS": 4, "D": 128, "PAD_HEADS": 4, "PAD_D": 128, "GROUP": False, "KEEPS": keeps}
    return compiled(gpu, gated_norm_kernel, sizes | affinity(affine), own, own, 1, 3)


def norm(gpu: Gpu, own: str, affine: bool) -> Compiled:
    return compiled(gpu, norm_kernel, {"D": 512, "PAD_D": 512} | affinity(affine), own, own, 1, 3)


def affinity(affine: bool) -> dict[str, object]:
    """Without weight and bias the kernels are given None."""
    return {"AFFINE": affine} | ({} if affine else {"weight_ptr": None, "bias_ptr": None})


def one_of_each(gpu: Gpu) -> dict[str, Compiled]:
    """One configuration of each kernel, and of each kind of attention."""
    bf16, fp16, fp32 = Attention("bf16", "bf16"), Attention("fp16", "bf16"), Attention("fp32", "fp32")
    fp8, int8 = Attention("bf16", "fp8e4nv"), Attention("bf16", "i8")
    return {
        "bfloat16, ranking": bf16.ranking(gpu, 64, 4, 3),
        "bfloat16, chunk": bf16.chunk(gpu, 64, 8, 3),
        "bfloat16, pages of 24": replace(bf16, page_tokens=24).ranking(gpu, 64, 4, 3),
        "bfloat16, dimension 100": replace(bf16, dim=100).ranking(gpu, 64, 4, 3),
        "bfloat16, dimension 256": replace(bf16, dim=256).ranking(gpu, 32, 8, 2),
        "bfloat16, every mask": replace(bf16, options=_MASKS).ranking(gpu, 64, 4, 3),
        "bfloat16, bias by position and time": replace(bf16, options=_BIASES).ranking(gpu, 64, 8, 2),
        "float16 on bfloat16 pages": fp16.ranking(gpu, 64, 4, 3),
        "bfloat16 on float8 pages": fp8.chunk(gpu, 64, 8, 3),
        "bfloat16 on int8 pages": int8.chunk(gpu, 64, 4, 3),
        "float32": fp32.ranking(gpu, 16, 4, 2),
        "float32, dimension 256": replace(fp32, dim=256).ranking(gpu, 16, 8, 2),
        "float32, bias by position and time": replace(fp32, dim=64, options=_BIASES).ranking(gpu, 16, 4, 2),
        "join": join(gpu),
        "store bfloat16": store(gpu, "bf16", "bf16"),
        "store float32 as bfloat16": store(gpu, "fp32", "bf16"),
        "store bfloat16 as float8": store(gpu, "bf16", "fp8e4nv"),
        "store bfloat16 as int8": store(gpu, "bf16", "i8"),
        "round to float8": rounded(gpu, "bf16", "fp8e4nv"),
        "round to int8": rounded(gpu, "fp32", "i8"),
        "input norm": norm(gpu, "bf16", True),
        "input norm without weights": norm(gpu, "bf16", False),
        "output": output(gpu, "bf16", 1, True),
        "output without weights": output(gpu, "bf16", 0, False),
    }


def table(report: dict[str, Compiled]) -> str:
    """For docs/cuda.md."""
    lines = ["| kernel | registers | shared memory, KiB | programs at once |", "|---|---|---|---|"]
    lines += [
        f"| {name} | {found.registers} | {found.shared_bytes / 1024:.0f} | {found.programs} |"
        for name, found in report.items()
    ]
    return "\n".join(lines) + "\n"


def main(name: str, kernels: str | None = None) -> None:
    """Prints the report."""
    knobs.compilation.always_compile = True
    gpu = GPUS[name]
    if kernels == "table":
        sys.stdout.write(table(one_of_each(gpu)))
        return
    report = one_of_each(gpu) if kernels is None else TUNED[kernels].tuned(gpu)
    json.dump({kernel: asdict(found) for kernel, found in report.items()}, sys.stdout)


if __name__ == "__main__":
    main(*sys.argv[1:])
