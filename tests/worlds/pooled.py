"""Workers that share a pool: executors over real engines on the CPU, each with its own tiers."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import ClassVar

from relaygr.schemas.messages import LatencyCoefficients
from relaygr.worker.kv import DramGeometry
from relaygr.worker.pool.deletions import Deletions
from relaygr.worker.pool.segments import Segments
from relaygr.worker.pool.stores.contract import Memory, Store
from relaygr.worker.pool.tier import SETTLE_US, PoolTier
from tests.waiting import until
from tests.worlds.pool import Mooncake, TwinStore
from tests.worlds.real_executor import RealExecutorWorld

SLOW_DEVICE = LatencyCoefficients(0, 100, 0, b0=0, b1=100, b2=0, c0=1, c1=0, c2=0, d0=100, d1=0)
"""On this device fetching pays: a prefix of 200 tokens takes 20 ms."""
SECRET = b"sixteen bytes at least"


class PooledWorld(RealExecutorWorld):
    """A worker with a pool. Its requests and jobs run on a clock of the test, the store on that of the machine."""

    opened: ClassVar[list[PooledWorld]] = []

    def __init__(
        self,
        store: TwinStore | Mooncake,
        folder: Path,
        kind: str = "plain",
        dram_pages: int = 64,
        *,
        connect: Callable[[Sequence[Memory]], Store] | None = None,
        **settings,
    ) -> None:
        """With `connect`, the test waits for the connection."""
        self.owned: Callable[[str], bool] = lambda _user: True

        def pool(world: RealExecutorWorld, guard) -> PoolTier:
            engine = world.engine
            return PoolTier(
                connect or store.open,
                Segments("relaygr", SECRET, DramGeometry(engine.geometry), engine.layout),
                world.cache,
                world.built.dram_arena.numpy(),
                Deletions(folder / "deletions"),
                world.corrector,
                world.clock,
                guard=guard,
                owns=lambda user: self.owned(user),
                visits=2,
                bytes_per_s=1 << 30,
            )

        super().__init__(kind, dram_pages=dram_pages, latency=SLOW_DEVICE, pool=pool, **settings)
        self.opened.append(self)
        self.pool.start()
        if connect is None:
            self.until(lambda: self.pool._store is not None)

    def close(self) -> None:
        """Ends the threads, as a worker does."""
        self.pool.close()
        self.cache.close()
        self.opened.remove(self)

    @classmethod
    def close_all(cls) -> None:
        for world in list(cls.opened):
            world.close()

    def until(self, holds: Callable[[], bool]) -> None:
        """Runs the executor until the condition holds."""

        def step() -> None:
            self.run()
            self.wake()

        until(holds, "the worker has come so far", meanwhile=step)
        self.run()

    def wake(self) -> None:
        """The clock of the test has advanced."""
        with self.pool._changed:
            self.pool._changed.notify_all()

    def settle(self) -> None:
        """Runs until nothing is copied, fetched or due to be written."""
        self.clock.advance_us(2 * SETTLE_US)
        self.until(lambda: not self.pool._fetches and not self.pool._writes and self.cache.stats().dram.in_flight == 0)
        self.until(lambda: self.cache.stats().dram.pinned == 0)

    def visit(self, user_id: str, version, request_id: str):
        """Ranks, and waits for what happens behind it. Returns the request."""
        self.submit(user_id, version, request_id)
        self.until(lambda: request_id in self.outbox.answered)
        time.sleep(0.02)
        self.settle()
        return self.outbox.answered[request_id][0]
