"""Replays of cache traces: checked by hand, against the upper bound, and from the command line."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from matplotlib.figure import Figure
from typer.testing import CliRunner

from relaygr.admission.latency import LatencyModel
from relaygr.cli import cache
from relaygr.cli.app import app
from relaygr.interactions import read_interactions
from relaygr.replay import parallel
from relaygr.replay.bound import HitBound
from relaygr.replay.demand import DemandKind, demands_of
from relaygr.replay.link import LinkSpeed, VirtualLink
from relaygr.replay.run import Candidate, ReplayEnvironment, ReplayResult
from relaygr.replay.run import replay as replay_demands
from relaygr.replay.synthetic import Sketches, records_of_interactions, records_of_schedule, window_start
from relaygr.runtime.errors import RelayError
from relaygr.schemas.messages import LatencyCoefficients
from relaygr.traffic.population import SyntheticPopulation
from relaygr.traffic.settings import TrafficSettings
from relaygr.worker.cache import Tier
from relaygr.worker.cache.copies import CopyLimits, CopyPriority, CopyRequest, Deadline
from relaygr.worker.cache.events import EventKind
from relaygr.worker.cache.policies import VISIT_US, PolicyName, TierPolicies
from relaygr.worker.cache.trace import TraceReader, TraceRow
from relaygr.worker.kv import DramGeometry, KvDtype, KvGeometry, PrefixLayout

PAGE_TOKENS = 16
GEOMETRY = DramGeometry(KvGeometry(1, 1, 1, 1, PAGE_TOKENS, KvDtype.BFLOAT16))
PAGE_BYTES = GEOMETRY.page_bytes
LAYOUT = PrefixLayout(contextual_tokens=0, tokens_per_behaviour=1)
ENVIRONMENT = ReplayEnvironment(
    GEOMETRY,
    LAYOUT,
    # Computing costs 10 µs a token, so reloads always pay on this link: a page takes 1 µs.
    LatencyModel(LatencyCoefficients(0, 0, 0, b0=0, b1=10, b2=0, c0=0, c1=0, c2=0, d0=0, d1=0)),
    LinkSpeed(delay_us=0.0, bytes_per_us=float(PAGE_BYTES)),
)
SKETCHES = Sketches()


def rank(
    user: str,
    second: float,
    behaviours: int = 16,
    begins_at: int = 0,
    kind: EventKind = EventKind.ACQUIRE,
    model: bytes = b"m",
) -> TraceRow:
    sketch = SKETCHES.of(user, begins_at, behaviours)
    at_us = round(second * VISIT_US)
    return kind.value, at_us, SKETCHES.user(user), model, sketch.behaviours, sketch.marks, "made"


def prepare(user: str, second: float, behaviours: int = 16) -> TraceRow:
    return rank(user, second, behaviours, kind=EventKind.PREPARE)


def replay(rows: list[TraceRow], environment: ReplayEnvironment, candidate: Candidate) -> ReplayResult:
    return replay_demands(demands_of(rows), environment, candidate)


def bound_of(rows: list[TraceRow]) -> HitBound:
    return HitBound(demands_of(rows), LAYOUT, PAGE_TOKENS)


def on(hbm_pages: int, dram_pages: int = 0, policy: PolicyName = PolicyName.LRU) -> Candidate:
    return Candidate(TierPolicies(policy, policy), hbm_pages * PAGE_BYTES, dram_pages * PAGE_BYTES)


def visits_of(users: str, behaviours: int = 16) -> list[TraceRow]:
    """One visit a second; each letter is a user."""
    return [rank(user, second, behaviours) for second, user in enumerate(users)]


class TestByHand:
    def test_lru_with_room_for_two(self) -> None:
        """a and b miss; a hits; c evicts b; b evicts a; c hits; a evicts b."""
        done = replay(visits_of("abacbca"), ENVIRONMENT, on(2))
        assert (done.visits, done.hbm_hits, done.dram_hits, done.hbm_evictions) == (7, 2, 0, 3)
        assert (done.asked_tokens, done.hbm_tokens, done.recomputed_tokens) == (7 * 16, 2 * 16, 5 * 16)

    def test_what_left_hbm_comes_back_from_dram_and_is_not_computed_again(self) -> None:
        done = replay(visits_of("abab"), ENVIRONMENT, on(1, 4))
        assert (done.hbm_hits, done.dram_hits) == (0, 2)
        assert (done.recomputed_tokens, done.reloaded_tokens) == (32, 32)
        assert (done.spilled_bytes, done.reloaded_bytes) == (2 * PAGE_BYTES, 2 * PAGE_BYTES)

    def test_a_reload_that_a_ranking_joins_is_counted_once(self) -> None:
        slow = ReplayEnvironment(
            GEOMETRY, LAYOUT, LatencyModel(LatencyCoefficients(*[1e6] * 11)), LinkSpeed(300_000.0, 1e9)
        )
        done = replay([rank("a", 0), rank("b", 10), prepare("a", 20), rank("a", 20.1)], slow, on(1, 4))
        assert (done.reloaded_tokens, done.reloaded_bytes) == (16, PAGE_BYTES)
        assert done.recomputed_tokens == 32

    def test_a_reload_that_does_not_pay_is_computed(self) -> None:
        slow = ReplayEnvironment(GEOMETRY, LAYOUT, ENVIRONMENT.latency, LinkSpeed(delay_us=1e6, bytes_per_us=1.0))
        demands = [rank(user, 100 * place) for place, user in enumerate("abab")]
        done = replay(demands, slow, on(1, 4))
        assert (done.dram_hits, done.reloaded_bytes, done.recomputed_tokens) == (2, 0, 64)

    def test_growth_computes_the_tail_and_counts_as_a_hit(self) -> None:
        done = replay([rank("a", 0, 32), rank("a", 2, 40), rank("a", 4, 40)], ENVIRONMENT, on(8))
        assert (done.visits, done.hbm_hits) == (3, 2)
        assert done.recomputed_tokens == 32 + 8
        assert done.hbm_tokens == 32 + 40

    def test_a_window_that_slid_can_not_hit(self) -> None:
        done = replay([rank("a", 0, 128), rank("a", 2, 100, begins_at=64)], ENVIRONMENT, on(50))
        assert (done.hbm_hits, done.recomputed_tokens) == (0, 228)
        assert bound_of([rank("a", 0, 128), rank("a", 2, 100, begins_at=64)]).with_all_room == 0

    def test_another_model_and_a_forgotten_user_start_anew(self) -> None:
        forget = rank("a", 1, kind=EventKind.INVALIDATE)
        other = rank("a", 9, model=b"n")
        done = replay([rank("a", 0), forget, rank("a", 3), rank("a", 6), other], ENVIRONMENT, on(8))
        assert (done.visits, done.hbm_hits) == (4, 1)

    def test_job_and_ranking_of_one_impression_are_one_visit(self) -> None:
        done = replay([prepare("a", 0), rank("a", 0.15), rank("a", 2)], ENVIRONMENT, on(4))
        assert (done.visits, done.hbm_hits, done.recomputed_tokens) == (2, 1, 16)

    def test_what_is_leased_is_not_evicted_by_others(self) -> None:
        demands = [prepare("a", 0), rank("b", 0.1), rank("c", 0.2), rank("a", 0.3), rank("b", 5)]
        done = replay(demands, ENVIRONMENT, on(1))
        assert done.no_room == 2
        assert done.recomputed_tokens == 4 * 16

    def test_what_is_too_long_for_hbm_is_computed_every_time(self) -> None:
        done = replay(visits_of("aaa", behaviours=64), ENVIRONMENT, on(2))
        assert (done.hbm_hits, done.recomputed_tokens, done.no_room) == (0, 3 * 64, 3)


Steps = list[tuple[str, float, int, bool]]


def demand_lists(pauses: list[float]) -> st.SearchStrategy[Steps]:
    """Steps: the user, the seconds since the last step, the growth of the history, whether a job comes first."""
    step = st.tuples(
        st.sampled_from("abcdefgh"), st.sampled_from(pauses), st.sampled_from([0, 0, 0, 5, 40]), st.booleans()
    )
    return st.lists(step, min_size=1, max_size=60)


def grown(steps: Steps) -> list[TraceRow]:
    """The demands of these steps: histories grow, and some rankings follow a pre-infer job."""
    lengths: dict[str, int] = {}
    second, demands = 0.0, []
    for user, pause, growth, prepared in steps:
        second += pause
        lengths[user] = lengths.get(user, 16 + 7 * (ord(user) % 5)) + growth
        if prepared:
            demands.append(prepare(user, second, lengths[user]))
        demands.append(rank(user, second + 0.2, lengths[user]))
    return sorted(demands, key=lambda row: row[1])


class TestBound:
    @pytest.mark.slow
    @pytest.mark.parametrize("policy", PolicyName)
    @settings(max_examples=40, deadline=None)
    @given(steps=demand_lists([0.1, 0.3, 0.8, 1.0, 2.0]), hbm_pages=st.integers(1, 30), dram_pages=st.integers(0, 30))
    def test_no_policy_is_above_it(self, policy: PolicyName, steps: Steps, hbm_pages: int, dram_pages: int) -> None:
        demands = grown(steps)
        bound = bound_of(demands)
        done = replay(demands, ENVIRONMENT, on(hbm_pages, dram_pages, policy))
        assert done.visits == bound.visits
        assert done.hbm_hits <= bound.hits(hbm_pages)
        assert done.hbm_hits + done.dram_hits <= bound.hits(hbm_pages + dram_pages)

    @pytest.mark.parametrize(("hbm_pages", "hits"), [(0, 0), (1, 2), (2, 3)])
    def test_it_is_what_the_budget_of_page_steps_buys(self, hbm_pages: int, hits: int) -> None:
        """A hit costs 3 page-steps (one page for 3 look-ups). One page over 6 look-ups pays for two hits."""
        assert bound_of(visits_of("abcabc")).hits(hbm_pages) == hits

    def test_dear_prefixes_are_bought_last(self) -> None:
        """a costs 8 page-steps, b 2. Over 4 look-ups 3 pages give 12, enough for both; 1 page gives 4, enough for b."""
        demands = [rank("a", 0, 64), rank("b", 1, 16), rank("a", 2, 64), rank("b", 3, 16)]
        bound = bound_of(demands)
        assert [bound.hits(pages) for pages in (0, 1, 2, 3)] == [0, 1, 1, 2]

    def test_a_prefix_need_not_stay_between_the_look_ups_of_one_visit(self) -> None:
        """The bound once counted a prefix as cached from the first look-up of a visit, though its last one computed it.
        Two users who took turns on one page then had twice as many hits as the bound."""
        demands, hits = [rank("a", 0.0), rank("b", 0.1)], 0
        for second in range(10):
            for user, again, next_visit in (("a", second + 0.95, second + 1.05), ("b", second + 1.08, second + 1.15)):
                demands += [rank(user, again), rank(user, next_visit)]
                hits += 1
        done = replay(demands, ENVIRONMENT, on(1))
        assert (done.visits, done.hbm_hits) == (hits + 2, hits)
        assert done.hbm_hits <= bound_of(demands).hits(1)

    @given(users=st.lists(st.sampled_from("abcdef"), min_size=1, max_size=40), room=st.integers(1, 5))
    def test_beladys_best_is_not_above_it_where_all_have_one_size(self, users: list[str], room: int) -> None:
        bound = bound_of(visits_of("".join(users)))
        assert belady_hits(users, room) <= bound.hits(room)

    @pytest.mark.slow
    @settings(deadline=None)
    @given(steps=demand_lists([1.0, 2.0, 3.0]))
    def test_with_all_room_every_policy_reaches_it(self, steps: Steps) -> None:
        demands = grown(steps)
        bound = bound_of(demands)
        done = replay(demands, ENVIRONMENT, on(10_000))
        assert done.hbm_hits == bound.with_all_room == bound.hits(10_000)
        assert done.recomputed_tokens == done.asked_tokens - done.hbm_tokens


def belady_hits(users: list[str], room: int) -> int:
    """Belady's MIN: evicts the user who returns last, and does not cache a user who returns even later."""
    there: set[str] = set()
    hits = 0
    for place, user in enumerate(users):
        hits += user in there
        there.add(user)
        if len(there) > room:
            next_use = {
                each: next((i for i in range(place + 1, len(users)) if users[i] == each), 10**9) for each in there
            }
            there.remove(max(there, key=lambda each: next_use[each]))
    return hits


def test_copies_cross_a_virtual_link_one_after_the_other() -> None:
    ended: list[tuple[str, int]] = []
    link = VirtualLink(100, LinkSpeed(delay_us=5.0, bytes_per_us=10.0), CopyLimits(max_jobs=8))

    def copy(name: str, pages: int, priority: CopyPriority, deadline_us: int) -> None:
        numbers = np.arange(pages, dtype=np.int32)
        tiers = (Tier.DRAM, Tier.HBM) if priority is CopyPriority.RELOAD else (Tier.HBM, Tier.DRAM)
        request = CopyRequest(
            *tiers, numbers, numbers, priority, Deadline(deadline_us), lambda copied: ended.append((name, link.now_us))
        )
        assert link.submit(request)

    copy("spill", 1, CopyPriority.SPILL, 0)
    copy("late", 2, CopyPriority.RELOAD, 900)
    copy("urgent", 1, CopyPriority.RELOAD, 100)
    link.advance(39)
    assert ended == [("spill", 15)]
    link.run()
    # The copies under way were spill and late; urgent was submitted after both had begun.
    assert ended == [("spill", 15), ("late", 40), ("urgent", 55)]
    assert link.moved_bytes == {Tier.HBM: 300, Tier.DRAM: 100}


class TestMaking:
    def test_a_schedule_becomes_jobs_and_rankings_in_the_order_of_time(self) -> None:
        traffic = TrafficSettings(duration_s=20, rate_per_s=20, users=10, growth=8, lead_sigma=1.0)
        records = list(records_of_schedule(traffic, SyntheticPopulation(traffic)))
        assert [record.at_us for record in records] == sorted(record.at_us for record in records)
        kinds = [record.kind for record in records]
        assert kinds.count(EventKind.PREPARE) == kinds.count(EventKind.ACQUIRE) > 300
        by_user = itertools.groupby(
            sorted(records, key=lambda each: (each.user, each.sketch.behaviours)), lambda each: each.user
        )
        for _, mine in by_user:
            sketches = [each.sketch for each in mine]
            assert all(a.common(b) == a.behaviours for a, b in itertools.pairwise(sketches))

    def test_a_schedule_without_an_end_is_refused(self) -> None:
        traffic = TrafficSettings(duration_s=0)
        with pytest.raises(ValueError, match="no end"):
            next(records_of_schedule(traffic, SyntheticPopulation(traffic)))

    def test_a_log_becomes_an_impression_at_each_moment_with_the_history_before_it(self, tmp_path: Path) -> None:
        log = tmp_path / "log.csv"
        rows = [("u1", 1, 10), ("u1", 2, 20), ("u2", 3, 20), ("u1", 4, 30), ("u1", 5, 30), ("u1", 6, 40)]
        log.write_text("userId,movieId,rating,timestamp\n" + "".join(f"{u},{i},5,{t}\n" for u, i, t in rows))
        records = list(records_of_interactions(read_interactions(log), 500_000, 2, 1))
        assert [(each.kind.value, each.at_us // 1000, each.sketch.behaviours) for each in records] == [
            ("prepare", 10_000, 1),
            ("acquire", 10_500, 1),
            ("prepare", 20_000, 2),
            ("acquire", 20_500, 2),
            ("prepare", 30_000, 2),
            ("acquire", 30_500, 2),
        ]
        # Then two behaviours at one time: the window of two slid.
        assert records[4].sketch.common(records[2].sketch) == 0

    @pytest.mark.parametrize(("length", "start"), [(10, 0), (100, 0), (101, 30), (130, 30), (131, 60), (161, 90)])
    def test_a_window_slides_in_whole_steps(self, length: int, start: int) -> None:
        assert window_start(length, 100, 30) == start


class TestCommand:
    def run(self, *arguments: str) -> str:
        done = CliRunner().invoke(app, ["cache", *arguments], catch_exceptions=False)
        assert done.exit_code == 0, done.output
        return done.output

    @pytest.fixture
    def trace(self, tmp_path: Path) -> Path:
        path = tmp_path / "made.trace"
        wrote = self.run(
            *("trace", "--schedule", "--out", str(path), "--set", "traffic.duration_s=20", "--token-bytes", "1KiB"),
            *("--set", "traffic.users=30", "--set", "worker.hbm_policy=slru", "--set", "worker.hbm_bytes=16MiB"),
        )
        assert "look-ups written" in wrote
        return path

    @pytest.mark.slow
    def test_a_made_trace_is_replayed_into_a_table_and_a_plot(self, trace: Path, tmp_path: Path) -> None:
        plot = tmp_path / "plot.png"
        shown = self.run(
            *("replay", str(trace), "--policy", "lru", "--policy", "s3fifo/cost", "--hbm", "4MiB", "--hbm", "16MiB"),
            *("--dram", "8MiB", "--plot", str(plot)),
        )
        assert "4MiB of HBM, 8MiB of DRAM" in shown and "16MiB of HBM" in shown
        assert shown.count("\nlru ") == shown.count("\ns3fifo/cost ") == shown.count("\nbound ") == 2
        assert plot.read_bytes().startswith(b"\x89PNG")

    @pytest.mark.parametrize("name", ["nowhere/x.png", "x.docx", "x", "."])
    def test_a_plot_that_cannot_be_written_is_refused_before_the_replay(
        self, trace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
    ) -> None:
        monkeypatch.setattr(cache, "_read", lambda *_: pytest.fail("the trace was read"))
        with pytest.raises(RelayError, match=r"--plot .* cannot be written"):
            cache.replay_command(trace, policy=["lru"], plot=tmp_path / name)

    @pytest.mark.slow
    @pytest.mark.parametrize(
        ("sizes", "panels"),
        [
            (("--hbm", "4MiB", "--dram", "8MiB"), 1),
            (("--hbm", "4MiB", "--dram", "0", "--dram", "8MiB"), 1),
            (("--hbm", "4MiB", "--hbm", "16MiB", "--dram", "0"), 1),
            (("--hbm", "4MiB", "--hbm", "16MiB", "--dram", "0", "--dram", "8MiB", "--dram", "32MiB"), 3),
        ],
    )
    def test_a_plot_has_a_panel_for_each_size_of_dram_where_both_tiers_sizes_vary(
        self, trace: Path, tmp_path: Path, sizes: tuple[str, ...], panels: int
    ) -> None:
        plot = tmp_path / "plot.png"
        self.run("replay", str(trace), "--policy", "lru", "--limit", "50", "--plot", str(plot), *sizes)
        width = int.from_bytes(plot.read_bytes()[16:20], "big")
        assert width == 150 * (5 + 4 * panels)

    @pytest.mark.slow
    def test_a_plot_has_the_traces_name_and_axes_that_show_the_differences(
        self, trace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        drawn: list[Figure] = []
        monkeypatch.setattr(Figure, "savefig", lambda figure, *_, **__: drawn.append(figure))
        self.run(
            "replay",
            str(trace),
            "--limit",
            "200",
            "--plot",
            str(tmp_path / "x.png"),
            *("--hbm", "4MiB", "--dram", "8MiB"),
        )
        [figure] = drawn
        assert figure.get_suptitle() == "made.trace: visits that found all they could reuse"
        assert len(figure.axes) == 2
        for axes in figure.axes:
            shares = [float(y) for line in axes.lines for y in line.get_ydata()]
            lowest, highest = axes.get_ylim()
            assert lowest < min(shares) <= max(shares) < highest
            assert max(shares) - min(shares) >= 0.5 * (highest - lowest) or highest - lowest <= 0.01

    @pytest.mark.slow
    def test_in_parallel_the_results_are_the_same(self, trace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        reader, candidates = TraceReader(trace), [on(40, 100, policy) for policy in PolicyName]
        environment = ReplayEnvironment(
            reader.header.geometry, reader.header.layout, ENVIRONMENT.latency, ENVIRONMENT.link
        )
        demands = demands_of(list(reader.rows()) * 3)
        played: list[int] = []
        alone = parallel.replay_all(demands, environment, candidates, 2, played.append)
        assert played == sorted(played)
        assert played[-1] > len(demands) * (len(candidates) - 1)
        monkeypatch.setattr(parallel, "_DEMANDS_FOR_PROCESSES", 0)
        assert parallel.replay_all(demands, environment, candidates, 2, played.append) == alone
        assert max(played) <= len(demands) * len(candidates)

    @pytest.mark.slow
    def test_without_options_all_policies_are_tried_on_the_recorded_sizes(self, trace: Path, tmp_path: Path) -> None:
        shown = self.run("replay", str(trace), "--limit", "100", "--plot", str(tmp_path / "bars.png"))
        assert "16MiB of HBM, 1GiB of DRAM" in shown
        assert "Only the first 100 look-ups are replayed" in shown
        assert all(f"\n{name} " in shown for name in PolicyName)

    def test_the_header_of_a_made_trace_says_what_the_settings_say(self, trace: Path) -> None:
        header = TraceReader(trace).header
        assert (header.hbm_policy, header.geometry.kv.bytes_per_token) == (PolicyName.SLRU, 1024)
        assert DemandKind.FORGET not in demands_of(TraceReader(trace).rows()).kinds

    @pytest.mark.slow
    @pytest.mark.parametrize(
        ("arguments", "says"),
        [
            (["replay", "TRACE", "--policy", "mru"], "--policy mru: give one of lru"),
            (["replay", "TRACE", "--policy", "lru/mru"], "--policy lru/mru"),
            (["replay", "TRACE", "--hbm", "much"], "--hbm much is not a size"),
            (["replay", "TRACE", "--hbm", "1KiB"], "has no room for a page"),
            (["replay", "TRACE", "--plot", "/nowhere/x.png"], "cannot be written"),
            (["replay", "nowhere"], "cannot be read"),
            (["trace", "--out", "x"], "Give one of --interactions FILE and --schedule"),
            (["trace", "--out", "/nowhere/x", "--schedule", "--set", "traffic.duration_s=1"], "cannot be written"),
            (["trace", "--out", "x", "--schedule"], "has no end"),
            (["trace", "--out", "x", "--schedule", "--token-bytes", "3B"], "multiple of 4"),
        ],
    )
    def test_what_can_not_be_done_is_said_in_a_sentence(self, trace: Path, arguments: list[str], says: str) -> None:
        given = [str(trace) if argument == "TRACE" else argument for argument in arguments]
        done = CliRunner().invoke(app, ["cache", *given])
        assert done.exit_code == 1
        assert says in " ".join(done.output.split())


def test_an_empty_trace_has_nothing_to_replay(tmp_path: Path) -> None:
    path = tmp_path / "empty.trace"
    log = tmp_path / "log.csv"
    log.write_text("userId,movieId,rating,timestamp\nu1,1,5,10\n")
    done = CliRunner().invoke(app, ["cache", "trace", "--interactions", str(log), "--out", str(path)])
    assert done.exit_code == 0
    with pytest.raises(RelayError, match="no look-ups"):
        cache.replay_command(path)


def test_results_are_plain_numbers() -> None:
    done = replay(visits_of("ab"), ENVIRONMENT, on(2))
    assert isinstance(done, ReplayResult)
    assert isinstance(done.hbm_hits, int)
