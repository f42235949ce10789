"""A ranker of the simple form as a paged one: it is given one chunk or request at a time, on copies of its K,V.

The states of rows lie in one more layer of the pages, as if they were K,V. So they are appended, spilled, reloaded and
moved with their rows, and a row that is there is never changed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import numpy as np
import torch

from relaygr.ranker import (
    CandidateInputs,
    Computed,
    History,
    HistoryInputs,
    PagedRanker,
    Past,
    PrefixChunk,
    Ranker,
    RankInputs,
    Segment,
    Shape,
)
from relaygr.ranker.interface import Kv
from relaygr.schemas.messages import Behaviours
from relaygr.worker.device import Device
from relaygr.worker.model.attention.paged_kv import KEY_BLOCK, PagedKv
from relaygr.worker.model.attention.spec import widened
from relaygr.worker.model.interface import Int64Array
from relaygr.worker.model.rankers import RankerError, ranker_code

_FEATURELESS = np.empty(0, np.int64)


class ContiguousRanker(PagedRanker):
    """Gathers K,V from the pages for a ranker, and scatters what it computes."""

    def __init__(self, ranker: Ranker, name: str, device: Device) -> None:
        """`name`: as the configuration names the ranker, for errors."""
        super().__init__(ranker.folder)
        self._ranker = ranker
        self._name = name
        self._device = device
        self._shape = ranker.shape()
        self._dtype = ranker.folder.dtype

    @property
    def backend(self) -> str:
        return self._name

    def shape(self) -> Shape:
        return self._shape

    def known_items(self) -> Sequence[int] | None:
        return self._ranker.known_items()

    def scratch_bytes(self, chunk_rows: int, ranked_rows: int) -> int:
        return self._ranker.scratch_bytes(max(chunk_rows, ranked_rows))

    def forward(
        self, kv: PagedKv, chunks: Sequence[PrefixChunk], requests: Sequence[RankInputs]
    ) -> torch.Tensor | None:
        for chunk in chunks:
            self._compute(kv, chunk)
        asked = cast("Sequence[CandidateInputs]", requests)
        return torch.cat([self._rank(kv, request) for request in asked]) if asked else None

    def _compute(self, kv: PagedKv, chunk: PrefixChunk) -> None:
        inputs, rows = cast("HistoryInputs", chunk.inputs), chunk.end - chunk.start
        segment = Segment(chunk.pages, chunk.start, rows, 0, stores=True, total_tokens=inputs.tokens)
        history = self._history(inputs.behaviours, inputs.features, inputs.query_time_ms)
        with ranker_code(f"{self._name}.prefix"):
            computed = self._ranker.prefix(history, chunk.start, chunk.end, self._past(kv, segment))
        slots = kv.slots([segment])
        for layer, (k, v) in enumerate(self._checked(computed, rows)):
            kv.write(layer, slots, k.transpose(0, 1), v.transpose(0, 1))

    def _checked(self, computed: Computed, rows: int) -> list[Kv]:
        """K,V of all layers, and the states as those of one more. Raises RankerError for another form."""
        shape = self._shape
        if not isinstance(computed, Computed):
            raise RankerError(f"{self._name}.prefix returned a {type(computed).__name__} in place of Computed")
        layers = list(computed.layers)
        if len(layers) != shape.layers:
            raise RankerError(f"{self._name}.prefix returned K,V of {len(layers)} layers, not of {shape.layers}")
        for k, v in layers:
            self._require("prefix", "K", k, (shape.heads, rows, shape.key_dim))
            self._require("prefix", "V", v, (shape.heads, rows, shape.value_dim))
        if shape.state_dim:
            if computed.states is None:
                raise RankerError(f"{self._name}.prefix returned no states, its shape has {shape.state_dim} a row")
            self._require("prefix", "states", computed.states, (rows, shape.state_dim))
            layers.append(self._state_kv(computed.states))
        return layers

    def _state_kv(self, states: torch.Tensor) -> Kv:
        shape, rows = self._shape, states.shape[0]
        width = shape.heads * (shape.key_dim + shape.value_dim)
        padded = torch.nn.functional.pad(states, (0, width - shape.state_dim))
        keys = shape.heads * shape.key_dim
        k, v = (part.reshape(rows, shape.heads, -1).transpose(0, 1) for part in (padded[:, :keys], padded[:, keys:]))
        return k, v

    def _rank(self, kv: PagedKv, request: CandidateInputs) -> torch.Tensor:
        tokens = request.prefix_tokens
        segment = Segment(request.pages, tokens, 0, 0, stores=False, total_tokens=tokens)
        if request.layer_ready is not None:
            # A reload brings the layers in order, and the states last.
            request.layer_ready(kv.geometry.num_layers - 1)
        suffix = self._history(request.suffix, _FEATURELESS, request.query_time_ms)
        state = self._last_state(kv, segment)
        with ranker_code(f"{self._name}.rank"):
            scores = self._ranker.rank(suffix, self._sent(request.candidates), self._past(kv, segment), state)
        self._require("rank", "scores", scores, (request.num_candidates, len(self._shape.tasks)))
        return scores.float().cpu()

    def _last_state(self, kv: PagedKv, segment: Segment) -> torch.Tensor | None:
        shape, tokens = self._shape, segment.context_tokens
        if not (shape.state_dim and tokens):
            return None
        page, place = segment.pages[(tokens - 1) // kv.geometry.page_tokens], (tokens - 1) % kv.geometry.page_tokens
        row = [pages[int(page), :, place] for pages in (kv.k(shape.layers), kv.v(shape.layers))]
        exponents = kv.exponents(shape.layers)
        if exponents is not None:
            row = [
                widened(numbers, scales[int(page), :, place], self._dtype)
                for numbers, scales in zip(row, exponents, strict=True)
            ]
        return torch.cat([part.to(self._dtype).flatten() for part in row])[: shape.state_dim]

    def _past(self, kv: PagedKv, segment: Segment) -> Past:
        shape, rows = self._shape, segment.context_tokens
        if not rows:
            empty = torch.empty((shape.heads, 0, 1), dtype=self._dtype, device=self._device.torch_device)
            none = empty.expand(-1, -1, shape.key_dim), empty.expand(-1, -1, shape.value_dim)
            return Past(0, shape.layers, lambda _: none)
        ((span,),) = kv.spans([segment], -(-rows // KEY_BLOCK) * KEY_BLOCK + kv.geometry.page_tokens)

        def read(layer: int) -> Kv:
            k, v = kv.read(layer, span, self._dtype)
            # What was read is valid until the next layer is.
            return k.clone(memory_format=torch.contiguous_format), v.clone(memory_format=torch.contiguous_format)

        return Past(rows, shape.layers, read)

    def _history(self, behaviours: Behaviours, features: Int64Array, query_time_ms: int) -> History:
        return History(
            self._sent(behaviours.items),
            self._sent(behaviours.actions.astype(np.int64)),
            self._sent(behaviours.timestamps_ms),
            self._sent(features),
            query_time_ms,
        )

    def _sent(self, numbers: Int64Array) -> torch.Tensor:
        """A copy on the device, for the ranker to keep."""
        return torch.from_numpy(numbers.astype(np.int64)).to(self._device.torch_device)

    def _require(self, method: str, what: str, found: torch.Tensor, shape: tuple[int, ...]) -> None:
        if not isinstance(found, torch.Tensor):
            raise RankerError(f"{self._name}.{method} returned a {type(found).__name__} in place of {what}")
        if tuple(found.shape) != shape:
            raise RankerError(f"{self._name}.{method} returned {what} {list(found.shape)}, not {list(shape)}")
        if not found.is_floating_point():
            raise RankerError(f"{self._name}.{method} returned {what} of {found.dtype}, not of a floating-point type")
