"""Replays one trace against several candidates, on as many processes as there are cores if that pays.

Each replay reads the trace itself, so no process holds the whole trace in memory.
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

# A process takes about a second to start, the time of some ten thousand demands.
_DEMANDS_FOR_PROCESSES = 100_000
_LOOK_S = 0.2

_played: MutableSequence[int] = []
"""Number of demands that each candidate has played: memory that all processes of the pool share."""


def replay_all(
    path: Path,
    demands: int,
    environment: ReplayEnvironment,
    candidates: Sequence[Candidate],
    on_progress: Callable[[int], None],
) -> list[ReplayResult]:
    """Plays the first `demands` demands against each candidate. `on_progress` gets the number played in all."""
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
    # Ctrl-C reaches every process; those of the pool end without a message.
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
