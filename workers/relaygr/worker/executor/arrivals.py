"""When the next request arrives that a cut of a chunk would help: learnt from jobs and from earlier requests."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection

_EARLY_SHARE = 0.02
"""Share of announced requests that arrive before the time from which they count as possible."""
_EARLY_STEP = 0.01
_RATE_WINDOW_US = 2_000_000
_MOST_ANNOUNCED = 4096
Impression = tuple[str, str]
"""User id and request id: a job and its request have the same."""
Announcement = tuple[int, int, int, tuple[int, int] | None]
"""When the request was announced, when it is expected, and until when; and by the gateway's clock, when its retrieval
began and when the gateway expected to send it. None for a request that arrived and waits."""


class ExpectedArrivals:
    """Predicts the arrival of requests that a cut would help. Jobs announce some of them; unannounced requests that
    find their prefix ready arrive at a measured rate. A request for full inference gains nothing from a cut, since it
    would not overtake. Belongs to the device thread.

    Gateways know their lead time only roughly. So an announced request may arrive after a part of its announced lead
    time; the part is a low quantile of the measured ones.
    """

    def __init__(self) -> None:
        self.announced: dict[Impression, Announcement] = {}
        self.seen: deque[tuple[Announcement | None, int]] = deque(maxlen=1024)
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
        stated: tuple[int, int] | None = None,
    ) -> None:
        """A job expects this request at `expected_us`, and no longer than `until_us`. `stated`: see `Announcement`."""
        if len(self.announced) >= _MOST_ANNOUNCED:
            del self.announced[next(iter(self.announced))]
        self.announced[impression] = now_us, max(now_us, expected_us), until_us, stated

    def wait(self, impression: Impression, now_us: int, until_us: int) -> None:
        """A request that arrived waits for its history or for a copy, and may go on at any time."""
        self.announced[impression] = now_us, now_us, until_us, None

    def next_us(self, now_us: int, without: Collection[Impression] = ()) -> tuple[float, float]:
        """Time until the next announced request may arrive, and mean time between others. Infinite if there is none.

        `without`: requests that a cut of the chunk cannot help, since they need the prefix that is computed.
        """
        while self.seen:
            self._learn(*self.seen.popleft())
        earliest_us, overdue = math.inf, []
        for impression, (announced_us, expected_us, until_us, _) in self.announced.items():
            if until_us < now_us:
                overdue.append(impression)
            elif impression not in without:
                earliest_us = min(earliest_us, announced_us + self._part * (expected_us - announced_us))
        for impression in overdue:
            del self.announced[impression]
        self._decay(now_us)
        others_us = _RATE_WINDOW_US / self._others if self._others > _EARLY_STEP else math.inf
        return max(0.0, earliest_us - now_us), others_us

    def _learn(self, announcement: Announcement | None, at_us: int) -> None:
        if announcement is None:
            self._decay(at_us)
            self._others += 1.0
            return
        announced_us, expected_us, _, _ = announcement
        if expected_us > announced_us:
            part = (at_us - announced_us) / (expected_us - announced_us)
            moved = self._part + _EARLY_STEP * (_EARLY_SHARE - 1 if part < self._part else _EARLY_SHARE)
            self._part = min(max(moved, 0.0), 1.0)

    def _decay(self, now_us: int) -> None:
        if now_us > self._others_at_us:
            self._others *= math.exp((self._others_at_us - now_us) / _RATE_WINDOW_US)
            self._others_at_us = now_us
