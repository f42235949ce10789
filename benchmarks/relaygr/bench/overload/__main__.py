"""Offers a worker more than it can serve: `python -m benchmarks.overload --broker kafka`.

One worker and `relaygr traffic` run with one broker on the cores of this machine. There are no retrieval events.
Returning users are ranked before anything is measured, so they are hits; with `--model small` half of the requests are
of users who come once, and need full inference. That model computes on one core and serves some tens of requests a
second; `--model null` computes nothing, so its capacity is that of the Python processes, `relaygr traffic` included.

Capacity is the highest load at which 99 % of the requests are answered in time, bisected in the same run. Then each
load, a multiple of capacity, is offered for `--seconds`:

* goodput: requests ranked within their deadline, counted from their scheduled time, a second;
* told in time: of the other requests, the share that got `overloaded` or `expired` before the deadline;
* wasted: device time of requests that were ranked too late, as a share of all device time;
* to worker, in worker, to gateway: the parts of the time of ranked requests, each with its own P99;
* calm in time: after the burst another gateway offers 0.7 of capacity, and this share is ranked in time.

`--rules` runs nothing: it simulates a worker in virtual time with all rules of the scheduler and without each of them,
and says what each is worth, over `--seeds` seeds.

A row whose gateway was late is not valid, and says so: its requests did not arrive at the offered rate.
"""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer


class OverloadModel(StrEnum):
    """The model of the worker."""

    SMALL = "small"
    NULL = "null"


def main(
    model: Annotated[OverloadModel, typer.Option(help="The model of the worker.")] = OverloadModel.SMALL,
    seconds: Annotated[float, typer.Option(min=1, help="Length of the run at each load.")] = 20.0,
    broker: Annotated[str, typer.Option(metavar="auto|embedded|kafka|docker|HOST:PORT")] = "auto",
    out: Annotated[Path, typer.Option(help="CSV to append to. The plot goes beside it.")] = Path(
        "benchmarks/results/overload/results.csv"
    ),
    json: Annotated[Path | None, typer.Option(help="Writes the rows to this file, as a list.")] = None,
    rules: Annotated[
        bool, typer.Option("--rules", help="Simulate the worker without each rule of its scheduler and trigger.")
    ] = False,
    seeds: Annotated[int, typer.Option(min=5, help="Pairs of simulations for each rule and load.")] = 20,
) -> None:
    """Measure goodput, refusals and wasted device time of a worker above its capacity."""
    if rules:
        from relaygr.bench.overload.rules import measure_rules

        return measure_rules(seeds, out.with_name("rules.csv"), json)
    from relaygr.bench.overload.run import PLANS, measure_overload

    measure_overload(PLANS[model], seconds, broker, out, json)


if __name__ == "__main__":
    from relaygr.cli.app import run

    run(main)
