"""`relaygr doctor`: what it makes of what it sees, its exit codes, and that nothing keeps it."""

from __future__ import annotations

import dataclasses
import json
import socket
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import KafkaError

from relaygr.client import RankOutcome, RankStatus, TimeOutReason
from relaygr.devbroker.local import free_ports
from relaygr.doctor import examine, judge, observe
from relaygr.doctor.examine import Examination
from relaygr.doctor.findings import Diagnosis, Verdict, exit_code
from relaygr.doctor.judge import SeenBroker, SeenFolder, SeenWorker
from relaygr.kafka.client_errors import why_undelivered
from relaygr.kafka.rights import Role
from relaygr.kafka.settings import GroupProtocol, KafkaSettings
from relaygr.kafka.topic_check import Finding, Severity, TopicReport
from relaygr.schemas.messages import FailureReason, WorkerState
from relaygr.settings import Settings, load_settings
from relaygr.worker.settings import WorkerSettings
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
    return SeenWorker(worker_id, "ready", is_fresh, 1.0, frozenset(partitions), 0)


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
    [found] = judge.clocks({"near": 100, "far": offset_us}, 5_000)
    assert found.verdict is verdict
    assert verdict is OK or "far" in found.what


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
    [found] = judge.pool("pool:50051", lack, True)
    assert found.verdict is FAIL and "libibverbs.so.1, libnuma.so.1" in found.what
    assert found.mend == "apt-get install libibverbs1 libnuma1"
    assert verdicts(judge.pool("pool:50051", None, False)) == [WARN]
    assert verdicts(judge.pool("pool:50051", None, True)) == [OK]


def test_the_pool_is_looked_at_only_where_one_is_set() -> None:
    (port,) = free_ports(1)
    assert Examination(load_settings(environment={}))._pool() == []
    pool = {"RELAYGR_WORKER__POOL__ADDRESS": f"127.0.0.1:{port}", "RELAYGR_WORKER__POOL__SECRET_FILE": "secret"}
    [found] = Examination(load_settings(environment=pool))._pool()
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


def test_a_trigger_that_does_not_run_is_a_warning() -> None:
    assert verdicts(judge.trigger(["trigger-0"], True)) == [OK]
    assert verdicts(judge.trigger([], True)) == [WARN]
    assert verdicts(judge.trigger(None, True)) == [SKIP]


@pytest.mark.parametrize(
    ("status", "reason", "verdict", "says"),
    [
        (RankStatus.TIMED_OUT, TimeOutReason.NO_ANSWER, FAIL, "no_answer"),
        (RankStatus.EXPIRED, None, FAIL, "expired"),
        (RankStatus.FAILED, FailureReason.OVERLOADED, WARN, "overloaded"),
        (RankStatus.FAILED, FailureReason.DEVICE_ERROR, FAIL, "device_error"),
        (RankStatus.FAILED, FailureReason.REFUSED_BY_KAFKA, FAIL, "refused_by_kafka"),
    ],
)
def test_an_impression_that_is_not_ranked_says_how_it_ended(
    status: RankStatus, reason: Any, verdict: Verdict, says: str
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
    outcome = RankOutcome("r", RankStatus.FAILED, 10, None, FailureReason.REFUSED_BY_KAFKA)
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
    assert (found["alive"].partitions, found["alive"].offset_us) == (frozenset({2, 3}), -hour_us)
    assert (found["dead"].offset_us, found["dead"].age_s) == (None, 3600)


def test_the_status_that_came_quickest_tells_the_clock() -> None:
    statuses = observe.Statuses()
    statuses.is_live.set()
    for delay_us in (9_000, 700, 4_000):
        statuses.apply("w", status("w"), NOW_US + delay_us)
    assert statuses.workers(NOW_US)[0].offset_us == -700


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
    assert verdicts(observe.checkpoint(tmp_path / "absent")) == [SKIP]
    model = make_model(tmp_path / "model")
    assert verdicts(observe.checkpoint(model)) == [OK]
    weights = model / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-3] ^= 0x01
    weights.write_bytes(bytes(data))
    [found] = observe.checkpoint(model)
    assert found.verdict is FAIL and "was changed after it was written" in found.what


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
    assert {found[name] for name in ("topics", "rights", "trigger", "workers", "impression")} == {"skip"}


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
