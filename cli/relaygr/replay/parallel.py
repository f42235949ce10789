"""Plays one trace against several candidates, on as many processes as there are cores if that pays.

Every process gets the demands of the trace once, about 35 bytes each.
"""

from __future__ import annotations

import multiprocessing
import signal
from collections.abc import Callable, MutableSequence, Sequence
from concurrent.futures import ProcessPoolExecutor, wait
from dataclasses import dataclass
from functools import partial

from relaygr.replay.demand import Demands
from relaygr.replay.run import Candidate, ReplayEnvironment, ReplayResult, replay

# A process takes about a second to start, the time of some hundred thousand demands.
_DEMANDS_FOR_PROCESSES = 1_000_000
_LOOK_S = 0.2


@dataclass(frozen=True, slots=True)
class _Shared:
    """What a process of the pool has for all candidates."""

    demands: Demands
    environment: ReplayEnvironment
    played: MutableSequence[int]
    """Number of demands that each candidate has played: memory that all processes share."""


_shared: _Shared | None = None


def replay_all(
    demands: Demands,
    environment: ReplayEnvironment,
    candidates: Sequence[Candidate],
    jobs: int,
    on_progress: Callable[[int], None],
) -> list[ReplayResult]:
    """Plays the demands against each candidate, on at most `jobs` processes. `on_progress` gets the number played."""
    processes = min(len(candidates), jobs)
    if processes == 1 or len(demands) * len(candidates) < _DEMANDS_FOR_PROCESSES:
        return [
            replay(demands, environment, candidate, partial(_add, on_progress, number * len(demands)))
            for number, candidate in enumerate(candidates)
        ]
    context = multiprocessing.get_context("spawn")
    played = context.RawArray("q", len(candidates))
    with ProcessPoolExecutor(processes, context, _begin, (demands, environment, played)) as pool:
        futures = [pool.submit(_replay_here, number, candidate) for number, candidate in enumerate(candidates)]
        while wait(futures, _LOOK_S).not_done:
            on_progress(sum(played))
        return [future.result() for future in futures]


def _add(on_progress: Callable[[int], None], before: int, count: int) -> None:
    on_progress(before + count)


def _begin(demands: Demands, environment: ReplayEnvironment, played: MutableSequence[int]) -> None:
    global _shared
    _shared = _Shared(demands, environment, played)
    # Ctrl-C reaches every process; those of the pool end without a message.
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def _replay_here(number: int, candidate: Candidate) -> ReplayResult:
    assert _shared is not None
    shared = _shared

    def show(count: int) -> None:
        shared.played[number] = count

    return replay(shared.demands, shared.environment, candidate, show)
