"""Compares `relaygr size` with a run: `python -m benchmarks.sizing --broker kafka`.

The benchmark calibrates the machine, and learns the times of Kafka and worker from a short run at a low load
(`relaygr size --times`). Then it searches the highest rate that one worker can serve. The relay (broker, trigger, one
worker and a gateway) runs at a part of this rate, or if there is none, at a part of the rate that fills the device. The
table has a line for each figure: as predicted by `relaygr size`, and as measured.

* Load and shares: simulated, as for `relaygr size`, with the learnt times and with the calibration alone.
* Bytes and returning users: calculated. Users who came, and the DRAM that keeps their prefixes, are those of the whole
  run. `size` does not know that histories grow meanwhile.
* Waiting prefixes: rate times lead time. `size` adds `admission.lease_margin_ms`, which is a reserve.

The first quarter of a run is not counted, as in the simulation. `foreign_cpu` says how many cores other processes used:
where they used many, a difference says little. It takes about four minutes.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def main(
    load: Annotated[float, typer.Option(min=0.05, max=1, help="Part of the highest rate.")] = 0.6,
    seconds: Annotated[float, typer.Option(min=5, help="Length of the run.")] = 75.0,
    broker: Annotated[str, typer.Option(metavar="auto|embedded|kafka|docker|HOST:PORT")] = "auto",
    out: Annotated[Path, typer.Option(help="CSV to append to.")] = Path("benchmarks/results/sizing/results.csv"),
    json: Annotated[Path | None, typer.Option(help="Writes the lines to this file, as a list.")] = None,
) -> None:
    """Compare what `relaygr size` says of one worker with a run of one worker."""
    from relaygr.bench.sizing.run import SizingPlan, compare_with_run

    compare_with_run(SizingPlan(load, seconds), broker, out, json)


if __name__ == "__main__":
    from relaygr.cli.app import run

    run(main)
