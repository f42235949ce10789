"""Dense modules of inputs and read-out: linear, norms, and MLPs of a few layers.

    swish-norm(x) = x * sigmoid(LayerNorm(x))

Weights are [in, out]; rows are [rows, width].
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
import torch.nn.functional as F  # noqa: N812 - its usual name

Rows = Callable[[torch.Tensor], torch.Tensor]

_L2_EPS = 1e-6


def linear(tensors: Mapping[str, torch.Tensor], name: str) -> Rows:
    """x weight + bias, with the tensors NAME.weight and NAME.bias."""
    weight, bias = tensors[f"{name}.weight"], tensors[f"{name}.bias"]
    return lambda x: torch.addmm(bias, x, weight)


def layer_norm(tensors: Mapping[str, torch.Tensor], name: str, eps: float) -> Rows:
    """LayerNorm with the tensors NAME.weight and NAME.bias."""
    weight, bias = tensors[f"{name}.weight"], tensors[f"{name}.bias"]
    return lambda x: F.layer_norm(x, weight.shape, weight, bias, eps)


def l2_norm(x: torch.Tensor) -> torch.Tensor:
    """Rows divided by their length."""
    length: torch.Tensor = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    return x / length.clamp_min(_L2_EPS)


def swish_norm(tensors: Mapping[str, torch.Tensor], name: str, eps: float) -> Rows:
    """Swish-norm with the norm's tensors NAME.weight and NAME.bias."""
    norm = layer_norm(tensors, name, eps)
    return lambda x: x * torch.sigmoid(norm(x))


def chain(parts: Sequence[Rows]) -> Rows:
    """The functions applied in order."""

    def apply(x: torch.Tensor) -> torch.Tensor:
        for part in parts:
            x = part(x)
        return x

    return apply


def swish_norm_mlp(tensors: Mapping[str, torch.Tensor], name: str, eps: float, swish_eps: float) -> Rows:
    """Linear, swish-norm, linear, LayerNorm: tensors NAME.{0, inner_norm, 1, outer_norm}. eps: of the LayerNorm."""
    return chain(
        (
            linear(tensors, f"{name}.0"),
            swish_norm(tensors, f"{name}.inner_norm", swish_eps),
            linear(tensors, f"{name}.1"),
            layer_norm(tensors, f"{name}.outer_norm", eps),
        )
    )


def swish_norm_mlp_shapes(name: str, rows: int, hidden: int, columns: int) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the tensors of `swish_norm_mlp`."""
    return {
        f"{name}.0.weight": (rows, hidden),
        f"{name}.0.bias": (hidden,),
        f"{name}.inner_norm.weight": (hidden,),
        f"{name}.inner_norm.bias": (hidden,),
        f"{name}.1.weight": (hidden, columns),
        f"{name}.1.bias": (columns,),
        f"{name}.outer_norm.weight": (columns,),
        f"{name}.outer_norm.bias": (columns,),
    }
