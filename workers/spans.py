"""From a message to its prefix: the history that it names or carries, cut to what the model takes, and its key."""

from __future__ import annotations

from typing import Protocol

import numpy as np

from schemas.digest import DigestChain, digest_chain
from schemas.messages import Behaviours, History, HistoryVersion
from workers.cache import PrefixKey
from workers.history.record import StoredHistory
from workers.history.resolve import ResolvedHistory, resolve, window
from workers.model.interface import Engine
from workers.work import PrefixSpan


class Histories(Protocol):
    """The user-history store, as the worker reads it."""

    def get(self, user_id: str) -> StoredHistory | None:
        """The newest history of the user that is known."""

    def is_loading(self, partition: int) -> bool:
        """Whether the store has yet to catch up with the partition."""


class SpanResolver:
    """Resolves histories and names prefixes, for one engine."""

    def __init__(self, histories: Histories, engine: Engine, anchor_behaviours: int) -> None:
        self._histories = histories
        self._engine = engine
        # A whole step goes at once: a large one would leave little of a history just above the limit.
        self._anchor_behaviours = min(anchor_behaviours, max(1, engine.limits.max_prefix_behaviours // 4))

    def resolve(
        self, user_id: str, wanted: HistoryVersion | None, inline: History | None, partition: int
    ) -> ResolvedHistory:
        """The history to use. Raises HistoryMismatchError if the one carried is not the one named."""
        if inline is not None:
            return resolve(None, wanted, inline, loading=False)
        return resolve(self._histories.get(user_id), wanted, None, self._histories.is_loading(partition))

    def span(self, user_id: str, resolved: ResolvedHistory) -> PrefixSpan:
        """The prefix of a resolved history; of an unknown one, that of a user without behaviours or features."""
        history, chain = resolved.history, resolved.chain
        if history is None or chain is None:
            history = History(user_id, 0, np.empty(0, "<i8"), Behaviours.empty())
            chain = digest_chain(history.features, history.behaviours)
        cut = window(history, chain, self._engine.limits.max_prefix_behaviours, self._anchor_behaviours)
        behaviours = cut.history.behaviours
        return PrefixSpan(
            key=PrefixKey(user_id, self._engine.namespace, cut.chain, behaviours),
            features=history.features,
            behaviours=behaviours,
            tokens=self._engine.layout.tokens(len(behaviours)),
            version=resolved.version,
            stale=resolved.is_stale,
            loading=resolved.loading,
        )

    def shortened(self, span: PrefixSpan, prefix_tokens: int) -> PrefixSpan:
        """The newest behaviours that fit into `prefix_tokens`. Never cached: its key names nothing."""
        layout = self._engine.layout
        kept = max(0, prefix_tokens - layout.contextual_tokens) // layout.tokens_per_behaviour
        behaviours = span.behaviours[len(span.behaviours) - kept :]
        nothing = PrefixKey(span.key.user_id, b"", DigestChain(span.key.chain.seed, (), 0))
        return PrefixSpan(
            nothing, span.features, behaviours, layout.tokens(kept), span.version, span.stale, span.loading
        )

    def expected_tokens(self, wanted: HistoryVersion | None) -> int:
        """Prefix tokens of a version that is not known yet."""
        length = wanted.length if wanted is not None else 0
        return self._engine.layout.tokens(min(length, self._engine.limits.max_prefix_behaviours))
