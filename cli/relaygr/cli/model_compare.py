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

from relaygr.cli.model_options import DeviceOption, ThreadsOption
from relaygr.cli.options import JsonOption
from relaygr.cli.texts import print_json, printable, stdout_console

if TYPE_CHECKING:
    from relaygr.compare.comparison import Comparison
    from relaygr.compare.measures import TaskAgreement
    from relaygr.compare.search import Found

EXIT_DIFFERENT = 1

_SHOWN_TRIALS = 8
_BETTER = 0.95
"""Trials with at most this share of the first error are shown."""


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
    search: Annotated[
        bool, typer.Option("--search/--no-search", help="Search for the cause if the scores differ.")
    ] = True,
    search_seconds: Annotated[float, typer.Option(min=0.0, help="Longest search for the cause.")] = 300.0,
    as_json: JsonOption = False,
) -> None:
    """Compare a model's scores with those of its source. The exit code is 1 if they differ."""
    from relaygr.compare.comparison import compare, find_cause
    from relaygr.compare.requests import read_requests
    from relaygr.runtime.logs import configure_logging
    from relaygr.runtime.settings import LogLevel, LogSettings
    from relaygr.worker.device import open_device, set_threads
    from relaygr.worker.model.checkpoint import load_checkpoint

    # Each trial of the search loads an engine, which logs its choices.
    configure_logging(LogSettings(level=LogLevel.WARNING))
    set_threads(threads)
    checkpoint, opened = load_checkpoint(model), open_device(device)
    asked = read_requests(requests, scores or requests, checkpoint.config)
    console = stdout_console()
    comparison = compare(checkpoint, opened, asked, top_k)
    if as_json:
        cause = None
        if search and not comparison.agrees(tolerance) and comparison.cached_error <= tolerance:
            cause = find_cause(checkpoint, opened, asked, comparison, tolerance, search_seconds)
        print_json(_as_json(comparison, tolerance, cause))
        if not comparison.agrees(tolerance):
            raise typer.Exit(EXIT_DIFFERENT)
        return
    _print_comparison(console, comparison, tolerance)
    if comparison.agrees(tolerance):
        console.print("The scores agree.")
        return
    if comparison.cached_error > tolerance:
        console.print(
            "Full and cached inference differ: this is a fault of RelayGR or of the device, please report it."
        )
        raise typer.Exit(EXIT_DIFFERENT)
    if search:
        console.print("The scores differ. Trying the usual causes ...")
        cause = find_cause(checkpoint, opened, asked, comparison, tolerance, search_seconds)
        _print_cause(console, cause, comparison, tolerance)
    raise typer.Exit(EXIT_DIFFERENT)


def _as_json(comparison: Comparison, tolerance: float, cause: Found | None) -> dict[str, object]:
    found = None
    if cause is not None:
        changes = [{"text": change.text, "remedy": change.remedy} for change in cause.best.trial.changes]
        error, agreeing = max(cause.errors), cause.agreeing(tolerance)
        found = {
            "worst_error": error,
            "explains": error <= tolerance,
            "agreeing_requests": agreeing,
            "changes": changes,
        }
    return {**asdict(comparison), "agrees": comparison.agrees(tolerance), "tolerance": tolerance, "cause": found}


def _print_comparison(console: Console, comparison: Comparison, tolerance: float) -> None:
    console.print(
        f"{comparison.requests:,} requests, {comparison.candidates:,} candidates; full and cached inference differ by "
        f"{comparison.cached_error:.1e} of the largest score"
    )
    if comparison.unknown_items:
        console.print(
            f"{comparison.unknown_items:,} of {comparison.item_ids:,} item ids are not in the model's vocabulary: "
            "unless the source has no row for them either, convert with --items"
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


def _cells(agreement: TaskAgreement) -> tuple[str, ...]:
    correlation, overlap = agreement.rank_correlation, agreement.topk_overlap
    return (
        f"{agreement.worst_error:.1e}",
        f"{agreement.typical_error:.1e}",
        "-" if correlation is None else f"{correlation:.4f}",
        "-" if overlap is None else f"{overlap:.1%}",
    )


def _print_cause(console: Console, cause: Found, comparison: Comparison, tolerance: float) -> None:
    from relaygr.compare.comparison import LIKE_BFLOAT16, looks_rounded

    requests, error = comparison.requests, max(cause.errors)
    table = Table("worst error", f"with ({len(cause.sample)} of {requests} requests)")
    start = next(outcome for outcome in cause.tried if not outcome.trial.changes)
    better = [outcome for outcome in cause.tried if outcome.worst < _BETTER * start.worst]
    for outcome in [*better[:_SHOWN_TRIALS], start]:
        changes = "; ".join(change.text for change in outcome.trial.changes) or "no change"
        table.add_row(f"{outcome.worst:.1e}", printable(changes))
    console.print(table)
    console.print(f"{cause.trials} trials{'' if cause.in_time else '; the time was up before all were tried'}.")
    if error <= tolerance:
        console.print(f"With this change all {requests} requests agree, with a worst error of {error:.1e}:")
    elif cause.best.worst <= tolerance:
        console.print(
            f"With this change {cause.agreeing(tolerance)} of {requests} requests agree; request "
            f"{cause.errors.index(error) + 1} has the worst error, {error:.1e}:"
        )
    else:
        console.print("None of the usual causes explains the difference; the table shows what makes it smaller.")
        if looks_rounded(comparison) and cause.best.worst > start.worst / 2:
            console.print(LIKE_BFLOAT16)
        return
    for change in cause.best.trial.changes:
        console.print(f"  {printable(change.text)}: {printable(change.remedy)}")
