"""The interface of attention back ends. The device thread makes all calls:

* once for each forward: `AttentionBackend.begin(kv, segments)`, which copies the description of the segments to the
  device;
* once for each layer, in order: `AttentionPass.attend(layer, q, k, v)`, which stores K,V of the chunks and returns A.

`q`, `k`, `v` hold the rows of all segments, one segment after the other, chunks first. `q` and `k` are
[rows, heads, attention_dim], `v` is [rows, heads, hidden_dim], all of the compute type. They are views of one
projection, and their last dimension is contiguous. The caller has rounded `k` and `v` to the stored type, so that a row
has the same values before and after it is stored; `q` is not scaled yet. A is [rows, heads * hidden_dim], contiguous,
float32 or of the compute type, and divided by N.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from relaygr.worker.model.attention.paged_kv import PagedKv
from relaygr.worker.model.attention.segments import Segment


class AttentionPass(Protocol):
    """The attention of one forward."""

    def attend(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Stores K,V of the segments with `stores`, and returns A of every row."""


class AttentionBackend(Protocol):
    """An attention back end for one model."""

    @property
    def name(self) -> str:
        """The back end's name in logs."""

    def begin(self, kv: PagedKv, segments: Sequence[Segment]) -> AttentionPass:
        """Prepares one forward. Raises ValueError if the pages of a segment do not hold its tokens."""

    def scratch_bytes(self, rows: int, max_tokens: int) -> int:
        """The most memory that `attend` needs beside its arguments, for `rows` rows in total.

        `max_tokens`: the most keys of one segment, its own rows included.
        """
