"""`relaygr model deploy` and `rollback`: the revision that the workers of a scenario serve (`relaygr.deployment`)."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from relaygr.cli.texts import plain_console, stdout_console
from relaygr.runtime.errors import RelayError
from relaygr.settings import CALIBRATION_FILE

FolderArgument = Annotated[Path, typer.Argument(help="Folder of the deployed revisions; `current` in it serves.")]


def deploy_command(
    checkpoint: Annotated[
        str,
        typer.Argument(help="The checkpoint to deploy: a folder, models:/NAME/VERSION of MLflow, s3://, gs://, hf://."),
    ],
    folder: FolderArgument,
    calibrate_at_start: Annotated[
        bool,
        typer.Option(
            "--calibrate-at-start", help="Deploy without calibration.json: workers have no worker.calibration."
        ),
    ] = False,
    keep_current: Annotated[
        bool,
        typer.Option("--keep-current", help="Succeed if a URL cannot be read but a revision serves already."),
    ] = False,
) -> None:
    """Copy a checkpoint and its calibration.json into a folder of revisions, and let it serve."""
    from relaygr.deployment import CURRENT, deploy, deployed_revision
    from relaygr.model_sources import SourceError, is_url, local_checkpoint
    from relaygr.runtime.masking import masked

    try:
        with local_checkpoint(checkpoint, beside=folder) as local:
            if is_url(checkpoint) and not calibrate_at_start and not (local / CALIBRATION_FILE).exists():
                raise RelayError(
                    f"{masked(checkpoint)} has no {CALIBRATION_FILE}: put that of `relaygr calibrate` beside its "
                    "files, or pass --calibrate-at-start if the workers have no worker.calibration."
                )
            revision = deploy(local, folder, needs_calibration=not calibrate_at_start)
    except SourceError as error:
        served = deployed_revision(folder)
        if served is None:
            raise
        complaint = f"{error} {served}, which was deployed before, serves from {folder / CURRENT}."
        if not keep_current:
            raise RelayError(complaint) from error
        plain_console(stderr=True).print(complaint)
        return
    stdout_console().print(f"{revision} serves from {folder / CURRENT}")


def rollback_command(folder: FolderArgument) -> None:
    """Let the previous revision serve again. A second rollback undoes the first one."""
    from relaygr.deployment import CURRENT, rollback

    stdout_console().print(f"{rollback(folder)} serves from {folder / CURRENT}")
