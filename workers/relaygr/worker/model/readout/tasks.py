"""The task MLP: rows to one score a task, through sigmoid where the task is binary."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F  # noqa: N812 - its usual name

from relaygr.worker.model.config import ModelConfig
from relaygr.worker.model.mlp import Rows, chain, linear, swish_norm
from relaygr.worker.model.options import ReadoutActivation, TaskKind

_PLAIN: dict[ReadoutActivation, Rows] = {
    ReadoutActivation.SILU: F.silu,
    ReadoutActivation.RELU: F.relu,
    ReadoutActivation.GELU: F.gelu,
}


class TaskHead:
    """Rows [n, D] -> scores float32 [n, tasks]."""

    def __init__(self, config: ModelConfig, tensors: Mapping[str, torch.Tensor]) -> None:
        parts: list[Rows] = []
        for index in range(len(config.readout_hidden)):
            parts.append(linear(tensors, f"readout.mlp.{index}"))
            if config.readout_activation is ReadoutActivation.SWISH_NORM:
                eps = config.swish_eps(config.readout_mlp_eps)
                parts.append(swish_norm(tensors, f"readout.mlp.{index}.norm", eps))
            else:
                parts.append(_PLAIN[config.readout_activation])
        last = f"readout.mlp.{len(config.readout_hidden)}"
        self._mlp = chain([*parts, linear(tensors, last)])
        self._binary = torch.tensor([task.kind is TaskKind.BINARY for task in config.tasks])
        self._binary = self._binary.to(tensors[f"{last}.weight"].device)

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        logits = self._mlp(rows)
        return torch.where(self._binary, torch.sigmoid(logits), logits)
