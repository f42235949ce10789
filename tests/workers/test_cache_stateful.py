"""19. Random sequences of all cache operations, with faults, under every policy.

After every step the metadata is consistent and every page of a tier is in exactly one state. Every row that a hit
would return, or that a handle covers, equals the computed row of its key (a shadow of all bytes in both tiers).
Each waiter is called exactly once, and leased prefixes are still cached. Faults: copies that fail or never end, full
queues, waiters that raise or gave up, leaked handles, fills and leases, histories and models removed in any state.

RELAYGR_TEST_CACHE_SEQUENCES sets the number of sequences: 1,000 take some minutes.
"""

from __future__ import annotations

import itertools
import os
from dataclasses import dataclass, field

import numpy as np
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

from relaygr.runtime.clock import ManualClock
from relaygr.worker.cache import (
    Fill,
    Handle,
    Hit,
    Miss,
    PendingPrefix,
    PrefixKey,
    Presence,
    Purpose,
    SpillOutcome,
)
from relaygr.worker.cache.admin import (
    CacheAdmin,
    CacheReport,
    ServingModel,
    Show,
    ShowUser,
    UserReport,
    decode_report,
    encode_request,
)
from relaygr.worker.cache.copies import CopyLimits
from relaygr.worker.cache.policies import VISIT_US, PolicyName, TierPolicies
from relaygr.worker.cache.stats import HOLDINGS
from relaygr.worker.cache.transfers import SpillGate
from tests.worlds.cache import LAYOUT, PAGE_TOKENS, CacheWorld, Later, make_key, stamps
from tests.worlds.invariants import check_invariants

pytestmark = pytest.mark.slow

_LENGTHS = (14, 63, 64, 100, 110, 130, 190)
# Mostly one history of one user at several lengths, so that operations concern the same entries.
_KEYS = [make_key("ann", length) for length in _LENGTHS for _ in range(4)]
_KEYS += [make_key(user, length, at) for user in ("ann", "bob") for length in (100, 130, 190) for at in (None, 70)]
_KEYS += [make_key("ann", length, 0) for length in (64, 100)]
_KEYS += [make_key("ann", 100, None, b"m2"), make_key("ann", 100, feature=8), make_key("cid", 130)]
_NOTHING = Presence(0, 0)
_MODELS = (b"model-1", b"m2")
keys = st.sampled_from(_KEYS)
picks = st.integers(0, 1_000)


@dataclass(slots=True)
class Held:
    key: PrefixKey
    handle: Handle


@dataclass(slots=True)
class Waiter:
    told: int = 0
    pending: PendingPrefix | None = None


def shadows() -> dict[tuple[str, bytes, bytes], np.ndarray]:  # type: ignore[type-arg]
    """The expected rows of every prefix that may be in a tier, by user, model and digest."""
    known = {}
    for key in {(each.user_id, each.namespace, each.chain.digest): each for each in _KEYS}.values():
        rows = stamps(key)
        for length in range(1, key.length + 1):
            digest = key.digest_at(length)
            assert digest is not None
            known[key.user_id, key.namespace, digest] = rows[: LAYOUT.tokens(length)]
    return known


SHADOWS = shadows()
EXAMPLES = int(os.environ.get("RELAYGR_TEST_CACHE_SEQUENCES", "20"))
"""Sequences of operations under each policy; others each time."""


@dataclass(slots=True)
class Taken:
    """Revoked handles and fills, which the device may use until it has passed `event`."""

    event: Later
    handles: list[Held]
    fills: list[tuple[PrefixKey, Fill]]


@dataclass(slots=True)
class Run:
    """Handles, fills, leases and waiters of the test."""

    handles: list[Held] = field(default_factory=list)
    leaked: list[Held] = field(default_factory=list)
    fills: list[tuple[PrefixKey, Fill]] = field(default_factory=list)
    leaked_fills: list[tuple[PrefixKey, Fill]] = field(default_factory=list)
    waiters: list[Waiter] = field(default_factory=list)
    taken: list[Taken] = field(default_factory=list)
    leases: dict[tuple[str, str], tuple[PrefixKey, int, int]] = field(default_factory=dict)


class CacheMachine(RuleBasedStateMachine):
    policy = PolicyName.LRU

    @initialize(hbm_pages=st.integers(10, 40), dram_pages=st.integers(0, 40), max_jobs=st.integers(1, 6))
    def start(self, hbm_pages: int, dram_pages: int, max_jobs: int) -> None:
        self.world = CacheWorld(
            hbm_pages,
            dram_pages,
            TierPolicies(self.policy, self.policy),
            limits=CopyLimits(max_in_flight=2, max_jobs=max_jobs, max_bytes=64 * 1024),
            spill_gate=SpillGate(0.5, 2.0, weight=0.5),
            layer_wise=True,
            longest_hold_us=3 * VISIT_US,
        )
        self.cache = self.world.cache
        self.run = Run()
        self.now_us = 0
        self.only_model: bytes | None = None
        self.admin = CacheAdmin(
            "worker-00", self.cache, lambda: ServingModel("model-1", _MODELS[0]), ManualClock(VISIT_US)
        )

    def tick(self) -> int:
        self.now_us += 1
        return self.now_us

    @rule(visits=st.floats(0.1, 3))
    def time_passes(self, visits: float) -> None:
        self.now_us += int(visits * VISIT_US)

    def wait_on(self, pending: PendingPrefix, raises: bool = False) -> None:
        waiter = Waiter(pending=pending)
        self.run.waiters.append(waiter)

        def tell(_: PendingPrefix) -> None:
            waiter.told += 1
            if raises:
                raise RuntimeError("a waiter that fails")

        pending.add_done_callback(tell)

    # Operations.

    @rule(key=keys)
    def peek(self, key: PrefixKey) -> None:
        before = self.cache.stats()
        self.cache.peek(key)
        assert self.cache.stats() == before

    @rule(
        key=keys,
        join=st.booleans(),
        purpose=st.sampled_from(Purpose),
        missing=st.none() | st.integers(0, 200),
        raises=st.booleans(),
    )
    def acquire(self, key: PrefixKey, join: bool, purpose: Purpose, missing: int | None, raises: bool = False) -> None:
        """`missing`: at most so many behaviours may be missing of a reload under way; None: it is no hit."""
        arriving = None if missing is None else key.length - missing
        found = self.cache.acquire(key, self.tick(), join, purpose, arriving)
        if self.only_model not in (None, key.namespace):
            assert isinstance(found, Miss)
        if isinstance(found, Hit):
            assert found.handle.complete == (found.handle.behaviours == key.length)
            if found.handle.arrival is not None:
                assert arriving is not None
                assert found.handle.behaviours >= arriving
            self.run.handles.append(Held(key, found.handle))
        elif isinstance(found, PendingPrefix):
            assert join
            self.wait_on(found, raises)

    @rule(key=keys, purpose=st.sampled_from(Purpose))
    def reserve(self, key: PrefixKey, purpose: Purpose) -> None:
        self.take(key, self.cache.reserve(key, self.tick(), purpose))

    @precondition(lambda self: self.run.handles)
    @rule(pick=picks, key=keys)
    def extend(self, pick: int, key: PrefixKey) -> None:
        held = self.run.handles[pick % len(self.run.handles)]
        if held.handle.is_held:
            self.take(key, self.cache.extend(held.handle, key, self.tick()))

    def take(self, key: PrefixKey, answer: object) -> None:
        if isinstance(answer, Fill):
            self.world.begin(answer)
            self.run.fills.append((key, answer))
        elif isinstance(answer, PendingPrefix):
            self.wait_on(answer)

    @precondition(lambda self: self.run.fills)
    @rule(pick=picks, part=st.floats(0, 1))
    def compute_a_chunk(self, pick: int, part: float) -> None:
        """Also computes prefixes that were invalidated: others may not see them."""
        key, fill = self.run.fills[pick % len(self.run.fills)]
        if not fill.work.revoked:
            self.world.write(fill, key, fill.filled_tokens + int(part * (fill.tokens - fill.filled_tokens)))

    @precondition(lambda self: any(taken.fills for taken in self.run.taken))
    @rule(pick=picks)
    def the_device_writes_to_what_was_taken(self, pick: int) -> None:
        fills = [fill for taken in self.run.taken for _, fill in taken.fills]
        self.world.begin(fills[pick % len(fills)])

    @precondition(lambda self: self.run.fills)
    @rule(pick=picks)
    def publish(self, pick: int) -> None:
        key, fill = self.run.fills.pop(pick % len(self.run.fills))
        if not fill.work.revoked:
            self.world.write(fill, key, fill.tokens)
        fill.progress(fill.tokens)
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
    def lose_a_handle(self, pick: int) -> None:
        self.run.leaked.append(self.run.handles.pop(pick % len(self.run.handles)))

    @precondition(lambda self: self.run.fills)
    @rule(pick=picks)
    def lose_a_fill(self, pick: int) -> None:
        self.run.leaked_fills.append(self.run.fills.pop(pick % len(self.run.fills)))

    @rule(after_the_device=st.booleans())
    def take_what_was_held_too_long(self, after_the_device: bool) -> None:
        event = Later() if after_the_device else None
        handles = [each for each in (*self.run.handles, *self.run.leaked) if each.handle.is_held]
        fills = [each for each in (*self.run.fills, *self.run.leaked_fills) if not each[1].work.revoked]
        taken = self.cache.revoke_overdue(self.tick(), event)
        handles = [held for held in handles if not held.handle.is_held]
        fills = [each for each in fills if each[1].work.revoked]
        assert taken == len(handles) + len(fills)
        assert not any(fill.is_current for _, fill in fills)
        self.forget_lost_leases()
        if event is not None:
            self.run.taken.append(Taken(event, handles, fills))

    @precondition(lambda self: self.run.taken)
    @rule()
    def the_device_passes_what_was_taken(self) -> None:
        self.run.taken.pop(0).event.complete()

    @rule(key=keys, request=st.integers(0, 5), lasts_us=st.integers(1, 4 * VISIT_US))
    def lease(self, key: PrefixKey, request: int, lasts_us: int) -> None:
        until_us = self.tick() + lasts_us
        ready, coming = self.cache.peek(key).hbm_behaviours, self.cache.ledger.hbm.index.find_work(key)
        if self.cache.lease(key, f"r{request}", until_us):
            # The lease protects the coming prefix if that is longer, and then not the present one.
            held = 0 if coming is not None and coming.behaviours > ready else ready
            self.run.leases[key.user_id, f"r{request}"] = (key, held, until_us)

    @rule(key=keys, request=st.integers(0, 5))
    def end_lease(self, key: PrefixKey, request: int) -> None:
        self.cache.end_lease(key.user_id, f"r{request}")
        self.run.leases.pop((key.user_id, f"r{request}"), None)

    @rule()
    def expire_leases(self) -> None:
        self.cache.expire_leases(self.tick())
        self.run.leases = {name: lease for name, lease in self.run.leases.items() if lease[2] > self.now_us}

    @rule(key=keys, deadline_us=st.integers(0, 50), saved_us=st.none() | st.floats(0, 1))
    def reload(self, key: PrefixKey, deadline_us: int, saved_us: float | None) -> None:
        answer = self.cache.transfers.start_reload(key, deadline_us, self.tick(), saved_us)
        if isinstance(answer, PendingPrefix):
            self.wait_on(answer)

    @rule(key=keys)
    def spill_by_key(self, key: PrefixKey) -> None:
        assert isinstance(self.cache.transfers.spill(key), SpillOutcome)

    @precondition(lambda self: self.run.handles)
    @rule(pick=picks)
    def spill_by_handle(self, pick: int) -> None:
        assert isinstance(
            self.cache.transfers.spill(self.run.handles[pick % len(self.run.handles)].handle), SpillOutcome
        )

    @rule(refuses=st.booleans())
    def the_copy_queue_refuses(self, refuses: bool) -> None:
        self.world.mover.refuses = refuses

    @rule()
    def start_a_copy(self) -> None:
        self.world.mover.start()
        assert self.world.mover.under_way <= 2

    @precondition(lambda self: self.world.mover.under_way)
    @rule(index=st.integers(0, 1))
    def a_first_layer_arrives(self, index: int) -> None:
        self.world.mover.arrive(index % self.world.mover.under_way)

    @rule()
    def the_mover_ends_all_it_has(self) -> None:
        """Copies under way succeed and those in the queue fail, as at the end of a worker."""
        self.world.mover.close()
        self.forget_lost_leases()

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
    def an_operator_looks(self, key: PrefixKey) -> None:
        tiers = self.cache.ledger.tiers
        report = decode_report(CacheReport, self.admin.answer(encode_request(Show())))
        assert [each.pages.entries for each in report.tiers] == [len(tier.index) for tier in tiers]
        shown = decode_report(UserReport, self.admin.answer(encode_request(ShowUser(user_id=key.user_id))))
        assert len(shown.entries) == sum(len(list(tier.index.of_user(key.user_id))) for tier in tiers)

    # Mostly the first model, to which most keys belong.
    @rule(model=st.sampled_from((_MODELS[0],) * 4 + (_MODELS[1],)), frees=st.booleans())
    def another_model_serves(self, model: bytes, frees: bool) -> None:
        self.only_model = model
        if not frees:
            self.cache.admit_only(model)
            return
        self.cache.keep_only(model)
        self.run.leases = {name: lease for name, lease in self.run.leases.items() if lease[0].namespace == model}
        assert all(self.cache.peek(other) == _NOTHING for other in _KEYS if other.namespace != model)

    @rule(key=keys, by_question=st.booleans())
    def demote(self, key: PrefixKey, by_question: bool) -> None:
        self.cache.demote((lambda user_id: user_id == key.user_id) if by_question else [key.user_id])

    # Sequences of operations on one prefix, which random single operations would rarely form.

    @rule(key=keys)
    def store(self, key: PrefixKey) -> None:
        answer = self.cache.reserve(key, self.tick())
        if isinstance(answer, Fill):
            self.world.begin(answer)
            self.world.write(answer, key, answer.tokens)
            handle = answer.publish(self.tick())
            assert handle is not None
            self.cache.release(handle)

    @rule(key=keys, request=st.integers(0, 5))
    def store_for_a_request(self, key: PrefixKey, request: int) -> None:
        self.store(key)
        self.lease(key, request, 4 * VISIT_US)

    @rule(user=st.sampled_from(["ann", "bob"]), length=st.sampled_from([100, 130, 190]), request=st.integers(0, 5))
    def lease_while_a_changed_history_is_computed(self, user: str, length: int, request: int) -> None:
        """The computation would remove the end of the leased prefix."""
        key = make_key(user, length, None)
        self.store(key)
        before = len(self.run.fills)
        self.reserve(make_key(user, length, 70), Purpose.PRE_INFER)
        self.lease(key, request, 4 * VISIT_US)
        if len(self.run.fills) > before:
            self.publish(before)

    @rule(key=keys)
    def store_and_crowd_out(self, key: PrefixKey) -> None:
        self.store(key)
        self.crowd_out()

    @rule(key=keys, longer=keys, after_the_device=st.booleans())
    def lose_a_computation_for_long(self, key: PrefixKey, longer: PrefixKey, after_the_device: bool) -> None:
        """Leaks a fill, mostly an append. Another begins in its place while the device may still write."""
        self.store(key)
        before = len(self.run.fills)
        self.reserve(longer, Purpose.PRE_INFER)
        self.run.leaked_fills += self.run.fills[before:]
        del self.run.fills[before:]
        self.time_passes(3)
        self.take_what_was_held_too_long(after_the_device)
        self.store(longer)

    @rule(key=keys)
    def spill_and_wait(self, key: PrefixKey) -> None:
        self.cache.transfers.spill(key)
        self.world.mover.run()

    def leave_in_dram(self, key: PrefixKey) -> None:
        """Spills the prefix, and evicts it from HBM unless it is held."""
        self.store(key)
        self.spill_and_wait(key)
        self.crowd_out()

    @rule(key=keys, other=keys)
    def reload_beside_another_and_read(self, key: PrefixKey, other: PrefixKey) -> None:
        """The other prefix may be a shorter or longer history of the same user, on which the reload then builds."""
        self.leave_in_dram(key)
        self.store(other)
        self.reload(key, self.now_us, None)
        self.world.mover.run()
        self.acquire(key, True, Purpose.RANKING, None)

    @rule(key=keys, copied=st.booleans(), taken_away=st.booleans())
    def read_while_it_arrives(self, key: PrefixKey, copied: bool, taken_away: bool) -> None:
        self.leave_in_dram(key)
        self.reload(key, self.now_us, None)
        if self.world.mover.start():
            latest = self.world.mover.under_way - 1
            self.world.mover.arrive(latest)
            self.acquire(key, True, Purpose.RANKING, 0)
            if taken_away:
                self.take_away("user", key)
            self.end_a_copy(copied, latest)

    @rule()
    def crowd_out(self) -> None:
        """Fills HBM with another user's prefix, and invalidates that prefix."""
        stats = self.cache.stats().hbm
        tokens = (stats.free + stats.evictable) * PAGE_TOKENS
        model = self.only_model or _MODELS[0]
        if tokens > LAYOUT.contextual_tokens:
            self.store(make_key("crowd", tokens - LAYOUT.contextual_tokens, model=model))
            self.cache.invalidate_user("crowd")

    def forget_lost_leases(self) -> None:
        """A lease on work that was discarded protects nothing, though the key may match another entry."""
        held = self.cache.stats().leases
        if held < len(self.run.leases):
            self.run.leases.clear()
            for user_id, request in itertools.product({key.user_id for key in _KEYS}, range(6)):
                self.cache.end_lease(user_id, f"r{request}")

    # Invariants.

    @invariant()
    def books_add_up(self) -> None:
        if hasattr(self, "cache"):
            check_invariants(self.cache)

    @invariant()
    def no_reader_sees_another_prefix(self) -> None:
        if hasattr(self, "cache"):
            for held in (*self.run.handles, *self.run.leaked):
                arrival = held.handle.arrival
                if held.handle.is_held and not (arrival is not None and arrival.failed):
                    self.world.check_reads(held.handle, held.key)
            for held in (held for taken in self.run.taken for held in taken.handles):
                if held.handle.arrival is None:
                    self.world.check_reads(held.handle, held.key)

    @invariant()
    def every_page_is_in_one_state(self) -> None:
        if hasattr(self, "cache"):
            stats = self.cache.stats()
            for tier in (stats.hbm, stats.dram):
                parts = [getattr(tier, held) for held in HOLDINGS]
                assert min(parts) >= 0
                assert sum(parts) == tier.capacity

    @invariant()
    def no_hit_would_show_another_prefix(self) -> None:
        if hasattr(self, "cache"):
            for tier in self.cache.ledger.tiers:
                rows = self.world.arenas[tier.tier]
                for entry in tier.index.all():
                    if entry.is_visible:
                        shadow = SHADOWS[entry.key.user_id, entry.key.namespace, entry.key.chain.digest]
                        assert entry.tokens == shadow.size
                        assert np.array_equal(rows[entry.pages].reshape(-1)[: shadow.size], shadow)

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
        for taken in self.run.taken:
            taken.event.complete()
        self.cache.revoke_overdue(self.now_us + 10 * VISIT_US)
        self.cache.close()
        check_invariants(self.cache)
        stats = self.cache.stats()
        assert all(tier.free == tier.capacity for tier in (stats.hbm, stats.dram))
        assert all(waiter.told == 1 for waiter in self.run.waiters)


# Hypothesis shortens a failing sequence before it reports it.
@pytest.mark.parametrize("policy", PolicyName)
def test_random_operations_keep_every_invariant(policy: PolicyName) -> None:
    machine = type("CacheMachineOfPolicy", (CacheMachine,), {"policy": policy})
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=EXAMPLES, stateful_step_count=60, deadline=None, suppress_health_check=list(HealthCheck)
        ),
    )
