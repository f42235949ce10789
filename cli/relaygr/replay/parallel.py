"""Replays of one trace under several candidates: in as many processes as there are cores, where that pays.

Each replay reads the trace for itself, so that none holds it, however long it is.
"""

from __future__ import annotations

import itertools
import multiprocessing
import os
import signal
from collections.abc import Callable, MutableSequence, Sequence
from concurrent.futures import ProcessPoolExecutor, wait
from functools import partial
from pathlib import Path

from relaygr.replay.demand import demands_of
from relaygr.replay.run import Candidate, ReplayEnvironment, ReplayResult, replay
from relaygr.worker.cache.trace import TraceReader

# A process takes a second to start, which is worth some ten thousand demands.
_DEMANDS_FOR_PROCESSES = 100_000
_LOOK_S = 0.2

_played: MutableSequence[int] = []
"""In a process of the pool: how many demands each candidate has played, shared with all."""


def replay_all(
    path: Path,
    demands: int,
    environment: ReplayEnvironment,
    candidates: Sequence[Candidate],
    on_progress: Callable[[int], None],
) -> list[ReplayResult]:
    """The first so many demands of the trace under each candidate; `on_progress` gets how many were played in all."""
    processes = min(len(candidates), os.cpu_count() or 1)
    if processes == 1 or demands * len(candidates) < _DEMANDS_FOR_PROCESSES:
        return [
            _replay(path, demands, environment, candidate, partial(_add, on_progress, number * demands))
            for number, candidate in enumerate(candidates)
        ]
    context = multiprocessing.get_context("spawn")
    played = context.RawArray("q", len(candidates))
    with ProcessPoolExecutor(processes, context, _begin, (played,)) as pool:
        futures = [
            pool.submit(_replay_here, number, path, demands, environment, candidate)
            for number, candidate in enumerate(candidates)
        ]
        while wait(futures, _LOOK_S).not_done:
            on_progress(sum(played))
        return [future.result() for future in futures]


def _add(on_progress: Callable[[int], None], before: int, count: int) -> None:
    on_progress(before + count)


def _begin(played: MutableSequence[int]) -> None:
    global _played
    _played = played
    # Ctrl-C goes to all: these end without a word.
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def _replay_here(
    number: int, path: Path, demands: int, environment: ReplayEnvironment, candidate: Candidate
) -> ReplayResult:
    return _replay(path, demands, environment, candidate, partial(_played.__setitem__, number))


def _replay(
    path: Path, demands: int, environment: ReplayEnvironment, candidate: Candidate, on_progress: Callable[[int], None]
) -> ReplayResult:
    return replay(
        itertools.islice(demands_of(TraceReader(path).records()), demands), environment, candidate, on_progress
    )
