"""Starts the Triton kernels: checks shapes, chooses block sizes, allocates results.

The element type and the longest segment determine the rows of a tile (`choose_block_rows`). Triton's autotuner
(`tuned`) chooses the block of keys and the stages of the pipeline once for each kind of kernel, and keeps its choice on
disk. A kind is the combination of heads, mask, bias, dimensions, page size, element types and rows of a tile:
two kinds for each model, for any requests. `attend` launches with known `Blocks`, because two threads cannot use the
tuner at once, and one model may load while another serves.
"""

from __future__ import annotations

import math
import threading
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from triton.runtime import driver

from relaygr.worker.kv import KvDtype
from relaygr.worker.model.attention.bias import RelativeBiases
from relaygr.worker.model.attention.spec import SCALED, torch_dtype
from relaygr.worker.model.triton.attention_kernels import attend_kernel, join_kernel, round_kernel, store_kernel
from relaygr.worker.model.triton.plan import PLAIN_MASK, MaskOptions, PackedPlan

BLOCK_ROWS = (16, 32, 64, 128)
"""The possible results of `choose_block_rows`."""
_STORE_ROWS = 32
_JOIN_ROWS = 8
_LEAST_DOT = 16
"""The smallest side of a tile in `tl.dot`."""
_FLOAT8_FROM = 89
"""The compute capability, times ten, from which on a GPU has e4m3."""
_tuning = threading.Lock()


@dataclass(frozen=True, slots=True)
class Blocks:
    """Keys in a block, warps of a program, and stages of its pipeline."""

    keys: int
    warps: int = 4
    stages: int = 2


@dataclass(frozen=True, slots=True)
class KernelBiases:
    """The bias tables of all layers, and the buckets of times, as the kernel reads them."""

    positions: list[torch.Tensor]
    times: list[torch.Tensor] | None
    edges: torch.Tensor | None
    """int64: the edges of `RelativeBiases`, then a number above all times."""
    bucket_rate: float
    """Buckets in a doubling of the time, a little less: the kernel's guess must never be above the bucket."""

    @property
    def last_bucket(self) -> int:
        """The highest bucket that a time can fall into."""
        return 0 if self.edges is None else self.edges.numel() - 1


_GUESS_ERROR = 2.0**-18
"""Relative; above the error of the kernel's and of the formula's logarithm, and below one bucket of 65,536."""


def kernel_biases(biases: RelativeBiases | None) -> KernelBiases | None:
    """The tables of a model's bias; None without one."""
    if biases is None:
        return None
    if biases.edges is None:
        return KernelBiases(biases.positions, None, None, 0.0)
    above_all = biases.edges.new_full((1,), torch.iinfo(torch.int64).max)
    rate = math.log(2.0) / biases.log_base * (1.0 - _GUESS_ERROR)
    return KernelBiases(biases.positions, biases.times, torch.cat((biases.edges, above_all)), rate)


@dataclass(frozen=True, slots=True)
class Formula:
    """The parameters of attention, except sizes."""

    alpha: float
    normalizer: float
    mask: MaskOptions = PLAIN_MASK
    biases: KernelBiases | None = None


@dataclass(frozen=True, slots=True)
class LayerPages:
    """One layer of the arena: K [pages, heads, page_tokens, dqk] and V [.., dv], strided views; and its number."""

    k: torch.Tensor
    v: torch.Tensor
    layer: int = 0
    exponents: tuple[torch.Tensor, torch.Tensor] | None = None
    """Of K and V in a scaled type: uint8 [pages, heads, page_tokens], strided views."""

    @property
    def page_tokens(self) -> int:
        return self.k.shape[2]


class DevicePlan:
    """A packed plan and its array on the device, with views of the array's parts."""

    def __init__(self, plan: PackedPlan, packed: torch.Tensor) -> None:
        """packed: int32, a copy of `plan.packed`."""
        self.plan = plan
        self.packed = packed
        self.segments = packed[plan.segments_at :]
        self.joins = packed[plan.joins_at :]
        self.table = packed[plan.table_at :]
        self.slots = packed[plan.slots_at :]
        self.key_times = packed[plan.key_times_at :].view(torch.int64)
        self.following = packed[plan.following_at :].view(torch.int64)


def choose_block_rows(
    dtype: torch.dtype, longest_rows: int, widest_dim: int, has_bias: bool = False, is_scaled: bool = False
) -> int:
    """Rows of a tile. A tile with more rows reads K,V less often, but its sums must fit into registers.

    `is_scaled`: K,V are stored in a scaled type.

    By the compiler's words for sm_90 (tests/workers/compiled_kernels.py), float32 tiles above 32 x 128 spill, and with
    K,V that are widened, 128 rows spill or have their `wgmma` serialised. A bias needs registers for each pair of a row
    and a key.
    """
    if dtype is torch.float32:
        return 32 if widest_dim <= 128 and not has_bias else 16
    if has_bias:
        return 64 if widest_dim <= 128 else 32
    return 128 if longest_rows >= 512 and widest_dim <= 128 and not is_scaled else 64


@dataclass(frozen=True, slots=True)
class _Launch:
    """The parameters of a launch of the attention kernel, except its blocks."""

    grid: tuple[int]
    arguments: tuple[Any, ...]
    fixed: dict[str, object]
    sums: torch.Tensor
    """The result, and partial sums after it: one of the arguments."""


def compute_capability() -> int:
    """Of the calling thread's GPU, times ten."""
    return int(driver.active.get_current_target().arch)


def check_stored_type(dtype: KvDtype, device: torch.device) -> None:
    """Raises ValueError if Triton does not compile the stored type for this GPU."""
    if dtype is KvDtype.FLOAT8 and device.type != "cpu" and compute_capability() < _FLOAT8_FROM:
        raise ValueError(
            "Triton computes with float8 on GPUs of compute capability 8.9 or newer; worker.kv_dtype=int8 takes as"
            " little memory, is more exact, and runs here"
        )


def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    pages: LayerPages,
    device_plan: DevicePlan,
    formula: Formula,
    blocks: Blocks,
) -> torch.Tensor:
    """Attention of one layer for all rows of a forward.

    q, k [rows, heads, dqk], v [rows, heads, dv]: the last stride is 1, the others are any. Returns float32
    [rows, heads, dv]; rows beyond the plan's segments are undefined. Raises ValueError for shapes that do not fit.
    """
    launch = _launch(q, k, v, pages, device_plan, formula)
    attend_kernel[launch.grid](
        *launch.arguments, **launch.fixed, BLOCK_N=blocks.keys, num_warps=blocks.warps, num_stages=blocks.stages
    )
    rows, heads, d_v = v.shape
    shape = device_plan.plan.shape
    if shape.extra_items:
        columns = heads * d_v
        join_kernel[(device_plan.plan.joins, triton.cdiv(shape.block_rows, _JOIN_ROWS))](
            launch.sums,
            device_plan.joins,
            COLUMNS=columns,
            PAD_COLUMNS=triton.next_power_of_2(columns),
            BLOCK_M=shape.block_rows,
            ROWS=_JOIN_ROWS,
        )
    return launch.sums[:rows]


def tuned(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    pages: LayerPages,
    device_plan: DevicePlan,
    formula: Formula,
) -> Blocks:
    """The fastest blocks for this kind of kernel. An unknown kind is tuned on these rows. Any thread may call."""
    launch = _launch(q, k, v, pages, device_plan, formula)
    with _tuning:
        tuned_attend[launch.grid](*launch.arguments, **launch.fixed)
        best = tuned_attend.best_config
    return Blocks(best.kwargs["BLOCK_N"], best.num_warps, best.num_stages)


def _launch(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    pages: LayerPages,
    device_plan: DevicePlan,
    formula: Formula,
) -> _Launch:
    rows, heads, d_qk = q.shape
    d_v = v.shape[2]
    plan = device_plan.plan
    _check(q, k, v, pages, rows)
    if rows != plan.rows:
        raise ValueError(f"{rows} rows were given, the plan has {plan.rows}")
    sums = torch.empty((plan.result_rows, heads, d_v), dtype=torch.float32, device=q.device)
    mask, biases = formula.mask, formula.biases
    pads = [max(_LEAST_DOT, triton.next_power_of_2(dim)) for dim in (d_qk, d_v)]
    positions = times = None
    if biases is not None:
        positions = biases.positions[pages.layer]
        times = None if biases.times is None else biases.times[pages.layer]
    has_times = times is not None
    arguments = (
        q,
        k,
        v,
        pages.k,
        pages.v,
        *(pages.exponents or (None, None)),
        sums,
        device_plan.packed,
        device_plan.segments,
        device_plan.table,
        device_plan.key_times if has_times else None,
        device_plan.following if has_times else None,
        positions,
        times,
        biases.edges if biases is not None else None,
        formula.alpha,
        1.0 / formula.normalizer,
        biases.bucket_rate if biases is not None else 0.0,
        *q.stride()[:2],
        *k.stride()[:2],
        *v.stride()[:2],
        *pages.k.stride()[:2],
        *pages.v.stride()[:2],
        *sums.stride()[:2],
    )
    fixed = {
        "HEADS": heads,
        "GROUP": mask.group_size,
        "CONTEXTUAL": mask.contextual_tokens,
        "WINDOW": mask.max_attn_len,
        "FULL_LAST": mask.min_full_attn_len,
        "POSITIONS": 0 if positions is None else positions.numel(),
        "TIMES": has_times,
        "EDGES": 0 if biases is None else biases.last_bucket,
        "D_QK": d_qk,
        "D_V": d_v,
        "PAD_QK": pads[0],
        "PAD_V": pads[1],
        "PAGE_TOKENS": pages.page_tokens,
        "PRECISION": "ieee" if q.dtype is torch.float32 else "tf32",
        "BLOCK_M": plan.shape.block_rows,
    }
    return _Launch((plan.items * heads,), arguments, fixed, sums)


def store(k: torch.Tensor, v: torch.Tensor, pages: LayerPages, device_plan: DevicePlan) -> None:
    """Writes K,V of the causal rows of segments with `stores` to their pages, rounded to the stored type.

    k [rows, heads, dqk], v [rows, heads, dv]: see `attend`.
    """
    rows, heads, d_qk = k.shape
    d_v = v.shape[2]
    _check(k, k, v, pages, device_plan.plan.rows)
    store_kernel[(triton.cdiv(rows, _STORE_ROWS), heads)](
        k,
        v,
        pages.k,
        pages.v,
        *(pages.exponents or (None, None)),
        device_plan.slots,
        rows,
        *k.stride()[:2],
        *v.stride()[:2],
        *pages.k.stride()[:2],
        *pages.v.stride()[:2],
        D_QK=d_qk,
        D_V=d_v,
        PAD_QK=triton.next_power_of_2(d_qk),
        PAD_V=triton.next_power_of_2(d_v),
        PAGE_TOKENS=pages.page_tokens,
        **_scaling(pages.k.dtype),
        BLOCK_M=_STORE_ROWS,
    )


def round_rows(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """K or V [rows, heads, dim], rounded to a scaled type in one launch. The last stride of x is 1."""
    rows, heads, dim = x.shape
    out = torch.empty((rows, heads, dim), dtype=x.dtype, device=x.device)
    if rows:
        round_kernel[(triton.cdiv(rows, _STORE_ROWS), heads)](
            x,
            out,
            rows,
            *x.stride()[:2],
            HEADS=heads,
            D=dim,
            PAD_D=triton.next_power_of_2(dim),
            STORED=tl.int8 if dtype is torch.int8 else tl.float8e4nv,
            **_scaling(dtype),
            BLOCK_M=_STORE_ROWS,
        )
    return out


def _scaling(dtype: torch.dtype) -> dict[str, int]:
    """The constants of a scaled type for the kernels; zeros for another type."""
    for kv_dtype, of_type in SCALED.items():
        if torch_dtype(kv_dtype) is dtype:
            return {"POWER": of_type.power, "ROUND_UP": of_type.round_up}
    return {"POWER": 0, "ROUND_UP": 0}


def _check(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, pages: LayerPages, rows: int) -> None:
    heads, d_qk, d_v = q.shape[1], q.shape[2], v.shape[2]
    if q.shape != k.shape or v.shape[:2] != q.shape[:2] or q.shape[0] != rows:
        raise ValueError(f"q {list(q.shape)}, k {list(k.shape)} and v {list(v.shape)} do not fit {rows} rows")
    if pages.k.shape[1::2] != (heads, d_qk) or pages.v.shape[1::2] != (heads, d_v):
        raise ValueError(f"pages of {list(pages.k.shape[1:])} and {list(pages.v.shape[1:])} do not fit this layer")
    # The kernels assume the strides of the last dimension and of a page's tokens.
    if any(tensor.stride(-1) != 1 for tensor in (q, k, v)):
        raise ValueError("q, k and v must be contiguous in their last dimension")
    if pages.k.stride()[2:] != (d_qk, 1) or pages.v.stride()[2:] != (d_v, 1):
        raise ValueError("the tokens of a page must be contiguous")


def fitting_configs(configs: list[triton.Config], named: dict[str, object], **fixed: object) -> list[triton.Config]:
    """The configurations that spill no more than 150 bytes of registers a thread; at least one.

    Measured with tests/workers/compiled_kernels.py: on sm_90, 64 x 64 with every option spills 48 bytes, and 64 x 64 of
    dimension 256 at most 132; on sm_80, 128 x 128 of dimension 128 spills 23,000, and 64 x 64 with every option and 4
    warps 492; on sm_90 and sm_100, 32 x 32 of dimension 128 in float32 spills 1,124. The tuner decides whether what is
    left costs more than it wins. With K,V that are widened, the compiler serialises `wgmma` in most blocks of other
    sizes than 64 x 64.
    """
    is_float32 = fixed["PRECISION"] == "ieee"
    has_bias = bool(fixed["POSITIONS"] or fixed["TIMES"])
    dim = max(int(str(fixed["PAD_QK"])), int(str(fixed["PAD_V"])))
    large = int(str(fixed["BLOCK_M"])) > 64
    is_scaled = named.get("k_exponents_ptr") is not None

    if is_float32:
        least, most = 16, 16 if has_bias or dim > 64 else 32
    else:
        most = 64 if has_bias or is_scaled or dim > 128 or (large and dim > 64) else 128
        if has_bias and dim > 128:
            most = 32
        least = min(64, most) if is_scaled else 32

    def fits(config: triton.Config) -> bool:
        keys = config.kwargs["BLOCK_N"]
        needs_8_warps = dim > 128 or large or (has_bias and keys > 32)
        return least <= keys <= most and (config.num_warps == 8 or not needs_8_warps)

    return [config for config in configs if fits(config)]


_KIND = [
    "HEADS",
    "GROUP",
    "CONTEXTUAL",
    "WINDOW",
    "FULL_LAST",
    "POSITIONS",
    "TIMES",
    "EDGES",
    "D_QK",
    "D_V",
    "PAGE_TOKENS",
    "PRECISION",
    "BLOCK_M",
]


tuned_attend = triton.autotune(
    configs=[
        triton.Config({"BLOCK_N": keys}, num_warps=warps, num_stages=stages)
        for keys in (16, 32, 64, 128)
        for warps in (4, 8)
        for stages in (2, 3, 4)
    ],
    key=_KIND,
    prune_configs_by={"early_config_prune": fitting_configs},
    cache_results=True,
)(attend_kernel)
