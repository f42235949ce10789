"""The mask and the relative bias of the dense model, for a whole sequence, each [tokens, tokens]."""

from __future__ import annotations

import torch

from relaygr.worker.model.config import ModelConfig
from relaygr.worker.model.vectors.masks import MaskOptions, attention_mask
from tests.worlds.dense.encodings import relative_time_bias
from tests.worlds.dense.inputs import Sequence


def mask_of(config: ModelConfig, sequence: Sequence) -> torch.Tensor:
    """bool [tokens, tokens]: the keys that each row sees."""
    options = MaskOptions(
        contextual_seq_len=sequence.contextual if config.contextual_mask else 0,
        max_attn_len=config.max_attn_len,
        min_full_attn_seq_len=config.min_full_attn_len,
    )
    size = len(sequence.rows)
    mask = attention_mask(size, size, sequence.candidates, options)
    for row in range(sequence.candidates):
        for key in range(row - row % config.target_group_size, row):
            mask[sequence.end + row, sequence.end + key] = True
    return mask


def bias_of(config: ModelConfig, layer: dict[str, torch.Tensor], sequence: Sequence) -> torch.Tensor | None:
    """The bias that a layer adds to alpha * q.k, or None."""
    if config.relative_bias is None:
        return None
    folded = max(0, sequence.contextual - 1) if config.contextual_mask else 0
    places = (torch.arange(len(sequence.rows)) - folded).clamp(min=0, max=sequence.end - folded)
    weights = layer["relative_bias.positions"]
    centre = config.relative_bias.positions - 1
    bias = weights[(centre + places[None, :] - places[:, None]).clamp(0, weights.numel() - 1)]
    if config.relative_bias.time_buckets:
        # After the history comes a candidate, whose time is the query's; after a candidate the query, too.
        bias = bias + relative_time_bias(layer["relative_bias.times"], sequence.times, config.relative_bias.log_base)
    return bias
