"""What the supervisor serves: its children, and the active one's answers as its own.

* `/readyz`: the active child's, as of its last sign of life. Ready without a standby too: work may come.
* `/healthz`: 200; the children's health is the supervisor's own business.
* `/metrics`: the active child's, with the supervisor's beside them. A take-over looks like a restart of counters.
* `/children`: JSON, each child with phase, pid and the port of its own probes.
"""

from __future__ import annotations

import http.client
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass

from prometheus_client import CollectorRegistry, Metric
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.parser import text_string_to_metric_families

from relaygr.runtime.probes import Check, ProbeServer, Readiness
from relaygr.worker.supervisor.beats import Phase
from relaygr.worker.supervisor.judge import ChildState

_FETCH_TIMEOUT_S = 0.5


@dataclass(frozen=True, slots=True)
class ChildPage:
    """One child, for people. `port` 0: it serves nothing yet."""

    number: int
    pid: int
    phase: Phase
    port: int
    ready: bool
    detail: str

    @classmethod
    def of(cls, child: ChildState, pid: int) -> ChildPage:
        beat = child.beat
        if beat is None:
            return cls(child.number, pid, child.phase, 0, False, "loads its model")
        return cls(child.number, pid, beat.phase, beat.port, beat.ready, beat.detail)


@dataclass(frozen=True, slots=True)
class View:
    """What is shown; replaced as a whole."""

    worker_id: str
    children: tuple[ChildPage, ...] = ()
    replaced: int = 0

    def child_in(self, phase: Phase) -> ChildPage | None:
        return next((child for child in self.children if child.phase is phase), None)


class Pages:
    """The supervisor's probe server. Its thread only reads the view."""

    def __init__(self, host: str, port: int, view: Callable[[], View]) -> None:
        self._host = host
        self._view = view
        registry = CollectorRegistry()
        registry.register(self)
        self._server = ProbeServer(
            host, port, self._readiness, registry=registry, documents={"/children": lambda: asdict(self._view())}
        )

    @property
    def port(self) -> int:
        return self._server.port

    def start(self) -> None:
        """Raises RelayError if the address cannot be had."""
        self._server.start()

    def stop(self) -> None:
        self._server.stop()

    def collect(self) -> Iterator[Metric]:
        """prometheus_client's: ours, then the active child's."""
        view = self._view()
        active = view.child_in(Phase.ACTIVE)
        children = GaugeMetricFamily(
            "relaygr_supervisor_children", "Children by phase; a standby of 0 means that nobody would take over.",
            labels=["phase"],
        )  # fmt: skip
        for phase in Phase:
            children.add_metric([phase.value], sum(child.phase is phase for child in view.children))
        yield children
        yield CounterMetricFamily("relaygr_supervisor_replaced", "Children that ended unasked.", value=view.replaced)
        if active is not None and active.port:
            yield from self._metrics_of(active)

    def describe(self) -> tuple[Metric, ...]:
        """prometheus_client's: asked at registration, when there is no child to ask."""
        return ()

    def _metrics_of(self, child: ChildPage) -> Iterator[Metric]:
        # No urllib: it would ask a proxy that is meant for other hosts.
        connection = http.client.HTTPConnection(self._host, child.port, timeout=_FETCH_TIMEOUT_S)
        try:
            connection.request("GET", "/metrics")
            families = list(text_string_to_metric_families(connection.getresponse().read().decode()))
        except (OSError, http.client.HTTPException, ValueError):
            # It may die in the middle of its answer, and the supervisor's own metrics matter most then.
            return
        finally:
            connection.close()
        yield from families

    def _readiness(self) -> Readiness:
        view = self._view()
        active = view.child_in(Phase.ACTIVE)
        if active is None:
            return Readiness((Check("active", False, "no child is active"),))
        detail = "standby ready" if view.child_in(Phase.STANDBY) is not None else "no standby"
        return Readiness((Check("active", active.ready, active.detail or detail),))
