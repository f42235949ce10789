"""The sequence of the reference model: its tokens, and the row of each token."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from relaygr.schemas.messages import Behaviours
from relaygr.worker.model.config import ModelConfig
from relaygr.worker.model.options import InputForm, PositionOrigin, TimeEncoding
from tests.workers.reference.encodings import TimeBuckets, positions_from_end, time_rows
from tests.workers.reference.small import layer_norm

Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True, slots=True)
class Sequence:
    """Contextual tokens, history, candidates."""

    rows: list[torch.Tensor]
    """One row [D] for each token, before scale, position and time."""
    times: torch.Tensor
    """int64 seconds: 0 for contextual tokens, the query time for candidates."""
    contextual: int
    candidates: int
    items: list[int]
    """Rows of the item table for the candidates."""

    @property
    def end(self) -> int:
        """The index of the first token after the history."""
        return len(self.rows) - self.candidates


def sequence_of(
    config: ModelConfig,
    tensors: Tensors,
    features: NDArray[np.int64],
    history: Behaviours,
    candidates: NDArray[np.int64],
    query_time_ms: int,
) -> Sequence:
    """The tokens of one request."""
    known = tensors["items.ids"].tolist() if "items.ids" in tensors else range(config.vocabulary_size)
    row_of = {item: row for row, item in enumerate(known)}

    def item_row(item: int) -> int:
        return row_of.get(item, config.vocabulary_size)

    rows = _contextual(config, tensors, features, len(history) + candidates.size)
    contextual = len(rows)
    times = [0] * contextual
    for item, action, time_ms in zip(
        history.items.tolist(), history.actions.tolist(), history.timestamps_ms.tolist(), strict=True
    ):
        added = _behaviour(config, tensors, item_row(item), action)
        rows += added
        times += [time_ms // 1000] * len(added)
    items = [item_row(item) for item in candidates.tolist()]
    rows += [_candidate(config, tensors, item) for item in items]
    times += [query_time_ms // 1000] * len(items)
    return Sequence(rows, torch.tensor(times, dtype=torch.int64), contextual, len(items), items)


def embed(config: ModelConfig, tensors: Tensors, sequence: Sequence) -> torch.Tensor:
    """[tokens, D]: scale * row + position + time."""
    x = torch.stack(sequence.rows) * config.embedding_scale
    size, end = x.shape[0], sequence.end
    if config.num_positions and config.position_origin is PositionOrigin.END:
        places = positions_from_end(size, sequence.candidates, sequence.contextual, config.num_positions)
        x = x + tensors["positions.weight"][places]
    elif config.num_positions:
        places = torch.arange(size).clamp(max=end).clamp(max=config.num_positions - 1)
        x = x + tensors["positions.weight"][places]
    if config.time_encoding is not TimeEncoding.NONE:
        fn = TimeBuckets(config.time_encoding.value)
        ages = time_rows(sequence.times, config.time_unit_seconds, fn, config.num_times)
        x = x + tensors["times.weight"][ages]
    return x


def item_vector(config: ModelConfig, tensors: Tensors, item: int) -> torch.Tensor:
    """An item's row, joined with those of its features: [table_dim * (1 + features)]."""
    parts = [tensors["items.weight"][item]]
    if config.dlrm_inputs is not None:
        for index in range(len(config.dlrm_inputs.item_features)):
            value = int(tensors[f"item_features.{index}.rows"][item])
            parts.append(tensors[f"item_features.{index}.weight"][value])
    return torch.cat(parts)


def swish_mlp(config: ModelConfig, tensors: Tensors, name: str, x: torch.Tensor, eps: float) -> torch.Tensor:
    """Linear, x * sigmoid(norm(x)), linear, norm; eps is of the last norm."""
    x = x @ tensors[f"{name}.0.weight"] + tensors[f"{name}.0.bias"]
    inner = layer_norm(
        x, tensors[f"{name}.inner_norm.weight"], tensors[f"{name}.inner_norm.bias"], config.swish_norm_eps or eps
    )
    x = (x * torch.sigmoid(inner)) @ tensors[f"{name}.1.weight"] + tensors[f"{name}.1.bias"]
    return layer_norm(x, tensors[f"{name}.outer_norm.weight"], tensors[f"{name}.outer_norm.bias"], eps)


def _contextual(
    config: ModelConfig, tensors: Tensors, features: NDArray[np.int64], behaviours_and_candidates: int
) -> list[torch.Tensor]:
    rows: list[torch.Tensor] = []
    for index, feature in enumerate(config.contextual_features):
        for _ in range(feature.tokens):
            token = len(rows)
            value = int(features[token]) if token < features.size else -1
            known = 0 <= value < feature.cardinality and behaviours_and_candidates >= feature.min_tokens
            row = tensors[f"features.{index}.weight"][value if known else feature.cardinality]
            if config.inputs is InputForm.DLRM:
                row = row @ tensors["contextual.weight"][token] + tensors["contextual.bias"][token]
            rows.append(row)
    return rows


def _behaviour(config: ModelConfig, tensors: Tensors, item: int, action: int) -> list[torch.Tensor]:
    if config.dlrm_inputs is not None:
        inputs = config.dlrm_inputs
        bits = [
            tensors["action_bits.weight"][index] * float(bool(action & weight))
            for index, weight in enumerate(inputs.action_weights)
        ]
        return [_dlrm(config, tensors, item, torch.cat(bits) if bits else None)]
    row = tensors["items.weight"][item]
    if not config.num_actions:
        return [row]
    action_row = tensors["actions.weight"][min(action, config.num_actions)]
    return [row, action_row] if config.inputs is InputForm.INTERLEAVED else [row + action_row]


def _candidate(config: ModelConfig, tensors: Tensors, item: int) -> torch.Tensor:
    if config.dlrm_inputs is not None:
        return _dlrm(config, tensors, item, tensors.get("action_bits.candidates"))
    row = tensors["items.weight"][item]
    if config.inputs is InputForm.ADDED and config.num_actions:
        return row + tensors["actions.weight"][config.num_actions + 1]
    return row


def _dlrm(config: ModelConfig, tensors: Tensors, item: int, bits: torch.Tensor | None) -> torch.Tensor:
    assert config.dlrm_inputs is not None
    inputs, vector = config.dlrm_inputs, item_vector(config, tensors, item)
    row = swish_mlp(config, tensors, "content", vector[: inputs.table_dim], inputs.norm_eps)
    if inputs.item_features:
        row = row + swish_mlp(config, tensors, "additional", vector[inputs.table_dim :], inputs.norm_eps)
    return row if bits is None else row + swish_mlp(config, tensors, "action_bits", bits, inputs.norm_eps)
