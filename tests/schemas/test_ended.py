"""Every end of a ranking request is declared once, and has its name and its counter everywhere."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from relaygr.client import ClientStatistics
from relaygr.client.metrics import GatewayMetrics
from relaygr.gateway.openapi import document
from relaygr.schemas.codec import DecodeError, EncodeError, decode, encode
from relaygr.schemas.ended import UNRANKED, WIRE_ENDS, WIRE_REASONS, Ended, Reason, http_status
from relaygr.schemas.fields import Other
from relaygr.schemas.messages import Path, RankingResult, StageTimings
from relaygr.simulate.figures import ENDINGS
from relaygr.ui.model import KINDS
from relaygr.worker.metrics import WorkerMetrics


def labels(registry: CollectorRegistry, name: str, label: str) -> set[str]:
    samples = (sample for family in registry.collect() for sample in family.samples if sample.name == name)
    return {sample.labels[label] for sample in samples}


def result(**fields: Any) -> RankingResult:
    return RankingResult("r", "worker-00", **{"outcome": Ended.FAILED} | fields, **TIMES)


TIMES: dict[str, Any] = {
    "request_sent_at_us": 1, "received_at_us": 1, "sent_at_us": 1, "timings": StageTimings(),
}  # fmt: skip


def test_texts_and_names_are_those_that_users_know():
    assert list(map(str, Ended)) == ["ranked", "expired", "failed", "timed_out"]
    assert KINDS == ("hbm", "dram", "pending", "full", "truncated", "other", "expired", "failed", "unanswered")
    assert ENDINGS == ("hbm", "dram", "pending", "full", "truncated", "refused", "expired", "failed", "lost")


def test_no_text_is_declared_twice():
    texts = [*Ended, *Reason, *Path]
    assert len(texts) == len(set(texts))


@pytest.mark.parametrize(
    ("ended", "reason", "status"),
    [
        (Ended.RANKED, None, 200),
        (Ended.EXPIRED, None, 504),
        (Ended.FAILED, Reason.DEVICE_ERROR, 502),
        (Ended.FAILED, Reason.OVERLOADED, 503),
        (Ended.FAILED, Reason.TOO_LONG, 400),
        (Ended.FAILED, Other("of a newer worker"), 502),
        (Ended.TIMED_OUT, Reason.NO_ANSWER, 504),
        (Ended.TIMED_OUT, Reason.CLOSED, 503),
    ],
)
def test_the_reason_has_the_first_say_about_the_http_status(ended: Ended, reason: str | None, status: int):
    assert http_status(ended, reason) == status


@pytest.mark.parametrize("end", [each for each in WIRE_ENDS if each is not Ended.RANKED])
def test_a_result_has_each_end_of_the_wire(end: Ended):
    written = result(outcome=end, reason=Reason.DEVICE_ERROR if end.row.needs_reason else None)
    assert decode(RankingResult, encode(written)).outcome is end


def test_no_result_says_what_only_the_callers_side_knows():
    with pytest.raises(EncodeError, match="'timed_out' is not one of ranked, expired, failed"):
        encode(result(outcome=Ended.TIMED_OUT, reason=Reason.NO_ANSWER))
    with pytest.raises(EncodeError, match="'no_answer' is not one of"):
        encode(result(reason=Reason.NO_ANSWER))
    text = encode(result(reason=Other("no_answer")))
    assert type(decode(RankingResult, text).reason) is Other
    with pytest.raises(DecodeError, match="'later' is not one of"):
        decode(RankingResult, encode(result(reason=Reason.TOO_LONG)).replace(b"\xa6failed", b"\xa5later"))


def test_every_end_has_its_counters():
    registry = CollectorRegistry()
    WorkerMetrics(registry)
    GatewayMetrics(registry)
    assert labels(registry, "relaygr_gateway_requests_total", "status") == set(UNRANKED)
    assert labels(registry, "relaygr_gateway_late_results_total", "status") == set(WIRE_ENDS)
    assert labels(registry, "relaygr_worker_unranked_total", "outcome") == {Ended.EXPIRED, *WIRE_REASONS}
    assert labels(registry, "relaygr_worker_diverted_received_total", "outcome") == {"ranked", "late", "unranked"}
    assert set(Ended) <= {field.name for field in fields(ClientStatistics)}


def test_the_openapi_document_names_every_end_and_its_status():
    found = document(needs_token=False)
    assert found["components"]["schemas"]["RankOutcome"]["properties"]["status"]["enum"] == [*Ended]
    statuses = {str(http_status(end, reason)) for end in UNRANKED for reason in (None, *Reason)}
    assert statuses <= found["paths"]["/v1/rank"]["post"]["responses"].keys()
