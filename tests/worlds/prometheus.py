"""A Prometheus of a test's own, which scrapes processes of the relay."""

from __future__ import annotations

import json
import math
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from relaygr.devbroker.local import free_ports
from tests.promised import program

START_S = 30.0


@dataclass(frozen=True)
class LivePrometheus:
    """Its HTTP interface."""

    address: str

    def values(self, expression: str) -> list[float]:
        """The newest value of each series. Raises AssertionError if Prometheus refuses the expression."""
        found = self._ask(f"query?{urllib.parse.urlencode({'query': expression})}")
        assert found["resultType"] == "vector", expression
        return [float(series["value"][1]) for series in found["result"]]

    def shows(self, expression: str) -> bool:
        """Whether a panel with this query has a point to draw."""
        return any(map(math.isfinite, self.values(expression)))

    def rules(self) -> list[dict[str, Any]]:
        """Every rule, with its `health` and `lastError`."""
        return [rule for group in self._ask("rules")["groups"] for rule in group["rules"]]

    def _ask(self, path: str) -> Any:
        try:
            with urllib.request.urlopen(f"{self.address}/api/v1/{path}", timeout=10) as answer:
                return json.load(answer)["data"]
        except urllib.error.HTTPError as refusal:
            raise AssertionError(f"{path}: {refusal.read().decode(errors='replace')}") from None


@contextmanager
def live_prometheus(
    folder: Path, targets: Mapping[str, Mapping[str, int]], rule_files: Sequence[Path] = ()
) -> Iterator[LivePrometheus]:
    """Scrapes every second. `targets`: job -> instance -> port on this machine.

    Without the program the test is skipped, or fails if it is promised.
    """
    prometheus = program("prometheus")
    (port,) = free_ports(1)
    configuration = {
        "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
        "rule_files": [str(path) for path in rule_files],
        "scrape_configs": [
            {
                "job_name": job,
                "static_configs": [
                    {"targets": [f"127.0.0.1:{at}"], "labels": {"instance": instance}}
                    for instance, at in instances.items()
                ],
            }
            for job, instances in targets.items()
        ],
    }
    (folder / "prometheus.yaml").write_text(yaml.safe_dump(configuration), encoding="utf-8")
    command = [
        prometheus,
        f"--config.file={folder / 'prometheus.yaml'}",
        f"--storage.tsdb.path={folder / 'data'}",
        f"--web.listen-address=127.0.0.1:{port}",
    ]
    log = folder / "prometheus.log"
    with log.open("wb") as output, subprocess.Popen(command, stdout=output, stderr=output) as process:
        try:
            address = f"http://127.0.0.1:{port}"
            _await_ready(process, address, log)
            yield LivePrometheus(address)
        finally:
            process.terminate()
            try:
                process.wait(timeout=20)
            except subprocess.TimeoutExpired:
                process.kill()


def _await_ready(process: subprocess.Popen[bytes], address: str, log: Path) -> None:
    ends_s = time.monotonic() + START_S
    while process.poll() is None and time.monotonic() < ends_s:
        try:
            with urllib.request.urlopen(f"{address}/-/ready", timeout=1):
                return
        except OSError:
            time.sleep(0.1)
    raise AssertionError(f"prometheus is not ready:\n{log.read_text(encoding='utf-8', errors='replace')[-2000:]}")
