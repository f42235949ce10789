"""The impressions of the last minutes, and when the next request arrives that a cut of a chunk would help.

Both belong to the device thread; the poll thread asks only `Impressions.is_leased`.
"""

from __future__ import annotations

import math
from collections import OrderedDict, deque
from collections.abc import Collection
from typing import Final

from relaygr.worker.executor.work import WORK_BYTES, Announcement, Impression, ResolvedPrefix

REMEMBERED: Final = 65_536
"""Impressions of a minute at 1,000 a second, which is more than one worker serves."""
REMEMBERED_US: Final = 120_000_000
"""Twice the longest life of a job: a job that comes later than that has expired."""
PREFIXES_BYTES: Final = 16 * 1024 * 1024
"""Most memory of the prefixes that jobs resolved and whose requests have not come: some hundreds of long ones."""
_EARLY_SHARE = 0.02
"""Share of announced requests that arrive before the time from which they count as possible."""
_EARLY_STEP = 0.01
"""How far one arrival moves that time: the last hundred or so count. A rate below it is none."""
_RATE_WINDOW_US = 2_000_000
"""Requests of the last seconds make the rate of those that nobody announced."""
_MOST_ANNOUNCED = 4096
"""Each chunk looks at all of them. So many arrive in a few seconds, and a cut helps only the next."""


class Impressions:
    """The impressions of the last `kept_us`, at most `capacity`, and the prefixes that their jobs resolved: of each
    user the newest, and of all at most `prefixes_bytes`.

    Work keeps its `Impression` for as long as it needs it. One beyond these bounds is then unknown to later messages.
    """

    def __init__(
        self, capacity: int = REMEMBERED, kept_us: int = REMEMBERED_US, prefixes_bytes: int = PREFIXES_BYTES
    ) -> None:
        if capacity < 1:
            raise ValueError("capacity must be at least 1")
        self._capacity = capacity
        self._kept_us = kept_us
        self._prefixes_bytes = prefixes_bytes
        self._held_bytes = 0
        # A plain dict would search past the places of all deleted entries to find its oldest one.
        self._by_id: OrderedDict[tuple[str, str], Impression] = OrderedDict()
        self._with_prefix: OrderedDict[str, Impression] = OrderedDict()
        """Those with a prefix, by user, the oldest prefix first."""

    def __len__(self) -> int:
        return len(self._by_id)

    def of(self, user_id: str, request_id: str, now_us: int) -> Impression:
        """The impression of a message that was received at `now_us`. It is the newest from now on."""
        key, known = (user_id, request_id), self._by_id
        impression = known.get(key)
        if impression is None:
            impression = known[key] = Impression(user_id, request_id)
        else:
            known.move_to_end(key)
        impression.seen_us = now_us
        oldest_us = now_us - self._kept_us
        while len(known) > self._capacity or known[next(iter(known))].seen_us < oldest_us:
            self.take_prefix(known.popitem(last=False)[1])
        return impression

    def is_leased(self, user_id: str, request_id: str) -> bool:
        """Whether the job of this impression has prepared its prefix. From any thread."""
        impression = self._by_id.get((user_id, request_id))
        return impression is not None and impression.is_leased

    def keep_prefix(self, impression: Impression, prefix: ResolvedPrefix) -> None:
        """Keeps what a job resolved for its request, which names the same history, in the place of an earlier one."""
        self.forget_prefix(impression.user_id)
        impression.prefix = prefix
        self._with_prefix[impression.user_id] = impression
        self._held_bytes += prefix.held_bytes + WORK_BYTES
        while self._held_bytes > self._prefixes_bytes:
            self.forget_prefix(next(iter(self._with_prefix)))

    def take_prefix(self, impression: Impression) -> ResolvedPrefix | None:
        """The prefix that the job of this impression resolved, which is then no longer kept."""
        prefix = impression.prefix
        if prefix is not None:
            self.forget_prefix(impression.user_id)
        return prefix

    def forget_prefix(self, user_id: str) -> None:
        """Drops the user's prefix, if there is one."""
        impression = self._with_prefix.pop(user_id, None)
        if impression is not None and impression.prefix is not None:
            self._held_bytes -= impression.prefix.held_bytes + WORK_BYTES
            impression.prefix = None


class ExpectedArrivals:
    """Predicts the arrival of requests that a cut would help. Jobs announce some of them; unannounced requests that
    find their prefix ready arrive at a measured rate. A request for full inference gains nothing from a cut, since it
    would not overtake.

    Gateways know their lead time only roughly. So an announced request may arrive after a part of its announced lead
    time; the part is a low quantile of the measured ones.
    """

    def __init__(self) -> None:
        self._announced: dict[Impression, Announcement] = {}
        """Those with an announcement, the oldest first: a chunk looks at all of them."""
        self._seen: deque[tuple[Announcement | None, int]] = deque(maxlen=1024)
        """Requests that arrived: their announcement, and the time. Those that nobody announced: only if a cut helps."""
        self._part = 0.5
        self._others = 0.0
        self._others_at_us = 0

    def announce(
        self,
        impression: Impression,
        now_us: int,
        expected_us: int,
        until_us: int,
        stated_us: tuple[int, int] | None = None,
    ) -> None:
        """The request of this impression is expected at `expected_us`, and no longer than `until_us`."""
        if len(self._announced) >= _MOST_ANNOUNCED:
            self.withdraw(next(iter(self._announced)))
        announcement = Announcement(now_us, max(now_us, expected_us), until_us, stated_us)
        impression.announced = self._announced[impression] = announcement

    def wait(self, impression: Impression, now_us: int, until_us: int) -> None:
        """The request arrived and waits for its history or for a copy, and may go on at any time."""
        self.announce(impression, now_us, now_us, until_us)

    def withdraw(self, impression: Impression) -> None:
        """The request is not expected any more, if it was."""
        if impression.announced is not None:
            impression.announced = None
            del self._announced[impression]

    def arrived(self, impression: Impression, at_us: int) -> Announcement | None:
        """The request arrived. Returns its announcement, if there is one."""
        announcement = impression.announced
        if announcement is not None:
            self.withdraw(impression)
            self._seen.append((announcement, at_us))
        return announcement

    def arrived_ready(self, at_us: int) -> None:
        """A request that nobody announced arrived and found its prefix ready."""
        self._seen.append((None, at_us))

    def next_us(self, now_us: int, without: Collection[Impression] = ()) -> tuple[float, float]:
        """Time until the next announced request may arrive, and mean time between others. Infinite if there is none.

        `without`: requests that a cut of the chunk cannot help, since they need the prefix that is computed.
        """
        while self._seen:
            self._learn(*self._seen.popleft())
        earliest_us, overdue = math.inf, []
        for impression, (announced_us, expected_us, until_us, _) in self._announced.items():
            if until_us < now_us:
                overdue.append(impression)
            elif impression not in without:
                earliest_us = min(earliest_us, announced_us + self._part * (expected_us - announced_us))
        for impression in overdue:
            self.withdraw(impression)
        self._decay(now_us)
        others_us = _RATE_WINDOW_US / self._others if self._others > _EARLY_STEP else math.inf
        return max(0.0, earliest_us - now_us), others_us

    def _learn(self, announcement: Announcement | None, at_us: int) -> None:
        if announcement is None:
            self._decay(at_us)
            self._others += 1.0
            return
        announced_us, expected_us = announcement.announced_us, announcement.expected_us
        if expected_us > announced_us:
            part = (at_us - announced_us) / (expected_us - announced_us)
            moved = self._part + _EARLY_STEP * (_EARLY_SHARE - 1 if part < self._part else _EARLY_SHARE)
            self._part = min(max(moved, 0.0), 1.0)

    def _decay(self, now_us: int) -> None:
        if now_us > self._others_at_us:
            self._others *= math.exp((self._others_at_us - now_us) / _RATE_WINDOW_US)
            self._others_at_us = now_us
