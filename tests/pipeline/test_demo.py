"""`relaygr demo` as a user runs it: to its end, and stopped in the middle."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from tests.worlds.otlp import collector
from tests.worlds.relay import environment, wait_until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

SMALL = ("traffic.users=10", "traffic.history_median=128", "traffic.history_max=256", "traffic.items=500")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "tmp").mkdir()
    return tmp_path


def start(folder: Path, *arguments: str, **variables: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "relaygr", "demo", "--broker", "embedded", *arguments]
    for setting in SMALL:
        command += ["--set", setting]
    return subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        stdin=subprocess.DEVNULL,
        text=True,
        env={**environment(), "TMPDIR": str(folder / "tmp"), "COLUMNS": "200", **variables},
        start_new_session=True,
    )


@pytest.fixture
def demo(folder: Path) -> Iterator[subprocess.Popen[str]]:
    """In the middle of its first run: the gateway plays."""
    process = start(folder, "--seconds", "60", "--rate", "5")
    try:
        wait_until("the traffic runs", lambda: any("relaygr traffic" in line for line in commands(process)), 90)
        yield process
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def commands(process: subprocess.Popen[str]) -> list[str]:
    found = []
    for child in psutil.Process(process.pid).children(recursive=True):
        try:
            found.append(" ".join(child.cmdline()))
        except psutil.Error:
            continue
    return found


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_demo_stopped_in_the_middle_leaves_no_process_and_no_folder(demo, folder, number):
    children = psutil.Process(demo.pid).children(recursive=True)
    assert len(children) >= 4, "two workers, a trigger and a gateway"
    time.sleep(1)
    demo.send_signal(number)
    said, _ = demo.communicate(timeout=40)
    assert demo.returncode != 0
    assert "Traceback" not in said, said
    _, alive = psutil.wait_procs(children, timeout=15)
    assert not alive
    assert not list((folder / "tmp").glob("relaygr-*"))


def test_a_short_demo_ends_with_both_runs_side_by_side_and_its_gates(folder):
    with collector() as seen:
        tracing = ("--set", "tracing.enabled=true")
        process = start(folder, "--seconds", "6", *tracing, OTEL_EXPORTER_OTLP_ENDPOINT=seen.endpoint)
        said, _ = process.communicate(timeout=240)
    assert process.returncode in (0, 1), said
    assert "Traceback" not in said, said
    for wanted in ("relay on", "relay off", "requests offered", "P99", "device seconds", "no request lost", "scores"):
        assert wanted in said, said
    predicted = said[said.index("Predicted / measured") :].splitlines()
    hits = next(line for line in predicted if "ranking on cached K,V" in line)
    assert re.search(r"(\d+\.\d\d ){2}\d+\.\d\d", hits), hits
    lost = next(line for line in said.splitlines() if "no request lost" in line)
    assert lost.startswith("yes"), said
    equal = next(line for line in said.splitlines() if "cached scores equal" in line)
    assert equal.startswith("yes"), said
    services = {span.service for span in seen.spans}
    assert services == {"relaygr-traffic", "relaygr-trigger", "relaygr-worker"}, "every process of the demo traces"
    assert ("NO " in said) == (process.returncode == 1)
    assert not list((folder / "tmp").glob("relaygr-*"))
