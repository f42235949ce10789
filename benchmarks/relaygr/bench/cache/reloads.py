"""Latency of a reload, by size and by the number of reloads requested at once, with real bytes and copy threads.

All reloads of a round are requested at the same time, with deadlines in their order. A latency is the time from the
request to the end of the copy. Each round also makes one plain copy of as many bytes on one thread: the speed of the
memory.
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass

import numpy as np
import torch

from relaygr.bench.cache.operations import key_of
from relaygr.schemas.digest import DigestChain
from relaygr.worker.cache import CacheConfig, Fill, PendingOutcome, PendingPrefix, PrefixCache, PrefixKey
from relaygr.worker.cache.build import BuiltCache, build_cache
from relaygr.worker.cache.copies import CopyLimits
from relaygr.worker.device import CpuDevice
from relaygr.worker.kv import DramGeometry, KvDtype, KvGeometry, PrefixLayout

PAGE_TOKENS = 64
LAYOUT = PrefixLayout(contextual_tokens=0, tokens_per_behaviour=1)
# 32 KiB a token: 8 layers, 4 heads, 256 + 256 wide, bfloat16. A page is 2 MiB.
GEOMETRY = KvGeometry(8, 4, 256, 256, PAGE_TOKENS, KvDtype.BFLOAT16)
MIB = 2**20
ROUNDS = 9
WAIT_S = 60.0


@dataclass(frozen=True, slots=True)
class ReloadFigures:
    """Reloads of one size, `at_once` at the same time: medians of `ROUNDS` rounds."""

    measured_at: str
    machine: str
    size_mib: float
    at_once: int
    first_ms: float
    """Latency of the most urgent reload."""
    last_ms: float
    gib_per_s: float
    """All bytes divided by the latency of the last reload."""
    plain_gib_per_s: float
    """Speed of one plain copy of as many bytes on one thread."""


def measure(pages: int, at_once: int) -> tuple[float, float, float]:
    """(first ms, last ms, ms of the plain copy)."""
    config = CacheConfig(DramGeometry(GEOMETRY), LAYOUT, pages * at_once, pages * at_once)
    built = build_cache(CpuDevice(), config, limits=CopyLimits(max_bytes=2**40))
    try:
        keys = [_key(user, pages) for user in range(at_once)]
        for key in keys:
            _leave_in_dram(built.cache, key)
        rounds = np.array([_round(built, keys) for _ in range(ROUNDS + 1)])
        first_ms, last_ms, plain_ms = np.median(rounds[1:], axis=0)
        return float(first_ms), float(last_ms), float(plain_ms)
    finally:
        built.cache.close()


def _round(built: BuiltCache, keys: list[PrefixKey]) -> tuple[float, float, float]:
    latencies_ms = [0.0] * len(keys)
    left = threading.Semaphore(0)
    # Each round begins with none of the prefixes in HBM.
    while any(built.cache.peek(key).hbm_behaviours for key in keys):
        _empty_hbm(built.cache, keys)
    started_ns = time.perf_counter_ns()
    for place, key in enumerate(keys):
        pending = built.cache.transfers.start_reload(key, place, place)
        if not isinstance(pending, PendingPrefix):
            raise TypeError(f"a reload was refused: {pending}")

        def ended(done: PendingPrefix, place: int = place) -> None:
            latencies_ms[place] = (time.perf_counter_ns() - started_ns) / 1e6
            if done.outcome is PendingOutcome.PUBLISHED:
                left.release()

        pending.add_done_callback(ended)
    for _ in keys:
        if not left.acquire(timeout=WAIT_S):
            raise TimeoutError("a reload did not end")
    return latencies_ms[0], max(latencies_ms), _plain_copy_ms(built)


def _plain_copy_ms(built: BuiltCache) -> float:
    if built.dram_arena is None:
        raise ValueError("no DRAM tier")
    target = torch.empty_like(built.dram_arena).zero_()
    started_ns = time.perf_counter_ns()
    target.copy_(built.dram_arena)
    return (time.perf_counter_ns() - started_ns) / 1e6


def _key(user: int, pages: int) -> PrefixKey:
    base = key_of(user)
    seed = base.chain.seed
    blocks = b"".join(n.to_bytes(len(seed), "little") for n in range(1, pages * PAGE_TOKENS // 64 + 1))
    return PrefixKey(base.user_id, base.namespace, DigestChain(seed, blocks, pages * PAGE_TOKENS))


def _leave_in_dram(cache: PrefixCache, key: PrefixKey) -> None:
    fill = cache.reserve(key, 0)
    if not isinstance(fill, Fill):
        raise TypeError(f"no pages: {fill}")
    fill.progress(fill.tokens)
    handle = fill.publish(0)
    if handle is not None:
        cache.transfers.spill(handle)
        cache.release(handle)
    while cache.peek(key).dram_behaviours < key.length:
        time.sleep(0.001)


def _empty_hbm(cache: PrefixCache, keys: list[PrefixKey]) -> None:
    """Reserves all of HBM for another prefix, which evicts everything, and aborts."""
    pages = sum(key.length for key in keys) // PAGE_TOKENS
    crowd = _key(10**6, pages)
    fill = cache.reserve(crowd, 0)
    if isinstance(fill, Fill):
        fill.abort()
