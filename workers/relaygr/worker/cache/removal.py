"""Taking entries away, or first in line: of a user, of a model, of all. Readers keep their pages, and work in flight is
discarded when it ends. What touches very many entries takes the lock for some at a time.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable

from relaygr.worker.cache.ledger import TierLedger

# How many entries one section under the lock handles.
BATCH = 256


def remove_user(ledger: TierLedger, user_id: str) -> int:
    """Nothing of the user can be found any more, in either tier; how many entries that were."""
    with ledger.section() as after:
        entries = [(tier, entry) for tier in ledger.tiers for entry in tier.index.of_user(user_id)]
        ledger.remove(after, entries)
        return len(entries)


def drop_namespace(ledger: TierLedger, namespace: bytes) -> int:
    """Frees everything of one model; how many entries."""
    dropped = 0
    while True:
        with ledger.section() as after:
            entries = [(tier, entry) for tier in ledger.tiers for entry in tier.index.of_namespace(namespace, BATCH)]
            if not entries:
                return dropped
            ledger.remove(after, entries)
            dropped += len(entries)


def drop_others(ledger: TierLedger, namespace: bytes | None) -> int:
    """Frees everything of all other models, of all models for None; how many entries."""
    with ledger.section():
        others = {other for tier in ledger.tiers for other in tier.index.namespaces()} - {namespace}
    return sum(drop_namespace(ledger, other) for other in others)


def demote(ledger: TierLedger, users: Iterable[str] | Callable[[str], bool]) -> int:
    """Puts these users' entries first in the order of eviction; how many."""
    if callable(users):
        with ledger.section():
            known = {user_id for tier in ledger.tiers for user_id in tier.index.users()}
        users = filter(users, known)
    demoted = 0
    remaining = iter(users)
    while batch := list(itertools.islice(remaining, BATCH)):
        with ledger.section():
            for tier, user_id in itertools.product(ledger.tiers, batch):
                for entry in tier.index.of_user(user_id):
                    tier.demote(entry)
                    demoted += 1
    return demoted
