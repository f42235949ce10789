"""Starts the Triton kernels: checks shapes, chooses block sizes, allocates results.

The element type and the longest segment determine the rows of a tile (`choose_block_rows`). Triton's autotuner
(`tuned`) chooses the block of keys and the stages of the pipeline once for each kind of kernel, and keeps its choice on
disk. A kind is the combination of heads, groups, dimensions, page size, element types and rows of a tile: two kinds for
each model, for any requests. `attend` launches with known `Blocks`, because two threads cannot use the tuner at once,
and one model may load while another serves.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Any

import torch
import triton

from relaygr.worker.model.triton.attention_kernels import attend_kernel, store_kernel
from relaygr.worker.model.triton.plan import PackedPlan

BLOCK_ROWS = (16, 32, 64, 128)
"""The possible results of `choose_block_rows`."""
_STORE_ROWS = 32
_LEAST_DOT = 16
"""The smallest side of a tile in `tl.dot`."""
_tuning = threading.Lock()


@dataclass(frozen=True, slots=True)
class Blocks:
    """Keys in a block, warps of a program, and stages of its pipeline."""

    keys: int
    warps: int = 4
    stages: int = 2


@dataclass(frozen=True, slots=True)
class Formula:
    """The parameters of attention, except sizes."""

    alpha: float
    normalizer: float
    group_size: int = 1
    """Candidates in a group; each sees the earlier ones of its group."""


@dataclass(frozen=True, slots=True)
class LayerPages:
    """One layer of the arena: K [pages, heads, page_tokens, dqk] and V [.., dv], strided views."""

    k: torch.Tensor
    v: torch.Tensor

    @property
    def page_tokens(self) -> int:
        return self.k.shape[2]


@dataclass(frozen=True, slots=True)
class DevicePlan:
    """A packed plan, and its array on the device."""

    plan: PackedPlan
    packed: torch.Tensor
    """int32, a copy of `plan.packed`."""

    @property
    def segments(self) -> torch.Tensor:
        return self.packed[self.plan.segments_at :]

    @property
    def table(self) -> torch.Tensor:
        return self.packed[self.plan.table_at :]

    @property
    def slots(self) -> torch.Tensor:
        return self.packed[self.plan.slots_at :]


def choose_block_rows(dtype: torch.dtype, longest_rows: int, widest_dim: int) -> int:
    """Rows of a tile. A tile with more rows reads K,V less often, but its sums must fit into registers.

    By the compiler's register counts for sm_90 (tests/workers/hopper_process.py), float32 tiles above 32 x 128 spill.
    """
    if dtype is torch.float32:
        return 32 if widest_dim <= 128 else 16
    return 128 if longest_rows >= 512 and widest_dim <= 128 else 64


def padded_rows(rows: int) -> int:
    """Rows of a result: a multiple of 16, so that its stride is one, too.

    For another stride Triton would compile a second kernel while a request waits.
    """
    return -(-rows // 16) * 16


@dataclass(frozen=True, slots=True)
class _Launch:
    """The parameters of a launch of the attention kernel, except its blocks."""

    grid: tuple[int, int]
    arguments: tuple[Any, ...]
    fixed: dict[str, object]
    sums: torch.Tensor


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
    return launch.sums[0] if launch.sums.shape[0] == 1 else launch.sums.sum(0)


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
    splits = plan.shape.splits
    sums = torch.empty((splits, padded_rows(rows), heads, d_v), dtype=torch.float32, device=q.device)[:, :rows]
    arguments = (
        q,
        k,
        v,
        pages.k,
        pages.v,
        sums,
        device_plan.packed,
        device_plan.segments,
        device_plan.table,
        formula.alpha,
        1.0 / formula.normalizer,
        *q.stride()[:2],
        *k.stride()[:2],
        *v.stride()[:2],
        *pages.k.stride()[:2],
        *pages.v.stride()[:2],
        *sums.stride()[:3],
    )
    fixed = {
        "HEADS": heads,
        "GROUP": formula.group_size,
        "D_QK": d_qk,
        "D_V": d_v,
        "PAD_QK": max(_LEAST_DOT, triton.next_power_of_2(d_qk)),
        "PAD_V": max(_LEAST_DOT, triton.next_power_of_2(d_v)),
        "PAGE_TOKENS": pages.page_tokens,
        "PRECISION": "ieee" if q.dtype is torch.float32 else "tf32",
        "BLOCK_M": plan.shape.block_rows,
    }
    return _Launch((plan.tiles * heads, splits), arguments, fixed, sums)


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
        BLOCK_M=_STORE_ROWS,
    )


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


def fitting_configs(configs: list[triton.Config], _: dict[str, object], **fixed: object) -> list[triton.Config]:
    """The configurations without spilled registers on sm_90 (tests/workers/hopper_process.py); at least one."""
    is_float32 = fixed["PRECISION"] == "ieee"
    wide = max(int(str(fixed["PAD_QK"])), int(str(fixed["PAD_V"]))) > 128
    large = int(str(fixed["BLOCK_M"])) > 64
    return [
        config
        for config in configs
        if (config.kwargs["BLOCK_N"] <= (16 if wide else 32) if is_float32 else config.kwargs["BLOCK_N"] >= 32)
        and (config.num_warps == 8 or not (wide or large))
    ]


tuned_attend = triton.autotune(
    configs=[
        triton.Config({"BLOCK_N": keys}, num_warps=warps, num_stages=stages)
        for keys in (16, 32, 64, 128)
        for warps in (4, 8)
        for stages in (2, 3, 4)
    ],
    key=["HEADS", "GROUP", "D_QK", "D_V", "PAGE_TOKENS", "PRECISION", "BLOCK_M"],
    prune_configs_by={"early_config_prune": fitting_configs},
    cache_results=True,
)(attend_kernel)
