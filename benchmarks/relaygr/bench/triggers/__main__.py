"""Measures one, two and three trigger processes: `python -m benchmarks.triggers --broker kafka`.

Every event wants a job that takes 2 ms of its worker's device. The worker's statuses are made up, and by its latency
model the rankings fill the device. That leaves jobs 10 % of it (`admission.preinfer_share`), so the budget is 50 jobs a
second, however many processes decide. For each number of processes:

* `drain`: they read a topic that was filled before, as fast as they can;
* `steady`: `--load` (80 %) of that rate is offered for `--seconds`;

and last `rebalance`: 80 % of what one process can read is offered while a second and a third process join and one
stops. Jobs are counted on the topic by their time stamps; `ratio` is jobs / budget, and within 5 % a row is `kept`. A
drain follows the burst with which the processes begin, so its ratio is only bounded above. The age is the time from an
event to its decision (P99).

The processes, the broker and the events share the cores of this machine.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def main(
    processes: Annotated[str, typer.Option(help="Numbers of processes, comma-separated.")] = "1,2,3",
    events: Annotated[
        int, typer.Option(min=100, help="Events in the topic before a drain, for each process.")
    ] = 60_000,
    load: Annotated[float, typer.Option(min=0.1, max=1, help="Part of the drain's rate that is offered.")] = 0.8,
    seconds: Annotated[float, typer.Option(min=5, help="Length of each steady run.")] = 15.0,
    broker: Annotated[str, typer.Option(metavar="auto|kafka|docker|HOST:PORT")] = "auto",
    out: Annotated[Path, typer.Option(help="CSV to append to.")] = Path("benchmarks/results/triggers/results.csv"),
    json: Annotated[Path | None, typer.Option(help="Writes the rows to this file, as a list.")] = None,
) -> None:
    """Measure what several trigger processes read, and that what they admit adds up to one budget."""
    from relaygr.bench.triggers.run import Plan, measure_triggers

    counts = tuple(int(text) for text in processes.split(","))
    measure_triggers(Plan(counts, events, load, seconds), broker, out, json)


if __name__ == "__main__":
    from relaygr.cli.app import run

    run(main)
