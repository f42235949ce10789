"""Whether a group keeps up: the rules, one by one."""

from __future__ import annotations

import pytest

from relaygr.lag.status import LagSample, LagStatus, cadence_polls, evaluate, worst

WINDOW = 4


def samples(*pairs: tuple[int | None, int | None], owned: bool | None = True) -> list[LagSample]:
    return [LagSample(committed, lag, owned=owned) for committed, lag in pairs]


def status(*pairs: tuple[int | None, int | None], ok_messages: int = 0, owned: bool | None = True) -> LagStatus:
    return evaluate(samples(*pairs, owned=owned), WINDOW, ok_messages)


@pytest.mark.parametrize(
    ("pairs", "expected"),
    [
        pytest.param([(5, 0)], LagStatus.OK, id="nothing to read"),
        pytest.param([(None, None)], LagStatus.NO_COMMIT, id="never committed"),
        pytest.param([(5, None)], LagStatus.UNKNOWN, id="the end is not known"),
        pytest.param([(5, 9)] * 3, LagStatus.JUDGING, id="too early to judge"),
        pytest.param([(5, 0), (5, 3)], LagStatus.OK, id="had just caught up"),
        pytest.param([(5, 9)] * 4, LagStatus.STALL, id="does not move"),
        pytest.param([(5, 9), (5, 10), (5, 11), (5, 99)], LagStatus.STALL, id="does not move while more arrives"),
        pytest.param([(9, 1), (5, 5)], LagStatus.REWIND, id="went back"),
        pytest.param([(5, 0), (6, 3), (7, 6), (8, 9)], LagStatus.OK, id="had caught up within the window"),
        pytest.param([(5, 0), (5, 3), (5, 6)], LagStatus.OK, id="had just caught up, and has not committed yet"),
        pytest.param([(5, 0), (5, 3), (5, 6), (5, 9)], LagStatus.JUDGING, id="had caught up, and does not move"),
        pytest.param([(5, 90), (6, 91), (7, 92), (8, 93)], LagStatus.WARN, id="moves, and falls behind"),
        pytest.param([(5, 90), (6, 90), (7, 90), (8, 90)], LagStatus.WARN, id="moves, and does not catch up"),
        pytest.param([(5, 90), (6, 80), (7, 85), (8, 93)], LagStatus.OK, id="lag fell once"),
        pytest.param([(0, 9), (10, 9), (20, 9), (30, 10)], LagStatus.OK, id="behind by what one poll brings"),
        pytest.param([(None, None), (5, 9), (5, 9), (5, 9)], LagStatus.STALL, id="committed once, and never again"),
    ],
)
def test_a_partition_is_judged_by_its_last_polls(
    pairs: list[tuple[int | None, int | None]], expected: LagStatus
) -> None:
    assert status(*pairs) is expected


def test_messages_that_wait_for_a_group_that_never_committed_are_a_stop_or_a_stall() -> None:
    """No worker had ever existed, requests waited, and the exit code was 0."""

    def status_of(*unread: int, owned: bool, ok_messages: int = 0) -> LagStatus:
        return evaluate([LagSample(None, None, each, owned) for each in unread], WINDOW, ok_messages)

    assert status_of(1, owned=False) is LagStatus.STOP
    assert status_of(1, 5, 9, 9, owned=True) is LagStatus.STALL
    assert status_of(1, 5, 9, owned=True) is LagStatus.JUDGING, "too early"
    assert status_of(0, 5, 9, owned=True) is LagStatus.NO_COMMIT, "the first messages of a new group"
    assert status_of(0, 5, 9, 9, owned=True) is LagStatus.JUDGING
    assert status_of(1, 5, 9, 9, owned=False, ok_messages=9) is LagStatus.NO_COMMIT


def test_polls_that_come_oftener_than_commits_do_not_make_a_group_that_keeps_up_fall_behind() -> None:
    assert [cadence_polls(interval_s) for interval_s in (0.1, 0.4, 1, 60)] == [20, 5, 2, 2]
    between_commits = samples((0, 1), (10, 2), (10, 12), (10, 12))
    assert evaluate(between_commits, WINDOW, 0) is LagStatus.OK
    keeps_up = samples((0, 60), (10, 60), (10, 70), (10, 80))
    assert evaluate(keeps_up, WINDOW, 0) is LagStatus.WARN
    assert evaluate(keeps_up, WINDOW, 0, cadence=cadence_polls(0.1)) is LagStatus.OK


@pytest.mark.parametrize(
    "polls", [[(5, 9)], [(5, 0), (5, 40)], [(5, 0), (5, 0), (5, 1)], [(9, 1), (5, 5)], [(5, 9)] * 4]
)
def test_messages_that_nobody_owns_are_a_stop_at_once(polls: list[tuple[int | None, int | None]]) -> None:
    """All workers had stopped, 40 requests waited, and the status was ok for a whole window."""
    assert status(*polls, owned=False) is LagStatus.STOP
    assert status(*polls, owned=None) is not LagStatus.STOP, "an unknown owner counts as an owner"
    assert status(*polls, owned=False, ok_messages=40) is LagStatus.OK


def test_a_commit_of_the_last_owner_does_not_hide_that_it_has_gone() -> None:
    assert evaluate([*samples((2, 3), owned=True), *samples((5, 40), owned=False)], WINDOW, 0) is LagStatus.STOP


def test_a_consumer_that_is_no_member_is_judged_by_its_commits() -> None:
    """It assigns partitions to itself, and commits for a group without members."""
    assert status((2, 3), (5, 40), owned=False) is LagStatus.JUDGING
    assert status((2, 3), (5, 40), (5, 42), (9, 38), owned=False) is LagStatus.OK
    assert status((5, 40), (5, 41), (5, 42), (5, 43), owned=False) is LagStatus.STOP


def test_lag_within_bounds_is_ok_whatever_its_trend() -> None:
    assert status((5, 9), (5, 9), (5, 9), (5, 9), ok_messages=9) is LagStatus.OK
    assert status((9, 1), (5, 5), ok_messages=9) is LagStatus.OK


@pytest.mark.parametrize("unread", [0, 32])
def test_a_commit_beyond_the_end_of_the_log_is_not_ok_however_little_can_be_read(unread: int) -> None:
    beyond = LagSample(65, unread, owned=True, is_beyond_end=True)
    assert evaluate([LagSample(65, 0, owned=True), beyond], WINDOW, 0) is LagStatus.BEYOND_END
    assert LagStatus.BEYOND_END.exit_code == 2


def test_a_group_is_as_its_gravest_partition_and_one_that_never_read_is_not_grave() -> None:
    assert worst([LagStatus.OK, LagStatus.STALL, LagStatus.WARN]) is LagStatus.STALL
    assert worst([LagStatus.NO_COMMIT, LagStatus.OK]) is LagStatus.OK
    assert worst([LagStatus.OK, LagStatus.JUDGING]) is LagStatus.JUDGING
    assert worst([LagStatus.JUDGING, LagStatus.WARN]) is LagStatus.WARN
    assert worst([]) is LagStatus.UNKNOWN


def test_exit_codes_are_as_documented() -> None:
    assert {status: status.exit_code for status in LagStatus} == {
        LagStatus.OK: 0,
        LagStatus.NO_COMMIT: 0,
        LagStatus.WARN: 1,
        LagStatus.REWIND: 2,
        LagStatus.BEYOND_END: 2,
        LagStatus.STALL: 2,
        LagStatus.STOP: 2,
        LagStatus.UNKNOWN: 3,
        LagStatus.JUDGING: 4,
    }
