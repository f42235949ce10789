"""The load generator: what a trace may be, what a workload makes, and that every impression ends as one sample."""

from __future__ import annotations

import itertools
import json
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from scipy import stats

from relaygr.bench.generator.player import Message, Player, Requests, Run, SyntheticContent, lags_us_of
from relaygr.bench.generator.samples import LOST, read_samples
from relaygr.bench.generator.trace import WARM_UP, Trace, digest_of, read_trace, write_table, write_trace
from relaygr.bench.generator.workload import Workload, make_trace, reuse_of, with_reuse
from relaygr.devbroker import LocalBroker
from relaygr.runtime.errors import RelayError
from relaygr.schemas import partition_for
from relaygr.settings import Settings
from relaygr.traffic.population import LogPopulation, population_of
from relaygr.traffic.settings import TrafficSettings
from tests.echo_worker import echo_worker

LOAD = Workload(
    seed=1, rate_per_s=200, seconds=20, warm_up_s=5, reuse=0.6, return_gap_s=2, history_median=100, history_max=400,
    lead_median_ms=50,
)  # fmt: skip
HEADER = "retrieval_us,ranking_us,user_id,history_length\n"


def made(**changes: Any) -> Trace:
    return make_trace(replace(LOAD, **changes))


def gaps_of(trace: Trace) -> Any:
    return np.diff(trace.retrieval_us / 1e6, prepend=0)


class TestFormat:
    @pytest.mark.parametrize("name", ["trace.parquet", "trace.csv"])
    def test_a_trace_is_read_as_it_was_written(self, name: str, tmp_path: Path) -> None:
        trace = made(seconds=1)
        write_trace(trace, tmp_path / name)
        again = read_trace(tmp_path / name)
        assert again.user_id == trace.user_id
        for column in ("retrieval_us", "ranking_us", "history_length", "suffix", "candidates", "part"):
            assert np.array_equal(getattr(again, column), getattr(trace, column)), column

    def test_parquet_keeps_the_seed_that_made_it(self, tmp_path: Path) -> None:
        write_trace(made(seed=77, seconds=1), tmp_path / "trace.parquet")
        assert json.loads(read_trace(tmp_path / "trace.parquet").made_by)["seed"] == 77

    def test_a_file_of_others_needs_four_columns_and_its_ids_may_be_digits(self, tmp_path: Path) -> None:
        (tmp_path / "trace.csv").write_text(f"{HEADER}0,50000,0017,100\n1000,60000,18,200\n", encoding="utf-8")
        trace = read_trace(tmp_path / "trace.csv")
        assert trace.user_id == ["0017", "18"]
        assert (trace.suffix[0], trace.candidates[0], trace.part[0]) == (16, 128, 1)

    @pytest.mark.parametrize(
        ("content", "why"),
        [
            (HEADER, "1 to 2,000,000 rows"),
            ("retrieval_us,user_id\n0,a\n", "columns missing: ranking_us, history_length"),
            (f"{HEADER}5,9,a,1\n4,9,b,1\n", "row 2: retrieval_us is before that of the row above"),
            (f"{HEADER}5,4,a,1\n", "row 1: ranking_us is before retrieval_us"),
            (f"{HEADER}0,1,a,9\n0,1,b,9\n1,2,a,8\n", "row 3: the history of user 'a' became shorter"),
            (f"{HEADER}0,1,a,0\n", "row 1: history_length is not 1 to"),
            (f"{HEADER}0,1,,5\n", "row 1: user_id has not 1 to 256 bytes"),
            (f"{HEADER}0,1,a,\n", "empty values in history_length"),
            (f"{HEADER}0,soon,a,5\n", "a column has the wrong type"),
            ("retrieval_us,ranking_us,user_id,history_length,user_id\n0,1,a,5,b\n", "columns more than once: user_id"),
            ("", "cannot be read"),
        ],
    )
    def test_a_file_that_is_no_trace_is_refused_with_the_reason(self, content: str, why: str, tmp_path: Path) -> None:
        (tmp_path / "trace.csv").write_text(content, encoding="utf-8")
        with pytest.raises(RelayError) as refused:
            read_trace(tmp_path / "trace.csv")
        assert why in str(refused.value) and "trace.csv" in str(refused.value)

    def test_a_column_of_lists_is_refused_with_the_reason(self, tmp_path: Path) -> None:
        columns = {"retrieval_us": [0], "ranking_us": [1], "user_id": ["a"], "history_length": [[5]]}
        write_table(pa.table(columns), tmp_path / "lists.parquet")
        with pytest.raises(RelayError, match=r"lists\.parquet: a column has the wrong type: .* list"):
            read_trace(tmp_path / "lists.parquet")

    def test_a_name_says_the_format(self, tmp_path: Path) -> None:
        with pytest.raises(RelayError, match=r"must end in \.parquet or \.csv"):
            read_trace(tmp_path / "trace.json")


class TestOtherUsers:
    @pytest.mark.parametrize("reuse", [0.0, 0.3, 0.6, 0.9])
    def test_a_trace_gets_that_share_of_returning_users_and_keeps_all_else(self, reuse: float) -> None:
        trace = made(reuse=0.6, warm_up_s=10)
        other = with_reuse(trace, reuse)
        assert reuse_of(other) == pytest.approx(reuse, abs=0.04)
        for column in ("retrieval_us", "ranking_us", "history_length", "suffix", "candidates", "part"):
            assert np.array_equal(getattr(other, column), getattr(trace, column)), column

    def test_visits_with_histories_of_one_length_spread_over_many_users(self) -> None:
        trace = made(reuse=0.0)
        # The first user has the highest id.
        users, lengths = sorted(trace.user_id, reverse=True), np.full(len(trace), 2_048, np.int32)
        other = with_reuse(replace(trace, user_id=users, history_length=lengths), 0.6)
        assert reuse_of(other) == pytest.approx(0.6, abs=0.04)
        counts = Counter(other.user_id)
        assert max(counts.values()) < 0.01 * len(trace)
        assert sum(count > 1 for count in counts.values()) > 0.1 * len(trace)

    def test_users_stay_where_they_can(self) -> None:
        trace = made(reuse=0.6)
        assert with_reuse(trace, reuse_of(trace)).user_id == trace.user_id
        fewer = with_reuse(trace, 0.5).user_id
        assert np.mean([own == other for own, other in zip(trace.user_id, fewer, strict=True)]) > 0.8

    def test_a_new_name_is_not_one_of_the_trace(self) -> None:
        trace = made(reuse=0.9, seconds=2)
        named = replace(trace, user_id=[f"new-{each}" for each in trace.user_id])
        assert reuse_of(with_reuse(named, 0.0)) == 0


class TestWorkload:
    def test_the_same_seed_makes_the_same_trace_and_another_seed_another(self) -> None:
        assert np.array_equal(made().ranking_us, made().ranking_us)
        assert made().user_id == made().user_id
        assert not np.array_equal(made().ranking_us[:50], made(seed=2).ranking_us[:50])

    def test_gaps_are_exponential_and_the_total_is_not_rescaled(self) -> None:
        gaps = gaps_of(made())
        assert stats.kstest(gaps, stats.expon(scale=1 / LOAD.rate_per_s).cdf).pvalue > 0.01
        assert stats.kstest(gaps * 1.1, stats.expon(scale=1 / LOAD.rate_per_s).cdf).pvalue < 0.01
        assert len({len(made(seed=seed)) for seed in range(1, 5)}) > 1

    def test_at_most_all_visits_but_the_first_are_of_users_seen_before(self) -> None:
        assert LOAD.visits == 12
        assert reuse_of(made(reuse=1.0, warm_up_s=10)) == pytest.approx(11 / 12, abs=0.03)

    @pytest.mark.parametrize("reuse", [0.0, 0.6, 0.9])
    def test_that_share_of_the_measured_impressions_is_of_users_seen_before(self, reuse: float) -> None:
        assert reuse_of(made(reuse=reuse, warm_up_s=10)) == pytest.approx(reuse, abs=0.03)

    def test_users_return_after_gaps_with_that_mean_and_popular_ones_sooner(self) -> None:
        trace = made(reuse=1.0, seconds=60, growth=0)
        times: dict[str, list[float]] = {}
        for user, at_us in zip(trace.user_id, trace.retrieval_us.tolist(), strict=True):
            times.setdefault(user, []).append(at_us / 1e6)
        gaps = np.concatenate([np.diff(each) for each in times.values()])
        assert np.mean(gaps) == pytest.approx(LOAD.return_gap_s, rel=0.15)
        counts = sorted(Counter(trace.user_id).values())
        assert counts[-1] > 2 * counts[len(counts) // 2]
        assert len(times) == pytest.approx(LOAD.rate_per_s * LOAD.return_gap_s, abs=2)

    def test_lengths_and_lead_times_are_log_normal_around_their_medians(self) -> None:
        trace = made(reuse=0.0)
        assert np.median(trace.history_length) == pytest.approx(100, rel=0.05)
        assert np.std(np.log(trace.history_length)) == pytest.approx(0.3, rel=0.1)
        lead_ms = (trace.ranking_us - trace.retrieval_us) / 1000
        assert np.median(lead_ms) == pytest.approx(50, rel=0.05)
        assert np.std(np.log(lead_ms)) == pytest.approx(0.2, rel=0.1)

    def test_histories_grow_at_each_visit_until_their_user_leaves(self) -> None:
        trace = made(reuse=1.0, growth=5, history_sigma=0.0, seconds=120)
        lengths: dict[str, list[int]] = {}
        for user, length in zip(trace.user_id, trace.history_length.tolist(), strict=True):
            lengths.setdefault(user, []).append(length)
        assert {later - sooner for each in lengths.values() for sooner, later in itertools.pairwise(each)} == {5}
        assert (trace.history_length.min(), trace.history_length.max()) == (50, 145)
        assert len(lengths) > 2 * LOAD.returning_users * LOAD.reuse

    @pytest.mark.parametrize("seed", range(5))
    def test_of_few_returning_users_one_is_short_and_one_is_long_whatever_the_seed(self, seed: int) -> None:
        trace = made(seed=seed, reuse=1.0, rate_per_s=3.0, return_gap_s=1.0, growth=0)
        short, middle, long = sorted(set(trace.history_length.tolist()))
        assert short <= 88 <= middle <= 114 <= long

    def test_a_newcomer_has_the_stratum_of_the_user_who_left(self) -> None:
        load = replace(LOAD, reuse=0.95, rate_per_s=4.0, return_gap_s=0.5, history_median=1_000, history_max=4_000)
        load = replace(load, growth=1, seconds=1_000)
        assert (load.returning_users, load.visits) == (2, 250)
        rows: dict[str, list[int]] = {}
        trace = make_trace(load)
        for row, user in enumerate(trace.user_id):
            rows.setdefault(user, []).append(row)
        newcomers = [each for each in rows.values() if len(each) > 200 and each[0] > 400]
        # Half of the growth is below the mean length.
        is_short = {each[0]: trace.history_length[each[0]] + 125 < 1_000 for each in newcomers}
        together = [(a, b) for a, b in itertools.combinations(newcomers, 2) if a[0] < b[-1] and b[0] < a[-1]]
        assert len(together) > 5
        assert all(is_short[a[0]] != is_short[b[0]] for a, b in together)

    def test_all_returning_users_come_equally_often_before_they_leave(self) -> None:
        trace = made(reuse=0.9, history_median=400, history_max=4_000, history_sigma=0.6, return_gap_s=1.0, seconds=120)
        counts, first_us = Counter(trace.user_id), {}
        for user, at_us in zip(trace.user_id, trace.retrieval_us.tolist(), strict=True):
            first_us.setdefault(user, at_us)
        # They came first in the trace, and had the time for all their visits.
        ended = {counts[user] for user, at_us in first_us.items() if 30e6 < at_us < 60e6 and counts[user] > 1}
        assert ended == {20}

    @pytest.mark.parametrize("rate_per_s", [0.5, 50.0])
    def test_a_long_trace_has_no_longer_histories_than_a_short_one(self, rate_per_s: float) -> None:
        trace = made(reuse=0.9, rate_per_s=rate_per_s, seconds=2_000 / rate_per_s, history_median=400, history_max=800)
        count = len(trace) // 4
        for lengths in (trace.history_length[:count], trace.history_length[-count:]):
            assert np.median(lengths) == pytest.approx(400, rel=0.15)

    def test_a_burst_multiplies_the_rate_in_its_part_of_the_time(self) -> None:
        times = made(burst_factor=5.0, burst_every_s=5.0, burst_s=1.0, warm_up_s=0).retrieval_us / 1e6
        in_burst = times % 5 < 1
        assert in_burst.sum() / 4 == pytest.approx(5 * LOAD.rate_per_s, rel=0.1)
        assert (~in_burst).sum() / 16 == pytest.approx(LOAD.rate_per_s, rel=0.1)

    def test_one_hot_user_has_its_share(self) -> None:
        trace = made(hot_user_share=0.3)
        assert Counter(trace.user_id)["hot"] / len(trace) == pytest.approx(0.3, abs=0.03)

    def test_a_hot_partition_has_its_share_of_the_users(self) -> None:
        trace = made(hot_partition_share=0.5, reuse=0.0, seconds=5)
        hot = np.mean([partition_for(user.encode(), LOAD.partitions) == 0 for user in trace.user_id])
        assert hot == pytest.approx(0.5 + 0.5 / 8, abs=0.05)

    def test_the_warm_up_is_marked(self) -> None:
        trace = made()
        assert np.array_equal(trace.part == WARM_UP, trace.retrieval_us < 5e6)

    def test_a_log_gives_the_users_and_says_when_they_are_too_few(self, tmp_path: Path) -> None:
        log = tmp_path / "log.inter"
        lines = [f"{user}\t{item}\t{item}" for user in "abc" for item in range(60)]
        log.write_text("user_id:token\titem_id:token\ttimestamp:float\n" + "\n".join(lines) + "\n", encoding="utf-8")
        users = population_of(TrafficSettings(interactions=log, suffix=4))
        assert isinstance(users, LogPopulation)
        few = replace(LOAD, rate_per_s=2, return_gap_s=1, reuse=1.0, suffix=4)
        trace = make_trace(few, logged=users)
        assert set(trace.user_id) <= set("abc")
        assert max(trace.history_length) <= 56
        assert set(make_trace(replace(few, hot_user_share=0.5), logged=users).user_id) <= set("abc")
        with pytest.raises(RelayError, match="3 users are too few"):
            make_trace(replace(few, reuse=0.0), logged=users)

    @pytest.mark.parametrize(
        ("change", "why"),
        [
            ({"reuse": 1.5}, "reuse is 1.5, expected 0 to 1"),
            ({"rate_per_s": 0.0}, "rate_per_s is 0.0"),
            ({"rate_per_s": 1e6}, "more than 1,000,000 impressions"),
            ({"burst_s": 20.0}, "burst_s is 20.0"),
        ],
    )
    def test_a_workload_without_sense_is_refused(self, change: dict[str, float], why: str) -> None:
        with pytest.raises(RelayError, match=why):
            made(**change)


def test_an_impression_is_as_late_as_the_latest_of_its_messages() -> None:
    def sent(topic: str, row: int, lag_us: int) -> Message:
        return Message(1_000, topic, b"u", b"", row, sent_us=1_000 + lag_us)

    messages = [sent("retrieval", 0, 900), sent("ranking", 0, 5), sent("history", 1, 70), sent("ranking", 1, 8)]
    assert lags_us_of(messages) == {0: 900, 1: 70}


def test_a_changed_file_has_another_digest(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    digests = []
    for content in (f"{HEADER}0,9,a,1\n", f"{HEADER}0,9,a,2\n"):
        path.write_text(content, encoding="utf-8")
        digests.append(digest_of(path))
    assert digests[0] != digests[1] and len(digests[0]) == 8
    with pytest.raises(RelayError, match=r"none\.csv cannot be read"):
        digest_of(tmp_path / "none.csv")


def test_a_longer_synthetic_history_begins_with_the_shorter_one() -> None:
    content = SyntheticContent(1_000)
    assert content.behaviours("a", 20)[:8] == content.behaviours("a", 8)
    assert content.behaviours("a", 8) != content.behaviours("b", 8)


@pytest.mark.slow
def test_each_impression_of_a_trace_ends_as_one_sample(embedded_broker: LocalBroker, tmp_path: Path) -> None:
    own = {"topic_prefix": f"player-{time.time_ns()}", "partitions": 4}
    settings = Settings.model_validate({**embedded_broker.settings().model_dump(), **own})
    embedded_broker.create_topics(settings)
    trace = made(rate_per_s=40, seconds=1, warm_up_s=0.5, lead_median_ms=20)
    write_trace(trace, tmp_path / "trace.parquet")
    run = Run("one", tmp_path / "trace.parquet", tmp_path / "samples.parquet", 5_000, events=True, scores_every=2)
    with Player(tmp_path / "player", settings, Requests(1_000)) as player:
        with echo_worker(settings):
            player.play(run)
        samples = read_samples(run.samples)
        assert [each.row for each in samples] == list(range(len(trace)))
        assert all(each.status == "ranked" and each.latency_us is not None and each.latency_us > 0 for each in samples)
        assert all((each.scores is not None) == (each.row % 2 == 0) for each in samples)
        # Without a worker every request is lost, and still there is a sample of it.
        alone = replace(run, name="two", budget_ms=100)
        player.play(alone)
        assert {each.status for each in read_samples(run.samples)} == {LOST}
        with pytest.raises(RelayError, match=r"absent\.parquet cannot be read"):
            player.play(replace(run, name="three", trace=tmp_path / "absent.parquet"))
