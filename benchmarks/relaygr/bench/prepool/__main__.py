"""Offers pre-infer workers more than they can compute: `python -m benchmarks.prepool`.

Two workers, a Kafka broker and a pool's store run on the cores of this machine. Capacity is the rate at which they end
a backlog of jobs that have much time. Then each load, a multiple of it, is offered for `--seconds`, to workers that
forward (a share group: a job is taken only with a free slot and enough time) and to workers that queue (an ordinary
group: each takes all jobs of its partitions in order). Both get the same arrivals; each job is of another user.

* accepted: jobs that workers took; of a queue, all;
* in time: of those, the share whose prefix was in the store, and the owner told, before the ranking was due;
* ready a second: how many these were in a second of the load.

With `--histories` nothing is computed: it tells what the histories of so many users cost a worker, and a job.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def main(
    seconds: Annotated[float, typer.Option(min=1, help="Length of the run at each load.")] = 10.0,
    lead_ms: Annotated[int, typer.Option(min=1, help="Time from a job to its ranking.")] = 1000,
    out: Annotated[Path, typer.Option(help="CSV to append to.")] = Path("benchmarks/results/prepool/results.csv"),
    histories: Annotated[int, typer.Option(min=0, help="Users; 0: see above.")] = 0,
) -> None:
    """Pre-infer workers above their capacity, with forwarding and with queues."""
    from relaygr.bench.prepool.run import follow, run

    if histories:
        follow(histories)
    else:
        run(seconds, lead_ms, out)


if __name__ == "__main__":
    typer.run(main)
