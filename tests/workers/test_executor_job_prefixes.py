"""A request uses the prefix that its own job has resolved, as long as nothing else could come of its own look-up."""

from __future__ import annotations

from typing import cast

import pytest

from relaygr.schemas.messages import Path
from relaygr.worker.executor.impressions import Impressions
from relaygr.worker.executor.work import WORK_BYTES, ResolvedPrefix
from tests.worlds.executor import ExecutorWorld

LENGTH = 400


class _Sized:
    def __init__(self, held_bytes: int) -> None:
        self.held_bytes = held_bytes


def sized(held_bytes: int) -> ResolvedPrefix:
    return cast(ResolvedPrefix, _Sized(held_bytes))


def test_the_newest_are_kept_and_each_is_taken_once() -> None:
    kept, first, second = Impressions(prefixes_bytes=100 + WORK_BYTES), sized(60), sized(50)
    one, two, three, four = (kept.of("u", str(number), 0) for number in range(1, 5))
    other = kept.of("v", "5", 0)
    kept.keep_prefix(one, first)
    kept.keep_prefix(two, second)
    assert kept.take_prefix(one) is None
    assert kept.take_prefix(two) is second
    assert kept.take_prefix(two) is None
    kept.keep_prefix(three, sized(100))
    assert kept.take_prefix(three) is not None
    kept.keep_prefix(four, first)
    kept.keep_prefix(other, second)
    assert kept.take_prefix(four) is None
    assert kept.take_prefix(other) is second


def test_a_user_is_forgotten() -> None:
    kept, other = Impressions(prefixes_bytes=3 * WORK_BYTES), sized(1)
    kept.keep_prefix(kept.of("u", "1", 0), sized(1))
    kept.keep_prefix(kept.of("v", "1", 0), other)
    kept.forget_prefix("u")
    assert kept.take_prefix(kept.of("u", "1", 0)) is None
    assert kept.take_prefix(kept.of("v", "1", 0)) is other


def test_an_impression_that_is_forgotten_keeps_no_prefix() -> None:
    kept = Impressions(capacity=1, prefixes_bytes=WORK_BYTES)
    first = kept.of("u", "1", 0)
    kept.keep_prefix(first, sized(0))
    second = kept.of("v", "2", 0)
    assert first.prefix is None
    kept.keep_prefix(second, sized(0))
    assert kept.take_prefix(second) is not None, "the bytes of the first are free"


class _CountingStore:
    """Counts the histories that are read."""

    def __init__(self, world: ExecutorWorld) -> None:
        self._get, self.reads = world.store.get, 0
        world.store.get = self.get  # type: ignore[method-assign]

    def get(self, user_id: str):  # type: ignore[no-untyped-def]
        self.reads += 1
        return self._get(user_id)


def test_the_request_of_a_job_does_not_read_the_history_again() -> None:
    world = ExecutorWorld()
    version = world.store.put("u", LENGTH)
    reads = _CountingStore(world)
    world.job("u", version, "r")
    world.run()
    work = world.rank("u", version, "r", candidates=7)
    world.run()
    assert (work.path, reads.reads) == (Path.HBM, 1)
    assert work.prefix is not None
    assert (work.prefix.version, work.prefix.scored_tokens, work.prefix.stale) == (version, 7, False)
    again = world.rank("u", version, "later")
    world.run()
    assert (again.path, reads.reads) == (Path.HBM, 2)
    assert again.prefix is not None
    assert again.prefix.key.chain == work.prefix.key.chain


def test_a_job_that_comes_twice_before_and_after_its_request_is_computed_once_and_holds_nothing() -> None:
    """As a share group gives it, or a consumer that starts again."""
    world = ExecutorWorld()
    version = world.store.put("u", LENGTH)
    for _ in range(2):
        world.job("u", version, "r")
    world.run()
    world.job("u", version, "r")
    work = world.rank("u", version, "r")
    world.run()
    world.job("u", version, "r")
    world.run()
    stats = world.cache.stats()
    assert work.path is Path.HBM
    assert (stats.fills.total(), stats.leases, stats.leases_leaked) == (1, 0, 0)


CASES = [
    "unnamed",
    "other version",
    "deleted",
    "other model",
    "features hidden from the job",
    "features hidden from the request",
]


@pytest.mark.parametrize("case", CASES)
def test_the_request_looks_itself_up_where_the_job_may_have_another_prefix(case: str) -> None:
    world = ExecutorWorld()
    version = world.store.put("u", LENGTH)
    shown = world.engine.shown_features
    if case == "features hidden from the job":
        world.engine.shown_features = lambda features, *_: features.copy()  # type: ignore[method-assign]
    world.job("u", None if case == "unnamed" else version, "r")
    world.run()
    asked = version
    if case == "unnamed":
        asked = None
    elif case == "other version":
        asked = world.store.put("u", LENGTH + 10, number=2)
    elif case == "deleted":
        world.executor.user_deleted("u")
        del world.store.histories["u"]
    elif case == "other model":
        world.engine.revision = "model-2"
    elif case == "features hidden from the job":
        world.engine.shown_features = shown  # type: ignore[method-assign]
    else:
        world.engine.shown_features = lambda features, *_: features.copy()  # type: ignore[method-assign]
    reads = _CountingStore(world)
    work = world.rank("u", asked, "r")
    world.run()
    assert reads.reads >= 1
    if case == "deleted":
        assert work.prefix is None or work.prefix.tokens == 0
    else:
        assert work.prefix is not None
        assert len(work.prefix.behaviours) == (LENGTH + 10 if case == "other version" else LENGTH)


def test_a_partition_that_is_read_again_is_told_in_the_result() -> None:
    world = ExecutorWorld()
    version = world.store.put("u", LENGTH)
    world.job("u", version, "r")
    world.run()
    world.store.loading = True
    work = world.rank("u", version, "r")
    world.run()
    assert work.prefix is not None
    assert work.prefix.loading
