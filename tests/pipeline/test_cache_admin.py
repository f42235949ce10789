"""`relaygr cache show` against a running worker and its standby, which takes over meanwhile."""

from __future__ import annotations

import json
import os
import signal
import socket
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from relaygr.cli.app import app
from relaygr.client import Ended
from relaygr.devbroker import LocalBroker
from relaygr.schemas.messages import Path as ServedBy
from relaygr.worker.admin_socket import SOCKET_NAME
from tests.waiting import until
from tests.worlds.pair import await_pair, children
from tests.worlds.relay import Relay, candidates_of, history_of, new_user, own_topics

pytestmark = pytest.mark.slow

LENGTH = 300
BUDGET_MS = 20_000
STANDBY_TIMEOUT_S = 90.0


@pytest.fixture
def relay(embedded_broker: LocalBroker, model: Path, tmp_path: Path) -> Iterator[Relay]:
    with own_topics(embedded_broker) as kafka, Relay(kafka, tmp_path, model) as relay:
        yield relay


def cache_of(relay: Relay, *arguments: str) -> Any:
    config = str(relay.folder / "settings.yaml")
    done = CliRunner().invoke(app, ["cache", "show", "worker-00", *arguments, "--json", "--config", config])
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout)


def server_of(path: Path) -> int:
    """The process that serves the socket."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        folder = os.open(path.parent, os.O_PATH)
        connection.connect(f"/proc/self/fd/{folder}/{path.name}")
        os.close(folder)
        pid, _, _ = struct.unpack("iII", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
        return int(pid)


def test_an_operator_sees_what_a_running_worker_holds(relay: Relay) -> None:
    worker = relay.start_worker(command=["worker", "--standby"])
    relay.await_ready(worker)
    pair = await_pair(worker.port, STANDBY_TIMEOUT_S)
    (path,) = (relay.folder / "shared").rglob(SOCKET_NAME)
    assert server_of(path) == pair.active
    users = [new_user() for _ in range(2)]
    with relay.client() as client:

        def rank(user: str, seed: int) -> ServedBy:
            outcome = client.rank(
                user, candidates_of(), history_version=history_of(user, LENGTH, seed).version(), budget_ms=BUDGET_MS
            )
            assert outcome.status is Ended.RANKED and outcome.result is not None
            assert isinstance(outcome.result.path, ServedBy)
            return outcome.result.path

        def spilled(user: str) -> bool:
            entries = cache_of(relay, "--user", user)["entries"]
            return [(each["tier"], each["state"]) for each in entries] == [("hbm", "ready"), ("dram", "ready")]

        for seed, user in enumerate(users):
            client.publish_history(history_of(user, LENGTH, seed))
            assert rank(user, seed) is ServedBy.FULL
        until(lambda: all(map(spilled, users)), "both users are in both tiers")
        report = cache_of(relay)
        assert {each["user_id"] for each in report["top"]} == set(users)

        os.kill(pair.active, signal.SIGKILL)
        until(lambda: children(worker.port).get("active") == pair.standby, "the standby is active")
        relay.await_ready(worker)
        assert server_of(path) == pair.standby
        restored = cache_of(relay)["top"]
        assert {(each["user_id"], each["hbm_bytes"] > 0) for each in restored} == {(user, False) for user in users}
        assert rank(users[1], 1) is ServedBy.DRAM
    assert relay.stop(worker) == 0
    assert not path.exists()
