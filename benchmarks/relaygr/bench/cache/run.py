"""The parts of the cache benchmark, one after the other. `__main__` describes them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import track

from relaygr.bench.cache import operations, reloads, report
from relaygr.bench.rows import append_rows, machine, now
from relaygr.worker.cache.policies import PolicyName

SIZES_PAGES = (1, 4, 16, 32)
AT_ONCE = (1, 2, 4, 8)


def measure(parts: Sequence[str], users: int, calls: int, out: Path) -> None:
    """Measures the named parts, prints the figures and appends them to the CSVs in `out`."""
    torch.set_num_threads(1)
    console = Console(highlight=False)
    out.mkdir(parents=True, exist_ok=True)
    for part in parts:
        if part == "operations":
            _operations(console, out, users, min(calls, users // 10))
        else:
            _reloads(console, out)
        console.print()


def _operations(console: Console, out: Path, users: int, calls: int) -> None:
    figures = []
    for policy in track(list(PolicyName), "operations", console=Console(stderr=True), transient=True):
        for operation, us in operations.measure(policy, users, calls):
            one = operations.OperationFigures(now(), machine(), policy.value, operation, users, 1e6 / us, us)
            figures.append(one)
    console.print(report.operations_table(figures))
    append_rows(out / "operations.csv", [asdict(one) for one in figures])
    report.plot_operations(out / "operations.png", figures)


def _reloads(console: Console, out: Path) -> None:
    figures = []
    cases = [(pages, at_once) for pages in SIZES_PAGES for at_once in AT_ONCE]
    for pages, at_once in track(cases, "reloads", console=Console(stderr=True), transient=True):
        first_ms, last_ms, plain_ms = reloads.measure(pages, at_once)
        size_mib = pages * reloads.GEOMETRY.page_bytes / reloads.MIB
        gib = size_mib * at_once / 1024
        figures.append(
            reloads.ReloadFigures(
                now(), machine(), size_mib, at_once, first_ms, last_ms, gib / last_ms * 1000,
                gib / plain_ms * 1000,
            )
        )  # fmt: skip
    console.print(report.reloads_table(figures))
    append_rows(out / "reloads.csv", [asdict(one) for one in figures])
    report.plot_reloads(out / "reloads.png", figures)
