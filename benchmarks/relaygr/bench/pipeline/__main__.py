"""Measures the pipeline apart from the model: `python -m benchmarks.pipeline --broker kafka`.

One worker with a null model, the trigger and `relaygr traffic` run as processes with one broker and share the cores of
this machine. A made-up calibration makes full inference slow, so every impression sends four messages: a retrieval
event, a pre-infer job, a ranking request and a result.

The floor is an echo of the same four messages by bare confluent-kafka clients (`relaygr.bench.pipeline.echo`), and
once more by its asyncio clients. All run in turns, in rounds, after a warm-up at half the rate. Absolute figures depend
on the machine and its other work: look at the ratios of pipeline to echo in the same round, and at the cores that other
processes used meanwhile.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated

import typer

from relaygr.runtime.errors import RelayError


def main(
    rates: Annotated[str, typer.Option(help="Impressions a second, comma-separated.")] = "200,500,1000,1200",
    seconds: Annotated[float, typer.Option(min=2, help="Length of each run.")] = 15.0,
    rounds: Annotated[int, typer.Option(min=1, help="Runs of pipeline and echoes at each rate.")] = 3,
    warm_up: Annotated[float, typer.Option(min=1, help="Seconds of warm-up of each before the first round.")] = 15.0,
    broker: Annotated[str, typer.Option(metavar="auto|embedded|kafka|docker|HOST:PORT")] = "auto",
    out: Annotated[Path, typer.Option(help="CSV to append the medians to.")] = Path(
        "benchmarks/results/pipeline/ratios.csv"
    ),
    json: Annotated[Path | None, typer.Option(help="Writes the medians of each rate to this file, as a list.")] = None,
) -> None:
    """Measure the latency and CPU time of the pipeline without a model, beside a bare echo of its messages."""
    from relaygr.bench.pipeline.run import Plan, measure_rates

    measure_rates(_numbers(rates), Plan(seconds, rounds, warm_up), broker, out, json)


def _numbers(rates: str) -> list[float]:
    try:
        chosen = [float(text) for text in rates.split(",")]
    except ValueError:
        chosen = [0.0]
    if not all(0 < rate < math.inf for rate in chosen):
        raise RelayError(f"--rates {rates} is not a list of numbers above 0, such as 200,500")
    return chosen


if __name__ == "__main__":
    from relaygr.cli.app import run

    run(main)
