"""The kernels compile for Hopper, on any machine: Triton brings its compiler, and needs no GPU to run it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SHARED_BYTES = 227 * 1024
"""Of one program on sm_90."""


@pytest.mark.slow
@pytest.mark.skipif(find_spec("triton") is None, reason="Triton is there for Linux only")
def test_the_kernels_compile_for_hopper_and_fit_it() -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-m", "tests.workers.hopper_process"],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    for kernel, found in report.items():
        assert found["shared_bytes"] <= SHARED_BYTES, kernel
        assert found["spilled_bytes"] == 0, (kernel, found)
        is_attention = not kernel.startswith(("input norm", "output", "store", "round", "join"))
        assert (found["wgmma"] > 0) == (is_attention and "float16" in kernel), kernel
        assert (found["async_copies"] > 0) == is_attention, kernel
