"""One test: the processes, the histories, the adapter between the load generator and the relay's client, the output."""

from __future__ import annotations

import re
import threading
import time
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Final

import numpy as np
from prometheus_client import CollectorRegistry
from rich.console import Console

from relaygr.bench.generator.player import SyntheticContent
from relaygr.bench.generator.trace import MEASURED, Trace, write_trace
from relaygr.bench.headline.grid import BY_NAME, ITEMS, Cell
from relaygr.bench.headline.plan import CellPlan
from relaygr.bench.headline.points import QUICK_MODE
from relaygr.bench.headline.run import Bench
from relaygr.bench.headline.systems import UNCUT, System
from relaygr.bench.rows import append_rows, machine, now
from relaygr.client import RankOutcome, RankStatus, RelayClient
from relaygr.devbroker import local_broker
from relaygr.runtime.errors import RelayError
from relaygr.schemas.messages import Behaviours, History
from relaygr.schemas.messages import Path as RankingPath

LIMIT_MS: Final = 80
"""MLPerf's limit of DLRM-v3 in the server scenario, at P99."""
USERS: Final = 64
BUDGET_MS: Final = 60_000
"""So long that every request is computed whole: the load generator judges the latency."""
READ_WITHIN_S: Final = 60.0
LEAST_REQUESTS: Final = 459
"""With fewer, the load generator finds no result valid: too few to be sure of a P99."""
_SUMMARY: Final = "mlperf_log_summary.txt"
_WANTED: Final = {
    "result": r"Result is : (\w+)",
    "limit_met": r"Performance constraints satisfied : (\w+)",
    "enough_requests": r"Early stopping satisfied: (\w+)",
    "completed_per_s": r"Completed samples per second\s*: ([\d.]+)",
    "p50_ns": r"50\.00 percentile latency \(ns\)\s*: (\d+)",
    "p99_ns": r"99\.00 percentile latency \(ns\)\s*: (\d+)",
}


def run_loadgen(cell_name: str, load: float, seconds: float, broker: str, out: Path) -> bool:
    """Runs the test, prints and writes its figures. Returns whether the load generator found the limit met."""
    if cell_name not in BY_NAME:
        raise RelayError(f"no cell has the name {cell_name!r}: `benchmarks.headline --cells list` prints them")
    cell, console, loadgen = BY_NAME[cell_name], Console(highlight=False), _load_generator()
    out.mkdir(parents=True, exist_ok=True)
    with local_broker(broker) as started, Bench(console, out, started, QUICK_MODE, None) as bench:
        plan = bench.plan(cell)
        limit_ms = plan.deadline_ms
        rate_per_s = load * 1000 / plan.full_ms
        console.print(
            f"{cell.name}: {cell.origin or 'a cell of the grid'}. Limit {limit_ms} ms at P99: MLPerf's {LIMIT_MS} ms "
            f"times {limit_ms / LIMIT_MS:.2f} for this device; {rate_per_s:.3g} requests/s for {seconds:.0f} s",
            soft_wrap=True,
        )
        settings = bench.serve(cell, plan, System.B0, UNCUT)
        with RelayClient(settings, gateway_id="loadgen", registry=CollectorRegistry()) as client:
            system = _SystemUnderTest(client, cell, plan)
            system.publish()
            _test(loadgen, system, rate_per_s, limit_ms, seconds, out)
        what = started.what.split(" at ")[0]
    found = read_summary((out / _SUMMARY).read_text(encoding="utf-8"))
    write_trace(system.trace(), out / "trace.parquet")
    row = {
        "measured_at": now(), "machine": machine(), "broker": what, "cell": cell.name,
        "rate_per_s": round(rate_per_s, 4),
        "seconds": seconds, "limit_ms": limit_ms, "factor_of_mlperf": round(limit_ms / LIMIT_MS, 3),
        "requests": len(system.sent), "not_whole": system.not_whole, **found,
    }  # fmt: skip
    append_rows(out / "results.csv", [row])
    console.print(
        f"{found['result']} (limit {'met' if found['limit_met'] else 'not met'}, "
        f"{'enough' if found['enough_requests'] else 'too few'} requests): {found['completed_per_s']:.3g} requests/s, "
        f"P50 {found['p50_ms']:.1f} ms, P99 {found['p99_ms']:.1f} ms; "
        f"{system.not_whole} of {len(system.sent)} without a whole answer.\n"
        "Unverified, not an MLPerf result.",
        soft_wrap=True,
    )
    return found["result"] == "VALID" and not system.not_whole


def read_summary(text: str) -> dict[str, Any]:
    """The figures of the load generator's summary. Raises RelayError if it has none."""
    found = {name: re.search(pattern, text) for name, pattern in _WANTED.items()}
    missing = [name for name, match in found.items() if match is None]
    if missing:
        raise RelayError(f"the load generator's summary has no {', '.join(missing)}: the test did not end")
    values = {name: match.group(1) for name, match in found.items() if match is not None}
    return {
        "result": values["result"],
        "limit_met": values["limit_met"] == "Yes",
        "enough_requests": values["enough_requests"] == "Yes",
        "completed_per_s": float(values["completed_per_s"]),
        "p50_ms": int(values["p50_ns"]) / 1e6,
        "p99_ms": int(values["p99_ns"]) / 1e6,
    }


class _SystemUnderTest:
    """Sends what the load generator asks for, and tells it of answers. A sample is the request of one user."""

    def __init__(self, client: RelayClient, cell: Cell, plan: CellPlan) -> None:
        self._client, self._cell, self._plan = client, cell, plan
        random = np.random.default_rng(1)
        lengths = cell.history * np.exp(cell.history_sigma * random.standard_normal(USERS))
        self._lengths = np.clip(lengths, 1, 2 * cell.history).astype(np.int32)
        content = SyntheticContent(ITEMS)
        self._users = [f"loadgen-{number:03d}" for number in range(USERS)]
        self._behaviours = [
            content.behaviours(user, int(length) + cell.suffix)
            for user, length in zip(self._users, self._lengths, strict=True)
        ]
        self._histories = [
            History(user, 1, np.empty(0, "<i8"), whole[: int(length)])
            for user, length, whole in zip(self._users, self._lengths, self._behaviours, strict=True)
        ]
        self._candidates = random.integers(0, ITEMS, (USERS, cell.candidates)).astype("<i8")
        self._lock = threading.Lock()
        self.sent: list[tuple[int, int]] = []
        """Time in ns and number of the user of each request."""
        self.not_whole = 0

    def publish(self) -> None:
        """Publishes the histories, and returns when the worker ranks each user on the whole of it."""
        for history in self._histories:
            self._client.publish_history(history)
        ends_s = time.monotonic() + READ_WITHIN_S
        for number in range(USERS):
            while not _is_whole(self._submit(number).result()):
                if time.monotonic() > ends_s:
                    raise RelayError(f"the worker did not rank on the published histories within {READ_WITHIN_S:.0f} s")
                time.sleep(0.1)

    def issue(self, number: int, done: Any) -> None:
        """Sends the request of a user, and calls `done` with its end."""
        self.sent.append((time.monotonic_ns(), number))
        future = self._submit(number)

        def ended(answered: Future[RankOutcome]) -> None:
            if not _is_whole(answered.result()):
                with self._lock:
                    self.not_whole += 1
            done()

        future.add_done_callback(ended)

    def trace(self) -> Trace:
        """What was sent, with the cell's lead time before each request."""
        lead_us = round(self._plan.lead_ms * 1000)
        first_ns = self.sent[0][0]
        at_us = np.array([(at_ns - first_ns) // 1000 for at_ns, _ in self.sent], np.int64)
        users = [number for _, number in self.sent]
        count = len(users)
        return Trace(
            at_us, at_us + lead_us, [self._users[number] for number in users], self._lengths[users],
            np.full(count, self._cell.suffix, np.int32), np.full(count, self._cell.candidates, np.int32),
            np.full(count, MEASURED, np.int32), made_by="mlcommons-loadgen, server scenario",
        )  # fmt: skip

    def _submit(self, number: int) -> Future[RankOutcome]:
        history = self._histories[number]
        suffix: Behaviours = self._behaviours[number][len(history.behaviours) :]
        return self._client.submit_rank(
            self._users[number],
            self._candidates[number],
            budget_ms=BUDGET_MS,
            suffix=suffix,
            history_version=history.version(),
        )


def _is_whole(outcome: RankOutcome) -> bool:
    result = outcome.result
    if outcome.status is not RankStatus.RANKED or result is None:
        return False
    return not (result.history_stale or result.history_loading or result.path is RankingPath.TRUNCATED)


def _load_generator() -> Any:
    try:
        import mlperf_loadgen
    except ImportError as error:
        raise RelayError("MLPerf's load generator is missing: pip install mlcommons-loadgen") from error
    return mlperf_loadgen


def _test(loadgen: Any, system: _SystemUnderTest, rate_per_s: float, limit_ms: int, seconds: float, out: Path) -> None:
    def issue(samples: list[Any]) -> None:
        for sample in samples:
            # The load generator takes the address of scores only to check accuracy.
            response = [loadgen.QuerySampleResponse(sample.id, 0, 0)]
            system.issue(sample.index, lambda response=response: loadgen.QuerySamplesComplete(response))

    wanted = loadgen.TestSettings()
    wanted.scenario, wanted.mode = loadgen.TestScenario.Server, loadgen.TestMode.PerformanceOnly
    wanted.server_target_qps = rate_per_s
    wanted.server_target_latency_ns = limit_ms * 1_000_000
    wanted.server_target_latency_percentile = 0.99
    wanted.min_duration_ms = round(seconds * 1000)
    wanted.min_query_count = LEAST_REQUESTS
    logs = loadgen.LogSettings()
    logs.log_output.outdir = str(out)
    logs.enable_trace = False
    sut = loadgen.ConstructSUT(issue, lambda: None)
    library = loadgen.ConstructQSL(USERS, USERS, lambda _: None, lambda _: None)
    try:
        loadgen.StartTestWithLogSettings(sut, library, wanted, logs)
    finally:
        loadgen.DestroyQSL(library)
        loadgen.DestroySUT(sut)
