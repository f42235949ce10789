"""The process that plays traces, and keeps a sample of every impression.

It shares the machine with what it measures, so it does little while it measures: messages are encoded before a run,
they are sent and received with bare Kafka clients, and results are decoded after the run. A message is sent at its
time, whatever happened to those before it (open loop). A latency counts from the *scheduled* time of its request.

The first history of each user is published before the run, each longer one `HISTORY_LEAD_US` before the retrieval event
that names it. Histories are synthetic (a function of the user's id alone) or those of an interaction log.

`Player` runs the process: `python -m relaygr.bench.generator.player SETTINGS PLAN` reads a run from each line of its
input.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Protocol

import numpy as np
from confluent_kafka import Producer, TopicPartition
from numpy.typing import NDArray

from relaygr.bench.generator.samples import Sample, write_samples
from relaygr.bench.generator.trace import Trace, read_trace
from relaygr.demo.processes import write_config
from relaygr.interactions import read_interactions
from relaygr.kafka.clients import ProducerKind, make_assigned_consumer, make_producer
from relaygr.runtime.errors import RelayError
from relaygr.runtime.interpreter import tune_interpreter, without_collection
from relaygr.schemas.codec import decode, encode
from relaygr.schemas.headers import Headers, RankingHeaders
from relaygr.schemas.messages import (
    Behaviours,
    History,
    HistoryVersion,
    RankingRequest,
    RankingResult,
    RetrievalEvent,
)
from relaygr.schemas.topics import Topic
from relaygr.settings import Settings, load_settings
from relaygr.traffic.player import HISTORY_LEAD_US

GATEWAY_ID = "load"
MAX_ENCODED_BYTES = 4 << 30
"""The messages of a run are in memory before it begins."""
_BEGINS_AFTER_S = 0.3
_SETTLE_S = 1.0
_SETTLE_BYTES_PER_S = 40e6
"""Histories that a worker surely reads and stores in a second."""
_DRAIN_S = 1.0
_BATCH = 256
_WAIT_S = 0.05
_WATCH_S = 0.1
_LONGEST_SLEEP_S = 0.2
_READY = "ready"
_FAILED = ".failed"
_STRIDE = 7919
_EPOCH_MS = 1_700_000_000_000
_GAP_MS = 60_000


@dataclass(frozen=True, slots=True)
class Requests:
    """What the requests of all runs have in common. Candidates and synthetic histories have item ids below `items`."""

    items: int
    interactions: Path | None = None


@dataclass(frozen=True, slots=True)
class Run:
    """One play of a trace. `name` distinguishes it from the other runs of the process."""

    name: str
    trace: Path
    samples: Path
    budget_ms: int
    events: bool = False
    """Whether retrieval events are sent."""
    expected_lead_ms: float = 0.0
    """The lead time that retrieval events promise."""
    scores_every: int = 0
    """The scores of every so many impressions are kept; 0: none."""


class Player:
    """The process. The context manager starts and stops it."""

    def __init__(self, folder: Path, settings: Settings, requests: Requests) -> None:
        """`folder` is made for the files of the process."""
        self._folder = folder
        self._settings = settings
        self._requests = requests
        self._process: subprocess.Popen[str] | None = None

    def __enter__(self) -> Player:
        self._folder.mkdir(parents=True)
        config, plan = self._folder / "settings.yaml", self._folder / "requests.json"
        write_config(self._settings, config)
        plan.write_text(json.dumps(asdict(self._requests), default=str), encoding="utf-8")
        self._process = subprocess.Popen(
            [sys.executable, "-m", "relaygr.bench.generator.player", str(config), str(plan)],
            stdin=subprocess.PIPE,  # The process ends when this one closes the pipe, or ends itself.
            stdout=subprocess.PIPE,
            text=True,
            process_group=0,
        )
        assert self._process.stdout is not None
        if self._process.stdout.readline().strip() != _READY:
            self._process.wait()
            raise RelayError("the process that sends the load did not start")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._process is not None and self._process.stdin is not None and self._process.stdout is not None
        with suppress(BrokenPipeError):
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

    def begun(self, run_name: str) -> Path:
        """A file that has content from the time of the run's first message on."""
        return self._folder / f"{run_name}.begun"

    def play(self, run: Run, watch: Callable[[], None] = lambda: None) -> None:
        """Plays the run, and calls `watch` meanwhile. Then `run.samples` is there. Raises RelayError."""
        assert self._process is not None and self._process.stdin is not None
        failed = run.samples.with_name(run.samples.name + _FAILED)
        run.samples.unlink(missing_ok=True)
        self._process.stdin.write(json.dumps(asdict(run), default=str) + "\n")
        self._process.stdin.flush()
        while not run.samples.exists():
            if failed.exists():
                why = failed.read_text(encoding="utf-8")
                failed.unlink()
                raise RelayError(why)
            if self._process.poll() is not None:
                raise RelayError("the process that sends the load ended")
            watch()
            time.sleep(_WATCH_S)


# -- the content of messages ---------------------------------------------------------------------------


class Content(Protocol):
    """Behaviours of users, and items to rank."""

    items: NDArray[np.int64]

    def behaviours(self, user_id: str, length: int) -> Behaviours:
        """The user's first `length` behaviours. Raises RelayError if there are fewer."""


class SyntheticContent:
    """Behaviours that are a function of the user's id: the shorter sequence is the beginning of the longer one."""

    def __init__(self, items: int) -> None:
        self.items = np.arange(items, dtype=np.int64)

    def behaviours(self, user_id: str, length: int) -> Behaviours:
        seed = int.from_bytes(hashlib.blake2b(user_id.encode(), digest_size=8).digest(), "little")
        random, count = np.random.default_rng(seed), len(self.items)
        drawn = random.random((length, 2))
        return Behaviours(
            (drawn[:, 0] * count).astype("<i8"),
            (drawn[:, 1] * 4).astype("<u2"),
            (_EPOCH_MS + np.arange(length) * _GAP_MS).astype("<i8"),
        )


class LoggedContent:
    """The behaviours of an interaction log."""

    def __init__(self, path: Path) -> None:
        self._log = read_interactions(path)
        self._index = {user: index for index, user in enumerate(self._log.users)}
        self.items = np.unique(np.concatenate([self._log.of(each).items for each in self._index.values()]))

    def behaviours(self, user_id: str, length: int) -> Behaviours:
        if user_id not in self._index:
            raise RelayError(f"user {user_id!r} of the trace is not in the interaction log")
        found = self._log.of(self._index[user_id])
        if len(found) < length:
            raise RelayError(
                f"user {user_id!r} has {len(found):,} behaviours in the log, the trace asks for {length:,}"
            )
        return found[:length]


# -- the process ---------------------------------------------------------------------------------------


@dataclass(slots=True)
class Message:
    """An encoded message. Times are on the wall clock, in µs."""

    at_us: int
    topic: str
    key: bytes
    value: bytes
    row: int
    headers: Headers | None = None
    sent_us: int = 0


@dataclass(slots=True)
class _Histories:
    """The histories of a run: those before it, those during it (times from the start of the trace), and by row the
    version and the suffix of the ranking request.
    """

    first: list[Message]
    later: list[Message]
    versions: list[HistoryVersion]
    suffixes: list[Behaviours]


class _Sender:
    def __init__(self, settings: Settings, requests: Requests) -> None:
        self._content: Content = (
            LoggedContent(requests.interactions) if requests.interactions else SyntheticContent(requests.items)
        )
        self._order = np.random.default_rng(settings.traffic.seed).permutation(self._content.items).astype("<i8")
        self._producer = make_producer(settings, ProducerKind.LATENCY, "load-requests")
        self._durable = make_producer(settings, ProducerKind.DURABLE, "load-histories")
        self._ranking, self._results, self._history, self._retrieval = (
            settings.topic(each) for each in (Topic.RANKING, Topic.RESULTS, Topic.HISTORY, Topic.RETRIEVAL)
        )
        self._consumer = make_assigned_consumer(settings, "load-results")
        place = TopicPartition(self._results, 0)
        place.offset = self._consumer.get_watermark_offsets(place, timeout=10)[1]
        self._consumer.assign([place])
        for producer, topics in (
            (self._producer, (self._ranking,)), (self._durable, (self._history, self._retrieval)),
        ):  # fmt: skip
            for topic in topics:
                producer.list_topics(topic, timeout=10)

    def play(self, run: Run, begun: Path) -> None:
        """Plays a run, and writes its samples."""
        trace = read_trace(run.trace)
        with without_collection():
            histories = self._histories(run, trace)
            self._publish(histories.first)
            messages, begin_us = self._timed(run, trace, histories)
            received: dict[str, tuple[int, bytes]] = {}
            stopping = threading.Event()
            receiver = threading.Thread(target=self._receive, args=(run, received, stopping), daemon=True)
            receiver.start()
            _sleep_until(messages[0].at_us)
            begun.write_text("begun")
            self._send(messages)
            latest_us = begin_us + int(trace.ranking_us.max()) + run.budget_ms * 1000
            while len(received) < len(trace) and time.time_ns() // 1000 < latest_us + _DRAIN_S * 1e6:
                time.sleep(0.02)
            stopping.set()
            receiver.join()
            sent = [message for message in messages if message.topic == self._ranking]
            lags_us = lags_us_of(messages)
            samples = [
                self._sample(run, trace, each, lags_us[each.row], received.get(f"{run.name}.{each.row}"))
                for each in sent
            ]
        write_samples(sorted(samples, key=lambda sample: sample.row), run.samples)

    # -- before the run

    def _histories(self, run: Run, trace: Trace) -> _Histories:
        found = _Histories([], [], [], [])
        wanted: dict[str, int] = {}
        lengths, suffixes = trace.history_length.tolist(), trace.suffix.tolist()
        for user, length, suffix in zip(trace.user_id, lengths, suffixes, strict=True):
            wanted[user] = max(wanted.get(user, 0), length + suffix)
        known: dict[str, Behaviours] = {}
        versions: dict[str, HistoryVersion] = {}
        total_bytes = int(8 * trace.candidates.sum(dtype=np.int64) + 18 * trace.suffix.sum(dtype=np.int64))
        none = np.empty(0, dtype="<i8")
        retrieval = trace.retrieval_us.tolist()
        for row, (user, length, suffix) in enumerate(zip(trace.user_id, lengths, suffixes, strict=True)):
            if user not in known:
                known[user] = self._content.behaviours(user, wanted[user])
            version = versions.get(user)
            if version is None or version.length != length:
                history = History(user, length, none, known[user][:length])
                message = Message(retrieval[row] - HISTORY_LEAD_US, self._history, user.encode(), encode(history), row)
                (found.first if version is None else found.later).append(message)
                version = versions[user] = history.version()
                total_bytes += len(message.value)
            if total_bytes > MAX_ENCODED_BYTES:
                limit = f"{MAX_ENCODED_BYTES >> 30} GiB"
                raise RelayError(f"{run.trace}: its messages take more than {limit} of memory: play a part of it")
            found.versions.append(version)
            found.suffixes.append(known[user][length : length + suffix])
        return found

    def _publish(self, histories: Sequence[Message]) -> None:
        """Publishes the first histories, and leaves the worker time to read them."""
        for number, message in enumerate(histories):
            _produce(self._durable, message)
            if number % 100 == 0:
                self._durable.poll(0)
        if self._durable.flush(30):
            raise RelayError("the broker did not take the histories within 30 s")
        time.sleep(_SETTLE_S + sum(len(message.value) for message in histories) / _SETTLE_BYTES_PER_S)

    def _timed(self, run: Run, trace: Trace, histories: _Histories) -> tuple[list[Message], int]:
        """The messages of the run in the order of their times, and its beginning, which lies ahead."""
        took_s = len(trace) * 100e-6
        while True:
            begin_us = time.time_ns() // 1000 + int((_BEGINS_AFTER_S + took_s) * 1e6) + HISTORY_LEAD_US
            messages = self._encoded(run, trace, histories, begin_us)
            if messages[0].at_us - time.time_ns() // 1000 > _BEGINS_AFTER_S / 2 * 1e6:
                return messages, begin_us
            took_s *= 2

    def _encoded(self, run: Run, trace: Trace, histories: _Histories, begin_us: int) -> list[Message]:
        budget_us, expected_us = run.budget_ms * 1000, int(run.expected_lead_ms * 1000)
        messages = [replace(message, at_us=begin_us + message.at_us) for message in histories.later]
        columns = (trace.retrieval_us.tolist(), trace.ranking_us.tolist(), trace.candidates.tolist())
        for row, (user, retrieval_us, ranking_us, candidates) in enumerate(zip(trace.user_id, *columns, strict=True)):
            request_id, key = f"{run.name}.{row}", user.encode()
            retrieval_us, ranking_us = begin_us + retrieval_us, begin_us + ranking_us
            version, suffix = histories.versions[row], histories.suffixes[row]
            if run.events:
                event = RetrievalEvent(
                    request_id, user, retrieval_us, retrieval_us + expected_us, run.budget_ms, candidates, len(suffix),
                    version,
                )  # fmt: skip
                messages.append(Message(retrieval_us, self._retrieval, key, encode(event), row))
            # `take` with mode="wrap" subtracts the size again and again: 250 us at row 10,000.
            places = np.arange(row * _STRIDE, row * _STRIDE + candidates) % self._order.size
            request = RankingRequest(
                request_id, user, ranking_us, ranking_us + budget_us, retrieval_us // 1000,
                self._order.take(places), suffix, version,
            )  # fmt: skip
            headers = RankingHeaders(request_id, GATEWAY_ID, self._results, 0, ranking_us + budget_us).encode()
            messages.append(Message(ranking_us, self._ranking, key, encode(request), row, headers))
        messages.sort(key=lambda message: message.at_us)
        return messages

    # -- during the run

    def _send(self, messages: Sequence[Message]) -> None:
        for message in messages:
            _sleep_until(message.at_us)
            message.sent_us = time.time_ns() // 1000
            producer = self._producer if message.topic == self._ranking else self._durable
            while True:
                try:
                    producer.produce(message.topic, message.value, message.key, headers=[*(message.headers or ())])
                    break
                except BufferError:
                    # The broker does not take the messages at this rate, which the row shows as the generator's lag.
                    time.sleep(0.005)
                    message.sent_us = time.time_ns() // 1000

    def _receive(self, run: Run, received: dict[str, tuple[int, bytes]], stopping: threading.Event) -> None:
        """Keeps the time and the first result of each request of the run. Late results of earlier runs may come too."""
        begins = f"{run.name}."
        while not stopping.is_set():
            for request_id, value in self._next():
                if request_id.startswith(begins):
                    received.setdefault(request_id, (time.time_ns() // 1000, value))
            self._producer.poll(0)
            self._durable.poll(0)

    def _next(self) -> Iterator[tuple[str, bytes]]:
        """Key and value of each result: the key is the id of the request."""
        first = self._consumer.poll(_WAIT_S)
        for message in (first, *self._consumer.consume(_BATCH, 0)) if first is not None else ():
            key, value = message.key(), message.value()
            if message.error() is None and key is not None and value is not None:
                yield bytes(key).decode(), value

    # -- after the run

    def _sample(
        self, run: Run, trace: Trace, message: Message, lag_us: int, received: tuple[int, bytes] | None
    ) -> Sample:
        row = message.row
        sample = Sample(
            row=row,
            part=int(trace.part[row]),
            user_id=trace.user_id[row],
            history_length=int(trace.history_length[row]),
            ranking_us=int(trace.ranking_us[row]),
            lag_us=lag_us,
        )
        if received is None:
            return sample
        at_us, result = received[0], decode(RankingResult, received[1])
        timings = result.timings
        keeps_scores = run.scores_every and row % run.scores_every == 0 and result.scores is not None
        return replace(
            sample,
            latency_us=at_us - message.at_us,
            status=result.outcome.value,
            reason=str(result.reason) if result.reason is not None else None,
            path=str(result.path) if result.path is not None else None,
            prefix_source=str(result.prefix_source) if result.prefix_source is not None else None,
            prefix_tokens=result.prefix_tokens,
            tokens_cached=result.tokens_cached,
            history_stale=result.history_stale or result.history_loading,
            to_worker_us=result.received_at_us - message.sent_us,
            in_worker_us=result.sent_at_us - result.received_at_us,
            to_gateway_us=at_us - result.sent_at_us,
            queue_us=timings.queue_us,
            wait_us=timings.wait_us,
            pre_infer_us=timings.pre_infer_us,
            reload_us=timings.reload_us,
            rank_us=timings.rank_us,
            scores=result.scores if keeps_scores else None,
        )


def _sleep_until(at_us: int) -> None:
    """Sleeps until this wall-clock time, which other processes may move."""
    while (left_us := at_us - time.time_ns() // 1000) > 0:
        time.sleep(min(left_us / 1e6, _LONGEST_SLEEP_S))


def lags_us_of(messages: Sequence[Message]) -> dict[int, int]:
    """By row: how late the latest of its messages was sent. A late retrieval event takes lead time from the relay."""
    lags: dict[int, int] = {}
    for each in messages:
        lags[each.row] = max(lags.get(each.row, 0), each.sent_us - each.at_us)
    return lags


def _produce(producer: Producer, message: Message) -> None:
    while True:
        try:
            return producer.produce(message.topic, message.value, message.key)
        except BufferError:
            producer.poll(0.01)


def _main(config: str, plan: str) -> None:
    # The parent reads one line: more of them, such as logs, would fill the pipe.
    parent, sys.stdout = sys.stdout, sys.stderr
    read = json.loads(Path(plan).read_text(encoding="utf-8"))
    log = read["interactions"]
    sender = _Sender(load_settings(config, environment={}), Requests(read["items"], Path(log) if log else None))
    tune_interpreter()
    with suppress(OSError, AttributeError):
        # The sender must not wait for a core behind what it measures. Not every user and system allow that.
        os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1))
    print(_READY, file=parent, flush=True)
    for line in sys.stdin:
        run = Run(**(fields := json.loads(line)) | {name: Path(fields[name]) for name in ("trace", "samples")})
        try:
            sender.play(run, Path(config).parent / f"{run.name}.begun")
        except RelayError as error:
            run.samples.parent.mkdir(parents=True, exist_ok=True)
            run.samples.with_name(run.samples.name + _FAILED).write_text(str(error), encoding="utf-8")


if __name__ == "__main__":
    _main(*sys.argv[1:])
