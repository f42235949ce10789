"""Kills a worker with a hot standby under load, several times: `python -m benchmarks.standby --broker kafka`.

Each kill is a `kill -9` of the active process while users send requests on a fixed schedule. Each adds a line to a CSV:

* delays of the requests before the kill, and the longest delay of a request that the kill affected;
* time from the kill to each step of the take-over, read from the worker's log, and to the first result;
* share of requests that found their prefix before and after the kill; requests without scores; lost requests;
* time until a new standby was ready.

With `--killed supervisor` or `--killed pair` the supervisor is started again at once, and the lines, in a file of their
own, have the time until the first request was served on a cached prefix.

Broker, workers, the loading standby and users share the cores of this machine.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from relaygr.bench.standby.pair import Killed

RESULTS = Path("benchmarks/results/standby")


def main(
    kills: Annotated[int, typer.Option(min=1)] = 5,
    rate: Annotated[float, typer.Option(min=1, help="Requests a second.")] = 40.0,
    users: Annotated[int, typer.Option(min=1)] = 100,
    history: Annotated[int, typer.Option(min=8, help="Behaviours of each user.")] = 512,
    hbm_mib: Annotated[int, typer.Option(min=8)] = 64,
    dram_mib: Annotated[int, typer.Option(min=8)] = 512,
    memory: Annotated[str, typer.Option(help="worker.standby_memory")] = "reserved",
    broker: Annotated[str, typer.Option(metavar="auto|kafka|docker|HOST:PORT")] = "kafka",
    killed: Annotated[Killed, typer.Option(help="The processes that are killed.")] = Killed.ACTIVE,
    out: Annotated[Path | None, typer.Option(help="CSV to append to.")] = None,
) -> None:
    """Measure the cost of a kill."""
    from relaygr.bench.standby.run import measure_kills

    rows = out or RESULTS / ("results.csv" if killed is Killed.ACTIVE else "restarts.csv")
    measure_kills(killed, kills, rate, users, history, hbm_mib, dram_mib, memory, broker, rows)


if __name__ == "__main__":
    from relaygr.cli.app import run

    run(main)
