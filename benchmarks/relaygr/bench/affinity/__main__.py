"""Changes a fleet of workers under load, in each mode of `affinity`: `python -m benchmarks.affinity --broker kafka`.

The members are processes with the workers' consumer loop and its real settings. In the place of K,V each keeps the last
pre-infer job of a user. `--rate` impressions a second send a job, and 100 ms later a ranking request, which the owner
of the partition answers: hit if it has that job. Besides, every partition has resident users with a job from before.

Each mode goes through the same changes: nothing (`none`), a member is killed and started again at once (`restart`), a
member joins (`join`) and leaves for good (`leave`), a member is killed (`death`) and comes back after its session
(`return`). With `range`, the new member's id sorts last, or where the fewest partitions move (`range_placed`). For each
change:

* moved: partitions whose owner lives and is another one now; needed: the fewest that an equal share needs;
* kv_lost_mib: K,V of resident users whom the owner no longer knows, at 16 MiB a prefix;
* apart: requests that did not meet their own job; late: requests without an answer in `--budget-ms`;
* longest_ms: the longest wait for an answer; settled_ms: from the change until every partition has its new owner.

Members, load and broker share the cores of this machine.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from relaygr.bench.affinity import FleetMode


def main(
    mode: Annotated[list[FleetMode] | None, typer.Option(help="May be repeated.", show_default="all")] = None,
    members: Annotated[int, typer.Option(min=2, help="Members before the changes.")] = 6,
    partitions: Annotated[int, typer.Option(min=4, help="Partitions of a topic.")] = 48,
    rate: Annotated[float, typer.Option(min=1, help="Impressions a second.")] = 100.0,
    budget_ms: Annotated[float, typer.Option(min=1, help="A later answer counts as late.")] = 100.0,
    broker: Annotated[str, typer.Option(metavar="auto|kafka|docker|HOST:PORT")] = "auto",
    out: Annotated[Path, typer.Option(help="CSV to append to.")] = Path("benchmarks/results/affinity/results.csv"),
    json: Annotated[Path | None, typer.Option(help="Writes the rows to this file, as a list.")] = None,
) -> None:
    """Measure the partitions moved, the K,V lost and the late requests when members come and go."""
    from relaygr.bench.affinity.run import Plan, measure_affinity

    measure_affinity(mode or list(FleetMode), Plan(members, partitions, rate, budget_ms), broker, out, json)


if __name__ == "__main__":
    from relaygr.cli.app import run

    run(main)
