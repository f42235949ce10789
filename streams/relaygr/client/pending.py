"""The table of open requests and their timers. No I/O, no clock, no lock.

    add ---> WAITING --answer--> ended                                  (ON_TIME)
                |
                +---deadline---> GRACE --answer--> ended                (LATE)
                                   |
                                   +--grace over--> OVERDUE --answer--> ended   (LATE)
                                                      |
                                                      +--lost_after--> lost

An unanswered request counts towards the bound on requests in flight until its grace is over. A request is
lost if no worker answers it in time: after a worker dies, its successor answers the requests that expired
meanwhile, some seconds later. A request that Kafka did not acknowledge, and that is not sent again, is lost as soon as
its grace is over. The number of overdue requests is bounded as well; beyond the bound the oldest one is lost.

The table remembers the ids of ended and lost requests, up to a bound; it forgets the oldest first. An answer
to an ended request is a DUPLICATE, to a lost request AFTER_LOSS, to any other id UNKNOWN.

All times are microseconds on the gateway's monotonic clock. The caller calls `due` at `next_due_us` or soon
after; an answer that arrives between a deadline and that call is LATE as well. The caller makes sure that only
one thread at a time uses the table.
"""

from __future__ import annotations

import enum
import heapq
import itertools
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from relaygr.client.outcome import QueueFull, RankOutcome, RequestIdInUse
from relaygr.schemas.record import record

if TYPE_CHECKING:
    from relaygr.client.tracing import RankTrace

# The heap keeps the timers of ended requests until it holds more than this many timers for each open request.
_STALE_TIMERS_PER_REQUEST: Final = 3
_FEW_TIMERS: Final = 1024


class RequestPhase(enum.StrEnum):
    """The phase of an open request."""

    WAITING = "waiting"
    GRACE = "grace"
    OVERDUE = "overdue"


class AnswerMatch(enum.StrEnum):
    """How an answer relates to the requests of this client."""

    ON_TIME = "on_time"
    LATE = "late"
    DUPLICATE = "duplicate"
    AFTER_LOSS = "after_loss"
    UNKNOWN = "unknown"


class Timer(enum.StrEnum):
    """The effect of a timer when it is due."""

    TIME_OUT = "time_out"
    GRACE_OVER = "grace_over"
    LOSE = "lose"
    RETRY = "retry"


@dataclass(slots=True, eq=False)
class PendingRequest:
    """An open request."""

    request_id: str
    sent_us: int
    deadline_us: int
    sent_wall_us: int
    """When the request was sent, on the wall clock; used for the clock offset."""
    echo_us: int
    """The request's `sent_at_us`. A ranked result repeats it."""
    candidates: int
    """The number of candidates, which is the number of rows of the scores."""
    future: Future[RankOutcome]
    partition: int = -1
    """The partition of its user; -1 if the client does not fail fast."""
    phase: RequestPhase = RequestPhase.WAITING
    acknowledged: bool = False
    given_up: bool = False
    """Its message was not acknowledged, and is not sent again: nothing waits for an answer after its grace."""
    send_again: Callable[[], None] | None = None
    """Sends the request again; set while a retry is planned."""
    traceparent: bytes | None = None
    """The header that its message carries."""
    trace: RankTrace | None = None
    """Set if its trace is recorded."""


@record(frozen=True, slots=True)
class Answer:
    """The request that an answer belongs to; `entry` is set if ON_TIME or LATE."""

    match: AnswerMatch
    entry: PendingRequest | None = None
    untold: bool = False
    """The deadline has passed, but its timer has not fired yet: the caller has not got `timed_out` yet."""


@record(frozen=True, slots=True)
class Due:
    """A timer that is due."""

    timer: Timer
    entry: PendingRequest


class PendingTable:
    """Open requests by id, their timers, and the ids of requests that ended recently."""

    def __init__(self, max_in_flight: int, grace_us: int, remembered: int, lost_after_us: int = 0) -> None:
        """A request is lost `lost_after_us` after its deadline, but not before its grace is over."""
        self._max_in_flight = max_in_flight
        self._grace_us = grace_us
        self._lost_after_us = max(lost_after_us, grace_us)
        self._overdue: dict[str, PendingRequest] = {}
        self._max_remembered = remembered
        self._entries: dict[str, PendingRequest] = {}
        self._timers: list[tuple[int, int, Timer, PendingRequest]] = []
        self._order = itertools.count()
        self._answered: dict[str, bool] = {}
        self._waiting = 0

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def waiting(self) -> int:
        """Requests whose caller still waits."""
        return self._waiting

    @property
    def next_due_us(self) -> int | None:
        """When the next timer is due. The timer may belong to a request that has ended."""
        return self._timers[0][0] if self._timers else None

    def add(self, entry: PendingRequest) -> None:
        """Adds a request. Raises QueueFull at the bound, RequestIdInUse for an id that is or was in use."""
        in_flight = len(self._entries) - len(self._overdue)
        if in_flight >= self._max_in_flight:
            raise QueueFull(
                f"{in_flight} ranking requests are in flight: max_in_flight is {self._max_in_flight}. "
                "Send more slowly, or raise max_in_flight"
            )
        if entry.request_id in self._entries or entry.request_id in self._answered:
            raise RequestIdInUse(f"request id {entry.request_id} was used already: each request needs its own")
        self._entries[entry.request_id] = entry
        self._waiting += 1
        self._push(entry.deadline_us, Timer.TIME_OUT, entry)

    def discard(self, entry: PendingRequest) -> bool:
        """Removes a request that was not sent. Returns False if the request has ended already."""
        if self._entries.get(entry.request_id) is not entry:
            return False
        del self._entries[entry.request_id]
        self._overdue.pop(entry.request_id, None)
        if entry.phase is RequestPhase.WAITING:
            self._waiting -= 1
        return True

    def retry(self, entry: PendingRequest, send_again: Callable[[], None], at_us: int) -> bool:
        """Plans to send a request again. Returns False if its deadline comes first, or if it has ended."""
        if self._entries.get(entry.request_id) is not entry or entry.phase is not RequestPhase.WAITING:
            return False
        if at_us >= entry.deadline_us:
            return False
        entry.send_again = send_again
        self._push(at_us, Timer.RETRY, entry)
        return True

    def give_up(self, entry: PendingRequest, now_us: int) -> None:
        """Notes that the request is not sent again. One that is overdue is lost at once."""
        entry.given_up = not entry.acknowledged
        if entry.given_up and entry.request_id in self._overdue:
            self._push(now_us, Timer.LOSE, entry)

    def answer(self, request_id: str, now_us: int) -> Answer:
        """Finds the request of an answer and ends it."""
        entry = self._entries.pop(request_id, None)
        if entry is None:
            answered = self._answered.get(request_id)
            if answered is None:
                return Answer(AnswerMatch.UNKNOWN)
            return Answer(AnswerMatch.DUPLICATE if answered else AnswerMatch.AFTER_LOSS)
        self._remember(request_id, answered=True)
        if entry.phase is not RequestPhase.WAITING:
            self._overdue.pop(request_id, None)
            return Answer(AnswerMatch.LATE, entry)
        self._waiting -= 1
        if now_us >= entry.deadline_us:
            return Answer(AnswerMatch.LATE, entry, untold=True)
        return Answer(AnswerMatch.ON_TIME, entry)

    def time_out(self, entry: PendingRequest) -> bool:
        """Ends the wait for a request; an answer to it can still be matched. Returns False if the wait has ended."""
        if self._entries.get(entry.request_id) is not entry or entry.phase is not RequestPhase.WAITING:
            return False
        entry.phase = RequestPhase.GRACE
        if entry.send_again is not None:
            entry.send_again, entry.given_up = None, not entry.acknowledged
        self._waiting -= 1
        self._push(entry.deadline_us + self._grace_us, Timer.GRACE_OVER, entry)
        return True

    def _become_overdue(self, entry: PendingRequest) -> list[Due]:
        """Stops counting the request towards the bound. If too many are overdue, the oldest is lost."""
        if entry.given_up:
            return [self._lose(entry)]
        entry.phase = RequestPhase.OVERDUE
        self._overdue[entry.request_id] = entry
        self._push(entry.deadline_us + self._lost_after_us, Timer.LOSE, entry)
        if len(self._overdue) <= self._max_remembered:
            return []
        return [self._lose(next(iter(self._overdue.values())))]

    def _lose(self, entry: PendingRequest) -> Due:
        del self._entries[entry.request_id]
        self._overdue.pop(entry.request_id, None)
        self._remember(entry.request_id, answered=False)
        return Due(Timer.LOSE, entry)

    def due(self, now_us: int) -> list[Due]:
        """Applies the timers that are due, and returns them in order."""
        fired = []
        while self._timers and self._timers[0][0] <= now_us:
            _, _, timer, entry = heapq.heappop(self._timers)
            if self._entries.get(entry.request_id) is not entry:
                continue
            if timer is Timer.TIME_OUT:
                if self.time_out(entry):
                    fired.append(Due(timer, entry))
            elif timer is Timer.GRACE_OVER:
                fired.extend(self._become_overdue(entry))
            elif timer is Timer.LOSE:
                fired.append(self._lose(entry))
            elif entry.phase is RequestPhase.WAITING:
                fired.append(Due(timer, entry))
        return fired

    def clear(self) -> list[PendingRequest]:
        """Removes all requests. Returns those whose caller still waits."""
        waiting = [entry for entry in self._entries.values() if entry.phase is RequestPhase.WAITING]
        self._entries.clear()
        self._overdue.clear()
        self._timers.clear()
        self._waiting = 0
        return waiting

    def _push(self, at_us: int, timer: Timer, entry: PendingRequest) -> None:
        heapq.heappush(self._timers, (at_us, next(self._order), timer, entry))
        if len(self._timers) > _FEW_TIMERS + _STALE_TIMERS_PER_REQUEST * len(self._entries):
            self._timers = [item for item in self._timers if self._entries.get(item[3].request_id) is item[3]]
            heapq.heapify(self._timers)

    def _remember(self, request_id: str, answered: bool) -> None:
        self._answered[request_id] = answered
        if len(self._answered) > self._max_remembered:
            del self._answered[next(iter(self._answered))]
