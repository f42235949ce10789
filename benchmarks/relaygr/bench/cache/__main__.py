"""Measures the prefix cache: `python -m benchmarks.cache`.

* `operations`: operations a second of the metadata with very many users, for each operation and policy;
* `reloads`: latency of a copy from DRAM, by size and by the number of reloads requested at once, with real bytes.

Each part appends its figures to a CSV, with a description of the machine, and draws a picture of this run.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

PARTS = ("operations", "reloads")


def main(
    only: Annotated[list[str] | None, typer.Option(help=f"One of {', '.join(PARTS)}. May be repeated.")] = None,
    users: Annotated[int, typer.Option(min=1_000, help="Users in the cache, for operations.")] = 100_000,
    calls: Annotated[int, typer.Option(min=10, help="Calls a round, for operations.")] = 2_000,
    out: Annotated[Path, typer.Option(help="Folder of the CSVs and pictures.")] = Path("benchmarks/results/cache"),
) -> None:
    """Measure the cost of the prefix cache."""
    for part in only or ():
        if part not in PARTS:
            raise typer.BadParameter(f"--only {part}: one of {', '.join(PARTS)}")
    from relaygr.bench.cache.run import measure

    measure(only or PARTS, users, calls, out)


if __name__ == "__main__":
    from relaygr.cli.app import run

    run(main)
