"""What a fleet needs beside its number of workers, and what the relay saves: calculated from a case. Pure.

Memory    A prefix stays in HBM from its pre-infer job to its ranking request. By Little's law, as in the admission
          policy, the fleet holds

              impressions a second * (lead time + margin of the lease) * bytes of a prefix / (1 - reserve)

          A prefix then moves to DRAM for the user's next visit. To find it there, DRAM must hold the prefixes of all
          users who come within the time that prefixes are to be kept.
Returns   A user with p of all impressions, of which there are r a second, comes within t seconds with 1 - exp(-p r t).
          Users follow the Zipf distribution of the traffic.
Work      A visit takes the shares of `relaygr.simulate.visit`, for the prefix of the median history.
Network   Encoded messages of the case's sizes, with their keys and headers, before Kafka's framing.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import numpy as np
from numpy.typing import NDArray

from relaygr.schemas import codec
from relaygr.schemas.ended import Ended
from relaygr.schemas.headers import Headers, RankingHeaders, ResultHeaders
from relaygr.schemas.messages import (
    Behaviours,
    History,
    Path,
    PreInferJob,
    RankingRequest,
    RankingResult,
    RetrievalEvent,
    StageTimings,
)
from relaygr.simulate.case import Case
from relaygr.simulate.visit import BreakEven, Tier, break_even
from relaygr.traffic.schedule import user_shares

_REQUEST_ID = "gateway-00.19a0c5d2f00a1b2c3d4.1000000.0123456789abcdef"
_USER_ID = "user-000000"
_WALL_US = 1_790_000_000_000_000
_TASKS = 1


class Kind(StrEnum):
    """The messages of an impression."""

    RETRIEVAL = "retrieval event"
    PREINFER = "pre-infer job"
    RANKING = "ranking request"
    RESULT = "result"
    HISTORY = "history"


@dataclass(frozen=True, slots=True)
class Sizing:
    """The needs of a fleet of `workers`. Bytes and rates are those of the whole fleet, unless their name says else."""

    workers: int
    prefix_behaviours: float
    """Behaviours of the mean history, as far as the model takes them."""
    prefix_bytes: int
    """K,V of the mean prefix in HBM."""
    dram_prefix_bytes: int
    waiting: float
    """Prefixes that wait for their ranking request, on average."""
    hbm_bytes: int
    """The least HBM for them."""
    hbm_set_bytes: int
    """The HBM tiers of all workers, by the settings."""
    keep_s: float
    users_kept: float
    """Users who come within `keep_s`."""
    dram_bytes: int
    """The DRAM that keeps the prefixes of these users."""
    dram_set_bytes: int
    reuse: float
    """The share of impressions whose user was there within `keep_s`."""
    message_bytes: dict[Kind, int]
    network_bytes_per_s: float
    """Written to Kafka. Each message is read once, and copied to each further replica."""
    work: BreakEven
    """Device work of a visit by the place of the prefix, for the median history on one worker."""
    device_share: float
    """Device work of all visits with the relay, as a share of full inference."""

    @property
    def hbm_is_enough(self) -> bool:
        return self.hbm_set_bytes >= self.hbm_bytes


def size_of(case: Case, workers: int, keep_s: float, reuse: float | None = None) -> Sizing:
    """The needs of this many workers. `reuse`: the share of returning impressions, if it is known."""
    model, traffic, admission = case.model, case.demand.traffic, case.settings.admission
    geometry, layout, grows = model.geometry, model.layout, model.rules.grows
    work = case.visit()
    mean = min(work.behaviours * math.exp(traffic.history_sigma**2 / 2), case.longest_history)
    pages = geometry.kv.pages_for(layout.tokens(math.ceil(mean)))
    prefix_bytes, dram_prefix_bytes = pages * geometry.kv.page_bytes, pages * geometry.page_bytes

    lead_s = traffic.lead_median_ms / 1000 * math.exp(traffic.lead_sigma**2 / 2)
    waiting = traffic.rate_per_s * (lead_s + admission.lease_margin_ms / 1000)
    # Each worker holds the longest prefix at least.
    longest_bytes = geometry.kv.pages_for(layout.tokens(case.longest_history)) * geometry.kv.page_bytes
    waiting_bytes = round(waiting * prefix_bytes / (1 - admission.footprint_reserve))
    hbm_set_bytes, dram_set_bytes = case.memory(workers)

    new_per_s = traffic.new_share * traffic.rate_per_s
    users_kept, back = returns(user_shares(traffic, traffic.users), traffic.rate_per_s - new_per_s, keep_s)
    users_kept += new_per_s * keep_s
    reuse = 0.0 if not grows else (1 - traffic.new_share) * back if reuse is None else reuse
    found = break_even(
        work, hbm_set_bytes // workers, dram_set_bytes // workers, traffic.rate_per_s / workers, grows=grows
    )
    sizes = message_sizes(traffic.candidates, traffic.suffix, round(mean))
    return Sizing(
        workers=workers,
        prefix_behaviours=mean,
        prefix_bytes=prefix_bytes,
        dram_prefix_bytes=dram_prefix_bytes,
        waiting=waiting,
        hbm_bytes=max(waiting_bytes, workers * longest_bytes),
        hbm_set_bytes=hbm_set_bytes,
        keep_s=keep_s,
        users_kept=users_kept if grows else 0.0,
        dram_bytes=math.ceil(users_kept * dram_prefix_bytes) if grows else 0,
        dram_set_bytes=dram_set_bytes,
        reuse=reuse,
        message_bytes=sizes,
        network_bytes_per_s=traffic.rate_per_s * sum(sizes.values()),
        work=found,
        device_share=reuse * found.work[Tier.DRAM] + (1 - reuse) * found.work[Tier.NONE],
    )


def returns(shares: NDArray[np.float64], rate_per_s: float, keep_s: float) -> tuple[float, float]:
    """The number of users who come within `keep_s`, and the share of impressions whose user came within it before."""
    come = -np.expm1(-shares * rate_per_s * keep_s)
    return float(come.sum()), float((shares * come).sum())


def message_sizes(candidates: int, suffix: int, behaviours: int) -> dict[Kind, int]:
    """Bytes of the messages of an impression, with keys and headers; a history once, as if each visit changed it."""
    common: dict[str, Any] = {
        "request_id": _REQUEST_ID,
        "user_id": _USER_ID,
        "retrieval_at_us": _WALL_US,
        "expected_ranking_at_us": _WALL_US,
        "ranking_budget_ms": 50,
        "expected_candidates": candidates,
        "expected_suffix": suffix,
    }
    result = RankingResult(
        request_id=_REQUEST_ID,
        worker_id="worker-00",
        outcome=Ended.RANKED,
        request_sent_at_us=_WALL_US,
        received_at_us=_WALL_US,
        sent_at_us=_WALL_US,
        timings=StageTimings(1000, 1000, 1000, 1000, 1000, 1000),
        path=Path.HBM,
        num_tasks=_TASKS,
        scores=np.zeros(candidates * _TASKS, np.float32),
        prefix_tokens=behaviours,
        tokens_cached=behaviours,
        model_revision="0" * 16,
    )
    request = RankingRequest(
        _REQUEST_ID, _USER_ID, _WALL_US, _WALL_US, _WALL_US // 1000, np.zeros(candidates, np.int64), _behaviours(suffix)
    )
    asked = RankingHeaders(_REQUEST_ID, "gateway-00", "relaygr.results", 0, _WALL_US).encode()
    return {
        Kind.RETRIEVAL: _bytes(RetrievalEvent(**common), _USER_ID),
        Kind.PREINFER: _bytes(PreInferJob(**common, decided_at_us=_WALL_US), _USER_ID),
        Kind.RANKING: _bytes(request, _USER_ID, asked),
        Kind.RESULT: _bytes(result, _REQUEST_ID, ResultHeaders(_REQUEST_ID, "gateway-00").encode()),
        Kind.HISTORY: _bytes(History(_USER_ID, 1, np.empty(0, np.int64), _behaviours(behaviours)), _USER_ID),
    }


def _behaviours(count: int) -> Behaviours:
    return Behaviours(np.zeros(count, np.int64), np.zeros(count, np.uint16), np.zeros(count, np.int64))


def _bytes(message: Any, key: str, headers: Headers | None = None) -> int:
    beside = sum(len(name) + len(value or b"") for name, value in headers or ())
    return len(codec.encode(message)) + len(key.encode()) + beside
