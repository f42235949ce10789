"""Identity of a cached prefix: which entry may serve which request.

A prefix belongs to one user and was computed by one model over one history. `PrefixKey` names all three.
`common_behaviours` says how many leading behaviours two keys certainly share:

* none, if user, namespace (weights, layout, dtype, N, encodings) or features differ;
* all of the shorter history, if it is the start of the longer one, even inside a digest block;
* everything up to the end of their last equal block, if the histories diverge;
* none, if a key does not identify a prefix: the cache fails closed.

Two histories are equal if their digests are. The caller guarantees that behaviours match their digests. The result
may be too short where a digest is not known; it is never too long.
"""

from __future__ import annotations

from dataclasses import field
from typing import TYPE_CHECKING

from relaygr.schemas.digest import BLOCK, DIGEST_BYTES, DigestChain, digest_at
from relaygr.schemas.record import record

if TYPE_CHECKING:
    from relaygr.schemas.messages import Behaviours

MAX_MARKS = 8
"""Marks that an entry keeps. A mark is an earlier length at which the entry was ready, so that a request for an older
version of the history still finds its whole prefix. Few versions of one user are in use at a time."""


@record(frozen=True, slots=True)
class Mark:
    """The digest of the first `length` behaviours."""

    length: int
    digest: bytes


@record(frozen=True, slots=True, eq=False)
class PrefixKey:
    """Identity of one prefix.

    `namespace` identifies everything that shapes K,V apart from the user: a digest of model revision, layout, dtype,
    N and encodings. `chain` covers features (its seed) and history. `behaviours` are those that the chain was
    computed over. With `behaviours` the digest is known at every length; without, only at block ends, at marks and at
    the full length. `growable` is false if earlier rows depend on the end of the history; then only the whole prefix
    matches.
    """

    user_id: str
    namespace: bytes
    chain: DigestChain
    behaviours: Behaviours | None = None
    marks: tuple[Mark, ...] = ()
    growable: bool = True

    length: int = field(init=False)
    """Number of behaviours that the key covers."""
    is_known: bool = field(init=False)
    """Whether the key identifies a prefix at all."""
    _hashed: dict[int, bytes] | None = field(init=False, repr=False, default=None)
    """The digests that were computed inside a block, by length: the look-ups of a request ask for the same ones. Few,
    since each is that of an entry or a mark of the user.
    """

    def __post_init__(self) -> None:
        # Computed once, since every look-up needs both.
        chain = self.chain
        known = (
            bool(self.user_id)
            and bool(self.namespace)
            and len(chain.seed) == DIGEST_BYTES
            and len(chain.packed) == -(-chain.length // BLOCK) * DIGEST_BYTES
            and (self.behaviours is None or len(self.behaviours) == chain.length)
        )
        object.__setattr__(self, "length", chain.length)
        object.__setattr__(self, "is_known", known)

    def digest_at(self, length: int) -> bytes | None:
        """The digest of the first `length` behaviours, or None if it is not known."""
        known = self.chain.at(length)
        if known is not None or length > self.length:
            return known
        if self.behaviours is not None:
            return self._hashed_at(length, self.behaviours)
        return next((mark.digest for mark in self.marks if mark.length == length), None)

    def _hashed_at(self, length: int, behaviours: Behaviours) -> bytes:
        hashed = self._hashed
        if hashed is None:
            hashed = {}
            object.__setattr__(self, "_hashed", hashed)
        digest = hashed.get(length)
        if digest is None:
            digest = hashed[length] = digest_at(self.chain, behaviours, length)
        return digest

    def head(self, length: int) -> PrefixKey | None:
        """The key of the first `length` behaviours, or None if their digest is not known."""
        digest = self.digest_at(length)
        if digest is None:
            return None
        marks = tuple(mark for mark in self.marks if mark.length < length)
        return PrefixKey(self.user_id, self.namespace, self.chain.cut(length, digest), None, marks, self.growable)

    def held(self, marks: tuple[Mark, ...] = ()) -> PrefixKey:
        """The key as an entry keeps it: without behaviours, with the longest of its own marks and `marks`."""
        if self.behaviours is None and not self.marks and not marks:
            return self
        known = {mark.length: mark for mark in (*marks, *self.marks) if mark.length < self.length}
        kept = tuple(known[length] for length in sorted(known)[-MAX_MARKS:])
        return PrefixKey(self.user_id, self.namespace, self.chain, None, kept, self.growable)


def common_behaviours(asked: PrefixKey, held: PrefixKey) -> int:
    """Number of leading behaviours of `asked` that the K,V cached for `held` certainly covers."""
    if not (asked.is_known and held.is_known):
        return 0
    if asked.user_id != held.user_id or asked.namespace != held.namespace or asked.chain.seed != held.chain.seed:
        return 0
    if asked.growable is not held.growable:
        return 0
    if asked.length == held.length and asked.chain.digest == held.chain.digest:
        return asked.length
    if not asked.growable:
        return 0
    shorter, longer = (held, asked) if held.length < asked.length else (asked, held)
    if longer.digest_at(shorter.length) == shorter.chain.digest:
        return shorter.length
    common = asked.chain.common_length(held.chain)
    marked = (mark for mark in held.marks if common < mark.length < asked.length)
    return max((mark.length for mark in marked if asked.digest_at(mark.length) == mark.digest), default=common)
