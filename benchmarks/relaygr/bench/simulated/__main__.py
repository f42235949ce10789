"""Compares `relaygr simulate` with measured runs: `python -m benchmarks.simulated --broker kafka`.

The real relay (broker, trigger, one worker and a gateway) runs on this machine. The capacity of a system, the relay or
full inference alone, is the load that fills the worker's device thread, by simulation. Each cell, a part of a system's
capacity, is measured `--repeats` times. Before each of these runs another one is played, with another seed and at a
load that is no cell. From those the simulation learns the times of Kafka and worker and the noise. Then it plays the
cell's schedules:

* P50 and P99: simulated / measured - 1;
* late: difference of the shares without an answer over the whole history in time, in points;
* mix: the largest difference of the share of a path, in points.

A cell agrees if P50 is within 5 %, P99 within 10 %, late within 2 points and mix within 3; or within the spread of the
repeated runs, where that is larger. A cell above 80 % of capacity is out of range: it is shown and not judged. The exit
code is 1 if a cell in range differs, or if two of them change places in the order of P99. All this takes 25 minutes.
Each pair of runs first waits until the machine is quiet, for a minute at most. `foreign_cpu` says how many cores other
processes used, and `slowdown` how much longer than on the quiet machine fixed work took: where they are high, a
difference says little.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def main(
    loads: Annotated[str, typer.Option(help="Parts of the capacity.")] = "0.3,0.6,0.8",
    seconds: Annotated[float, typer.Option(min=5, help="Length of each run.")] = 30.0,
    repeats: Annotated[int, typer.Option(min=1, help="Measured runs of each cell, each with a seed of its own.")] = 3,
    broker: Annotated[str, typer.Option(metavar="auto|embedded|kafka|docker|HOST:PORT")] = "auto",
    out: Annotated[Path, typer.Option(help="CSV to append to.")] = Path("benchmarks/results/simulated/results.csv"),
    json: Annotated[Path | None, typer.Option(help="Writes the rows to this file, as a list.")] = None,
) -> None:
    """Compare the simulation with measured runs; the exit code is 1 if a cell differs."""
    from relaygr.bench.simulated.run import compare_with_measured

    if not compare_with_measured(loads, seconds, repeats, broker, out, json):
        raise typer.Exit(1)


if __name__ == "__main__":
    from relaygr.cli.app import run

    run(main)
