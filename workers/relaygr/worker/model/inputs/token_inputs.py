"""The way from a history, a suffix and candidates to the rows that enter the first layer.

    row = scale * content + position[place] + time[age]

Its first half (`prefix`, `scored`) is numpy, cheap, and callable from any thread; the second (`embed`) runs on the
device. Which form the content has, where places are counted from and how ages are bucketed is chosen once, at load.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812 - its usual name
from numpy.typing import NDArray

from relaygr.schemas.messages import Behaviours
from relaygr.worker.model.config import ModelConfig
from relaygr.worker.model.inputs.content import build_content
from relaygr.worker.model.inputs.forms import Added, Bits, Form, Interleaved, ItemsAlone
from relaygr.worker.model.inputs.places import FromEnd, FromStart, NoPlaces, Places
from relaygr.worker.model.inputs.times import Ages, BucketedAges, NoAges, query_seconds, seconds
from relaygr.worker.model.inputs.tokens import Column, FoundTokens, Tokens, no_tokens
from relaygr.worker.model.inputs.vocabulary import FeatureRows, Vocabulary
from relaygr.worker.model.options import InputForm, PositionOrigin, TimeEncoding

Int64Array = NDArray[np.int64]
Send = Callable[[torch.Tensor], torch.Tensor]


class TokenLookup:
    """Histories, suffixes and candidates to tokens, in numpy."""

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
        """Suffix behaviours, then candidates, behind a prefix. Raises ValueError for a suffix that cannot be."""
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


class TokenEmbedding:
    """Tokens to rows, on the device."""

    def __init__(self, config: ModelConfig, tensors: Mapping[str, torch.Tensor], send: Send | None = None) -> None:
        """`send` copies to the tensors' device (`Device.sent`); without it they are on the CPU."""
        self._content = build_content(config, tensors)
        self._send = send if send is not None else _stay
        self._scale = config.embedding_scale
        self._tables = [
            (column, tensors[name])
            for column, name in ((Column.PLACE, "positions.weight"), (Column.AGE, "times.weight"))
            if name in tensors
        ]

    def __call__(self, tokens: Tokens, sent: torch.Tensor | None = None) -> torch.Tensor:
        """Tokens [n, 5] -> rows [n, D]. `sent`: the same tokens, where the device has them already."""
        others = np.flatnonzero(tokens[:, Column.CONTENT] < 0)
        if sent is None:
            sent = self._moved(tokens)
        x = self._content(sent, self._moved(others) if others.size else None)
        if self._scale != 1.0:
            x = x.mul_(self._scale)
        for column, table in self._tables:
            x = x.add_(F.embedding(sent[:, column], table))
        return x

    def _moved(self, array: Int64Array) -> torch.Tensor:
        return self._send(torch.from_numpy(np.ascontiguousarray(array)))


def _stay(host: torch.Tensor) -> torch.Tensor:
    return host


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
