"""What a ranking request waits for before it is computed for: its history's version, or a prefix that is under way.

It waits as long as full inference would still end in time, and no longer. When that time is over, or when what it
waited for has come, failed or been discarded, it is looked up or planned anew.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Protocol

from relaygr.schemas.messages import Path, PrefixSource
from relaygr.worker.cache import Handle, Hit, PendingKind, PendingPrefix, Purpose
from relaygr.worker.executor.context import Shared
from relaygr.worker.executor.work import RankingWork, ResolvedPrefix


class Waiters(Protocol):
    """What a request does next (`relaygr.worker.executor.requests`)."""

    def look_up(self, work: RankingWork) -> None: ...
    def plan(self, work: RankingWork, span: ResolvedPrefix, handle: Handle | None, now_us: int) -> None: ...
    def rank_on_handle(self, work: RankingWork, handle: Handle, path: Path) -> None: ...
    def guarded(self, work: RankingWork, step: Callable[[RankingWork], None]) -> None: ...


class Waiting:
    """Belongs to the device thread."""

    def __init__(self, shared: Shared, requests: Waiters) -> None:
        self._shared = shared
        self._requests = requests

    def for_history(self, work: RankingWork) -> bool:
        """Waits for the version asked for; False if there is no time, or no place, to wait."""
        tokens = self._shared.spans.expected_tokens(work.request.history_version)
        needed_us = self._shared.full_us(tokens, work.scored_tokens) + self._shared.chunk_us
        again = partial(self._requests.look_up, work)
        return self._shared.park(work.request.user_id, work.answer_by_us - int(needed_us), again, again)

    def for_prefix(self, work: RankingWork, pending: PendingPrefix) -> None:
        """Waits at most until full inference would still end in time, though another piece of work runs first."""
        assert work.span is not None
        if pending.kind is PendingKind.LOAD:
            work.path, work.prefix_source = Path.DRAM, PrefixSource.DRAM
            work.tokens_cached = self._shared.engine.layout.tokens(pending.behaviours)
        else:
            work.path, work.prefix_source = Path.PENDING, PrefixSource.COMPUTED
        started_us = self._shared.now_us()
        full_us = self._shared.full_us(work.span.tokens, work.scored_tokens) + self._shared.chunk_us
        waits = True  # The first of the three below that has its turn ends it.

        def arrived() -> None:
            nonlocal waits
            if waits:
                waits = False
                if pending.kind is PendingKind.LOAD:
                    work.reload_us += self._shared.now_us() - started_us
                self._after(work)

        def begun() -> None:
            nonlocal waits
            handle = self._arriving(work) if waits else None
            if handle is not None:
                waits = False
                work.reload_us += self._shared.now_us() - started_us
                self._requests.rank_on_handle(work, handle, Path.DRAM)

        def overdue() -> None:
            nonlocal waits
            if waits:
                waits = False
                self._requests.guarded(work, self._compute_instead)

        pending.needed_by(work.deadline_us)
        if pending.arrival is not None:
            pending.arrival.add_begun_callback(lambda: self._shared.post(begun))
        pending.add_done_callback(lambda _: self._shared.post(arrived))
        spare_us = self._shared.time_left_us(work, started_us) - int(full_us)
        self._shared.timers.at(started_us + max(0, spare_us), overdue)

    def _arriving(self, work: RankingWork) -> Handle | None:
        """The request's whole prefix, if its first layers are there; else it goes on waiting."""
        assert work.span is not None
        if not self._shared.is_current(work.span):
            return None
        now_us = self._shared.now_us()
        found = self._shared.cache.acquire(work.span.key, now_us, purpose=Purpose.AGAIN, arriving=True)
        if isinstance(found, Hit) and not found.handle.complete:
            self._shared.cache.release(found.handle)
            return None
        return found.handle if isinstance(found, Hit) else None

    def _compute_instead(self, work: RankingWork) -> None:
        assert work.span is not None
        if not self._shared.is_current(work.span):
            return self._requests.look_up(work)
        return self._requests.plan(work, work.span, None, self._shared.now_us())

    def _after(self, work: RankingWork) -> None:
        waited_for = work.path
        self._requests.look_up(work)
        if work.path is Path.HBM:
            work.path = waited_for
