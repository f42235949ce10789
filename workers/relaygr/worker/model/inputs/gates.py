"""Contextual features that a model hides from short sequences.

A feature with `min_tokens` counts only from so many behaviours and candidates together on; below, its values are
unknown. What a prefix holds then depends on the request's number of candidates, so the values are hidden before the
prefix is named: a prefix of another view has another key. Source: Meta's generative-recommenders, minimum lengths.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from relaygr.worker.model.options import ContextualFeature

Int64Array = NDArray[np.int64]

_HIDDEN = -1


class FeatureGates:
    """For one model."""

    def __init__(self, features: tuple[ContextualFeature, ...]) -> None:
        self._min_tokens = np.array(
            [feature.min_tokens for feature in features for _ in range(feature.tokens)], np.int64
        )
        self._most = int(self._min_tokens.max(initial=0))

    def shown(self, features: Int64Array, behaviours: int, candidates: int) -> Int64Array:
        """The values that such a sequence shows: the same array where nothing is hidden."""
        tokens = behaviours + candidates
        if tokens >= self._most:
            return features
        hidden = self._min_tokens[: features.size] > tokens
        shown = features.copy()
        shown[: hidden.size][hidden] = _HIDDEN
        return shown
