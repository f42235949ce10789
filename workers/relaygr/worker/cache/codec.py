"""Encodes K,V pages for the DRAM tier, and decodes them. Formats: `relaygr.worker.kv.DramGeometry`.

Pages are uint8 [pages, layers, layer_bytes] for any range of layers, so that a page can be copied layer by layer.
The error of a decoded number is at most half a scale (int8: 1/254 of the largest number of its token and head), or
the rounding to bfloat16 (2^-9 of the number). Encoding a decoded page gives the same bytes, so errors do not add up
over many spills and reloads. A number that is not finite stays not finite, and affects only its own token and head.
"""

from __future__ import annotations

from typing import Protocol

import torch

from relaygr.worker.kv import DramGeometry, DramKvDtype, KvDtype

_INT8_MAX = 127.0
_TINY = torch.finfo(torch.float32).tiny


class PageCodec(Protocol):
    """Works on the device of the tensors, in the calling thread's stream."""

    def encode(self, pages: torch.Tensor, stored: torch.Tensor) -> None:
        """Encodes [pages, layers, kv.layer_bytes] into [pages, layers, dram.layer_bytes]."""

    def decode(self, stored: torch.Tensor, pages: torch.Tensor) -> None:
        """Decodes [pages, layers, dram.layer_bytes] into [pages, layers, kv.layer_bytes]."""


def make_codec(geometry: DramGeometry) -> PageCodec | None:
    """The codec of the DRAM tier; None if it stores pages byte for byte."""
    if geometry.is_exact:
        return None
    return Bfloat16Codec(geometry) if geometry.dtype is DramKvDtype.BFLOAT16 else Int8Codec(geometry)


class Bfloat16Codec:
    """Stores float32 as bfloat16, in half the bytes."""

    def __init__(self, geometry: DramGeometry) -> None:
        self._dtype = _torch_dtype(geometry.kv.dtype)

    def encode(self, pages: torch.Tensor, stored: torch.Tensor) -> None:
        stored.view(torch.bfloat16).copy_(pages.view(self._dtype))

    def decode(self, stored: torch.Tensor, pages: torch.Tensor) -> None:
        pages.view(self._dtype).copy_(stored.view(torch.bfloat16))


class Int8Codec:
    """Stores int8 numbers and a float32 scale for each token and head, separately for K and V."""

    def __init__(self, geometry: DramGeometry) -> None:
        g = geometry.kv
        self._dtype = _torch_dtype(g.dtype)
        self._scale_bytes = geometry.scale_bytes
        self._rows = (g.num_heads, g.page_tokens)
        self._dims = (g.attention_dim, g.hidden_dim)
        self._elements = g.layer_bytes // g.dtype.size_bytes

    def encode(self, pages: torch.Tensor, stored: torch.Tensor) -> None:
        scales, numbers = self._stored_views(stored)
        for values, scale, number in zip(self._split(pages.view(self._dtype)), scales, numbers, strict=True):
            scale.copy_(values.abs().amax(-1).float() / _INT8_MAX)
            # A row of zeros has a scale of zero.
            number.copy_((values.float() / scale.clamp_min(_TINY).unsqueeze(-1)).round_())

    def decode(self, stored: torch.Tensor, pages: torch.Tensor) -> None:
        scales, numbers = self._stored_views(stored)
        for values, scale, number in zip(self._split(pages.view(self._dtype)), scales, numbers, strict=True):
            values.copy_(number.float().mul_(scale.unsqueeze(-1)))

    def _stored_views(self, stored: torch.Tensor) -> tuple[tuple[torch.Tensor, ...], tuple[torch.Tensor, ...]]:
        """Scales [pages, layers, heads, tokens] and int8 numbers [pages, layers, heads, tokens, dim], of K and V."""
        heads, tokens = self._rows
        scales = stored[..., : self._scale_bytes].view(torch.float32)
        numbers = stored[..., self._scale_bytes : self._scale_bytes + self._elements].view(torch.int8)
        return scales.view(*scales.shape[:-1], 2, heads, tokens).unbind(-3), self._split(numbers)

    def _split(self, layers: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """K and V, [pages, layers, heads, tokens, dim], of layers [pages, layers, elements]."""
        heads, tokens = self._rows
        parts = torch.split(layers, [heads * tokens * dim for dim in self._dims], -1)
        return tuple(
            part.view(*part.shape[:-1], heads, tokens, dim) for part, dim in zip(parts, self._dims, strict=True)
        )


def _torch_dtype(dtype: KvDtype) -> torch.dtype:
    return torch.float32 if dtype is KvDtype.FLOAT32 else torch.bfloat16
