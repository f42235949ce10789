"""The folder of a team's own ranker, and the class that its configuration names.

    config.json     {"ranker": "MODULE:CLASS", "options": {...}}, or the name of an entry point of `relaygr.rankers`
    ranker.json     what `relaygr model check` found: sizes, rules, and the version of the code that it ran
    ...             the weights, in any files

A folder can be downloaded, and what it names is code. So a class is imported only if the operator's list of modules has
its name, and never from the folder. The *revision* is a hash of the version and of all files but those beside the model
(`_BESIDE`), so whoever reads the folder knows it without running code.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from hashlib import blake2b
from importlib import import_module
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, TypeAdapter, ValidationError

from relaygr.ranker import PagedRanker, Ranker, Shape
from relaygr.runtime.errors import RelayError
from relaygr.runtime.files import files_below, read_regular, write_whole
from relaygr.schemas.messages import MAX_BEHAVIOURS, MAX_CANDIDATES, MAX_FEATURES, MAX_SUFFIX_BEHAVIOURS, MAX_TASKS
from relaygr.worker.kv import PrefixLayout
from relaygr.worker.model.config import CONFIG_FILE, PrefixRules, describe_problems
from relaygr.worker.model.description import Description
from relaygr.worker.model.interface import EngineLimits
from relaygr.worker.model.options import ContextualFeature, Part

GROUP = "relaygr.rankers"
RECORD_FILE = "ranker.json"
_BESIDE = frozenset({RECORD_FILE, "calibration.json", "actions.json", "README.md"})
_REVISION_BYTES = 16
_BLOCK_BYTES = 1 << 24


class RankerError(RelayError):
    """A ranker raised, or returned what its shape does not allow. The text names its class and method."""


@contextmanager
def ranker_code(name: str) -> Iterator[None]:
    """Around code of a team's own: whatever it raises, the log says which code it was. It does not end a thread."""
    try:
        yield
    except RankerError:
        raise
    except (Exception, SystemExit) as error:
        # Devices may have an error type of their own with this name.
        if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
            raise
        raise RankerError(f"{name} raised {type(error).__name__}: {error}") from error


class RankerConfig(Part):
    """The configuration of a team's own ranker."""

    format: Literal[1] = 1
    ranker: str = Field(min_length=1, max_length=256, pattern=r"^[\w.]+(:\w+)?$")
    options: dict[str, Any] = Field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class RankerRecord:
    """What `relaygr model check` found about a ranker."""

    ranker: str
    version: str
    shape: Shape
    rules: PrefixRules

    def description(self) -> Description:
        """What the worker and the simulation ask of every model. K,V have one more layer for states."""
        shape = self.shape
        return Description(
            shape.layers + (shape.state_dim > 0),
            shape.heads,
            shape.key_dim,
            shape.value_dim,
            PrefixLayout(shape.user_rows, shape.rows_per_behaviour),
            EngineLimits(shape.max_history, shape.max_suffix, shape.max_candidates),
            self.rules,
            len(shape.tasks),
            tuple(
                ContextualFeature(name=str(index), cardinality=cardinality)
                for index, cardinality in enumerate(shape.feature_cardinalities)
            ),
            tuple(range(shape.num_actions + 1)),
        )


_RECORD = TypeAdapter(RankerRecord)


@dataclass(frozen=True, slots=True)
class RankerFolder:
    """A ranker's folder, read. No code has run."""

    path: Path
    config: RankerConfig
    record: RankerRecord
    revision: str
    files_bytes: int


def read_ranker_config(folder: Path) -> RankerConfig:
    """Raises RelayError for a folder without the configuration of a ranker."""
    path = folder / CONFIG_FILE
    try:
        return RankerConfig.model_validate_json(read_regular(path))
    except OSError as error:
        raise RelayError(f"{path} cannot be read: {error}.") from error
    except ValidationError as error:
        raise RelayError(f"{path} is not the configuration of a ranker: {describe_problems(error)}.") from error


def read_record(folder: Path) -> RankerRecord:
    """Raises RelayError if the ranker was not checked yet, or the file is broken."""
    path = folder / RECORD_FILE
    try:
        return _RECORD.validate_json(read_regular(path))
    except FileNotFoundError:
        raise RelayError(
            f"{folder} is a ranker of your own, and no {path.name} says yet what it allows: run `relaygr model check "
            f"{folder}` first."
        ) from None
    except (OSError, ValidationError) as error:
        raise RelayError(f"{path} is broken ({error}): run `relaygr model check {folder}` again.") from error


def write_record(folder: Path, record: RankerRecord) -> None:
    """Raises RelayError if the folder cannot be written."""
    try:
        write_whole(folder / RECORD_FILE, _RECORD.dump_json(record, indent=1) + b"\n")
    except OSError as error:
        raise RelayError(f"{folder / RECORD_FILE} cannot be written: {error}.") from error


def require_sizes(name: str, shape: Shape) -> None:
    """Raises RelayError for sizes that the relay does not take."""
    most = {
        "max_history": MAX_BEHAVIOURS,
        "max_candidates": MAX_CANDIDATES,
        "max_suffix": MAX_SUFFIX_BEHAVIOURS,
        "state_dim": shape.heads * (shape.key_dim + shape.value_dim),
        "tasks": MAX_TASKS,
        "feature_cardinalities": MAX_FEATURES,
    }
    may_be_none = ("max_suffix", "state_dim", "user_rows", "num_actions", "feature_cardinalities")
    for field in fields(shape):
        value = getattr(shape, field.name)
        size = len(value) if isinstance(value, tuple) else value
        least, largest = int(field.name not in may_be_none), most.get(field.name, 2**31)
        if not isinstance(size, int) or not least <= size <= largest:
            needed = "it must be a tuple" if isinstance(value, list) else f"its size must be {least} to {largest:,}"
            raise RelayError(f"The ranker {name} has the {field.name} {value!r}: {needed}.")


def read_ranker(folder: Path, record: RankerRecord | None = None) -> RankerFolder:
    """Reads all files of a ranker's folder. `record`: in place of the folder's own. Raises RelayError."""
    folder = folder.resolve()
    config = read_ranker_config(folder)
    record = record or read_record(folder)
    if record.ranker != config.ranker:
        raise RelayError(
            f"{folder} names the ranker {config.ranker}, but {RECORD_FILE} is of {record.ranker}: run `relaygr model "
            f"check {folder}` again."
        )
    revision = blake2b(f"{record.ranker}\0{record.version}".encode(), digest_size=_REVISION_BYTES)
    size = 0
    try:
        for path in model_files(folder):
            revision.update(f"\0{path.relative_to(folder)}\0{path.stat().st_size}\0".encode())
            with path.open("rb") as file:
                while block := file.read(_BLOCK_BYTES):
                    revision.update(block)
                    size += len(block)
    except OSError as error:
        raise RelayError(f"{folder} cannot be read: {error}.") from error
    return RankerFolder(folder, config, record, revision.hexdigest(), size)


def files_bytes(folder: Path) -> int:
    """The size of the model's files, about what its weights take in memory."""
    return sum(path.stat().st_size for path in model_files(folder))


def model_files(folder: Path) -> list[Path]:
    """The files of the model, also in folders that links name, in the order of their names. Hidden ones are of tools,
    and some are half written. Raises RelayError if the folder cannot be read.
    """
    try:
        found = sorted(files_below(folder, lambda name: name.startswith(".")))
    except OSError as error:
        raise RelayError(f"{folder} cannot be read: {error}.") from error
    return [path for path in found if path.is_file() and str(path.relative_to(folder)) not in _BESIDE]


def require_allowed(name: str, allowed: Sequence[str]) -> None:
    """Raises RelayError if the operator's list has neither the name of a ranker nor its module."""
    module = name.partition(":")[0]
    if name not in allowed and module not in allowed:
        raise RelayError(
            f"The model names the ranker {name}, which is code: it runs only if worker.ranker_modules (for commands "
            f"--ranker-module) has {module!r}. Add it if you trust that module."
        )


def ranker_class(name: str, allowed: Sequence[str]) -> type[Ranker] | type[PagedRanker]:
    """The class of a name. Raises RelayError if it is not allowed, or no ranker."""
    require_allowed(name, allowed)
    module, _, attribute = name.partition(":")
    try:
        if attribute:
            found = getattr(import_module(module), attribute)
        else:
            (entry,) = entry_points(group=GROUP, name=name)
            found = entry.load()
    except ValueError as error:
        raise RelayError(
            f"No installed package has the entry point {name} of {GROUP}, or several have: install the ranker's "
            "package, or name it as MODULE:CLASS."
        ) from error
    # What the module does when it is imported is not ours: a training script reads the command line, and exits.
    except (Exception, SystemExit) as error:
        is_absent = isinstance(error, ModuleNotFoundError) and error.name == module.partition(".")[0]
        cure = " Install its package, or add the folder of the file to PYTHONPATH." if is_absent else ""
        raise RelayError(f"The ranker {name} cannot be imported: {type(error).__name__}: {error}.{cure}") from error
    if not (isinstance(found, type) and issubclass(found, (Ranker, PagedRanker))):
        raise RelayError(f"{name} is no subclass of relaygr.ranker.Ranker, nor of PagedRanker.")
    return found
