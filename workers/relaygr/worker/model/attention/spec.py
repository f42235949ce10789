"""The attention of a model (sizes, scale, mask), and torch's element types, with the scales of K,V in one byte.

The scale of a row is the least power of two with which its largest number fits into the type. Then a row that has been
rounded is rounded to itself, and a product of it may be scaled before or after: both give the same bits.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from relaygr.worker.kv import KvDtype
from relaygr.worker.model.config import ModelConfig
from relaygr.worker.model.options import ComputeDtype

_BY_NAME = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "int8": torch.int8,
    "float8": torch.float8_e4m3fn,
}
_MANTISSA_BITS = 23
_INFINITY = 0x7F800000
"""Of float32, as its bits."""


@dataclass(frozen=True, slots=True)
class ScaledType:
    """The largest number of a type in one byte, 127 or 448, as the kernels and torch use it."""

    power: int
    """The largest power of two in it: 6 or 8."""
    round_up: int
    """Added to the bits of a float32, it carries into the exponent if the fraction is above that of the number."""


SCALED = {
    KvDtype.INT8: ScaledType(6, 0x7FFFFF - 0x7E0000),
    KvDtype.FLOAT8: ScaledType(8, 0x7FFFFF - 0x600000),
}


def torch_dtype(dtype: KvDtype | ComputeDtype) -> torch.dtype:
    """The torch type of an element type."""
    return _BY_NAME[dtype.value]


def rounding(dtype: KvDtype) -> Callable[[torch.Tensor], torch.Tensor]:
    """The function that rounds K or V [..., dim] as storing does: identity, or a round trip through the type.

    Rows that are never stored (suffix, candidates) are rounded too, so that a behaviour has the same K,V in the suffix
    as in a prefix.
    """
    if dtype is KvDtype.FLOAT32:
        return lambda x: x
    if dtype.is_scaled:
        return lambda x: widened(*scaled(x, dtype), x.dtype)
    return lambda x: x.to(torch.bfloat16).to(x.dtype)


def scaled(x: torch.Tensor, dtype: KvDtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows [..., dim] as numbers of a scaled type, and their exponents, uint8 [...].

    A row with a number that is not finite has exponent 255, and is not finite when it is widened.
    """
    of_type, wide = SCALED[dtype], x.float()
    bits = wide.abs().amax(-1).view(torch.int32)
    exponents = (((bits + of_type.round_up) >> _MANTISSA_BITS) - of_type.power).clamp_(1, 254)
    exponents.masked_fill_(bits >= _INFINITY, 255)
    inverse = ((254 - exponents) << _MANTISSA_BITS).view(torch.float32)
    numbers = wide * inverse.unsqueeze(-1)
    if dtype is KvDtype.INT8:
        numbers.round_()
    return numbers.to(torch_dtype(dtype)), exponents.to(torch.uint8)


def widened(numbers: torch.Tensor, exponents: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The values [..., dim] of numbers of a scaled type with their exponents [...]."""
    scales = (exponents.to(torch.int32) << _MANTISSA_BITS).view(torch.float32)
    return numbers.float().mul_(scales.unsqueeze(-1)).to(dtype)


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """The attention of a model, the same in all layers. Sizes are per head; 0 switches an option of the mask off.

    docs/model.md describes the options.
    """

    num_heads: int
    attention_dim: int
    hidden_dim: int
    alpha: float
    normalizer: float | None
    """N; None: soft-max."""
    contextual_tokens: int = 0
    """Number of tokens at the beginning of a prefix that see the whole history and all have place 0."""
    max_attn_len: int = 0
    min_full_attn_len: int = 0
    target_group_size: int = 1
    has_bias: bool = False
    """A relative bias is added to the scaled product."""
    compute_dtype: torch.dtype = torch.float32
    may_round: bool = False
    """Whether float32 q, K, V and weights may be rounded to bfloat16, where that is faster: with products in int8."""

    @property
    def is_plain(self) -> bool:
        """The plain mask, which the fast back ends compute.

        SiLU attention without a bias; a causal row sees itself and all earlier keys, a candidate all causal keys and
        itself.
        """
        return (
            self.normalizer is not None
            and self.contextual_tokens == 0
            and self.max_attn_len == 0
            and self.target_group_size == 1
            and not self.has_bias
        )

    @property
    def row_width(self) -> int:
        """Elements of one row of V, and of the result."""
        return self.num_heads * self.hidden_dim

    @property
    def key_width(self) -> int:
        """Elements of one row of Q or K."""
        return self.num_heads * self.attention_dim


def spec_of(config: ModelConfig, compute_dtype: ComputeDtype) -> AttentionSpec:
    """The attention of a configuration."""
    return AttentionSpec(
        num_heads=config.num_heads,
        attention_dim=config.attention_dim,
        hidden_dim=config.hidden_dim,
        alpha=config.alpha,
        normalizer=config.normalizer,
        contextual_tokens=config.layout().contextual_tokens if config.contextual_mask else 0,
        max_attn_len=config.max_attn_len,
        min_full_attn_len=config.min_full_attn_len,
        target_group_size=config.target_group_size,
        has_bias=config.relative_bias is not None,
        compute_dtype=torch_dtype(compute_dtype.of_rows),
        may_round=compute_dtype is ComputeDtype.INT8,
    )
