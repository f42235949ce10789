"""19. Random sequences of all cache operations, with faults, under every policy.

After every step the books add up, every pinned row still reads what its key's own computation gives, a
waiter is told exactly once, and what is leased is still there.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from tests.workers.cache_world import LAYOUT, PAGE_TOKENS, Later, World, make_key
from workers.cache import Fill, Handle, Hit, Pending, PrefixKey, Presence, Purpose, SpillOutcome
from workers.cache.copy_queue import CopyLimits
from workers.cache.entries import EntryState
from workers.cache.policies import PolicyName, TierPolicies
from workers.cache.transfer import SpillGate

_LENGTHS = (14, 63, 64, 100, 110, 130, 190)
# Mostly one user's one history at several lengths: there the operations meet.
_KEYS = [make_key("ann", length) for length in _LENGTHS for _ in range(4)]
_KEYS += [make_key(user, length, at) for user in ("ann", "bob") for length in (100, 130, 190) for at in (None, 70)]
_KEYS += [make_key("ann", length, 0) for length in (64, 100)]
_KEYS += [make_key("ann", 100, None, b"m2"), make_key("ann", 100, feature=8), make_key("cid", 130)]
_NOTHING = Presence(0, 0, EntryState.EMPTY, EntryState.EMPTY)
keys = st.sampled_from(_KEYS)
picks = st.integers(0, 1_000)


@dataclass(slots=True)
class Held:
    key: PrefixKey
    handle: Handle


@dataclass(slots=True)
class Waiter:
    told: int = 0
    pending: Pending | None = None


@dataclass(slots=True)
class Run:
    """What the test itself holds."""

    handles: list[Held] = field(default_factory=list)
    leaving: list[tuple[Held, Later]] = field(default_factory=list)
    fills: list[tuple[PrefixKey, Fill]] = field(default_factory=list)
    waiters: list[Waiter] = field(default_factory=list)
    leases: dict[str, tuple[PrefixKey, int, int]] = field(default_factory=dict)


class CacheMachine(RuleBasedStateMachine):
    policy = PolicyName.LRU

    @initialize(hbm_pages=st.integers(10, 40), dram_pages=st.integers(0, 40), max_jobs=st.integers(1, 6))
    def start(self, hbm_pages: int, dram_pages: int, max_jobs: int) -> None:
        self.world = World(
            hbm_pages,
            dram_pages,
            TierPolicies(self.policy, self.policy),
            limits=CopyLimits(max_in_flight=2, max_jobs=max_jobs, max_bytes=64 * 1024),
            spill_gate=SpillGate(0.5, 2.0, weight=0.5),
        )
        self.cache = self.world.cache
        self.run = Run()
        self.now_us = 0

    def tick(self) -> int:
        self.now_us += 1
        return self.now_us

    def wait_on(self, pending: Pending) -> None:
        waiter = Waiter(pending=pending)
        self.run.waiters.append(waiter)

        def tell(_: Pending) -> None:
            waiter.told += 1

        pending.add_done_callback(tell)

    # Operations.

    @rule(key=keys)
    def peek(self, key: PrefixKey) -> None:
        before = self.cache.stats()
        self.cache.peek(key)
        assert self.cache.stats() == before

    @rule(key=keys, join=st.booleans(), purpose=st.sampled_from(Purpose))
    def acquire(self, key: PrefixKey, join: bool, purpose: Purpose) -> None:
        found = self.cache.acquire(key, self.tick(), join, purpose)
        if isinstance(found, Hit):
            self.run.handles.append(Held(key, found.handle))
        elif isinstance(found, Pending):
            assert join
            self.wait_on(found)

    @rule(key=keys, purpose=st.sampled_from(Purpose))
    def reserve(self, key: PrefixKey, purpose: Purpose) -> None:
        self.take(key, self.cache.reserve(key, self.tick(), purpose))

    @precondition(lambda self: self.run.handles)
    @rule(pick=picks, key=keys)
    def extend(self, pick: int, key: PrefixKey) -> None:
        held = self.run.handles[pick % len(self.run.handles)]
        self.take(key, self.cache.extend(held.handle, key, self.tick()))

    def take(self, key: PrefixKey, answer: object) -> None:
        if isinstance(answer, Fill):
            self.world.begin(answer)
            self.run.fills.append((key, answer))
        elif isinstance(answer, Pending):
            self.wait_on(answer)

    @precondition(lambda self: self.run.fills)
    @rule(pick=picks, part=st.floats(0, 1))
    def compute_a_chunk(self, pick: int, part: float) -> None:
        key, fill = self.run.fills[pick % len(self.run.fills)]
        self.world.write(fill, key, fill.filled_tokens + int(part * (fill.tokens - fill.filled_tokens)))

    @precondition(lambda self: self.run.fills)
    @rule(pick=picks)
    def publish(self, pick: int) -> None:
        key, fill = self.run.fills.pop(pick % len(self.run.fills))
        self.world.write(fill, key, fill.tokens)
        current = fill.is_current
        handle = fill.publish(self.tick())
        assert (handle is not None) == current
        if handle is not None:
            assert handle.complete
            self.run.handles.append(Held(key, handle))

    @precondition(lambda self: self.run.fills)
    @rule(pick=picks)
    def abort(self, pick: int) -> None:
        _, fill = self.run.fills.pop(pick % len(self.run.fills))
        fill.abort()
        self.forget_lost_leases()

    @precondition(lambda self: self.run.handles)
    @rule(pick=picks)
    def release(self, pick: int) -> None:
        self.cache.release(self.run.handles.pop(pick % len(self.run.handles)).handle)

    @precondition(lambda self: self.run.handles)
    @rule(pick=picks)
    def release_after_the_device(self, pick: int) -> None:
        held, event = self.run.handles.pop(pick % len(self.run.handles)), Later()
        self.cache.release(held.handle, after=event)
        self.run.leaving.append((held, event))

    @precondition(lambda self: self.run.leaving)
    @rule()
    def the_device_passes(self) -> None:
        self.run.leaving.pop(0)[1].complete()

    @rule(key=keys, request=st.integers(0, 5), lasts_us=st.integers(1, 40))
    def lease(self, key: PrefixKey, request: int, lasts_us: int) -> None:
        until_us = self.tick() + lasts_us
        if self.cache.lease(key, f"r{request}", until_us):
            self.run.leases[f"r{request}"] = (key, self.cache.peek(key).hbm_behaviours, until_us)

    @rule(request=st.integers(0, 5))
    def end_lease(self, request: int) -> None:
        self.cache.end_lease(f"r{request}")
        self.run.leases.pop(f"r{request}", None)

    @rule()
    def expire_leases(self) -> None:
        self.cache.expire_leases(self.tick())
        self.run.leases = {name: lease for name, lease in self.run.leases.items() if lease[2] > self.now_us}

    @rule(key=keys, deadline_us=st.integers(0, 50), saved_us=st.none() | st.floats(0, 1))
    def reload(self, key: PrefixKey, deadline_us: int, saved_us: float | None) -> None:
        answer = self.cache.start_reload(key, deadline_us, self.tick(), saved_us)
        if isinstance(answer, Pending):
            self.wait_on(answer)

    @rule(key=keys)
    def spill_by_key(self, key: PrefixKey) -> None:
        assert isinstance(self.cache.spill(key), SpillOutcome)

    @precondition(lambda self: self.run.handles)
    @rule(pick=picks)
    def spill_by_handle(self, pick: int) -> None:
        assert isinstance(self.cache.spill(self.run.handles[pick % len(self.run.handles)].handle), SpillOutcome)

    @rule(refuses=st.booleans())
    def the_copy_queue_refuses(self, refuses: bool) -> None:
        self.world.mover.refuses = refuses

    @rule()
    def start_a_copy(self) -> None:
        self.world.mover.start()
        assert self.world.mover.under_way <= 2

    @precondition(lambda self: self.world.mover.under_way)
    @rule(copied=st.booleans() | st.just(True), index=st.integers(0, 1))
    def end_a_copy(self, copied: bool, index: int) -> None:
        self.world.mover.finish(copied, index % self.world.mover.under_way)
        self.forget_lost_leases()

    @rule(what=st.sampled_from(["user", "model", "all"]), key=keys)
    def take_away(self, what: str, key: PrefixKey) -> None:
        if what == "user":
            self.cache.invalidate_user(key.user_id)
        elif what == "model":
            self.cache.drop_namespace(key.namespace)
        else:
            self.cache.clear()
        gone = {
            "user": lambda other: other.user_id == key.user_id,
            "model": lambda other: other.namespace == key.namespace,
        }
        matches = gone.get(what, lambda other: True)
        self.run.leases = {name: lease for name, lease in self.run.leases.items() if not matches(lease[0])}
        assert all(self.cache.peek(other) == _NOTHING for other in _KEYS if matches(other))

    @rule(key=keys)
    def demote(self, key: PrefixKey) -> None:
        self.cache.demote([key.user_id])

    # Whole stories, so that the single operations meet something.

    @rule(key=keys)
    def store(self, key: PrefixKey) -> None:
        answer = self.cache.reserve(key, self.tick())
        if isinstance(answer, Fill):
            self.world.begin(answer)
            self.world.write(answer, key, answer.tokens)
            handle = answer.publish(self.tick())
            assert handle is not None
            self.cache.release(handle)

    @rule(key=keys)
    def spill_and_wait(self, key: PrefixKey) -> None:
        self.cache.spill(key)
        self.world.mover.run()

    @rule(key=keys)
    def reload_and_read(self, key: PrefixKey) -> None:
        self.reload(key, self.now_us, None)
        self.world.mover.run()
        self.acquire(key, True, Purpose.RANKING)

    @rule()
    def crowd_out(self) -> None:
        """Another user takes all the room there is, and goes."""
        stats = self.cache.stats().hbm
        tokens = (stats.free + stats.evictable) * PAGE_TOKENS
        if tokens > LAYOUT.contextual_tokens:
            self.store(make_key("crowd", tokens - LAYOUT.contextual_tokens))
            self.cache.invalidate_user("crowd")

    def forget_lost_leases(self) -> None:
        """A lease on work that came to nothing protects nothing, though the key may match something else."""
        held = self.cache.stats().leases
        if held < len(self.run.leases):
            self.run.leases.clear()
            for request in range(6):
                self.cache.end_lease(f"r{request}")

    # What always holds.

    @invariant()
    def books_add_up(self) -> None:
        if hasattr(self, "cache"):
            self.cache.check_invariants()

    @invariant()
    def no_reader_sees_another_prefix(self) -> None:
        if hasattr(self, "cache"):
            for held in (*self.run.handles, *(held for held, _ in self.run.leaving)):
                self.world.check_reads(held.handle, held.key)

    @invariant()
    def waiters_are_told_exactly_once(self) -> None:
        if hasattr(self, "cache"):
            assert all(waiter.told == waiter.pending.done for waiter in self.run.waiters if waiter.pending)

    @invariant()
    def what_is_leased_is_there(self) -> None:
        if hasattr(self, "cache"):
            for key, behaviours, _ in self.run.leases.values():
                assert self.cache.peek(key).hbm_behaviours >= behaviours

    def teardown(self) -> None:
        if not hasattr(self, "cache"):
            return
        for _, fill in self.run.fills:
            fill.abort()
        for held in self.run.handles:
            self.cache.release(held.handle)
        for _, event in self.run.leaving:
            event.complete()
        self.cache.close()
        self.cache.check_invariants()
        stats = self.cache.stats()
        assert (stats.hbm.free, stats.dram.free) == (stats.hbm.capacity, stats.dram.capacity)
        assert all(waiter.told == 1 for waiter in self.run.waiters)


@pytest.mark.parametrize("policy", PolicyName)
def test_random_operations_keep_every_invariant(policy: PolicyName) -> None:
    machine = type("CacheMachineOfPolicy", (CacheMachine,), {"policy": policy})
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=60, stateful_step_count=50, deadline=None, suppress_health_check=list(HealthCheck)
        ),
    )


@pytest.mark.slow
@pytest.mark.parametrize("policy", PolicyName)
def test_many_more_random_operations_keep_every_invariant(policy: PolicyName) -> None:
    machine = type("CacheMachineOfPolicy", (CacheMachine,), {"policy": policy})
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=80, stateful_step_count=80, deadline=None, suppress_health_check=list(HealthCheck)
        ),
    )
