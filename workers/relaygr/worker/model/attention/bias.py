"""The relative bias, which is added to alpha * q.k: by the distance of two tokens, and by the time between them.

    bias(i, j) = positions[N - 1 + place(j) - place(i)] + times[bucket(following(i) - time(j))]
    bucket(s)  = int(log(max(|s|, 1)) / log_base), at most the last

`following(i)` is the time of the token after row i; after the last behaviour, and after a candidate, the query time.
Distances beyond the table use its first or last weight. Source: the research layer of arXiv 2402.17152.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from relaygr.worker.model.attention.mask import AttentionMask
from relaygr.worker.model.attention.segments import Segment
from relaygr.worker.model.config import ModelConfig
from relaygr.worker.model.options import RelativeBias

_LONGEST_SECONDS = 2**54
"""More seconds than any time in 64-bit milliseconds."""


class RelativeBiases:
    """The bias tables of all layers."""

    def __init__(self, config: RelativeBias, positions: list[torch.Tensor], times: list[torch.Tensor] | None) -> None:
        """positions: one table [2 N - 1] a layer; times: one table [time_buckets + 1] a layer, or None."""
        self.log_base = config.log_base
        self.positions = positions
        self.times = times
        self.edges = bucket_edges(config).to(positions[0].device) if times is not None else None

    def of(self, segment: Segment, mask: AttentionMask) -> SegmentBias:
        """The bias of one segment. Raises ValueError if the bias needs times and the segment has none."""
        return SegmentBias(self, segment, mask)


class SegmentBias:
    """The bias of one segment."""

    def __init__(self, biases: RelativeBiases, segment: Segment, mask: AttentionMask) -> None:
        self._biases = biases
        self._mask = mask
        self._first_row = segment.context_tokens
        if biases.times is not None:
            if segment.times is None:
                raise ValueError("a bias by time needs the times of a segment's tokens")
            device = biases.times[0].device
            self._keys = torch.from_numpy(segment.times.keys).to(device)
            self._following = torch.from_numpy(segment.times.following).to(device)

    def tile(self, layer: int, rows: range, keys: range) -> torch.Tensor:
        """float32 [rows, keys]; both ranges are of the segment's tokens."""
        weights = self._biases.positions[layer]
        centre = weights.numel() // 2
        apart = self._mask.places(keys)[None, :] - self._mask.places(rows)[:, None]
        bias = weights[apart.add_(centre).clamp_(0, weights.numel() - 1)]
        if self._biases.times is not None and self._biases.edges is not None:
            first = self._first_row
            following = self._following[rows.start - first : rows.stop - first]
            seconds = (following[:, None] - self._keys[keys.start : keys.stop][None, :]).abs_()
            bias += self._biases.times[layer][torch.bucketize(seconds, self._biases.edges, right=True)]
        return bias


def bucket_edges(config: RelativeBias) -> torch.Tensor:
    """int64, ascending: edge b - 1 is the fewest seconds of bucket b, for the buckets that a time can fall into.

    Comparing whole seconds puts a time into the same bucket on every device; a logarithm in float32 may not. The edges
    are computed with the formula of the bucket.
    """

    def bucket(seconds: torch.Tensor) -> torch.Tensor:
        grown = torch.log(seconds.float()) / config.log_base
        return grown.clamp(max=config.time_buckets).to(torch.int64)

    longest = torch.tensor(_LONGEST_SECONDS)
    wanted = torch.arange(1, int(bucket(longest)) + 1)
    low, high = torch.ones_like(wanted), longest.expand_as(wanted)
    while not torch.equal(low, high):
        middle = (low + high) // 2
        reached = bucket(middle) >= wanted
        low, high = torch.where(reached, low, middle + 1), torch.where(reached, middle, high)
    return low


def relative_biases(config: ModelConfig, tensors: Mapping[str, torch.Tensor]) -> RelativeBiases | None:
    """The bias tables of a checkpoint; None if its configuration has no relative bias."""
    if config.relative_bias is None:
        return None
    layers = range(config.num_layers)
    positions = [tensors[f"layers.{layer}.relative_bias.positions"] for layer in layers]
    times = None
    if config.relative_bias.time_buckets:
        times = [tensors[f"layers.{layer}.relative_bias.times"] for layer in layers]
    return RelativeBiases(config.relative_bias, positions, times)
