"""The soak: what it finds flat, which counters it adds up, and a run in miniature."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from relaygr.bench.soak.judge import (
    BROKER,
    FILES,
    Account,
    Ends,
    Growth,
    Life,
    Resource,
    Sample,
    Window,
    accounts,
    growths,
)
from relaygr.bench.soak.run import EventKind, SoakPlan, planned_events, soak
from relaygr.demo.processes import Reading
from relaygr.worker.supervisor.policy import SupervisorSettings

MIB = 1 << 20
RUN_S = 600
WINDOW = Window.of(RUN_S)
KILLS_S = (84, 192, 288, 336)
STEP_MIB = 40.0
NOISE_MIB = 1.0


def memory_of(leak_mib_per_minute: float = 0.0, seed: int = 1, process: str = "active") -> list[Sample]:
    """Noise, a level and a warm-up of each life, and a peak at each reload, when two models are in memory."""
    random = np.random.default_rng(seed)
    samples, life, begun_s = [], 0, 0
    for second in range(RUN_S):
        if second in KILLS_S:
            life, begun_s = life + 1, second
        age_s = second - begun_s
        level = 300 + STEP_MIB * (life % 2) - 20 * np.exp(-age_s / 8) + 20 * (age_s % 60 < 6)
        noise = random.normal(0, NOISE_MIB)
        samples.append(
            Sample(second, process, life, Resource.RSS, (level + noise + leak_mib_per_minute * age_s / 60) * MIB)
        )
    return samples


def verdict(samples: list[Sample], window: Window = WINDOW) -> Growth:
    (found,) = growths(samples, window)
    return found


@pytest.mark.parametrize("seed", range(5))
def test_noise_steps_at_kills_and_peaks_at_reloads_are_flat(seed: int) -> None:
    found = verdict(memory_of(seed=seed))
    assert found.is_judged and found.is_flat
    assert abs(found.per_minute) < 0.3


@pytest.mark.parametrize("seed", range(5))
def test_a_leak_of_a_mebibyte_a_minute_is_found_though_kills_end_each_life(seed: int) -> None:
    found = verdict(memory_of(1.0, seed))
    assert not found.is_flat
    assert found.per_minute == pytest.approx(1.0, abs=0.3)


def test_what_shrinks_is_flat() -> None:
    assert verdict(memory_of(-5.0)).is_flat


def test_a_descriptor_that_each_kill_leaves_open_in_the_supervisor_is_found() -> None:
    def of(leak: int) -> list[Sample]:
        return [
            Sample(second, "supervisor", 1, Resource.FDS, 12 + leak * sum(second >= kill_s for kill_s in KILLS_S))
            for second in range(RUN_S)
        ]

    assert verdict(of(leak=0)).is_flat
    assert not verdict(of(leak=1)).is_flat


def test_a_file_is_one_life_so_growth_at_each_kill_counts() -> None:
    def of(leak_mib: float) -> list[Sample]:
        kills = [sum(second >= kill_s for kill_s in KILLS_S) for second in range(RUN_S)]
        return [
            Sample(second, FILES, 0, Resource.SHARED, (64 + leak_mib * kills[second]) * MIB) for second in range(RUN_S)
        ]

    assert verdict(of(0.0)).is_flat
    assert not verdict(of(4.0)).is_flat


def test_growth_in_the_first_half_and_in_the_warm_up_of_a_process_does_not_count() -> None:
    samples = [
        Sample(second, "trigger", 1, Resource.RSS, min(second, RUN_S / 2) * MIB) for second in range(RUN_S)
    ]  # fmt: skip
    assert verdict(samples).per_minute == 0
    late = [
        Sample(second, "trigger", 2, Resource.RSS, min(second - 400, WINDOW.settle_s) * MIB)
        for second in range(400, RUN_S)
    ]
    assert verdict(late).per_minute == 0


def test_a_life_that_is_too_short_is_not_judged() -> None:
    assert not verdict(memory_of(100.0)[-45:]).is_judged


def test_the_broker_is_not_judged() -> None:
    found = verdict(memory_of(100.0, process=BROKER))
    assert not found.is_judged and found.is_flat


def test_levels_are_the_last_ones_in_the_unit_of_the_bound() -> None:
    assert verdict(memory_of()).level == pytest.approx(300, abs=5)


# -- counters


def reading_of(**totals: float) -> Reading:
    """Names without their prefix and suffix; `name__label_value` for a label."""
    samples: dict[str, dict[tuple[tuple[str, str], ...], float]] = {}
    for name, value in totals.items():
        name, _, label = name.partition("__")
        key, _, text = label.partition("_")
        samples.setdefault(f"relaygr_{name}", {})[((key, text.replace("_", ".")),) if label else ()] = value
    return Reading(samples)


WORKER = reading_of(
    consumer_messages_total__topic_soak_ranking=100,
    consumer_messages_total__topic_soak_preinfer=90,
    consumer_in_flight_messages=0,
    worker_ranked_total__path_hbm=90,
    worker_ranked_total__path_truncated=4,
    worker_unranked_total__outcome_overloaded=6,
    worker_preinfer_jobs_total__outcome_computed=90,
    cache_hits_total__coverage_complete=50,
    cache_joins_total__kind_fill=15,
    cache_misses_total__reason_absent=25,
    cache_spills_total__outcome_started=7,
    cache_spills_ended_total__outcome_published=7,
)
TRIGGER = reading_of(trigger_decisions_total__reason_admitted=98)
SUPERVISOR = reading_of(supervisor_replaced_total=0)
ENDS = Ends(offered=98, recorded=98, answered=98, lost=0, not_sent=0, unrecorded_answers=2, without_prefix=3)


def differing(worker: Reading = WORKER, unseen: int = 0, ends: Ends = ENDS, kills: int = 0) -> set[str]:
    """The names of the accounts that do not add up."""
    lives = [Life("worker", 1, worker, unseen)]
    found = accounts(lives, [Life("trigger", 2, TRIGGER)], Life("supervisor", 3, SUPERVISOR), ends, kills)
    return {one.name for one in found if not one.adds_up}


def with_total(name: str, value: float) -> Reading:
    changed = reading_of(**{name: value})
    return Reading({**WORKER.samples, **changed.samples})


def test_counters_that_agree_add_up() -> None:
    assert differing() == set()


def test_lost_and_unrecorded_requests_are_found() -> None:
    assert differing(ends=replace(ENDS, answered=97, lost=1)) == {
        "requests lost",
        "answers written by the workers, and received by the gateway",
    }
    assert "impressions offered, and recorded ends" in differing(ends=replace(ENDS, offered=99))


def test_requests_whose_budget_was_shorter_than_the_brokers_outage_may_be_lost() -> None:
    assert "requests lost" in differing(ends=replace(ENDS, lost=3))
    assert "requests lost" not in differing(ends=replace(ENDS, lost=3, excused=3))


def test_events_that_the_broker_did_not_acknowledge_may_be_undecided() -> None:
    events = "retrieval events, and decisions of the triggers"
    assert events in differing(ends=replace(ENDS, offered=100, recorded=100))
    assert events not in differing(ends=replace(ENDS, offered=100, recorded=100, events_unacknowledged=2))


def test_look_ups_are_requests_apart_from_those_that_were_not_looked_up() -> None:
    look_ups = "requests with a prefix, and look-ups: hits, joins and misses"
    assert differing(with_total("cache_misses_total__reason_absent", 22)) == set(), "ten ended before it"
    assert differing(with_total("cache_misses_total__reason_absent", 21)) == {look_ups}
    assert differing(with_total("cache_misses_total__reason_absent", 43)) == {look_ups}, "counted twice"


def test_a_request_that_a_worker_received_and_never_answered_is_found() -> None:
    found = differing(with_total("consumer_messages_total__topic_soak_ranking", 101))
    assert "worker 1: requests received, and answered" in found


def test_what_a_killed_process_did_after_its_last_scrape_is_allowed_for() -> None:
    late = replace(ENDS, offered=105, recorded=105, answered=105)
    answers = "answers written by the workers, and received by the gateway"
    assert answers in differing(ends=late)
    assert answers not in differing(ends=late, unseen=7)
    assert answers in differing(ends=late, unseen=6)


def test_a_lease_that_is_left_at_the_end_is_found() -> None:
    assert differing(with_total("cache_leases", 1)) == {"worker 1: leases at the end"}


def test_a_child_that_died_without_a_kill_is_found() -> None:
    assert differing(kills=1) == {"kills of workers, and children that the supervisor replaced"}


def test_an_account_may_differ_by_its_slack() -> None:
    assert Account("", 5, 3, 2).adds_up
    assert not Account("", 5, 2, 2).adds_up


# -- events


def test_a_run_of_ten_minutes_has_all_kinds_of_events_in_both_halves() -> None:
    events = planned_events(600, can_restart_broker=True)
    assert events == sorted(events, key=lambda event: event.second)
    counts = Counter(event.kind for event in events)
    assert counts[EventKind.WORKER_KILLED] == 4 and counts[EventKind.BROKER_RESTARTED] == 1
    late = {event.kind for event in events if event.second > 300}
    assert late == set(EventKind) - {EventKind.BROKER_RESTARTED}


def test_an_hour_repeats_the_events_and_seconds_have_fewer() -> None:
    hour = Counter(event.kind for event in planned_events(3_600, can_restart_broker=True))
    assert hour == {kind: 6 * n for kind, n in Counter(e.kind for e in planned_events(600, True)).items()}
    seconds = Counter(event.kind for event in planned_events(10, can_restart_broker=True))
    assert seconds == {**dict.fromkeys(EventKind, 1), EventKind.MODEL_RELOADED: 3}
    assert EventKind.BROKER_RESTARTED not in {event.kind for event in planned_events(600, can_restart_broker=False)}


@pytest.mark.soak
@pytest.mark.timeout(300)
def test_a_run_in_miniature_kills_reloads_and_adds_up(tmp_path: Path) -> None:
    """The plan is shorter than a recovery, so each event waits for the one before, and the traffic goes on."""
    plan = SoakPlan(2.0, 10.0, 20)
    soak(plan, "embedded", tmp_path / "samples.csv", tmp_path / "verdicts.json")
    found = json.loads((tmp_path / "verdicts.json").read_text(encoding="utf-8"))
    planned = [event.kind for event in planned_events(plan.seconds, can_restart_broker=False)]
    assert set(planned) == set(EventKind) - {EventKind.BROKER_RESTARTED}
    assert [event["kind"] for event in found["events"]] == planned
    seconds = {event["kind"]: event["second"] for event in found["events"]}
    # A new standby is not started before this pause is over.
    least_s = SupervisorSettings().restart_pause_s
    assert seconds[EventKind.TRIGGER_KILLED] > seconds[EventKind.WORKER_KILLED] + least_s, "after the relay's recovery"
    assert found["seconds"] > seconds[EventKind.TRIGGER_KILLED]
    assert [one for one in found["accounts"] if not one["adds_up"]] == []
    series = {(one["process"], one["resource"]) for one in found["growth"]}
    assert {("gateway", "rss_bytes"), ("supervisor", "threads"), ("active", "leases")} <= series
    assert {(FILES, "history_store_file_bytes"), (FILES, "shared_memory_bytes")} <= series
    lines = (tmp_path / "samples.csv").read_text(encoding="utf-8").splitlines()
    assert lines[0] == "second,process,pid,name,value"
    assert any(",relaygr_worker_ranked_total," in line for line in lines)
    assert (tmp_path / "soak.png").stat().st_size > 10_000
