"""The tools that will read these files find nothing to say about them, where those tools are installed."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from pathlib import Path

import pytest

from tests.promised import program, unavailable
from tests.waiting import PATIENCE_S
from tests.worlds.compose import ALERTS, COMPOSE, PROMETHEUS

CASES = Path(__file__).with_name("alerts_cases.yaml")
ENTRYPOINT = COMPOSE / "entrypoint.sh"
PROFILES = ("gateway", "pre-infer", "kafka-ui", "monitoring", "cuda", "npu")


@pytest.fixture
def promtool() -> str:
    """Its path."""
    return program("promtool")


def run(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)


def test_promtool_accepts_configuration_and_rules(promtool: str) -> None:
    result = run(promtool, "check", "config", str(PROMETHEUS))
    assert result.returncode == 0, result.stderr
    assert run(promtool, "check", "rules", str(ALERTS)).returncode == 0


def test_alerts_fire_when_they_should_and_are_quiet_otherwise(promtool: str) -> None:
    result = run(promtool, "test", "rules", str(CASES))
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.container
@pytest.mark.parametrize("profile", [None, *PROFILES])
def test_docker_compose_reads_the_file_without_a_word(profile: str | None) -> None:
    if shutil.which("docker") is None or run("docker", "compose", "version").returncode:
        unavailable("docker", "docker compose is not installed")
    chosen = ["--profile", profile] if profile else []
    result = run("docker", "compose", "--project-directory", str(COMPOSE), *chosen, "config", "--quiet")
    assert (result.returncode, result.stderr) == (0, "")


def entrypoint(folder: Path, script: str, **variables: str) -> subprocess.Popen[str]:
    """Starts the entrypoint as `worker`, with a shell script in the place of `relaygr`."""
    stand_in = folder / "relaygr"
    stand_in.write_text(f"#!/bin/sh\n{script}\n", encoding="utf-8")
    stand_in.chmod(0o755)
    environment = {**os.environ, "PATH": f"{folder}:{os.environ['PATH']}", **variables}
    return subprocess.Popen(
        ["/bin/sh", str(ENTRYPOINT), "worker"],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.parametrize(("ends_with", "engine_sees"), [(0, 0), (1, 1), (3, 0), (4, 4)])
def test_only_a_fenced_worker_looks_as_if_it_had_ended_well(tmp_path: Path, ends_with: int, engine_sees: int) -> None:
    """An engine restarts on failure; a fenced worker that came back would take its id from the other."""
    process = entrypoint(tmp_path, f"exit {ends_with}")
    process.communicate(timeout=PATIENCE_S)
    assert process.returncode == engine_sees


@pytest.mark.slow
def test_kubernetes_sees_a_fenced_worker_stay_until_its_pod_is_deleted(tmp_path: Path) -> None:
    """It restarts a container whatever its exit code."""
    mark = tmp_path / "fenced"
    mark.touch()
    process = entrypoint(tmp_path, 'test -e "$TMPDIR/fenced" || exit 3', WHEN_FENCED="hold", TMPDIR=str(tmp_path))
    assert process.stderr is not None
    assert "is not restarted" in process.stderr.readline()
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(timeout=0.3)
    assert mark.exists(), "the liveness probe passes by this file"
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=PATIENCE_S) == 0


@pytest.mark.slow
def test_a_worker_is_told_to_stop_and_awaited(tmp_path: Path) -> None:
    """The exit code is the worker's own, after its drain, and not that of the signal."""
    process = entrypoint(tmp_path, "trap 'echo draining; exit 7' TERM; echo ready; while :; do sleep 0.05; done")
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=PATIENCE_S)
    assert (output, process.returncode) == ("draining\n", 7)
