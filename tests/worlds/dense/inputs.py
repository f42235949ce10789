"""The sequence of the dense model: its tokens, and the row of each token."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812 - its usual name
from numpy.typing import NDArray

from relaygr.schemas.messages import Behaviours
from relaygr.worker.model.config import ModelConfig
from relaygr.worker.model.options import InputForm, PositionOrigin, TimeEncoding
from tests.worlds.dense.encodings import TimeBuckets, positions_from_end, time_rows
from tests.worlds.dense.small import layer_norm

Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True, slots=True)
class Sequence:
    """Contextual tokens, history, candidates."""

    rows: torch.Tensor
    """[tokens, D], before scale, position and time."""
    times: torch.Tensor
    """int64 seconds: 0 for contextual tokens, the query time for candidates."""
    contextual: int
    candidates: int
    items: torch.Tensor
    """int64 [candidates]: rows of the item table."""

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

    def item_rows(items: NDArray[np.int64]) -> torch.Tensor:
        return torch.tensor([row_of.get(item, config.vocabulary_size) for item in items.tolist()], dtype=torch.int64)

    contextual = _contextual(config, tensors, features, len(history) + candidates.size)
    actions = torch.from_numpy(history.actions.astype(np.int64))
    behaviours = behaviour_rows(config, tensors, item_rows(history.items), actions)
    items = item_rows(candidates)
    rows = torch.cat([*contextual, behaviours, candidate_rows(config, tensors, items)])
    times = torch.zeros(len(rows), dtype=torch.int64)
    end = len(rows) - items.numel()
    seconds = torch.from_numpy(history.timestamps_ms // 1000)
    each = len(behaviours) // max(1, len(history))
    times[len(contextual) : end] = seconds.repeat_interleave(each) if len(history) else seconds
    times[end:] = query_time_ms // 1000
    return Sequence(rows, times, len(contextual), items.numel(), items)


def embed(config: ModelConfig, tensors: Tensors, sequence: Sequence) -> torch.Tensor:
    """[tokens, D]: scale * row + position + time."""
    x = sequence.rows * config.embedding_scale
    size, end = x.shape[0], sequence.end
    if config.num_positions and config.position_origin is PositionOrigin.END:
        places = positions_from_end(size, sequence.candidates, sequence.contextual, config.num_positions)
        x = x + tensors["positions.weight"][places]
    elif config.num_positions:
        x = x + start_positions(config, tensors, torch.arange(size).clamp(max=end))
    if config.time_encoding is not TimeEncoding.NONE:
        fn = TimeBuckets(config.time_encoding.value)
        ages = time_rows(sequence.times, config.time_unit_seconds, fn, config.num_times)
        x = x + tensors["times.weight"][ages]
    return x


def start_positions(config: ModelConfig, tensors: Tensors, places: torch.Tensor) -> torch.Tensor:
    """[..., D]: the rows of places that count from the start; places beyond the table take its last row."""
    return F.embedding(places.clamp(max=config.num_positions - 1), tensors["positions.weight"])


def item_vectors(config: ModelConfig, tensors: Tensors, items: torch.Tensor) -> torch.Tensor:
    """Items' rows, joined with those of their features: [..., table_dim * (1 + features)]."""
    parts = [F.embedding(items, tensors["items.weight"])]
    if config.dlrm_inputs is not None:
        parts += [
            tensors[f"item_features.{index}.weight"][tensors[f"item_features.{index}.rows"][items]]
            for index in range(len(config.dlrm_inputs.item_features))
        ]
    return torch.cat(parts, dim=-1)


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
    """One tensor [1, D] for each contextual token."""
    rows: list[torch.Tensor] = []
    for index, feature in enumerate(config.contextual_features):
        for _ in range(feature.tokens):
            token = len(rows)
            value = int(features[token]) if token < features.size else -1
            known = 0 <= value < feature.cardinality and behaviours_and_candidates >= feature.min_tokens
            row = tensors[f"features.{index}.weight"][value if known else feature.cardinality]
            if config.inputs is InputForm.DLRM:
                row = row @ tensors["contextual.weight"][token] + tensors["contextual.bias"][token]
            rows.append(row[None])
    return rows


def behaviour_rows(config: ModelConfig, tensors: Tensors, items: torch.Tensor, actions: torch.Tensor) -> torch.Tensor:
    """int64 [..., behaviours]: rows of the item table, and action codes -> [..., tokens, D]."""
    if config.dlrm_inputs is not None:
        bits = [
            tensors["action_bits.weight"][index] * ((actions & weight) != 0)[..., None]
            for index, weight in enumerate(config.dlrm_inputs.action_weights)
        ]
        return _dlrm(config, tensors, items, torch.cat(bits, dim=-1) if bits else None)
    rows = F.embedding(items, tensors["items.weight"])
    if not config.num_actions:
        return rows
    of_actions = F.embedding(actions.clamp(max=config.num_actions), tensors["actions.weight"])
    if config.inputs is InputForm.INTERLEAVED:
        return torch.stack((rows, of_actions), dim=-2).flatten(-3, -2)
    return rows + of_actions


def candidate_rows(config: ModelConfig, tensors: Tensors, items: torch.Tensor) -> torch.Tensor:
    """int64 [..., candidates]: rows of the item table -> [..., candidates, D]."""
    if config.dlrm_inputs is not None:
        return _dlrm(config, tensors, items, tensors.get("action_bits.candidates"))
    rows = F.embedding(items, tensors["items.weight"])
    if config.inputs is InputForm.ADDED and config.num_actions:
        return rows + tensors["actions.weight"][config.num_actions + 1]
    return rows


def _dlrm(config: ModelConfig, tensors: Tensors, items: torch.Tensor, bits: torch.Tensor | None) -> torch.Tensor:
    assert config.dlrm_inputs is not None
    inputs, vectors = config.dlrm_inputs, item_vectors(config, tensors, items)
    rows = swish_mlp(config, tensors, "content", vectors[..., : inputs.table_dim], inputs.norm_eps)
    if inputs.item_features:
        rows = rows + swish_mlp(config, tensors, "additional", vectors[..., inputs.table_dim :], inputs.norm_eps)
    return rows if bits is None else rows + swish_mlp(config, tensors, "action_bits", bits, inputs.norm_eps)
