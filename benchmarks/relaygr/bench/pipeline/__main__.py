"""Measures the pipeline apart from the model: `python -m benchmarks.pipeline --broker kafka`.

One worker with a null model, the trigger and the gateway, each a process, on one broker; all of them
share this machine's cores. The policy is told, through a made calibration, that full inference is slow,
so every impression sends a retrieval event, a pre-infer job, a ranking request and a result: four messages.

Figures, appended to a CSV with the machine's description:

* at each rate: latency of ranking requests from their scheduled time (all of it is Kafka and our code),
  what was answered in time, the generator's own lag;
* retrieval event to the start of its pre-infer job;
* CPU seconds of each process a second of wall time: where the time goes.

Before each run its processes are warmed up at half its rate: a fresh broker compiles its code, and fresh
processes fill their connections and caches.

A rate is carried if at least 99.9 % of the requests were answered and the last second's latencies are
no longer than those of the middle of the run: the queues do not grow.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def main(
    rates: Annotated[str, typer.Option(help="Impressions a second, comma-separated.")] = "200,500,1000,1200",
    seconds: Annotated[float, typer.Option(min=2, help="What of each run is counted.")] = 15.0,
    warm_up: Annotated[float, typer.Option(min=1, help="What goes before it, seconds.")] = 15.0,
    broker: Annotated[str, typer.Option(metavar="auto|embedded|kafka|docker|HOST:PORT")] = "auto",
    out: Annotated[Path, typer.Option(help="CSV to append to.")] = Path("benchmarks/results/pipeline/results.csv"),
) -> None:
    """Measure what Kafka and our code cost."""
    from relaygr.bench.pipeline.run import measure_rates

    measure_rates([float(text) for text in rates.split(",")], seconds, warm_up, broker, out)


if __name__ == "__main__":
    typer.run(main)
