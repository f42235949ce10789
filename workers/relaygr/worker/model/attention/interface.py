"""What a back end does. Who calls what, and when, all on the device's thread:

* once a forward: `AttentionBackend.begin(kv, segments)`, which brings to the device what describes the segments;
* once a layer, in order: `AttentionPass.attend(layer, q, k, v)`, which stores K,V of the chunks and gives A.

The rows of `q`, `k`, `v` are those of all segments, one segment after the other; chunks come first. `q` and `k` are
[rows, heads, attention_dim], `v` is [rows, heads, hidden_dim], all of the compute type: views of one projection, whose
last dimension is contiguous. `k` and `v` were rounded to the stored type by the caller, so that a row counts as much
now as it will once it is read back; `q` is not scaled yet. A is [rows, heads * hidden_dim], contiguous, float32 or of
the compute type, and divided by N.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from relaygr.worker.model.attention.paged_kv import PagedKv
from relaygr.worker.model.attention.segments import Segment


class AttentionPass(Protocol):
    """AttentionBackend of one forward."""

    def attend(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Stores K,V of the rows of segments that store, and returns A of every row."""


class AttentionBackend(Protocol):
    """One back end for one model."""

    @property
    def name(self) -> str:
        """As logs say it."""

    def begin(self, kv: PagedKv, segments: Sequence[Segment]) -> AttentionPass:
        """Prepares one forward. Raises ValueError for a segment whose pages do not hold its tokens."""

    def scratch_bytes(self, rows: int, max_tokens: int) -> int:
        """Most memory that `attend` needs at once beside its arguments, for so many rows in all.

        `max_tokens`: the most that one segment's keys can be, its own rows included.
        """
