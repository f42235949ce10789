"""The commit watermark, case by case and against a naive model of a log, a group and two owners."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from relaygr.consumer.watermark import Begin, TopicPartition, WatermarkTracker
from relaygr.runtime.errors import RelayError

TP = TopicPartition("ranking", 0)
OTHER = TopicPartition("ranking", 1)


def tracker_at(position: int | None = 0, max_span: int = 100) -> WatermarkTracker:
    tracker = WatermarkTracker(max_span)
    tracker.assign({TP: position})
    return tracker


def begin(tracker: WatermarkTracker, *offsets: int) -> list[Begin]:
    return [tracker.begin(TP, offset) for offset in offsets]


def finish(tracker: WatermarkTracker, *offsets: int) -> None:
    for offset in offsets:
        tracker.finish(TP, offset, tracker.generation(TP))


def test_nothing_is_committable_while_the_first_message_is_unfinished() -> None:
    tracker = tracker_at(5)
    begin(tracker, 5, 6, 7)
    finish(tracker, 6, 7)
    assert tracker.committable() == {}
    finish(tracker, 5)
    assert tracker.committable() == {TP: 8}


def test_a_watermark_is_offered_until_it_is_noted_and_then_not_again() -> None:
    tracker = tracker_at()
    begin(tracker, 0)
    finish(tracker, 0)
    assert tracker.committable() == tracker.committable() == {TP: 1}
    tracker.committed({TP: 1})
    assert tracker.committable() == {}


def test_offsets_that_do_not_exist_hold_nothing_up() -> None:
    tracker = tracker_at(0)
    begin(tracker, 3)
    assert tracker.committable() == {TP: 3}
    begin(tracker, 9)
    finish(tracker, 3)
    assert tracker.committable() == {TP: 9}
    finish(tracker, 9)
    assert tracker.committable() == {TP: 10}


def test_what_is_in_flight_or_finished_here_is_not_done_again_when_a_partition_comes_back() -> None:
    tracker = tracker_at()
    begin(tracker, 0, 1, 2)
    finish(tracker, 1)
    tracker.revoke([TP])
    tracker.assign({TP: 0})
    assert begin(tracker, 0, 1, 2, 3) == [Begin.IN_FLIGHT, Begin.FINISHED, Begin.IN_FLIGHT, Begin.NEW]
    finish(tracker, 0, 2)
    assert tracker.committable() == {TP: 3}


def test_completions_of_a_lost_partition_never_touch_offsets() -> None:
    tracker = tracker_at()
    begin(tracker, 0)
    tracker.revoke([TP])
    finish(tracker, 0)
    assert tracker.committable() == {}
    tracker.committed({TP: 1})
    tracker.assign({TP: 0})
    assert tracker.committable() == {TP: 1}, "but it is known when the partition is assigned again"


def test_work_that_another_owner_committed_past_is_dropped() -> None:
    tracker = tracker_at()
    begin(tracker, 0, 1, 2, 3)
    tracker.revoke([TP])
    tracker.assign({TP: 2})
    finish(tracker, 0)
    assert tracker.committable() == {}, "2 and 3 are still in flight here"
    assert tracker.in_flight() == 2
    assert begin(tracker, 2, 3, 4) == [Begin.IN_FLIGHT, Begin.IN_FLIGHT, Begin.NEW]
    tracker.revoke([TP])
    tracker.assign({TP: 50})
    assert tracker.in_flight() == 0
    finish(tracker, 2, 3, 4)
    assert tracker.committable() == {}
    assert begin(tracker, 50) == [Begin.NEW]


def test_an_unknown_position_commits_nothing_before_the_first_message_tells_it() -> None:
    tracker = tracker_at(0)
    begin(tracker, 0, 1)
    tracker.revoke([TP])
    tracker.assign({TP: None})
    finish(tracker, 0)
    assert tracker.committable() == {}, "another owner may be at 50 by now"
    assert begin(tracker, 1) == [Begin.IN_FLIGHT]
    assert tracker.committable() == {TP: 1}
    finish(tracker, 1)
    assert tracker.committable() == {TP: 2}


def test_a_start_that_nobody_ever_committed_is_committable_before_the_first_message_is_finished() -> None:
    tracker = tracker_at(None)
    begin(tracker, 7, 8)
    assert tracker.committable() == {TP: 7}


def test_an_offset_that_somebody_reset_is_read_again_and_old_completions_do_not_count() -> None:
    tracker = tracker_at(10)
    begin(tracker, 10, 11)
    finish(tracker, 10)
    before = tracker.generation(TP)
    tracker.revoke([TP])
    tracker.assign({TP: 4})
    assert begin(tracker, 4, 11) == [Begin.NEW, Begin.NEW]
    assert tracker.generation(TP) != before
    tracker.finish(TP, 11, before)
    finish(tracker, 4)
    assert tracker.committable() == {TP: 11}


def test_a_log_that_goes_back_within_one_assignment_is_read_again() -> None:
    tracker = tracker_at(0)
    assert begin(tracker, 0, 1, 2) == [Begin.NEW] * 3
    finish(tracker, 0, 1, 2)
    assert begin(tracker, 1) == [Begin.NEW]


def test_a_log_that_was_made_anew_is_read_although_its_offsets_were_finished_before() -> None:
    tracker = tracker_at(0)
    begin(tracker, *range(10))
    finish(tracker, *range(10))
    tracker.committed(tracker.committable())
    tracker.revoke([TP])
    tracker.assign({TP: 0})
    assert begin(tracker, 0) == [Begin.NEW]
    assert tracker.committable() == {}, "10 would be beyond the end"
    finish(tracker, 0)
    assert tracker.committable() == {TP: 1}


@pytest.mark.parametrize("read", [10, 1, 500])
def test_the_commit_of_the_log_before_is_taken_back_when_messages_begin_below_it(read: int) -> None:
    """The old commit may come back after the topic was created: the client repeats it when partitions are revoked."""
    tracker = tracker_at(0, max_span=1000)
    begin(tracker, *range(read))
    finish(tracker, *range(read))
    tracker.committed(tracker.committable())
    tracker.revoke([TP])
    tracker.assign({TP: read})
    assert begin(tracker, 0) == [Begin.NEW]
    assert tracker.set_back() == {TP: 0}
    assert tracker.set_back() == {TP: 0}, "the client did not take it: once more"
    tracker.committed({TP: 0})
    assert tracker.set_back() == {}
    finish(tracker, 0)
    assert tracker.committable() == {TP: 1}


@pytest.mark.parametrize("position", [0, 7, None])
def test_a_topic_that_was_missing_is_not_taken_for_the_log_before(position: int | None) -> None:
    tracker = tracker_at(0)
    begin(tracker, *range(10))
    tracker.suspect(TP.topic)
    assert begin(tracker, 10) == [Begin.NEW], "until the next assignment, it may have been a mistake"
    finish(tracker, 0)
    assert tracker.committable() == {TP: 1}
    tracker.revoke([TP])
    tracker.assign({TP: position})
    start = position or 0
    assert begin(tracker, start, start + 1) == [Begin.NEW, Begin.NEW]


def test_a_log_that_ends_below_what_was_read_is_another_one() -> None:
    tracker = tracker_at(0)
    begin(tracker, 0, 1, 2)
    tracker.reach_end(TP, 0)
    finish(tracker, 0, 1, 2)
    assert tracker.set_back() == {TP: 0}
    assert begin(tracker, 0) == [Begin.NEW]


def test_a_topic_with_another_id_begins_at_0_whatever_was_read_of_it() -> None:
    tracker = WatermarkTracker(100)
    elsewhere = TopicPartition("preinfer", 0)
    tracker.assign({TP: 0, OTHER: 0, elsewhere: 0})
    for tp in (TP, OTHER, elsewhere):
        tracker.begin(tp, 0)
    old = tracker.generation(TP)
    tracker.revoke([OTHER])
    assert tracker.begin_anew(["ranking"]) == [TP]
    assert tracker.set_back() == {TP: 0}
    tracker.finish(TP, 0, old)
    tracker.assign({OTHER: 0})
    assert [tracker.begin(tp, 0) for tp in (TP, OTHER)] == [Begin.NEW, Begin.NEW]
    assert tracker.in_flight() == 3, "the other topic is as before"


def test_what_holds_no_message_at_the_end_of_a_log_is_committed_once_all_before_it_is_finished() -> None:
    tracker = tracker_at(0)
    begin(tracker, 0, 1)
    finish(tracker, 1)
    tracker.reach_end(TP, 7)
    assert tracker.committable() == {}
    finish(tracker, 0)
    assert tracker.committable() == {TP: 7}
    assert begin(tracker, 9) == [Begin.NEW]


@pytest.mark.parametrize("position", [5, 50, None])
def test_a_log_whose_messages_were_all_deleted_has_nothing_unread(position: int | None) -> None:
    tracker = tracker_at(position)
    tracker.reach_end(TP, 50)
    assert tracker.next_offset(TP) == 50
    tracker.committed(tracker.committable())
    assert begin(tracker, 50) == [Begin.NEW]
    tracker.reach_end(OTHER, 3)  # Of a partition that went away.
    assert tracker.committable() == {}


def test_a_partition_is_full_when_its_span_reaches_the_bound_however_little_is_unfinished() -> None:
    tracker = tracker_at(0, max_span=3)
    begin(tracker, 0, 1)
    assert not tracker.is_full(TP)
    begin(tracker, 2)
    finish(tracker, 1, 2)
    assert tracker.is_full(TP)
    finish(tracker, 0)
    assert not tracker.is_full(TP)
    assert tracker.span(TP) == 0


def test_finishing_twice_or_what_was_never_begun_does_nothing() -> None:
    tracker = tracker_at(0)
    begin(tracker, 0, 1)
    finish(tracker, 1, 1, 7)
    tracker.finish(OTHER, 0, 0)
    assert tracker.committable() == {}
    assert tracker.in_flight() == 1


def test_partitions_do_not_touch_each_other() -> None:
    tracker = WatermarkTracker(10)
    tracker.assign({TP: 0, OTHER: 100})
    tracker.begin(TP, 0)
    tracker.begin(OTHER, 100)
    finish(tracker, 0)
    assert tracker.committable() == {TP: 1}
    tracker.revoke([TP])
    assert tracker.owned() == {OTHER}
    assert tracker.in_flight() == 1


def test_a_bound_that_lets_nothing_in_is_refused() -> None:
    with pytest.raises(RelayError, match="at least one"):
        WatermarkTracker(0)


class OneLogTwoOwners(RuleBasedStateMachine):
    """A log with holes, the group's offset, this process and another owner, any order of events, crashes included."""

    def __init__(self) -> None:
        super().__init__()
        self.log: list[int] = []
        self.end = 0
        self.group_offset = 0
        self.done: set[int] = set()
        self._restart()

    def _restart(self) -> None:
        self.tracker = WatermarkTracker(1000)
        self.owned = False
        self.position = 0
        self.begun = 0
        self.working: dict[int, int] = {}

    @rule(holes=st.lists(st.sampled_from([0, 0, 1, 3]), min_size=1, max_size=6))
    def append(self, holes: list[int]) -> None:
        for hole in holes:
            self.log.append(self.end + hole)
            self.end += hole + 1

    @precondition(lambda self: not self.owned)
    @rule(known=st.booleans())
    def assign(self, known: bool) -> None:
        self.owned = True
        self.position = self.group_offset
        self.tracker.assign({TP: self.group_offset if known else None})

    @precondition(lambda self: self.owned)
    @rule(commit=st.booleans())
    def revoke(self, commit: bool) -> None:
        if commit:
            self.store()
        self.tracker.revoke([TP])
        self.owned = False

    @precondition(lambda self: self.owned)
    @rule(count=st.integers(1, 6))
    def deliver(self, count: int) -> None:
        for _ in range(count):
            self._deliver_one()

    def _deliver_one(self) -> None:
        offset = next((offset for offset in self.log if offset >= self.position), None)
        if offset is None:
            return
        self.position = offset + 1
        answer = self.tracker.begin(TP, offset)
        if answer is Begin.NEW:
            assert offset not in self.working, "in flight, but processed a second time"
            self.working[offset] = self.tracker.generation(TP)
        elif answer is Begin.IN_FLIGHT:
            assert offset in self.working
        else:
            assert offset in self.done, "skipped, but never processed"

    @precondition(lambda self: self.owned)
    @rule()
    def reach_end(self) -> None:
        self.deliver(len(self.log))
        self.position = self.end
        self.tracker.reach_end(TP, self.end)

    @rule(holes=st.integers(1, 3))
    def append_nothing(self, holes: int) -> None:
        """Transaction markers."""
        self.end += holes

    @rule()
    def create_anew(self) -> None:
        """The topic is deleted and created again: the group's offset goes with it."""
        self.log, self.end, self.group_offset, self.position = [], 0, 0, 0
        self.done.clear()
        self.working.clear()
        self.tracker.begin_anew([TP.topic])
        assert self.tracker.set_back() == ({TP: 0} if self.owned else {})
        self.tracker.committed(self.tracker.set_back())

    @precondition(lambda self: self.working)
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        offset = data.draw(st.sampled_from(sorted(self.working)))
        self.tracker.finish(TP, offset, self.working.pop(offset))
        self.done.add(offset)

    @rule()
    def store(self) -> None:
        offsets = self.tracker.committable()
        assert self.owned or not offsets
        self._commit(offsets)
        self.tracker.committed(offsets)

    @precondition(lambda self: not self.owned)
    @rule(count=st.integers(1, 5))
    def other_owner_works(self, count: int) -> None:
        ahead = [offset for offset in self.log if offset >= self.group_offset][:count]
        if ahead:
            self.done.update(ahead)
            self.group_offset = ahead[-1] + 1

    @rule(dice=st.integers(0, 9))
    def crash(self, dice: int) -> None:
        if dice == 0:
            self._restart()

    def _commit(self, offsets: dict[TopicPartition, int]) -> None:
        for offset in offsets.values():
            assert offset >= self.group_offset, "the group's offset would go back"
            self.group_offset = offset

    @invariant()
    def nothing_before_the_groups_offset_is_unfinished(self) -> None:
        assert all(offset in self.done for offset in self.log if offset < self.group_offset)

    def teardown(self) -> None:
        if not self.owned:
            self.assign(known=True)
        self.deliver(len(self.log))
        for offset, generation in self.working.items():
            self.tracker.finish(TP, offset, generation)
            self.done.add(offset)
        self.working.clear()
        self.reach_end()
        self.store()
        assert self.done.issuperset(self.log), "read, but lost"
        assert not self.log or self.group_offset == self.end


TestOneLogTwoOwners = OneLogTwoOwners.TestCase
TestOneLogTwoOwners.pytestmark = [pytest.mark.slow]
TestOneLogTwoOwners.settings = settings(max_examples=150, stateful_step_count=40)
