"""Other people's attention kernels on our shapes, where their packages can be imported. None is needed.

Meta's `generative_recommenders` (github.com/meta-recsys/generative-recommenders) has `triton_hstu_mha` over whole
jagged sequences and `triton_cached_hstu_mha` for new rows on kept K,V; both take contiguous K,V, so what a paged cache
would have to gather first is not counted against them, nor is what describes the sequences. Its normaliser is its N,
which therefore must be ours; rows behind so many it does not compute. It writes A in the type of V, we in float32.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

META = "generative_recommenders.ops.triton.triton_hstu_attention"
"""Not its `ops.hstu_attention`, which chooses among kernels, some of which are not public."""


@dataclass(frozen=True, slots=True)
class Jagged:
    """Users of one length: q of the last `rows` tokens of each, k and v of all `length` tokens of each.

    q [users * rows, heads, dqk], k [users * length, heads, dqk], v [users * length, heads, dv], contiguous. The last
    `targets` tokens of each user are candidates.
    """

    users: int
    length: int
    rows: int
    targets: int
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    alpha: float
    normalizer: int
    """At least `length`."""


Work = Callable[[], torch.Tensor]
"""Gives A [users * rows, heads, dv]."""


def find_peers() -> dict[str, Callable[[Jagged], Work]]:
    """Those that can be imported here, by name; each prepares a case."""
    try:
        kernels: Any = importlib.import_module(META)
    except ImportError:
        return {}
    return {"Meta, Triton": lambda case: _meta(kernels, case)}


def _meta(kernels: Any, case: Jagged) -> Work:
    device = case.q.device
    offsets = torch.arange(0, (case.users + 1) * case.length, case.length, dtype=torch.int64, device=device)
    targets = torch.full((case.users,), case.targets, dtype=torch.int64, device=device) if case.targets else None
    common = {"N": case.normalizer, "alpha": case.alpha, "k": case.k, "v": case.v}
    common |= {"seq_offsets": offsets, "num_targets": targets}
    if case.rows == case.length:
        return partial(kernels.triton_hstu_mha, q=case.q, **common)
    return partial(kernels.triton_cached_hstu_mha, delta_q=case.q, **common)
