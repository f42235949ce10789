"""Which prefixes an owner's DRAM probably still holds: a guess from what was lately admitted.

A returning user's job costs a reload, not a pre-infer. Charged in full, it would be refused for load just when the
cache carries most, and the job is also what makes the worker reload. So the trigger remembers whom it admitted,
newest first, up to the owner's DRAM capacity. A wrong guess costs little: the worker, which knows, checks again.

Least recently used first out, as in the cache's default policy. Pure; not thread-safe.
"""

from __future__ import annotations

from collections import OrderedDict

from relaygr.admission.policy import NOTHING_CACHED, CachedPrefix, OwnerView, Tier

MAX_USERS_PER_OWNER = 100_000
MAX_OWNERS = 64
"""Owners remembered at a time. One process deciding for more forgets, and charges in full."""


class RecentPrefixes:
    """Admitted prefixes by owner and user."""

    def __init__(self) -> None:
        self._owners: OrderedDict[str, _Owner] = OrderedDict()

    def guess(self, owner: OwnerView, user_id: str) -> CachedPrefix:
        """What the owner's DRAM probably holds of the user's prefix."""
        known = self._owners.get(owner.worker_id)
        tokens = 0 if known is None else known.tokens.get(user_id, 0)
        return CachedPrefix(Tier.DRAM, tokens) if tokens else NOTHING_CACHED

    def note(self, owner: OwnerView, user_id: str, tokens: int) -> None:
        """A prefix of `tokens` tokens was admitted on `owner`."""
        known = self._owners.get(owner.worker_id)
        if known is None:
            known = self._owners[owner.worker_id] = _Owner()
            if len(self._owners) > MAX_OWNERS:
                self._owners.popitem(last=False)
        self._owners.move_to_end(owner.worker_id)
        known.note(user_id, tokens, owner.dram_capacity_bytes // max(1, owner.kv_bytes_per_token))


class _Owner:
    """One owner's admitted prefixes, least recent first."""

    __slots__ = ("_total", "tokens")

    def __init__(self) -> None:
        self.tokens: OrderedDict[str, int] = OrderedDict()
        self._total = 0

    def note(self, user_id: str, tokens: int, capacity_tokens: int) -> None:
        self._total += tokens - self.tokens.pop(user_id, 0)
        self.tokens[user_id] = tokens
        while self.tokens and (self._total > capacity_tokens or len(self.tokens) > MAX_USERS_PER_OWNER):
            self._total -= self.tokens.popitem(last=False)[1]
