"""The entries of one tier: by number, by user, by model. Finds the one that covers most of a key."""

from __future__ import annotations

import itertools
from collections.abc import Iterable

from relaygr.worker.cache.entries import CacheEntry, PrefixMatch, WorkMatch
from relaygr.worker.cache.identity import PrefixKey, common_behaviours


class EntryIndex:
    """Single-threaded: the cache's lock guards it."""

    def __init__(self) -> None:
        self._entries: dict[int, CacheEntry] = {}
        self._by_user: dict[str, list[CacheEntry]] = {}
        self._by_namespace: dict[bytes, dict[int, CacheEntry]] = {}

    def __len__(self) -> int:
        return len(self._entries)

    def __getitem__(self, number: int) -> CacheEntry:
        return self._entries[number]

    def all(self) -> Iterable[CacheEntry]:
        return self._entries.values()

    def add(self, entry: CacheEntry) -> None:
        self._entries[entry.number] = entry
        self._by_user.setdefault(entry.key.user_id, []).append(entry)
        self._by_namespace.setdefault(entry.key.namespace, {})[entry.number] = entry

    def remove(self, entry: CacheEntry) -> None:
        """Leaves no empty list behind: users come and go without end."""
        del self._entries[entry.number]
        siblings = self._by_user[entry.key.user_id]
        siblings.remove(entry)
        if not siblings:
            del self._by_user[entry.key.user_id]
        peers = self._by_namespace[entry.key.namespace]
        del peers[entry.number]
        if not peers:
            del self._by_namespace[entry.key.namespace]

    def find(self, key: PrefixKey) -> PrefixMatch | None:
        """The visible entry that covers most of `key`."""
        best: PrefixMatch | None = None
        for entry in self._by_user.get(key.user_id, ()):
            if entry.is_visible:
                behaviours = common_behaviours(key, entry.key)
                if behaviours > (best.behaviours if best else 0):
                    best = PrefixMatch(entry, behaviours)
        return best

    def find_work(self, key: PrefixKey) -> WorkMatch | None:
        """The work in flight that will cover most of `key`."""
        best: WorkMatch | None = None
        for entry in self._by_user.get(key.user_id, ()):
            if entry.work is not None:
                behaviours = common_behaviours(key, entry.work.key)
                if behaviours > (best.behaviours if best else 0):
                    best = WorkMatch(entry.work, behaviours)
        return best

    def holds_user(self, user_id: str, namespace: bytes | None = None) -> bool:
        """Whether the user has an entry, in that namespace if one is given."""
        entries = self._by_user.get(user_id, ())
        return any(namespace is None or entry.key.namespace == namespace for entry in entries)

    def of_user(self, user_id: str) -> list[CacheEntry]:
        return list(self._by_user.get(user_id, ()))

    def of_namespace(self, namespace: bytes, limit: int) -> list[CacheEntry]:
        """So many of them at most."""
        return list(itertools.islice(self._by_namespace.get(namespace, {}).values(), limit))

    def namespaces(self) -> list[bytes]:
        return list(self._by_namespace)

    def users(self) -> list[str]:
        return list(self._by_user)

    def check(self) -> None:
        """Raises AssertionError if the three indices disagree."""
        for number, entry in self._entries.items():
            _require(entry.number == number and entry.attached, "an entry is indexed under another number")
            _require(entry in self._by_user[entry.key.user_id], "an entry is missing from its user")
            _require(number in self._by_namespace[entry.key.namespace], "an entry is missing from its namespace")
        _require(all(self._by_user.values()) and all(self._by_namespace.values()), "an empty list was left behind")
        _require(sum(map(len, self._by_user.values())) == len(self._entries), "the user index is stale")
        _require(sum(map(len, self._by_namespace.values())) == len(self._entries), "the namespace index is stale")


def _require(condition: bool, what: str) -> None:
    if not condition:
        raise AssertionError(what)
