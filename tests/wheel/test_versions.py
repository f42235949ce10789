"""Two versions of the package in two processes: a gateway and a worker that understand each other's messages.

The later version has members in each open choice, and optional fields, that today's does not know, as today's may have
some that an earlier one does not know. A worker that is told what to answer shows every member; a real worker shows
that a request is ranked.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest

from relaygr.kafka.settings import KafkaSettings
from relaygr.schemas import messages
from relaygr.schemas.ended import WIRE_REASONS
from tests.wheel.wheel_world import Environment, finish
from tests.worlds.relay import Relay, make_model

pytestmark = [pytest.mark.slow, pytest.mark.parametrize("broker", ["embedded"], indirect=True)]

HERE = Path(__file__).parent
NEWEST_LATER = {"path": "remote", "prefix_source": "peer", "reason": "quota_exceeded", "state": "draining"}
CHOICES = {"path": "Path", "prefix_source": "PrefixSource", "reason": "Reason", "state": "WorkerState"}
NEWEST_TODAY = {field: list(getattr(messages, name))[-1].value for field, name in CHOICES.items()}
NEWEST_TODAY["reason"] = WIRE_REASONS[-1].value
NEW_FIELDS = {
    "RankingRequest": '    tenant: Annotated[str | None, Text(64), "whose request it is"] = "a"\n',
    "RankingResult": '    region: Annotated[str | None, Text(64), "where it was ranked"] = "eu"\n',
}


def with_one_more_member(source: str, field: str) -> str:
    """The source with one more member in the choice of this field."""
    name, member = CHOICES[field], f'    NEWEST = "{NEWEST_LATER[field]}"\n'
    source, count = re.subn(rf"(class {name}\(.*?\n)\n\n", rf"\1{member}\n\n", source, count=1, flags=re.S)
    assert count == 1, name
    return source


def with_new_fields(source: str) -> str:
    """The messages of a later version, with new optional fields."""
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
def later(installed: Environment, tmp_path_factory: pytest.TempPathFactory) -> Environment:
    """The installed wheel with other message classes."""
    environment = installed.copy(tmp_path_factory.mktemp("later") / "copy")
    schemas = environment.packages / "relaygr" / "schemas"
    for field in CHOICES:
        path = schemas / ("ended.py" if field == "reason" else "messages.py")
        path.write_text(with_one_more_member(path.read_text(encoding="utf-8"), field), encoding="utf-8")
    path = schemas / "messages.py"
    path.write_text(with_new_fields(path.read_text(encoding="utf-8")), encoding="utf-8")
    return environment


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


def test_a_real_worker_ranks_for_a_gateway_of_a_later_version(
    kafka_settings: KafkaSettings,
    tmp_path: Path,
    installed: Environment,
    later: Environment,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys, "executable", str(installed.python))
    with Relay(kafka_settings, tmp_path / "relay", make_model(tmp_path / "model")) as relay:
        relay.await_ready(relay.start_worker())
        ended = finish(later.start(HERE / "rank_gateway.py", kafka_settings.model_dump_json(exclude={"security"})))
    assert ended == "ranked 3"
