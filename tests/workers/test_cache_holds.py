"""Handles that are never released: taken away after their time, without a page that the device still reads."""

from __future__ import annotations

import pytest
from prometheus_client import CollectorRegistry

from tests.workers.cache_world import GEOMETRY, LAYOUT, Later, World, make_key
from tests.workers.overlap_world import OverlapWorld, worst
from workers.cache import Fill, NoRoom, PrefixCache
from workers.cache.cache import LONGEST_HOLD_US
from workers.cache.metrics import CacheCollector

KEY = make_key(length=100)
SECOND_US = 1_000_000


def test_a_leaked_handle_is_taken_away_after_its_time_and_counted() -> None:
    """11. A reader that died kept its pages for good."""
    world = World()
    world.compute(KEY, now_us=0)
    assert world.cache.force_unpins(LONGEST_HOLD_US - 1) == 0
    assert world.cache.stats().hbm.pinned == 7
    assert world.cache.force_unpins(LONGEST_HOLD_US) == 1
    stats = world.cache.stats()
    assert (stats.hbm.pinned, stats.hbm.evictable, stats.forced_unpins) == (0, 7, 1)
    assert world.cache.force_unpins(2 * LONGEST_HOLD_US) == 0
    world.cache.check_invariants()


def test_full_of_leaked_handles_there_is_room_again() -> None:
    """1. All pages pinned by users who never came back: no room, for ever."""
    world = World(hbm_pages=8)
    world.compute(KEY)
    other = make_key("bob", 100)
    assert isinstance(world.cache.reserve(other, SECOND_US), NoRoom)
    world.cache.force_unpins(LONGEST_HOLD_US)
    world.cache.release(world.compute(other, LONGEST_HOLD_US))
    world.cache.check_invariants()


def test_the_holder_sees_that_it_holds_nothing_and_its_release_is_counted_not_an_error() -> None:
    world = World()
    handle = world.compute(KEY)
    assert handle.is_held
    world.cache.force_unpins(LONGEST_HOLD_US)
    assert not handle.is_held
    world.cache.release(handle)
    stats = world.cache.stats()
    assert (stats.late_releases, stats.hbm.evictable) == (1, 7)
    world.cache.check_invariants()


def test_pages_that_a_forward_reads_are_not_free_before_it_has_ended() -> None:
    world, forward = World(hbm_pages=8), Later()
    handle = world.compute(KEY)
    world.cache.force_unpins(LONGEST_HOLD_US, forward)
    assert (world.cache.stats().hbm.pinned, handle.is_held) == (7, False)
    assert isinstance(world.cache.reserve(make_key("bob", 100), LONGEST_HOLD_US), NoRoom)
    world.check_reads(handle, KEY)
    world.cache.check_invariants()
    # Also a holder that comes back in between frees nothing.
    world.cache.release(handle)
    assert world.cache.stats().hbm.pinned == 7
    forward.complete()
    assert world.cache.stats().hbm.evictable == 7
    world.cache.check_invariants()


def test_a_handle_in_time_is_left_alone_when_an_older_one_goes() -> None:
    world = World()
    world.compute(KEY, now_us=0)
    young = world.hit(KEY, now_us=LONGEST_HOLD_US // 2)
    assert world.cache.force_unpins(LONGEST_HOLD_US) == 1
    assert young.is_held
    world.check_reads(young, KEY)
    world.cache.release(young)
    assert world.cache.stats().late_releases == 0
    with pytest.raises(ValueError, match="twice"):
        world.cache.release(young)


def test_the_pages_of_an_invalidated_prefix_go_too_when_its_last_handle_is_taken_away() -> None:
    world = World()
    world.compute(KEY)
    world.cache.invalidate_user("ann")
    assert world.cache.stats().hbm.pinned == 7
    world.cache.force_unpins(LONGEST_HOLD_US)
    assert world.cache.stats().hbm.free == 32
    world.cache.check_invariants()


def test_copies_hold_their_pages_however_long_they_take() -> None:
    """The device may be writing: only the copy's own end says that it is not."""
    world = World()
    world.store(KEY)
    world.cache.spill(KEY)
    assert world.cache.force_unpins(100 * LONGEST_HOLD_US) == 0
    assert world.cache.stats().hbm.pinned == 7
    world.mover.run()
    assert world.cache.stats().hbm.evictable == 7


def test_forced_unpins_and_late_releases_are_metrics() -> None:
    registry, cache = CollectorRegistry(), PrefixCache(GEOMETRY, LAYOUT, 8)
    CacheCollector(cache.stats, registry)
    for name in ("forced_unpins", "late_releases"):
        assert registry.get_sample_value(f"relaygr_cache_{name}_total") == 0


def test_a_request_whose_prefix_was_taken_away_is_looked_up_again() -> None:
    world = OverlapWorld()
    version = world.put("ann", 1)
    world.submit("ann", version, "first")
    world.run()
    world.until(lambda: world.cache.stats().dram.in_flight == 0)
    world.submit("ann", version, "held-up", budget_us=10 * LONGEST_HOLD_US)
    assert world.cache.stats().hbm.pinned > 0
    world.cache.force_unpins(world.device.monotonic_us() + LONGEST_HOLD_US)
    world.run()
    assert worst(world.scores("held-up"), world.exact("ann")) <= 2e-5
    assert world.work("held-up").lookups == 2
    stats = world.cache.stats()
    assert (stats.forced_unpins, stats.late_releases, stats.hbm.pinned) == (1, 1, 0)
    world.close()


def test_the_executor_looks_for_leaked_handles_by_itself() -> None:
    world = OverlapWorld()
    leaked = world.cache.reserve(make_key("zoe", 10), world.device.monotonic_us())
    assert isinstance(leaked, Fill)
    leaked.progress(leaked.tokens)
    handle = leaked.publish(world.device.monotonic_us())
    assert handle is not None and handle.is_held
    world.device.timeline.advance(LONGEST_HOLD_US)
    world.run()
    assert not handle.is_held
    assert world.cache.stats().hbm.pinned == 0
    world.close()
