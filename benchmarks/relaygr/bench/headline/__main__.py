"""The headline figures: `python -m benchmarks.headline --quick --broker kafka`. docs/benchmark.md explains them.

* A: the longest history at which the deadline holds at P99, at a fixed rate.
* B: the highest rate at which it holds, at a fixed history.

`--quick` takes 10 to 15 minutes on two cores, 20 on a busy host: one cell, one seed, so its figures are indicative and
decide nothing. `--full` runs the committed grid with seven seeds, and says before how long it takes. `--simulated`
plays the grid in virtual time on `--processes` cores, with times that it first learns on the broker. `--rates 5,50`
plays only these rates, each after one or two minutes of warm-up, without a search, and `--histories 2048,4096` plays
them at these lengths. `--trace FILE` plays a trace of your own on each system; with `--seconds` its first part.
`--make-trace FILE` writes the trace of a load and ends. With `--any-speed` runs on a slow machine count: the report
says how slow it was. `--check-simulation` plays the live runs of the folder again in virtual time. `--report` makes the
report again from the CSV files and measures nothing. `--page docs/benchmark.md` also writes the main figures (with
`--report`: of the last search, else of the last run) into that page: live ones between its marks `figures`, simulated
ones between `grid` and `cells of others`, and those of given rates between marks with the name of the folder.

A run that is interrupted goes on where it stopped when the same command is given again.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from relaygr.runtime.errors import RelayError

OUT = Path("benchmarks/results/headline")


def main(
    quick: Annotated[bool, typer.Option("--quick", help="One cell, one seed, 10 to 20 minutes.")] = False,
    full: Annotated[
        bool, typer.Option("--full", help="The grid, with seven seeds. Says first how long it takes.")
    ] = False,
    simulated: Annotated[
        bool, typer.Option("--simulated", help="The grid in virtual time, about an hour on two cores.")
    ] = False,
    rates: Annotated[
        str, typer.Option(help="Only play these requests/s, by commas, without a search.", show_default=False)
    ] = "",
    histories: Annotated[
        str, typer.Option(help="With --rates: median behaviours, by commas.", show_default="the cell's")
    ] = "",
    check_simulation: Annotated[
        bool, typer.Option("--check-simulation", help="Play the live runs of --out again in virtual time, and compare.")
    ] = False,
    report: Annotated[bool, typer.Option("--report", help="Only make the report again from the CSV files.")] = False,
    trace: Annotated[
        Path | None, typer.Option(help="Play this trace (.parquet or .csv) on each system.", show_default=False)
    ] = None,
    make_trace: Annotated[
        Path | None, typer.Option(help="Only write the trace of the first cell to this file.", show_default=False)
    ] = None,
    cells: Annotated[str, typer.Option(help="Cells, by commas; `list` prints them.", show_default="all")] = "",
    systems: Annotated[
        str, typer.Option(help="Systems, by commas.", show_default="B0,C,R,O where possible; all with --full")
    ] = "",
    seeds: Annotated[
        int | None,
        typer.Option(min=1, help="Seeds of each search or rate; runs of a --trace.", show_default="1; 7 with --full"),
    ] = None,
    processes: Annotated[int, typer.Option(min=1, help="In virtual time: runs side by side.")] = 2,
    seed: Annotated[int, typer.Option(min=0, help="The first seed; the others follow it.")] = 1,
    rate: Annotated[float, typer.Option(min=0.01, help="With --make-trace: impressions/s.")] = 20.0,
    seconds: Annotated[
        float | None,
        typer.Option(
            min=1,
            help="Measured part of each run; with --trace: its first seconds alone.",
            show_default="6; 30 with --rates; 120 with --full; the whole --trace",
        ),
    ] = None,
    any_speed: Annotated[
        bool, typer.Option("--any-speed", help="For a host that is never quiet: runs on a slow machine count.")
    ] = False,
    interactions: Annotated[
        Path | None, typer.Option(help="An interaction log: users with real histories.", show_default=False)
    ] = None,
    broker: Annotated[str, typer.Option(metavar="auto|embedded|kafka|docker|HOST:PORT")] = "auto",
    page: Annotated[
        Path | None,
        typer.Option(help="Also write the main figures between the marks of this page.", show_default=False),
    ] = None,
    yes: Annotated[bool, typer.Option("--yes", help="With --full: do not ask.")] = False,
    out: Annotated[Path, typer.Option(help="Folder of the results, the traces and the report.")] = OUT,
) -> None:
    """Measure the longest history and the most requests that meet the deadline, for each system."""
    wanted_modes = (
        quick, full, simulated, check_simulation, report, bool(rates), trace is not None, make_trace is not None,
        cells == "list",
    )  # fmt: skip
    if sum(wanted_modes) != 1:
        raise RelayError(
            "give one of --quick, --full, --simulated, --rates RATES, --trace FILE, --make-trace FILE, "
            "--check-simulation, --report and --cells list"
        )

    from relaygr.bench.generator.trace import digest_of
    from relaygr.bench.headline.command import list_cells, measure, measure_rates, measure_trace, simulate, write_load
    from relaygr.bench.headline.grid import GRID, QUICK
    from relaygr.bench.headline.points import FULL_MODE, QUICK_MODE, RATES_MODE, SIMULATED_MODE, TRACE_MODE
    from relaygr.bench.headline.report import FIGURES, fill_page, marked_name, read_page, write_report
    from relaygr.bench.headline.rows import OF_LOG
    from relaygr.bench.headline.systems import NOT_SIMULATED, QUICK_SYSTEMS, SIMULATED_SYSTEMS, System
    from relaygr.runtime.stop_signals import exit_on_sigterm

    exit_on_sigterm()
    if cells == "list":
        return list_cells()
    modes = ((full, FULL_MODE), (simulated, SIMULATED_MODE), (bool(rates), RATES_MODE), (trace is not None, TRACE_MODE))
    mode = next((mode for is_asked, mode in modes if is_asked), QUICK_MODE)
    mode = mode.with_seeds(tuple(seed + number for number in range(seeds or len(mode.seeds))))
    if seconds is not None:
        # Runs of another length are not mixed with those that the folder has.
        mode = replace(mode, seconds=seconds, name=f"{mode.name}-{seconds:g}s")
    if any_speed:
        if simulated:
            raise RelayError("--any-speed belongs to real runs: virtual time has one speed")
        mode = mode.at_any_speed()
    chosen = _chosen_cells(cells, GRID if full or simulated else (QUICK,))
    impossible: dict[System, str] = {}
    if interactions is not None:
        impossible[System.B1] = "B1 takes its longest history from figure A, which --interactions does not measure"
    if trace is not None:
        if page is not None:
            raise RelayError("--trace searches for nothing, so it has no figures for --page")
        impossible[System.B1] = "B1 takes its longest history from figure A, which a trace does not have"
    if histories and not rates:
        raise RelayError("--histories belongs to --rates; --quick and --full search for the longest history themselves")
    if histories and interactions is not None:
        raise RelayError("the users of a log have histories of their own lengths: leave out --histories")
    if rates:
        impossible[System.B1] = "B1 takes its longest history from figure A, which --rates does not measure"
    if trace is not None or interactions is not None:
        impossible[System.O] = "O ranks synthetic users of its own: it plays neither --trace nor --interactions"
    if simulated:
        impossible = dict(NOT_SIMULATED)
        if interactions is not None:
            raise RelayError("--simulated does not take --interactions")
    if page is not None:
        # A page without marks is refused before the runs, not after them.
        text, folder = read_page(page), out.resolve().name
        if not (report or simulated or check_simulation):
            marked_name(page, text, folder, *(() if rates else (FIGURES,)))
    default = tuple(System) if full else SIMULATED_SYSTEMS if simulated else QUICK_SYSTEMS
    wanted = _chosen_systems(systems, default, impossible)
    if interactions is not None:
        named = f"{mode.name}{OF_LOG}{digest_of(interactions)}"
        mode = replace(mode, name=named, a_systems=(), measures_short_capacity=False)
    if make_trace is not None:
        return write_load(chosen[0], make_trace, rate, mode, interactions)
    if trace is not None:
        measure_trace(chosen[0], wanted, trace, mode, broker, out, interactions, seconds)
    elif rates:
        measure_rates(chosen, wanted, _rates_of(rates), _histories_of(histories), mode, broker, out, interactions)
    elif simulated:
        simulate(chosen, wanted, mode, broker, out, processes)
    elif check_simulation:
        from relaygr.bench.headline.checked import compare_in_virtual_time

        compare_in_virtual_time(out, processes)
    elif not report and not measure(chosen, wanted, mode, broker, out, interactions, asks=full and not yes):
        return None
    write_report(out)
    if page is not None:
        fill_page(out, None if report or check_simulation else mode.name, page)
    return None


def _rates_of(text: str) -> list[float]:
    try:
        rates = [float(rate) for rate in text.split(",")]
    except ValueError:
        rates = []
    if not rates or not all(0.1 <= rate <= 10_000 for rate in rates):
        raise RelayError(f"--rates takes requests a second, 0.1 to 10,000, by commas, such as 5,50: not {text!r}")
    return rates


def _histories_of(text: str) -> list[int]:
    if not all(each.isdecimal() and int(each) for each in text.split(",") if text):
        raise RelayError(f"--histories takes whole numbers of behaviours, by commas, such as 2048,4096: not {text!r}")
    return [int(each) for each in text.split(",")] if text else []


def _names_of(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]


def _chosen_cells(text: str, default: tuple) -> tuple:  # type: ignore[type-arg]
    from relaygr.bench.headline.grid import BY_NAME

    names = _names_of(text)
    unknown = [name for name in names if name not in BY_NAME]
    if unknown:
        raise RelayError(f"no cell has the name {unknown[0]!r}: `--cells list` prints them")
    return tuple(BY_NAME[name] for name in names) or default


def _chosen_systems(text: str, default: tuple, impossible: dict) -> tuple:  # type: ignore[type-arg]
    from relaygr.bench.headline.systems import System

    names, known = _names_of(text), {system.value.lower(): system for system in System}
    unknown = [name for name in names if name.lower() not in known]
    if unknown:
        raise RelayError(f"no system has the name {unknown[0]!r}: there are {', '.join(System)}")
    wanted = {known[name.lower()] for name in names} or set(default) - impossible.keys()
    for system, why in impossible.items():
        if system in wanted:
            raise RelayError(why)
    # B0 comes first: the others are compared with it.
    return tuple(system for system in System if system in wanted)


if __name__ == "__main__":
    from relaygr.cli.app import run

    run(main)
