"""What the supervisor does next: pure decisions over what is known of the children. Times are monotonic µs.

Operation x state -> result:

| a child                          | while                                     | result                            |
|----------------------------------|-------------------------------------------|-----------------------------------|
| ended, fenced                    | always                                    | all end, with Exit.FENCED         |
| ended by itself                  | none was ever a standby or active         | all end, with its code            |
| ended otherwise                  | fewer than `restarts_max` in the window   | replaced after a pause            |
| ended otherwise                  | more than that, another child is active   | no new standby until one is old   |
| ended otherwise                  | more than that, none is active            | all end, with Exit.FAILED         |
| silent for `silence_s`           | standby or active                         | killed                            |
| silent for `start_timeout_s`     | preparing, or taking over                 | killed                            |
| active                           | alone                                     | a standby is started              |
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from relaygr.worker.exits import Exit
from relaygr.worker.supervisor.beats import Beat, Phase
from relaygr.worker.supervisor.settings import SupervisorSettings

CHILDREN = 2
LONGEST_PAUSE_S = 60.0
MOST_DOUBLINGS = 30


@dataclass(slots=True)
class ChildState:
    """What is known of one child."""

    number: int
    heard_us: int
    """Its last sign of life; before the first, its start."""
    beat: Beat | None = None
    condemned: bool = False
    """Killed, and not yet gone."""

    @property
    def phase(self) -> Phase:
        return Phase.PREPARING if self.beat is None else self.beat.phase


@dataclass(frozen=True, slots=True)
class Verdict:
    """What is to be done now. `end` ends everything; otherwise kill, then start."""

    kill: tuple[int, ...] = ()
    start: bool = False
    end: Exit | None = None


@dataclass(slots=True)
class Judge:
    """See the module. `note_*` tell it what happened, `decide` says what to do."""

    settings: SupervisorSettings
    children: dict[int, ChildState] = field(default_factory=dict)
    deaths: int = 0
    """Children that ended and were not asked to."""
    was_well: bool = False
    """A child was ready once: the settings are right."""
    _deaths_us: deque[int] = field(default_factory=deque)
    _end: Exit | None = None
    _decided_us: int | None = None

    def note_started(self, number: int, now_us: int) -> None:
        self.children[number] = ChildState(number, now_us)

    def note_beat(self, number: int, beat: Beat, now_us: int) -> None:
        child = self.children[number]
        child.beat, child.heard_us = beat, now_us
        if beat.phase is not Phase.PREPARING:
            self.was_well = True

    def note_ended(self, number: int, code: int, now_us: int) -> None:
        """`code` is negative for a signal, as subprocess says it."""
        child = self.children.pop(number)
        self.deaths += 1
        self._deaths_us.append(now_us)
        if code == Exit.FENCED:
            self._end = Exit.FENCED
        elif code >= 0 and not self.was_well and not child.condemned:
            # Wrong settings do not mend themselves.
            self._end = Exit(code) if code in set(Exit) else Exit.FAILED

    def decide(self, now_us: int) -> Verdict:
        """What is to be done at `now_us`."""
        self._forgive_own_absence(now_us)
        while self._deaths_us and now_us - self._deaths_us[0] > self.settings.restart_window_s * 1e6:
            self._deaths_us.popleft()
        too_many = len(self._deaths_us) > self.settings.restarts_max
        if self._end is None and too_many and not self.children:
            self._end = Exit.FAILED
        if self._end is not None:
            return Verdict(end=self._end)
        silent = tuple(number for number, child in self.children.items() if self._is_silent(child, now_us))
        for number in silent:
            self.children[number].condemned = True
        return Verdict(kill=silent, start=not too_many and self._wants_child(now_us))

    @property
    def active(self) -> ChildState | None:
        """The child that holds the lock."""
        return next((child for child in self.children.values() if child.phase is Phase.ACTIVE), None)

    @property
    def standby(self) -> ChildState | None:
        """The child that would take over now."""
        return next((child for child in self.children.values() if child.phase is Phase.STANDBY), None)

    def _is_silent(self, child: ChildState, now_us: int) -> bool:
        preparing = child.phase is Phase.PREPARING
        bound_s = self.settings.start_timeout_s if preparing else self.settings.silence_s
        return not child.condemned and now_us - child.heard_us > bound_s * 1e6

    def _wants_child(self, now_us: int) -> bool:
        if len(self.children) >= CHILDREN:
            return False
        if self.children and self.active is None:
            return False
        if not self._deaths_us:
            return True
        doublings = min(len(self._deaths_us) - 1, MOST_DOUBLINGS)
        pause_s = min(self.settings.restart_pause_s * 2**doublings, LONGEST_PAUSE_S)
        return bool(now_us - self._deaths_us[-1] >= pause_s * 1e6)

    def _forgive_own_absence(self, now_us: int) -> None:
        """Who was stopped itself, with the whole machine perhaps, has heard nobody and may judge nobody."""
        last_us, self._decided_us = self._decided_us, now_us
        if last_us is not None and now_us - last_us > self.settings.silence_s * 0.5e6:
            for child in self.children.values():
                child.heard_us = now_us
