"""Whether a group keeps up: the rules, one by one."""

from __future__ import annotations

import pytest

from relaygr.lag.status import LagSample, LagStatus, cadence_polls, evaluate, worst

WINDOW = 4


def samples(*pairs: tuple[int | None, int | None]) -> list[LagSample]:
    return [LagSample(committed, lag) for committed, lag in pairs]


def status(*pairs: tuple[int | None, int | None], ok_messages: int = 0, owned: bool | None = True) -> LagStatus:
    return evaluate(samples(*pairs), WINDOW, ok_messages, owned)


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
        pytest.param([(5, 0), (5, 3), (5, 6), (5, 9)], LagStatus.OK, id="had caught up within the window"),
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
    waits = [LagSample(None, None, unread) for unread in (1, 5, 9, 9)]
    assert evaluate(waits, WINDOW, 0, owned=False) is LagStatus.STOP
    assert evaluate(waits, WINDOW, 0, owned=True) is LagStatus.STALL
    assert evaluate(waits[:3], WINDOW, 0, owned=False) is LagStatus.JUDGING, "too early"
    assert evaluate([LagSample(None, None, 0), *waits[1:]], WINDOW, 0, owned=False) is LagStatus.NO_COMMIT
    assert evaluate(waits, WINDOW, 9, owned=False) is LagStatus.NO_COMMIT


def test_polls_that_come_oftener_than_commits_do_not_make_a_group_that_keeps_up_fall_behind() -> None:
    assert [cadence_polls(interval_s) for interval_s in (0.1, 0.4, 1, 60)] == [20, 5, 2, 2]
    between_commits = samples((0, 1), (10, 2), (10, 12), (10, 12))
    assert evaluate(between_commits, WINDOW, 0, owned=True) is LagStatus.OK
    keeps_up = samples((0, 60), (10, 60), (10, 70), (10, 80))
    assert evaluate(keeps_up, WINDOW, 0, owned=True) is LagStatus.WARN
    assert evaluate(keeps_up, WINDOW, 0, owned=True, cadence=cadence_polls(0.1)) is LagStatus.OK


def test_an_offset_that_stands_still_is_a_stop_if_nobody_owns_it() -> None:
    still = [(5, 9)] * 4
    assert status(*still, owned=False) is LagStatus.STOP
    assert status(*still, owned=None) is LagStatus.STALL, "an unknown owner counts as an owner"


def test_lag_within_bounds_is_ok_whatever_its_trend() -> None:
    assert status((5, 9), (5, 9), (5, 9), (5, 9), ok_messages=9) is LagStatus.OK
    assert status((9, 1), (5, 5), ok_messages=9) is LagStatus.OK


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
        LagStatus.STALL: 2,
        LagStatus.STOP: 2,
        LagStatus.UNKNOWN: 3,
        LagStatus.JUDGING: 4,
    }
