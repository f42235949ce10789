"""A worker with a hot standby under steady traffic, for tests and for `benchmarks/standby`."""

from __future__ import annotations

import json
import threading
import time
import urllib.request
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from relaygr.demo.processes import Child
from schemas.messages import Path as RankingPath
from streams.client import LostRequest, RankOutcome, RankStatus
from tests.pipeline.relay_world import Relay, candidates_of, history_of, wait_until

HISTORY = 300
CACHED = frozenset((RankingPath.HBM, RankingPath.DRAM, RankingPath.PENDING))
STANDBY_TIMEOUT_S = 90.0


def children(supervisor: Child) -> dict[str, int]:
    """Phase -> process id of a supervisor's children."""
    with urllib.request.urlopen(f"http://127.0.0.1:{supervisor.port}/children", timeout=5) as answer:
        return {child["phase"]: child["pid"] for child in json.load(answer)["children"]}


def await_pair(supervisor: Child, but_not: Sequence[int] = ()) -> tuple[int, int]:
    """The process ids of the active worker and of its standby, once there are both, and both are others."""

    def found() -> bool:
        pids = children(supervisor)
        return pids.keys() >= {"active", "standby"} and not set(pids.values()) & set(but_not)

    wait_until("an active worker and a standby", found, STANDBY_TIMEOUT_S)
    pids = children(supervisor)
    return pids["active"], pids["standby"]


@dataclass(frozen=True, slots=True)
class Asked:
    """One request and its end. Times are monotonic seconds."""

    sent_s: float
    answered_s: float
    outcome: RankOutcome

    @property
    def took_ms(self) -> float:
        return (self.answered_s - self.sent_s) * 1e3


class Traffic:
    """Users who come again and again, one request every `interval_s`. As a context: runs inside.

    Their histories travel inline, so a request depends on nothing but the worker.
    """

    def __init__(self, relay: Relay, users: Sequence[str], interval_s: float, budget_ms: float) -> None:
        self.lost: list[LostRequest] = []
        self._client = relay.client(on_lost=self.lost.append)
        self._users = users
        self._interval_s = interval_s
        self._budget_ms = budget_ms
        self._asked: list[tuple[float, list[float], Future[RankOutcome]]] = []
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Traffic:
        self._client.__enter__()
        self._thread.start()
        return self

    def __exit__(self, *_: Any) -> None:
        self._stopping.set()
        self._thread.join()
        self._client.__exit__(None, None, None)

    def stop(self) -> list[Asked]:
        """Asks no more, and waits for every answer."""
        self._stopping.set()
        self._thread.join()
        outcomes = [future.result(timeout=self._budget_ms / 1e3 + 30) for _, _, future in self._asked]
        return [
            Asked(sent_s, ends[0], outcome) for (sent_s, ends, _), outcome in zip(self._asked, outcomes, strict=True)
        ]

    def _run(self) -> None:
        number = 0
        next_s = time.monotonic()
        while not self._stopping.wait(max(0.0, next_s - time.monotonic())):
            next_s += self._interval_s
            user = self._users[number % len(self._users)]
            number += 1
            ends: list[float] = []
            sent_s = time.monotonic()
            future = self._client.submit_rank(
                user, candidates_of(), budget_ms=self._budget_ms, history=history_of(user, HISTORY)
            )
            future.add_done_callback(lambda _, ends=ends: ends.append(time.monotonic()))  # type: ignore[misc]
            self._asked.append((sent_s, ends, future))


def hit_ratio(asked: Sequence[Asked]) -> float:
    """The share that was ranked on a prefix that was there."""
    paths = Counter(each.outcome.result.path for each in asked if each.outcome.result is not None)
    return sum(paths[path] for path in CACHED) / max(1, paths.total())


def require_all_ranked(asked: Sequence[Asked], lost: Sequence[LostRequest]) -> None:
    """Each was answered once, with scores."""
    assert not lost
    assert Counter(each.outcome.status for each in asked) == {RankStatus.RANKED: len(asked)}
    assert len({each.outcome.request_id for each in asked}) == len(asked)
