"""Requests of operators to a cache, and the reports that answer them."""

from __future__ import annotations

import json
from typing import Any

import pytest

from relaygr.runtime.clock import ManualClock
from relaygr.runtime.errors import RelayError
from relaygr.worker.cache.admin import (
    CacheAdmin,
    CacheReport,
    ServingModel,
    Show,
    ShowUser,
    UserReport,
    decode_report,
    encode_request,
)
from tests.worlds.cache import GEOMETRY, CacheWorld, make_key

PAGES = 7
"""Pages of a prefix of 100 behaviours."""
ANN = make_key("ann", 100)


class Admin:
    def __init__(self, world: CacheWorld) -> None:
        model = ServingModel("0123456789abcdef", ANN.namespace)
        self.admin = CacheAdmin("w-00", world.cache, lambda: model, ManualClock(monotonic_us=10_000_000))

    def ask(self, kind: Any, request: Any) -> Any:
        return decode_report(kind, self.admin.answer(encode_request(request)))


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
        assert (report.users, len(report.top)) == (600, 2)
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


@pytest.mark.parametrize(
    "line",
    [
        b"",
        b"\xff\xfe",
        b"[" * 4000,
        b"{}",
        b"null",
        b'{"command": "format_disk"}',
        b'{"command": "show_user"}',
        b'{"command": "show_user", "user_id": ""}',
        b'{"command": "show_user", "user_id": 7}',
        b'{"command": "show", "yes": true}',
        b'{"command": "show", "users": 1000000}',
        b'{"command": "show", "users": -1}',
        b'{"command": "show", "users": "10"}',
        b'{"command": "show", "users": 1e400}',
        b'{"command": "show_user", "user_id": "' + b"u" * 300 + b'"}',
        b'{"command": "show_user", "user_id": "\\ud800"}',
    ],
)
def test_a_line_that_is_no_request_is_refused_with_a_sentence_and_does_nothing(line: bytes) -> None:
    world = CacheWorld()
    world.store(ANN)
    answer = json.loads(Admin(world).admin.answer(line))
    assert answer["error"].startswith("The worker does not know this request: ")
    assert world.cache.stats().hbm.entries == 1


def test_an_answer_of_another_version_is_said_to_be_one() -> None:
    with pytest.raises(RelayError, match="use the `relaygr` of the version"):
        decode_report(CacheReport, b'{"tiers": []}')
