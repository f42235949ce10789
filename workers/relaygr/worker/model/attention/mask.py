"""The attention mask of a segment with all options (docs/model.md), made tile by tile, never as a whole.

Keys of a segment are numbered from the prefix's first token on: context, causal rows, candidates. With a contextual
mask all contextual tokens have place 0 and the history begins at place 1; all candidates have the place after the
history. A row sees a key of the history

    if the key is the row itself, or comes before it and is no more than `max_attn_len` places back;
    at any distance, if the row is a candidate or a history row within `min_full_attn_len` places of the end;
    always, if the row is a contextual token and the mask is contextual.

A candidate sees the candidates of its own group up to itself. Source: Meta's generative-recommenders; the groups are
those of NVIDIA's recsys-examples.
"""

from __future__ import annotations

import enum

import torch

from relaygr.worker.model.attention.segments import Segment
from relaygr.worker.model.attention.spec import AttentionSpec


class Visible(enum.Enum):
    """The mask of a tile in which all pairs are the same."""

    NONE = enum.auto()
    ALL = enum.auto()


Tile = Visible | torch.Tensor
"""No pair, every pair, or bool [rows, keys]."""


class AttentionMask:
    """The mask of one segment. Rows and keys are ranges of the segment's tokens."""

    def __init__(self, spec: AttentionSpec, segment: Segment, device: torch.device) -> None:
        self._spec = spec
        self._history = segment.causal_tokens
        self._folded = max(0, spec.contextual_tokens - 1)
        self._end = segment.total_tokens - self._folded
        self._device = device

    def tile(self, rows: range, keys: range) -> Tile:
        """Which of `keys` each of `rows` sees. Each range holds only history or only candidates."""
        if keys.start >= self._history:
            return self._of_candidates(rows, keys)
        return self._of_history(rows, keys)

    def group_start(self, row: int) -> int:
        """The first candidate of a candidate's group."""
        return row - (row - self._history) % self._spec.target_group_size

    def place(self, token: int) -> int:
        """The place of a token."""
        return self._end if token >= self._history else max(0, token - self._folded)

    def places(self, tokens: range) -> torch.Tensor:
        """int64 [tokens]: the place of each token."""
        if tokens.start >= self._history:
            return torch.full((len(tokens),), self._end, device=self._device)
        return torch.arange(tokens.start - self._folded, tokens.stop - self._folded, device=self._device).clamp_(min=0)

    def _of_history(self, rows: range, keys: range) -> Tile:
        s = self._spec
        first, last = self.place(rows[0]), self.place(rows[-1])
        see_all = s.contextual_tokens > 0 and first == 0
        farthest, nearest = last - self.place(keys[0]), first - self.place(keys[-1])
        any_exempt = last >= self._end - s.min_full_attn_len if s.min_full_attn_len else False
        if not see_all and (rows[-1] < keys[0] or (s.max_attn_len and nearest > s.max_attn_len and not any_exempt)):
            return Visible.NONE
        if nearest > 0 and (not s.max_attn_len or farthest <= s.max_attn_len):
            return Visible.ALL
        row_places, key_places = self.places(rows)[:, None], self.places(keys)[None, :]
        back = row_places - key_places
        own = self._tokens(rows)[:, None] == self._tokens(keys)[None, :]
        visible = (back > 0) | own
        if s.max_attn_len:
            near = back <= s.max_attn_len
            if s.min_full_attn_len:
                near |= row_places >= self._end - s.min_full_attn_len
            visible &= near
        if see_all:
            visible |= row_places == 0
        return visible

    def _of_candidates(self, rows: range, keys: range) -> Tile:
        if rows[0] < self._history:
            return Visible.NONE
        row_orders, key_orders = self._tokens(rows)[:, None], self._tokens(keys)[None, :]
        size = self._spec.target_group_size
        row_groups, key_groups = ((orders - self._history) // size for orders in (row_orders, key_orders))
        return (row_groups == key_groups) & (key_orders <= row_orders)

    def _tokens(self, tokens: range) -> torch.Tensor:
        return torch.arange(tokens.start, tokens.stop, device=self._device)
