"""A worker without time passes a ranking request on, and a worker with time takes it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from types import SimpleNamespace

import numpy as np
import pytest
from confluent_kafka import KafkaError
from prometheus_client import CollectorRegistry

from relaygr.admission.divert import CALM_US, SHORT_REQUESTS, DivertPolicy, Peers
from relaygr.consumer.interface import Received, Token
from relaygr.runtime.clock import ManualClock
from relaygr.schemas import codec
from relaygr.schemas.ended import Ended, Reason
from relaygr.schemas.headers import RankingHeaders
from relaygr.schemas.messages import (
    Behaviours,
    Diverted,
    HistoryVersion,
    LatencyCoefficients,
    Path,
    RankingRequest,
    RankingResult,
    StaleCause,
    WorkerState,
    WorkerStatus,
)
from relaygr.schemas.partitioner import partition_for
from relaygr.worker.divert import Diverter, DivertParts
from relaygr.worker.executor.backlog import Backlog
from relaygr.worker.executor.executor import Executor
from relaygr.worker.handler import HandlerSettings, OverflowHandler, WorkerHandler
from relaygr.worker.history.resolve import StoredHistory
from relaygr.worker.metrics import WorkerMetrics
from relaygr.worker.results import ResultWriter
from relaygr.worker.settings import WorkerSettings
from tests.workers.kafka_fakes import FakeDeadLetters, FakeProducer, Produced, received
from tests.worlds.executor import LIMITS, ExecutorWorld, FakeEngine, Store, history_of

OVERFLOW, RANKING, RESULTS = "relaygr.ranking-overflow", "relaygr.ranking", "relaygr.results"
PARTITIONS = 12
BUDGET_US = 100_000
LATENCY = LatencyCoefficients(0, 10, 0, 0, 10, 0, 0, 0, 0, 0, 0)
"""Full inference on 100 behaviours takes a peer a millisecond."""


@dataclass
class Sent:
    """A message on the overflow topic."""

    produced: Produced

    @property
    def request(self) -> RankingRequest:
        return codec.decode(RankingRequest, self.produced.value)


class World:
    """A worker with one peer, which takes diverted requests on partition 7."""

    def __init__(self, **settings: object) -> None:
        self.clock = ManualClock(monotonic_us=5_000_000)
        self.store = Store()
        self._producer = FakeProducer()
        self.finished: list[Token] = []
        self.registry = CollectorRegistry()
        self.backlog = Backlog()
        self.letters = FakeDeadLetters()
        self.engine = FakeEngine(self.clock)
        metrics = WorkerMetrics(self.registry)
        self.results = ResultWriter(self._producer, "worker-00", 5, self.finished.append, metrics, self.clock)
        self.peers = Peers("worker-00", 1_500_000)
        self.diverter = Diverter(
            WorkerSettings(worker_id="worker-00", divert=True, **settings),
            DivertParts(
                topic=OVERFLOW,
                policy=DivertPolicy(self.peers, 1.0),
                producer=self._producer,
                results=self.results,
                histories=self.store,
                metrics=metrics,
                clock=self.clock,
                engine=lambda: self.engine,
                backlog=lambda: self.backlog,
            ),
        )
        self.hear()

    @property
    def producer(self) -> FakeProducer:
        """With all results that were written."""
        self.results.send()
        return self._producer

    def hear(self, **changes: object) -> None:
        """The peer's status."""
        values: dict[str, object] = {
            "worker_id": "worker-01",
            "state": WorkerState.READY,
            "written_at_us": self.clock.wall_us(),
            "assignment_epoch": 1,
            "partitions": (),
            "model_revision": self.engine.revision,
            "contextual_tokens": 0,
            "tokens_per_behaviour": 1,
            "max_prefix_behaviours": LIMITS.max_prefix_behaviours,
            "latency": LATENCY,
            "overflow_partitions": (7,),
        }
        names = (
            "kv_bytes_per_token", "hbm_capacity_bytes", "hbm_free_bytes", "dram_capacity_bytes", "dram_free_bytes",
            "ranking_queue_p99_us", "preinfer_queue_us",
        )  # fmt: skip
        status = WorkerStatus(**(dict.fromkeys(names, 0) | values | changes))  # type: ignore[arg-type]
        self.peers.apply("worker-01", status, self.clock.wall_us())

    def request(self, version: HistoryVersion | None = None, **changes: object) -> RankingRequest:
        now_us = self.clock.wall_us()
        request = RankingRequest(
            "g.0.1", "u", now_us, now_us + BUDGET_US, 17, np.arange(3), Behaviours.of([(1, 2, 3)]), version
        )
        return replace(request, **changes)

    def message(self, request: RankingRequest) -> tuple[RankingHeaders, Received]:
        reply = RankingHeaders(request.request_id, "g", RESULTS, 3, request.deadline_us)
        key = request.user_id.encode()
        place = partition_for(key, PARTITIONS)
        value = codec.encode(request)
        return reply, received(RANKING, value, key, reply.encode(), place, 7, self.clock.monotonic_us())

    def divert(self, request: RankingRequest, left_us: int = BUDGET_US, kept_tokens: int = 0) -> bool:
        reply, message = self.message(request)
        return self.diverter.divert(request, reply, message, self.clock.monotonic_us() + left_us, kept_tokens)

    @property
    def sent(self) -> list[Sent]:
        return [Sent(produced) for produced in self.producer.sent if produced.topic == OVERFLOW]

    @property
    def answers(self) -> list[RankingResult]:
        return [codec.decode(RankingResult, each.value) for each in self.producer.sent if each.topic == RESULTS]

    def count(self, outcome: str) -> float:
        return self.registry.get_sample_value("relaygr_worker_diverted_total", {"outcome": outcome}) or 0.0


@pytest.fixture
def world() -> World:
    return World()


def test_a_diverted_request_is_the_same_request_with_its_history(world: World) -> None:
    version = world.store.put("u", 40)
    request = world.request(version)
    assert world.divert(request)
    (sent,) = world.sent
    assert (sent.produced.partition, sent.produced.key) == (7, b"u")
    reply, _ = world.message(request)
    assert RankingHeaders.decode(sent.produced.headers) == replace(reply, diverted_by="worker-00")
    assert sent.request == replace(
        request,
        history_version=None,
        history=history_of("u", 40),
        diverted=Diverted("worker-00", 0, version),
    )


def test_an_older_version_is_diverted_as_it_was_asked_for(world: World) -> None:
    version = world.store.put("u", 30)
    world.store.put("u", 40, number=2)
    assert world.divert(world.request(version))
    (sent,) = world.sent
    assert sent.request.history is not None and len(sent.request.history.behaviours) == 30
    assert sent.request.diverted == Diverted("worker-00", 0, version)


def test_a_request_with_its_history_inline_keeps_it(world: World) -> None:
    history = history_of("u", 20)
    assert world.divert(world.request(history=history))
    assert world.sent[0].request.history == history


def test_a_user_without_a_history_is_diverted_with_an_empty_one(world: World) -> None:
    world.store.loading = True
    assert world.divert(world.request())
    request = world.sent[0].request
    assert request.history is not None and len(request.history.behaviours) == 0
    assert request.diverted == Diverted("worker-00", 0, None, history_loading=True)


def test_no_request_is_diverted_before_the_store_of_its_partition_is_open(world: World) -> None:
    """The other worker would rank it on nothing, though the history may be here."""
    world.store.loading = world.store.settling = True
    assert not world.divert(world.request())
    assert not world.sent
    world.store.put("u", 30)
    assert world.divert(world.request())


def test_a_history_with_a_gap_is_diverted_with_the_cause_and_its_result_says_it(world: World) -> None:
    history = history_of("u", 40)
    world.store.histories["u"] = StoredHistory(history, history.chain(), has_gap=True)
    assert world.divert(world.request(HistoryVersion(9, 41, bytes(16))))
    diverted = world.sent[0].request.diverted
    assert diverted == Diverted("worker-00", 0, history.version(), True, history_stale_cause=StaleCause.GAP)
    other = ExecutorWorld()
    work = other.rank("u", history=history, diverted=diverted)
    other.run()
    assert (work.prefix.stale, work.prefix.stale_cause) == (True, StaleCause.GAP)


def test_of_a_history_beyond_the_models_limit_the_same_window_is_attached_that_the_worker_would_use(
    world: World,
) -> None:
    longest, anchor = LIMITS.max_prefix_behaviours, LIMITS.max_prefix_behaviours // 4
    version = world.store.put("u", longest + 1)
    assert world.divert(world.request(version))
    request = world.sent[0].request
    assert request.history is not None and request.history.first_position == anchor
    assert request.history.behaviours == history_of("u", longest + 1).behaviours[anchor:]
    assert request.diverted == Diverted("worker-00", 0, version)


def test_of_a_history_larger_than_the_bound_the_newest_part_is_attached() -> None:
    world = World(divert_bytes=4_000)
    version = world.store.put("u", 300)
    assert world.divert(world.request(version))
    (sent,) = world.sent
    assert len(sent.produced.value) <= 4_000 and sent.request.history is not None
    kept = len(sent.request.history.behaviours)
    assert 60 <= kept < 200
    assert sent.request.history.behaviours == history_of("u", 300).behaviours[300 - kept :]
    assert sent.request.diverted == Diverted("worker-00", 300 - kept, version)


def test_the_offset_is_finished_on_the_delivery_report(world: World) -> None:
    """A process that dies before leaves the request to the next owner of its partition."""
    assert world.divert(world.request())
    assert not world.finished
    world.producer.report()
    assert len(world.finished) == 1 and not world.answers
    assert world.count("delivered") == 1


def test_a_request_that_cannot_be_delivered_is_answered_overloaded(world: World) -> None:
    assert world.divert(world.request())
    world.producer.report(KafkaError._MSG_TIMED_OUT)
    (answer,) = world.answers
    assert (answer.outcome, answer.reason) == (Ended.FAILED, Reason.OVERLOADED)
    assert not world.finished
    world.producer.report()
    assert len(world.finished) == 1
    assert world.count("undelivered") == 1


def test_a_request_that_the_producer_refuses_stays_with_the_caller(world: World) -> None:
    world.producer.raises = BufferError("full")
    assert not world.divert(world.request())
    assert not world.answers and world.count("undelivered") == 1


def test_a_request_that_carries_another_history_than_it_names_stays_with_the_caller(world: World) -> None:
    version = world.store.put("u", 20)
    other = replace(history_of("u", 20), features=np.arange(1))
    assert not world.divert(world.request(version, history=other))


@pytest.mark.parametrize(
    ("left_us", "kept_tokens", "status", "reason"),
    [
        (3_000, 0, {}, "no_time"),
        (BUDGET_US, 0, {"overflow_partitions": ()}, "no_peer"),
        (BUDGET_US, 0, {"model_revision": "other"}, "no_peer"),
    ],
)
def test_why_a_request_is_not_diverted_is_counted(
    world: World, left_us: int, kept_tokens: int, status: dict[str, object], reason: str
) -> None:
    world.hear(**status)
    assert not world.divert(world.request(world.store.put("u", 40)), left_us, kept_tokens)
    assert world.count(reason) == 1 and not world.producer.sent


# -- the executor ----------------------------------------------------------------------------------


class Divert:
    """In the place of a `Diverter`. Notes what it was asked."""

    def __init__(self, *, takes: bool) -> None:
        self.takes = takes
        self.asked: list[tuple[str, int]] = []
        self.short = 0

    def note_short(self) -> None:
        self.short += 1

    def divert(self, request, reply, received, answer_by_us, kept_tokens=0) -> bool:  # type: ignore[no-untyped-def]
        self.asked.append((request.request_id, kept_tokens))
        return self.takes


def overload(diverter: Divert, diverted: Diverted | None = None) -> ExecutorWorld:
    """The first of two requests takes all the time that the second one has."""
    world = ExecutorWorld(diverter=diverter)
    world.rank("a", world.store.put("a", 400), "first", budget_us=7_000)
    world.rank("b", None, "second", budget_us=6_500, history=history_of("b", 400), diverted=diverted)
    world.run()
    return world


def test_a_request_that_finds_no_time_is_diverted_and_gets_no_answer_here() -> None:
    diverter = Divert(takes=True)
    world = overload(diverter)
    assert [request_id for request_id, _ in diverter.asked] == ["second"]
    assert diverter.short == 1
    assert list(world.outbox.answered) == ["first"] and not world.outbox.failures
    assert world.executor.ranking_outstanding == 0 and world.executor.ranking_outstanding_bytes == 0
    assert world.executor.backlog.total_us == 0


def test_a_request_that_no_other_worker_takes_is_served_as_without_diverting() -> None:
    def ends(world: ExecutorWorld) -> list[str]:
        outbox = world.outbox
        return [f"{name} {work.path}" for name, (work, _) in outbox.answered.items()] + [
            f"{work.request.request_id} {reason}" for work, reason, _ in outbox.failures
        ]

    assert ends(overload(Divert(takes=False))) == ends(overload(None))  # type: ignore[arg-type]


def test_a_diverted_request_is_not_diverted_again() -> None:
    diverter = Divert(takes=True)
    world = overload(diverter, Diverted("worker-07"))
    assert not diverter.asked and diverter.short == 1
    assert world.outbox.answers == 2


def test_a_request_that_ends_in_time_is_never_offered_to_other_workers() -> None:
    diverter = Divert(takes=True)
    world = ExecutorWorld(diverter=diverter)
    world.rank("a", world.store.put("a", 400), "r1")
    world.run()
    world.rank("a", world.store.put("a", 400), "r2")
    world.run()
    assert world.outbox.paths == [Path.FULL, Path.HBM]
    assert not diverter.asked and not diverter.short


@pytest.mark.parametrize(("left_out", "goes_first"), [(0, False), (100, True)])
def test_a_diverted_request_is_ranked_on_the_history_that_it_brings_and_its_whole_prefix_is_kept(
    left_out: int, goes_first: bool
) -> None:
    """Where a history is cut depends on the request, so the next one rarely finds the prefix of a cut one."""
    version = HistoryVersion(9, 500, bytes(16))
    world = ExecutorWorld()
    diverted = Diverted("worker-07", left_out, version, True, True)
    work = world.rank("u", history=history_of("u", 400), diverted=diverted)
    world.run()
    assert world.outbox.paths == [Path.FULL]
    prefix = work.prefix
    assert prefix is not None and prefix.tokens == 400
    assert (prefix.version, prefix.stale, prefix.loading) == (version, True, True)
    assert prefix.for_one_impression is goes_first
    again = world.rank("u", request_id="r2", history=history_of("u", 400), diverted=Diverted("worker-07"))
    world.run()
    assert again.path is Path.HBM
    received = "relaygr_worker_diverted_received_total"
    assert world.registry.get_sample_value(received, {"outcome": "ranked"}) == 2


# -- the poll threads ------------------------------------------------------------------------------


class Sink(SimpleNamespace):
    """The executor, as the handlers use it: so busy that no request is answered in time."""

    def __init__(self, world: World, *, is_busy: bool) -> None:
        super().__init__(backlog=world.backlog, rankings=[], refused=[], work_arrived=SimpleNamespace(set=lambda: None))
        self.is_busy = is_busy
        if is_busy:
            world.backlog.total_us = 1.0

    def is_hopeless(self, *_: object) -> bool:
        return self.is_busy

    def note_no_time(self, user_id: str, request_id: str) -> None:
        self.refused.append((user_id, request_id))

    def take_ranking(self, work) -> bool:  # type: ignore[no-untyped-def]
        self.rankings.append(work)
        return True


def settings() -> HandlerSettings:
    return HandlerSettings(
        ranking_topic=RANKING, results_topic=RESULTS, partitions=PARTITIONS, max_clock_skew_ms=5, reply_margin_ms=2.0
    )


def handler_of(world: World, sink: Sink) -> WorkerHandler:
    return WorkerHandler(
        settings(), sink, world.results, FakeDeadLetters(), world.clock,  # type: ignore[arg-type]
        on_work=lambda: None, on_ownership=lambda _: None, on_tick=lambda _: None, diverter=world.diverter,
        results_partitions=lambda: None,
    )  # fmt: skip


def test_a_request_without_hope_is_diverted_by_the_poll_thread(world: World) -> None:
    sink = Sink(world, is_busy=True)
    version = world.store.put("u", 40)
    _, message = world.message(world.request(version))
    handler_of(world, sink).on_message(message)
    assert not world.answers and not sink.rankings
    assert world.sent[0].request.diverted == Diverted("worker-00", 0, version)
    # Its prefix is not needed here any more.
    assert sink.refused == [("u", "g.0.1")]


@pytest.mark.parametrize("value", ["undecodable", "misrouted", "diverted before"])
def test_a_request_without_hope_that_may_not_be_diverted_is_refused(world: World, value: str) -> None:
    request = world.request(diverted=Diverted("worker-07") if value == "diverted before" else None)
    _, message = world.message(request)
    message = replace(
        message,
        value=b"\x01\x80" if value == "undecodable" else message.value,
        partition=message.partition + (value == "misrouted"),
    )
    handler_of(world, Sink(world, is_busy=True)).on_message(message)
    assert not world.sent
    assert [answer.reason for answer in world.answers] == [Reason.OVERLOADED]


def test_without_a_peer_a_request_without_hope_is_not_even_decoded(world: World) -> None:
    world.hear(overflow_partitions=())
    _, message = world.message(world.request())
    handler_of(world, Sink(world, is_busy=True)).on_message(replace(message, value=b"no message"))
    assert [answer.reason for answer in world.answers] == [Reason.OVERLOADED]
    assert world.count("no_peer") == 1


def test_a_worker_that_is_short_of_time_takes_no_diverted_requests(world: World) -> None:
    assert world.diverter.takes_diverted()
    handler = handler_of(world, Sink(world, is_busy=True))
    for _ in range(SHORT_REQUESTS):
        handler.on_message(world.message(world.request())[1])
    assert not world.diverter.takes_diverted()


def test_a_wall_clock_that_is_set_back_does_not_prolong_that(world: World) -> None:
    for _ in range(SHORT_REQUESTS):
        world.diverter.note_short()
        assert world.diverter.may_divert()
    world.clock.set_back_us(3_600_000_000)
    assert not world.diverter.takes_diverted()
    world.clock.advance_us(CALM_US)
    assert world.diverter.takes_diverted()


def overflow_of(world: World, sink: Executor) -> tuple[OverflowHandler, set[int]]:
    others: set[int] = set()
    handler = OverflowHandler(
        settings(), sink, world.results, world.letters, world.clock,  # type: ignore[arg-type]
        WorkerMetrics(CollectorRegistry()),
        on_refused=world.diverter.note_short, on_user_partition=others.add, results_partitions=lambda: None,
    )  # fmt: skip
    return handler, others


def test_a_diverted_request_is_taken_on_any_partition(world: World) -> None:
    sink = Sink(world, is_busy=False)
    handler, others = overflow_of(world, sink)  # type: ignore[arg-type]
    request = world.request(history=history_of("u", 5), diverted=Diverted("worker-07"))
    reply, message = world.message(request)
    handler.on_message(replace(message, topic=OVERFLOW, partition=(message.partition + 1) % PARTITIONS))
    (work,) = sink.rankings
    assert work.request == request and work.reply == reply
    assert others == {message.partition}


def test_a_diverted_request_that_finds_no_time_is_refused_and_the_worker_is_short_of_time(world: World) -> None:
    sink = Sink(world, is_busy=True)
    handler, _ = overflow_of(world, sink)  # type: ignore[arg-type]
    for _ in range(SHORT_REQUESTS):
        request = world.request(history=history_of("u", 5), diverted=Diverted("worker-07"))
        handler.on_message(replace(world.message(request)[1], topic=OVERFLOW))
    assert not world.sent and not world.diverter.takes_diverted()
    assert {answer.reason for answer in world.answers} == {Reason.OVERLOADED}


@pytest.mark.parametrize(
    ("end", "outcome"), [("refused", Ended.FAILED), ("expired", Ended.EXPIRED), ("undecodable", Ended.FAILED)]
)
def test_a_diverted_request_that_is_answered_undecoded_names_the_first_worker(
    world: World, end: str, outcome: Ended
) -> None:
    handler, _ = overflow_of(world, Sink(world, is_busy=end == "refused"))  # type: ignore[arg-type]
    assert world.divert(world.request())
    (sent,) = world.sent
    value = b"no message" if end == "undecodable" else sent.produced.value
    message = received(OVERFLOW, value, b"u", sent.produced.headers, 7, 1, world.clock.monotonic_us())
    if end == "expired":
        world.clock.advance_us(2 * BUDGET_US)
    handler.on_message(message)
    world.letters.report()
    (answer,) = world.answers
    assert (answer.outcome, answer.diverted_by) == (outcome, "worker-00")


@pytest.mark.parametrize("changes", [{"diverted": None}, {"history": None}])
def test_a_request_on_the_overflow_topic_that_was_not_diverted_is_a_dead_letter(
    world: World, changes: dict[str, object]
) -> None:
    sink = Sink(world, is_busy=False)
    handler, _ = overflow_of(world, sink)  # type: ignore[arg-type]
    request = world.request(history=history_of("u", 5), diverted=Diverted("worker-07"))
    handler.on_message(replace(world.message(replace(request, **changes))[1], topic=OVERFLOW))
    assert not sink.rankings


# -- the result ------------------------------------------------------------------------------------


@pytest.mark.parametrize(("left_out", "path"), [(0, Path.FULL), (5, Path.TRUNCATED)])
def test_a_result_names_the_first_worker_and_says_if_the_history_was_cut(left_out: int, path: Path) -> None:
    executor = ExecutorWorld()
    work = executor.rank("u", history=history_of("u", 40), diverted=Diverted("worker-07", left_out))
    executor.run()
    world = World()
    _, scores = executor.outbox.answered["r"]
    world.results.ranked(work, SimpleNamespace(scores=scores))  # type: ignore[arg-type]
    (answer,) = [codec.decode(RankingResult, each.value) for each in world.producer.sent]
    assert (answer.diverted_by, answer.path) == ("worker-07", path)
