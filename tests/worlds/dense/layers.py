"""Layers of the dense model, for any leading dimensions. Formulas: `relaygr.worker.model.hstu`, `.layers`.

The rows of a sequence are the last dimension but one.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F  # noqa: N812 - its usual name

from relaygr.worker.model.config import ModelConfig
from relaygr.worker.model.options import Activated, Family, OutputForm
from tests.worlds.dense.small import layer_norm

Tensors = dict[str, torch.Tensor]
Product = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""rows @ weight"""
Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""q, k [..., rows, H * dqk], v [..., rows, H * dv] -> [..., rows, H, dv]"""


class DenseAttention:
    """The attention of one layer by a mask over all rows. Keeps the stored K and V [..., rows, H * dim]."""

    def __init__(
        self,
        config: ModelConfig,
        mask: torch.Tensor,
        bias: torch.Tensor | None,
        round_kv: Callable[[torch.Tensor], torch.Tensor],
    ) -> None:
        """mask bool, bias [rows, rows]."""
        self._config, self._mask, self._bias, self._round = config, mask, bias, round_kv
        self.keys = self.values = mask

    def __call__(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        self.keys, self.values = self._round(k), self._round(v)
        heads = self._config.num_heads
        scores = self._config.alpha * (by_head(q, heads) @ by_head(self.keys, heads).transpose(-1, -2))
        if self._bias is not None:
            scores = scores + self._bias
        return (self._weigh(scores) @ by_head(self.values, heads)).transpose(-3, -2)

    def _weigh(self, scores: torch.Tensor) -> torch.Tensor:
        """SiLU / N without a row sum, or soft-max."""
        if self._config.family is Family.SOFTMAX:
            return torch.softmax(scores.masked_fill(~self._mask, float("-inf")), dim=-1)
        assert self._config.normalizer is not None
        return F.silu(scores) / self._config.normalizer * self._mask


def by_head(x: torch.Tensor, heads: int) -> torch.Tensor:
    """[..., rows, H * dim] -> [..., H, rows, dim]"""
    return x.reshape(*x.shape[:-1], heads, -1).transpose(-3, -2)


def hstu_layer(
    config: ModelConfig, tensors: Tensors, x: torch.Tensor, attend: Attend, product: Product
) -> torch.Tensor:
    """One HSTU layer."""
    eps = config.norm_eps
    normal = layer_norm(x, tensors.get("input_norm.weight"), tensors.get("input_norm.bias"), eps)
    z = product(normal, tensors["projection.weight"])
    if config.projection_bias:
        z = z + tensors["projection.bias"]
    width, key_width = config.num_heads * config.hidden_dim, config.num_heads * config.attention_dim
    u, v, q, k = torch.split(z, [width, width, key_width, key_width], dim=-1)
    u = F.silu(u)
    if config.activated is Activated.UVQK:
        v, q, k = F.silu(v), F.silu(q), F.silu(k)
    of_heads = attend(q, k, v)
    a = of_heads.flatten(-2)
    weight, bias = tensors.get("output_norm.weight"), tensors.get("output_norm.bias")
    if config.group_norm and weight is not None and bias is not None:
        normal = (layer_norm(of_heads, None, None, eps) * weight[:, None] + bias[:, None]).flatten(-2)
    else:
        normal = layer_norm(a, weight, bias, eps)
    read = {
        OutputForm.U_A_UNORM: (u, a, u * normal),
        OutputForm.U_NA_UNORM: (u, normal, u * normal),
        OutputForm.UNORM: (u * normal,),
    }[config.output_form]
    y = x + product(torch.cat(read, dim=-1), tensors["output.weight"])
    return y + tensors["output.bias"] if config.output_bias else y


def decoder_layer(
    config: ModelConfig, tensors: Tensors, x: torch.Tensor, attend: Attend, product: Product
) -> torch.Tensor:
    """One soft-max layer."""
    eps, key_width = config.norm_eps, config.num_heads * config.attention_dim
    normal = layer_norm(x, tensors.get("input_norm.weight"), tensors.get("input_norm.bias"), eps)
    z = product(normal, tensors["projection.weight"])
    if config.projection_bias:
        z = z + tensors["projection.bias"]
    q, k, v = torch.split(z, [key_width, key_width, config.num_heads * config.hidden_dim], dim=-1)
    x = x + product(attend(q, k, v).flatten(-2), tensors["output.weight"])
    if config.output_bias:
        x = x + tensors["output.bias"]
    normal = layer_norm(x, tensors.get("mlp_norm.weight"), tensors.get("mlp_norm.bias"), eps)
    hidden = F.silu(product(normal, tensors["mlp.0.weight"]) + tensors["mlp.0.bias"])
    return x + product(hidden, tensors["mlp.1.weight"]) + tensors["mlp.1.bias"]


def layer_tensors(tensors: Tensors, index: int) -> Tensors:
    """The tensors of one layer, by their names without its prefix."""
    prefix = f"layers.{index}."
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}
