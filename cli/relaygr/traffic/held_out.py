"""The test part of a training run as traffic, with the candidates that its ranker retrieves.

Each test behaviour is one impression: its request is ranked on the behaviours before it, and the behaviour is published
after it. The candidates are found from the retrieval event on, by exact search: with `traffic.retrieval`, or with what
found most of the validation part, the ranker's own retrieval or a baseline.
"""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from relaygr.ingest.log_map import recorded_map
from relaygr.ingest.reading import read_interactions
from relaygr.runtime.errors import RelayError
from relaygr.schemas.messages import Behaviours
from relaygr.traffic.population import LogPopulation
from relaygr.traffic.schedule import Impression
from relaygr.traffic.settings import TrafficSettings
from relaygr.training.logs import Log, usable
from relaygr.training.models import RETRIEVAL
from relaygr.training.retrieval import BaselineSearch, GraphSearch, ItemSearch, found_shares
from relaygr.training.runs import Run
from relaygr.training.sampling import FOUND
from relaygr.training.splits import Part, Split, split_log
from relaygr.training_progress import training_log


class HeldOutPopulation(LogPopulation):
    """The users of the log with the most behaviours, the longest first. Each impression is one test behaviour.

    `items` is the vocabulary of the ranker. Only the newest `traffic.history_max` behaviours of a history are there.
    """

    def __init__(self, split: Split, times_ms: NDArray[np.int64], settings: TrafficSettings) -> None:
        judged = split.judged_users(Part.TEST)
        users = judged[np.argsort(-np.diff(split.starts)[judged], kind="stable")[: settings.users]]
        ends, first_ends = split.starts[users + 1], split.validation_ends[users]
        starts = np.maximum(split.starts[users], first_ends - settings.history_max)
        # Copies: the log has many more users than are played.
        sequences = [
            Behaviours(
                split.behaviour_ids[start:end].astype("<i8"),
                split.actions[start:end].astype("<u2"),
                times_ms[start:end].astype("<i8"),
            )
            for start, end in zip(starts.tolist(), ends.tolist(), strict=True)
        ]
        names = [split.users[user] for user in users.tolist()]
        super().__init__(names, sequences, (first_ends - starts).tolist(), split.item_ids.copy())
        self.leaves_out_seen = split.leaves_out_seen
        """Whether items of a user's history are no candidates."""


def held_out_population(folder: Path, settings: TrafficSettings) -> HeldOutPopulation:
    """The users of the run in this folder. Raises RelayError for a folder, or settings, that do not fit."""
    for name, is_default in (
        ("interactions", settings.interactions is None),
        ("new_share", not settings.new_share),
        ("start_again", not settings.start_again),
    ):
        if not is_default:
            raise RelayError(f"traffic.held_out plays the log of its run: leave out traffic.{name}.")
    if settings.suffix:
        raise RelayError(
            "traffic.held_out publishes each behaviour before the next impression, and what follows a history is what "
            "the ranker has to find: set traffic.suffix=0."
        )
    log, split = _log_of(Run(folder))
    return HeldOutPopulation(split, log.times_ms, settings)


def _log_of(run: Run) -> tuple[Log, Split]:
    names = recorded_map(run.described())
    log = usable(training_log([read_interactions(path, log_map=names) for path in run.log_paths()]))
    run.require_log(log)
    return log, split_log(log, run.options().protocol)


def search_of(folder: Path, retrieval: Path | None) -> ItemSearch | BaselineSearch | GraphSearch:
    """The file of retrieval, or without one the best retrieval of the run in this folder. Raises RelayError."""
    if retrieval is not None:
        return GraphSearch(retrieval)
    run = Run(folder)
    name = next(iter(found_shares(run)))
    return ItemSearch(run.checkpoint) if name == RETRIEVAL else BaselineSearch(run, _log_of(run)[1], name)


def retrieval_text(folder: Path, retrieval: Path | None) -> str:
    """Which retrieval finds the candidates, and how much each that the run has found. Raises RelayError."""
    if retrieval is not None:
        return f"{retrieval}, as asked"
    shares = found_shares(Run(folder))
    (best, share), *others = [
        ("the ranker's own" if name == RETRIEVAL else name, each) for name, each in shares.items()
    ]
    said = f"{best}: {FOUND} candidates have {share:.0%} of what came next in the validation part"
    return f"{said}; others {', '.join(f'{name} {each:.0%}' for name, each in others)}" if others else said


def use_one_thread() -> None:
    """For the retrieval, which shares the machine with the workers. Changes torch for the whole process."""
    torch.set_num_threads(1)


class FoundCandidates:
    """The candidates of each impression, found by a thread that starts with the retrieval event."""

    def __init__(self, folder: Path, settings: TrafficSettings, population: HeldOutPopulation) -> None:
        """Raises RelayError for a run without a checkpoint, or a file that is no retrieval."""
        self._search = search_of(folder, settings.retrieval)
        self._count, self._population = settings.candidates, population
        self._thread = ThreadPoolExecutor(1, "retrieval")
        self._begun: dict[int, Future[NDArray[np.int64]]] = {}

    def begin(self, impression: Impression) -> None:
        self._begun[impression.number] = self._thread.submit(self._find, impression)

    def of(self, impression: Impression) -> NDArray[np.int64]:
        """Waits for the search that has begun."""
        begun = self._begun.pop(impression.number, None)
        return self._find(impression) if begun is None else begun.result()

    def close(self) -> None:
        self._thread.shutdown(cancel_futures=True)

    def _find(self, impression: Impression) -> NDArray[np.int64]:
        history = self._population.sequence(impression.user)[: impression.history_length]
        seen = history.items if self._population.leaves_out_seen else history.items[:0]
        return self._search.find(history, self._count, seen)
