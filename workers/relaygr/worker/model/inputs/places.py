"""Where tokens stand: rows of the position table, from the start of the sequence or back from its end.

With C contextual tokens, T candidates, H tokens of contextual part and history, and P rows:

    from the start   p(i) = min(i, P - 1), candidates all at min(H, P - 1): good for any later request
    from the end     p(i) = i for i < C, else min(H - i + C, P - 1), candidates all at min(C, P - 1): good for one
                     impression only, since one more behaviour moves every row

Sources: NVIDIA's recsys-examples (start), Meta's generative-recommenders (end).
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

Int64Array = NDArray[np.int64]


class Places(Protocol):
    """How places are counted."""

    def of_prefix(self, tokens: int) -> Int64Array:
        """Places [tokens] of a prefix, contextual tokens first."""

    def of_scored(self, prefix_tokens: int, suffix_tokens: int, candidates: int) -> Int64Array:
        """Places [suffix tokens + candidates] behind such a prefix."""


class FromStart:
    """Counts from the start; all candidates stand behind the last behaviour."""

    def __init__(self, rows: int) -> None:
        self._last = rows - 1

    def of_prefix(self, tokens: int) -> Int64Array:
        return np.minimum(np.arange(tokens, dtype=np.int64), self._last)

    def of_scored(self, prefix_tokens: int, suffix_tokens: int, candidates: int) -> Int64Array:
        places = np.arange(prefix_tokens, prefix_tokens + suffix_tokens + candidates, dtype=np.int64)
        return np.minimum(places, min(prefix_tokens + suffix_tokens, self._last), out=places)


class FromEnd:
    """Counts back from the history's end. A suffix would move the prefix, so there is none."""

    def __init__(self, rows: int, contextual_tokens: int) -> None:
        self._last = rows - 1
        self._contextual = contextual_tokens

    def of_prefix(self, tokens: int) -> Int64Array:
        places = tokens - np.arange(tokens, dtype=np.int64) + self._contextual
        np.minimum(places, self._last, out=places)
        places[: self._contextual] = np.arange(min(tokens, self._contextual))
        return places

    def of_scored(self, prefix_tokens: int, suffix_tokens: int, candidates: int) -> Int64Array:  # noqa: ARG002
        if suffix_tokens:
            raise ValueError("positions count from the history's end: send the short-term behaviours in the history")
        return np.full(candidates, min(self._contextual, self._last), dtype=np.int64)


class NoPlaces:
    """For models without positions."""

    def of_prefix(self, tokens: int) -> Int64Array:
        return np.zeros(tokens, dtype=np.int64)

    def of_scored(self, prefix_tokens: int, suffix_tokens: int, candidates: int) -> Int64Array:  # noqa: ARG002
        return np.zeros(suffix_tokens + candidates, dtype=np.int64)
