"""The benchmark of histories, small. It runs as a command, because it tunes the interpreter and heap of its process."""

from __future__ import annotations

import csv
import subprocess
import sys
from pathlib import Path

import pytest

from relaygr.bench.histories.run import PARTITIONS
from relaygr.schemas.partitioner import partition_for

USERS = 60


@pytest.mark.slow
def test_the_store_is_measured_alone_and_with_a_follower(tmp_path: Path) -> None:
    out = tmp_path / "results.csv"
    command = [
        sys.executable, "-m", "relaygr.bench.histories", "--users", str(USERS), "--length", "16", "--events", "1000",
        "--folder", str(tmp_path / "store"), "--out", str(out),
    ]  # fmt: skip
    for broker in ([], ["--broker", "embedded"]):
        done = subprocess.run([*command, *broker], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
    alone, followed = csv.DictReader(out.open(encoding="utf-8"))
    users = [f"user-{number:07}".encode() for number in range(USERS)]
    forgotten = [user for user in users if partition_for(user, PARTITIONS) == partition_for(users[0], PARTITIONS)]
    for row in (alone, followed):
        assert (row["users"], row["events"], row["forgotten_users"]) == (str(USERS), "1000", str(len(forgotten)))
        for name in ("look_up", "look_up_again"):
            assert 0 < float(row[f"{name}_p50_us"]) <= float(row[f"{name}_p99_us"])
            assert 0 <= float(row[f"{name}_disk_percent"]) <= 100
        assert float(row["bytes_per_append"]) > 0
    assert float(alone["follow_events_per_s"]) == 0 < float(followed["follow_events_per_s"])
    assert not (tmp_path / "store").exists()
