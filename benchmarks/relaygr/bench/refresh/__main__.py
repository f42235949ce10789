"""What K,V of the weights before a refresh are worth: `python -m benchmarks.refresh LOG --before DIR --after DIR`.

    fresh   K,V and scores by the new weights: what a worker does, since the key of a prefix names the weights
    mixed   K,V by the old weights, scores by the new ones: what a worker would do that kept its cache
    old     K,V and scores by the old weights: no refresh

Both checkpoints are of one training, an earlier and a later one. Users, histories, held-out behaviours and candidates
are those of the log's test part, as `relaygr train` judges them, by the worker's engine in float32.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer


def main(
    logs: Annotated[list[Path], typer.Argument(metavar="LOG...", help="The log of the training.")],
    before: Annotated[Path, typer.Option(help="The checkpoint before the refresh.")],
    after: Annotated[list[Path], typer.Option(help="A later checkpoint. May be repeated.")],
    users: Annotated[int, typer.Option(min=2, help="Users to judge.")] = 300,
    json_path: Annotated[Path | None, typer.Option("--json", help="Write the rows to this file, as a list.")] = None,
) -> None:
    """Measure what scores on K,V of the previous weights lose after a refresh."""
    from relaygr.bench.refresh.run import compare
    from relaygr.cli.texts import figures_table, plain_console, stdout_console
    from relaygr.progress import progress_bars
    from relaygr.training.logs import usable
    from relaygr.training.options import Protocol
    from relaygr.training.ranking import chosen_users
    from relaygr.training.splits import Part, split_log
    from relaygr.training_progress import read_training_log

    split = split_log(usable(read_training_log(logs, 100, plain_console(stderr=True))), Protocol.TIME)
    chosen = chosen_users(split, Part.TEST, users, 0)
    with progress_bars() as bars:
        bars.began("ranking", 3 * len(chosen) * len(after))
        rows = [compare(split, before, each, chosen, bars.stepped) for each in after]
    table = figures_table(
        "NDCG@10 after a refresh of the weights",
        *("after", "fresh", "K,V before", "no refresh", "refresh gains", "K,V before lose", "error", "top 10 kept"),
    )
    for row in rows:
        table.add_row(
            Path(row.after).name,
            *(f"{each.mean:.4f}" for each in (row.fresh, row.mixed, row.old)),
            *(each.with_interval() for each in (row.gained, row.lost)),
            *(f"{share:.1%}" for share in (row.mean_error, row.overlap)),
        )
    stdout_console().print(table)
    if json_path is not None:
        json_path.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    from relaygr.cli.app import run

    run(main)
