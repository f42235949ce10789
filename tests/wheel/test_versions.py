"""Two versions of the package in two processes: a gateway and a worker that understand each other's messages.

The later version has members in each open choice, and optional fields, that the earlier one does not know. A worker
that is told what to answer shows every member; a real worker shows that a request is ranked.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from relaygr.kafka.settings import KafkaSettings
from relaygr.schemas import messages
from tests.wheel.wheel_world import Environment, finish
from tests.worlds.relay import Relay, make_model

pytestmark = [pytest.mark.slow, pytest.mark.parametrize("broker", ["embedded"], indirect=True)]

HERE = Path(__file__).parent
NEWEST_LATER = {"path": "remote", "prefix_source": "peer", "reason": "quota_exceeded", "state": "draining"}
CHOICES = {"path": "Path", "prefix_source": "PrefixSource", "reason": "FailureReason", "state": "WorkerState"}
NEWEST_TODAY = {field: list(getattr(messages, name))[-1].value for field, name in CHOICES.items()}
NEW_FIELDS = {
    "RankingRequest": '    tenant: Annotated[str | None, Text(64), "whose request it is"] = "a"\n',
    "RankingResult": '    region: Annotated[str | None, Text(64), "where it was ranked"] = "eu"\n',
}


def rewrite(environment: Environment, edit: Callable[[str], str]) -> Environment:
    """Changes the message classes of an installed wheel."""
    path = environment.packages / "relaygr" / "schemas" / "messages.py"
    before = path.read_text(encoding="utf-8")
    after = edit(before)
    assert after != before
    path.write_text(after, encoding="utf-8")
    return environment


def without_newest_members(source: str) -> str:
    """The messages of an earlier version: the last member of each open choice is not there."""
    for name in CHOICES.values():
        source, count = re.subn(
            rf'(class {name}\(.*?)    [A-Z_]+ = [^\n]*\n(?:    """[^\n]*\n)?\n\n',
            r"\1\n\n",
            source,
            count=1,
            flags=re.S,
        )
        assert count == 1, name
    return source


def with_more_members(source: str) -> str:
    """The messages of a later version: one more member in each open choice, and new optional fields."""
    for field, name in CHOICES.items():
        member = f'    NEWEST = "{NEWEST_LATER[field]}"\n'
        source, count = re.subn(rf"(class {name}\(.*?\n)\n\n", rf"\1{member}\n\n", source, count=1, flags=re.S)
        assert count == 1, name
    for name, field in NEW_FIELDS.items():
        source, count = re.subn(
            rf"(class {name}:.*?\n)(\n    def )",
            lambda found, field=field: found[1] + field + found[2],
            source,
            count=1,
            flags=re.S,
        )
        assert count == 1, name
    return source


@pytest.fixture(scope="module")
def earlier(installed: Environment, tmp_path_factory: pytest.TempPathFactory) -> Environment:
    return rewrite(installed.copy(tmp_path_factory.mktemp("earlier") / "copy"), without_newest_members)


@pytest.fixture(scope="module")
def later(installed: Environment, tmp_path_factory: pytest.TempPathFactory) -> Environment:
    return rewrite(installed.copy(tmp_path_factory.mktemp("later") / "copy"), with_more_members)


def understood(kafka: KafkaSettings, gateway: Environment, worker: Environment) -> dict[str, str]:
    """What a gateway of one version reads in the answers and the status of a worker of another one."""
    as_json = kafka.model_dump_json(exclude={"security"})
    answering = worker.start(HERE / "version_worker.py", as_json)
    try:
        assert answering.stdout is not None
        if answering.stdout.readline() != "ready\n":
            finish(answering)
        seen: dict[str, str] = json.loads(finish(gateway.start(HERE / "version_gateway.py", as_json)))
        finish(answering)
    finally:
        answering.kill()
    return seen


def test_a_gateway_of_an_earlier_version_keeps_what_todays_worker_says_as_other(
    kafka_settings: KafkaSettings, earlier: Environment, installed: Environment
) -> None:
    assert understood(kafka_settings, earlier, installed) == {
        field: f"other {text}" for field, text in NEWEST_TODAY.items()
    }


def test_todays_gateway_keeps_what_a_later_worker_says_as_other(
    kafka_settings: KafkaSettings, installed: Environment, later: Environment
) -> None:
    assert understood(kafka_settings, installed, later) == {
        field: f"other {text}" for field, text in NEWEST_LATER.items()
    }


def test_todays_worker_serves_a_gateway_of_a_later_version(
    kafka_settings: KafkaSettings, later: Environment, installed: Environment
) -> None:
    assert understood(kafka_settings, later, installed) == {
        field: f"member {text}" for field, text in NEWEST_TODAY.items()
    }


def test_a_worker_of_an_earlier_version_serves_todays_gateway(
    kafka_settings: KafkaSettings, installed: Environment, earlier: Environment
) -> None:
    seen = understood(kafka_settings, installed, earlier)
    assert {text.partition(" ")[0] for text in seen.values()} == {"member"}
    assert not set(seen.values()) & {f"member {text}" for text in NEWEST_TODAY.values()}


@pytest.mark.parametrize("gateway", ["earlier", "later"])
def test_a_real_worker_ranks_for_a_gateway_of_another_version(
    kafka_settings: KafkaSettings,
    tmp_path: Path,
    gateway: str,
    installed: Environment,
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asking: Environment = request.getfixturevalue(gateway)
    monkeypatch.setattr(sys, "executable", str(installed.python))
    with Relay(kafka_settings, tmp_path / "relay", make_model(tmp_path / "model")) as relay:
        relay.await_ready(relay.start_worker())
        ended = finish(asking.start(HERE / "rank_gateway.py", kafka_settings.model_dump_json(exclude={"security"})))
    assert ended == "ranked 3"
