"""`relaygr model convert-recbole CHECKPOINT OUT`: the SASRec of RecBole as the folder of a ranker (docs/rankers.md)."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from relaygr.cli.texts import stdout_console
from relaygr.runtime.errors import RelayError
from relaygr.schemas.messages import MAX_CANDIDATES, MAX_SUFFIX_BEHAVIOURS
from relaygr.worker.model.config import CONFIG_FILE

_SUFFIX_SHARE = 5


def convert_recbole_command(
    checkpoint: Annotated[Path, typer.Argument(help="The .pth file that RecBole saved of a SASRec.")],
    out: Annotated[Path, typer.Argument(help="Folder to write: config.json and model.safetensors.")],
    log: Annotated[
        Path | None, typer.Option(help="The .inter file with which it was trained.", show_default=False)
    ] = None,
    items: Annotated[
        Path | None,
        typer.Option(help="In place of --log, RecBole's list of items: one a line, [PAD] first.", show_default=False),
    ] = None,
    max_suffix: Annotated[
        int | None,
        typer.Option(
            min=0,
            max=MAX_SUFFIX_BEHAVIOURS,
            help="Longest suffix, behaviours. The longest history is RecBole's longest list less this.",
            show_default=f"a part in {_SUFFIX_SHARE} of the longest list",
        ),
    ] = None,
    max_candidates: Annotated[
        int, typer.Option(min=1, max=MAX_CANDIDATES, help="Most candidates of a request.")
    ] = 2048,
    force: Annotated[bool, typer.Option("--force", help="Overwrite an existing model.")] = False,
) -> None:
    """Convert a SASRec that RecBole trained. RecBole is not needed, and no code of the checkpoint runs."""
    if (out / CONFIG_FILE).exists() and not force:
        raise RelayError(f"{out} already contains a model: choose another folder, or give --force.")
    from relaygr.ingest.recbole import item_numbers, items_of_log, read_items
    from relaygr.worker.model.convert.recbole import read_sasrec, write_sasrec

    found = read_sasrec(checkpoint)
    if log is not None and items is None:
        names = items_of_log(log, found.config)
    elif log is None and items is not None:
        names = read_items(items)
    else:
        raise RelayError("Give the .inter file with --log, or RecBole's list of items with --items.")
    if len(names) != found.items:
        raise RelayError(
            f"RecBole would number {len(names):,} items of {log or items}, and {checkpoint} has {found.items:,}: give "
            "the file with which it was trained."
        )
    places = int(found.sizes["places"])
    suffix = places // _SUFFIX_SHARE if max_suffix is None else max_suffix
    if suffix >= places:
        raise RelayError(f"--max-suffix {suffix} leaves no history: RecBole's longest list has {places} items.")
    write_sasrec(out, found, item_numbers(names), suffix, max_candidates)
    stdout_console().print(
        f"{out}: {found.items:,} items, histories of up to {places - suffix:,} behaviours and suffixes of up to "
        f"{suffix:,}. Go on with relaygr model check {out} --ranker-module relaygr.ranker.sasrec"
    )
