"""The restart policy, row by row of its table, without a clock."""

from __future__ import annotations

import pytest

from relaygr.worker.exits import Exit
from relaygr.worker.supervisor.heartbeat import ChildPhase, Heartbeat, HeartbeatReader
from relaygr.worker.supervisor.policy import STOP_S, Action, RestartPolicy, SupervisorSettings
from relaygr.worker.supervisor.records import ProcessStat

SETTINGS = SupervisorSettings(silence_s=3, start_timeout_s=60, restart_pause_s=1, restarts_max=3, restart_window_s=100)
SECOND = 1_000_000
NOTHING = Action()


class RestartWorld:
    """A restart policy, and children in the phases that a test sets."""

    def __init__(self) -> None:
        self.policy = RestartPolicy(SETTINGS)
        self.now_us = 0
        self.quiet: set[int] = set()
        self.phases: dict[int, ChildPhase] = {}
        self.state = "S"
        """The kernel's state letter of every quiet child."""
        self.busy = 1.0
        """Clock ticks of processor time that a quiet child uses in each step."""
        self.threads_ms = (0, 0)
        """Silence of the poll thread and of the device thread, in every heartbeat."""
        self._ticks = 0.0

    def start(self, number: int, phase: ChildPhase | None = None) -> None:
        self.policy.note_started(number, self.now_us)
        if phase is not None:
            self.phases[number] = phase
            self.heartbeat(number)

    def heartbeat(self, number: int) -> None:
        self.policy.note_heartbeat(number, Heartbeat(self.phases[number], 1, True, "", *self.threads_ms), self.now_us)

    def die(self, number: int, code: int) -> None:
        self.phases.pop(number, None)
        self.policy.note_ended(number, code, self.now_us)

    def decide(self) -> Action:
        return self.policy.decide(self.now_us)

    def pass_s(self, seconds: float, step_s: float = 0.2) -> Action:
        """Time passes in steps, as in the loop; each child that is not quiet sends a heartbeat at each step."""
        action = NOTHING
        for _ in range(round(seconds / step_s)):
            self.now_us += int(SECOND * step_s)
            self._ticks += self.busy
            for number in self.phases.keys() - self.quiet:
                self.heartbeat(number)
            for number in self.phases:
                self.policy.note_stat(number, ProcessStat(self.state, 1, int(self._ticks)), self.now_us)
            action = self.decide()
            if action != NOTHING:
                return action
        return action


@pytest.fixture
def world() -> RestartWorld:
    return RestartWorld()


def with_both(world: RestartWorld) -> None:
    world.start(1, ChildPhase.ACTIVE)
    world.start(2, ChildPhase.STANDBY)
    assert world.decide() == NOTHING


def test_the_first_child_is_started_at_once_and_the_second_when_the_first_is_active(world: RestartWorld) -> None:
    assert world.decide() == Action(start=True)
    world.start(1)
    assert world.pass_s(30) == NOTHING
    world.phases[1] = ChildPhase.ACTIVE
    world.heartbeat(1)
    assert world.decide() == Action(start=True)
    world.start(2, ChildPhase.STANDBY)
    assert world.pass_s(100) == NOTHING


def test_an_active_child_that_was_killed_is_replaced_once_the_other_is_active(world: RestartWorld) -> None:
    with_both(world)
    world.die(1, -9)
    assert world.pass_s(5) == NOTHING  # The standby has not taken over yet, so no second child is started.
    world.phases[2] = ChildPhase.ACTIVE
    assert world.pass_s(1) == Action(start=True)


def test_a_dead_child_is_replaced_after_a_pause_that_doubles(world: RestartWorld) -> None:
    world.start(1, ChildPhase.ACTIVE)
    pauses_s = []
    for number in (2, 3, 4):
        world.start(number, ChildPhase.STANDBY)
        world.die(number, -9)
        began_us = world.now_us
        assert world.pass_s(30) == Action(start=True)
        pauses_s.append((world.now_us - began_us) / SECOND)
    assert pauses_s == [1, 2, 4]


def test_too_many_deaths_leave_the_active_one_alone_until_they_are_long_ago(world: RestartWorld) -> None:
    """A standby that does not fit into memory must not end the active worker."""
    world.start(1, ChildPhase.ACTIVE)
    for number in range(2, 2 + SETTINGS.restarts_max + 1):
        world.start(number)
        world.die(number, -9)
    assert world.pass_s(95) == NOTHING
    assert world.pass_s(30) == Action(start=True)


def test_too_many_deaths_without_an_active_child_end_it(world: RestartWorld) -> None:
    for number in range(1, 1 + SETTINGS.restarts_max + 1):
        world.start(number, ChildPhase.STANDBY)
        world.die(number, 1)
    assert world.decide() == Action(end=Exit.FAILED)


@pytest.mark.parametrize("code", [Exit.FAILED, 2])
def test_a_first_child_that_refuses_to_start_ends_it(world: RestartWorld, code: int) -> None:
    world.start(1)
    world.die(1, code)
    assert world.decide() == Action(end=Exit.FAILED)


def test_a_first_child_that_was_killed_while_it_loaded_is_replaced(world: RestartWorld) -> None:
    world.start(1)
    world.die(1, -9)
    assert world.pass_s(2) == Action(start=True)


@pytest.mark.parametrize("number", [1, 2])
def test_a_fenced_child_ends_it_for_good(world: RestartWorld, number: int) -> None:
    with_both(world)
    world.die(number, Exit.FENCED)
    assert world.decide() == Action(end=Exit.FENCED)


@pytest.mark.parametrize("code", [Exit.STUCK, Exit.FAILED, Exit.DONE, -9])
def test_a_child_that_ends_otherwise_is_replaced(world: RestartWorld, code: int) -> None:
    with_both(world)
    world.die(2, code)
    assert world.pass_s(2) == Action(start=True)


@pytest.mark.parametrize("number", [1, 2])
def test_a_child_that_falls_silent_is_killed_once(world: RestartWorld, number: int) -> None:
    with_both(world)
    world.quiet.add(number)
    began_us = world.now_us
    assert world.pass_s(30) == Action(kill=(number,))
    assert 3 * SECOND < world.now_us - began_us <= 3.4 * SECOND
    assert world.pass_s(30) == NOTHING


@pytest.mark.parametrize("state", ["S", "T"])
def test_a_silent_child_that_stands_still_is_killed_sooner(world: RestartWorld, state: str) -> None:
    with_both(world)
    assert world.pass_s(1) == NOTHING
    world.quiet.add(1)
    world.state, world.busy = state, 0
    began_us = world.now_us
    assert world.pass_s(30) == Action(kill=(1,))
    assert SECOND < world.now_us - began_us <= 1.6 * SECOND


@pytest.mark.parametrize(
    ("state", "busy"), [("S", 1.0), ("R", 0.0), ("D", 0.0)], ids=["computes", "waits for a processor", "for the disk"]
)
def test_a_silent_child_that_does_not_stand_still_gets_more_time(world: RestartWorld, state: str, busy: float) -> None:
    """On a busy machine, or in a long call that holds the interpreter's lock, its heartbeats only come late."""
    with_both(world)
    world.quiet.add(1)
    world.state, world.busy = state, busy
    began_us = world.now_us
    assert world.pass_s(30) == Action(kill=(1,))
    assert 3 * SECOND < world.now_us - began_us <= 3.4 * SECOND


def test_an_idle_child_uses_no_processor_time_and_stays(world: RestartWorld) -> None:
    with_both(world)
    world.busy = 0
    assert world.pass_s(30) == NOTHING


def test_silence_does_not_count_while_the_supervisor_is_late_itself(world: RestartWorld) -> None:
    """Steps of 2 s instead of 0.2 s: heartbeats are as late. After them the bounds are as ever."""
    with_both(world)
    world.quiet.add(1)
    world.busy = 0
    assert world.pass_s(6, step_s=2) == NOTHING
    world.quiet.clear()
    assert world.pass_s(1) == NOTHING
    world.quiet.add(1)
    assert world.pass_s(2) == Action(kill=(1,))


def test_an_active_child_whose_poll_thread_hangs_is_killed(world: RestartWorld) -> None:
    with_both(world)
    world.threads_ms = (19_000, 0)
    assert world.pass_s(2) == NOTHING
    world.threads_ms = (21_000, 0)
    assert world.pass_s(1) == Action(kill=(1, 2))


def test_a_device_that_hangs_is_left_to_the_childs_own_watchdog(world: RestartWorld) -> None:
    """Its bound is the longest forward, which only the worker's settings know."""
    with_both(world)
    world.threads_ms = (0, 60_000)
    assert world.pass_s(5) == NOTHING


def test_a_child_that_sends_its_last_results_gets_time_for_it(world: RestartWorld) -> None:
    """It waits for a broker, asleep and silent. A kill would lose the results."""
    with_both(world)
    world.phases[1] = ChildPhase.STOPPING
    world.heartbeat(1)
    world.quiet.add(1)
    world.busy = 0
    assert world.pass_s(STOP_S - 1) == NOTHING
    assert world.pass_s(2) == Action(kill=(1,))


def test_a_child_that_stops_counts_as_active_until_the_standby_is(world: RestartWorld) -> None:
    """It may hold the lock, so a stop waits for it."""
    with_both(world)
    world.phases[1] = ChildPhase.STOPPING
    world.heartbeat(1)
    assert world.policy.active is world.policy.children[1]
    world.phases[2] = ChildPhase.ACTIVE
    world.heartbeat(2)
    assert world.policy.active is world.policy.children[2]


def test_a_child_that_loads_its_model_may_be_silent_for_longer(world: RestartWorld) -> None:
    world.start(1)
    assert world.pass_s(59) == NOTHING
    assert world.pass_s(2) == Action(kill=(1,))


def test_a_standby_that_takes_over_may_be_silent_until_it_is_active(world: RestartWorld) -> None:
    """It may restore a large tier. A kill would end the last child that is left."""
    with_both(world)
    world.die(1, -9)
    world.phases[2] = ChildPhase.PREPARING
    world.heartbeat(2)
    world.quiet.add(2)
    assert world.pass_s(59) == NOTHING
    world.phases[2] = ChildPhase.ACTIVE
    world.quiet.clear()
    assert world.pass_s(1) == Action(start=True)


def test_an_adopted_child_keeps_its_phase_until_it_sends_one(world: RestartWorld) -> None:
    world.policy.note_adopted(1, ChildPhase.ACTIVE, world.now_us)
    assert world.decide() == Action(start=True), "a standby beside the active one"
    world.start(2)
    assert world.pass_s(30) == Action(kill=(1,)), "it never connected"
    assert world.now_us <= 4 * SECOND


def test_an_adopted_child_that_loads_gets_the_time_that_a_new_one_gets(world: RestartWorld) -> None:
    world.policy.note_adopted(1, ChildPhase.PREPARING, world.now_us)
    assert world.pass_s(59) == NOTHING
    assert world.pass_s(2) == Action(kill=(1,))


def test_after_an_adopted_standby_a_refusal_to_start_does_not_end_it(world: RestartWorld) -> None:
    """The settings are valid: a child once started with them."""
    world.policy.note_adopted(1, ChildPhase.STANDBY, world.now_us)
    world.policy.note_adopted(2, ChildPhase.PREPARING, world.now_us)
    world.die(2, Exit.FAILED)
    assert world.decide() == NOTHING


def test_any_number_of_deaths_makes_the_longest_pause() -> None:
    policy = RestartPolicy(SupervisorSettings(restart_pause_s=0.001, restarts_max=10_000, restart_window_s=1e6))
    for number in range(2_000):
        policy.note_started(number, 0)
        policy.note_ended(number, -9, 0)
    assert policy.decide(59 * SECOND) == NOTHING
    assert policy.decide(60 * SECOND) == Action(start=True)


def test_a_child_that_the_supervisor_killed_while_it_loaded_does_not_end_it(world: RestartWorld) -> None:
    world.start(1)
    assert world.pass_s(70) == Action(kill=(1,))
    world.die(1, 1)
    assert world.pass_s(2) == Action(start=True)


def test_a_supervisor_that_was_stopped_itself_kills_no_child(world: RestartWorld) -> None:
    """For example the whole machine slept: no heartbeat could be received, so none counts as missing."""
    with_both(world)
    world.now_us += 3600 * SECOND
    assert world.decide() == NOTHING
    assert world.pass_s(10) == NOTHING


def test_a_heartbeat_is_read_back_wherever_the_bytes_are_cut() -> None:
    heartbeats = [
        Heartbeat(ChildPhase.STANDBY, 8080, False, "waits"),
        Heartbeat(ChildPhase.ACTIVE, 8081, True, "é" * 600),
    ]
    text = b"".join(heartbeat.encode() for heartbeat in heartbeats)
    for cut in range(len(text)):
        reader = HeartbeatReader()
        heard = [reader.feed(text[:cut]), reader.feed(text[cut:])]
        last = [heartbeat for heartbeat in heard if heartbeat is not None][-1]
        assert (last.phase, last.port, last.ready) == (ChildPhase.ACTIVE, 8081, True)


@pytest.mark.parametrize("line", [b"", b"{", b"[]", b"{}", b'{"phase": "x", "port": 1, "ready": 1, "detail": ""}'])
def test_a_line_that_is_no_heartbeat_is_ignored(line: bytes) -> None:
    assert HeartbeatReader().feed(line + b"\n") is None
