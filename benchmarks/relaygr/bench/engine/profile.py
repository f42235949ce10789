"""The profile of a pass: the self times of operators, summed into a few parts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from rich.table import Table
from torch.autograd.profiler_util import FunctionEventAvg
from torch.profiler import ProfilerActivity, profile

from relaygr.worker.device import Device

_PARTS = (
    ("projections", ("multiply compiled", "aten::addmm", "aten::addmm_", "aten::mm", "aten::linear")),
    (
        "attention: products",
        ("attend_kernel", "attend compiled", "aten::bmm", "aten::baddbmm", "scaled_dot_product", "hstu"),
    ),
    # Projections, and attention's products of a large tile.
    ("products by oneDNN", ("mkldnn::_linear_pointwise", "onednn::qlinear_pointwise")),
    ("SiLU", ("aten::silu", "aten::sigmoid")),
    ("norms and gates", ("norm_kernel", "layer_norm", "aten::mul", "aten::addcmul", "aten::add")),
    (
        "K,V to and from pages",
        ("store_kernel", "aten::index_select", "aten::index_put", "aten::_index_put", "aten::copy_", "aten::cat"),
    ),
    ("mask of the diagonal", ("aten::tril",)),
)
_OTHER = "other"
_OWN_KERNELS = {"attend_kernel", "store_kernel", "norm_kernel", "gated_norm_kernel"}
"""Kernels that no operator launches."""


@dataclass(frozen=True, slots=True)
class Share:
    """A part of a pass, and its share of the time of all operators."""

    part: str
    share: float


def shares(device: Device, work: Callable[[], object]) -> list[Share]:
    """The parts of `work`, the largest first. `work` runs twice, the first time as warm-up."""
    work()
    device.synchronize()
    activities = [ProfilerActivity.CPU]
    if not device.is_cpu:
        activities += [each for each in ProfilerActivity.__members__.values() if each.name in ("CUDA", "PrivateUse1")]
    with profile(activities=activities) as profiler:
        work()
        device.synchronize()
    return gathered(profiler.key_averages(), device)


def gathered(events: Iterable[FunctionEventAvg], device: Device) -> list[Share]:
    """The parts of the profiler's events."""
    spent_us: Counter[str] = Counter()
    for event in events:
        name = event.key or ""
        if device.is_cpu:
            spent_us[_part(name)] += event.self_cpu_time_total
        # A kernel has a separate event, and the event of its operator already includes its time.
        elif event.device_type.name == "CPU" or name in _OWN_KERNELS:
            spent_us[_part(name)] += event.self_device_time_total
    total_us = sum(spent_us.values()) or 1.0
    return [Share(part, own_us / total_us) for part, own_us in spent_us.most_common() if own_us]


def _part(operator: str) -> str:
    for part, names in _PARTS:
        if any(name in operator for name in names):
            return part
    return _OTHER


def table(title: str, columns: dict[str, list[Share]]) -> Table:
    """One column for each pass, one row for each part."""
    made = Table(title=title, box=None, padding=(0, 2, 0, 0))
    made.add_column("share of the time")
    for name in columns:
        made.add_column(name, justify="right")
    by_column = [{share.part: share.share for share in found} for found in columns.values()]
    parts = [part for part, _ in _PARTS] + [_OTHER]
    for part in parts:
        if any(part in column for column in by_column):
            made.add_row(part, *(f"{column.get(part, 0.0):.0%}" for column in by_column))
    return made
