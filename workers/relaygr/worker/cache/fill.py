"""A prefix that is computed into pages of the cache."""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType

from relaygr.schemas.messages import PrefixSource
from relaygr.worker.cache.entries import CacheEntry, Handle, WorkInFlight
from relaygr.worker.cache.identity import PrefixKey
from relaygr.worker.cache.ledger import AfterLock, TierLedger
from relaygr.worker.cache.results import PageArray, PageCopy, PendingOutcome


class Fill:
    """Pages to compute a prefix into. The caller ends it once, with `publish` or `abort`.

    `pages` int32 is the whole page table; the rows up to `start_tokens` are filled already. If `copy_page` is set,
    copy that page before computing: others read its rows too. As a context manager it aborts unless published.
    """

    def __init__(
        self, ledger: TierLedger, work: WorkInFlight, handle_of: Callable[[CacheEntry, int, PrefixKey], Handle]
    ) -> None:
        """`handle_of` pins a part of a ready entry, inside a section."""
        self._ledger = ledger
        self._handle_of = handle_of
        self.work = work
        self.behaviours = work.key.length
        self.tokens = work.tokens
        self.start_behaviours = work.start_behaviours
        self.start_tokens = work.start_tokens
        self.filled_tokens = work.start_tokens
        self.pages: PageArray = work.table
        self.copy_page: PageCopy | None = work.copy_page

    @property
    def is_current(self) -> bool:
        """False once the prefix was invalidated or the fill revoked. `publish` will then return None.

        The caller then gives the device no more work on the pages, which may soon belong to another prefix.
        """
        return self.work.is_current

    def progress(self, tokens: int) -> None:
        """The first `tokens` rows are filled. Raises ValueError if that is fewer than before, or too many."""
        if not self.filled_tokens <= tokens <= self.tokens:
            raise ValueError(f"{tokens} tokens filled, after {self.filled_tokens} of {self.tokens}")
        self.filled_tokens = tokens

    def publish(self, now_us: int) -> Handle | None:
        """Makes the prefix visible and pins it for the caller. If the fill is not current, frees its pages: None.

        Raises ValueError unless every row is filled.
        """
        if self.filled_tokens != self.tokens:
            raise ValueError(f"{self.filled_tokens} of {self.tokens} tokens are filled: publish only a complete prefix")
        ledger, work = self._ledger, self.work
        with ledger.section as after:
            ledger.pass_time(now_us)
            if work.revoked:
                return None
            entry = ledger.hbm.publish(work, now_us, PrefixSource.COMPUTED)
            outcome = PendingOutcome.PUBLISHED if entry is not None else PendingOutcome.INVALIDATED
            ledger.counters.fills[outcome] += 1
            ledger.finish(after, work, outcome)
            return self._handle_of(entry, work.key.length, work.key) if entry is not None else None

    def abort(self) -> None:
        """Frees the pages; waiters get FAILED. Does nothing if the fill has ended."""
        ledger, work = self._ledger, self.work
        with ledger.section as after:
            if work.revoked or not work.open:
                return
            ledger.hbm.abort(work)
            count_abort(ledger, after, work)

    def __enter__(self) -> Fill:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.abort()


def count_abort(ledger: TierLedger, after: AfterLock, work: WorkInFlight) -> None:
    """Counts a fill that failed, and notifies the requests that wait for it."""
    ledger.counters.fills[PendingOutcome.FAILED] += 1
    ledger.finish(after, work, PendingOutcome.FAILED)
