"""Offers a worker more than it can serve: `python -m benchmarks.overload --broker kafka`.

One worker and a gateway run as processes with one broker on the cores of this machine. The gateway sends no retrieval
events, so a request of a user whose prefix is not cached needs full inference, and the others are hits. `--model small`
computes on one core and serves about 10 to 20 requests a second; `--model null` computes nothing, so its capacity is
that of the Python processes.

Capacity is the highest load at which 99 % of the requests are answered in time, bisected in the same run. Then each
load, a multiple of capacity, is offered for `--seconds`:

* goodput: requests ranked within their deadline, counted from their scheduled time, a second;
* told in time: of the other requests, the share whose gateway got `overloaded` or `expired` before the deadline;
* wasted: device time of requests that were ranked too late, as a share of all device time.

A row whose generator was late is not valid, and says so: its requests did not arrive at the offered rate.
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
) -> None:
    """Measure goodput, refusals and wasted device time of a worker above its capacity."""
    from relaygr.bench.overload.run import PLANS, measure_overload

    measure_overload(PLANS[model], seconds, broker, out, json)


if __name__ == "__main__":
    typer.run(main)
