"""Identity of a prefix in a replay: the rules of `relaygr.worker.cache.identity`, with numbers in place of digests.

A trace says only how much two successive histories of a user share. So the digests are invented: equal where the
histories are, and never used again. Small numbers are compared and made faster than digests.
`tests/cli/test_replay_equality.py` holds both to the same answers.
"""

from __future__ import annotations

import itertools

from relaygr.schemas.digest import BLOCK
from relaygr.worker.cache.identity import MAX_MARKS

_SEED = 0

Marks = tuple[tuple[int, int], ...]
"""(length, digest) of earlier lengths at which the prefix was ready, in the order of their lengths."""


class PrefixHistory:
    """A history of `length` behaviours. `blocks` has a digest for each block of behaviours."""

    __slots__ = ("blocks", "digest", "length", "marks")

    def __init__(self, length: int, blocks: tuple[int, ...], marks: Marks) -> None:
        self.length = length
        self.blocks = blocks
        self.marks = marks
        self.digest = blocks[-1] if blocks else _SEED
        """That of the whole history."""

    def digest_at(self, length: int) -> int | None:
        """The digest of the first `length` behaviours, or None if it is not known."""
        if length == self.length:
            return self.digest
        if length == 0:
            return _SEED
        if length > self.length:
            return None
        if length % BLOCK == 0:
            return self.blocks[length // BLOCK - 1]
        for marked, digest in self.marks:
            if marked == length:
                return digest
        return None

    def head(self, length: int) -> PrefixHistory | None:
        """The first `length` behaviours, or None if their digest is not known."""
        if length == self.length:
            return self
        digest = self.digest_at(length)
        if digest is None:
            return None
        blocks = self.blocks[: length // BLOCK] + ((digest,) if length % BLOCK else ())
        return PrefixHistory(length, blocks, tuple(mark for mark in self.marks if mark[0] < length))

    def held(self, marks: Marks) -> PrefixHistory:
        """The history with the longest of its own marks and `marks`, which are in the order of their lengths."""
        longest = marks[-MAX_MARKS:]
        if longest == self.marks or set(self.marks).issuperset(longest):
            return self
        known = {mark[0]: mark for mark in (*marks, *self.marks) if mark[0] < self.length}
        return PrefixHistory(self.length, self.blocks, tuple(known[length] for length in sorted(known)[-MAX_MARKS:]))


def covered_behaviours(asked: PrefixHistory, held: PrefixHistory) -> int:
    """Number of leading behaviours of `asked` that the K,V cached for `held` certainly covers."""
    if asked is held or (asked.length == held.length and asked.digest == held.digest):
        return asked.length
    shorter, longer = (held, asked) if held.length < asked.length else (asked, held)
    if longer.digest_at(shorter.length) == shorter.digest:
        return shorter.length
    # Once two digests differ, all later ones do. So bisect.
    low, high = 0, shorter.length // BLOCK
    while low < high:
        middle = (low + high + 1) // 2
        if asked.blocks[middle - 1] == held.blocks[middle - 1]:
            low = middle
        else:
            high = middle - 1
    common = low * BLOCK
    marked = (
        length for length, digest in held.marks if common < length < asked.length and asked.digest_at(length) == digest
    )
    return max(marked, default=common)


class HistoryMaker:
    """Makes histories that share with the one before what the trace says."""

    def __init__(self) -> None:
        self._digests = itertools.count(_SEED + 1)

    def first(self, length: int) -> PrefixHistory:
        """A history that shares nothing with any other."""
        return PrefixHistory(length, tuple(itertools.islice(self._digests, -(-length // BLOCK))), ())

    def after(self, before: PrefixHistory, shared: int, length: int) -> PrefixHistory:
        """A history of `length` behaviours, the first `shared` of which are those of `before`."""
        blocks = before.blocks[: shared // BLOCK]
        blocks += tuple(itertools.islice(self._digests, -(-length // BLOCK) - len(blocks)))
        known = (*before.marks, (before.length, before.digest))
        if shared < before.length or length <= before.length:
            known = tuple([mark for mark in known if mark[0] <= shared and mark[0] < length])
        return PrefixHistory(length, blocks, known[-MAX_MARKS:])
