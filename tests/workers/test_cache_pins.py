"""Leaked handles and fills are revoked after their time, without freeing pages that the device uses."""

from __future__ import annotations

import pytest
from prometheus_client import CollectorRegistry

from relaygr.schemas.messages import Path
from relaygr.worker.cache import CacheConfig, Fill, NoRoom, PendingOutcome, PendingPrefix, PrefixCache
from relaygr.worker.cache.cache import LONGEST_HOLD_US
from relaygr.worker.cache.stats import CacheCollector
from relaygr.worker.executor.work import PrefixWork
from relaygr.worker.kv import DramGeometry
from tests.worlds.cache import GEOMETRY, LAYOUT, CacheWorld, Later, make_key
from tests.worlds.invariants import check_invariants
from tests.worlds.overlap import OverlapWorld, worst

KEY = make_key(length=100)
SECOND_US = 1_000_000


def test_a_leaked_handle_is_revoked_after_its_time_and_counted() -> None:
    """11. A reader that died kept its pages for ever."""
    world = CacheWorld()
    world.compute(KEY, now_us=0)
    assert world.cache.revoke_overdue(LONGEST_HOLD_US - 1) == 0
    assert world.cache.stats().hbm.pinned == 7
    assert world.cache.revoke_overdue(LONGEST_HOLD_US) == 1
    stats = world.cache.stats()
    assert (stats.hbm.pinned, stats.hbm.evictable, stats.forced_unpins) == (0, 7, 1)
    assert world.cache.revoke_overdue(2 * LONGEST_HOLD_US) == 0
    check_invariants(world.cache)


def test_a_pool_full_of_leaked_handles_has_room_again() -> None:
    """1. Leaked handles pinned all pages, so the cache had no room, for ever."""
    world = CacheWorld(hbm_pages=8)
    world.compute(KEY)
    other = make_key("bob", 100)
    assert isinstance(world.cache.reserve(other, SECOND_US), NoRoom)
    world.cache.revoke_overdue(LONGEST_HOLD_US)
    world.cache.release(world.compute(other, LONGEST_HOLD_US))
    check_invariants(world.cache)


def test_the_holder_sees_the_revocation_and_its_late_release_is_counted_and_not_an_error() -> None:
    world = CacheWorld()
    handle = world.compute(KEY)
    assert handle.is_held
    world.cache.revoke_overdue(LONGEST_HOLD_US)
    assert not handle.is_held
    world.cache.release(handle)
    stats = world.cache.stats()
    assert (stats.late_releases, stats.hbm.evictable) == (1, 7)
    check_invariants(world.cache)


def test_pages_that_a_forward_reads_are_not_free_before_it_has_ended() -> None:
    world, forward = CacheWorld(hbm_pages=8), Later()
    handle = world.compute(KEY)
    world.cache.revoke_overdue(LONGEST_HOLD_US, forward)
    assert (world.cache.stats().hbm.pinned, handle.is_held) == (7, False)
    assert isinstance(world.cache.reserve(make_key("bob", 100), LONGEST_HOLD_US), NoRoom)
    world.check_reads(handle, KEY)
    check_invariants(world.cache)
    # A late release of the holder frees nothing either.
    world.cache.release(handle)
    assert world.cache.stats().hbm.pinned == 7
    forward.complete()
    assert world.cache.stats().hbm.evictable == 7
    check_invariants(world.cache)


def test_a_handle_in_time_is_left_alone_when_an_older_one_goes() -> None:
    world = CacheWorld()
    world.compute(KEY, now_us=0)
    young = world.hit(KEY, now_us=LONGEST_HOLD_US // 2)
    assert world.cache.revoke_overdue(LONGEST_HOLD_US) == 1
    assert young.is_held
    world.check_reads(young, KEY)
    world.cache.release(young)
    assert world.cache.stats().late_releases == 0
    with pytest.raises(ValueError, match="twice"):
        world.cache.release(young)


def test_the_pages_of_an_invalidated_prefix_are_freed_when_its_last_handle_is_revoked() -> None:
    world = CacheWorld()
    world.compute(KEY)
    world.cache.invalidate_user("ann")
    assert world.cache.stats().hbm.pinned == 7
    world.cache.revoke_overdue(LONGEST_HOLD_US)
    assert world.cache.stats().hbm.free == 32
    check_invariants(world.cache)


def test_copies_hold_their_pages_however_long_they_take() -> None:
    """The device may be writing until the copy has ended."""
    world = CacheWorld()
    world.store(KEY)
    world.cache.transfers.spill(KEY)
    assert world.cache.revoke_overdue(100 * LONGEST_HOLD_US) == 0
    assert world.cache.stats().hbm.pinned == 7
    world.mover.run()
    assert world.cache.stats().hbm.evictable == 7


def test_a_leaked_fill_fails_after_its_time_and_others_may_compute_the_prefix() -> None:
    """A leaked computation kept its pages, and all later requests of its user waited for it in vain."""
    world = CacheWorld()
    fill = world.reserve(KEY, now_us=0)
    waiting = world.cache.acquire(KEY, 0)
    assert isinstance(waiting, PendingPrefix)
    assert world.cache.revoke_overdue(LONGEST_HOLD_US - 1) == 0
    assert world.cache.revoke_overdue(LONGEST_HOLD_US) == 1
    assert (waiting.outcome, fill.is_current) == (PendingOutcome.FAILED, False)
    stats = world.cache.stats()
    assert (stats.hbm.free, stats.forced_aborts, stats.forced_unpins) == (32, 1, 0)
    assert stats.fills == {PendingOutcome.FAILED: 1}
    assert world.cache.revoke_overdue(2 * LONGEST_HOLD_US) == 0
    world.store(KEY, 2 * LONGEST_HOLD_US)
    world.hit(KEY, 2 * LONGEST_HOLD_US)
    check_invariants(world.cache)


def test_pages_that_the_device_writes_to_are_not_free_before_it_has_passed() -> None:
    world, forward = CacheWorld(hbm_pages=8), Later()
    fill = world.reserve(KEY)
    world.cache.revoke_overdue(LONGEST_HOLD_US, forward)
    assert world.cache.stats().hbm.in_flight == 7
    # No request joins the fill any more, but its pages are not free yet.
    assert isinstance(world.cache.reserve(KEY, LONGEST_HOLD_US), NoRoom)
    check_invariants(world.cache)
    # A late publish of the holder frees nothing and publishes nothing.
    world.write(fill, KEY, fill.tokens)
    assert fill.publish(LONGEST_HOLD_US) is None
    fill.abort()
    assert world.cache.stats().hbm.in_flight == 7
    forward.complete()
    assert world.cache.stats().hbm.free == 8
    assert fill.publish(LONGEST_HOLD_US) is None
    world.store(KEY, LONGEST_HOLD_US)
    stats = world.cache.stats()
    assert stats.fills == {PendingOutcome.FAILED: 1, PendingOutcome.PUBLISHED: 1}
    check_invariants(world.cache)


def test_a_revoked_append_keeps_its_base_and_shares_no_page_with_the_next() -> None:
    world, forward, grown = CacheWorld(), Later(), make_key(length=105)
    world.store(KEY)
    leaked = world.reserve(grown)
    assert leaked.copy_page is None, "it grows in place, in the last page"
    world.cache.revoke_overdue(LONGEST_HOLD_US, forward)
    reader = world.hit(KEY, LONGEST_HOLD_US)
    world.cache.release(reader)
    again = world.reserve(grown, LONGEST_HOLD_US)
    assert again.copy_page is not None
    world.write(again, grown, again.tokens)
    # The device now runs the work that it got before.
    world.begin(leaked)
    handle = again.publish(LONGEST_HOLD_US)
    assert handle is not None
    world.check_reads(handle, grown)
    forward.complete()
    world.check_reads(handle, grown)
    check_invariants(world.cache)
    world.cache.release(handle)
    assert (world.cache.stats().hbm.evictable, world.cache.stats().hbm.free) == (7, 25)


def test_a_fill_in_time_is_left_alone_when_an_older_handle_goes() -> None:
    world = CacheWorld()
    world.compute(KEY, now_us=0)
    other = make_key("bob")
    young = world.reserve(other, now_us=LONGEST_HOLD_US // 2)
    assert world.cache.revoke_overdue(LONGEST_HOLD_US) == 1
    world.write(young, other, young.tokens)
    handle = young.publish(LONGEST_HOLD_US)
    assert handle is not None and handle.is_held
    assert world.cache.stats().forced_aborts == 0
    # The time of the published handle begins with the publication, not with the fill.
    assert world.cache.revoke_overdue(LONGEST_HOLD_US * 2 - 1) == 0


def test_a_leaked_fill_of_an_invalidated_prefix_is_revoked_too() -> None:
    world = CacheWorld()
    world.reserve(KEY)
    world.cache.invalidate_user("ann")
    assert world.cache.stats().hbm.in_flight == 7
    assert world.cache.revoke_overdue(LONGEST_HOLD_US) == 1
    assert world.cache.stats().hbm.free == 32
    check_invariants(world.cache)


def test_forced_ends_are_in_the_metrics() -> None:
    registry, cache = CollectorRegistry(), PrefixCache(CacheConfig(DramGeometry(GEOMETRY), LAYOUT, 8))
    CacheCollector(cache.stats, registry)
    for name in ("forced_unpins", "forced_aborts"):
        assert registry.get_sample_value(f"relaygr_cache_{name}_total") == 0


def test_a_request_whose_prefix_was_revoked_is_looked_up_again() -> None:
    world = OverlapWorld()
    version = world.put("ann", 1)
    world.submit("ann", version, "first")
    world.run()
    world.until(lambda: world.cache.stats().dram.in_flight == 0)
    world.submit("ann", version, "held-up", budget_us=10 * LONGEST_HOLD_US)
    assert world.cache.stats().hbm.pinned > 0
    world.cache.revoke_overdue(world.device.monotonic_us() + LONGEST_HOLD_US)
    world.run()
    assert worst(world.scores("held-up"), world.exact("ann")) <= 2e-5
    assert world.work("held-up").lookups == 2
    stats = world.cache.stats()
    assert (stats.forced_unpins, stats.late_releases, stats.hbm.pinned) == (1, 1, 0)
    world.close()


def under_way(world: OverlapWorld, user_id: str) -> PrefixWork:
    """The computation of the user's prefix after its first chunk, for a request with enough time."""
    world.submit(user_id, world.put(user_id, 1), "first", budget_us=10 * LONGEST_HOLD_US)
    world.executor.step()
    prefix = world.executor._prefixes.by_user.get(user_id)
    assert prefix is not None and prefix.fill is not None and 0 < prefix.done_tokens < prefix.total_tokens
    return prefix


def test_a_computation_whose_fill_was_revoked_starts_over() -> None:
    world = OverlapWorld()
    prefix = under_way(world, "ann")
    world.cache.revoke_overdue(world.device.monotonic_us() + LONGEST_HOLD_US, Later())
    done_tokens = prefix.done_tokens
    world.run()
    assert prefix.done_tokens == done_tokens
    assert worst(world.scores("first"), world.exact("ann")) <= 2e-5
    assert (world.work("first").path, world.work("first").lookups) == (Path.FULL, 2)
    assert world.cache.stats().fills == {PendingOutcome.FAILED: 1, PendingOutcome.PUBLISHED: 1}
    world.close()


def test_a_computation_whose_fill_was_invalidated_does_not_continue() -> None:
    world = OverlapWorld()
    prefix = under_way(world, "ann")
    world.cache.invalidate_user("ann")
    done_tokens = prefix.done_tokens
    world.run()
    assert prefix.done_tokens == done_tokens
    assert worst(world.scores("first"), world.exact("ann")) <= 2e-5
    assert world.cache.stats().hbm.in_flight == 0
    world.close()


def test_the_executor_revokes_leaked_fills_and_serves_the_requests_that_waited_for_one() -> None:
    world = OverlapWorld()
    leaked = under_way(world, "ann")
    # The executor loses the fill without ending it.
    world.executor._scheduler.remove(leaked)
    del world.executor._prefixes.by_user["ann"]
    world.submit("ann", world.histories["ann"].history.version(), "second", budget_us=10 * LONGEST_HOLD_US)
    world.run()
    assert "second" not in world.outbox.answered
    world.device.timeline.advance(LONGEST_HOLD_US)
    world.run()
    assert worst(world.scores("second"), world.exact("ann")) <= 2e-5
    stats = world.cache.stats()
    assert (stats.forced_aborts, stats.hbm.in_flight) == (1, 0)
    world.close()


def test_the_executor_revokes_leaked_handles() -> None:
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
