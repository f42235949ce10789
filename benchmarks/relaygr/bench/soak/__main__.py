"""Runs the relay for minutes and looks for leaks: `python -m benchmarks.soak --broker kafka`.

A worker with a hot standby, the trigger, the lag monitor and a gateway run as processes. Users return, their histories
grow, and a user whose history is at its longest is deleted by a tombstone and begins again, so that the amount of data
stays the same. Meanwhile

* the active worker gets `kill -9`, and its standby takes over; the trigger gets `kill -9` and is started again;
* the workers load a new model revision;
* the broker gets `kill -9` and is started again with its data (only a Kafka that was started here).

An event waits until the relay has recovered from the one before. The traffic goes on until the last event is done, for
at most two minutes longer than planned.

Every second the benchmark samples memory, file descriptors and threads of each process, and the sizes of the history
store, of the shared memory and of the logs; every five seconds it reads the metrics of each process.

**Flat.** A *life* is one process in one role. Growth is the median of the slopes between all pairs of samples of one
life (Theil and Sen), pooled over the lives after the first 30 % of the run, without the first 150 s of each life. Steps
between lives do not count, and noise and single steps change the median little. Files outlive processes, so each
is one life. A series is flat if it grows by no more than its bound a minute. The broker is sampled and not judged.

**Counters add up.** All planned events were done, and the last model ranked the last request. Each impression of the
schedule ends as one record of the gateway, and none is lost. In each process, requests received are requests answered,
and look-ups (hits, joins and misses) are requests. The counters of a killed process are those of a scrape directly
before the kill; the gateway's records, which no kill ends, bound what a process did after that scrape.

The exit code is 0 if every series is flat and all counters add up, else 1.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def main(
    minutes: Annotated[float, typer.Option(min=0.05, help="Length of the traffic.")] = 10.0,
    rate: Annotated[float, typer.Option(min=1, help="Impressions a second.")] = 20.0,
    users: Annotated[int, typer.Option(min=1)] = 100,
    broker: Annotated[str, typer.Option(metavar="auto|embedded|kafka|docker|HOST:PORT")] = "auto",
    out: Annotated[
        Path, typer.Option(help="CSV of the samples, written anew. The plot and the logs go beside it.")
    ] = Path("build/soak/samples.csv"),
    json: Annotated[Path | None, typer.Option(help="Writes the verdicts to this file.")] = None,
) -> None:
    """Run the relay for minutes with kills, reloads and a broker restart; look for leaks and lost requests."""
    from relaygr.bench.soak.run import SoakPlan, soak

    if not soak(SoakPlan(minutes * 60, rate, users), broker, out, json):
        raise typer.Exit(1)


if __name__ == "__main__":
    from relaygr.cli.app import run

    run(main)
