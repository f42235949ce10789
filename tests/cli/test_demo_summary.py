"""The summary of a run of the demo, and its gates."""

from __future__ import annotations

import io
import re
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge, start_http_server
from rich.console import Console

from relaygr.admission.corrector import PredictionQuality
from relaygr.admission.latency import Stage
from relaygr.demo import board
from relaygr.demo.summary import (
    LEAST_COMPARED,
    SLOW_RUN,
    Gate,
    PredictionFigures,
    ScoreComparison,
    compare_scores,
    gates,
    slow_machine,
    summarise,
    verdict,
)
from relaygr.processes import CommandProcess
from relaygr.schemas.messages import StageTimings
from relaygr.traffic.records import LOST, ImpressionRecord, RecordWriter, pack_scores

SCORES = np.array([0.5, -1.0, 0.25], np.float32)


def record(number: int = 0, **fields: object) -> ImpressionRecord:
    whole = ImpressionRecord(
        number, f"g.0.{number}", "u", "ranked", 10_000, 0, False, path="hbm", prefix_source="computed",
        history_number=3, history_length=3, model_revision="m", scores=pack_scores(SCORES),
    )  # fmt: skip
    return replace(whole, **fields)  # type: ignore[arg-type]


def test_shares_are_of_all_that_was_offered() -> None:
    run = summarise(
        [
            record(0), record(1, late=True), record(2, path="truncated"), record(3, prefix_source="dram"),
            record(4, status=LOST, latency_us=None, late=True, path=None, prefix_source=None),
            record(5, status="failed", reason="overloaded", path=None, prefix_source=None),
        ],
        2.5,
    )  # fmt: skip
    assert (run.offered, run.ranked, run.whole.late, run.lost, run.from_dram) == (6, 4, 4, 1, 1)
    assert run.whole.late_share == pytest.approx(4 / 6)
    assert run.endings == {"hbm": 3, "truncated": 1, LOST: 1, "failed: overloaded": 1}
    assert run.share(run.ranked) == pytest.approx(4 / 6)


def test_the_p99_of_all_offered_counts_a_request_without_a_whole_answer_as_infinite() -> None:
    """The P99 of answered requests improves when requests are refused."""
    answered = [record(number, latency_us=1_000 * (number + 1)) for number in range(99)]
    assert summarise([*answered, record(99, latency_us=500_000, late=True)], 0.0).whole.offered_p99_ms == 99
    refused = record(99, status="failed", reason="overloaded", path=None, prefix_source=None)
    assert summarise([*answered, refused], 0.0).whole.offered_p99_ms == 99
    cut = record(100, path="truncated")
    assert summarise([*answered, refused, cut], 0.0).whole.offered_p99_ms == np.inf
    assert np.isnan(summarise([], 0.0).whole.offered_p99_ms)


def test_a_run_without_any_request_has_no_shares() -> None:
    run = summarise([], 0.0)
    assert run.share(run.ranked) == run.whole.late_share == 0
    assert np.isnan(run.whole.p99_ms)


def test_the_first_third_of_the_schedule_is_told_apart_from_the_rest_whatever_order_answers_come_in() -> None:
    cold = [record(number, late=True, latency_us=90_000) for number in (2, 0, 1)]
    warm = [record(number, late=number == 8) for number in (8, 3, 7, 4, 6, 5)]
    run = summarise([*warm, *cold], 1)
    assert (run.whole.offered, run.whole.late) == (9, 4)
    assert run.whole.p99_ms == pytest.approx(90)
    assert (run.warm.offered, run.warm.late, run.warm.p99_ms) == (6, 1, 10)


@pytest.mark.parametrize(
    "fields",
    [
        {"path": "truncated"}, {"history_stale": True}, {"history_number": 4}, {"model_revision": "other"},
        {"scores": None},
    ],
)  # fmt: skip
@pytest.mark.parametrize("side", [0, 1])
def test_what_cannot_be_compared_is_left_out(fields: dict[str, object], side: int) -> None:
    pair = [record(1), record(1)]
    pair[side] = record(1, **fields)
    found = compare_scores([pair[0]], [pair[1]])
    assert (found.compared, found.skipped, found.different) == (0, 1, 0)


def test_errors_are_relative_to_the_largest_score_of_the_request() -> None:
    near, far = SCORES + np.float32(1.5e-5), SCORES + np.float32(1e-3)
    ours = [record(0), record(1, scores=pack_scores(near)), record(2, scores=pack_scores(far)), record(9)]
    ours.append(record(3, scores=pack_scores(SCORES[:2])))
    found = compare_scores(ours, [record(number) for number in range(4)])
    assert (found.compared, found.different) == (4, 2)
    assert found.worst_error == pytest.approx(1e-3, rel=0.01)


def verdicts(records: list[ImpressionRecord], compared: int = LEAST_COMPARED) -> list[bool]:
    ours = [record(number) for number in range(compared)]
    return [gate.passed for gate in gates(summarise(records, 1), summarise([], 0), compare_scores(ours, ours))]


def test_a_run_that_shows_everything_passes_and_each_shortcoming_fails_its_own_gate() -> None:
    good = [record(number, prefix_source="dram" if number == 0 else "computed") for number in range(100)]
    assert all(verdicts(good))
    lost = record(100, status=LOST, latency_us=None, path=None)
    assert verdicts([*good, lost]).count(False) == 1
    assert verdicts([*good, *(replace(lost, status="expired") for _ in range(12))]).count(False) == 1
    assert verdicts([*good, replace(lost, status="failed", reason="device_error")]).count(False) == 1
    assert all(verdicts([*good, replace(lost, status="failed", reason="overloaded")])), "of the machine's speed"
    assert verdicts([replace(one, path="full") for one in good]).count(False) == 1
    assert verdicts([replace(one, prefix_source="computed") for one in good]).count(False) == 1
    assert verdicts(good, 0).count(False) == 1


def test_most_of_what_was_ranked_again_must_have_been_compared() -> None:
    """A run in which a checkpoint is deployed has few requests of its first one."""
    run = summarise([record()], 1.0)

    def gate(ranked_again: int, compared: int) -> Gate:
        comparison = ScoreComparison(compared, ranked_again - compared, 0.0, 0)
        return next(each for each in gates(run, run, comparison) if "requests compared" in each.name)

    assert gate(300, 240).name == f"at least {LEAST_COMPARED} requests compared"
    assert gate(7, 7).passed and gate(10, 8).passed
    assert not gate(10, 7).passed and not gate(0, 0).passed


def test_on_a_machine_that_became_slow_only_lost_and_failed_requests_and_scores_are_judged() -> None:
    figures = PredictionFigures({Stage.PRE: PredictionQuality(SLOW_RUN, 0.5, 1.0, 1.5)})
    run = summarise([record(number, path="truncated") for number in range(3)], 1.0, predictions=figures)
    shown = gates(run, run, compare_scores([], []))
    judged = ["no request lost", "no request failed", "cached scores equal full scores"]
    assert [gate.name for gate in shown if gate.judged] == judged


def test_the_verdict_is_one_sentence() -> None:
    relay = summarise([record(number) for number in range(100)], 1.0)
    full = summarise([record(number, late=number < 43) for number in range(100)], 1.0)
    said = "With the relay 100 of 100 requests were answered whole and in time, without it 57."
    assert verdict(relay, full) == said


def test_on_a_busy_machine_only_lost_and_failed_requests_and_scores_are_judged() -> None:
    slow = [record(number, path="truncated") for number in range(3)]
    shown = gates(summarise(slow, 1), summarise([], 0), compare_scores([], []), busy=True)
    judged = ["no request lost", "no request failed", "cached scores equal full scores"]
    assert [gate.name for gate in shown if gate.judged] == judged


@pytest.mark.parametrize(
    ("slowdown", "gate", "told"),
    [
        (2.4, Gate("at least 90% ranked", False, "77%", depends_on_speed=True), True),
        (1.8, Gate("at least 90% ranked", False, "77%", depends_on_speed=True), False),
        (2.4, Gate("at least 90% ranked", True, "99%", depends_on_speed=True), False),
        (2.4, Gate("at least 90% ranked", False, "77%", depends_on_speed=True, is_busy=True), True),
        (2.4, Gate("cached scores equal full scores", False, "3 differ"), False),
    ],
)
def test_a_gate_that_was_not_passed_is_explained_by_a_machine_that_was_slower_than_when_it_was_measured(
    slowdown: float, gate: Gate, told: bool
) -> None:
    figures = PredictionFigures({Stage.PRE: PredictionQuality(slowdown, 0.5, 1.0, 1.5)})
    runs = [summarise([record()], 1.0), summarise([record()], 1.0, predictions=figures)]
    why = slow_machine(runs, [gate])
    assert ("2.40 times its calibrated time" in why) if told else not why


def test_without_measured_prefixes_nothing_is_known_of_the_machine() -> None:
    failed = Gate("at least 90% ranked", False, "77%", depends_on_speed=True)
    assert not slow_machine([summarise([record()], 1.0)], [failed])


def shown_live(file: Path, is_terminal: bool) -> str:
    """What the board shows of a run whose records are in the file."""
    output, ends = io.StringIO(), iter((False, True))
    console = Console(file=output, force_terminal=is_terminal, color_system=None, width=200)
    run = board.Board(console, "relay on", 300, board.RecordTail(file), (), None, dict, None)
    run.run(lambda: next(ends))
    return output.getvalue()


@pytest.mark.parametrize(
    ("only", "latency"),
    [(record(status=LOST, latency_us=None, late=True, path=None, prefix_source=None), "-"), (record(), "10.0 ms")],
)
def test_the_live_output_shows_a_latency_once_a_request_was_answered(
    only: ImpressionRecord, latency: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The table once began with "nan ms" in red."""
    monkeypatch.setattr(board, "PLAIN_INTERVAL_S", 0.0)
    file = tmp_path / "records"
    assert "nan" not in shown_live(file, is_terminal=True)
    assert "no request has ended yet" in shown_live(file, is_terminal=False)
    writer = RecordWriter(file)
    writer.write(only)
    writer.close()
    table = shown_live(file, is_terminal=True)
    assert f" {latency} " in table and "nan" not in table
    assert f"P50 {latency}, P99 {latency} of 300 ms" in shown_live(file, is_terminal=False)


def test_the_live_output_says_first_what_is_wrong_and_fits_a_terminal(tmp_path: Path) -> None:
    metrics = CollectorRegistry()
    Gauge("relaygr_pool_away", "", registry=metrics).set(1)
    for name, label, count in (("fetches", "loaded", 7), ("objects_written", "stored", 9)):
        Counter(f"relaygr_pool_{name}_total", "", ["outcome"], registry=metrics).labels(label).inc(count)
    Gauge("relaygr_kafka_broker_throttle_seconds", "", ["client"], registry=metrics).labels("w").set(1.5)
    writer = RecordWriter(tmp_path / "records")
    for number in range(100):
        timings = StageTimings(queue_us=200_000 if number < 8 else 1000)
        writer.write(record(number, late=number < 65, path="truncated" if number > 95 else "hbm", timings=timings))
    writer.close()
    server, thread = start_http_server(0, "127.0.0.1", metrics)
    try:
        process = CommandProcess("worker-00", cast(Any, None), tmp_path / "log", server.server_port)
        output = io.StringIO()
        console = Console(file=output, force_terminal=True, color_system=None, width=80, height=24)
        tail = board.RecordTail(tmp_path / "records")
        owners = {"worker-00": tuple(range(6))}
        board.Board(console, "relay on", 300, tail, [process, process], None, lambda: owners, None).run(lambda: True)
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
    lines = re.sub(r"\x1b\[[^m]*?[A-Za-z]", "", output.getvalue()).splitlines()
    # The table that stays on the screen comes last.
    first = max(number for number, line in enumerate(lines) if line.startswith("wrong      65 %"))
    lines = lines[first:]
    assert len(lines) <= 24 and max(map(len, lines)) <= 80
    said = " ".join(" ".join(lines).split())
    assert said.startswith(
        "wrong 65 % of the ranking requests are late. See docs/alerts.md#relayrankinglate. wrong 4.0 %"
    )
    assert "8.0 % of the ranked requests waited in the queue for more than half of their time" in said
    assert "and 2 more relay on" in said, "a quota of Kafka and the pool are less grave"
    assert "pool 9 written, 7 loaded" in said


def test_board_and_summary_stay_whole_at_80_columns() -> None:
    from relaygr.demo.quality import compare_quality

    output = io.StringIO()
    console = Console(file=output, width=80, highlight=False)
    records = [
        record(number, next_retrieved=True, next_place=number % 9, next_rank=number % 12) for number in range(1200)
    ]
    run = summarise([*records, record(1200, status="failed", reason="overloaded", path=None)], 12.3)
    quality = compare_quality(records, records)
    board.print_summary(
        console, run, run, 25, compare_scores(records, records), gates(run, run, compare_scores([], [])), quality
    )
    for line in output.getvalue().splitlines():
        assert "…" not in line and len(line) <= 80, line
