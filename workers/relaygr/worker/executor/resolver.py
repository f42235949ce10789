"""Resolves a message to its prefix: the history that it names or carries, cut to the model's limit, and its cache key.

The model's rules (`PrefixRules`) define what may follow a prefix. If prefixes do not grow, the request's
suffix becomes a part of the history, and that history is a separate prefix, computed in full. If K,V depend on the
query time (the time of the retrieval event, which job and request both carry), the key covers it. If prefixes grow, the
behaviours that a cached prefix lacks may be ranked before the request's suffix.
"""

from __future__ import annotations

import struct
from collections import OrderedDict
from dataclasses import replace
from hashlib import blake2b
from typing import Any, Final, Protocol

import numpy as np
from numpy.typing import NDArray

from relaygr.schemas.digest import DIGEST_BYTES, DigestChain, digest_chain, extend_chain
from relaygr.schemas.messages import Behaviours, History, HistoryVersion, RankingRequest
from relaygr.schemas.record import record
from relaygr.worker.cache import PrefixKey
from relaygr.worker.executor.waits import FailedWaits
from relaygr.worker.executor.work import BYTES_PER_TOKEN, ResolvedPrefix
from relaygr.worker.history.resolve import HistoryStatus, ResolvedHistory, StoredHistory, Wanted, resolve, window
from relaygr.worker.model.interface import Engine, EngineLimits

_NO_SUFFIX = Behaviours.empty()
_SPARE_BYTES: Final = 4096
"""A window may keep a quarter more alive than it shows, and this: below, a copy costs more than it frees."""
REMEMBERED_DELETIONS: Final = 65_536
"""Users: far more than are deleted while a piece of work is alive."""


class HistoryReader(Protocol):
    """The user-history store, as the executor reads it."""

    def get(self, user_id: str) -> StoredHistory | None:
        """The newest history of the user that is known."""

    def is_loading(self, partition: int) -> bool:
        """Whether the store has not caught up with the partition yet."""

    def is_settling(self, partition: int) -> bool:
        """Whether the store has not caught up with the partition, which the worker has had for a moment only."""

    def deleted_at_ms(self, user_id: str) -> int:
        """When the user was last deleted, as far as the store knows; ms since the epoch; 0: never."""


@record(frozen=True, slots=True)
class Scored:
    """The numbers of behaviours and candidates that are ranked after a prefix."""

    suffix_behaviours: int
    candidates: int


class Deletions:
    """The users that were deleted lately, so that work which resolved a prefix before does not cache it.

    It remembers the newest `capacity` of them. Whatever was resolved before an older deletion counts as deleted, too:
    it is computed for its own request alone, which is always right.
    """

    def __init__(self, capacity: int = REMEMBERED_DELETIONS) -> None:
        self.count = 0
        """All deletions so far."""
        self._capacity = capacity
        self._last: OrderedDict[str, int] = OrderedDict()
        """Which deletion was the last of each user."""
        self._dropped = 0
        """The newest deletion that is no longer in `_last`."""

    def add(self, user_id: str) -> None:
        """The user was deleted."""
        self.count += 1
        self._last[user_id] = self.count
        self._last.move_to_end(user_id)
        if len(self._last) > self._capacity:
            self._dropped = self._last.popitem(last=False)[1]

    def cover(self, prefix: ResolvedPrefix) -> bool:
        """Whether the user of this prefix was deleted after it was resolved."""
        return self._last.get(prefix.key.user_id, self._dropped) > prefix.deletions


class PrefixResolver:
    """Resolves histories and prefixes for the model that serves now. Belongs to the device thread."""

    def __init__(
        self,
        histories: HistoryReader,
        engine: Engine,
        anchor_behaviours: int,
        deletions: Deletions,
        failed_waits: FailedWaits,
    ) -> None:
        self._histories = histories
        self._deletions = deletions
        self._failed_waits = failed_waits
        self._longest_anchor = anchor_behaviours
        self.use(engine)

    def use(self, engine: Engine) -> None:
        """Resolves for this model from now on."""
        self.engine = engine
        self._anchor_behaviours = longest_anchor(self._longest_anchor, engine.limits)

    def forget(self, user_id: str) -> None:
        """The user was deleted. What was resolved before is not cached from now on: see `is_forgotten`."""
        self._deletions.add(user_id)

    def is_forgotten(self, prefix: ResolvedPrefix) -> bool:
        """Whether the user of this prefix was deleted after it was resolved."""
        return self._deletions.cover(prefix)

    def history(
        self, user_id: str, wanted: Wanted, inline: History | None, partition: int, chosen_ms: int = 0
    ) -> ResolvedHistory:
        """As `read_history`. Nothing arrives for which the user's work has waited in vain."""
        found = read_history(self._histories, user_id, wanted, inline, partition, chosen_ms)
        if wanted is None or not found.may_arrive or found.is_settling:
            return found
        is_in_vain = self._failed_waits.cover(user_id, wanted, self._histories.get(user_id))
        return replace(found, may_arrive=False) if is_in_vain else found

    def prefix(
        self,
        user_id: str,
        resolved: ResolvedHistory,
        query_time_ms: int,
        scored: Scored,
        suffix: Behaviours = _NO_SUFFIX,
    ) -> ResolvedPrefix:
        """The prefix of a resolved history; of an unknown one, that of a user without behaviours or features.

        `query_time_ms`: the time of the retrieval event. `scored`: the request's numbers, or the expected ones; a model
        may hide features by them. `suffix`: the request's own; it may become a part of the prefix.
        """
        history, chain = resolved.history, resolved.chain
        if history is None or chain is None:
            history = History(user_id, 0, np.empty(0, "<i8"), _NO_SUFFIX)
            chain = digest_chain(history.features, history.behaviours)
        engine, rules = self.engine, self.engine.rules
        unknown_features = engine.unknown_features(history.features)
        shown = engine.shown_features(history.features, chain.length + scored.suffix_behaviours, scored.candidates)
        hides_features = shown is not history.features
        if hides_features:
            history = replace(history, features=shown)
            chain = history.chain()
        folded = not rules.grows and len(suffix) > 0
        followed_by = scored.suffix_behaviours if rules.grows else 0
        if folded:
            behaviours = history.behaviours + suffix
            history = History(user_id, history.number, history.features, behaviours)
            chain = extend_chain(chain, behaviours)
        cut = window(history, chain, engine.limits.max_prefix_behaviours, self._anchor_behaviours)
        behaviours, chain = cut.history.behaviours, cut.chain
        features, held_bytes = history.features, 0
        if folded or resolved.status is not HistoryStatus.INLINE:
            # The arrays of an inline history are counted with its message.
            features, behaviours, held_bytes = _detached(features, behaviours)
        if rules.uses_query_time:
            chain = _chain_at(query_time_ms, chain, behaviours)
        return ResolvedPrefix(
            key=PrefixKey(user_id, engine.namespace, chain, behaviours, growable=rules.grows),
            features=features,
            behaviours=behaviours,
            suffix=_NO_SUFFIX if folded else suffix,
            query_time_ms=query_time_ms,
            tokens=engine.layout.tokens(chain.length),
            scored_tokens=followed_by * engine.layout.tokens_per_behaviour + scored.candidates,
            version=resolved.version,
            # `is_stale`, without a call for each request.
            stale=resolved.stale is not None,
            stale_cause=resolved.stale,
            loading=resolved.loading,
            revision=engine.revision,
            deletions=self._deletions.count,
            for_one_impression=folded or rules.uses_query_time,
            unknown_actions=engine.unknown_actions(behaviours),
            unknown_features=unknown_features,
            hides_features=hides_features,
            held_bytes=held_bytes + len(chain.packed) + BYTES_PER_TOKEN * engine.layout.tokens(chain.length),
        )

    @staticmethod
    def serves_all_that_name(prefix: ResolvedPrefix, version: HistoryVersion | None) -> bool:
        """Whether every impression that names this version of the history has this prefix."""
        is_general = not (prefix.for_one_impression or prefix.hides_features or prefix.stale)
        return is_general and version is not None and prefix.version == version

    def again(
        self, known: ResolvedPrefix, request: RankingRequest, scored: Scored, partition: int
    ) -> ResolvedPrefix | None:
        """The prefix of a request, from that which its job has resolved; None if it may be another one.

        The version that both name stands for the content, so the history need not be read again.
        """
        engine, version = self.engine, request.history_version
        if known.revision != engine.revision or request.history is not None or request.diverted is not None:
            return None
        if version is None or not self.serves_all_that_name(known, version):
            return None
        if scored.suffix_behaviours and not engine.rules.grows:
            return None
        shown = engine.shown_features(known.features, version.length + scored.suffix_behaviours, scored.candidates)
        if shown is not known.features:
            return None
        return replace(
            known,
            suffix=request.suffix,
            query_time_ms=request.query_time_ms,
            scored_tokens=self.scored_tokens(scored.suffix_behaviours, scored.candidates),
            loading=self._histories.is_loading(partition),
        )

    def shortened(self, prefix: ResolvedPrefix, prefix_tokens: int) -> ResolvedPrefix:
        """The newest behaviours that fit into `prefix_tokens`. It is never cached: its key identifies no prefix."""
        layout = self.engine.layout
        kept = max(0, prefix_tokens - layout.contextual_tokens) // layout.tokens_per_behaviour
        newest = prefix.behaviours[len(prefix.behaviours) - kept :]
        features, behaviours, held_bytes = _detached(prefix.features, newest)
        return replace(
            prefix,
            key=PrefixKey(prefix.key.user_id, b"", DigestChain(prefix.key.chain.seed, b"", 0)),
            features=features,
            behaviours=behaviours,
            unknown_actions=self.engine.unknown_actions(behaviours),
            tokens=layout.tokens(kept),
            for_one_impression=True,
            held_bytes=held_bytes + BYTES_PER_TOKEN * layout.tokens(kept),
        )

    def tail_as_suffix(self, prefix: ResolvedPrefix, cached_behaviours: int) -> Behaviours | None:
        """The behaviours after the first `cached_behaviours`, with the suffix; None where they may not be a suffix."""
        if not self.tail_may_be_suffix(prefix, cached_behaviours, len(prefix.suffix)):
            return None
        return prefix.behaviours[cached_behaviours:] + prefix.suffix

    def tail_may_be_suffix(self, prefix: ResolvedPrefix, cached_behaviours: int, suffix_behaviours: int) -> bool:
        """Whether the model takes the behaviours after the first `cached_behaviours` before a suffix of this length."""
        tail = len(prefix.behaviours) - cached_behaviours
        limits, rules = self.engine.limits, self.engine.rules
        return rules.grows and cached_behaviours > 0 and tail + suffix_behaviours <= limits.max_suffix_behaviours

    def scored_tokens(self, suffix_behaviours: int, candidates: int) -> int:
        """The tokens of a ranking pass, as the latency model counts them."""
        behaviours = suffix_behaviours if self.engine.rules.grows else 0
        return behaviours * self.engine.layout.tokens_per_behaviour + candidates

    def expected_tokens(self, wanted: Wanted, known: int) -> int:
        """Prefix tokens of a history that is not known yet, or of the one of this length that is."""
        length = max(known, wanted.length if wanted is not None else 0)
        return self.engine.layout.tokens(min(length, self.engine.limits.max_prefix_behaviours))


def read_history(
    histories: HistoryReader, user_id: str, wanted: Wanted, inline: History | None, partition: int, chosen_ms: int
) -> ResolvedHistory:
    """The history to use. `chosen_ms`: when `wanted` was chosen, ms since the epoch. Raises HistoryMismatchError if the
    inline history is not the version that is named.
    """
    if inline is not None:
        return resolve(None, wanted, inline, loading=False)
    # Asked first: the store may catch up between the calls.
    loading = histories.is_loading(partition)
    is_settling = loading and histories.is_settling(partition)
    stored = histories.get(user_id)
    if stored is None and not loading:
        # The store found damage, and reads the partition again.
        loading = histories.is_loading(partition)
        is_settling = loading and histories.is_settling(partition)
    found = resolve(stored, wanted, None, loading)
    if found.stale is not None and wanted is not None:
        found = resolve(stored, wanted, None, loading, is_deleted=histories.deleted_at_ms(user_id) > chosen_ms)
    # What is stored may be old, or of a user who was deleted since, unless the request proves to know the content.
    may_change = stored is None or found.may_arrive or not isinstance(wanted, HistoryVersion)
    return replace(found, is_settling=True) if is_settling and may_change else found


def longest_anchor(anchor_behaviours: int, limits: EngineLimits) -> int:
    """The step in which a history above the model's limit is cut: a large one would leave little of one just above."""
    return min(anchor_behaviours, max(1, limits.max_prefix_behaviours // 4))


def _chain_at(query_time_ms: int, chain: DigestChain, behaviours: Behaviours) -> DigestChain:
    """The chain of a prefix that is valid for one query time: its seed covers that time, too."""
    seed = blake2b(chain.seed + struct.pack("<q", query_time_ms), digest_size=DIGEST_BYTES).digest()
    return extend_chain(DigestChain(seed, b"", 0), behaviours)


def _detached(features: NDArray[np.int64], behaviours: Behaviours) -> tuple[NDArray[np.int64], Behaviours, int]:
    """Features and behaviours, and the bytes of the buffers that they keep alive. They are copied if they keep alive
    much more than they show, such as the record of a long history of which a window is used.
    """
    arrays: tuple[Any, ...] = (features, behaviours.items, behaviours.actions, behaviours.timestamps_ms)
    shown_bytes = held_bytes = 0
    counted: set[int] = set()
    for array in arrays:
        shown_bytes += array.nbytes
        # The object that owns the memory: the array itself, another array, or the bytes of a message or record.
        owner = array
        while isinstance(owner, np.ndarray) and owner.base is not None:
            owner = owner.base
        if id(owner) not in counted:
            counted.add(id(owner))
            held_bytes += memoryview(owner).nbytes
    if held_bytes <= shown_bytes + shown_bytes // 4 + _SPARE_BYTES:
        return features, behaviours, held_bytes
    copies = Behaviours(behaviours.items.copy(), behaviours.actions.copy(), behaviours.timestamps_ms.copy())
    return features.copy(), copies, shown_bytes
