"""Histories in one worker's store: `python -m benchmarks.histories --broker kafka`.

Fills a store with users of equal histories, and measures on one core: its size, look-ups, appends of one behaviour to
random users in transactions of the follower's size, and the deletion of one partition. With `--broker kafka` it then
publishes records of one behaviour, and a follower reads them into the store: consumer, decoder and store together. The
stages are measured apart too, so that the table shows which one limits.

100,000 users of 8,192 behaviours take 15 GiB of disk, and of memory if look-ups shall not wait for the disk:

    python -m benchmarks.histories --users 100000 --broker kafka

It pins itself to one core. The broker is idle while the follower reads what was published before.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def main(
    users: Annotated[int, typer.Option(min=48, help="Users in the store.")] = 10_000,
    length: Annotated[int, typer.Option(min=0, help="Behaviours of each user.")] = 8192,
    events: Annotated[int, typer.Option(min=1000, help="Appended behaviours, and records to publish.")] = 100_000,
    broker: Annotated[
        str | None, typer.Option(metavar="auto|embedded|kafka|docker|HOST:PORT", help="Default: the store alone.")
    ] = None,
    folder: Annotated[Path, typer.Option(help="Where the store is made.")] = Path("build/histories"),
    out: Annotated[Path, typer.Option(help="CSV to append to.")] = Path("benchmarks/results/histories/results.csv"),
) -> None:
    """Measure the history store and its follower."""
    from relaygr.bench.histories.run import measure_histories

    measure_histories(users, length, events, broker, folder, out)


if __name__ == "__main__":
    from relaygr.cli.app import run

    run(main)
