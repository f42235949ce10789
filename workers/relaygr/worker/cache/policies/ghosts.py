"""The memory of what was evicted, which `arc` and `s3fifo` share."""

from __future__ import annotations

from collections import OrderedDict


class Ghosts:
    """Identities of evicted entries, each with its pages, the oldest first. `forget_oldest` bounds them."""

    __slots__ = ("_pages_of", "pages")

    def __init__(self) -> None:
        self._pages_of: OrderedDict[int, int] = OrderedDict()
        self.pages = 0

    def __len__(self) -> int:
        return len(self._pages_of)

    def remember(self, identity: int, pages: int) -> None:
        """Makes it the youngest."""
        self.forget(identity)
        self._pages_of[identity] = pages
        self.pages += pages

    def forget(self, identity: int) -> bool:
        """Whether the identity was remembered."""
        pages = self._pages_of.pop(identity, None)
        self.pages -= pages or 0
        return pages is not None

    def forget_oldest(self) -> None:
        """Raises KeyError if none is remembered."""
        self.pages -= self._pages_of.popitem(last=False)[1]
