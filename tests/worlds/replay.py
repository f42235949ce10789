"""The oracle of replays: plays demands against a real `PrefixCache`, with its page tables, and a simulated link."""

from __future__ import annotations

from functools import partial

from relaygr.replay.demand import NO_VISIT, SAME, DemandKind, DemandRow, Demands
from relaygr.replay.link import VirtualLink
from relaygr.replay.run import Candidate, ReplayEnvironment, ReplayResult
from relaygr.schemas.digest import BLOCK, DIGEST_BYTES, DigestChain
from relaygr.worker.cache import (
    CacheConfig,
    Fill,
    Hit,
    PendingOutcome,
    PendingPrefix,
    PrefixCache,
    PrefixKey,
    Presence,
    Purpose,
    Tier,
)
from relaygr.worker.cache.identity import Mark
from relaygr.worker.cache.policies import VISIT_US
from relaygr.worker.cache.transfers import SpillGate

SEED = bytes(DIGEST_BYTES)
# A replay always admits spills: nothing else uses the link, and its queue is bounded.
_OPEN_GATE_US = 1e15


class KeyMaker:
    """Makes keys whose invented digest chains diverge where the histories of a trace do."""

    def __init__(self) -> None:
        self._made = 0

    def key(self, user: int, owner: int, before: PrefixKey | None, shared: int, length: int) -> PrefixKey:
        """A key of `length` behaviours, the first `shared` of which are those of the owner's key before."""
        blocks = b""
        marks: tuple[Mark, ...] = ()
        if before is not None:
            blocks = before.chain.packed[: shared // BLOCK * DIGEST_BYTES]
            known = (*before.marks, Mark(before.length, before.chain.digest))
            marks = tuple(mark for mark in known if mark.length <= shared and mark.length < length)
        count = -(-length // BLOCK)
        chain = DigestChain(
            SEED, blocks + b"".join(self._digest() for _ in range(count - len(blocks) // DIGEST_BYTES)), length
        )
        return PrefixKey(f"{user:016x}", b"%d" % owner, chain, marks=marks).held()

    def _digest(self) -> bytes:
        self._made += 1
        return self._made.to_bytes(DIGEST_BYTES, "big")


class CacheReplayOracle:
    """One replay against the real cache, step by step as `CacheReplay`."""

    def __init__(self, demands: Demands, environment: ReplayEnvironment, candidate: Candidate) -> None:
        self._demands = demands
        self._candidate = candidate
        self._layout = environment.layout
        self._latency = environment.latency
        self.link = VirtualLink(environment.geometry.page_bytes, environment.link)
        self.cache = PrefixCache(
            CacheConfig(
                environment.geometry,
                environment.layout,
                candidate.hbm_bytes // environment.geometry.kv.page_bytes,
                candidate.dram_bytes // environment.geometry.page_bytes,
                candidate.policies,
            ),
            self.link if candidate.dram_bytes else None,
            spill_gate=SpillGate(_OPEN_GATE_US, _OPEN_GATE_US),
        )
        self.cache.weigh_by(environment.latency.pre_us)
        self._keys = KeyMaker()
        self._latest: dict[int, PrefixKey] = {}
        self._expires_us = 0
        self._reloads: set[PendingPrefix] = set()
        self._counted = dict.fromkeys(
            ("visits", "hbm_hits", "dram_hits", "asked_tokens", "hbm_tokens", "reloaded_tokens", "recomputed_tokens"), 0
        )
        self._asked_us = self._recomputed_us = 0.0

    def play(self, demand: DemandRow) -> None:
        kind, now_us, owner, length, shared, reusable = demand
        self.link.advance(now_us)
        if now_us >= self._expires_us:
            self.cache.expire_leases(now_us)
            self.cache.expire_prefixes(now_us)
            self._expires_us = now_us + VISIT_US
        before = self._latest.get(owner)
        user = int(self._demands.users[owner])
        key = before if before is not None and shared == SAME else self._keys.key(user, owner, before, shared, length)
        self._latest[owner] = key
        if kind == DemandKind.FORGET:
            self.cache.invalidate_user(key.user_id)
            return
        presence = self.cache.peek(key)
        if reusable != NO_VISIT:
            self._count(length, reusable, presence)
        ranks = kind == DemandKind.RANK
        found = self.cache.acquire(key, now_us, join=False, purpose=Purpose.RANKING if ranks else Purpose.PRE_INFER)
        if isinstance(found, Hit):
            self.cache.release(found.handle)
        if presence.hbm_behaviours == key.length:
            self._keep(key, now_us, ranks)
        else:
            self._prepare(key, presence, now_us, ranks)

    def result(self) -> ReplayResult:
        self.link.run()
        stats = self.cache.stats()
        return ReplayResult(
            candidate=self._candidate,
            **self._counted,
            asked_us=self._asked_us,
            recomputed_us=self._recomputed_us,
            spilled_bytes=self.link.moved_bytes[Tier.DRAM],
            reloaded_bytes=self.link.moved_bytes[Tier.HBM],
            hbm_evictions=stats.evictions.get(Tier.HBM, 0),
            dram_evictions=stats.evictions.get(Tier.DRAM, 0),
            no_room=sum(stats.no_room.values()),
        )

    def _count(self, behaviours: int, reusable: int, presence: Presence) -> None:
        counted = self._counted
        counted["visits"] += 1
        counted["asked_tokens"] += self._tokens(behaviours)
        self._asked_us += self._latency.pre_us(self._tokens(behaviours))
        counted["hbm_tokens"] += self._tokens(presence.hbm_behaviours)
        if reusable:
            hbm_hit = presence.hbm_behaviours >= reusable
            counted["hbm_hits"] += hbm_hit
            counted["dram_hits"] += not hbm_hit and presence.dram_behaviours >= reusable

    def _prepare(self, key: PrefixKey, presence: Presence, now_us: int, ranks: bool) -> None:
        in_hbm, in_dram = self._tokens(presence.hbm_behaviours), self._tokens(presence.dram_behaviours)
        if in_dram > in_hbm:
            saved_us = self._latency.append_us(in_hbm, in_dram - in_hbm)
            reload = self.cache.transfers.start_reload(key, now_us + int(saved_us), now_us, saved_us)
            if isinstance(reload, PendingPrefix):
                self._reloads.add(reload)
                reload.add_done_callback(partial(self._reloaded, key, in_hbm, ranks))
                return
        self._compute(key, ranks)

    def _reloaded(self, key: PrefixKey, cached_tokens: int, ranks: bool, pending: PendingPrefix) -> None:
        is_first = pending in self._reloads
        self._reloads.discard(pending)
        if is_first and pending.outcome is PendingOutcome.PUBLISHED:
            self._counted["reloaded_tokens"] += self._tokens(pending.behaviours) - cached_tokens
        self._compute(key, ranks)

    def _compute(self, key: PrefixKey, ranks: bool) -> None:
        now_us = self.link.now_us
        fill = self.cache.reserve(key, now_us)
        if isinstance(fill, Fill):
            self._counted["recomputed_tokens"] += fill.tokens - fill.start_tokens
            self._recomputed_us += self._latency.append_us(fill.start_tokens, fill.tokens - fill.start_tokens)
            fill.progress(fill.tokens)
            handle = fill.publish(now_us)
            if handle is not None:
                self.cache.release(handle)
        elif not isinstance(fill, PendingPrefix):
            self._counted["recomputed_tokens"] += self._tokens(key.length)
            self._recomputed_us += self._latency.pre_us(self._tokens(key.length))
        self._keep(key, now_us, ranks)

    def _keep(self, key: PrefixKey, now_us: int, ranks: bool) -> None:
        if ranks:
            self.cache.end_lease(key.user_id, key.user_id)
            self.cache.transfers.spill(key)
        else:
            self.cache.lease(key, key.user_id, now_us + VISIT_US)

    def _tokens(self, behaviours: int) -> int:
        return self._layout.tokens(behaviours) if behaviours else 0
