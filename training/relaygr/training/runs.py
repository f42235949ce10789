"""The folder of a run: what was asked, what came out, and the state from which an interrupted run goes on.

| file | content |
|---|---|
| `run.json` | the options, the log (digest, sizes, names of columns and events), versions |
| `state.pt` | weights, optimizer and history after the last whole epoch; removed when training ends |
| `checkpoint/` | the model as a worker loads it, its card, `README.md`, and the codes of event names, `actions.json` |
| `metrics.json` | loss and validation of each epoch, test metrics of ranker and baselines |
| `predictions/*.jsonl` | each model's ranking of each test user |
| `training.png` | loss and validation NDCG@10 |

Each file is replaced whole, so that an interruption leaves the one before.
"""

from __future__ import annotations

import json
import platform
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch

from relaygr.runtime.errors import RelayError
from relaygr.runtime.files import write_whole
from relaygr.runtime.json_values import finite
from relaygr.schemas.version import __version__
from relaygr.training.logs import Log
from relaygr.training.ranking import MOST_RANKED
from relaygr.training.splits import Protocol, Split

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

RUN_FILE: Final = "run.json"
METRICS_FILE: Final = "metrics.json"
STATE_FILE: Final = "state.pt"
CHECKPOINT: Final = "checkpoint"
CARD_FILE: Final = "README.md"


@dataclass(frozen=True, slots=True)
class TrainingOptions:
    """What decides the result of a run, beside the log. The same options, log and machine give the same checkpoint."""

    protocol: Protocol = Protocol.TIME
    dim: int = 64
    heads: int = 2
    layers: int = 2
    max_history: int = 1024
    epochs: int = 30
    patience: int = 5
    """Validations without an improvement after which training ends."""
    places: int = 16
    """The least places of a user's window that are trained in an epoch; a long window has a sixteenth of its length."""
    negatives: int = 31
    """Random items beside the next behaviour at each place."""
    learning_rate: float = 2e-3
    dropout: float = 0.2
    validation_users: int = 500
    test_users: int = 0
    """The most users that are judged; 0: all."""
    seed: int = 0
    threads: int = 2
    """Of torch: another number adds in another order."""
    max_minutes: float = 0.0
    """Training stops when this time is over; 0: never. The learning rate falls with the time, so the result depends on
    the machine."""


@dataclass(frozen=True, slots=True)
class PostTrainingOptions:
    """What decides the result of post-training, beside the log and the run that it starts from."""

    start: str
    """Revision of the ranker."""
    steps: int
    """Batches that each arm is trained on."""
    group: int
    """Slates drawn for a request."""
    negatives: int
    """Random candidates of a request, beside the behaviour that came next."""
    learning_rate: float
    kl_weight: float
    validation_users: int
    test_users: int
    """The most users that are judged; 0: all."""


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

    def begin(self, options: DataclassInstance, log: Log, paths: list[Path]) -> bool:
        """Makes the folder, or finds the same run in it. Returns whether it was there.

        Raises RelayError if the folder has another run or other files.
        """
        asked = {"options": asdict(options), "log": describe_log(log)}
        if self.has_begun:
            found = self.described()
            if different := _differences({key: found.get(key, {}) for key in asked}, asked):
                raise RelayError(
                    f"{self.folder} has a run with other options or another log: {'; '.join(different)}. Give the "
                    "same ones to go on with it, or another folder."
                )
            return True
        if self.folder.exists() and any(self.folder.iterdir()):
            raise RelayError(f"{self.folder} has files that are no run: give a new folder.")
        versions = {name: metadata.version(name) for name in ("torch", "numpy", "implicit", "torchmetrics")}
        about: dict[str, object] = {
            "paths": [str(path.resolve()) for path in paths],
            "columns": dict(log.columns),
            "actions": dict(log.action_names),
            "python": platform.python_version(),
        }
        self.write_json(RUN_FILE, {**asked, "versions": {"relaygr": __version__, **versions}, **about})
        return False

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
            found = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise RelayError(
                f"{path} cannot be read ({error}): give the folder of a run of `relaygr train ranker`."
            ) from error
        if not isinstance(found, dict):
            raise RelayError(f"{path} is not the file of a run.")
        return found

    def write_json(self, name: str, content: Mapping[str, object]) -> None:
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            text = json.dumps(finite(content), indent=1, allow_nan=False) + "\n"
            write_whole(self.folder / name, text.encode())
        except OSError as error:
            raise RelayError(f"{self.folder / name} cannot be written: {error}.") from error

    def save_state(self, state: Mapping[str, object]) -> None:
        """Raises RelayError."""
        partial = self.folder / f".{STATE_FILE}.partial"
        try:
            torch.save(dict(state), partial)
            partial.replace(self.folder / STATE_FILE)
        except (OSError, RuntimeError) as error:
            raise RelayError(f"{self.folder / STATE_FILE} cannot be written: {error}.") from error

    def load_state(self) -> dict[str, Any] | None:
        """None: no epoch has ended. Raises RelayError for a broken file."""
        path = self.folder / STATE_FILE
        if not path.exists():
            return None
        try:
            found: dict[str, Any] = torch.load(path, weights_only=True)
        # torch raises what its parts raise: of pickle, zip files and its own.
        except Exception as error:
            raise RelayError(f"{path} is broken: remove it, and training begins again ({error}).") from error
        return found

    def remove_state(self) -> None:
        (self.folder / STATE_FILE).unlink(missing_ok=True)


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


def describe_split(split: Split) -> dict[str, object]:
    """The sizes of the split's parts."""
    training = int(split.training_places().sum())
    validation = int((split.validation_ends - split.train_ends).sum())
    in_test = np.arange(len(split.rows)) >= np.repeat(split.validation_ends, np.diff(split.starts))
    return {
        "protocol": split.protocol.value,
        "items": split.num_items,
        "training": training,
        "validation": validation,
        "test": len(split.rows) - training - validation,
        "test_outside_vocabulary": int((in_test & (split.rows == split.num_items)).sum()),
        "ranked_items": min(split.num_items, MOST_RANKED),
        "leaves_out_seen": split.leaves_out_seen,
        "repeats_share": split.repeats_share,
    }  # fmt: skip


def _differences(found: Mapping[str, Any], asked: Mapping[str, Any]) -> list[str]:
    return [
        f"{name} is {found[section].get(name)!r} there and {value!r} here"
        for section, values in asked.items()
        for name, value in values.items()
        if found[section].get(name) != value
    ]
