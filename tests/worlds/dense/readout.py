"""The read-out of the dense model."""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812 - its usual name

from relaygr.worker.model.config import ModelConfig
from relaygr.worker.model.options import ReadoutActivation, ReadoutForm, ReadoutNorm, TaskKind
from tests.worlds.dense.inputs import Sequence, Tensors, item_vectors, swish_mlp
from tests.worlds.dense.small import layer_norm

_PI = 3.14
"""The value in Meta's DLRM-v3."""


def read_out(config: ModelConfig, tensors: Tensors, x: torch.Tensor, sequence: Sequence) -> torch.Tensor:
    """The candidates' last rows [candidates, D] -> scores [candidates, tasks]."""
    if config.readout_periods:
        x = _with_circles(config, tensors, x, sequence)
    logits = task_logits(config, tensors, x, sequence.items)
    binary = torch.tensor([task.kind is TaskKind.BINARY for task in config.tasks])
    return torch.where(binary, torch.sigmoid(logits), logits)


def task_logits(config: ModelConfig, tensors: Tensors, x: torch.Tensor, items: torch.Tensor) -> torch.Tensor:
    """Rows [..., candidates, D], rows of the item table [..., candidates] -> logits [..., candidates, tasks]."""
    if config.readout_norm is ReadoutNorm.LAYER:
        eps = config.readout_norm_eps or config.norm_eps
        x = layer_norm(x, tensors["readout.norm.weight"], tensors["readout.norm.bias"], eps)
    else:
        x = F.normalize(x, dim=-1)
    if config.readout is ReadoutForm.ITEM_PRODUCT:
        vectors = item_vectors(config, tensors, items)
        if config.dlrm_inputs is None:
            x = x * F.normalize(vectors, dim=-1)
        else:
            x = x * swish_mlp(config, tensors, "readout.item", vectors, config.readout_mlp_eps)
    last = len(config.readout_hidden)
    for index in range(last + 1):
        x = x @ tensors[f"readout.mlp.{index}.weight"] + tensors[f"readout.mlp.{index}.bias"]
        x = _activated(config, tensors, index, x) if index < last else x
    return x


def _activated(config: ModelConfig, tensors: Tensors, index: int, x: torch.Tensor) -> torch.Tensor:
    if config.readout_hidden_norm:
        name = f"readout.mlp.{index}.norm"
        x = layer_norm(x, tensors[f"{name}.weight"], tensors[f"{name}.bias"], config.readout_mlp_eps)
    match config.readout_activation:
        case ReadoutActivation.SILU:
            return F.silu(x)
        case ReadoutActivation.RELU:
            return x.clamp(min=0)
        case ReadoutActivation.GELU:
            return x * 0.5 * (1 + torch.erf(x / 2**0.5))
        case ReadoutActivation.SWISH_NORM:
            name = f"readout.mlp.{index}.norm"
            normal = layer_norm(
                x, tensors[f"{name}.weight"], tensors[f"{name}.bias"], config.swish_norm_eps or config.readout_mlp_eps
            )
            return x * torch.sigmoid(normal)


def _with_circles(config: ModelConfig, tensors: Tensors, x: torch.Tensor, sequence: Sequence) -> torch.Tensor:
    times = sequence.times[sequence.end :].float()
    columns = [x]
    for period in config.readout_periods:
        elapsed = torch.div(times, period.unit_seconds, rounding_mode="floor")
        angle = torch.remainder(elapsed, period.units) / period.units * 2 * _PI
        columns += [angle.cos()[:, None].to(x.dtype), angle.sin()[:, None].to(x.dtype)]
    return torch.cat(columns, dim=1) @ tensors["readout.periods.weight"] + tensors["readout.periods.bias"]
