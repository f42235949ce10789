"""The prefix cache's stories; the numbered ones are faults that other systems had."""

from __future__ import annotations

import dataclasses
import gc
import subprocess
import sys
import threading

import numpy as np
import pytest

from relaygr.schemas.messages import PrefixSource
from relaygr.worker.cache import (
    CacheConfig,
    Declined,
    DeclineReason,
    Fill,
    Hit,
    Miss,
    MissReason,
    NoRoom,
    NoRoomReason,
    PendingKind,
    PendingOutcome,
    PendingPrefix,
    PrefixCache,
    Purpose,
    SpillOutcome,
    Tier,
    WasteReason,
)
from relaygr.worker.cache.copies import CopyForecast, CopyLimits, CopyPriority
from relaygr.worker.cache.entries import EntryState, Presence
from relaygr.worker.cache.identity import PrefixKey
from relaygr.worker.cache.metadata import MAX_ENTRIES_PER_USER
from relaygr.worker.cache.transfers import SpillGate, reload_pays
from relaygr.worker.kv import DramGeometry
from tests.worlds.cache import GEOMETRY, LAYOUT, PAGE_TOKENS, CacheWorld, make_key
from tests.worlds.invariants import check_invariants


@pytest.fixture
def world() -> CacheWorld:
    return CacheWorld()


class TestFullUnderPinning:
    """1. A batch larger than the pool evicted users that were being read."""

    def test_a_full_pool_of_pinned_prefixes_answers_no_room(self) -> None:
        world = CacheWorld(hbm_pages=14)
        keys = [make_key("ann"), make_key("bob")]
        handles = [world.compute(key) for key in keys]
        assert world.cache.reserve(make_key("cid"), 1) == NoRoom(NoRoomReason.FULL)
        for handle, key in zip(handles, keys, strict=True):
            world.check_reads(handle, key)
        world.cache.release(handles[0])
        world.store(make_key("cid"))
        world.check_reads(handles[1], keys[1])
        assert world.cache.acquire(keys[0], 2) == Miss(MissReason.ABSENT)
        check_invariants(world.cache)

    def test_a_prefix_that_can_not_fit_evicts_nothing(self) -> None:
        world = CacheWorld(hbm_pages=14)
        world.store(make_key("ann"))
        pinned = world.compute(make_key("bob"))
        assert world.cache.reserve(make_key("cid", length=200), 1) == NoRoom(NoRoomReason.FULL)
        assert world.cache.reserve(make_key("cid", length=1000), 1) == NoRoom(NoRoomReason.TOO_LARGE)
        assert world.hit(make_key("ann")).complete
        assert world.cache.stats().evictions == {}
        world.cache.release(pinned)

    def test_filling_loading_spilling_and_leased_prefixes_are_not_evicted(self) -> None:
        world = CacheWorld(hbm_pages=28)
        world.spilled(make_key("dram"))
        filling = world.reserve(make_key("filling"))
        loading = world.cache.transfers.start_reload(make_key("dram"), 100, 0)
        assert isinstance(loading, PendingPrefix) and not loading.done
        world.store(make_key("leased"))
        assert world.cache.lease(make_key("leased"), "r1", 1000)
        world.store(make_key("spilling"))
        assert world.cache.transfers.spill(make_key("spilling")) is SpillOutcome.STARTED
        assert world.cache.reserve(make_key("dan"), 1) == NoRoom(NoRoomReason.FULL)
        pages = world.cache.stats().hbm
        assert (pages.free, pages.evictable, pages.leased, pages.pinned, pages.in_flight) == (0, 0, 7, 7, 14)
        world.mover.run()
        filling.abort()
        assert world.hit(make_key("dram")).source is PrefixSource.DRAM
        assert world.hit(make_key("leased")).complete
        check_invariants(world.cache)

    @pytest.mark.parametrize("held", ["pinned", "leased"])
    def test_eviction_passes_over_a_prefix_that_is_held_though_it_is_the_oldest(self, held: str) -> None:
        world = CacheWorld(hbm_pages=14)
        reader = world.compute(make_key("ann"), 1)
        if held == "leased":
            world.cache.lease(make_key("ann"), "r1", 1000)
            world.cache.release(reader)
        world.store(make_key("bob"), 2)
        world.store(make_key("cid"), 3)
        assert world.hit(make_key("ann"), 4).complete
        assert world.cache.peek(make_key("bob")).hbm_behaviours == 0

    def test_a_reader_of_an_evicted_identity_keeps_its_pages(self, world: CacheWorld) -> None:
        handle = world.compute(make_key())
        world.cache.invalidate_user("ann")
        assert world.cache.stats().hbm.pinned == handle.pages.size
        world.check_reads(handle, make_key())
        world.cache.release(handle)
        assert world.cache.stats().hbm.free == 32


def test_clear_empties_every_index(world: CacheWorld) -> None:
    """2. A cleared cache kept a stale index beside the pages."""
    world.spilled(make_key("ann"))
    world.store(make_key("bob"))
    world.cache.lease(make_key("bob"), "r1", 1000)
    fill = world.reserve(make_key("cid"))
    world.cache.clear()
    check_invariants(world.cache)
    stats = world.cache.stats()
    assert (stats.hbm.entries, stats.dram.entries, stats.leases) == (0, 0, 0)
    for user in ("ann", "bob", "cid"):
        assert world.cache.acquire(make_key(user), 1) == Miss(MissReason.ABSENT)
    world.write(fill, make_key("cid"), fill.tokens)
    assert fill.publish(2) is None
    assert world.cache.stats().hbm.free == 32
    assert world.cache.stats().dram.free == 64


class TestFailures:
    """3. A device error ended the process."""

    def test_a_reload_that_fails_twice_evicts_its_dram_entry_and_fails_its_waiters(self, world: CacheWorld) -> None:
        world.spilled(make_key())
        outcomes: list[PendingOutcome | None] = []
        pending = world.cache.transfers.start_reload(make_key(), 100, 0)
        assert isinstance(pending, PendingPrefix)
        pending.add_done_callback(lambda ended: outcomes.append(ended.outcome))
        assert world.mover.run(copied=False) == 2
        assert outcomes == [PendingOutcome.FAILED]
        assert world.cache.acquire(make_key(), 1) == Miss(MissReason.ABSENT)
        assert world.cache.transfers.start_reload(make_key(), 100, 0) == Declined(DeclineReason.NOT_IN_DRAM)
        stats = world.cache.stats()
        assert (stats.hbm.free, stats.dram.free) == (32, 64)
        assert stats.reloads == {PendingOutcome.FAILED: 1}
        assert stats.reload_retries == 1

    def test_a_reload_that_fails_once_is_tried_again_for_the_same_waiters(self, world: CacheWorld) -> None:
        world.spilled(make_key())
        pending = world.cache.transfers.start_reload(make_key(), 100, 0)
        assert isinstance(pending, PendingPrefix)
        world.mover.start()
        world.mover.finish(copied=False)
        assert not pending.done
        assert world.cache.acquire(make_key(), 1) is pending
        assert world.mover.run() == 1
        assert pending.outcome is PendingOutcome.PUBLISHED
        world.hit(make_key())

    def test_a_failed_reload_of_an_invalidated_prefix_is_not_tried_again(self, world: CacheWorld) -> None:
        world.spilled(make_key())
        pending = world.cache.transfers.start_reload(make_key(), 100, 0)
        assert isinstance(pending, PendingPrefix)
        world.mover.start()
        world.cache.invalidate_user("ann")
        world.mover.finish(copied=False)
        assert (len(world.mover), pending.outcome) == (0, PendingOutcome.INVALIDATED)
        check_invariants(world.cache)

    def test_a_reload_that_waits_when_the_worker_ends_leaves_dram_as_it_was(self, world: CacheWorld) -> None:
        """Such a reload counted as failed twice: each stop of a worker removed prefixes that the next start needed."""
        world.spilled(make_key())
        pending = world.cache.transfers.start_reload(make_key(), 100, 0)
        assert isinstance(pending, PendingPrefix)
        world.mover.close()
        assert pending.outcome is PendingOutcome.FAILED
        assert world.cache.peek(make_key()).dram_behaviours == make_key().length

    def test_a_reload_that_could_not_be_tried_again_leaves_dram_as_it_was(self, world: CacheWorld) -> None:
        world.spilled(make_key())
        pending = world.cache.transfers.start_reload(make_key(), 100, 0)
        assert isinstance(pending, PendingPrefix)
        world.mover.start()
        world.mover.refuses = True
        world.mover.finish(copied=False)
        assert pending.outcome is PendingOutcome.FAILED
        world.mover.refuses = False
        assert isinstance(world.cache.transfers.start_reload(make_key(), 100, 1), PendingPrefix)
        world.mover.run()
        world.hit(make_key())

    def test_a_failed_spill_leaves_hbm_as_it_was(self, world: CacheWorld) -> None:
        world.store(make_key())
        world.cache.transfers.spill(make_key())
        world.mover.run(copied=False)
        assert world.hit(make_key()).complete
        assert world.cache.peek(make_key()).dram_behaviours == 0
        assert world.cache.stats().dram.free == 64

    def test_an_aborted_fill_fails_its_waiters_and_the_next_one_may_try(self, world: CacheWorld) -> None:
        fill = world.reserve(make_key())
        pending = world.cache.acquire(make_key(), 0)
        assert isinstance(pending, PendingPrefix)
        fill.abort()
        fill.abort()
        assert pending.outcome is PendingOutcome.FAILED
        world.store(make_key())
        assert world.hit(make_key()).complete

    def test_an_error_inside_a_fill_gives_the_pages_back(self, world: CacheWorld) -> None:
        with pytest.raises(RuntimeError, match="kernel"), world.reserve(make_key()):
            raise RuntimeError("kernel failed")
        assert world.cache.stats().hbm.free == 32

    def test_one_waiter_that_fails_does_not_keep_the_others_waiting(self, world: CacheWorld) -> None:
        fill = world.reserve(make_key())
        pending = world.cache.acquire(make_key(), 0)
        assert isinstance(pending, PendingPrefix)
        told: list[str] = []

        def fail(_: PendingPrefix) -> None:
            raise RuntimeError("my own fault")

        pending.add_done_callback(fail)
        pending.add_done_callback(lambda _: told.append("second"))
        fill.abort()
        assert told == ["second"]

    def test_half_a_prefix_is_never_published(self, world: CacheWorld) -> None:
        fill = world.reserve(make_key())
        world.write(fill, make_key(), 50)
        with pytest.raises(ValueError, match="50 of 102"):
            fill.publish(1)
        with pytest.raises(ValueError, match="49 tokens"):
            fill.progress(49)
        fill.abort()

    def test_a_handle_is_released_once(self, world: CacheWorld) -> None:
        handle = world.compute(make_key())
        world.cache.release(handle)
        with pytest.raises(ValueError, match="twice"):
            world.cache.release(handle)
        check_invariants(world.cache)


class TestIdentity:
    """4. Keys of user and length alone gave silently wrong scores."""

    @pytest.mark.parametrize(
        ("asked", "reason"),
        [
            (make_key(length=100, changed_at=0), MissReason.OTHER_HISTORY),
            (make_key(length=100, feature=8), MissReason.OTHER_HISTORY),
            (make_key(model=b"model-2"), MissReason.OTHER_MODEL),
            (make_key(user="bob"), MissReason.ABSENT),
            (make_key(user=""), MissReason.UNKNOWN_IDENTITY),
            (make_key(model=b""), MissReason.UNKNOWN_IDENTITY),
            (dataclasses.replace(make_key(), behaviours=make_key(length=3).behaviours), MissReason.UNKNOWN_IDENTITY),
        ],
        ids=["other history", "other features", "new weights", "other user", "no user", "no model", "other behaviours"],
    )
    def test_another_prefix_is_a_miss(self, world: CacheWorld, asked: PrefixKey, reason: MissReason) -> None:
        world.store(make_key(length=100))
        assert world.cache.acquire(asked, 1) == Miss(reason)

    @pytest.mark.parametrize("asked", [make_key(user=""), make_key(model=b"")], ids=["no user", "no model"])
    def test_an_unknown_identity_gets_no_pages(self, world: CacheWorld, asked: PrefixKey) -> None:
        assert world.cache.reserve(asked, 0) == NoRoom(NoRoomReason.UNKNOWN_IDENTITY)
        assert world.cache.transfers.start_reload(asked, 0, 0) == Declined(DeclineReason.NOT_IN_DRAM)
        assert not world.cache.lease(asked, "r1", 10)
        assert world.cache.transfers.spill(asked) is SpillOutcome.NOT_READY

    def test_same_length_but_a_late_change_hits_up_to_the_last_equal_block(self, world: CacheWorld) -> None:
        world.store(make_key(length=200))
        handle = world.hit(make_key(length=200, changed_at=150))
        assert (handle.behaviours, handle.complete) == (128, False)

    def test_a_grown_history_hits_to_the_end_of_the_entry(self, world: CacheWorld) -> None:
        world.store(make_key(length=100))
        handle = world.hit(make_key(length=103))
        assert (handle.behaviours, handle.complete) == (100, False)

    def test_a_request_of_the_version_before_still_finds_its_whole_prefix(self, world: CacheWorld) -> None:
        world.store(make_key(length=100))
        world.store(make_key(length=103))
        world.store(make_key(length=117))
        assert world.cache.stats().hbm.entries == 1
        for length in (100, 103, 117):
            assert world.hit(make_key(length=length)).complete

    def test_versions_behind_the_place_where_a_history_changed_are_forgotten(self, world: CacheWorld) -> None:
        world.store(make_key(length=70))
        world.store(make_key(length=100))
        world.store(make_key(length=130))
        world.store(make_key(length=150, changed_at=90))
        assert world.cache.stats().hbm.entries == 1
        assert world.hit(make_key(length=130)).behaviours == 70
        assert world.hit(make_key(length=100)).behaviours == 70

    def test_a_prefix_that_may_not_grow_matches_only_as_a_whole(self, world: CacheWorld) -> None:
        rigid = dataclasses.replace(make_key(length=128), growable=False)
        world.store(rigid)
        assert world.hit(rigid).complete
        grown = dataclasses.replace(make_key(length=130), growable=False)
        assert world.cache.acquire(grown, 1) == Miss(MissReason.OTHER_HISTORY)

    def test_new_weights_are_unreachable_at_once_and_freed(self, world: CacheWorld) -> None:
        world.spilled(make_key("ann"))
        world.store(make_key("bob"))
        filling = world.reserve(make_key("cid"))
        assert world.cache.keep_only(b"model-2") == 4 - 1
        assert world.cache.acquire(make_key("bob"), 1) == Miss(MissReason.OTHER_MODEL)
        assert world.cache.reserve(make_key("bob"), 1) == NoRoom(NoRoomReason.OTHER_MODEL)
        world.write(filling, make_key("cid"), filling.tokens)
        assert filling.publish(1) is None
        assert (world.cache.stats().hbm.free, world.cache.stats().dram.free) == (32, 64)
        world.store(make_key("bob", model=b"model-2"))
        assert world.hit(make_key("bob", model=b"model-2")).complete


class TestInvalidation:
    """5. A fill that began before an invalidation was published after it."""

    def test_invalidated_while_filling_is_discarded_and_waiters_miss(self, world: CacheWorld) -> None:
        fill = world.reserve(make_key())
        pending = world.cache.acquire(make_key(), 0)
        assert isinstance(pending, PendingPrefix)
        world.cache.invalidate_user("ann")
        assert pending.outcome is PendingOutcome.INVALIDATED
        assert not fill.is_current
        assert world.cache.stats().hbm.in_flight == fill.pages.size
        world.write(fill, make_key(), fill.tokens)
        assert fill.publish(1) is None
        assert world.cache.acquire(make_key(), 1) == Miss(MissReason.ABSENT)
        assert world.cache.stats().fills == {PendingOutcome.INVALIDATED: 1}
        assert world.cache.stats().hbm.free == 32

    def test_invalidated_while_filling_does_not_touch_the_fill_that_came_after(self, world: CacheWorld) -> None:
        stale = world.reserve(make_key())
        world.cache.invalidate_user("ann")
        fresh = world.compute(make_key())
        stale.abort()
        world.check_reads(fresh, make_key())
        assert world.hit(make_key()).complete
        check_invariants(world.cache)

    def test_invalidated_while_loading_and_while_spilling(self, world: CacheWorld) -> None:
        world.spilled(make_key("ann"))
        loading = world.cache.transfers.start_reload(make_key("ann"), 100, 0)
        world.store(make_key("bob"))
        world.cache.transfers.spill(make_key("bob"))
        assert [each.state for each in world.cache.ledger.hbm.index.of_user("bob")] == [EntryState.SPILLING]
        assert world.cache.invalidate_user("ann") == 2
        assert world.cache.invalidate_user("bob") == 2
        assert isinstance(loading, PendingPrefix) and loading.outcome is PendingOutcome.INVALIDATED
        world.mover.run()
        check_invariants(world.cache)
        assert (world.cache.stats().hbm.free, world.cache.stats().dram.free) == (32, 64)

    def test_invalidated_while_growing(self, world: CacheWorld) -> None:
        world.store(make_key(length=100))
        fill = world.reserve(make_key(length=150))
        world.cache.invalidate_user("ann")
        check_invariants(world.cache)
        world.write(fill, make_key(length=150), fill.tokens)
        assert fill.publish(1) is None
        assert world.cache.stats().hbm.free == 32


class TestSingleFlight:
    """6, 7. Every concurrent request started a copy of its own, and the first to give up ended it for all."""

    def test_a_hundred_concurrent_requests_of_one_user_make_one_reload(self, world: CacheWorld) -> None:
        world.spilled(make_key())
        all_missed = threading.Barrier(100)
        answers: list[object] = []
        arrived = threading.Semaphore(0)

        def request() -> None:
            assert isinstance(world.cache.acquire(make_key(), 0), Miss)
            all_missed.wait(30)
            pending = world.cache.transfers.start_reload(make_key(), 100, 0)
            assert isinstance(pending, PendingPrefix)
            answers.append(pending)
            pending.add_done_callback(lambda _: arrived.release())

        threads = [threading.Thread(target=request) for _ in range(100)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        answers.append(world.cache.acquire(make_key(), 0))
        assert len(world.mover) == 1
        assert world.mover.run() == 1
        assert (len(answers), len(set(map(id, answers)))) == (101, 1)
        assert all(arrived.acquire(timeout=5) for _ in range(100))
        assert world.cache.stats().reloads == {PendingOutcome.PUBLISHED: 1}
        world.hit(make_key())

    def test_the_first_waiter_leaves_the_copy_goes_on_and_the_second_hits(self, world: CacheWorld) -> None:
        world.spilled(make_key())
        first = world.cache.transfers.start_reload(make_key(), 10, 0)
        second = world.cache.acquire(make_key(), 5)
        assert first is second
        world.mover.start()
        # The first waiter's deadline is over: it does not look up its prefix again.
        world.mover.finish()
        assert world.hit(make_key(), 50).source is PrefixSource.DRAM

    @pytest.mark.parametrize("cached", [0, 100])
    def test_a_hundred_concurrent_computations_of_one_prefix_are_one(self, world: CacheWorld, cached: int) -> None:
        """A pre-infer where nothing is cached, an append where the beginning is."""
        key = make_key(length=150)
        if cached:
            world.store(make_key(length=cached))
        barrier = threading.Barrier(100)
        answers: list[object] = []

        def reserve() -> None:
            barrier.wait()
            answers.append(world.cache.reserve(key, 0))

        threads = [threading.Thread(target=reserve) for _ in range(100)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        (fill,) = [answer for answer in answers if isinstance(answer, Fill)]
        waiting = [answer for answer in answers if isinstance(answer, PendingPrefix)]
        assert (len(waiting), len(set(map(id, waiting)))) == (99, 1)
        assert fill.start_behaviours == cached
        world.begin(fill)
        world.write(fill, key, fill.tokens)
        handle = fill.publish(1)
        assert handle is not None
        assert waiting[0].outcome is PendingOutcome.PUBLISHED
        world.check_reads(handle, key)
        world.cache.release(handle)
        check_invariants(world.cache)

    def test_reserve_acquire_and_reload_join_the_same_fill(self, world: CacheWorld) -> None:
        fill = world.reserve(make_key())
        joined = world.cache.acquire(make_key(), 0)
        assert isinstance(joined, PendingPrefix) and joined.kind is PendingKind.FILL
        assert world.cache.reserve(make_key(), 0) is joined
        assert world.cache.transfers.start_reload(make_key(), 10, 0) is joined
        world.write(fill, make_key(), fill.tokens)
        handle = fill.publish(1)
        assert joined.outcome is PendingOutcome.PUBLISHED
        assert handle is not None and world.hit(make_key()).complete

    def test_reserve_and_reload_of_a_ready_prefix_return_a_pending_prefix_that_has_ended(
        self, world: CacheWorld
    ) -> None:
        world.store(make_key())
        for answer in (world.cache.reserve(make_key(), 1), world.cache.transfers.start_reload(make_key(), 10, 1)):
            assert isinstance(answer, PendingPrefix) and answer.outcome is PendingOutcome.PUBLISHED

    def test_a_look_up_joins_an_append_under_way_or_hits_the_ready_part(self, world: CacheWorld) -> None:
        world.store(make_key(length=100))
        fill = world.reserve(make_key(length=150))
        assert isinstance(world.cache.acquire(make_key(length=150), 1), PendingPrefix)
        passed_by = world.cache.acquire(make_key(length=150), 1, join=False)
        assert isinstance(passed_by, Hit) and passed_by.handle.behaviours == 100
        assert world.hit(make_key(length=100)).complete
        fill.abort()


class TestLooking:
    """8. A peek that changed state, and refusals that were not counted, kept entries out of the cache."""

    def test_peek_changes_nothing(self) -> None:
        world = CacheWorld(hbm_pages=14)
        world.store(make_key("ann"), 1)
        world.store(make_key("bob"), 2)
        before = world.cache.stats()
        for _ in range(3):
            assert world.cache.peek(make_key("ann")).hbm_behaviours == 100
            assert world.cache.peek(make_key("nobody")) == Presence(0, 0)
        assert world.cache.stats() == before
        world.store(make_key("cid"), 3)
        assert world.cache.peek(make_key("ann")).hbm_behaviours == 0, "the one peeked at was still the oldest"
        assert world.cache.peek(make_key("bob")).hbm_behaviours == 100

    @pytest.mark.parametrize("case", ["absent", "in DRAM", "complete", "in part", "under computation", "other model"])
    def test_a_look_up_that_is_only_counted_counts_and_marks_as_one_that_pins(self, case: str) -> None:
        found, key = [], make_key(length=150)
        for is_only_counted in (False, True):
            world = CacheWorld()
            if case == "in DRAM":
                world.spilled(key)
            elif case in ("complete", "in part"):
                world.store(key if case == "complete" else make_key(length=100))
            elif case == "under computation":
                world.reserve(key)
            elif case == "other model":
                world.cache.admit_only(b"another model")
            before = world.cache.stats()
            if is_only_counted:
                tier = world.cache.count_look_up(key, 5)
                assert tier == {"in DRAM": Tier.DRAM, "complete": Tier.HBM, "in part": Tier.HBM}.get(case)
            else:
                got = world.cache.acquire(key, 5)
                if isinstance(got, Hit):
                    world.cache.release(got.handle)
            assert world.cache.stats() != before
            world.cache.invalidate_user(key.user_id)
            found.append(world.cache.stats())
            check_invariants(world.cache)
        assert found[0] == found[1]

    def test_every_refusal_is_counted_by_its_reason(self) -> None:
        world = CacheWorld(hbm_pages=7, dram_pages=7)
        world.cache.acquire(make_key("ann"), 0)
        pinned = world.compute(make_key("ann"))
        world.cache.reserve(make_key("bob"), 0)
        world.cache.transfers.start_reload(make_key("bob"), 0, 0)
        world.mover.refuses = True
        assert world.cache.transfers.spill(pinned) is SpillOutcome.QUEUE_FULL
        stats = world.cache.stats()
        assert stats.misses == {MissReason.ABSENT: 1}
        assert stats.no_room == {NoRoomReason.FULL: 1}
        assert stats.declined == {DeclineReason.NOT_IN_DRAM: 1}
        assert stats.spills == {SpillOutcome.QUEUE_FULL: 1}
        check_invariants(world.cache)

    def test_look_ups_for_pre_infer_are_not_counted(self, world: CacheWorld) -> None:
        world.cache.acquire(make_key(), 0, purpose=Purpose.PRE_INFER)
        world.store(make_key())
        found = world.cache.acquire(make_key(), 0, purpose=Purpose.PRE_INFER)
        assert isinstance(found, Hit)
        assert world.cache.stats().lookups == 0

    @pytest.mark.slow
    def test_defaults_have_finite_bounds(self) -> None:
        """10. Queues and lease tables were unbounded by default."""
        limits = CopyLimits()
        assert 0 < limits.max_in_flight <= 4
        assert 0 < limits.max_jobs < 10_000
        assert 0 < limits.max_bytes <= 1 << 34
        cache = PrefixCache(CacheConfig(DramGeometry(GEOMETRY), LAYOUT, 32))
        fill = cache.reserve(make_key(), 0)
        assert isinstance(fill, Fill)
        leased = next(index for index in range(10**6) if not cache.lease(fill.work.key, f"r{index}", 10))
        assert 1_000 < leased <= 100_000

    def test_a_user_whose_history_keeps_changing_keeps_few_entries(self, world: CacheWorld) -> None:
        for feature in range(10):
            world.store(make_key(length=20, feature=feature))
        assert world.cache.stats().hbm.entries == MAX_ENTRIES_PER_USER
        check_invariants(world.cache)


class TestLeases:
    """11. A pin whose owner had died held its pages for ever."""

    def test_a_leaked_lease_ends_at_its_time_and_is_counted(self) -> None:
        world = CacheWorld(hbm_pages=7)
        world.store(make_key("ann"))
        assert world.cache.lease(make_key("ann"), "r1", until_us=100)
        assert world.cache.reserve(make_key("bob"), 50) == NoRoom(NoRoomReason.FULL)
        assert world.cache.expire_leases(99) == 0
        assert world.cache.expire_leases(100) == 1
        world.store(make_key("bob"), 101)
        stats = world.cache.stats()
        assert (stats.leases_granted, stats.leases_leaked, stats.leases) == (1, 1, 0)
        assert stats.wasted == {WasteReason.LEASE_EXPIRED: 1}

    def test_each_request_of_a_set_holds_the_prefix(self) -> None:
        world = CacheWorld(hbm_pages=7)
        world.store(make_key("ann"))
        for request_id in ("r1", "r2"):
            assert world.cache.lease(make_key("ann"), request_id, 100)
        assert world.cache.end_lease("ann", "r1")
        assert not world.cache.end_lease("ann", "r1")
        assert isinstance(world.cache.reserve(make_key("bob"), 1), NoRoom)
        assert world.cache.end_lease("ann", "r2")
        world.store(make_key("bob"))

    def test_the_request_id_of_another_user_ends_and_moves_no_lease(self) -> None:
        """Whoever could write a request with a known id freed the prefix of its user."""
        world = CacheWorld(hbm_pages=14)
        for user in ("ann", "bob"):
            world.store(make_key(user))
            assert world.cache.lease(make_key(user), "r1", 100)
        assert world.cache.stats().hbm.leased == 14
        assert not world.cache.end_lease("cid", "r1")
        assert world.cache.end_lease("bob", "r1")
        assert world.cache.stats().hbm.leased == 7
        assert isinstance(world.cache.reserve(make_key("long", 200), 1), NoRoom)
        check_invariants(world.cache)

    def test_a_lease_taken_during_a_fill_protects_the_published_prefix(self) -> None:
        world = CacheWorld(hbm_pages=7)
        fill = world.reserve(make_key("ann"))
        assert world.cache.lease(make_key("ann"), "r1", 100)
        world.write(fill, make_key("ann"), fill.tokens)
        handle = fill.publish(1)
        assert handle is not None
        assert world.cache.stats().hbm.pinned == 7
        world.cache.release(handle)
        assert world.cache.stats().hbm.leased == 7

    def test_a_lease_moved_to_a_later_time_does_not_end_at_the_earlier(self, world: CacheWorld) -> None:
        world.store(make_key())
        world.cache.lease(make_key(), "r1", 100)
        world.cache.lease(make_key(), "r1", 200)
        assert world.cache.expire_leases(150) == 0
        assert world.cache.expire_leases(200) == 1

    def test_a_lease_protects_the_end_of_its_prefix_from_a_changed_history(self, world: CacheWorld) -> None:
        world.store(make_key(length=200))
        world.cache.lease(make_key(length=200), "r1", 100)
        world.store(make_key(length=200, changed_at=150))
        assert world.hit(make_key(length=200)).complete
        assert world.hit(make_key(length=200, changed_at=150)).complete

    def test_a_lease_given_while_a_changed_history_is_computed_wins_over_it(self, world: CacheWorld) -> None:
        """The growth had begun before the lease, and removed the end of the leased prefix when it was published."""
        world.store(make_key(length=200))
        changed = make_key(length=200, changed_at=150)
        fill = world.reserve(changed)
        waiting = world.cache.acquire(changed, 1)
        assert isinstance(waiting, PendingPrefix)
        assert world.cache.lease(make_key(length=200), "r1", 100)
        assert (fill.is_current, waiting.outcome) == (False, PendingOutcome.INVALIDATED)
        world.write(fill, changed, fill.tokens)
        assert fill.publish(2) is None
        assert world.hit(make_key(length=200)).complete
        check_invariants(world.cache)
        world.store(changed)
        assert world.hit(changed).complete and world.hit(make_key(length=200)).complete

    def test_a_lease_on_the_part_that_both_histories_share_does_not_stop_the_growth(self, world: CacheWorld) -> None:
        world.store(make_key(length=200))
        changed = make_key(length=200, changed_at=150)
        fill = world.reserve(changed)
        assert world.cache.lease(make_key(length=100), "r1", 100)
        assert world.cache.lease(changed, "r2", 100)
        world.write(fill, changed, fill.tokens)
        assert fill.publish(2) is not None
        assert world.hit(changed).complete

    @pytest.mark.parametrize(
        ("how", "reason"),
        [
            (
                lambda world: world.cache.end_lease("ann", "r1", WasteReason.REQUEST_EXPIRED),
                WasteReason.REQUEST_EXPIRED,
            ),
            (lambda world: world.cache.invalidate_user("ann"), WasteReason.INVALIDATED),
            (lambda world: (world.cache.end_lease("ann", "r1"), world.evict_hbm()), WasteReason.EVICTED),
        ],
        ids=["request expired", "invalidated", "evicted"],
    )
    def test_a_pre_infer_that_served_nothing_is_counted_once_by_its_reason(self, world, how, reason) -> None:  # type: ignore[no-untyped-def]
        world.store(make_key("ann"))
        world.cache.lease(make_key("ann"), "r1", 100)
        how(world)
        world.cache.expire_leases(1000)
        wasted = dict(world.cache.stats().wasted)
        wasted.pop(WasteReason.INVALIDATED, None) if reason is WasteReason.EVICTED else None
        assert wasted == {reason: 1}

    @pytest.mark.parametrize("expires", [False, True])
    def test_a_pre_infer_is_not_wasted_while_another_request_may_still_use_it(
        self, world: CacheWorld, expires: bool
    ) -> None:
        world.store(make_key())
        world.cache.lease(make_key(), "r1", 100)
        world.cache.lease(make_key(), "r2", 200)
        if expires:
            world.cache.expire_leases(100)
        else:
            world.cache.end_lease("ann", "r1", WasteReason.REQUEST_EXPIRED)
        assert world.cache.stats().wasted == {}
        world.cache.release(world.hit(make_key()))
        world.cache.expire_leases(200)
        assert world.cache.stats().wasted == {}

    def test_a_pre_infer_that_served_a_ranking_is_not_wasted(self, world: CacheWorld) -> None:
        world.store(make_key())
        world.cache.release(world.hit(make_key()))
        world.cache.invalidate_user("ann")
        assert world.cache.stats().wasted == {}


class TestAppend:
    """13. Appending behind a gap attended to rows of another history."""

    def test_growth_computes_only_the_tail(self, world: CacheWorld) -> None:
        world.store(make_key(length=94))
        before = world.cache.stats().hbm.free
        fill = world.reserve(make_key(length=130))
        assert (fill.start_behaviours, fill.start_tokens, fill.copy_page) == (94, 96, None)
        assert world.cache.stats().hbm.free == before - 3
        world.write(fill, make_key(length=130), fill.tokens)
        handle = fill.publish(1)
        assert handle is not None
        world.check_reads(handle, make_key(length=130))
        assert world.cache.stats().appends == 1

    def test_a_partial_tail_page_that_nobody_reads_grows_in_place(self, world: CacheWorld) -> None:
        world.store(make_key(length=100))
        fill = world.reserve(make_key(length=105))
        assert fill.copy_page is None
        assert world.cache.stats().hbm.in_flight == 0
        fill.abort()
        assert world.hit(make_key(length=100)).complete

    def test_a_partial_tail_page_that_others_read_is_copied(self, world: CacheWorld) -> None:
        reader = world.compute(make_key(length=100))
        fill = world.reserve(make_key(length=130))
        assert fill.copy_page is not None
        assert fill.copy_page.source == reader.pages[-1]
        assert fill.copy_page.target == fill.pages[reader.pages.size - 1]
        world.write(fill, make_key(length=130), fill.tokens)
        handle = fill.publish(1)
        assert handle is not None
        world.check_reads(handle, make_key(length=130))
        world.check_reads(reader, make_key(length=100))
        assert (reader.behaviours, reader.pages.size) == (100, 7)
        check_invariants(world.cache)
        world.cache.release(reader)
        check_invariants(world.cache)
        world.check_reads(handle, make_key(length=130))

    def test_the_extender_s_own_handle_does_not_make_the_page_shared(self, world: CacheWorld) -> None:
        handle = world.compute(make_key(length=100))
        fill = world.cache.extend(handle, make_key(length=105), 1)
        assert isinstance(fill, Fill) and fill.copy_page is None
        world.begin(fill)
        world.write(fill, make_key(length=105), fill.tokens)
        grown = fill.publish(2)
        assert grown is not None
        world.check_reads(grown, make_key(length=105))
        world.check_reads(handle, make_key(length=100))

    def test_behind_a_gap_the_tail_is_computed_from_the_last_equal_block(self, world: CacheWorld) -> None:
        world.store(make_key(length=100))
        moved_on = make_key(length=300, changed_at=90)
        assert world.hit(moved_on).behaviours == 64
        fill = world.reserve(moved_on)
        assert fill.start_behaviours in (0, 64)
        world.write(fill, moved_on, fill.tokens)
        handle = fill.publish(1)
        assert handle is not None
        world.check_reads(handle, moved_on)
        slid = make_key(length=100, changed_at=0)
        assert world.cache.acquire(slid, 1) == Miss(MissReason.OTHER_HISTORY)

    def test_growth_from_inside_leaves_the_old_end_until_it_is_published(self, world: CacheWorld) -> None:
        world.store(make_key(length=200))
        changed = make_key(length=200, changed_at=150)
        fill = world.reserve(changed)
        assert fill.start_behaviours == 128
        assert world.hit(make_key(length=200)).complete
        fill.abort()
        assert world.hit(make_key(length=200)).complete
        check_invariants(world.cache)

    def test_growth_from_inside_does_not_overwrite_readers(self, world: CacheWorld) -> None:
        reader = world.compute(make_key(length=200))
        changed = make_key(length=200, changed_at=150)
        handle = world.compute(changed)
        world.check_reads(reader, make_key(length=200))
        world.check_reads(handle, changed)
        check_invariants(world.cache)


class TestTiers:
    def test_a_spilled_prefix_comes_back_as_it_was(self, world: CacheWorld) -> None:
        world.spilled(make_key())
        assert world.cache.acquire(make_key(), 0) == Miss(MissReason.IN_DRAM, 100)
        pending = world.cache.transfers.start_reload(make_key(), 100, 0)
        assert isinstance(pending, PendingPrefix) and pending.kind is PendingKind.LOAD
        assert isinstance(world.cache.acquire(make_key(), 0), PendingPrefix)
        world.mover.run()
        handle = world.hit(make_key())
        assert (handle.complete, handle.source) == (True, PrefixSource.DRAM)

    def test_a_prefix_is_spilled_once_and_then_only_its_grown_tail(self, world: CacheWorld) -> None:
        world.store(make_key(length=94))
        assert world.cache.transfers.spill(make_key(length=94)) is SpillOutcome.STARTED
        assert world.cache.transfers.spill(make_key(length=94)) is SpillOutcome.UNDER_WAY
        world.mover.run()
        assert world.cache.transfers.spill(make_key(length=94)) is SpillOutcome.ALREADY_THERE
        world.store(make_key(length=130))
        before = world.cache.stats().dram.free
        assert world.cache.transfers.spill(make_key(length=130)) is SpillOutcome.STARTED
        assert world.cache.stats().dram.free == before - 3
        world.mover.run()
        check_invariants(world.cache)
        world.evict_hbm()
        world.cache.transfers.start_reload(make_key(length=130), 100, 0)
        world.mover.run()
        assert world.hit(make_key(length=130)).complete

    def test_a_reload_of_a_grown_history_is_completed_by_an_append(self, world: CacheWorld) -> None:
        world.spilled(make_key(length=100))
        world.cache.transfers.start_reload(make_key(length=110), 100, 0)
        world.mover.run()
        partial_hit = world.hit(make_key(length=110))
        assert (partial_hit.behaviours, partial_hit.complete) == (100, False)
        fill = world.cache.extend(partial_hit, make_key(length=110), 1)
        assert isinstance(fill, Fill) and fill.start_behaviours == 100
        world.begin(fill)
        world.write(fill, make_key(length=110), fill.tokens)
        handle = fill.publish(2)
        assert handle is not None and handle.source is PrefixSource.DRAM
        world.check_reads(handle, make_key(length=110))

    def test_no_room_in_hbm_starts_no_reload(self) -> None:
        world = CacheWorld(hbm_pages=7)
        world.spilled(make_key("ann"))
        pinned = world.compute(make_key("bob"))
        assert world.cache.transfers.start_reload(make_key("ann"), 100, 0) == NoRoom(NoRoomReason.FULL)
        assert len(world.mover) == 0
        world.cache.release(pinned)
        check_invariants(world.cache)

    def test_a_refused_copy_fails_the_reload_and_keeps_dram(self, world: CacheWorld) -> None:
        world.spilled(make_key())
        world.mover.refuses = True
        assert world.cache.transfers.start_reload(make_key(), 100, 0) == Declined(DeclineReason.QUEUE_FULL)
        check_invariants(world.cache)
        world.mover.refuses = False
        assert isinstance(world.cache.transfers.start_reload(make_key(), 100, 0), PendingPrefix)

    def test_a_reload_that_saves_less_than_it_costs_is_declined(self, world: CacheWorld) -> None:
        world.spilled(make_key())
        size_bytes = 7 * GEOMETRY.page_bytes
        copy_us = world.mover.forecast(size_bytes, CopyPriority.RELOAD).copy_us
        declined = world.cache.transfers.start_reload(make_key(), 100, 0, saved_us=copy_us)
        assert declined == Declined(DeclineReason.NOT_WORTH_IT)
        assert isinstance(
            world.cache.transfers.start_reload(make_key(), 100, 0, saved_us=copy_us * 1.01), PendingPrefix
        )

    @pytest.mark.parametrize(
        ("wait_us", "copy_us", "saved_us", "pays"),
        [(0, 10, 11, True), (5, 10, 15, False), (5, 10, 16, True), (0, 0, 0, False)],
    )
    def test_break_even(self, wait_us: float, copy_us: float, saved_us: float, pays: bool) -> None:
        assert reload_pays(CopyForecast(wait_us, copy_us), saved_us) is pays

    @pytest.mark.parametrize(
        ("copy_us", "groups", "rank_us", "exposed_us"),
        [
            (400, 4, 400, 100),  # The first layer, then computing hides the next one's copy.
            (400, 4, 800, 100),
            (400, 4, 200, 250),  # Each of the other three layers comes 50 µs after it is wanted.
            (400, 4, 0, 400),
            (400, 1, 400, 400),
        ],
    )
    def test_a_copy_beside_a_ranking_counts_only_the_time_that_the_ranking_waits(
        self, copy_us: float, groups: int, rank_us: float, exposed_us: float
    ) -> None:
        forecast = CopyForecast(7, copy_us)
        assert not reload_pays(forecast, 7 + exposed_us, groups, rank_us)
        assert reload_pays(forecast, 7 + exposed_us + 1, groups, rank_us)

    @pytest.mark.parametrize(
        ("length", "num_layers", "pays"), [(100, 4, True), (100, 1, False), (110, 4, False)], ids=str
    )
    def test_a_whole_prefix_that_is_reloaded_layer_by_layer_may_pay_where_a_part_does_not(
        self, length: int, num_layers: int, pays: bool
    ) -> None:
        """Length 110: DRAM has only a part of the prefix, and a ranking waits until that part has arrived."""
        world = CacheWorld(layer_wise=True, num_layers=num_layers)
        world.spilled(make_key(length=100))
        copy_us = world.mover.forecast(7 * num_layers * GEOMETRY.page_bytes, CopyPriority.RELOAD).copy_us
        answer = world.cache.transfers.start_reload(
            make_key(length=length), 100, 0, saved_us=copy_us / 2, rank_us=copy_us
        )
        if pays:
            assert isinstance(answer, PendingPrefix)
        else:
            assert answer == Declined(DeclineReason.NOT_WORTH_IT)

    def test_a_reload_that_a_request_with_an_earlier_deadline_joins_goes_first(self) -> None:
        """The reload kept the deadline of the job that had started it, behind reloads with later deadlines."""
        world = CacheWorld(hbm_pages=35, limits=CopyLimits(max_in_flight=1))
        users = ("ann", "bob", "cid")
        for user in users:
            world.spilled(make_key(user))
        for user, deadline_us in zip(users, (100, 200, 300), strict=True):
            assert isinstance(world.cache.transfers.start_reload(make_key(user), deadline_us, 0), PendingPrefix)
        world.mover.start()
        joined = world.cache.acquire(make_key("cid"), 0)
        assert isinstance(joined, PendingPrefix)
        joined.needed_by(150)
        world.mover.finish()
        world.mover.start()
        world.mover.finish()
        assert joined.outcome is PendingOutcome.PUBLISHED
        assert isinstance(world.cache.acquire(make_key("bob"), 0), PendingPrefix)

    def test_spills_stop_while_copies_are_slow_and_start_again_well_below(self) -> None:
        gate = SpillGate(open_below_us=20, close_above_us=50, weight=1.0)
        waits = [0, 50, 51, 49, 21, 20, 19, 50]
        assert [gate.admits(wait) for wait in waits] == [True, True, False, False, False, False, True, True]

    def test_a_cache_of_one_tier_spills_nothing(self) -> None:
        cache = PrefixCache(CacheConfig(DramGeometry(GEOMETRY), LAYOUT, 32))
        fill = cache.reserve(make_key(), 0)
        assert isinstance(fill, Fill)
        fill.progress(fill.tokens)
        handle = fill.publish(0)
        assert handle is not None
        assert cache.transfers.spill(handle) is SpillOutcome.NO_ROOM
        cache.release(handle)
        cache.close()

    def test_demoted_prefixes_go_first_unless_they_are_used_again(self) -> None:
        world = CacheWorld(hbm_pages=21)
        for now_us, user in enumerate(("ann", "bob", "cid")):
            world.store(make_key(user), now_us)
        of_two = world.cache.held_bytes(lambda user: user in {"bob", "cid"})
        assert of_two == 2 * world.cache.held_bytes(lambda user: user == "ann") > 0
        assert world.cache.held_bytes(lambda user: user == "dan") == 0
        assert world.cache.demote(lambda user: user in {"bob", "cid"}) == 2
        world.cache.release(world.hit(make_key("bob"), 4))
        world.store(make_key("dan"), 5)
        assert world.cache.acquire(make_key("cid"), 6) == Miss(MissReason.ABSENT)
        assert world.cache.peek(make_key("ann")).hbm_behaviours == 100
        assert world.cache.peek(make_key("bob")).hbm_behaviours == 100
        assert world.cache.demote(["nobody", "ann"]) == 1

    def test_a_newer_prefix_of_the_user_makes_the_older_one_go_first(self) -> None:
        world = CacheWorld(hbm_pages=21)
        world.store(make_key("zoe"), 0)
        world.store(make_key("ann"), 1)
        world.store(make_key("ann", feature=8), 2)
        world.store(make_key("bob"), 3)
        assert world.cache.peek(make_key("ann")).hbm_behaviours == 0
        assert world.cache.peek(make_key("zoe")).hbm_behaviours == 100


def test_a_prefix_without_behaviours_is_not_cached(world: CacheWorld) -> None:
    assert world.cache.reserve(make_key(length=0), 0) == NoRoom(NoRoomReason.NOTHING_TO_CACHE)
    assert world.cache.acquire(make_key(length=0), 0) == Miss(MissReason.ABSENT)


def _lines_run(call) -> int:  # type: ignore[no-untyped-def]
    """How many lines of Python `call` runs."""
    lines = 0

    def count(frame, event, _):  # type: ignore[no-untyped-def]
        nonlocal lines
        lines += event == "line"
        return count

    before = sys.gettrace()
    # A garbage collection in between would run other callbacks.
    gc.disable()
    sys.settrace(count)
    try:
        call()
    finally:
        sys.settrace(before)
        gc.enable()
    return lines


@pytest.mark.slow
def test_a_hit_costs_as_many_steps_among_1e4_users_as_among_ten() -> None:
    """12. LRU touches walked a list."""
    small, large = CacheWorld(hbm_pages=10), CacheWorld(hbm_pages=10_000)
    chain = make_key(length=3).chain
    for world, users in ((small, 10), (large, 10_000)):
        for user in range(users):
            key = PrefixKey(f"u{user}", b"m", chain)
            fill = world.cache.reserve(key, user)
            assert isinstance(fill, Fill)
            fill.progress(fill.tokens)
            handle = fill.publish(user)
            assert handle is not None
            world.cache.release(handle)
        assert world.cache.stats().hbm.entries == users
    key = PrefixKey("u0", b"m", chain)
    steps = [_lines_run(lambda world=world: world.cache.acquire(key, 10**6)) for world in (small, large)]
    assert steps[0] == steps[1] > 0
    newcomer = PrefixKey("new", b"m", chain)
    steps = [_lines_run(lambda world=world: world.cache.reserve(newcomer, 10**6)) for world in (small, large)]
    assert steps[0] == steps[1] > 0


@pytest.mark.slow
def test_metadata_needs_no_torch_and_no_arena() -> None:
    """18. Metadata could not be tested where the accelerator's library was broken."""
    code = (
        "import sys; sys.modules['torch'] = None; import relaygr.worker.cache, relaygr.worker.cache.copies; "
        "assert 'relaygr.worker.cache.arena' not in sys.modules; assert 'relaygr.worker.device' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=240)


@pytest.mark.slow
def test_the_modules_of_bytes_do_not_import_the_metadata() -> None:
    code = (
        "import sys, types; sys.modules['relaygr.worker.cache'] = types.ModuleType('relaygr.worker.cache'); "
        "sys.modules['relaygr.worker.cache'].__path__ = [__import__('relaygr.worker').worker.__path__[0] + '/cache']; "
        "import relaygr.worker.cache.arena, relaygr.worker.cache.copies; "
        "assert 'relaygr.worker.cache.metadata' not in sys.modules and 'relaygr.worker.cache.cache' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=240)


def test_page_tables_locate_each_token(world: CacheWorld) -> None:
    handle = world.compute(make_key(length=100))
    assert handle.pages.dtype == np.int32
    assert handle.pages.size == -(-handle.tokens // PAGE_TOKENS)
    assert handle.pages.max() < world.arenas[Tier.HBM].shape[0]
