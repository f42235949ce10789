"""The pool as a tier of a worker: scores stay exact, and no request is late, whatever the store does."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from relaygr.schemas.messages import Path as RankedOn
from relaygr.worker.cache import PrefixKey
from relaygr.worker.executor.work import JobOutcome
from relaygr.worker.pool import deletions, metrics, segments, tier
from relaygr.worker.pool.stores.contract import Memory, ObjectKey, Store, StoreDownError
from tests.worlds import real_executor
from tests.worlds.invariants import check_invariants
from tests.worlds.pool import TwinStore
from tests.worlds.pooled import PooledWorld
from tests.worlds.real_executor import behaviours_of

LENGTH = 200


@pytest.fixture(autouse=True)
def small_objects(monkeypatch: pytest.MonkeyPatch) -> None:
    """Objects of one block of the digest chain, since the histories of these tests are short."""
    monkeypatch.setattr(segments, "_LEAST_BYTES", 1)


@pytest.fixture(autouse=True)
def close_worlds() -> Iterator[None]:
    yield
    PooledWorld.close_all()


@pytest.fixture
def store() -> TwinStore:
    return TwinStore()


def writer(store: TwinStore, folder: Path, kind: str = "plain", length: int = LENGTH, **settings) -> PooledWorld:
    """A worker that has written ann's prefix."""
    world = PooledWorld(store, folder / "writer", kind, **settings)
    version = world.put("ann", length)
    for visit in range(2):
        world.visit("ann", version, f"w{visit}")
    assert store.objects
    return world


def fetched(outcome: str = "loaded") -> float:
    return metrics.FETCHES.labels(outcome)._value.get()


def assert_job_then_rank_is_exact(world: PooledWorld, length: int = LENGTH, outcome: str | None = "loaded") -> RankedOn:
    """A job and its request, on a worker that has nothing of ann but her history. Returns the request's path."""
    before = fetched(outcome) if outcome else 0
    version = world.put("ann", length)
    world.queue_job("ann", version, "r")
    world.until(lambda: bool(world.outbox.jobs))
    if outcome:
        assert fetched(outcome) == before + 1
    work = world.rank("ann", version, "r")
    world.assert_exact(work, behaviours_of(length))
    check_invariants(world.cache)
    return work.path


KINDS = ("plain", "interleaved actions", "window", "relative positions", "contextual features")


@pytest.mark.parametrize("kind", KINDS)
def test_a_prefix_written_by_one_worker_is_ranked_on_by_another(
    store: TwinStore, tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(real_executor.KINDS, "contextual features", {"contextual_features": real_executor.FEATURES})
    writer(store, tmp_path, kind, length=140)
    assert_job_then_rank_is_exact(PooledWorld(store, tmp_path / "b", kind), length=140)


@pytest.mark.parametrize("kind", ["time encoding", "positions from the end"])
def test_prefixes_that_no_other_impression_can_use_are_neither_written_nor_asked_for(
    store: TwinStore, tmp_path: Path, kind: str
) -> None:
    world = PooledWorld(store, tmp_path, kind)
    calls, version = len(store.calls), world.put("ann", 140)
    for visit in range(3):
        world.visit("ann", version, f"r{visit}")
    assert len(store.calls) == calls


def test_a_job_fetches_the_prefix_and_computes_only_the_tail(store: TwinStore, tmp_path: Path) -> None:
    writer(store, tmp_path)
    world = PooledWorld(store, tmp_path / "b", longest_tail=0)
    version = world.put("ann", LENGTH)
    world.queue_job("ann", version, "r")
    world.until(lambda: bool(world.outbox.jobs))
    presence = world.cache.peek(key_of(world))
    assert presence.dram_behaviours == 192 and presence.hbm_behaviours == LENGTH
    assert world.rank("ann", version, "r").path is RankedOn.HBM


def key_of(world: PooledWorld) -> PrefixKey:
    (entry,) = world.cache.ledger.hbm.index.of_user("ann")
    return entry.key


def test_a_request_without_a_job_fetches_in_its_spare_time(store: TwinStore, tmp_path: Path) -> None:
    writer(store, tmp_path)
    world = PooledWorld(store, tmp_path / "b")
    version = world.put("ann", LENGTH)
    before = fetched()
    work = world.visit("ann", version, "r")
    assert fetched() == before + 1 and work.path is RankedOn.DRAM
    world.assert_exact(work, behaviours_of(LENGTH))


def test_a_history_that_grew_matches_up_to_its_last_whole_object(store: TwinStore, tmp_path: Path) -> None:
    writer(store, tmp_path, length=150)
    assert_job_then_rank_is_exact(PooledWorld(store, tmp_path / "b"), length=199)


def test_another_history_and_another_model_are_not_matched(store: TwinStore, tmp_path: Path) -> None:
    writer(store, tmp_path)
    world = PooledWorld(store, tmp_path / "b")
    before = fetched("absent")
    version = world.put("ann", LENGTH, seed=1)
    world.queue_job("ann", version, "r")
    world.until(lambda: bool(world.outbox.jobs))
    assert fetched("absent") == before + 1
    work = world.rank("ann", version, "r")
    world.assert_exact(work, behaviours_of(LENGTH, seed=1))
    other = PooledWorld(store, tmp_path / "c", "window")
    assert_job_then_rank_is_exact(other, outcome="absent")


def test_an_append_writes_new_objects_and_leaves_the_old_ones(store: TwinStore, tmp_path: Path) -> None:
    world = writer(store, tmp_path, length=130)
    before = dict(store.objects)
    version = world.put("ann", 195)
    world.visit("ann", version, "more")
    assert len(store.objects) == 3 and len(before) == 2
    assert {key: store.objects[key] for key in before} == before


def test_a_prefix_is_written_from_the_second_visit_on(store: TwinStore, tmp_path: Path) -> None:
    world = PooledWorld(store, tmp_path)
    version = world.put("ann", LENGTH)
    world.visit("ann", version, "1")
    assert not store.objects
    world.visit("ann", version, "2")
    assert len(store.objects) == 3
    check_invariants(world.cache)


def test_rankings_within_a_second_are_one_visit(store: TwinStore, tmp_path: Path) -> None:
    world = PooledWorld(store, tmp_path)
    version = world.put("ann", LENGTH)
    for request in range(5):
        world.submit("ann", version, f"r{request}")
    world.until(lambda: len(world.outbox.answered) == 5)
    world.settle()
    assert not store.objects


def test_a_user_who_comes_again_and_again_is_written_too(store: TwinStore, tmp_path: Path) -> None:
    world = PooledWorld(store, tmp_path)
    version = world.put("ann", LENGTH)
    world.visit("ann", version, "1")
    world.clock.advance_us(2_000_000)
    for request in range(8):
        world.submit("ann", version, f"r{request}")
        world.until(lambda request=request: f"r{request}" in world.outbox.answered)
        world.clock.advance_us(tier.SETTLE_US // 2)
    world.until(lambda: len(store.objects) == 3)


def test_nothing_is_written_or_fetched_where_computing_is_faster(store: TwinStore, tmp_path: Path) -> None:
    world = writer(store, tmp_path)
    world.pool._link.us_per_byte = world.pool._link.fastest_us_per_byte = 1e6
    version = world.put("bob", LENGTH)
    calls = len(store.calls)
    for visit in range(3):
        world.visit("bob", version, f"b{visit}")
    assert len(store.calls) == calls


def test_a_link_that_is_slow_for_now_is_not_read_but_written_to(store: TwinStore, tmp_path: Path) -> None:
    """Another worker reads it later: a user who came once while the machine was busy had nothing in the pool."""
    world = writer(store, tmp_path)
    written, calls = len(store.objects), len(store.calls)
    world.pool._link.us_per_byte = 1e6
    version = world.put("bob", LENGTH)
    for visit in range(2):
        world.visit("bob", version, f"b{visit}")
    assert len(store.objects) > written and "get" not in store.calls[calls:]


def test_a_link_that_was_slow_is_measured_again(store: TwinStore, tmp_path: Path) -> None:
    world = PooledWorld(store, tmp_path)
    world.pool._link.us_per_byte = 1e6
    world.clock.advance_us(2 * tier._OLD_US)
    world.until(lambda: world.pool._link.us_per_byte < 1)
    assert not store.objects


@pytest.mark.parametrize("where", ["seal", "first page", "last page"])
def test_changed_bytes_are_a_miss_and_the_object_is_removed_once(store: TwinStore, tmp_path: Path, where: str) -> None:
    writer(store, tmp_path)
    key = list(store.objects)[1]
    whole = store.objects[key]
    at = {"seal": 5, "first page": segments.SEAL_BYTES, "last page": len(whole) - 1}[where]
    torn = whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :]
    store.objects[key] = torn
    world = PooledWorld(store, tmp_path / "b")
    assert assert_job_then_rank_is_exact(world, outcome="torn") is RankedOn.HBM
    assert key not in store.objects
    # Damaged again, it is left alone.
    store.objects[key] = torn
    assert world.pool._remove_once(store, key) is None and key in store.objects


def test_bytes_of_another_object_are_a_miss(store: TwinStore, tmp_path: Path) -> None:
    writer(store, tmp_path)
    first, second, _ = list(store.objects)
    store.objects[first] = store.objects[second]
    assert_job_then_rank_is_exact(PooledWorld(store, tmp_path / "b"), outcome="torn")


def test_an_object_of_another_size_is_a_miss_and_removed(store: TwinStore, tmp_path: Path) -> None:
    writer(store, tmp_path)
    key = next(iter(store.objects))
    store.objects[key] = store.objects[key][:-1]
    assert_job_then_rank_is_exact(PooledWorld(store, tmp_path / "b"), outcome="unreadable")
    assert key not in store.objects


def test_objects_after_a_gap_are_not_read(store: TwinStore, tmp_path: Path) -> None:
    writer(store, tmp_path)
    del store.objects[list(store.objects)[1]]
    assert_job_then_rank_is_exact(PooledWorld(store, tmp_path / "b"))
    del store.objects[next(iter(store.objects))]
    assert_job_then_rank_is_exact(PooledWorld(store, tmp_path / "c"), outcome="absent")


def test_a_full_store_costs_nothing_but_its_objects(store: TwinStore, tmp_path: Path) -> None:
    store.capacity = 40_000
    world = PooledWorld(store, tmp_path)
    version = world.put("ann", LENGTH)
    for visit in range(3):
        world.assert_exact(world.visit("ann", version, f"r{visit}"), behaviours_of(LENGTH))
    assert sum(map(len, store.objects.values())) <= 40_000
    check_invariants(world.cache)


def test_a_store_that_is_down_is_not_asked_until_it_answers(store: TwinStore, tmp_path: Path) -> None:
    writer(store, tmp_path)
    world = PooledWorld(store, tmp_path / "b")
    store.down = True
    assert_job_then_rank_is_exact(world, outcome="failed")
    calls = len(store.calls)
    version = world.put("bob", LENGTH)
    world.assert_exact(world.rank("bob", version, "bob"), behaviours_of(LENGTH))
    assert len(store.calls) == calls and metrics.AWAY._value.get() == 1
    store.down = False
    world.clock.advance_us(int(tier.FIRST_RETRY_S * 1e6))
    world.until(lambda: metrics.AWAY._value.get() == 0)


def test_a_store_that_went_down_is_away_whatever_becomes_of_fetches_that_waited(
    store: TwinStore, tmp_path: Path
) -> None:
    first = writer(store, tmp_path)
    version = first.put("bob", LENGTH)
    for visit in range(2):
        first.visit("bob", version, f"bob{visit}")
    world = PooledWorld(store, tmp_path / "b")
    versions = {user: world.put(user, LENGTH) for user in ("ann", "bob", "cid")}
    with store.hung():
        for user in ("ann", "bob"):
            world.queue_job(user, versions[user], user)
        world.until(lambda: store.waiting == 2)
        world.queue_job("cid", versions["cid"], "cid")
        world.run()
        assert len(world.pool._waiting) == 1
        world.clock.advance_us(200_000)
        store.down = True
        world.pool.forget_user("dan")
        world.until(lambda: metrics.AWAY._value.get() == 1)
        calls = len(store.calls)
    world.until(lambda: not world.pool._fetches)
    world.rank("eve", world.put("eve", LENGTH), "eve")
    assert metrics.AWAY._value.get() == 1 and len(store.calls) == calls


def test_a_fetch_that_hangs_is_given_up_and_keeps_its_pages_until_it_returns(store: TwinStore, tmp_path: Path) -> None:
    writer(store, tmp_path)
    world = PooledWorld(store, tmp_path / "b")
    version = world.put("ann", LENGTH)
    with store.hung():
        world.queue_job("ann", version, "r")
        world.until(lambda: store.waiting == 1)
        assert not world.outbox.jobs
        in_flight = world.cache.stats().dram.in_flight
        assert in_flight == world.engine.geometry.pages_for(192)
        world.clock.advance_us(200_000)
        work = world.rank("ann", version, "r")
        world.assert_exact(work, behaviours_of(LENGTH))
        assert world.cache.stats().dram.in_flight == in_flight
        check_invariants(world.cache)
    world.settle()
    assert world.cache.stats().dram.in_flight == 0
    check_invariants(world.cache)
    # What arrived late is whole, and serves the next visit.
    assert world.cache.dram_behaviours(key_of(world)) >= 192


def test_bytes_that_arrive_after_a_call_that_failed_change_no_prefix(
    store: TwinStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As with a holder that stops for a minute and goes on. The pages of the fetch are bob's by then."""
    monkeypatch.setattr(store, "remove", lambda _key: False)
    writer(store, tmp_path)
    world = PooledWorld(store, tmp_path / "b", dram_pages=16)
    version, before = world.put("ann", LENGTH), fetched("unreadable")
    with store.late():
        world.queue_job("ann", version, "r")
        world.until(lambda: fetched("unreadable") > before)
        world.until(lambda: bool(world.outbox.jobs))
        world.visit("bob", world.put("bob", LENGTH, seed=1), "bob")
        assert world.cache.ledger.dram.index.of_user("bob")
        dram = world.built.dram_arena.numpy()
        as_written = dram.copy()
    assert (dram == as_written).all()


def test_two_fetches_that_hang_put_the_tier_away_until_one_returns(store: TwinStore, tmp_path: Path) -> None:
    first = writer(store, tmp_path)
    for user in ("bob", "cid"):
        version = first.put(user, LENGTH)
        for visit in range(2):
            first.visit(user, version, f"{user}{visit}")
    world = PooledWorld(store, tmp_path / "b")
    versions = {user: world.put(user, LENGTH) for user in ("ann", "bob", "cid")}
    with store.hung():
        for user in ("ann", "bob"):
            world.queue_job(user, versions[user], f"j{user}")
        world.until(lambda: store.waiting == 2)
        world.clock.advance_us(200_000)
        world.run()
        calls = len(store.calls)
        before_s = time.monotonic()
        work = world.rank("cid", versions["cid"], "cid")
        assert time.monotonic() - before_s < 5 and len(store.calls) == calls
        world.assert_exact(work, behaviours_of(LENGTH))
    world.until(lambda: metrics.AWAY._value.get() == 0)
    world.settle()
    check_invariants(world.cache)


def test_a_late_answer_never_changes_a_prefix_that_was_deleted_meanwhile(store: TwinStore, tmp_path: Path) -> None:
    writer(store, tmp_path)
    world = PooledWorld(store, tmp_path / "b")
    version = world.put("ann", LENGTH)
    with store.hung():
        world.queue_job("ann", version, "r")
        world.until(lambda: store.waiting == 1)
        del world.histories["ann"]
        world.cache.invalidate_user("ann")
        world.pool.forget_user("ann")
        world.executor.post(lambda: world.executor.user_deleted("ann"))
        world.until(lambda: bool(world.outbox.jobs))
    world.settle()
    assert not world.cache.ledger.dram.index.of_user("ann")
    world.until(lambda: not store.objects)
    check_invariants(world.cache)


def test_a_deletion_removes_all_objects_of_the_user_and_no_others(store: TwinStore, tmp_path: Path) -> None:
    world = writer(store, tmp_path)
    version = world.put("bob", LENGTH)
    for visit in range(2):
        world.visit("bob", version, f"b{visit}")
    assert len(store.objects) == 6
    world.cache.invalidate_user("ann")
    world.pool.forget_user("ann")
    world.until(lambda: len(store.objects) == 3)
    work = world.visit("bob", version, "again")
    world.assert_exact(work, behaviours_of(LENGTH))


def test_a_deletion_waits_for_the_store_and_outlives_the_worker(store: TwinStore, tmp_path: Path) -> None:
    world = writer(store, tmp_path)
    store.down = True
    world.cache.invalidate_user("ann")
    world.pool.forget_user("ann")
    world.pool.close()
    assert len(store.objects) == 3
    store.down = False
    successor = PooledWorld(store, tmp_path / "writer")
    successor.until(lambda: not store.objects)
    # A second pass removes what another process was still writing.
    store.objects[ObjectKey("0a", successor.pool._segments.user_part("ann"), "ff")] = b""
    successor.clock.advance_us(deletions.SECOND_PASS_US)
    successor.until(lambda: not store.objects)
    successor.until(lambda: not list((tmp_path / "writer" / "deletions").iterdir()))


STRAY = [
    "backup (2",
    "{",
    ".*",
    "ffff|.+",
    "0123456789abcdef0123456789abcdeg",
    "0123456789ABCDEF0123456789ABCDEF",
    "a" * 31,
]
"""Names that are no user's: of copies, of editors, of a restored backup. Two of them match every user."""


def test_strange_files_beside_a_deletion_neither_stop_it_nor_delete_other_users(
    store: TwinStore, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    world = writer(store, tmp_path)
    version = world.put("bob", LENGTH)
    for visit in range(2):
        world.visit("bob", version, f"b{visit}")
    assert len(store.objects) == 6
    store.down = True
    world.pool.forget_user("ann")
    world.pool.close()
    store.down = False
    folder = tmp_path / "writer" / "deletions"
    for name in STRAY:
        (folder / name).touch()
    (folder / ("e" * 32)).mkdir()
    (folder / ("d" * 32)).symlink_to(folder / "elsewhere")
    successor = PooledWorld(store, tmp_path / "writer")
    successor.until(lambda: len(store.objects) == 3)
    successor.clock.advance_us(deletions.SECOND_PASS_US)
    successor.until(lambda: not (folder / successor.pool._segments.user_part("ann")).exists())
    # The link is measured again, with an object that is soon gone.
    successor.until(lambda: len(store.objects) == 3 and not successor.pool.is_away)
    # They are somebody's: nothing removes them.
    assert {each.name for each in folder.iterdir()} == {*STRAY, "e" * 32, "d" * 32}
    assert "not a deletion in the pool" in capsys.readouterr().err


def test_that_all_users_are_deleted_outlives_the_worker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deletions, "MOST", 1)
    noted = deletions.Deletions(tmp_path)
    for part in ("1" * 32, "2" * 32):
        noted.add(part)
    everything = list(noted.take(0))
    assert len(everything) == 1 and list(deletions.Deletions(tmp_path).take(0)) == everything


def test_a_deletion_whose_file_can_not_be_removed_ends_all_the_same(tmp_path: Path) -> None:
    noted = deletions.Deletions(tmp_path)
    noted.add("5" * 32)
    (tmp_path / ("5" * 32)).unlink()
    (tmp_path / ("5" * 32)).mkdir()
    for now_us in (0, deletions.SECOND_PASS_US):
        noted.passed(noted.take(now_us), now_us)
    assert noted.take(2**61) == {}


def test_a_put_that_ends_after_the_deletion_removes_its_own_object(store: TwinStore, tmp_path: Path) -> None:
    world = PooledWorld(store, tmp_path)
    version = world.put("ann", LENGTH)
    world.visit("ann", version, "1")
    with store.hung():
        world.submit("ann", version, "2")
        world.until(lambda: "2" in world.outbox.answered)
        world.clock.advance_us(2 * tier.SETTLE_US)
        world.until(lambda: store.waiting == 1)
        world.cache.invalidate_user("ann")
    world.until(lambda: metrics.WRITES.labels("withdrawn")._value.get() > 0)
    assert not store.objects
    check_invariants(world.cache)


def test_a_worker_that_no_longer_owns_the_user_writes_nothing(store: TwinStore, tmp_path: Path) -> None:
    world = PooledWorld(store, tmp_path)
    world.owned = lambda _user: False
    version = world.put("ann", LENGTH)
    for visit in range(3):
        world.visit("ann", version, f"r{visit}")
    assert not store.objects


def test_pages_of_a_torn_arena_are_not_written_under_a_right_seal(store: TwinStore, tmp_path: Path) -> None:
    world = PooledWorld(store, tmp_path, shared=tmp_path / "arena")
    version = world.put("ann", LENGTH)
    world.visit("ann", version, "1")
    (entry,) = world.cache.ledger.dram.index.of_user("ann")
    page = int(entry.pages[0])
    world.close()
    world.lock.release()
    world.built.dram_arena[page, 3] ^= 1
    successor = PooledWorld(store, tmp_path / "s", shared=tmp_path / "arena")
    (entry,) = successor.cache.ledger.dram.index.of_user("ann")
    successor.pool.visited(entry.key, 0)
    successor.clock.advance_us(2_000_000)
    successor.pool.visited(entry.key, 2_000_000)
    successor.settle()
    assert not store.objects


def test_the_jobs_outcome_says_that_the_prefix_was_not_computed(store: TwinStore, tmp_path: Path) -> None:
    writer(store, tmp_path, length=192)
    world = PooledWorld(store, tmp_path / "b")
    version = world.put("ann", 192)
    world.queue_job("ann", version, "r")
    world.until(lambda: bool(world.outbox.jobs))
    assert world.outbox.jobs == [JobOutcome.RELOADED]


def test_more_deletions_than_the_bound_delete_everything(
    store: TwinStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(deletions, "MOST", 3)
    world = writer(store, tmp_path)
    store.down = True
    for user in range(4):
        world.pool.forget_user(f"{user}")
    assert [each.name for each in (tmp_path / "writer" / "deletions").iterdir()] == [deletions.EVERYONE]
    world.pool.close()
    store.down = False
    successor = PooledWorld(store, tmp_path / "writer")
    successor.until(lambda: not store.objects)


def test_a_deletion_that_is_asked_for_again_begins_anew(tmp_path: Path) -> None:
    noted = deletions.Deletions(tmp_path / "deletions")
    noted.add("ann")
    taken = noted.take(0)
    noted.add("ann")
    noted.passed(taken, 0)
    assert list(noted.take(0)) == ["ann"]
    for now_us in (0, deletions.SECOND_PASS_US):
        noted.passed(noted.take(now_us), now_us)
    assert noted.take(2**61) == {} and not list((tmp_path / "deletions").iterdir())


def test_a_deletion_that_two_threads_carry_out_at_once_has_its_second_pass(tmp_path: Path) -> None:
    noted = deletions.Deletions(tmp_path / "deletions")
    noted.add("ann")
    for taken in (noted.take(0), noted.take(0)):
        noted.passed(taken, 0)
    assert list(noted.take(deletions.SECOND_PASS_US)) == ["ann"]


def test_a_request_with_much_time_waits_for_a_hanging_store_only_twice_the_expected_time(
    store: TwinStore, tmp_path: Path
) -> None:
    writer(store, tmp_path)
    world = PooledWorld(store, tmp_path / "b")
    version = world.put("ann", LENGTH)
    began_us = world.clock.monotonic_us()
    with store.hung():
        world.submit("ann", version, "r", budget_us=60_000_000)
        world.until(lambda: store.waiting == 1)
        while "r" not in world.outbox.answered:
            world.clock.advance_us(1_000)
            world.run()
            assert world.clock.monotonic_us() - began_us < 1_000_000
    world.assert_exact(world.outbox.answered["r"][0], behaviours_of(LENGTH))
    assert world.outbox.answered["r"][0].path is RankedOn.FULL


@pytest.mark.parametrize("is_up", [True, False])
def test_a_worker_that_starts_waits_until_the_store_has_answered_or_failed_to_or_the_time_is_over(
    store: TwinStore, tmp_path: Path, is_up: bool
) -> None:
    answers = threading.Event()

    def connect(_memory: Sequence[Memory]) -> Store:
        answers.wait()
        if not is_up:
            raise StoreDownError("the master does not answer")
        return store

    pool = PooledWorld(store, tmp_path, connect=connect).pool
    pool.await_connection(0.05)
    assert pool.is_connecting
    threading.Timer(0.05, answers.set).start()
    began_s = time.monotonic()
    pool.await_connection(60)
    assert not pool.is_connecting and time.monotonic() - began_s < 30


def test_a_warm_up_whose_fetch_hangs_delays_no_request_and_goes_on_afterwards(store: TwinStore, tmp_path: Path) -> None:
    writer(store, tmp_path)
    world = PooledWorld(store, tmp_path / "b", warm_up_users=10)
    versions = {user: world.put(user, LENGTH) for user in ("ann", "bob", "cid")}
    world.executor.begin_warm_up()
    world.executor.offer_warm_ups(["ann", "bob"])
    with store.hung():
        world.until(lambda: store.waiting == 1)
        began_us = world.clock.monotonic_us()
        for user in ("ann", "cid"):
            world.submit(user, versions[user], user, budget_us=200_000)
        while world.outbox.answered.keys() != {"ann", "cid"}:
            world.clock.advance_us(1_000)
            world.run()
            assert world.clock.monotonic_us() - began_us < 200_000
        world.assert_exact(world.outbox.answered["ann"][0], behaviours_of(LENGTH))
    world.until(lambda: world.clock.advance_us(1_000) or world.cache.ledger.hbm.index.of_user("bob"))
    world.settle()
    check_invariants(world.cache)


def test_a_warm_up_reads_no_faster_than_its_share_of_the_link(store: TwinStore, tmp_path: Path) -> None:
    first = writer(store, tmp_path)
    version = first.put("bob", LENGTH, seed=1)
    for visit in range(2):
        first.visit("bob", version, f"b{visit}")
    world = PooledWorld(store, tmp_path / "b", warm_up_users=10)
    world.put("ann", LENGTH)
    world.put("bob", LENGTH, seed=1)
    before = fetched()
    world.executor.begin_warm_up()
    world.executor.offer_warm_ups(["ann", "bob"])
    world.until(lambda: fetched() == before + 1 and not world.pool._fetches)
    size_bytes = world.engine.geometry.pages_for(LENGTH) * world.cache.stats().dram_page_bytes
    world.clock.advance_us(size_bytes * 1_000_000 // int(world.settings.pool.bytes_per_s) - 1)
    for _ in range(10):
        world.run()
    assert not world.pool._fetches and fetched() == before + 1
    world.clock.advance_us(1)
    world.until(lambda: fetched() == before + 2)


def test_a_warm_up_fetches_what_the_pool_has_and_computes_the_rest(store: TwinStore, tmp_path: Path) -> None:
    """So the next owner of a partition has the prefixes of its users before they return."""
    writer(store, tmp_path)
    world = PooledWorld(store, tmp_path / "b", warm_up_users=10)
    # Nobody waits for a warm-up.
    world.pool._link.us_per_byte = 1
    version = world.put("ann", LENGTH)
    world.put("bob", LENGTH, seed=1)
    before = fetched()
    world.executor.begin_warm_up()
    world.executor.offer_warm_ups(["ann", "bob"])

    def warmed(outcome: str) -> float | None:
        world.clock.advance_us(1_000)
        return world.registry.get_sample_value("relaygr_worker_warm_ups_total", {"outcome": outcome})

    world.until(lambda: (warmed("fetched"), warmed("computed")) == (1, 1))
    assert fetched() == before + 1 and len(world.cache.ledger.hbm.index.of_user("bob")) == 1
    work = world.visit("ann", version, "r")
    assert work.path is RankedOn.DRAM
    world.assert_exact(work, behaviours_of(LENGTH))
    check_invariants(world.cache)
