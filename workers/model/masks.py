"""Who sees whom: the attention masks of HSTU and its variants, as bool matrices.

A sequence is `[contextual | history | targets]`. Row i sees column j where

    row \\ column | contextual | history       | target
    contextual    | all        | all history   | none      (with a contextual mask; else ordinary causal rows)
    history i     | all        | j <= i        | none
    target t      | all        | all           | itself only

`max_attn_len` m narrows this to keys at most m places back, the diagonal always kept; all targets count as standing
at the place right after the history. `min_full_attn_seq_len` k exempts targets and the history rows within k places
of its end. Where a model is not target-aware, its targets are ordinary causal history.
Sources: Meta's generative-recommenders (contextual mask, windows), NVIDIA's recsys-examples (target groups).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class MaskOptions:
    """The options of a mask. Zero switches an option off."""

    contextual_seq_len: int = 0
    """Leading tokens that see the whole history and stand at one place together."""
    max_attn_len: int = 0
    min_full_attn_seq_len: int = 0


def attention_mask(size: int, length: int, num_targets: int | None, options: MaskOptions) -> torch.Tensor:
    """bool [size, size] of one sequence of `length` tokens; beyond them, padding counts as more targets.

    num_targets: how many of its last tokens are targets; None: not target-aware.
    """
    contextual = options.contextual_seq_len
    places = torch.arange(size)
    end = length
    if contextual:
        places = (places - (contextual - 1)).clamp(min=0)
        end -= contextual - 1
    if num_targets is not None:
        end -= num_targets
        places = places.clamp(max=end)
    rows, columns = places[:, None], places[None, :]
    back = rows - columns
    visible = back > 0
    if options.max_attn_len:
        near = back <= options.max_attn_len
        if options.min_full_attn_seq_len:
            near = near | (rows >= end - options.min_full_attn_seq_len)
        visible = visible & near
    visible = visible | torch.eye(size, dtype=torch.bool)
    if contextual:
        visible = visible | ((rows == 0) & (columns < end))
    return visible


def grouped_mask(size: int, length: int, num_targets: int, num_contextuals: int, group_size: int) -> torch.Tensor:
    """bool [size, size] with targets that see their own group of `group_size`, and nothing beyond `length`."""
    raise NotImplementedError
