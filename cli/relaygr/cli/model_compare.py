"""`relaygr model compare MODEL --requests FILE --scores FILE`: our scores against those that the source gave.

The command imports torch only when it runs, so that `--help` answers without it.
"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table

from relaygr.cli.model_options import DeviceOption, RankerModulesOption, ThreadsOption
from relaygr.cli.options import JsonOption
from relaygr.cli.texts import print_json, printable, prints_to_stderr, stdout_console

if TYPE_CHECKING:
    from relaygr.compare.comparison import Comparison
    from relaygr.compare.measures import TaskAgreement

EXIT_DIFFERENT = 1

_CAUSES = "The scores differ. docs/differing-scores.md has the usual causes, and how to check each."
_CAUSES_OF_RANKER = (
    "The scores differ: `prefix` and `rank` compute something else than your training code, or the file does not have "
    "what your code was given."
)
_LIKE_BFLOAT16 = (
    "Errors of this size with the same order of candidates are usual if the source computes in bfloat16 or TF32: let "
    "it compute in float32, or raise --tolerance."
)


def compare_command(
    model: Annotated[Path, typer.Argument(help="A checkpoint folder.")],
    requests: Annotated[
        Path, typer.Option(help="Requests, as JSON lines, .parquet or .npz (docs/checkpoints.md).", show_default=False)
    ],
    scores: Annotated[
        Path | None, typer.Option(help="Scores of the source.", show_default="in the file of the requests")
    ] = None,
    tolerance: Annotated[
        float, typer.Option(min=0.0, help="Largest allowed error, as a share of the largest score of a task.")
    ] = 1e-4,
    top_k: Annotated[int, typer.Option(min=1, help="Number of the best candidates whose overlap is counted.")] = 10,
    device: DeviceOption = None,
    threads: ThreadsOption = 1,
    ranker_module: RankerModulesOption = None,
    as_json: JsonOption = False,
) -> None:
    """Compare a model's scores with those of its source. The exit code is 1 if they differ."""
    from relaygr.compare.comparison import compare
    from relaygr.compare.requests import read_requests
    from relaygr.runtime.logs import configure_logging
    from relaygr.runtime.settings import LogLevel, LogSettings
    from relaygr.worker.device import open_device, set_threads
    from relaygr.worker.model.engine import load_model
    from relaygr.worker.model.rankers import RankerFolder

    # The engine logs its choices.
    configure_logging(LogSettings(level=LogLevel.WARNING))
    set_threads(threads)
    loaded, opened = load_model(model), open_device(device)
    described = loaded.record if isinstance(loaded, RankerFolder) else loaded.config
    asked = read_requests(requests, scores or requests, described)
    with prints_to_stderr():
        comparison = compare(loaded, opened, asked, top_k, ranker_module or ())
    if as_json:
        print_json({**asdict(comparison), "agrees": comparison.agrees(tolerance), "tolerance": tolerance})
    else:
        _print_comparison(stdout_console(), comparison, tolerance, isinstance(loaded, RankerFolder))
    if not comparison.agrees(tolerance):
        raise typer.Exit(EXIT_DIFFERENT)


def _print_comparison(console: Console, comparison: Comparison, tolerance: float, is_ranker: bool) -> None:
    console.print(
        f"{comparison.requests:,} requests, {comparison.candidates:,} candidates; full and cached inference differ by "
        f"{comparison.cached_error:.1e} of the largest score"
    )
    if comparison.unknown_items:
        cure = "correct `known_items`" if is_ranker else "convert with --items"
        console.print(
            f"{comparison.unknown_items:,} of {comparison.item_ids:,} item ids are not in the model's vocabulary: "
            f"unless the source has no row for them either, {cure}"
        )
    for count, what in (
        (comparison.unknown_actions, "behaviours have an action code"),
        (comparison.unknown_features, "values of features are missing, or values"),
    ):
        if count:
            console.print(f"{count:,} {what} that the model does not know")
    table = Table("task", "worst error", "typical error", "rank correlation", f"top {comparison.top_k} kept")
    for task, agreement in comparison.tasks.items():
        table.add_row(printable(task), *_cells(agreement))
    console.print(table)
    console.print(f"Errors are shares of the task's largest score; at most {tolerance:.1e} is allowed.")
    if comparison.agrees(tolerance):
        console.print("The scores agree.")
    elif comparison.cached_error > tolerance:
        console.print(
            "Full and cached inference differ: run `relaygr model check` again."
            if is_ranker
            else "Full and cached inference differ: this is a fault of RelayGR or of the device, please report it."
        )
    else:
        errors = comparison.errors
        console.print(f"Request {errors.index(max(errors)) + 1} has the worst error; --json has that of each request.")
        console.print(_CAUSES_OF_RANKER if is_ranker else _CAUSES)
        if comparison.looks_rounded():
            console.print(_LIKE_BFLOAT16)


def _cells(agreement: TaskAgreement) -> tuple[str, ...]:
    correlation, overlap = agreement.rank_correlation, agreement.topk_overlap
    return (
        f"{agreement.worst_error:.1e}",
        f"{agreement.typical_error:.1e}",
        "-" if correlation is None else f"{correlation:.4f}",
        "-" if overlap is None else f"{overlap:.1%}",
    )
