"""The table of open requests: each ends once, on time, late or lost, in any order of events."""

from __future__ import annotations

import gc
from concurrent.futures import Future

import pytest
from hypothesis import given
from hypothesis import strategies as st

from relaygr.client.outcome import MessageRefused, QueueFull
from relaygr.client.pending import AnswerMatch, PendingRequest, PendingTable, Timer

GRACE_US = 1_000_000


def table(max_in_flight: int = 100, remembered: int = 100) -> PendingTable:
    return PendingTable(max_in_flight, GRACE_US, remembered)


def request(request_id: str = "gw.1.1", deadline_us: int = 50_000) -> PendingRequest:
    return PendingRequest(request_id, 0, deadline_us, 0, 0, 1, Future())


def test_an_answer_before_the_deadline_is_on_time_and_ends_the_request() -> None:
    pending, entry = table(), request()
    pending.add(entry)
    answer = pending.answer("gw.1.1", 49_999)
    assert (answer.match, answer.entry, answer.untold) == (AnswerMatch.ON_TIME, entry, False)
    assert (len(pending), pending.waiting) == (0, 0)
    assert pending.due(10 * GRACE_US) == []


def test_a_request_is_timed_out_at_its_deadline_and_lost_after_the_grace() -> None:
    pending = table()
    pending.add(request())
    assert pending.due(49_999) == []
    assert [due.timer for due in pending.due(50_000)] == [Timer.TIME_OUT]
    assert (len(pending), pending.waiting) == (1, 0)
    assert pending.due(50_000 + GRACE_US - 1) == []
    assert [due.timer for due in pending.due(50_000 + GRACE_US)] == [Timer.LOSE]
    assert len(pending) == 0


def test_an_answer_within_the_grace_is_late_and_the_request_is_not_lost() -> None:
    pending, entry = table(), request()
    pending.add(entry)
    pending.due(50_000)
    answer = pending.answer("gw.1.1", 60_000)
    assert (answer.match, answer.entry, answer.untold) == (AnswerMatch.LATE, entry, False)
    assert pending.due(10 * GRACE_US) == []


def test_an_answer_after_the_deadline_is_late_even_if_its_timer_has_not_fired() -> None:
    pending = table()
    pending.add(request())
    answer = pending.answer("gw.1.1", 50_000)
    assert (answer.match, answer.untold) == (AnswerMatch.LATE, True)
    assert pending.due(10 * GRACE_US) == []


def test_a_second_answer_is_a_duplicate() -> None:
    pending = table()
    pending.add(request())
    pending.answer("gw.1.1", 1)
    assert pending.answer("gw.1.1", 2).match is AnswerMatch.DUPLICATE


def test_an_answer_to_a_lost_request_is_told_from_a_duplicate() -> None:
    pending = table()
    pending.add(request())
    pending.due(50_000 + GRACE_US)
    pending.due(50_000 + 2 * GRACE_US)
    assert pending.answer("gw.1.1", 3 * GRACE_US).match is AnswerMatch.AFTER_LOSS


def test_an_answer_to_somebody_elses_request_is_unknown() -> None:
    assert table().answer("gw.0.7", 1).match is AnswerMatch.UNKNOWN


def test_the_bound_refuses_at_once_and_says_so() -> None:
    pending = table(max_in_flight=2)
    pending.add(request("a"))
    pending.add(request("b"))
    with pytest.raises(QueueFull, match="max_in_flight is 2"):
        pending.add(request("c"))
    assert len(pending) == 2


def test_requests_in_their_grace_count_towards_the_bound() -> None:
    pending = table(max_in_flight=1)
    pending.add(request("a"))
    pending.due(50_000)
    with pytest.raises(QueueFull):
        pending.add(request("b"))


def test_after_its_grace_a_request_is_overdue_not_yet_lost_and_makes_room() -> None:
    pending, entry = PendingTable(1, GRACE_US, 10, lost_after_us=5 * GRACE_US), request("a")
    pending.add(entry)
    pending.due(50_000)
    assert pending.due(50_000 + GRACE_US) == []
    pending.add(request("b", deadline_us=10**9))
    answer = pending.answer("a", 50_000 + 4 * GRACE_US)
    assert (answer.match, answer.entry) == (AnswerMatch.LATE, entry), "a dead worker's successor answered it"
    assert pending.due(50_000 + 6 * GRACE_US) == []


def test_what_nobody_ever_answers_is_lost_in_the_end() -> None:
    pending = PendingTable(1, GRACE_US, 10, lost_after_us=5 * GRACE_US)
    pending.add(request("a"))
    pending.due(50_000)
    pending.due(50_000 + GRACE_US)
    assert pending.due(50_000 + 5 * GRACE_US - 1) == []
    assert [due.timer for due in pending.due(50_000 + 5 * GRACE_US)] == [Timer.LOSE]
    assert len(pending) == 0


def test_too_many_overdue_requests_are_given_up_oldest_first() -> None:
    pending = PendingTable(10, GRACE_US, 2, lost_after_us=100 * GRACE_US)
    for name in ("a", "b", "c"):
        pending.add(request(name))
    pending.due(50_000)
    given_up = pending.due(50_000 + GRACE_US)
    assert [(due.timer, due.entry.request_id) for due in given_up] == [(Timer.LOSE, "a")]
    assert len(pending) == 2


@pytest.mark.parametrize("answered", [False, True])
def test_an_id_that_is_or_was_in_use_is_refused(answered: bool) -> None:
    pending = table()
    pending.add(request("a"))
    if answered:
        pending.answer("a", 1)
    with pytest.raises(MessageRefused, match="used already"):
        pending.add(request("a"))


def test_a_discarded_request_leaves_nothing_and_its_id_is_free() -> None:
    pending, entry = table(), request("a")
    pending.add(entry)
    pending.discard(entry)
    assert (len(pending), pending.waiting) == (0, 0)
    pending.add(request("a", deadline_us=70_000))
    assert pending.due(50_000) == [], "the timer of the discarded request has no effect on a new one with its id"
    assert len(pending.due(70_000)) == 1


def test_a_retry_is_planned_only_before_the_deadline() -> None:
    pending, entry = table(), request()
    pending.add(entry)
    assert not pending.retry(entry, lambda: None, 50_000)
    assert pending.retry(entry, lambda: None, 20_000)
    assert [due.timer for due in pending.due(20_000)] == [Timer.RETRY]


def test_a_retry_of_a_request_that_ended_meanwhile_does_not_fire() -> None:
    pending, entry = table(), request()
    pending.add(entry)
    pending.retry(entry, lambda: None, 20_000)
    pending.answer("gw.1.1", 10_000)
    assert pending.due(30_000) == []
    assert not pending.retry(entry, lambda: None, 40_000)


def test_ended_ids_are_forgotten_oldest_first() -> None:
    pending = table(remembered=2)
    for name in "abc":
        pending.add(request(name))
        pending.answer(name, 1)
    assert [pending.answer(name, 2).match for name in "abc"] == [
        AnswerMatch.UNKNOWN,
        AnswerMatch.DUPLICATE,
        AnswerMatch.DUPLICATE,
    ]


@pytest.mark.slow
def test_timers_of_answered_requests_do_not_pile_up() -> None:
    pending = table(remembered=10)
    for number in range(20_000):
        pending.add(request(str(number), deadline_us=600_000_000))
        pending.answer(str(number), 1)
    assert sum(isinstance(kept, PendingRequest) for kept in gc.get_objects()) < 2_000


def test_clearing_gives_the_requests_whose_caller_still_waits() -> None:
    pending = table()
    pending.add(request("gone", deadline_us=10))
    pending.due(10)
    pending.add(request("waits"))
    assert [entry.request_id for entry in pending.clear()] == ["waits"]
    assert (len(pending), pending.waiting, pending.next_due_us) == (0, 0, None)


@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("add"), st.integers(0, 5), st.integers(1, 40)),
            st.tuples(st.just("answer"), st.integers(0, 5), st.just(0)),
            st.tuples(st.just("wait"), st.integers(1, 60), st.just(0)),
        ),
        max_size=60,
    )
)
def test_every_request_ends_once_for_its_caller_and_once_for_the_gateway(steps: list[tuple[str, int, int]]) -> None:
    grace_us = 25
    pending = PendingTable(4, grace_us, 1000)
    now_us, told, ended, sent, names = 0, [], [], [], iter(range(1000))
    open_by_slot: dict[int, str] = {}
    for kind, number, budget in steps:
        if kind == "add":
            name = str(next(names))
            try:
                pending.add(request(name, now_us + budget))
            except QueueFull:
                continue
            sent.append(name)
            open_by_slot[number] = name
        elif kind == "answer" and number in open_by_slot:
            name = open_by_slot[number]
            answer = pending.answer(name, now_us)
            if answer.match in (AnswerMatch.ON_TIME, AnswerMatch.LATE):
                ended.append(name)
                if answer.match is AnswerMatch.ON_TIME or answer.untold:
                    told.append(name)
        elif kind == "wait":
            now_us += number
            for due in pending.due(now_us):
                (told if due.timer is Timer.TIME_OUT else ended).append(due.entry.request_id)
        assert pending.waiting == len(sent) - len(told)
    for _ in range(2):
        now_us += 1000
        for due in pending.due(now_us):
            (told if due.timer is Timer.TIME_OUT else ended).append(due.entry.request_id)
    assert sorted(told) == sorted(ended) == sorted(sent)
