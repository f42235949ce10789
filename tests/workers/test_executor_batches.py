"""Ranking passes: chunks in the same forward, accounting of device time, and the host's work beside the device."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch

from relaygr.admission.latency import LatencyModel, Stage
from relaygr.runtime.clock import ManualClock
from relaygr.schemas.ended import Reason
from relaygr.schemas.messages import HistoryVersion, Path
from relaygr.simulate.device import SimulatedDevice
from relaygr.worker.device import Event
from relaygr.worker.executor.executor import LONG_US, POSTED_TO_WAKE, WORK_TOO_LONG
from relaygr.worker.executor.work import JobOutcome
from tests.worlds.executor import COEFFICIENTS, HIT_US, TOKEN_US, ExecutorWorld
from tests.worlds.invariants import check_invariants
from tests.worlds.real_executor import RealExecutorWorld, behaviours_of


def device_us(world: ExecutorWorld, work_class: str) -> float:
    name = "relaygr_worker_device_seconds_total"
    return 1e6 * (world.registry.get_sample_value(name, {"work_class": work_class}) or 0.0)


def world_with_a_ready_request_and_a_job_begun(budget_us: int = 50_000, **settings) -> ExecutorWorld:
    """User a's prefix is cached and its request is ready; one chunk of user b's prefix is computed."""
    world = ExecutorWorld(**{"mix_chunks": True, **settings})
    cached = world.store.put("a", 100)
    world.rank("a", cached, "a1")
    world.run()
    world.job("b", world.store.put("b", 300), "b1")
    world.executor.step()
    world.rank("a", cached, "a2", budget_us=budget_us)
    world.engine.chunks.clear()
    return world


def test_the_next_chunk_of_pre_infer_runs_beside_a_request_that_can_spare_its_time():
    world = world_with_a_ready_request_and_a_job_begun()
    world.executor.step()
    assert world.engine.mixed == [(96, 1)]
    assert world.outbox.paths == [Path.FULL, Path.HBM]
    world.run()
    assert world.outbox.jobs == [JobOutcome.COMPUTED]
    assert world.rank("b", None, "b1").path is Path.HBM


def test_a_prefix_that_has_not_begun_may_begin_beside_a_request():
    world = ExecutorWorld(mix_chunks=True)
    cached = world.store.put("a", 100)
    world.rank("a", cached, "a1")
    world.run()
    world.rank("a", cached, "a2")
    world.job("b", world.store.put("b", 64), "b1")
    world.executor.step()
    assert world.engine.mixed == [(64, 1)]
    assert world.outbox.jobs == [JobOutcome.COMPUTED]


@pytest.mark.parametrize(
    ("budget_us", "tokens"),
    [
        pytest.param(HIT_US + 96 * TOKEN_US, 96, id="time for a whole chunk"),
        pytest.param(HIT_US + 96 * TOKEN_US - 1, 80, id="time for a shorter one"),
        pytest.param(HIT_US + 16 * TOKEN_US, 16, id="time for a page"),
        pytest.param(HIT_US + 16 * TOKEN_US - 1, 0, id="time for none"),
    ],
)
def test_a_chunk_beside_a_request_ends_before_its_deadline(budget_us, tokens):
    world = world_with_a_ready_request_and_a_job_begun(budget_us)
    asked_us = world.clock.monotonic_us()
    world.executor.step()
    assert [mixed for mixed, _ in world.engine.mixed] == [tokens] * bool(tokens)
    assert len(world.outbox.ranked_works) == 2
    assert world.clock.monotonic_us() - asked_us <= budget_us


def test_a_chunk_beside_a_batch_does_not_make_waiting_requests_late():
    world = world_with_a_ready_request_and_a_job_begun(budget_us=50_000, max_batch_requests=1)
    world.rank("c", None, "c1", budget_us=3_000)
    world.rank("d", None, "d1", budget_us=3_500)
    asked_us = world.clock.monotonic_us()
    while len(world.outbox.ranked_works) < 3:
        world.executor.step()
    assert world.clock.monotonic_us() - asked_us <= 3_500
    assert world.outbox.failures == []


def world_with_a_cached_prefix(**settings) -> tuple[ExecutorWorld, HistoryVersion]:
    world = ExecutorWorld(**settings)
    cached = world.store.put("a", 100)
    world.rank("a", cached, "a1")
    world.run()
    world.engine.batches.clear()
    return world, cached


def test_the_fixed_part_of_a_pass_is_predicted_once_a_batch():
    world, cached = world_with_a_cached_prefix()
    world.corrector.recalibrate(LatencyModel(replace(COEFFICIENTS, c0=800.0, c1=20.0)))
    for number in range(3):
        world.rank("a", cached, f"r{number}", budget_us=1_200)
    world.executor.step()
    assert world.engine.batches == [2], "1,000 µs for the first and 200 more for the second"


def test_a_batch_has_at_most_the_set_number_of_rows_or_one_request():
    world, cached = world_with_a_cached_prefix(max_batch_rows=25)
    for number, candidates in enumerate((40, 10, 10, 10)):
        world.rank("a", cached, f"r{number}", budget_us=50_000 + number, candidates=candidates)
    world.run()
    assert world.engine.batches == [1, 2, 1]


def test_a_batch_does_not_delay_a_prefix_that_a_request_waits_for():
    """A request with enough time joined an urgent one, and the prefix was truncated as a result."""
    world, cached = world_with_a_cached_prefix()
    world.rank("a", cached, "urgent", budget_us=2_500)
    waits = world.rank("b", world.store.put("b", 200), "waits", budget_us=200 * TOKEN_US + 2 * HIT_US + 950)
    world.rank("a", cached, "can wait", budget_us=50_000)
    world.run()
    assert waits.path is Path.FULL
    assert len(world.outbox.ranked_works) == 4


@pytest.mark.parametrize("job_waits", [False, True])
def test_the_time_left_excludes_more_urgent_work_and_the_share_of_pre_infer(job_waits: bool):
    world, cached = world_with_a_cached_prefix()
    if job_waits:
        world.job("c", world.store.put("c", 100), "c1")
    world.rank("a", cached, "urgent", budget_us=2_500)
    # Alone it takes 3 ms. A request of 1 ms is ahead, and pre-infer may take up to nine times as long.
    work = world.rank("b", world.store.put("b", 200), "b1", budget_us=12_000)
    assert work.path is (Path.TRUNCATED if job_waits else Path.FULL)
    if not job_waits:
        late = world.rank("d", world.store.put("d", 200), "d1", budget_us=3_900)
        assert late.path is Path.TRUNCATED, "alone it would have been in time"


def test_device_time_of_ranking_leaves_less_for_jobs():
    world, _ = world_with_a_cached_prefix()
    world.executor._parts.admission.count_rankings()
    load = world.executor._parts.admission._buckets.ranking_load(world.clock.monotonic_us())
    assert load == pytest.approx((100 * TOKEN_US + HIT_US) / 1e6, rel=0.01)


def test_ready_requests_run_in_the_forward_of_a_chunk_that_goes_first():
    """Otherwise they would wait for the whole chunk."""
    world = ExecutorWorld(mix_chunks=True)
    cached = world.store.put("a", 100)
    world.rank("a", cached, "a1")
    world.run()
    world.job("b", world.store.put("b", 300), "b1", lead_us=5_000)
    world.rank("a", cached, "a2", budget_us=50_000)
    world.executor.step()
    assert world.engine.mixed == [(96, 1)]
    assert world.outbox.paths == [Path.FULL, Path.HBM]


def test_on_a_cpu_nothing_is_mixed_unless_it_is_asked_for():
    """A CPU computes one row after the other, so the chunk would only delay the request."""
    world = world_with_a_ready_request_and_a_job_begun(mix_chunks=None)
    world.run()
    assert world.engine.mixed == []
    assert not world.settings.mixes_chunks(on_cpu=True)
    assert world.settings.mixes_chunks(on_cpu=False)


def test_each_class_pays_its_predicted_part_of_a_mixed_pass():
    world = world_with_a_ready_request_and_a_job_begun()
    before = device_us(world, "ranking"), device_us(world, "preinfer")
    world.executor.step()
    assert device_us(world, "ranking") - before[0] == pytest.approx(HIT_US, abs=1)
    assert device_us(world, "preinfer") - before[1] == pytest.approx(96 * TOKEN_US, abs=1)


def test_when_a_mixed_pass_fails_requests_and_chunk_run_alone():
    world = world_with_a_ready_request_and_a_job_begun()
    world.engine.fail_mixed = True
    world.executor.step()
    assert world.outbox.paths == [Path.FULL, Path.HBM]
    assert world.engine.chunks == [(96, 192)]
    world.run()
    assert world.outbox.jobs == [JobOutcome.COMPUTED]


def test_a_chunk_that_fails_beside_a_request_fails_alone():
    world = world_with_a_ready_request_and_a_job_begun()
    errors = [RuntimeError("kernel failed"), RuntimeError("kernel failed")]
    whole = world.engine.pre_infer

    def broken(chunk):
        if errors:
            raise errors.pop()
        whole(chunk)

    world.engine.pre_infer = broken
    world.run()
    assert world.outbox.jobs == [JobOutcome.FAILED]
    assert (world.outbox.paths, world.outbox.failures) == ([Path.FULL, Path.HBM], [])
    assert world.cache.stats().hbm.in_flight == 0


def test_a_request_that_fails_beside_a_chunk_fails_alone():
    world = world_with_a_ready_request_and_a_job_begun()
    world.engine.fail_candidates = 10
    world.run()
    assert [reason for _, reason, _ in world.outbox.failures] == [Reason.DEVICE_ERROR]
    assert world.outbox.jobs == [JobOutcome.COMPUTED]


@pytest.mark.parametrize("kind", ["plain", "interleaved actions", "positions from the end", "contextual mask"])
def test_mixed_passes_score_as_full_inference_and_leave_exact_prefixes(kind):
    torch.set_num_threads(1)
    world = RealExecutorWorld(kind, mix_chunks=True)
    versions = {user: world.put(user, 150, seed) for seed, user in enumerate("abc")}
    world.rank("a", versions["a"], "a0")
    mixed: list[int] = []
    whole = world.engine.forward

    def counted(chunks, requests):
        mixed.append(len(chunks) * len(requests))
        return whole(chunks, requests)

    world.engine.forward = counted  # type: ignore[method-assign]
    run, world.run = world.run, lambda: None  # type: ignore[method-assign]
    world.job("b", versions["b"], "b1")
    world.job("c", versions["c"], "c1")
    for number in range(1, 8):
        world.submit("a", versions["a"], f"a{number}", budget_us=50_000)
        world.executor.step()
    world.run = run  # type: ignore[method-assign]
    world.run()
    assert max(mixed) == 1
    for number in range(1, 8):
        world.assert_exact(world.outbox.answered[f"a{number}"][0], behaviours_of(150))
    for seed, user in ((1, "b"), (2, "c")):
        work = world.rank(user, versions[user], f"{user}1")
        assert work.path is Path.HBM
        world.assert_exact(work, behaviours_of(150, seed))


# -- an asynchronous device ----------------------------------------------------------------


@dataclass
class LateEvent(Event):
    """Complete once `wait` was called."""

    log: list[str]
    error: Exception | None = None
    passed: bool = False
    on_wait: Callable[[], None] = lambda: None

    def done(self) -> bool:
        return self.passed

    def wait(self) -> None:
        self.log.append("waited")
        self.on_wait()
        self.passed = True
        if self.error is not None:
            raise self.error


@dataclass
class LateStream:
    log: list[str]
    error: Exception | None
    ended: bool
    on_wait: Callable[[], None]

    def record(self) -> Event:
        return LateEvent(self.log, self.error, self.ended, self.on_wait)


class LateDevice(SimulatedDevice):
    """Its work is complete once `wait` was called on the event."""

    def __init__(self, clock: ManualClock) -> None:
        super().__init__(clock, is_cpu=False)
        self.log: list[str] = []
        self.error: Exception | None = None
        self.ended = False
        self.on_wait: Callable[[], None] = lambda: None

    def run(self, duration_us: float) -> None:
        super().run(duration_us)
        super().settle()

    def current_stream(self) -> LateStream:  # type: ignore[override]
        return LateStream(self.log, self.error, self.ended, self.on_wait)

    def settle(self) -> None:
        self.log.append("waited for all")


def world_on_a_late_device() -> tuple[ExecutorWorld, LateDevice]:
    world = ExecutorWorld(mix_chunks=False)
    world.engine.device = device = LateDevice(world.clock)
    world.executor.serve_with(world.engine)
    return world, device


def test_the_host_does_other_work_before_it_waits_for_a_chunk():
    world, device = world_on_a_late_device()
    version = world.store.put("u", 64)
    world.job(version=version)
    world.executor.step()
    assert (device.log, world.outbox.jobs) == ([], []), "given to the device, not waited for"
    assert world.cache.stats().hbm.in_flight == 4, "and not published"
    world.executor.post(lambda: device.log.append("looked up"))
    world.executor.step()
    assert device.log == ["looked up", "waited"]
    assert world.outbox.jobs == [JobOutcome.COMPUTED]


def test_a_request_that_comes_while_the_host_waits_for_a_chunk_is_ranked_before_the_next_one():
    world, device = world_on_a_late_device()
    cached = world.store.put("a", 100)
    world.rank("a", cached, "a1")
    world.run()
    world.job("b", world.store.put("b", 300), "b1")
    device.on_wait = lambda: world.rank("a", cached, "a2", budget_us=2_000, looks_up=False)  # type: ignore[assignment]
    world.executor.step()
    chunks = len(world.engine.chunks)
    world.executor.step()
    assert world.outbox.paths == [Path.FULL, Path.HBM]
    assert len(world.engine.chunks) == chunks


@pytest.mark.parametrize("is_seen_to_end", [True, False])
def test_a_chunk_that_ended_before_it_was_settled_is_not_timed(is_seen_to_end: bool):
    world, device = world_on_a_late_device()
    device.ended = not is_seen_to_end
    world.job(version=world.store.put("u", 64))
    world.executor.step()
    world.clock.advance_us(10 * 64 * TOKEN_US)
    world.executor.step()
    assert world.outbox.jobs == [JobOutcome.COMPUTED]
    assert (world.corrector.factor(Stage.PRE) > 1) is is_seen_to_end


def test_pages_of_a_failed_mixed_pass_are_reused_only_after_the_device_has_finished():
    world = world_with_a_ready_request_and_a_job_begun()
    world.engine.device = device = LateDevice(world.clock)
    world.engine.fail_mixed = True
    world.executor.step()
    assert device.log[0] == "waited for all"
    assert world.outbox.paths == [Path.FULL, Path.HBM]


def test_a_chunk_that_turns_out_to_have_failed_fails_its_prefix():
    world, device = world_on_a_late_device()
    device.error = RuntimeError("illegal memory access")
    world.rank("u", world.store.put("u", 64))
    world.run()
    assert [reason for _, reason, _ in world.outbox.failures] == [Reason.DEVICE_ERROR]
    assert world.cache.stats().hbm.free == 128


def test_pages_of_a_failed_chunk_are_freed_only_after_the_device_has_finished():
    """Its first layers were already launched when the memory for a later layer did not fit."""
    world, device = world_on_a_late_device()

    def broken(chunk):
        device.log.append(f"raised, {world.cache.stats().hbm.free} pages free")
        raise torch.OutOfMemoryError("out of memory")

    world.engine.pre_infer = broken
    world.outbox.job_done = lambda received, outcome, _: device.log.append(f"{world.cache.stats().hbm.free} pages free")
    world.job(version=world.store.put("u", 64))
    world.executor.step()
    assert device.log == ["raised, 124 pages free", "waited for all", "128 pages free"]


def test_requests_that_arrive_while_a_chunk_runs_are_answered():
    world, device = world_on_a_late_device()
    version = world.store.put("u", 300)
    world.job(version=version)
    random = np.random.default_rng(0)
    for number in range(60):
        world.executor.step()
        choice = random.integers(4)
        if choice == 0:
            world.rank("u", version, f"r{number}")
        elif choice == 1:
            world.executor.user_deleted("u")
        elif choice == 2:
            world.job("u", version, f"j{number}")
        device.error = RuntimeError("kernel failed") if random.integers(8) == 0 else None
        check_invariants(world.cache)
    device.error = None
    world.run()
    world.mover.finish()
    world.run()
    assert world.executor.ranking_outstanding == 0
    assert world.cache.stats().hbm.in_flight == 0


def test_the_time_of_rejections_does_not_count_as_device_time():
    """Otherwise every rejection would raise the predictions, which would lead to more rejections."""
    world, cached = world_with_a_cached_prefix()
    before_us = device_us(world, "ranking")
    record = world.outbox.unranked
    world.outbox.unranked = lambda *end: (record(*end), world.clock.advance_us(50))  # type: ignore[method-assign]
    for number in range(10):
        world.rank("a", cached, f"late {number}", budget_us=1_900)
    world.rank("a", cached, "in time", budget_us=50_000)
    world.clock.advance_us(1_000)
    world.run()
    assert [reason for _, reason, _ in world.outbox.failures] == [Reason.OVERLOADED] * 10
    assert device_us(world, "ranking") - before_us == HIT_US
    assert world.corrector.factor(Stage.HIT) == 1.0


@pytest.mark.parametrize("on_cpu", [True, False], ids=["CPU", "accelerator"])
def test_much_mail_wakes_the_device_thread_unless_the_poll_thread_of_a_cpu_does_short_work(on_cpu: bool):
    """With a model that computes nothing, both threads then waited for the interpreter lock of the other one."""
    world = ExecutorWorld() if on_cpu else world_on_a_late_device()[0]
    world.executor.work_arrived.clear()
    for number in range(POSTED_TO_WAKE + 1):
        world.rank(f"u{number}", request_id=f"r{number}", looks_up=False)
    assert world.executor.work_arrived.is_set() is not on_cpu
    world.executor.backlog.measured.expected_us = LONG_US + 1
    world.rank("long", request_id="long", looks_up=False)
    assert world.executor.work_arrived.is_set()


def test_a_long_queue_is_short_work_if_one_batch_of_it_is():
    """The queue counted as one piece of work, so that the device thread did what the poll thread could."""
    world = ExecutorWorld(max_batch_requests=4)
    works = [world.rank(f"u{number}", request_id=f"r{number}", budget_us=1_000_000) for number in range(20)]
    batch_us = 4 * max(work.predicted_us for work in works)
    assert world.executor.step(batch_us - 1) == WORK_TOO_LONG
    assert world.executor.step(batch_us) == 0
    assert any(work.has_ended for work in works)


def test_the_results_of_a_batch_are_sent_before_its_requests_are_counted_and_let_go():
    """Otherwise the bookkeeping of each would delay the results of all. The outbox asserts the order."""
    world = ExecutorWorld()
    versions = {user: world.store.put(user, 100) for user in ("a", "b", "c")}
    for user, version in versions.items():
        world.rank(user, version, f"{user}1")
    world.run()
    for user, version in versions.items():
        world.rank(user, version, f"{user}2")
    world.run()
    assert world.outbox.paths[3:] == [Path.HBM] * 3
    assert world.outbox.counted == world.outbox.ranked_works
