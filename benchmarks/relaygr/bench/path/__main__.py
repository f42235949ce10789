"""Counts the Python calls of one ranking request in a worker: `python -m benchmarks.path`.

Two requests are counted from `ConsumerLoop._receive` to the finished offset: one whose prefix a pre-infer job left in
HBM, and one whose prefix is computed in full. Only the broker, the model and LMDB are fakes (`world`).

* calls: of functions of the product, that is, of files of the namespace `relaygr` without its benchmarks;
* files and classes: those of the called functions;
* moves: calls into another file than that of the call before, as a reader who follows the request has to make.

`--pauses` prints the CPU time of a hit after pauses of several lengths. A worker that is not busy rests between
requests.

`--json` prints `{"hit": {"calls":, "files":, "moves":}, "miss": {...}}` and nothing else. `--by-file` also prints the
calls and the moves of each file.
"""

from __future__ import annotations

import json
import logging
from collections import Counter
from pathlib import PurePath
from typing import Annotated

import numpy as np
import structlog
import typer
from rich.console import Console
from rich.table import Table

from relaygr.bench.path.trace import CpuTimes, Trace
from relaygr.schemas.messages import Path

PAUSES_S = (0.0, 0.001, 0.005, 0.02)
TIMED_HITS = 200
WARM_UP_HITS = 50


def main(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON and nothing else.")] = False,
    by_file: Annotated[bool, typer.Option("--by-file", help="Print the calls and moves of each file.")] = False,
    pauses: Annotated[bool, typer.Option("--pauses", help="Print the CPU time of a hit after pauses.")] = False,
) -> None:
    """Count the calls, files and moves of one ranking request."""
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING))
    if pauses:
        return Console(highlight=False).print(_times())
    traces = {"hit": trace_request(is_cached=True), "miss": trace_request(is_cached=False)}
    if as_json:
        figures = {
            name: {"calls": trace.calls, "files": trace.files, "moves": trace.moves} for name, trace in traces.items()
        }
        return typer.echo(json.dumps(figures))
    console = Console(highlight=False)
    console.print(_summary(traces))
    if by_file:
        for name, trace in traces.items():
            console.print(_files(name, trace))
    return None


def trace_request(*, is_cached: bool) -> Trace:
    """The calls of one request, whose prefix was computed ahead or is not cached."""
    # Imports torch, which `--help` does not need.
    from relaygr.bench.path.world import World

    world = World()
    # The first request of a worker also fills caches of Python and of the codec.
    world.store_history("first")
    world.rank("first")
    world.store_history("user")
    if is_cached:
        world.pre_infer("user")
    world.rank("user", world.trace)
    result = world.run()[-1]
    if result.path is not (Path.HBM if is_cached else Path.FULL):
        raise RuntimeError(f"the request took another path than the one to count: {result.path or result.outcome}")
    return world.trace


def time_hits(pause_s: float, hits: int) -> list[float]:
    """The CPU time in µs of each of so many hits, each after a pause."""
    from relaygr.bench.path.world import World

    world, times = World(), CpuTimes()
    world.store_history("user")
    world.pre_infer("user")
    for number in range(WARM_UP_HITS + hits):
        if number >= WARM_UP_HITS:
            world.pause(pause_s)
        world.rank("user", times if number >= WARM_UP_HITS else None)
    world.run()
    return times.took_us


def _times() -> Table:
    table = Table(title=f"CPU time of a hit, of {TIMED_HITS}")
    for name in ("pause before", "median", "P10", "P90"):
        table.add_column(name, justify="right")
    for pause_s in PAUSES_S:
        p10, median, p90 = np.percentile(time_hits(pause_s, TIMED_HITS), [10, 50, 90])
        table.add_row(f"{pause_s * 1000:g} ms", *(f"{took_us:.0f} µs" for took_us in (median, p10, p90)))
    return table


def _summary(traces: dict[str, Trace]) -> Table:
    table = Table(title="One ranking request, from its receipt to the finished offset")
    for name in ("request", "calls", "files", "classes", "moves"):
        table.add_column(name, justify="left" if name == "request" else "right")
    for name, trace in traces.items():
        table.add_row(name, *(str(count) for count in (trace.calls, trace.files, trace.classes, trace.moves)))
    return table


def _files(name: str, trace: Trace) -> Table:
    calls, moves = Counter[str](), Counter[str]()
    for (file, _), count in trace.by_function.items():
        calls[file] += count
    for (_, file), count in trace.by_move.items():
        moves[file] += count
    table = Table(title=name)
    for heading in ("file", "calls", "moves into it"):
        table.add_column(heading, justify="left" if heading == "file" else "right")
    for file, count in calls.most_common():
        table.add_row(_short(file), str(count), str(moves[file]))
    return table


def _short(file: str) -> str:
    parts = PurePath(file).parts
    start = len(parts) - 1 - parts[::-1].index("relaygr")
    return "/".join(parts[start + 1 :])


if __name__ == "__main__":
    from relaygr.cli.app import run

    run(main)
