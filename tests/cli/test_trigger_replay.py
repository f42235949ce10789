"""Recorded events under the trigger's policies: the replay's figures, the file format, and the commands."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from relaygr.cli.app import app
from relaygr.kafka.clients import ProducerKind, make_producer
from relaygr.kafka.settings import KafkaSettings
from relaygr.replay.recording import (
    RankingLine,
    RecordedLine,
    RecordingWriter,
    RetrievalLine,
    StatusLine,
    read_recording,
)
from relaygr.replay.trigger import PolicyResult, replay_trigger
from relaygr.runtime.clock import SystemClock
from relaygr.runtime.errors import RelayError
from relaygr.schemas import HistoryVersion, RankingRequest, RetrievalEvent
from relaygr.schemas.codec import encode
from relaygr.schemas.messages import Behaviours, History
from relaygr.schemas.topics import Topic
from relaygr.trigger.settings import TriggerSettings
from tests.streams.test_trigger_handler import NOW_US, STATUS

SECOND_US = 1_000_000
LEAD_US = 80_000
BUDGET_US = 20_000
# 10 µs a token in all stages: 2,000 tokens take the budget of 20 ms.
LONG, SHORT = 4_000, 100


def visit(
    number: int, at_us: int, length: int = LONG, user: str | None = None, lead_us: int | None = LEAD_US
) -> list[RecordedLine]:
    """An event, and the request that follows after `lead_us`; None: no request follows."""
    user_id = user or f"user-{number}"
    event = RetrievalEvent(
        request_id=f"gateway.1.{number}",
        user_id=user_id,
        retrieval_at_us=NOW_US + at_us,
        expected_ranking_at_us=NOW_US + at_us + LEAD_US,
        ranking_budget_ms=BUDGET_US // 1000,
        expected_candidates=100,
        expected_suffix=0,
        history_version=HistoryVersion(1, length, user_id.encode().ljust(16, b"\x00")[:16]),
    )
    lines: list[RecordedLine] = [RetrievalLine(NOW_US + at_us, 0, event)]
    if lead_us is not None:
        lines.append(RankingLine(NOW_US + at_us + lead_us, event.request_id, 100, 0))
    return lines


def status(at_us: int, **changes: object) -> StatusLine:
    written = replace(STATUS, written_at_us=NOW_US + at_us, **changes)  # type: ignore[arg-type]
    return StatusLine(written.written_at_us, written)


def played(policy: str, *visits: list[RecordedLine], seconds: int = 30, **changes: object) -> PolicyResult:
    lines = [status(at_s * SECOND_US, **changes) for at_s in range(seconds)]
    recorded = sorted([*lines, *(line for each in visits for line in each)], key=lambda line: line.at_us)
    return replay_trigger(recorded, TriggerSettings(policy=policy))


LONG_VISITS = [visit(number, number * SECOND_US) for number in range(10)]
SHORT_VISITS = [visit(100 + number, number * SECOND_US + 500_000, SHORT) for number in range(10)]


def test_without_jobs_every_request_at_risk_is_missed() -> None:
    result = played("never", *LONG_VISITS, *SHORT_VISITS)
    assert (result.jobs, result.requests, result.missed) == (0, 20, 10)
    assert (result.prepare_us, result.prepared_bytes) == (0, 0)
    assert result.ranking_us == 10 * 41_000 + 10 * 2_000


def test_a_job_for_every_event_misses_none_and_half_of_them_are_needless() -> None:
    result = played("always", *LONG_VISITS, *SHORT_VISITS)
    assert (result.jobs, result.missed, result.needless, result.wasted) == (20, 0, 10, 0)
    assert result.prepared_bytes == 10 * (LONG + SHORT) * STATUS.kv_bytes_per_token
    assert result.prepare_us == 10 * 40_000 + 10 * 1_000


def test_the_default_policy_prepares_what_is_at_risk_and_nothing_else() -> None:
    result = played("policy", *LONG_VISITS, *SHORT_VISITS)
    assert (result.jobs, result.missed, result.needless, result.wasted) == (10, 0, 0, 0)
    assert result.decisions == {"admitted": 10, "not_at_risk": 10}


def test_a_job_is_wasted_if_no_request_comes_or_if_it_comes_too_early() -> None:
    abandoned, early = visit(1, 0, lead_us=None), visit(2, SECOND_US, lead_us=10_000)
    result = played("always", abandoned, early)
    assert (result.jobs, result.wasted, result.missed) == (2, 2, 1)


def test_jobs_wait_for_each_other_on_the_device() -> None:
    # Five pre-infers of 40 ms at once: the third ends after 120 ms, and its request can wait for 100.
    result = played("always", *(visit(number, 0) for number in range(5)))
    assert (result.jobs, result.missed, result.wasted) == (5, 3, 3)


def test_a_prefix_that_came_to_dram_is_reloaded_at_the_next_visit() -> None:
    visits = [visit(number, number * SECOND_US, user="ann") for number in range(5)]
    small, large = (played("always", *visits, dram_capacity_bytes=size) for size in (0, 2**30))
    assert small.prepare_us == 5 * 40_000
    # A reload costs nothing in this model.
    assert large.prepare_us == 40_000
    assert played("never", *visits, dram_capacity_bytes=2**30).missed == 1


def test_a_repeated_event_and_one_within_the_lead_time_cost_nothing() -> None:
    first = visit(1, 0, user="ann")
    again = visit(2, 10_000, user="ann")
    result = played("policy", first, first[:1], again)
    assert result.decisions == {"admitted": 1, "repeated": 1, "under_way": 1}
    assert (result.requests, result.missed, result.prepare_us) == (2, 0, 40_000)


def test_requests_without_a_recorded_event_or_a_known_owner_do_not_count() -> None:
    stray = [RankingLine(NOW_US, "gateway.9.9", 100, 0)]
    late = visit(1, 60 * SECOND_US)
    result = played("policy", stray, late)
    assert (result.events, result.requests, result.jobs, result.wasted) == (1, 0, 1, 1)


# -- the file ----------------------------------------------------------------------------------------


def written(path: Path) -> Path:
    with path.open("w", encoding="utf-8") as file:
        writer = RecordingWriter(file, b"k" * 16)
        writer.status(status(0).status)
        for number, length in enumerate((LONG, SHORT)):
            (line, _) = visit(number, 1_000 * number, length, user="ann")
            assert isinstance(line, RetrievalLine)
            writer.retrieval(line.event, line.partition, line.at_us)
            suffix = Behaviours(np.zeros(3, np.int64), np.zeros(3, np.uint16), np.zeros(3, np.int64))
            candidates = np.zeros(100, np.int64)
            sent_us = line.at_us + LEAD_US
            version = line.event.history_version
            writer.ranking(
                RankingRequest(line.event.request_id, "ann", sent_us, sent_us, 0, candidates, suffix, version)
            )
    return path


def test_a_recording_is_read_in_order_of_time_and_names_no_user(tmp_path: Path) -> None:
    lines = read_recording(written(tmp_path / "events.jsonl"))
    assert [type(line) for line in lines] == [StatusLine, RetrievalLine, RetrievalLine, RankingLine, RankingLine]
    first, second = (line.event for line in lines if isinstance(line, RetrievalLine))
    assert first.user_id == second.user_id != "ann"
    assert "ann" not in (tmp_path / "events.jsonl").read_text(encoding="utf-8")
    assert lines[-1] == RankingLine(NOW_US + 1_000 + LEAD_US, "gateway.1.1", 100, 3)


def test_an_inline_history_leaves_its_length_alone() -> None:
    file = io.StringIO()
    (line, *_) = visit(1, 0)
    assert isinstance(line, RetrievalLine)
    behaviours = Behaviours(np.arange(7), np.zeros(7, np.uint16), np.zeros(7, np.int64))
    inline = History(line.event.user_id, 4, np.zeros(1, np.int64), behaviours)
    RecordingWriter(file, b"k" * 16).retrieval(replace(line.event, history_version=None, history=inline), 0, 1)
    message = json.loads(file.getvalue().splitlines()[1])["message"]
    assert message["history_version"]["length"] == 7
    assert "history" not in message


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("", "is empty"),
        ("{}\n", "is not a recording"),
        ('{"format":"relaygr-trigger-recording","version":1}\n{"kind":"x","at_us":1}\n', "line 2: 'x' is no kind"),
        ('{"format":"relaygr-trigger-recording","version":1}\n{"kind":"ranking","at_us":-1}\n', "line 2: not a line"),
        ('{"format":"relaygr-trigger-recording","version":1}\nnonsense\n', "line 2: not a line"),
    ],
)
def test_what_is_no_recording_is_refused_with_its_line(tmp_path: Path, text: str, complaint: str) -> None:
    path = tmp_path / "events.jsonl"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(RelayError, match=complaint):
        read_recording(path)


# -- the command -------------------------------------------------------------------------------------


def run(*arguments: str) -> object:
    return CliRunner().invoke(app, ["trigger", "replay", *arguments])


def test_the_command_compares_all_policies_in_a_table_or_as_json(tmp_path: Path) -> None:
    path = str(written(tmp_path / "events.jsonl"))
    done = run(path)
    assert done.exit_code == 0, done.output
    assert [line.split()[0] for line in done.stdout.splitlines()[2:]] == ["policy", "always", "threshold", "never"]
    rows = json.loads(run(path, "--policy", "never", "--policy", "always", "--json").stdout)
    assert [(row["policy"], row["jobs"], row["missed"]) for row in rows] == [("never", 0, 1), ("always", 2, 0)]
    assert rows[0]["device_us"] == rows[0]["ranking_us"]


def test_the_command_says_what_is_missing(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    assert "cannot be read" in run(str(path)).output
    with path.open("w", encoding="utf-8") as file:
        RecordingWriter(file, b"k" * 16).status(status(0).status)
    assert "has no retrieval event" in run(str(path)).output
    assert "no trigger policy 'nope'" in run(str(written(path)), "--policy", "nope").output


@pytest.mark.slow
def test_what_the_topics_hold_is_recorded_and_replayed(kafka_settings: KafkaSettings, tmp_path: Path) -> None:
    kafka = kafka_settings
    producer = make_producer(kafka, ProducerKind.DURABLE, "test-writer")
    now_us = SystemClock().wall_us()
    writes = [(Topic.WORKERS, b"worker-00", encode(replace(STATUS, written_at_us=now_us - SECOND_US)))]
    for number, length in enumerate((LONG, SHORT)):
        (line, _) = visit(number, now_us - NOW_US, length, user="ann")
        assert isinstance(line, RetrievalLine)
        sent_us = now_us + SECOND_US
        suffix = Behaviours(np.zeros(0, np.int64), np.zeros(0, np.uint16), np.zeros(0, np.int64))
        request = RankingRequest(line.event.request_id, "ann", sent_us, sent_us, 0, np.arange(100), suffix)
        event = replace(line.event, expected_ranking_at_us=sent_us)
        writes += [(Topic.RETRIEVAL, b"ann", encode(event)), (Topic.RANKING, b"ann", encode(request))]
    writes.append((Topic.RETRIEVAL, b"ann", b"garbage"))
    for topic, key, value in writes:
        producer.produce(kafka.topic(topic), value, key)
    assert producer.flush(10) == 0
    path = tmp_path / "events.jsonl"
    changed = (f"topic_prefix={kafka.topic_prefix}", f"group_prefix={kafka.group_prefix}")
    options = [part for each in changed for part in ("--set", each)]
    command = ["trigger", "record", str(path), "--bootstrap", kafka.bootstrap, *options]
    done = CliRunner().invoke(app, command)
    assert done.exit_code == 0, done.output
    assert "2 of retrieval, 2 of ranking, 1 of workers" in done.output
    (result,) = json.loads(run(str(path), "--policy", "policy", "--json").stdout)
    assert (result["events"], result["requests"], result["missed"]) == (2, 2, 0)
    assert result["decisions"] == {"admitted": 1, "not_at_risk": 1}
