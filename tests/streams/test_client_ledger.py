"""The ledger of requests: the outcomes of callers, the counters, and the arguments of callbacks."""

from __future__ import annotations

import sys
from concurrent.futures import Future
from dataclasses import replace

import numpy as np
import pytest
import structlog
from prometheus_client import CollectorRegistry

from relaygr.client import publisher
from relaygr.client.ledger import MOST_WORKERS, Ledger, WorkerBacklogs
from relaygr.client.metrics import GatewayMetrics
from relaygr.client.outcome import LostRequest, QueueFull, RankOutcome
from relaygr.client.pending import AnswerMatch, PendingRequest
from relaygr.client.settings import ClientSettings
from relaygr.kafka.client_errors import LOG_INTERVAL_US, LimitedLog
from relaygr.runtime.clock import ManualClock
from relaygr.schemas.ended import Ended, Reason
from relaygr.schemas.fields import Other
from relaygr.schemas.messages import Behaviours, Path, RankingRequest, RankingResult, StageTimings

MS = 1000


class Gateway:
    """A ledger with a manual clock, and lists of the arguments of its callbacks."""

    def __init__(self, **settings: object) -> None:
        self.clock = ManualClock()
        self.registry = CollectorRegistry()
        self.late: list[RankOutcome] = []
        self.lost: list[LostRequest] = []
        self.metrics = GatewayMetrics(self.registry)
        self.ledger = Ledger(
            ClientSettings.model_validate(settings),
            self.clock,
            self.metrics,
            self.late.append,
            self.lost.append,
        )

    def request(self, request_id: str = "gw.1.1", budget_ms: int = 50) -> RankingRequest:
        now_us = self.clock.wall_us()
        return RankingRequest(
            request_id, "user", now_us, now_us + budget_ms * MS, 0, np.array([1, 2]), Behaviours.empty()
        )

    def open(self, request_id: str = "gw.1.1", budget_ms: int = 50) -> PendingRequest:
        return self.ledger.open(self.request(request_id, budget_ms))

    def wait_ms(self, duration_ms: float) -> list[PendingRequest]:
        self.clock.advance_us(round(duration_ms * MS))
        return self.ledger.fire()

    def result(self, outcome: Ended = Ended.RANKED, request_id: str = "gw.1.1", offset_us: int = 0) -> RankingResult:
        """A result of a worker whose clock is `offset_us` ahead. The worker itself took no time."""
        now_us = self.clock.wall_us() + offset_us
        ranked = outcome is Ended.RANKED
        return RankingResult(
            request_id,
            "w-0",
            outcome,
            ManualClock().wall_us(),
            now_us,
            now_us,
            StageTimings(),
            reason=Reason.OVERLOADED if outcome is Ended.FAILED else None,
            path=Path.HBM if ranked else None,
            scores=np.zeros(2, "<f4") if ranked else None,
            num_tasks=1 if ranked else 0,
            model_revision="r" if ranked else None,
        )

    def sample(self, name: str, **labels: str) -> float | None:
        return self.registry.get_sample_value(name, labels)


def outcome_of(future: Future[RankOutcome]) -> RankOutcome:
    return future.result(timeout=0)


def test_an_answer_in_time_reaches_its_caller_with_its_latency() -> None:
    gateway = Gateway()
    entry = gateway.open()
    gateway.wait_ms(12)
    result = gateway.result()
    assert gateway.ledger.answered(result) is AnswerMatch.ON_TIME
    assert outcome_of(entry.future) == RankOutcome("gw.1.1", Ended.RANKED, 12 * MS, result)
    assert gateway.sample("relaygr_gateway_requests_total", status="ranked", path="hbm") == 1
    assert gateway.sample("relaygr_gateway_latency_seconds_bucket", le="0.011") == 0
    assert gateway.sample("relaygr_gateway_latency_seconds_bucket", le="0.012") == 1
    assert gateway.ledger.in_flight == 0


def test_paths_of_a_newer_worker_are_kept_and_counted_under_one_label() -> None:
    gateway = Gateway()
    for number, path in enumerate((Other("remote"), Other("peer"))):
        entry = gateway.open(f"gw.1.{number}")
        gateway.ledger.answered(replace(gateway.result(request_id=f"gw.1.{number}"), path=path))
        result = outcome_of(entry.future).result
        assert result is not None
        assert result.path == path
    assert gateway.sample("relaygr_gateway_requests_total", status="ranked", path="other") == 2


def test_a_reason_of_a_newer_worker_reaches_the_caller_with_its_text() -> None:
    gateway = Gateway()
    entry = gateway.open()
    gateway.ledger.answered(replace(gateway.result(Ended.FAILED), reason=Other("quota_exceeded")))
    assert outcome_of(entry.future).reason == Other("quota_exceeded")


@pytest.mark.parametrize(
    ("answer", "status", "reason"),
    [
        (Ended.EXPIRED, Ended.EXPIRED, None),
        (Ended.FAILED, Ended.FAILED, Reason.OVERLOADED),
    ],
)
def test_a_workers_refusal_is_an_outcome(answer: Ended, status: Ended, reason: Reason | None) -> None:
    gateway = Gateway()
    entry = gateway.open()
    gateway.ledger.answered(gateway.result(answer))
    outcome = outcome_of(entry.future)
    assert (outcome.status, outcome.reason, outcome.late) == (status, reason, False)
    assert gateway.sample("relaygr_gateway_requests_total", status=status.value, path="none") == 1


@pytest.mark.parametrize(("acknowledged", "reason"), [(True, Reason.NO_ANSWER), (False, Reason.NOT_ACKNOWLEDGED)])
def test_at_its_deadline_a_caller_is_told_timed_out_and_why(acknowledged: bool, reason: Reason) -> None:
    gateway = Gateway()
    entry = gateway.open()
    if acknowledged:
        gateway.ledger.acknowledged(entry)
    gateway.wait_ms(49.999)
    assert not entry.future.done()
    gateway.wait_ms(0.001)
    assert outcome_of(entry.future) == RankOutcome("gw.1.1", Ended.TIMED_OUT, 50 * MS, reason=reason)


def test_a_late_answer_goes_to_on_late_with_its_true_latency_and_not_to_the_caller() -> None:
    gateway = Gateway()
    entry = gateway.open()
    gateway.wait_ms(50)
    gateway.wait_ms(20)
    result = gateway.result()
    assert gateway.ledger.answered(result) is AnswerMatch.LATE
    assert gateway.late == [RankOutcome("gw.1.1", Ended.RANKED, 70 * MS, result, late=True)]
    assert outcome_of(entry.future).status is Ended.TIMED_OUT
    gateway.wait_ms(5_000)
    assert gateway.lost == []
    assert gateway.sample("relaygr_gateway_late_results_total", status="ranked") == 1


def test_an_answer_that_overtakes_its_own_timer_is_late_and_the_caller_is_told_first() -> None:
    gateway = Gateway()
    entry = gateway.open()
    gateway.clock.advance_us(51 * MS)
    gateway.ledger.answered(gateway.result())
    assert outcome_of(entry.future).status is Ended.TIMED_OUT
    assert [outcome.late for outcome in gateway.late] == [True]
    counts = gateway.ledger.statistics()
    assert (counts.timed_out, counts.ranked, counts.late) == (1, 0, 1)


def test_a_request_that_nobody_answers_within_the_grace_is_lost_once() -> None:
    gateway = Gateway(result_grace_ms=200, lost_after_ms=200)
    gateway.ledger.acknowledged(gateway.open())
    gateway.wait_ms(50)
    gateway.wait_ms(199)
    assert gateway.lost == []
    gateway.wait_ms(1)
    gateway.wait_ms(1_000)
    assert gateway.lost == [LostRequest("gw.1.1", acknowledged=True)]
    assert gateway.sample("relaygr_gateway_lost_requests_total", acknowledged="yes") == 1


def test_a_second_answer_is_dropped_and_counted() -> None:
    gateway = Gateway()
    entry = gateway.open()
    gateway.ledger.answered(gateway.result())
    first = outcome_of(entry.future)
    assert gateway.ledger.answered(gateway.result(Ended.FAILED)) is AnswerMatch.DUPLICATE
    assert outcome_of(entry.future) is first
    assert gateway.ledger.statistics().duplicates == 1
    assert gateway.sample("relaygr_gateway_duplicate_results_total") == 1
    assert gateway.late == []


def test_an_answer_to_an_earlier_incarnation_is_counted_as_none_of_ours() -> None:
    gateway = Gateway()
    assert gateway.ledger.answered(gateway.result(request_id="gw.0.1")) is AnswerMatch.UNKNOWN
    assert gateway.ledger.statistics().foreign == 1


def test_an_answer_whose_body_can_not_be_read_fails_its_request_at_once() -> None:
    gateway = Gateway()
    entry = gateway.open()
    gateway.ledger.answered_undecodable("gw.1.1")
    outcome = outcome_of(entry.future)
    assert (outcome.status, outcome.reason, outcome.result) == (Ended.FAILED, Reason.UNDECODABLE, None)
    gateway.wait_ms(5_000)
    assert gateway.lost == [], "a worker did answer"


def test_garbage_without_headers_is_counted_and_ends_nothing() -> None:
    gateway = Gateway()
    entry = gateway.open()
    gateway.ledger.answered_undecodable(None)
    assert not entry.future.done()
    assert gateway.ledger.statistics().undecodable == 1


def test_a_failed_delivery_is_tried_again_after_the_backoff() -> None:
    gateway = Gateway()
    entry = gateway.open()
    sent: list[str] = []
    assert gateway.ledger.not_delivered(entry, lambda: sent.append("again"))
    assert gateway.wait_ms(19) == []
    (again,) = gateway.wait_ms(1)
    assert again is entry and again.send_again is not None
    again.send_again()
    assert sent == ["again"]
    assert gateway.ledger.statistics().retries == 1


def test_a_failed_delivery_near_the_deadline_is_not_tried_again_and_may_still_be_answered() -> None:
    gateway = Gateway()
    entry = gateway.open(budget_ms=30)
    gateway.wait_ms(15)
    assert not gateway.ledger.not_delivered(entry, lambda: None)
    gateway.ledger.answered(gateway.result())
    assert outcome_of(entry.future).status is Ended.RANKED


@pytest.mark.parametrize("given_up_at_ms", [15, 60, 240])
def test_nothing_waits_for_an_answer_to_a_request_that_was_not_delivered(given_up_at_ms: int) -> None:
    """Before the deadline, in the grace, and after it. `RelayClient.drain` waited for all of `lost_after_ms`."""
    gateway = Gateway(result_grace_ms=100, lost_after_ms=20_000)
    entry = gateway.open(budget_ms=30)
    now_ms = 0
    for at_ms in sorted((30, 130, given_up_at_ms)):
        gateway.wait_ms(at_ms - now_ms)
        now_ms = at_ms
        if at_ms == given_up_at_ms:
            assert gateway.lost == [] and not gateway.ledger.not_delivered(entry, lambda: None)
    gateway.wait_ms(0)
    assert gateway.lost == [LostRequest("gw.1.1", acknowledged=False)]
    assert gateway.ledger.is_settled


def test_a_retry_that_the_deadline_came_before_is_not_waited_for() -> None:
    gateway = Gateway(result_grace_ms=200, lost_after_ms=9_000)
    entry = gateway.open(budget_ms=25)
    assert gateway.ledger.not_delivered(entry, lambda: None)
    gateway.ledger.time_out(entry)
    gateway.wait_ms(224)
    assert gateway.lost == []
    gateway.wait_ms(1)
    assert gateway.lost == [LostRequest("gw.1.1", acknowledged=False)]


def test_an_acknowledged_request_is_waited_for_though_a_later_report_says_otherwise() -> None:
    gateway = Gateway(result_grace_ms=200, lost_after_ms=9_000)
    entry = gateway.open(budget_ms=25)
    gateway.ledger.acknowledged(entry)
    gateway.wait_ms(25)
    gateway.ledger.not_delivered(entry, lambda: None)
    gateway.wait_ms(8_999)
    assert gateway.lost == []


def test_what_a_callback_raises_stops_nothing() -> None:
    gateway = Gateway()

    def broken(_outcome: RankOutcome) -> None:
        raise RuntimeError("the caller's bug")

    ledger = Ledger(ClientSettings(), gateway.clock, GatewayMetrics(CollectorRegistry()), on_late=broken)
    entry = ledger.open(gateway.request())
    gateway.clock.advance_us(60 * MS)
    ledger.fire()
    assert ledger.answered(gateway.result()) is AnswerMatch.LATE
    assert outcome_of(entry.future).status is Ended.TIMED_OUT


def test_closing_tells_who_still_waits() -> None:
    gateway = Gateway()
    entry = gateway.open()
    gateway.wait_ms(10)
    gateway.ledger.close()
    outcome = outcome_of(entry.future)
    assert (outcome.status, outcome.reason, outcome.latency_us) == (
        Ended.TIMED_OUT,
        Reason.CLOSED,
        10 * MS,
    )


def test_a_withdrawn_request_is_not_counted_and_makes_room() -> None:
    gateway = Gateway(max_in_flight=1)
    entry = gateway.open()
    with pytest.raises(QueueFull):
        gateway.open("gw.1.2")
    gateway.ledger.withdraw(entry)
    gateway.open("gw.1.2")
    assert gateway.ledger.statistics().submitted == 1


def test_a_request_that_close_ended_while_it_was_sent_is_withdrawn_without_being_counted_twice() -> None:
    gateway = Gateway()
    entry = gateway.open()
    gateway.ledger.close()
    gateway.ledger.withdraw(entry)
    assert gateway.ledger.statistics().submitted == gateway.ledger.statistics().timed_out == 1


def test_a_callers_cancel_does_not_take_a_sent_request_back() -> None:
    gateway = Gateway()
    entry = gateway.open()
    assert not entry.future.cancel()
    gateway.ledger.answered(gateway.result())
    assert outcome_of(entry.future).status is Ended.RANKED


def test_a_deadline_that_has_passed_when_it_is_sent_times_out_at_once() -> None:
    gateway = Gateway()
    request = gateway.request()
    gateway.clock.advance_us(60 * MS)
    entry = gateway.ledger.open(request)
    gateway.ledger.fire()
    assert outcome_of(entry.future).latency_us == 0


def test_the_workers_clock_offset_is_estimated_from_the_echoes() -> None:
    gateway = Gateway()
    gateway.open()
    gateway.clock.advance_us(2 * MS)
    result = gateway.result(offset_us=300 * MS)
    gateway.clock.advance_us(2 * MS)
    gateway.ledger.answered(result)
    offset = gateway.ledger.clock_offsets()["w-0"]
    assert (offset.offset_us, offset.error_us) == (300 * MS, 2 * MS)
    assert gateway.sample("relaygr_clock_offset_seconds", worker="w-0") == pytest.approx(0.3)
    assert gateway.sample("relaygr_clock_offset_error_seconds", worker="w-0") == pytest.approx(0.002)


def answer(gateway: Gateway, request_id: str, worker_id: str, offset_us: int) -> None:
    entry = gateway.open(request_id)
    result = replace(gateway.result(request_id=request_id, offset_us=offset_us), worker_id=worker_id)
    gateway.ledger.answered(replace(result, request_sent_at_us=entry.echo_us))


def test_a_worker_that_answers_no_more_has_no_clock_on_the_page_after_some_minutes() -> None:
    """Its alert went on until the gateway was restarted."""
    gateway = Gateway()
    answer(gateway, "gw.1.1", "gone", 4_000 * MS)
    for minute in range(6):
        gateway.clock.advance_us(60_000 * MS)
        answer(gateway, f"gw.2.{minute}", "alive", 2 * MS)
    assert set(gateway.ledger.clock_offsets()) == {"alive"}
    for name in ("relaygr_clock_offset_seconds", "relaygr_clock_offset_error_seconds"):
        assert gateway.sample(name, worker="gone") is None
        assert gateway.sample(name, worker="alive") is not None


def test_of_several_clients_the_one_with_the_least_error_tells_a_clock_and_a_closed_one_tells_none() -> None:
    first = Gateway()
    second = Ledger(ClientSettings(), first.clock, first.metrics)
    answer(first, "gw.1.1", "w-7", 90 * MS)
    entry = second.open(first.request("gw.3.1"))
    first.clock.advance_us(30 * MS)
    slow = first.result(request_id="gw.3.1", offset_us=60 * MS)
    second.answered(replace(slow, worker_id="w-7", request_sent_at_us=entry.echo_us))
    assert first.sample("relaygr_clock_offset_seconds", worker="w-7") == pytest.approx(0.09)
    first.ledger.close()
    assert first.sample("relaygr_clock_offset_seconds", worker="w-7") == pytest.approx(0.075)
    second.close()
    assert first.sample("relaygr_clock_offset_seconds", worker="w-7") is None


def test_a_client_that_is_closed_misses_no_broker() -> None:
    """The gauge of the process stayed 0, and its alert went on."""
    gateway = Gateway()

    def reachable() -> float | None:
        return gateway.sample("relaygr_gateway_broker_reachable")

    assert reachable() == 0
    for client in "ab":
        gateway.metrics.note_broker(client, misses_it=False)
    gateway.metrics.note_broker("a", misses_it=True)
    gateway.metrics.note_broker("b", misses_it=False)
    assert reachable() == 0, "one of two is enough"
    gateway.metrics.note_broker("a", misses_it=False)
    assert reachable() == 1


def test_a_result_that_echoes_another_send_time_says_nothing_about_the_clock() -> None:
    gateway = Gateway()
    gateway.clock.advance_us(1)
    gateway.open()
    gateway.ledger.answered(gateway.result())
    assert gateway.ledger.clock_offsets() == {}


def test_the_workers_that_have_a_label_are_bounded() -> None:
    gateway = Gateway()
    for number in range(MOST_WORKERS + 1):
        gateway.open(f"gw.1.{number}")
        gateway.ledger.answered(replace(gateway.result(request_id=f"gw.1.{number}"), worker_id=f"w-{number}"))
    assert gateway.sample("relaygr_clock_offset_seconds", worker="w-0") is None
    assert gateway.sample("relaygr_clock_offset_seconds", worker="w-1") is not None


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"scores": np.zeros(1, "<f4")}, "1 scores for 2 candidates and 1 tasks"),
        ({"scores": np.zeros(2, "<f4"), "num_tasks": 2}, "2 scores for 2 candidates and 2 tasks"),
        ({"request_sent_at_us": 7}, "request_sent_at_us is 7"),
        ({"request_sent_at_us": 0}, "request_sent_at_us is 0"),
        ({"model_revision": "other"}, "model revision other"),
    ],
    ids=["too few scores", "too few scores for its tasks", "another request", "no request", "another model"],
)
def test_a_result_that_does_not_fit_its_request_is_a_failure(changes: dict[str, object], problem: str) -> None:
    """One score for two candidates was accepted."""
    gateway = Gateway(model_revisions=("r", "next"))
    entry = gateway.open()
    with structlog.testing.capture_logs() as logs:
        gateway.ledger.answered(replace(gateway.result(), **changes))
    outcome = outcome_of(entry.future)
    assert (outcome.status, outcome.reason, outcome.result) == (Ended.FAILED, Reason.INVALID_RESULT, None)
    assert gateway.ledger.statistics().invalid == 1
    assert gateway.sample("relaygr_gateway_requests_total", status="failed", path="none") == 1
    assert [problem in log["problem"] for log in logs] == [True]
    assert gateway.ledger.clock_offsets() == {}


def test_of_many_results_that_do_not_fit_few_are_logged_with_the_number_of_the_others() -> None:
    gateway = Gateway()
    with structlog.testing.capture_logs() as logs:
        for number in range(90):
            if number == 80:
                gateway.clock.advance_us(LOG_INTERVAL_US)
            gateway.open(f"gw.2.{number}")
            misfit = replace(gateway.result(request_id=f"gw.2.{number}"), scores=np.zeros(1, "<f4"))
            gateway.ledger.answered(misfit)
    assert [log["left_out"] for log in logs] == [0, 79]
    assert gateway.ledger.statistics().invalid == 90


@pytest.mark.parametrize("sent_at_us", [0, None], ids=["of an undecodable request", "of the request"])
def test_a_failed_result_needs_no_scores_and_no_model(sent_at_us: int | None) -> None:
    gateway = Gateway(model_revisions=("r",))
    entry = gateway.open()
    result = gateway.result(Ended.FAILED)
    gateway.ledger.answered(result if sent_at_us is None else replace(result, request_sent_at_us=sent_at_us))
    assert outcome_of(entry.future).reason is Reason.OVERLOADED


def test_a_result_for_an_id_that_was_never_asked_changes_nothing() -> None:
    gateway = Gateway()
    entry = gateway.open()
    assert gateway.ledger.answered(gateway.result(request_id="gw.1.2")) is AnswerMatch.UNKNOWN
    assert not entry.future.done()
    assert gateway.ledger.statistics().foreign == 1


def test_a_request_fails_fast_while_the_backlog_of_its_worker_is_longer_than_its_budget() -> None:
    gateway = Gateway()
    request = gateway.request("gw.1.1")
    first = gateway.ledger.open(request, partition=3)
    gateway.ledger.answered(replace(gateway.result(request_id="gw.1.1"), backlog_us=100 * MS))
    assert outcome_of(first.future).status is Ended.RANKED
    now_us = gateway.clock.monotonic_us()
    refused = gateway.ledger.fail_fast(gateway.request("gw.1.2"), now_us, partition=3)
    assert refused is not None
    assert outcome_of(refused.future) == RankOutcome("gw.1.2", Ended.FAILED, 0, None, Reason.OVERLOADED)
    assert gateway.ledger.fail_fast(gateway.request("gw.1.3"), now_us, partition=4) is None, "another worker's"
    counts = gateway.ledger.statistics()
    assert (counts.submitted, counts.ranked, counts.failed, gateway.ledger.in_flight) == (2, 1, 1, 0)
    gateway.wait_ms(51)
    now_us = gateway.clock.monotonic_us()
    assert gateway.ledger.fail_fast(gateway.request("gw.1.4"), now_us, partition=3) is None, "the backlog has shrunk"


def test_only_so_many_workers_backlogs_are_kept() -> None:
    backlogs = WorkerBacklogs(most_workers=2)
    for number in range(3):
        backlogs.note(number, f"w-{number}", 100 + number)
    assert [backlogs.done_us(number) for number in range(4)] == [0, 101, 102, 0]


def test_a_request_is_settled_once_its_callback_was_called() -> None:
    """`drain` returned before the last late answer had reached the caller."""
    gateway, settled = Gateway(), list[bool]()
    ledger = Ledger(
        ClientSettings(result_grace_ms=1000),
        gateway.clock,
        GatewayMetrics(CollectorRegistry()),
        on_late=lambda _: settled.append(ledger.is_settled),
        on_lost=lambda _: settled.append(ledger.is_settled),
    )
    for request_id in ("gw.1.1", "gw.1.2"):
        ledger.open(gateway.request(request_id))
    gateway.clock.advance_us(100 * MS)
    ledger.fire()
    ledger.answered(gateway.result(request_id="gw.1.1"))
    gateway.clock.advance_us(60_000 * MS)
    ledger.fire()
    assert settled == [False, False]
    assert ledger.is_settled


def test_a_callback_that_calls_exit_ends_no_more_than_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """It ended the thread that reads answers, without a word: requests that ended with it, or later, never ended."""

    def leave(_: object) -> None:
        sys.exit(1)

    gateway = Gateway()
    monkeypatch.setattr(publisher, "_raised", LimitedLog(gateway.clock))
    ledger = Ledger(ClientSettings(result_grace_ms=0, lost_after_ms=0), gateway.clock, gateway.metrics, leave, leave)
    entries = [ledger.open(gateway.request(f"gw.1.{number}")) for number in range(3)]
    for entry in entries[:2]:
        entry.future.add_done_callback(leave)
    gateway.clock.advance_us(60 * MS)
    with structlog.testing.capture_logs() as logs:
        ledger.fire()
        ledger.fire()
    assert [outcome_of(entry.future).status for entry in entries] == [Ended.TIMED_OUT] * 3
    assert ledger.is_settled and ledger.statistics().lost == 3
    assert [line["event"] for line in logs] == ["a callback raised"], "a traceback takes long, so few are written"
