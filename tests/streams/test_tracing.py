"""Tracing: ids and sampling, the bounded queue, the stages of a request, and the export to a collector."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry

from relaygr.client.tracing import ClientTraces
from relaygr.runtime.clock import ManualClock
from relaygr.runtime.errors import RelayError
from relaygr.schemas.headers import RankingHeaders
from relaygr.schemas.trace_context import TRACEPARENT, TraceContext
from relaygr.schemas.vectors.samples import MESSAGES
from relaygr.tracing import TracingSettings, start_tracing
from relaygr.tracing.otlp import OtelSampler, SpanExport, otel_spans
from relaygr.tracing.spans import MessagePlace, Operation, Span, SpanKind, message_span
from relaygr.tracing.stages import RankingTimes, Stage, StageSpan, stages_of
from relaygr.tracing.tracer import Tracer, TracerMetrics
from relaygr.tracing.worker import REMEMBERED_JOBS, WorkerTraces
from tests.worlds.otlp import Collector, collector, traceparent
from tests.worlds.relay import wait_until

RATIO = pytest.importorskip("opentelemetry.sdk.trace.sampling")


class Always:
    """Records every trace."""

    def is_sampled(self, parent: TraceContext | None, trace_id: int, name: str) -> bool:
        return True


class World:
    """A tracer without an exporter."""

    def __init__(self, sampler: object = None, max_queue_spans: int = 100) -> None:
        self.registry = CollectorRegistry()
        self.clock = ManualClock()
        self.metrics = TracerMetrics(self.registry)
        self.tracer = Tracer(sampler or Always(), max_queue_spans, self.metrics, self.clock)  # type: ignore[arg-type]

    def count(self, outcome: str) -> float:
        return self.registry.get_sample_value("relaygr_tracing_spans_total", {"outcome": outcome}) or 0.0

    def span(self, name: str = "span") -> Span:
        own = self.tracer.begin(name, None, "r")
        return Span(name, SpanKind.INTERNAL, own, None, 1_000_000, 2_000_000)


# -- ids and sampling --------------------------------------------------------------------------------


def test_a_span_with_a_parent_is_of_its_trace() -> None:
    parent = TraceContext(7, 8, True)
    own = World().tracer.begin("rank", parent, "r")
    assert own.trace_id == 7 and own.span_id != 8


def test_the_traces_of_an_impression_are_two_that_one_sampler_treats_alike() -> None:
    ratio = World(OtelSampler(RATIO.TraceIdRatioBased(0.5)))
    decisions = []
    for number in range(200):
        retrieval = ratio.tracer.begin("send", None, f"request-{number}")
        ranking = ratio.tracer.begin("rank", None, f"request-{number}")
        assert retrieval.trace_id != ranking.trace_id or retrieval is ratio.tracer.unrecorded
        assert retrieval.is_sampled is ranking.is_sampled
        decisions.append(ranking.is_sampled)
    assert 60 < sum(decisions) < 140


@pytest.mark.parametrize("ratio", [0.0, 0.5, 0.999])
def test_a_later_process_with_a_sampler_of_its_own_does_not_record_what_began_unrecorded(ratio: float) -> None:
    began = World(OtelSampler(RATIO.TraceIdRatioBased(0.0))).tracer.begin("rank", None, "r")
    assert not World(OtelSampler(RATIO.TraceIdRatioBased(ratio))).tracer.begin("process", began, "r").is_sampled


@pytest.mark.parametrize("is_sampled", [True, False])
def test_a_parent_based_sampler_follows_the_parent(is_sampled: bool) -> None:
    world = World(OtelSampler(RATIO.ParentBased(RATIO.ALWAYS_OFF if is_sampled else RATIO.ALWAYS_ON)))
    assert world.tracer.begin("rank", TraceContext(1, 2, is_sampled), "r").is_sampled is is_sampled
    assert world.tracer.begin("rank", None, "r").is_sampled is not is_sampled


@pytest.mark.parametrize("ratio", [0.0, 1e-9, 0.01, 0.5, 1.0])
@pytest.mark.parametrize("based", [False, True])
@given(trace_id=st.integers(1, 2**128 - 1), near=st.integers(-2, 2))
def test_a_ratio_samples_the_traces_that_opentelemetry_samples(
    ratio: float, based: bool, trace_id: int, near: int
) -> None:
    """The client decides without a call of OpenTelemetry's sampler."""
    root = RATIO.TraceIdRatioBased(ratio)
    theirs = RATIO.ParentBased(root) if based else root
    ours = OtelSampler(theirs)
    at_the_bound = max(1, min(2**64 - 1, root.bound + near))
    for each in (trace_id, trace_id >> 64 << 64 | at_the_bound):
        expected = theirs.should_sample(None, each, "rank").decision is RATIO.Decision.RECORD_AND_SAMPLE
        assert ours.is_sampled(None, each, "rank") is expected


# -- the queue ---------------------------------------------------------------------------------------


def test_spans_beyond_the_queue_are_dropped_and_counted() -> None:
    world = World(max_queue_spans=3)
    for _ in range(5):
        world.tracer.end(world.span())
    assert (world.tracer.waiting, world.count("dropped")) == (3, 2)
    assert len(world.tracer.take(10)) == 3 and world.tracer.waiting == 0


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
    "it expired in the queue": (RankingTimes(100, 1_000), [(Stage.QUEUE, 100, 1_000)]),
    "it was refused at once": (RankingTimes(100, 100), []),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_the_stages_of_a_request(name: str) -> None:
    times, expected = CASES[name]
    assert [(each.stage, each.start_us, each.end_us) for each in stages_of(times, Stage.FULL)] == expected


@given(st.lists(st.integers(0, 1_000), min_size=9, max_size=9))
def test_stages_never_overlap_whatever_the_times(numbers: list[int]) -> None:
    received_us, ended_us = sorted(numbers[:2])
    stages = stages_of(RankingTimes(received_us, ended_us, *numbers[2:]), Stage.FULL)
    assert all(received_us <= each.start_us < each.end_us <= ended_us for each in stages)
    assert all(first.end_us <= then.start_us for first, then in itertools.pairwise(stages))


# -- a client ----------------------------------------------------------------------------------------


class Never(Always):
    """Records no trace."""

    def is_sampled(self, parent: TraceContext | None, trace_id: int, name: str) -> bool:
        return False


@pytest.mark.parametrize("recorded", [False, True])
def test_a_message_whose_trace_is_not_recorded_has_its_header_and_nothing_else(recorded: bool) -> None:
    world = World(Always() if recorded else Never())
    traces = ClientTraces(world.tracer, "retrieval", "ranking", "results")
    for begun in (
        traces.retrieval(MESSAGES["RetrievalEvent"], None),
        traces.rank(MESSAGES["RankingRequest"], None),
    ):
        context = TraceContext.parse(begun.header)
        assert context is not None and context.is_sampled is recorded
        assert (begun.trace is not None) is recorded


# -- a worker ----------------------------------------------------------------------------------------


def reply(given: str | None = None, request_id: str = "r") -> RankingHeaders:
    return RankingHeaders(request_id, "gw", "results", 0, 1, given.encode() if given else None)


def test_a_ranking_links_to_the_job_of_its_impression_once() -> None:
    world = World()
    traces, place = WorkerTraces(world.tracer), MessagePlace("jobs", 1, 2)
    job = traces.job([(TRACEPARENT, traceparent(trace_id=5).encode())], "jobs", "r")
    assert job is not None
    job.ended(place, 10, 20, [StageSpan(Stage.PRE_INFER, 10, 20)], 0, "computed", None)
    for _ in range(2):
        ranking = traces.ranking(reply(), "ranking")
        assert ranking is not None
        ranking.answered(place, 10, 20, 30, [], 0, {}, None)
    job_span, compute, first, second = world.tracer.take(10)
    assert (job_span.context.trace_id, compute.parent, compute.name) == (5, job_span.context, "relaygr.pre_infer")
    assert (first.link, second.link) == (job_span.context, None)


def test_a_worker_remembers_a_bounded_number_of_jobs() -> None:
    world = World(max_queue_spans=10**6)
    traces = WorkerTraces(world.tracer)
    for number in range(REMEMBERED_JOBS + 1):
        job = traces.job(None, "jobs", f"r{number}")
        assert job is not None
        job.ended(MessagePlace("jobs"), 0, 1, [], 0, "computed", None)
    world.tracer.take(10**6)
    for request_id in ("r0", "r1"):
        ranking = traces.ranking(reply(request_id=request_id), "ranking")
        assert ranking is not None
        ranking.answered(MessagePlace("ranking"), 0, 1, 1, [], 0, {}, None)
    assert [span.link is None for span in world.tracer.take(2)] == [True, False]


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
    own = tracer.begin("process topic", parent, "r")
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
    assert not tracer.begin("rank", None, "r").is_sampled
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


def test_off_is_the_default() -> None:
    assert start_tracing(TracingSettings(), "relaygr-test", "test-0") is None


def test_a_collector_that_refuses_costs_spans_and_nothing_else(
    collected: Collector, variables: pytest.MonkeyPatch
) -> None:
    collected.status = 400
    world = World()
    resource = otel_resource()
    export = SpanExport(otlp_exporter(), resource, world.metrics, 0.05, 10)
    export.start(world.tracer)
    world.tracer.end(world.span())
    wait_until("the failure is counted", lambda: world.count("failed") == 1)
    collected.status = 200
    world.tracer.end(world.span("later"))
    wait_until("the next span arrives", lambda: world.count("exported") == 1)
    export.stop(5)
    assert [span.name for span in collected.spans] == ["later"]


def otel_resource() -> object:
    from opentelemetry.sdk.resources import Resource

    return Resource({"service.name": "test"})


def otlp_exporter() -> object:
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

    return OTLPSpanExporter()


def test_a_span_without_parent_is_a_root_for_opentelemetry() -> None:
    [span] = otel_spans([World().span()], otel_resource())  # type: ignore[arg-type]
    assert span.parent is None and span.status.is_ok and span.start_time == 1_000_000_000
