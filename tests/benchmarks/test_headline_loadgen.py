"""The bridge to LoadGen, before a worker that tells the truth and workers that lie."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("mlperf_loadgen", reason="no wheel for this platform")

from relaygr.bench.headline.loadgen import LoadgenPlayer
from relaygr.bench.headline.question import VALID, Judged, read_judged, summary_path
from relaygr.bench.headline.run import SENDER
from relaygr.bench.pipeline.echo import example_result
from relaygr.client import RelayClient
from relaygr.kafka.clients import ProducerKind, make_group_consumer, make_producer
from relaygr.kafka.message_headers import headers_of
from relaygr.kafka.settings import KafkaSettings
from relaygr.processes import write_config
from relaygr.runtime.errors import RelayError
from relaygr.schemas.codec import decode, encode
from relaygr.schemas.ended import Ended, Reason
from relaygr.schemas.headers import RankingHeaders, ResultHeaders
from relaygr.schemas.messages import Path as RankingPath
from relaygr.schemas.messages import RankingRequest
from relaygr.schemas.topics import Topic
from relaygr.settings import Settings
from relaygr.traffic.player import Request
from relaygr.traffic.population import population_of
from relaygr.traffic.records import ImpressionRecord, read_records

pytestmark = pytest.mark.parametrize("broker", ["embedded"], indirect=True)
STALL_S = 0.06
QUERIES, RATE_PER_S, BUDGET_MS = 459, 100.0, 5_000
EVERY = 20
"""Of so many requests of the run one is lied to."""
TRAFFIC = {
    "rate_per_s": RATE_PER_S, "duration_s": 8.0, "users": 40, "history_median": 32, "history_max": 64, "items": 200,
    "candidates": 8, "suffix": 2, "growth": 2, "lead_median_ms": 20.0, "lead_sigma": 0.0, "budget_ms": BUDGET_MS,
    "settle_s": 0.0,
}  # fmt: skip


@contextmanager
def worker(settings: Settings, lie: str) -> Iterator[None]:
    """Answers every request, but for every 20th as the lie says."""
    stopping = threading.Event()
    consumer = make_group_consumer(settings, settings.workers_group, "liar", instance_id="liar")
    producer = make_producer(settings, ProducerKind.DURABLE, "liar")
    assigned = threading.Event()
    consumer.subscribe([settings.topic(Topic.RANKING)], on_assign=lambda *_: assigned.set())
    whole = example_result(settings.traffic)

    def answer(message: object) -> None:
        nonlocal asked
        headers = RankingHeaders.decode(headers_of(message))
        request = decode(RankingRequest, message.value())
        told = replace(
            whole,
            request_id=request.request_id,
            request_sent_at_us=request.sent_at_us,
            scores=np.zeros(len(request.candidates), dtype="<f4"),
        )
        copies = 1
        if not request.user_id.startswith("warm-up"):
            asked += 1
            if asked % EVERY == 0:
                if lie == "never":
                    return
                if lie == "late":
                    threading.Timer(BUDGET_MS / 1000 + 0.2, send, (headers, told, 1)).start()
                    return
                if lie == "half":
                    told = replace(told, path=RankingPath.TRUNCATED)
                if lie == "old":
                    told = replace(told, history_stale=True)
                if lie == "fails":
                    told = replace(
                        told, outcome=Ended.FAILED, reason=Reason.OVERLOADED, path=None, scores=None, num_tasks=0
                    )
                copies = 2 if lie == "twice" else 1
        send(headers, told, copies)

    def send(headers: RankingHeaders, told: object, copies: int) -> None:
        for _ in range(copies):
            producer.produce(
                headers.reply_topic, encode(told), told.request_id.encode(), partition=headers.reply_partition,
                headers=[*ResultHeaders(told.request_id, headers.gateway_id).encode()],
            )  # fmt: skip
        producer.poll(0)

    def serve() -> None:
        while not stopping.is_set():
            for message in consumer.consume(64, 0.05):
                if message.error() is None:
                    answer(message)
            producer.poll(0)

    asked = 0
    thread = threading.Thread(target=serve)
    thread.start()
    assert assigned.wait(60)
    try:
        yield
    finally:
        stopping.set()
        thread.join()
        producer.flush(5)
        consumer.close()


@pytest.fixture
def settings(kafka_settings: KafkaSettings) -> Settings:
    return Settings.model_validate(
        kafka_settings.model_dump() | {"traffic": TRAFFIC, "client": {"lost_after_ms": 2_000}}
    )


class LateToIssue(LoadgenPlayer):
    """LoadGen's thread is held up before every tenth query."""

    def _issue(self, coming: deque[Request], *rest: Any) -> None:
        if len(coming) % 10 == 0:
            time.sleep(STALL_S)
        super()._issue(coming, *rest)


class LateToSend(LoadgenPlayer):
    """The sender is held up before every tenth ranking request."""

    def _rank_on_schedule(self, request: Request, at_us: int) -> None:
        if request.impression.number % 10 == 0:
            time.sleep(STALL_S)
        super()._rank_on_schedule(request, at_us)


def judged(
    settings: Settings, queries: int = QUERIES, kind: type[LoadgenPlayer] = LoadgenPlayer
) -> tuple[Judged, list[ImpressionRecord]]:
    records: list[ImpressionRecord] = []
    player = kind(
        partial(RelayClient, settings, "gateway-00", settings.client), settings.traffic,
        population_of(settings.traffic), records.append, settings.client.lost_after_ms / 1000,
        warm_up_s=0.5, queries=queries,
    )  # fmt: skip
    player.play()
    assert player.judged is not None
    return player.judged, records


@pytest.mark.slow
@pytest.mark.parametrize("lie", ["", "twice"])
def test_each_query_is_answered_once_and_the_run_is_valid(settings: Settings, lie: str):
    with worker(settings, lie):
        found, records = judged(settings)
    assert (found.verdict, found.queries, found.over) == (VALID, QUERIES, 0)
    assert 0 < found.p50_ms <= found.p99_ms < BUDGET_MS
    assert 0 < found.lag_p99_ms < BUDGET_MS
    numbers = [each.number for each in records]
    assert len(numbers) == len(set(numbers)) > QUERIES, "the warm-up is recorded, too"


@pytest.mark.slow
@pytest.mark.parametrize("lie", ["never", "late", "half", "old", "fails"])
def test_a_query_without_a_whole_answer_in_time_is_late_and_the_run_invalid(settings: Settings, lie: str):
    with worker(settings, lie):
        found, _ = judged(settings)
    assert found.verdict == "INVALID"
    assert found.queries == QUERIES
    assert found.over == pytest.approx(QUERIES / EVERY, abs=2), "none disappears"
    assert found.p99_ms > BUDGET_MS


@pytest.mark.slow
@pytest.mark.parametrize("kind", [LateToIssue, LateToSend])
def test_a_sender_that_is_held_up_is_found_out(settings: Settings, kind: type[LoadgenPlayer]):
    with worker(settings, ""):
        found, _ = judged(settings, kind=kind)
    assert found.lag_p99_ms >= 0.9 * 1000 * STALL_S


def test_a_schedule_with_too_few_impressions_is_refused_before_the_first_query(settings: Settings):
    with pytest.raises(RelayError, match="the schedule ends after"):
        judged(settings, 10_000)


@pytest.mark.slow
def test_the_process_writes_records_verdict_and_loadgens_own_summary(settings: Settings, tmp_path: Path):
    write_config(settings, tmp_path / "settings.yaml")
    records = tmp_path / "records.jsonl"
    with worker(settings, ""):
        arguments = ["--config", str(tmp_path / "settings.yaml"), "--warm-up-s", "0.2", "--queries", str(QUERIES)]
        subprocess.run([sys.executable, "-m", SENDER, str(records), *arguments], check=True, timeout=120)
    assert read_judged(records).verdict == VALID
    assert "Result is : VALID" in summary_path(records).read_text(encoding="utf-8")
    assert len(list(read_records(records))) > QUERIES
