"""Our own layers as a paged ranker: a checkpoint's inputs, layers and read-out over K,V in pages, in torch.

One forward runs the rows of all its chunks and requests through the layers together. The matrix products cover all
rows, and no row is padding. Attention handles each segment by itself (`attention/segments.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import numpy as np
import torch

from relaygr.ranker import PagedRanker, Shape
from relaygr.schemas.messages import Behaviours
from relaygr.schemas.record import record
from relaygr.worker.device import Device
from relaygr.worker.kv import KvGeometry
from relaygr.worker.model.attention.bias import relative_biases
from relaygr.worker.model.attention.choose import AttentionChooser
from relaygr.worker.model.attention.paged_kv import PagedKv
from relaygr.worker.model.attention.segments import Segment, SegmentTimes
from relaygr.worker.model.attention.spec import spec_of, torch_dtype
from relaygr.worker.model.checkpoint import Checkpoint, copied_bytes
from relaygr.worker.model.config import ModelConfig, RuleError
from relaygr.worker.model.description import shape_of
from relaygr.worker.model.graphs import layer_runner
from relaygr.worker.model.inputs.embedding import TokenEmbedding, input_row_elements
from relaygr.worker.model.inputs.encodings import query_seconds, seconds
from relaygr.worker.model.inputs.known import IDS_TENSOR
from relaygr.worker.model.inputs.lookup import FeatureGates, TokenLookup
from relaygr.worker.model.inputs.tables import Placement
from relaygr.worker.model.inputs.tokens import Column, Tokens
from relaygr.worker.model.interface import Int32Array, Int64Array, PrefixChunk, PrefixInputs, RankInputs
from relaygr.worker.model.layer_parts import padded_rows
from relaygr.worker.model.layers import LayerStack, build_layers
from relaygr.worker.model.options import ComputeDtype
from relaygr.worker.model.readout import Readout, readout_row_elements


@record(frozen=True, slots=True, kw_only=True)
class TokenPrefix(PrefixInputs):
    """`rows`: the prefix's contextual tokens, then its behaviours (`inputs/tokens.py`)."""

    rows: Tokens
    query_time: int = 0
    """Seconds; 0 if the model does not use the query time."""


@record(frozen=True, slots=True, kw_only=True)
class TokenRequest(RankInputs):
    """`rows`: the tokens of the suffix, then of the candidates."""

    rows: Tokens
    suffix_tokens: int
    prefix_times: Int64Array | None = None
    """Time of each prefix token in seconds, if the model has a bias by time."""


def _prefix_of(chunk: PrefixChunk) -> TokenPrefix:
    """An engine is given what its own look-up returned."""
    return cast("TokenPrefix", chunk.inputs)


class Segmenting:
    """Turns the chunks and requests of one model into segments, with the times that a bias by time needs."""

    def __init__(self, config: ModelConfig) -> None:
        self._layout = config.layout()
        self._has_times = config.relative_bias is not None and config.relative_bias.time_buckets > 0

    def prefix_times(self, prefix_tokens: int, timestamps_ms: Int64Array | None) -> Int64Array | None:
        """The time of each token of a prefix in seconds, from the times of its behaviours; None if not needed.

        Contextual tokens have time 0. Raises RuleError if times are needed and missing, or their number is wrong.
        """
        if not self._has_times:
            return None
        if timestamps_ms is None or self._layout.tokens(timestamps_ms.size) != prefix_tokens:
            raise RuleError(
                f"this model's bias by time needs the timestamps of all behaviours in a prefix ({prefix_tokens} tokens)"
            )
        return np.concatenate(
            (
                np.zeros(self._layout.contextual_tokens, dtype=np.int64),
                np.repeat(seconds(timestamps_ms), self._layout.tokens_per_behaviour),
            )
        )

    def of_chunk(self, chunk: PrefixChunk) -> Segment:
        """The segment of a chunk."""
        inputs = _prefix_of(chunk)
        tokens = inputs.tokens
        times = None
        if self._has_times:
            own = inputs.rows[: chunk.end + 1, Column.TIME]
            following = own[chunk.start + 1 :]
            if chunk.end == tokens:
                following = np.append(following, inputs.query_time)
            times = SegmentTimes(own[: chunk.end].copy(), following.copy())
        return Segment(
            pages=chunk.pages,
            context_tokens=chunk.start,
            causal_rows=chunk.end - chunk.start,
            free_rows=0,
            stores=True,
            total_tokens=tokens,
            times=times,
        )

    def of_request(self, request: TokenRequest) -> Segment:
        """The segment of a request: its suffix and candidates."""
        times = None
        if request.prefix_times is not None:
            # A model with a bias by time allows no suffix: all rows are candidates, and have the time of the query.
            own = request.rows[:, Column.TIME].copy()
            times = SegmentTimes(np.concatenate((request.prefix_times, own)), own)
        return Segment(
            pages=request.pages,
            context_tokens=request.prefix_tokens,
            causal_rows=request.suffix_tokens,
            free_rows=request.num_candidates,
            stores=False,
            total_tokens=request.prefix_tokens + request.suffix_tokens,
            times=times,
        )


_FLOAT_BYTES = 4
_TOKEN_BYTES = 8 * len(Column)


class OwnLayers(PagedRanker):
    """Any family of layers on any device of torch."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        device: Device,
        geometry: KvGeometry,
        compute_dtype: ComputeDtype,
        choose: AttentionChooser,
        graphs: bool,
        device_table_bytes: int,
    ) -> None:
        """`choose`: selects the attention back end.

        `graphs`: run forwards from captured graphs, if the back end can be captured (`graphs.py`).
        `device_table_bytes`: larger tables stay in host memory (`inputs/tables.py`).
        """
        config = self._config = checkpoint.config
        self._device, self._compute_dtype = device, compute_dtype
        # Not from `known_items`: a list of millions of ids is large.
        self.vocabulary = checkpoint.vocabulary()
        self._ids = checkpoint.tensors.get(IDS_TENSOR)
        self._gates = FeatureGates(config.contextual_features)
        self._lookup = TokenLookup(config, self.vocabulary)
        self._segmenting = Segmenting(config)
        on_host = checkpoint.large_tables(device_table_bytes)
        self.weights_bytes = checkpoint.weights_bytes - sum(checkpoint.tensors[name].nbytes for name in on_host)
        shapes = {name: tuple(tensor.shape) for name, tensor in checkpoint.tensors.items()}
        self.weights_bytes += copied_bytes(shapes, torch_dtype(compute_dtype), device.torch_device.type)
        tensors = {
            name: tensor if name in on_host else tensor.to(device.torch_device)
            for name, tensor in checkpoint.tensors.items()
            if name != IDS_TENSOR
        }
        placement = Placement(on_host, device.sent)
        self._embedding = TokenEmbedding(config, tensors, placement)
        layers = build_layers(config, tensors, torch_dtype(compute_dtype))
        stack = LayerStack(layers, geometry.dtype, device.torch_device)
        self._attention = choose(spec_of(config, compute_dtype), relative_biases(config, tensors), geometry, device)
        self._layers = layer_runner(stack, self._attention, device, graphs)
        self._readout = Readout(config, tensors, placement)

    def shape(self) -> Shape:
        return shape_of(self._config)

    def known_items(self) -> Sequence[int] | None:
        return None if self._ids is None else self._ids.tolist()

    @property
    def backend(self) -> str:
        return self._layers.name

    @property
    def passes_to_warm(self) -> int:  # type: ignore[override]
        return self._layers.passes_to_warm

    def scratch_bytes(self, chunk_rows: int, ranked_rows: int) -> int:
        c = self._config
        values, keys = c.num_heads * c.hidden_dim, c.num_heads * c.attention_dim
        # float32: x before and after the layer and normalised; A, A normalised, and the rows of the output's product.
        full = 3 * c.embedding_dim + 3 * values + c.output_width
        # Of the compute type: the norms, the last rows and the result of a product again, the projection and a copy
        # of its K and V.
        narrow = 2 * c.embedding_dim + values + max(c.projection_width, c.mlp_dim or 0) + 2 * (keys + values)
        narrow += c.output_width
        rows = chunk_rows + ranked_rows
        if self._device.is_cpu:
            # What a product adds to the residual stream, and the rows that it reads, copied with rows of padding.
            rows = padded_rows(rows)
            full += c.embedding_dim + c.output_width
        max_tokens = c.layout().tokens(c.max_prefix_behaviours + c.max_suffix_behaviours) + c.max_candidates
        layers = rows * (full * _FLOAT_BYTES + narrow * self._compute_dtype.size_bytes)
        if self._compute_dtype is ComputeDtype.INT8:
            # The rows of a product divided by their scales, and as int8.
            layers += rows * (_FLOAT_BYTES + 1) * max(c.embedding_dim, c.output_width, c.mlp_dim or 0)
        layers += self._attention.scratch_bytes(rows, max_tokens)
        # Embedding ends before the layers begin, and then keeps only the rows.
        layers = max(layers, rows * input_row_elements(c) * _FLOAT_BYTES)
        # The tokens stay in memory until the read-out has used those of the candidates.
        readout = ranked_rows * readout_row_elements(c) * _FLOAT_BYTES + rows * _TOKEN_BYTES
        return self._layers.scratch_bytes(layers, rows, c.embedding_dim) + readout

    def shown_features(self, features: Int64Array, behaviours: int, candidates: int) -> Int64Array:
        return self._gates.shown(features, behaviours, candidates)

    def prefix_inputs(self, features: Int64Array, behaviours: Behaviours, query_time_ms: int) -> PrefixInputs:
        found = self._lookup.prefix(features, behaviours, query_time_ms)
        return TokenPrefix(
            tokens=found.tokens.shape[0],
            unknown_items=found.unknown_items,
            rows=found.tokens,
            query_time=query_seconds(query_time_ms),
        )

    def rank_inputs(
        self,
        prefix_tokens: int,
        pages: Int32Array,
        suffix: Behaviours,
        candidates: Int64Array,
        query_time_ms: int,
        prefix_timestamps_ms: Int64Array | None,
    ) -> RankInputs:
        found = self._lookup.scored(prefix_tokens, suffix, candidates, query_time_ms)
        return TokenRequest(
            prefix_tokens=prefix_tokens,
            pages=pages,
            rows=found.tokens,
            suffix_tokens=found.tokens.shape[0] - candidates.size,
            num_candidates=int(candidates.size),
            unknown_items=found.unknown_items,
            prefix_times=self._segmenting.prefix_times(prefix_tokens, prefix_timestamps_ms),
        )

    def forward(
        self, kv: PagedKv, chunks: Sequence[PrefixChunk], requests: Sequence[RankInputs]
    ) -> torch.Tensor | None:
        asked = cast("Sequence[TokenRequest]", requests)
        segments: list[Segment] = [self._segmenting.of_chunk(chunk) for chunk in chunks]
        segments += [self._segmenting.of_request(request) for request in asked]
        tokens = np.concatenate(
            [_prefix_of(chunk).rows[chunk.start : chunk.end] for chunk in chunks] + [request.rows for request in asked]
        )
        before = [request.layer_ready for request in requests if request.layer_ready is not None]
        sent = self._device.sent(torch.from_numpy(tokens))
        rows = self._layers(kv, segments, self._embedding(tokens, sent), before)
        return self._scores(rows, sent, sum(chunk.end - chunk.start for chunk in chunks), asked) if asked else None

    def _scores(
        self, rows: torch.Tensor, tokens: torch.Tensor, start: int, requests: Sequence[TokenRequest]
    ) -> torch.Tensor:
        """The scores of the requests. Their rows and tokens begin at `start`."""
        ends = np.cumsum([request.rows.shape[0] for request in requests]) + start
        counts = [request.num_candidates for request in requests]
        asked = [slice(end - count, end) for end, count in zip(ends.tolist(), counts, strict=True)]
        candidates = np.concatenate([request.rows[request.suffix_tokens :] for request in requests])
        return self._readout(torch.cat([rows[of] for of in asked]), torch.cat([tokens[of] for of in asked]), candidates)
