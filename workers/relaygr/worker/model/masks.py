"""Who sees whom: the attention masks of HSTU and its variants, as bool matrices.

A sequence is `[contextual | history | targets]`. Row i sees column j where

    row \\ column | contextual | history       | target
    contextual    | all        | all history   | none      (with a contextual mask; else ordinary causal rows)
    history i     | all        | j <= i        | none
    target t      | all        | all           | itself only (NVIDIA: earlier ones of its group, and itself)

`max_attn_len` m narrows this to keys at most m places back, the diagonal always kept. `min_full_attn_seq_len` k
exempts targets and the history rows within k places of its end. With a contextual mask all contextual tokens stand
at place 0, and the history starts at 1. Sources: Meta's generative-recommenders (`attention_mask`) and NVIDIA's
recsys-examples (`grouped_mask`), which differ in where targets stand.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class MaskOptions:
    """The options of a mask. Zero switches an option off."""

    contextual_seq_len: int = 0
    max_attn_len: int = 0
    min_full_attn_seq_len: int = 0
    causal: bool = True
    """False: history rows see later ones too."""


def attention_mask(size: int, length: int, num_targets: int | None, options: MaskOptions) -> torch.Tensor:
    """bool [size, size] of one sequence of `length` tokens; what is beyond them is masked like more targets.

    num_targets: how many of its last tokens are targets, which all stand at the place after the history; None: the
    model is not target-aware, and they are ordinary history.
    """
    places, end = _places(size, length, options.contextual_seq_len)
    if num_targets is not None:
        end -= num_targets
        places = places.clamp(max=end)
    return _visible(places, end, options)


def grouped_mask(
    size: int, length: int, num_targets: int | None, group_size: int, options: MaskOptions
) -> torch.Tensor:
    """bool [size, size] with targets in groups of `group_size`, each target at a place of its own.

    A target sees all that is not a target, and of its own group what comes before it and itself.
    """
    places, end = _places(size, length, options.contextual_seq_len)
    if num_targets is None:
        return _visible(places, end, options)
    end -= num_targets
    groups = torch.div((places - end).clamp(min=-1), group_size, rounding_mode="floor")
    rows, columns = groups[:, None], groups[None, :]
    together = (rows == columns) | (rows < 0) | (columns < 0)
    return _visible(places, end, options, together)


def _places(size: int, length: int, contextual: int) -> tuple[torch.Tensor, int]:
    places = torch.arange(size)
    if not contextual:
        return places, length
    return (places - (contextual - 1)).clamp(min=0), length - (contextual - 1)


def _visible(
    places: torch.Tensor, end: int, options: MaskOptions, together: torch.Tensor | None = None
) -> torch.Tensor:
    rows, columns = places[:, None], places[None, :]
    back = rows - columns if options.causal else (rows - columns).abs()
    visible = (back > 0) | torch.eye(rows.shape[0], dtype=torch.bool)
    if together is not None:
        visible = visible & together
    if options.max_attn_len:
        near = back <= options.max_attn_len
        if options.min_full_attn_seq_len:
            near = near | (rows >= end - options.min_full_attn_seq_len)
        visible = visible & near
    if options.contextual_seq_len:
        visible = visible | ((rows == 0) & (columns < end))
    return visible
