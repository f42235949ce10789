"""`relaygr model deploy` and `rollback`: the revision that the workers of a scenario serve, as a link in a folder.

    FOLDER/REVISION/     config.json, model.safetensors, calibration.json: one folder for each deployed revision
    FOLDER/current       link to the revision that serves: `worker.model` of the workers is this
    FOLDER/previous      link to the one before

Each link is replaced in one step. Workers with `worker.model_poll_s` load what `current` names within that time, and
others at SIGHUP. A revision whose K,V have another form is refused by a running worker, which then keeps its model.

A worker whose setting `worker.calibration` is FOLDER/current/calibration.json refuses a revision without a calibration
of its own, and says so in its log only. So `deploy` refuses it too, unless it is told that workers calibrate at start.
"""

from __future__ import annotations

import secrets
import shutil
from pathlib import Path
from typing import Annotated, Final

import typer

from relaygr.cli.texts import stdout_console
from relaygr.runtime.errors import RelayError

CURRENT: Final = "current"
PREVIOUS: Final = "previous"

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
    revision = deploy(checkpoint, folder, needs_calibration=not calibrate_at_start)
    stdout_console().print(f"{revision} serves from {folder / CURRENT}")


def rollback_command(folder: FolderArgument) -> None:
    """Let the previous revision serve again. A second rollback undoes the first one."""
    stdout_console().print(f"{rollback(folder)} serves from {folder / CURRENT}")


def deploy(checkpoint: Path, folder: Path, *, needs_calibration: bool) -> str:
    """Copies the checkpoint and points `current` at the copy. Returns its revision.

    Raises RelayError for a checkpoint that cannot be read, and for one with the calibration of another, or with none
    though it is needed. Nothing was changed then.
    """
    from relaygr.worker.model.checkpoint import load_checkpoint

    # A training job may point a link at its next checkpoint meanwhile.
    checkpoint = checkpoint.resolve()
    revision = load_checkpoint(checkpoint).revision
    _check_calibration(checkpoint, revision, needs_calibration)
    folder.mkdir(parents=True, exist_ok=True)
    target = folder / revision
    if target.exists():
        _update_calibration(checkpoint, target)
    else:
        # Renamed when it is whole, so that no worker finds half a checkpoint.
        partial = folder / f".{revision}.{secrets.token_hex(4)}"
        try:
            shutil.copytree(checkpoint, partial)
            if load_checkpoint(partial).revision != revision:
                raise RelayError(
                    f"{checkpoint} was replaced while it was copied: nothing was changed. Deploy it again."
                )
            partial.rename(target)
        finally:
            shutil.rmtree(partial, ignore_errors=True)
    before = _target(folder, CURRENT)
    if before != revision:
        _point(folder, CURRENT, revision)
        if before is not None:
            _point(folder, PREVIOUS, before)
    return revision


def _check_calibration(checkpoint: Path, revision: str, needed: bool) -> None:
    from relaygr.settings import CALIBRATION_FILE
    from relaygr.worker.calibration import load_calibration

    path = checkpoint / CALIBRATION_FILE
    if not path.exists():
        if needed:
            raise RelayError(
                f"{path} does not exist: run `relaygr calibrate --model {checkpoint} --out {path}` on a worker's "
                "machine, or pass --calibrate-at-start if the workers have no worker.calibration."
            )
        return
    measured = load_calibration(path).machine.model_revision
    if measured != revision:
        raise RelayError(
            f"{path} was measured with revision {measured}, but the checkpoint is {revision}: run `relaygr calibrate "
            f"--model {checkpoint} --out {path}` again."
        )


def _update_calibration(checkpoint: Path, target: Path) -> None:
    """A revision that was deployed before may have been calibrated since."""
    from relaygr.settings import CALIBRATION_FILE

    if (checkpoint / CALIBRATION_FILE).exists() and checkpoint != target.resolve():
        partial = target / f".{CALIBRATION_FILE}.{secrets.token_hex(4)}"
        shutil.copy2(checkpoint / CALIBRATION_FILE, partial)
        partial.replace(target / CALIBRATION_FILE)


def rollback(folder: Path) -> str:
    """Swaps `current` and `previous`. Returns the revision that serves now. Raises RelayError if there is none."""
    before, now = _target(folder, PREVIOUS), _target(folder, CURRENT)
    if before is None or now is None or before == now:
        raise RelayError(
            f"{folder} has no previous revision: nothing was changed. `relaygr model deploy` adds revisions."
        )
    if not (folder / before).is_dir():
        raise RelayError(f"{folder / before} does not exist any more: nothing was changed.")
    _point(folder, CURRENT, before)
    _point(folder, PREVIOUS, now)
    return before


def _target(folder: Path, name: str) -> str | None:
    link = folder / name
    return str(link.readlink()) if link.is_symlink() else None


def _point(folder: Path, name: str, revision: str) -> None:
    new = folder / f".{name}.{secrets.token_hex(4)}"
    try:
        new.symlink_to(revision, target_is_directory=True)
        new.replace(folder / name)
    except OSError as error:
        new.unlink(missing_ok=True)
        raise RelayError(f"{folder / name} cannot be made: {error.strerror}.") from error
