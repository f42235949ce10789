"""Whether more ranking work can end in time. Pure decisions.

Ranking work is admitted only if it can end in time without making admitted work late. `Backlog` adds the demands in
the order of the deadlines. So above capacity the queue holds only work that will be answered, and goodput does not
collapse. docs/scheduling.md says what each rule is worth.
"""

from __future__ import annotations

import bisect
import math
from typing import NamedTuple

from relaygr.schemas.messages import Path
from relaygr.worker.executor.measured import Measured
from relaygr.worker.executor.schedulable import SchedulableWork

_DISPLACES_FROM = 0.75
"""Limit of the wait from which shorter work displaces long work: while many are refused, none would ever end."""
_MOST_RESERVED = 0.5
"""The largest part of the queue that is reserved for requests whose prefix is ready."""
_RESERVED_PER_LOST_LIMIT = 2.0
"""All of it is reserved once a quarter of the limit is lost."""


class Demand(NamedTuple):
    """The demand of one piece of admitted work for time of the device thread."""

    due_us: float
    """When the work must have ended."""
    work_id: int
    demand_us: float
    """Without the chunk that the device computes."""


class Backlog:
    """The ranking work that was admitted and has not ended: its demand for time of the device thread, by deadline.

    The device thread writes; other threads may read figures that are one change old.
    """

    def __init__(self) -> None:
        self.total_us = 0.0
        self.measured = Measured()
        self.preinfer_share = 0.0
        """The part of the device time that is guaranteed to pre-infer: 0 while no pre-infer waits."""
        self.handed_over = 0
        """Requests that the poll thread has put into the mailbox. Only that thread writes it."""
        self.looked_up = 0
        """Requests that the device thread has taken out of the mailbox."""
        self._displaceable: int | None = None
        """The `id` of the longest queued work that may be displaced by shorter work."""
        self.computes_until_us = 0
        """When the device ends the chunk that it computes, as predicted; when it ended the last one that was part of
        admitted work."""
        self._by_deadline: list[Demand] = []
        self._demands: dict[int, Demand] = {}
        self._chunk: tuple[int, float] | None = None
        """The work of the chunk that the device computes, by its `id`, and the chunk's part of its demand."""

    def hand_over(self) -> None:
        """The poll thread puts a request into the mailbox."""
        self.handed_over += 1

    def take_over(self) -> None:
        """The device thread takes a request out of the mailbox."""
        self.looked_up += 1

    def share_with_preinfer(self, share: float) -> None:
        """This part of the device time is guaranteed to pre-infer from now on."""
        self.preinfer_share = share

    def put(self, work: SchedulableWork, latest_start_us: int) -> None:
        """Adds the work with its present demand; work that is there already is moved."""
        key, demand_us = id(work), work.remaining_us
        begun_us = self._chunk[1] if self._chunk is not None and key == self._chunk[0] else 0.0
        demand = Demand(latest_start_us + demand_us, key, max(0.0, demand_us - begun_us))
        if key in self._demands:
            if self._demands[key] == demand:
                return
            self.drop(work)
        self._demands[key] = demand
        bisect.insort(self._by_deadline, demand)
        self.total_us += demand.demand_us

    def drop(self, work: SchedulableWork) -> None:
        """Removes the work, if it is there."""
        demand = self._demands.pop(id(work), None)
        if demand is not None:
            del self._by_deadline[bisect.bisect_left(self._by_deadline, demand)]
            # Sums of floats drift: an empty backlog begins anew.
            self.total_us = self.total_us - demand.demand_us if self._demands else 0.0

    def demand_of(self, work: SchedulableWork) -> Demand | None:
        """None if the work is not there."""
        return self._demands.get(id(work))

    def note_displaceable(self, work: SchedulableWork | None) -> None:
        """Notes the longest queued work that may be displaced by shorter work."""
        self._displaceable = None if work is None else id(work)

    @property
    def displaceable(self) -> Demand | None:
        """The present demand of that work, which falls with each chunk."""
        return None if self._displaceable is None else self._demands.get(self._displaceable)

    def begin_chunk(self, work: SchedulableWork, chunk_us: float, now_us: int) -> None:
        """Notes that the device begins a chunk of this work, which may be admitted now, later or never. While it is,
        the chunk's demand is the time until it ends.
        """
        self._chunk = (id(work), chunk_us)
        if id(work) in self._demands:
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
        return chunk is None or chunk[0] in self._demands

    def room_us(
        self,
        must_end_us: int,
        now_us: int,
        *,
        sent_us: int | None = None,
        preinfer_share: float = 0.0,
        unread_us: float = 0.0,
        displacing: bool = False,
    ) -> float:
        """The largest demand of other work that then ends by `must_end_us` and makes no admitted work late. Admitted
        work that is late already is not considered.

        `sent_us`: when a new request was sent, for which there is no room (0) if it would wait for longer than
        `wait_limit` allows. `preinfer_share`: the part of the device time that pre-infer gets meanwhile, which the
        slowdown leaves out. `unread_us`: demand that is ahead of it and not admitted. `displacing`: as if the longest
        work that may be displaced were gone.
        """
        if sent_us is not None and not self.may_wait(
            must_end_us, now_us, sent_us, unread_us=unread_us, displacing=displacing
        ):
            return 0.0
        margin = self.measured.margin
        slowdown = margin * self.measured.slowdown / (1 - preinfer_share)
        later, gone = self._later(must_end_us), self.displaceable if displacing else None
        ahead_us = self._ahead_us(later, gone, now_us, unread_us)
        if not self._demands and not ahead_us:
            # The margin is for queues: without one, the first request after a burst needs none.
            return must_end_us - now_us
        # The share of pre-infer delays only the work ahead: when the new work's turn comes, it precedes pre-infer.
        room_us = (must_end_us - now_us - slowdown * ahead_us) / margin
        for each in later:
            if each == gone:
                continue
            ahead_us += each.demand_us
            spare_us = (each.due_us - now_us - slowdown * ahead_us) / margin
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
        measured = self.measured
        if measured.wait_limit >= 1.0:
            return True
        longest_us = measured.wait_limit * (must_end_us - sent_us) - (now_us - sent_us)
        if longest_us < 0:
            # If messages come faster than they are read, newer ones have more time left than this one.
            return False
        # Not the time in transit: a worker without a backlog serves a request whatever it needs.
        reserved = min(_MOST_RESERVED, _RESERVED_PER_LOST_LIMIT * (1.0 - measured.wait_limit))
        gone = self.displaceable if displacing else None
        ahead_us = self._ahead_us(self._later(must_end_us), gone, now_us, unread_us)
        return measured.margin * measured.slowdown * ahead_us <= longest_us * max(1.0 - reserved, ready_part)

    def _later(self, must_end_us: int) -> list[Demand]:
        """The demands that work which must end by then precedes."""
        return self._by_deadline[bisect.bisect_left(self._by_deadline, (must_end_us + 1,)) :]

    def _ahead_us(self, later: list[Demand], gone: Demand | None, now_us: int, unread_us: float) -> float:
        """The demand ahead of new work, which precedes the `later` ones, without the one that is `gone`."""
        if self._computes_admitted:
            unread_us += max(0, self.computes_until_us - now_us)
        ahead_us = self.total_us + unread_us
        for each in later:
            ahead_us -= each.demand_us
        if gone is not None and gone not in later:
            ahead_us -= gone.demand_us
        return max(0.0, ahead_us)

    def spare_us(self, now_us: int, until_us: float, preinfer_share: float) -> float:
        """The largest demand of other work that may run now without making admitted work with a deadline up to
        `until_us` late. 0 if some of it is late already.
        """
        slowdown = self.measured.slowdown / (1 - preinfer_share)
        spare_us, ahead_us = math.inf, 0.0
        for due_us, _, demand_us in self._by_deadline:
            if due_us > until_us:
                break
            ahead_us += demand_us
            spare_us = min(spare_us, (due_us - now_us) / self.measured.margin - slowdown * ahead_us)
        return max(0.0, spare_us)

    @property
    def is_busy(self) -> bool:
        """Whether a new request may have to wait, or would be refused. For any thread."""
        return self.has_others or self.measured.wait_limit < 1.0

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
        return int(demand_us * self.measured.margin * self.measured.slowdown / self.measured.wait_limit)

    def is_hopeless(self, must_end_us: int, now_us: int, sent_us: int | None = None) -> bool:
        """Whether a request that is still undecoded cannot be answered in time, however cheap it is. With `sent_us`: or
        would have to wait for longer than `wait_limit` allows.

        Requests in the mailbox are looked up first. For any thread.
        """
        # The device thread decides whether this request displaces the longest work.
        room_us = self.room_us(
            must_end_us,
            now_us,
            sent_us=sent_us,
            unread_us=(self.handed_over - self.looked_up) * self.measured.expected_us,
            displacing=self.displaces,
        )
        return room_us <= 0 or room_us < self.measured.own_us[Path.HBM]

    @property
    def has_others(self) -> bool:
        """Whether other work is admitted, or waits in the mailbox."""
        return self.total_us > 0 or self.handed_over > self.looked_up

    @property
    def displaces(self) -> bool:
        """Whether shorter work displaces long work: not while many requests are refused."""
        return self.measured.wait_limit >= _DISPLACES_FROM
