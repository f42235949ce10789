"""Measures the pipeline apart from the model: `python -m benchmarks.pipeline --broker kafka`.

One worker with a null model, the trigger and the gateway run as processes with one broker and share the cores of this
machine. A made-up calibration makes full inference slow, so every impression sends four messages: a retrieval
event, a pre-infer job, a ranking request and a result.

The floor is an echo of the same four messages by bare confluent-kafka clients (`relaygr.bench.pipeline.echo`). Both run
alternately, in rounds. Absolute figures depend on the machine and its other work, so the results are the ratios of
pipeline to echo in the same round: P50, P99, and CPU time of the Python processes an impression. `foreign_cpu` is the
number of cores that other processes of the machine used meanwhile.

The benchmark appends these figures to two CSV files, with a description of the machine:

* of each round of the pipeline: latency of ranking requests from their scheduled time (all of it is spent in Kafka and
  our code), requests answered in time, and the delay of the gateway itself; time from the retrieval event to the start
  of its pre-infer job; CPU seconds of each process in a second of wall time;
* at each rate: the medians of the rounds, of pipeline, echo and ratios. `--json FILE` writes them too, as a list.

Before the rounds both are warmed up at half the rate, because a new broker compiles its code, and new processes
open connections and fill caches.

A rate counts as carried if at least 99.9 % of the requests were answered and the latencies at the end of the run are
not longer than those in the middle, so that no queue grows.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def main(
    rates: Annotated[str, typer.Option(help="Impressions a second, comma-separated.")] = "200,500,1000,1200",
    seconds: Annotated[float, typer.Option(min=2, help="Length of each run.")] = 15.0,
    rounds: Annotated[int, typer.Option(min=1, help="Runs of pipeline and echo at each rate.")] = 3,
    warm_up: Annotated[float, typer.Option(min=1, help="Seconds of warm-up of each before the first round.")] = 15.0,
    broker: Annotated[str, typer.Option(metavar="auto|embedded|kafka|docker|HOST:PORT")] = "auto",
    out: Annotated[
        Path, typer.Option(help="CSV of the rounds to append to. The ratios go to ratios.csv beside it.")
    ] = Path("benchmarks/results/pipeline/results.csv"),
    json: Annotated[Path | None, typer.Option(help="Writes the ratios of each rate to this file, as a list.")] = None,
) -> None:
    """Measure the latency and CPU time of the pipeline without a model, beside a bare echo of its messages."""
    from relaygr.bench.pipeline.run import Plan, measure_rates

    measure_rates([float(text) for text in rates.split(",")], Plan(seconds, rounds, warm_up), broker, out, json)


if __name__ == "__main__":
    from relaygr.cli.app import run

    run(main)
