"""Pushes a new model revision to two workers under load: `python -m benchmarks.push --broker kafka`.

The relay of `relaygr demo` runs with its plan for this machine. In the middle of the run the workers' checkpoint is
replaced by one with other weights, and both workers get SIGHUP, as from a push of a newly trained model. They load it
one after the other (`worker.reload_spread_s`), and pre-infer the prefixes of likely users while their devices are idle.

The table shows each phase: the requests, the share that was late, truncated, failed or expired, the P99 of all offered
requests, and how many were ranked by the new revision. The push begins at SIGHUP and lasts until the spread and the
warm-up are over.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def main(
    seconds: Annotated[float, typer.Option(min=20, help="Length of the run. The push comes in the middle.")] = 80.0,
    spread_s: Annotated[float, typer.Option(min=0, help="worker.reload_spread_s")] = 10.0,
    warm_up: Annotated[bool, typer.Option(help="Warm up prefixes after the reload.")] = True,
    broker: Annotated[str, typer.Option(metavar="auto|embedded|kafka|docker|HOST:PORT")] = "auto",
    out: Annotated[Path, typer.Option(help="CSV to append to.")] = Path("benchmarks/results/push/results.csv"),
) -> None:
    """Measure the late requests around a push of a new model revision."""
    from relaygr.bench.push.run import measure_push

    measure_push(seconds, spread_s, warm_up, broker, out)


if __name__ == "__main__":
    from relaygr.cli.app import run

    run(main)
