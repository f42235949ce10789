"""The dense model: the whole model on a checkpoint's tensors in plain torch.

It shares with the engine only the configuration and the names of tensors. It has no pages, chunks or tiles. A prefix,
a suffix and candidates go through all layers together. Tests compare the engine, and the trainer, with
`full_inference` in float64. Its masks are those of `relaygr.worker.model.vectors.masks`, which
`relaygr vectors` checks and the engine does not use.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from relaygr.schemas.messages import Behaviours
from relaygr.worker.model.checkpoint import Checkpoint
from relaygr.worker.model.options import Family
from tests.worlds.dense.inputs import embed, sequence_of
from tests.worlds.dense.layers import DenseAttention, Product, decoder_layer, hstu_layer, layer_tensors
from tests.worlds.dense.mask import bias_of, mask_of
from tests.worlds.dense.readout import read_out

__all__ = ["DenseOutputs", "full_inference"]


@dataclass(frozen=True, slots=True)
class DenseOutputs:
    """scores [candidates, tasks]; keys, values: one tensor [tokens, H * dim] for each layer, prefix first."""

    scores: torch.Tensor
    keys: list[torch.Tensor]
    values: list[torch.Tensor]


def full_inference(
    checkpoint: Checkpoint,
    features: NDArray[np.int64],
    history: Behaviours,
    candidates: NDArray[np.int64],
    query_time_ms: int = 0,
    dtype: torch.dtype = torch.float64,
    round_kv: Callable[[torch.Tensor], torch.Tensor] = lambda x: x,
    product: Product = torch.matmul,
) -> DenseOutputs:
    """Scores of the candidates after the history (prefix and suffix together), computed in `dtype`.

    `round_kv` is the rounding of K and V by storing, `product` that of rows and the layers' weights.
    """
    config = checkpoint.config
    tensors = {name: t.to(dtype) if t.is_floating_point() else t for name, t in checkpoint.tensors.items()}
    sequence = sequence_of(config, tensors, features, history, candidates, query_time_ms)
    x = embed(config, tensors, sequence)
    mask = mask_of(config, sequence)
    layer = decoder_layer if config.family is Family.SOFTMAX else hstu_layer
    keys, values = [], []
    for index in range(config.num_layers):
        own = layer_tensors(tensors, index)
        attention = DenseAttention(config, mask, bias_of(config, own, sequence), round_kv)
        x = layer(config, own, x, attention, product)
        keys.append(attention.keys)
        values.append(attention.values)
    return DenseOutputs(read_out(config, tensors, x[x.shape[0] - candidates.size :], sequence), keys, values)
