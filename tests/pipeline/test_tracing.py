"""One impression through real processes that trace: its spans, looked at in a collector."""

from __future__ import annotations

import itertools
import urllib.request
import uuid
from collections.abc import Iterator

import pytest
from prometheus_client import CollectorRegistry

from relaygr.client import Ended, RelayClient
from relaygr.devbroker import LocalBroker
from relaygr.schemas.codec import encode
from relaygr.schemas.messages import Path
from relaygr.schemas.partitioner import partition_for
from relaygr.schemas.topics import Topic
from relaygr.tracing import Tracer, TracingSettings, start_tracing
from relaygr.tracing.tracer import TracerMetrics
from tests.leftovers import owned_by_a_fixture
from tests.waiting import until
from tests.worlds.otlp import Collector, SeenSpan, collector, traceparent
from tests.worlds.relay import RawGateway, Relay, candidates_of, computed_ahead, history_of, new_user

pytestmark = pytest.mark.slow

ON = "tracing.enabled=true"
BUDGET_MS = 5_000


@pytest.fixture(scope="module")
def broker(embedded_broker: LocalBroker) -> LocalBroker:
    """Spans do not depend on the broker."""
    return embedded_broker


class Stack:
    """A worker, a trigger and a client that trace everything, and their collector."""

    def __init__(self, relay: Relay, seen: Collector, tracer: Tracer) -> None:
        self.relay = relay
        self.seen = seen
        self.worker = relay.start_worker("worker-00", ON)
        self.trigger = relay.start_trigger(ON)
        relay.await_ready(self.worker, self.trigger)
        self.client = RelayClient(
            relay.kafka, f"gw-{uuid.uuid4().hex[:6]}", registry=CollectorRegistry(), tracer=tracer
        )
        self.client.start()

    def spans(self, request_id: str, *names: str) -> dict[str, SeenSpan]:
        """The spans of an impression by name, once those with these names have come."""
        until(lambda: {*names} <= {span.name for span in self.seen.of(request_id)}, f"spans {names}")
        return {span.name: span for span in self.seen.of(request_id)}


@pytest.fixture(scope="module")
def stack(relay: Relay) -> Iterator[Stack]:
    with pytest.MonkeyPatch.context() as patch, collector() as seen:
        patch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", seen.endpoint)
        patch.setenv("OTEL_BSP_SCHEDULE_DELAY", "100")
        patch.setattr("relaygr.tracing.otlp.TracerMetrics", lambda: TracerMetrics(CollectorRegistry()))
        # The processes take the environment of the moment in which they are made.
        with Relay(relay.kafka, relay.folder / "traced", relay.settings.worker.model) as traced:
            tracer = start_tracing(TracingSettings(enabled=True), "gateway", "gw-0")
            assert tracer is not None
            running = Stack(traced, seen, tracer)
            with owned_by_a_fixture(traced.process_ids):
                yield running
            running.client.close()
            tracer.close()


def impression(stack: Stack, user: str, **fields: str) -> str:
    """One impression whose prefix is computed ahead. Returns its request id."""
    history = history_of(user, 200)
    request_id = computed_ahead(
        stack.client,
        stack.worker,
        history,
        ranking_budget_ms=BUDGET_MS,
        expected_ranking_in_ms=10_000,
        expected_candidates=20,
        expected_suffix=4,
        **fields,
    )
    outcome = stack.client.rank(
        user,
        candidates_of(),
        budget_ms=BUDGET_MS,
        suffix=history_of(user, 4, seed=77).behaviours,
        history_version=history.version(),
        request_id=request_id,
        **fields,
    )
    assert outcome.status is Ended.RANKED and outcome.result is not None
    assert outcome.result.path is Path.HBM
    return request_id


def test_an_impression_is_two_traces_that_a_link_joins(stack: Stack) -> None:
    kafka, user = stack.relay.kafka, new_user("traced")
    request_id = impression(stack, user)
    retrieval, preinfer, ranking, results = (
        kafka.topic(topic) for topic in (Topic.RETRIEVAL, Topic.PREINFER, Topic.RANKING, Topic.RESULTS)
    )
    names = {
        f"send {retrieval}", f"process {retrieval}", f"send {preinfer}", f"process {preinfer}", "relaygr.pre_infer",
        "relaygr.rank", f"send {ranking}", f"process {ranking}", "relaygr.queue", "relaygr.hit", f"send {results}",
        f"receive {results}",
    }  # fmt: skip
    spans = stack.spans(request_id, *names)
    assert spans.keys() == names

    chains = (
        (f"send {retrieval}", f"process {retrieval}", f"send {preinfer}", f"process {preinfer}", "relaygr.pre_infer"),
        ("relaygr.rank", f"send {ranking}", f"process {ranking}", f"send {results}", f"receive {results}"),
        ("relaygr.rank", f"send {ranking}", f"process {ranking}", "relaygr.hit"),
    )
    for chain in chains:
        assert spans[chain[0]].parent_id == ""
        for parent, child in itertools.pairwise(chain):
            assert spans[child].parent_id == spans[parent].span_id
            assert spans[child].trace_id == spans[parent].trace_id
    first, second = spans[f"send {retrieval}"], spans["relaygr.rank"]
    assert first.trace_id != second.trace_id and first.trace_id[16:] == second.trace_id[16:]
    assert second.links == ((first.trace_id, first.span_id),)
    job = spans[f"process {preinfer}"]
    assert spans[f"process {ranking}"].links == ((job.trace_id, job.span_id),)

    assert {name: span.service for name, span in spans.items()} == {
        **dict.fromkeys(names, "relaygr-worker"),
        **dict.fromkeys((f"process {retrieval}", f"send {preinfer}"), "relaygr-trigger"),
        **dict.fromkeys((f"send {retrieval}", "relaygr.rank", f"send {ranking}", f"receive {results}"), "gateway"),
    }
    partition = str(partition_for(user.encode(), kafka.partitions))
    for name, span in spans.items():
        assert not span.is_error and span.start_us <= span.end_us
        assert span.kind == {"send": "producer", "process": "consumer", "receive": "consumer"}.get(
            name.partition(" ")[0], "internal"
        )
        assert user not in str(span.attributes)
        if " " in name and results not in name:
            assert span.attributes["messaging.destination.partition.id"] == partition
    process = spans[f"process {ranking}"]
    assert (process.attributes["relaygr.path"], process.attributes["relaygr.outcome"]) == ("hbm", "ranked")
    assert spans[f"process {retrieval}"].attributes["relaygr.decision"] == "admitted"
    assert job.attributes["relaygr.job.outcome"] == "computed"


def test_the_stages_of_a_request_lie_within_it_and_do_not_overlap(stack: Stack) -> None:
    request_id = impression(stack, new_user("stages"))
    ranking = stack.relay.kafka.topic(Topic.RANKING)
    process = stack.spans(request_id, f"process {ranking}", "relaygr.hit", "relaygr.pre_infer")[f"process {ranking}"]
    inside = [s for s in stack.seen.of(request_id) if s.parent_id == process.span_id and s.kind == "internal"]
    assert process.start_us <= inside[0].start_us and inside[-1].end_us <= process.end_us
    assert all(first.end_us <= then.start_us for first, then in itertools.pairwise(inside))


def test_the_spans_of_a_caller_are_the_parents(stack: Stack) -> None:
    request_id = impression(stack, new_user("caller"), traceparent=traceparent(trace_id=0xFEED, span_id=0xBEEF))
    ranking = stack.relay.kafka.topic(Topic.RANKING)
    spans = stack.spans(request_id, "relaygr.rank", f"process {ranking}", "relaygr.pre_infer")
    assert {span.trace_id for span in spans.values()} == {f"{0xFEED:032x}"}
    assert spans["relaygr.rank"].parent_id == f"{0xBEEF:016x}"


def test_a_trace_that_the_caller_does_not_record_is_recorded_nowhere(stack: Stack) -> None:
    request_id = impression(stack, new_user("unsampled"), traceparent=traceparent(0xD0, 0xD1, is_sampled=False))
    # A later impression has come, so the one before it has not.
    later = impression(stack, new_user("later"))
    stack.spans(later, f"receive {stack.relay.kafka.topic(Topic.RESULTS)}", "relaygr.hit", "relaygr.pre_infer")
    assert stack.seen.of(request_id) == []


@pytest.mark.parametrize("header", [b"", b"garbage", b"\xff\xfe", b"00-" + b"0" * 32 + b"-" + b"0" * 16 + b"-01"])
def test_a_malformed_header_is_ignored(stack: Stack, header: bytes) -> None:
    raw, user = RawGateway(stack.relay.kafka), new_user("malformed")
    with_trace = raw.headers(BUDGET_MS)
    raw.send(
        Topic.RANKING,
        encode(raw.request(with_trace, user)),
        user.encode(),
        [*with_trace.encode(), ("traceparent", header)],
        partition_for(user.encode(), stack.relay.kafka.partitions),
    )
    assert raw.answer(with_trace).path is not None
    raw.close()
    # Only a client begins traces. A later impression has come, so the one before it has not.
    later = impression(stack, new_user("later"))
    stack.spans(later, f"receive {stack.relay.kafka.topic(Topic.RESULTS)}", "relaygr.hit", "relaygr.pre_infer")
    assert stack.seen.of(with_trace.request_id) == []


def test_what_the_client_does_not_record_has_no_header_and_is_recorded_nowhere(stack: Stack) -> None:
    """The trigger and the worker record every trace that reaches them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OTEL_TRACES_SAMPLER", "parentbased_always_off")
        tracer = start_tracing(TracingSettings(enabled=True), "gateway", "gw-1")
    assert tracer is not None
    user = new_user("unrecorded")
    client = RelayClient(stack.relay.kafka, f"gw-{uuid.uuid4().hex[:6]}", registry=CollectorRegistry(), tracer=tracer)
    with client:
        outcome = client.rank(user, candidates_of(), budget_ms=BUDGET_MS)
    tracer.close()
    assert outcome.result is not None
    later = impression(stack, new_user("later"))
    stack.spans(later, f"receive {stack.relay.kafka.topic(Topic.RESULTS)}", "relaygr.hit", "relaygr.pre_infer")
    assert stack.seen.of(outcome.request_id) == []


def test_a_latency_names_its_trace(stack: Stack) -> None:
    request_id = impression(stack, new_user("exemplar"))
    ranking = stack.relay.kafka.topic(Topic.RANKING)
    process = stack.spans(request_id, f"process {ranking}")[f"process {ranking}"]
    asked = urllib.request.Request(
        f"http://127.0.0.1:{stack.worker.port}/metrics", headers={"accept": "application/openmetrics-text"}
    )
    with urllib.request.urlopen(asked, timeout=10) as answer:
        lines = answer.read().decode().splitlines()
    exemplars = [line for line in lines if line.startswith("relaygr_worker_ranking_seconds_bucket") and " # " in line]
    assert any(f'trace_id="{process.trace_id}"' in line for line in exemplars)
