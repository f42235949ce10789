"""Measures the prefix cache: `python -m benchmarks.cache`.

* `operations`: how many a second the books carry with very many users, each operation under each policy;
* `reloads`: how long a copy from DRAM takes, by size and by how many are asked for at once, real bytes;
* `bursts`: what single flight and the break-even rule save on one bursty trace, with and without (simulated).

Figures are appended to a CSV each, with the machine's description; pictures are drawn of this run.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

PARTS = ("operations", "reloads", "bursts")


def main(
    only: Annotated[list[str] | None, typer.Option(help=f"One of {', '.join(PARTS)}. Repeat it.")] = None,
    users: Annotated[int, typer.Option(min=1_000, help="Users in the cache, for operations.")] = 100_000,
    calls: Annotated[int, typer.Option(min=10, help="Calls a round, for operations.")] = 2_000,
    seconds: Annotated[float, typer.Option(min=1, help="Length of the trace, for bursts.")] = 20.0,
    out: Annotated[Path, typer.Option(help="Folder of the CSVs and pictures.")] = Path("benchmarks/results/cache"),
) -> None:
    """Measure what the cache costs and what its rules save."""
    for part in only or ():
        if part not in PARTS:
            raise typer.BadParameter(f"--only {part}: one of {', '.join(PARTS)}")
    from relaygr.bench.cache.run import measure

    measure(only or PARTS, users, calls, seconds, out)


if __name__ == "__main__":
    typer.run(main)
