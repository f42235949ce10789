"""Limits on the pages in use, and requests of operators to a cache: reports, drops and limits."""

from __future__ import annotations

import json
from typing import Any

import pytest
from structlog.testing import capture_logs

from relaygr.runtime.clock import ManualClock
from relaygr.runtime.errors import RelayError
from relaygr.runtime.private_sockets import SocketPeer
from relaygr.worker.cache import Fill, NoRoom, NoRoomReason, Tier
from relaygr.worker.cache.admin import (
    CacheAdmin,
    CacheReport,
    DropAll,
    DropReport,
    DropUser,
    Limit,
    LimitReport,
    ServingModel,
    Show,
    ShowUser,
    UserReport,
    decode_report,
    digest_of,
    encode_request,
)
from relaygr.worker.cache.stats import TierStats
from relaygr.worker.executor.work import JobOutcome
from tests.worlds.cache import GEOMETRY, CacheWorld, make_key
from tests.worlds.invariants import check_invariants
from tests.worlds.real_executor import RealExecutorWorld

PAGES = 7
"""Pages of a prefix of 100 behaviours."""
ANN, BOB, CID = make_key("ann", 100), make_key("bob", 100), make_key("cid", 100)
CALLER = SocketPeer(pid=4711, uid=1000)
NAMES = ("free", "withheld", "evictable", "leased", "pinned", "in_flight")


def by_state(tier: TierStats) -> tuple[int, ...]:
    return tuple(getattr(tier, name) for name in NAMES)


def limited(world: CacheWorld, tier: Tier, pages: int) -> TierStats:
    world.cache.limit(tier, pages)
    while world.cache.shrink(world.cache.ledger.latest_us):
        check_invariants(world.cache)
    check_invariants(world.cache)
    stats = world.cache.stats()
    return stats.hbm if tier is Tier.HBM else stats.dram


class TestLimit:
    def test_a_lower_limit_evicts_the_next_victims_and_withholds_the_rest(self) -> None:
        world = CacheWorld(hbm_pages=32)
        for key in (ANN, BOB, CID):
            world.store(key)
        assert by_state(limited(world, Tier.HBM, 16)) == (2, 16, 14, 0, 0, 0)
        assert world.cache.peek(ANN).hbm_behaviours == 0, "the least recently used one"
        world.cache.release(world.hit(CID))

    def test_what_is_pinned_leased_or_filling_stays_and_goes_when_it_is_released(self) -> None:
        world = CacheWorld(hbm_pages=32)
        handle = world.compute(ANN)
        world.store(BOB)
        world.cache.lease(BOB, "r", 1_000)
        fill = world.reserve(CID)
        assert by_state(limited(world, Tier.HBM, 0)) == (0, 11, 0, PAGES, PAGES, PAGES)
        world.cache.release(handle)
        world.cache.end_lease("bob", "r")
        fill.abort()
        check_invariants(world.cache)
        assert world.cache.shrink(1) == 2
        assert by_state(world.cache.stats().hbm) == (0, 32, 0, 0, 0, 0)

    def test_no_fill_takes_more_than_the_limit_allows(self) -> None:
        world = CacheWorld(hbm_pages=32)
        limited(world, Tier.HBM, PAGES)
        assert world.cache.reserve(make_key("ann", 130), 0) == NoRoom(NoRoomReason.TOO_LARGE)
        fill = world.reserve(ANN)
        assert world.cache.reserve(BOB, 0) == NoRoom(NoRoomReason.FULL)
        fill.abort()
        world.store(BOB)
        world.store(ANN)
        assert by_state(world.cache.stats().hbm) == (0, 25, 7, 0, 0, 0), "one makes room for the other"

    def test_a_fill_evicts_what_exceeds_the_limit_as_well(self) -> None:
        """Pages that were pinned when the limit was set are evictable now."""
        world = CacheWorld(hbm_pages=32)
        handles = [world.compute(key) for key in (ANN, BOB, CID)]
        limited(world, Tier.HBM, 2 * PAGES)
        for handle in handles:
            world.cache.release(handle)
        assert isinstance(world.cache.reserve(make_key("dan", 100), 0), Fill)
        assert by_state(world.cache.stats().hbm) == (0, 18, PAGES, 0, 0, PAGES)

    def test_a_lifted_limit_gives_all_pages_back(self) -> None:
        world = CacheWorld(hbm_pages=32)
        limited(world, Tier.HBM, 3)
        assert by_state(limited(world, Tier.HBM, 32)) == (32, 0, 0, 0, 0, 0)
        world.store(make_key("ann", 190))

    def test_a_limited_dram_tier_refuses_spills_beyond_it(self) -> None:
        world = CacheWorld(dram_pages=32)
        world.spilled(ANN)
        assert limited(world, Tier.DRAM, 8).evictable == PAGES
        assert limited(world, Tier.DRAM, 3).evictable == 0
        world.store(BOB)
        assert world.cache.transfers.spill(BOB).value == "no_room"

    def test_pages_that_are_being_zeroed_take_no_room_from_the_limit(self) -> None:
        world = CacheWorld(hbm_pages=32)
        world.store(ANN)
        world.store(BOB)
        world.cache.invalidate_user("ann")
        limited(world, Tier.HBM, 2 * PAGES)
        assert world.cache.begin_cleaning(Tier.HBM, 1 << 20).size == PAGES
        check_invariants(world.cache)
        assert by_state(world.cache.stats().hbm) == (PAGES, 11, PAGES, 0, 0, PAGES)
        world.cache.end_cleaning(Tier.HBM)
        check_invariants(world.cache)

    @pytest.mark.parametrize("pages", [-1, 33])
    def test_a_limit_outside_of_what_was_taken_is_a_mistake(self, pages: int) -> None:
        with pytest.raises(ValueError, match="32 pages"):
            CacheWorld(hbm_pages=32).cache.limit(Tier.HBM, pages)

    def test_many_entries_are_evicted_in_several_sections(self) -> None:
        world = CacheWorld(hbm_pages=700)
        for number in range(600):
            world.store(make_key(f"user-{number}", 5))
        world.cache.limit(Tier.HBM, 0)
        assert [world.cache.shrink(1) for _ in range(11)] == [64] * 9 + [24, 0]


class Admin:
    """A `CacheAdmin` whose owner's thread is the caller's."""

    def __init__(self, world: CacheWorld, busy_after: int | None = None) -> None:
        self.clock = ManualClock(monotonic_us=10_000_000)
        self.pieces = 0
        self.busy_after = busy_after
        model = ServingModel("0123456789abcdef", ANN.namespace)
        self.admin = CacheAdmin("w-00", world.cache, world, self.run, lambda: model, PAGES, self.clock)

    def run(self, call: Any) -> Any:
        self.pieces += 1
        if self.pieces == self.busy_after:
            raise RelayError("The worker's device thread was busy.")
        return call()

    def ask(self, kind: Any, request: Any) -> Any:
        return decode_report(kind, self.admin.answer(encode_request(request), CALLER))


class TestShow:
    def test_it_counts_both_tiers_by_state_and_lists_the_largest_users(self) -> None:
        world = CacheWorld(hbm_pages=40, dram_pages=20)
        world.spilled(ANN)
        world.store(make_key("bob", 190), now_us=4_000_000)
        world.cache.release(world.hit(make_key("bob", 190), now_us=7_000_000))
        world.cache.acquire(ANN, 7_000_000)
        report = Admin(world).ask(CacheReport, Show())
        hbm, dram = report.tiers
        assert (hbm.pages, dram.pages) == (world.cache.stats().hbm, world.cache.stats().dram)
        assert (report.look_ups, hbm.found, dram.found) == (2, 0.5, 0.5)
        assert [(each.user_id, each.entries, each.hbm_bytes, each.dram_bytes) for each in report.top] == [
            ("bob", 1, 12 * GEOMETRY.page_bytes, 0),
            ("ann", 1, 0, PAGES * GEOMETRY.page_bytes),
        ]
        assert (report.top[0].age_s, report.top[0].idle_s) == (6.0, 3.0)

    def test_hit_ratios_are_not_integer_divisions(self) -> None:
        """9. Hits over look-ups came out as 0 until they were 1."""
        world = CacheWorld(hbm_pages=40)
        assert [tier.found for tier in Admin(world).ask(CacheReport, Show()).tiers] == [None, None]
        world.cache.acquire(ANN, 0)
        world.store(ANN)
        for _ in range(2):
            world.cache.release(world.hit(ANN))
        hbm, dram = Admin(world).ask(CacheReport, Show()).tiers
        assert (hbm.found, dram.found) == (pytest.approx(2 / 3), 0)

    def test_it_lists_as_many_users_as_were_asked_for_and_counts_them_all(self) -> None:
        world = CacheWorld(hbm_pages=700)
        for number in range(600):
            world.store(make_key(f"user-{number}", 5 + (number == 77)))
        admin = Admin(world)
        report = admin.ask(CacheReport, Show(users=2))
        assert (report.users, len(report.top), admin.pieces) == (600, 2, 0)
        assert admin.ask(CacheReport, Show(users=0)).top == ()

    def test_a_user_has_entries_in_each_tier_with_their_state_and_holders(self) -> None:
        world = CacheWorld()
        world.spilled(ANN)
        world.store(ANN)
        world.cache.lease(ANN, "r", 1_000)
        handle = world.hit(ANN)
        world.reserve(make_key("ann", 130))
        world.store(make_key("ann", 100, None, b"m2"))
        found = Admin(world).ask(UserReport, ShowUser(user_id="ann"))
        assert [
            (each.tier.value, each.state.value, each.holding.value, each.tokens, each.pages, each.coming_pages)
            for each in found.entries
        ] == [
            ("hbm", "ready", "pinned", 102, 7, 3),
            ("hbm", "ready", "evictable", 102, 7, 0),
            ("dram", "ready", "evictable", 102, 7, 0),
        ]
        assert [each.leases for each in found.entries] == [1, 0, 0]
        assert [each.model_revision for each in found.entries] == ["0123456789abcdef", None, "0123456789abcdef"]
        world.cache.release(handle)

    def test_a_user_without_entries_is_an_empty_report(self) -> None:
        assert Admin(CacheWorld()).ask(UserReport, ShowUser(user_id="nobody")).entries == ()


class TestDrop:
    def test_a_user_goes_from_both_tiers_and_the_log_names_a_digest(self) -> None:
        world = CacheWorld()
        world.spilled(ANN)
        world.store(ANN)
        world.store(BOB)
        with capture_logs() as logs:
            report = Admin(world).ask(DropReport, DropUser(user_id="ann"))
        size = PAGES * GEOMETRY.page_bytes
        assert (report.users, report.entries, report.hbm_bytes, report.dram_bytes) == (1, 2, size, size)
        assert (report.held_entries, report.held_bytes, report.leases) == (0, 0, 0)
        assert world.cache.ledger.hbm.index.by_user.keys() == {"bob"}
        assert len(world.cache.ledger.dram.index) == 0
        (line,) = logs
        assert (line["uid"], line["pid"], line["whose"]) == (CALLER.uid, CALLER.pid, digest_of("ann"))
        assert line["entries"] == 2 and "ann" not in str(line)

    def test_what_is_read_or_filled_is_counted_and_becomes_free_at_its_end(self) -> None:
        world = CacheWorld()
        handle = world.compute(ANN)
        fill = world.reserve(BOB)
        world.store(CID)
        world.cache.lease(CID, "r", 1_000)
        report = Admin(world).ask(DropReport, DropAll())
        assert (report.entries, report.held_entries, report.leases) == (3, 2, 1)
        assert report.held_bytes == 2 * PAGES * GEOMETRY.page_bytes
        assert by_state(world.cache.stats().hbm) == (18, 0, 0, 0, 7, 7)
        world.cache.release(handle)
        fill.abort()
        assert world.cache.stats().hbm.free == 32
        check_invariants(world.cache)

    def test_all_users_go_in_pieces_so_that_requests_run_between(self) -> None:
        world = CacheWorld(hbm_pages=700)
        for number in range(600):
            world.store(make_key(f"user-{number}", 5))
        admin = Admin(world)
        report = admin.ask(DropReport, DropAll())
        assert (report.users, report.entries, admin.pieces) == (600, 600, 10)
        assert world.cache.stats().hbm.free == 700

    def test_a_drop_that_ends_early_is_logged_with_what_it_dropped(self) -> None:
        world = CacheWorld(hbm_pages=700)
        for number in range(600):
            world.store(make_key(f"user-{number}", 5))
        with capture_logs() as logs, pytest.raises(RelayError, match="busy"):
            Admin(world, busy_after=2).ask(DropReport, DropAll())
        assert [(line["whose"], line["entries"]) for line in logs] == [("all", 64)]

    def test_an_empty_cache_is_dropped_too(self) -> None:
        assert Admin(CacheWorld()).ask(DropReport, DropAll()).entries == 0


class TestSetLimit:
    def test_it_evicts_and_reports_what_is_still_held_above_it(self) -> None:
        world = CacheWorld(hbm_pages=32)
        handle = world.compute(ANN)
        for key in (BOB, CID):
            world.store(key)
        size = GEOMETRY.page_bytes
        with capture_logs() as logs:
            (limit,) = Admin(world).ask(LimitReport, Limit(tiers={"hbm": 10 * size + 1})).tiers
        assert (limit.capacity_bytes, limit.limit_bytes) == (32 * size, 10 * size), "whole pages"
        assert (limit.evicted, limit.excess_bytes) == (2, 0)
        assert [(line["tier"], line["limit_bytes"], line["uid"]) for line in logs] == [("hbm", 10 * size, CALLER.uid)]
        world.compute(make_key("ann", 110))
        (limit,) = Admin(world).ask(LimitReport, Limit(tiers={"hbm": PAGES * size})).tiers
        assert limit.excess_bytes == (world.cache.stats().hbm.pinned - PAGES) * size > 0
        world.cache.release(handle)

    def test_none_lifts_it_and_an_absent_tier_keeps_its_own(self) -> None:
        world = CacheWorld()
        admin = Admin(world)
        admin.ask(LimitReport, Limit(tiers={"hbm": 10 * GEOMETRY.page_bytes, "dram": 0}))
        assert (world.cache.stats().hbm.limit, world.cache.stats().dram.limit) == (10, 0)
        (lifted,) = admin.ask(LimitReport, Limit(tiers={"hbm": None})).tiers
        assert (lifted.limit_bytes, world.cache.stats().dram.limit) == (32 * GEOMETRY.page_bytes, 0)

    @pytest.mark.parametrize(
        ("tiers", "error"),
        [
            ({"hbm": 1 << 40}, "--hbm is more than the 4.0KiB .* larger worker.hbm_bytes"),
            ({"hbm": 6 * 128}, "--hbm has no room .* at least 1KiB"),
            ({"dram": 0, "hbm": 1 << 40}, "--hbm is more than"),
        ],
    )
    def test_a_limit_that_cannot_be_is_refused_and_changes_nothing(self, tiers: dict[Any, int], error: str) -> None:
        world = CacheWorld(hbm_pages=32)
        before = world.cache.stats()
        with pytest.raises(RelayError, match=error):
            Admin(world).ask(LimitReport, Limit(tiers=tiers))
        assert world.cache.stats() == before

    def test_a_tier_that_the_worker_does_not_have_is_named(self) -> None:
        with pytest.raises(RelayError, match=r"w-00 has no dram tier \(worker.dram_bytes is 0\)"):
            Admin(CacheWorld(dram_pages=0)).ask(LimitReport, Limit(tiers={"dram": 5}))


@pytest.mark.parametrize(
    "line",
    [
        b"",
        b"\xff\xfe",
        b"[" * 4000,
        b"{}",
        b"null",
        b'{"command": "format_disk"}',
        b'{"command": "drop_user"}',
        b'{"command": "drop_user", "user_id": ""}',
        b'{"command": "drop_user", "user_id": 7}',
        b'{"command": "drop_all", "yes": true}',
        b'{"command": "show", "users": 1000000}',
        b'{"command": "show", "users": -1}',
        b'{"command": "limit", "tiers": {}}',
        b'{"command": "limit", "tiers": {"l3": 5}}',
        b'{"command": "limit", "tiers": {"hbm": -5}}',
        b'{"command": "limit", "tiers": {"hbm": "2GiB"}}',
        b'{"command": "limit", "tiers": {"hbm": 1e400}}',
        b'{"command": "show_user", "user_id": "' + b"u" * 300 + b'"}',
        b'{"command": "show_user", "user_id": "\\ud800"}',
    ],
)
def test_a_line_that_is_no_request_is_refused_with_a_sentence_and_does_nothing(line: bytes) -> None:
    world = CacheWorld()
    world.store(ANN)
    answer = json.loads(Admin(world).admin.answer(line, CALLER))
    assert answer["error"].startswith("The worker does not know this request: ")
    assert world.cache.stats().hbm.entries == 1


def test_an_answer_of_another_version_is_said_to_be_one() -> None:
    with pytest.raises(RelayError, match="use the `relaygr` of the version"):
        decode_report(CacheReport, b'{"tiers": []}')


# With the executor.


def test_the_executor_evicts_what_exceeds_a_limit_once_it_is_released() -> None:
    world = RealExecutorWorld("plain")
    version = world.put("ann", 200)
    world.job("ann", version)
    taken = world.cache.stats().hbm.leased
    world.executor.limit_tier(Tier.HBM, 0)
    assert world.cache.stats().hbm.leased == taken > 0
    world.clock.advance_us(1_000_000)
    world.run()
    assert by_state(world.cache.stats().hbm) == (0, world.cache.stats().hbm.capacity, 0, 0, 0, 0)
    work = world.rank("ann", version, "again")
    world.assert_exact(work, world.histories["ann"].history.behaviours)


def test_jobs_are_admitted_for_the_limit_and_not_for_what_was_taken() -> None:
    world = RealExecutorWorld("plain")
    version = world.put("ann", 200)
    world.executor.limit_tier(Tier.HBM, 2)
    world.job("ann", version)
    assert world.outbox.jobs == [JobOutcome.OVER_FOOTPRINT]
    world.executor.limit_tier(Tier.HBM, world.cache.stats().hbm.capacity)
    world.job("ann", version, "again")
    assert world.outbox.jobs[-1] is JobOutcome.COMPUTED


def test_a_dropped_users_pages_and_scratch_are_zeroed_and_its_next_request_is_computed() -> None:
    world = RealExecutorWorld("plain")
    version = world.put("ann", 200)
    world.rank("ann", version)
    with world.erases("ann"):
        assert world.executor.drop_user("ann") == 1
    work = world.rank("ann", version, "again")
    world.assert_exact(work, world.histories["ann"].history.behaviours)


def test_a_job_that_waits_for_the_device_is_kept_when_its_user_is_dropped() -> None:
    """A tombstone ends it, since there is no history any more; after a drop there is."""
    world = RealExecutorWorld("plain")
    version = world.put("ann", 200)
    world.queue_job("ann", version)
    world.executor.post(lambda: world.executor.drop_user("ann"))
    world.run()
    assert world.outbox.jobs == [JobOutcome.COMPUTED]
