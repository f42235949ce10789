"""Very many operations on one cache, with changing users and occasional faults: memory stays flat.

RELAYGR_TEST_SOAK_OPERATIONS sets their number: a million before a release. This test does not check contents
(the random sequences of `test_cache_stateful` do). It checks that nothing leaks over time.
"""

from __future__ import annotations

import gc
import os
import random
import tracemalloc
from dataclasses import dataclass, field

import numpy as np
import psutil
import pytest

from relaygr.schemas.digest import BLOCK, DIGEST_BYTES, DigestChain
from relaygr.worker.cache import (
    CacheConfig,
    Fill,
    Handle,
    Hit,
    PendingPrefix,
    PrefixCache,
    PrefixKey,
    Purpose,
    Tier,
    WasteReason,
)
from relaygr.worker.cache.copies import CopyLimits
from relaygr.worker.cache.policies import VISIT_US, PolicyName, TierPolicies
from relaygr.worker.kv import DramGeometry
from tests.worlds.cache import GEOMETRY, LAYOUT, SteppedMover
from tests.worlds.invariants import check_invariants

OPERATIONS = int(os.environ.get("RELAYGR_TEST_SOAK_OPERATIONS", "250000"))
HBM_PAGES, DRAM_PAGES = 400, 1_200
USERS = 5_000
"""At a time; each is another user after a while."""


@dataclass(slots=True)
class Holder:
    """Handles and fills that the users hold now."""

    handles: list[Handle] = field(default_factory=list)
    fills: list[Fill] = field(default_factory=list)
    told: int = 0


class Soak:
    """One cache under random use. `operations` counts calls of the cache."""

    def __init__(self, policies: TierPolicies, seed: int) -> None:
        self.random = random.Random(seed)
        arenas = {Tier.HBM: np.zeros((HBM_PAGES, 1)), Tier.DRAM: np.zeros((DRAM_PAGES, 1))}
        self.mover = SteppedMover(arenas, CopyLimits(max_jobs=16))
        config = CacheConfig(
            DramGeometry(GEOMETRY), LAYOUT, HBM_PAGES, DRAM_PAGES, policies, lease_limit=500, layer_wise=True,
            longest_hold_us=20 * VISIT_US,
        )  # fmt: skip
        self.cache = PrefixCache(config, self.mover)
        self.held = Holder()
        self.now_us = 0
        self.operations = 0
        self.models = [b"model-1", b"model-2"]
        self.leasers: dict[str, str] = {}
        """The user of each recent request."""

    def key(self) -> PrefixKey:
        """The key of a user: mostly of a returning one, whose history grows slowly."""
        generation = self.operations // 50_000
        number = int(self.random.paretovariate(0.8)) % USERS
        length = 20 + number % 90 + (self.operations // 20_000 + number) % 40
        seed = (number % 7 + generation).to_bytes(DIGEST_BYTES, "little")
        blocks = b"".join(
            (number * 1_000 + min(length, (block + 1) * BLOCK)).to_bytes(DIGEST_BYTES, "little")
            for block in range(-(-length // BLOCK))
        )
        user = f"user {number + generation * 37}"
        return PrefixKey(user, self.models[0], DigestChain(seed, blocks, length))

    def run(self, operations: int) -> None:
        end = self.operations + operations
        while self.operations < end:
            self.now_us += self.random.choice((10, 1_000, VISIT_US // 20))
            self.step()
            self.operations += 1

    def step(self) -> None:
        cache, random_, held = self.cache, self.random, self.held
        dice = random_.random()
        if dice < 0.45:
            self.impression()
        elif dice < 0.60:
            if held.handles:
                handle = held.handles.pop(random_.randrange(len(held.handles)))
                # One of a thousand is never released.
                if random_.random() > 0.001:
                    cache.release(handle)
        elif dice < 0.70:
            if held.fills:
                self.end_fill(held.fills.pop(random_.randrange(len(held.fills))))
        elif dice < 0.80:
            if not self.mover.start() and self.mover.under_way:
                self.mover.finish(random_.random() > 0.05)
        elif dice < 0.86:
            cache.transfers.spill(self.key())
        elif dice < 0.92:
            key, request_id = self.key(), f"request {self.operations}"
            cache.lease(key, request_id, self.now_us + 2 * VISIT_US)
            self.leasers[request_id] = key.user_id
            if len(self.leasers) > 200:
                del self.leasers[next(iter(self.leasers))]
        elif dice < 0.95:
            request_id = f"request {self.operations - random_.randrange(100)}"
            cache.end_lease(self.leasers.pop(request_id, ""), request_id, WasteReason.REQUEST_EXPIRED)
        elif dice < 0.98:
            cache.expire_leases(self.now_us)
            cache.revoke_overdue(self.now_us)
        elif dice < 0.99:
            cache.demote([self.key().user_id])
        elif dice < 0.9995:
            cache.invalidate_user(self.key().user_id)
        else:
            self.models.reverse()
            cache.keep_only(self.models[0])

    def impression(self) -> None:
        """A look-up, and the calls that follow from its result."""
        key = self.key()
        found = self.cache.acquire(key, self.now_us, arriving=self.random.choice((None, 0, key.length)))
        if isinstance(found, Hit):
            self.held.handles.append(found.handle)
        elif isinstance(found, PendingPrefix):
            found.add_done_callback(self.tell)
        else:
            reload = self.cache.transfers.start_reload(key, self.now_us + 1_000, self.now_us)
            if isinstance(reload, PendingPrefix):
                reload.add_done_callback(self.tell)
            else:
                fill = self.cache.reserve(key, self.now_us, self.random.choice(list(Purpose)))
                if isinstance(fill, Fill):
                    self.held.fills.append(fill)
        # A worker holds few at a time.
        while len(self.held.handles) > 20:
            self.cache.release(self.held.handles.pop(0))
        while len(self.held.fills) > 10:
            self.end_fill(self.held.fills.pop(0))

    def tell(self, _: PendingPrefix) -> None:
        self.held.told += 1

    def end_fill(self, fill: Fill) -> None:
        dice = self.random.random()
        if dice < 0.05:
            # A few are never ended.
            if dice > 0.002:
                fill.abort()
            return
        fill.progress(fill.tokens)
        handle = fill.publish(self.now_us)
        if handle is not None:
            self.held.handles.append(handle)

    def index_sizes(self) -> dict[str, int]:
        """The length of every container of the metadata."""
        sizes = {"pending": len(self.cache.ledger.pending), "copies": len(self.mover)}
        for tier in self.cache.ledger.tiers:
            by_name = {
                "entries": len(tier.index),
                "users": len(tier.index.by_user),
                "works": len(tier.works),
                "pins": len(tier.pins),
                "held": len(tier.held_until_us),
                "leases": len(tier.leases),
                "lease times": len(tier.leases._by_end),
                "ordered": len(tier.policy),
            }
            sizes |= {f"{tier.tier} {name}": size for name, size in by_name.items()}
        return sizes


LIMITS = {"pending": HBM_PAGES, "copies": 16, "hbm leases": 500, "hbm lease times": 1_064}


@pytest.mark.soak
@pytest.mark.timeout(max(300, OPERATIONS // 2_000))
def test_very_many_operations_leave_memory_flat() -> None:
    """The policies share the operations. Traced and resident memory may not grow after the first tenth."""
    process = psutil.Process()
    share = OPERATIONS // len(PolicyName)
    for seed, name in enumerate(PolicyName):
        soak = Soak(TierPolicies(name, name), seed)
        soak.run(share // 10)
        gc.collect()
        resident_bytes = process.memory_info().rss
        largest: dict[str, int] = {}
        for _ in range(9):
            soak.run(share // 10)
            check_invariants(soak.cache)
            for index, size in soak.index_sizes().items():
                largest[index] = max(largest.get(index, 0), size)
                assert size <= LIMITS.get(index, HBM_PAGES + DRAM_PAGES), f"{name}: {index} has {size}"
        gc.collect()
        grown_bytes = process.memory_info().rss - resident_bytes
        assert grown_bytes < 16 << 20, f"{name}: {grown_bytes} bytes more, {largest}"
        assert traced_growth_bytes(soak) < 1 << 20, name
        finish(soak)


def traced_growth_bytes(soak: Soak) -> int:
    """Growth of the memory that Python has allocated, over two thousand operations."""
    tracemalloc.start()
    try:
        soak.run(2_000)
        gc.collect()
        before_bytes = tracemalloc.get_traced_memory()[0]
        soak.run(2_000)
        gc.collect()
        return tracemalloc.get_traced_memory()[0] - before_bytes
    finally:
        tracemalloc.stop()


def finish(soak: Soak) -> None:
    """Ends everything, and finds every page free."""
    for fill in soak.held.fills:
        fill.abort()
    for handle in soak.held.handles:
        soak.cache.release(handle)
    soak.cache.close()
    soak.cache.revoke_overdue(soak.now_us + 100 * VISIT_US)
    check_invariants(soak.cache)
    stats = soak.cache.stats()
    assert (stats.hbm.free, stats.dram.free, stats.leases) == (HBM_PAGES, DRAM_PAGES, 0)
    assert stats.hits > 0 and stats.evictions and stats.reloads and stats.spills_ended
    assert stats.forced_unpins > 0 and stats.forced_aborts > 0 and stats.leases_leaked > 0
    leftover = {name: size for name, size in soak.index_sizes().items() if size and "lease times" not in name}
    assert leftover == {}
