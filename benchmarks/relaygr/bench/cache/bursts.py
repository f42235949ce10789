"""Savings of single flight and of the break-even rule when requests come in bursts: one trace, with and without each.

Users come in bursts (ten times the rate for a fifth of each second), and each user sends three requests at almost the
same time. Every prefix is in DRAM, and HBM has room for a tenth of them. A request that does not find its prefix waits
for a copy or for a computation; its delay is the time until it can be ranked. Time is virtual and the link simulated
(`relaygr.replay.link`). The device computes any number of prefixes at once, so only copies and waiting are compared.

With single flight the cache is real. Without single flight, each request that finds nothing makes its own copy or
computation. With the break-even rule a copy that would end later than a computation is not started. Without the rule,
all requests wait for the link.
"""

from __future__ import annotations

import heapq
import itertools
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import numpy as np

from relaygr.admission.latency import LatencyModel
from relaygr.bench.cache.operations import BEHAVIOURS, LAYOUT, PAGES, key_of
from relaygr.replay.link import LinkSpeed, VirtualLink
from relaygr.worker.cache import CacheConfig, Fill, Hit, PendingOutcome, PendingPrefix, PrefixCache, Tier
from relaygr.worker.cache.copies import CopyLimits, CopyPriority, CopyRequest, Deadline
from relaygr.worker.cache.policies import PolicyName, TierPolicies
from relaygr.worker.cache.transfers import SpillGate, reload_pays
from relaygr.worker.kv import DramGeometry, KvDtype, KvGeometry

# 32 KiB a token, so 32 MiB a prefix, and a link that carries 600 prefixes a second.
GEOMETRY = KvGeometry(1, 1, 8192, 8192, BEHAVIOURS // PAGES, KvDtype.BFLOAT16)
SPEED = LinkSpeed(delay_us=30.0, bytes_per_us=20 * 2**30 / 1e6)
UNBOUNDED = CopyLimits(max_jobs=10**9, max_bytes=2**60)
LRU = TierPolicies(PolicyName.LRU, PolicyName.LRU)
USERS = 5_000
HBM_PREFIXES = 500
REQUESTS_A_VISIT = 3
VISIT_SPREAD_US = 10_000.0
CROWD_SHARE_S = 0.2
QUIET_VISITS_PER_S = 100.0
CROWD_VISITS_PER_S = 1_000.0


@dataclass(frozen=True, slots=True)
class BurstFigures:
    """Figures of one variant."""

    measured_at: str
    machine: str
    single_flight: bool
    break_even: bool
    seconds: float
    requests: int
    mean_ms: float
    p50_ms: float
    p99_ms: float
    copied_gib: float
    computed: int


@dataclass(frozen=True, slots=True)
class Request:
    """One look-up."""

    at_us: int
    user: int


class BurstVariant(Protocol):
    """A way to get prefixes into HBM."""

    link: VirtualLink

    def ask(self, user: int, now_us: int, ready: Callable[[int], None]) -> None:
        """`ready(now_us)` is called once the request can be ranked."""


def trace(seconds: float, seed: int = 1) -> list[Request]:
    """Requests in order of time; a pure function of its arguments."""
    random = np.random.default_rng(seed)
    requests: list[Request] = []
    at_s = 0.0
    while True:
        rate = CROWD_VISITS_PER_S if at_s % 1.0 < CROWD_SHARE_S else QUIET_VISITS_PER_S
        at_s += random.exponential(1 / rate)
        if at_s >= seconds:
            return sorted(requests, key=lambda request: request.at_us)
        user = int(random.integers(USERS))
        spreads_us = (0.0, *random.uniform(0, VISIT_SPREAD_US, REQUESTS_A_VISIT - 1))
        requests += [Request(int(at_s * 1e6 + spread_us), user) for spread_us in spreads_us]


class Computing:
    """Prefixes that are being computed: each ends `pre_us` after it began."""

    def __init__(self, pre_us: float) -> None:
        self.count = 0
        self._pre_us = pre_us
        self._ends: list[tuple[int, int, Callable[[int], None]]] = []
        self._order = itertools.count()

    def begin(self, now_us: int, ended: Callable[[int], None]) -> None:
        self.count += 1
        heapq.heappush(self._ends, (now_us + int(self._pre_us), next(self._order), ended))

    def until(self, now_us: int) -> Iterator[tuple[int, Callable[[int], None]]]:
        """Computations that end by `now_us`, in order."""
        while self._ends and self._ends[0][0] <= now_us:
            ends_us, _, ended = heapq.heappop(self._ends)
            yield ends_us, ended


class WithSingleFlight:
    """The real cache: the second request for a prefix joins the first."""

    def __init__(self, computing: Computing, saved_us: float | None) -> None:
        self.link = VirtualLink(GEOMETRY.page_bytes, SPEED, UNBOUNDED)
        self._computing = computing
        self._saved_us = saved_us
        gate = SpillGate(1e12, 1e12)
        self._cache = PrefixCache(
            CacheConfig(DramGeometry(GEOMETRY), LAYOUT, HBM_PREFIXES * PAGES, USERS * PAGES, LRU),
            self.link,
            spill_gate=gate,
        )
        for user in range(USERS):
            fill = self._cache.reserve(key_of(user), 0)
            if isinstance(fill, Fill):
                self._publish(fill, 0)
                self._cache.transfers.spill(key_of(user))
                self.link.run()

    def ask(self, user: int, now_us: int, ready: Callable[[int], None]) -> None:
        key = key_of(user)
        found = self._cache.acquire(key, now_us)
        if isinstance(found, Hit):
            self._cache.release(found.handle)
            return ready(now_us)
        pending = found
        if not isinstance(pending, PendingPrefix):
            reload = self._cache.transfers.start_reload(key, now_us, now_us, self._saved_us)
            pending = reload if isinstance(reload, PendingPrefix) else self._cache.reserve(key, now_us)  # type: ignore[assignment]
        if isinstance(pending, Fill):
            self._computing.begin(now_us, partial(self._end_fill, pending, ready))
        elif isinstance(pending, PendingPrefix):
            pending.add_done_callback(partial(self._end_wait, user, ready))
        else:
            self._computing.begin(now_us, ready)

    def _end_wait(self, user: int, ready: Callable[[int], None], pending: PendingPrefix) -> None:
        if pending.outcome is PendingOutcome.PUBLISHED:
            ready(self.link.now_us)
        else:
            self.ask(user, self.link.now_us, ready)

    def _end_fill(self, fill: Fill, ready: Callable[[int], None], now_us: int) -> None:
        self._publish(fill, now_us)
        ready(now_us)

    def _publish(self, fill: Fill, now_us: int) -> None:
        fill.progress(fill.tokens)
        handle = fill.publish(now_us)
        if handle is not None:
            self._cache.release(handle)


class WithoutSingleFlight:
    """No single flight: each request that finds no prefix copies or computes it. Evicts by LRU, as the real cache."""

    def __init__(self, computing: Computing, saved_us: float | None) -> None:
        self.link = VirtualLink(GEOMETRY.page_bytes, SPEED, UNBOUNDED)
        self._computing = computing
        self._saved_us = saved_us
        self._ready: OrderedDict[int, None] = OrderedDict()

    def ask(self, user: int, now_us: int, ready: Callable[[int], None]) -> None:
        if user in self._ready:
            self._ready.move_to_end(user)
            return ready(now_us)
        forecast = self.link.forecast(PAGES * GEOMETRY.page_bytes, CopyPriority.RELOAD)
        if self._saved_us is not None and not reload_pays(forecast, self._saved_us):
            return self._computing.begin(now_us, partial(self._end, user, ready))
        pages = np.arange(PAGES, dtype=np.int32)

        def copied(_: bool) -> None:
            self._end(user, ready, self.link.now_us)

        deadline = Deadline(now_us)
        self.link.submit(CopyRequest(Tier.DRAM, Tier.HBM, pages, pages, CopyPriority.RELOAD, deadline, copied))

    def _end(self, user: int, ready: Callable[[int], None], now_us: int) -> None:
        self._ready[user] = None
        self._ready.move_to_end(user)
        while len(self._ready) > HBM_PREFIXES:
            self._ready.popitem(last=False)
        ready(now_us)


def measure(
    requests: list[Request], latency: LatencyModel, single_flight: bool, break_even: bool
) -> tuple[list[float], float, int]:
    """(delay of each request in ms, GiB copied, prefixes computed)."""
    pre_us = latency.pre_us(BEHAVIOURS)
    computing = Computing(pre_us)
    saved_us = pre_us if break_even else None
    make = WithSingleFlight if single_flight else WithoutSingleFlight
    variant: BurstVariant = make(computing, saved_us)
    delays_ms: list[float] = []

    def go_on(now_us: int) -> None:
        for ends_us, ended in computing.until(now_us):
            variant.link.advance(ends_us)
            ended(ends_us)
        variant.link.advance(now_us)

    # The preparation took virtual time and made copies.
    began_us, began_bytes = variant.link.now_us, variant.link.moved_bytes[Tier.HBM]
    for request in requests:
        asked_us = began_us + request.at_us
        go_on(asked_us)
        variant.ask(request.user, asked_us, partial(_note, delays_ms, asked_us))
    go_on(began_us + requests[-1].at_us + 3_600_000_000)
    if len(delays_ms) != len(requests):
        raise RuntimeError(f"{len(delays_ms)} of {len(requests)} requests were served")
    return delays_ms, (variant.link.moved_bytes[Tier.HBM] - began_bytes) / 2**30, computing.count


def _note(delays_ms: list[float], asked_us: int, now_us: int) -> None:
    delays_ms.append((now_us - asked_us) / 1000)
