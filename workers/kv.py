"""The shape of K,V in memory: what the cache counts in pages and bytes, and the engine reads as tensors."""

from __future__ import annotations

import enum
from dataclasses import dataclass


class KvDtype(enum.StrEnum):
    """Element type of stored K,V."""

    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"

    @property
    def size_bytes(self) -> int:
        return 4 if self is KvDtype.FLOAT32 else 2


@dataclass(frozen=True, slots=True)
class KvGeometry:
    """K,V of one token and of one page.

    A page is `page_bytes` contiguous bytes holding `page_tokens` tokens of every layer, one layer after the
    other, so that a layer can be copied by itself: its K as [num_heads, page_tokens, attention_dim], then its V
    as [num_heads, page_tokens, hidden_dim]. An arena is uint8 [num_pages, page_bytes].
    """

    num_layers: int
    num_heads: int
    attention_dim: int
    hidden_dim: int
    page_tokens: int
    dtype: KvDtype

    @property
    def bytes_per_token(self) -> int:
        return self.num_layers * self.num_heads * (self.attention_dim + self.hidden_dim) * self.dtype.size_bytes

    @property
    def page_bytes(self) -> int:
        return self.page_tokens * self.bytes_per_token

    @property
    def layer_bytes(self) -> int:
        """Bytes of one layer in a page: layer l lies in [l * layer_bytes, (l + 1) * layer_bytes)."""
        return self.page_bytes // self.num_layers

    def pages_for(self, tokens: int) -> int:
        """Pages that hold `tokens` tokens."""
        return -(-tokens // self.page_tokens)


@dataclass(frozen=True, slots=True)
class PrefixLayout:
    """How behaviours become prefix tokens: the user's contextual tokens, then so many a behaviour."""

    contextual_tokens: int
    tokens_per_behaviour: int

    def tokens(self, behaviours: int) -> int:
        """Tokens of a prefix of `behaviours` behaviours."""
        return self.contextual_tokens + behaviours * self.tokens_per_behaviour
