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

RESULTS = Path("benchmarks/results/gateway")


def main(
    rate: Annotated[float, typer.Option(min=1, help="Requests a second.")] = 200.0,
    seconds: Annotated[float, typer.Option(min=1, help="Length of each run.")] = 12.0,
    rounds: Annotated[int, typer.Option(min=1, help="Runs of both.")] = 3,
    warm_up: Annotated[float, typer.Option(min=0.5, help="Seconds of warm-up of each before the first round.")] = 6.0,
    broker: Annotated[str, typer.Option(metavar="auto|embedded|kafka|docker|HOST:PORT")] = "auto",
    out: Annotated[
        Path | None, typer.Option(help="CSV to append to.", show_default="in benchmarks/results/gateway")
    ] = None,
    tracing: Annotated[bool, typer.Option("--tracing", help="Measure what tracing costs the client.")] = False,
    sampled: Annotated[float, typer.Option(min=0, max=1, help="--tracing: share of recorded traces.")] = 0.01,
    blocks: Annotated[int, typer.Option(min=6, help="--tracing: blocks of each client.")] = 120,
    impressions: Annotated[int, typer.Option(min=1, help="--tracing: impressions a block.")] = 200,
    json: Annotated[Path | None, typer.Option(help="Writes the rounds to this file, as a list.")] = None,
) -> None:
    """Measure the latency that the HTTP gateway adds to that of the client, or the CPU time that tracing adds."""
    if tracing:
        from relaygr.bench.gateway.tracing import TracingPlan, measure_tracing

        plan = TracingPlan(sampled, blocks, impressions)
        return measure_tracing(plan, broker, out or RESULTS / "tracing.csv", json)
    from relaygr.bench.gateway.run import Plan, measure_gateway

    return measure_gateway(Plan(rate, seconds, rounds, warm_up), broker, out or RESULTS / "results.csv", json)


if __name__ == "__main__":
    from relaygr.cli.app import run

    run(main)
