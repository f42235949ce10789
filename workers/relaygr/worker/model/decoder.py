"""A decoder layer with soft-max attention, the alternative to HSTU.

    Q, K, V = split(norm(x) W + b)                   `W` is [D, H (2 dqk + dv)], head-major inside each block
    x = x + attention(Q, K, V) Wo [+ bo]             soft-max over prefix, suffix and the row itself
    y = x + (SiLU(norm(x) W1 + b1)) W2 + b2          W1 [D, mlp_dim], W2 [mlp_dim, D]

The pre-norm decoder of "Attention Is All You Need" (arXiv 1706.03762) and its successors. As in HSTU, the K,V of a row
depend only on rows up to itself, so the rules of cached prefixes are the same. All keys of a soft-max are known when
the row is computed.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F  # noqa: N812 - its usual name

from relaygr.worker.model.config import ModelConfig
from relaygr.worker.model.fused import input_norm
from relaygr.worker.model.layer_parts import Attend, RowFunction, added_product


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
    """One layer. The caller passes the attention."""

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
        self._projection = projection.to(compute_dtype)
        self._projection_bias = (projection.new_zeros(projection.shape[1]) if bias is None else bias).to(compute_dtype)
        self._output = added_product(weights["output.weight"], compute_dtype, weights.get("output.bias"))
        self._wide = wide.to(compute_dtype)
        self._wide_bias = weights["mlp.0.bias"].to(compute_dtype)
        self._narrow = added_product(weights["mlp.1.weight"], compute_dtype, weights["mlp.1.bias"])

    def __call__(self, x: torch.Tensor, attend: Attend) -> torch.Tensor:
        """x [rows, D] -> y [rows, D], both float32."""
        z = torch.addmm(self._projection_bias, self._input_norm(x), self._projection)
        q, k, v = (self._by_head(block) for block in torch.split(z, self._split, dim=1))
        x = self._output(x, attend(q, k, v))
        hidden = torch.addmm(self._wide_bias, self._mlp_norm(x), self._wide)
        return self._narrow(x, F.silu(hidden, inplace=True))

    def _by_head(self, block: torch.Tensor) -> torch.Tensor:
        rows, columns = block.shape
        return block.view(rows, self._heads, columns // self._heads)
