"""Which prefixes the owners probably hold: what a trigger remembers of its decisions."""

from __future__ import annotations

import math
from collections import OrderedDict
from typing import Final

from relaygr.admission.policy import NOTHING_CACHED, CachedPrefix, OwnerView, PrefixTier
from relaygr.trigger.fleet import MAX_WORKERS

MAX_USERS: Final = 4_000_000
"""The largest number of prefixes that are kept, of all owners together: about 1 GiB. Beyond it, some jobs are charged
in full."""


class RecentPrefixes:
    """Estimates which prefixes the DRAM of an owner holds, from the recent decisions. Pure; not thread-safe.

    The job of a returning user costs a reload instead of a pre-infer. If it were charged in full, it would be refused
    for load just when the cache is most useful, and without the job the worker would not reload the prefix. Full
    inference leaves its prefix, too: if each request of such a user counted as full inference, the ranking load would
    be overstated, and leave no room for jobs.

    So the trigger keeps the prefixes of each owner, up to the owner's DRAM capacity. The least recently used prefix is
    evicted first, as in the default cache policy. A new process of the owner takes over its DRAM, but all is forgotten
    when the model changes. A wrong estimate costs little, because the worker decides again with its real cache.

    At most `MAX_USERS` prefixes of `MAX_WORKERS` owners are kept. Beyond that old ones are forgotten, and so, after a
    while, are those of owners that have left the fleet.
    """

    def __init__(self) -> None:
        self._owners: OrderedDict[str, _Owner] = OrderedDict()
        """The owner that was noted least recently comes first."""
        self._users = 0

    def guess(self, owner: OwnerView, user_id: str) -> CachedPrefix:
        """The part of the user's prefix that the owner's DRAM probably holds."""
        known = self._known(owner)
        tokens = 0 if known is None else known.tokens.get(user_id, (0, 0))[0]
        return CachedPrefix(PrefixTier.DRAM, tokens) if tokens else NOTHING_CACHED

    def note(self, owner: OwnerView, user_id: str, tokens: int, now_us: int) -> None:
        """Notes that a prefix of `tokens` tokens is prepared, or ranked in full, on `owner`."""
        if not owner.reuses_prefixes:
            return
        known = self._known(owner)
        if known is None:
            self._forget(owner.worker_id)
            known = self._owners[owner.worker_id] = _Owner(owner.model_revision)
            if len(self._owners) > MAX_WORKERS:
                self._forget(next(iter(self._owners)))
        self._owners.move_to_end(owner.worker_id)
        before = len(known.tokens)
        known.note(user_id, tokens, now_us, owner.dram_capacity_bytes // max(1, owner.kv_bytes_per_token))
        self._users += len(known.tokens) - before
        if self._users > MAX_USERS:
            self._forget_one(owner.worker_id)

    def _forget_one(self, noted: str) -> None:
        """Evicts the older prefix of two: of the owner that was just noted, and of the one that was noted least
        recently.
        """
        worker_id = min((next(iter(self._owners)), noted), key=lambda each: self._owners[each].oldest_us())
        self._owners[worker_id].evict()
        self._users -= 1
        if not self._owners[worker_id].tokens:
            del self._owners[worker_id]

    def _forget(self, worker_id: str) -> None:
        gone = self._owners.pop(worker_id, None)
        if gone is not None:
            self._users -= len(gone.tokens)

    def _known(self, owner: OwnerView) -> _Owner | None:
        known = self._owners.get(owner.worker_id)
        return known if known is not None and known.model_revision == owner.model_revision else None


class _Owner:
    """The prefixes that an owner holds for one model, least recently used first."""

    __slots__ = ("_total", "model_revision", "tokens")

    def __init__(self, model_revision: str) -> None:
        self.model_revision = model_revision
        self.tokens: OrderedDict[str, tuple[int, int]] = OrderedDict()
        """Tokens of each user's prefix, and when it was noted."""
        self._total = 0

    def oldest_us(self) -> float:
        """When the oldest prefix was noted; infinite without prefixes."""
        return next(iter(self.tokens.values()))[1] if self.tokens else math.inf

    def note(self, user_id: str, tokens: int, now_us: int, capacity_tokens: int) -> None:
        self._total += tokens - self.tokens.pop(user_id, (0, 0))[0]
        self.tokens[user_id] = tokens, now_us
        while self.tokens and self._total > capacity_tokens:
            self.evict()

    def evict(self) -> None:
        """Removes the oldest prefix. Only with prefixes."""
        self._total -= self.tokens.popitem(last=False)[1][0]
