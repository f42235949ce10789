"""`relaygr publish retrieval|ranking`: what is sent, what is refused, and what is printed."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import sys
import threading
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from typer.testing import CliRunner, Result

from relaygr.cli.publish import app
from relaygr.client import Ended, RankOutcome
from relaygr.devbroker import LocalBroker
from relaygr.ingest.json_lines import MAX_LINE_BYTES, JsonLineError, read_lines
from relaygr.ingest.known import SentInputs
from relaygr.ingest.messages import behaviours_from_line, ranking_from_line, retrieval_from_line
from relaygr.ingest.publish_lines import Outcomes
from relaygr.kafka.settings import KafkaSettings
from relaygr.schemas import codec
from relaygr.schemas.fields import FieldError
from relaygr.schemas.json_messages import from_json, to_json
from relaygr.schemas.messages import BehaviourEvent, RankingRequest, RankingResult, RetrievalEvent
from relaygr.schemas.topics import Topic
from relaygr.worker.model.checkpoint import random_checkpoint, save_checkpoint
from relaygr.worker.model.options import ContextualFeature
from tests.echo_worker import answer_once, echo_worker, read_topic
from tests.strategies import messages
from tests.worlds.model import small_config

DOCS = [Path(__file__).parents[2] / "docs" / page for page in ("gateway.md", "publishing.md")]
NOW_US = 1_700_000_000_000_000
EVENT = {"user_id": "ann", "expected_candidates": 3, "expected_suffix": 1}
REQUEST = {"user_id": "ann", "candidates": [1, 2]}


@pytest.fixture(scope="module")
def broker(embedded_broker: LocalBroker) -> LocalBroker:
    """`tests/training/test_collect.py` publishes to a real Kafka."""
    return embedded_broker


def event_of(**fields: Any) -> RetrievalEvent:
    return retrieval_from_line(
        {**EVENT, **fields}, lambda: "new-id", NOW_US, ranking_budget_ms=50, expected_ranking_in_ms=120
    )


def request_of(**fields: Any) -> RankingRequest:
    return ranking_from_line({**REQUEST, **fields}, lambda: "new-id", NOW_US, deadline_in_ms=80)


def example(name: str) -> str:
    """A block of the documentation."""
    text = "".join(page.read_text(encoding="utf-8") for page in DOCS)
    (found,) = re.findall(rf"^```\w+ {name}\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    return str(found)


def publish(kafka: KafkaSettings, *arguments: str, lines: str | None = None) -> Result:
    settings = {
        "bootstrap": kafka.bootstrap,
        "topic_prefix": kafka.topic_prefix,
        "partitions": kafka.partitions,
        "fetch_wait_max_ms": kafka.fetch_wait_max_ms,
    }
    overrides = [part for key, value in settings.items() for part in ("--set", f"{key}={value}")]
    return CliRunner().invoke(app, [*arguments, *overrides], input=lines)


def decoded(kafka: KafkaSettings, count: int) -> list[RetrievalEvent]:
    found = [codec.decode(RetrievalEvent, m.value()) for m in read_topic(kafka, Topic.RETRIEVAL, count)]
    return sorted(found, key=lambda event: event.request_id)


@pytest.mark.slow
def test_the_documented_lines_run_as_documented(kafka_settings: KafkaSettings, tmp_path: Path) -> None:
    events, requests = tmp_path / "retrieval.jsonl", tmp_path / "ranking.jsonl"
    events.write_text(example("retrieval"), encoding="utf-8")
    requests.write_text(example("ranking"), encoding="utf-8")
    with echo_worker(kafka_settings):
        done = publish(kafka_settings, "retrieval", "--from", str(events))
        assert (done.exit_code, done.stdout) == (0, ""), done.stderr
        assert "3 of 3 retrieval events delivered" in done.stderr
        done = publish(kafka_settings, "ranking", "--from", str(requests))
    assert done.exit_code == 0, done.stderr
    assert "2 ranking requests: 2 ranked" in done.stderr
    outcomes = sorted((json.loads(line) for line in done.stdout.splitlines()), key=lambda outcome: outcome["line"])
    assert [(o["line"], o["user_id"], o["request_id"], o["status"]) for o in outcomes] == [
        (1, "ann", "demo-1", "ranked"),
        (2, "bob", "demo-2", "ranked"),
    ]
    assert [o["result"]["scores"] for o in outcomes] == [[101.0, 102.0, 103.0], [7.0, 8.0]]
    ann, bob, eve = decoded(kafka_settings, 3)
    assert (ann.expected_ranking_at_us - ann.retrieval_at_us, ann.ranking_budget_ms) == (150_000, 50)
    assert bob.history_version is not None and bob.history_version.digest == bytes(range(16))
    assert eve.request_id.startswith("publish.")
    assert eve.history is not None and eve.history.user_id == "eve"


@pytest.mark.slow
def test_the_documented_gateway_runs(kafka_settings: KafkaSettings, capsys: pytest.CaptureFixture[str]) -> None:
    script = example("gateway")
    # The test changes the cluster, and the deadline for a busy machine; the rest is as documented.
    for written, meant in (('KafkaSettings(bootstrap="127.0.0.1:9092")', "here"), (" budget_ms=50", " budget_ms=9000")):
        assert script.count(written) == 1
        script = script.replace(written, meant)
    with echo_worker(kafka_settings):
        exec(script, {"here": kafka_settings})
    assert capsys.readouterr().out == "ranked [101. 102. 103.]\n"


@pytest.mark.slow
def test_bad_lines_are_named_and_the_others_sent(kafka_settings: KafkaSettings) -> None:
    good = json.dumps({**EVENT, "request_id": "good"})
    lines = [
        good,
        "not json",
        json.dumps({**EVENT, "user": "x"}),
        "",
        json.dumps({**EVENT, "expected_suffix": "1"}),
        json.dumps({"user_id": "ann"}),
        "[1]",
    ]
    done = publish(kafka_settings, "retrieval", "--from", "-", lines="\n".join(lines))
    assert done.exit_code == 0
    assert done.stderr.splitlines()[:5] == [
        "line 2: not JSON: Expecting value at column 1",
        "line 3: .user: there is no such field; did you mean user_id?",
        "line 5: .expected_suffix: expected a whole number, got str",
        "line 6: .expected_candidates: is required",
        "line 7: not a JSON object",
    ]
    assert "1 of 1 retrieval events delivered" in done.stderr
    assert "5 bad lines left out" in done.stderr
    assert [event.request_id for event in decoded(kafka_settings, 1)] == ["good"]


def test_more_bad_lines_than_allowed_stop_the_run(kafka_settings: KafkaSettings) -> None:
    lines = ["x", "y", "z", json.dumps({**EVENT, "request_id": "never"})]
    done = publish(kafka_settings, "retrieval", "--from", "-", "--max-bad-lines", "1", lines="\n".join(lines))
    assert done.exit_code == 1
    assert "line 3" not in done.stderr
    assert "0 of 0 retrieval events delivered" in done.stderr
    assert "stopped after 2 bad lines" in done.stderr


def test_lines_that_are_all_bad_are_an_error(kafka_settings: KafkaSettings) -> None:
    done = publish(kafka_settings, "behaviours", "--from", "-", lines="x\ny\n")
    assert done.exit_code == 1 and "2 bad lines left out" in done.stderr


def test_an_id_used_twice_in_a_file_is_a_bad_line(kafka_settings: KafkaSettings) -> None:
    line = json.dumps({**REQUEST, "request_id": "same", "deadline_in_ms": 5000})
    with echo_worker(kafka_settings):
        done = publish(kafka_settings, "ranking", "--from", "-", lines=f"{line}\n{line}\n")
    assert done.exit_code == 0
    assert "line 2: request id same was used already" in done.stderr
    assert len(done.stdout.splitlines()) == 1


@pytest.mark.slow
def test_requests_without_an_answer_are_outcomes_and_counted(kafka_settings: KafkaSettings) -> None:
    done = publish(
        kafka_settings,
        *("ranking", "--from", "-", "--deadline-in-ms", "30", "--set", "client.result_grace_ms=100"),
        lines=json.dumps(REQUEST),
    )
    assert done.exit_code == 0, done.stderr
    assert json.loads(done.stdout)["status"] == "timed_out"
    assert "1 timed_out (0 of them answered late, 1 not at all)" in done.stderr


def outcome_now(status: Ended = Ended.RANKED) -> Future[RankOutcome]:
    future: Future[RankOutcome] = Future()
    future.set_result(RankOutcome("id", status, 1))
    return future


def test_after_the_reader_of_the_outcomes_has_left_they_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    with open(writing, "w", closefd=False) as pipe, Outcomes(1) as outcomes:
        monkeypatch.setattr(sys, "stdout", pipe)
        for line in (1, 2, 3):
            outcomes.follow(line, request_of(), outcome_now)
        outcomes.wait()
        monkeypatch.undo()
        assert outcomes.counts == {"ranked": 3}
        with contextlib.suppress(BrokenPipeError):
            pipe.close()
    os.close(writing)


def test_an_outcome_that_nobody_reads_takes_the_place_of_an_open_request(monkeypatch: pytest.MonkeyPatch) -> None:
    prints, is_read = threading.Event(), threading.Event()

    class Slow(io.StringIO):
        def write(self, text: str) -> int:
            prints.set()
            assert is_read.wait(60)
            return super().write(text)

    with Outcomes(1) as outcomes:
        monkeypatch.setattr(sys, "stdout", Slow())
        outcomes.follow(1, request_of(), outcome_now)
        assert prints.wait(60)
        assert not outcomes._room.acquire(blocking=False)
        is_read.set()
        outcomes.wait()
        monkeypatch.undo()


def test_more_lines_than_may_be_in_flight_are_all_answered(kafka_settings: KafkaSettings) -> None:
    lines = "\n".join(json.dumps({**REQUEST, "user_id": f"u{number}", "deadline_in_ms": 9000}) for number in range(40))
    with echo_worker(kafka_settings):
        done = publish(kafka_settings, "ranking", "--from", "-", "--max-in-flight", "3", lines=lines)
    assert "40 ranking requests: 40 ranked" in done.stderr
    assert sorted(json.loads(line)["line"] for line in done.stdout.splitlines()) == list(range(1, 41))


def test_without_waiting_requests_are_delivered_and_nothing_is_printed(kafka_settings: KafkaSettings) -> None:
    with echo_worker(kafka_settings, lambda request: []) as worker:
        done = publish(kafka_settings, "ranking", "--from", "-", "--no-wait", lines=json.dumps(REQUEST))
        assert (done.exit_code, done.stdout) == (0, ""), done.stderr
        assert "1 of 1 ranking requests delivered" in done.stderr
    (message,) = read_topic(kafka_settings, Topic.RANKING, 1)
    assert codec.decode(RankingRequest, message.value()).user_id == "ann"
    assert len(worker.seen) <= 1


def test_the_rate_is_held(kafka_settings: KafkaSettings) -> None:
    lines = "\n".join(json.dumps(EVENT) for _ in range(6))
    done = publish(kafka_settings, "retrieval", "--from", "-", "--rate", "20", lines=lines)
    times = sorted(event.retrieval_at_us for event in decoded(kafka_settings, 6))
    assert done.exit_code == 0
    assert times[-1] - times[0] >= 5 * 50_000 - 1_000


def test_a_file_that_is_not_there_is_a_sentence(kafka_settings: KafkaSettings) -> None:
    done = publish(kafka_settings, "retrieval", "--from", "/nowhere.jsonl")
    assert done.exit_code == 1
    assert "/nowhere.jsonl cannot be read" in str(done.exception)


def test_what_an_event_leaves_out_is_filled_in() -> None:
    event = event_of()
    assert (event.request_id, event.retrieval_at_us, event.ranking_budget_ms) == ("new-id", NOW_US, 50)
    assert event.expected_ranking_at_us == NOW_US + 120_000
    assert event_of(retrieval_at_us=5, expected_ranking_in_ms=1).expected_ranking_at_us == 1_005
    assert event_of(request_id="mine", expected_ranking_at_us=9).expected_ranking_at_us == 9


def test_what_a_request_leaves_out_is_filled_in() -> None:
    request = request_of()
    assert (request.request_id, request.sent_at_us, request.deadline_us) == ("new-id", NOW_US, NOW_US + 80_000)
    assert (request.query_time_ms, len(request.suffix)) == (NOW_US // 1000, 0)
    assert request_of(deadline_in_ms=7).deadline_us == NOW_US + 7_000
    assert request_of(deadline_us=3, suffix=None).deadline_us == 3


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"sent_at_us": "now"}, ".sent_at_us: expected a whole number"),
        ({"sent_at_us": -1}, ".sent_at_us: -1 is before 1970"),
        ({"deadline_us": 1, "deadline_in_ms": 1}, ".deadline_in_ms: give it or deadline_us, not both"),
        ({"deadline_in_ms": -1}, ".deadline_in_ms: -1 is outside"),
        ({"deadline_in_ms": 1.5}, ".deadline_in_ms: expected a whole number"),
        ({"candidates": [1, "2"]}, ".candidates[1] is text, expected a whole number"),
        ({"candidates": [1, 2.0]}, ".candidates[1] is a fraction, expected a whole number"),
        ({"candidates": [True]}, ".candidates[0] is true or false"),
        ({"candidates": [2**63]}, ".candidates: a number does not fit int64"),
        ({"candidates": []}, ".candidates: 0 entries"),
        ({"candidates": None}, ".candidates: is required"),
        (
            {"suffix": {"items": [1], "actions": [65536], "timestamps_ms": [1]}},
            ".suffix.actions: a number does not fit",
        ),
        ({"suffix": {"items": [1], "actions": [1]}}, ".suffix.timestamps_ms: is required"),
        ({"suffix": {"items": [1], "actions": [1], "timestamps_ms": []}}, ".suffix: 1 items, 1 actions, 0 timestamps"),
        ({"suffix": {"item": []}}, ".suffix.item: there is no such field; did you mean items?"),
        ({"history_version": {"number": 1, "length": 2, "digest": "zz"}}, ".history_version.digest: not hexadecimal"),
        ({"history_version": {"number": 1, "length": 2, "digest": "00"}}, ".history_version.digest: 1 bytes"),
        ({"history_version": 3}, ".history_version: expected an object, got a whole number"),
        (
            {"history": {"user_id": "b", "number": 1, "features": [], "behaviours": None}},
            ".history.behaviours: is required",
        ),
    ],
)
def test_a_wrong_field_is_named_with_its_place(fields: dict[str, Any], reason: str) -> None:
    with pytest.raises(FieldError) as caught:
        request_of(**fields)
    assert str(caught.value).startswith(reason)


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b'{"a": 1, "a": 2}', "a is given twice"),
        (b'{"a": NaN}', "NaN is not a number"),
        (b'{"a": "\xff"}', "not UTF-8"),
        (b"{" + b",".join(b'"%d" : 0' % name for name in range(2_049)) + b"}", "not a message: more than 2048 names"),
        (b'{"a": ' + b"[" * 4_000, "nested too deeply"),
        (b'{"a": 1', "not JSON: Expecting ',' delimiter at column 8"),
        (b'{"a": ' + b"1" * 5_000 + b"}", "Exceeds the limit"),
        (b"x" * (MAX_LINE_BYTES + 10), "the line is longer than"),
    ],
)
def test_a_line_that_is_no_object_says_why_and_the_next_one_is_read(line: bytes, reason: str) -> None:
    broken, good = read_lines(io.BytesIO(line + b'\n{"a": 1}\n'))
    with pytest.raises(JsonLineError) as caught:
        broken.parse()
    assert str(caught.value).startswith(reason)
    assert (good.number, good.parse()) == (2, {"a": 1})


@pytest.mark.slow
@given(messages()[RankingRequest] | messages()[RetrievalEvent] | messages()[RankingResult])
def test_every_message_survives_json(message: Any) -> None:
    assert from_json(type(message), json.loads(json.dumps(to_json(message)))) == message


def test_scores_are_printed_in_full() -> None:
    request = RankingRequest("r", "u", 1, 2, 3, np.array([16_777_217]), request_of().suffix)
    (result,) = [codec.decode(RankingResult, data) for data in answer_once(request)]
    assert result.scores is not None
    printed = json.loads(json.dumps(to_json(result)))["scores"]
    assert np.array(printed, "<f4").tobytes() == result.scores.tobytes()


def test_a_line_of_one_behaviour_takes_its_time_and_action_from_the_defaults() -> None:
    event = behaviours_from_line({"user_id": "ann", "item": 7}, 1234)
    assert to_json(event) == {
        "user_id": "ann", "behaviours": {"items": [7], "actions": [0], "timestamps_ms": [1234]}
    }  # fmt: skip
    given_all = behaviours_from_line({"user_id": "ann", "item": 7, "action": 2, "timestamp_ms": 9, "position": 3}, 1234)
    assert (given_all.position, to_json(given_all.behaviours)["timestamps_ms"]) == (3, [9])


@pytest.mark.parametrize(
    ("content", "error"),
    [
        ({"user_id": "ann"}, ".item: give it, or behaviours"),
        ({"user_id": "ann", "item": 1, "behaviours": {}}, ".item: give it or behaviours, not both"),
        ({"user_id": "ann", "items": [1]}, ".items: there is no such field"),
        ({"user_id": "ann", "item": "x"}, ".behaviours.items"),
        ({"user_id": "ann", "behaviours": {"items": [], "actions": [], "timestamps_ms": []}}, "expected 1 to 256"),
    ],
)
def test_a_line_that_is_no_behaviour_is_refused_with_the_reason(content: dict[str, Any], error: str) -> None:
    with pytest.raises(FieldError, match=re.escape(error)):
        behaviours_from_line(content, 0)


# -- with a model ---------------------------------------------------------------------------------


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """Six actions, the items 0 to 39 and 55 to 58, and two values of features."""
    features = (ContextualFeature(name="tags", cardinality=29, tokens=2),)
    items = np.array([*range(40), *range(55, 59)])
    config = small_config(vocabulary_size=items.size, num_actions=6, contextual_features=features)
    save_checkpoint(tmp_path / "model", config, random_checkpoint(config, 0, items).tensors)
    return tmp_path / "model"


def history_json(features: list[int], action: int = 5) -> dict[str, Any]:
    behaviours = {"items": [1], "actions": [action], "timestamps_ms": [0]}
    return {"number": 1, "features": features, "behaviours": behaviours}


@pytest.mark.parametrize(
    ("message", "said"),
    [
        (behaviours_from_line({"user_id": "a", "item": 1, "action": 6}, 0), ".behaviours.actions[0] is 6, the model"),
        (behaviours_from_line({"user_id": "a", "item": 1, "action": 60_000}, 0), "is 60000, the model knows 0 to 5"),
        (request_of(suffix={"items": [1, 2], "actions": [0, 8], "timestamps_ms": [0, 0]}), ".suffix.actions[1] is 8"),
        (request_of(history=history_json([3, 4], action=9)), ".history.behaviours.actions[0] is 9"),
        (request_of(history=history_json([])), ".history.features: 2 of 2 values are missing"),
        (event_of(history=history_json([29, 1])), ".history.features: 1 of 2 values"),
        (event_of(history=history_json([1, 2, 3])), ".history.features: 1 of 3 values"),
        (event_of(history=history_json([10**6, 10**6])), ".history.features: 2 of 2 values"),
    ],
)
def test_what_a_model_does_not_know_is_a_bad_line(model: Path, message: Any, said: str) -> None:
    with pytest.raises(FieldError, match=re.escape(said)):
        SentInputs(model).take(message)
    SentInputs(None).take(message)


def test_codes_and_unknown_items_of_lines_are_counted(model: Path) -> None:
    inputs = SentInputs(model)
    inputs.take(request_of(candidates=[1, 55, 99], history=history_json([3, 4])))
    inputs.take(behaviours_from_line({"user_id": "a", "item": 10**12, "action": 2}, 0))
    assert inputs.text() == ", action codes 2, 5, 2 of 5 items unknown to the model"
    assert SentInputs(None).text() == ""


@pytest.mark.slow
def test_lines_with_codes_that_the_model_does_not_know_are_not_sent(kafka_settings: KafkaSettings, model: Path) -> None:
    lines = '{"user_id": "ann", "item": 55, "action": 6}\n{"user_id": "bob", "item": 55, "action": 3}\n'
    done = publish(kafka_settings, "behaviours", "--from", "-", "--model", str(model), lines=lines)
    assert done.exit_code == 0
    assert "line 1: .behaviours.actions[0] is 6, the model knows 0 to 5" in done.stderr
    assert "1 of 1 records of behaviours delivered, action codes 3, 0 of 1 items unknown to the model" in done.stderr
    (found,) = [codec.decode(BehaviourEvent, m.value()) for m in read_topic(kafka_settings, Topic.BEHAVIOURS, 1)]
    assert found.user_id == "bob"


@pytest.mark.slow
def test_behaviours_of_json_lines_reach_the_topic(kafka_settings: KafkaSettings) -> None:
    done = publish(kafka_settings, "behaviours", "--from", "-", lines=example("behaviours") + "{}\n")
    assert done.exit_code == 0
    assert "2 of 2 records of behaviours delivered, action codes 1, 2 in" in done.stderr
    assert "1 bad line left out" in done.stderr
    found = [codec.decode(BehaviourEvent, m.value()) for m in read_topic(kafka_settings, Topic.BEHAVIOURS, 2)]
    assert {len(event.behaviours) for event in found} == {1, 2}
    both = publish(kafka_settings, "behaviours", "--from", "-", "--interactions", "x", lines="")
    assert "one of them" in str(both.exception)


NOW_S = 1_700_000_000


@pytest.mark.parametrize(
    ("factor", "unit"), [(1, "seconds"), (1000, "milliseconds"), (10**9, "nanoseconds"), (0, "before 1970")]
)
@pytest.mark.parametrize("name", ["retrieval_at_us", "expected_ranking_at_us", "sent_at_us", "deadline_us"])
def test_a_time_in_another_unit_than_microseconds_is_named(name: str, factor: int, unit: str) -> None:
    make = event_of if name in ("retrieval_at_us", "expected_ranking_at_us") else request_of
    with pytest.raises(FieldError, match=rf"^\.{name}: .*{unit}: give (it|the time) in microseconds"):
        make(**{name: NOW_S * factor or -1})
    assert getattr(make(**{name: NOW_S * 10**6}), name) == NOW_S * 10**6


@pytest.mark.parametrize("factor", [1, 10**6, 10**9])
def test_a_time_in_another_unit_than_milliseconds_is_named(factor: int) -> None:
    with pytest.raises(FieldError, match=r"query_time_ms.*: give it in milliseconds"):
        request_of(query_time_ms=NOW_S * factor)
    with pytest.raises(FieldError, match=r"^\.timestamp_ms: .*: give it in milliseconds"):
        behaviours_from_line({"user_id": "u", "item": 1, "timestamp_ms": NOW_S * factor}, 5)
    several = {"items": [1, 2], "actions": [0, 0], "timestamps_ms": [5, NOW_S * factor]}
    with pytest.raises(FieldError, match=r"^\.behaviours.timestamps_ms: .*: give it in milliseconds"):
        behaviours_from_line({"user_id": "u", "behaviours": several}, 5)


def test_a_behaviour_before_1970_is_refused() -> None:
    with pytest.raises(FieldError, match=r"^\.timestamp_ms: -1 is before 1970"):
        behaviours_from_line({"user_id": "u", "item": 1, "timestamp_ms": -1}, 5)
