"""The floor under the pipeline: the same four messages with bare confluent-kafka clients, and nothing else.

Gateway, trigger and worker are processes of their own, as in the pipeline. Their clients, topics and settings come from
the same factories, the gateway sends at the times of the same schedule, and each message has the size of the real one.
The trigger forwards each event as a job, the worker drops jobs and answers each ranking request, and nobody decodes.
A second gateway does the same with the asyncio clients of confluent-kafka.

`Echo` runs the three processes: `python -m relaygr.bench.pipeline.echo ROLE FILE --config SETTINGS` is one of them.
"""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
from confluent_kafka import Consumer, Message, TopicPartition
from confluent_kafka.aio import AIOConsumer, AIOProducer

from relaygr.cli.options import ConfigOption, SetOption
from relaygr.devbroker import LocalBroker
from relaygr.kafka.clients import ProducerKind, make_assigned_consumer, make_group_consumer, make_producer
from relaygr.kafka.message_headers import headers_of
from relaygr.processes import CommandProcess, Processes, write_config
from relaygr.runtime.interpreter import tune_interpreter
from relaygr.schemas.codec import encode
from relaygr.schemas.ended import Ended
from relaygr.schemas.headers import RankingHeaders, ResultHeaders
from relaygr.schemas.messages import HistoryVersion, RankingRequest, RankingResult, RetrievalEvent, StageTimings
from relaygr.schemas.messages import Path as RankingPath
from relaygr.schemas.topics import Topic
from relaygr.settings import Settings, load_settings
from relaygr.traffic.population import history_at, population_of
from relaygr.traffic.schedule import Candidates, impressions, suffix_of
from relaygr.traffic.settings import TrafficSettings

START_TIMEOUT_S = 120.0
_BATCH = 64
_WAIT_S = 0.1
_DRAIN_S = 10.0
_LONGEST_SLEEP_S = 0.2


class Echo:
    """The echo's trigger and worker, and a gateway for each run. The context manager starts and stops them."""

    def __init__(self, folder: Path, broker: LocalBroker, settings: Settings) -> None:
        """`settings` are those of the pipeline; the echo has its own topics and groups."""
        name = f"{settings.topic_prefix}-echo"
        self._folder = folder / name
        self._broker = broker
        self._settings = settings.model_copy(update={"topic_prefix": name, "group_prefix": name})

    def __enter__(self) -> Echo:
        self._folder.mkdir(parents=True)
        config = self._folder / "settings.yaml"
        write_config(self._settings, config)
        with ExitStack() as started:
            self._broker.create_topics(self._settings)
            if not self._broker.ours:
                started.callback(self._broker.delete_topics, self._settings)
            self._processes = started.enter_context(Processes(self._folder, config))
            signs = [self._folder / role for role in ("worker", "trigger")]
            for sign in signs:
                self._start(sign.name, sign)
            self._processes.await_so("the echo is ready", lambda: all(map(Path.exists, signs)), START_TIMEOUT_S)
            self._cleanup = started.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._cleanup.close()

    def roles(self) -> Mapping[int, str]:
        """`gateway`, `trigger` or `worker` of each process, by its process id."""
        return {
            child.process.pid: child.name if child.name in ("trigger", "worker") else "gateway"
            for child in self._processes.running
        }

    def start_run(self, records: Path, traffic: TrafficSettings, role: str = "gateway") -> CommandProcess:
        """Starts a gateway, or `asyncio`, that plays the schedule once. `read_run` reads the file when it has ended."""
        return self._start(role, records, schedule_of(traffic))

    def _start(self, role: str, file: Path, settings: Sequence[str] = ()) -> CommandProcess:
        return self._processes.start(role, [role, str(file)], "traffic", settings, [__name__])


def schedule_of(traffic: TrafficSettings) -> list[str]:
    """The settings in which the runs differ."""
    return [f"traffic.rate_per_s={traffic.rate_per_s}", f"traffic.duration_s={traffic.duration_s}"]


def read_run(records: Path) -> tuple[np.ndarray, int]:
    """The latencies in ms of one run, in the order of the requests, and the number of requests that were sent."""
    latencies = np.array(json.loads(records.read_text(encoding="utf-8"))["latency_us"], dtype=np.float64) / 1000
    return latencies[~np.isnan(latencies)], latencies.size


# -- the processes ----------------------------------------------------------------------------------


def _trigger(settings: Settings, sign: Path) -> None:
    producer = make_producer(settings, ProducerKind.PREINFER, "echo-trigger")
    topic = settings.topic(Topic.PREINFER)
    consumer = make_group_consumer(settings, settings.trigger_group, "echo-trigger")
    for messages in _batches(consumer, [settings.topic(Topic.RETRIEVAL)], sign):
        for message in messages:
            producer.produce(topic, message.value(), message.key())
        producer.poll(0)


def _worker(settings: Settings, sign: Path) -> None:
    producer = make_producer(settings, ProducerKind.LATENCY, "echo-worker")
    ranking, results = settings.topic(Topic.RANKING), settings.topic(Topic.RESULTS)
    value = encode(example_result(settings.traffic))
    consumer = make_group_consumer(settings, settings.workers_group, "echo-worker", instance_id="echo-worker")
    for messages in _batches(consumer, [settings.topic(Topic.PREINFER), ranking], sign):
        for message in messages:
            if message.topic() == ranking:
                request_id = _request_id(message)
                headers = ResultHeaders(request_id, "gateway-00").encode()
                producer.produce(results, value, request_id.encode(), partition=0, headers=[*headers])
        producer.poll(0)


def _gateway(settings: Settings, records: Path) -> None:
    """Sends on the main thread, receives on another, as the client does."""
    events = make_producer(settings, ProducerKind.DURABLE, "echo-events")
    requests = make_producer(settings, ProducerKind.LATENCY, "echo-requests")
    retrieval, ranking, results = (settings.topic(each) for each in (Topic.RETRIEVAL, Topic.RANKING, Topic.RESULTS))
    consumer = make_assigned_consumer(settings, "echo-gateway")
    place = TopicPartition(results, 0)
    place.offset = consumer.get_watermark_offsets(place, timeout=10)[1]
    consumer.assign([place])
    for producer, topic in ((events, retrieval), (requests, ranking)):
        producer.list_topics(topic, timeout=10)

    event, request = (encode(each) for each in _event_and_request(settings.traffic))
    calls = _calls(settings.traffic)
    due_us = {number: at_us for at_us, number, is_ranking, _ in calls if is_ranking}
    latency_us: dict[int, int] = {}
    stopping = threading.Event()
    begin_us = 0

    def receive() -> None:
        while not stopping.is_set():
            for message in _next(consumer):
                number = int(_request_id(message))
                latency_us[number] = time.monotonic_ns() // 1000 - begin_us - due_us[number]
            requests.poll(0)
            events.poll(0)

    tune_interpreter()
    receiver = threading.Thread(target=receive, daemon=True)
    begin_us = time.monotonic_ns() // 1000 + 200_000
    receiver.start()
    records.with_suffix(".begun").write_text("begun")
    for at_us, number, is_ranking, key in calls:
        while (left_us := begin_us + at_us - time.monotonic_ns() // 1000) > 0:
            time.sleep(min(left_us / 1e6, _LONGEST_SLEEP_S))
        if is_ranking:
            headers = RankingHeaders(str(number), "gateway-00", results, 0, begin_us + at_us).encode()
            requests.produce(ranking, request, key, headers=[*headers])
        else:
            events.produce(retrieval, event, key)
    ends_s = time.monotonic() + _DRAIN_S
    while len(latency_us) < len(due_us) and time.monotonic() < ends_s:
        time.sleep(0.02)
    stopping.set()
    receiver.join()
    _write_run(records, latency_us, due_us)


def _calls(traffic: TrafficSettings) -> list[tuple[int, int, bool, bytes]]:
    """Time in µs, number of the impression, whether it is the ranking request, and key of each message."""
    calls = []
    population = population_of(traffic)
    for impression in impressions(traffic, population):
        key = population.user_id(impression.user).encode()
        calls.append((impression.retrieval_us, impression.number, False, key))
        calls.append((impression.ranking_us, impression.number, True, key))
    return sorted(calls)


def _write_run(records: Path, latency_us: Mapping[int, int], numbers: Iterable[int]) -> None:
    in_order = [latency_us.get(number) for number in sorted(numbers)]
    records.write_text(json.dumps({"latency_us": in_order}), encoding="utf-8")


async def _play_by_asyncio(settings: Settings, records: Path) -> None:
    """The same in one event loop. The clients have the library's defaults but for what makes them wait."""
    about = {"bootstrap.servers": settings.bootstrap}
    # By default a message waits until there are a thousand, or for a second.
    producer = AIOProducer({**about, "linger.ms": 0, "acks": "1"}, batch_size=1)
    own = {"group.id": settings.unjoined_group, "enable.auto.commit": False, "auto.offset.reset": "latest"}
    consumer = AIOConsumer({**about, **own, "fetch.wait.max.ms": settings.fetch_wait_max_ms})
    retrieval, ranking, results = (settings.topic(each) for each in (Topic.RETRIEVAL, Topic.RANKING, Topic.RESULTS))
    place = TopicPartition(results, 0)
    place.offset = (await consumer.get_watermark_offsets(place, timeout=10))[1]
    await consumer.assign([place])
    event, request = (encode(each) for each in _event_and_request(settings.traffic))
    calls, latency_us, sends = _calls(settings.traffic), dict[int, int](), set[asyncio.Task[Any]]()
    due_us = {number: at_us for at_us, number, is_ranking, _ in calls if is_ranking}

    async def receive() -> None:
        while len(latency_us) < len(due_us):
            # To ask for several at once waits until there are as many.
            first = await consumer.poll(_WAIT_S)
            for message in [] if first is None else [first, *await consumer.consume(_BATCH - 1, 0)]:
                if message.error() is None:
                    number = int(_request_id(message))
                    latency_us[number] = time.monotonic_ns() // 1000 - begin_us - due_us[number]

    tune_interpreter()
    begin_us = time.monotonic_ns() // 1000 + 200_000
    receiver = asyncio.create_task(receive())
    records.with_suffix(".begun").write_text("begun")
    for at_us, number, is_ranking, key in calls:
        await asyncio.sleep(max(0, begin_us + at_us - time.monotonic_ns() // 1000) / 1e6)
        # These producers send no headers, so the key has the id.
        made = (ranking, request, str(number)) if is_ranking else (retrieval, event, key)
        sends.add(task := asyncio.create_task(producer.produce(*made)))
        task.add_done_callback(sends.discard)
    with suppress(TimeoutError):
        await asyncio.wait_for(receiver, _DRAIN_S)
    await producer.close()
    await consumer.close()
    _write_run(records, latency_us, due_us)


def _gateway_by_asyncio(settings: Settings, records: Path) -> None:
    asyncio.run(_play_by_asyncio(settings, records))


def _batches(consumer: Consumer, topics: list[str], sign: Path) -> Iterator[list[Message]]:
    """Joins the group, makes the file `sign`, and yields what arrives."""
    assigned = threading.Event()
    consumer.subscribe(topics, on_assign=lambda *_: assigned.set())
    ends_s = time.monotonic() + START_TIMEOUT_S
    while not assigned.is_set() and time.monotonic() < ends_s:
        yield _next(consumer)
    tune_interpreter()
    sign.touch()
    while True:
        yield _next(consumer)


def _next(consumer: Consumer) -> list[Message]:
    """The messages that are there, after a wait for the first."""
    first = consumer.poll(_WAIT_S)
    if first is None:
        return []
    return [each for each in (first, *consumer.consume(_BATCH - 1, 0)) if each.error() is None]


def _request_id(message: Message) -> str:
    """From the first header, in which both ranking requests and results carry it, or else from the key."""
    ((_, value), *_) = headers_of(message) or [("", message.key())]
    return value.decode() if isinstance(value, bytes) else ""


def _event_and_request(traffic: TrafficSettings) -> tuple[RetrievalEvent, RankingRequest]:
    population = population_of(traffic)
    impression = next(impressions(traffic, population))
    version = history_at(population, impression.user, impression.history_length).version()
    now_us = time.time_ns() // 1000
    user, request_id = population.user_id(impression.user), "gateway-00.00000000.000000"
    event = RetrievalEvent(
        request_id, user, now_us, now_us, traffic.budget_ms, traffic.candidates, traffic.suffix, version
    )
    candidates = Candidates(traffic, population).of(impression)
    suffix = suffix_of(impression, traffic, population)
    return event, RankingRequest(request_id, user, now_us, now_us, now_us // 1000, candidates, suffix, version)


def example_result(traffic: TrafficSettings) -> RankingResult:
    """An answer of the size of a real one."""
    now_us = time.time_ns() // 1000
    return RankingResult(
        request_id="gateway-00.00000000.000000",
        worker_id="worker-00",
        outcome=Ended.RANKED,
        request_sent_at_us=now_us,
        received_at_us=now_us,
        sent_at_us=now_us,
        timings=StageTimings(100, 100, 100, 100, 100, 100),
        path=RankingPath.HBM,
        num_tasks=1,
        scores=np.zeros(traffic.candidates, dtype="<f4"),
        prefix_tokens=traffic.history_median,
        tokens_cached=traffic.history_median,
        history_version=HistoryVersion(1, traffic.history_median, bytes(16)),
        model_revision="0" * 16,
    )


def main(role: str, file: Path, config: ConfigOption, overrides: SetOption = None) -> None:
    """Runs one of the processes. `file`: what the gateway writes, or a file that says that another one is ready."""
    roles = {"trigger": _trigger, "worker": _worker, "gateway": _gateway, "asyncio": _gateway_by_asyncio}
    roles[role](load_settings(config, overrides=overrides or ()), file)


if __name__ == "__main__":
    from relaygr.cli.app import run

    run(main)
