"""The document that browsers get: the cluster under observation, and the runs of a demo. JSON, bounded in size."""

from __future__ import annotations

import json
import math
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final, Protocol

from relaygr.runtime.json_values import finite
from relaygr.ui.model import LiveSnapshot, RequestView

REFRESH_S: Final = 1.0
"""Time between two events. All browsers get the same document."""


class Observed(Protocol):
    """A cluster under observation."""

    @property
    def has_ended(self) -> bool: ...

    def snapshot(self) -> LiveSnapshot: ...

    def find(self, text: str) -> list[RequestView]: ...


@dataclass(frozen=True, slots=True)
class RunView:
    """One run of the demo. Shares are of all offered requests."""

    title: str
    offered: int
    ranked: int
    late: int
    lost: int
    p50_ms: float
    p99_ms: float
    offered_p99_ms: float
    """Infinite if fewer than 99 % of all offered requests got a whole answer."""
    from_dram: int
    device_s: float
    endings: Mapping[str, int]
    distribution: Sequence[tuple[float, float]]
    """Latency in ms, and the share of all offered requests with a whole answer within it."""
    dots: Sequence[tuple[int, float, str]]
    """Some requests: number in the schedule, latency in ms, path or status."""


@dataclass(frozen=True, slots=True)
class GateView:
    """A condition that the demo must fulfil; not judged on a busy machine."""

    name: str
    found: str
    passed: bool
    judged: bool


class Page:
    """The state behind the page. Any thread may change it or ask for the document."""

    def __init__(self, title: str, comparison: str = "Relay on and off") -> None:
        """`comparison`: the heading of the comparison of two runs."""
        self._title = title
        self._comparison = comparison
        self._lock = threading.Lock()
        self._phase = ""
        self._live: Observed | None = None
        self._deadline_ms: int | None = None
        self._runs: list[RunView] = []
        self._gates: Sequence[GateView] = ()
        self._document = ""
        self._made_s = -math.inf

    def set_phase(self, phase: str) -> None:
        """Shows the step of the demo that runs now."""
        self._phase = phase
        self._made_s = -math.inf

    def follow(self, live: Observed, phase: str) -> None:
        """From now on the page shows this cluster."""
        self._live = live
        self.set_phase(phase)

    def add_run(self, run: RunView, deadline_ms: int) -> None:
        """Shows a run that has ended."""
        self._deadline_ms = deadline_ms
        self._runs.append(run)
        self._made_s = -math.inf

    def judge(self, gates: Sequence[GateView]) -> None:
        """Shows the gates."""
        self._gates = gates
        self._made_s = -math.inf

    def document(self) -> str:
        """At most `REFRESH_S` old."""
        with self._lock:
            if time.monotonic() - self._made_s >= 0.8 * REFRESH_S:
                self._document = json.dumps(finite(self._values()), separators=(",", ":"), allow_nan=False)
                self._made_s = time.monotonic()
            return self._document

    def found(self, text: str) -> str:
        """The kept requests of a user or with a request id, as JSON."""
        live = self._live
        return json.dumps(finite([] if live is None else [asdict(each) for each in live.find(text)]), allow_nan=False)

    def _values(self) -> dict[str, Any]:
        live = self._live
        return {
            "title": self._title,
            "comparison": self._comparison,
            "phase": self._phase,
            "ended": live is not None and live.has_ended,
            "live": None if live is None else asdict(live.snapshot()),
            "deadline_ms": self._deadline_ms,
            "runs": [asdict(run) for run in self._runs],
            "gates": [asdict(gate) for gate in self._gates],
        }
