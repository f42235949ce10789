"""Segments: rows of one user over one page table. One forward computes several segments together.

The keys of a segment are `context_tokens` tokens with K,V in its pages, then its own rows: `causal_rows` new tokens in
sequence (a chunk of a prefix, or a request's suffix), then `free_rows` candidates. A causal row sees the context and
causal rows up to itself. A candidate sees the context, all causal rows and itself. No other row sees a candidate
(`mask.py` describes masks with options). If `stores` is set, K,V of the causal rows are written to the pages; such a
segment has no candidates.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class SegmentTimes:
    """Times of a segment's tokens for a bias by time: whole seconds, int64."""

    keys: NDArray[np.int64]
    """The time of each key: context, causal rows, candidates."""
    following: NDArray[np.int64]
    """The time of the token after each row; after the last behaviour, and after a candidate, the query time."""


@dataclass(frozen=True, slots=True)
class Segment:
    """One user's rows of a forward."""

    pages: NDArray[np.int32]
    context_tokens: int
    causal_rows: int
    free_rows: int
    stores: bool
    total_tokens: int
    """Tokens of the whole history, which may continue after a chunk. Candidates have this place."""
    times: SegmentTimes | None = None

    @property
    def rows(self) -> int:
        """Number of rows of this segment in the forward."""
        return self.causal_rows + self.free_rows

    @property
    def causal_tokens(self) -> int:
        """Number of context tokens and causal rows."""
        return self.context_tokens + self.causal_rows

    @property
    def stored_tokens(self) -> int:
        """Number of tokens that the pages must hold."""
        return self.causal_tokens if self.stores else self.context_tokens


@dataclass(frozen=True, slots=True)
class Placed:
    """A segment, and the index of its first row in the forward."""

    segment: Segment
    start: int

    @property
    def causal(self) -> slice:
        """The causal rows."""
        return slice(self.start, self.start + self.segment.causal_rows)

    @property
    def free(self) -> slice:
        """The candidates."""
        return slice(self.start + self.segment.causal_rows, self.start + self.segment.rows)

    @property
    def rows(self) -> slice:
        """All rows."""
        return slice(self.start, self.start + self.segment.rows)


def place(segments: Sequence[Segment]) -> Iterator[Placed]:
    """Each segment with the index of its first row. Raises ValueError unless segments that store come first."""
    start, stores = 0, True
    for segment in segments:
        if segment.stores and (not stores or segment.free_rows):
            raise ValueError("chunks come before requests, and hold no candidates")
        yield Placed(segment, start)
        start, stores = start + segment.rows, segment.stores
