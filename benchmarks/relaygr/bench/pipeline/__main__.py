"""Measures the pipeline apart from the model: `python -m benchmarks.pipeline --broker kafka`.

One worker with a null model, the trigger and the gateway run as processes with one broker and share the cores of this
machine. A made-up calibration makes full inference slow, so every impression sends four messages: a retrieval
event, a pre-infer job, a ranking request and a result.

The benchmark appends these figures to a CSV, with a description of the machine:

* at each rate: latency of ranking requests from their scheduled time (all of it is spent in Kafka and our code),
  requests answered in time, and the delay of the gateway itself;
* time from the retrieval event to the start of its pre-infer job;
* CPU seconds of each process in a second of wall time.

Before each run the processes are warmed up at half the rate, because a new broker compiles its code, and new processes
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
    warm_up: Annotated[float, typer.Option(min=1, help="Seconds of warm-up before each run.")] = 15.0,
    broker: Annotated[str, typer.Option(metavar="auto|embedded|kafka|docker|HOST:PORT")] = "auto",
    out: Annotated[Path, typer.Option(help="CSV to append to.")] = Path("benchmarks/results/pipeline/results.csv"),
) -> None:
    """Measure the latency and CPU time of the pipeline without a model."""
    from relaygr.bench.pipeline.run import measure_rates

    measure_rates([float(text) for text in rates.split(",")], seconds, warm_up, broker, out)


if __name__ == "__main__":
    typer.run(main)
