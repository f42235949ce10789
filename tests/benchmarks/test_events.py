"""The benchmark of events: the figures of an event, growth, counters that add up, and a run in miniature."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest

from relaygr.bench.events import Event, Plan, run
from relaygr.bench.events.__main__ import main
from relaygr.bench.events.figures import HandOver, Happened, Phase, lost_outside, row_of
from relaygr.bench.events.judge import Account, Ends, Growth, Judged, Life, Resource, Sample, accounts, growths
from relaygr.bench.events.run import play_events
from relaygr.bench.events.stack import Stack
from relaygr.runtime.errors import RelayError
from relaygr.settings import Settings
from relaygr.traffic.records import LOST, ImpressionRecord
from relaygr.ui.scrape import Reading

RECORD = ImpressionRecord(0, "g.0.0", "u", "ranked", 10_000, 0, False, path="hbm")
BAD = {
    "late": {"late": True, "latency_us": 900_000},
    "truncated": {"path": "truncated"},
    "failed": {"status": "failed", "path": None},
    "lost": {"status": LOST, "path": None, "latency_us": None, "late": True},
}
AT_S, READY_S, WINDOW_S = 100.0, 106.0, 10.0


def records_with(bad: dict[float, str]) -> list[ImpressionRecord]:
    """Ten requests a second from 80 to 130 s, of which those at these times are bad."""
    found = []
    for number in range(500):
        at_s = 80 + number / 10
        changes = BAD[bad[at_s]] if at_s in bad else {}
        found.append(replace(RECORD, number=number, scheduled_us=int(at_s * 1e6), **changes))
    return found


def row_with(bad: dict[float, str]):
    return row_of(Happened("kill", AT_S, READY_S), records_with(bad), WINDOW_S, begun_s=70.0)


def test_a_row_counts_the_bad_requests_before_during_and_after_by_kind() -> None:
    row = row_with({95.0: "late", 101.0: "truncated", 102.0: "failed", 102.5: "lost", 107.0: "late", 125.0: "late"})
    assert row.before == Phase(100, late=1, not_whole=0, lost=0)
    assert row.during == Phase(60, late=0, not_whole=2, lost=1)
    assert row.after == Phase(100, late=1, not_whole=0, lost=0)
    assert (row.at_s, row.ready_s, row.longest_ms) == (30.0, 6.0, 900.0)


def test_the_level_is_back_with_the_last_bad_request_of_a_window_that_is_worse_than_before() -> None:
    assert row_with({}).back_s == 0
    assert row_with({101.0: "late", 102.0: "late", 103.5: "late"}).back_s == 3.5
    assert row_with({108.0: "late", 108.5: "late"}).back_s == 8.5, "though the processes were ready before"


def test_a_single_bad_request_or_as_many_as_before_are_no_change() -> None:
    assert row_with({101.0: "late", 110.0: "late"}).back_s == 0
    always = {80 + number: "late" for number in range(50)}
    assert row_with(always).back_s == 0


def test_a_hand_over_counts_the_first_visits_of_users_who_had_come_to_another_worker() -> None:
    def visit(user: str, worker: str, **changes: str) -> ImpressionRecord:
        return replace(RECORD, user_id=user, worker_id=worker, scheduled_us=next(times), **changes)

    times = itertools.count()
    records = [
        visit("ann", "worker-00", prefix_source="computed"),
        visit("bob", "worker-00", prefix_source="computed"),
        visit("cid", "worker-00", prefix_source="computed"),
        visit("ann", "worker-02", prefix_source="dram"),
        visit("bob", "worker-02", path="full"),
        visit("bob", "worker-02", prefix_source="dram"),
        visit("new", "worker-02", prefix_source="computed"),
    ]
    joined = HandOver("worker-02", 0.5, 1.5, 0.25)
    row = row_of(Happened("join", AT_S, READY_S, joined), records[::-1], WINDOW_S, 0.0)
    assert row.hand_over == replace(joined, sources={"dram": 1, "full": 1})


def test_a_lost_request_is_excused_only_while_the_broker_was_away() -> None:
    records = records_with({90.0: "lost", 100.5: "lost", 120.0: "lost"})
    assert lost_outside(records, [], 2.0) == 3
    assert lost_outside(records, [(101.0, 103.0)], 2.0) == 2


# -- growth

MIB = 1 << 20
RUN_S = 600
KILLS_S = (84, 192, 288, 336)


def memory_of(leak_mib_per_minute: float = 0.0, seed: int = 1) -> list[Sample]:
    """Noise, a level and a warm-up of each life, and a peak at each reload, when two models are in memory."""
    random = np.random.default_rng(seed)
    samples, life, begun_s = [], 0, 0
    for second in range(RUN_S):
        if second in KILLS_S:
            life, begun_s = life + 1, second
        age_s = second - begun_s
        level = 300 + 40 * (life % 2) - 20 * np.exp(-age_s / 8) + 20 * (age_s % 60 < 6) + random.normal(0, 1)
        samples.append(Sample(second, "active", life, Resource.RSS, (level + leak_mib_per_minute * age_s / 60) * MIB))
    return samples


def verdict(samples: list[Sample]) -> Growth:
    (found,) = growths(samples, Judged.of(RUN_S))
    return found


@pytest.mark.parametrize("seed", range(3))
def test_noise_steps_at_kills_and_peaks_at_reloads_are_flat_and_a_leak_of_a_mebibyte_a_minute_is_not(seed: int) -> None:
    assert verdict(memory_of(seed=seed)).is_flat
    leak = verdict(memory_of(1.0, seed))
    assert not leak.is_flat and leak.per_minute == pytest.approx(1.0, abs=0.3)
    assert verdict(memory_of(-5.0, seed)).is_flat


def test_what_each_kill_leaves_in_a_process_or_a_file_that_lives_on_is_found() -> None:
    def of(resource: Resource, leak: float) -> list[Sample]:
        kills = [sum(second >= kill_s for kill_s in KILLS_S) for second in range(RUN_S)]
        return [Sample(second, "files", 0, resource, 12 + leak * kills[second]) for second in range(RUN_S)]

    for resource, leak in ((Resource.FDS, 1), (Resource.SHARED, 4 * MIB)):
        assert verdict(of(resource, 0)).is_flat
        assert not verdict(of(resource, leak)).is_flat


def test_growth_during_the_warm_up_and_of_a_short_life_does_not_count() -> None:
    samples = [Sample(second, "t", 1, Resource.RSS, min(second, RUN_S / 2) * MIB) for second in range(RUN_S)]
    assert verdict(samples).per_minute == 0
    assert verdict(memory_of(100.0)[-45:]).is_flat


# -- counters


def reading_of(**totals: float) -> Reading:
    """Names without their prefix; `name__label_value` for a label."""
    samples: dict[str, dict[tuple[tuple[str, str], ...], float]] = {}
    for name, value in totals.items():
        name, _, label = name.partition("__")
        key, _, text = label.partition("_")
        samples.setdefault(f"relaygr_{name}", {})[((key, text.replace("_", ".")),) if label else ()] = value
    return Reading(samples)


WORKER = reading_of(
    consumer_messages_total__topic_events_ranking=100,
    consumer_messages_total__topic_events_preinfer=90,
    consumer_in_flight_messages=0,
    worker_ranked_total__path_hbm=94,
    worker_unranked_total__outcome_overloaded=6,
    worker_preinfer_jobs_total__outcome_computed=90,
    cache_spills_total__outcome_started=7,
    cache_spills_ended_total__outcome_published=7,
)
TRIGGER = reading_of(trigger_decisions_total__reason_admitted=98)
ENDS = Ends(begun=98, recorded=98, lost=0, lost_outside_outages=0, not_sent=0, unrecorded_answers=2)


def differing(worker: Reading = WORKER, unseen: int = 0, ends: Ends = ENDS, take_overs: int = 0) -> set[str]:
    """The names of the accounts that do not add up."""
    lives = [
        Life("worker", "worker-01", 1, worker, unseen=unseen),
        Life("trigger", "trigger", 2, TRIGGER),
        Life("supervisor", "worker-00", 3, reading_of(supervisor_replaced_total=0)),
    ]
    return {one.name for one in accounts(lives, ends, take_overs) if not one.adds_up}


def with_total(name: str, value: float) -> Reading:
    ((changed, totals),) = reading_of(**{name: value}).samples.items()
    return Reading({**WORKER.samples, changed: {**WORKER.samples.get(changed, {}), **totals}})


def test_counters_that_agree_add_up() -> None:
    assert differing() == set()


def test_a_request_without_a_record_and_a_lost_one_are_found() -> None:
    assert "impressions begun, and recorded" in differing(ends=replace(ENDS, begun=99))
    assert differing(ends=replace(ENDS, lost=1, lost_outside_outages=1)) == {
        "requests lost outside an outage of the broker"
    }


def test_a_request_that_a_worker_received_and_never_answered_is_found() -> None:
    found = differing(with_total("consumer_messages_total__topic_events_ranking", 101))
    assert found == {"worker-01: requests received, and answered"}


def test_what_a_killed_process_did_after_its_last_reading_is_allowed_for() -> None:
    late = replace(ENDS, recorded=105, begun=105, events_unacknowledged=7)
    assert "answers of the workers, and of the gateways" in differing(ends=late)
    assert differing(ends=late, unseen=7) == set()
    assert "answers of the workers, and of the gateways" in differing(ends=late, unseen=6)


def test_a_lease_that_is_left_and_a_process_that_died_without_a_kill_are_found() -> None:
    assert differing(with_total("cache_leases", 1)) == {"worker-01: leases at the end"}
    assert differing(take_overs=1) == {"kills of active processes, and processes that the supervisor replaced"}


def test_an_account_may_differ_by_its_slack() -> None:
    assert Account("", 5, 3, 2).adds_up
    assert not Account("", 5, 2, 2).adds_up


# -- runs


def test_an_unknown_event_is_refused_with_those_that_there_are() -> None:
    with pytest.raises(RelayError, match=r"--events earthquake: there are kill, take-over, "):
        main(events="kill,earthquake")


def plan_of(*events: Event, seconds: float = 0.0) -> Plan:
    return Plan(events, seconds, 10.0, 20.0, 20, 512, budget_ms=10_000, window_s=2.0, seed=1)


def test_a_folder_with_files_of_others_is_refused_and_keeps_them(tmp_path: Path) -> None:
    own = tmp_path / "thesis.csv"
    own.write_text("of years", encoding="utf-8")
    with pytest.raises(RelayError, match=r"thesis\.csv"):
        play_events(plan_of(Event.KILL), "embedded", 1, tmp_path, None)
    assert own.read_text(encoding="utf-8") == "of years"


def test_a_run_replaces_the_files_of_an_earlier_one(tmp_path: Path) -> None:
    out, folder = tmp_path / "out", tmp_path / "run"
    for path in (out / "worker-02.log", folder / "trigger.log", folder / "settings.yaml"):
        path.parent.mkdir(exist_ok=True)
        path.touch()
    run._refuse_other_files(out)
    run._keep(folder, out)
    assert [path.name for path in out.iterdir()] == ["trigger.log"]


def test_a_plan_without_an_event_that_can_happen_is_refused() -> None:
    assert run.without_broker_stop(plan_of(Event.BROKER_STOP, Event.KILL)).events == (Event.KILL,)
    with pytest.raises(RelayError, match="no event that can happen"):
        run.without_broker_stop(plan_of(Event.BROKER_STOP))


def test_several_brokers_beside_a_broker_that_is_there_are_refused(tmp_path: Path) -> None:
    with pytest.raises(RelayError, match="leave out --broker localhost:9092"):
        play_events(plan_of(Event.KILL), "localhost:9092", 3, tmp_path / "out", None)


@pytest.mark.parametrize("ours", [True, False])
def test_topics_of_a_stack_that_does_not_start_are_deleted_of_a_broker_of_others(
    ours: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise RelayError("no port is free")

    broker = Mock(ours=ours)
    monkeypatch.setattr(Stack, "start", fail)
    with pytest.raises(RelayError, match="no port"), Stack(broker, tmp_path, Settings(), 10.0):
        pass
    assert broker.delete_topics.called is not ours


@pytest.mark.soak
@pytest.mark.timeout(600)
def test_a_run_in_miniature_plays_its_events_and_adds_up(tmp_path: Path) -> None:
    events = (Event.TAKE_OVER, Event.KILL_TRIGGER, Event.RELOAD, Event.KILL)
    plan = plan_of(*events)
    passed = play_events(plan, "embedded", 1, tmp_path / "out", tmp_path / "events.json")
    found = json.loads((tmp_path / "events.json").read_text(encoding="utf-8"))
    assert [one["name"] for one in found["accounts"] if abs(one["expected"] - one["found"]) > one["slack"]] == []
    assert passed
    assert [row["event"] for row in found["rows"]] == [*events]
    assert all(row["during"]["requests"] > 0 and row["during"]["lost"] == 0 for row in found["rows"])
    assert (
        (tmp_path / "out" / "samples.csv").read_text(encoding="utf-8").startswith("second,process,pid,resource,value")
    )


@pytest.mark.soak
@pytest.mark.timeout(600)
def test_a_soak_in_miniature_judges_what_grew(tmp_path: Path) -> None:
    plan = plan_of(Event.HOT_USER, seconds=5.0)
    play_events(plan, "embedded", 1, tmp_path / "out", tmp_path / "events.json")
    found = json.loads((tmp_path / "events.json").read_text(encoding="utf-8"))
    assert [row["event"] for row in found["rows"]] == [Event.HOT_USER]
    series = {(one["process"], one["resource"]) for one in found["growths"]}
    assert {("worker-00 active", "rss_bytes"), ("trigger", "threads"), ("files", "shared_memory_bytes")} <= series
