"""The layers of a checkpoint, by family: names and shapes of their tensors, the modules built from them, and the stack.

Tensors of layer K are named `layers.K.NAME`; the names of HSTU are in `hstu.py`, those of the soft-max decoder here.
The stack runs embedded rows through the layers over K,V in pages. It does not handle items or tasks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch
import torch.nn.functional as F  # noqa: N812 - its usual name

from relaygr.worker.kv import KvDtype
from relaygr.worker.model.attention.interface import AttentionPass
from relaygr.worker.model.config import ModelConfig
from relaygr.worker.model.fused import input_norm, kv_rounding
from relaygr.worker.model.hstu import build_hstu_layer, hstu_shapes
from relaygr.worker.model.layer_parts import Attend, Layer, RowFunction, added_product, product
from relaygr.worker.model.options import Family


def decoder_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Name (without the prefix of the layer) and shape of each tensor of a layer."""
    d, hidden = config.embedding_dim, config.mlp_dim or 0
    keys, values = config.num_heads * config.attention_dim, config.num_heads * config.hidden_dim
    shapes: dict[str, tuple[int, ...]] = {
        "projection.weight": (d, 2 * keys + values),
        "output.weight": (values, d),
        "mlp.0.weight": (d, hidden),
        "mlp.0.bias": (hidden,),
        "mlp.1.weight": (hidden, d),
        "mlp.1.bias": (d,),
    }
    if config.projection_bias:
        shapes["projection.bias"] = (2 * keys + values,)
    if config.output_bias:
        shapes["output.bias"] = (d,)
    if config.norm_affine:
        for norm in ("input_norm", "mlp_norm"):
            shapes |= {f"{norm}.weight": (d,), f"{norm}.bias": (d,)}
    return shapes


class DecoderLayer:
    """A layer with soft-max attention, the alternative to HSTU. The caller passes the attention.

        Q, K, V = split(norm(x) W + b)                   `W` is [D, H (2 dqk + dv)], head-major inside each block
        x = x + attention(Q, K, V) Wo [+ bo]             soft-max over prefix, suffix and the row itself
        y = x + (SiLU(norm(x) W1 + b1)) W2 + b2          W1 [D, mlp_dim], W2 [mlp_dim, D]

    The pre-norm decoder of "Attention Is All You Need" (arXiv 1706.03762) and its successors. As in HSTU, the K,V of a
    row depend only on rows up to itself, so the rules of cached prefixes are the same. All keys of a soft-max are known
    when the row is computed.
    """

    def __init__(self, config: ModelConfig, weights: Mapping[str, torch.Tensor], compute_dtype: torch.dtype) -> None:
        """weights: float32, by the names of `decoder_shapes`."""
        self._heads = config.num_heads
        keys, values = config.num_heads * config.attention_dim, config.num_heads * config.hidden_dim
        self._split = [keys, keys, values]
        projection, bias, wide = weights["projection.weight"], weights.get("projection.bias"), weights["mlp.0.weight"]

        def norm_before(matrix: torch.Tensor, name: str) -> RowFunction:
            own = weights.get(f"{name}.weight"), weights.get(f"{name}.bias")
            return input_norm(*own, matrix, config.norm_eps, compute_dtype)

        self._input_norm, self._mlp_norm = norm_before(projection, "input_norm"), norm_before(wide, "mlp_norm")
        bias = projection.new_zeros(projection.shape[1]) if bias is None else bias
        self._projection = product(projection, bias, compute_dtype)
        self._output = added_product(weights["output.weight"], compute_dtype, weights.get("output.bias"))
        self._wide = product(wide, weights["mlp.0.bias"], compute_dtype)
        self._narrow = added_product(weights["mlp.1.weight"], compute_dtype, weights["mlp.1.bias"])

    def __call__(self, x: torch.Tensor, attend: Attend) -> torch.Tensor:
        """x [rows, D] -> y [rows, D], both float32."""
        z = self._projection(self._input_norm(x))
        q, k, v = (self._by_head(block) for block in torch.split(z, self._split, dim=1))
        x = self._output(x, attend(q, k, v))
        return self._narrow(x, F.silu(self._wide(self._mlp_norm(x)), inplace=True))

    def _by_head(self, block: torch.Tensor) -> torch.Tensor:
        rows, columns = block.shape
        return block.view(rows, self._heads, columns // self._heads)


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

    def __init__(self, layers: Sequence[Layer], kv_dtype: KvDtype, device: torch.device | None = None) -> None:
        """`device` None: the CPU."""
        self._layers = tuple(layers)
        self._rounded = kv_rounding(kv_dtype, device or torch.device("cpu"))

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
