"""The load: traces of new and returning users in a fixed mix, which the generator plays.

The schedule is open loop: gaps are exponential, and a request is sent at its time whatever happened to those before. A
fixed share of the requests is of new users, each of whom comes once. The others are of returning users in random order.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import numpy as np

from relaygr.bench.generator import player
from relaygr.bench.generator.samples import Sample, read_samples
from relaygr.bench.generator.trace import Trace, write_trace
from relaygr.settings import Settings

BURST = 1
"""The part of a trace that is the first phase of a run; the later phases follow."""
_BLOCK = 12
"""Each group of this many requests has the same number from new users, so that equal rates are equal work."""
_LONGEST_BUDGET_MS = 50_000


@dataclass(frozen=True, slots=True)
class Requests:
    """What all requests of a benchmark have in common."""

    budget_ms: int
    history: int
    suffix: int
    candidates: int
    items: int
    returning_users: int
    new_share: float


@dataclass(frozen=True, slots=True)
class Phase:
    """A part of a run. A rate of 0 is a pause."""

    rate_per_s: float
    seconds: float


@dataclass(frozen=True, slots=True)
class Run:
    """One run. `is_warm_up`: each returning user once, with a deadline that leaves time for all of them."""

    name: str
    phases: tuple[Phase, ...]
    is_warm_up: bool = False


class Load:
    """The process that sends the requests. The context manager starts and stops it."""

    def __init__(self, folder: Path, settings: Settings, requests: Requests) -> None:
        self._folder = folder / "load"
        self._requests = requests
        self._random = np.random.default_rng(settings.traffic.seed)
        self._player = player.Player(self._folder, settings, player.Requests(requests.items))

    def __enter__(self) -> Load:
        self._player.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._player.__exit__(kind, error, trace)

    @property
    def pid(self) -> int:
        return self._player.pid

    def begun(self, run: Run) -> Path:
        """A file that has content from the time of the run's first request on."""
        return self._player.begun(run.name)

    def play(self, run: Run, watch: Callable[[], None]) -> list[Sample]:
        """Plays the run, and calls `watch` meanwhile. The samples are in the order of their times."""
        trace, samples = self._folder / f"{run.name}.parquet", self._folder / f"{run.name}.samples.parquet"
        write_trace(self._trace(run), trace)
        budget_ms = _LONGEST_BUDGET_MS if run.is_warm_up else self._requests.budget_ms
        self._player.play(player.Run(run.name, trace, samples, budget_ms), watch)
        return read_samples(samples)

    def _trace(self, run: Run) -> Trace:
        calls = self._calls(run)
        count, requests = len(calls), self._requests
        at_us = np.array([at_us for _, at_us, _ in calls], np.int64)
        return Trace(
            retrieval_us=at_us,
            ranking_us=at_us,
            user_id=[user for _, _, user in calls],
            history_length=np.full(count, requests.history, np.int32),
            suffix=np.full(count, requests.suffix, np.int32),
            candidates=np.full(count, requests.candidates, np.int32),
            part=np.array([BURST + phase for phase, _, _ in calls], np.int32),
        )

    def _calls(self, run: Run) -> list[tuple[int, int, str]]:
        """Phase, time since the beginning in µs, and user of each request."""
        returning = [f"returning-{number}" for number in range(self._requests.returning_users)]
        if run.is_warm_up:
            return [(0, 0, user) for user in returning]
        calls: list[tuple[int, int, str]] = []
        begins_s, are_new = 0.0, list[bool]()
        for phase, part in enumerate(run.phases):
            at_s = 0.0
            while part.rate_per_s and (at_s := at_s + self._random.exponential(1 / part.rate_per_s)) < part.seconds:
                number = len(calls)
                if not are_new:
                    are_new = list(self._random.permutation(np.arange(_BLOCK) < self._requests.new_share * _BLOCK))
                user = f"new-{run.name}-{number}" if are_new.pop() else returning[self._random.integers(len(returning))]
                calls.append((phase, int((begins_s + at_s) * 1e6), user))
            begins_s += part.seconds
        return calls
