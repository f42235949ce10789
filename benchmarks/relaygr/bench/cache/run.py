"""The parts of the cache benchmark, one after the other. `__main__` describes them."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import numpy as np
import torch
from rich.console import Console
from rich.progress import track

from relaygr.admission.latency import LatencyModel
from relaygr.bench.cache import bursts, operations, policies, reloads, report
from relaygr.bench.rows import append_rows, machine, now
from relaygr.schemas.messages import LatencyCoefficients
from relaygr.worker.cache.policies import PolicyName

SIZES_PAGES = (1, 4, 16, 32)
AT_ONCE = (1, 2, 4, 8)
LATENCY = LatencyModel(
    LatencyCoefficients(a0=0, a1=0, a2=0, b0=1_000, b1=5.0, b2=5e-4, c0=0, c1=0, c2=0, d0=30, d1=5e-5)
)
"""Latency of the simulated device: it computes a prefix of 1,024 tokens in 6.6 ms. Its copy takes 1.6 ms."""


def measure(
    parts: Sequence[str], users: int, calls: int, seconds: float, visits: int, logs: Sequence[Path], out: Path
) -> None:
    """Measures the named parts, prints the figures and appends them to the CSVs in `out`."""
    torch.set_num_threads(1)
    console = Console(highlight=False)
    out.mkdir(parents=True, exist_ok=True)
    for part in parts:
        if part == "operations":
            _operations(console, out, users, min(calls, users // 10))
        elif part == "reloads":
            _reloads(console, out)
        elif part == "bursts":
            _bursts(console, out, seconds)
        else:
            _policies(console, out, visits, logs)
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
                now(), machine(), single_flight, break_even, seconds, len(requests),
                float(np.mean(delays_ms)), float(p50_ms), float(p99_ms), copied_gib, computed,
            )
        )  # fmt: skip
    console.print(report.bursts_table(figures))
    append_rows(out / "bursts.csv", [asdict(one) for one in figures])
    report.plot_bursts(out / "bursts.png", figures, all_delays)


def _policies(console: Console, out: Path, visits: int, logs: Sequence[Path]) -> None:
    figures: list[policies.PolicyFigures] = []
    measured_at, jobs = now(), os.cpu_count() or 1
    for name, demands in policies.demands_by_traffic(visits, logs):
        figures += policies.measure(name, demands, LATENCY, measured_at, jobs, policies.COMPARED)
        console.print(report.policies_table(name, figures))
        console.print()
    console.print(report.policies_summary(figures))
    append_rows(out / "policies.csv", [asdict(one) for one in figures])
    report.plot_policies(out / "policies.png", figures)
