"""Measures what the HTTP gateway adds: `python -m benchmarks.gateway --broker kafka`.

One worker with a null model and `relaygr gateway` run as processes with one broker. This process sends ranking requests
of 128 candidates at random times (open loop), in turns: by `relaygr.client`'s asyncio client, and as JSON over HTTP on
kept connections. Both play the same schedule in every round, and latencies count from the scheduled time. So what the
sender itself costs is in both.

Absolute figures depend on the machine and its other work: look at the difference and the ratio of the two in the same
round. A row is one round; `foreign_cpu` is the number of cores that other processes used meanwhile.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def main(
    rate: Annotated[float, typer.Option(min=1, help="Requests a second.")] = 200.0,
    seconds: Annotated[float, typer.Option(min=1, help="Length of each run.")] = 12.0,
    rounds: Annotated[int, typer.Option(min=1, help="Runs of both.")] = 3,
    warm_up: Annotated[float, typer.Option(min=0.5, help="Seconds of warm-up of each before the first round.")] = 6.0,
    broker: Annotated[str, typer.Option(metavar="auto|embedded|kafka|docker|HOST:PORT")] = "auto",
    out: Annotated[Path, typer.Option(help="CSV of the rounds to append to.")] = Path(
        "benchmarks/results/gateway/results.csv"
    ),
    json: Annotated[Path | None, typer.Option(help="Writes the rounds to this file, as a list.")] = None,
) -> None:
    """Measure the latency that the HTTP gateway adds to that of the client."""
    from relaygr.bench.gateway.run import Plan, measure_gateway

    measure_gateway(Plan(rate, seconds, rounds, warm_up), broker, out, json)


if __name__ == "__main__":
    typer.run(main)
