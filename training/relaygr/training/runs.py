"""The folder of a run: what was asked, what came out, and the state from which an interrupted run goes on.

| file | content |
|---|---|
| `run.json` | the options, the log (digest, sizes, names of columns and events, order of ties), versions |
| `state.pt` | weights, optimizer and history after the last whole epoch; removed when training ends |
| `checkpoint/` | the model as a worker loads it, its card, `README.md`, and the codes of event names, `actions.json` |
| `metrics.json` | loss and validation of each epoch, test metrics of ranker and baselines |
| `predictions/*.jsonl` | each model's ranking of each test user |
| `training.png` | loss and validation NDCG@10 |

Each file is replaced whole, so that an interruption leaves the one before. One process at a time trains in a folder.
"""

from __future__ import annotations

import json
import platform
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch
from safetensors import SafetensorError

from relaygr.runtime.errors import RelayError
from relaygr.runtime.files import has_files, locked_folder, open_regular, read_regular, remove_partials, whole_file
from relaygr.runtime.json_values import finite
from relaygr.schemas.version import __version__
from relaygr.training.logs import Log
from relaygr.training.options import Protocol, TrainingOptions
from relaygr.training.ranking import MOST_RANKED
from relaygr.training.splits import Part, Split
from relaygr.worker.model.config import CARD_FILE
from relaygr.worker.model.convert.pickles import check_claims
from relaygr.worker.model.inputs.known import write_action_names

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

RUN_FILE: Final = "run.json"
METRICS_FILE: Final = "metrics.json"
FOUND_SHARES: Final = "found_shares"
"""In the metrics: for each retrieval the share of the validation items that it finds."""
STATE_FILE: Final = "state.pt"
CHECKPOINT: Final = "checkpoint"


class Run:
    """A run's folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @property
    def checkpoint(self) -> Path:
        return self.folder / CHECKPOINT

    @property
    def is_finished(self) -> bool:
        """Whether the run's metrics are written, which is its last step."""
        return (self.folder / METRICS_FILE).exists()

    @property
    def has_begun(self) -> bool:
        """Whether the folder has a run, finished or not."""
        return (self.folder / RUN_FILE).exists()

    def require_unfinished(self) -> None:
        """Raises RelayError if the run is finished."""
        if self.is_finished:
            raise RelayError(
                f"{self.folder} has a finished run: see {CHECKPOINT}/{CARD_FILE} in it, or give another folder."
            )

    @contextmanager
    def begun(self, options: DataclassInstance, log: Log, paths: list[Path]) -> Iterator[None]:
        """Makes the folder, or finds the same run in it, and keeps other trainings off it.

        Raises RelayError if another training is in the folder, or if it has another run or other files.
        """
        with ExitStack() as held:
            try:
                self.folder.mkdir(parents=True, exist_ok=True)
                in_use = (
                    f"{self.folder} is in use by another `relaygr train`: wait for its end, or give another folder."
                )
                held.enter_context(locked_folder(self.folder, in_use))
                is_used = has_files(self.folder)
                remove_partials(self.folder)
            except OSError as error:
                raise RelayError(f"{self.folder} cannot be used ({error.strerror}): give another folder.") from error
            self._begin({"options": asdict(options), "log": describe_log(log)}, log, paths, is_used)
            yield

    def _begin(self, asked: dict[str, Any], log: Log, paths: list[Path], is_used: bool) -> None:
        if self.has_begun:
            found = self.described()
            if different := _differences({key: found.get(key, {}) for key in asked}, asked):
                raise RelayError(
                    f"{self.folder} has a run with other options or another log: {'; '.join(different)}. Give the "
                    "same ones to go on with it, or another folder."
                )
            return
        if is_used:
            raise RelayError(f"{self.folder} has files that are no run: give a new folder.")
        versions = {name: metadata.version(name) for name in ("torch", "numpy", "implicit", "torchmetrics")}
        about: dict[str, object] = {
            "paths": [str(path.resolve()) for path in paths],
            "columns": dict(log.columns),
            "actions": dict(log.action_names),
            "ties": log.ties.value,
            "python": platform.python_version(),
        }
        self.write_json(RUN_FILE, {**asked, "versions": {"relaygr": __version__, **versions}, **about})

    def described(self) -> dict[str, Any]:
        """The content of `run.json`. Raises RelayError."""
        return self.read_json(RUN_FILE)

    def options(self) -> TrainingOptions:
        """Raises RelayError if the folder has no run, or that of another release or command."""
        try:
            found = self.described()["options"]
            return TrainingOptions(**{**found, "protocol": Protocol(found["protocol"])})
        except (TypeError, ValueError, KeyError) as error:
            raise RelayError(
                f"{self.folder / RUN_FILE} is no run of `relaygr train ranker` of this release: train again ({error})."
            ) from error

    def log_paths(self) -> list[Path]:
        """The files of the log: beside the folder, where a copied or moved one has them, else where they were read."""
        found = []
        for recorded in self.described()["paths"]:
            beside = self.folder.resolve().parent / Path(recorded).name
            found.append(beside if beside.exists() else Path(recorded))
        return found

    def require_log(self, log: Log) -> None:
        """Raises RelayError if this is not the log that the run was trained on."""
        if self.described()["log"]["digest"] != log.digest():
            raise RelayError(
                f"The log is not the one that {self.folder} was trained on: its digest differs. Behaviours of the "
                "test part might be in the training part of the other log. Give the first log again, or train in a "
                "new folder."
            )

    def read_json(self, name: str) -> dict[str, Any]:
        path = self.folder / name
        try:
            found = json.loads(read_regular(path))
        except (OSError, ValueError, RecursionError) as error:
            raise RelayError(
                f"{path} cannot be read ({error}): give the folder of a run of `relaygr train ranker`."
            ) from error
        if not isinstance(found, dict):
            raise RelayError(f"{path} is not the file of a run.")
        return found

    def write_json(self, name: str, content: Mapping[str, object]) -> None:
        text = json.dumps(finite(content), indent=1, allow_nan=False) + "\n"
        with writing(self.folder / name) as partial:
            partial.write_text(text, encoding="utf-8")

    def save_state(self, state: Mapping[str, object]) -> None:
        """Raises RelayError."""
        # Through a file of Python: torch's own says nothing of a full disk.
        with writing(self.folder / STATE_FILE) as partial, partial.open("wb") as file:
            try:
                torch.save(dict(state), file)
            except RuntimeError as error:
                # torch ends the file once more after a failure, which hides why it could not be written.
                raise error.__context__ if isinstance(error.__context__, OSError) else OSError(str(error)) from error

    def load_state(self) -> dict[str, Any] | None:
        """None: no epoch has ended. Raises RelayError for a broken file."""
        path = self.folder / STATE_FILE
        if not path.exists():
            return None
        try:
            with open_regular(path) as file:
                check_claims(file)
            found: dict[str, Any] = torch.load(path, weights_only=True)
        # torch raises what its parts raise: of pickle, zip files and its own.
        except Exception as error:
            raise RelayError(f"{path} is broken: remove it, and training begins again ({error}).") from error
        return found

    def remove_state(self) -> None:
        (self.folder / STATE_FILE).unlink(missing_ok=True)


@contextmanager
def writing(path: Path) -> Iterator[Path]:
    """The temporary name under which a file of a run is written (`whole_file`). Makes its folder. Raises RelayError."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with whole_file(path) as partial:
            yield partial
    except (OSError, SafetensorError) as error:
        raise RelayError(f"{path} cannot be written: {error}.") from error


def write_beside(checkpoint: Path, card: str, log: Log) -> None:
    """Writes what belongs beside the weights: the card, and the names of the log's actions. Raises RelayError."""
    with writing(checkpoint / CARD_FILE) as partial:
        partial.write_text(card, encoding="utf-8")
    if log.action_names:
        try:
            write_action_names(checkpoint, log.action_names)
        except OSError as error:
            raise RelayError(f"The names of actions cannot be written into {checkpoint}: {error}.") from error


def describe_log(log: Log) -> dict[str, object]:
    """The log's digest and sizes."""
    return {
        "digest": log.digest(),
        "users": len(log.users),
        "behaviours": len(log.items),
        "longest": int(log.lengths.max()),
        "ties_share": round(log.ties_share(), 4),
        "has_ratings": log.has_ratings,
    }


def describe_split(split: Split, log: Log) -> dict[str, object]:
    """The sizes of the split's parts, and the share of test users whose history ends within behaviours of one time."""
    training = int(split.training_places().sum())
    validation = int((split.validation_ends - split.train_ends).sum())
    in_test = np.arange(len(split.rows)) >= np.repeat(split.validation_ends, np.diff(split.starts))
    first = split.validation_ends[split.judged_users(Part.TEST)]
    return {
        "protocol": split.protocol.value,
        "cuts_ms": split.cuts_ms,
        "items": split.num_items,
        "training": training,
        "validation": validation,
        "test": len(split.rows) - training - validation,
        "test_outside_vocabulary": int((in_test & (split.rows == split.num_items)).sum()),
        "ties_at_test": float((log.times_ms[first] == log.times_ms[first - 1]).mean()),
        "ranked_items": min(split.num_items, MOST_RANKED),
        "leaves_out_seen": split.leaves_out_seen,
        "repeats_share": split.repeats_share,
        "liked_share": split.liked_share,
        "has_liked": split.has_liked,
    }  # fmt: skip


def _differences(found: Mapping[str, Any], asked: Mapping[str, Any]) -> list[str]:
    return [
        f"{name} is {found[section].get(name)!r} there and {value!r} here"
        for section, values in asked.items()
        for name, value in values.items()
        if found[section].get(name) != value
    ]
