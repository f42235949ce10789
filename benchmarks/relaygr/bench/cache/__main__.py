"""Measures the prefix cache: `python -m benchmarks.cache`.

* `operations`: how many a second the books carry with very many users, each operation under each policy;
* `reloads`: how long a copy from DRAM takes, by size and by how many are asked for at once, real bytes;
* `bursts`: what single flight and the break-even rule save on one bursty trace, with and without (simulated).

Figures are appended to a CSV each, with the machine's description; pictures are drawn of this run.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import numpy as np
import torch
import typer
from rich.console import Console
from rich.progress import track

from relaygr.admission.latency import LatencyModel
from relaygr.bench.cache import bursts, operations, reloads, report
from relaygr.schemas.messages import LatencyCoefficients
from relaygr.worker.cache.policies import PolicyName

PARTS = ("operations", "reloads", "bursts")
SIZES_PAGES = (1, 4, 16, 32)
AT_ONCE = (1, 2, 4, 8)
LATENCY = LatencyModel(
    LatencyCoefficients(a0=0, a1=0, a2=0, b0=1_000, b1=5.0, b2=5e-4, c0=0, c1=0, c2=0, d0=30, d1=5e-5)
)
"""Of the simulated device: a prefix of 1,024 tokens takes it 6.6 ms, and its copy 1.6 ms."""


def main(
    only: Annotated[list[str] | None, typer.Option(help=f"One of {', '.join(PARTS)}. Repeat it.")] = None,
    users: Annotated[int, typer.Option(min=1_000, help="Users in the cache, for operations.")] = 100_000,
    calls: Annotated[int, typer.Option(min=10, help="Calls a round, for operations.")] = 2_000,
    seconds: Annotated[float, typer.Option(min=1, help="Length of the trace, for bursts.")] = 20.0,
    out: Annotated[Path, typer.Option(help="Folder of the CSVs and pictures.")] = Path("benchmarks/results/cache"),
) -> None:
    """Measure what the cache costs and what its rules save."""
    torch.set_num_threads(1)
    console = Console(highlight=False)
    out.mkdir(parents=True, exist_ok=True)
    for part in only or PARTS:
        if part == "operations":
            _operations(console, out, users, min(calls, users // 10))
        elif part == "reloads":
            _reloads(console, out)
        elif part == "bursts":
            _bursts(console, out, seconds)
        else:
            raise typer.BadParameter(f"--only {part}: one of {', '.join(PARTS)}")
        console.print()


def _operations(console: Console, out: Path, users: int, calls: int) -> None:
    figures = []
    for policy in track(list(PolicyName), "operations", console=Console(stderr=True), transient=True):
        for operation, us in operations.measure(policy, users, calls):
            one = operations.OperationFigures(
                report.now(), report.machine(), policy.value, operation, users, 1e6 / us, us
            )
            figures.append(one)
    console.print(report.operations_table(figures))
    report.append(out / "operations.csv", figures)
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
                report.now(), report.machine(), size_mib, at_once, first_ms, last_ms, gib / last_ms * 1000,
                gib / plain_ms * 1000,
            )
        )  # fmt: skip
    console.print(report.reloads_table(figures))
    report.append(out / "reloads.csv", figures)
    report.plot_reloads(out / "reloads.png", figures)


def _bursts(console: Console, out: Path, seconds: float) -> None:
    requests = bursts.trace(seconds)
    figures, all_delays = [], []
    variants = [(True, True), (True, False), (False, True), (False, False)]
    for single_flight, break_even in track(variants, "bursts", console=Console(stderr=True), transient=True):
        delays_ms, copied_gib, computed = bursts.measure(requests, LATENCY, single_flight, break_even)
        p50_ms, p99_ms = np.percentile(delays_ms, (50, 99))
        all_delays.append(delays_ms)
        figures.append(
            bursts.BurstFigures(
                report.now(), report.machine(), single_flight, break_even, seconds, len(requests),
                float(np.mean(delays_ms)), float(p50_ms), float(p99_ms), copied_gib, computed,
            )
        )  # fmt: skip
    console.print(report.bursts_table(figures))
    report.append(out / "bursts.csv", figures)
    report.plot_bursts(out / "bursts.png", figures, all_delays)


if __name__ == "__main__":
    typer.run(main)
