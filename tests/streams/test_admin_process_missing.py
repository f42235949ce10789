"""Processes without a usable `sys.executable` or temporary folder: questions that are a courtesy end with a warning."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import pytest
from confluent_kafka.admin import AdminClient
from structlog.testing import capture_logs

import relaygr.cluster.rights
from relaygr.cluster.admin_process import AdminProcess, CannotStart, ask
from relaygr.cluster.rights import Role, require_rights
from relaygr.cluster.topic_identity import identify_topics
from relaygr.kafka.settings import KafkaSettings

NOBODY = KafkaSettings(bootstrap="127.0.0.1:1")


def echo(_: AdminClient, text: str) -> str:
    return text


def chatter(_: AdminClient) -> int:
    """Writes more to stderr than a pipe holds."""
    for _line in range(200_000):
        sys.stderr.write("a line of a library\n")
    return 7


@pytest.fixture
def nowhere(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """No interpreter: neither the executable nor the environment has one."""
    monkeypatch.setattr(sys, "exec_prefix", str(tmp_path))
    return tmp_path


def hanging(folder: Path, name: str) -> str:
    program = folder / name
    program.write_text("#!/bin/sh\nexec sleep 600\n")
    program.chmod(0o700)
    return str(program)


@pytest.mark.slow
@pytest.mark.parametrize("executable", ["", None, "/usr/bin/yes", "a server that hangs"])
def test_a_server_that_embeds_python_asks_with_the_interpreter_of_its_environment(
    executable: str | None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    given = hanging(tmp_path, "server") if executable == "a server that hangs" else executable
    monkeypatch.setattr(sys, "executable", given)
    assert ask(NOBODY, "test", 60, echo, "asked") == "asked"


@pytest.mark.slow
def test_the_process_that_asks_needs_no_temporary_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "missing"))
    assert ask(NOBODY, "test", 60, echo, "asked") == "asked"


@pytest.mark.slow
def test_a_library_that_writes_much_does_not_stop_the_process_that_asks() -> None:
    assert ask(NOBODY, "test", 60, chatter) == 7


@pytest.mark.parametrize("executable", ["", None, "/nowhere/python3", "/nowhere/uwsgi"])
def test_without_an_interpreter_the_check_of_rights_warns(
    executable: str | None, nowhere: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", executable)
    with capture_logs() as logs:
        require_rights(NOBODY, Role.GATEWAY)
    [line] = logs
    assert line["event"] == "rights were not checked" and "cannot start" in line["cause"]


def test_an_interpreter_that_does_not_start_is_not_waited_for_long(
    nowhere: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(relaygr.cluster.rights, "START_OF_CHECK_S", 0.2)
    monkeypatch.setattr(sys, "executable", hanging(nowhere, "python3"))
    with capture_logs() as logs:
        require_rights(NOBODY, Role.WORKER)
    assert "did not start within 0.2 s" in logs[0]["cause"]


def test_an_interpreter_without_our_packages_cannot_start_a_process(
    nowhere: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = nowhere / "python3"
    program.write_text("#!/bin/sh\necho no module named relaygr >&2\nexit 1\n")
    program.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(program))
    with pytest.raises(CannotStart, match="ended with 1: no module named relaygr"), AdminProcess(NOBODY, "t") as admin:
        admin.call(5, echo, "asked")


def test_topic_ids_that_cannot_be_asked_are_of_another_log_and_said_once(
    nowhere: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", "")
    with capture_logs() as logs:
        first = identify_topics(NOBODY, ["a", "b"], "test", 1)
        again = identify_topics(NOBODY, ["b"], "test", 1)
    assert first.cluster_id and all(first.topic_ids.values())
    assert again.topic_ids["b"] == first.topic_ids["b"]
    assert len(logs) <= 1 and all("topic ids are unknown" in line["event"] for line in logs)
