"""`relaygr demo` as a user runs it: to its end, and stopped in the middle."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
from typer.testing import CliRunner

from relaygr.cli.app import app
from relaygr.traffic.records import read_records
from tests.waiting import until
from tests.worlds.otlp import SeenSpan, collector
from tests.worlds.relay import environment

pytestmark = pytest.mark.slow

SMALL = ("traffic.users=10", "traffic.history_median=128", "traffic.history_max=256", "traffic.items=500")
ALIKE = (*SMALL, "traffic.users=20", "traffic.zipf_exponent=0", "traffic.history_sigma=0")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "tmp").mkdir()
    return tmp_path


def start(folder: Path, *arguments: str, **variables: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "relaygr", "demo", "--broker", "embedded"]
    for setting in SMALL:
        command += ["--set", setting]
    return subprocess.Popen(
        [*command, *arguments],
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
        until(lambda: any("relaygr traffic" in line for line in commands(process)), "the traffic runs", 240)
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
    said, _ = demo.communicate(timeout=120)
    assert demo.returncode != 0
    assert "Traceback" not in said, said
    _, alive = psutil.wait_procs(children, timeout=60)
    assert not alive
    assert not list((folder / "tmp").glob("relaygr-*"))


@dataclass(frozen=True)
class FinishedDemo:
    """A demo that ended. `kept`: its folder with records, calibration, model and settings."""

    said: str
    status: int
    kept: Path
    spans: list[SeenSpan]
    leftovers: list[Path]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> FinishedDemo:
    """The deadline is long, so a slow machine changes no path. All users are alike, so little depends on who comes."""
    folder = tmp_path_factory.mktemp("finished")
    (folder / "tmp").mkdir()
    kept = folder / "kept"
    options = ["--keep", str(kept), "--seconds", "15", "--rate", "20", "--deadline-ms", "10000", "--lead-ms", "100"]
    for setting in (*ALIKE, "worker.warm_up_users=0", "tracing.enabled=true"):
        options += ["--set", setting]
    with collector() as seen:
        process = start(folder, *options, OTEL_EXPORTER_OTLP_ENDPOINT=seen.endpoint)
        said, _ = process.communicate(timeout=240)
    return FinishedDemo(said, process.returncode, kept, list(seen.spans), list((folder / "tmp").glob("relaygr-*")))


def test_a_short_demo_ends_with_both_runs_side_by_side_and_its_gates(finished):
    said = finished.said
    assert finished.status in (0, 1), said
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
    services = {span.service for span in finished.spans}
    assert services == {"relaygr-traffic", "relaygr-trigger", "relaygr-worker"}, "every process of the demo traces"
    assert ("NO " in said) == (finished.status == 1)
    assert not finished.leftovers


def test_the_simulation_of_a_run_has_the_paths_of_the_run(finished, tmp_path):
    """Times are learnt from the run. The simulation draws other impressions than the run: the share of hits in HBM
    differs from seed to seed with a standard deviation of 0.03, and with the usual Zipf distribution and lengths over
    ten users of 0.06.
    """
    kept, times, out = finished.kept, tmp_path / "times.json", tmp_path / "simulated.json"
    ran = kept / "relaygr-relay"
    workers = len(list(ran.glob("worker-*.log")))
    measured = ("--calibration", str(kept / "calibration.json"))

    def relaygr(*command: str) -> None:
        done = CliRunner().invoke(app, command)
        assert done.exit_code == 0, done.output

    relaygr("simulate", "learn", str(kept / "relay.jsonl"), *measured, "--out", str(times))
    relaygr(
        "simulate", "run", *measured, "--config", str(ran / "settings.yaml"), "--model", str(kept / "model"),
        "--times", str(times), "--system", "relay", "--workers", str(workers), "--qps", "20", "--seconds", "15",
        "--slo-ms", "10000", "--json", str(out),
    )  # fmt: skip
    mix = json.loads(out.read_text())["systems"]["relay"]["mix"]
    records = sorted(read_records(kept / "relay.jsonl"), key=lambda each: each.number)
    records = records[len(records) // 4 :]
    counted = [each for each in records if each.status == "ranked"]
    assert len(counted) >= 0.9 * len(records), "the machine is too slow to compare anything"
    found = Counter(each.path for each in counted)
    simulated = {path: mix[path]["value"] for path in ("hbm", "dram", "full")}
    assert simulated == pytest.approx({path: found[path] / len(counted) for path in simulated}, abs=0.1)
