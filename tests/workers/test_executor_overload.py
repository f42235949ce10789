"""Above capacity goodput never falls: admission, order and plan together, with a clock that only work moves."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from relaygr.admission.latency import LatencyModel
from relaygr.consumer.interface import Received
from relaygr.schemas.ended import Reason
from relaygr.schemas.headers import RankingHeaders
from relaygr.schemas.messages import HistoryVersion, LatencyCoefficients, Path
from relaygr.worker.executor.backlog import Backlog
from relaygr.worker.executor.executor import POSTED_PER_STEP
from relaygr.worker.executor.order import Scheduler
from relaygr.worker.executor.schedulable import WorkClass
from relaygr.worker.executor.work import JobOutcome, RankingWork, Unranked
from relaygr.worker.model.interface import PrefixChunk, RankOutputs
from tests.worlds.executor import ExecutorWorld, world_with_a_in_dram
from tests.worlds.outbox import Outbox

TOKENS = 400
RETURNING_USERS = 20
SECONDS = 12
MOST_REQUESTS = 2_000
CALM_S = 3.0
REPLY_MARGIN_US = 2_000


@dataclass(frozen=True)
class Model:
    """Costs of one model, and of the worker around it, in µs."""

    token_us: float
    hit_us: float
    budget_us: int
    decode_us: int = 150
    refuse_us: int = 60
    answer_us: int = 300
    noise: float = 0.1
    """Forwards take longer or shorter than predicted by about this part."""

    @property
    def full_us(self) -> float:
        """Device time of a prefix."""
        return TOKENS * self.token_us

    @property
    def capacity(self) -> float:
        """Requests a second that take all the time, a third of them without a prefix."""
        return 1e6 / (self.decode_us + self.answer_us + self.hit_us + self.full_us / 3)


SMALL = Model(token_us=200, hit_us=12_000, budget_us=1_000_000)
"""Full inference takes 92 ms, a hit 12 ms."""
NULL = Model(token_us=0.1, hit_us=20, budget_us=200_000, answer_us=800, refuse_us=40)
"""The worker's own time is nearly all the time."""


@dataclass
class TimedOutbox(Outbox):
    """Notes when each request was answered; writing a result takes time."""

    world: ExecutorWorld = field(default=None)  # type: ignore[assignment]
    model: Model = SMALL
    ranked_at: dict[str, int] = field(default_factory=dict)
    told_at: dict[str, int] = field(default_factory=dict)

    def ranked(self, work: RankingWork, outputs: RankOutputs) -> bool:
        super().ranked(work, outputs)
        self.world.clock.advance_us(self.model.answer_us)
        self.ranked_at[work.request.request_id] = self.world.clock.monotonic_us()
        return True

    def unranked(self, reply: RankingHeaders, received: Received, end: Unranked, work: RankingWork) -> None:
        super().unranked(reply, received, end, work)
        self.world.clock.advance_us(self.model.refuse_us)
        self.told_at[work.request.request_id] = self.world.clock.monotonic_us()


@dataclass(frozen=True)
class Row:
    """The figures of one load."""

    offered_per_s: float
    in_time_per_s: float
    work_in_time_per_s: float
    """The same, counted by demand in units of the mean demand: a short run serves more or fewer new users by chance."""
    in_time_share: float
    told_in_time_share: float
    """Of the requests that were not ranked in time."""
    wasted_share: float
    """Of the device time: for answers that came too late."""
    new_users_share: float
    """Of those that were ranked in time."""
    wait_p50_share: float
    """From receipt to answer in the second half of the run, as a part of the budget."""


class Overload:
    """One worker under a schedule of requests: a poll thread that goes first, and the executor."""

    def __init__(self, model: Model) -> None:
        self.model = model
        self.outbox = TimedOutbox(tasks=1, model=model)
        world = self.world = self.outbox.world = ExecutorWorld(hbm_pages=1_500, chunk_ms=5.0, outbox=self.outbox)
        coefficients = LatencyCoefficients(0, 0, 0, 0, model.token_us, 0, 0, model.hit_us / 10, 0, 100, 0)
        world.corrector.recalibrate(LatencyModel(coefficients))
        self.random = np.random.default_rng(3)
        self.device_us = 0
        world.engine.pre_infer = lambda chunk: self.work((chunk.end - chunk.start) * model.token_us)  # type: ignore[method-assign]
        world.engine.rank = self.rank  # type: ignore[method-assign]
        self.deadlines: dict[str, int] = {}
        self.are_new: list[bool] = []
        self.versions = {name: world.store.put(name, TOKENS) for name in self.returning()}
        self.sent = 0
        for name in self.returning():
            world.rank(name, self.versions[name], f"warm {name}", budget_us=10_000_000)
            world.run()
        self.device_us = 0

    @staticmethod
    def returning() -> list[str]:
        return [f"returning {number}" for number in range(RETURNING_USERS)]

    def work(self, predicted_us: float) -> None:
        took_us = int(predicted_us * np.exp(self.random.normal(0.0, self.model.noise)))
        self.device_us += took_us
        self.world.clock.advance_us(took_us)

    def rank(self, batch):
        self.work(self.model.hit_us * len(batch))
        return [RankOutputs(np.zeros((request.candidates, 1), np.float32)) for request in batch]

    def play(self, rate_per_s: float, seconds: float) -> Row:
        """Plays a Poisson stream, a third of it of new users, and waits for all answers."""
        clock, executor = self.world.clock, self.world.executor
        began_us, device_us = clock.monotonic_us(), self.device_us
        count = int(rate_per_s * seconds)
        times = began_us + np.cumsum(self.random.exponential(1e6 / rate_per_s, count)).astype(int)
        names = [f"r{self.sent + number}" for number in range(count)]
        position = 0
        while position < count or executor.ranking_outstanding:
            while position < count and times[position] <= clock.monotonic_us():
                self.receive(names[position], int(times[position]))
                position += 1
            if executor.step() != 0 and position < count:
                clock.advance_us(max(0, int(times[position]) - clock.monotonic_us()))
        self.sent += count
        return self.row(names, rate_per_s, device_us)

    def receive(self, name: str, sent_us: int) -> None:
        """The poll thread's part. Of each twelve requests, four are of new users."""
        clock, executor = self.world.clock, self.world.executor
        self.deadlines[name] = sent_us + self.model.budget_us
        deadline_us = self.deadlines[name] - REPLY_MARGIN_US
        if not self.are_new:
            self.are_new = list(self.random.permutation([True] * 4 + [False] * 8))
        is_new = self.are_new.pop()
        if executor.is_hopeless("unknown", name, deadline_us, clock.monotonic_us(), sent_us):
            executor.note_no_time("unknown", name)
            clock.advance_us(self.model.refuse_us)
            self.outbox.told_at[name] = clock.monotonic_us()
            return
        clock.advance_us(self.model.decode_us)
        if is_new:
            user = f"new {name}"
            version = self.world.store.put(user, TOKENS)
        else:
            user = f"returning {self.random.integers(RETURNING_USERS)}"
            version = self.versions[user]
        self.world.rank(user, version, name, budget_us=deadline_us - clock.monotonic_us())

    def row(self, names: list[str], rate_per_s: float, device_us: int) -> Row:
        works = {work.request.request_id: work for work in self.outbox.ranked_works}
        in_time = [name for name in names if self.outbox.ranked_at.get(name, 1 << 60) <= self.deadlines[name]]
        late = [name for name in names if name in self.outbox.ranked_at and name not in set(in_time)]
        told = [name for name in names if self.outbox.told_at.get(name, 1 << 60) <= self.deadlines[name]]
        began_us = {name: deadline_us - self.model.budget_us for name, deadline_us in self.deadlines.items()}
        waits_us = [self.outbox.ranked_at[name] - began_us[name] for name in in_time[len(in_time) // 2 :]]
        wasted_us = sum(works[name].pre_infer_us + self.model.hit_us for name in late)
        new = sum(works[name].request.user_id.startswith("new") for name in in_time)
        full_us, hit_us = self.model.full_us, self.model.hit_us + self.model.answer_us
        work = (new * full_us + len(in_time) * hit_us) / (full_us / 3 + hit_us)
        return Row(
            offered_per_s=rate_per_s,
            work_in_time_per_s=work / len(names) * rate_per_s,
            in_time_per_s=len(in_time) / len(names) * rate_per_s,
            in_time_share=len(in_time) / len(names),
            told_in_time_share=len(told) / max(1, len(names) - len(in_time)),
            wasted_share=wasted_us / max(1, self.device_us - device_us),
            new_users_share=new / len(in_time),
            wait_p50_share=float(np.median(waits_us)) / self.model.budget_us,
        )


@pytest.mark.slow
@pytest.mark.parametrize("model", [SMALL, NULL], ids=["small", "null"])
def test_goodput_never_falls_from_one_to_ten_times_capacity(model: Model):
    best = best_work = 0.0
    for load in (1, 2, 3, 5, 10) if model is SMALL else (1, 2, 3):
        overload = Overload(model)
        rate_per_s = load * model.capacity
        row = overload.play(rate_per_s, min(SECONDS, MOST_REQUESTS / rate_per_s))
        best, best_work = max(best, row.in_time_per_s), max(best_work, row.work_in_time_per_s)
        refusing_share = (1 - row.in_time_share) * rate_per_s * model.refuse_us / 1e6
        assert row.work_in_time_per_s >= 0.9 * best_work * (1 - refusing_share)
        assert row.in_time_per_s >= 0.9 * best * (1 - refusing_share)
        assert row.wasted_share <= 0.01
        assert row.told_in_time_share >= 0.95 or row.in_time_share > 0.98
        overload.world.clock.advance_us(1_000_000)
        calm = overload.play(0.7 * model.capacity, min(CALM_S, 1_000 / model.capacity))
        assert calm.in_time_share >= 0.97, "normal within a second after the burst"
        if load > 1:
            # A request of the null model costs the same with and without its prefix.
            least, most = (0.01, max(0.1, 0.45 / load)) if model is SMALL else (0.26, 0.40)
            assert least < row.new_users_share < most, "who needs more time is refused first, but not always"
            assert row.wait_p50_share < 0.7, "requests do not wait until their deadline"
        if model is SMALL and load == 5:
            assert row.in_time_per_s > 2 * model.capacity, "many short requests are answered instead of few long ones"


@dataclass(eq=False)
class Promise:
    must_end_us: int
    remaining_us: float

    @property
    def latest_start_us(self) -> int:
        return self.must_end_us - int(self.remaining_us)


def put(backlog: Backlog, promise: Promise) -> Promise:
    backlog.put(promise, promise.latest_start_us)
    return promise


def ends_in_time(promises: list[Promise], now_us: int) -> bool:
    """Whether all end in time, one after the other in the order of their deadlines."""
    for promise in sorted(promises, key=lambda promise: promise.must_end_us):
        now_us += promise.remaining_us
        if now_us > promise.must_end_us:
            return False
    return True


def world_with_u_cached() -> tuple[ExecutorWorld, HistoryVersion]:
    world = ExecutorWorld()
    version = world.store.put("u", 100)
    world.rank("u", version, "first")
    world.run()
    return world, version


PIECES = st.lists(st.tuples(st.integers(1, 1_000), st.integers(1, 300)), max_size=30)


@given(PIECES, st.randoms(use_true_random=False))
def test_admitted_work_ends_in_time_and_what_is_refused_would_make_some_of_it_late(pieces, random):
    backlog, admitted = Backlog(), []
    for must_end_us, demand_us in pieces:
        promise = Promise(must_end_us, demand_us)
        fits = demand_us <= backlog.room_us(must_end_us, 0)
        assert fits == ends_in_time([*admitted, promise], 0)
        if fits:
            put(backlog, promise)
            admitted.append(promise)
        if admitted and random.random() < 0.2:
            backlog.drop(admitted.pop(random.randrange(len(admitted))))
        assert backlog.total_us == pytest.approx(sum(promise.remaining_us for promise in admitted))


def test_work_that_is_late_already_does_not_refuse_other_work():
    backlog = Backlog()
    put(backlog, Promise(must_end_us=100, remaining_us=500))
    assert backlog.room_us(50, now_us=0) == 50
    assert backlog.room_us(1_000, now_us=0) == 500


def test_a_demand_that_changed_replaces_the_old_one():
    backlog, promise = Backlog(), Promise(1_000, 300)
    put(backlog, promise)
    promise.remaining_us, promise.must_end_us = 100, 400
    put(backlog, promise)
    assert (backlog.total_us, backlog.room_us(400, 0), backlog.room_us(300, 0)) == (100, 300, 300)
    backlog.drop(promise)
    backlog.drop(promise)
    assert (backlog.total_us, backlog.room_us(400, 0)) == (0, 400)


def test_missed_deadlines_leave_more_time_to_spare_until_none_is_missed():
    backlog = Backlog()
    put(backlog, Promise(1_000, 100))
    assert backlog.room_us(1_000, 0) == 900
    for _ in range(4):
        backlog.measured.missed()
    assert backlog.room_us(1_000, 0) == pytest.approx(1_000 / 1.2 - 100)
    for _ in range(500):
        backlog.measured.observe(Path.HBM, 100, 0, in_time=True)
    assert backlog.room_us(1_000, 0) == 900


def test_a_device_thread_that_others_slow_down_admits_less_until_it_rests():
    backlog = Backlog()
    put(backlog, Promise(100_000, 10_000))
    now_us = 0
    for _ in range(30):
        backlog.measured.busy_since_us, backlog.measured.done_us = now_us, 20_000
        now_us += 40_000
        backlog.measured.observe_slowdown(now_us)
    assert backlog.room_us(100_000, 0) == pytest.approx(80_000, rel=0.01)
    for _ in range(30):
        backlog.measured.rest(now_us)
    assert backlog.room_us(100_000, 0) == pytest.approx(90_000, rel=0.01)


def test_time_of_pre_infer_is_no_slow_device_thread():
    scheduler: Scheduler[Promise] = Scheduler(0.1, chunk_us=5_000)
    backlog, now_us = scheduler.backlog, 0
    for _ in range(30):
        backlog.measured.busy_since_us, backlog.measured.done_us = now_us, 20_000
        now_us += 100_000
        scheduler.charge(WorkClass.PREINFER, 50_000, now_us)
        scheduler.charge(WorkClass.PREINFER, 30_000, now_us)
        scheduler.charge(WorkClass.RANKING, 20_000, now_us)
        backlog.measured.observe_slowdown(now_us)
    assert backlog.measured.slowdown == 1


@given(st.floats(0, 0.9), st.floats(1, 8), st.floats(1, 1.5), PIECES)
def test_the_share_of_pre_infer_delays_admitted_work_once_beside_all_that_slows_the_device_thread(
    share, slowdown, margin, pieces
):
    backlog = Backlog()
    backlog.measured.slowdown, backlog.measured.margin = slowdown, margin
    promises = [put(backlog, Promise(must_end_us, demand_us)) for must_end_us, demand_us in pieces]
    last_us = max((must_end_us for must_end_us, _ in pieces), default=0)
    ahead_us = sum(promise.remaining_us for promise in promises)
    left_us = last_us if not pieces else (last_us - margin * slowdown / (1 - share) * ahead_us) / margin
    assert backlog.room_us(last_us, 0, preinfer_share=share) == pytest.approx(left_us, abs=1e-3)


def test_pre_infer_beside_hits_makes_the_device_thread_no_slower():
    world = ExecutorWorld(hbm_pages=2048, preinfer_queue_max=64)
    hit = world.store.put("hit", TOKENS)
    world.rank("hit", hit, "first")
    world.run()
    for number in range(60):
        world.job(f"u{number}", world.store.put(f"u{number}", TOKENS), f"j{number}", lead_us=1_000)
        world.rank("hit", hit, f"r{number}", budget_us=10_000_000)
    slowdowns = []
    while world.executor.step() == 0:
        slowdowns.append(world.executor.backlog.measured.slowdown)
    assert world.engine.chunks and len(slowdowns) > 60
    assert max(slowdowns) == pytest.approx(1.0, abs=0.01)


ANSWERS = st.lists(st.booleans(), max_size=300)


@given(ANSWERS, PIECES)
def test_new_work_waits_at_most_for_the_part_of_its_time_that_the_limit_allows(answers, pieces):
    backlog, admitted = Backlog(), []
    for is_answered in answers:
        backlog.measured.observe(Path.HBM, 0, 0, in_time=True) if is_answered else backlog.measured.refused()
        assert 0.25 <= backlog.measured.wait_limit <= 1
    for must_end_us, demand_us in pieces:
        ahead_us = sum(promise.remaining_us for promise in admitted if promise.must_end_us <= must_end_us)
        may_wait = backlog.may_wait(must_end_us, 0, sent_us=0)
        assert may_wait == (backlog.measured.wait_limit == 1 or ahead_us <= backlog.measured.wait_limit * must_end_us)
        if may_wait and demand_us <= backlog.room_us(must_end_us, 0):
            admitted.append(put(backlog, Promise(must_end_us, demand_us)))


@given(st.integers(0, 100), st.integers(1, 100), st.integers(0, 200))
def test_the_time_in_transit_counts_as_waiting(waited_us, left_us, ahead_us):
    backlog = Backlog()
    for _ in range(100):
        backlog.measured.refused()
    put(backlog, Promise(left_us, ahead_us))
    may_wait = backlog.may_wait(left_us, 0, sent_us=-waited_us)
    assert may_wait == (waited_us + ahead_us <= backlog.measured.wait_limit * (waited_us + left_us))


def test_requests_that_are_missed_lower_the_wait_limit_too():
    backlog = Backlog()
    for _ in range(20):
        backlog.measured.missed()
    assert backlog.measured.wait_limit < 1


def test_requests_that_arrive_without_a_pause_do_not_keep_ready_ones_from_being_ranked():
    world = ExecutorWorld()
    version = world.store.put("u", 100)
    world.rank("u", version, "first", budget_us=10_000_000)
    world.run()
    ranked = len(world.outbox.ranked_works)
    for number in range(3 * POSTED_PER_STEP):
        world.rank("u", version, f"r{number}", budget_us=10_000_000, looks_up=False)
    world.executor.step()
    assert ranked < len(world.outbox.ranked_works) <= ranked + POSTED_PER_STEP


def test_the_wait_limit_lasts_while_few_are_refused_and_falls_while_many_are():
    backlog = Backlog()
    for _ in range(200):
        backlog.measured.refused()
        for _ in range(9):
            backlog.measured.observe(Path.HBM, 0, 0, in_time=True)
    assert backlog.measured.wait_limit > 0.97
    for _ in range(200):
        backlog.measured.refused()
        backlog.measured.observe(Path.HBM, 0, 0, in_time=True)
    assert backlog.measured.wait_limit < 0.28
    for _ in range(150):
        backlog.measured.observe(Path.HBM, 0, 0, in_time=True)
    assert backlog.measured.wait_limit == pytest.approx(1.0, abs=0.03)


def test_the_wait_limit_comes_back_while_the_device_rests_however_few_requests_are_answered():
    backlog = Backlog()
    for _ in range(100):
        backlog.measured.refused()
    patience = backlog.measured.wait_limit
    backlog.measured.rest(1_000_000)
    backlog.measured.wake(1_500_000)
    backlog.measured.wake(9_000_000)
    assert backlog.measured.wait_limit == pytest.approx(patience + 0.5)
    backlog.measured.rest(10_000_000)
    backlog.measured.wake(12_000_000)
    assert backlog.measured.wait_limit == 1.0


def test_while_many_are_refused_a_request_is_refused_that_would_fit():
    world, version = world_with_u_cached()
    for _ in range(100):
        world.executor.backlog.measured.refused()
    for number in range(2):
        world.rank("u", version, f"r{number}", budget_us=4_500 if number else 3_000)
    assert [work.request.request_id for work, _, _ in world.outbox.failures] == []
    world.rank("u", version, "refused", budget_us=5_000)
    assert [work.request.request_id for work, _, _ in world.outbox.failures] == ["refused"]
    world.run()
    assert len(world.outbox.ranked_works) == 3


@pytest.mark.parametrize("many_refused", [True, False])
def test_while_many_are_refused_a_worker_keeps_half_of_its_queue_for_requests_whose_prefix_is_ready(many_refused: bool):
    world = ExecutorWorld()
    cached, new = world.store.put("cached", 100), world.store.put("new", 100)
    world.rank("cached", cached, "first")
    world.run()
    for _ in range(100 if many_refused else 0):
        world.executor.backlog.measured.refused()
    # It takes 1 ms, a fifth of the time that the other two have.
    world.rank("cached", cached, "ahead", budget_us=4_500)
    world.rank("new", new, "new", budget_us=5_000)
    world.rank("cached", cached, "ready", budget_us=5_000)
    assert [work.request.request_id for work, _, _ in world.outbox.failures] == (["new"] if many_refused else [])


@given(ANSWERS, PIECES, st.floats(0, 1), st.integers(0, 1_000))
def test_a_request_that_must_compute_its_prefix_may_wait_for_half_of_the_time_or_more(
    answers, pieces, ready_part, transit_us
):
    backlog = Backlog()
    for is_answered in answers:
        backlog.measured.observe(Path.HBM, 0, 0, in_time=True) if is_answered else backlog.measured.refused()
    admitted = [put(backlog, Promise(must_end_us, demand_us)) for must_end_us, demand_us in pieces]
    ahead_us = sum(promise.remaining_us for promise in admitted if promise.must_end_us <= 1_000)
    may_wait = backlog.may_wait(1_000, 0, sent_us=-transit_us, ready_part=ready_part)
    longest_us = backlog.measured.wait_limit * (1_000 + transit_us) - transit_us
    unreserved = max(0.5, 1 - 2 * (1 - backlog.measured.wait_limit))
    waits = longest_us >= 0 and ahead_us <= max(unreserved, ready_part) * longest_us
    assert may_wait == (waits or backlog.measured.wait_limit == 1)


def test_a_worker_without_a_backlog_serves_a_request_whatever_it_needs():
    world = ExecutorWorld()
    for _ in range(100):
        world.executor.backlog.measured.refused()
    request = world.rank("new", world.store.put("new", 100), "r", budget_us=20_000, sent_ago_us=3_000)
    world.run()
    assert request.path is Path.FULL and not world.outbox.failures


def test_while_many_are_refused_a_worker_serves_the_requests_of_a_gateway_that_sends_no_valid_time():
    """Each seemed to have waited since 1970, so it was refused, which lowered the limit further."""
    world = ExecutorWorld()
    version = world.store.put("u", 100)
    world.executor.backlog.measured.refused()
    request = world.rank("u", version, sent_ago_us=world.clock.wall_us())
    world.run()
    assert request.has_ended and not world.outbox.failures


def test_while_many_are_refused_a_worker_does_not_refuse_the_request_whose_prefix_was_prepared_for_it():
    world = ExecutorWorld(lease_margin_ms=60_000)
    version = world.store.put("u", 100)
    world.job("u", version, "prepared")
    world.run()
    for _ in range(100):
        world.executor.backlog.measured.refused()
    for number in range(2):
        world.rank("u", version, f"r{number}", budget_us=4_900)
    must_end_us = world.clock.monotonic_us() + 5_000
    assert world.executor.is_hopeless("u", "other", must_end_us, world.clock.monotonic_us(), world.clock.monotonic_us())
    assert not world.executor.is_hopeless(
        "u", "prepared", must_end_us, world.clock.monotonic_us(), world.clock.monotonic_us()
    )
    world.rank("u", version, "prepared", budget_us=5_000)
    world.rank("u", version, "other", budget_us=5_000)
    world.run()
    assert [work.request.request_id for work, _, _ in world.outbox.failures] == ["other"]


class TestDisplacement:
    """A hit takes 1 ms. The long request takes 5 ms for its prefix and 1 ms more, and has 6.5 ms."""

    LONG_US, HIT_US = 6_500, 6_600

    def world(self, **settings) -> ExecutorWorld:
        world = ExecutorWorld(**settings)
        self.short, self.long = world.store.put("short", 100), world.store.put("long", 500)
        world.rank("short", self.short, "first")
        world.run()
        return world

    def failed(self, world: ExecutorWorld) -> list[str]:
        assert {reason for _, reason, _ in world.outbox.failures} <= {Reason.OVERLOADED}
        return [work.request.request_id for work, _, _ in world.outbox.failures]

    def test_a_long_request_is_displaced_by_short_ones_that_would_be_refused(self):
        world = self.world()
        world.rank("long", self.long, "long", budget_us=self.LONG_US)
        for number in range(4):
            world.rank("short", self.short, f"hit {number}", budget_us=self.HIT_US)
        world.run()
        assert self.failed(world) == ["long"]
        assert [work.path for work in world.outbox.ranked_works[1:]] == [Path.HBM] * 4

    def test_the_poll_thread_leaves_a_request_that_may_displace_another_to_the_device_thread(self):
        world = self.world()
        backlog, now_us = world.executor.backlog, world.clock.monotonic_us()
        world.rank("long", self.long, "long", budget_us=self.LONG_US)
        backlog.measured.own_us[Path.HBM] = 1_000.0
        assert backlog.room_us(now_us + self.HIT_US, now_us) < 1_000
        assert not backlog.is_hopeless(now_us + self.HIT_US, now_us)
        assert backlog.is_hopeless(now_us + 900, now_us), "nothing helps a request without time"

    def test_it_does_not_once_much_of_it_is_done(self):
        world = self.world()
        world.rank("long", self.long, "long", budget_us=self.LONG_US)
        for _ in range(2):
            world.executor.step()
        assert 0 < world.clock.monotonic_us() - 1_000_000 - 2_000 < 5_000
        # 3 ms of the prefix are left, more than four times the 0.6 ms of this request.
        world.rank("short", self.short, "hit", budget_us=4_550, candidates=6)
        world.run()
        assert self.failed(world) == ["hit"]
        assert world.outbox.ranked_works[-1].path is Path.FULL

    def test_it_does_not_for_a_request_that_demands_more_than_a_fourth(self):
        world = self.world()
        world.rank("long", self.long, "long", budget_us=self.LONG_US)
        world.rank("short", self.short, "dear", budget_us=self.HIT_US, candidates=13)
        world.run()
        assert self.failed(world) == ["dear"]

    def test_it_does_not_for_a_request_whose_prefix_is_not_cached(self):
        world = self.world()
        world.rank("long", self.long, "long", budget_us=self.LONG_US)
        world.rank("new", world.store.put("new", 20), "new", budget_us=self.HIT_US)
        world.run()
        assert self.failed(world) == ["new"]

    def test_it_does_not_where_several_requests_wait_for_it(self):
        world = self.world()
        for name in ("long", "too"):
            world.rank("long", self.long, name, budget_us=self.LONG_US + 1_000)
        world.rank("short", self.short, "hit", budget_us=self.HIT_US + 1_000)
        world.run()
        assert self.failed(world) == ["hit"]

    def test_it_does_not_without_a_cache_where_the_poll_thread_refuses_as_before(self):
        world = self.world(reuse_prefixes=False)
        now_us, backlog = world.clock.monotonic_us(), world.executor.backlog
        world.rank("long", self.long, "long", budget_us=self.LONG_US)
        backlog.measured.own_us[Path.HBM] = 1_000.0
        assert backlog.is_hopeless(now_us + self.HIT_US, now_us)

    def test_it_does_not_in_a_lasting_overload_in_which_none_would_ever_end(self):
        world = self.world()
        world.rank("long", self.long, "long", budget_us=self.LONG_US)
        for _ in range(20):
            world.executor.backlog.measured.refused()
        world.rank("short", self.short, "hit", budget_us=self.HIT_US)
        world.run()
        assert self.failed(world) == ["hit"]

    def test_a_job_still_computes_the_prefix_for_the_next_visit(self):
        world = self.world()
        world.job("long", self.long, "long")
        world.rank("long", self.long, "long", budget_us=self.LONG_US)
        for number in range(4):
            world.rank("short", self.short, f"hit {number}", budget_us=self.HIT_US)
        world.run()
        assert (self.failed(world), world.outbox.jobs) == (["long"], [JobOutcome.COMPUTED])
        world.rank("long", self.long, "next")
        world.run()
        assert world.outbox.ranked_works[-1].path is Path.HBM
        assert len(world.outbox.ranked_works) == 6
        assert world.executor.ranking_outstanding_bytes == 0

    def test_it_is_ranked_on_the_newest_part_of_its_history_if_a_fourth_of_its_time_suffices(self):
        world = self.world()
        long = world.rank("long", self.long, "long", budget_us=5_600, candidates=1)
        world.rank("short", self.short, "hit", budget_us=5_700)
        world.run()
        assert long.path is Path.TRUNCATED and not self.failed(world)
        assert len(world.outbox.ranked_works) == 3


@pytest.mark.parametrize(
    ("long_ends_us", "ahead_us", "must_end_us", "is_hopeless"),
    [(200_500, 0, 100_000, False), (900_000, 150_000, 100_000, True), (90_000, 80_000, 100_000, False)],
    ids=["due later, without time to spare", "due later, and not ahead", "ahead"],
)
def test_the_poll_thread_refuses_what_has_no_room_even_if_the_longest_work_is_displaced(
    long_ends_us: int, ahead_us: int, must_end_us: int, is_hopeless: bool
) -> None:
    backlog, long = Backlog(), Promise(long_ends_us, 200_000 if long_ends_us > 100_000 else 40_000)
    if ahead_us:
        put(backlog, Promise(must_end_us, ahead_us))
    put(backlog, long)
    backlog.measured.own_us[Path.HBM] = 1_000.0
    assert backlog.is_hopeless(must_end_us, 0), "without displacement"
    backlog.note_displaceable(long)
    assert backlog.is_hopeless(must_end_us, 0) is is_hopeless


def test_work_that_may_be_displaced_counts_with_what_is_left_of_it_while_a_chunk_runs() -> None:
    backlog, long = Backlog(), Promise(1_000_000, 100_000)
    put(backlog, long)
    backlog.note_displaceable(long)
    backlog.begin_chunk(long, 40_000, 0)
    # Not 60,000, as if its whole demand were gone. The chunk ends at 40,000 whatever is displaced.
    assert backlog.room_us(60_000, 0, displacing=True) == 20_000


def test_of_the_chunk_that_the_device_computes_only_the_rest_counts():
    backlog, promise = Backlog(), Promise(1_000, 300)
    put(backlog, promise)
    backlog.begin_chunk(promise, 200, now_us=0)
    # The poll thread sees the same room while the chunk advances, and what it takes too long.
    assert [backlog.room_us(1_000, now_us) for now_us in (0, 150, 200, 250)] == [700, 700, 700, 650]
    put(backlog, promise)
    assert backlog.room_us(1_000, 100) == 700, "work that is put again while its chunk runs counts once"
    assert backlog.predicted_us == 300
    backlog.end_chunk(now_us=200)
    promise.remaining_us = 100
    put(backlog, promise)
    assert (backlog.room_us(1_000, 200), backlog.predicted_us) == (700, 100)
    # A simulated poll thread asks for times before the end of what its device thread has done.
    assert backlog.room_us(1_000, 150) == 700


def test_the_time_of_a_jobs_chunk_counts_once_a_request_joins_it():
    backlog, work = Backlog(), Promise(1_000, 300)
    backlog.begin_chunk(work, 200, now_us=0)
    assert backlog.room_us(1_000, 50) == 950
    put(backlog, work)
    assert backlog.room_us(1_000, 150) == 850 - 50 - 100
    backlog.drop(work)
    assert backlog.room_us(1_000, 150) == 850


@pytest.mark.parametrize("fails", [False, True], ids=["ends", "fails"])
def test_the_poll_thread_sees_the_chunk_of_a_request_and_not_that_of_a_job(fails: bool):
    world, rooms_us = ExecutorWorld(), []
    backlog, compute = world.executor.backlog, world.engine.pre_infer

    def pre_infer(chunk: PrefixChunk) -> None:
        now_us = world.clock.monotonic_us()
        rooms_us.append([backlog.room_us(now_us + 100_000, now_us + later_us) for later_us in (0, 400)])
        compute(chunk)

    world.engine.pre_infer = pre_infer  # type: ignore[method-assign]
    world.job("job", world.store.put("job", 100), "job")
    world.run()
    assert rooms_us == [[100_000, 99_600]]
    if fails:
        world.engine.fail_next = RuntimeError("kernel failed")
    world.rank("request", world.store.put("request", 100), "request")
    world.run()
    # The chunk takes 1 ms, as the ranking does after it.
    assert rooms_us[1] == [98_000, 98_000]
    now_us = world.clock.monotonic_us()
    assert (backlog.room_us(now_us + 100_000, now_us), backlog.predicted_us) == (100_000, 0)


def test_requests_in_the_mailbox_count_with_the_demand_of_those_before():
    backlog = Backlog()
    backlog.measured.expected_us, backlog.handed_over = 1_000.0, 50
    assert backlog.is_hopeless(40_000, 0)
    assert not backlog.is_hopeless(60_000, 0)
    backlog.measured.expected_us = 0.0
    assert not backlog.is_hopeless(40_000, 0), "requests that are refused demand nothing"


def test_a_hit_that_would_be_late_behind_others_is_refused_when_it_is_looked_up():
    world, version = world_with_u_cached()
    for number in range(5):
        world.rank("u", version, f"r{number}", budget_us=3_500)
    assert [work.request.request_id for work, _, _ in world.outbox.failures] == ["r3", "r4"]
    world.run()
    assert len(world.outbox.ranked_works) == 4


def test_a_hit_with_a_tail_is_not_refused_for_the_share_of_pre_infer_that_delays_no_other_hit():
    world, version = world_with_u_cached()
    world.job("v", world.store.put("v", 400), "job")
    world.rank("u", version, "ahead", budget_us=4_000)
    grown = world.rank("u", world.store.put("u", 102, 2), "grown", budget_us=4_500)
    world.run()
    assert not world.outbox.failures
    assert (grown.path, grown.tokens_cached) == (Path.HBM, 100)


def test_a_hit_whose_long_tail_leaves_no_time_is_refused_when_it_is_looked_up():
    world, version = world_with_u_cached()
    world.rank("u", version, "ahead", budget_us=2_000)
    # A pass with the tail takes 4 ms, an append and a pass 1.3 ms, and 1.2 ms are left.
    world.rank("u", world.store.put("u", 130, 2), "grown", budget_us=2_200)
    assert [work.request.request_id for work, _, _ in world.outbox.failures] == ["grown"]


def test_nothing_is_reloaded_for_a_request_that_would_be_late():
    world, first = world_with_a_in_dram()
    world.rank("a", first, "late", budget_us=900)
    assert [reason for _, reason, _ in world.outbox.failures] == [Reason.OVERLOADED]
    assert world.mover.waiting == []


def test_behind_others_no_small_part_of_a_history_is_ranked():
    world = ExecutorWorld()
    world.rank("a", world.store.put("a", 100), "first", budget_us=2_500)
    world.rank("b", world.store.put("b", 500), "second", budget_us=3_700)
    assert [work.request.request_id for work, _, _ in world.outbox.failures] == ["second"]


def test_a_request_that_the_poll_thread_answered_needs_its_prefix_no_more():
    world = ExecutorWorld(lease_margin_ms=60_000)
    version = world.store.put("u", 100)
    world.job("u", version, "r")
    world.run()
    assert world.cache.stats().hbm.leased
    world.executor.note_no_time("u", "r")
    world.run()
    assert not world.cache.stats().hbm.leased


def test_a_busy_worker_drops_the_job_of_a_refused_request():
    world = ExecutorWorld()
    world.job("u", world.store.put("u", 100), "r1")
    world.executor.note_no_time("u", "r1")
    world.job("v", world.store.put("v", 100), "r2")
    world.run()
    assert world.outbox.jobs == [JobOutcome.OVERTAKEN, JobOutcome.COMPUTED]


def test_an_idle_worker_computes_the_prefix_of_a_refused_request_for_the_next_visit():
    world = ExecutorWorld()
    version = world.store.put("u", 100)
    world.job("u", version, "r1")
    world.executor.note_no_time("u", "r1")
    world.run()
    assert world.outbox.jobs == [JobOutcome.COMPUTED]
    world.rank("u", version, "r2")
    world.run()
    assert world.outbox.paths == [Path.HBM]


def test_results_tell_the_backlog_that_is_left_and_refusals_add_their_own_demand():
    world = ExecutorWorld(max_batch_requests=1)
    version = world.store.put("u", 100)
    alone = world.rank("u", version, "alone")
    world.run()
    works = [world.rank("u", version, f"r{number}", budget_us=3_500) for number in range(4)]
    world.run()
    assert alone.backlog_us is None
    assert works[2].backlog_us is None
    told_us = [work.backlog_us for work in (*works[:2], works[3])]
    assert told_us == pytest.approx([2_000, 1_000, 4_000], rel=0.03)


def test_while_many_are_refused_results_tell_the_time_that_a_new_request_must_have():
    backlog = Backlog()
    put(backlog, Promise(must_end_us=4_000, remaining_us=3_000))
    assert backlog.predicted_us == 3_000
    for _ in range(100):
        backlog.measured.refused()
    told_us = backlog.predicted_us
    assert backlog.may_wait(told_us, 0, sent_us=0) and not backlog.may_wait(told_us - 10, 0, sent_us=0)
