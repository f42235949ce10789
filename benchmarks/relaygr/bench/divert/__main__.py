"""Loads one of three workers too much, with and without `worker.divert`: `python -m benchmarks.divert --broker kafka`.

Two fleets of three workers run side by side, one with `worker.divert` and one without. They are loaded in turns, so
that a slow minute of the machine hits both. The null model waits for as long as its latency model says (`paced.py`):
three workers then do not compete for the cores of this machine, as three accelerators would not. There are no retrieval
events; each user is ranked once before anything is measured.

* hot user: one user sends more than one worker can answer, on top of an even load;
* hot partition: all users of the load are in one partition;
* slow worker: an even load, and one worker in three is four times as slow.

Late: no answer on the whole history within the deadline, as a share of all offered requests. Truncated answers count as
late. Diverted: the share that was passed on. A row whose generator was late is not valid, and says so.

`--simulated` plays the same loads in virtual time, without a broker: the product's scheduler, admission and divert
policy, with assumed times of hops (`simulated.py`).
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def main(
    seconds: Annotated[float, typer.Option(min=1, help="Length of each run.")] = 10.0,
    rounds: Annotated[int, typer.Option(min=1, help="Runs of each fleet for each load, in turns.")] = 3,
    simulated: Annotated[bool, typer.Option("--simulated", help="In virtual time, without a broker.")] = False,
    broker: Annotated[str, typer.Option(metavar="auto|embedded|kafka|docker|HOST:PORT")] = "auto",
    out: Annotated[Path, typer.Option(help="CSV to append to.")] = Path("benchmarks/results/divert/results.csv"),
    json: Annotated[Path | None, typer.Option(help="Writes the rows to this file, as a list.")] = None,
) -> None:
    """Measure the late requests of an unevenly loaded fleet, with and without diverting."""
    from relaygr.bench.divert.run import measure_divert, simulate_divert

    if simulated:
        simulate_divert(seconds, rounds, out, json)
    else:
        measure_divert(seconds, rounds, broker, out, json)


if __name__ == "__main__":
    from relaygr.cli.app import run

    run(main)
