"""Taking entries away, or first in line: of a user, of a model, of all. Readers keep their pages, and work in flight is
discarded when it ends. What touches very many entries takes the lock for some at a time.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable

from relaygr.worker.cache.books import Books

# How many entries one section under the lock handles.
BATCH = 256


def remove_user(books: Books, user_id: str) -> int:
    """Nothing of the user can be found any more, in either tier; how many entries that were."""
    with books.section() as after:
        entries = [(tier, entry) for tier in books.tiers for entry in tier.index.of_user(user_id)]
        books.remove(after, entries)
        return len(entries)


def drop_namespace(books: Books, namespace: bytes) -> int:
    """Frees everything of one model; how many entries."""
    dropped = 0
    while True:
        with books.section() as after:
            entries = [(tier, entry) for tier in books.tiers for entry in tier.index.of_namespace(namespace, BATCH)]
            if not entries:
                return dropped
            books.remove(after, entries)
            dropped += len(entries)


def drop_others(books: Books, namespace: bytes | None) -> int:
    """Frees everything of all other models, of all models for None; how many entries."""
    with books.section():
        others = {other for tier in books.tiers for other in tier.index.namespaces()} - {namespace}
    return sum(drop_namespace(books, other) for other in others)


def demote(books: Books, users: Iterable[str] | Callable[[str], bool]) -> int:
    """Puts these users' entries first in the order of eviction; how many."""
    if callable(users):
        with books.section():
            known = {user_id for tier in books.tiers for user_id in tier.index.users()}
        users = filter(users, known)
    demoted = 0
    remaining = iter(users)
    while batch := list(itertools.islice(remaining, BATCH)):
        with books.section():
            for tier, user_id in itertools.product(books.tiers, batch):
                for entry in tier.index.of_user(user_id):
                    tier.demote(entry)
                    demoted += 1
    return demoted
