"""`relaygr demo --pool`: whole workers load from real stores what other whole workers computed."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from relaygr.devbroker.local import free_ports
from relaygr.runtime.direct_http import open_directly
from tests.worlds.pool import needs_mooncake

pytestmark = [pytest.mark.soak, pytest.mark.timeout(900)]


def test_new_workers_load_prefixes_from_the_pool_and_score_as_in_full(tmp_path: Path) -> None:
    needs_mooncake()
    options = ["--pool", "--broker", "embedded", "--seconds", "15", "--rate", "3", "--deadline-ms", "10000"]
    options += ["--lead-ms", "1000", "--set", "traffic.users=12", "--keep", str(tmp_path / "kept")]
    (port,) = free_ports(1)
    options += ["--no-stay", "--set", f"ui.http_port={port}"]
    documents, out = [], tmp_path / "out.txt"
    with out.open("wb") as printed:
        demo = subprocess.Popen(
            [sys.executable, "-m", "relaygr", "demo", *options], stdout=printed, stderr=subprocess.STDOUT,
            env={**os.environ, "COLUMNS": "200"},
        )  # fmt: skip
        ends_s = time.monotonic() + 800
        try:
            while demo.poll() is None and time.monotonic() < ends_s:
                documents += document(port)
                time.sleep(0.2)
        finally:
            demo.kill()
    said = out.read_text(encoding="utf-8")
    assert demo.wait(10) == 0, said
    found = re.search(r"New workers loaded (\d+) prefixes of (\d+) users", said)
    assert found is not None and int(found[1]) > 0, said
    assert "objects_written stored" in said and "NO " not in said
    # The page is asked five times a second, and shows the pool within two of the first worker. Nothing is loaded yet.
    shown = [state["live"]["workers"] for state in documents if state["live"] is not None and not state["ended"]]
    pools = [[worker["pool"] for worker in workers] for workers in shown if workers]
    first = next(each for each in pools[:10] if all(each))
    assert not any(pool["loaded"] for pool in first)
    for what in ("written", "loaded"):
        assert any(pool[what] for each in pools for pool in each if pool), what
    assert [run["title"] for run in documents[-1]["runs"]] == ["workers that fill the pool", "new workers"]


def document(port: int) -> list[dict[str, Any]]:
    """What the page shows now; nothing while it is not served."""
    try:
        with open_directly(f"http://127.0.0.1:{port}/state", timeout_s=2) as answer:
            return [json.loads(answer.read())]
    except OSError:
        return []
