"""The inputs of messages that are published: their action codes, and those that a model does not know (`--model`)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import numpy as np
import typer
from numpy.typing import NDArray

from relaygr.ingest.gather import Interactions
from relaygr.ingest.log_map import LogMap, log_map
from relaygr.runtime.errors import RelayError
from relaygr.schemas.fields import FieldError
from relaygr.schemas.messages import BehaviourEvent, Behaviours, History, RankingRequest, RetrievalEvent

if TYPE_CHECKING:
    from relaygr.worker.model.inputs.known import Vocabulary
    from relaygr.worker.model.rankers import RankerRecord

ModelOption = Annotated[
    Path | None,
    typer.Option(
        "--model",
        metavar="DIR",
        help="Refuse action codes and features that this checkpoint does not know, and count its unknown items.",
        show_default=False,
    ),
]
_SHOWN: Final = 12
_BLOCK: Final = 2**20

Published = BehaviourEvent | History | RankingRequest | RetrievalEvent


def codes_text(codes: Iterable[int]) -> str:
    """Action codes, for people."""
    known = sorted(codes)
    shown = ", ".join(map(str, known[:_SHOWN]))
    return f"{shown} and {len(known) - _SHOWN} more up to {known[-1]}" if len(known) > _SHOWN else shown


def named_log(columns: str | None, actions: str | None, model: Path | None, ties: str = "hash") -> LogMap:
    """The map of the options; without `--actions` a model's event names.

    Raises RelayError, also if `--actions` gives a name another code than the model has, or an unknown name.
    """
    names = log_map(columns, actions, ties)
    if model is None:
        return names
    from relaygr.worker.model.inputs.known import read_action_names

    known = read_action_names(model)
    if not names.actions:
        return replace(names, actions=known)
    if wrong := [f"{name}={code}" for name, code in names.actions.items() if known and known.get(name) != code]:
        trained = ",".join(f"{name}={code}" for name, code in known.items())
        raise RelayError(
            f"--actions gives {', '.join(wrong)[:200]}, but {model} was trained with {trained[:400]}: leave --actions "
            "out, or correct it."
        )
    return names


class KnownModel:
    """What the model in a folder knows. Raises RelayError for a folder that is none."""

    def __init__(self, folder: Path, record: RankerRecord | None = None, vocabulary: Vocabulary | None = None) -> None:
        """`record`, `vocabulary`: of a team's ranker that is being checked. Its folder has no record yet, and only its
        code says which items it knows.
        """
        # Imported here, so that publishing without --model needs no library of the worker's.
        from relaygr.worker.model.config import is_ranker, read_config
        from relaygr.worker.model.inputs.known import KnownInputs, read_vocabulary
        from relaygr.worker.model.rankers import read_record

        self.folder = folder
        self._vocabulary = vocabulary
        if is_ranker(folder):
            record = record or read_record(folder)
            self._inputs = KnownInputs(record.description().features, record.shape.num_actions)
            return
        config = read_config(folder)
        self._inputs = KnownInputs.of(config)
        self._vocabulary = read_vocabulary(folder, config)

    def check_log(self, read: Interactions) -> list[str]:
        """Sentences about what the model does not know. Raises RelayError if the log is not meant for it."""
        codes = np.array(sorted(read.report.actions), np.uint16)
        unknown = codes[self._inputs.unknown_actions(codes)].tolist()
        if unknown:
            count = sum(read.report.actions[code] for code in unknown)
            raise RelayError(
                f"{self.folder} knows the action codes {self._inputs.known_actions()}, but {count:,} of "
                f"{read.report.interactions:,} behaviours of the log have {codes_text(unknown)}: convert the log, or "
                "train with its codes."
            )
        items = self.unknown_items(read.behaviours.items)
        if 2 * items > read.report.interactions:
            raise RelayError(
                f"{items:,} of {read.report.interactions:,} behaviours are of items that {self.folder} does not know: "
                "the log probably has other item ids than the model (relaygr publish history --item-map)."
            )
        notes = [f"{items:,} behaviours are of items that the model does not know"] if items else []
        if self._inputs.features:
            notes.append(
                f"the model has {self._inputs.features} feature values of each user, and a log has none: scores are "
                "those of unknown values"
            )
        return notes

    @property
    def has_vocabulary(self) -> bool:
        """Whether it is known which items the model knows."""
        return self._vocabulary is not None

    def unknown_items(self, items: NDArray[np.int64]) -> int:
        """How many ids are not in the vocabulary; 0 without one."""
        if self._vocabulary is None:
            return 0
        blocks = (items[start : start + _BLOCK] for start in range(0, items.size, _BLOCK))
        return sum(self._vocabulary.rows(block).unknown for block in blocks)

    def check_actions(self, place: str, behaviours: Behaviours) -> None:
        """Raises FieldError for the first unknown code."""
        for at in np.flatnonzero(self._inputs.unknown_actions(behaviours.actions)).tolist():
            raise FieldError(
                f"{place}.actions[{at}] is {behaviours.actions[at]}, the model knows {self._inputs.known_actions()}"
            )

    def check_features(self, place: str, history: History) -> None:
        """Raises FieldError for values that are missing, unknown or too many."""
        unknown = self._inputs.unknown_features(history.features)
        if unknown:
            raise FieldError(
                f"{place}.features: {unknown} of {max(history.features.size, self._inputs.features)} values are "
                f"missing, out of range or too many; the model has {self._inputs.features}"
            )


class SentInputs:
    """Collects the inputs of the messages that a command sends."""

    def __init__(self, model: Path | None) -> None:
        self._model = KnownModel(model) if model is not None else None
        self._codes: set[int] = set()
        self._items = self._unknown_items = 0

    def take(self, message: Published) -> None:
        """Counts a message. Raises FieldError for inputs that the model does not know."""
        self.check(message)
        self.count(message)

    def check(self, message: Published) -> None:
        """Raises FieldError for inputs that the model does not know."""
        if self._model is None:
            return
        for place, behaviours in _behaviours_of(message):
            self._model.check_actions(place, behaviours)
        history = getattr(message, "history", None)
        if history is not None:
            self._model.check_features(".history", history)

    def count(self, message: Published) -> None:
        """Counts a message that was checked."""
        for _, behaviours in _behaviours_of(message):
            self._codes.update(np.unique(behaviours.actions).tolist())
            self._count_items(behaviours.items)
        if isinstance(message, RankingRequest):
            self._count_items(message.candidates)

    def text(self) -> str:
        """The end of a command's last line."""
        codes = f", action codes {codes_text(self._codes)}" if self._codes else ""
        if self._model is None or not self._model.has_vocabulary:
            return codes
        return f"{codes}, {self._unknown_items:,} of {self._items:,} items unknown to the model"

    def _count_items(self, items: NDArray[np.int64]) -> None:
        if self._model is not None:
            self._items += items.size
            self._unknown_items += self._model.unknown_items(items)


def _behaviours_of(message: Published) -> Iterator[tuple[str, Behaviours]]:
    """The behaviours in a message, and the name of their field."""
    if isinstance(message, RankingRequest):
        yield ".suffix", message.suffix
    if isinstance(message, BehaviourEvent | History):
        yield ".behaviours", message.behaviours
    elif message.history is not None:
        yield ".history.behaviours", message.history.behaviours
