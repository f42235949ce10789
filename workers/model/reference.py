"""The whole model in one piece, as slow and plain as it can be: the oracle of tests, never the way to serve.

It shares no code with the engine but the names of the tensors: no pages, no chunks, no blocks, one dense mask, any
float type. A prefix, a suffix and candidates go through all layers together; candidates see everything before
them and themselves. Formulas: `hstu.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812 - its usual name
from numpy.typing import NDArray

from schemas.messages import Behaviours
from workers.model.checkpoint import Checkpoint
from workers.model.config import Activated, ModelConfig, OutputForm, ReadoutNorm, TaskKind
from workers.model.inputs.vocabulary import IDS_TENSOR


@dataclass(frozen=True, slots=True)
class ReferenceOutputs:
    """scores [candidates, tasks]; keys, values: of each layer [tokens, H * dim], prefix first."""

    scores: torch.Tensor
    keys: list[torch.Tensor]
    values: list[torch.Tensor]


def full_inference(
    checkpoint: Checkpoint,
    features: NDArray[np.int64],
    history: Behaviours,
    candidates: NDArray[np.int64],
    dtype: torch.dtype = torch.float64,
    round_kv: Callable[[torch.Tensor], torch.Tensor] = lambda x: x,
) -> ReferenceOutputs:
    """Scores of the candidates after the history (prefix and suffix together), computed in `dtype`.

    `round_kv` stands for what storage does to K and V.
    """
    config = checkpoint.config
    tensors = {name: t if name == IDS_TENSOR else t.to(dtype) for name, t in checkpoint.tensors.items()}
    x = _embed(config, tensors, features, history, candidates)
    count = x.shape[0]
    place = torch.arange(count)
    seen = place < count - candidates.size
    mask = (place[:, None] == place[None, :]) | ((place[:, None] > place[None, :]) & seen[None, :])

    keys, values = [], []
    for index in range(config.num_layers):
        x, k, v = _layer(config, tensors, f"layers.{index}", x, mask, round_kv)
        keys.append(k)
        values.append(v)
    return ReferenceOutputs(_readout(config, tensors, x[count - candidates.size :]), keys, values)


def _embed(
    config: ModelConfig,
    tensors: dict[str, torch.Tensor],
    features: NDArray[np.int64],
    history: Behaviours,
    candidates: NDArray[np.int64],
) -> torch.Tensor:
    known = tensors[IDS_TENSOR].tolist() if IDS_TENSOR in tensors else range(config.vocabulary_size)
    row_of = {item: row for row, item in enumerate(known)}
    rows = []
    for index, feature in enumerate(config.contextual_features):
        value = int(features[index]) if index < features.size else -1
        table = tensors[f"features.{index}.weight"]
        rows.append(table[value if 0 <= value < feature.cardinality else feature.cardinality])
    actions = [min(int(code), config.num_actions) for code in history.actions]
    actions += [config.num_actions + 1] * candidates.size
    for item, action in zip([*history.items.tolist(), *candidates.tolist()], actions, strict=True):
        row = tensors["items.weight"][row_of.get(item, config.vocabulary_size)]
        rows.append(row + tensors["actions.weight"][action] if config.num_actions else row)
    if config.num_positions:
        end = len(rows) - candidates.size
        table = tensors["positions.weight"]
        rows = [row + table[min(place, end, config.num_positions - 1)] for place, row in enumerate(rows)]
    return torch.stack(rows)


def _layer(
    config: ModelConfig,
    tensors: dict[str, torch.Tensor],
    name: str,
    x: torch.Tensor,
    mask: torch.Tensor,
    round_kv: Callable[[torch.Tensor], torch.Tensor],
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    heads, eps = config.num_heads, config.norm_eps
    normal = _layer_norm(x, tensors.get(f"{name}.input_norm.weight"), tensors.get(f"{name}.input_norm.bias"), eps)
    z = normal @ tensors[f"{name}.projection.weight"]
    if config.projection_bias:
        z = z + tensors[f"{name}.projection.bias"]
    width, key_width = heads * config.hidden_dim, heads * config.attention_dim
    u, v, q, k = z[:, :width], z[:, width : 2 * width], z[:, 2 * width : 2 * width + key_width], z[:, -key_width:]
    u = u * torch.sigmoid(u)
    if config.activated is Activated.UVQK:
        v, q, k = v * torch.sigmoid(v), q * torch.sigmoid(q), k * torch.sigmoid(k)
    k, v = round_kv(k), round_kv(v)

    parts = []
    for head in range(heads):
        own = slice(head * config.attention_dim, (head + 1) * config.attention_dim)
        scores = config.alpha * (q[:, own] @ k[:, own].T)
        weights = scores * torch.sigmoid(scores) / config.normalizer * mask
        parts.append(weights @ v[:, head * config.hidden_dim : (head + 1) * config.hidden_dim])
    a = torch.cat(parts, dim=1)

    weight, bias = tensors.get(f"{name}.output_norm.weight"), tensors.get(f"{name}.output_norm.bias")
    if config.group_norm and weight is not None and bias is not None:
        normal = torch.cat(
            [_layer_norm(part, None, None, eps) * weight[h] + bias[h] for h, part in enumerate(parts)], 1
        )
    else:
        normal = _layer_norm(a, weight, bias, eps)
    gated = u * normal
    read = {
        OutputForm.U_A_UNORM: (u, a, gated),
        OutputForm.U_NA_UNORM: (u, normal, gated),
        OutputForm.UNORM: (gated,),
    }[config.output_form]
    y = x + torch.cat(read, dim=1) @ tensors[f"{name}.output.weight"]
    if config.output_bias:
        y = y + tensors[f"{name}.output.bias"]
    return y, k, v


def _layer_norm(x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, eps: float) -> torch.Tensor:
    centred = x - x.mean(-1, keepdim=True)
    normal = centred / torch.sqrt((centred * centred).mean(-1, keepdim=True) + eps)
    return normal if weight is None or bias is None else normal * weight + bias


def _readout(config: ModelConfig, tensors: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    if config.readout_norm is ReadoutNorm.LAYER:
        x = _layer_norm(x, tensors["readout.norm.weight"], tensors["readout.norm.bias"], config.norm_eps)
    else:
        x = F.normalize(x, dim=-1)
    last = len(config.readout_hidden)
    for index in range(last + 1):
        x = x @ tensors[f"readout.mlp.{index}.weight"] + tensors[f"readout.mlp.{index}.bias"]
        x = x * torch.sigmoid(x) if index < last else x
    columns = [
        torch.sigmoid(x[:, task]) if config.tasks[task].kind is TaskKind.BINARY else x[:, task]
        for task in range(len(config.tasks))
    ]
    return torch.stack(columns, dim=1)
