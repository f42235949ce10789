"""The layers of a checkpoint, by family: their tensors' names and shapes, and the modules built from them.

Tensors of layer K are named `layers.K.NAME`; the names of a family are in its own module (`hstu.py`, `decoder.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from relaygr.worker.model.config import ModelConfig
from relaygr.worker.model.decoder import DecoderLayer, decoder_shapes
from relaygr.worker.model.hstu import build_hstu_layer, hstu_shapes
from relaygr.worker.model.options import Family
from relaygr.worker.model.stack import Layer

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
    """The layers of a checkpoint whose tensors were checked (`checkpoint.py`)."""
    layers = []
    for layer in range(config.num_layers):
        prefix = f"layers.{layer}."
        own = {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}
        layers.append(_BUILDERS[config.family](config, own, compute_dtype))
    return layers
