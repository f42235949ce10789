"""The restart policy: settings, and pure decisions about children. Times are monotonic µs.

| a child                          | while                                     | result                            |
|----------------------------------|-------------------------------------------|-----------------------------------|
| ended, fenced                    | always                                    | all end, with Exit.FENCED         |
| ended by itself                  | none was ever a standby or active         | all end, with its code            |
| ended otherwise                  | at most `restarts_max` in the window      | replaced after a back-off         |
| ended otherwise                  | more, and another child is left           | no standby until deaths expire    |
| ended otherwise                  | more, and no child is left                | all end, with Exit.FAILED         |
| no heartbeat for `silence_s`     | standby or active                         | killed                            |
| no heartbeat for `start_timeout_s` | preparing, or taking over               | killed                            |
| active                           | alone                                     | a standby is started              |
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Annotated

from pydantic import Field

from relaygr.runtime.settings import Section
from relaygr.worker.exits import Exit
from relaygr.worker.supervisor.heartbeat import ChildPhase, Heartbeat

CHILDREN = 2
LONGEST_PAUSE_S = 60.0
MOST_DOUBLINGS = 30


class SupervisorSettings(Section):
    """`relaygr worker --standby`: when a child counts as hung, and how often it is replaced."""

    silence_s: Annotated[
        float, Field(ge=2, description="a standby or active child that sends no heartbeat for this long is killed")
    ] = 3.0
    start_timeout_s: Annotated[
        float,
        Field(gt=0, description="a child that loads or takes over and sends no heartbeat for this long is killed"),
    ] = 300.0
    restart_pause_s: Annotated[
        float,
        Field(ge=0, description="pause before a dead child is replaced; doubles with each death within the window"),
    ] = 1.0
    restarts_max: Annotated[
        int, Field(ge=0, description="deaths within the window up to which a dead child is replaced")
    ] = 5
    restart_window_s: Annotated[float, Field(gt=0, description="time after which a death no longer counts")] = 300.0


@dataclass(slots=True)
class ChildState:
    """The policy's record of one child."""

    number: int
    heard_us: int
    """Time of its last heartbeat; before the first one, its start."""
    heartbeat: Heartbeat | None = None
    killed: bool = False
    """Whether a kill was decided and the process has not ended yet."""

    @property
    def phase(self) -> ChildPhase:
        return ChildPhase.PREPARING if self.heartbeat is None else self.heartbeat.phase


@dataclass(frozen=True, slots=True)
class Action:
    """The supervisor's next action: `end` both children, or else `kill` some, then `start` one."""

    kill: tuple[int, ...] = ()
    start: bool = False
    end: Exit | None = None


@dataclass(slots=True)
class RestartPolicy:
    """The `note_*` methods record events, `decide` returns the next action. See the module's table."""

    settings: SupervisorSettings
    children: dict[int, ChildState] = field(default_factory=dict)
    deaths: int = 0
    """Children that ended before the supervisor was stopped."""
    was_well: bool = False
    """Whether a child ever became a standby or active, so the settings are valid."""
    _deaths_us: deque[int] = field(default_factory=deque)
    _end: Exit | None = None
    _decided_us: int | None = None

    def note_started(self, number: int, now_us: int) -> None:
        self.children[number] = ChildState(number, now_us)

    def note_heartbeat(self, number: int, heartbeat: Heartbeat, now_us: int) -> None:
        child = self.children[number]
        child.heartbeat, child.heard_us = heartbeat, now_us
        if heartbeat.phase is not ChildPhase.PREPARING:
            self.was_well = True

    def note_ended(self, number: int, code: int, now_us: int) -> None:
        """`code` is negative for a signal, as in subprocess."""
        child = self.children.pop(number)
        self.deaths += 1
        self._deaths_us.append(now_us)
        if code == Exit.FENCED:
            self._end = Exit.FENCED
        elif code >= 0 and not self.was_well and not child.killed:
            # The settings are wrong, so the next child would end in the same way.
            self._end = Exit(code) if code in set(Exit) else Exit.FAILED

    def decide(self, now_us: int) -> Action:
        """The action for `now_us`."""
        self._restart_silence_after_own_pause(now_us)
        while self._deaths_us and now_us - self._deaths_us[0] > self.settings.restart_window_s * 1e6:
            self._deaths_us.popleft()
        too_many = len(self._deaths_us) > self.settings.restarts_max
        if self._end is None and too_many and not self.children:
            self._end = Exit.FAILED
        if self._end is not None:
            return Action(end=self._end)
        silent = tuple(number for number, child in self.children.items() if self._is_silent(child, now_us))
        for number in silent:
            self.children[number].killed = True
        return Action(kill=silent, start=not too_many and self._needs_child(now_us))

    @property
    def active(self) -> ChildState | None:
        """The child that holds the lock."""
        return next((child for child in self.children.values() if child.phase is ChildPhase.ACTIVE), None)

    def _is_silent(self, child: ChildState, now_us: int) -> bool:
        preparing = child.phase is ChildPhase.PREPARING
        bound_s = self.settings.start_timeout_s if preparing else self.settings.silence_s
        return not child.killed and now_us - child.heard_us > bound_s * 1e6

    def _needs_child(self, now_us: int) -> bool:
        if len(self.children) >= CHILDREN:
            return False
        if self.children and self.active is None:
            return False
        if not self._deaths_us:
            return True
        doublings = min(len(self._deaths_us) - 1, MOST_DOUBLINGS)
        pause_s = min(self.settings.restart_pause_s * 2**doublings, LONGEST_PAUSE_S)
        return bool(now_us - self._deaths_us[-1] >= pause_s * 1e6)

    def _restart_silence_after_own_pause(self, now_us: int) -> None:
        """Ignores the silence of children during a pause of the supervisor, which could not receive heartbeats."""
        last_us, self._decided_us = self._decided_us, now_us
        if last_us is not None and now_us - last_us > self.settings.silence_s * 0.5e6:
            for child in self.children.values():
                child.heard_us = now_us
