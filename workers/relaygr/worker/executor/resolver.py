"""From a message to its prefix: the history that it names or carries, cut to what the model takes, and its key.

The model decides what may follow a prefix (`relaygr.worker.model.rules`). Where prefixes do not grow, a request's
suffix is a part of the history: a prefix of its own, computed in full. Where K,V depend on the query time, the key
holds it: the time of the retrieval event, which job and request both carry.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, replace
from hashlib import blake2b
from typing import Protocol

import numpy as np

from relaygr.schemas.digest import DIGEST_BYTES, DigestChain, digest_chain, extend_chain
from relaygr.schemas.messages import Behaviours, History, HistoryVersion
from relaygr.worker.cache import PrefixKey
from relaygr.worker.executor.work import ResolvedPrefix
from relaygr.worker.history.resolve import ResolvedHistory, StoredHistory, resolve, window
from relaygr.worker.model.interface import Engine

_NO_SUFFIX = Behaviours.empty()


class HistoryReader(Protocol):
    """The user-history store, as the worker reads it."""

    def get(self, user_id: str) -> StoredHistory | None:
        """The newest history of the user that is known."""

    def is_loading(self, partition: int) -> bool:
        """Whether the store has yet to catch up with the partition."""


@dataclass(frozen=True, slots=True)
class Scored:
    """What is ranked behind a prefix."""

    suffix_behaviours: int
    candidates: int


class PrefixResolver:
    """Resolves histories and names prefixes, for one engine."""

    def __init__(self, histories: HistoryReader, engine: Engine, anchor_behaviours: int) -> None:
        self._histories = histories
        self._engine = engine
        self._anchor_setting = anchor_behaviours
        # A whole step goes at once: a large one would leave little of a history just above the limit.
        self._anchor_behaviours = min(anchor_behaviours, max(1, engine.limits.max_prefix_behaviours // 4))

    def for_engine(self, engine: Engine) -> PrefixResolver:
        """The same histories, for another model."""
        return PrefixResolver(self._histories, engine, self._anchor_setting)

    def resolve(
        self, user_id: str, wanted: HistoryVersion | None, inline: History | None, partition: int
    ) -> ResolvedHistory:
        """The history to use. Raises HistoryMismatchError if the one carried is not the one named."""
        if inline is not None:
            return resolve(None, wanted, inline, loading=False)
        return resolve(self._histories.get(user_id), wanted, None, self._histories.is_loading(partition))

    def span(
        self,
        user_id: str,
        resolved: ResolvedHistory,
        query_time_ms: int,
        scored: Scored,
        suffix: Behaviours = _NO_SUFFIX,
    ) -> ResolvedPrefix:
        """The prefix of a resolved history; of an unknown one, that of a user without behaviours or features.

        `query_time_ms`: the time of the retrieval event. `scored`: how much the request brings, or is expected to,
        which a model may hide features by. `suffix`: the request's; the span says what of it still follows the prefix.
        """
        history, chain = resolved.history, resolved.chain
        if history is None or chain is None:
            history = History(user_id, 0, np.empty(0, "<i8"), _NO_SUFFIX)
            chain = digest_chain(history.features, history.behaviours)
        shown = self._engine.shown_features(
            history.features, len(history.behaviours) + scored.suffix_behaviours, scored.candidates
        )
        if shown is not history.features:
            history = replace(history, features=shown)
            chain = history.chain()
        rules = self._engine.rules
        folded = len(suffix) > 0 and not rules.grows
        if folded:
            behaviours = history.behaviours + suffix
            history = History(user_id, history.number, history.features, behaviours)
            chain = extend_chain(chain, behaviours)
        cut = window(history, chain, self._engine.limits.max_prefix_behaviours, self._anchor_behaviours)
        behaviours, chain = cut.history.behaviours, cut.chain
        if rules.uses_query_time:
            chain = _chain_at(query_time_ms, chain, behaviours)
        return ResolvedPrefix(
            key=PrefixKey(user_id, self._engine.namespace, chain, behaviours, growable=rules.grows),
            features=history.features,
            behaviours=behaviours,
            suffix=_NO_SUFFIX if folded else suffix,
            query_time_ms=query_time_ms,
            tokens=self._engine.layout.tokens(len(behaviours)),
            version=resolved.version,
            stale=resolved.is_stale,
            loading=resolved.loading,
            revision=self._engine.revision,
            for_one_impression=folded or rules.uses_query_time,
        )

    def shortened(self, span: ResolvedPrefix, prefix_tokens: int) -> ResolvedPrefix:
        """The newest behaviours that fit into `prefix_tokens`. Never cached: its key names nothing."""
        layout = self._engine.layout
        kept = max(0, prefix_tokens - layout.contextual_tokens) // layout.tokens_per_behaviour
        return ResolvedPrefix(
            key=PrefixKey(span.key.user_id, b"", DigestChain(span.key.chain.seed, (), 0)),
            features=span.features,
            behaviours=span.behaviours[len(span.behaviours) - kept :],
            suffix=span.suffix,
            query_time_ms=span.query_time_ms,
            tokens=layout.tokens(kept),
            version=span.version,
            stale=span.stale,
            loading=span.loading,
            revision=span.revision,
            for_one_impression=True,
        )

    def tail_as_suffix(self, span: ResolvedPrefix, cached_behaviours: int) -> Behaviours | None:
        """What follows the first `cached_behaviours`, up to the candidates; None where it may not be a suffix."""
        tail = len(span.behaviours) - cached_behaviours
        too_long = tail + len(span.suffix) > self._engine.limits.max_suffix_behaviours
        if not self._engine.rules.grows or cached_behaviours == 0 or too_long:
            return None
        return span.behaviours[cached_behaviours:] + span.suffix

    def scored_tokens(self, suffix: Behaviours, candidates: int) -> int:
        """Tokens that a ranking pass computes, as the latency model counts them."""
        behaviours = len(suffix) if self._engine.rules.grows else 0
        return behaviours * self._engine.layout.tokens_per_behaviour + candidates

    def expected_tokens(self, wanted: HistoryVersion | None) -> int:
        """Prefix tokens of a version that is not known yet."""
        length = wanted.length if wanted is not None else 0
        return self._engine.layout.tokens(min(length, self._engine.limits.max_prefix_behaviours))


def _chain_at(query_time_ms: int, chain: DigestChain, behaviours: Behaviours) -> DigestChain:
    """The chain of a prefix that is good for one query time: its seed covers that, too."""
    seed = blake2b(chain.seed + struct.pack("<q", query_time_ms), digest_size=DIGEST_BYTES).digest()
    return extend_chain(DigestChain(seed, (), 0), behaviours)
