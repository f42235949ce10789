"""The estimate of the prefixes in an owner's DRAM."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from relaygr.admission.latency import LatencyModel
from relaygr.admission.policy import NOTHING_CACHED, CachedPrefix, OwnerView, PrefixTier
from relaygr.schemas.messages import LatencyCoefficients
from relaygr.trigger import recent as recent_module
from relaygr.trigger.recent import RecentPrefixes

MODEL = LatencyModel(LatencyCoefficients(0, 1, 0, 0, 1, 0, 0, 1, 0, 0, 0))
# Room for 1,000 tokens.
OWNER = OwnerView("worker-00", frozenset({0}), MODEL, 10, 0, 1, 1000, 0, 10_000, 0, 0)


def test_an_admitted_prefix_is_guessed_to_be_in_its_owners_dram() -> None:
    recent = RecentPrefixes()
    recent.note(OWNER, "user-1", 400, 0)
    assert recent.guess(OWNER, "user-1") == CachedPrefix(PrefixTier.DRAM, 400)
    assert recent.guess(OWNER, "user-2") is NOTHING_CACHED
    assert recent.guess(dataclasses.replace(OWNER, worker_id="worker-01"), "user-1") is NOTHING_CACHED


def test_the_least_recent_is_forgotten_when_the_dram_is_full() -> None:
    recent = RecentPrefixes()
    for user in ("user-1", "user-2", "user-1", "user-3"):
        recent.note(OWNER, user, 400, 0)
    assert recent.guess(OWNER, "user-2") is NOTHING_CACHED
    assert recent.guess(OWNER, "user-1").tokens == 400
    assert recent.guess(OWNER, "user-3").tokens == 400


def owner(number: int) -> OwnerView:
    return dataclasses.replace(OWNER, worker_id=f"worker-{number:03}")


def test_the_prefixes_of_a_large_fleet_are_all_known() -> None:
    """Of more than 64 owners, each new one once drove out another with all of its users."""
    recent = RecentPrefixes()
    for visit in range(2):
        for number in range(200):
            recent.note(owner(number), f"user-{number}-{visit}", 400, visit)
    for number in range(200):
        assert [recent.guess(owner(number), f"user-{number}-{visit}").tokens for visit in range(2)] == [400, 400]


def test_the_users_are_bounded_in_total_and_an_owner_that_left_is_forgotten_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(recent_module, "MAX_USERS", 4)
    recent = RecentPrefixes()
    left, first, second = owner(0), owner(1), owner(2)
    for now_us, view in enumerate((left, left, first, second, first, second)):
        recent.note(view, f"user-{now_us}", 400, now_us)
    assert recent.guess(left, "user-0") is recent.guess(left, "user-1") is NOTHING_CACHED
    known = [(first, 2), (second, 3), (first, 4), (second, 5)]
    assert [recent.guess(view, f"user-{number}").tokens for view, number in known] == [400] * 4
    # What a new model, and a full DRAM, make forgotten leaves room for others.
    recent.note(dataclasses.replace(first, model_revision="new"), "user-6", 400, 6)
    recent.note(second, "user-7", 400, 7)
    assert [recent.guess(second, f"user-{number}").tokens for number in (3, 5, 7)] == [0, 400, 400]
    recent.note(left, "user-8", 400, 8)
    assert recent.guess(second, "user-5").tokens == 400


def test_the_owners_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recent_module, "MAX_WORKERS", 2)
    recent = RecentPrefixes()
    for number in (0, 1, 0, 2):
        recent.note(owner(number), "user-1", 400, number)
    assert [recent.guess(owner(number), "user-1").tokens for number in range(3)] == [400, 0, 400]


def test_a_new_process_takes_over_the_dram_of_the_one_before() -> None:
    recent = RecentPrefixes()
    recent.note(OWNER, "user-1", 400, 0)
    assert recent.guess(dataclasses.replace(OWNER, active_since_us=8), "user-1").tokens == 400


def test_all_is_forgotten_when_the_owners_model_changes() -> None:
    recent = RecentPrefixes()
    for number in range(3):
        recent.note(OWNER, f"user-{number}", 400, 0)
    changed = dataclasses.replace(OWNER, model_revision="new")
    assert recent.guess(changed, "user-2") is NOTHING_CACHED
    recent.note(changed, "user-3", 400, 0)
    assert recent.guess(changed, "user-3").tokens == 400
    assert recent.guess(OWNER, "user-2") is NOTHING_CACHED


def test_prefixes_that_serve_one_impression_are_not_kept() -> None:
    recent = RecentPrefixes()
    of_one = dataclasses.replace(OWNER, reuses_prefixes=False)
    recent.note(of_one, "user-1", 400, 0)
    assert recent.guess(of_one, "user-1") is NOTHING_CACHED


def test_without_dram_nothing_is_guessed() -> None:
    recent = RecentPrefixes()
    none = dataclasses.replace(OWNER, dram_capacity_bytes=0)
    recent.note(none, "user-1", 1, 0)
    assert recent.guess(none, "user-1") is NOTHING_CACHED


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(1, 1500))))
def test_what_is_guessed_never_exceeds_the_dram(noted: list[tuple[int, int]]) -> None:
    recent = RecentPrefixes()
    for user, tokens in noted:
        recent.note(OWNER, str(user), tokens, 0)
        assert sum(recent.guess(OWNER, str(each)).tokens for each in range(10)) <= 1000
