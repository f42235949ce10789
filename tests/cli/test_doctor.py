"""`relaygr doctor`: what it makes of what it sees, its exit codes, and that nothing keeps it."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import socket
import subprocess
import sys
import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import KafkaError
from prometheus_client import CollectorRegistry, start_http_server

from relaygr.admission.fit import RankPoint
from relaygr.admission.latency import LatencyModel
from relaygr.admission.worker_table import NoRoomError
from relaygr.client import Ended, RankOutcome, Reason
from relaygr.client.clock_offset import ClockOffset
from relaygr.cluster.rights import Role
from relaygr.cluster.topic_check import Finding, Severity, TopicReport
from relaygr.conditions import Seen
from relaygr.conditions import judge as judge_conditions
from relaygr.devbroker.local import free_ports
from relaygr.doctor import examine, judge, observe
from relaygr.doctor.examine import Examination
from relaygr.doctor.judge import Diagnosis, SeenBroker, SeenFolder, SeenWorker, Verdict, exit_code
from relaygr.kafka.client_errors import why_undelivered
from relaygr.kafka.settings import GroupProtocol, KafkaSettings
from relaygr.kafka.statistics import KafkaStatistics
from relaygr.schemas.messages import LatencyCoefficients, WorkerState
from relaygr.settings import Settings, load_settings
from relaygr.trigger.fleet import MAX_WORKERS
from relaygr.worker.calibration import Calibration, MachineDescription, save_calibration
from relaygr.worker.kv import KvDtype
from relaygr.worker.model.options import ComputeDtype
from relaygr.worker.pool.stores import store_url
from relaygr.worker.settings import WorkerSettings
from tests.streams.test_kafka_statistics import report
from tests.streams.test_trigger_fleet import NOW_US, status
from tests.waiting import until
from tests.worlds.broker_proxy import broker_behind_proxy
from tests.worlds.relay import environment, make_model

OK, SKIP, WARN, FAIL = Verdict.OK, Verdict.SKIP, Verdict.WARN, Verdict.FAIL
KAFKA_4 = {0: (0, 13), 1: (4, 18), 68: (0, 1)}
KAFKA_3 = {0: (0, 9), 1: (0, 15)}


def verdicts(found: Sequence[Diagnosis]) -> list[Verdict]:
    return [each.verdict for each in found]


def seen_broker(apis: dict[int, tuple[int, int]], is_embedded: bool = False) -> SeenBroker:
    return SeenBroker("kafka-1:9092", 1, is_embedded, apis)


def worker(worker_id: str = "worker-00", partitions: Sequence[int] = (0, 1), is_fresh: bool = True) -> SeenWorker:
    return SeenWorker(worker_id, "ready", is_fresh, 1.0, frozenset(partitions), ClockOffset(0, 0))


def pre_infer_worker(is_fresh: bool = True) -> SeenWorker:
    return dataclasses.replace(worker("pre-infer-00", (), is_fresh), is_pre_infer=True)


# -- judgement ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("found", "code"), [([OK, SKIP], 0), ([OK, WARN], 1), ([WARN, FAIL, OK], 2), ([], 0), ([FAIL], 2)]
)
def test_the_exit_code_is_that_of_the_worst_finding(found: list[Verdict], code: int) -> None:
    assert exit_code(Diagnosis("check", verdict, "what") for verdict in found) == code


@pytest.mark.parametrize(
    ("apis", "version"),
    [(KAFKA_4, "4.0 or newer"), (KAFKA_3, "older than 4.0"), ({}, "not known")],
)
def test_the_version_of_a_broker_shows_in_the_requests_that_it_knows(
    apis: dict[int, tuple[int, int]], version: str
) -> None:
    [found] = judge.broker(seen_broker(apis), GroupProtocol.CLASSIC)
    assert found.verdict is OK and version in found.what


def test_a_group_protocol_that_the_broker_does_not_know_is_a_failure() -> None:
    found = judge.broker(seen_broker(KAFKA_3), GroupProtocol.CONSUMER)
    assert verdicts(found) == [OK, FAIL] and "set affinity to range" in found[1].mend
    assert verdicts(judge.broker(seen_broker(KAFKA_4), GroupProtocol.CONSUMER)) == [OK]


def test_findings_on_topics_keep_their_severity_and_remedy() -> None:
    found = judge.topics(
        TopicReport(
            (),
            (
                Finding(Severity.ERROR, None, "a topic is missing", "run `relaygr topics create`"),
                Finding(Severity.WARNING, "t", "its retention is long", "shorten it"),
                Finding(Severity.NOTE, None, "settings cannot be read", ""),
            ),
        )
    )
    assert verdicts(found) == [FAIL, WARN, SKIP] and found[0].mend == "run `relaygr topics create`"
    assert verdicts(judge.topics(TopicReport((), ()))) == [OK]


def test_a_user_needs_the_rights_of_one_role_or_of_those_asked_for() -> None:
    missing = {Role.GATEWAY: (), Role.WORKER: ("ann may not Read topic t, as a worker must",)}
    assert verdicts(judge.rights(missing, ())) == [OK]
    found = judge.rights(missing, (Role.WORKER,))
    assert verdicts(found) == [OK, FAIL] and "topics acls --role worker" in found[1].mend
    assert verdicts(judge.rights({Role.WORKER: ("lacks",)}, ())) == [FAIL]


def test_a_worker_that_diverts_needs_the_rights_for_that() -> None:
    assert judge.roles((), False) == (Role.GATEWAY, Role.TRIGGER, Role.WORKER)
    assert judge.roles((), True) == (Role.GATEWAY, Role.TRIGGER, Role.WORKER_DIVERT)
    assert judge.roles((Role.WORKER, Role.WORKER_DIVERT), True) == (Role.WORKER_DIVERT,)
    assert judge.roles((Role.WORKER_DIVERT,), False) == (Role.WORKER_DIVERT,)


def test_the_overflow_topics_rights_are_asked_for_where_workers_divert(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Role] = []

    def rights(_: KafkaSettings, roles: Sequence[Role]) -> dict[Role, tuple[str, ...]]:
        asked.extend(roles)
        lacks = ("ann may not Write topic overflow, as a worker-divert must",)
        return {role: lacks if role is Role.WORKER_DIVERT else () for role in roles}

    monkeypatch.setattr(observe, "rights", rights)
    found = Examination(Settings(worker=WorkerSettings(divert=True)), (Role.WORKER,))._rights()
    assert Role.WORKER not in asked
    assert verdicts(found) == [OK, FAIL] and "topics acls --role worker-divert" in found[1].mend


@pytest.mark.parametrize(
    ("installed", "requirement", "verdict"),
    [
        ("2.16.1", "confluent-kafka<3,>=2.16; extra == 'client'", OK),
        ("2.13.0", "confluent-kafka<3,>=2.16; extra == 'client'", FAIL),
        ("3.0", "confluent-kafka<3,>=2.16", FAIL),
        ("2.16", "confluent-kafka>=2.16.0", OK),
        ("2.13.0+cpu", "confluent-kafka==2.13.0", OK),
        ("1.0", "other-library>=2", OK),
        ("1.0", "confluent-kafka[schema]>=0.9", OK),
    ],
)
def test_installed_libraries_must_lie_in_the_ranges_of_the_package(
    installed: str, requirement: str, verdict: Verdict
) -> None:
    assert verdicts(judge.versions({"confluent-kafka": installed}, [requirement])) == [verdict]


@pytest.mark.parametrize(
    ("offset_us", "verdict"), [(0, OK), (4_000, OK), (-5_001, WARN), (99_000, WARN), (-100_001, FAIL)]
)
def test_clocks_may_differ_by_the_skew_that_workers_allow(offset_us: int, verdict: Verdict) -> None:
    [found] = judge.clocks({"near": ClockOffset(100, 0), "far": ClockOffset(offset_us, 0)}, 5_000)
    assert found.verdict is verdict
    assert verdict is OK or "far" in found.what


@pytest.mark.parametrize(
    ("offset", "verdict", "says"),
    [
        (ClockOffset(-412_300, 413_000), SKIP, "-412.3 ms from ours (+/- 413.0 ms)"),
        (ClockOffset(-412_300, 380_000), WARN, "over worker.max_clock_skew_ms"),
        (ClockOffset(-412_300, 300_000), FAIL, "(+/- 300.0 ms)"),
        (ClockOffset(2_400, 61_000), OK, "1 compared: the clock of w is +2.4 ms from ours (+/- 61.0 ms)"),
    ],
)
def test_half_of_a_slow_round_trip_is_no_offset(offset: ClockOffset, verdict: Verdict, says: str) -> None:
    """Under a quota, a clock on the same machine was 757 ms from ours."""
    [found] = judge.clocks({"w": offset}, 5_000)
    assert found.verdict is verdict and says in found.what
    assert bool(found.mend) == (verdict in (WARN, FAIL))


def test_clocks_that_can_be_compared_are_judged_beside_those_that_cannot() -> None:
    found = judge.clocks({"quick": ClockOffset(700, 900), "slow": ClockOffset(-2_000_000, 10_000_000)}, 5_000)
    assert verdicts(found) == [OK, SKIP]
    assert "1 compared" in found[0].what and "1 cannot be compared" in found[1].what and "slow" in found[1].what


def test_what_kafka_holds_back_names_the_processes_the_time_and_the_quota() -> None:
    assert judge.throttling({"worker-03": 0.0, "this process": 0.0}) == []
    [found] = judge.throttling({"worker-03": 1.25, "worker-04": 0.4, "this process": 0.0})
    assert found.verdict is WARN and "kafka-configs.sh" in found.mend
    assert "docs/alerts.md#relaykafkathrottles" in found.mend
    assert found.what == (
        "A quota of Kafka holds back the answers to 2 processes (worker-03, worker-04) for up to 1.25 s"
    )


def test_traffic_is_judged_in_the_words_of_the_live_page() -> None:
    seen = Seen(ready=0, ended=20, late=13, held_back_s={"worker-00": 1.0})
    [late] = judge.traffic(judge_conditions(seen), 20, 6)
    assert (late.check, late.verdict, late.what) == ("traffic", WARN, "65 % of the ranking requests are late")
    assert late.mend == "see docs/alerts.md#relayrankinglate"
    [calm] = judge.traffic([], 20, 6)
    assert (calm.verdict, calm.what) == (OK, "20 ranking requests ended within 6 s, and nothing is wrong with them")
    assert judge.traffic([], 0, 6)[0].what == "no ranking request ended within 6 s, and nothing else is wrong"
    unread = Seen(errors=["This user may not read relaygr.results: grant the rights"], ended=9, late=9)
    [skipped] = judge.traffic(judge_conditions(unread), 9, 6)
    assert skipped.verdict is SKIP and "may not read relaygr.results" in skipped.what, "a user of another role"


def test_the_metrics_pages_of_workers_and_others_tell_what_kafka_holds_back() -> None:
    """The processes have the traffic that a quota is for; the one impression has not."""
    pages = {}
    with contextlib.ExitStack() as stack:
        for name, throttle_ms in (("worker-00", 0), ("worker-01", 640)):
            registry = CollectorRegistry()
            figures = report(name, brokers=2)
            figures["brokers"]["b1"] = figures["brokers"]["b1"] | {"throttle": {"max": throttle_ms}}
            KafkaStatistics(registry).read(json.dumps(figures))
            server, thread = start_http_server(0, "127.0.0.1", registry)
            stack.callback(thread.join)
            stack.callback(server.server_close)
            stack.callback(server.shutdown)
            pages[name] = f"http://127.0.0.1:{server.server_port}/metrics"
        (closed,) = free_ports(1)
        known = {**pages, "gone": f"http://127.0.0.1:{closed}/metrics"}
        assert observe.held_back(known) == {"worker-00": 0.0, "worker-01": 0.64}
        host = socket.gethostname()
        statuses = observe.Statuses()
        statuses.apply("worker-01", replace(status("worker-01"), metrics_url=pages["worker-01"], host=host), NOW_US)
        statuses.apply("far", replace(status("far"), metrics_url=pages["worker-01"], host="another"), NOW_US)
        examination = Examination(Settings())
        examination._workers = statuses.workers(NOW_US)
        [found] = examination._quotas()
        assert "holds back the answers to worker-01 for up to 0.64 s" in found.what
        examination._workers = statuses.workers(NOW_US + 3_600_000_000)
        assert examination._quotas() == [], "they are silent"


def test_without_another_process_no_clock_is_compared() -> None:
    assert verdicts(judge.clocks({}, 5_000)) == [SKIP]


def test_memory_shared_memory_and_open_files_that_do_not_suffice_are_warnings() -> None:
    gib = 1 << 30
    assert verdicts(judge.memory(10 * gib, 8 * gib) + judge.memory(10 * gib, 10 * gib)) == [OK, WARN]
    assert verdicts(judge.shared_memory(SeenFolder("/dev/shm", 2 * gib, True), gib)) == [OK]
    assert verdicts(judge.shared_memory(SeenFolder("/dev/shm", gib // 16, True), gib)) == [WARN]
    assert verdicts(judge.shared_memory(SeenFolder("/tmp", 9 * gib, False), gib)) == [WARN]
    assert verdicts(judge.open_files(1 << 16, 1024) + judge.open_files(1024, 1024)) == [OK, WARN]


def test_a_pool_lacks_libraries_by_name_or_a_master_or_nothing() -> None:
    lack = "Mooncake needs libibverbs.so.1, libnuma.so.1: apt-get install libibverbs1 libnuma1"
    url = store_url("mooncake://pool:50051")
    [found] = judge.pool(url, lack, None)
    assert found.verdict is FAIL and "libibverbs.so.1, libnuma.so.1" in found.what
    assert found.mend == "apt-get install libibverbs1 libnuma1"
    [found] = judge.pool(url, None, "nothing listens at pool:50051: start it")
    assert (found.verdict, found.what) == (WARN, "nothing listens at pool:50051 (worker.pool.store)")
    assert found.mend == "start it; until then workers compute"
    assert verdicts(judge.pool(url, None, None)) == [OK]


def test_the_pool_is_looked_at_only_where_one_is_set() -> None:
    (port,) = free_ports(1)
    assert Examination(load_settings(environment={}))._pool() == []
    secret = {"RELAYGR_WORKER__POOL__SECRET_FILE": "secret"}
    address = f"127.0.0.1:{port}"
    for form in ({"STORE": f"mooncake://{address}"}, {"ADDRESS": address}):
        pool = {f"RELAYGR_WORKER__POOL__{name}": value for name, value in form.items()}
        [found] = Examination(load_settings(environment=secret | pool))._pool()
        assert found.check == "pool" and found.verdict in (FAIL, WARN)


def test_partitions_without_an_owner_are_named() -> None:
    found = judge.workers([worker("a", [0, 1]), worker("b", [3])], 4)
    assert verdicts(found) == [OK, FAIL] and "1 of 4 have no owner: 2" in found[1].what
    assert verdicts(judge.workers([worker("a", range(4))], 4)) == [OK, OK]


def test_a_silent_worker_owns_nothing() -> None:
    found = judge.workers([worker("a", [0, 1]), worker("b", [2, 3], is_fresh=False)], 4)
    assert verdicts(found) == [OK, WARN, FAIL] and "b (ready, 1 s ago)" in found[1].what
    assert verdicts(judge.workers([], 4)) == [FAIL]


def test_pre_infer_workers_rank_nothing_and_owners_compute_without_them() -> None:
    owner, ready, silent = worker("a", range(4)), pre_infer_worker(), pre_infer_worker(is_fresh=False)
    assert verdicts(judge.workers([ready], 4)) == [FAIL]
    assert verdicts(judge.pre_infer_workers([owner, ready], is_wanted=True)) == [OK]
    [found] = judge.pre_infer_workers([owner, silent], is_wanted=True)
    assert found.verdict is WARN and "the owners compute" in found.what
    [found] = judge.pre_infer_workers([owner, ready], is_wanted=False)
    assert found.verdict is WARN and "pre-infer-00 get no jobs" in found.what
    assert judge.pre_infer_workers([owner], is_wanted=False) == []
    [found] = judge.pre_infer_workers([owner, replace(ready, has_slots=False)], is_wanted=True)
    assert found.verdict is WARN and "can take no jobs" in found.what


def test_a_trigger_that_does_not_run_is_a_warning() -> None:
    assert verdicts(judge.trigger(["trigger-0"], True)) == [OK]
    assert verdicts(judge.trigger([], True)) == [WARN]
    assert verdicts(judge.trigger(None, True)) == [SKIP]


@pytest.mark.parametrize(
    ("status", "reason", "verdict", "says"),
    [
        (Ended.TIMED_OUT, Reason.NO_ANSWER, FAIL, "no_answer"),
        (Ended.EXPIRED, None, FAIL, "expired"),
        (Ended.FAILED, Reason.OVERLOADED, WARN, "overloaded"),
        (Ended.FAILED, Reason.DEVICE_ERROR, FAIL, "device_error"),
        (Ended.FAILED, Reason.REFUSED_BY_KAFKA, FAIL, "refused_by_kafka"),
    ],
)
def test_an_impression_that_is_not_ranked_says_how_it_ended(
    status: Ended, reason: Any, verdict: Verdict, says: str
) -> None:
    [found] = judge.impression(None, RankOutcome("r", status, 10, None, reason))
    assert found.verdict is verdict and says in found.what and found.mend


@pytest.mark.parametrize(
    ("code", "what", "mend"),
    [
        (KafkaError.INVALID_TIMESTAMP, "too far from that of the brokers", "set the clocks"),
        (KafkaError.TOPIC_AUTHORIZATION_FAILED, "this user may not write", "relaygr topics acls"),
        (KafkaError.INVALID_RECORD, "Broker failed to validate record", "look at the topics"),
    ],
)
def test_an_event_that_kafka_refuses_names_the_cause(code: int, what: str, mend: str) -> None:
    outcome = RankOutcome("r", Ended.FAILED, 10, None, Reason.REFUSED_BY_KAFKA)
    event, _ = judge.impression(why_undelivered(KafkaError(code)), outcome)
    assert event.verdict is FAIL and what in event.what and mend in event.mend
    assert ("acls" in event.mend) == (code == KafkaError.TOPIC_AUTHORIZATION_FAILED)


# -- statuses ----------------------------------------------------------------------------------------


def test_a_worker_is_ready_that_writes_while_we_read_whatever_its_clock_says() -> None:
    statuses, hour_us = observe.Statuses(), 3_600_000_000
    for name in ("dead", "alive", "gone"):
        statuses.apply(name, status(name), NOW_US + hour_us)
    statuses.is_live.set()
    statuses.apply("alive", status("alive", partitions=(2, 3)), NOW_US + hour_us)
    statuses.apply("gone", status("gone", state=WorkerState.STOPPING), NOW_US)
    statuses.apply("starting", status("starting", state=WorkerState.STARTING), NOW_US)
    found = {each.worker_id: each for each in statuses.workers(NOW_US + hour_us)}
    assert {name: each.is_fresh for name, each in found.items()} == {"dead": False, "alive": True, "starting": False}
    assert found["alive"].partitions == frozenset({2, 3})
    assert found["alive"].offset is not None and found["alive"].offset.offset_us == -hour_us
    assert (found["dead"].offset, found["dead"].age_s) == (None, 3600)


def test_the_status_that_came_quickest_tells_the_clock() -> None:
    statuses = observe.Statuses()
    statuses.is_live.set()
    for delay_us in (9_000, 700, 4_000):
        statuses.apply("w", status("w"), NOW_US + delay_us)
    [seen] = statuses.workers(NOW_US)
    assert seen.offset is not None and seen.offset.offset_us == -700


@pytest.mark.parametrize(("behind_us", "verdict"), [(-240_000, FAIL), (3_100_000, SKIP), (30_000_000, FAIL)])
def test_a_status_that_comes_late_makes_no_clock_slow_by_seconds(behind_us: int, verdict: Verdict) -> None:
    """Kafka may hold back what its worker writes. A clock that is ahead cannot come from that."""
    statuses = observe.Statuses()
    statuses.is_live.set()
    statuses.apply("w", status("w"), NOW_US + behind_us)
    [seen] = statuses.workers(NOW_US)
    assert seen.offset is not None
    [found] = judge.clocks({"w": seen.offset}, 5_000)
    assert found.verdict is verdict


def test_of_very_many_made_up_workers_a_bounded_number_is_kept() -> None:
    statuses, kept = observe.Statuses(), 0
    for number in range(MAX_WORKERS + 25):
        with contextlib.suppress(NoRoomError):
            statuses.apply(f"w{number}", status(f"w{number}"), NOW_US)
            kept += 1
    assert kept == len(statuses.heard) == MAX_WORKERS
    statuses.apply("late", status("late"), NOW_US + 3_600_000_000)
    assert "late" in statuses.heard and len(statuses.heard) == MAX_WORKERS, "they are silent by then"


def test_a_check_that_fails_in_an_unexpected_way_says_how_and_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise ValueError("no such file system")

    monkeypatch.setattr(observe, "shared_folder", broken)
    examination = Examination(Settings())
    [found] = examination._bounded("shared memory", 60, examination._shared_memory)
    assert (found.verdict, found.what) == (FAIL, "the check failed: ValueError: no such file system")
    assert not examination.is_stuck


# -- the model ---------------------------------------------------------------------------------------


def test_a_checkpoint_is_read_whole(tmp_path: Path) -> None:
    assert verdicts(observe.checkpoint(tmp_path / "absent", ())) == [SKIP]
    model = make_model(tmp_path / "model")
    assert verdicts(observe.checkpoint(model, ())) == [OK]
    weights = model / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-3] ^= 0x01
    weights.write_bytes(bytes(data))
    [found] = observe.checkpoint(model, ())
    assert found.verdict is FAIL and "was changed after it was written" in found.what


def test_a_calibration_whose_fits_are_far_off_is_a_warning(tmp_path: Path) -> None:
    file = tmp_path / "calibration.json"
    assert observe.calibration(None) == [] and verdicts(observe.calibration(file)) == [SKIP]
    model = LatencyModel(LatencyCoefficients(50.0, 3.0, 0.0, 40.0, 2.0, 0.0, 30.0, 1.0, 0.0, 1.0, 0.001))
    sizes = [(tokens, scored) for tokens in (32, 64, 128, 256) for scored in (8, 40)]
    machine = MachineDescription("ab", "cpu", "", "", 1, "2.0", KvDtype.FLOAT32, 64, ComputeDtype.FLOAT32, "torch")

    def written(slower: float) -> list[Diagnosis]:
        """After half of the full passes took so much longer."""
        full = tuple(RankPoint(n, m, model.full_us(n, m) * (slower if m == 40 else 1.0)) for n, m in sizes)
        save_calibration(Calibration(machine, "now", model.coefficients, full, (), (), ()), file)
        return observe.calibration(file)

    [good] = written(1.1)
    assert good.verdict is OK and "at most 6% off" in good.what
    [bad] = written(3.0)
    assert bad.verdict is WARN and "the fitted T_full is 47% off" in bad.what and "relaygr calibrate" in bad.mend
    file.write_text("{}")
    examination = Examination(load_settings(environment={}, overrides=[f"worker.calibration={file}"]))
    [broken] = examination._bounded("calibration", 60, lambda: observe.calibration(file))
    assert broken.verdict is FAIL and "is not a calibration" in broken.what


# -- the command -------------------------------------------------------------------------------------


def doctor(kafka: KafkaSettings, *options: str) -> subprocess.CompletedProcess[str]:
    """`relaygr doctor`, as a process of its own: it may end while a check still waits."""
    given = [f"topic_prefix={kafka.topic_prefix}", f"group_prefix={kafka.group_prefix}"]
    given += [f"partitions={kafka.partitions}", f"connect_timeout_s={kafka.connect_timeout_s}"]
    settings = [text for setting in (*given, "worker.model=/nowhere/model") for text in ("--set", setting)]
    command = [sys.executable, "-m", "relaygr", "doctor", "--bootstrap", kafka.bootstrap, *settings, *options]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment(), check=False)


def by_check(done: subprocess.CompletedProcess[str]) -> dict[str, str]:
    """The worst verdict of each check."""
    report = json.loads(done.stdout)
    assert report["exit_code"] == done.returncode, done.stderr
    order = ["ok", "skip", "warn", "fail"]
    found: dict[str, str] = {}
    for each in report["findings"]:
        found[each["check"]] = max(found.get(each["check"], "ok"), each["verdict"], key=order.index)
    return found


@pytest.mark.slow
def test_without_workers_it_says_so_and_sends_nothing(kafka_settings: KafkaSettings) -> None:
    done = doctor(kafka_settings, "--json")
    found = by_check(done)
    assert done.returncode == 2
    assert (found["versions"], found["broker"], found["workers"]) == ("ok", "ok", "fail")
    assert (found["impression"], found["clocks"], found["model"]) == ("skip", "skip", "skip")
    assert found["topics"] != "fail"


@pytest.mark.slow
@pytest.mark.parametrize("broker", ["embedded"], indirect=True)
def test_the_page_fits_80_columns_and_says_what_to_do(kafka_settings: KafkaSettings) -> None:
    done = doctor(kafka_settings.model_copy(update={"topic_prefix": "nobody"}), "--no-impression")
    assert done.returncode == 2
    lines = done.stdout.splitlines()
    assert max(map(len, lines)) <= 80
    assert not any("impression" in line[:22] for line in lines)
    text = " ".join(done.stdout.split())
    assert "fail topics" in text and "-> run `relaygr topics create`" in text


@pytest.mark.slow
def test_a_broker_that_accepts_and_never_answers_keeps_it_for_a_bounded_time() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        kafka = KafkaSettings(bootstrap=f"127.0.0.1:{listener.getsockname()[1]}", connect_timeout_s=0.5)
        done = doctor(kafka, "--json")
    found = by_check(done)
    assert done.returncode == 2 and found["broker"] == "fail"
    assert {found[name] for name in ("topics", "rights", "trigger", "workers", "impression", "traffic")} == {"skip"}


@pytest.mark.kafka
def test_a_broker_that_freezes_in_between_ends_the_checks_of_kafka(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(examine, "KAFKA_S", 2.0)
    describe_configs = 32
    with broker_behind_proxy("doctor") as behind:
        behind.proxy.hold([describe_configs])
        settings = Settings(
            **behind.proxied.model_copy(update={"connect_timeout_s": 5.0}).model_dump(),
            worker=WorkerSettings(model=Path("/nowhere/model")),
        )
        examination = Examination(settings)
        found = {each.check: each for each in examination.run()}
        behind.proxy.cut()
        # The abandoned check ends once its broker is gone.
        until(lambda: "doctor-topics" not in {thread.name for thread in threading.enumerate()}, "the check ends", 90)
    assert examination.is_stuck
    assert (found["broker"].verdict, found["topics"].verdict) == (OK, FAIL)
    assert "did not end within 7 s" in found["topics"].what
    assert {found[name].verdict for name in ("rights", "trigger", "workers", "impression")} == {SKIP}
