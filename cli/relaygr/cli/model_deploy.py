"""`relaygr model deploy` and `rollback`: the revision that the workers of a scenario serve (`relaygr.deployment`)."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from relaygr.cli.texts import stdout_console

FolderArgument = Annotated[Path, typer.Argument(help="Folder of the deployed revisions; `current` in it serves.")]


def deploy_command(
    checkpoint: Annotated[Path, typer.Argument(help="The checkpoint folder to deploy.")],
    folder: FolderArgument,
    calibrate_at_start: Annotated[
        bool,
        typer.Option(
            "--calibrate-at-start", help="Deploy without calibration.json: workers have no worker.calibration."
        ),
    ] = False,
) -> None:
    """Copy a checkpoint and its calibration.json into a folder of revisions, and let it serve."""
    from relaygr.deployment import CURRENT, deploy

    revision = deploy(checkpoint, folder, needs_calibration=not calibrate_at_start)
    stdout_console().print(f"{revision} serves from {folder / CURRENT}")


def rollback_command(folder: FolderArgument) -> None:
    """Let the previous revision serve again. A second rollback undoes the first one."""
    from relaygr.deployment import CURRENT, rollback

    stdout_console().print(f"{rollback(folder)} serves from {folder / CURRENT}")
