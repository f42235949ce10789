"""The same impressions over HTTP: `relaygr gateway`, and a player whose client sends JSON to it.

Histories still go to Kafka. `Http` runs the gateway, and a player for each run:
`python -m relaygr.bench.pipeline.http PORT RECORDS --config SETTINGS`.
"""

from __future__ import annotations

import asyncio
import json
import threading
import time
from concurrent.futures import Future
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Unpack

from numpy.typing import ArrayLike

from relaygr.bench.pipeline.echo import schedule_of
from relaygr.cli.options import ConfigOption, SetOption
from relaygr.client import RankOutcome, RankStatus, RelayClient
from relaygr.client.publisher import OnDelivery
from relaygr.client.requests import RankFields, RetrievalFields, ranking_request, retrieval_event
from relaygr.devbroker.local import free_ports
from relaygr.gateway.bodies import RankBody, RetrievalBody
from relaygr.processes import CommandProcess, Processes
from relaygr.runtime.interpreter import tune_interpreter
from relaygr.schemas.json_messages import to_json
from relaygr.schemas.messages import RetrievalEvent
from relaygr.settings import load_settings
from relaygr.traffic.player import Player
from relaygr.traffic.population import population_of
from relaygr.traffic.records import RecordWriter
from relaygr.traffic.settings import TrafficSettings

START_TIMEOUT_S = 60.0
_DRAIN_STEP_S = 0.002


class Http:
    """`relaygr gateway`, and a player for each run. The context manager starts and stops the gateway."""

    def __init__(self, folder: Path, config: Path) -> None:
        """`config`: the settings file of the pipeline."""
        self._folder, self._config = folder, config
        (self._port,) = free_ports(1)

    def __enter__(self) -> Http:
        with ExitStack() as started:
            self._processes = started.enter_context(Processes(self._folder, self._config))
            own = [f"gateway.listen_port={self._port}"]
            gateway = self._processes.start("http", ["gateway"], "gateway", own)
            self._processes.await_ready([gateway], START_TIMEOUT_S)
            self._cleanup = started.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._cleanup.close()

    def roles(self) -> dict[int, str]:
        """`gateway` for the processes of the HTTP gateway and of the player, by their process ids."""
        return {child.process.pid: "gateway" for child in self._processes.running}

    def start_run(self, records: Path, traffic: TrafficSettings) -> CommandProcess:
        """Starts a player that plays the schedule once."""
        command = [str(self._port), str(records)]
        return self._processes.start("player", command, "traffic", schedule_of(traffic), [__name__])


class HttpClient(RelayClient):
    """The client of `relaygr.client`, but retrieval events and ranking requests go over HTTP, on kept connections."""

    def __init__(self, port: int, *arguments: Any, **callbacks: Any) -> None:
        super().__init__(*arguments, **callbacks)
        self._port = port
        self._loop = asyncio.new_event_loop()
        self._idle: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []
        self._calls: set[asyncio.Task[str] | None] = set()
        """The loop itself keeps no task from being collected."""
        # Each is counted by one thread: the caller's, and that of the loop.
        self._sent, self._ended = 0, 0
        threading.Thread(target=self._loop.run_forever, name="http", daemon=True).start()

    def publish_retrieval(
        self,
        user_id: str,
        *,
        on_delivery: OnDelivery | None = None,  # noqa: ARG002 - there is no report over HTTP
        **fields: Unpack[RetrievalFields],
    ) -> RetrievalEvent:
        request_id = fields.get("request_id") or self.new_request_id()
        event = retrieval_event(request_id, user_id, time.time_ns() // 1000, fields)
        body = RetrievalBody(
            user_id,
            fields["expected_ranking_in_ms"],
            fields["expected_candidates"],
            fields["expected_suffix"],
            fields["ranking_budget_ms"],
            event.history_version,
            request_id=request_id,
        )
        self._send("/v1/retrieval", body)
        return event

    def submit_rank(self, user_id: str, candidates: ArrayLike, **fields: Unpack[RankFields]) -> Future[RankOutcome]:
        called_ns = time.monotonic_ns()
        request_id = fields.get("request_id") or self.new_request_id()
        request = ranking_request(request_id, user_id, candidates, time.time_ns() // 1000, fields)
        body = RankBody(
            user_id,
            request.candidates,
            fields["budget_ms"],
            suffix=request.suffix,
            history_version=request.history_version,
            request_id=request_id,
        )
        future: Future[RankOutcome] = Future()

        def answered(done: Future[str]) -> None:
            status = done.result() if done.exception() is None else "failed"
            took_us = (time.monotonic_ns() - called_ns) // 1000
            future.set_result(
                RankOutcome(request_id, RankStatus.RANKED if status == "ranked" else RankStatus.FAILED, took_us)
            )

        self._send("/v1/rank", body).add_done_callback(answered)
        return future

    def drain(self, timeout_s: float) -> bool:
        ends_s = time.monotonic() + timeout_s
        while self._ended < self._sent and time.monotonic() < ends_s:
            time.sleep(_DRAIN_STEP_S)
        return self._ended == self._sent

    def _send(self, path: str, body: RankBody | RetrievalBody) -> Future[str]:
        content = json.dumps(to_json(body)).encode()
        head = (
            f"POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
            f"content-length: {len(content)}\r\n\r\n"
        )
        self._sent += 1
        return asyncio.run_coroutine_threadsafe(self._call(head.encode() + content), self._loop)

    async def _call(self, request: bytes) -> str:
        """The field `status` of the answer."""
        task = asyncio.current_task()
        self._calls.add(task)
        try:
            pair = self._idle.pop() if self._idle else await asyncio.open_connection("127.0.0.1", self._port)
            reader, writer = pair
            writer.write(request)
            head = await reader.readuntil(b"\r\n\r\n")
            length = next(line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:"))
            body = json.loads(await reader.readexactly(int(length.partition(b":")[2])))
            self._idle.append(pair)
            return str(body["status"])
        finally:
            self._calls.discard(task)
            self._ended += 1


def main(port: int, records: Path, config: ConfigOption, overrides: SetOption = None) -> None:
    """Plays the schedule of the settings once."""
    settings = load_settings(config, overrides=overrides or ())
    traffic, writer = settings.traffic, RecordWriter(records)
    client_of = partial(HttpClient, port, settings, traffic.gateway_id, settings.client)
    tune_interpreter()
    Player(client_of, traffic, population_of(traffic), writer.write).play()
    writer.close()


if __name__ == "__main__":
    from relaygr.cli.app import run

    run(main)
