"""Attention kernels of other projects on our shapes, if their packages can be imported. None is required.

Meta's `generative_recommenders` (github.com/meta-recsys/generative-recommenders) has `triton_hstu_mha` over whole
jagged sequences and `triton_cached_hstu_mha` for new rows on cached K,V. Both take contiguous K,V; the measured time
excludes the gather that a paged cache would need, and the description of the sequences. Its normaliser is its N, so our
N is the same; it does not compute rows beyond N. It writes A in the type of V; our back ends write float32.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

META = "generative_recommenders.ops.triton.triton_hstu_attention"
"""Not `ops.hstu_attention`, which chooses among kernels that are not all public."""


@dataclass(frozen=True, slots=True)
class Jagged:
    """Users with sequences of one length: q of the last `rows` tokens, k and v of all `length` tokens of each user.

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
"""A function that returns A [users * rows, heads, dv]."""


def find_peers() -> dict[str, Callable[[Jagged], Work]]:
    """The kernels that can be imported here, by name. Each function prepares a case."""
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
