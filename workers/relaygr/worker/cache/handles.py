"""What the cache's users hold: a `Handle` to read a prefix, a `Fill` to compute one."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import TracebackType
from typing import TYPE_CHECKING

from relaygr.schemas.messages import PrefixSource
from relaygr.worker.cache.arrival import LayerArrival
from relaygr.worker.cache.entries import Pin, WorkInFlight
from relaygr.worker.cache.pages import PageArray
from relaygr.worker.cache.results import PageCopy

if TYPE_CHECKING:
    from relaygr.worker.cache.fills import Fills


@dataclass(frozen=True, slots=True, eq=False)
class Handle:
    """A pinned prefix in HBM. It stays as it is, whatever becomes of its entry, until it is released.

    `pages` int32 [pages_for(tokens)]: token t lies in row t % page_tokens of pages[t // page_tokens].
    `behaviours` of the key asked for are covered, `complete` if that is all of them. `approximate` says that a
    part of it came from a DRAM tier that keeps K,V in fewer bits. With an `arrival` its last layers may still be
    on their way: `arrival.wait(layer)` before reading each, and nothing computed on it counts once that failed.
    """

    behaviours: int
    tokens: int
    pages: PageArray
    complete: bool
    source: PrefixSource
    pin: Pin = field(repr=False)
    approximate: bool = False
    arrival: LayerArrival | None = None

    @property
    def is_held(self) -> bool:
        """False once released, also by force: its pages may then hold anything."""
        return self.pin.open and not self.pin.forced


class Fill:
    """Pages to compute a prefix into; ends with `publish` or `abort`, once.

    `pages` int32 is the whole table; rows up to `start_tokens` are there already. If `copy_page` is
    set, copy that page before computing: its rows belong to others too. As a context it aborts when left
    unpublished.
    """

    def __init__(self, fills: Fills, work: WorkInFlight) -> None:
        self._fills = fills
        self._work = work
        self.behaviours = work.key.length
        self.tokens = work.tokens
        self.start_behaviours = work.start_behaviours
        self.start_tokens = work.start_tokens
        self.filled_tokens = work.start_tokens
        self.pages: PageArray = work.table
        self.copy_page: PageCopy | None = work.copy_page

    @property
    def work(self) -> WorkInFlight:
        """For the cache alone."""
        return self._work

    @property
    def is_current(self) -> bool:
        """False once invalidated, or taken away by force: then give the device no more work on its pages, which may
        soon be another's; `publish` will give None.
        """
        return self._work.is_current

    def progress(self, tokens: int) -> None:
        """`tokens` rows are filled, from the first. Raises ValueError if that is fewer than before, or too many."""
        if not self.filled_tokens <= tokens <= self.tokens:
            raise ValueError(f"{tokens} tokens filled, after {self.filled_tokens} of {self.tokens}")
        self.filled_tokens = tokens

    def publish(self, now_us: int) -> Handle | None:
        """Shows the prefix and pins it for the caller; None if it is not current, and the pages are not its any more.

        Raises ValueError unless every row is filled.
        """
        return self._fills.publish(self, now_us)

    def abort(self) -> None:
        """Gives the pages back; waiters learn that it failed. Nothing if it has ended."""
        self._fills.abort(self)

    def __enter__(self) -> Fill:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.abort()
