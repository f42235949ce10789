"""The Helm chart, rendered and linted by Helm's own code, without a cluster and without the program `helm`.

Helm's Go runtime runs in a process of its own: the tests fork, and a Go runtime does not survive that.
"""

from __future__ import annotations

import functools
import importlib.util
import json
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import yaml

from tests.worlds.compose import COMPOSE

CHART = COMPOSE / "helm" / "relaygr"
EXAMPLES = {path.stem: path for path in sorted((COMPOSE / "helm" / "values").glob("*.yaml"))}
RELEASE, NAMESPACE = "shop-relaygr", "prod"
SERVER = """
import json, sys
import helm_python as helm

with helm.Chart.load(sys.argv[1]) as chart:
    for line in sys.stdin:
        values = json.loads(line)
        try:
            answer = {"files": chart.render(values, name=sys.argv[2], namespace=sys.argv[3])}
            answer["lint"] = helm.lint(sys.argv[1], values, strict=True)
        except helm.HelmError as error:
            answer = {"error": str(error)}
        print(json.dumps(answer), flush=True)
"""


@dataclass(frozen=True)
class Rendered:
    """The chart with some values: its objects, what lint found, or why Helm refuses the values."""

    objects: tuple[Any, ...] = ()
    lint: Mapping[str, Any] | None = None
    error: str = ""

    def of(self, kind: str) -> list[Any]:
        return [each for each in self.objects if each["kind"] == kind]

    def named(self, kind: str, ending: str) -> Any:
        """The only object of a kind whose name ends so. Raises ValueError for none or several."""
        [found] = [each for each in self.of(kind) if each["metadata"]["name"].endswith(ending)]
        return found


def helm_is_installed() -> bool:
    return importlib.util.find_spec("helm_python") is not None


class Helm:
    """A process that renders. The tests share it."""

    def __init__(self) -> None:
        command = [sys.executable, "-c", SERVER, str(CHART), RELEASE, NAMESPACE]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )

    def render(self, values: Mapping[str, Any]) -> Rendered:
        return self._render(json.dumps(values, sort_keys=True))

    @functools.cache  # noqa: B019
    def _render(self, values: str) -> Rendered:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(values + "\n")
        self._process.stdin.flush()
        answer = json.loads(self._process.stdout.readline())
        if "error" in answer:
            return Rendered(error=answer["error"])
        return Rendered(tuple(objects_of(answer["files"])), answer["lint"])

    def close(self) -> None:
        self._process.communicate(timeout=60)


def objects_of(files: Mapping[str, str]) -> Iterator[Any]:
    for name, text in files.items():
        if name.endswith(".yaml"):
            yield from (each for each in yaml.safe_load_all(text) if each is not None)


def example(name: str) -> Any:
    """The values of an example."""
    return yaml.safe_load(EXAMPLES[name].read_text(encoding="utf-8"))


def merged(base: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Values with changes in them, map by map."""
    result = dict(base)
    for key, value in changes.items():
        old = result.get(key)
        result[key] = merged(old, value) if isinstance(old, dict) and isinstance(value, dict) else value
    return result
