"""Tracing: ids and sampling, the bounded queue, the stages of a request, and the export to a collector."""

from __future__ import annotations

import functools
import itertools
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from confluent_kafka import Message
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry
from structlog.testing import capture_logs

from relaygr.client.tracing import Begun, ClientTraces, RankTrace, SendTrace
from relaygr.runtime.clock import ManualClock
from relaygr.runtime.errors import RelayError
from relaygr.schemas.headers import RankingHeaders
from relaygr.schemas.trace_context import TRACEPARENT, TraceContext
from relaygr.tracing import TracingSettings, start_tracing
from relaygr.tracing.otlp import Answers, SpanExport, otel_spans, sampler_of
from relaygr.tracing.spans import MessagePlace, Operation, Span, SpanKind, message_span
from relaygr.tracing.stages import RankingTimes, StageSpan, stages_of
from relaygr.tracing.stages import TraceStage as Stage
from relaygr.tracing.tracer import Sampler, Tracer, TracerMetrics
from relaygr.tracing.worker import REMEMBERED_JOBS, WorkerTraces
from relaygr.trigger.traces import TriggerTraces
from tests.schemas.wire_samples import MESSAGES
from tests.waiting import until
from tests.worlds.otlp import Collector, collector, traceparent
from tests.worlds.proxy import refusing_proxy

RATIO = pytest.importorskip("opentelemetry.sdk.trace.sampling")
otel_trace = pytest.importorskip("opentelemetry.trace")
otel_sdk_trace = pytest.importorskip("opentelemetry.sdk.trace")


ALWAYS = Sampler(2**64, follows_parent=False)
NEVER = Sampler(0, follows_parent=False)


class World:
    """A tracer without an exporter."""

    def __init__(self, sampler: Sampler = ALWAYS, max_queue_spans: int = 100) -> None:
        self.registry = CollectorRegistry()
        self.clock = ManualClock()
        self.metrics = TracerMetrics(self.registry)
        self.tracer = Tracer(sampler, max_queue_spans, max_queue_spans, self.metrics, self.clock)

    def count(self, outcome: str) -> float:
        return self.registry.get_sample_value("relaygr_tracing_spans_total", {"outcome": outcome}) or 0.0

    def span(self, name: str = "span") -> Span:
        own = self.tracer.begin("r")
        assert own is not None
        return Span(name, SpanKind.INTERNAL, own, None, 1_000_000, 2_000_000)


def ratio_sampler(ratio: float) -> Sampler:
    return sampler_of({"OTEL_TRACES_SAMPLER": "parentbased_traceidratio", "OTEL_TRACES_SAMPLER_ARG": str(ratio)})


@functools.cache
def samplers(name: str, argument: str) -> tuple[Sampler, Any]:
    """Ours and OpenTelemetry's for the same variables."""
    variables = {"OTEL_TRACES_SAMPLER": name, "OTEL_TRACES_SAMPLER_ARG": argument}
    with pytest.MonkeyPatch.context() as patch:
        for variable, value in variables.items():
            patch.setenv(variable, value)
        return sampler_of(variables), otel_sdk_trace.TracerProvider(shutdown_on_exit=False).sampler


def context_of(parent: TraceContext | None) -> object:
    """OpenTelemetry's context of a span in another process."""
    if parent is None:
        return None
    flags = otel_trace.TraceFlags(int(parent.is_sampled))
    span = otel_trace.SpanContext(parent.trace_id, parent.span_id, True, flags)
    return otel_trace.set_span_in_context(otel_trace.NonRecordingSpan(span))


# -- ids and sampling --------------------------------------------------------------------------------


def test_a_span_with_a_parent_is_of_its_trace() -> None:
    parent = TraceContext(7, 8, True)
    own = World().tracer.follow(parent)
    assert own.trace_id == 7 and own.span_id != 8


def test_the_traces_of_an_impression_are_two_that_one_sampler_treats_alike() -> None:
    ratio = World(ratio_sampler(0.5))
    decisions = []
    for number in range(200):
        retrieval = ratio.tracer.begin(f"request-{number}")
        ranking = ratio.tracer.begin(f"request-{number}")
        assert (retrieval is None) is (ranking is None)
        if retrieval is not None and ranking is not None:
            assert retrieval.trace_id != ranking.trace_id
            assert retrieval.trace_id % 2**64 == ranking.trace_id % 2**64
        decisions.append(ranking is not None)
    assert 60 < sum(decisions) < 140


@pytest.mark.parametrize(("ratio", "expected"), [(0.0, 0), (0.01, 1_000), (0.2, 20_000), (1.0, 100_000)])
def test_a_ratio_of_the_impressions_is_recorded_also_with_ids_in_a_row(ratio: float, expected: int) -> None:
    """A checksum of the request id decides; the client's own ids differ in a counter and a random token."""
    tracer = World(ratio_sampler(ratio)).tracer
    recorded = sum(tracer.begin(f"gw-0.1a2b.{number}") is not None for number in range(100_000))
    assert recorded == pytest.approx(expected, rel=0.2)


@pytest.mark.parametrize("is_sampled", [True, False])
def test_a_parent_based_sampler_follows_the_parent(is_sampled: bool) -> None:
    world = World(Sampler(0 if is_sampled else 2**64))
    assert world.tracer.follow(TraceContext(1, 2, is_sampled)).is_sampled is is_sampled
    assert (world.tracer.begin("r") is None) is is_sampled


@pytest.mark.parametrize("name", ["always_on", "always_off", "traceidratio"])
@pytest.mark.parametrize("prefix", ["", "parentbased_"])
@pytest.mark.parametrize("ratio", ["0", "1e-9", "0.01", "0.5", "1"])
@given(trace_id=st.integers(1, 2**128 - 1), near=st.integers(-2, 2))
def test_a_sampler_records_the_traces_that_opentelemetry_records(
    name: str, prefix: str, ratio: str, trace_id: int, near: int
) -> None:
    ours, theirs = samplers(prefix + name, ratio)
    for each in (trace_id, trace_id >> 64 << 64 | max(1, min(2**64 - 1, ours.bound + near))):
        for parent in (None, TraceContext(each, 1, True), TraceContext(each, 1, False)):
            decision = theirs.should_sample(context_of(parent), each, "rank").decision
            assert ours.is_sampled(parent, each) is (decision is RATIO.Decision.RECORD_AND_SAMPLE)


# -- the queue ---------------------------------------------------------------------------------------


def test_spans_beyond_the_queue_are_dropped_and_counted() -> None:
    world = World(max_queue_spans=3)
    for _ in range(5):
        world.tracer.end(world.span())
    assert world.count("dropped") == 2
    assert (len(world.tracer.take_batch()), len(world.tracer.take_batch())) == (3, 0)


# -- stages ------------------------------------------------------------------------------------------

HIT = RankingTimes(received_us=100, ended_us=1_000, started_us=400, ready_us=150, rank_us=500, ranked_us=900)
CASES: dict[str, tuple[RankingTimes, list[tuple[Stage, int, int]]]] = {
    "a hit waits and is ranked": (HIT, [(Stage.QUEUE, 100, 400), (Stage.HIT, 400, 900)]),
    "a reload comes first": (
        RankingTimes(100, 1_000, 700, reload_us=300, reloaded_us=500, ready_us=500, rank_us=200, ranked_us=900),
        [(Stage.QUEUE, 100, 200), (Stage.RELOAD, 200, 500), (Stage.QUEUE, 500, 700), (Stage.HIT, 700, 900)],
    ),
    "a computation comes first": (
        RankingTimes(100, 1_000, 150, compute_us=300, ready_us=600, rank_us=200, ranked_us=900),
        [(Stage.QUEUE, 100, 150), (Stage.FULL, 150, 600), (Stage.QUEUE, 600, 700), (Stage.HIT, 700, 900)],
    ),
    "it joined the last chunk of a computation": (
        RankingTimes(100, 1_000, 700, compute_us=300, ready_us=600, rank_us=200, ranked_us=900),
        [(Stage.QUEUE, 100, 300), (Stage.FULL, 300, 600), (Stage.QUEUE, 600, 700), (Stage.HIT, 700, 900)],
    ),
    "a reload failed, and it was computed": (
        RankingTimes(100, 1_000, 400, 200, 350, 300, 800, 100, 900),
        [
            (Stage.QUEUE, 100, 150), (Stage.RELOAD, 150, 350), (Stage.QUEUE, 350, 400), (Stage.FULL, 400, 800),
            (Stage.HIT, 800, 900),
        ],
    ),
    "a hit that waited for its history": (
        RankingTimes(
            100, 1_000, 800, ready_us=750, rank_us=150, ranked_us=950, history_wait_us=500, history_waited_us=700
        ),
        [(Stage.QUEUE, 100, 200), (Stage.HISTORY, 200, 700), (Stage.QUEUE, 700, 800), (Stage.HIT, 800, 950)],
    ),
    "it expired in the queue": (RankingTimes(100, 1_000), [(Stage.QUEUE, 100, 1_000)]),
    "it was refused at once": (RankingTimes(100, 100), []),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_the_stages_of_a_request(name: str) -> None:
    times, expected = CASES[name]
    assert [(each.stage, each.start_us, each.end_us) for each in stages_of(times, Stage.FULL)] == expected


@given(st.lists(st.integers(0, 1_000), min_size=11, max_size=11))
def test_stages_never_overlap_whatever_the_times(numbers: list[int]) -> None:
    received_us, ended_us = sorted(numbers[:2])
    stages = stages_of(RankingTimes(received_us, ended_us, *numbers[2:]), Stage.FULL)
    assert all(received_us <= each.start_us < each.end_us <= ended_us for each in stages)
    assert all(first.end_us <= then.start_us for first, then in itertools.pairwise(stages))


# -- a client ----------------------------------------------------------------------------------------


def begun_by(world: World, given: TraceContext | None) -> list[Begun[SendTrace] | Begun[RankTrace] | None]:
    """What a client begins for the two messages of an impression."""
    traces = ClientTraces(world.tracer, "retrieval", "ranking", "results")
    return [traces.retrieval(MESSAGES["RetrievalEvent"], given), traces.rank(MESSAGES["RankingRequest"], given)]


def test_a_message_of_a_trace_that_begins_here_has_a_header_only_if_it_is_recorded() -> None:
    assert begun_by(World(NEVER), None) == [None, None]
    for begun in begun_by(World(), None):
        assert begun is not None and begun.trace is not None
        context = TraceContext.parse(begun.header)
        assert context is not None and context.is_sampled


@pytest.mark.parametrize("from_program", [False, True])
def test_a_message_of_an_unrecorded_trace_of_the_caller_has_its_header_and_nothing_else(from_program: bool) -> None:
    caller = TraceContext(7, 8, False)
    if from_program:
        span = otel_trace.NonRecordingSpan(otel_trace.SpanContext(7, 8, False, otel_trace.TraceFlags(0)))
        with otel_trace.use_span(span):
            found = begun_by(World(NEVER), None)
    else:
        found = begun_by(World(NEVER), caller)
    for begun in found:
        assert begun is not None and begun.trace is None
        context = TraceContext.parse(begun.header)
        assert context is not None and (context.trace_id, context.is_sampled) == (7, False)


# -- triggers and workers begin no trace -------------------------------------------------------------


@pytest.mark.parametrize("of_client", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("downstream", [0.0, 0.5, 1.0])
def test_a_trigger_and_a_worker_record_exactly_what_the_client_records_with_any_parent_based_sampler(
    of_client: float, downstream: float
) -> None:
    client = World(ratio_sampler(of_client)).tracer
    later = World(ratio_sampler(downstream)).tracer
    events, worker = TriggerTraces(later, "events", "jobs"), WorkerTraces(later)
    for number in range(40):
        request_id = f"request-{number}"
        begun = client.begin(request_id)
        header = None if begun is None else begun.encode()
        raw = None if header is None else [(TRACEPARENT, header)]
        event = events.event(Message(topic="events", partition=0, offset=1, headers=raw), request_id, 0)
        job = worker.job(raw if event is None else event.headers, request_id)
        ranking = worker.ranking(RankingHeaders(request_id, "gw", "results", 0, 1, header))
        recorded = begun is not None
        assert (event is not None and event.own.is_sampled) is recorded
        assert (job is not None) is recorded and (ranking is not None) is recorded


# -- a worker ----------------------------------------------------------------------------------------


def reply(given: str | None = None, request_id: str = "r") -> RankingHeaders:
    return RankingHeaders(request_id, "gw", "results", 0, 1, given.encode() if given else None)


def test_a_ranking_links_to_the_job_of_its_impression_once() -> None:
    world = World()
    traces, place = WorkerTraces(world.tracer), MessagePlace("jobs", 1, 2)
    job = traces.job([(TRACEPARENT, traceparent(trace_id=5).encode())], "r")
    assert job is not None
    job.ended(place, 10, 20, [StageSpan(Stage.PRE_INFER, 10, 20)], 0, "computed", None)
    for _ in range(2):
        ranking = traces.ranking(reply(traceparent(6)))
        assert ranking is not None
        ranking.answered(place, 10, 20, 30, [], 0, {}, None)
    job_span, compute, first, second = world.tracer.take_batch()
    assert (job_span.context.trace_id, compute.parent, compute.name) == (5, job_span.context, "relaygr.pre_infer")
    assert (first.link, second.link) == (job_span.context, None)


def test_a_worker_remembers_a_bounded_number_of_jobs() -> None:
    world = World(max_queue_spans=10**6)
    traces = WorkerTraces(world.tracer)
    for number in range(REMEMBERED_JOBS + 1):
        job = traces.job([(TRACEPARENT, traceparent(5).encode())], f"r{number}")
        assert job is not None
        job.ended(MessagePlace("jobs"), 0, 1, [], 0, "computed", None)
    world.tracer.take_batch()
    for request_id in ("r0", "r1"):
        ranking = traces.ranking(reply(traceparent(6), request_id))
        assert ranking is not None
        ranking.answered(MessagePlace("ranking"), 0, 1, 1, [], 0, {}, None)
    assert [span.link is None for span in world.tracer.take_batch()] == [True, False]


# -- the exporter ------------------------------------------------------------------------------------


@pytest.fixture
def collected() -> Iterator[Collector]:
    with collector() as running:
        yield running


@pytest.fixture
def variables(monkeypatch: pytest.MonkeyPatch, collected: Collector) -> pytest.MonkeyPatch:
    """Those of a process that exports to `collected`."""
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collected.endpoint)
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "50")
    monkeypatch.setattr("relaygr.tracing.otlp.TracerMetrics", lambda: TracerMetrics(CollectorRegistry()))
    return monkeypatch


def started() -> Tracer:
    tracer = start_tracing(TracingSettings(enabled=True), "relaygr-test", "test-0")
    assert tracer is not None
    return tracer


def test_spans_arrive_with_their_resource_parent_link_and_error(
    collected: Collector, variables: pytest.MonkeyPatch
) -> None:
    tracer = started()
    parent, link = TraceContext(1, 2, True), TraceContext(3, 4, True)
    own = tracer.follow(parent)
    place = MessagePlace("topic", 5, 6)
    tracer.end(message_span(Operation.PROCESS, place, "r", own, parent, 10, 30, link=link, error="overloaded"))
    tracer.close()
    [span] = collected.spans
    assert (span.name, span.kind, span.trace_id, span.parent_id) == (
        "process topic",
        "consumer",
        f"{1:032x}",
        f"{2:016x}",
    )
    assert (span.start_us, span.end_us, span.is_error) == (10, 30, True)
    assert span.links == ((f"{3:032x}", f"{4:016x}"),)
    assert span.attributes == {
        "messaging.system": "kafka",
        "messaging.operation.name": "process",
        "messaging.operation.type": "process",
        "messaging.destination.name": "topic",
        "messaging.destination.partition.id": "5",
        "messaging.kafka.offset": 6,
        "messaging.message.conversation_id": "r",
        "error.type": "overloaded",
    }
    assert span.service == "relaygr-test" and span.resource["service.instance.id"] == "test-0"


def test_a_proxy_of_the_environment_is_not_asked_for_a_collector_on_this_machine(
    collected: Collector, variables: pytest.MonkeyPatch
) -> None:
    with refusing_proxy() as (proxies, asked):
        for name, value in proxies.items():
            variables.setenv(name, value)
        tracer = started()
        tracer.end(
            message_span(Operation.PROCESS, MessagePlace("topic", 1, 2), "r", TraceContext(1, 2, True), None, 1, 2)
        )
        tracer.close()
    assert len(collected.spans) == 1 and asked == []


def test_the_environment_names_the_process(collected: Collector, variables: pytest.MonkeyPatch) -> None:
    variables.setenv("OTEL_RESOURCE_ATTRIBUTES", "service.name=mine,service.instance.id=here,team=ranking")
    tracer = started()
    tracer.end(World().span())
    tracer.close()
    [span] = collected.spans
    assert (span.service, span.resource["service.instance.id"], span.resource["team"]) == ("mine", "here", "ranking")


def test_the_variables_choose_the_sampler(variables: pytest.MonkeyPatch) -> None:
    variables.setenv("OTEL_TRACES_SAMPLER", "traceidratio")
    variables.setenv("OTEL_TRACES_SAMPLER_ARG", "0")
    tracer = started()
    assert tracer.begin("r") is None
    tracer.close()


@pytest.mark.parametrize(
    ("name", "value"),
    [("OTEL_TRACES_EXPORTER", "none"), ("OTEL_SDK_DISABLED", "true")],
)
def test_the_variables_can_turn_tracing_off(variables: pytest.MonkeyPatch, name: str, value: str) -> None:
    variables.setenv(name, value)
    assert start_tracing(TracingSettings(enabled=True), "relaygr-test", "test-0") is None


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("OTEL_TRACES_EXPORTER", "zipkin"),
        ("OTEL_TRACES_SAMPLER", "sometimes"),
        ("OTEL_EXPORTER_OTLP_PROTOCOL", "grpc"),
        ("OTEL_BSP_MAX_QUEUE_SIZE", "many"),
        ("OTEL_BSP_SCHEDULE_DELAY", "-1"),
    ],
)
def test_a_variable_that_cannot_be_followed_is_refused_by_name(
    variables: pytest.MonkeyPatch, name: str, value: str
) -> None:
    variables.setenv(name, value)
    with pytest.raises(RelayError, match=f"{name} is .*{value}"):
        start_tracing(TracingSettings(enabled=True), "relaygr-test", "test-0")


@pytest.mark.parametrize("rate", ["half", "1.5", "-0.1", "nan"])
def test_a_rate_that_is_none_is_refused(rate: str) -> None:
    with pytest.raises(RelayError, match=f"OTEL_TRACES_SAMPLER_ARG is '{rate}': expected a number from 0 to 1"):
        sampler_of({"OTEL_TRACES_SAMPLER": "traceidratio", "OTEL_TRACES_SAMPLER_ARG": rate})


def test_off_is_the_default() -> None:
    assert start_tracing(TracingSettings(), "relaygr-test", "test-0") is None


@pytest.mark.parametrize("status", [400, 301, 308])
def test_a_collector_that_refuses_or_redirects_costs_spans_and_nothing_else(
    collected: Collector, variables: pytest.MonkeyPatch, status: int
) -> None:
    collected.status = status
    world = World()
    with exporting(world):
        world.tracer.end(world.span())
        until(lambda: world.count("failed") == 1, "the failure is counted")
        collected.status = 200
        world.tracer.end(world.span("later"))
        until(lambda: world.count("exported") == 1, "the next span arrives")
    assert [span.name for span in collected.spans] == ["later"] and world.count("failed") == 1


def test_spans_that_a_collector_refuses_in_an_answer_of_success_are_counted_with_its_reason(
    collected: Collector, variables: pytest.MonkeyPatch
) -> None:
    collected.refused = 1
    world = World()
    world.tracer.end(world.span("one"), world.span("other"))
    with exporting(world), capture_logs() as lines:
        until(lambda: world.count("failed") == 1, "the refusal is counted")
        until(lambda: len(lines) == 1, "the refusal is logged")
    assert world.count("exported") == 1
    assert (lines[0]["spans"], lines[0]["reason"]) == (1, "no quota")


def test_a_collector_that_never_answers_costs_its_spans_and_keeps_no_process_from_its_end(
    variables: pytest.MonkeyPatch,
) -> None:
    world = World()
    with socket.create_server(("127.0.0.1", 0)) as silent:
        variables.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{silent.getsockname()[1]}")
        variables.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "3600")
        export = span_export(world)
        export.start()
        world.tracer.end(world.span())
        connection, _ = silent.accept()
        for _ in range(130):
            world.tracer.end(world.span())
        export.stop(0.01)
        assert (world.count("dropped"), world.count("exported")) == (30, 0)
        connection.close()
    until(lambda: world.count("failed") == 101, "what was sent and what waited is counted")


def test_a_full_batch_is_sent_before_its_time(collected: Collector, variables: pytest.MonkeyPatch) -> None:
    variables.setenv("OTEL_BSP_SCHEDULE_DELAY", "3600000")
    variables.setenv("OTEL_BSP_MAX_EXPORT_BATCH_SIZE", "3")
    tracer = started()
    for number in range(3):
        tracer.end(World().span(f"span-{number}"))
    until(lambda: len(collected.spans) == 3, "the batch arrives")
    tracer.close()


def otel_resource() -> object:
    from opentelemetry.sdk.resources import Resource

    return Resource({"service.name": "test"})


def span_export(world: World) -> SpanExport:
    """The spans of the world's tracer go to the collector of the environment."""
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.resources import Resource

    answers, resource = Answers(), Resource({"service.name": "test"})
    return SpanExport(world.tracer, OTLPSpanExporter(session=answers), answers, resource, world.metrics, 0.05)


@contextmanager
def exporting(world: World) -> Iterator[None]:
    export = span_export(world)
    export.start()
    yield
    export.stop(5)


def test_a_span_without_parent_is_a_root_for_opentelemetry() -> None:
    [span] = otel_spans([World().span()], otel_resource())  # type: ignore[arg-type]
    assert span.parent is None and span.status.is_ok and span.start_time == 1_000_000_000
