"""The cache's small parts: pages, identity, order of copies, copy threads, arenas, metrics."""

from __future__ import annotations

import dataclasses
import threading
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry

from relaygr.runtime.clock import ManualClock
from relaygr.schemas.digest import digest_chain
from relaygr.worker.cache import CacheConfig, Fill, Hit, PageCopy, PendingOutcome, PendingPrefix, SpillOutcome, Tier
from relaygr.worker.cache.arena import allocate_arena, copy_page, copy_runs
from relaygr.worker.cache.build import ThreadMover, build_cache
from relaygr.worker.cache.copies import CopyLimits, CopyPriority, CopyQueue, CopyRequest, Deadline
from relaygr.worker.cache.identity import MAX_MARKS, Mark, PrefixKey, common_behaviours
from relaygr.worker.cache.pages import PagePool
from relaygr.worker.cache.stats import CacheCollector
from relaygr.worker.cache.transfers import SpillGate
from relaygr.worker.device import CpuDevice
from relaygr.worker.kv import DramGeometry
from tests.worlds.cache import GEOMETRY, LAYOUT, CacheWorld, history, make_key
from tests.worlds.invariants import check_invariants


class TestPages:
    def test_taking_is_all_or_nothing(self) -> None:
        pool = PagePool(4)
        assert pool.take(5) is None
        pages = pool.take(3)
        assert pages is not None and sorted(pages) == [0, 1, 2]
        assert pool.take(2) is None
        assert pool.free == 1

    def test_a_page_is_free_when_its_last_holder_drops_it(self) -> None:
        pool = PagePool(4)
        pages = pool.take(2)
        assert pages is not None
        pool.share(pages[:1])
        assert pool.drop(pages) == 1
        assert pool.drop(pages[:1]) == 1
        with pytest.raises(ValueError, match="dropped again"):
            pool.drop(pages[:1])
        assert pool.free == 4

    def test_a_fresh_pool_gives_adjacent_pages(self) -> None:
        pages = PagePool(8).take(5)
        assert pages is not None and list(np.diff(pages)) == [1, 1, 1, 1]

    def test_a_pool_has_no_negative_size(self) -> None:
        with pytest.raises(ValueError, match="-1 pages"):
            PagePool(-1)


class TestIdentity:
    @given(
        asked=st.tuples(st.integers(0, 300), st.none() | st.integers(0, 300)),
        held=st.tuples(st.integers(0, 300), st.none() | st.integers(0, 300)),
        marks=st.lists(st.integers(0, 300), max_size=4),
    )
    def test_common_behaviours_are_equal_and_complete_if_one_history_begins_the_other(
        self, asked: tuple[int, int | None], held: tuple[int, int | None], marks: list[int]
    ) -> None:
        one, other = make_key("ann", *asked), make_key("ann", *held)
        kept = other.held(tuple(Mark(n, digest) for n in marks if (digest := other.digest_at(n)) is not None))
        assert one.behaviours is not None and other.behaviours is not None
        items = zip(one.behaviours.items, other.behaviours.items, strict=False)
        equal = next((n for n, (a, b) in enumerate(items) if a != b), min(one.length, other.length))
        common = common_behaviours(one, kept)
        assert common <= equal
        if equal == kept.length:
            assert common == equal
        else:
            assert common >= max((n for n in (*range(0, equal + 1, 64), *marks) if n <= equal), default=0)

    def test_the_key_of_an_entry_drops_the_behaviours_and_keeps_few_marks(self) -> None:
        key = make_key(length=100)
        held = key.held(tuple(Mark(n, bytes(16)) for n in range(90)))
        assert held.behaviours is None
        assert [mark.length for mark in held.marks] == list(range(90 - MAX_MARKS, 90))

    def test_a_head_is_the_key_of_the_shorter_history(self) -> None:
        key = make_key(length=200)
        for length in (0, 1, 63, 64, 65, 128, 199, 200):
            head = key.head(length)
            assert head is not None
            behaviours = history(length)
            assert head.chain == digest_chain(np.array([7], "<i8"), behaviours)
        assert key.head(201) is None
        assert key.held().head(100) is None, "inside a block, and the behaviours are gone"


def _request(
    pages: int, deadline_us: int = 0, priority: CopyPriority = CopyPriority.RELOAD, done: list[bool] | None = None
) -> CopyRequest:
    numbers = np.arange(pages, dtype=np.int32)
    told: list[bool] = done if done is not None else []
    source, target = (Tier.DRAM, Tier.HBM) if priority is CopyPriority.RELOAD else (Tier.HBM, Tier.DRAM)
    return CopyRequest(source, target, numbers, numbers, priority, Deadline(deadline_us), told.append)


class TestCopyQueue:
    def test_reloads_go_by_earliest_deadline_and_spills_after_them(self) -> None:
        queue = CopyQueue(100, CopyLimits(max_in_flight=1))
        spill = _request(1, priority=CopyPriority.SPILL)
        late, soon = _request(1, 200), _request(1, 100)
        assert all(queue.push(request) for request in (spill, late, soon))
        order = []
        while (request := queue.start(0)) is not None:
            assert queue.start(0) is None
            queue.end(request, 1, True)
            order.append(request)
        assert order == [soon, late, spill]
        assert len(queue) == 0

    def test_a_reload_whose_deadline_is_brought_forward_moves_up(self) -> None:
        queue = CopyQueue(100, CopyLimits(max_in_flight=1))
        first, second, joined = _request(1, 100), _request(1, 200), _request(1, 300)
        assert all(queue.push(request) for request in (first, second, joined))
        joined.deadline.bring_forward(150)
        # A later deadline changes nothing.
        first.deadline.bring_forward(1000)
        order = []
        while (request := queue.start(0)) is not None:
            queue.end(request, 1, copied=True)
            order.append(request)
        assert order == [first, joined, second]

    def test_two_copies_run_at_a_time_and_at_most_one_spill(self) -> None:
        queue = CopyQueue(100, CopyLimits(max_in_flight=2))
        for _ in range(3):
            queue.push(_request(1, priority=CopyPriority.SPILL))
        first = queue.start(0)
        assert first is not None and queue.start(0) is None
        queue.push(_request(1, 5))
        assert queue.start(0) is not None
        assert queue.start(0) is None

    def test_jobs_and_bytes_are_bounded_and_spills_keep_no_reload_out(self) -> None:
        queue = CopyQueue(100, CopyLimits(max_jobs=4, max_bytes=1000))
        assert queue.push(_request(5, priority=CopyPriority.SPILL))
        assert not queue.push(_request(1, priority=CopyPriority.SPILL))
        assert queue.push(_request(5))
        assert not queue.push(_request(1))
        few = CopyQueue(100, CopyLimits(max_jobs=2, max_bytes=10**6))
        assert [few.push(_request(1)) for _ in range(3)] == [True, True, False]

    def test_a_copy_over_the_bound_goes_alone(self) -> None:
        queue = CopyQueue(100, CopyLimits(max_bytes=100))
        assert queue.push(_request(50))
        assert not queue.push(_request(1))

    def test_a_spill_over_the_bound_keeps_no_reload_out(self) -> None:
        queue = CopyQueue(100, CopyLimits(max_bytes=1000))
        assert queue.push(_request(50, priority=CopyPriority.SPILL))
        assert queue.push(_request(5))
        assert not queue.push(_request(1))

    def test_the_forecast_follows_the_measured_speed(self) -> None:
        queue = CopyQueue(100, CopyLimits())
        now_us = 0
        for _ in range(60):
            queue.push(_request(10))
            request = queue.start(now_us)
            assert request is not None
            now_us += 500
            queue.end(request, now_us, True)
        assert queue.forecast(1000, CopyPriority.RELOAD, 0).copy_us == pytest.approx(500, rel=0.01)
        assert queue.forecast(1000, CopyPriority.RELOAD, 0).wait_us == 0
        queue.push(_request(20))
        queue.push(_request(10, priority=CopyPriority.SPILL))
        assert queue.forecast(1000, CopyPriority.RELOAD, 0).wait_us == pytest.approx(1000, rel=0.01)
        assert queue.forecast(1000, CopyPriority.SPILL, 0).wait_us == pytest.approx(1500, rel=0.01)

    def test_each_direction_has_its_own_speed(self) -> None:
        """Encoding may take several times as long as decoding; with one speed for both, reloads seemed not to pay."""
        queue = CopyQueue(100, CopyLimits())
        now_us = 0
        for priority, takes_us in ((CopyPriority.SPILL, 1000), (CopyPriority.RELOAD, 100)) * 40:
            queue.push(_request(10, 0, priority))
            request = queue.start(now_us)
            assert request is not None
            now_us += takes_us
            queue.end(request, now_us, copied=True)
        assert queue.forecast(1000, CopyPriority.SPILL, 0).copy_us == pytest.approx(1000, rel=0.01)
        assert queue.forecast(1000, CopyPriority.RELOAD, 0).copy_us == pytest.approx(100, rel=0.01)

    def test_copies_that_share_the_link_are_each_measured_once(self) -> None:
        queue = CopyQueue(100, CopyLimits())
        now_us = 0
        for _ in range(60):
            pair = []
            for _ in range(2):
                queue.push(_request(10))
                pair.append(queue.start(now_us))
            now_us += 1000
            for request in pair:
                assert request is not None
                queue.end(request, now_us, True)
        # 2 x 1000 bytes every 1000 µs.
        assert queue.forecast(2000, CopyPriority.RELOAD, 0).copy_us == pytest.approx(1000, rel=0.2)

    def test_an_old_slow_measurement_is_not_trusted(self) -> None:
        """After a take-over the first reload was slow; since then no reload seemed to pay, so none was measured."""
        queue = CopyQueue(100, CopyLimits())
        queue.push(_request(10))
        first = queue.start(0)
        assert first is not None
        queue.end(first, 1_000_000, True)
        slow = queue.forecast(1000, CopyPriority.RELOAD, 1_900_000)
        assert slow.copy_us > 100_000
        assert queue.forecast(1000, CopyPriority.RELOAD, 2_100_000).copy_us < 1
        # One reload tries it; those behind it wait for its measurement.
        queue.push(_request(10))
        assert queue.forecast(1000, CopyPriority.RELOAD, 2_100_000).copy_us == slow.copy_us
        second = queue.start(2_100_000)
        assert second is not None
        queue.end(second, 2_100_100, True)
        assert queue.forecast(1000, CopyPriority.RELOAD, 2_100_100).copy_us < 100

    def test_a_failed_copy_is_not_measured(self) -> None:
        queue = CopyQueue(100, CopyLimits())
        before = queue.forecast(1000, CopyPriority.RELOAD, 0)
        queue.push(_request(10))
        request = queue.start(0)
        assert request is not None
        queue.end(request, 10**9, False)
        assert queue.forecast(1000, CopyPriority.RELOAD, 0) == before

    def test_limits_leave_room_for_one_copy(self) -> None:
        with pytest.raises(ValueError, match="room for one copy"):
            CopyLimits(max_in_flight=0)

    @pytest.mark.parametrize(("low", "high", "weight"), [(0, 1, 0.5), (2, 1, 0.5), (1, 2, 0), (1, 2, 1.5)])
    def test_a_gate_has_sensible_bounds(self, low: float, high: float, weight: float) -> None:
        with pytest.raises(ValueError):
            SpillGate(low, high, weight)


class _HeldCopier:
    """Copies that end when the test releases them."""

    def __init__(self) -> None:
        self.begun = threading.Semaphore(0)
        self.may_end = threading.Semaphore(0)
        self.order: list[CopyRequest] = []
        self.fails = False

    def copy(self, request: CopyRequest) -> None:
        self.order.append(request)
        self.begun.release()
        assert self.may_end.acquire(timeout=10)
        if self.fails:
            raise RuntimeError("the link is down")


class TestThreadMover:
    def _mover(self, copier: _HeldCopier, **limits: int) -> ThreadMover:
        return ThreadMover(copier.copy, 100, ManualClock(), CopyLimits(**limits))

    def test_copies_run_in_order_and_report_their_end(self) -> None:
        copier, told = _HeldCopier(), threading.Semaphore(0)
        mover = self._mover(copier, max_in_flight=1)
        ends: list[bool] = []

        def tell(copied: bool) -> None:
            ends.append(copied)
            told.release()

        requests = [dataclasses.replace(_request(1, deadline_us), on_done=tell) for deadline_us in (0, 300, 200)]
        assert mover.submit(requests[0])
        assert copier.begun.acquire(timeout=10)
        assert all(mover.submit(request) for request in requests[1:])
        for _ in requests:
            copier.may_end.release()
        assert all(told.acquire(timeout=10) for _ in requests)
        assert copier.order == [requests[0], requests[2], requests[1]]
        assert ends == [True, True, True]
        mover.close()

    def test_a_copy_that_raises_fails_and_the_thread_lives(self) -> None:
        copier, done = _HeldCopier(), []
        mover = self._mover(copier, max_in_flight=1)
        copier.fails = True
        copier.may_end.release()
        mover.submit(_request(1, done=done))
        assert copier.begun.acquire(timeout=10)
        copier.fails = True
        mover.submit(_request(1, done=done))
        copier.may_end.release()
        assert copier.begun.acquire(timeout=10)
        mover.close()
        assert done == [False, False]

    def test_a_callback_that_raises_leaves_the_copy_thread_alive(self) -> None:
        def raises(_: bool) -> None:
            raise RuntimeError("a listener failed")

        copier, done = _HeldCopier(), []
        mover = self._mover(copier, max_in_flight=1)
        for request in (dataclasses.replace(_request(1), on_done=raises), _request(1, done=done)):
            assert mover.submit(request)
            copier.may_end.release()
            assert copier.begun.acquire(timeout=10)
        mover.close()
        assert done == [True]

    def test_closing_completes_copies_under_way_and_fails_those_in_the_queue(self) -> None:
        copier, under_way, waiting = _HeldCopier(), [], []
        mover = self._mover(copier, max_in_flight=1)
        mover.submit(_request(1, done=under_way))
        assert copier.begun.acquire(timeout=10)
        mover.submit(_request(1, done=waiting))
        closing = threading.Thread(target=mover.close)
        closing.start()
        copier.may_end.release()
        closing.join(10)
        assert not closing.is_alive()
        assert (under_way, waiting) == ([True], [False])
        assert not mover.submit(_request(1))
        mover.close()


class TestArenas:
    def test_bytes_taken_are_bytes_planned(self) -> None:
        """14. Rounding made the pool larger than planned."""
        built = build_cache(CpuDevice(), CacheConfig(DramGeometry(GEOMETRY), LAYOUT, 32, 64), extra_hbm_pages=5)
        try:
            assert built.dram_arena is not None
            assert built.hbm_arena.nbytes == (32 + 5) * GEOMETRY.page_bytes
            assert built.dram_arena.nbytes == 64 * GEOMETRY.page_bytes
            assert built.hbm_arena.shape == (37, GEOMETRY.page_bytes)
            stats = built.cache.stats()
            assert (stats.hbm.capacity, stats.dram.capacity, stats.hbm_page_bytes) == (32, 64, GEOMETRY.page_bytes)
        finally:
            built.cache.close()

    def test_an_arena_is_allocated_and_zero(self) -> None:
        arena = allocate_arena(CpuDevice(), Tier.DRAM, 3, 8)
        assert (arena.dtype, tuple(arena.shape), int(arena.sum())) == (torch.uint8, (3, 8), 0)

    @given(st.lists(st.tuples(st.integers(0, 20), st.integers(0, 20)), max_size=30))
    def test_runs_copy_each_page_once_and_are_as_long_as_can_be(self, pairs: list[tuple[int, int]]) -> None:
        sources = np.array([source for source, _ in pairs], np.int32)
        targets = np.array([target for _, target in pairs], np.int32)
        runs = copy_runs(sources, targets)
        copied = [(run.source + step, run.target + step) for run in runs for step in range(run.count)]
        assert copied == pairs
        assert all(
            (left.source + left.count, left.target + left.count) != (right.source, right.target)
            for left, right in pairwise(runs)
        )

    def test_page_tables_of_two_lengths_are_not_copied(self) -> None:
        with pytest.raises(ValueError, match="2 pages do not go into 1"):
            copy_runs(np.arange(2, dtype=np.int32), np.arange(1, dtype=np.int32))

    def test_a_page_copy_copies_one_page(self) -> None:
        arena = torch.arange(4, dtype=torch.uint8).repeat_interleave(8).view(4, 8).clone()
        copy_page(arena, PageCopy(source=1, target=3))
        assert arena[:, 0].tolist() == [0, 1, 2, 1]

    def test_a_prefix_survives_spill_eviction_and_reload_to_the_byte(self) -> None:
        built = build_cache(CpuDevice(), CacheConfig(DramGeometry(GEOMETRY), LAYOUT, 8, 16))
        cache, key = built.cache, make_key(length=100)
        try:
            # Fragments the pool, so that the copies are not one block.
            first = cache.reserve(make_key("x", 10), 0)
            fill = cache.reserve(key, 0)
            assert isinstance(fill, Fill) and isinstance(first, Fill)
            first.abort()
            content = torch.randint(0, 256, (fill.pages.size, GEOMETRY.page_bytes), dtype=torch.uint8)
            built.hbm_arena[fill.pages.tolist()] = content
            fill.progress(fill.tokens)
            handle = fill.publish(1)
            assert handle is not None
            assert cache.transfers.spill(handle) is SpillOutcome.STARTED
            cache.release(handle)
            _settle(cache, lambda: cache.peek(key).dram_behaviours == 100)
            other = cache.reserve(make_key("bob", 110), 2)
            assert isinstance(other, Fill)
            built.hbm_arena[other.pages.tolist()] = 255
            other.abort()
            arrived = threading.Event()
            pending = cache.transfers.start_reload(key, 100, 3)
            assert isinstance(pending, PendingPrefix)
            pending.add_done_callback(lambda _: arrived.set())
            assert arrived.wait(10)
            assert pending.outcome is PendingOutcome.PUBLISHED
            found = cache.acquire(key, 4)
            assert isinstance(found, Hit)
            assert torch.equal(built.hbm_arena[found.handle.pages.tolist()], content)
            cache.release(found.handle)
            check_invariants(cache)
        finally:
            cache.close()
        check_invariants(cache)


def _settle(cache, condition) -> None:  # type: ignore[no-untyped-def]
    """Waits for the copy threads."""
    step = threading.Event()
    for _ in range(2000):
        if condition():
            return
        step.wait(0.005)
    raise AssertionError(f"did not settle: {cache.stats()}")


def test_threads_that_race_keep_every_invariant() -> None:
    """Poll, device and copy threads at once, on real arenas."""
    built = build_cache(CpuDevice(), CacheConfig(DramGeometry(GEOMETRY), LAYOUT, 40, 60))
    cache = built.cache
    errors: list[BaseException] = []
    keys = [make_key(user, length) for user in ("ann", "bob", "cid", "dan", "eve") for length in (60, 100, 130)]

    def device() -> None:
        for turn in range(300):
            key = keys[(turn * 7) % len(keys)]
            found = cache.acquire(key, turn, join=False)
            if isinstance(found, Hit):
                cache.transfers.spill(found.handle)
                cache.release(found.handle)
                continue
            cache.transfers.start_reload(key, turn + 100, turn)
            fill = cache.reserve(key, turn)
            if isinstance(fill, Fill):
                fill.progress(fill.tokens)
                handle = fill.publish(turn)
                if handle is not None:
                    cache.release(handle)

    def poll() -> None:
        for turn in range(300):
            key = keys[(turn * 11) % len(keys)]
            cache.lease(key, f"r{turn % 9}", turn + 5)
            cache.expire_leases(turn)
            if turn % 40 == 0:
                cache.invalidate_user(key.user_id)
            if turn % 97 == 0:
                cache.clear()
            check_invariants(cache)

    def guard(work) -> None:  # type: ignore[no-untyped-def]
        try:
            work()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=guard, args=(work,)) for work in (device, device, poll)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    cache.close()
    assert errors == []
    check_invariants(cache)
    stats = cache.stats()
    assert (stats.hbm.free, stats.dram.free) == (40, 60)


def test_metrics_equal_the_stats() -> None:
    world, registry = CacheWorld(), CollectorRegistry()
    collector = CacheCollector(world.cache.stats, registry)
    world.store(make_key())
    world.cache.acquire(make_key("nobody"), 0)
    handle = world.hit(make_key())

    def value(name: str, **labels: str) -> float | None:
        return registry.get_sample_value(name, labels)

    assert value("relaygr_cache_bytes", tier="hbm", held="pinned") == 7 * GEOMETRY.page_bytes
    held = ("free", "evictable", "leased", "pinned", "in_flight")
    assert sum(value("relaygr_cache_bytes", tier="hbm", held=each) or 0 for each in held) == 32 * GEOMETRY.page_bytes
    assert value("relaygr_cache_hits_total", coverage="complete") == 1
    assert value("relaygr_cache_misses_total", reason="absent") == 1
    assert value("relaygr_cache_fills_total", outcome="published") == 1
    world.cache.release(handle)
    collector.unregister()
    assert value("relaygr_cache_leases") is None


def test_a_key_without_behaviours_still_matches_at_block_ends() -> None:
    world = CacheWorld()
    world.store(make_key(length=150))
    key = make_key(length=190)
    bare = PrefixKey(key.user_id, key.namespace, key.chain)
    found = world.cache.acquire(bare, 0)
    assert isinstance(found, Hit) and found.handle.behaviours == 128
