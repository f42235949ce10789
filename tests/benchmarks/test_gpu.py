"""The prepared run on a GPU host, on a CPU: every phase's smallest case, and phases that fail or hang."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import psutil
import pytest

from benchmarks.gpu import __main__ as gpu
from tests.waiting import until

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(find_spec("triton") is None, reason="Triton is there for Linux only"),
]
ROOT = Path(__file__).parents[2]
ENDINGS = {"fails": gpu.Outcome.FAILED, "hangs": gpu.Outcome.TOO_LONG, "passes": gpu.Outcome.PASSED}

SCRIPT = """
import json, subprocess, sys, time
out, ending = sys.argv[1:]
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
with open(out, "w") as file:
    json.dump([{"child": child.pid}], file)
if ending == "hangs":
    time.sleep(600)
sys.exit(ending == "fails")
"""


def test_a_phase_that_fails_or_hangs_is_reported_and_does_not_stop_the_next(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "phase.py"
    script.write_text(SCRIPT, encoding="utf-8")
    figures = gpu.Figures("json", json.loads, lambda row: f"process {row['child']}")
    phases = [gpu.Phase(name, 15 if name == "hangs" else 100, f"{script} OUT {name}", figures) for name in ENDINGS]
    phases.insert(1, gpu.Phase("breaks", 100, "-c raise", figures))
    results = gpu.run(phases, tmp_path / "results", {})
    gpu.report(results, phases, "a CPU", tmp_path / "figures.json")
    assert {each.name: each.outcome for each in results} == ENDINGS | {"breaks": gpu.Outcome.FAILED}
    children = {each.name: row["child"] for each in results for row in each.rows}
    assert list(children) == list(ENDINGS), "what broke has no figures"
    until(lambda: not any(map(runs, children.values())), "the processes of the phases have ended")
    written = json.loads((tmp_path / "figures.json").read_text(encoding="utf-8"))
    assert [each["outcome"] for each in written["phases"]] == ["failed", "failed", "too long", "passed"]
    shown = capsys.readouterr().out
    assert all(f"process {child}" in shown for child in children.values())


def runs(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_what_is_not_a_group_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert gpu.main([]) == gpu.main(["right", "--dry"]) == 2
    assert "right, kernel, engine, relay, or --dry alone" in capsys.readouterr().out


def test_the_test_files_of_a_gpu_host_exist() -> None:
    named = [word for group in gpu.on_gpu().values() for phase in group for word in phase.arguments.split()]
    files = [word for word in named if word.startswith("tests/")]
    assert files and all((ROOT / file).is_file() for file in files)


@pytest.mark.timeout(1600)
def test_the_dry_run_passes_every_phase_and_has_its_figures() -> None:
    done = subprocess.run(
        [ROOT / "benchmarks" / "gpu" / "run.sh", "--dry"],
        env={**os.environ, "PYTHON": sys.executable},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads((gpu.RESULTS / "figures.json").read_text(encoding="utf-8"))
    figures = {each["phase"]: each["figures"] for each in report["phases"]}
    for tests in (figures["kernels"], figures["contract"]):
        assert tests[0]["passed"] > 0 == tests[0]["failed"]
    kernels = [row for row in figures["attention"] if row["back_end"] == "triton"]
    assert {(row["users"], row["candidates"]) for row in kernels} == {(1, 0), (2, 0), (1, 4), (2, 4)}
    assert all(0 < row["error"] < 1e-2 for row in kernels), "of bfloat16"
    assert {row["backend"] for row in figures["engine"]} == {"triton", "triton from graphs"}
    assert [row["system"] for row in figures["relay"]] == ["relay", "full inference"]
    assert all(row["offered"] > 0 and row["worst_score_error"] < 2e-5 for row in figures["relay"])
