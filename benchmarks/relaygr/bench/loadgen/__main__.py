"""B0 under MLPerf's load generator: `python -m benchmarks.loadgen --broker kafka`.

`mlcommons-loadgen` sends single requests at exponential gaps (server scenario) through broker and worker, and judges
whether 99 % are answered within the limit. The sizes are those of MLPerf's DLRM-v3, scaled for a CPU by default; the
limit is its 80 ms times a factor that the output states. **Unverified, not an MLPerf result**: the model has random
weights, histories are synthetic and do not grow, and no accuracy is measured.

Every request runs full inference (`worker.reuse_prefixes=false`), because MLPerf forbids caching across queries. The
times at which it sent are kept as a trace. The relay on that trace, outside of MLPerf's rules:

    python -m benchmarks.headline --trace OUT/trace.parquet --cells dlrm-v3-cpu --systems B0,R --broker kafka
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def main(
    cell: Annotated[str, typer.Option(help="A cell of `benchmarks.headline --cells list`.")] = "dlrm-v3-cpu",
    load: Annotated[float, typer.Option(min=0.01, max=1, help="Part of the rate that fills the device.")] = 0.3,
    seconds: Annotated[
        float, typer.Option(min=1, help="Least length of the test; MLPerf asks for 600. It has at least 459 requests.")
    ] = 600.0,
    broker: Annotated[str, typer.Option(metavar="auto|embedded|kafka|docker|HOST:PORT")] = "auto",
    out: Annotated[Path, typer.Option(help="Folder of the logs, the trace and results.csv.")] = Path(
        "benchmarks/results/loadgen"
    ),
) -> None:
    """Run MLPerf's load generator against full inference; the exit code is 1 if it finds the result not valid."""
    from relaygr.bench.loadgen.run import run_loadgen

    if not run_loadgen(cell, load, seconds, broker, out):
        raise typer.Exit(1)


if __name__ == "__main__":
    from relaygr.cli.app import run

    run(main)
