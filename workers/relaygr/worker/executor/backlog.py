"""Whether more ranking work can end in time. Pure decisions.

Ranking work is admitted only if it can end in time without making admitted work late. `Backlog` adds the demands in
the order of the deadlines. So above capacity the queue holds only work that will be answered, and goodput does not
collapse. docs/scheduling.md says what each rule is worth.
"""

from __future__ import annotations

import bisect
import math

from relaygr.schemas.messages import Path
from relaygr.worker.executor.schedulable import SchedulableWork

OWN_WEIGHT = 0.05
_OWN_MAX_STEP_US = 1_000.0
"""One request counts with at most twice the average own time plus this, so that one stall changes little."""
_SLOWDOWN_WEIGHT = 0.2
SLOWDOWN_SAMPLE_US = 10_000.0
"""Demand over which the slowdown is measured."""
_MAX_SLOWDOWN = 8.0
_MISS_STEP = 0.05
_MISS_SHARE = 0.01
_MAX_MARGIN = 1.5
_LEAST_WAIT_LIMIT = 0.25
_REFUSED_STEP = 0.02
_ANSWERED_STEP = 0.005
"""With these two steps, the limit falls while more than a fifth of the requests are refused."""
_WAIT_LIMIT_PER_IDLE_S = 1.0
"""A second without work restores the limit, however few requests a worker answers in it."""
_DISPLACES_FROM = 0.75
"""Limit of the wait from which shorter work displaces long work: while many are refused, none would ever end."""
_MOST_RESERVED = 0.5
"""The largest part of the queue that is reserved for requests whose prefix is ready."""
_RESERVED_PER_LOST_LIMIT = 2.0
"""All of it is reserved once a quarter of the limit is lost."""


class Backlog:
    """The ranking work that was admitted and has not ended: its demand for time of the device thread, by deadline.

    It also keeps the measured figures that admission needs: the worker's own time of a request by path, and how far to
    trust predictions. The device thread writes; other threads may read figures that are one change old.
    """

    def __init__(self) -> None:
        self.total_us = 0.0
        self.margin = 1.0
        """Predictions are multiplied by this. It rises with each admitted request that was not answered in time, and
        falls with each that was, so that about `_MISS_SHARE` of them are missed when there is no room to spare."""
        self.wait_limit = 1.0
        """The largest part of its time, from when it was sent, that a new request may wait: on its way here and for
        admitted work. It falls with each request that is refused or late, and rises with each that is answered and
        while the device thread rests. With a limit of 1 every admitted request of an overloaded worker would wait until
        just before its deadline, where a small error makes it late, and only cheap ones would find room."""
        self.own_us = dict.fromkeys(Path, 0.0)
        """The worker's *own time* of a request, by path: time of the device thread outside of forwards."""
        self.answer_us = 0.0
        """The part of the own time that follows the forward."""
        self.prepare_us = 0.0
        """The part of the own time that a look-up takes, on average over all paths."""
        self.slowdown = 1.0
        """Time in which the device thread does 1 µs of demand. It is above 1 where refusals, other threads and the
        machine take time, too. Pre-infer does not count: beyond its share it takes only time that admitted work can
        spare."""
        self.preinfer_share = 0.0
        """The part of the device time that is guaranteed to pre-infer: 0 while no pre-infer waits."""
        self.done_us = 0.0
        """Demand that was done since `busy_since_us`."""
        self.preinfer_us = 0.0
        """Device time of pre-infer since `busy_since_us`."""
        self.busy_since_us: int | None = None
        """Since when the device thread has not been idle."""
        self.expected_us = 0.0
        """Expected demand of a request in the mailbox: the average of earlier requests, refused ones included."""
        self.handed_over = 0
        """Requests that the poll thread has put into the mailbox. Only that thread writes it."""
        self.looked_up = 0
        """Requests that the device thread has taken out of the mailbox."""
        self.looking_up_since_us = 0
        """When the first request of this step was looked up; 0 if none was."""
        self.idle_since_us: int | None = None
        """Since when the device thread has had nothing to do; None while it has."""
        self._displaceable: int | None = None
        """The `id` of the longest queued work that may be displaced by shorter work."""
        self.computes_until_us = 0
        """When the device ends the chunk that it computes, as predicted; when it ended the last one that was part of
        admitted work."""
        self._by_deadline: list[tuple[float, int, float]] = []
        self._entries: dict[int, tuple[float, int, float]] = {}
        self._chunk: tuple[int, float] | None = None
        """The work of the chunk that the device computes, by its `id`, and the chunk's part of its demand."""

    def put(self, work: SchedulableWork, latest_start_us: int) -> None:
        """Adds the work with its present demand; work that is there already is moved."""
        key, demand_us = id(work), work.remaining_us
        begun_us = self._chunk[1] if self._chunk is not None and key == self._chunk[0] else 0.0
        entry = (latest_start_us + demand_us, key, max(0.0, demand_us - begun_us))
        if key in self._entries:
            if self._entries[key] == entry:
                return
            self.drop(work)
        self._entries[key] = entry
        bisect.insort(self._by_deadline, entry)
        self.total_us += entry[2]

    def drop(self, work: SchedulableWork) -> None:
        """Removes the work, if it is there."""
        entry = self._entries.pop(id(work), None)
        if entry is not None:
            del self._by_deadline[bisect.bisect_left(self._by_deadline, entry)]
            # Sums of floats drift: an empty backlog begins anew.
            self.total_us = self.total_us - entry[2] if self._entries else 0.0

    def entry(self, work: SchedulableWork) -> tuple[float, int, float] | None:
        """When the work must have ended, its `id`, and the demand that counts; None if it is not there."""
        return self._entries.get(id(work))

    def note_displaceable(self, work: SchedulableWork | None) -> None:
        """Notes the longest queued work that may be displaced by shorter work."""
        self._displaceable = None if work is None else id(work)

    @property
    def displaceable(self) -> tuple[float, int, float] | None:
        """The present entry of that work: its demand falls with each chunk."""
        return None if self._displaceable is None else self._entries.get(self._displaceable)

    def begin_chunk(self, work: SchedulableWork, chunk_us: float, now_us: int) -> None:
        """Notes that the device begins a chunk of this work, which may be admitted now, later or never. While it is,
        the chunk's demand is the time until it ends.
        """
        self._chunk = (id(work), chunk_us)
        if id(work) in self._entries:
            self.put(work, work.latest_start_us)
        # Last: the poll thread, which may ask meanwhile, rather counts too little than the chunk twice.
        self.computes_until_us = now_us + round(chunk_us)

    def end_chunk(self, now_us: int) -> None:
        """Notes that the chunk ended, if one was begun. Its work must be put again, or dropped."""
        if self._chunk is not None:
            # A simulated poll thread asks for times before the end.
            self.computes_until_us = now_us if self._computes_admitted else 0
            self._chunk = None

    @property
    def _computes_admitted(self) -> bool:
        chunk = self._chunk
        return chunk is None or chunk[0] in self._entries

    def room_us(
        self,
        must_end_us: int,
        now_us: int,
        preinfer_share: float = 0.0,
        *,
        unread_us: float = 0.0,
        displacing: bool = False,
    ) -> float:
        """The largest demand of other work that then ends by `must_end_us` and makes no admitted work late. Admitted
        work that is late already is not considered.

        `preinfer_share`: the part of the device time that pre-infer gets meanwhile, which the slowdown leaves out.
        `unread_us`: demand that is ahead of it and not admitted. `displacing`: as if the longest work that may be
        displaced were gone.
        """
        slowdown = self.margin * self.slowdown / (1 - preinfer_share)
        later, gone = self._later(must_end_us), self.displaceable if displacing else None
        ahead_us = self._ahead_us(later, gone, now_us, unread_us)
        if not self._entries and not ahead_us:
            # The margin is for queues: without one, the first request after a burst needs none.
            return must_end_us - now_us
        # The share of pre-infer delays only the work ahead: when the new work's turn comes, it precedes pre-infer.
        room_us = (must_end_us - now_us - slowdown * ahead_us) / self.margin
        for entry in later:
            if entry == gone:
                continue
            ahead_us += entry[2]
            spare_us = (entry[0] - now_us - slowdown * ahead_us) / self.margin
            if 0 <= spare_us < room_us:
                room_us = spare_us
        return room_us

    def may_wait(
        self,
        must_end_us: int,
        now_us: int,
        sent_us: int,
        *,
        unread_us: float = 0.0,
        ready_part: float = 1.0,
        displacing: bool = False,
    ) -> bool:
        """Whether a new request, sent at `sent_us`, would wait for no longer than `wait_limit` allows.

        `ready_part`: the part of its demand that is no computation of a prefix. The smaller it is, the more of the
        queue is kept for others: many requests whose prefix is ready are answered instead of few long ones (trunk
        reservation, as telephone networks do).
        """
        if self.wait_limit >= 1.0:
            return True
        longest_us = self.wait_limit * (must_end_us - sent_us) - (now_us - sent_us)
        if longest_us < 0:
            # If messages come faster than they are read, newer ones have more time left than this one.
            return False
        # Not the time in transit: a worker without a backlog serves a request whatever it needs.
        reserved = min(_MOST_RESERVED, _RESERVED_PER_LOST_LIMIT * (1.0 - self.wait_limit))
        gone = self.displaceable if displacing else None
        wait_us = self.margin * self.slowdown * self._ahead_us(self._later(must_end_us), gone, now_us, unread_us)
        return wait_us <= longest_us * max(1.0 - reserved, ready_part)

    def _later(self, must_end_us: int) -> list[tuple[float, int, float]]:
        """The entries that work which must end by then precedes."""
        return self._by_deadline[bisect.bisect_left(self._by_deadline, (must_end_us + 1,)) :]

    def _ahead_us(
        self,
        later: list[tuple[float, int, float]],
        gone: tuple[float, int, float] | None,
        now_us: int,
        unread_us: float,
    ) -> float:
        """The demand ahead of new work, which precedes the `later` entries, without the entry that is `gone`."""
        if self._computes_admitted:
            unread_us += max(0, self.computes_until_us - now_us)
        ahead_us = self.total_us + unread_us
        for entry in later:
            ahead_us -= entry[2]
        if gone is not None and gone not in later:
            ahead_us -= gone[2]
        return max(0.0, ahead_us)

    def spare_us(self, now_us: int, until_us: float, preinfer_share: float) -> float:
        """The largest demand of other work that may run now without making admitted work with a deadline up to
        `until_us` late. 0 if some of it is late already.
        """
        slowdown = self.slowdown / (1 - preinfer_share)
        spare_us, ahead_us = math.inf, 0.0
        for due_us, _, demand_us in self._by_deadline:
            if due_us > until_us:
                break
            ahead_us += demand_us
            spare_us = min(spare_us, (due_us - now_us) / self.margin - slowdown * ahead_us)
        return max(0.0, spare_us)

    @property
    def is_busy(self) -> bool:
        """Whether a new request may have to wait, or would be refused. For any thread."""
        return self.total_us > 0 or self.handed_over > self.looked_up or self.wait_limit < 1.0

    @property
    def predicted_us(self) -> int:
        """The time that a new request must have left in addition to its own work: the time until the admitted work is
        done, and more while many requests are refused. For any thread.
        """
        chunk = self._chunk
        chunk_us = chunk[1] if chunk is not None and self._computes_admitted else 0.0
        return self._needed_us(self.total_us + chunk_us)

    @property
    def queued_us(self) -> int:
        """The same without the chunk that the device computes, as results tell it."""
        return self._needed_us(self.total_us)

    def _needed_us(self, demand_us: float) -> int:
        return int(demand_us * self.margin * self.slowdown / self.wait_limit)

    def is_hopeless(self, must_end_us: int, now_us: int, sent_us: int | None = None) -> bool:
        """Whether a request that is still undecoded cannot be answered in time, however cheap it is. With `sent_us`: or
        would have to wait for longer than `wait_limit` allows.

        Requests in the mailbox are looked up first. For any thread.
        """
        # The device thread decides whether this request displaces the longest work.
        unread_us, displacing = (self.handed_over - self.looked_up) * self.expected_us, self.displaces
        if sent_us is not None and not self.may_wait(
            must_end_us, now_us, sent_us, unread_us=unread_us, displacing=displacing
        ):
            return True
        room_us = self.room_us(must_end_us, now_us, unread_us=unread_us, displacing=displacing)
        return room_us < self.own_us[Path.HBM]

    @property
    def displaces(self) -> bool:
        """Whether shorter work displaces long work: not while many requests are refused."""
        return self.wait_limit >= _DISPLACES_FROM

    def missed(self) -> None:
        """Notes that an admitted request was answered late, or not at all because it would have been late."""
        self.margin = min(_MAX_MARGIN, self.margin + _MISS_STEP)
        self.refused()

    def refused(self) -> None:
        """Notes a request that was refused, or cut short, because other work leaves no time for it."""
        self.wait_limit = max(_LEAST_WAIT_LIMIT, self.wait_limit - _REFUSED_STEP)

    def observe(self, path: Path, demand_us: float, answer_us: float, in_time: bool) -> None:
        """Notes a request that was ranked: the time to write its result, and whether it ended in time."""
        self.done_us += demand_us
        # Written out: a call for each average would be most of the cost.
        own_us, moved_us = self.own_us[path], self.prepare_us + answer_us
        self.own_us[path] = own_us + OWN_WEIGHT * (min(moved_us, 2 * own_us + _OWN_MAX_STEP_US) - own_us)
        self.answer_us += OWN_WEIGHT * (min(answer_us, 2 * self.answer_us + _OWN_MAX_STEP_US) - self.answer_us)
        self.wait_limit = min(1.0, self.wait_limit + _ANSWERED_STEP)
        if in_time:
            self.margin = max(1.0, self.margin - _MISS_STEP * _MISS_SHARE)
        else:
            self.missed()

    def observe_look_ups(self, spent_us: int, requests: int) -> None:
        """Notes the time that the device thread took to look up requests from the mailbox."""
        spent_us_each = min(spent_us / requests, 2 * self.prepare_us + _OWN_MAX_STEP_US)
        self.prepare_us += _SLOWDOWN_WEIGHT * (spent_us_each - self.prepare_us)

    def observe_slowdown(self, now_us: int) -> None:
        """Compares the demand that was done with the time that it took. The device thread was busy until now."""
        if self.busy_since_us is None:
            return
        took_us = now_us - self.busy_since_us - self.preinfer_us
        sample = min(max(took_us / self.done_us, 1.0), _MAX_SLOWDOWN)
        self.slowdown += _SLOWDOWN_WEIGHT * (sample - self.slowdown)
        self.busy_since_us, self.done_us, self.preinfer_us = now_us, 0.0, 0.0

    def rest(self, now_us: int) -> None:
        """Notes that the device thread has nothing to do, so nothing slows it down."""
        self.busy_since_us, self.idle_since_us = None, now_us
        self.done_us = self.preinfer_us = 0.0
        self.slowdown += _SLOWDOWN_WEIGHT * (1.0 - self.slowdown)

    def wake(self, now_us: int) -> None:
        """Notes that the device thread, which rested, looks for work again."""
        if self.idle_since_us is not None:
            idle_s = (now_us - self.idle_since_us) / 1e6
            self.wait_limit = min(1.0, self.wait_limit + _WAIT_LIMIT_PER_IDLE_S * idle_s)
            self.idle_since_us = None
