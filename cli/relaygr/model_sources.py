"""A checkpoint from where teams keep them, as a local folder.

    models:/NAME/VERSION, models:/NAME@ALIAS, runs:/RUN/PATH    MLflow's registry and runs, at MLFLOW_TRACKING_URI
    s3://, gs://, hf://, any other URL that fsspec reads        a folder with the files of a checkpoint

Rights and time limits are those of the libraries: their environment variables, their files of credentials.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from http import HTTPStatus
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Final
from urllib.parse import unquote

from relaygr.progress import progress_bars
from relaygr.runtime.errors import RelayError
from relaygr.runtime.masking import masked
from relaygr.settings import CALIBRATION_FILE

if TYPE_CHECKING:
    from fsspec import AbstractFileSystem

_MLFLOW_SCHEMES: Final = ("models", "runs", "mlflow-artifacts")
_SHOWN: Final = 8
_MOST_CONFIG_BYTES: Final = 16 << 20
"""A server may answer without an end. Configurations have some KiB."""


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

    Raises SourceError if a URL cannot be read, and RelayError if its files disagree. An error about the copy, here or
    in the body of the `with`, names the source: nobody knows the copy, and it is gone.
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
        try:
            _trust(source, folder)
            yield folder
        except RelayError as error:
            text = str(error)
            for path in (folder.resolve(), folder):
                text = text.replace(str(path), masked(source))
            raise RelayError(text) from error


def _fetched(fetch: Callable[[str, Path], Path], source: str, place: Path) -> Path:
    try:
        return fetch(source, place)
    except (ModuleNotFoundError, RelayError):
        raise
    except Exception as error:  # Each library has errors of its own.
        addresses = f"{source} {os.environ.get('MLFLOW_TRACKING_URI', '')}"
        reason = masked(_first_line(error), of=addresses)
        complaint = f"{masked(source)} cannot be read: {type(error).__name__}: {reason}."
        # A scheme that is unknown, or whose library is missing, will not be known later.
        raise (RelayError if isinstance(error, ImportError | ValueError) else SourceError)(complaint) from error


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0].rstrip(".")


def _trust(source: str, folder: Path) -> None:
    """Checks the digests, and gives the copy the time of its record: else each load would read the weights again."""
    from relaygr.worker.model.checkpoint import verify_checkpoint
    from relaygr.worker.model.config import is_ranker

    # A ranker of one's own has no digests.
    if is_ranker(folder):
        return
    if changed := verify_checkpoint(folder, trust=True).changed:
        raise RelayError(f"{masked(source)} was changed after it was written: {_shown(changed)} differ.")


def _from_mlflow(source: str, place: Path) -> Path:
    # Its own seven retries take four minutes, and its bars are eight lines where there is no terminal.
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "3")
    os.environ.setdefault("MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR", "false")
    import mlflow.artifacts

    from relaygr.worker.model.config import CONFIG_FILE

    with progress_bars() as bars:
        bars.began(f"fetching {masked(source)}", 0)
        fetched = Path(mlflow.artifacts.download_artifacts(artifact_uri=source, dst_path=str(place)))
    if (fetched / CONFIG_FILE).is_file():
        return fetched
    below = sorted(path.parent.relative_to(fetched).as_posix() for path in fetched.rglob(CONFIG_FILE))
    if len(below) > 1:
        raise RelayError(
            f"{masked(source)} has {len(below)} checkpoints: {_shown(below)}. Name one, such as "
            f"{masked(source).rstrip('/')}/{below[0]}."
        )
    if not below:
        raise SourceError(_without_config(source, (path.name for path in fetched.iterdir())))
    return fetched / below[0]


def _from_files(source: str, place: Path) -> Path:
    import fsspec

    from relaygr.worker.model.config import CARD_FILE, CONFIG_FILE, WEIGHTS_FILE, names_ranker
    from relaygr.worker.model.inputs.known import ACTIONS_FILE

    # Paths of file URLs are percent-encoded, as Path.as_uri() writes them; fsspec takes them literally.
    files, folder = fsspec.core.url_to_fs(unquote(source) if source.startswith("file:") else source)
    if not _is_there(files, f"{folder}/{CONFIG_FILE}"):
        if not _is_there(files, folder):
            raise SourceError(f"{masked(source)} does not exist.")
        content = files.ls(folder, detail=False) if files.isdir(folder) else ()
        raise SourceError(_without_config(source, (path.rstrip("/").rpartition("/")[2] for path in content)))
    (place / CONFIG_FILE).write_bytes(config := _read_config(files, f"{folder}/{CONFIG_FILE}", source))
    if names_ranker(config):
        names = _names_below(files, folder)
    else:
        others = (WEIGHTS_FILE, CALIBRATION_FILE, ACTIONS_FILE, CARD_FILE)
        names = [CONFIG_FILE, *(name for name in others if _is_there(files, f"{folder}/{name}", may_be_hidden=True))]
    before = [files.ukey(f"{folder}/{name}") for name in names]
    with progress_bars() as bars:

        def show(size: int | None, value: int, **_: object) -> None:
            bars.total(size or 0)
            bars.reached(value)

        for name in names:
            if name == CONFIG_FILE:
                continue
            bars.began(name, 0)
            (place / name).parent.mkdir(parents=True, exist_ok=True)
            shown = fsspec.callbacks.Callback(hooks={"bar": show})
            files.get_file(f"{folder}/{name}", str(place / name), callback=shown)
            if (place / name).is_dir():
                raise RelayError(
                    f"{masked(source)}: {name} is a link to a folder, which is not fetched. Give the path of the "
                    "checkpoint in place of the URL."
                )
    files.invalidate_cache()
    if before != [files.ukey(f"{folder}/{name}") for name in names]:
        raise SourceError(f"{masked(source)} was replaced while it was read.")
    return place


def _read_config(files: AbstractFileSystem, path: str, source: str) -> bytes:
    content = b""
    with files.open(path, "rb") as file:
        while len(content) <= _MOST_CONFIG_BYTES and (block := file.read(_MOST_CONFIG_BYTES + 1 - len(content))):
            content += block
    if len(content) > _MOST_CONFIG_BYTES:
        raise RelayError(
            f"{masked(source)}: its config.json has more than {_MOST_CONFIG_BYTES >> 20} MiB, so it is no model's "
            "configuration. Check the address."
        )
    return content


def _names_below(files: AbstractFileSystem, folder: str) -> list[str]:
    """All files of a ranker of one's own, of which any may be read. Raises RelayError for one elsewhere."""
    names = sorted(path.removeprefix(folder).lstrip("/") for path in files.find(folder))
    if wrong := [name for name in names if ".." in PurePosixPath(name).parts]:
        raise RelayError(f"{folder} lists a file that is not in it: {wrong[0]}.")
    return names


def _is_there(files: AbstractFileSystem, path: str, *, may_be_hidden: bool = False) -> bool:
    """Raises what kept the library from looking: `exists` calls a server that is away a file that is not there.

    `may_be_hidden`: a refusal means "not there", as S3 says it of a missing file to a reader who may not list files.
    """
    try:
        files.info(path)
    except FileNotFoundError as error:
        # fsspec's HTTP gives each error this name, and the real one as its cause.
        cause = error.__cause__
        status = getattr(cause, "status", None)
        if cause is None or isinstance(cause, FileNotFoundError) or status == HTTPStatus.NOT_FOUND:
            return False
        if status == HTTPStatus.FORBIDDEN and may_be_hidden:
            return False
        raise cause from error
    except PermissionError:
        if may_be_hidden:
            return False
        raise
    return True


def _without_config(source: str, content: Iterable[str]) -> str:
    from relaygr.worker.model.config import CONFIG_FILE

    names = sorted(content)
    return f"{masked(source)} has no {CONFIG_FILE}: {f'it has {_shown(names)}' if names else 'it is empty'}."


def _shown(names: Sequence[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return f"{', '.join(names[:_SHOWN])}{more}"
