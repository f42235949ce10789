"""The handler turns each message into work, a result, or a dead letter."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field, replace

import numpy as np
import pytest
import structlog
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry

from relaygr.consumer.interface import Received, Token
from relaygr.runtime.clock import ManualClock
from relaygr.schemas import codec
from relaygr.schemas.ended import Ended, Reason
from relaygr.schemas.headers import JOB_HEADER, RankingHeaders
from relaygr.schemas.messages import (
    MAX_BUDGET_MS,
    Behaviours,
    Path,
    PreInferJob,
    RankingRequest,
    RankingResult,
    StageTimings,
)
from relaygr.schemas.partitioner import partition_for
from relaygr.worker.executor.backlog import Backlog
from relaygr.worker.executor.work import JobWork, RankingWork
from relaygr.worker.handler import HandlerSettings, WorkerHandler
from relaygr.worker.metrics import WorkerMetrics
from relaygr.worker.results import ResultWriter
from tests.workers.kafka_fakes import FakeDeadLetters, FakeProducer, received

PARTITIONS = 12
SKEW_US = 5_000
REPLY_MARGIN_MS = 2.0
PREINFER, RANKING, RESULTS = "relaygr.preinfer", "relaygr.ranking", "relaygr.results"


@dataclass
class Sink:
    """The executor, as the handler uses it."""

    rankings: list[RankingWork] = field(default_factory=list)
    jobs: list[JobWork] = field(default_factory=list)
    backlog: Backlog = field(default_factory=Backlog)
    refused: list[tuple[str, str]] = field(default_factory=list)
    work_arrived: threading.Event = field(default_factory=threading.Event)

    def is_hopeless(self, user_id: str, request_id: str, must_end_us: int, now_us: int, sent_us: int) -> bool:
        return self.backlog.is_hopeless(must_end_us, now_us, sent_us)

    def note_no_time(self, user_id: str, request_id: str) -> None:
        self.refused.append((user_id, request_id))

    has_room: bool = True

    def take_ranking(self, work: RankingWork) -> bool:
        if self.has_room:
            self.rankings.append(work)
        return self.has_room

    def take_job(self, work: JobWork) -> bool:
        if self.has_room:
            self.jobs.append(work)
        return self.has_room


class HandlerWorld:
    def __init__(
        self, has_one_topic: bool = False, scenarios: tuple[str, ...] = ("default",), grace_ms: float = 0.0
    ) -> None:
        self.clock = ManualClock(monotonic_us=5_000_000)
        self.sink = Sink()
        self._producer = FakeProducer()
        self.letters = FakeDeadLetters()
        self.finished: list[Token] = []
        self.owned: list[frozenset[int]] = []
        self.results_partitions: int | None = 16
        self.registry = CollectorRegistry()
        self.writer = ResultWriter(
            self._producer,
            "worker-00",
            SKEW_US // 1000,
            self.finished.append,
            WorkerMetrics(self.registry, scenarios),
            self.clock,
        )
        self.handler = WorkerHandler(
            HandlerSettings(
                ranking_topic=RANKING,
                results_topic=RESULTS,
                partitions=PARTITIONS,
                max_clock_skew_ms=SKEW_US // 1000,
                reply_margin_ms=REPLY_MARGIN_MS,
                grace_ms=grace_ms,
                has_one_topic=has_one_topic,
                scenarios=scenarios,
            ),
            self.sink,
            self.writer,
            self.letters,
            self.clock,
            on_work=lambda: False,
            on_ownership=self.owned.append,
            on_tick=lambda now_us: None,
            results_partitions=lambda: self.results_partitions,
        )

    def headers(self, **changes) -> RankingHeaders:
        values = {
            "request_id": "g.0.1",
            "gateway_id": "g",
            "reply_topic": "relaygr.results",
            "reply_partition": 3,
            "deadline_us": self.clock.wall_us() + 50_000,
        }
        return RankingHeaders(**(values | changes))

    def request(self, headers: RankingHeaders, user_id: str = "u") -> RankingRequest:
        return RankingRequest(
            headers.request_id, user_id, self.clock.wall_us(), headers.deadline_us, 0, np.arange(3),
            Behaviours.empty(),
        )  # fmt: skip

    def job(self, user_id: str = "u", lead_us: int = 100_000) -> PreInferJob:
        wall_us = self.clock.wall_us()
        return PreInferJob("g.0.1", user_id, wall_us, wall_us + lead_us, 50, 3, 0, wall_us)

    def send(
        self, topic: str, value: bytes | None, user_id="u", headers=(), partition=None, key=..., age_us: int | None = 0
    ) -> Received:
        place = partition_for(user_id.encode(), PARTITIONS) if partition is None else partition
        message = received(
            topic, value, user_id.encode() if key is ... else key, headers, place, 7, self.clock.monotonic_us(),
            None if age_us is None else (self.clock.wall_us() - age_us) // 1000,
        )  # fmt: skip
        self.handler.on_message(message)
        return message

    def rank(self, headers: RankingHeaders | None = None, user_id="u", **fields) -> Received:
        headers = headers or self.headers()
        value = codec.encode(self.request(headers, user_id))
        return self.send(RANKING, value, user_id, headers.encode(), **fields)

    @property
    def producer(self) -> FakeProducer:
        """With all results that were written."""
        self.writer.send()
        return self._producer

    @property
    def results(self) -> list[RankingResult]:
        return [codec.decode(RankingResult, produced.value) for produced in self.producer.sent]

    def count(self, name: str, **labels: str) -> float:
        return self.registry.get_sample_value(name, labels) or 0.0


@pytest.fixture
def world() -> HandlerWorld:
    return HandlerWorld()


def test_a_request_becomes_work_with_its_deadline_on_our_monotonic_clock(world: HandlerWorld):
    message = world.rank(world.headers(deadline_us=world.clock.wall_us() + 40_000))
    (work,) = world.sink.rankings
    assert work.deadline_us == world.clock.monotonic_us() + 40_000
    assert work.answer_by_us == work.deadline_us - REPLY_MARGIN_MS * 1000
    assert work.received is message
    assert not world.producer.sent and not world.finished and not world.letters.written


def test_on_one_topic_a_header_tells_jobs_from_requests():
    world = HandlerWorld(has_one_topic=True)
    world.send(RANKING, codec.encode(world.job()), headers=[JOB_HEADER])
    world.rank()
    assert (len(world.sink.jobs), len(world.sink.rankings)) == (1, 1)
    world.send(RANKING, codec.encode(world.job()), headers=[("kind", b"something new")])
    assert [reason for _, reason, _ in world.letters.written] == ["invalid_field"], "neither a job nor a request"


def test_with_two_topics_the_topic_alone_tells_jobs_from_requests(world: HandlerWorld):
    world.send(PREINFER, codec.encode(world.job()))
    world.send(RANKING, codec.encode(world.request(world.headers())), headers=[*world.headers().encode(), JOB_HEADER])
    assert (len(world.sink.jobs), len(world.sink.rankings)) == (1, 1)


def test_an_answer_is_due_earlier_while_results_take_long_to_reach_the_broker(world: HandlerWorld):
    for _ in range(40):
        world.rank(world.headers(deadline_us=1))
        world.clock.advance_us(20_000)
        world.handler.on_tick(world.clock.monotonic_us())
        world.producer.report()
    world.handler.on_tick(world.clock.monotonic_us())
    world.rank(world.headers(deadline_us=world.clock.wall_us() + 100_000))
    (work,) = world.sink.rankings
    assert work.answer_by_us == work.deadline_us - 20_000


@pytest.mark.parametrize(("ahead_us", "is_work"), [(60_005_000, True), (60_005_001, False), (2**62, False)])
def test_a_deadline_may_lie_only_so_far_ahead(world: HandlerWorld, ahead_us: int, is_work: bool):
    world.rank(world.headers(deadline_us=world.clock.wall_us() + ahead_us))
    assert bool(world.sink.rankings) is is_work
    reasons = [result.reason for result in world.results]
    assert reasons == ([] if is_work else [Reason.INVALID_DEADLINE])


@pytest.mark.parametrize(("in_unit", "unit"), [(1_700_000_000, "seconds"), (1_700_000_000_123, "milliseconds")])
def test_a_deadline_in_another_unit_is_no_expired_request(world: HandlerWorld, in_unit: int, unit: str):
    world.clock.advance_us(10**16)
    headers = world.headers(deadline_us=in_unit)
    world.send(RANKING, b"", headers=headers.encode())
    (result,) = world.results
    assert (result.outcome, result.reason) == (Ended.FAILED, Reason.INVALID_DEADLINE)
    assert f"{in_unit} is a time in {unit}: give it in microseconds" in str(result.detail)


def test_a_gateway_whose_clock_is_an_hour_ahead_is_told_the_offset(world: HandlerWorld):
    hour_us = 3_600_000_000
    headers = world.headers(deadline_us=world.clock.wall_us() + hour_us + 50_000)
    request = replace(world.request(headers), sent_at_us=world.clock.wall_us() + hour_us - 1_000)
    world.send(RANKING, codec.encode(request), headers=headers.encode())
    (result,) = world.results
    assert (result.outcome, result.reason) == (Ended.FAILED, Reason.INVALID_DEADLINE)
    assert result.detail and "3600.1 s ahead" in result.detail and "-3599.999 s" in result.detail
    assert not world.sink.rankings
    world.producer.report()
    assert len(world.finished) == 1


def test_a_request_for_which_there_is_no_memory_is_answered_overloaded_at_once(world: HandlerWorld):
    world.sink.has_room = False
    world.rank()
    (result,) = world.results
    assert (result.outcome, result.reason) == (Ended.FAILED, Reason.OVERLOADED)
    assert result.detail and "worker.ranking_queue_bytes" in result.detail


def test_a_job_for_which_there_is_no_memory_is_shed(world: HandlerWorld):
    world.sink.has_room = False
    world.send(PREINFER, codec.encode(world.job()))
    assert world.count("relaygr_worker_preinfer_jobs_total", outcome="shed") == 1
    assert len(world.finished) == 1


def test_a_job_years_away_is_taken_for_one_of_the_longest_budget(world: HandlerWorld):
    world.send(PREINFER, codec.encode(world.job(lead_us=2**55)))
    (work,) = world.sink.jobs
    assert work.expires_us == world.clock.monotonic_us() + MAX_BUDGET_MS * 1000


@pytest.mark.parametrize(("late_us", "is_work"), [(SKEW_US, True), (SKEW_US + 1, False)])
def test_a_request_counts_as_expired_only_past_the_skew(world: HandlerWorld, late_us: int, is_work: bool):
    world.rank(world.headers(deadline_us=world.clock.wall_us() - late_us))
    assert bool(world.sink.rankings) is is_work
    assert [result.outcome for result in world.results] == ([] if is_work else [Ended.EXPIRED])


@pytest.mark.parametrize(("late_us", "is_work"), [(30_000 + SKEW_US, True), (30_000 + SKEW_US + 1, False)])
def test_a_time_of_grace_makes_all_deadlines_later(late_us: int, is_work: bool):
    world = HandlerWorld(grace_ms=30.0)
    world.rank(world.headers(deadline_us=world.clock.wall_us() - late_us))
    works = [(work.deadline_us, work.answer_by_us) for work in world.sink.rankings]
    due_us = world.clock.monotonic_us() - late_us + 30_000
    assert works == ([(due_us, due_us - int(REPLY_MARGIN_MS * 1000))] if is_work else [])
    assert [result.outcome for result in world.results] == ([] if is_work else [Ended.EXPIRED])


def test_with_time_of_grace_a_request_behind_a_long_backlog_is_not_refused():
    world = HandlerWorld(grace_ms=30.0)
    world.sink.backlog.measured.expected_us, world.sink.backlog.handed_over = 1_000.0, 60
    world.rank(world.headers(deadline_us=world.clock.wall_us() + 50_000))
    assert len(world.sink.rankings) == 1 and not world.results


def test_an_expired_request_is_answered_without_its_body_being_read(world: HandlerWorld):
    headers = world.headers(deadline_us=world.clock.wall_us() - 1_000_000)
    world.send(RANKING, b"not a message", headers=headers.encode())
    (result,) = world.results
    assert (result.outcome, result.request_id) == (Ended.EXPIRED, headers.request_id)
    assert not world.letters.written
    assert not world.finished
    world.producer.report()
    assert len(world.finished) == 1


def test_a_request_behind_a_long_backlog_is_refused_without_its_body_being_read(world: HandlerWorld):
    world.sink.backlog.measured.expected_us, world.sink.backlog.handed_over = 1_000.0, 60
    headers = world.headers(deadline_us=world.clock.wall_us() + 50_000)
    world.send(RANKING, b"not a message", headers=headers.encode())
    (result,) = world.results
    assert (result.outcome, result.reason) == (Ended.FAILED, Reason.OVERLOADED)
    assert world.sink.refused == [("u", headers.request_id)]
    assert not world.sink.rankings
    world.rank(world.headers(request_id="g.0.2", deadline_us=world.clock.wall_us() + 100_000))
    assert len(world.sink.rankings) == 1


@pytest.mark.parametrize(("late_us", "reason"), [(1_000_000, None), (-50_000, Reason.OVERLOADED)])
def test_a_request_that_is_refused_by_its_headers_is_told_the_backlog_and_has_no_stages(
    world: HandlerWorld, late_us: int, reason: Reason | None
):
    world.sink.backlog.measured.expected_us, world.sink.backlog.handed_over = 1_000.0, 60
    world.sink.backlog.total_us = 900.0
    headers = world.headers(deadline_us=world.clock.wall_us() - late_us, diverted_by="worker-01")
    world.send(RANKING, b"not a message", headers=headers.encode())
    (result,) = world.results
    assert (result.reason, result.timings, result.diverted_by) == (reason, StageTimings(), "worker-01")
    assert result.backlog_us == world.sink.backlog.predicted_us > 0
    assert world.sink.refused == [("u", headers.request_id)]


def test_a_request_that_is_refused_by_its_content_is_not_one_of_overload(world: HandlerWorld):
    world.sink.backlog.measured.expected_us, world.sink.backlog.handed_over = 1_000.0, 1
    world.rank(world.headers(deadline_us=world.clock.wall_us() + 2**62))
    (result,) = world.results
    assert (result.reason, result.backlog_us) == (Reason.INVALID_DEADLINE, None)
    assert not world.sink.refused


def test_above_capacity_messages_that_waited_on_their_way_are_refused_so_that_newer_ones_are_served(
    world: HandlerWorld,
):
    left = world.headers(deadline_us=world.clock.wall_us() + 40_000)
    world.rank(left, age_us=60_000)
    assert len(world.sink.rankings) == 1, "nothing is refused yet"
    for _ in range(20):
        world.sink.backlog.measured.refused()
    world.send(RANKING, b"not a message", headers=left.encode(), age_us=60_000)
    assert [result.reason for result in world.results] == [Reason.OVERLOADED]
    world.rank(left, age_us=10_000)
    assert len(world.sink.rankings) == 2
    world.rank(left, age_us=None)
    assert len(world.sink.rankings) == 3, "without a time stamp"
    world.rank(left, age_us=world.clock.wall_us())
    assert len(world.sink.rankings) == 4, "with the time stamp 0"
    for _ in range(100):
        world.sink.backlog.measured.observe(Path.HBM, 0, 0, in_time=True)
    world.rank(left, age_us=60_000)
    assert len(world.sink.rankings) == 5, "the worker keeps up again"


def test_an_answer_goes_to_the_partition_that_the_headers_name_under_its_id(world: HandlerWorld):
    world.rank(world.headers(deadline_us=1))
    (produced,) = world.producer.sent
    assert (produced.topic, produced.partition, produced.key) == ("relaygr.results", 3, b"g.0.1")
    assert dict(produced.headers) == {"request_id": b"g.0.1", "gateway_id": b"g"}


def test_a_request_without_reply_headers_is_a_dead_letter(world: HandlerWorld):
    message = world.send(RANKING, codec.encode(world.request(world.headers())))
    ((raw, reason, detail),) = world.letters.written
    assert raw == message.message
    assert reason == "invalid_field" and "no reply address" in detail
    assert not world.finished and not world.producer.sent
    world.letters.report()
    assert world.finished == [message.token]


@pytest.mark.parametrize(
    "topic", ["other.results", "relaygrx.results", "results", "relaygr", "relaygr.history", RANKING]
)
def test_answers_go_to_the_results_topic_only(world: HandlerWorld, topic: str):
    world.rank(world.headers(reply_topic=topic))
    assert len(world.letters.written) == 1
    assert not world.producer.sent and not world.sink.rankings


@pytest.mark.parametrize(
    ("known", "partition", "is_taken"), [(16, 15, True), (16, 16, False), (5, 70_000, False), (None, 70_000, True)]
)
def test_a_partition_that_the_results_do_not_have_makes_a_dead_letter_and_no_work(
    world: HandlerWorld, known: int | None, partition: int, is_taken: bool
) -> None:
    """It was ranked, and its result went nowhere without a word."""
    world.results_partitions = known
    world.rank(world.headers(reply_partition=partition))
    assert bool(world.sink.rankings) == is_taken
    details = [detail for _, _, detail in world.letters.written]
    found = f"header reply_partition is {partition}, and {RESULTS} has the partitions 0 to {(known or 1) - 1}"
    assert details == ([] if is_taken else [f"no reply address: {found}"])
    assert not world.producer.sent


def test_of_many_requests_without_a_reply_address_few_are_logged(world: HandlerWorld) -> None:
    with structlog.testing.capture_logs() as lines:
        for partition in range(16, 100):
            world.rank(world.headers(reply_partition=partition))
        world.send(RANKING, b"")
    assert len(world.letters.written) == 85
    [line] = [line for line in lines if "no reply address" in line["event"]]
    assert (line["topic"], "reply_partition is 16" in line["detail"]) == (RANKING, True)


@pytest.mark.parametrize("value", [None, b"", b"\x01", b"\x63abc", b"\xff" * 20])
def test_an_undecodable_request_is_a_dead_letter_and_then_answered(world: HandlerWorld, value: bytes | None):
    message = world.send(RANKING, value, headers=world.headers().encode())
    assert len(world.letters.written) == 1
    assert not world.producer.sent, "first the letter is safe"
    world.letters.report()
    (result,) = world.results
    assert (result.outcome, result.reason) == (Ended.FAILED, Reason.UNDECODABLE)
    assert result.detail
    assert not world.finished
    world.producer.report()
    assert world.finished == [message.token]


@pytest.mark.parametrize("change", [{"request_id": "g.0.2"}, {"deadline_us": 2**60}])
def test_headers_that_disagree_with_the_body_are_undecodable(world: HandlerWorld, change: dict[str, object]):
    value = codec.encode(world.request(world.headers()))
    world.send(RANKING, value, headers=world.headers(**change).encode())
    world.letters.report()
    assert [result.reason for result in world.results] == [Reason.UNDECODABLE]


def test_a_dead_letter_that_was_not_delivered_is_written_again_a_second_later(world: HandlerWorld):
    message = world.send(PREINFER, b"garbage")
    for _ in range(3):
        world.letters.report(False)
        world.handler.on_tick(world.clock.monotonic_us())
        world.clock.advance_us(1_000_000)
        world.handler.on_tick(world.clock.monotonic_us())
    assert 3 <= len(world.letters.written) <= 5
    assert not world.finished
    world.letters.report(True)
    assert world.finished == [message.token]


@pytest.mark.parametrize("fields", [{"partition": 0}, {"key": b"someone-else"}, {"key": None}])
def test_the_result_of_a_misrouted_request_names_its_partition(world: HandlerWorld, fields: dict[str, object]):
    user = next(user for user in map(str, range(100)) if partition_for(user.encode(), PARTITIONS) != 0)
    message = world.rank(user_id=user, **fields)
    (result,) = world.results
    assert result.reason is Reason.WRONG_PARTITIONER
    assert str(partition_for(user.encode(), PARTITIONS)) in result.detail and "murmur2" in result.detail
    world.producer.report()
    assert world.finished == [message.token]
    assert not world.sink.rankings


def test_a_misrouted_job_is_dropped_and_counted(world: HandlerWorld):
    message = world.send(PREINFER, codec.encode(world.job()), key=b"someone-else")
    assert world.finished == [message.token]
    assert world.count("relaygr_worker_preinfer_jobs_total", outcome="misrouted") == 1
    assert not world.sink.jobs


def test_a_job_becomes_work_and_an_expired_one_does_not(world: HandlerWorld):
    job = world.job()
    world.send(PREINFER, codec.encode(job))
    (work,) = world.sink.jobs
    assert work.expires_us - work.expected_ranking_us == 50_000
    world.clock.advance_us(150_000 + SKEW_US + 1)
    message = world.send(PREINFER, codec.encode(job))
    assert world.finished == [message.token]
    assert world.count("relaygr_worker_preinfer_jobs_total", outcome="expired") == 1
    assert len(world.sink.jobs) == 1


def test_an_undecodable_job_is_a_dead_letter_and_counted(world: HandlerWorld):
    message = world.send(PREINFER, b"\x02")
    ((_, reason, _),) = world.letters.written
    assert reason
    assert world.count("relaygr_worker_preinfer_jobs_total", outcome="undecodable") == 1
    world.letters.report()
    assert world.finished == [message.token]


def test_a_new_assignment_is_reported_and_a_revocation_changes_nothing(world: HandlerWorld):
    world.handler.on_assigned(frozenset({1, 2}), 1)
    world.handler.on_revoked(frozenset({1, 2}))
    world.handler.on_lost(frozenset({1}))
    assert world.owned == [frozenset({1, 2})]


@given(
    topic=st.sampled_from([RANKING, PREINFER]),
    value=st.none() | st.binary(max_size=200),
    key=st.none() | st.binary(max_size=20),
    headers=st.lists(
        st.tuples(
            st.sampled_from(["request_id", "gateway_id", "reply_topic", "reply_partition", "deadline_us", "x"]),
            st.sampled_from([b"relaygr.results", b"3", b"9" * 19, b"\xff", b"", b"-1"]) | st.binary(max_size=30),
        ),
        max_size=7,
    ),
)
def test_no_message_raises_and_each_ends_once(topic, value, key, headers):
    world = HandlerWorld()
    message = received(topic, value, key, headers)
    world.handler.on_message(message)
    world.letters.report()
    world.producer.report()
    ends = len(world.finished) + len(world.sink.rankings) + len(world.sink.jobs)
    assert ends == 1


@pytest.mark.parametrize("scenario", [None, "default", "home"])
def test_a_request_and_a_job_of_a_known_scenario_become_work(scenario: str | None):
    world = HandlerWorld(scenarios=("default", "home"))
    headers = world.headers()
    request = replace(world.request(headers), scenario=scenario)
    world.send(RANKING, codec.encode(request), headers=headers.encode())
    world.send(PREINFER, codec.encode(replace(world.job(), scenario=scenario)))
    assert [work.request.scenario for work in world.sink.rankings] == [scenario]
    assert [work.job.scenario for work in world.sink.jobs] == [scenario]


@pytest.mark.parametrize(
    ("served", "scenario"),
    [(("default",), "home"), (("ads",), None), (("ads",), "default"), (("default", "home"), "ads")],
)
def test_a_request_of_a_scenario_that_the_worker_does_not_serve_fails(served: tuple[str, ...], scenario: str | None):
    world = HandlerWorld(scenarios=served)
    headers = world.headers()
    world.send(RANKING, codec.encode(replace(world.request(headers), scenario=scenario)), headers=headers.encode())
    (result,) = world.results
    assert (result.outcome, result.reason) == (Ended.FAILED, Reason.UNKNOWN_SCENARIO)
    assert result.detail and repr(scenario or "default") in result.detail
    assert not world.sink.rankings
    world.producer.report()
    assert len(world.finished) == 1


def test_a_job_of_an_unknown_scenario_is_dropped_and_counted(world: HandlerWorld):
    world.send(PREINFER, codec.encode(replace(world.job(), scenario="home")))
    assert not world.sink.jobs
    assert world.count("relaygr_worker_preinfer_jobs_total", outcome="unknown_scenario") == 1
    assert len(world.finished) == 1


def test_no_label_names_a_scenario_that_the_settings_do_not_have(world: HandlerWorld):
    headers = world.headers()
    world.send(RANKING, codec.encode(replace(world.request(headers), scenario="x")), headers=headers.encode())
    labels = {
        sample.labels["scenario"]
        for metric in world.registry.collect()
        for sample in metric.samples
        if "scenario" in sample.labels
    }
    assert labels == {"default"}


def test_refusals_of_a_poll_are_produced_when_all_its_messages_were_read(world: HandlerWorld):
    for number in range(3):
        world.rank(world.headers(request_id=f"g.0.{number}", deadline_us=world.clock.wall_us() - SKEW_US - 1))
    assert not world._producer.sent
    world.handler.on_batch()
    assert len(world._producer.sent) == 3


def test_an_answer_to_a_request_in_dead_letters_is_produced_in_the_tick_that_hears_of_its_delivery(world: HandlerWorld):
    world.send(RANKING, b"not msgpack", headers=world.headers().encode())
    world.letters.report()
    world.handler.on_tick(world.clock.monotonic_us())
    assert len(world._producer.sent) == 1


def test_a_rebalance_leaves_the_work_to_the_device_thread(world: HandlerWorld):
    """The poll thread, which had kept short work for its next turn, may wait for seconds in a rebalance."""
    world.handler.on_rebalance()
    assert world.sink.work_arrived.is_set()
