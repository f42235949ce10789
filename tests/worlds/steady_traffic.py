"""Users who send requests in turn on a fixed schedule, whether or not results arrive.

Histories are sent inline, so that a request depends on the worker alone.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

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


class Traffic:
    """Sends one request every `interval_s`, for the users in turn. A context manager: it runs inside the context."""

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
        self.lost: list[LostRequest] = []
        self._client = make_client(on_lost=self.lost.append)
        self._users = users
        self._history_of = history_of
        self._candidates = candidates
        self._interval_s = interval_s
        self._budget_ms = budget_ms
        self._asked: list[tuple[float, list[float], Future[RankOutcome]]] = []
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="traffic", daemon=True)

    def __enter__(self) -> Traffic:
        self._client.__enter__()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopping.set()
        self._thread.join()
        self._client.__exit__(None, None, None)

    def stop(self) -> list[Asked]:
        """Stops sending and waits for every outcome. Raises TimeoutError for a request without one."""
        self._stopping.set()
        self._thread.join()
        timeout_s = self._budget_ms / 1e3 + 30
        outcomes = [future.result(timeout_s) for _, _, future in self._asked]
        return [
            Asked(sent_s, ends[0], outcome) for (sent_s, ends, _), outcome in zip(self._asked, outcomes, strict=True)
        ]

    @property
    def repeated(self) -> int:
        """Number of results of requests that had a result already. The client dropped them."""
        return self._client.statistics().duplicates

    def _run(self) -> None:
        number = 0
        next_s = time.monotonic()
        while not self._stopping.wait(max(0.0, next_s - time.monotonic())):
            next_s += self._interval_s
            user = self._users[number % len(self._users)]
            number += 1
            self._ask(user)

    def _ask(self, user: str) -> None:
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
