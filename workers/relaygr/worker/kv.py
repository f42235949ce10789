"""The shape of K,V in memory. The cache counts it in pages and bytes, the engine reads it as tensors.

`KvGeometry` is the form of a page in the HBM tier, `DramGeometry` the form of the same page in the DRAM tier.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass


class KvDtype(enum.StrEnum):
    """Element type of stored K,V."""

    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"
    INT8 = "int8"
    FLOAT8 = "float8"
    """Sign, 4 bits of exponent, 3 of fraction (e4m3)."""

    @property
    def size_bytes(self) -> int:
        """Of one number, without a scale."""
        return {KvDtype.FLOAT32: 4, KvDtype.BFLOAT16: 2}.get(self, 1)

    @property
    def is_scaled(self) -> bool:
        """Whether each token and head has a scale of its own for K, and one for V."""
        return self in (KvDtype.INT8, KvDtype.FLOAT8)


class DramKvDtype(enum.StrEnum):
    """Element type of K,V in the DRAM tier."""

    SAME = "same"
    BFLOAT16 = "bfloat16"
    INT8 = "int8"

    def keeps(self, dtype: KvDtype) -> bool:
        """Whether a reloaded page of K,V in this type has the bits that were spilled."""
        return self is DramKvDtype.SAME or self.value == dtype.value or dtype.is_scaled


@dataclass(frozen=True, slots=True)
class KvGeometry:
    """K,V of one token and of one page.

    A page is `page_bytes` contiguous bytes with `page_tokens` tokens of every layer, one layer after the other, so that
    a layer can be copied by itself. A layer is its K as [num_heads, page_tokens, attention_dim], then its V as
    [num_heads, page_tokens, hidden_dim]. An arena is uint8 [num_pages, page_bytes].

    In a scaled type, the exponents of K, uint8 [num_heads, page_tokens], and then those of V follow. The value of a
    number is the number times 2^(exponent - 127). So rows that are appended do not change rows that are there, and a
    value is exact in bfloat16, too.
    """

    num_layers: int
    num_heads: int
    attention_dim: int
    hidden_dim: int
    page_tokens: int
    dtype: KvDtype

    @property
    def bytes_per_token(self) -> int:
        of_head = (self.attention_dim + self.hidden_dim) * self.dtype.size_bytes
        return self.num_layers * self.num_heads * (of_head + (2 if self.dtype.is_scaled else 0))

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


_SCALE_BYTES = 4


@dataclass(frozen=True, slots=True)
class DramGeometry:
    """The form of a page of `kv` in the DRAM tier, one layer after the other.

    * `same`: the bytes of the HBM tier.
    * `bfloat16`: each layer's K, then its V, rounded.
    * `int8`: each layer begins with float32 scales, of K [num_heads, page_tokens], then of V; then K as int8
      [num_heads, page_tokens, attention_dim], then V as int8 [num_heads, page_tokens, hidden_dim], then up to 3
      unused bytes, so that the next scales are aligned. The value of a number is the number times its scale. Each
      token and head has its own scale, so other rows of the page do not change it.

    Pages of a scaled type are stored as they are, because no type here is smaller.
    """

    kv: KvGeometry
    dtype: DramKvDtype = DramKvDtype.SAME

    @property
    def is_exact(self) -> bool:
        """Whether a reloaded page has the bits that were spilled."""
        return self.dtype.keeps(self.kv.dtype)

    @property
    def layer_bytes(self) -> int:
        """Bytes of one layer in a page: layer l lies in [l * layer_bytes, (l + 1) * layer_bytes)."""
        if self.is_exact:
            return self.kv.layer_bytes
        elements = self.kv.layer_bytes // self.kv.dtype.size_bytes
        if self.dtype is DramKvDtype.BFLOAT16:
            return elements * KvDtype.BFLOAT16.size_bytes
        used = self.scale_bytes + elements
        return used + -used % _SCALE_BYTES

    @property
    def scale_bytes(self) -> int:
        """Bytes of the scales of K and V at the start of a layer."""
        return 2 * self.kv.num_heads * self.kv.page_tokens * _SCALE_BYTES if self.dtype is DramKvDtype.INT8 else 0

    @property
    def page_bytes(self) -> int:
        return self.kv.num_layers * self.layer_bytes


@dataclass(frozen=True, slots=True)
class PrefixLayout:
    """The tokens of a prefix: the user's contextual tokens, then those of each behaviour."""

    contextual_tokens: int
    tokens_per_behaviour: int

    def tokens(self, behaviours: int) -> int:
        """Tokens of a prefix of `behaviours` behaviours."""
        return self.contextual_tokens + behaviours * self.tokens_per_behaviour
