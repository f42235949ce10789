"""`relaygr train post-train`: a ranker trained on in three ways, which are compared."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from relaygr.cli.options import JsonOption, takes
from relaygr.cli.texts import figures_table, plain_console, print_json, print_note, stdout_console
from relaygr.ingest.log_map import recorded_map
from relaygr.progress import progress_bars
from relaygr.runtime.errors import RelayError
from relaygr.runtime.json_values import finite
from relaygr.runtime.stop_signals import exit_on_sigterm
from relaygr.training.options import PostTrainingOptions
from relaygr.training_progress import read_training_log

if TYPE_CHECKING:
    from relaygr.training.post_training import Compared


@takes(PostTrainingOptions, after="logs")
def post_train_command(
    folder: Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a finished run of `train ranker`.")],
    out: Annotated[
        Path,
        typer.Option(help="Folder for the results. A run that was interrupted there goes on, also with more seeds."),
    ],
    logs: Annotated[
        list[Path] | None,
        typer.Option("--log", help="The run's log, if it was moved; may be repeated.", show_default=False),
    ] = None,
    seeds: Annotated[int, typer.Option(min=1, max=100, help="Each arm is trained so often.")] = 5,
    max_bad_lines: Annotated[int, typer.Option(min=0, help="Bad lines are skipped; stop if there are more.")] = 100,
    as_json: JsonOption = False,
    **given: Any,
) -> None:
    """Train a ranker on in three ways: supervised, weighted by exp(reward), and group-relative.

    All have the same batches and steps. The last line recommends supervision, unless group-relative is better in pairs,
    and says whether that ranks better than RUN. Other options are those of RUN.
    """
    from relaygr.training.logs import usable
    from relaygr.training.post_training import Job, post_train
    from relaygr.training.runs import Run
    from relaygr.training.splits import split_log
    from relaygr.worker.model.checkpoint import load_checkpoint

    exit_on_sigterm()
    run = Run(folder)
    described, trained_with = run.described(), run.options()
    if not run.is_finished:
        raise RelayError(f"The run in {folder} is not finished: the command that began it goes on with it.")
    console = plain_console(stderr=as_json, soft_wrap=True)
    paths = logs or run.log_paths()
    log = usable(read_training_log(paths, max_bad_lines, console, recorded_map(described)))
    run.require_log(log)
    checkpoint = load_checkpoint(run.checkpoint)
    options = PostTrainingOptions(checkpoint.revision, **given)
    split = split_log(log, trained_with.protocol)
    with progress_bars() as bars:
        job = Job(log, split, checkpoint, trained_with, options, bars.began, bars.stepped)
        compared = post_train(job, paths, seeds, out)
    if as_json:
        print_json(finite(asdict(compared)))
    else:
        _print_compared(compared)
    for note in (log.ties_note(), compared.note):
        print_note(console, note)


def _print_compared(compared: Compared) -> None:
    console = stdout_console()
    names = list(compared.start)
    table = figures_table(
        "Test part, means over seeds", "checkpoint", *names, "steps", "CPU s", "groups without spread"
    )
    table.add_row("start", "", *(f"{compared.start[name]:.4f}" for name in names), "0", "0", "")
    less = figures_table("Less supervised, 95 % intervals over seeds", "checkpoint", *names)
    for row in compared.rows:
        cells = [f"{row.metrics[name]:.4f}" for name in names]
        without = f"{row.without_spread:.1%}" if row.arm == "group-relative" else ""
        table.add_row(row.arm, row.kept, *cells, f"{row.steps:.0f}", f"{row.cpu_s:.0f}", without)
        if row.arm != "supervised":
            less.add_row(row.arm, row.kept, *(row.less_supervised[name].with_interval() for name in names))
    console.print(table)
    console.print(less)
    plain_console(soft_wrap=True).print(compared.sentence())
