"""Other people's attention kernels on our shapes, where their packages can be imported. None is needed.

Meta's `generative_recommenders` (github.com/meta-recsys/generative-recommenders) has `hstu_mha` over whole jagged
sequences and `delta_hstu_mha` for new rows on kept K,V; both take contiguous K,V, so what a paged cache would have to
gather first is not counted against them. Its normaliser is its `max_seq_len`, which therefore must be ours; rows behind
so many it does not compute. It writes A in the type of V, we in float32.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch


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


Attend = Callable[[Jagged], torch.Tensor]
"""A [users * rows, heads, dv]"""


def find_peers() -> dict[str, Attend]:
    """Those that can be imported here, by name."""
    found: dict[str, Attend] = {}
    try:
        operators: Any = importlib.import_module("generative_recommenders.ops.hstu_attention")
        kernels: Any = importlib.import_module("generative_recommenders.common").HammerKernel
    except ImportError:
        return found
    found["Meta, Triton"] = lambda case: _meta(operators, kernels.TRITON, case)
    return found


def _meta(operators: Any, kernel: Any, case: Jagged) -> torch.Tensor:
    device = case.q.device
    offsets = torch.arange(0, (case.users + 1) * case.length, case.length, dtype=torch.int64, device=device)
    targets = torch.full((case.users,), case.targets, dtype=torch.int64, device=device) if case.targets else None
    common = {"alpha": case.alpha, "seq_offsets": offsets, "num_targets": targets, "kernel": kernel}
    if case.rows == case.length:
        out = operators.hstu_mha(max_seq_len=case.normalizer, q=case.q, k=case.k, v=case.v, **common)
    else:
        out = operators.delta_hstu_mha(max_seq_len=case.normalizer, delta_q=case.q, k=case.k, v=case.v, **common)
    return torch.as_tensor(out)
