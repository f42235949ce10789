"""Kills a worker with a hot standby under traffic, again and again: `python -m benchmarks.standby --broker kafka`.

Each kill is `kill -9` of the active process while users come back on a fixed schedule. Of each, one line of a CSV:

* what the requests took before, and the longest of those that the kill touched;
* from the kill to each step of the take-over, as the worker's log tells it, and to the first answer;
* the share that found its prefix before and after, and how many were not answered, or by nobody ever;
* how long until there was a standby again.

All of it shares this machine's cores: broker, both workers, the one that is loading, and the users.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def main(
    kills: Annotated[int, typer.Option(min=1)] = 5,
    rate: Annotated[float, typer.Option(min=1, help="Requests a second.")] = 40.0,
    users: Annotated[int, typer.Option(min=1)] = 100,
    history: Annotated[int, typer.Option(min=8, help="Behaviours of each.")] = 512,
    hbm_mib: Annotated[int, typer.Option(min=8)] = 64,
    dram_mib: Annotated[int, typer.Option(min=8)] = 512,
    memory: Annotated[str, typer.Option(help="worker.standby_memory")] = "reserved",
    broker: Annotated[str, typer.Option(metavar="auto|kafka|docker|HOST:PORT")] = "kafka",
    out: Annotated[Path, typer.Option(help="CSV to append to.")] = Path("benchmarks/results/standby/results.csv"),
) -> None:
    """Measure what a kill costs."""
    from relaygr.bench.standby.run import measure_kills

    measure_kills(kills, rate, users, history, hbm_mib, dram_mib, memory, broker, out)


if __name__ == "__main__":
    typer.run(main)
