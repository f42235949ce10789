"""The result writer produces one result a request until it is delivered or nobody waits for it."""

from __future__ import annotations

import numpy as np
import pytest
import structlog
from confluent_kafka import KafkaError
from prometheus_client import CollectorRegistry

from relaygr.consumer.interface import Token
from relaygr.runtime.clock import ManualClock
from relaygr.schemas import codec
from relaygr.schemas.ended import Ended, Reason
from relaygr.schemas.headers import RankingHeaders
from relaygr.schemas.messages import (
    MAX_BUDGET_MS,
    Behaviours,
    HistoryVersion,
    Path,
    PrefixSource,
    RankingRequest,
    RankingResult,
    StaleCause,
)
from relaygr.worker.executor.work import JobOutcome, RankingWork, ResolvedPrefix, Unranked
from relaygr.worker.latest_answers import DeliveryTimes
from relaygr.worker.metrics import WorkerMetrics
from relaygr.worker.model.interface import RankOutputs
from relaygr.worker.results import RESEND_INTERVAL_US, RESEND_LATE_US, RESEND_NOWHERE_US, ResultWriter
from tests.workers.kafka_fakes import FakeProducer, received, refused

SKEW_US = 5_000
BUDGET_US = 50_000


class ResultsWorld:
    def __init__(self) -> None:
        self.clock = ManualClock(monotonic_us=1_000_000)
        self._producer = FakeProducer()
        self.finished: list[Token] = []
        self.registry = CollectorRegistry()
        self.writer = ResultWriter(
            self._producer, "worker-00", SKEW_US // 1000, self.finished.append,
            WorkerMetrics(self.registry), self.clock,
        )  # fmt: skip
        self.waits = self.writer.waits

    def unranked(self, end: Unranked) -> None:
        work = self.work()
        self.writer.unranked(work.reply, work.received, end, work)

    def work(self, tokens: int = 10, budget_us: int = BUDGET_US) -> RankingWork:
        wall_deadline_us = self.clock.wall_us() + budget_us
        request = RankingRequest("r", "u", 123, wall_deadline_us, 0, np.arange(4), Behaviours.empty())
        reply = RankingHeaders("r", "g", "relaygr.results", 2, wall_deadline_us)
        message = received("relaygr.ranking", b"", b"u", received_us=self.clock.monotonic_us())
        deadline_us = self.clock.monotonic_us() + budget_us
        work = RankingWork(request, reply, message, self.clock.wall_us(), deadline_us, deadline_us)
        work.prefix = ResolvedPrefix(
            key=None,  # type: ignore[arg-type]
            features=np.empty(0, "<i8"),
            behaviours=Behaviours.empty(),
            suffix=Behaviours.empty(),
            query_time_ms=0,
            tokens=tokens,
            scored_tokens=4,
            version=None,
            stale=False,
            loading=True,
            revision="model-1",
            deletions=0,
            for_one_impression=False,
        )
        return work

    def rank(self, scores=None, **fields) -> RankingWork:
        work = self.work(**fields)
        self.writer.ranked(work, RankOutputs(np.ones((4, 2), np.float32) if scores is None else scores))
        return work

    def tick(self, after_us: int = 0) -> None:
        self.clock.advance_us(after_us)
        self.writer.tick(self.clock.monotonic_us())

    @property
    def producer(self) -> FakeProducer:
        """With all results that were written."""
        self.writer.send()
        return self._producer

    @property
    def result(self) -> RankingResult:
        return codec.decode(RankingResult, self.producer.sent[-1].value)

    def count(self, name: str, **labels: str) -> float:
        return self.registry.get_sample_value(name, labels) or 0.0


@pytest.fixture
def world() -> ResultsWorld:
    return ResultsWorld()


def test_a_ranked_result_has_scores_path_and_timings(world: ResultsWorld):
    work = world.work()
    work.path, work.prefix_source, work.tokens_cached = Path.DRAM, PrefixSource.DRAM, 8
    world.clock.advance_us(700)
    work.looked_up_us = world.clock.monotonic_us()
    world.clock.advance_us(2_000)
    work.ready_us = work.started_us = world.clock.monotonic_us()
    work.reload_us, work.rank_us = 1_500, 300
    world.clock.advance_us(300)
    world.writer.ranked(work, RankOutputs(np.arange(8, dtype=np.float32).reshape(4, 2)))
    result = world.result
    assert result.outcome is Ended.RANKED
    assert (result.path, result.prefix_source) == (Path.DRAM, PrefixSource.DRAM)
    assert result.num_tasks == 2 and list(result.scores) == list(range(8))
    assert (result.prefix_tokens, result.tokens_cached) == (10, 8)
    assert (result.history_loading, result.request_sent_at_us, result.model_revision) == (True, 123, "model-1")
    timings = result.timings
    assert (timings.queue_us, timings.wait_us, timings.reload_us, timings.rank_us) == (2_700, 2_000, 1_500, 300)
    assert timings.total_us == 3_000


def test_inputs_that_the_model_does_not_know_are_in_the_result_and_counted(world: ResultsWorld):
    work = world.work()
    work.unknown_actions, work.prefix.unknown_features = 3, 2
    world.writer.ranked(work, RankOutputs(np.ones((4, 2), np.float32)))
    world.writer.count_ranked(work)
    result = world.result
    assert (result.unknown_actions, result.unknown_features, result.history_missing) == (3, 2, True)
    assert world.count("relaygr_worker_unknown_actions_total") == 3
    assert world.count("relaygr_worker_unknown_features_total") == 2
    assert world.count("relaygr_worker_history_missing_total") == 1


def test_a_stale_history_and_the_wait_for_it_are_in_the_result_and_no_time_in_the_queue(world: ResultsWorld):
    work = world.work()
    work.prefix.stale, work.prefix.stale_cause, work.history_wait_us = True, StaleCause.REPLACED, 1_700
    world.clock.advance_us(2_500)
    work.looked_up_us = work.ready_us = work.started_us = world.clock.monotonic_us()
    world.writer.ranked(work, RankOutputs(np.ones((4, 2), np.float32)))
    work.answered_us = world.clock.monotonic_us()
    world.writer.count_ranked(work)
    result = world.result
    assert (result.history_stale, result.history_stale_cause) == (True, StaleCause.REPLACED)
    timings = result.timings
    assert (timings.queue_us, timings.history_wait_us, timings.total_us) == (800, 1_700, 2_500)
    assert world.waits.p99_us() == 800
    assert world.count("relaygr_worker_ranking_queue_seconds_sum") == pytest.approx(0.0008)
    assert world.count("relaygr_worker_history_wait_seconds_sum") == pytest.approx(0.0017)
    counted = {
        cause.value: world.count("relaygr_worker_history_stale_total", cause=cause.value) for cause in StaleCause
    }
    assert counted == {"gap": 0, "deleted": 0, "behind": 0, "replaced": 1, "missing": 0}


@pytest.mark.parametrize(("queue_us", "history_us", "long_waits"), [(5_000, 0, 0), (5_001, 0, 1), (9_000, 5_000, 0)])
def test_a_wait_for_more_than_half_of_the_time_to_the_deadline_is_counted(
    world: ResultsWorld, queue_us: int, history_us: int, long_waits: int
):
    work = world.work()
    work.deadline_us = work.received.received_us + 10_000
    work.history_wait_us, work.started_us = history_us, work.received.received_us + queue_us
    world.clock.advance_us(9_500)
    world.writer.ranked(work, RankOutputs(np.ones((4, 2), np.float32)))
    work.answered_us = world.clock.monotonic_us()
    world.writer.count_ranked(work)
    assert world.count("relaygr_worker_long_waits_total") == long_waits


def test_a_result_without_unknown_inputs_takes_no_more_bytes(world: ResultsWorld):
    work = world.work()
    work.prefix.version = HistoryVersion(1, 10, bytes(16))
    world.writer.ranked(work, RankOutputs(np.ones((4, 2), np.float32)))
    world.writer.count_ranked(work)
    result = world.result
    assert (result.unknown_actions, result.unknown_features, result.history_missing) == (None, None, None)
    assert b"unknown_actions" not in world.producer.sent[-1].value
    assert not world.count("relaygr_worker_history_missing_total")


def test_a_ranked_request_is_counted_on_its_own(world: ResultsWorld):
    """The caller sends the result in between, so that counting does not delay it."""
    work = world.work()
    work.path, work.unknown_items, received_us = Path.DRAM, 3, world.clock.monotonic_us()
    work.started_us = received_us + 2_700
    world.clock.advance_us(3_000)
    assert world.writer.ranked(work, RankOutputs(np.ones((4, 2), np.float32)))
    assert not world.count("relaygr_worker_ranked_total", path="dram")
    work.answered_us = world.clock.monotonic_us()
    world.writer.count_ranked(work)
    assert world.count("relaygr_worker_ranked_total", path="dram") == 1
    assert world.count("relaygr_worker_ranking_seconds_sum", path="dram") == pytest.approx(0.003)
    assert world.count("relaygr_worker_ranking_queue_seconds_sum") == pytest.approx(0.0027)
    assert not world.count("relaygr_worker_long_waits_total")
    assert world.waits.p99_us() == 2_700


def test_time_to_compute_is_not_counted_as_time_to_wait(world: ResultsWorld):
    work = world.work()
    work.looked_up_us = world.clock.monotonic_us()
    world.clock.advance_us(2_000)
    work.ready_us, work.pre_infer_us = world.clock.monotonic_us(), 1_200
    world.writer.ranked(work, RankOutputs(np.ones((4, 2), np.float32)))
    assert (world.result.timings.wait_us, world.result.timings.pre_infer_us) == (800, 1_200)


def test_without_a_prefix_no_source_is_named(world: ResultsWorld):
    world.rank(tokens=0)
    assert world.result.prefix_source is None


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_scores_that_are_no_numbers_become_a_failure(world: ResultsWorld, value: float):
    scores = np.ones((4, 2), np.float32)
    scores[2, 1] = value
    assert not world.writer.ranked(world.work(), RankOutputs(scores))
    assert (world.result.outcome, world.result.reason) == (Ended.FAILED, Reason.DEVICE_ERROR)
    assert world.count("relaygr_worker_unranked_total", outcome="device_error") == 1


def test_the_offset_is_finished_when_the_answer_is_delivered_and_not_before(world: ResultsWorld):
    work = world.rank()
    world.tick()
    assert not world.finished
    world.producer.report()
    assert world.finished == [work.received.token]


def test_results_that_are_written_one_after_the_other_are_produced_together(world: ResultsWorld):
    """Each message that finds the producer's thread asleep wakes it, which takes ten times as long as the message."""
    works = [world.rank() for _ in range(3)]
    assert not world._producer.sent
    world.writer.send()
    assert len(world._producer.sent) == 3
    world.writer.send()
    world.producer.report()
    assert world.finished == [work.received.token for work in works]


@pytest.mark.parametrize("end", ["tick", "close"])
def test_no_result_stays_unsent(world: ResultsWorld, end: str):
    world.rank()
    world.tick() if end == "tick" else world.writer.close(0)
    assert len(world._producer.sent) == 1


def test_a_failed_delivery_is_tried_again_until_it_succeeds(world: ResultsWorld):
    work = world.rank()
    for _ in range(2):
        world.producer.report(KafkaError._MSG_TIMED_OUT)
        world.tick()
        assert not world.producer.pending, "not at once"
        world.tick(RESEND_INTERVAL_US)
        assert len(world.producer.pending) == 1
    world.producer.report()
    assert world.finished == [work.received.token]
    assert len({produced.value for produced in world.producer.sent}) == 1
    assert world.count("relaygr_worker_results_resent_total") == 2
    assert world.count("relaygr_worker_results_undelivered_total") == 0


def test_a_full_queue_is_a_failed_delivery(world: ResultsWorld):
    world.producer.raises = BufferError("queue full")
    work = world.rank()
    assert not world.producer.sent and not world.finished
    world.tick(RESEND_INTERVAL_US)
    world.producer.report()
    assert world.finished == [work.received.token]


def test_a_result_whose_partition_had_no_leader_at_the_deadline_is_delivered_late(world: ResultsWorld):
    """It was given up at the deadline, and its client counted the request as lost."""
    work = world.rank()
    world.producer.report(KafkaError._MSG_TIMED_OUT)
    world.tick(BUDGET_US + SKEW_US + 9_000_000)
    world.producer.report()
    assert world.finished == [work.received.token]
    assert world.count("relaygr_worker_results_undelivered_total") == 0


def test_a_result_that_no_client_waits_for_is_given_up_and_counted_and_the_offset_is_free(world: ResultsWorld):
    work = world.rank()
    world.clock.advance_us(BUDGET_US + SKEW_US + RESEND_LATE_US)
    world.producer.report(KafkaError._MSG_TIMED_OUT)
    world.tick()
    assert not world.finished, "the last moment is still in time"
    world.tick(1)
    assert world.finished == [work.received.token]
    assert world.count("relaygr_worker_results_undelivered_total") == 1
    world.tick(RESEND_INTERVAL_US)
    assert len(world.producer.sent) == 1


def test_a_deadline_years_away_does_not_hold_the_offset_for_years(world: ResultsWorld):
    work = world.rank(budget_us=2**50)
    world.producer.report(KafkaError._MSG_TIMED_OUT)
    world.tick(MAX_BUDGET_MS * 1000 + SKEW_US + RESEND_LATE_US + 1)
    assert world.finished == [work.received.token]
    assert world.count("relaygr_worker_results_undelivered_total") == 1


@pytest.mark.parametrize("code", [KafkaError._UNKNOWN_TOPIC, KafkaError._UNKNOWN_PARTITION])
@pytest.mark.parametrize("at_once", [True, False], ids=["produce raises", "the report says so"])
def test_a_reply_topic_that_stays_unknown_is_given_up_soon_but_not_at_once(
    world: ResultsWorld, code: int, at_once: bool
) -> None:
    """A broker that has just started does not know its topics yet."""

    def fails() -> None:
        if at_once:
            world.producer.raises = refused(code)

    fails()
    work = world.rank(budget_us=2**50)
    world.producer.report(code)
    fails()
    world.tick(RESEND_INTERVAL_US)
    world.producer.report(code)
    assert not world.finished
    world.tick(RESEND_NOWHERE_US)
    assert world.finished == [work.received.token]
    assert world.count("relaygr_worker_results_undelivered_total") == 1


@pytest.mark.parametrize(
    "code", [KafkaError.INVALID_TIMESTAMP, KafkaError.INVALID_RECORD, KafkaError.MSG_SIZE_TOO_LARGE]
)
@pytest.mark.parametrize("at_once", [True, False], ids=["produce raises", "the report says so"])
def test_a_result_that_kafka_would_refuse_again_is_given_up_at_once(
    world: ResultsWorld, code: int, at_once: bool
) -> None:
    for _ in range(3):
        if at_once:
            world.producer.raises = refused(code)
        work = world.rank()
        world.producer.report(code)
        assert world.finished[-1] == work.received.token
    world.tick(RESEND_INTERVAL_US)
    assert not world.producer.pending
    assert world.count("relaygr_worker_results_undelivered_total") == 3


def test_a_result_that_is_not_delivered_is_in_the_log_with_its_cause_and_of_many_a_few(world: ResultsWorld) -> None:
    with structlog.testing.capture_logs() as lines:
        for code in (*[KafkaError.MSG_SIZE_TOO_LARGE] * 70, KafkaError.INVALID_TIMESTAMP):
            world.rank()
            world.producer.report(code)
    assert [line["event"] for line in lines] == ["a result was not delivered"] * 2
    assert [(line["gateway_id"], line["reply_partition"]) for line in lines] == [("g", 2)] * 2
    assert "max.message.bytes" in lines[0]["cause"] and "set the clocks" in lines[1]["cause"]


def test_many_undelivered_answers_are_each_tried_once_a_tick(world: ResultsWorld):
    for _ in range(100):
        world.rank()
    world.producer.report(KafkaError._ALL_BROKERS_DOWN)
    world.tick(RESEND_INTERVAL_US)
    assert len(world.producer.pending) == 100
    world.producer.report()
    assert len(world.finished) == 100


@pytest.mark.parametrize(
    ("detail", "said"),
    [("a\nb\x00c", "a b c"), ("", None), ("ü" * 600, "ü" * 250), ("\ud800", " ")],
)
def test_details_are_made_to_fit_their_field(world: ResultsWorld, detail: str, said: str | None):
    world.unranked(Unranked(Ended.FAILED, Reason.OVERLOADED, detail))
    assert world.result.detail == said
    assert world.result.reason is Reason.OVERLOADED
    work = world.work()
    world.writer.unranked(work.reply, work.received, Unranked(Ended.FAILED, Reason.UNDECODABLE, detail))
    assert (world.result.detail, world.result.reason) == (said, Reason.UNDECODABLE)


def test_expired_work_gets_a_result_and_is_counted(world: ResultsWorld):
    world.unranked(Unranked(Ended.EXPIRED))
    assert (world.result.outcome, world.result.reason) == (Ended.EXPIRED, None)
    assert world.count("relaygr_worker_unranked_total", outcome="expired") == 1


def test_a_job_is_counted_by_its_outcome_and_its_offset_finished(world: ResultsWorld):
    message = received("relaygr.preinfer", b"", b"u")
    world.writer.job_done(message, JobOutcome.NO_ROOM)
    assert world.finished == [message.token]
    assert world.count("relaygr_worker_preinfer_jobs_total", outcome="no_room") == 1


def test_the_median_delivery_time_follows_a_slow_broker_and_ignores_a_single_stall():
    times, now_us, tick_us = DeliveryTimes(), 0, 5_000

    def deliver(count: int, took_us: int) -> None:
        nonlocal now_us
        for _ in range(count):
            now_us += tick_us
            times.delivered(now_us - took_us, now_us)
            times.update(now_us)

    deliver(64, took_us=1_000)
    deliver(20, took_us=400_000)
    assert times.median_us == 0, "a report is noticed at most one tick late"
    deliver(30, took_us=400_000)
    assert times.median_us == 400_000 - tick_us
    deliver(33, took_us=2_000)
    assert times.median_us == 0, "only the latest 64 deliveries count"
    times.delivered(now_us, now_us)
    times.update(now_us + 3_000_000)
    assert times.median_us == 0, "the past says nothing about the present"
