"""What the live page shows, folded from messages, statuses and metrics."""

from __future__ import annotations

import dataclasses
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from relaygr.lag.report import GroupReport, LagReport, PartitionReport
from relaygr.lag.status import LagStatus
from relaygr.schemas.ended import Ended, Reason
from relaygr.schemas.messages import Path, PreInferSlots, WorkerState
from relaygr.schemas.topics import Topic
from relaygr.ui import model
from relaygr.ui.model import LiveSnapshot, PoolView, ranges
from relaygr.ui.scrape import Reading, parse_reading
from tests.worlds.ui import BUDGET_MS, UiWorld, worker_status


def kinds(snapshot: LiveSnapshot) -> dict[str, int]:
    return {each.kind: each.count for each in snapshot.kinds if each.count}


def trigger_metrics(**counts: int) -> Reading:
    lines = [f'relaygr_trigger_decisions_total{{reason="{name}"}} {count}' for name, count in counts.items()]
    return parse_reading("\n".join(lines) + "\n")


def test_an_impression_is_counted_in_each_stage_and_by_its_path() -> None:
    world = UiWorld()
    for number in range(10):
        world.impression(f"g.1.{number}.token", latency_ms=10 + number)
    world.wait(1)
    shown = world.snapshot()
    assert [sum(stage.series) for stage in shown.stages] == [10, 10, 10, 10]
    assert [stage.stage for stage in shown.stages] == ["retrieval", "preinfer", "ranking", "results"]
    assert kinds(shown) == {"hbm": 10}
    assert shown.admitted_share == 1
    assert shown.latency.p50_ms == pytest.approx(14, rel=0.03)
    assert shown.latency.p99_ms == pytest.approx(19, rel=0.03)
    assert (shown.latency.budget_ms, shown.latency.late, shown.latency.ended) == (BUDGET_MS, 0, 10)


def test_a_result_that_comes_before_its_request_waits_for_it() -> None:
    """They are on different partitions, so the reader may get them in any order."""
    world = UiWorld()
    world.answer("g.1.1.t", latency_ms=70)
    assert kinds(world.snapshot()) == {}
    world.ask("g.1.1.t")
    shown = world.snapshot()
    assert (kinds(shown), shown.latency.late) == ({"hbm": 1}, 1)
    world.answer("g.1.2.t")
    world.wait(3)
    assert kinds(world.snapshot()) == {"hbm": 2}, "without its request after a while"


@pytest.mark.parametrize(
    ("outcome", "reason", "kind"),
    [(Ended.EXPIRED, None, "expired"), (Ended.FAILED, Reason.OVERLOADED, "failed")],
)
def test_a_request_that_was_not_ranked_is_late(outcome: Ended, reason: Reason | None, kind: str) -> None:
    world = UiWorld()
    world.retrieve("g.1.1.t")
    world.ask("g.1.1.t")
    world.answer("g.1.1.t", path=None, outcome=outcome, reason=reason)
    (late,) = world.snapshot().late
    assert (late.kind, late.reason) == (kind, reason)


def test_the_mean_latency_has_a_part_for_prefixes_that_were_not_ready() -> None:
    world = UiWorld()
    assert (world.snapshot().latency.mean_ms, world.snapshot().latency.not_ready_share) == (None, None)
    for number, (path, latency_ms) in enumerate([(Path.HBM, 10), (Path.DRAM, 15), (Path.FULL, 30), (Path.PENDING, 45)]):
        world.ask(f"g.1.{number}.t")
        world.answer(f"g.1.{number}.t", latency_ms, path)
    world.ask("g.1.9.t")
    world.answer("g.1.9.t", 90, path=None, outcome=Ended.EXPIRED)
    shown = world.snapshot().latency
    assert (shown.mean_ms, shown.not_ready_share) == (25, 0.75)


def test_a_request_without_a_result_is_late_some_time_after_its_deadline() -> None:
    world = UiWorld()
    world.ask("g.1.1.t")
    world.wait(1)
    assert kinds(world.snapshot()) == {}
    world.wait(2)
    shown = world.snapshot()
    assert (kinds(shown), [late.kind for late in shown.late]) == ({"unanswered": 1}, ["unanswered"])


def test_a_request_counts_once_whatever_comes_twice() -> None:
    """A producer that sends again, and the successor of a worker, repeat messages."""
    world = UiWorld()
    world.ask("g.1.1.t")
    world.answer("g.1.1.t")
    world.answer("g.1.1.t")
    world.ask("g.1.1.t")
    world.ask("g.1.2.t")
    for _ in range(4):
        world.wait(1)
    world.answer("g.1.2.t", latency_ms=5_000)
    for _ in range(4):
        world.wait(1)
    snapshot = world.snapshot()
    assert kinds(snapshot) == {"hbm": 1, "unanswered": 1}
    assert (snapshot.latency.ended, snapshot.latency.late) == (2, 1)


def test_after_messages_were_skipped_no_request_counts_as_unanswered() -> None:
    world = UiWorld()
    world.ask("g.1.1.t")
    world.model.forget_open()
    world.wait(5)
    assert kinds(world.snapshot()) == {}


def test_a_late_request_shows_its_stages_and_neither_its_user_nor_the_secret_of_its_id() -> None:
    world = UiWorld()
    world.retrieve("gateway-00.18f.7.secrettoken")
    world.clock.advance_us(150_000)
    world.ask("gateway-00.18f.7.secrettoken", b"ann@example.com")
    world.answer("gateway-00.18f.7.secrettoken", latency_ms=80)
    shown = world.snapshot()
    (late,) = shown.late
    assert (late.decided_ms, late.sent_ms, late.received_ms, late.deadline_ms, late.answered_ms) == (
        2,
        150,
        151,
        200,
        230,
    )
    assert (late.queue_ms, late.rank_ms, late.latency_ms, late.budget_ms) == (2, 5, 80, 50)
    assert late.request == "gateway-00.18f.7"
    text = json.dumps(dataclasses.asdict(shown))
    assert "ann" not in text and "secrettoken" not in text
    assert len(late.user) == 8


def test_a_user_has_one_hash_in_a_process_and_another_one_in_the_next() -> None:
    def user_of(salt: bytes, *names: bytes) -> list[str]:
        world = UiWorld()
        world.model = model.LiveModel("k", "p", 1, world.clock.monotonic_us(), salt)
        for number, name in enumerate(names):
            world.ask(f"g.1.{number}.t", name)
            world.answer(f"g.1.{number}.t", latency_ms=90)
        return [late.user for late in world.snapshot().late]

    once = user_of(b"a", b"ann", b"ann", b"bob")
    assert once[1] == once[2] != once[0]
    assert user_of(b"b", b"ann") != user_of(b"a", b"ann")


def test_messages_that_the_reader_skipped_still_count() -> None:
    world = UiWorld()
    world.model.count(Topic.RANKING, 0, 100, world.clock.monotonic_us())
    world.model.forget_open()
    for offset in (150, 151):
        world.model.count(Topic.RANKING, 0, offset, world.clock.monotonic_us())
    world.wait(1)
    shown = world.snapshot()
    assert (sum(shown.stages[2].series), shown.skipped) == (52, 49)


def test_an_offset_without_a_message_counts_as_none() -> None:
    """A transaction's marker has an offset, and so has what it aborted. A new topic begins at 0 again."""
    world = UiWorld()
    for offset in (100, 102, 150, 0, 2):
        world.model.count(Topic.RANKING, 0, offset, world.clock.monotonic_us())
    world.model.forget_open()
    world.model.count(Topic.RANKING, 0, 1, world.clock.monotonic_us())
    world.wait(1)
    shown = world.snapshot()
    assert (sum(shown.stages[2].series), shown.skipped) == (6, 0)


def test_old_seconds_leave_the_charts_and_the_totals() -> None:
    world = UiWorld()
    world.impression("g.1.1.t")
    world.wait(61)
    shown = world.snapshot()
    assert kinds(shown) == {} and sum(shown.stages[0].series) == 1
    world.wait(1000)
    shown = world.snapshot()
    assert sum(shown.stages[0].series) == 0 and len(shown.stages[0].series) == model.SERIES_S
    assert shown.latency.p99_ms is None


def test_what_is_kept_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model, "MAX_OPEN", 100)
    monkeypatch.setattr(model, "MAX_KEPT", 100)
    world = UiWorld()
    for number in range(1000):
        world.retrieve(f"g.1.{number}.t")
        world.ask(f"g.2.{number}.t")
        world.answer(f"g.2.{number}.t", latency_ms=60 + number)
    for number in range(500):
        world.status(f"worker-{number:03}", 0)
    shown = world.snapshot()
    assert len(world.model._open) <= 100 and len(world.model._ended) == 100 == len(world.model._kept)
    assert len(shown.late) == model.SHOWN_REQUESTS and len(shown.workers) == model.MAX_SHOWN_WORKERS
    assert len(shown.latency.dots) <= model.DOTS_PER_S * (model.SERIES_S + 1)
    assert len(world.model._workers) <= 4 * model.MAX_SHOWN_WORKERS


def test_made_up_workers_do_not_hide_one_that_still_writes_from_the_page() -> None:
    world = UiWorld()
    world.status("real", 3)
    world.wait(0.5)
    for number in range(model.MAX_KNOWN_WORKERS + 90):
        world.status(f"aa-{number:04}", 3)
    world.status("real", 3)
    shown = world.snapshot()
    assert [each.fresh for each in shown.workers if each.worker_id == "real"] == [True]
    assert shown.unreadable > 0, "refused claims are counted"
    assert len(world.model._workers) == model.MAX_KNOWN_WORKERS
    world.wait(model.SILENT_S + 1)
    world.status("new", 3)
    shown = world.snapshot()
    assert [each.worker_id for each in shown.workers] == ["new"] and shown.owners[3] == 0


def test_the_newest_late_request_comes_first() -> None:
    world = UiWorld()
    for number in range(30):
        world.ask(f"g.1.{number}.t")
        world.answer(f"g.1.{number}.t", latency_ms=60)
    assert [late.request for late in world.snapshot().late][:2] == ["g.1.29", "g.1.28"]


def test_requests_are_found_by_user_and_by_id_the_good_ones_too() -> None:
    world = UiWorld()
    for number, user in enumerate((b"ann", b"bob", b"ann")):
        world.ask(f"g.1.{number}.token", user)
        world.answer(f"g.1.{number}.token", latency_ms=90 if number else 10)
        world.retrieve(f"g.1.{number}.token")
    first = world.find("g.1.0")[0]
    assert (first.kind, first.latency_ms, first.decided_ms) == ("hbm", 10, 2), "its job was read after its result"
    assert (
        [each.request for each in world.find("ann")]
        == ["g.1.2", "g.1.0"]
        == [each.request for each in world.find(first.user)]
    )
    assert [each.request for each in world.find("g.1.")] == ["g.1.2", "g.1.1", "g.1.0"]
    assert [each.request for each in world.find("g.1.1.token")] == ["g.1.1"]
    for text in ("", "an", "g.1.1.", "g.1.1.tok", "g.1.1.token2"):
        assert world.find(text) == [], "no guess of the random part, letter by letter"


def test_of_many_good_requests_some_are_kept_and_of_late_ones_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model, "SHOWN_REQUESTS", 1000)
    world = UiWorld()
    for number in range(200):
        world.ask(f"g.1.{number}.t")
        world.answer(f"g.1.{number}.t", latency_ms=90 if number % 2 else 10)
    kinds_found = [each.latency_ms for each in world.find("ann")]
    assert (kinds_found.count(90), kinds_found.count(10)) == (100, model.KEPT_PER_S)


def test_the_page_says_that_ready_workers_have_several_revisions() -> None:
    world = UiWorld()
    now_us = world.clock.wall_us()
    for name, revision in (("worker-00", "a" * 32), ("worker-01", "b" * 32), ("worker-02", "a" * 32)):
        world.model.note_status(name, worker_status(name, now_us, (), revision=revision), now_us)
    shown = world.snapshot()
    assert [worker.revision for worker in shown.workers] == ["aaaaaaaa", "bbbbbbbb", "aaaaaaaa"]
    [problem] = world.said()
    assert "2 revisions of the model" in problem
    assert "aaaaaaaa on 2 workers (worker-00, worker-02); bbbbbbbb on worker-01" in problem
    world.model.note_status("worker-01", None, now_us)
    assert world.said() == []


def test_a_worker_s_use_of_its_device_is_that_of_the_last_readings() -> None:
    world = UiWorld()
    for used_s, expected in ((5.0, None), (6.0, 0.5), (7.0, 0.5), (0.5, None), (2.5, 1.0)):
        world.status("worker-00", 0)
        page = f'relaygr_worker_device_seconds_total{{work_class="ranking"}} {used_s}\n'
        world.model.note_metrics("worker-00", parse_reading(page), world.clock.monotonic_us())
        assert world.snapshot().workers[0].device_share == expected, "a successor begins at 0"
        world.wait(2)
    world.model.note_metrics("worker-00", None, world.clock.monotonic_us())
    assert world.snapshot().workers[0].device_share is None


@pytest.mark.parametrize("partitions", [1, 96, 97, 1000])
def test_the_lag_of_each_partition_is_that_of_its_worst_topic(partitions: int) -> None:
    def row(topic: str, partition: int, lag: int | None, unread: int | None = None) -> PartitionReport:
        return PartitionReport(topic, partition, None, None, lag, None, None, LagStatus.OK, unread=unread)

    last = partitions - 1
    rows = [row(topic, each, 0) for topic in ("preinfer", "ranking") for each in range(last)]
    rows += [row("preinfer", last, 7), row("ranking", last, None, 3)]
    report = GroupReport("g", "", "", "", 1, 7, 7, None, 0, (), LagStatus.OK, (), tuple(rows))
    world = UiWorld()
    world.model.note_lag(LagReport("c", 0, 0, True, (report,)), None)
    [group] = world.snapshot().lag or ()
    assert group.cells[-1] == 7 and sum(group.cells) == 7
    assert len(group.cells) == -(-partitions // -(-partitions // model.MAX_CELLS)) <= model.MAX_CELLS


def test_each_partition_has_the_place_of_its_owner() -> None:
    world = UiWorld(partitions=5)
    world.status("worker-01", 2, 3)
    world.status("worker-00", 0, 1)
    shown = world.snapshot()
    assert [worker.worker_id for worker in shown.workers] == ["worker-00", "worker-01"]
    assert shown.owners == [0, 0, 1, 1, -1]
    assert shown.workers[0].fresh and shown.workers[0].owns == "0-1"
    world.wait(10)
    world.status("worker-01", 2, 3)
    shown = world.snapshot()
    assert shown.owners == [-1, -1, 1, 1, -1] and not shown.workers[0].fresh, "silent"
    world.wait(100)
    shown = world.snapshot()
    assert (shown.workers, shown.silent_workers) == ([], 2)
    world.model.note_status("worker-00", None, world.clock.wall_us())
    assert world.snapshot().silent_workers == 1, "a tombstone"


def test_the_fill_of_a_tier_comes_from_the_metrics_or_else_from_the_status() -> None:
    world = UiWorld()
    world.status("worker-00", 0)
    (worker,) = world.snapshot().workers
    assert (worker.hbm.capacity_bytes, worker.hbm.held_bytes, worker.hbm.cached_bytes) == (2**30, 2**28, None)
    page = "".join(
        f'relaygr_cache_bytes{{tier="hbm",held="{held}"}} {count}\n'
        for held, count in (
            ("free", 10),
            ("evictable", 20),
            ("leased", 3),
            ("pinned", 4),
            ("in_flight", 5),
        )
    )
    page += 'relaygr_supervisor_children{phase="active"} 1\nrelaygr_supervisor_children{phase="standby"} 1\n'
    world.model.note_metrics("worker-00", parse_reading(page), world.clock.monotonic_us())
    (worker,) = world.snapshot().workers
    assert (worker.hbm.capacity_bytes, worker.hbm.held_bytes, worker.hbm.cached_bytes) == (42, 12, 20)
    assert (worker.standbys, worker.hit_share) == (1, None)
    world.model.note_metrics("worker-00", None, world.clock.monotonic_us())
    shown = world.snapshot()
    assert shown.workers[0].hbm.cached_bytes is None and shown.workers[0].standbys is None
    assert world.said() == ["No metrics come from worker-00"]
    world.model.keep_pages([])
    assert world.said() == []


def test_a_page_that_has_not_answered_yet_is_told_after_the_time_of_a_start() -> None:
    """The gateway of the demo was named for 9 s, each time that it started."""
    world = UiWorld()
    world.model.note_metrics("gateway", None, world.clock.monotonic_us())
    world.wait(19)
    world.model.note_metrics("gateway", None, world.clock.monotonic_us())
    world.status("worker-00", 0)
    assert world.said() == []
    world.wait(2)
    world.status("worker-00", 0)
    assert world.said() == ["No metrics come from gateway"]
    world.model.note_metrics("gateway", Reading(), world.clock.monotonic_us())
    assert world.said() == []
    world.model.note_metrics("gateway", None, world.clock.monotonic_us())
    assert world.said() == ["No metrics come from gateway"], "it did answer"


def test_a_pool_is_shown_beside_the_tiers_and_told_when_it_is_away() -> None:
    world = UiWorld()
    for name in ("worker-00", "worker-01"):
        world.status(name, 0)
    now_us = world.clock.monotonic_us()
    world.model.note_metrics("worker-00", parse_reading("relaygr_pool_away 0\n"), now_us)
    page = 'relaygr_pool_away {}\nrelaygr_pool_fetches_total{{outcome="loaded"}} 7\n'
    page += 'relaygr_pool_objects_written_total{{outcome="stored"}} 9\n'
    world.model.note_metrics("worker-01", parse_reading(page.format(0)), now_us)
    shown = world.snapshot()
    assert [worker.pool for worker in shown.workers] == [None, PoolView(away=False, written=9, loaded=7)]
    assert shown.problems == []
    world.model.note_metrics("worker-01", parse_reading(page.format(1)), now_us)
    assert world.said() == ["The pool hangs or does not answer for worker-01: prefixes are computed instead"]


def test_a_quota_of_kafka_is_told_with_the_process_that_waits_longest() -> None:
    world = UiWorld()
    now_us = world.clock.monotonic_us()
    page = 'relaygr_kafka_broker_throttle_seconds{{broker="1",client="c",type="producer"}} {}\n'
    for name, held_s in (("worker-07", 0.3), ("gateway-1", 1.75), ("trigger", 0)):
        world.model.note_metrics(name, parse_reading(page.format(held_s)), now_us)
    assert world.said() == [
        "A quota of Kafka holds back the answers to 2 processes (gateway-1, worker-07) for up to 1.75 s"
    ]
    world.model.note_metrics("worker-07", parse_reading(page.format(0)), now_us)
    world.model.keep_pages(["worker-07", "trigger"])
    assert world.said() == [], "one waits no more, and the other is gone"


def test_decisions_are_those_of_the_last_minute_over_all_triggers() -> None:
    world = UiWorld()
    assert world.snapshot().decisions is None
    for name in ("one", "two"):
        world.model.note_metrics(name, trigger_metrics(admitted=1000, load=5), world.clock.monotonic_us())
    world.wait(2)
    world.model.note_metrics("one", trigger_metrics(admitted=1010, load=5), world.clock.monotonic_us())
    world.model.note_metrics("two", trigger_metrics(admitted=7, load=2), world.clock.monotonic_us())
    decided = {each.reason: each.count for each in world.snapshot().decisions or ()}
    assert decided == {"admitted": 17, "load": 2}, "the second trigger was started again"
    world.wait(70)
    assert world.snapshot().decisions == []


def test_a_worker_s_metrics_page_is_read_if_it_can_be_reached_from_here(monkeypatch: pytest.MonkeyPatch) -> None:
    world = UiWorld()
    monkeypatch.setattr("socket.gethostname", lambda: "machine-1")
    now_us = world.clock.wall_us()
    urls = {
        "worker-00": "http://127.0.0.1:9100/metrics",
        "worker-01": "http://10.0.0.7:9100/metrics",
        "worker-02": "http://10.0.0.7:9100/admin?delete=all",
        "worker-03": "file:///etc/passwd/metrics",
        "worker-04": "http://[broken/metrics",
        "worker-05": None,
    }
    for name, url in urls.items():
        world.model.note_status(name, worker_status(name, now_us, (0,), url), now_us)
    assert set(world.model.metrics_urls(now_us).values()) == {"worker-00", "worker-01"}
    monkeypatch.setattr("socket.gethostname", lambda: "another-machine")
    assert set(world.model.metrics_urls(now_us).values()) == {"worker-01"}
    assert world.model.metrics_urls(now_us + 100_000_000) == {}, "silent workers"


def test_a_worker_that_stops_says_so() -> None:
    world = UiWorld()
    stopping = dataclasses.replace(worker_status("worker-00", world.clock.wall_us(), (0,)), state=WorkerState.STOPPING)
    world.model.note_status("worker-00", stopping, world.clock.wall_us())
    shown = world.snapshot()
    assert (shown.workers[0].state, shown.workers[0].fresh, shown.owners[0]) == ("stopping", False, -1)


def test_the_page_says_that_no_worker_is_ready_and_nothing_is_ranked() -> None:
    """All workers had stopped, requests waited, and the page showed only a green "live"."""
    world = UiWorld()
    assert world.said() == [], "the statuses in the topic are not read yet"
    world.wait(4)
    assert world.said() == ["No worker is ready, so no request is ranked"]
    world.model.note_lag(None, "Kafka at kafka-1:9092 does not answer")
    assert world.said() == ["Kafka at kafka-1:9092 does not answer"], "the cause alone"
    world.model.note_lag(None, None)
    world.status("worker-00", 0)
    world.status("worker-01", 1)
    assert world.snapshot().problems == []
    stopping = dataclasses.replace(worker_status("worker-00", world.clock.wall_us(), (0,)), state=WorkerState.STOPPING)
    world.model.note_status("worker-00", stopping, world.clock.wall_us())
    assert world.snapshot().problems == [], "the other one is ready"


def test_a_pre_infer_worker_is_shown_with_its_slots_and_ranks_nothing() -> None:
    world = UiWorld()
    world.wait(4)
    status = worker_status("pre-infer-00", world.clock.wall_us(), ())
    world.model.note_status(
        "pre-infer-00", dataclasses.replace(status, pre_infer=PreInferSlots(2, 1, 40, 3)), world.clock.wall_us()
    )
    shown = world.snapshot()
    (view,) = shown.workers
    assert (view.fresh, view.owns, view.pre_infer) == (True, "", PreInferSlots(2, 1, 40, 3))
    assert world.said() == ["No worker is ready, so no request is ranked"]
    world.wait(4)
    assert world.said() == ["No worker is ready, so no request is ranked"], "killed"
    world.model.note_reader("The broker is away")
    assert world.said() == ["The broker is away"], "nobody knows"


def test_a_worker_whose_clock_is_ahead_is_silent_as_soon_as_others() -> None:
    """It was shown as ready for two hours after its death."""
    world = UiWorld()
    status = worker_status("worker-00", world.clock.wall_us() + 7_200_000_000, (0,))
    world.model.note_status("worker-00", status, world.clock.wall_us())
    assert world.snapshot().workers[0].fresh
    world.wait(4)
    assert not world.snapshot().workers[0].fresh


@given(st.lists(st.integers(0, 200), unique=True).map(sorted))
def test_ranges_name_every_partition_once(partitions: list[int]) -> None:
    named: list[int] = []
    for part in filter(None, ranges(partitions).split(", ")):
        first, _, last = part.partition("-")
        named += range(int(first), int(last or first) + 1)
    assert named == partitions


def test_every_kind_of_an_end_has_a_place() -> None:
    assert [each.kind for each in UiWorld().snapshot().kinds] == [
        "hbm", "dram", "pending", "full", "truncated", "other", "expired", "failed", "unanswered"
    ]  # fmt: skip
