"""What the command does: it says what will be run and how long it takes, and runs it."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import typer
from rich.console import Console
from rich.table import Table

from relaygr.bench.generator.trace import write_trace
from relaygr.bench.generator.workload import Workload, make_trace, reuse_of
from relaygr.bench.headline.figures import NO_LENGTHS
from relaygr.bench.headline.grid import GRID, LENGTH_FACTORS, LOOSE, PUBLISHED, QUICK, REUSES, Cell, at_reuse
from relaygr.bench.headline.points import FRESH_SEEDS, PARTITIONS, Asked, Mode, estimated_runs, points_at
from relaygr.bench.headline.rows import RunFile, RunRow
from relaygr.bench.headline.run import RUN_OVERHEAD_S, Bench, estimated_s, name_of, read_others
from relaygr.bench.headline.systems import System
from relaygr.cli.texts import plain_console
from relaygr.devbroker import local_broker
from relaygr.runtime.errors import RelayError
from relaygr.traffic.population import population_of
from relaygr.traffic.settings import TrafficSettings

SIMULATED_RUN_S = 3.0
"""About the time of one simulated run on one core."""


def measure(
    cells: Sequence[Cell],
    systems: Sequence[System],
    mode: Mode,
    broker: str,
    out: Path,
    interactions: Path | None,
    asks: bool,
) -> bool:
    """Runs the cells. False: the user declined after the estimate of the time."""
    console = plain_console()
    asked = with_other_reuses(cells, systems, mode)
    runs = sum(estimated_runs(each, mode) for _, each in asked)
    known = min(runs, runs_there(RunFile(out).rows, asked, mode))
    whole_s = estimated_s(asked, mode) * (1 - known / runs)
    there = f" ({known} are there)" if known else ""
    days = f" ({whole_s / 86_400:.1f} days)" if whole_s > 86_400 else ""
    console.print(
        f"cells {', '.join(cell.name for cell, _ in asked)}; systems {', '.join(systems)}; "
        f"seeds {', '.join(map(str, mode.seeds))}: "
        f"about {runs} runs{there}, {whole_s / 60:.0f} minutes{days}",
        soft_wrap=True,
    )
    if not mode.decides:
        console.print("indicative: with one seed a figure may be off by a step of its search, and nothing is decided")
    if interactions is not None:
        console.print(NO_LENGTHS, soft_wrap=True)
    if asks and not typer.confirm("Begin?"):
        return False
    with _bench(console, broker, mode, out, interactions) as bench:
        bench.run_cells(asked)
    return True


def runs_there(rows: Iterable[RunRow], asked: Asked, mode: Mode) -> int:
    """How many of the asked runs have a valid row."""
    places = {(mode.name, cell.name, system.value) for cell, systems in asked for system in systems}
    valid = (row for row in rows if row.valid and (row.mode, row.cell, row.system) in places)
    # The seeds of confirming runs are those of the search plus a multiple of `FRESH_SEEDS`.
    return len({row.key for row in valid if row.seed % FRESH_SEEDS in mode.seeds})


def simulate(
    cells: Sequence[Cell], systems: Sequence[System], mode: Mode, broker: str, out: Path, processes: int
) -> None:
    """Simulates the cells. Without learnt times in the folder it first plays runs on the broker to learn them."""
    from relaygr.bench.headline.simulated import SimulatedBench, learnt_in

    console = plain_console()
    asked = with_other_reuses(cells, systems, mode)
    learnt = learnt_in(out, console, broker)
    runs = sum(estimated_runs(each, mode) for _, each in asked)
    console.print(
        f"{len(asked)} cells; systems {', '.join(systems)}; seeds {', '.join(map(str, mode.seeds))}: about {runs:,} "
        f"simulated runs, {runs * SIMULATED_RUN_S / processes / 60:.0f} minutes on {processes} cores",
        soft_wrap=True,
    )
    SimulatedBench(console, out, mode, learnt, processes).run_cells(asked)


def with_other_reuses(
    cells: Sequence[Cell], systems: Sequence[System], mode: Mode
) -> list[tuple[Cell, tuple[System, ...]]]:
    """Each cell with the systems. After it, the same cell at each of `REUSES` that is not there: with R, and with B0
    unless its runs in the first cell stand for those.
    """
    there = {(cell.family, cell.reuse) for cell in cells}
    asked: list[tuple[Cell, tuple[System, ...]]] = []
    for cell in cells:
        asked.append((cell, tuple(systems)))
        others = [at_reuse(cell, reuse) for reuse in REUSES if (cell.family, reuse) not in there]
        there |= {(other.family, other.reuse) for other in others}
        for other in others:
            wanted = (System.R,) if mode.lends_b0(other) else (System.B0, System.R)
            chosen = tuple(system for system in systems if system in wanted)
            asked += [(other, chosen)] if chosen else []
    return asked


def measure_rates(
    cells: Sequence[Cell],
    systems: Sequence[System],
    rates_per_s: Sequence[float],
    histories: Sequence[int],
    mode: Mode,
    broker: str,
    out: Path,
    interactions: Path | None,
) -> None:
    """Plays these rates on each system, without a search, at these histories; without any, at the cells'."""
    console = plain_console()
    for cell, history in itertools.product(cells, histories):
        if history > cell.history * LENGTH_FACTORS[1]:
            longest = int(cell.history * LENGTH_FACTORS[1])
            raise RelayError(f"cell {cell.name} takes histories of up to {longest:,} behaviours, not {history:,}")
    points = [point for cell in cells for point in points_at(cell, rates_per_s, histories, mode.seeds)] * len(systems)
    whole_s = sum(mode.seconds_at(point.rate_per_s) + mode.warm_up_s + RUN_OVERHEAD_S for point in points)
    console.print(f"{len(points)} runs, {whole_s / 60:.0f} minutes")
    with _bench(console, broker, mode, out, interactions) as bench:
        bench.run_rates(cells, systems, rates_per_s, histories)


def measure_trace(
    cell: Cell,
    systems: Sequence[System],
    trace: Path,
    mode: Mode,
    broker: str,
    out: Path,
    interactions: Path | None,
    seconds: float | None,
) -> None:
    """Plays a trace of others, or its first seconds, on each system."""
    # A file that cannot be played is refused before the broker starts.
    read = read_others(trace, cell, seconds)
    with _bench(plain_console(), broker, mode, out, interactions) as bench:
        bench.run_trace(cell, systems, read)


@contextmanager
def _bench(console: Console, broker: str, mode: Mode, out: Path, interactions: Path | None) -> Iterator[Bench]:
    """A bench on the chosen broker, which it names."""
    with local_broker(broker, os.environ.get("RELAYGR_BOOTSTRAP")) as started:
        console.print(f"broker: {started.what}", soft_wrap=True)
        RunFile(out).refuse_other_brokers(name_of(started))
        with Bench(console, out, started, mode, interactions) as bench:
            yield bench


def write_load(cell: Cell, path: Path, rate_per_s: float, mode: Mode, interactions: Path | None) -> None:
    """Writes the trace of a cell at a rate. The lead time is the cell's factor times 50 ms: it has no machine."""
    logged = None
    if interactions is not None:
        logged = population_of(
            TrafficSettings(
                interactions=interactions, users=100_000, history_max=cell.longest_history, suffix=cell.suffix
            )
        )
    trace = make_trace(
        Workload(
            seed=mode.seeds[0], rate_per_s=rate_per_s, seconds=mode.seconds, warm_up_s=mode.warm_up_s,
            reuse=cell.reuse, return_gap_s=cell.return_gap_s, history_median=cell.history,
            history_max=2 * cell.history, lead_median_ms=50 * cell.lead_factor, suffix=cell.suffix,
            candidates=cell.candidates, zipf=cell.zipf, history_sigma=cell.history_sigma, growth=cell.growth,
            burst_factor=cell.burst_factor, hot_user_share=cell.hot_user_share, partitions=PARTITIONS,
        ),
        logged=logged,
    )  # fmt: skip
    write_trace(trace, path)
    plain_console().print(f"{path}: {len(trace):,} impressions, {reuse_of(trace):.0%} of users seen before")


def list_cells() -> None:
    """Prints every cell."""
    table = Table(title="Cells; times are multiples of what the engine alone takes")
    for name in ("cell", "history", "deadline", "lead", "reuse", "return gap", "candidates", "else"):
        table.add_column(name)
    for cell in (QUICK, LOOSE, *GRID, *PUBLISHED):
        others = {
            "growth": cell.growth,
            "zipf": cell.zipf,
            "bursts": cell.burst_factor,
            "hot user": cell.hot_user_share,
        }
        usual = {"growth": QUICK.growth, "zipf": QUICK.zipf, "bursts": 1.0, "hot user": 0.0}
        table.add_row(
            cell.name, f"{cell.history:,}", f"{cell.deadline_factor:g} full", f"{cell.lead_factor:g} pre-infer",
            f"{cell.reuse:g}", f"{cell.return_gap_s:g} s", str(cell.candidates),
            ", ".join(f"{name} {value:g}" for name, value in others.items() if value != usual[name]),
        )  # fmt: skip
    console = plain_console(width=120)
    console.print(table)
    for cell in (LOOSE, *PUBLISHED):
        console.print(f"{cell.name}: {cell.origin}", soft_wrap=True)
    console.print(
        f"Each cell is also there as NAME-r0 and NAME-r{REUSES[1]:g}: with other shares of returning users.",
        soft_wrap=True,
    )
    console.print(
        f"A trace (--trace) may have histories of up to {QUICK.longest_history // QUICK.history} times that length, "
        f"suffixes of up to {QUICK.longest_suffix} behaviours and as many candidates.",
        soft_wrap=True,
    )
