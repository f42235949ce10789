"""`mask_`: who sees whom, from the dense definition and, tile by tile, as attention asks for it."""

from __future__ import annotations

import numpy as np
import torch

from relaygr.worker.model.attention.segments import Segment
from relaygr.worker.model.attention.sight import Sight, Visible
from relaygr.worker.model.attention.spec import AttentionSpec
from relaygr.worker.model.masks import MaskOptions, attention_mask
from relaygr.worker.model.vectors.cases import Case, Checked, compare_exactly

MASK_OPTIONS = frozenset({"contextual_seq_len", "max_attn_len", "min_full_attn_seq_len", "causal"})
_TILE = 5


def mask_options(case: Case) -> MaskOptions:
    """The options of a case's mask."""
    return MaskOptions(
        contextual_seq_len=case.whole("contextual_seq_len", 0),
        max_attn_len=case.whole("max_attn_len", 0),
        min_full_attn_seq_len=case.whole("min_full_attn_seq_len", 0),
        causal=case.flag("causal", True),
    )


def served_mask(size: int, history: int, total: int, options: MaskOptions, group_size: int = 1) -> torch.Tensor:
    """bool [size, size] in tiles, as attention sees it: `history` rows, then candidates at place `total`."""
    spec = AttentionSpec(
        num_heads=1,
        attention_dim=1,
        hidden_dim=1,
        alpha=1.0,
        normalizer=1.0,
        contextual_tokens=options.contextual_seq_len,
        max_attn_len=options.max_attn_len,
        min_full_attn_len=options.min_full_attn_seq_len,
        target_group_size=group_size,
    )
    segment = Segment(np.empty(0, np.int32), 0, history, size - history, False, total)
    sight = Sight(spec, segment, torch.device("cpu"))
    mask = torch.zeros((size, size), dtype=torch.bool)
    for rows in _tiles(size, history):
        for keys in _tiles(size, history):
            tile = sight.tile(rows, keys)
            seen = tile if isinstance(tile, torch.Tensor) else tile is Visible.ALL
            mask[rows.start : rows.stop, keys.start : keys.stop] = seen
    return mask


def in_tiles(
    dense: torch.Tensor, history: int, num_targets: int | None, options: MaskOptions, group_size: int = 1
) -> torch.Tensor:
    """The mask `dense` [size, size] again, as attention sees it.

    Without targets, padding is neither history nor a candidate: attention never has it, and it stays as it is.
    """
    size = dense.shape[0]
    if num_targets is not None:
        return served_mask(size, history, history, options, group_size)
    mask = dense.clone()
    mask[:history, :history] = served_mask(history, history, history, options)
    return mask


def compare_masks(name: str, masks: list[torch.Tensor], expected: torch.Tensor) -> Checked:
    """Masks of all users; where all are the same, one may stand for them."""
    ours = torch.stack(masks)
    if expected.shape[0] == 1 and bool((ours == ours[:1]).all()):
        ours = ours[:1]
    return compare_exactly(name, ours, expected)


def run_mask(case: Case) -> list[Checked]:
    """The masks of all users. What lies beyond a sequence is masked like more targets."""
    case.require_known(MASK_OPTIONS | {"N", "target_aware"})
    lengths, expected = case.lengths(), case.integers("mask").bool()
    options, size = mask_options(case), case.whole("N")
    targets = case.targets(len(lengths), lengths) if case.flag("target_aware", True) else None
    counts = [None] * len(lengths) if targets is None else targets
    users = list(zip(lengths, counts, strict=True))
    dense = [attention_mask(size, length, count, options) for length, count in users]
    checked = [compare_masks("mask", dense, expected)]
    histories = [length - (count or 0) for length, count in users]
    if options.causal and all(history >= options.contextual_seq_len for history in histories):
        tiled = [
            in_tiles(mask, history, count, options)
            for mask, history, (_, count) in zip(dense, histories, users, strict=True)
        ]
        checked.append(compare_masks("mask in tiles", tiled, expected))
    return checked


def _tiles(size: int, history: int) -> list[range]:
    """Ranges that are all history or all candidates."""
    starts = [*range(0, history, _TILE), *range(history, size, _TILE)]
    return [range(start, min(start + _TILE, history if start < history else size)) for start in starts]
