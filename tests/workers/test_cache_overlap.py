"""Copies that overlap rankings, races and time-outs, in virtual time: spill, reload layer by layer, release, close.

The device is simulated (`simulated_device`); the copy threads are real.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from relaygr.schemas.messages import HistoryVersion, Path, PrefixSource
from relaygr.worker.cache import PendingOutcome, SpillOutcome
from relaygr.worker.kv import DramKvDtype
from tests.workers.simulated_device import SimulatedDevice
from tests.worlds.invariants import check_invariants
from tests.worlds.overlap import LAYER_US, LAYERS, PAGES, OverlapWorld, worst

TOLERANCE = 2e-5
COPY_US = 100
"""Virtual time that one layer of a whole prefix takes over the link."""


@pytest.fixture
def world() -> Iterator[OverlapWorld]:
    world = OverlapWorld(copy_us_per_layer=COPY_US)
    yield world
    world.close()


@pytest.fixture
def stored(world: OverlapWorld) -> HistoryVersion:
    """A world in which user ann's prefix is in DRAM only."""
    version = world.put("ann", 1)
    world.spill_and_evict("ann", version)
    return version


class TestTheDevice:
    def test_the_bytes_of_a_copy_change_at_its_end_and_not_before(self) -> None:
        device, done = SimulatedDevice(delay_us=10, bytes_per_us=4), []
        stream = device.stream()
        stream.run(lambda: done.append(device.timeline.now_us), 400)
        event = stream.record()
        device.timeline.advance(109)
        assert (event.done(), done) == (False, [])
        device.timeline.advance(1)
        assert (event.done(), done) == (True, [110])

    def test_copies_of_two_streams_share_the_link(self) -> None:
        device = SimulatedDevice(bytes_per_us=1)
        first, second = device.stream(), device.stream()
        first.run(lambda: None, 100)
        second.run(lambda: None, 100)
        ends = [first.record(), second.record()]
        device.timeline.advance(100)
        assert [event.done() for event in ends] == [True, False]
        device.timeline.advance(100)
        assert ends[1].done()

    def test_a_stream_goes_on_after_the_event_that_it_waits_for(self) -> None:
        device, order = SimulatedDevice(bytes_per_us=1), []
        slow, other = device.stream(), device.stream()
        slow.run(lambda: order.append("slow"), 100)
        other.wait_for(slow.record())
        other.run(lambda: order.append("other"))
        event = other.record()
        assert not event.done()
        event.wait()
        assert (order, device.timeline.now_us) == (["slow", "other"], 100)

    def test_work_that_fails_raises_once_at_the_next_wait(self) -> None:
        device = SimulatedDevice()
        stream = device.stream()
        device.timeline.fail(0)
        stream.run(lambda: None)
        with pytest.raises(RuntimeError, match="work failed"):
            stream.record().wait()
        stream.record().wait()


class TestReloadByLayers:
    def reload(self, world: OverlapWorld, version: HistoryVersion, layer_us: float = COPY_US) -> float:
        """Submits a request and runs until its result. Returns the virtual time in µs."""
        began_us = world.device.timeline.now_us
        self.begin(world, version, layer_us)
        world.run()
        world.until(lambda: "again" in world.outbox.answered or bool(world.outbox.failures))
        return world.device.timeline.now_us - began_us

    def begin(self, world: OverlapWorld, version: HistoryVersion, layer_us: float = COPY_US) -> None:
        """Runs until the device thread knows that the first layer has arrived."""
        world.submit("ann", version, "again")
        world.run()
        world.device.timeline.await_waiters()
        world.executor.work_arrived.clear()
        world.device.timeline.advance(layer_us)
        world.settle(world.executor.work_arrived.is_set)

    def test_ranking_starts_when_the_first_layer_is_there(self, world: OverlapWorld, stored: HistoryVersion) -> None:
        took_us = self.reload(world, stored)
        work = world.work("again")
        assert (work.path, work.prefix_source) == (Path.DRAM, PrefixSource.DRAM)
        assert worst(world.scores("again"), world.exact("ann")) <= TOLERANCE
        serial_us = LAYERS * COPY_US + LAYERS * LAYER_US
        # The first layer's copy, then each layer's computing hides the next one's copy.
        assert took_us == pytest.approx(COPY_US + LAYERS * LAYER_US, abs=30)
        assert took_us < 0.7 * serial_us
        assert work.reload_us == pytest.approx(COPY_US, abs=10)

    def test_a_short_tail_is_ranked_with_the_suffix_when_the_first_layer_is_there(
        self, world: OverlapWorld, stored: HistoryVersion
    ) -> None:
        took_us = self.reload(world, world.put("ann", 1, stored.length + 8))
        assert took_us == pytest.approx(COPY_US + LAYERS * LAYER_US, abs=30)
        work = world.work("again")
        assert (work.path, work.tokens_cached, len(work.suffix)) == (Path.DRAM, stored.length, 8)
        assert worst(world.scores("again"), world.exact("ann")) <= TOLERANCE

    def test_the_reload_is_published_and_the_next_request_finds_it_in_hbm(
        self, world: OverlapWorld, stored: HistoryVersion
    ) -> None:
        self.reload(world, stored)
        world.settle(lambda: world.cache.stats().hbm.in_flight == 0)
        world.submit("ann", stored, "third")
        world.run()
        assert world.work("third").path is Path.HBM
        assert worst(world.scores("third"), world.exact("ann")) <= TOLERANCE
        assert world.cache.stats().reloads == {PendingOutcome.PUBLISHED: 1}
        check_invariants(world.cache)

    def test_a_second_request_in_the_middle_of_a_reload_ranks_on_it_too(
        self, world: OverlapWorld, stored: HistoryVersion
    ) -> None:
        self.begin(world, stored, 1.5 * COPY_US)
        world.submit("ann", stored, "beside")
        world.run()
        world.until(lambda: {"again", "beside"} <= set(world.outbox.answered))
        assert [world.work(each).path for each in ("again", "beside")] == [Path.DRAM, Path.DRAM]
        for each in ("again", "beside"):
            assert worst(world.scores(each), world.exact("ann")) <= TOLERANCE
        assert sum(world.cache.stats().reloads.values()) == 1

    @pytest.mark.slow
    @pytest.mark.parametrize("layer", range(1, LAYERS))
    def test_a_layer_that_fails_discards_what_was_computed_and_the_reload_is_tried_once_more(
        self, world: OverlapWorld, stored: HistoryVersion, layer: int
    ) -> None:
        world.device.timeline.fail(layer)
        self.reload(world, stored)
        world.until(lambda: world.cache.stats().hbm.in_flight == 0)
        work = world.work("again")
        assert not world.outbox.failures
        assert (work.path, work.prefix_source, work.lookups) == (Path.DRAM, PrefixSource.DRAM, 3)
        assert worst(world.scores("again"), world.exact("ann")) <= TOLERANCE
        stats = world.cache.stats()
        assert (stats.reloads, stats.reload_retries) == ({PendingOutcome.PUBLISHED: 1}, 1)
        check_invariants(world.cache)

    @pytest.mark.slow
    @pytest.mark.parametrize("layer", range(LAYERS))
    def test_a_reload_that_fails_twice_is_full_inference(
        self, world: OverlapWorld, stored: HistoryVersion, layer: int
    ) -> None:
        # The second time all layers are one copy.
        world.device.timeline.fail(layer, LAYERS)
        world.submit("ann", stored, "again")
        world.run()
        world.until(lambda: "again" in world.outbox.answered)
        world.until(lambda: world.cache.stats().hbm.in_flight == 0)
        work = world.work("again")
        assert not world.outbox.failures
        assert (work.path, work.prefix_source, work.tokens_cached) == (Path.FULL, PrefixSource.COMPUTED, 0)
        assert worst(world.scores("again"), world.exact("ann")) <= TOLERANCE
        assert world.cache.stats().reloads == {PendingOutcome.FAILED: 1}
        check_invariants(world.cache)

    def test_a_prefix_invalidated_while_it_is_ranked_on_keeps_its_pages_until_the_ranking_ends(
        self, world: OverlapWorld, stored: HistoryVersion
    ) -> None:
        self.begin(world, stored)
        world.executor.post(lambda: world.cache.invalidate_user("ann"))
        world.run()
        world.until(lambda: "again" in world.outbox.answered)
        assert worst(world.scores("again"), world.exact("ann")) <= TOLERANCE
        world.until(lambda: world.cache.stats().hbm.in_flight == 0)
        check_invariants(world.cache)

    def test_a_later_layer_that_is_slow_is_waited_for(self) -> None:
        world = OverlapWorld(copy_us_per_layer=3 * LAYER_US)
        version = world.put("ann", 1)
        world.spill_and_evict("ann", version)
        took_us = self.reload(world, version, 3 * LAYER_US)
        assert worst(world.scores("again"), world.exact("ann")) <= TOLERANCE
        # The link is the bottleneck: only the last layer is computed after the last copy.
        assert took_us == pytest.approx(3 * LAYER_US * LAYERS + LAYER_US, abs=30)
        world.close()


class TestInt8:
    def test_a_reload_from_int8_scores_within_its_error_and_counts_as_approximate(self) -> None:
        world = OverlapWorld(copy_us_per_layer=COPY_US, dram=DramKvDtype.INT8)
        version = world.put("ann", 1)
        world.spill_and_evict("ann", version)
        world.submit("ann", version, "again")
        world.run()
        world.until(lambda: "again" in world.outbox.answered)
        error = worst(world.scores("again"), world.exact("ann"))
        assert TOLERANCE < error < 0.02
        assert world.work("again").prefix_source is PrefixSource.DRAM
        assert world.metric("relaygr_worker_approximate_total") == 1
        world.until(lambda: world.cache.stats().hbm.in_flight == 0)
        # An append to an approximate prefix is approximate, too.
        grown = world.put("ann", 1, 168)
        world.submit("ann", grown, "grown")
        world.run()
        assert world.work("grown").prefix_source is PrefixSource.DRAM
        assert world.metric("relaygr_worker_approximate_total") == 2
        assert worst(world.scores("grown"), world.exact("ann")) < 0.02
        world.close()


class TestRaces:
    def test_a_prefix_is_ranked_on_while_it_is_spilled(self) -> None:
        world = OverlapWorld(copy_us_per_layer=10 * LAYER_US)
        version = world.put("ann", 1)
        world.submit("ann", version, "first")
        world.run()
        world.device.timeline.await_waiters()
        assert world.cache.stats().dram.in_flight == PAGES
        world.submit("ann", version, "during")
        world.run()
        assert world.work("during").path is Path.HBM
        assert worst(world.scores("during"), world.exact("ann")) <= TOLERANCE
        assert world.cache.stats().spills == {SpillOutcome.STARTED: 1, SpillOutcome.UNDER_WAY: 1}
        world.close()

    def test_a_spill_that_ends_after_its_prefix_was_invalidated_publishes_nothing(self, world: OverlapWorld) -> None:
        world.submit("ann", world.put("ann", 1), "first")
        world.run()
        world.device.timeline.await_waiters()
        world.cache.invalidate_user("ann")
        world.until(lambda: world.cache.stats().dram.in_flight == 0)
        stats = world.cache.stats()
        assert (stats.hbm.entries, stats.dram.entries) == (0, 0)
        assert stats.spills_ended == {PendingOutcome.INVALIDATED: 1}
        check_invariants(world.cache)

    def test_a_reload_that_ends_after_its_prefix_was_invalidated_is_discarded(
        self, world: OverlapWorld, stored: HistoryVersion
    ) -> None:
        world.submit("ann", stored, "again")
        world.run()
        world.device.timeline.await_waiters()
        world.cache.invalidate_user("ann")
        world.run()
        world.until(lambda: "again" in world.outbox.answered)
        world.until(lambda: world.cache.stats().hbm.in_flight == 0)
        assert worst(world.scores("again"), world.exact("ann")) <= TOLERANCE
        assert world.cache.stats().reloads == {PendingOutcome.INVALIDATED: 1}
        check_invariants(world.cache)

    def test_the_first_waiter_times_out_the_copy_goes_on_and_the_second_hits(
        self, world: OverlapWorld, stored: HistoryVersion
    ) -> None:
        """7. A waiter that gave up cancelled the copy."""
        world.device.timeline.stall_link(100_000)
        world.submit("ann", stored, "hurried", budget_us=30_000)
        world.run()
        world.device.timeline.await_waiters()
        assert "hurried" not in world.outbox.answered
        for _ in range(30_000 // 100):
            world.device.timeline.advance(100)
            world.run()
        assert world.work("hurried").path is Path.FULL
        assert world.cache.stats().reloads == {}
        world.until(lambda: world.cache.stats().hbm.in_flight == 0)
        world.submit("ann", stored, "second")
        world.run()
        assert world.work("second").path is Path.HBM
        assert world.cache.stats().reloads == {PendingOutcome.PUBLISHED: 1}
        for each in ("hurried", "second"):
            assert worst(world.scores(each), world.exact("ann")) <= TOLERANCE

    def test_closing_ends_the_copy_under_way_and_fails_those_that_wait(self) -> None:
        world = OverlapWorld(copy_us_per_layer=10 * LAYER_US)
        for seed in range(2):
            user = f"user-{seed}"
            world.submit(user, world.put(user, seed), user)
            world.run()
        world.device.timeline.await_waiters()
        closing = threading.Thread(target=world.cache.close)
        closing.start()
        world.settle(lambda: world.cache.stats().spills_ended.get(PendingOutcome.FAILED) == 1)
        world.device.timeline.finish()
        closing.join(20)
        assert not closing.is_alive()
        assert world.cache.stats().spills_ended == {PendingOutcome.FAILED: 1, PendingOutcome.PUBLISHED: 1}
        stats = world.cache.stats()
        assert (stats.hbm.free, stats.dram.free) == (stats.hbm.capacity, stats.dram.capacity)
        check_invariants(world.cache)
