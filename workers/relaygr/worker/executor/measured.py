"""The figures that admission needs, measured from finished work. Pure: every time is passed in.

They tell how much time of the device thread a request takes, and how far to trust predictions.
"""

from __future__ import annotations

from relaygr.schemas.messages import Path

_OWN_WEIGHT = 0.05
"""Weight of one request in an average: the last 20 or so count."""
_OWN_MAX_STEP_US = 1_000.0
"""One request counts with at most twice the average own time plus this, so that one stall changes little."""
_SLOWD_OWN_WEIGHT = 0.2
"""Weight of one sample. A sample is of many requests, so the last 5 suffice, and a burst is noticed in time."""
SLOWDOWN_SAMPLE_US = 10_000.0
"""Demand over which the slowdown is measured: far longer than the clock's error and a change of threads."""
_MAX_SLOWDOWN = 8.0
"""The highest sample: a process that was stopped for a moment must not refuse everything after it."""
_MISS_STEP = 0.05
"""The margin after one miss: a few misses in a row are answered at once."""
_MISS_SHARE = 0.01
"""The share of misses at which the margin neither rises nor falls: that of a P99."""
_MAX_MARGIN = 1.5
"""Predictions that are wrong by more are the corrector's task; a larger margin would leave the device idle."""
_LEAST_WAIT_LIMIT = 0.25
"""With less, requests were refused because of their time in transit alone."""
_REFUSED_STEP = 0.02
"""From 1 to the least in 38 refusals: a fraction of a second of an overload."""
_ANSWERED_STEP = 0.005
"""With these two steps, the limit falls while more than a fifth of the requests are refused."""
_WAIT_LIMIT_PER_IDLE_S = 1.0
"""A second without work restores the limit, however few requests a worker answers in it."""


class Measured:
    """The device thread writes; other threads may read figures that are one change old."""

    def __init__(self) -> None:
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
        self.expected_us = 0.0
        """Expected demand of a request in the mailbox: the average of earlier requests, refused ones included."""
        self.done_us = 0.0
        """Demand that was done since `busy_since_us`."""
        self.preinfer_us = 0.0
        """Device time of pre-infer since `busy_since_us`."""
        self.busy_since_us: int | None = None
        """Since when the device thread has not been idle."""
        self.idle_since_us: int | None = None
        """Since when the device thread has had nothing to do; None while it has."""

    def begin(self, now_us: int) -> None:
        """Notes that the device thread begins a piece of work, unless it was busy before."""
        if self.busy_since_us is None:
            self.busy_since_us = now_us

    def expect(self, demand_us: float) -> None:
        """Notes what a request from the mailbox demanded."""
        self.expected_us += _OWN_WEIGHT * (demand_us - self.expected_us)

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
        self.own_us[path] = own_us + _OWN_WEIGHT * (min(moved_us, 2 * own_us + _OWN_MAX_STEP_US) - own_us)
        self.answer_us += _OWN_WEIGHT * (min(answer_us, 2 * self.answer_us + _OWN_MAX_STEP_US) - self.answer_us)
        self.wait_limit = min(1.0, self.wait_limit + _ANSWERED_STEP)
        if in_time:
            self.margin = max(1.0, self.margin - _MISS_STEP * _MISS_SHARE)
        else:
            self.missed()

    def observe_look_ups(self, spent_us: int, requests: int) -> None:
        """Notes the time that the device thread took to look up requests from the mailbox."""
        spent_us_each = min(spent_us / requests, 2 * self.prepare_us + _OWN_MAX_STEP_US)
        self.prepare_us += _SLOWD_OWN_WEIGHT * (spent_us_each - self.prepare_us)

    def did(self, demand_us: float) -> None:
        """Notes that this much demand was done."""
        self.done_us += demand_us

    def did_preinfer(self, duration_us: int) -> None:
        """Notes device time of pre-infer."""
        self.preinfer_us += duration_us

    def observe_slowdown(self, now_us: int) -> None:
        """Compares the demand that was done with the time that it took. The device thread was busy until now."""
        if self.busy_since_us is None:
            return
        took_us = now_us - self.busy_since_us - self.preinfer_us
        sample = min(max(took_us / self.done_us, 1.0), _MAX_SLOWDOWN)
        self.slowdown += _SLOWD_OWN_WEIGHT * (sample - self.slowdown)
        self.busy_since_us, self.done_us, self.preinfer_us = now_us, 0.0, 0.0

    def rest(self, now_us: int) -> None:
        """Notes that the device thread has nothing to do, so nothing slows it down."""
        self.busy_since_us, self.idle_since_us = None, now_us
        self.done_us = self.preinfer_us = 0.0
        self.slowdown += _SLOWD_OWN_WEIGHT * (1.0 - self.slowdown)

    def wake(self, now_us: int) -> None:
        """Notes that the device thread, which rested, looks for work again."""
        if self.idle_since_us is not None:
            idle_s = (now_us - self.idle_since_us) / 1e6
            self.wait_limit = min(1.0, self.wait_limit + _WAIT_LIMIT_PER_IDLE_S * idle_s)
            self.idle_since_us = None
