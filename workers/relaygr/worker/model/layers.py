"""The layers of a checkpoint, by family: names and shapes of their tensors, the modules built from them, and the stack.

Tensors of layer K are named `layers.K.NAME`; the names of a family are in its own module (`hstu.py`, `decoder.py`).
The stack runs embedded rows through the layers over K,V in pages. It does not handle items or tasks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch

from relaygr.worker.kv import KvDtype
from relaygr.worker.model.attention.interface import AttentionPass
from relaygr.worker.model.attention.spec import rounding
from relaygr.worker.model.config import ModelConfig
from relaygr.worker.model.decoder import DecoderLayer, decoder_shapes
from relaygr.worker.model.hstu import build_hstu_layer, hstu_shapes
from relaygr.worker.model.layer_parts import Layer
from relaygr.worker.model.options import Family

_SHAPES: dict[Family, Callable[[ModelConfig], dict[str, tuple[int, ...]]]] = {
    Family.HSTU: hstu_shapes,
    Family.SOFTMAX: decoder_shapes,
}
_BUILDERS: dict[Family, Callable[[ModelConfig, Mapping[str, torch.Tensor], torch.dtype], Layer]] = {
    Family.HSTU: build_hstu_layer,
    Family.SOFTMAX: DecoderLayer,
}


def layer_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor of all layers."""
    shapes = dict(_SHAPES[config.family](config))
    if config.relative_bias is not None:
        shapes["relative_bias.positions"] = (2 * config.relative_bias.positions - 1,)
        if config.relative_bias.time_buckets:
            shapes["relative_bias.times"] = (config.relative_bias.time_buckets + 1,)
    return {f"layers.{layer}.{name}": shape for layer in range(config.num_layers) for name, shape in shapes.items()}


def build_layers(config: ModelConfig, tensors: Mapping[str, torch.Tensor], compute_dtype: torch.dtype) -> list[Layer]:
    """The layers of a checkpoint. `checkpoint.py` has checked its tensors."""
    layers = []
    for layer in range(config.num_layers):
        prefix = f"layers.{layer}."
        own = {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}
        layers.append(_BUILDERS[config.family](config, own, compute_dtype))
    return layers


class LayerStack:
    """All layers of a model."""

    def __init__(self, layers: Sequence[Layer], kv_dtype: KvDtype) -> None:
        self._layers = tuple(layers)
        self._rounded = rounding(kv_dtype)

    def __call__(
        self, x: torch.Tensor, attention: AttentionPass, before: Sequence[Callable[[int], None]] = ()
    ) -> torch.Tensor:
        """Rows x [rows of all segments, D] after the last layer. Segments share only the matrix products.

        Each function of `before` is called with the number of a layer before that layer reads pages.
        """
        for index, layer in enumerate(self._layers):
            for call in before:
                call(index)
            x = layer(x, partial(self._attend, attention, index))
        return x

    def _attend(
        self, attention: AttentionPass, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> torch.Tensor:
        return attention.attend(layer, q, self._rounded(k), self._rounded(v))
