"""From a candidate's last row to one score a task: norm, MLP with SiLU between its layers, sigmoid where binary."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
import torch.nn.functional as F  # noqa: N812 - its usual name

from workers.model.config import ModelConfig, ReadoutNorm, TaskKind
from workers.model.hstu import LayerNorm

_L2_EPS = 1e-6


def l2_norm(x: torch.Tensor) -> torch.Tensor:
    """Rows divided by their length."""
    length: torch.Tensor = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    return x / length.clamp_min(_L2_EPS)


class Readout:
    """Rows [candidates, D] -> scores float32 [candidates, tasks]."""

    def __init__(self, config: ModelConfig, tensors: Mapping[str, torch.Tensor]) -> None:
        self._norm: Callable[[torch.Tensor], torch.Tensor] = l2_norm
        if config.readout_norm is ReadoutNorm.LAYER:
            self._norm = LayerNorm(
                tensors["readout.norm.weight"], tensors["readout.norm.bias"], config.embedding_dim, config.norm_eps
            )
        self._mlp = [
            (tensors[f"readout.mlp.{index}.weight"], tensors[f"readout.mlp.{index}.bias"])
            for index in range(len(config.readout_hidden) + 1)
        ]
        self._binary = torch.tensor([task.kind is TaskKind.BINARY for task in config.tasks])
        self._binary = self._binary.to(self._mlp[0][0].device)

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        x = self._norm(rows)
        for weight, bias in self._mlp[:-1]:
            x = F.silu(torch.addmm(bias, x, weight), inplace=True)
        weight, bias = self._mlp[-1]
        logits = torch.addmm(bias, x, weight)
        return torch.where(self._binary, torch.sigmoid(logits), logits)
