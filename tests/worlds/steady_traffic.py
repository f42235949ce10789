"""Messages on a fixed schedule, whether or not results arrive."""

from __future__ import annotations

import itertools
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Self

import numpy as np

from relaygr.client import LostRequest, RankOutcome, RelayClient
from relaygr.schemas.messages import History, Path

CACHED = frozenset((Path.HBM, Path.DRAM, Path.PENDING))


@dataclass(frozen=True, slots=True)
class Asked:
    """One request and its outcome. Times are monotonic seconds."""

    sent_s: float
    answered_s: float
    outcome: RankOutcome


class Steady:
    """Calls `send` every `interval_s` on a thread. A context manager: it runs inside the context."""

    def __init__(self, interval_s: float) -> None:
        self._interval_s = interval_s
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="traffic", daemon=True)

    def send(self, number: int) -> None:
        """Sends the messages of the turn `number`, from 0."""
        raise NotImplementedError

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopping.set()
        self._thread.join()

    def _run(self) -> None:
        started_s = time.monotonic()
        for number in itertools.count():
            due_s = started_s + number * self._interval_s
            if self._stopping.wait(max(0.0, due_s - time.monotonic())):
                return
            self.send(number)


class Traffic(Steady):
    """Ranking requests of the users in turn. Histories are sent inline, so a request depends on the worker alone."""

    def __init__(
        self,
        make_client: Callable[..., RelayClient],
        users: Sequence[str],
        history_of: Callable[[str], History],
        candidates: np.ndarray[Any, np.dtype[np.int64]],
        interval_s: float,
        budget_ms: float,
    ) -> None:
        """`make_client` makes a client from the callback `on_lost`."""
        super().__init__(interval_s)
        self.lost: list[LostRequest] = []
        self._client = make_client(on_lost=self.lost.append)
        self._users = users
        self._history_of = history_of
        self._candidates = candidates
        self._budget_ms = budget_ms
        self._asked: list[tuple[float, list[float], Future[RankOutcome]]] = []

    def __enter__(self) -> Self:
        self._client.__enter__()
        return super().__enter__()

    def __exit__(self, *_: object) -> None:
        super().__exit__()
        self._client.__exit__(None, None, None)

    def stop(self) -> list[Asked]:
        """Stops sending and waits for every outcome. Raises TimeoutError for a request without one."""
        super().__exit__()
        timeout_s = self._budget_ms / 1e3 + 30
        outcomes = [future.result(timeout_s) for _, _, future in self._asked]
        return [
            Asked(sent_s, ends[0], outcome) for (sent_s, ends, _), outcome in zip(self._asked, outcomes, strict=True)
        ]

    @property
    def repeated(self) -> int:
        """Number of results of requests that had a result already. The client dropped them."""
        return self._client.statistics().duplicates

    def send(self, number: int) -> None:
        user = self._users[number % len(self._users)]
        ends: list[float] = []
        history = self._history_of(user)
        sent_s = time.monotonic()
        future = self._client.submit_rank(user, self._candidates, budget_ms=self._budget_ms, history=history)
        future.add_done_callback(lambda _: ends.append(time.monotonic()))
        self._asked.append((sent_s, ends, future))


def hit_ratio(asked: Sequence[Asked]) -> float:
    """Share of the requests that were ranked on a cached prefix."""
    paths = Counter(each.outcome.result.path for each in asked if each.outcome.result is not None)
    return sum(paths[path] for path in CACHED) / max(1, paths.total())
