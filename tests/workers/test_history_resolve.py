"""The history that a request is ranked with."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from relaygr.schemas.messages import Behaviours, History, HistoryVersion, StaleCause
from relaygr.worker.history.resolve import (
    HistoryMismatchError,
    HistoryStatus,
    StoredHistory,
    WantedLength,
    resolve,
    window,
)


def history(length: int, number: int = 5, first_item: int = 0, features: tuple[int, ...] = (1, 2)) -> History:
    items = np.arange(first_item, first_item + length)
    behaviours = Behaviours(items, (items % 7).astype("<u2"), items * 1000)
    return History("u", number, np.array(features, "<i8"), behaviours)


def stored(given_history: History) -> StoredHistory:
    return StoredHistory(given_history, given_history.chain())


def test_an_unknown_user_is_unknown_and_behind_only_what_was_asked_for() -> None:
    assert resolve(None, None, None, False).status is HistoryStatus.UNKNOWN
    assert not resolve(None, None, None, False).may_arrive
    asked = resolve(None, history(3).version(), None, True)
    assert (asked.status, asked.may_arrive, asked.loading) == (HistoryStatus.UNKNOWN, True, True)
    assert (asked.history, asked.chain, asked.version) == (None, None, None)


def test_a_version_of_a_user_without_any_history_is_still_loading() -> None:
    """The result had no version, and said neither stale nor loading."""
    asked = resolve(None, history(3).version(), None, loading=False)
    assert (asked.status, asked.version, asked.loading) == (HistoryStatus.UNKNOWN, None, True)


def test_without_a_version_the_newest_is_used() -> None:
    newest = history(100)
    resolved = resolve(stored(newest), None, None, False)
    assert resolved.status is HistoryStatus.NEWEST
    assert resolved.history == newest
    assert resolved.version == newest.version()


def test_the_version_that_is_stored_is_exact() -> None:
    newest = history(100)
    resolved = resolve(stored(newest), newest.version(), None, False)
    assert (resolved.status, resolved.is_stale, resolved.may_arrive) == (HistoryStatus.EXACT, False, False)
    assert resolved.chain == newest.chain()


def test_equal_content_under_another_number_is_exact_and_answers_with_the_number_asked_for() -> None:
    resolved = resolve(stored(history(100, number=9)), history(100, number=5).version(), None, False)
    assert resolved.status is HistoryStatus.EXACT
    assert resolved.version == history(100, number=5).version()
    assert resolved.history == history(100, number=5)


@given(st.integers(0, 300), st.integers(1, 300))
def test_a_store_that_is_ahead_serves_the_version_asked_for(wanted_length: int, more: int) -> None:
    wanted = history(wanted_length, number=5)
    resolved = resolve(stored(history(wanted_length + more, number=6)), wanted.version(), None, False)
    assert resolved.status is HistoryStatus.PREFIX_OF_NEWER
    assert resolved.history == wanted
    assert resolved.chain == wanted.chain()
    assert resolved.version == wanted.version()


@pytest.mark.parametrize(
    ("known", "asked", "cause"),
    [
        pytest.param(history(50, 5), history(60, 6), StaleCause.BEHIND, id="the store is behind"),
        pytest.param(
            history(60, 6, first_item=10), history(60, 5), StaleCause.REPLACED, id="the newer one lost its oldest"
        ),
        pytest.param(history(60, 6, features=(1, 3)), history(50, 5), StaleCause.REPLACED, id="other features"),
        pytest.param(history(60, 5, first_item=1), history(60, 5), StaleCause.REPLACED, id="one number, two contents"),
        pytest.param(history(60, 5), history(61, 5), StaleCause.BEHIND, id="one number: behaviours are on their way"),
        pytest.param(
            history(70, 5), history(60, 6, first_item=1), StaleCause.BEHIND, id="a newer number, other content"
        ),
    ],
)
def test_any_other_version_gets_the_newest_known_and_is_stale(
    known: History, asked: History, cause: StaleCause
) -> None:
    resolved = resolve(stored(known), asked.version(), None, False)
    assert (resolved.status, resolved.stale) == (HistoryStatus.STALE, cause)
    assert resolved.may_arrive == (cause is StaleCause.BEHIND)
    assert resolved.history == known
    assert resolved.version == known.version()


def test_what_was_asked_for_before_a_deletion_does_not_arrive_but_may_be_there_again() -> None:
    known, asked = history(50, 5), history(60, 6)
    deleted = resolve(stored(known), asked.version(), None, False, is_deleted=True)
    assert (deleted.stale, deleted.may_arrive, deleted.history) == (StaleCause.DELETED, False, known)
    at_least = resolve(stored(known), WantedLength(51, False), None, False, is_deleted=True)
    assert (at_least.stale, at_least.may_arrive) == (StaleCause.DELETED, False)
    gone = resolve(None, asked.version(), None, False, is_deleted=True)
    assert (gone.stale, gone.may_arrive, gone.loading) == (StaleCause.DELETED, False, False)
    assert not resolve(stored(known), known.version(), None, False, is_deleted=True).is_stale
    assert not resolve(None, None, None, False, is_deleted=True).is_stale


def test_an_inline_history_goes_before_the_stored_one() -> None:
    inline = history(10, number=1)
    resolved = resolve(stored(history(100)), inline.version(), inline, True)
    assert resolved.status is HistoryStatus.INLINE
    assert resolved.history is inline
    assert resolved.chain == inline.chain()
    assert resolve(None, None, inline, False).version == inline.version()


@pytest.mark.parametrize("other", [history(10, first_item=1), history(11), history(10, features=(1,))])
def test_an_inline_history_that_is_not_the_version_named_is_refused(other: History) -> None:
    with pytest.raises(HistoryMismatchError, match="name the version of the inline history"):
        resolve(None, other.version(), history(10), False)


def test_a_version_with_the_right_length_and_a_wrong_digest_is_not_served() -> None:
    wanted = HistoryVersion(5, 64, b"\0" * 16)
    assert resolve(stored(history(100)), wanted, None, False).status is HistoryStatus.STALE


def test_a_history_within_the_window_is_not_copied_or_hashed() -> None:
    whole = stored(history(100))
    kept = window(whole.history, whole.chain, 100, 64)
    assert kept.history is whole.history
    assert kept.chain is whole.chain
    assert kept.start == 0


@given(st.integers(0, 2000), st.integers(1, 500), st.integers(1, 200))
def test_a_window_keeps_the_newest_from_a_multiple_of_the_anchor(length: int, maximum: int, anchor: int) -> None:
    whole = stored(history(length))
    step = min(anchor, maximum)
    kept = window(whole.history, whole.chain, maximum, anchor)
    assert kept.start % step == 0
    assert kept.history.behaviours == whole.history.behaviours[kept.start :]
    assert kept.chain == kept.history.chain()
    size = len(kept.history.behaviours)
    assert size <= maximum
    assert kept.start == 0 or size > maximum - step


def test_a_growing_history_keeps_its_window_start_until_a_whole_anchor_has_to_go() -> None:
    starts = [window(history(n), history(n).chain(), 256, 64).start for n in range(250, 400)]
    assert starts == [0] * 7 + [64] * 64 + [128] * 64 + [192] * 15


def test_a_window_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="both must be at least 1"):
        window(history(3), history(3).chain(), 0, 1)


@pytest.mark.parametrize("is_exact", [True, False])
def test_a_length_that_is_not_reached_is_stale_and_behind(is_exact: bool) -> None:
    resolved = resolve(stored(history(60)), WantedLength(61, is_exact), None, False)
    assert (resolved.status, resolved.is_stale, resolved.may_arrive) == (HistoryStatus.STALE, True, True)
    unknown = resolve(None, WantedLength(1, is_exact), None, False)
    assert (unknown.status, unknown.may_arrive) == (HistoryStatus.UNKNOWN, True)


@given(st.integers(0, 300), st.integers(0, 300))
def test_a_length_alone_names_the_first_behaviours_or_the_least_number(wanted: int, more: int) -> None:
    newest = history(wanted + more)
    exact = resolve(stored(newest), WantedLength(wanted, True), None, False)
    assert exact.status is (HistoryStatus.PREFIX_OF_NEWER if more else HistoryStatus.EXACT)
    assert (exact.history, exact.version) == (history(wanted), history(wanted).version())
    assert exact.chain == history(wanted).chain()
    at_least = resolve(stored(newest), WantedLength(wanted, False), None, False)
    assert (at_least.status, at_least.history) == (HistoryStatus.NEWEST, newest)


def test_a_gap_is_stale_unless_a_digest_confirms_the_content() -> None:
    known = history(100)
    with_gap = StoredHistory(known, known.chain(), has_gap=True)
    assert resolve(with_gap, None, None, False).is_stale
    assert resolve(with_gap, WantedLength(50, True), None, False).is_stale
    longer = resolve(with_gap, history(101, number=6).version(), None, False)
    assert (longer.stale, longer.may_arrive) == (StaleCause.GAP, False), "only a snapshot brings it"
    reached_later = resolve(with_gap, WantedLength(101, False), None, False)
    assert (reached_later.stale, reached_later.may_arrive) == (StaleCause.GAP, True)
    assert not resolve(with_gap, history(50).version(), None, False).is_stale
    assert not resolve(with_gap, known.version(), None, False).is_stale
