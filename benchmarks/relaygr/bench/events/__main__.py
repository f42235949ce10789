"""Plays events against a relay under load: `python -m benchmarks.events --broker kafka`.

A worker with a hot standby, another without, the trigger and `relaygr traffic` run as processes. For each event the
table has the requests that were late, not whole (truncated, expired or refused) or lost in the seconds before it, until
all processes are ready again, and in the seconds after that; the longest wait for an answer; and the time until the
share of such requests was again as before the event (`back`).

`--minutes` plays the events in random order for so long, and looks for leaks: memory, descriptors and threads of each
process, and files. Growth is the median slope between all pairs of samples of one life of a process, after its warm-up.

The exit code is 1 if a request is lost outside an outage of the broker, if the counters of gateways, trigger and
workers do not add up, or if something grows.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from relaygr.bench.events import Event


def main(
    events: Annotated[str, typer.Option(help=f"Comma-separated: {', '.join(Event)}.")] = ",".join(Event),
    minutes: Annotated[float, typer.Option(min=0, help="Play the events at random for so long; 0: each once.")] = 0.0,
    rate: Annotated[float, typer.Option(min=1, help="Impressions a second.")] = 20.0,
    hot_rate: Annotated[float, typer.Option(min=1, help="Impressions of the hot user a second.")] = 100.0,
    users: Annotated[int, typer.Option(min=10, help="Users of the traffic.")] = 100,
    history: Annotated[int, typer.Option(min=64, help="Behaviours of the longest history.")] = 512,
    warm_up_users: Annotated[int, typer.Option(min=0, help="worker.warm_up_users.")] = 0,
    pool: Annotated[bool, typer.Option("--pool", help="Workers share a pool (relaygr[pool]).")] = False,
    budget_ms: Annotated[int, typer.Option(min=100, help="Deadline of a ranking request.")] = 2_000,
    window: Annotated[float, typer.Option(min=1, help="Seconds before and after each event.")] = 8.0,
    seed: Annotated[int, typer.Option(help="--minutes: fixes the order of the events.")] = 1,
    broker: Annotated[str, typer.Option(metavar="auto|embedded|kafka|docker|HOST:PORT")] = "auto",
    brokers: Annotated[int, typer.Option(min=1, help="Brokers of a Kafka that is started here, three replicas.")] = 1,
    out: Annotated[Path, typer.Option(help="Folder of the logs, the records and the samples.")] = Path("build/events"),
    json: Annotated[Path | None, typer.Option(help="Writes the rows and the verdicts to this file.")] = None,
) -> None:
    """Measure what kills, take-overs, reloads, outages and a hot user cost a relay under load."""
    from relaygr.bench.events import Plan
    from relaygr.bench.events.run import play_events
    from relaygr.runtime.errors import RelayError

    unknown = [name for name in events.split(",") if name not in [*Event]]
    if unknown:
        raise RelayError(f"--events {', '.join(unknown)}: there are {', '.join(Event)}")
    chosen = tuple(Event(name) for name in events.split(","))
    plan = Plan(chosen, minutes * 60, rate, hot_rate, users, history, budget_ms, window, seed, warm_up_users, pool)
    if not play_events(plan, broker, brokers, out, json):
        raise typer.Exit(1)


if __name__ == "__main__":
    from relaygr.cli.app import run

    run(main)
