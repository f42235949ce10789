"""The lead time: from the start of retrieval to the ranking request, measured by scenario.

A gateway states when it expects to send the ranking request; it knows that only roughly. The worker sees both ends: the
job copies `retrieval_at_us` and `expected_ranking_at_us` from the retrieval event, and the request says when it was
sent. All three are of the gateway's clock, so no clocks are compared. Its status reports low quantiles of measured /
expected lead time, and the trigger shortens the expected lead time of later events by them.

Requests without a job are not measured. If a trigger sends no more jobs because lead times were short, the samples grow
old, `lead_fraction` holds again, and the next jobs measure anew.

Pure: no clock, no I/O.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import defaultdict, deque
from collections.abc import Mapping
from functools import partial
from typing import Final

from relaygr.runtime.quantiles import quantile_of_sorted
from relaygr.schemas.messages import LeadTimeReport
from relaygr.schemas.record import record

LOW_QUANTILE: Final = 0.1
HORIZON_US: Final = 60_000_000
"""Age above which a lead time no longer counts."""
LEAST_SAMPLES: Final = 32
_MOST_SAMPLES: Final = 512


@record(frozen=True, slots=True)
class LeadQuantiles:
    """The lead times of one scenario, measured lately."""

    low_us: int
    """The 10th percentile."""
    median_us: int
    low_share: float
    """Measured / expected: the 10th percentile."""
    median_share: float


ArrivedRequest = tuple[int, int, int, int]
"""When the request of a job came (monotonic), was sent, when its retrieval began, and when it was expected; µs."""


class LeadTimes:
    """Observes the lead times of one worker's jobs.

    The device thread adds to `arrived`, which costs no call in Python. One thread calls `report`; any thread may read
    `latest`.
    """

    def __init__(self) -> None:
        self.arrived: defaultdict[str, deque[ArrivedRequest]] = defaultdict(partial(deque, maxlen=_MOST_SAMPLES))
        """By scenario, since the last report. The worker has refused the messages of unknown scenarios."""
        self._windows: defaultdict[str, _Window] = defaultdict(_Window)
        self.latest: Mapping[str, LeadQuantiles] = {}
        """By scenario, as of the last report; without those of which few were measured lately."""

    def report(self, now_us: int) -> LeadTimeReport | None:
        """The part of the status; None while nothing is known."""
        found: dict[str, LeadQuantiles] = {}
        for scenario, arrived in list(self.arrived.items()):
            window = self._windows[scenario]
            while arrived:
                window.add(arrived.popleft())
            quantiles = window.quantiles(now_us)
            if quantiles is not None:
                found[scenario] = quantiles
        self.latest = found
        if not found:
            return None
        return LeadTimeReport(
            scenarios=tuple(found),
            low_shares=tuple(each.low_share for each in found.values()),
            low_us=tuple(each.low_us for each in found.values()),
            median_us=tuple(each.median_us for each in found.values()),
        )


class _Window:
    """The lead times of one scenario that count now: in order of arrival, and in ascending order, so that a report does
    not sort them again for a few new ones.
    """

    __slots__ = ("_latest", "_shares", "_times_us")

    def __init__(self) -> None:
        self._latest: deque[tuple[int, int, float]] = deque()
        """When the request came, its lead time, and measured / expected."""
        self._times_us: list[int] = []
        self._shares: list[float] = []

    def add(self, request: ArrivedRequest) -> None:
        at_us, sent_us, retrieval_us, expected_us = request
        if expected_us <= retrieval_us:
            return
        if len(self._latest) == _MOST_SAMPLES:
            self._drop_oldest()
        measured_us = max(0, sent_us - retrieval_us)
        share = measured_us / (expected_us - retrieval_us)
        self._latest.append((at_us, measured_us, share))
        insort(self._times_us, measured_us)
        insort(self._shares, share)

    def quantiles(self, now_us: int) -> LeadQuantiles | None:
        """None while few were measured lately."""
        while self._latest and now_us - self._latest[0][0] > HORIZON_US:
            self._drop_oldest()
        if len(self._latest) < LEAST_SAMPLES:
            return None
        low_us, median_us = (quantile_of_sorted(self._times_us, share) for share in (LOW_QUANTILE, 0.5))
        low_share, median_share = (quantile_of_sorted(self._shares, share) for share in (LOW_QUANTILE, 0.5))
        return LeadQuantiles(low_us, median_us, low_share, median_share)

    def _drop_oldest(self) -> None:
        _, measured_us, share = self._latest.popleft()
        del self._times_us[bisect_left(self._times_us, measured_us)]
        del self._shares[bisect_left(self._shares, share)]


def lead_shares_of(report: LeadTimeReport | None) -> Mapping[str, float]:
    """The low quantile of measured / expected lead time, by scenario. Negative ones are left out."""
    if report is None:
        return {}
    pairs = zip(report.scenarios, report.low_shares, strict=False)
    return {scenario: share for scenario, share in pairs if share >= 0}
