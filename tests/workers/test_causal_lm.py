"""Decoders of `transformers` as rankers, in a process that has the library.

torchmetrics imports it wherever it is installed, and then Triton's interpreter fails in that process. So `make test`
installs it into a folder of its own.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.promised import unavailable

pytestmark = pytest.mark.slow

CASES = Path(__file__).with_name("causal_lm_cases.py")


def test_decoders_of_transformers_rank_as_they_do_without_us() -> None:
    library = Path(sys.prefix) / "transformers"
    if not library.is_dir():
        unavailable("transformers", f"{library} does not exist: `make test-fast` makes it")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-n0", str(CASES)],
        env={**os.environ, "PYTHONPATH": str(library)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert " passed" in done.stdout and "skipped" not in done.stdout
