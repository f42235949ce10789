"""The ranker as it is trained: on batches, with candidates as a worker sees them.

A batch has a window of each user's history and some of its places. At each place candidates are asked for: each attends
to the window's behaviours before the place and to itself, as a candidate of a request does whose history ends there.
The history's rows are computed once for all places, and no candidate is seen by any row but itself.

A score is read from the product of the candidate's last row and its item's embedding. So the row of an *unknown*
candidate, which knows the history alone, searches: the items nearest to it are what retrieval finds.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812 - its usual name
from numpy.typing import NDArray

from relaygr.training.layers import (
    Tensors,
    behaviour_rows,
    by_head,
    candidate_rows,
    layer,
    layer_tensors,
    task_logits,
)
from relaygr.training.sequence_loss import TEMPERATURE
from relaygr.training.splits import Split
from relaygr.worker.model.checkpoint import expected_tensors
from relaygr.worker.model.config import ModelConfig
from relaygr.worker.model.options import (
    Activated,
    OutputForm,
    ReadoutForm,
    ReadoutNorm,
    RelativeBias,
    Task,
    TaskKind,
)

NEXT: Final = 0
LIKED: Final = 1
"""Columns of the tasks."""
SUFFIX_BEHAVIOURS: Final = 128
"""The longest suffix of a request, which stands after the longest prefix."""
_NORMALIZER: Final = 64.0
_INITIAL: Final = 0.05
_NEAR: Final = 64.0
"""Behaviours: at the start, nearer ones have more weight."""
_CHUNK: Final = 4096
"""Candidates scored at once."""


@dataclass(frozen=True, slots=True)
class Size:
    """The sizes of a ranker."""

    dim: int
    heads: int
    layers: int
    max_history: int
    """Behaviours of the longest history; of longer ones the newest are served."""


def ranker_config(split: Split, size: Size) -> ModelConfig:
    """The configuration of the checkpoint. Raises ValueError (pydantic) for sizes that a model cannot have."""
    # The score of "next" is a logit: a sigmoid of large logits is 1.0 for several candidates.
    tasks = [Task(name="next", kind=TaskKind.REGRESSION)]
    if split.has_liked:
        tasks.append(Task(name="liked"))
    return ModelConfig(
        embedding_dim=size.dim,
        num_heads=size.heads,
        attention_dim=max(1, size.dim // size.heads),
        hidden_dim=max(1, size.dim // size.heads),
        num_layers=size.layers,
        normalizer=_NORMALIZER,
        vocabulary_size=split.num_items,
        num_actions=split.num_actions,
        activated=Activated.UVQK,
        # The sums of attention grow with the history, so that only their norm is read.
        output_form=OutputForm.UNORM,
        # By place only: a bias by time would depend on the next behaviour, and a prefix could not grow.
        relative_bias=RelativeBias(positions=size.max_history + SUFFIX_BEHAVIOURS + 1),
        readout=ReadoutForm.ITEM_PRODUCT,
        readout_norm=ReadoutNorm.L2,
        tasks=tuple(tasks),
        max_prefix_behaviours=size.max_history,
        max_suffix_behaviours=SUFFIX_BEHAVIOURS,
    )


def initial_tensors(config: ModelConfig, seed: int) -> Tensors:
    """The weights before training, float32."""
    generator = torch.Generator().manual_seed(seed)
    tensors: Tensors = {}
    for name, shape in expected_tensors(config).items():
        if name.endswith("relative_bias.positions"):
            distances = (shape[0] // 2 - torch.arange(shape[0])).clamp(min=0)
            tensors[name] = torch.exp(-distances / _NEAR)
        elif name.endswith("norm.weight"):
            tensors[name] = torch.ones(shape)
        elif name.endswith(".bias"):
            tensors[name] = torch.zeros(shape)
        elif name == "readout.mlp.0.weight":
            # "next" begins as what retrieval is trained on, the cosine of row and item.
            tensors[name] = torch.zeros(shape)
            tensors[name][:, NEXT] = 1 / TEMPERATURE
        else:
            is_table = name.startswith(("items.", "actions."))
            scale = _INITIAL if is_table else shape[0] ** -0.5
            tensors[name] = scale * torch.randn(shape, generator=generator)
    return tensors


@dataclass(frozen=True, slots=True)
class Batch:
    """Windows of some users, and candidates at some places of each. All int64."""

    items: torch.Tensor
    """[users, behaviours]: rows of the vocabulary; behind the end of a window any."""
    actions: torch.Tensor
    """[users, behaviours]"""
    candidates: torch.Tensor
    """[users, places, candidates]: rows of the vocabulary."""
    places: torch.Tensor
    """[users, places]: the number of behaviours before the candidates."""


class TargetAttention:
    """The attention of one layer in blocks: history rows to history rows, candidates to history rows and themselves."""

    def __init__(self, config: ModelConfig, batch: Batch, bias: torch.Tensor, is_last: bool) -> None:
        """`bias` [2 N - 1]: by place. `is_last`: nothing reads the history rows after this layer."""
        self._config, self._batch, self._is_last = config, batch, is_last
        self._bias, self._own_bias = bias_by_place(bias, batch.items.shape[1]), bias[len(bias) // 2]

    def __call__(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        config, batch = self._config, self._batch
        assert config.normalizer is not None
        length, (places, count) = batch.items.shape[1], batch.candidates.shape[1:]
        # Factors that would else be applied to each weight of the attention.
        (old_q, new_q), (old_k, new_k), (old_v, new_v) = (
            torch.split(by_head(each, config.num_heads), [length, places * count], dim=2)
            for each in (q * config.alpha, k, v / config.normalizer)
        )
        history = torch.zeros_like(old_v)
        if not self._is_last:
            history = F.silu(old_q @ old_k.transpose(-1, -2) + self._bias[:-1]).tril() @ old_v
        by_place = (len(q), config.num_heads, places, count, length)
        bias = F.embedding(batch.places, self._bias)[:, None, :, None]
        scores = (new_q @ old_k.transpose(-1, -2)).view(by_place) + bias
        hidden = torch.arange(length) >= batch.places[:, None, :, None, None]
        weights = F.silu(scores).masked_fill(hidden, 0.0)
        own = F.silu((new_q * new_k).sum(-1, keepdim=True) + self._own_bias)
        return torch.cat((history, weights.flatten(2, 3) @ old_v + own * new_v), dim=2).transpose(1, 2)


def bias_by_place(bias: torch.Tensor, length: int) -> torch.Tensor:
    """[length + 1, length]: of a row after so many behaviours, and each of them. `bias` [2 N - 1], by distance.

    A row is the one before, moved by one place. Equal rows that are one longer than the rows of the result, read one
    after the other, are that; looking each weight up takes a quarter of a training's time for the gradient alone.
    """
    centre = len(bias) // 2
    period = torch.cat((bias[centre : centre + length], bias[centre - length - 1 : centre]))
    shifted = period.expand(length + 1, -1).reshape(-1)[: (length + 1) * 2 * length]
    return shifted.view(length + 1, 2 * length)[:, :length]


def candidate_logits(config: ModelConfig, tensors: Tensors, batch: Batch, dropout: float = 0.0) -> torch.Tensor:
    """[users, places, candidates, tasks], before the sigmoid of binary tasks."""
    return task_logits(tensors, candidate_states(config, tensors, batch, dropout), batch.candidates)


def candidate_states(config: ModelConfig, tensors: Tensors, batch: Batch, dropout: float = 0.0) -> torch.Tensor:
    """The candidates' rows after the last layer [users, places, candidates, D].

    `dropout`: the share of the inputs of each product of a layer that is left out, in training.
    """
    length = batch.items.shape[1]
    behaviours = behaviour_rows(config, tensors, batch.items, batch.actions)
    x = torch.cat((behaviours, candidate_rows(config, tensors, batch.candidates.flatten(1))), dim=1)

    def product(rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return (_dropped(rows, dropout) if dropout else rows) @ weight

    for index in range(config.num_layers):
        own, is_last = layer_tensors(tensors, index), index == config.num_layers - 1
        x = layer(config, own, x, TargetAttention(config, batch, own["relative_bias.positions"], is_last), product)
    return x[:, length:].view(*batch.candidates.shape, x.shape[-1])


def _dropped(rows: torch.Tensor, share: float) -> torch.Tensor:
    """Dropout by one random byte for each number, which takes a fifth of the time of torch's."""
    words = torch.empty(-(-rows.numel() // 8), dtype=torch.int64).random_(-(2**63), None)
    kept = words.view(torch.uint8)[: rows.numel()].view(rows.shape) >= round(256 * share)
    return rows * (kept * (256 / (256 - round(256 * share))))


@torch.no_grad()
def score_items(
    config: ModelConfig, tensors: Tensors, items: NDArray[np.int32], actions: NDArray[np.uint16], asked: torch.Tensor
) -> torch.Tensor:
    """Logits [candidates, tasks] of the candidates `asked` (rows of the vocabulary) after one history, oldest first."""
    parts = [
        candidate_logits(config, tensors, _request(config, items, actions, part))[0, 0]
        for part in torch.split(asked, _CHUNK)
    ]
    return torch.cat(parts)


@torch.no_grad()
def search_row(
    config: ModelConfig, tensors: Tensors, items: NDArray[np.int32], actions: NDArray[np.uint16]
) -> torch.Tensor:
    """The row [D] of an unknown candidate after one history, oldest first: retrieval finds the items nearest to it."""
    unknown = torch.tensor([config.vocabulary_size])
    return candidate_states(config, tensors, _request(config, items, actions, unknown))[0, 0, 0]


def _request(config: ModelConfig, items: NDArray[np.int32], actions: NDArray[np.uint16], asked: torch.Tensor) -> Batch:
    """The newest behaviours of one history that the model may have, and candidates after them."""
    newest = slice(-config.max_prefix_behaviours, None)
    history = torch.from_numpy(items[newest].astype(np.int64))[None]
    codes = torch.from_numpy(actions[newest].astype(np.int64))[None]
    return Batch(history, codes, asked[None, None], torch.tensor([[history.shape[1]]]))
