"""The supervisor's HTTP pages: the state of its children, and the active child's readiness and metrics.

* `/readyz`: readiness of the active child, as of its last heartbeat. A missing standby does not change it.
* `/healthz`: always 200, since the supervisor itself replaces children that fail.
* `/metrics`: metrics of the active child and of the supervisor. At a take-over counters begin again at 0.
* `/children`: JSON; phase, pid and probe port of each child.
"""

from __future__ import annotations

import http.client
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass

from prometheus_client import CollectorRegistry, Metric
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.parser import text_string_to_metric_families

from relaygr.runtime.direct_http import address_here
from relaygr.runtime.probes import ProbeServer
from relaygr.runtime.readiness import Check, Readiness
from relaygr.worker.supervisor.heartbeat import ChildPhase
from relaygr.worker.supervisor.policy import ChildState

_FETCH_TIMEOUT_S = 0.5


@dataclass(frozen=True, slots=True)
class ChildView:
    """One child on the page `/children`. `port` 0: its probes are not served yet."""

    number: int
    pid: int
    phase: ChildPhase
    port: int
    ready: bool
    detail: str

    @classmethod
    def of(cls, child: ChildState, pid: int) -> ChildView:
        heartbeat = child.heartbeat
        if heartbeat is None:
            waits = child.phase is not ChildPhase.PREPARING
            detail = "adopted, has not connected yet" if waits else "loads its model"
            return cls(child.number, pid, child.phase, 0, False, detail)
        return cls(child.number, pid, heartbeat.phase, heartbeat.port, heartbeat.ready, heartbeat.detail)


@dataclass(frozen=True, slots=True)
class SupervisorView:
    """The state that the pages show. The supervisor replaces it as a whole."""

    worker_id: str
    children: tuple[ChildView, ...] = ()
    replaced: int = 0

    def child_in(self, phase: ChildPhase) -> ChildView | None:
        return next((child for child in self.children if child.phase is phase), None)


class SupervisorProbes:
    """The supervisor's probe server. The server's thread only reads the view."""

    def __init__(self, host: str, port: int, view: Callable[[], SupervisorView]) -> None:
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
        """Raises RelayError if the server cannot listen on its address."""
        self._server.start()

    def stop(self) -> None:
        self._server.stop()

    def collect(self) -> Iterator[Metric]:
        """Called by prometheus_client: the supervisor's metrics, then those of the active child."""
        view = self._view()
        active = view.child_in(ChildPhase.ACTIVE)
        children = GaugeMetricFamily(
            "relaygr_supervisor_children",
            "Child processes by phase. With no child in phase `standby`, no process can take over at once.",
            labels=["phase"],
        )
        for phase in ChildPhase:
            children.add_metric([phase.value], sum(child.phase is phase for child in view.children))
        yield children
        yield CounterMetricFamily(
            "relaygr_supervisor_replaced", "Child processes that ended without being stopped.", value=view.replaced
        )
        if active is not None and active.port:
            yield from self._metrics_of(active)

    def describe(self) -> tuple[Metric, ...]:
        """Called by prometheus_client at registration. Empty, since there is no child yet."""
        return ()

    def _metrics_of(self, child: ChildView) -> Iterator[Metric]:
        # Not urllib, which would use a proxy that is set for other hosts.
        connection = http.client.HTTPConnection(address_here(self._host), child.port, timeout=_FETCH_TIMEOUT_S)
        try:
            connection.request("GET", "/metrics")
            families = list(text_string_to_metric_families(connection.getresponse().read().decode()))
        except (OSError, http.client.HTTPException, ValueError):
            # The child may die while it answers; the supervisor's own metrics must still be served.
            return
        finally:
            connection.close()
        yield from families

    def _readiness(self) -> Readiness:
        view = self._view()
        active = view.child_in(ChildPhase.ACTIVE)
        if active is None:
            return Readiness((Check("active", False, "no child is active"),))
        detail = "standby ready" if view.child_in(ChildPhase.STANDBY) is not None else "no standby"
        return Readiness((Check("active", active.ready, active.detail or detail),))
