"""The CPU time that tracing costs a gateway's client: `python -m benchmarks.gateway --tracing`.

Three clients run in this process: one without a tracer, one with a tracer, and a second one without, as the control.
They take turns in short blocks of impressions (a retrieval event and a ranking request each), in another order each
time. There are three rounds with new clients; in each one another place (the order of their making, and the name, from
which the partition of the results follows) has the tracer.

The CPU time of a block is that of the whole process, librdkafka's threads included; the worker, the broker and the
collector are other processes. The figure is the median of the differences within a turn, so other work on the machine,
which slows all three, hardly changes it. Spans are exported every few seconds, in whichever block that falls, so a
median would leave it out: the export thread's time is taken out of the blocks, and its whole time is added to the
traced impressions. The difference of the control says how far the figure can be trusted.

A block sends as fast as the answers come (a few requests are open). At a lower rate a client spends more CPU time for a
request, and the tracer does not: the share is then smaller.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray
from prometheus_client import CollectorRegistry
from rich.console import Console
from rich.table import Table

from relaygr.bench.gateway.run import BUDGET_MS, INSTANT, START_TIMEOUT_S, USERS
from relaygr.bench.pipeline.run import CANDIDATES, null_settings
from relaygr.bench.rows import append_rows, machine, now
from relaygr.client import RankOutcome, RankStatus, RelayClient
from relaygr.demo.processes import Processes, write_config
from relaygr.devbroker import LocalBroker, local_broker
from relaygr.runtime.errors import RelayError
from relaygr.runtime.interpreter import tune_interpreter
from relaygr.settings import Settings
from relaygr.tracing import Tracer, TracingSettings, start_tracing
from relaygr.tracing.tracer import EXPORT_THREAD

OPEN_REQUESTS: Final = 8
WARM_UP_BLOCKS: Final = 3
_RESAMPLES: Final = 2_000
_ORDERS: Final = ((0, 1, 2), (2, 1, 0), (1, 0, 2), (2, 0, 1), (1, 2, 0), (0, 2, 1))
_OFF, _TRACED, _CONTROL = range(3)
ROUNDS: Final = ((_OFF, _TRACED, _CONTROL), (_TRACED, _CONTROL, _OFF), (_CONTROL, _OFF, _TRACED))
"""Which client is at each place, in each round."""


@dataclass(frozen=True, slots=True)
class TracingPlan:
    """The share of traces that are recorded, and the blocks of impressions."""

    sampled: float
    blocks: int
    """Blocks of each client."""
    impressions: int
    """Impressions a block."""


@dataclass(frozen=True, slots=True)
class Added:
    """CPU time that a client takes more than the first one, with a 95 % interval: µs an impression, and the share."""

    us: float
    low_us: float
    high_us: float
    share: float
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class TracingFigures:
    """CPU time of the client without a tracer in µs an impression, and what the others take more."""

    off_us: float
    traced: Added
    """With the export."""
    export_us: float
    """Of these, the export of the spans."""
    control: Added
    ranked_share: float

    def row(self) -> dict[str, float]:
        row = {"off_us": self.off_us, "ranked_share": self.ranked_share, "export_us": self.export_us}
        for name, added in (("traced", self.traced), ("control", self.control)):
            row |= {f"{name}_{key}": value for key, value in asdict(added).items()}
        return {name: round(value, 5) for name, value in row.items()}


def measure_tracing(plan: TracingPlan, broker: str, out: Path, json_out: Path | None) -> None:
    """Measures on one broker, prints the figures and appends them to `out`."""
    console = Console(highlight=False)
    with tempfile.TemporaryDirectory(prefix="relaygr-bench-") as name, local_broker(broker) as started:
        console.print(f"broker: {started.what}", soft_wrap=True)
        figures = _measure(console, started, Path(name), plan)
    described = {
        "measured_at": now(),
        "machine": machine(),
        "broker": started.what.split(" at ")[0],
        **asdict(plan),
    }
    _print(console, plan, figures)
    append_rows(out, [described | figures.row()])
    if json_out is not None:
        json_out.write_text(json.dumps(described | figures.row(), indent=1) + "\n", encoding="utf-8")
    console.print(f"appended to {out}")


def added(reference_us: NDArray[np.float64], other_us: NDArray[np.float64], constant_us: float = 0.0) -> Added:
    """The median difference of blocks of the same turns, float64 [blocks] each, and its bootstrap interval.

    `constant_us` is added to all three.
    """
    differences = other_us - reference_us
    random = np.random.default_rng(0)
    drawn = random.choice(differences, (_RESAMPLES, len(differences)))
    low_us, high_us = np.percentile(np.median(drawn, axis=1), [2.5, 97.5]) + constant_us
    us, of_us = float(np.median(differences)) + constant_us, float(np.median(reference_us))
    return Added(us, float(low_us), float(high_us), us / of_us, float(low_us) / of_us, float(high_us) / of_us)


def _measure(console: Console, broker: LocalBroker, folder: Path, plan: TracingPlan) -> TracingFigures:
    settings = null_settings(broker, folder, 1.0, 1.0, INSTANT)
    broker.create_topics(settings)
    config = folder / "settings.yaml"
    write_config(settings, config)
    try:
        with Processes(folder, config) as processes, console.status("starting a worker") as status:
            worker = processes.start("worker-00", ["worker"], "worker", [f"worker.history_path={folder / 'history'}"])
            processes.await_ready([worker], START_TIMEOUT_S)
            status.update("measuring")
            with _tracer(plan.sampled) as tracer:
                return _blocks(settings, plan, tracer)
    finally:
        if not broker.ours:
            broker.delete_topics(settings)


def _blocks(settings: Settings, plan: TracingPlan, tracer: Tracer) -> TracingFigures:
    random = np.random.default_rng(7)
    impressions = _Impressions([random.permutation(10_000)[:CANDIDATES] for _ in range(USERS)], plan.impressions)
    tune_interpreter()
    took_us = np.zeros((plan.blocks, len(ROUNDS)))
    cpu = _Cpu()
    export_ns = 0
    for number, places in enumerate(ROUNDS):
        blocks = range(plan.blocks)[number :: len(ROUNDS)]
        with ExitStack() as open_clients:
            clients: dict[int, RelayClient] = {}
            for place, role in enumerate(places):
                used = tracer if role == _TRACED else None
                client = RelayClient(settings, f"bench-{place}", registry=CollectorRegistry(), tracer=used)
                clients[role] = open_clients.enter_context(client)
            for _ in range(WARM_UP_BLOCKS):
                for client in clients.values():
                    impressions.cpu_us(client, cpu)
            if not impressions.ranked:
                raise RelayError("no request of the warm-up was ranked")
            if number == 0:
                impressions.ranked = impressions.sent = 0
            export_ns -= cpu.export_ns()
            for turn, block in enumerate(blocks):
                for role in _ORDERS[turn % len(_ORDERS)]:
                    took_us[block, role] = impressions.cpu_us(clients[role], cpu)
            export_ns += cpu.export_ns()
    export_us = export_ns / 1000 / (plan.blocks * plan.impressions)
    off, traced, control = took_us.T
    return TracingFigures(
        float(np.median(off)),
        added(off, traced, export_us),
        export_us,
        added(off, control),
        impressions.ranked / impressions.sent,
    )


class _Cpu:
    """CPU times of this process, and of its thread that exports spans."""

    def __init__(self) -> None:
        [export] = [thread for thread in threading.enumerate() if thread.name == EXPORT_THREAD]
        assert export.ident is not None
        self._export_clock = time.pthread_getcpuclockid(export.ident)

    def export_ns(self) -> int:
        return time.clock_gettime_ns(self._export_clock)

    def rest_ns(self) -> int:
        """All but the export."""
        return time.process_time_ns() - self.export_ns()


class _Impressions:
    """Sends blocks of impressions."""

    def __init__(self, candidates: Sequence[NDArray[np.int64]], count: int) -> None:
        self._candidates = candidates
        self._count = count
        self._free = threading.Semaphore(OPEN_REQUESTS)
        self.sent = 0
        self.ranked = 0

    def cpu_us(self, client: RelayClient, cpu: _Cpu) -> float:
        """Sends a block, waits for its end, and returns the CPU time without export, in µs an impression."""
        begun_ns = cpu.rest_ns()
        for _ in range(self._count):
            self._free.acquire()
            place = self.sent % len(self._candidates)
            self.sent += 1
            event = client.publish_retrieval(
                f"user-{place}",
                ranking_budget_ms=BUDGET_MS,
                expected_ranking_in_ms=100,
                expected_candidates=CANDIDATES,
                expected_suffix=0,
            )
            client.submit_rank(
                event.user_id, self._candidates[place], budget_ms=BUDGET_MS, request_id=event.request_id
            ).add_done_callback(self._ended)
        for _ in range(OPEN_REQUESTS):
            self._free.acquire()
        self._free.release(OPEN_REQUESTS)
        return (cpu.rest_ns() - begun_ns) / 1000 / self._count

    def _ended(self, future: Future[RankOutcome]) -> None:
        self.ranked += future.result().status is RankStatus.RANKED
        self._free.release()


@contextmanager
def _tracer(sampled: float) -> Iterator[Tracer]:
    """A tracer that exports to a collector in another process."""
    command = [sys.executable, "-m", "relaygr.bench.gateway.collector"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as collector:
        try:
            assert collector.stdout is not None
            os.environ["OTEL_EXPORTER_OTLP_ENDPOINT"] = collector.stdout.readline().strip()
            os.environ["OTEL_TRACES_SAMPLER"] = "parentbased_traceidratio"
            os.environ["OTEL_TRACES_SAMPLER_ARG"] = str(sampled)
            tracer = start_tracing(TracingSettings(enabled=True), "relaygr-bench", "bench")
            if tracer is None:
                raise RelayError("tracing is off: unset OTEL_SDK_DISABLED and OTEL_TRACES_EXPORTER")
            try:
                yield tracer
            finally:
                tracer.close()
        finally:
            collector.terminate()


def _print(console: Console, plan: TracingPlan, figures: TracingFigures) -> None:
    table = Table(title=f"CPU time of the client, {plan.blocks} blocks of {plan.impressions} impressions each")
    for name in ("client", "µs an impression more", "95 %", "share more", "95 %"):
        table.add_column(name, justify="left" if name == "client" else "right")
    for name, each in ((f"traced, {plan.sampled:.2%} recorded", figures.traced), ("control", figures.control)):
        table.add_row(
            name,
            f"{each.us:+.1f}",
            f"{each.low_us:+.1f} to {each.high_us:+.1f}",
            f"{each.share:+.2%}",
            f"{each.low:+.2%} to {each.high:+.2%}",
        )
    console.print(table)
    console.print(
        f"without a tracer: {figures.off_us:.0f} µs an impression; {figures.ranked_share:.1%} ranked; "
        f"{figures.export_us:.1f} µs of the traced are export"
    )
