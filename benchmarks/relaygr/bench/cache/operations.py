"""Operations a second of the cache's metadata, with very many users, under each policy. No bytes are moved.

Each operation is timed by itself over users drawn at random, in CPU time of its thread. The policies run one after the
other in one process. The cache is full, so each `fill` evicts.
"""

from __future__ import annotations

import gc
import random
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from relaygr.schemas.digest import BLOCK, DIGEST_BYTES, DigestChain
from relaygr.worker.cache import CacheConfig, Fill, Hit, PrefixCache, PrefixKey
from relaygr.worker.cache.copies import CopyForecast, CopyPriority, CopyRequest
from relaygr.worker.cache.policies import VISIT_US, PolicyName, TierPolicies
from relaygr.worker.cache.transfers import SpillGate
from relaygr.worker.kv import DramGeometry, KvDtype, KvGeometry, PrefixLayout

BEHAVIOURS = 1024
PAGES = 16
GEOMETRY = KvGeometry(1, 1, 1, 1, BEHAVIOURS // PAGES, KvDtype.BFLOAT16)
LAYOUT = PrefixLayout(contextual_tokens=0, tokens_per_behaviour=1)
CHAIN = DigestChain(
    bytes(DIGEST_BYTES), b"".join(bytes([n]) * DIGEST_BYTES for n in range(BEHAVIOURS // BLOCK)), BEHAVIOURS
)
ROUNDS = 5


@dataclass(frozen=True, slots=True)
class OperationFigures:
    """One operation under one policy: the median of `ROUNDS` rounds."""

    measured_at: str
    machine: str
    policy: str
    operation: str
    users: int
    per_second: float
    """On one core."""
    us: float


class InstantMover:
    """A `Mover` that copies nothing and reports success at once."""

    def submit(self, request: CopyRequest) -> bool:
        request.on_done(True)
        return True

    def forecast(self, size_bytes: int, priority: CopyPriority) -> CopyForecast:  # noqa: ARG002
        return CopyForecast(0.0, 0.0)

    def close(self) -> None:
        return


def key_of(user: int) -> PrefixKey:
    """All users have the same history: the cost of an operation does not depend on it."""
    return PrefixKey(f"user-{user:07d}", b"model", CHAIN)


class Filled:
    """A cache with the prefixes of `users` users in both tiers, and no free page."""

    def __init__(self, policy: PolicyName, users: int) -> None:
        self.users = users
        pages = users * PAGES
        config = CacheConfig(DramGeometry(GEOMETRY), LAYOUT, pages, pages, TierPolicies(policy, policy))
        self.cache = PrefixCache(config, InstantMover(), spill_gate=SpillGate(1e12, 1e12))
        self.now_us = 0
        self.newcomers = users
        for user in range(users):
            self.fill(key_of(user))
            self.cache.transfers.spill(key_of(user))

    def fill(self, key: PrefixKey) -> None:
        """Reserve, publish, release."""
        self.now_us += VISIT_US // 100
        fill = self.cache.reserve(key, self.now_us)
        if not isinstance(fill, Fill):
            raise TypeError(f"a cache that is full of evictable prefixes gave {fill}")
        fill.progress(fill.tokens)
        handle = fill.publish(self.now_us)
        if handle is not None:
            self.cache.release(handle)

    def hit(self, key: PrefixKey) -> None:
        """Acquire and release."""
        self.now_us += VISIT_US // 100
        found = self.cache.acquire(key, self.now_us)
        if isinstance(found, Hit):
            self.cache.release(found.handle)

    def miss(self, key: PrefixKey) -> None:
        self.cache.acquire(key, self.now_us)

    def lease(self, key: PrefixKey) -> None:
        """Begin and end a lease."""
        self.cache.lease(key, key.user_id, self.now_us + VISIT_US)
        self.cache.end_lease(key.user_id, key.user_id)

    def spill(self, key: PrefixKey) -> None:
        """Spills a prefix that is in DRAM already, as after most rankings of a returning user."""
        self.cache.transfers.spill(key)

    def reload(self, key: PrefixKey) -> None:
        """Starts and ends a reload of a prefix that HBM does not have."""
        self.cache.transfers.start_reload(key, self.now_us + VISIT_US, self.now_us)

    def demote(self, key: PrefixKey) -> None:
        self.cache.demote((key.user_id,))


def measure(policy: PolicyName, users: int, calls: int) -> Iterator[tuple[str, float]]:
    """(operation, µs a call) of every operation."""
    filled = Filled(policy, users)
    chosen = random.Random(1)

    def present() -> list[PrefixKey]:
        keys: list[PrefixKey] = []
        while len(keys) < calls:
            key = key_of(chosen.randrange(users))
            if filled.cache.peek(key).hbm_behaviours:
                keys.append(key)
        return keys

    def absent() -> list[PrefixKey]:
        first = filled.newcomers
        filled.newcomers += calls
        return [key_of(user) for user in range(first, first + calls)]

    yield "hit", timed(filled.hit, present)
    yield "miss", timed(filled.miss, absent)
    yield "lease and its end", timed(filled.lease, present)
    yield "spill, already there", timed(filled.spill, present)
    yield "demote", timed(filled.demote, present)
    yield "fill with eviction", timed(filled.fill, absent)
    yield "reload with eviction", timed(filled.reload, lambda: only_in_dram(filled, calls))


def only_in_dram(filled: Filled, calls: int) -> list[PrefixKey]:
    """Users whose prefixes HBM has evicted and DRAM has not."""
    keys = []
    for user in range(filled.users):
        key = key_of(user)
        presence = filled.cache.peek(key)
        if presence.dram_behaviours and not presence.hbm_behaviours:
            keys.append(key)
            if len(keys) == calls:
                break
    return keys


def timed(operation: Callable[[PrefixKey], None], make_keys: Callable[[], list[PrefixKey]]) -> float:
    """CPU time of this thread for one call, µs: the median of `ROUNDS` rounds."""
    rounds = []
    for _ in range(ROUNDS):
        keys = make_keys()
        with no_collection():
            started_ns = time.thread_time_ns()
            for key in keys:
                operation(key)
            rounds.append((time.thread_time_ns() - started_ns) / 1000 / max(1, len(keys)))
    return statistics.median(rounds)


@contextmanager
def no_collection() -> Iterator[None]:
    """Stops the garbage collector. A worker freezes its heap after its start instead."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
