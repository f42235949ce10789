"""Tables and JSON of `relaygr simulate` and `relaygr size`. Everything says that it is simulated."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.table import Table

from relaygr.cli.texts import figures_table, show_size
from relaygr.runtime.errors import RelayError
from relaygr.runtime.json_values import finite
from relaygr.simulate.case import System
from relaygr.simulate.figures import ENDINGS, HIGHEST_LOAD, Estimate, Figures
from relaygr.simulate.plan import CapacityPlan, Probe, partitions_for, prefixes_for

Results = Mapping[System, Figures] | Mapping[str, Figures]
"""By system, or by the name of another kind of fleet."""


@dataclass(frozen=True, slots=True)
class PlanRow:
    """A plan as it is printed: the workers of one system, their memory, and what they cost. None without a fleet, and
    costs also without a price.
    """

    system: System
    plan: CapacityPlan
    hbm_bytes: int | None
    dram_bytes: int | None
    cost_per_hour: float | None
    cost_per_million: float | None
    """Per million ranking requests."""


def table_of(results: Results, title: str) -> Table:
    """A row for each figure, a column for each system."""
    table = figures_table(f"Simulated: {title}", *(NAMES.get(each, each) for each in results))
    columns = list(results.values())
    table.add_row("P50", *(_ms(each.p50_ms) for each in columns))
    table.add_row("P99", *(_ms(each.p99_ms) for each in columns))
    table.add_row("P99 on prefixes in HBM", *(_ms(each.hit_p99_ms) for each in columns))
    table.add_row("jobs ready in time", *(_share(each.ready_share) for each in columns))
    table.add_row("late, truncated or refused", *(_share(each.late_share) for each in columns))
    for ending in ENDINGS:
        if any(each.mix[ending].value for each in columns):
            table.add_row(f"  {ending}", *(_share(each.mix[ending]) for each in columns), style="dim")
    table.add_row("prefix found in HBM", *(_share(each.found_hbm) for each in columns))
    table.add_row("prefix found in DRAM", *(_share(each.found_dram) for each in columns))
    table.add_row(
        "device s per 1,000 rankings",
        *(f"{each.device_s_per_1000.value:.2f}{_error(each.device_s_per_1000.error, 2)}" for each in columns),
    )
    table.add_row("device load", *(_share(each.device_load) for each in columns))
    table.add_row("device thread load", *(_share(each.thread_load) for each in columns))
    table.add_row(_RANGE_TITLE, *(_RANGE[each.is_in_range] for each in columns))
    table.add_row(_BUSIEST_TITLE, *(f"{each.highest_share:.1f}" for each in columns))
    table.add_row("requests counted", *(f"{each.requests:,}" for each in columns))
    table.add_row("simulations", *(str(each.parts) for each in columns))
    table.add_row("impressions a second of CPU", *(f"{each.impressions_per_s:,.0f}" for each in columns), style="dim")
    return table


def plan_table(rows: list[PlanRow], title: str) -> Table:
    """A row for each figure, a column for each system."""
    table = figures_table(f"Simulated: {title}", *(NAMES[row.system] for row in rows))

    def add(name: str, of: Callable[[PlanRow, Probe], str]) -> None:
        table.add_row(name, *("-" if row.plan.best is None else of(row, row.plan.best) for row in rows))

    table.add_row("workers", *(_workers(row.plan) for row in rows))
    if any(prefixes_for(row.plan.workers) > 1 for row in rows):
        add("topic prefixes, for parts of the users", lambda _, best: f"{prefixes_for(best.workers):,}")
        add("partitions of each prefix", lambda _, best: f"{partitions_for(best.workers):,}")
    else:
        add("partitions", lambda _, best: f"{partitions_for(best.workers):,}")
    add("HBM of all workers", lambda row, _: show_size(row.hbm_bytes) if row.hbm_bytes else "none")
    add("DRAM of all workers", lambda row, _: show_size(row.dram_bytes) if row.dram_bytes else "none")
    add("late, truncated or refused", lambda _, best: _share(best.figures.late_share))
    add("P99", lambda _, best: _ms(best.figures.p99_ms))
    add("device load", lambda _, best: _share(best.figures.device_load))
    add("device thread load", lambda _, best: _share(best.figures.thread_load))
    add(_RANGE_TITLE, lambda _, best: _RANGE[best.figures.is_in_range])
    add(_BUSIEST_TITLE, lambda _, best: f"{best.figures.highest_share:.1f}")
    add("simulated seconds, from empty caches on", lambda _, best: f"{best.seconds:,.0f}")
    if any(row.cost_per_hour is not None for row in rows):
        add("cost of an hour", lambda row, _: f"{row.cost_per_hour or 0:,.2f}")
        add("cost of a million requests", lambda row, _: f"{row.cost_per_million or 0:,.2f}")
    return table


def run_sentence(results: Results) -> str:
    """The result of a simulation in one sentence."""
    late = [f"{_share(each.late_share)} with {NAMES.get(name, name)}" for name, each in results.items()]
    return f"Late, truncated or refused: {', '.join(late)}."


def plan_sentence(rows: Sequence[PlanRow], title: str) -> str:
    """The result of a plan in one sentence."""
    needs = [f"{_workers(row.plan)} with {NAMES[row.system]}" for row in rows]
    return f"Workers for {title}: {', '.join(needs)}."


def to_json(results: Results, described: Mapping[str, Any]) -> dict[str, Any]:
    """The figures by system, with the description of what was simulated."""
    return {"simulated": True, **described, "systems": {str(name): plain(each) for name, each in results.items()}}


def plan_json(rows: list[PlanRow], described: Mapping[str, Any]) -> dict[str, Any]:
    """The plans by system, with every number of workers that was tried."""
    systems = {
        row.system.value: {
            "workers": row.plan.workers or None,
            "topic_prefixes": prefixes_for(row.plan.workers) if row.plan.workers else None,
            "partitions": partitions_for(row.plan.workers) if row.plan.workers else None,
            "is_in_range": row.plan.best.figures.is_in_range if row.plan.best is not None else None,
            "seconds": row.plan.best.seconds if row.plan.best is not None else None,
            "hbm_bytes": row.hbm_bytes,
            "dram_bytes": row.dram_bytes,
            "cost_per_hour": row.cost_per_hour,
            "cost_per_million": row.cost_per_million,
            "probes": [
                {**plain(probe.figures), "workers": probe.workers, "seconds": probe.seconds}
                for probe in row.plan.probes
            ],
        }
        for row in rows
    }
    return {"simulated": True, **described, "systems": systems}


def plain(figures: Figures) -> dict[str, Any]:
    """The figures as JSON takes them: what is not a number is null."""
    plain_figures: dict[str, Any] = finite(asdict(figures))
    return plain_figures | {
        "impressions_per_s": round(figures.impressions_per_s),
        "is_in_range": figures.is_in_range,
    }


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Raises RelayError if the file cannot be written."""
    try:
        path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        raise RelayError(f"--json {path} cannot be written: {error.strerror}.") from error


NAMES: Mapping[str, str] = {System.RELAY: "relay", System.CACHE: "cache only", System.OFF: "full inference"}
_RANGE_TITLE = f"in range (thread load up to {HIGHEST_LOAD:.0%})"
_RANGE = {True: "yes", False: "no"}
_BUSIEST_TITLE = "busiest worker / mean worker"


def _ms(estimate: Estimate) -> str:
    return "-" if math.isnan(estimate.value) else f"{estimate.value:.1f}{_error(estimate.error, 1)} ms"


def _share(estimate: Estimate) -> str:
    if math.isnan(estimate.value):
        return "-"
    return f"{100 * estimate.value:.1f}{_error(None if estimate.error is None else 100 * estimate.error, 1)} %"


def _workers(plan: CapacityPlan) -> str:
    if plan.best is not None:
        return f"{plan.workers:,}"
    return "none is certain" if plan.is_unclear else "none is enough"


def _error(error: float | None, digits: int) -> str:
    return " ± ?" if error is None else f" ± {error:.{digits}f}"
