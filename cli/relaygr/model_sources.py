"""A checkpoint from where teams keep them, as a local folder.

    models:/NAME/VERSION, models:/NAME@ALIAS, runs:/RUN/PATH    MLflow's registry and runs, at MLFLOW_TRACKING_URI
    s3://, gs://, hf://, any other URL that fsspec reads        a folder with the files of a checkpoint

Rights and time limits are those of the libraries: their environment variables, their files of credentials.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final
from urllib.parse import unquote

from relaygr.progress import progress_bars
from relaygr.runtime.errors import RelayError
from relaygr.settings import CALIBRATION_FILE

_MLFLOW_SCHEMES: Final = ("models", "runs", "mlflow-artifacts")
_SHOWN: Final = 8


class SourceError(RelayError):
    """A URL that cannot be read now."""


def is_url(source: str) -> bool:
    """Whether a source is fetched. Else it is the path of a folder."""
    return "://" in source or _is_mlflow(source)


def _is_mlflow(source: str) -> bool:
    scheme, colon, _ = source.partition(":")
    return bool(colon) and scheme in _MLFLOW_SCHEMES


@contextlib.contextmanager
def local_checkpoint(source: str, beside: Path) -> Iterator[Path]:
    """The folder of a source: itself, or a copy, which is removed afterwards. The copy lies in the folder `beside`, or,
    before there is one, in the one above it: a failure leaves no empty folder.

    Raises SourceError if a URL cannot be read, and RelayError if its files disagree.
    """
    if not is_url(source):
        yield Path(source)
        return
    try:
        there = next(each for each in (beside, *beside.absolute().parents) if each.is_dir())
        place = tempfile.TemporaryDirectory(prefix=".fetched-", dir=there)
    except OSError as error:
        raise RelayError(f"{beside} cannot be written: {error.strerror}.") from error
    with place as name:
        # Of the usual rights, which the deployed copy takes over: a temporary folder is its owner's alone.
        copy = Path(name) / "checkpoint"
        copy.mkdir()
        folder = _fetched(_from_mlflow if _is_mlflow(source) else _from_files, source, copy)
        _trust(source, folder)
        yield folder


def _fetched(fetch: Callable[[str, Path], Path], source: str, place: Path) -> Path:
    try:
        return fetch(source, place)
    except (ModuleNotFoundError, RelayError):
        raise
    except Exception as error:  # Each library has errors of its own.
        complaint = f"{source} cannot be read: {type(error).__name__}: {_first_line(error)}."
        # A scheme that is unknown, or whose library is missing, will not be known later.
        raise (RelayError if isinstance(error, ImportError | ValueError) else SourceError)(complaint) from error


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0].rstrip(".")


def _trust(source: str, folder: Path) -> None:
    """Checks the digests, and gives the copy the time of its record: else each load would read the weights again."""
    from relaygr.worker.model.checkpoint import verify_checkpoint

    if changed := verify_checkpoint(folder, trust=True).changed:
        raise RelayError(f"{source} was changed after it was written: {', '.join(changed[:_SHOWN])} differ.")


def _from_mlflow(source: str, place: Path) -> Path:
    # Its own seven retries take four minutes.
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "3")
    import mlflow.artifacts

    from relaygr.worker.model.config import CONFIG_FILE

    fetched = Path(mlflow.artifacts.download_artifacts(artifact_uri=source, dst_path=str(place)))
    configs = [*fetched.glob(CONFIG_FILE), *fetched.glob(f"*/{CONFIG_FILE}")]
    return configs[0].parent if configs else fetched


def _from_files(source: str, place: Path) -> Path:
    import fsspec

    from relaygr.worker.model.config import CONFIG_FILE, WEIGHTS_FILE

    # Paths of file URLs are percent-encoded, as Path.as_uri() writes them; fsspec takes them literally.
    files, folder = fsspec.core.url_to_fs(unquote(source) if source.startswith("file:") else source)
    names = [name for name in (CONFIG_FILE, WEIGHTS_FILE, CALIBRATION_FILE) if files.exists(f"{folder}/{name}")]
    if CONFIG_FILE not in names:
        there = files.exists(folder)
        raise SourceError(f"{source} has no {CONFIG_FILE}." if there else f"{source} does not exist.")
    before = [files.ukey(f"{folder}/{name}") for name in names]
    with progress_bars() as bars:

        def show(size: int | None, value: int, **_: object) -> None:
            bars.total(size or 0)
            bars.reached(value)

        for name in names:
            bars.began(name, 0)
            shown = fsspec.callbacks.Callback(hooks={"bar": show})
            files.get_file(f"{folder}/{name}", str(place / name), callback=shown)
    files.invalidate_cache()
    if before != [files.ukey(f"{folder}/{name}") for name in names]:
        raise SourceError(f"{source} was replaced while it was read.")
    return place
