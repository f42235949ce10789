"""`relaygr train`: `ranker` trains on a log of interactions, `evaluate` says what longer histories are worth, `collect`
reads such a log from Kafka, `retrieval` trains on two domains, `post-train` (`post_train.py`) compares ways to train a
ranker on.

Commands import torch only when they run, so that `--help` answers without it.
"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from relaygr.cli.options import (
    ActionsOption,
    BootstrapOption,
    ColumnsOption,
    ConfigOption,
    JsonOption,
    SetOption,
    TiesOption,
    command_settings,
    takes,
)
from relaygr.cli.post_train import post_train_command
from relaygr.cli.texts import figures_table, parse_size, plain_console, print_json, print_note, stdout_console
from relaygr.ingest.log_map import log_map, recorded_map
from relaygr.ingest.parquet import require_pyarrow
from relaygr.progress import progress_bars
from relaygr.runtime.errors import RelayError
from relaygr.runtime.json_values import finite
from relaygr.runtime.stop_signals import StopSignals, exit_on_sigterm
from relaygr.training.options import Protocol, RetrievalOptions, TrainingOptions
from relaygr.training_progress import EpochLines, read_training_log

if TYPE_CHECKING:
    from relaygr.training.collect import Collected
    from relaygr.training.comparison import Compared
    from relaygr.training.lengths import Worth
    from relaygr.training.pipeline import Finished

app = typer.Typer(
    no_args_is_help=True, add_completion=False, help="Train a ranker; measure what longer histories are worth."
)
app.command("post-train")(post_train_command)

LogArgument = Annotated[
    list[Path],
    typer.Argument(
        metavar="LOG...", help="A log of interactions, or a folder of them. Several are one log, in the order of time."
    ),
]
ThreadsOption = Annotated[int, typer.Option(min=1, help="CPU threads. Another number gives other roundings.")]
BadLinesOption = Annotated[int, typer.Option(min=0, help="Bad lines are skipped; stop if there are more than this.")]


@app.command()
@takes(TrainingOptions, after="protocol")
def ranker(
    logs: LogArgument,
    out: Annotated[Path, typer.Option(help="Folder of the run. A run that was interrupted there goes on.")],
    columns: ColumnsOption = None,
    actions: ActionsOption = None,
    ties: TiesOption = "hash",
    protocol: Annotated[
        str,
        typer.Option(
            metavar="time|leave-one-out|global-time",
            help="The test part: each user's last tenth, or last behaviour, or all users' behaviours from one time on.",
        ),
    ] = "time",
    baselines: Annotated[
        bool, typer.Option("--baselines/--no-baselines", help="Fit iALS and item neighbours, too.")
    ] = True,
    max_bad_lines: BadLinesOption = 100,
    as_json: JsonOption = False,
    **given: Any,
) -> None:
    """Train a ranker on a log of interactions, and compare it with baselines.

    Writes the run's folder: checkpoint and card, metrics, predictions, a plot.
    """
    from relaygr.training.pipeline import Progress as RunProgress
    from relaygr.training.pipeline import train_ranker
    from relaygr.training.runs import Run

    exit_on_sigterm()
    try:
        chosen = Protocol(protocol)
    except ValueError as error:
        raise RelayError(f"--protocol is {protocol!r}: give one of {', '.join(Protocol)}.") from error
    options = TrainingOptions(protocol=chosen, **given)
    if options.dim % options.heads:
        raise RelayError(f"--dim {options.dim} is no multiple of --heads {options.heads}.")
    run = Run(out)
    console = plain_console(stderr=as_json, soft_wrap=True)
    run.require_unfinished()
    log = read_training_log(logs, max_bad_lines, console, log_map(columns, actions, ties))
    with progress_bars() as bars:
        progress = RunProgress(EpochLines(bars, console, options), bars.began, bars.stepped)
        finished = train_ranker(log, logs, options, run, progress, with_baselines=baselines)
    if as_json:
        print_json(finite(asdict(finished)))
    else:
        _print_finished(finished, out)
    for note in finished.notes:
        print_note(console, note)


@app.command()
@takes(RetrievalOptions, after="seeds")
def retrieval(
    target: Annotated[Path, typer.Argument(metavar="LOG_A", help="The log of the domain that is judged.")],
    source: Annotated[Path, typer.Argument(metavar="LOG_B", help="The log of another domain with common users.")],
    out: Annotated[Path, typer.Option(help="Folder of the run. A run that was interrupted there goes on.")],
    ties: TiesOption = "hash",
    seeds: Annotated[int, typer.Option(min=1, help="Trainings of each arm. More of them go on with the same run.")] = 5,
    max_bad_lines: BadLinesOption = 100,
    as_json: JsonOption = False,
    **given: Any,
) -> None:
    """Train retrieval over two domains in the way of SCCDR, and compare its parts over several seeds.

    Writes metrics.json, and the better model of the separated and the joint arm, into the run's folder.
    """
    from relaygr.training.comparison import compare
    from relaygr.training.domains import join_logs
    from relaygr.training.runs import Run

    exit_on_sigterm()
    if target.resolve() == source.resolve():
        raise RelayError(f"LOG_A and LOG_B are both {target}: give the logs of two domains.")
    console = plain_console(stderr=as_json, soft_wrap=True)
    names = log_map(None, None, ties)
    logs = join_logs(*(read_training_log([path], max_bad_lines, console, names) for path in (target, source)))
    with progress_bars() as bars:
        compared = compare(logs, [target, source], RetrievalOptions(**given), seeds, Run(out), bars.began, bars.stepped)
    if as_json:
        print_json(finite(asdict(compared)))
    else:
        _print_compared(compared)
    print_note(console, logs.log.ties_note())


@app.command()
def evaluate(
    folder: Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a finished run.")],
    logs: Annotated[
        list[Path] | None,
        typer.Option("--log", help="The run's log, if it was moved; may be repeated.", show_default=False),
    ] = None,
    min_behaviours: Annotated[
        int, typer.Option(min=16, help="Judge the users with at least so many behaviours in the log.")
    ] = 512,
    candidates: Annotated[int, typer.Option(min=1, help="Candidates of a request whose time is measured.")] = 512,
    deadline_ms: Annotated[
        list[float] | None,
        typer.Option(min=0.01, help="Ranking deadline for which the loss by truncation is said; may be repeated."),
    ] = None,
    threads: ThreadsOption = 1,
    max_bad_lines: BadLinesOption = 100,
    as_json: JsonOption = False,
) -> None:
    """Say what a longer history is worth: the same users, served their newest 16, 32, ... behaviours.

    Writes lengths.json and lengths.png into the run's folder.
    """
    from relaygr.training.lengths import Asked, evaluate_lengths
    from relaygr.training.logs import usable
    from relaygr.training.plots import plot_lengths
    from relaygr.training.runs import Run
    from relaygr.training.splits import split_log

    exit_on_sigterm()
    run = Run(folder)
    described, options = run.described(), run.options()
    console = plain_console(stderr=as_json, soft_wrap=True)
    paths = logs or [Path(path) for path in described["paths"]]
    log = usable(read_training_log(paths, max_bad_lines, console, recorded_map(described)))
    run.require_log(log)
    asked = Asked(min_behaviours, candidates, tuple(sorted(deadline_ms or ())), threads)
    with progress_bars() as bars:
        worth = evaluate_lengths(split_log(log, options.protocol), run, asked, bars.began, bars.stepped)
    run.write_json("lengths.json", worth.as_json())
    title = f"{worth.users} users with {min_behaviours:,} behaviours or more"
    undrawn = plot_lengths(folder / "lengths.png", worth.points, title)
    if as_json:
        print_json(worth.as_json())
    else:
        _print_worth(worth)
    for note in (log.ties_note(), undrawn):
        print_note(console, note)


@app.command()
def collect(
    folder: Annotated[
        Path,
        typer.Argument(metavar="FOLDER", help="For the Parquet files; an earlier run may have begun it."),
    ],
    follow: Annotated[
        bool, typer.Option("--follow", help="Go on until SIGTERM or Ctrl-C. Default: read to the end of the topics.")
    ] = False,
    every_s: Annotated[
        float, typer.Option("--every-s", min=0.1, help="With --follow: how often the files are written.")
    ] = 600.0,
    ratings: Annotated[
        bool | None,
        typer.Option(
            "--ratings/--no-ratings",
            help="Whether the action codes are ratings, twice the stars, as publish sends those of a log. Default: as "
            "before, at first not.",
        ),
    ] = None,
    max_bytes: Annotated[
        str, typer.Option("--max-bytes", metavar="SIZE", help="Largest size of the histories' store in the folder.")
    ] = "64GiB",
    as_json: JsonOption = False,
    config: ConfigOption = None,
    bootstrap: BootstrapOption = None,
    overrides: SetOption = None,
) -> None:
    """Copy the histories of the running system to a folder of Parquet files.

    Such a folder is a log for `relaygr train ranker` and `relaygr publish`. It holds what a worker would rank with, and
    nothing of users that were deleted. The command goes on where it was, after a crash too.
    """
    settings = command_settings(config, bootstrap, overrides)
    require_pyarrow("Collecting")
    store_bytes = parse_size("--max-bytes", max_bytes)
    from relaygr.cluster.admin import require_topics
    from relaygr.cluster.rights import Role
    from relaygr.training.collect import Progress
    from relaygr.training.collect import collect as collect_histories

    require_topics(settings, Role.COLLECTOR)
    stopping = StopSignals()
    with progress_bars() as bars:

        def show(seen: Progress) -> None:
            bars.total(seen.partitions)
            bars.share(seen.read_partitions, f"{seen.users:,} users")

        found = collect_histories(
            settings,
            folder,
            has_ratings=ratings,
            max_bytes=store_bytes,
            max_ahead_ms=int(settings.worker.history_max_ahead_s * 1000),
            follow_s=every_s if follow else None,
            is_stopping=lambda: stopping.came,
            on_progress=show,
        )
    if as_json:
        print_json(asdict(found))
    else:
        plain_console(soft_wrap=True).print(_collected_text(found, folder))
    if found.refused_users or not (follow or found.reached_end):
        raise typer.Exit(1)


def _collected_text(found: Collected, folder: Path) -> str:
    """The last line of `collect`: one sentence, and one for each thing that is not as it should be."""
    texts = [f"{folder} has {found.behaviours:,} behaviours of {found.users:,} users"]
    if found.deleted_users:
        texts.append(f"{found.deleted_users:,} deletions were read")
    if found.bad:
        reasons = ", ".join(f"{count:,} {reason}" for reason, count in sorted(found.bad.items()))
        texts.append(f"Skipped {found.bad.total():,} bad messages ({reasons})")
    if found.incomplete_users:
        texts.append(f"Of {found.incomplete_users:,} users behaviours are missing, which Kafka has deleted")
    if found.refused_users:
        texts.append(f"{found.refused_users:,} records found no room: raise --max-bytes, and run it again")
    if not found.reached_end:
        texts.append("Stopped before the end: the same command goes on")
    return ". ".join(texts) + "."


def _print_finished(finished: Finished, out: Path) -> None:
    console = stdout_console()
    names = list(next(iter(finished.test.values())))
    table = figures_table("Test part, means over users with 95 % intervals", *names, "users")
    for model, metrics in finished.test.items():
        cells = [metrics[name].with_half_width() if name in metrics else "" for name in names]
        table.add_row(model, *cells, f"{max(each.users for each in metrics.values()):,}")
    console.print(table)
    for name, gain in finished.gains.items():
        console.print(f"NDCG@10 of the cascade less that of {name}: {gain.with_interval()}")
    console.print(f"Checkpoint and card: {out / 'checkpoint'}; metrics and plot: {out}")


def _print_compared(compared: Compared) -> None:
    from relaygr.training.comparison import CHOSEN, SPREAD

    console = stdout_console()
    metrics = list(next(iter(compared.arms.values()))["warm"])
    title = f"Target domain, means over {compared.seeds} seeds with 95 % intervals; gain: of separated over this"
    table = figures_table(title, "users", *metrics, f"gain in {CHOSEN}", SPREAD)
    for arm, groups in compared.arms.items():
        spread = groups["loss"][SPREAD].with_half_width() if groups["loss"] else ""
        for group in ("warm", "cold"):
            gain = compared.gains[arm][group][CHOSEN].with_interval()
            table.add_row(arm, group, *(groups[group][name].with_half_width() for name in metrics), gain, spread)
    console.print(table)
    console.print(compared.sentence())


def _print_worth(worth: Worth) -> None:
    console = stdout_console()
    names = list(worth.points[0].metrics)
    table = figures_table(
        f"{worth.users:,} users with {worth.shortest_log:,} behaviours or more, served their newest",
        "so long", *names, "ndcg@10 - whole", "of retrieval", "T_full ms", "T_hit ms",
    )  # fmt: skip
    for point in worth.points:
        table.add_row(
            f"{point.length:,}",
            f"{point.whole:,}",
            *(point.metrics[name].with_half_width() for name in names),
            point.against_whole.with_interval(),
            point.retrieval.with_half_width(),
            f"{point.full_ms:.2f}",
            f"{point.hit_ms:.2f}",
        )
    console.print(table)
    console.print(f"Times: medians with {worth.candidates} candidates on {worth.threads} threads of this machine.")
    for each in worth.deadlines:
        if each.loss is None:
            console.print(f"Deadline {each.deadline_ms:g} ms: no length fits.")
            continue
        console.print(
            f"Deadline {each.deadline_ms:g} ms: truncation serves {each.truncated:,} behaviours, the relay "
            f"{each.relayed:,}; NDCG@10 of the relay less that of truncation: {each.loss.with_interval()}"
        )
