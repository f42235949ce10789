"""The attention that a model asks for (sizes, scale, mask), and torch's element types."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from relaygr.worker.kv import KvDtype
from relaygr.worker.model.config import ModelConfig
from relaygr.worker.model.options import ComputeDtype

_BY_NAME = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def torch_dtype(dtype: KvDtype | ComputeDtype) -> torch.dtype:
    """torch's name of an element type."""
    return _BY_NAME[dtype.value]


def rounding(dtype: KvDtype) -> Callable[[torch.Tensor], torch.Tensor]:
    """What storing and reading back does to K or V: nothing, or a round trip through bfloat16.

    Rows that are never stored (suffix, candidates) take it too, so that they count as much in ranking as they
    would in a prefix.
    """
    if dtype is KvDtype.FLOAT32:
        return lambda x: x
    return lambda x: x.to(torch.bfloat16).to(x.dtype)


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """Sizes are per head; zero switches an option of the mask off. `docs/model.md` says what each option means."""

    num_heads: int
    attention_dim: int
    hidden_dim: int
    alpha: float
    normalizer: float | None
    """N; None: soft-max."""
    contextual_tokens: int = 0
    """Tokens at the beginning of a prefix that see the whole history, and all stand at place 0."""
    max_attn_len: int = 0
    min_full_attn_len: int = 0
    target_group_size: int = 1
    has_bias: bool = False
    """A relative bias is added to the scaled product."""
    compute_dtype: torch.dtype = torch.float32

    @property
    def is_plain(self) -> bool:
        """SiLU; causal rows see all before them, candidates themselves, and no bias: what fast back ends compute."""
        return self.is_plain_but_for_groups and self.target_group_size == 1

    @property
    def is_plain_but_for_groups(self) -> bool:
        """The same, but that candidates may see earlier ones of their group."""
        return (
            self.normalizer is not None and self.contextual_tokens == 0 and self.max_attn_len == 0 and not self.has_bias
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
    """The attention that a configuration asks for."""
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
        compute_dtype=torch_dtype(compute_dtype),
    )
