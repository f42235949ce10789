"""Traffic: the schedule is a pure function of its settings, and every request ends as exactly one record."""

from __future__ import annotations

import itertools
import json
import resource
import signal
import time
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

import relaygr.traffic.player
from relaygr.cli.app import app
from relaygr.client import Ended, LostRequest, QueueFull, RankOutcome
from relaygr.devbroker import LocalBroker
from relaygr.kafka.settings import KafkaSettings
from relaygr.runtime.errors import RelayError
from relaygr.traffic.player import Player
from relaygr.traffic.population import SyntheticPopulation, history_at, population_of
from relaygr.traffic.records import (
    LOST,
    NOT_SENT,
    UNDELIVERED,
    ImpressionRecord,
    RecordWriter,
    pack_scores,
    read_records,
)
from relaygr.traffic.schedule import HISTORY_LEAD_US, Candidates, Impression, impressions, suffix_of
from relaygr.traffic.settings import TrafficSettings
from relaygr.traffic.summary import TrafficSummary
from tests.echo_worker import echo_worker

SETTINGS = TrafficSettings(
    users=20, duration_s=0.3, rate_per_s=100, lead_median_ms=5, settle_s=0, history_median=20, history_max=64,
    suffix=4, candidates=8, items=100, growth=2,
)  # fmt: skip


@pytest.fixture(scope="module")
def broker(embedded_broker: LocalBroker) -> LocalBroker:
    """The tests of whole relays use the client on a real Kafka."""
    return embedded_broker


def test_the_same_settings_give_the_same_stream_and_another_seed_another() -> None:
    def stream(seed: int) -> list[Any]:
        settings = SETTINGS.model_copy(update={"seed": seed})
        return list(impressions(settings, SyntheticPopulation(settings)))

    assert stream(1) == stream(1)
    assert stream(1) != stream(2)


def test_impressions_come_in_order_within_the_duration_and_rank_after_their_retrieval() -> None:
    stream = list(impressions(SETTINGS, SyntheticPopulation(SETTINGS)))
    assert stream
    assert [impression.number for impression in stream] == list(range(len(stream)))
    assert all(one.retrieval_us <= other.retrieval_us for one, other in itertools.pairwise(stream))
    assert all(impression.retrieval_us <= impression.ranking_us for impression in stream)
    assert stream[-1].retrieval_us <= 300_000


def test_without_a_duration_the_stream_is_endless() -> None:
    settings = SETTINGS.model_copy(update={"duration_s": 0.0})
    assert len(list(itertools.islice(impressions(settings, SyntheticPopulation(settings)), 500))) == 500


def test_a_returning_users_history_grows_and_the_older_one_is_its_beginning() -> None:
    population = SyntheticPopulation(SETTINGS)
    lengths: dict[int, list[int]] = {}
    for impression in impressions(SETTINGS.model_copy(update={"duration_s": 3.0}), population):
        lengths.setdefault(impression.user, []).append(impression.history_length)
    seen = max(lengths.values(), key=len)
    assert seen == sorted(seen) and seen[-1] > seen[0]
    user = next(user for user, found in lengths.items() if found is seen)
    older, newer = (history_at(population, user, length) for length in (seen[0], seen[-1]))
    assert newer.behaviours[: len(older.behaviours)] == older.behaviours


STARTING_AGAIN = SETTINGS.model_copy(
    update={"start_again": True, "growth": 40, "users": 3, "duration_s": 2.0, "rate_per_s": 12.0}
)


@pytest.mark.parametrize(("lead_ms", "rate_per_s"), [(5, 12.0), (700, 2.0)])
def test_a_user_whose_history_is_at_its_longest_starts_again_once_no_impression_is_open(
    lead_ms: int, rate_per_s: float
) -> None:
    """The tombstone came while a request that named the deleted history was under way: it waited for nothing."""
    settings = STARTING_AGAIN.model_copy(
        update={"duration_s": 200.0, "lead_median_ms": lead_ms, "lead_sigma": 0.5, "rate_per_s": rate_per_s}
    )
    population = SyntheticPopulation(settings)
    stream = [impression for impression in impressions(settings, population) if not impression.user]
    first, longest = population.first_length(0), settings.history_max
    kept = begun = 0
    for at, (before, after) in enumerate(itertools.pairwise(stream), 1):
        deleted_us = after.retrieval_us - HISTORY_LEAD_US
        is_open = any(each.ranking_us + settings.budget_ms * 1000 > deleted_us for each in stream[:at])
        if before.history_length == longest and not is_open:
            begun += 1
            assert after.history_length == first
        else:
            kept += before.history_length == longest
            assert after.history_length == min(before.history_length + 40, longest)
    assert kept and begun


def test_candidates_are_distinct_and_the_suffix_follows_the_history() -> None:
    population = SyntheticPopulation(SETTINGS)
    impression = next(impressions(SETTINGS, population))
    candidates = Candidates(SETTINGS, population).of(impression)
    assert np.unique(candidates).size == SETTINGS.candidates
    assert np.array_equal(candidates, Candidates(SETTINGS, population).of(impression))
    whole = population.sequence(impression.user)
    assert suffix_of(impression, SETTINGS, population).items[0] == whole.items[impression.history_length]


def test_records_are_read_as_they_were_written(tmp_path: Path) -> None:
    record = ImpressionRecord(
        1, "g.0.1", "u", "ranked", 1_200, 30, False, scores=pack_scores(np.array([0.5, -2], np.float32))
    )
    writer = RecordWriter(tmp_path / "out" / "records.jsonl")
    writer.write(record)
    assert list(read_records(tmp_path / "out" / "records.jsonl")), "a reader waits for the first record"
    writer.write(replace(record, number=2))
    writer.close()
    found, second = read_records(tmp_path / "out" / "records.jsonl")
    assert (found, second.number) == (record, 2)
    assert list(found.score_array()) == [0.5, -2]


def test_after_a_full_disk_the_file_has_whole_lines_and_the_run_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A limit of the file's size, in place of a disk: half of the third line fits."""
    record = ImpressionRecord(7, "g.0.1", "u", "expired", None, 30, True)
    monkeypatch.setattr("relaygr.traffic.records.FLUSH_INTERVAL_S", 0.0)
    writer, file = RecordWriter(tmp_path / "records.jsonl"), tmp_path / "records.jsonl"
    writer.write(record)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    # CPython ignores SIGXFSZ, so that a write raises.
    resource.setrlimit(resource.RLIMIT_FSIZE, (file.stat().st_size * 5 // 2, before[1]))
    try:
        for number in range(8, 12):
            writer.write(replace(record, number=number))
        writer.close()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert [each.number for each in read_records(file)] == [7, 8]
    assert writer.problem == f"{file} lacks records: File too large"


def test_a_file_of_records_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(RelayError, match=r"records.jsonl cannot be read: No such file"):
        list(read_records(tmp_path / "records.jsonl"))


def test_a_line_that_is_no_record_is_named_by_its_number(tmp_path: Path) -> None:
    path = tmp_path / "records.jsonl"
    path.write_text('{"number": 1}\n')
    with pytest.raises(RelayError, match="line 1"):
        list(read_records(path))


class FakeClient:
    """Ends each request by `ends`: a status, None for a lost request, or an exception."""

    def __init__(self, ends: Any) -> None:
        self.ends = ends
        self.events = 0
        self.published: list[tuple[str, int]] = []
        """User and length of each history; length 0: a tombstone."""

    def __call__(self, on_late: Any, on_lost: Any) -> FakeClient:
        self.on_lost = on_lost
        return self

    def __enter__(self) -> FakeClient:
        return self

    def __exit__(self, *_: object) -> None:
        return None

    def new_request_id(self) -> str:
        return f"g.0.{next(self.ids)}"

    ids = itertools.count()

    def publish_history(self, history: Any) -> None:
        self.published.append((history.user_id, len(history.behaviours)))

    def publish_behaviours(self, event: Any) -> None:
        self.published.append((event.user_id, event.position + len(event.behaviours)))

    def tombstone(self, user_id: str) -> None:
        self.published.append((user_id, 0))

    def publish_retrieval(self, user_id: str, **_: Any) -> None:
        self.events += 1
        if self.ends == "full":
            raise QueueFull("full")

    def submit_rank(
        self, user_id: str, candidates: Any, request_id: str | None = None, **_: Any
    ) -> Future[RankOutcome]:
        future: Future[RankOutcome] = Future()
        if user_id.startswith("warm-up") or self.ends == "expired":
            future.set_result(RankOutcome(request_id or "", Ended.EXPIRED, 10))
        elif self.ends == "full":
            raise QueueFull("full")
        elif self.ends == "slow":
            future.set_result(RankOutcome(request_id or "", Ended.RANKED, 200_000))
        else:
            future.set_result(RankOutcome(request_id or "", Ended.TIMED_OUT, 10))
            self.on_lost(LostRequest(request_id or "", acknowledged=self.ends == "lost"))
        return future

    def drain(self, timeout_s: float) -> bool:
        return True


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ends", "status"),
    [("expired", "expired"), ("lost", LOST), ("undelivered", UNDELIVERED), ("full", NOT_SENT)],
)
def test_each_impression_ends_as_one_record_whatever_becomes_of_it(ends: str, status: str) -> None:
    records: list[ImpressionRecord] = []
    population = SyntheticPopulation(SETTINGS)
    client = FakeClient(ends)
    Player(client, SETTINGS, population, records.append).play()
    schedule = list(impressions(SETTINGS, population))
    numbers = [impression.number for impression in schedule]
    assert sorted(record.number for record in records) == numbers
    assert {record.status for record in records} == {status}
    # By the monotonic clock, so that another process of the machine can tell when a request was due.
    begun_us = {record.scheduled_us - schedule[record.number].ranking_us for record in records}
    assert len(begun_us) == 1 and begun_us.pop() < time.monotonic_ns() // 1000
    assert client.events == len(numbers)


def test_a_stopped_gateway_completes_what_it_began_and_begins_nothing_more_though_it_is_late() -> None:
    settings = SETTINGS.model_copy(update={"growth": 0})
    records: list[ImpressionRecord] = []

    class StoppingClient(FakeClient):
        def publish_retrieval(self, user_id: str, **_: Any) -> None:
            super().publish_retrieval(user_id)
            if self.events == 3:
                gateway.stop()
                time.sleep(0.1)  # Several impressions are due by then.

    client = StoppingClient("expired")
    gateway = Player(client, settings, SyntheticPopulation(settings), records.append)
    gateway.play()
    assert client.events == 3
    assert sorted(record.number for record in records) == [0, 1, 2]


@pytest.mark.slow
def test_a_user_that_starts_again_is_deleted_before_its_first_history_is_published() -> None:
    population, client = SyntheticPopulation(STARTING_AGAIN), FakeClient("expired")
    Player(client, STARTING_AGAIN, population, lambda _: None).play()
    lengths = [length for user, length in client.published if user == population.user_id(0)]
    first, longest = population.first_length(0), STARTING_AGAIN.history_max
    assert 0 in lengths
    for before, deleted, after in zip(lengths, lengths[1:], lengths[2:], strict=False):
        assert deleted or (before, after) == (longest, first)


def test_a_reference_run_ends_though_the_client_takes_nothing() -> None:
    records: list[ImpressionRecord] = []
    gateway = Player(FakeClient("full"), SETTINGS, SyntheticPopulation(SETTINGS), records.append)
    gateway.replay(frozenset({0, 1, 2}), 1_000, at_once=1)
    assert [record.status for record in records] == [NOT_SENT] * 3


@pytest.mark.slow
def test_an_answer_is_late_by_the_time_limit_that_its_request_had() -> None:
    """That of a reference run is longer than the schedule's."""
    records: list[ImpressionRecord] = []
    settings = SETTINGS.model_copy(update={"duration_s": 0.2, "budget_ms": 100})
    gateway = Player(FakeClient("slow"), settings, SyntheticPopulation(settings), records.append)
    gateway.play()
    assert records and all(record.late for record in records)
    records.clear()
    gateway.replay(frozenset({0, 1}), 1_000, at_once=1)
    assert [record.late for record in records] == [False, False]


def test_the_histories_of_at_most_so_many_users_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(relaygr.traffic.player, "KEPT_SEQUENCES", 3)
    gateway = Player(FakeClient("expired"), SETTINGS, SyntheticPopulation(SETTINGS), lambda _: None)
    for user in (0, 1, 2, 0, 3, 4, 0):
        assert gateway._version_of(Impression(0, user, 0, 0, 5)).version.length == 5
    assert list(gateway._versions) == [3, 4, 0]


def test_the_figures_of_a_run_are_its_percentiles_its_late_share_and_its_endings() -> None:
    summary = TrafficSummary()
    assert summary.figures().p99_ms is None and summary.figures().late_share == 0
    latencies_us = np.random.default_rng(1).lognormal(9, 1, 5_000).astype(int)
    for number, latency_us in enumerate(latencies_us):
        late = bool(latency_us > 50_000)
        summary.add(ImpressionRecord(number, "r", "u", "ranked", int(latency_us), 0, late, path="hbm"))
    summary.add(ImpressionRecord(5_000, "r", "u", "failed", 900, 0, False, reason="overloaded"))
    summary.add(ImpressionRecord(5_001, "r", "u", LOST, None, 0, True))
    found = summary.figures()
    assert found.requests == 5_002
    assert found.late == int((latencies_us > 50_000).sum()) + 2
    assert found.p50_ms == pytest.approx(np.percentile(latencies_us, 50) / 1000, rel=0.01)
    assert found.p99_ms == pytest.approx(np.percentile(latencies_us, 99) / 1000, rel=0.01)
    assert list(found.endings.items()) == [("hbm", 5_000), ("failed: overloaded", 1), (LOST, 1)]


@pytest.mark.slow
def test_the_command_ends_with_the_figures_of_its_run(
    kafka_settings: KafkaSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(signal, "signal", lambda *_: None)  # The command's handlers would outlive it here.
    for name in ("topic_prefix", "group_prefix", "partitions", "fetch_wait_max_ms"):
        monkeypatch.setenv(f"RELAYGR_{name.upper()}", str(getattr(kafka_settings, name)))
    chosen = {"users": 5, "duration_s": 0.4, "rate_per_s": 50, "settle_s": 0, "history_median": 8, "lead_median_ms": 1}
    chosen |= {"history_max": 16, "budget_ms": 9_000}
    overrides = [word for name, value in chosen.items() for word in ("--set", f"traffic.{name}={value}")]
    with echo_worker(kafka_settings):
        arguments = ["traffic", "--bootstrap", kafka_settings.bootstrap, *overrides]
        full = CliRunner().invoke(app, [*arguments, "--out", "/dev/full"])
        found = json.loads(CliRunner().invoke(app, [*arguments, "--json"]).stdout)
        table = CliRunner().invoke(app, arguments, env={"COLUMNS": "80"}).stdout
    assert full.exit_code == 1 and "/dev/full lacks records: No space left on device" in full.stderr
    assert "requests were answered whole" in full.stdout
    assert found["requests"] > 5 and found["endings"] == {"full": found["requests"]}
    assert 0 < found["p50_ms"] <= found["p99_ms"] and found["late"] == found["late_share"] == 0
    assert f"{found['requests']} requests with a deadline of 9000 ms: P50 " in table
    assert table.rstrip().endswith(f"of {found['requests']} requests were answered whole and within 9000 ms.")
    assert "late 0.0%" in table and "full" in table and "100.0%" in table


@pytest.mark.slow
def test_without_a_worker_the_command_says_that_none_answered(
    kafka_settings: KafkaSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    for name in ("topic_prefix", "group_prefix", "partitions", "fetch_wait_max_ms"):
        monkeypatch.setenv(f"RELAYGR_{name.upper()}", str(getattr(kafka_settings, name)))
    chosen = {"traffic.users": 2, "traffic.duration_s": 0.2, "traffic.settle_s": 0, "client.lost_after_ms": 1000}
    overrides = [word for name, value in chosen.items() for word in ("--set", f"{name}={value}")]
    table = CliRunner().invoke(app, ["traffic", "--bootstrap", kafka_settings.bootstrap, *overrides]).stdout
    assert "lost" in table and "No worker answered: start one" in table


# -- users who come once ----------------------------------------------------------------------------

MOSTLY_NEW = SETTINGS.model_copy(update={"new_share": 0.6, "duration_s": 3.0})


def test_a_share_of_the_impressions_is_by_users_who_come_once() -> None:
    population = SyntheticPopulation(MOSTLY_NEW)
    stream = list(impressions(MOSTLY_NEW, population))
    new = [each.user for each in stream if each.user >= population.size]
    assert len(new) == len(set(new)), "none comes twice"
    # Within four standard deviations.
    assert abs(len(new) / len(stream) - 0.6) < 4 * np.sqrt(0.24 / len(stream))
    assert all(each.history_length == population.first_length(each.user) for each in stream if each.user in new)
    assert len({population.first_length(user) for user in new}) > 1


def test_the_times_of_the_impressions_are_the_same_at_every_share() -> None:
    def times(share: float) -> list[tuple[int, int]]:
        settings = MOSTLY_NEW.model_copy(update={"new_share": share})
        stream = impressions(settings, SyntheticPopulation(settings))
        return [(each.retrieval_us, each.ranking_us) for each in stream]

    assert times(0.0) == times(0.6) == times(1.0)


@pytest.mark.parametrize("duration_s", [0.3, 0.0])
def test_each_history_of_a_user_who_comes_once_is_published_once_and_before_the_users_event(duration_s: float) -> None:
    """Before the first impression if the run has an end, and else just before the user's own."""
    settings = SETTINGS.model_copy(update={"new_share": 1.0, "duration_s": duration_s, "growth": 0})
    population = SyntheticPopulation(settings)
    named: list[tuple[str, list[str]]] = []
    """The user of each event, and whose histories were published before it."""

    class StoppingClient(FakeClient):
        def publish_retrieval(self, user_id: str, **_: Any) -> None:
            named.append((user_id, [user for user, _ in self.published]))
            if len(named) == 5:
                gateway.stop()

    client = StoppingClient("expired")
    gateway = Player(client, settings, population, lambda _: None)
    gateway.play()
    assert len(named) >= 5
    for user_id, published in named:
        assert published.count(user_id) == 1
    lengths = dict(client.published)
    returning = population.size
    assert lengths[population.user_id(returning)] == population.first_length(returning)


def test_users_who_come_once_are_refused_beside_the_users_of_a_log(tmp_path: Path) -> None:
    settings = SETTINGS.model_copy(update={"new_share": 0.1, "interactions": tmp_path / "log.csv"})
    with pytest.raises(RelayError, match="new_share"):
        population_of(settings)


def test_a_log_with_other_columns_is_told_the_setting_that_names_them(tmp_path: Path) -> None:
    """Demo and traffic have no `--columns`."""
    log = tmp_path / "log.csv"
    log.write_text("uid,sku,event,ts\nann,1,view,1700000000000\n")
    settings = SETTINGS.model_copy(update={"interactions": log})
    with pytest.raises(RelayError, match=r"name it by --set traffic\.columns=user=NAME,item=NAME\."):
        population_of(settings)
    named = settings.model_copy(update={"columns": "user=uid,item=skus,time=ts,action=event", "actions": "view=1"})
    with pytest.raises(RelayError, match=r"--set traffic\.columns=item=skus: there is no such column"):
        population_of(named)
    log.write_text("user_id,item_id,timestamp\nann,1,27.11.2026\nann,2,28.11.2026\n")
    with pytest.raises(RelayError, match=r"no user with at least two .* 2 lines are left out .*line 2: timestamp is"):
        population_of(settings)
