"""The engine on a device called npu: a fake one (`fake_npu.py`), computing like the CPU and strict like a device."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
def test_every_kind_of_model_scores_on_an_npu_as_on_the_cpu() -> None:
    environment = os.environ | {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "tests.workers.npu_process"],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    printed = json.loads(done.stdout.splitlines()[-1])
    report = printed["report"]
    assert {kind: error for kind, (_, error) in report.items() if error > 2e-6} == {}
    assert report["meta"][0] == "blocked torch"
    assert report["RecSDK"][0] == "RecSDK hstu_jagged"
    assert printed["operators"]["RecSDK"] == ["mxrec.hstu_jagged.delta"]
    assert "aten.bmm.default" in printed["operators"]["plain"]
