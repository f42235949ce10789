"""`relaygr demo --pool`: whole workers load from real stores what other whole workers computed."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.worlds.pool import needs_mooncake

pytestmark = [pytest.mark.soak, pytest.mark.timeout(900)]


def test_new_workers_load_prefixes_from_the_pool_and_score_as_in_full(tmp_path: Path) -> None:
    needs_mooncake()
    options = ["--pool", "--broker", "embedded", "--seconds", "15", "--rate", "3", "--deadline-ms", "10000"]
    options += ["--lead-ms", "1000", "--set", "traffic.users=12", "--keep", str(tmp_path / "kept")]
    done = subprocess.run(
        [sys.executable, "-m", "relaygr", "demo", *options], stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        text=True, timeout=800, env={**os.environ, "COLUMNS": "200"}, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout
    found = re.search(r"New workers loaded (\d+) prefixes of (\d+) users", done.stdout)
    assert found is not None and int(found[1]) > 0, done.stdout
    assert "objects_written stored" in done.stdout and "NO " not in done.stdout
