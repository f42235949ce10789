"""A worker with a hot standby on a real Kafka, under traffic: killed, stopped, hung, and fenced."""

from __future__ import annotations

import os
import shutil
import signal
import time
import uuid
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from relaygr.client import Ended
from relaygr.devbroker import LocalBroker
from relaygr.kafka.settings import KafkaSettings
from relaygr.processes import CommandProcess
from relaygr.schemas.topics import Topic
from relaygr.ui.scrape import Reading
from relaygr.worker.cache import MissReason
from relaygr.worker.exits import Exit
from relaygr.worker.settings import StandbyMemory
from tests.pipeline.test_warm_restart import asked_without_a_version, histories_used, known
from tests.waiting import until
from tests.worlds.pair import Pair, await_pair, children
from tests.worlds.relay import Relay, candidates_of, history_of, new_user, own_topics, reading
from tests.worlds.steady_traffic import Asked, Traffic, hit_ratio

pytestmark = [pytest.mark.kafka, pytest.mark.outage]

USERS = [f"user-{number:02d}" for number in range(30)]
INTERVAL_S = 0.04
BUDGET_MS = 20_000
HISTORY = 300
STANDBY_TIMEOUT_S = 90.0
WATCHDOG_S = 2.0
STOPPED_S = 8.0
"""Longer than a session."""
HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def kafka(real_broker: LocalBroker) -> Iterator[KafkaSettings]:
    with own_topics(real_broker) as settings:
        yield settings


@pytest.fixture
def session_timeout_ms(kafka: KafkaSettings) -> int:
    return kafka.session_timeout_ms


@pytest.fixture
def standby_memory() -> StandbyMemory:
    return StandbyMemory.RESERVED


@pytest.fixture
def relay(
    kafka: KafkaSettings,
    session_timeout_ms: int,
    standby_memory: StandbyMemory,
    model: Path,
    tmp_path: Path,
    hang_file: Path,
) -> Iterator[Relay]:
    group = f"{kafka.group_prefix}.{uuid.uuid4().hex[:6]}"
    own = kafka.model_copy(update={"group_prefix": group, "session_timeout_ms": session_timeout_ms})
    # HBM holds a few users' prefixes, DRAM all of them.
    memory = {"dram_bytes": 16 << 20, "standby_memory": standby_memory}
    with Relay(own, tmp_path, model, watchdog_s=WATCHDOG_S, **memory) as relay:
        yield relay


@pytest.fixture
def hang_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file for a process id: the worker with the process id in the file hangs."""
    hang_file = tmp_path / "hang"
    monkeypatch.setenv("RELAYGR_TEST_HANG", str(hang_file))
    monkeypatch.setenv("PYTHONPATH", f"{HERE / 'hang'}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    return hang_file


@pytest.fixture
def worker(relay: Relay) -> CommandProcess:
    supervisor = relay.start_worker("worker-00", command=["worker", "--standby"])
    relay.await_ready(supervisor)
    return supervisor


def begun(relay: Relay) -> Traffic:
    return Traffic(relay.client, USERS, lambda user: history_of(user, HISTORY), candidates_of(), INTERVAL_S, BUDGET_MS)


def pair_of(supervisor: CommandProcess, but_not: tuple[int, ...] = ()) -> Pair:
    return await_pair(supervisor.port, STANDBY_TIMEOUT_S, but_not)


def await_take_over(supervisor: CommandProcess, pair: Pair) -> None:
    until(lambda: children(supervisor.port).get("active") == pair.standby, "the standby is active")


def require_all_ranked(traffic: Traffic, *died_s: float) -> list[Asked]:
    """Each request got scores, and only requests that were open when their worker died were processed twice.

    With only a commit a second, and no file of finished offsets, 12 to 25 more requests would be repeated.
    """
    asked = traffic.stop()
    assert not traffic.lost
    assert Counter(each.outcome.status for each in asked) == {Ended.RANKED: len(asked)}
    were_open = sum(each.sent_s <= at_s < each.answered_s for each in asked for at_s in died_s)
    assert traffic.repeated <= were_open + 10
    return asked


def all_prefixes_are_in_dram(supervisor: CommandProcess) -> bool:
    return reading(supervisor).total("relaygr_cache_entries", tier="dram") == len(USERS)


def nothing_is_being_spilled(worker: CommandProcess) -> bool:
    told = reading(worker)
    started = told.total("relaygr_cache_spills_total", outcome="started")
    return started > 0 and told.total("relaygr_cache_spills_ended_total") == started


@dataclass(frozen=True)
class LookUps:
    """Look-ups of prefixes in both tiers. A hit counts even if the request then did not reload the prefix."""

    found: float
    absent: float

    @classmethod
    def of(cls, supervisor: CommandProcess) -> LookUps:
        """The look-ups of the active process so far, as soon as it serves metrics."""
        told: list[Reading] = []

        def has_told() -> bool:
            told.append(reading(supervisor))
            return "relaygr_cache_hits_total" in told[-1].samples

        until(has_told, "the active process serves its metrics")
        missed = told[-1].by_label("relaygr_cache_misses_total", "reason")
        in_dram = missed.pop(MissReason.IN_DRAM, 0)
        return cls(in_dram + told[-1].total("relaygr_cache_hits_total"), sum(missed.values()))

    def ratio_since(self, earlier: LookUps) -> float:
        found = self.found - earlier.found
        return found / (found + self.absent - earlier.absent)


@pytest.mark.parametrize("standby_memory", StandbyMemory)
def test_the_standby_of_a_worker_killed_under_traffic_takes_over(relay: Relay, worker: CommandProcess):
    """No request is lost or answered twice, every prefix in DRAM is found again, and a new standby starts."""
    pair = pair_of(worker)
    with begun(relay) as traffic:
        until(lambda: all_prefixes_are_in_dram(worker), "all prefixes are in DRAM", 60)
        spilled = LookUps.of(worker)
        time.sleep(1.5)
        before = LookUps.of(worker)
        killed_s = time.monotonic()
        os.kill(pair.active, signal.SIGKILL)
        await_take_over(worker, pair)
        time.sleep(1.5)
        asked = require_all_ranked(traffic, killed_s)
    after = [each for each in asked if each.sent_s > killed_s]
    assert reading(worker).by_label("relaygr_arena_prefixes_total", "outcome") == {"restored": len(USERS)}
    assert LookUps.of(worker).ratio_since(LookUps(0, 0)) == before.ratio_since(spilled) == 1
    assert hit_ratio(after) > 0
    assert {each.outcome.result.worker_id for each in after if each.outcome.result} == {"worker-00"}
    relay.await_all_committed(Topic.RANKING)
    later = pair_of(worker, but_not=(pair.active,))
    assert later.active == pair.standby
    assert later.standby not in (pair.active, pair.standby)
    assert relay.stop(worker) == 0


@pytest.mark.parametrize("session_timeout_ms", [3 * BUDGET_MS])
def test_a_rolling_restart_of_both_processes_costs_no_request(relay: Relay, worker: CommandProcess):
    """The recipe of docs/operations.md: SIGTERM to the active process, as soon as the standby is ready.

    Nothing waits for the end of a session: all requests would be late.
    """
    with begun(relay) as traffic:
        first = pair_of(worker)
        time.sleep(1)
        ended_s = [time.monotonic()]
        os.kill(first.active, signal.SIGTERM)
        await_take_over(worker, first)
        second = pair_of(worker, but_not=(first.active,))
        ended_s.append(time.monotonic())
        os.kill(second.active, signal.SIGTERM)
        await_take_over(worker, second)
        time.sleep(1)
        require_all_ranked(traffic, *ended_s)
    assert second.active == first.standby
    assert second.standby not in (first.active, first.standby)
    assert relay.stop(worker) == 0


def test_a_killed_supervisor_costs_no_request_and_the_next_one_adopts_the_pair(relay: Relay, worker: CommandProcess):
    pair = pair_of(worker)
    with begun(relay) as traffic:
        time.sleep(1)
        relay.kill(worker)
        again = relay.start_worker("worker-00", command=["worker", "--standby"])
        relay.await_ready(again)
        assert pair_of(again) == pair
        killed_s = time.monotonic()
        os.kill(pair.active, signal.SIGKILL)
        await_take_over(again, pair)
        time.sleep(1)
        require_all_ranked(traffic, killed_s)
    assert relay.stop(again) == 0


def test_an_emptied_shared_folder_costs_no_request_and_its_standby_takes_over_later(
    relay: Relay, worker: CommandProcess
):
    """What systemd-logind does (RemoveIPC). The standby fenced the active process, and both ended with 3."""
    pair = pair_of(worker)
    with begun(relay) as traffic:
        time.sleep(1)
        shutil.rmtree(relay.folder / "shared", ignore_errors=True)
        until(lambda: "RemoveIPC=no" in worker.log.read_text(encoding="utf-8"), "the active process says so")
        assert pair_of(worker) == pair
        killed_s = time.monotonic()
        os.kill(pair.active, signal.SIGKILL)
        await_take_over(worker, pair)
        assert pair_of(worker, (pair.active,)).active == pair.standby
        require_all_ranked(traffic, killed_s)
    assert worker.log.read_text(encoding="utf-8").count("RemoveIPC=no") == 1
    assert relay.stop(worker) == 0


def test_after_a_kill_of_all_processes_the_backlog_is_served_from_the_restored_prefixes(
    relay: Relay, worker: CommandProcess
):
    """HBM holds a few users' prefixes. Full inference once served 100 of 261 requests after such a restart."""
    pair = pair_of(worker)
    with begun(relay) as traffic:
        until(lambda: all_prefixes_are_in_dram(worker), "all prefixes are in DRAM", 60)
        killed_s = time.monotonic()
        for pid in (worker.process.pid, pair.active, pair.standby):
            os.kill(pid, signal.SIGKILL)
        relay.kill(worker)
        again = relay.start_worker("worker-00", command=["worker", "--standby"])
        relay.await_ready(again)
        time.sleep(1)
        asked = traffic.stop()
    assert reading(again).by_label("relaygr_arena_prefixes_total", "outcome") == {"restored": len(USERS)}
    backlog = [each for each in asked if each.sent_s > killed_s and each.outcome.status is Ended.RANKED]
    assert hit_ratio(backlog) > 0.8, "the break-even rule may choose full inference for a few"
    assert not traffic.lost
    assert relay.stop(again) == 0


def test_a_standby_that_still_starts_ranks_what_waited_with_the_histories_in_the_workers_store(
    relay: Relay, worker: CommandProcess
):
    """Such a standby was active before it had looked into the store, and ranked half of them on nothing."""
    pair = pair_of(worker)
    with relay.client() as client:
        users = known(client, "returning", 40, 63)
        os.kill(pair.standby, signal.SIGKILL)
        until(lambda: "preparing" in children(worker.port), "another standby starts")
        os.kill(pair.active, signal.SIGKILL)
        answers = asked_without_a_version(client, users)
        until(lambda: "active" in children(worker.port), "the standby is active", STANDBY_TIMEOUT_S)
        answers += asked_without_a_version(client, users)
        assert histories_used(answers) == [64] * 80
    assert pair_of(worker, (pair.active, pair.standby))
    assert relay.stop(worker) == 0


def test_a_worker_whose_device_hangs_exits_and_its_standby_takes_over(
    relay: Relay, worker: CommandProcess, hang_file: Path
):
    pair = pair_of(worker)
    with begun(relay) as traffic:
        time.sleep(2)
        hung_s = time.monotonic()
        hang_file.write_text(str(pair.active))
        await_take_over(worker, pair)
        time.sleep(1)
        require_all_ranked(traffic, hung_s)
    assert f'"exit_code": {int(Exit.STUCK)}' in worker.log.read_text()


def test_a_stopped_worker_that_wakes_up_after_its_session_is_fenced_and_writes_nothing(relay: Relay):
    """Two machines with one id and no common supervisor. A suspended process that woke up once took the id back."""
    first = relay.start_worker("worker-00")
    relay.await_ready(first)
    ask(relay, 10)
    until(lambda: nothing_is_being_spilled(first), "nothing is being spilled")
    first.process.send_signal(signal.SIGSTOP)
    elsewhere = f"worker.shared_path={relay.folder / 'elsewhere'}"
    second = relay.start_worker("worker-00-elsewhere", elsewhere, "worker.worker_id=worker-00")
    relay.await_ready(second)
    time.sleep(STOPPED_S)
    committed = relay.committed(Topic.RANKING)
    left = dram_of(relay)
    first.process.send_signal(signal.SIGCONT)
    assert first.process.wait(60) == Exit.FENCED
    relay.forget(first)
    assert dram_of(relay) == left
    assert second.process.poll() is None
    ask(relay, 10)
    relay.await_all_committed(Topic.RANKING)
    after = relay.committed(Topic.RANKING)
    assert all(after[partition] >= offset for partition, offset in committed.items())


def test_a_standby_takes_over_nothing_from_a_worker_that_was_fenced(relay: Relay, worker: CommandProcess):
    """Another machine has the id: a standby that joined would fence that machine's worker."""
    pair_of(worker)
    elsewhere = f"worker.shared_path={relay.folder / 'elsewhere'}"
    other = relay.start_worker("worker-00-elsewhere", elsewhere, "worker.worker_id=worker-00")
    assert worker.process.wait(60) == Exit.FENCED
    relay.forget(worker)
    relay.await_ready(other)
    time.sleep(1)
    assert other.process.poll() is None
    ask(relay, 5)


def ask(relay: Relay, count: int) -> None:
    with relay.client() as client:
        for _ in range(count):
            user = new_user("ask")
            outcome = client.rank(user, candidates_of(), budget_ms=BUDGET_MS, history=history_of(user, 50))
            assert outcome.status is Ended.RANKED


def dram_of(relay: Relay) -> list[bytes]:
    """The bytes of the first worker's arena, pages and index."""
    return [path.read_bytes() for path in sorted((relay.folder / "shared").rglob("*-*")) if path.is_file()]
