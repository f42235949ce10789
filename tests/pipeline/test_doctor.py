"""`relaygr doctor` beside a running relay, on both brokers: everything is well, until a worker is gone."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from relaygr.cluster.admin import is_embedded
from relaygr.kafka.clients import require_broker
from tests.worlds.relay import Relay, environment

pytestmark = pytest.mark.slow


def doctor(relay: Relay) -> tuple[int, dict[str, list[tuple[str, str]]]]:
    """The exit code, and by check its verdicts with what they say."""
    command = [sys.executable, "-m", "relaygr", "doctor", "--json", "--config", str(relay.folder / "settings.yaml")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=180, env=environment(), check=False)
    found: dict[str, list[tuple[str, str]]] = {}
    for each in json.loads(done.stdout)["findings"]:
        found.setdefault(each["check"], []).append((each["verdict"], each["what"]))
    return done.returncode, found


def test_a_running_relay_is_well_and_ranks_an_impression(relay: Relay) -> None:
    with relay:
        _look(relay)


def _look(relay: Relay) -> None:
    worker, trigger = relay.start_worker(), relay.start_trigger()
    relay.await_ready(worker, trigger)
    code, found = doctor(relay)
    assert code < 2, found
    is_real = not is_embedded(require_broker(relay.kafka))
    for check in ("versions", "broker", "topics", "workers", "partitions", "impression", "model"):
        assert found[check][0][0] == "ok", (check, found[check])
    assert found["clocks"][0][0] in ("ok", "warn"), found["clocks"]
    if is_real:
        assert found["trigger"] == [("ok", "1 running")]
        assert found["rights"] == [("ok", "this user may act as gateway, trigger, worker")]
        assert "Kafka 4.0 or newer" in found["broker"][0][1]
    assert "ranked by worker-00" in found["impression"][0][1]
    assert found["traffic"][0][0] != "skip", found["traffic"]

    relay.kill(worker)
    code, found = doctor(relay)
    assert code == 2
    assert [verdict for verdict, _ in found["workers"]] == ["warn", "fail"], found["workers"]
    assert found["impression"][0][0] == "skip"
