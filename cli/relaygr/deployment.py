"""The revision that the workers of a scenario serve, as a link in a folder.

    FOLDER/REVISION/     the files of the checkpoint: one folder for each deployed revision
    FOLDER/current       link to the revision that serves: `worker.model` of the workers is this
    FOLDER/previous      link to the one before

Each link is replaced in one step. Workers with `worker.model_poll_s` load what `current` names within that time, and
others at SIGHUP. A revision whose K,V have another form is refused by a running worker, which then keeps its model.

A revision that is deployed again gets the files that are not part of the revision, such as the names of actions, anew.

A worker whose setting `worker.calibration` is FOLDER/current/calibration.json refuses a revision without a calibration
of its own, and says so in its log only. So `deploy` refuses it too, unless it is told that workers calibrate at start.
"""

from __future__ import annotations

import contextlib
import filecmp
import secrets
import shutil
from pathlib import Path
from typing import Final

from relaygr.runtime.errors import RelayError
from relaygr.runtime.files import removed_on_failure
from relaygr.settings import CALIBRATION_FILE

CURRENT: Final = "current"
PREVIOUS: Final = "previous"


def deploy(checkpoint: Path, folder: Path, *, needs_calibration: bool, calibration: Path | None = None) -> str:
    """Copies the checkpoint and points `current` at the copy. Returns its revision.

    `calibration`: the file that becomes calibration.json of the copy; None: that of the checkpoint, if it has one.
    Raises RelayError for a checkpoint that cannot be read, and for one with the calibration of another, or with none
    though it is needed. Nothing was changed then.
    """
    from relaygr.worker.model.engine import load_model

    # A training job may point a link at its next checkpoint meanwhile.
    checkpoint = checkpoint.resolve()
    calibration = calibration or checkpoint / CALIBRATION_FILE
    revision = load_model(checkpoint).revision
    _check_calibration(calibration, checkpoint, revision, needs_calibration)
    try:
        _copy(checkpoint, calibration, folder, revision)
    except OSError as error:
        raise RelayError(f"{checkpoint} cannot be copied into {folder}: {error}.") from error
    before = _target(folder, CURRENT)
    if before != revision:
        _point(folder, CURRENT, revision)
        if before is not None:
            _point(folder, PREVIOUS, before)
    return revision


def _copy(checkpoint: Path, calibration: Path, folder: Path, revision: str) -> None:
    from relaygr.worker.model.config import CONFIG_FILE, WEIGHTS_FILE
    from relaygr.worker.model.engine import load_model

    is_new = not folder.exists()
    folder.mkdir(parents=True, exist_ok=True)
    target = folder / revision
    if not target.exists():
        # Renamed when it is whole, so that no worker finds half a checkpoint.
        partial = folder / f".{revision}.{secrets.token_hex(4)}"
        try:
            shutil.copytree(checkpoint, partial)
            if load_model(partial).revision != revision:
                raise RelayError(
                    f"{checkpoint} was replaced while it was copied: nothing was changed. Deploy it again."
                )
            partial.rename(target)
        finally:
            shutil.rmtree(partial, ignore_errors=True)
            if is_new:
                with contextlib.suppress(OSError):  # It is not empty, as after a success.
                    folder.rmdir()
    elif checkpoint != target.resolve():
        # The revision is of the configuration and the weights; that of a ranker of one's own of all that its code may
        # read. The others may have come, or changed, since.
        kept = (CONFIG_FILE, WEIGHTS_FILE)
        for path in checkpoint.iterdir():
            if path.is_file() and not path.name.startswith(".") and path.name not in kept:
                _replace(path, target / path.name)
    if calibration.exists() and calibration.parent not in (checkpoint, target.resolve()):
        _replace(calibration, target / CALIBRATION_FILE)


def _replace(source: Path, target: Path) -> None:
    """Replaces a file that differs, in one step."""
    if target.exists() and filecmp.cmp(source, target):
        return
    new = target.with_name(f".{target.name}.{secrets.token_hex(4)}")
    with removed_on_failure(new):
        shutil.copy2(source, new)
        new.replace(target)


def _check_calibration(path: Path, checkpoint: Path, revision: str, needed: bool) -> None:
    from relaygr.worker.calibration import load_calibration

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


def deployed_revision(folder: Path) -> str | None:
    """The revision that serves; None before the first deployment."""
    return _target(folder, CURRENT)


def _target(folder: Path, name: str) -> str | None:
    link = folder / name
    return str(link.readlink()) if link.is_symlink() else None


def _point(folder: Path, name: str, revision: str) -> None:
    new = folder / f".{name}.{secrets.token_hex(4)}"
    try:
        with removed_on_failure(new):
            new.symlink_to(revision, target_is_directory=True)
            new.replace(folder / name)
    except OSError as error:
        raise RelayError(f"{folder / name} cannot be made: {error.strerror}.") from error
