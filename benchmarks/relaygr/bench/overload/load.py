"""The load: a process that sends ranking requests at the times of a schedule, and keeps what comes back.

It shares the machine with the worker, so it does little while it measures: requests are encoded before a run, they are
sent and received with bare Kafka clients, and results are decoded after the run.

The schedule is open loop: gaps are exponential, and a request is sent at its time whatever happened to those before. A
fixed share of the requests is of new users, each of whom comes once. The others are of returning users in random order.
All histories are in the history topic before a run begins.

`Load` runs the process: `python -m relaygr.bench.overload.load SETTINGS PLAN` reads a run from each line of its input.
"""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType

import numpy as np
from confluent_kafka import Producer, TopicPartition

from relaygr.demo.processes import write_config
from relaygr.kafka.clients import ProducerKind, make_assigned_consumer, make_producer
from relaygr.runtime.errors import RelayError
from relaygr.runtime.interpreter import tune_interpreter, without_collection
from relaygr.schemas.codec import decode, encode
from relaygr.schemas.headers import Headers, RankingHeaders
from relaygr.schemas.messages import Behaviours, History, Outcome, RankingRequest, RankingResult
from relaygr.schemas.messages import Path as RankingPath
from relaygr.schemas.topics import Topic
from relaygr.settings import Settings, load_settings

GATEWAY_ID = "load"
LOST = "lost"
_BEGINS_AFTER_S = 0.3
_SETTLE_S = 1.0
_DRAIN_S = 1.0
_BATCH = 256
_WAIT_S = 0.05
_WATCH_S = 0.1
_BLOCK = 12
"""Of each so many requests, the same number is of new users, so that equal rates are equal work."""
_LONGEST_BUDGET_MS = 50_000
_LONGEST_SLEEP_S = 0.2
_READY = "ready"


@dataclass(frozen=True, slots=True)
class Requests:
    """What all requests of a benchmark have in common."""

    budget_ms: int
    history: int
    suffix: int
    candidates: int
    items: int
    returning_users: int
    new_share: float


@dataclass(frozen=True, slots=True)
class Phase:
    """A part of a run. A rate of 0 is a pause."""

    rate_per_s: float
    seconds: float


@dataclass(frozen=True, slots=True)
class Run:
    """One run. `is_warm_up`: each returning user once, with a deadline that leaves time for all of them."""

    name: str
    phases: tuple[Phase, ...]
    is_warm_up: bool = False


@dataclass(frozen=True, slots=True)
class Ended:
    """One request and its end. Times are in µs; those of gateway and worker are on the wall clock of one machine."""

    phase: int
    lag_us: int
    """Sent after its scheduled time."""
    latency_us: int | None = None
    """From its scheduled time to its result; None without one."""
    status: str = LOST
    """The outcome of the result, or `lost`."""
    path: str | None = None
    to_worker_us: int = 0
    """From sending to receipt at the worker."""
    in_worker_us: int = 0
    to_gateway_us: int = 0
    """From the worker's sending to receipt here."""
    device_us: int = 0

    def is_in_time(self, budget_us: int) -> bool:
        """Whether a result came before the deadline."""
        return self.latency_us is not None and self.latency_us <= budget_us

    @property
    def is_whole(self) -> bool:
        """Whether it was ranked on its whole history."""
        return self.status == Outcome.RANKED and self.path != RankingPath.TRUNCATED


class Load:
    """The process that sends the requests. The context manager starts and stops it."""

    def __init__(self, folder: Path, settings: Settings, requests: Requests) -> None:
        self._folder = folder / "load"
        self._settings = settings
        self._requests = requests
        self._process: subprocess.Popen[str] | None = None

    def __enter__(self) -> Load:
        self._folder.mkdir(parents=True)
        config, plan = self._folder / "settings.yaml", self._folder / "requests.json"
        write_config(self._settings, config)
        plan.write_text(json.dumps(asdict(self._requests)), encoding="utf-8")
        self._process = subprocess.Popen(
            [sys.executable, "-m", "relaygr.bench.overload.load", str(config), str(plan)],
            stdin=subprocess.PIPE,  # The process ends when this one closes the pipe, or ends itself.
            stdout=subprocess.PIPE,
            text=True,
            process_group=0,
        )
        assert self._process.stdout is not None
        if self._process.stdout.readline().strip() != _READY:
            raise RelayError("the process that sends the load did not start")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._process is not None and self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        try:
            self._process.wait(1 if kind is None else 0.1)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def begun(self, run: Run) -> Path:
        """A file that has content from the time of the run's first request on."""
        return self._folder / f"{run.name}.begun"

    def play(self, run: Run, watch: Callable[[], None]) -> list[Ended]:
        """Plays the run, and calls `watch` meanwhile. The requests are in the order of their times."""
        assert self._process is not None and self._process.stdin is not None
        self._process.stdin.write(json.dumps(asdict(run)) + "\n")
        self._process.stdin.flush()
        ends = self._folder / f"{run.name}.json"
        while not ends.exists():
            if self._process.poll() is not None:
                raise RelayError("the process that sends the load ended")
            watch()
            time.sleep(_WATCH_S)
        return [Ended(*row) for row in json.loads(ends.read_text(encoding="utf-8"))]


# -- the process ------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Message:
    """An encoded request. Times are on the wall clock, in µs."""

    request_id: str
    phase: int
    at_us: int
    key: bytes
    value: bytes
    headers: Headers
    sent_us: int = 0


class _Sender:
    def __init__(self, settings: Settings, requests: Requests, folder: Path) -> None:
        self._requests, self._folder = requests, folder
        self._random = np.random.default_rng(settings.gateway.seed)
        self._producer = make_producer(settings, ProducerKind.LATENCY, "overload-requests")
        self._histories = make_producer(settings, ProducerKind.DURABLE, "overload-histories")
        self._ranking, self._results, self._history = (
            settings.topic(each) for each in (Topic.RANKING, Topic.RESULTS, Topic.HISTORY)
        )
        self._consumer = make_assigned_consumer(settings, "overload-results")
        place = TopicPartition(self._results, 0)
        place.offset = self._consumer.get_watermark_offsets(place, timeout=10)[1]
        self._consumer.assign([place])
        for producer, topic in ((self._producer, self._ranking), (self._histories, self._history)):
            producer.list_topics(topic, timeout=10)
        self._behaviours = self._some_behaviours(requests.history)
        self._suffix = self._some_behaviours(requests.suffix)
        self._candidates = self._random.permutation(requests.items)[: requests.candidates].astype("<i8")
        self._returning = [f"returning-{number}" for number in range(requests.returning_users)]
        self._publish(self._returning)

    def play(self, run: Run) -> None:
        """Plays a run, and writes its requests and their ends to a file."""
        calls = self._calls(run)
        self._publish([user for _, _, user in calls if user not in self._returning])
        with without_collection():
            messages = self._encoded(run, calls)
            received: dict[str, tuple[int, bytes]] = {}
            stopping = threading.Event()
            receiver = threading.Thread(target=self._receive, args=(run, received, stopping), daemon=True)
            receiver.start()
            (self._folder / f"{run.name}.begun").write_text("begun")
            self._send(messages)
            latest_us = max((message.at_us for message in messages), default=0) + self._budget_us(run)
            while len(received) < len(messages) and time.time_ns() // 1000 < latest_us + _DRAIN_S * 1e6:
                time.sleep(0.02)
            stopping.set()
            receiver.join()
            rows = [self._end(message, received.get(message.request_id)) for message in messages]
        written = self._folder / f"{run.name}.part"
        written.write_text(json.dumps(rows), encoding="utf-8")
        written.rename(self._folder / f"{run.name}.json")

    def _calls(self, run: Run) -> list[tuple[int, int, str]]:
        """Phase, time since the beginning in µs, and user of each request."""
        calls: list[tuple[int, int, str]] = []
        if run.is_warm_up:
            return [(0, 0, user) for user in self._returning]
        begins_s, are_new = 0.0, list[bool]()
        for phase, part in enumerate(run.phases):
            at_s = 0.0
            while part.rate_per_s and (at_s := at_s + self._random.exponential(1 / part.rate_per_s)) < part.seconds:
                number = len(calls)
                if not are_new:
                    are_new = list(self._random.permutation(np.arange(_BLOCK) < self._requests.new_share * _BLOCK))
                user = f"new-{run.name}-{number}" if are_new.pop() else str(self._random.choice(self._returning))
                calls.append((phase, int((begins_s + at_s) * 1e6), user))
            begins_s += part.seconds
        return calls

    def _encoded(self, run: Run, calls: Sequence[tuple[int, int, str]]) -> list[_Message]:
        version = History("any", 1, np.empty(0, "<i8"), self._behaviours).version()
        took_s = len(calls) * 200e-6
        begin_us = time.time_ns() // 1000 + int((_BEGINS_AFTER_S + took_s) * 1e6)
        messages = []
        for number, (phase, after_us, user) in enumerate(calls):
            at_us, request_id = begin_us + after_us, f"{run.name}.{number}"
            deadline_us = at_us + self._budget_us(run)
            request = RankingRequest(
                request_id, user, at_us, deadline_us, at_us // 1000, self._candidates, self._suffix, version
            )
            headers = RankingHeaders(request_id, GATEWAY_ID, self._results, 0, deadline_us).encode()
            messages.append(_Message(request_id, phase, at_us, user.encode(), encode(request), headers))
        return messages

    def _send(self, messages: Sequence[_Message]) -> None:
        for message in messages:
            while (left_us := message.at_us - time.time_ns() // 1000) > 0:
                time.sleep(min(left_us / 1e6, _LONGEST_SLEEP_S))
            message.sent_us = time.time_ns() // 1000
            while True:
                try:
                    self._producer.produce(self._ranking, message.value, message.key, headers=[*message.headers])
                    break
                except BufferError:
                    # The broker does not take the messages at this rate, which the row shows as the generator's lag.
                    time.sleep(0.005)
                    message.sent_us = time.time_ns() // 1000

    def _receive(self, run: Run, received: dict[str, tuple[int, bytes]], stopping: threading.Event) -> None:
        """Keeps the time and the first result of each request of the run. Late results of earlier runs may come too."""
        while not stopping.is_set():
            for request_id, value in self._next():
                if request_id.startswith(f"{run.name}."):
                    received.setdefault(request_id, (time.time_ns() // 1000, value))
            self._producer.poll(0)

    def _next(self) -> Iterator[tuple[str, bytes]]:
        """Key and value of each result: the key is the id of the request."""
        first = self._consumer.poll(_WAIT_S)
        for message in (first, *self._consumer.consume(_BATCH, 0)) if first is not None else ():
            key, value = message.key(), message.value()
            if message.error() is None and key is not None and value is not None:
                yield bytes(key).decode(), value

    def _end(self, message: _Message, received: tuple[int, bytes] | None) -> tuple[object, ...]:
        lag_us = message.sent_us - message.at_us
        if received is None:
            return (message.phase, lag_us)
        at_us, result = received[0], decode(RankingResult, received[1])
        return (
            message.phase,
            lag_us,
            at_us - message.at_us,
            result.outcome.value,
            result.path,
            result.received_at_us - message.sent_us,
            result.sent_at_us - result.received_at_us,
            at_us - result.sent_at_us,
            result.timings.pre_infer_us + result.timings.rank_us,
        )

    def _budget_us(self, run: Run) -> int:
        return 1000 * (_LONGEST_BUDGET_MS if run.is_warm_up else self._requests.budget_ms)

    def _publish(self, users: Sequence[str]) -> None:
        """Publishes the histories of these users, and leaves the worker time to read them."""
        for number, user in enumerate(users):
            history = encode(History(user, 1, np.empty(0, "<i8"), self._behaviours))
            _produce(self._histories, self._history, user.encode(), history)
            if number % 100 == 0:
                self._histories.poll(0)
        self._histories.flush(10)
        time.sleep(_SETTLE_S)

    def _some_behaviours(self, count: int) -> Behaviours:
        items = self._random.integers(0, self._requests.items, count).astype("<i8")
        times = (1_700_000_000_000 + np.arange(count) * 60_000).astype("<i8")
        return Behaviours(items, np.ones(count, "<u2"), times)


def _produce(producer: Producer, topic: str, key: bytes, value: bytes) -> None:
    while True:
        try:
            return producer.produce(topic, value, key)
        except BufferError:
            producer.poll(0.01)


def _main(config: str, plan: str) -> None:
    requests = Requests(**json.loads(Path(plan).read_text(encoding="utf-8")))
    sender = _Sender(load_settings(config, environment={}), requests, Path(config).parent)
    tune_interpreter()
    print(_READY, flush=True)  # noqa: T201 - the parent waits for this line
    for line in sys.stdin:
        run = json.loads(line)
        sender.play(Run(run["name"], tuple(Phase(**phase) for phase in run["phases"]), run["is_warm_up"]))


if __name__ == "__main__":
    _main(*sys.argv[1:])
