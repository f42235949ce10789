"""The device work of one visit, and when the relay saves some: the arithmetic that every plan shares. Pure, no torch.

A visit computes its prefix before the ranking request arrives, or finds it cached from the visit before. A tier keeps
the newest prefixes: a prefix is dropped after as many visits of other users as the tier has places. So with a rate of
visits, a tier keeps prefixes for places / rate. The work of a visit, as a share of full inference:

    not kept    (T_pre + T_hit) / T_full              the relay moves work before the ranking request, and saves none
    in HBM      (T_append + T_hit) / T_full
    in DRAM     (T_append + T_hit + T_reload) / T_full

Full inference is the two passes that a worker runs: T_full = T_pre + T_hit. A model whose prefixes do not grow keeps
nothing for another visit.
"""

from __future__ import annotations

import enum
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from relaygr.admission.fit import fit_reload
from relaygr.admission.latency import LatencyModel
from relaygr.worker.kv import DramGeometry, DramKvDtype, PrefixLayout
from relaygr.worker.model.interface import Engine

CHUNK_TOKENS = 2048
USUAL_LOAD = 0.7
"""The share of the device's time that full inference takes at the default rate of visits."""
_RELOAD_BYTES = (1 << 18, 1 << 20, 1 << 22, 1 << 24)


class Tier(enum.StrEnum):
    """The place of a returning user's prefix."""

    HBM = "HBM"
    DRAM = "DRAM"
    NONE = "not kept"


@dataclass(frozen=True, slots=True)
class VisitTimes:
    """Device times and K,V of visits with a history of one length."""

    behaviours: int
    tokens: int
    pre_us: float
    append_us: float
    hit_us: float
    """Of a ranking pass without a tail in its suffix."""
    reload_us: float
    kv_bytes: int
    dram_kv_bytes: int
    tail_us: float = 0.0
    """What a tail in the suffix adds to the ranking pass of a mean visit."""

    @property
    def full_us(self) -> float:
        """Full inference is the same two passes as pre-infer and ranking."""
        return self.pre_us + self.hit_us


@dataclass(frozen=True, slots=True)
class BreakEven:
    """One length with its break-even. Shares of work are those of a visit, by the tier that kept the prefix."""

    figures: VisitTimes
    prefixes_in_hbm: int
    prefixes_in_dram: int
    visits_per_second: float
    hbm_keeps_s: float
    dram_keeps_s: float
    work: dict[Tier, float]

    def tier(self, gap_s: float) -> Tier:
        """The tier that still has the prefix after a gap."""
        if gap_s <= self.hbm_keeps_s:
            return Tier.HBM
        return Tier.DRAM if gap_s <= self.dram_keeps_s else Tier.NONE


def break_even(
    figures: VisitTimes, hbm_bytes: int, dram_bytes: int, visits_per_second: float | None, *, grows: bool
) -> BreakEven:
    """The break-even of one length with tiers of these sizes.

    `visits_per_second`: None for `USUAL_LOAD` with full inference. `grows`: whether the model's prefixes may grow, so
    that another visit uses them.
    """
    in_hbm = hbm_bytes // figures.kv_bytes
    in_dram = dram_bytes // figures.dram_kv_bytes
    rate = visits_per_second or USUAL_LOAD / (figures.full_us / 1e6)
    kept_us = figures.append_us + figures.tail_us + figures.hit_us
    return BreakEven(
        figures=figures,
        prefixes_in_hbm=in_hbm,
        prefixes_in_dram=in_dram,
        visits_per_second=rate,
        hbm_keeps_s=in_hbm / rate if grows else 0.0,
        # Prefixes go to DRAM when they leave HBM.
        dram_keeps_s=(in_hbm + in_dram) / rate if grows and in_dram else 0.0,
        work={
            Tier.HBM: kept_us / figures.full_us,
            Tier.DRAM: (kept_us + figures.reload_us) / figures.full_us,
            Tier.NONE: 1.0,
        },
    )


def predicted(
    latency: LatencyModel,
    geometry: DramGeometry,
    layout: PrefixLayout,
    behaviours: int,
    scored_tokens: int,
    new_behaviours: int = 1,
    longest_tail: int = 0,
) -> VisitTimes:
    """The times of visits by a calibration, with tails as workers treat them: a short tail is ranked with the suffix,
    visit after visit, until it pays to append it. Appends and tails are those of a mean visit.

    `scored_tokens`: suffix tokens and candidates; `longest_tail`: the most behaviours that are ranked with the suffix.
    """
    tokens, pages = layout.tokens(behaviours), geometry.kv.pages_for(layout.tokens(behaviours))
    hit_us = latency.hit_us(tokens, scored_tokens)
    tails_us, visits = 0.0, 1
    while True:
        tail = min(visits * new_behaviours, behaviours)
        tail_tokens = tail * layout.tokens_per_behaviour
        cached = tokens - tail_tokens
        if tail in (0, behaviours) or tail > longest_tail:
            break
        if not latency.tail_stays_in_suffix(cached, tail_tokens, scored_tokens):
            break
        tails_us += latency.hit_us(cached, scored_tokens + tail_tokens) - hit_us
        visits += 1
    return VisitTimes(
        behaviours=behaviours,
        tokens=tokens,
        pre_us=latency.pre_us(tokens),
        append_us=latency.append_us(cached, tail_tokens) / visits,
        tail_us=tails_us / visits,
        hit_us=hit_us,
        reload_us=latency.reload_us(pages * geometry.page_bytes),
        kv_bytes=pages * geometry.kv.page_bytes,
        dram_kv_bytes=pages * geometry.page_bytes,
    )


def measure(
    engine: Engine,
    lengths: Sequence[int],
    candidates: int,
    new_behaviours: int,
    dram_kv_dtype: DramKvDtype,
    repeats: int,
) -> list[VisitTimes]:
    """Measures visits with histories of these lengths, each of which appends its new behaviours. Binds the engine to a
    new arena.
    """
    # Imported here, so that a break-even can be calculated without torch.
    from relaygr.worker.measuring import EngineMeter, bind_own_arena, rest_between_requests

    layout, geometry = engine.layout, engine.geometry
    bind_own_arena(engine, longest_tokens=layout.tokens(max(lengths)))
    meter = EngineMeter(engine, rest=rest_between_requests(engine.device))
    per_copy_us, per_byte_us = fit_reload(list(meter.reloads(_RELOAD_BYTES)))
    dram_page_bytes = DramGeometry(geometry, dram_kv_dtype).page_bytes
    meter.prefix(layout.tokens(min(lengths)), CHUNK_TOKENS)  # A warm-up.
    found = []
    for count in lengths:
        tokens, pages = layout.tokens(count), geometry.pages_for(layout.tokens(count))
        new_tokens = min(new_behaviours, count) * layout.tokens_per_behaviour
        pre = [sum(point.duration_us for point in meter.prefix(tokens, CHUNK_TOKENS)) for _ in range(repeats)]
        append = pre
        if engine.rules.grows:
            append = [meter.append(tokens - new_tokens, new_tokens).duration_us for _ in range(repeats)]
        hit = [meter.rank(tokens, candidates).duration_us for _ in range(repeats)]
        found.append(
            VisitTimes(
                behaviours=count,
                tokens=tokens,
                pre_us=statistics.median(pre),
                append_us=statistics.median(append),
                hit_us=statistics.median(hit),
                reload_us=per_copy_us + per_byte_us * pages * dram_page_bytes,
                kv_bytes=pages * geometry.page_bytes,
                dram_kv_bytes=pages * dram_page_bytes,
            )
        )
    return found
