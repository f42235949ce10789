"""Segments: runs of rows of one user over one page table, which one forward takes through the layers together.

A segment's keys are `context_tokens` tokens whose K,V lie in its pages, then its own rows: `causal_rows` new tokens in
sequence (a chunk of a prefix, or a request's suffix), then `free_rows` candidates. A causal row sees the context and
causal rows up to itself; a candidate sees context, all causal rows and itself; nobody sees a candidate (masks with
options: `mask.py`). Where `stores`, the causal rows' K,V are written to the pages; such a segment has no candidates.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class SegmentTimes:
    """Whole seconds, int64, for a bias by time."""

    keys: NDArray[np.int64]
    """Of each key: context, causal rows, candidates."""
    following: NDArray[np.int64]
    """Of the token after each row; after the last behaviour, and after a candidate, the query time."""


@dataclass(frozen=True, slots=True)
class Segment:
    """One user's rows of a forward."""

    pages: NDArray[np.int32]
    context_tokens: int
    causal_rows: int
    free_rows: int
    stores: bool
    total_tokens: int
    """Tokens of the history as a whole: a chunk's prefix may go on behind it. Candidates stand at this place."""
    times: SegmentTimes | None = None

    @property
    def rows(self) -> int:
        """Rows of this segment in the forward."""
        return self.causal_rows + self.free_rows

    @property
    def causal_tokens(self) -> int:
        """Context and causal rows."""
        return self.context_tokens + self.causal_rows

    @property
    def stored_tokens(self) -> int:
        """Tokens that the pages must hold."""
        return self.causal_tokens if self.stores else self.context_tokens


@dataclass(frozen=True, slots=True)
class Placed:
    """A segment and where its rows begin among those of the forward."""

    segment: Segment
    start: int

    @property
    def causal(self) -> slice:
        """Its causal rows."""
        return slice(self.start, self.start + self.segment.causal_rows)

    @property
    def free(self) -> slice:
        """Its candidates."""
        return slice(self.start + self.segment.causal_rows, self.start + self.segment.rows)

    @property
    def rows(self) -> slice:
        """All its rows."""
        return slice(self.start, self.start + self.segment.rows)


def place(segments: Sequence[Segment]) -> Iterator[Placed]:
    """Each segment with the place of its rows. Raises ValueError unless those that store come first."""
    start, stores = 0, True
    for segment in segments:
        if segment.stores and (not stores or segment.free_rows):
            raise ValueError("chunks come before requests, and hold no candidates")
        yield Placed(segment, start)
        start, stores = start + segment.rows, segment.stores
