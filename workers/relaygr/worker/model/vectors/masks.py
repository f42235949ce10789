"""`mask_` and `pos_`: attention masks as bool matrices, positions from the end and time buckets.

A sequence is `[contextual | history | targets]`. Row i sees column j where

    row \\ column | contextual | history       | target
    contextual    | all        | all history   | none      (with a contextual mask; else ordinary causal rows)
    history i     | all        | j <= i        | none
    target t      | all        | all           | itself only (NVIDIA: earlier ones of its group, and itself)

`max_attn_len` m narrows this to keys at most m places back, the diagonal always kept. `min_full_attn_seq_len` k
exempts targets and the history rows within k places of its end. With a contextual mask all contextual tokens have
place 0, and the history starts at 1. Sources: Meta's generative-recommenders (`attention_mask`) and NVIDIA's
recsys-examples (`grouped_mask`), which give targets different places.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from relaygr.worker.model.attention.mask import AttentionMask, Visible
from relaygr.worker.model.attention.segments import Segment
from relaygr.worker.model.attention.spec import AttentionSpec
from relaygr.worker.model.inputs.encodings import FromEnd, age_rows
from relaygr.worker.model.options import TimeEncoding
from relaygr.worker.model.vectors.cases import (
    Checked,
    NotUnderstoodError,
    VectorCase,
    compare,
    compare_exactly,
    require_rows,
    slices,
)


@dataclass(frozen=True, slots=True)
class MaskOptions:
    """The options of a mask. Zero switches an option off."""

    contextual_seq_len: int = 0
    max_attn_len: int = 0
    min_full_attn_seq_len: int = 0
    causal: bool = True
    """False: history rows see later rows, too."""


def attention_mask(size: int, length: int, num_targets: int | None, options: MaskOptions) -> torch.Tensor:
    """bool [size, size] for one sequence of `length` tokens; padding is masked like more targets.

    num_targets: the number of its last tokens that are targets, which all have the place after the history; None: the
    model is not target-aware, and all tokens are history.
    """
    places, end = _places(size, length, options.contextual_seq_len)
    if num_targets is not None:
        end -= num_targets
        places = places.clamp(max=end)
    return _visible(places, end, options)


def grouped_mask(
    size: int, length: int, num_targets: int | None, group_size: int, options: MaskOptions
) -> torch.Tensor:
    """bool [size, size] with targets in groups of `group_size`. Each target has its own place.

    A target sees all other tokens that are not targets, and the targets of its group up to itself.
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


MASK_OPTIONS = frozenset({"contextual_seq_len", "max_attn_len", "min_full_attn_seq_len", "causal"})
_TILE = 5


def mask_options(case: VectorCase) -> MaskOptions:
    """The mask options of a case."""
    return MaskOptions(
        contextual_seq_len=case.whole("contextual_seq_len", 0),
        max_attn_len=case.whole("max_attn_len", 0),
        min_full_attn_seq_len=case.whole("min_full_attn_seq_len", 0),
        causal=case.flag("causal", True),
    )


def served_mask(size: int, history: int, total: int, options: MaskOptions, group_size: int = 1) -> torch.Tensor:
    """bool [size, size], assembled from the tiles of attention: `history` rows, then candidates at place `total`."""
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
    tiled_mask = AttentionMask(spec, segment, torch.device("cpu"))
    mask = torch.zeros((size, size), dtype=torch.bool)
    for rows in _tiles(size, history):
        for keys in _tiles(size, history):
            tile = tiled_mask.tile(rows, keys)
            seen = tile if isinstance(tile, torch.Tensor) else tile is Visible.ALL
            mask[rows.start : rows.stop, keys.start : keys.stop] = seen
    return mask


def in_tiles(
    dense: torch.Tensor, history: int, num_targets: int | None, options: MaskOptions, group_size: int = 1
) -> torch.Tensor:
    """The mask `dense` [size, size], assembled from the tiles of attention.

    Without targets, padding is neither history nor a candidate. Attention has no padding, so its part is copied.
    """
    size = dense.shape[0]
    if num_targets is not None:
        return served_mask(size, history, history, options, group_size)
    mask = dense.clone()
    mask[:history, :history] = served_mask(history, history, history, options)
    return mask


def compare_masks(name: str, masks: list[torch.Tensor], expected: torch.Tensor) -> Checked:
    """Compares the masks of all users. If all are the same, one expected mask is enough."""
    ours = torch.stack(masks)
    if expected.shape[0] == 1 and bool((ours == ours[:1]).all()):
        ours = ours[:1]
    return compare_exactly(name, ours, expected)


def run_mask(case: VectorCase) -> list[Checked]:
    """Checks the masks of all users. Padding is masked like more targets."""
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
    """Ranges that hold only history or only candidates."""
    starts = [*range(0, history, _TILE), *range(history, size, _TILE)]
    return [range(start, min(start + _TILE, history if start < history else size)) for start in starts]


_KNOWN = frozenset({"N", "contextual", "fn", "seconds_per_unit"})
_FUNCTIONS = {"sqrt": TimeEncoding.SQRT, "log": TimeEncoding.LOG}


def run_pos(case: VectorCase) -> list[Checked]:
    """Checks rows of the position table, and embeddings with positions and times added."""
    case.require_known(_KNOWN)
    lengths = case.lengths()
    targets = case.targets(len(lengths), lengths)
    emb, pos, times = case.floats("emb"), case.floats("pos"), case.floats("ts_w")
    stamps = case.integers("timestamps").numpy()
    require_rows("emb", emb.shape[0], lengths)
    require_rows("timestamps", stamps.shape[0], lengths)
    encoding = _FUNCTIONS.get(str(case.option("fn", "sqrt")))
    if encoding is None:
        raise NotUnderstoodError(f"option fn={case.option('fn')!r} is not known")
    contextual, size = case.whole("contextual", 0), case.whole("N")
    seconds = case.number("seconds_per_unit", 60.0)
    places = FromEnd(pos.shape[0], contextual)
    indices, out = [], []
    for user, own in enumerate(slices(lengths)):
        length = own.stop - own.start
        history = length if targets is None else length - targets[user]
        index = _padded(places, history, size, contextual)
        indices.append(index)
        own_stamps = stamps[own]
        query = int(own_stamps[-1]) if length else 0
        ages = age_rows(own_stamps, query, encoding, seconds, times.shape[0])
        added = pos[torch.from_numpy(index[:length])] + times[torch.from_numpy(ages)]
        out.append(emb[own] + added)
    checked = [compare("out", torch.cat(out), case.floats("out"))]
    if case.has("pos_index"):
        ours, expected = torch.from_numpy(np.stack(indices)), case.integers("pos_index")
        if targets is None and ours.shape == expected.shape:
            # Without targets, padding comes after the end and has no place.
            padding = torch.arange(size)[None, :] >= torch.tensor(lengths)[:, None]
            ours, expected = ours.masked_fill(padding, 0), expected.masked_fill(padding, 0)
        checked.append(compare_exactly("pos_index", ours, expected))
    return checked


def _padded(places: FromEnd, history: int, size: int, contextual: int) -> NDArray[np.int64]:
    """int64 [size]: the places of a sequence. All tokens after its history have the place of targets."""
    index = np.concatenate((places.of_prefix(history), places.of_scored(history, 0, size - history)))
    # Contextual tokens count from the start, even if a sequence is too short to have all of them.
    index[:contextual] = np.arange(min(contextual, size))
    return index
