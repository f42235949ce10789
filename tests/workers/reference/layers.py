"""Layers of the reference model. Formulas: `relaygr.worker.model.hstu`, `relaygr.worker.model.layers`."""

from __future__ import annotations

from collections.abc import Callable

import torch

from relaygr.worker.model.config import ModelConfig
from relaygr.worker.model.options import Activated, OutputForm
from tests.workers.reference.small import layer_norm, silu

Tensors = dict[str, torch.Tensor]
Product = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""rows @ weight"""


class ReferenceAttention:
    """The attention of one layer, head after head. Keeps the stored K and V [tokens, H * dim]."""

    def __init__(
        self,
        config: ModelConfig,
        mask: torch.Tensor,
        bias: torch.Tensor | None,
        round_kv: Callable[[torch.Tensor], torch.Tensor],
    ) -> None:
        self._config, self._mask, self._bias, self._round = config, mask, bias, round_kv
        self.keys = self.values = mask

    def heads(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, weigh: Callable[[torch.Tensor], torch.Tensor]
    ) -> list[torch.Tensor]:
        """The result of each head [tokens, dv]. `weigh` turns scores into weights."""
        config = self._config
        self.keys, self.values = self._round(k), self._round(v)
        parts = []
        for head in range(config.num_heads):
            own = slice(head * config.attention_dim, (head + 1) * config.attention_dim)
            scores = config.alpha * (q[:, own] @ self.keys[:, own].T)
            if self._bias is not None:
                scores = scores + self._bias
            values = self.values[:, head * config.hidden_dim : (head + 1) * config.hidden_dim]
            parts.append(weigh(scores) @ values)
        return parts

    def silu(self, scores: torch.Tensor) -> torch.Tensor:
        """SiLU / N, without a row sum."""
        assert self._config.normalizer is not None
        return silu(scores) / self._config.normalizer * self._mask

    def softmax(self, scores: torch.Tensor) -> torch.Tensor:
        return torch.softmax(scores.masked_fill(~self._mask, float("-inf")), dim=-1)


def hstu_layer(
    config: ModelConfig, tensors: Tensors, x: torch.Tensor, attention: ReferenceAttention, product: Product
) -> torch.Tensor:
    """One HSTU layer."""
    eps = config.norm_eps
    normal = layer_norm(x, tensors.get("input_norm.weight"), tensors.get("input_norm.bias"), eps)
    z = product(normal, tensors["projection.weight"])
    if config.projection_bias:
        z = z + tensors["projection.bias"]
    width, key_width = config.num_heads * config.hidden_dim, config.num_heads * config.attention_dim
    u, v, q, k = z[:, :width], z[:, width : 2 * width], z[:, 2 * width : 2 * width + key_width], z[:, -key_width:]
    u = silu(u)
    if config.activated is Activated.UVQK:
        v, q, k = silu(v), silu(q), silu(k)
    parts = attention.heads(q, k, v, attention.silu)
    a = torch.cat(parts, dim=1)
    weight, bias = tensors.get("output_norm.weight"), tensors.get("output_norm.bias")
    if config.group_norm and weight is not None and bias is not None:
        normal = torch.cat([layer_norm(part, None, None, eps) * weight[h] + bias[h] for h, part in enumerate(parts)], 1)
    else:
        normal = layer_norm(a, weight, bias, eps)
    read = {
        OutputForm.U_A_UNORM: (u, a, u * normal),
        OutputForm.U_NA_UNORM: (u, normal, u * normal),
        OutputForm.UNORM: (u * normal,),
    }[config.output_form]
    y = x + product(torch.cat(read, dim=1), tensors["output.weight"])
    return y + tensors["output.bias"] if config.output_bias else y


def decoder_layer(
    config: ModelConfig, tensors: Tensors, x: torch.Tensor, attention: ReferenceAttention, product: Product
) -> torch.Tensor:
    """One soft-max layer."""
    eps, key_width = config.norm_eps, config.num_heads * config.attention_dim
    normal = layer_norm(x, tensors.get("input_norm.weight"), tensors.get("input_norm.bias"), eps)
    z = product(normal, tensors["projection.weight"])
    if config.projection_bias:
        z = z + tensors["projection.bias"]
    q, k, v = z[:, :key_width], z[:, key_width : 2 * key_width], z[:, 2 * key_width :]
    x = x + product(torch.cat(attention.heads(q, k, v, attention.softmax), dim=1), tensors["output.weight"])
    if config.output_bias:
        x = x + tensors["output.bias"]
    normal = layer_norm(x, tensors.get("mlp_norm.weight"), tensors.get("mlp_norm.bias"), eps)
    hidden = silu(product(normal, tensors["mlp.0.weight"]) + tensors["mlp.0.bias"])
    return x + product(hidden, tensors["mlp.1.weight"]) + tensors["mlp.1.bias"]
