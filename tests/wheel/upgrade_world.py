"""Processes of two versions on the same topics, and callers of their HTTP gateways."""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from http.client import HTTPConnection
from typing import Any
from unittest.mock import patch

import numpy as np

from relaygr.devbroker.local import free_ports
from relaygr.processes import CommandProcess
from tests.waiting import PATIENCE_S
from tests.wheel.wheel_world import Environment
from tests.worlds.relay import Relay, candidates_of, reading
from tests.worlds.steady_traffic import Steady

BUDGET_MS = 60_000
"""A worker may take long to start on a busy machine."""
LEAD_MS = 100
AT_RISK_MS = 50
"""What the trigger is told of the budget, so that each impression has a job."""
CANDIDATES = candidates_of().tolist()


@dataclass(frozen=True)
class Version:
    """A version of the package, and where it is installed."""

    name: str
    installed: Environment

    @contextmanager
    def starts(self) -> Iterator[None]:
        """Commands that are started within run in this version."""
        with patch.object(sys, "executable", str(self.installed.python)):
            yield


@dataclass(frozen=True)
class Gateway:
    """An HTTP gateway."""

    process: CommandProcess
    port: int

    def post(self, path: str, **body: Any) -> tuple[int, dict[str, Any]]:
        """The status and the content of the answer."""
        connection = HTTPConnection("127.0.0.1", self.port, timeout=BUDGET_MS / 1000 + PATIENCE_S)
        try:
            connection.request("POST", path, json.dumps(body), {"content-type": "application/json"})
            answer = connection.getresponse()
            return answer.status, json.loads(answer.read())
        finally:
            connection.close()

    def rank(self, user_id: str, **fields: Any) -> tuple[int, dict[str, Any]]:
        """The answer to a ranking request."""
        return self.post("/v1/rank", user_id=user_id, candidates=CANDIDATES, budget_ms=BUDGET_MS, **fields)

    def impression(self, user_id: str) -> tuple[int, dict[str, Any]]:
        """The answer to the ranking request of an impression that is announced before."""
        status, event = self.post(
            "/v1/retrieval", user_id=user_id, expected_ranking_in_ms=LEAD_MS, ranking_budget_ms=AT_RISK_MS,
            expected_candidates=len(CANDIDATES), expected_suffix=0,
        )  # fmt: skip
        assert status == 202, event
        time.sleep(LEAD_MS / 1000)
        return self.rank(user_id, request_id=event["request_id"], query_time_ms=event["query_time_ms"])


def start_gateway(relay: Relay, version: Version) -> Gateway:
    """A gateway of this version; the caller waits until it is ready."""
    [port] = free_ports(1)
    with version.starts():
        name = f"gateway-{version.name}"
        own = [f"gateway.listen_port={port}", f"gateway.gateway_id={name}"]
        return Gateway(relay.processes.start(name, ["gateway"], "gateway", own), port)


class Impressions(Steady):
    """Impressions of the users in turn, each through one of the gateways."""

    def __init__(self, users: Sequence[str], interval_s: float, *gateways: Gateway) -> None:
        super().__init__(interval_s)
        self._users = users
        self._gateways = gateways
        self._changed = threading.Lock()
        self._callers = ThreadPoolExecutor(64)
        self._answers: list[Future[tuple[int, dict[str, Any]]]] = []

    def through(self, *gateways: Gateway) -> None:
        """From now on."""
        with self._changed:
            self._gateways = gateways

    def send(self, number: int) -> None:
        # Not the same users through the same gateway again and again.
        user = self._users[(number + number // len(self._users)) % len(self._users)]
        with self._changed:
            gateway = self._gateways[number % len(self._gateways)]
            self._answers.append(self._callers.submit(gateway.impression, user))

    def take(self) -> list[tuple[int, dict[str, Any]]]:
        """The answers of all impressions that were sent since the last call, waited for."""
        with self._changed:
            answers, self._answers = self._answers, []
        return [answer.result() for answer in answers]

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)
        self._callers.shutdown()


def workers_of(answers: Sequence[tuple[int, dict[str, Any]]]) -> set[str]:
    """Which workers ranked. Fails if a request was not ranked."""
    unranked = [answer for status, answer in answers if status != 200 or answer["status"] != "ranked"]
    assert unranked == []
    return {answer["result"]["worker_id"] for _, answer in answers}


def lengths_of(gateway: Gateway, users: Iterable[str]) -> dict[str, int]:
    """The length of the history on which each user is ranked now."""
    answers = {user: gateway.rank(user) for user in users}
    workers_of(list(answers.values()))
    return {
        user: (answer["result"].get("history_version") or {"length": 0})["length"]
        for user, (_, answer) in answers.items()
    }


def waits_in_vain(gateway: Gateway, users: Iterable[str]) -> list[bool]:
    """Names a version that never comes, and returns of each user whether the result says so. Newer workers add the
    cause and the time of the wait, which older gateways pass over.
    """
    never = {"number": 5_000_000, "length": 100, "digest": "00" * 16}
    answers = [gateway.rank(user, history_version=never) for user in users]
    workers_of(answers)
    return [answer["result"]["history_stale"] for _, answer in answers]


def scores_of(gateway: Gateway, lengths: Mapping[str, int], query_time_ms: int) -> np.ndarray[Any, Any]:
    """The scores of each user's candidates, [users, candidates * tasks]. Fails on an older history."""
    rows = []
    for user, length in lengths.items():
        status, answer = gateway.rank(user, query_time_ms=query_time_ms)
        assert (status, answer["status"]) == (200, "ranked"), answer
        result = answer["result"]
        assert (result["history_version"]["length"], result["history_stale"]) == (length, False), (user, result)
        assert result["prefix_tokens"] == length + 1
        rows.append(np.float32(result["scores"]))
    return np.stack(rows)


def owned(worker: CommandProcess) -> float:
    """Number of its partitions."""
    return reading(worker).total("relaygr_consumer_owned_partitions")


def all_owned(relay: Relay, *workers: CommandProcess) -> bool:
    """Whether each worker has its share of all partitions."""
    share = relay.kafka.partitions // len(workers)
    return all(owned(worker) == share for worker in workers)
