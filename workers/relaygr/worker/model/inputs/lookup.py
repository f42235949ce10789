"""Looks up ids, feature values and behaviours as tokens, in numpy: cheap, and callable from any thread.

A contextual feature with `min_tokens` is hidden from sequences with fewer behaviours and candidates together: its
values are unknown there. The content of a prefix then depends on the request's number of candidates, so `FeatureGates`
hides the values before the key is computed: a prefix with other visible features has another key. Source: Meta's
generative-recommenders, minimum lengths.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from relaygr.schemas.messages import Behaviours
from relaygr.worker.model.config import ModelConfig
from relaygr.worker.model.inputs.encodings import (
    Ages,
    BucketedAges,
    FromEnd,
    FromStart,
    NoAges,
    NoPlaces,
    Places,
    query_seconds,
    seconds,
)
from relaygr.worker.model.inputs.known import Vocabulary
from relaygr.worker.model.inputs.tokens import (
    Added,
    Bits,
    Column,
    Form,
    FoundTokens,
    Interleaved,
    ItemsAlone,
    Tokens,
    no_tokens,
)
from relaygr.worker.model.options import ContextualFeature, InputForm, PositionOrigin, TimeEncoding

Int64Array = NDArray[np.int64]


class FeatureRows:
    """Maps values of contextual features to rows of the joint feature table, which has one part for each token.

    A feature of several tokens takes as many values, one for each token. The last row of each part is for unknown and
    missing values.
    """

    def __init__(self, features: tuple[ContextualFeature, ...]) -> None:
        cardinalities = [feature.cardinality for feature in features for _ in range(feature.tokens)]
        self._cardinalities = np.asarray(cardinalities, dtype=np.int64)
        self._offsets = np.concatenate(([0], np.cumsum(self._cardinalities + 1)[:-1])).astype(np.int64)[
            : len(cardinalities)
        ]

    @property
    def total(self) -> int:
        """Number of rows of the joint table."""
        return int(np.sum(self._cardinalities + 1))

    def rows(self, features: Int64Array) -> Int64Array:
        """int64 [contextual tokens]: the row of each value. Values beyond the model's features are ignored."""
        values = np.full(self._cardinalities.size, -1, dtype=np.int64)
        given = min(values.size, features.size)
        values[:given] = features[:given]
        known = (values >= 0) & (values < self._cardinalities)
        return self._offsets + np.where(known, values, self._cardinalities)


_HIDDEN = -1


class FeatureGates:
    """Hides contextual features from short sequences, for one model."""

    def __init__(self, features: tuple[ContextualFeature, ...]) -> None:
        self._min_tokens = np.array(
            [feature.min_tokens for feature in features for _ in range(feature.tokens)], np.int64
        )
        self._most = int(self._min_tokens.max(initial=0))

    def shown(self, features: Int64Array, behaviours: int, candidates: int) -> Int64Array:
        """The values that a sequence of this length shows; the same array if nothing is hidden."""
        tokens = behaviours + candidates
        if tokens >= self._most:
            return features
        hidden = self._min_tokens[: features.size] > tokens
        shown = features.copy()
        shown[: hidden.size][hidden] = _HIDDEN
        return shown


class TokenLookup:
    """Looks up histories, suffixes and candidates as tokens, in numpy."""

    def __init__(self, config: ModelConfig, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._features = FeatureRows(config.contextual_features)
        self._form = _form(config, self._features.total)
        self._places = _places(config)
        self._ages = _ages(config)

    def prefix(self, features: Int64Array, behaviours: Behaviours, query_time_ms: int) -> FoundTokens:
        """Contextual tokens, then behaviours. Missing and unknown features take their unknown row."""
        found = self._vocabulary.rows(behaviours.items)
        contextual = self._features.rows(features)
        first = no_tokens(contextual.size)
        first[:, Column.CONTENT] = ~contextual
        tokens = np.concatenate((first, self._behaviours(found.rows, behaviours)))
        tokens[:, Column.PLACE] = self._places.of_prefix(tokens.shape[0])
        tokens[:, Column.AGE] = self._ages.of(tokens[:, Column.TIME], query_seconds(query_time_ms))
        return FoundTokens(tokens, found.unknown)

    def scored(self, prefix_tokens: int, suffix: Behaviours, candidates: Int64Array, query_time_ms: int) -> FoundTokens:
        """Suffix behaviours, then candidates, after a prefix. Raises ValueError if positions forbid a suffix."""
        found = self._vocabulary.rows(np.concatenate((suffix.items, candidates)))
        before = self._behaviours(found.rows[: len(suffix)], suffix)
        asked = self._form.candidates(found.rows[len(suffix) :])
        asked[:, Column.TIME] = query_seconds(query_time_ms)
        tokens = np.concatenate((before, asked))
        tokens[:, Column.PLACE] = self._places.of_scored(prefix_tokens, before.shape[0], candidates.size)
        tokens[:, Column.AGE] = self._ages.of(tokens[:, Column.TIME], query_seconds(query_time_ms))
        return FoundTokens(tokens, found.unknown)

    def _behaviours(self, rows: Int64Array, behaviours: Behaviours) -> Tokens:
        tokens = self._form.behaviours(rows, behaviours.actions)
        times = seconds(behaviours.timestamps_ms)
        tokens[:, Column.TIME] = np.repeat(times, self._form.tokens_per_behaviour)
        return tokens


def _form(config: ModelConfig, feature_rows: int) -> Form:
    if config.inputs is InputForm.DLRM:
        return Bits()
    if config.inputs is InputForm.INTERLEAVED:
        return Interleaved(config.num_actions, feature_rows)
    return Added(config.num_actions) if config.num_actions else ItemsAlone()


def _places(config: ModelConfig) -> Places:
    if not config.num_positions:
        return NoPlaces()
    if config.position_origin is PositionOrigin.END:
        return FromEnd(config.num_positions, config.contextual_tokens)
    return FromStart(config.num_positions)


def _ages(config: ModelConfig) -> Ages:
    if config.time_encoding is TimeEncoding.NONE:
        return NoAges()
    return BucketedAges(config.time_encoding, config.time_unit_seconds, config.num_times)
