"""The HSTU engine: embedding, stack and read-out of a checkpoint, over K,V in pages. Contract: `interface.py`."""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b

import numpy as np
import torch

from schemas.messages import Behaviours
from workers.device import Device
from workers.kv import KvDtype, KvGeometry
from workers.model.attention import KEY_BLOCK, ROW_BLOCK, PagedKv
from workers.model.checkpoint import Checkpoint
from workers.model.config import ModelConfig
from workers.model.hstu import HstuStack, RankRows, build_layers, options_of
from workers.model.inputs import IDS_TENSOR, TokenEmbedding, TokenLookup
from workers.model.interface import (
    EngineLimits,
    Int32Array,
    Int64Array,
    PrefixChunk,
    PrefixInputs,
    RankInputs,
    RankOutputs,
    check_limit,
)
from workers.model.readout import Readout
from workers.model.rules import RuleError, rules_of

_FLOAT_BYTES = 4


def kv_namespace(revision: str, config: ModelConfig, geometry: KvGeometry) -> bytes:
    """All that K,V depend on but the user: 16 bytes. The encodings are in the configuration, so in the revision."""
    g = geometry
    parts = (
        "relaygr.kv.2",
        revision,
        repr(config.normalizer),
        f"{g.num_layers}x{g.num_heads}x{g.attention_dim}+{g.hidden_dim}",
        str(g.page_tokens),
        str(g.dtype),
        "float32",
    )
    return blake2b("\0".join(parts).encode(), digest_size=16).digest()


def limits_of(config: ModelConfig) -> EngineLimits:
    """The limits that a configuration states."""
    return EngineLimits(config.max_prefix_behaviours, config.max_suffix_behaviours, config.max_candidates)


class HstuEngine:
    """Plain torch on any device; computes in float32."""

    def __init__(self, checkpoint: Checkpoint, device: Device, kv_dtype: KvDtype, page_tokens: int) -> None:
        config = checkpoint.config
        self.device = device
        self.geometry = config.geometry(page_tokens, kv_dtype)
        self.layout = config.layout()
        self.limits = limits_of(config)
        self.revision = checkpoint.revision
        self.namespace = kv_namespace(checkpoint.revision, config, self.geometry)
        self.rules = rules_of(config)
        self.num_tasks = len(config.tasks)
        self.weights_bytes = checkpoint.weights_bytes
        self._config = config
        self._lookup = TokenLookup(config, checkpoint.vocabulary())
        tensors = {
            name: tensor.to(device.torch_device) for name, tensor in checkpoint.tensors.items() if name != IDS_TENSOR
        }
        self._embedding = TokenEmbedding(config, tensors)
        self._stack = HstuStack(
            build_layers(config, tensors), options_of(config), config.alpha, config.normalizer, kv_dtype
        )
        self._readout = Readout(config, tensors)
        self._kv: PagedKv | None = None

    def scratch_bytes(self, max_chunk_tokens: int, max_batch_rows: int) -> int:
        c = self._config
        values, keys = c.num_heads * c.hidden_dim, c.num_heads * c.attention_dim
        # x before and after the layer and normalised; z; q scaled; k, v rounded (twice the size at most);
        # the sums, by row, normalised.
        per_row = 3 * c.embedding_dim + c.projection_width + 3 * keys + 2 * values + 3 * values
        page_block = max(KEY_BLOCK, self.geometry.page_tokens)
        # K, V of one block as stored and as float32; one tile of every head.
        tiles = 2 * page_block * (keys + values) + c.num_heads * ROW_BLOCK * page_block
        readout = sum((c.embedding_dim, *c.readout_hidden, 2 * self.num_tasks))
        rows = max(max_chunk_tokens * per_row, max_batch_rows * (per_row + readout))
        return (rows + tiles) * _FLOAT_BYTES

    def bind(self, arena: torch.Tensor) -> None:
        self._kv = PagedKv(arena, self.geometry)

    def prefix_inputs(self, features: Int64Array, behaviours: Behaviours, query_time_ms: int = 0) -> PrefixInputs:
        check_limit(len(behaviours), self.limits.max_prefix_behaviours, "prefix behaviours")
        found = self._lookup.prefix(features, behaviours, query_time_ms)
        return PrefixInputs(found.tokens, found.unknown_items)

    def rank_inputs(
        self,
        prefix_tokens: int,
        pages: Int32Array,
        suffix: Behaviours,
        candidates: Int64Array,
        query_time_ms: int = 0,
    ) -> RankInputs:
        check_limit(len(suffix), self.limits.max_suffix_behaviours, "suffix behaviours")
        check_limit(candidates.size, self.limits.max_candidates, "candidates")
        if len(suffix) and not self.rules.grows:
            raise RuleError("this model's prefixes cannot be followed by a suffix: send all behaviours in the history")
        found = self._lookup.scored(prefix_tokens, suffix, candidates, query_time_ms)
        return RankInputs(
            prefix_tokens=prefix_tokens,
            pages=pages,
            rows=found.tokens,
            suffix_tokens=found.tokens.shape[0] - candidates.size,
            num_candidates=int(candidates.size),
            unknown_items=found.unknown_items,
        )

    def forward(self, chunks: Sequence[PrefixChunk], requests: Sequence[RankInputs]) -> list[RankOutputs]:
        for chunk in chunks:
            self.pre_infer(chunk)
        return self.rank(requests)

    @torch.inference_mode()
    def pre_infer(self, chunk: PrefixChunk) -> None:
        if not 0 <= chunk.start < chunk.end <= chunk.inputs.tokens:
            raise ValueError(f"chunk [{chunk.start}, {chunk.end}) is not in a prefix of {chunk.inputs.tokens} tokens")
        x = self._embedding(chunk.inputs.rows[chunk.start : chunk.end])
        self._stack.pre_infer(self._bound(), x, chunk.start, chunk.pages)

    @torch.inference_mode()
    def rank(self, batch: Sequence[RankInputs]) -> list[RankOutputs]:
        if not batch:
            return []
        starts = np.cumsum([0] + [inputs.suffix_tokens + inputs.num_candidates for inputs in batch])
        requests = [
            RankRows(int(start), inputs.suffix_tokens, inputs.num_candidates, inputs.prefix_tokens, inputs.pages)
            for start, inputs in zip(starts[:-1], batch, strict=True)
        ]
        x = self._embedding(np.concatenate([inputs.rows for inputs in batch]))
        x = self._stack.rank(self._bound(), x, requests)
        candidates = [x[request.start + request.suffix_rows : request.end] for request in requests]
        asked = np.concatenate([inputs.rows[inputs.suffix_tokens :] for inputs in batch])
        tokens = torch.from_numpy(asked).to(x.device, non_blocking=True)
        scores = self._readout(torch.cat(candidates), tokens).cpu().numpy()
        ends = np.cumsum([request.candidate_rows for request in requests])
        return [RankOutputs(part) for part in np.split(scores, ends[:-1])]

    def _bound(self) -> PagedKv:
        if self._kv is None:
            raise ValueError("the engine has no arena yet: call bind first")
        return self._kv
