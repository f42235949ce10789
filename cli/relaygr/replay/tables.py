"""Results of replays as tables."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.table import Table

from relaygr.replay.bound import HitBound
from relaygr.replay.run import Candidate, ReplayEnvironment, ReplayResult
from relaygr.settings import size_text
from relaygr.worker.cache.policies import TierPolicies


def name_of(policies: TierPolicies) -> str:
    """The policies as they are written on the command line."""
    return policies.hbm.value if policies.hbm is policies.dram else f"{policies.hbm.value}/{policies.dram.value}"


def bounds_of(bound: HitBound, environment: ReplayEnvironment, candidate: Candidate) -> tuple[float, float]:
    """Upper bounds on the share of visits that hit: in HBM, and in either tier."""
    hbm_pages = candidate.hbm_bytes // environment.geometry.kv.page_bytes
    dram_pages = candidate.dram_bytes // environment.geometry.page_bytes
    visits = max(1, bound.visits)
    return bound.hits(hbm_pages) / visits, bound.hits(hbm_pages + dram_pages) / visits


def tables_of(results: Sequence[ReplayResult], bound: HitBound, environment: ReplayEnvironment) -> Iterator[Table]:
    """One table for each size, with a row for each policy; the last row is the bound."""
    by_size: dict[tuple[int, int], list[ReplayResult]] = {}
    for one in results:
        by_size.setdefault((one.candidate.hbm_bytes, one.candidate.dram_bytes), []).append(one)
    for (hbm_bytes, dram_bytes), same in by_size.items():
        title = f"{size_text(hbm_bytes)} of HBM, {size_text(dram_bytes) if dram_bytes else 'none'} of DRAM"
        table = Table(title=title, title_justify="left", title_style="bold", box=None, padding=(0, 1, 0, 0))
        table.add_column("policy", no_wrap=True)
        for name in ("in HBM", "in DRAM", "either", "computed", "time", "spilled", "reloaded", "evicted"):
            table.add_column(name, justify="right", no_wrap=True)
        for one in same:
            visits = max(1, one.visits)
            table.add_row(
                name_of(one.candidate.policies),
                _share(one.hbm_hits / visits),
                _share(one.dram_hits / visits),
                _share((one.hbm_hits + one.dram_hits) / visits),
                _share(one.recomputed_tokens / max(1, one.asked_tokens)),
                _share(one.recomputed_us / (one.asked_us or 1.0)),
                _bytes(one.spilled_bytes),
                _bytes(one.reloaded_bytes),
                f"{_count(one.hbm_evictions)} + {_count(one.dram_evictions)}",
            )
        in_hbm, in_either = bounds_of(bound, environment, same[0].candidate)
        table.add_row("bound", _share(in_hbm), "", _share(in_either), style="dim")
        unkept = max(one.no_room for one in same)
        if unkept:
            table.caption = f"Up to {unkept:,} prefixes were computed but not kept: there was no room."
        yield table


def _share(share: float) -> str:
    return f"{100 * share:.1f} %"


def _count(count: int) -> str:
    if count < 1000:
        return str(count)
    return f"{count / 1000:.1f}k" if count < 99_950 else f"{count / 1000:,.0f}k"


def _bytes(size_bytes: int) -> str:
    """At most three digits, and a unit."""
    size, unit = float(size_bytes), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if size < 999.5:
            break
        size, unit = size / 1024, larger
    digits = 0 if size >= 99.95 or unit == "B" else 1
    return f"{size:,.{digits}f} {unit}"
