"""What the demo prints before and after its runs."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from relaygr.demo.plan import DemoPlan
from relaygr.demo.summary import COLD_SHARE, Gate, Punctuality, RunSummary, ScoreComparison


def print_plan(console: Console, plan: DemoPlan, workers: int, users: int) -> None:
    """The calibration, and the plan that follows from it."""
    console.print(
        f"measured   full inference {plan.full_median_ms:.1f} ms at {plan.history_median} behaviours, "
        f"{plan.full_p90_ms:.1f} ms at {plan.history_p90}; pre-infer {plan.pre_infer_p90_ms:.1f} ms, "
        f"ranking on a cached prefix {plan.hit_ms:.1f} ms at {plan.history_p90}",
        soft_wrap=True,
    )
    console.print(
        f"plan       {users} users, {plan.rate_per_s} impressions/s on {workers} workers; deadline "
        f"{plan.budget_ms} ms, lead time {plan.lead_ms} ms; a worker holds {plan.hbm_bytes / 2**20:.0f} MiB of K,V "
        f"in HBM, {plan.dram_bytes / 2**20:.0f} MiB in DRAM",
        soft_wrap=True,
    )


def print_summary(
    console: Console,
    relay: RunSummary,
    full: RunSummary,
    budget_ms: int,
    comparison: ScoreComparison,
    shown: Sequence[Gate],
) -> None:
    """Both runs side by side, and what was to be shown."""
    table = Table(title=f"The same schedule, deadline {budget_ms} ms", title_justify="left")
    table.add_column("")
    table.add_column("relay on", justify="right")
    table.add_column("relay off", justify="right")
    runs = (relay, full)
    table.add_row("requests offered", *(str(run.offered) for run in runs))
    table.add_row("ranked", *(f"{run.ranked} ({run.share(run.ranked):.1%})" for run in runs))
    table.add_row("lost", *(str(run.lost) for run in runs))
    _add_punctuality(table, [run.whole for run in runs])
    table.add_section()
    table.add_row(f"Without the first {COLD_SHARE:.0%}, when all is cold:")
    _add_punctuality(table, [run.settled for run in runs])
    table.add_section()
    for ending in sorted(set(relay.endings) | set(full.endings)):
        table.add_row(ending, *(_count(run, ending) for run in runs))
    table.add_row("prefix from DRAM", *(str(run.from_dram) for run in runs))
    table.add_section()
    table.add_row("device seconds", *(f"{run.device_seconds:.1f}" for run in runs))
    table.add_row("generator behind, P99", *(f"{run.send_lag_p99_ms:.2f} ms" for run in runs))
    console.print()
    console.print(table)
    console.print(
        f"scores     {comparison.compared} requests compared with full inference, worst error "
        f"{comparison.worst_error:.1e} of the largest score"
    )
    for gate in shown:
        mark = "[green]yes[/green]" if gate.passed else "[red]NO [/red]"
        console.print(f"{mark}        {gate.name}: {gate.found}")


def _add_punctuality(table: Table, runs: Sequence[Punctuality]) -> None:
    table.add_row("late, cut short, failed or expired", *(f"{run.late} ({run.late_share:.1%})" for run in runs))
    table.add_row("P50", *(f"{run.p50_ms:.1f} ms" for run in runs))
    table.add_row("P99", *(f"{run.p99_ms:.1f} ms" for run in runs))


def _count(run: RunSummary, ending: str) -> str:
    count = run.endings.get(ending, 0)
    return f"{count} ({run.share(count):.1%})" if count else "-"
