"""The restart policy: settings, and pure decisions about children. Times are monotonic µs.

docs/architecture.md has the table of what ends, kills or replaces a child. Silence counts only while the supervisor
itself is on time: of the time between two decisions, at most `LATE_US`. A child that is silent for less than
`silence_s` is killed only if it also *stands still*: the kernel reports it as stopped or asleep, and no thread of it
used processor time.
"""

from __future__ import annotations

import enum
from collections import deque
from dataclasses import dataclass, field
from typing import Annotated

from pydantic import Field

from relaygr.runtime.settings import Section
from relaygr.worker.exits import Exit
from relaygr.worker.supervisor.heartbeat import ChildPhase, Heartbeat
from relaygr.worker.supervisor.records import ProcessStat

CHILDREN = 2
LONGEST_PAUSE_S = 60.0
STOP_S = 15.0
"""How long a child that has drained may take to send its last results and to close its files."""
LATE_US = 300_000
"""The longest time between two decisions of a supervisor that is on time."""
_STILL = "ST"
"""The kernel's states of a process that is asleep or stopped."""
MOST_DOUBLINGS = 30


class SupervisorSettings(Section):
    """`relaygr worker --standby`: when a child counts as hung, and how often it is replaced."""

    silence_s: Annotated[
        float, Field(ge=2, description="a standby or active child that sends no heartbeat for this long is killed")
    ] = 3.0
    standstill_s: Annotated[
        float,
        Field(
            ge=0.5,
            description="a standby or active child that for this long sends no heartbeat, uses no processor time, "
            "and is stopped or asleep is killed",
        ),
    ] = 1.0
    poll_silence_s: Annotated[
        float,
        Field(
            ge=10,
            description="an active child whose poll thread does not poll for this long is killed; its requests to a "
            "broker that is away end earlier",
        ),
    ] = 20.0
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
    """Time of its last heartbeat; before the first one, its start. In the time that counts."""
    phase: ChildPhase = ChildPhase.PREPARING
    heartbeat: Heartbeat | None = None
    killed: bool = False
    """Whether a kill was decided and the process has not ended yet."""
    stat: ProcessStat | None = None
    still_us: int = 0
    """Since when its process stands still, in the same time."""


class PolicyState(enum.Enum):
    """The state of the supervision."""

    STARTING = enum.auto()
    """No child was a standby or active yet, so the settings may be wrong."""
    RUNNING = enum.auto()
    ENDING = enum.auto()
    """All children end, and no other one is started."""


@dataclass(frozen=True, slots=True)
class Action:
    """The supervisor's next action: `end` both children, or else `kill` some, then `start` one."""

    kill: tuple[int, ...] = ()
    start: bool = False
    end: Exit | None = None


@dataclass(slots=True)
class RestartPolicy:
    """The `note_*` methods record events, `decide` returns the next action."""

    settings: SupervisorSettings
    children: dict[int, ChildState] = field(default_factory=dict)
    deaths: int = 0
    """Children that ended before the supervisor was stopped."""
    state: PolicyState = PolicyState.STARTING
    _deaths_us: deque[int] = field(default_factory=deque)
    _end: Exit = Exit.FAILED
    """The code of the end."""
    _counted_us: int = 0
    """The time in which this supervisor was on time. Only that counts for silence."""
    _counted_at_us: int | None = None

    def note_started(self, number: int, now_us: int) -> None:
        self.children[number] = ChildState(number, self._count(now_us))

    def note_adopted(self, number: int, phase: ChildPhase, now_us: int) -> None:
        """A child of an earlier supervisor, which was in this phase."""
        self.children[number] = ChildState(number, self._count(now_us), phase)
        self._note_phase(phase)

    def note_heartbeat(self, number: int, heartbeat: Heartbeat, now_us: int) -> None:
        child = self.children[number]
        child.phase, child.heartbeat, child.heard_us = heartbeat.phase, heartbeat, self._count(now_us)
        self._note_phase(heartbeat.phase)

    def note_stat(self, number: int, stat: ProcessStat | None, now_us: int) -> None:
        """The kernel's view of the child. None if it is unknown."""
        child, counted_us = self.children[number], self._count(now_us)
        if stat is None or stat != child.stat or stat.state not in _STILL:
            child.still_us = counted_us
        child.stat = stat

    def note_ended(self, number: int, code: int, now_us: int) -> None:
        """`code` is negative for a signal, as in subprocess."""
        child = self.children.pop(number)
        self.deaths += 1
        self._deaths_us.append(now_us)
        if code == Exit.FENCED:
            self._end_with(Exit.FENCED)
        elif code >= 0 and self.state is PolicyState.STARTING and not child.killed:
            # The settings are wrong, so the next child would end in the same way.
            self._end_with(Exit(code) if code in set(Exit) else Exit.FAILED)

    def decide(self, now_us: int) -> Action:
        """The action for `now_us`."""
        counted_us = self._count(now_us)
        while self._deaths_us and now_us - self._deaths_us[0] > self.settings.restart_window_s * 1e6:
            self._deaths_us.popleft()
        too_many = len(self._deaths_us) > self.settings.restarts_max
        if too_many and not self.children and self.state is not PolicyState.ENDING:
            self._end_with(Exit.FAILED)
        if self.state is PolicyState.ENDING:
            return Action(end=self._end)
        silent = tuple(number for number, child in self.children.items() if self._hangs(child, counted_us))
        for number in silent:
            self.children[number].killed = True
        return Action(kill=silent, start=not too_many and self._needs_child(now_us))

    @property
    def active(self) -> ChildState | None:
        """The child that holds the lock: the active one, else one that stops and may still hold it."""
        for phase in (ChildPhase.ACTIVE, ChildPhase.STOPPING):
            for child in self.children.values():
                if child.phase is phase:
                    return child
        return None

    def _hangs(self, child: ChildState, counted_us: int) -> bool:
        settings, heartbeat = self.settings, child.heartbeat
        silent_s = (counted_us - child.heard_us) / 1e6
        if child.killed:
            return False
        if child.phase is ChildPhase.PREPARING:
            return silent_s > settings.start_timeout_s
        if child.phase is ChildPhase.STOPPING:
            return silent_s > STOP_S
        still_s = (counted_us - child.still_us) / 1e6 if child.stat is not None else 0.0
        stands_still = min(silent_s, still_s) > settings.standstill_s
        polls = heartbeat is None or heartbeat.poll_silent_ms <= settings.poll_silence_s * 1000
        return silent_s > settings.silence_s or stands_still or not polls

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

    def _note_phase(self, phase: ChildPhase) -> None:
        if self.state is PolicyState.STARTING and phase is not ChildPhase.PREPARING:
            self.state = PolicyState.RUNNING

    def _end_with(self, code: Exit) -> None:
        self.state, self._end = PolicyState.ENDING, code

    def _count(self, now_us: int) -> int:
        """The time that counts, which stands still while the supervisor is late."""
        last_us, self._counted_at_us = self._counted_at_us, now_us
        self._counted_us += min(now_us - last_us, LATE_US) if last_us is not None else 0
        return self._counted_us
