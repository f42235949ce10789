"""HSTU as a team's own ranker in the simple form: the layers of the engine, with attention in plain torch.

It measures what the simple form costs beside the paged one for the same weights. On the CPU, in float32.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812 - its usual name

from relaygr.ranker import Computed, History, Kv, ModelFolder, Past, Ranker, Shape
from relaygr.schemas.messages import Behaviours
from relaygr.worker.device import Device
from relaygr.worker.kv import KvDtype
from relaygr.worker.model.checkpoint import Checkpoint
from relaygr.worker.model.contiguous import ContiguousRanker
from relaygr.worker.model.description import description_of, shape_of
from relaygr.worker.model.inputs.embedding import TokenEmbedding
from relaygr.worker.model.inputs.known import KnownInputs
from relaygr.worker.model.inputs.lookup import TokenLookup
from relaygr.worker.model.inputs.tokens import Tokens
from relaygr.worker.model.layers import build_layers
from relaygr.worker.model.options import ComputeDtype
from relaygr.worker.model.ranker_engine import RankerEngine
from relaygr.worker.model.readout import Readout

_NAME = "HSTU in plain torch"


class SimpleHstu(Ranker):
    """HSTU without features and biases."""

    def __init__(self, checkpoint: Checkpoint, device: Device) -> None:
        super().__init__(ModelFolder(Path(), {}, device.torch_device, torch.float32))
        config = self._config = checkpoint.config
        self._lookup = TokenLookup(config, checkpoint.vocabulary())
        self._embedding = TokenEmbedding(config, checkpoint.tensors)
        self._layers = build_layers(config, checkpoint.tensors, torch.float32)
        self._readout = Readout(config, checkpoint.tensors)

    def shape(self) -> Shape:
        return shape_of(self._config)

    def prefix(self, history: History, start: int, end: int, past: Past) -> Computed:
        tokens = self._lookup.prefix(np.empty(0, np.int64), _behaviours(history), 0).tokens[start:end]
        causal = torch.ones(end - start, end, dtype=torch.bool).tril(start)
        return Computed(self._forward(tokens, past, causal)[1])

    def rank(self, suffix: History, candidates: torch.Tensor, past: Past, state: torch.Tensor | None) -> torch.Tensor:  # noqa: ARG002
        found = self._lookup.scored(past.rows, _behaviours(suffix), candidates.numpy(), suffix.query_time_ms)
        rows, own = found.tokens.shape[0], len(candidates)
        sees = torch.ones(rows, past.rows + rows, dtype=torch.bool).tril(past.rows)
        sees[-own:, -own:] = torch.eye(own, dtype=torch.bool)
        x, _ = self._forward(found.tokens, past, sees)
        return self._readout(x[-own:], torch.from_numpy(found.tokens[-own:]))

    def _forward(self, tokens: Tokens, past: Past, sees: torch.Tensor) -> tuple[torch.Tensor, list[Kv]]:
        x, layers = self._embedding(tokens), []
        for layer, before in zip(self._layers, past, strict=True):
            attend, own = self._attention(before, sees)
            x = layer(x, attend)
            layers += own
        return x, layers

    def _attention(
        self, before: Kv, sees: torch.Tensor
    ) -> tuple[Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor], list[Kv]]:
        """The attention of one layer, and the list into which it puts the layer's own K,V."""
        own: list[Kv] = []
        scale = self._config.normalizer
        assert scale is not None

        def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            q, k, v = q.transpose(0, 1), k.transpose(0, 1), v.transpose(0, 1)
            own.append((k, v))
            keys, values = torch.cat((before[0], k), dim=1), torch.cat((before[1], v), dim=1)
            weights = F.silu(self._config.alpha * (q @ keys.transpose(1, 2))) / scale * sees
            return (weights @ values).transpose(0, 1).flatten(1)

        return attend, own


def _behaviours(history: History) -> Behaviours:
    actions = history.actions.numpy().astype(np.uint16)
    return Behaviours(history.items.numpy(), actions, history.times_ms.numpy())


def simple_engine(checkpoint: Checkpoint, device: Device, page_tokens: int) -> RankerEngine:
    """The engine of this form, for the weights of a checkpoint."""
    described = description_of(checkpoint.config)
    return RankerEngine(
        ContiguousRanker(SimpleHstu(checkpoint, device), _NAME, device),
        described,
        checkpoint.revision,
        KnownInputs.of(checkpoint.config),
        checkpoint.weights_bytes,
        device,
        described.geometry(page_tokens, KvDtype.FLOAT32),
        ComputeDtype.FLOAT32,
    )
