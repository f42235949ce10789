"""What a supervisor decides, row by row of its table; time is a number."""

from __future__ import annotations

import pytest

from relaygr.worker.exits import Exit
from relaygr.worker.supervisor.beats import Beat, BeatReader, Phase
from relaygr.worker.supervisor.judge import Judge, Verdict
from relaygr.worker.supervisor.settings import SupervisorSettings

SETTINGS = SupervisorSettings(silence_s=3, start_timeout_s=60, restart_pause_s=1, restarts_max=3, restart_window_s=100)
SECOND = 1_000_000
NOTHING = Verdict()


class World:
    """A judge, and children that are what a test says."""

    def __init__(self) -> None:
        self.judge = Judge(SETTINGS)
        self.now_us = 0
        self.quiet: set[int] = set()
        self.phases: dict[int, Phase] = {}

    def start(self, number: int, phase: Phase | None = None) -> None:
        self.judge.note_started(number, self.now_us)
        if phase is not None:
            self.phases[number] = phase
            self.beat(number)

    def beat(self, number: int) -> None:
        self.judge.note_beat(number, Beat(self.phases[number], 1, True, ""), self.now_us)

    def die(self, number: int, code: int) -> None:
        self.phases.pop(number, None)
        self.judge.note_ended(number, code, self.now_us)

    def decide(self) -> Verdict:
        return self.judge.decide(self.now_us)

    def pass_s(self, seconds: float) -> Verdict:
        """Time passes as it does in the loop: in short steps, with a beat of each child that is not quiet."""
        verdict = NOTHING
        for _ in range(int(seconds * 5)):
            self.now_us += SECOND // 5
            for number in self.phases.keys() - self.quiet:
                self.beat(number)
            verdict = self.decide()
            if verdict != NOTHING:
                return verdict
        return verdict


@pytest.fixture
def world() -> World:
    return World()


def with_both(world: World) -> None:
    world.start(1, Phase.ACTIVE)
    world.start(2, Phase.STANDBY)
    assert world.decide() == NOTHING


def test_the_first_child_is_started_at_once_and_the_second_when_the_first_is_active(world: World) -> None:
    assert world.decide() == Verdict(start=True)
    world.start(1)
    assert world.pass_s(30) == NOTHING
    world.phases[1] = Phase.ACTIVE
    world.beat(1)
    assert world.decide() == Verdict(start=True)
    world.start(2, Phase.STANDBY)
    assert world.pass_s(100) == NOTHING


def test_an_active_child_that_was_killed_is_replaced_once_the_other_is_active(world: World) -> None:
    with_both(world)
    world.die(1, -9)
    assert world.pass_s(5) == NOTHING  # No second one beside a standby that has not taken over yet.
    world.phases[2] = Phase.ACTIVE
    assert world.pass_s(1) == Verdict(start=True)


def test_a_dead_child_is_replaced_after_a_pause_that_doubles(world: World) -> None:
    world.start(1, Phase.ACTIVE)
    pauses_s = []
    for number in (2, 3, 4):
        world.start(number, Phase.STANDBY)
        world.die(number, -9)
        began_us = world.now_us
        assert world.pass_s(30) == Verdict(start=True)
        pauses_s.append((world.now_us - began_us) / SECOND)
    assert pauses_s == [1, 2, 4]


def test_too_many_deaths_leave_the_active_one_alone_until_they_are_long_ago(world: World) -> None:
    """A standby that does not fit into memory must not take the worker down with it."""
    world.start(1, Phase.ACTIVE)
    for number in range(2, 2 + SETTINGS.restarts_max + 1):
        world.start(number)
        world.die(number, -9)
    assert world.pass_s(95) == NOTHING
    assert world.pass_s(30) == Verdict(start=True)


def test_too_many_deaths_with_nobody_active_end_it(world: World) -> None:
    for number in range(1, 1 + SETTINGS.restarts_max + 1):
        world.start(number, Phase.STANDBY)
        world.die(number, 1)
    assert world.decide() == Verdict(end=Exit.FAILED)


@pytest.mark.parametrize("code", [Exit.FAILED, 2])
def test_a_first_child_that_refuses_to_start_ends_it(world: World, code: int) -> None:
    world.start(1)
    world.die(1, code)
    assert world.decide() == Verdict(end=Exit.FAILED)


def test_a_first_child_that_was_killed_while_it_loaded_is_replaced(world: World) -> None:
    world.start(1)
    world.die(1, -9)
    assert world.pass_s(2) == Verdict(start=True)


@pytest.mark.parametrize("number", [1, 2])
def test_a_fenced_child_ends_it_for_good(world: World, number: int) -> None:
    with_both(world)
    world.die(number, Exit.FENCED)
    assert world.decide() == Verdict(end=Exit.FENCED)


@pytest.mark.parametrize("code", [Exit.STUCK, Exit.FAILED, Exit.DONE, -9])
def test_any_other_end_is_made_good(world: World, code: int) -> None:
    with_both(world)
    world.die(2, code)
    assert world.pass_s(2) == Verdict(start=True)


@pytest.mark.parametrize("number", [1, 2])
def test_a_child_that_falls_silent_is_killed_once(world: World, number: int) -> None:
    with_both(world)
    world.quiet.add(number)
    began_us = world.now_us
    assert world.pass_s(30) == Verdict(kill=(number,))
    assert 3 * SECOND < world.now_us - began_us <= 3.4 * SECOND
    assert world.pass_s(30) == NOTHING


def test_a_child_that_loads_its_model_may_be_silent_for_longer(world: World) -> None:
    world.start(1)
    assert world.pass_s(59) == NOTHING
    assert world.pass_s(2) == Verdict(kill=(1,))


def test_a_standby_that_takes_over_may_be_silent_until_it_is_active(world: World) -> None:
    """It restores a large tier, say. Killing it would end the last one that is left."""
    with_both(world)
    world.die(1, -9)
    world.phases[2] = Phase.PREPARING
    world.beat(2)
    world.quiet.add(2)
    assert world.pass_s(59) == NOTHING
    world.phases[2] = Phase.ACTIVE
    world.quiet.clear()
    assert world.pass_s(1) == Verdict(start=True)


def test_any_number_of_deaths_makes_the_longest_pause() -> None:
    judge = Judge(SupervisorSettings(restart_pause_s=0.001, restarts_max=10_000, restart_window_s=1e6))
    for number in range(2_000):
        judge.note_started(number, 0)
        judge.note_ended(number, -9, 0)
    assert judge.decide(59 * SECOND) == NOTHING
    assert judge.decide(60 * SECOND) == Verdict(start=True)


def test_a_child_killed_by_us_while_it_loaded_says_nothing_about_settings(world: World) -> None:
    world.start(1)
    assert world.pass_s(70) == Verdict(kill=(1,))
    world.die(1, 1)
    assert world.pass_s(2) == Verdict(start=True)


def test_a_supervisor_that_was_stopped_itself_blames_nobody(world: World) -> None:
    """The whole machine slept, say: who heard nobody may judge nobody."""
    with_both(world)
    world.now_us += 3600 * SECOND
    assert world.decide() == NOTHING
    assert world.pass_s(10) == NOTHING


def test_a_beat_is_read_back_from_any_cut_of_the_line() -> None:
    beats = [Beat(Phase.STANDBY, 8080, False, "waits"), Beat(Phase.ACTIVE, 8081, True, "é" * 600)]
    text = b"".join(beat.encode() for beat in beats)
    for cut in range(len(text)):
        reader = BeatReader()
        heard = [reader.feed(text[:cut]), reader.feed(text[cut:])]
        last = [beat for beat in heard if beat is not None][-1]
        assert (last.phase, last.port, last.ready) == (Phase.ACTIVE, 8081, True)


@pytest.mark.parametrize("line", [b"", b"{", b"[]", b"{}", b'{"phase": "x", "port": 1, "ready": 1, "detail": ""}'])
def test_what_is_no_beat_is_none(line: bytes) -> None:
    assert BeatReader().feed(line + b"\n") is None
