"""The rounds of both ways into the relay, and the output of their figures. `__main__` describes the figures."""

from __future__ import annotations

import asyncio
import json
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

import numpy as np
import psutil
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

from relaygr.bench.pipeline.run import CANDIDATES, null_settings
from relaygr.bench.rows import append_rows, machine, now
from relaygr.client import AsyncRelayClient, RankStatus
from relaygr.demo.machine import busy_s
from relaygr.demo.processes import Processes, write_config
from relaygr.demo.summary import percentile
from relaygr.devbroker import LocalBroker, local_broker
from relaygr.devbroker.local import free_ports
from relaygr.runtime.errors import RelayError
from relaygr.runtime.interpreter import tune_interpreter
from relaygr.schemas.messages import LatencyCoefficients
from relaygr.settings import Settings

BUDGET_MS: Final = 1_000
USERS: Final = 1_000
START_TIMEOUT_S: Final = 120.0
INSTANT: Final = LatencyCoefficients(a0=1, a1=0, a2=0, b0=1, b1=0, b2=0, c0=1, c1=0, c2=0, d0=1, d1=0)
TABLE_WIDTH: Final = 120

Send = Callable[[int], Awaitable[bool]]
"""Sends the request of a user, and returns whether it was ranked."""


@dataclass(frozen=True, slots=True)
class Plan:
    """The load, how long each run takes, how many rounds there are, and how long each warm-up is."""

    rate_per_s: float
    seconds: float
    rounds: int
    warm_up_s: float


@dataclass(frozen=True, slots=True)
class RunFigures:
    """One run of one way. Latencies are in ms."""

    offered: int
    ranked: int
    p50_ms: float
    p99_ms: float


@dataclass(frozen=True, slots=True)
class RoundFigures:
    """Both ways, one after the other."""

    direct: RunFigures
    http: RunFigures
    gateway_cpu_ms: float
    """CPU time of the gateway's process a request."""
    foreign_cpu: float
    """Cores that processes used which this one did not start."""

    def row(self) -> dict[str, float]:
        return {
            "added_p50_ms": round(self.http.p50_ms - self.direct.p50_ms, 3),
            "added_p99_ms": round(self.http.p99_ms - self.direct.p99_ms, 3),
            "p50_ratio": round(self.http.p50_ms / self.direct.p50_ms, 3),
            "p99_ratio": round(self.http.p99_ms / self.direct.p99_ms, 3),
            "gateway_cpu_ms": round(self.gateway_cpu_ms, 3),
            "foreign_cpu": round(self.foreign_cpu, 2),
            **{f"direct_{name}": value for name, value in asdict(self.direct).items()},
            **{f"http_{name}": value for name, value in asdict(self.http).items()},
        }


def measure_gateway(plan: Plan, broker: str, out: Path, json_out: Path | None) -> None:
    """Measures on one broker, prints the figures and appends them to `out`."""
    console = Console(highlight=False)
    console.width = max(console.width, TABLE_WIDTH)
    with tempfile.TemporaryDirectory(prefix="relaygr-bench-") as name, local_broker(broker) as started:
        console.print(f"broker: {started.what}", soft_wrap=True)
        rounds = _measure(console, started, Path(name), plan)
    rows = [each.row() for each in rounds]
    _print(console, plan, rows)
    described = {
        "measured_at": now(),
        "machine": machine(),
        "broker": started.what.split(" at ")[0],
        "rate_per_s": plan.rate_per_s,
        "seconds": plan.seconds,
    }
    append_rows(out, [described | row for row in rows])
    if json_out is not None:
        json_out.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    console.print(f"appended to {out}")


def schedule(plan: Plan, seconds: float, seed: int) -> NDArray[np.float64]:
    """The times of the requests in s: a Poisson process, the same for both ways."""
    random = np.random.default_rng(seed)
    return np.cumsum(random.exponential(1 / plan.rate_per_s, max(1, round(plan.rate_per_s * seconds))))


async def play(times_s: NDArray[np.float64], send: Send) -> RunFigures:
    """Sends at the times of the schedule, whatever happened to the requests before."""
    latencies_ms: list[float] = []
    loop = asyncio.get_running_loop()
    begin_s = loop.time() + 0.1
    open_calls: set[asyncio.Task[None]] = set()

    async def call(number: int, due_s: float) -> None:
        if await send(number):
            latencies_ms.append((loop.time() - due_s) * 1000)

    for number, at_s in enumerate(times_s):
        due_s = begin_s + float(at_s)
        if (left_s := due_s - loop.time()) > 0:
            await asyncio.sleep(left_s)
        task = loop.create_task(call(number, due_s))
        open_calls.add(task)
        task.add_done_callback(open_calls.discard)
    if open_calls:
        await asyncio.wait(set(open_calls))
    return RunFigures(len(times_s), len(latencies_ms), percentile(latencies_ms, 50), percentile(latencies_ms, 99))


class HttpCalls:
    """JSON calls on kept connections: a bare client, so that it costs little."""

    def __init__(self, port: int, bodies: Sequence[bytes]) -> None:
        self._port = port
        head = (
            "POST /v1/rank HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\r\n"
        )
        self._requests = [head.format(len(body)).encode() + body for body in bodies]
        self._idle: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []

    async def __call__(self, number: int) -> bool:
        pair = self._idle.pop() if self._idle else await asyncio.open_connection("127.0.0.1", self._port)
        reader, writer = pair
        writer.write(self._requests[number % len(self._requests)])
        head = await reader.readuntil(b"\r\n\r\n")
        length = next(line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:"))
        body = json.loads(await reader.readexactly(int(length.partition(b":")[2])))
        self._idle.append(pair)
        return bool(body["status"] == "ranked")

    def close(self) -> None:
        for _, writer in self._idle:
            writer.close()


def _measure(console: Console, broker: LocalBroker, folder: Path, plan: Plan) -> list[RoundFigures]:
    settings = null_settings(broker, folder, plan.rate_per_s, plan.seconds, INSTANT)
    broker.create_topics(settings)
    config = folder / "settings.yaml"
    write_config(settings, config)
    (port,) = free_ports(1)
    try:
        with Processes(folder, config) as processes, console.status("starting a worker and the gateway") as status:
            worker = processes.start("worker-00", ["worker"], "worker", [f"worker.history_path={folder / 'history'}"])
            gateway = processes.start("gateway", ["gateway"], "gateway", [f"gateway.listen_port={port}"])
            processes.await_ready([worker, gateway], START_TIMEOUT_S)
            status.update("measuring")
            return asyncio.run(_rounds(settings, plan, port, psutil.Process(gateway.process.pid)))
    finally:
        if not broker.ours:
            broker.delete_topics(settings)


async def _rounds(settings: Settings, plan: Plan, port: int, gateway: psutil.Process) -> list[RoundFigures]:
    random = np.random.default_rng(7)
    users = [f"user-{number}" for number in range(USERS)]
    candidates = [random.permutation(10_000)[:CANDIDATES] for _ in users]
    http = HttpCalls(
        port,
        [
            json.dumps({"user_id": user, "candidates": items.tolist(), "budget_ms": BUDGET_MS}).encode()
            for user, items in zip(users, candidates, strict=True)
        ],
    )
    async with AsyncRelayClient(settings, "bench-direct") as client:

        async def direct(number: int) -> bool:
            place = number % USERS
            outcome = await client.rank(users[place], candidates[place], budget_ms=BUDGET_MS)
            return outcome.status is RankStatus.RANKED

        tune_interpreter()
        warm = schedule(plan, plan.warm_up_s, seed=0)
        ways: tuple[Send, Send] = (direct, http)
        for way in ways:
            if not (await play(warm, way)).ranked:
                raise RelayError("no request of the warm-up was ranked")
        rounds = []
        for number in range(plan.rounds):
            times_s = schedule(plan, plan.seconds, seed=1 + number)
            begun_s, busy_from_s, own_from_s = time.monotonic(), busy_s(), _family_s()
            # Each way is the first one in every other round.
            order = ways if number % 2 == 0 else ways[::-1]
            found: dict[Send, RunFigures] = {}
            gateway_ms = 0.0
            for way in order:
                from_s = _cpu_s(gateway)
                found[way] = await play(times_s, way)
                if way is http:
                    gateway_ms = (_cpu_s(gateway) - from_s) * 1000 / len(times_s)
            others_s = busy_s() - busy_from_s - (_family_s() - own_from_s)
            foreign = max(0.0, others_s / (time.monotonic() - begun_s))
            rounds.append(RoundFigures(found[direct], found[http], gateway_ms, foreign))
    http.close()
    return rounds


def _cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


def _family_s() -> float:
    """The CPU time of this process and of those that it started."""
    own = psutil.Process()
    return _cpu_s(own) + sum(_cpu_s(child) for child in own.children(recursive=True))


def _print(console: Console, plan: Plan, rows: Sequence[dict[str, float]]) -> None:
    median = {name: float(np.median([row[name] for row in rows])) for name in rows[0]}
    table = Table(title=f"{plan.rate_per_s:g} requests a second, {plan.seconds:g} s a run; ms")
    for name in ("round", "direct P50", "P99", "HTTP P50", "P99", "added P50", "P99", "CPU", "ranked", "others, cores"):
        table.add_column(name, justify="right")
    for name, row in [*((str(number + 1), row) for number, row in enumerate(rows)), ("median", median)]:
        ranked = (row["direct_ranked"] + row["http_ranked"]) / (row["direct_offered"] + row["http_offered"])
        shown = ("direct_p50_ms", "direct_p99_ms", "http_p50_ms", "http_p99_ms", "added_p50_ms", "added_p99_ms")
        cells = [f"{row[key]:.2f}" for key in (*shown, "gateway_cpu_ms")]
        table.add_row(name, *cells, f"{ranked:.1%}", f"{row['foreign_cpu']:.2f}")
    console.print(table)
