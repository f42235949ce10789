"""The part that all engines share: the description of the model, and the checks of a request. See `interface.py`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from hashlib import blake2b

import numpy as np

from relaygr.schemas.messages import Behaviours
from relaygr.worker.device import Device
from relaygr.worker.kv import KvDtype, KvGeometry
from relaygr.worker.model.config import RuleError
from relaygr.worker.model.description import Description
from relaygr.worker.model.inputs.known import Vocabulary
from relaygr.worker.model.interface import Int64Array, PrefixChunk, RankInputs, RankOutputs, TooLongError
from relaygr.worker.model.options import ComputeDtype


class BaseEngine(ABC):
    """A model on a device. A subclass adds the computation."""

    def __init__(
        self,
        described: Description,
        revision: str,
        vocabulary: Vocabulary,
        device: Device,
        kv_dtype: KvDtype,
        page_tokens: int,
        compute_dtype: ComputeDtype = ComputeDtype.FLOAT32,
    ) -> None:
        self.device = device
        self.description = described
        self.geometry = described.geometry(page_tokens, kv_dtype)
        self.layout = described.layout
        self.limits = described.limits
        self.revision = revision
        self.namespace = kv_namespace(revision, self.geometry, compute_dtype)
        self.rules = described.rules
        self.num_tasks = described.num_tasks
        self.compute_dtype = compute_dtype
        self._vocabulary = vocabulary

    @abstractmethod
    def forward(self, chunks: Sequence[PrefixChunk], requests: Sequence[RankInputs]) -> list[RankOutputs]:
        """See `Engine.forward`."""

    def known_items(self, count: int, random: np.random.Generator) -> Int64Array:
        return self._vocabulary.sample(count, random)

    def pre_infer(self, chunk: PrefixChunk) -> None:
        self.forward([chunk], [])

    def rank(self, batch: Sequence[RankInputs]) -> list[RankOutputs]:
        return self.forward([], batch)

    def _check_prefix(self, behaviours: Behaviours) -> None:
        _check_limit(len(behaviours), self.limits.max_prefix_behaviours, "prefix behaviours")

    def _check_request(self, suffix: Behaviours, candidates: Int64Array) -> None:
        _check_limit(len(suffix), self.limits.max_suffix_behaviours, "suffix behaviours")
        _check_limit(candidates.size, self.limits.max_candidates, "candidates")
        if len(suffix) and not self.rules.grows:
            raise RuleError("this model's prefixes cannot be followed by a suffix: send all behaviours in the history")


def _check_limit(count: int, limit: int, what: str) -> None:
    if count > limit:
        raise TooLongError(f"{count} {what}, the model takes {limit}")


def kv_namespace(revision: str, geometry: KvGeometry, compute_dtype: ComputeDtype) -> bytes:
    """16 bytes that identify everything K,V depend on, except the user. The revision covers the configuration, too."""
    g = geometry
    parts = (
        "relaygr.kv.3",
        revision,
        f"{g.num_layers}x{g.num_heads}x{g.attention_dim}+{g.hidden_dim}",
        str(g.page_tokens),
        str(g.dtype),
        str(compute_dtype),
    )
    return blake2b("\0".join(parts).encode(), digest_size=16).digest()
