"""Messages and settings of this version and of the earlier one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from relaygr.schemas import vectors
from relaygr.schemas.vectors import wire_file
from relaygr.settings import load_settings
from tests.wheel.wheel_world import Environment, finish

pytestmark = pytest.mark.slow

HERE = Path(__file__).parent
NEW_FIELDS = {"history_stale_cause", "history_wait_us"}
"""The optional fields that the earlier version does not know. One that comes is added here."""


@pytest.fixture(scope="module")
def known(earlier: Environment) -> dict[str, Any]:
    """What the earlier version knows, and what it reads in today's vectors."""
    today = Path(vectors.__file__).parent / vectors.FILE
    found: dict[str, Any] = json.loads(finish(earlier.start(HERE / "version_formats.py", str(today))))
    return found


def without_new_fields(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: without_new_fields(each) for name, each in value.items() if name not in NEW_FIELDS}
    return value


def test_the_bytes_that_the_earlier_version_sends_are_those_that_are_kept(known: dict[str, Any]) -> None:
    today = wire_file()
    for section, entries in known["vectors"].items():
        if isinstance(entries, list):
            assert [entry for entry in entries if entry not in today[section]] == []
        else:
            assert entries == today[section]


def test_the_earlier_version_reads_all_messages_of_today_and_passes_over_new_fields(known: dict[str, Any]) -> None:
    today = wire_file()["messages"]
    assert known["messages"] == [without_new_fields(entry["fields"]) for entry in today]
    assert any(without_new_fields(entry["fields"]) != entry["fields"] for entry in today)


def test_the_earlier_version_refuses_what_is_refused_today_for_the_same_reason(known: dict[str, Any]) -> None:
    assert known["refused"] == [entry["reason"] for entry in wire_file()["refused"]]


def test_settings_of_the_earlier_version_are_read(known: dict[str, Any], tmp_path: Path) -> None:
    file = tmp_path / "settings.yaml"
    file.write_text(yaml.safe_dump(known["settings"]), encoding="utf-8")
    load_settings(file, environment={})
