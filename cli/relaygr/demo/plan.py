"""The plan of the demo: deadline, lead time, rate and memory, from a calibration of this machine.

During the calibration nothing else runs. In the demo two workers share the cores with the broker, the trigger and the
gateway, so the plan multiplies the measured times by `CROWDING`. The plan then follows these rules:

* The deadline is between the time of ranking on a cached prefix and the time of full inference on a typical history.
* The lead time is long enough to compute the prefix of a long history.
* With the relay on, the devices use about a quarter of the free cores: the broker, the trigger and the gateway need
  cores too, and queueing delays are long even at half load. Cores that other processes use are not free.
* There are two workers. On one core there is one, because two would take turns in the middle of their work.
* HBM holds a part of the users' prefixes, so that the rest is reloaded from DRAM, which holds all of them.

Options of the command override the plan.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from relaygr.admission.latency import LatencyModel
from relaygr.machine import Cores
from relaygr.runtime.quantiles import quantile
from relaygr.simulate.visit import predicted
from relaygr.worker.kv import DramGeometry, KvGeometry, PrefixLayout

CROWDING = 2.0
MOST_WORKERS = 2
LEAST_BUDGET_MS = 25
LEAST_LEAD_MS = 100
TARGET_LOAD = 0.25
NEW_SHARE = 0.35
"""The assumed share of drawn impressions whose prefix is computed from its start."""
LEAST_IMPRESSIONS = 280
"""At a low rate the run lasts longer, up to `LONGEST_S`, so that there are enough requests to compare."""
LONGEST_S = 60.0
HBM_SHARE = 0.6
"""The share of all prefixes that the HBM tiers of the workers hold together."""


@dataclass(frozen=True, slots=True)
class DemoPlan:
    """The numbers of a run, and the measured times behind them (without `CROWDING`)."""

    workers: int
    history_median: int
    history_p90: int
    full_median_ms: float
    full_p90_ms: float
    pre_infer_p90_ms: float
    hit_ms: float
    budget_ms: int
    lead_ms: int
    rate_per_s: float
    duration_s: float
    hbm_bytes: int
    dram_bytes: int
    cores: Cores


@dataclass(frozen=True, slots=True)
class PlanOverrides:
    """The numbers that the user set. None means that the plan decides."""

    budget_ms: int | None = None
    lead_ms: int | None = None
    rate_per_s: float | None = None
    duration_s: float | None = None


def plan_demo(
    latency: LatencyModel,
    geometry: KvGeometry,
    layout: PrefixLayout,
    lengths: Sequence[int],
    scored_tokens: int,
    cores: Cores,
    duration_s: float,
    overrides: PlanOverrides,
    new_share: float = NEW_SHARE,
) -> DemoPlan:
    """A plan for users with histories of `lengths` behaviours, each ranked with `scored_tokens`. `duration_s`: the
    least length of a run. `new_share`: of impressions whose prefix is computed from its start.

    Raises ValueError if there is no user.
    """
    if not len(lengths):
        raise ValueError("there are no users")
    median, p90 = (quantile(lengths, share) for share in (0.5, 0.9))
    usual, long = (predicted(latency, DramGeometry(geometry), layout, each, scored_tokens) for each in (median, p90))
    hit_ms, pre_ms = long.hit_us / 1000, long.pre_us / 1000
    budget_ms = overrides.budget_ms or round(
        max(LEAST_BUDGET_MS, 4 * hit_ms * CROWDING, 0.8 * usual.full_us / 1000 * CROWDING)
    )
    lead_ms = overrides.lead_ms or round(max(LEAST_LEAD_MS, 3 * pre_ms * CROWDING))
    workers = min(MOST_WORKERS, cores.usable)
    cost_ms = (new_share * usual.pre_us / 1000 + hit_ms) * CROWDING
    rate_per_s = overrides.rate_per_s or min(40.0, max(1.0, TARGET_LOAD * min(workers, cores.free) * 1000 / cost_ms))
    whole_s = max(duration_s, min(LEAST_IMPRESSIONS / rate_per_s, LONGEST_S))
    pages = [geometry.pages_for(layout.tokens(length)) for length in lengths]
    per_worker = math.ceil(sum(pages) / workers)
    # The prefix of the longest history must fit, with room for others.
    hbm_pages = max(4 * max(pages), math.ceil(HBM_SHARE * per_worker))
    return DemoPlan(
        workers=workers,
        history_median=median,
        history_p90=p90,
        full_median_ms=usual.full_us / 1000,
        full_p90_ms=long.full_us / 1000,
        pre_infer_p90_ms=pre_ms,
        hit_ms=hit_ms,
        budget_ms=budget_ms,
        lead_ms=lead_ms,
        rate_per_s=round(rate_per_s, 1),
        duration_s=overrides.duration_s or round(whole_s, 1),
        hbm_bytes=max(1 << 20, hbm_pages * geometry.page_bytes),
        dram_bytes=max(1 << 20, 2 * sum(pages) * geometry.page_bytes),
        cores=cores,
    )
