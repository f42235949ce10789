"""Which cached prefix may serve which request.

A prefix is a user's, computed by one model over one history. `PrefixKey` says all three, and
`common_behaviours` answers how many leading behaviours two keys certainly share:

* another user, another namespace (weights, layout, dtype, N, encodings) or other features: none;
* one history is the start of the other: the whole of the shorter, even inside a digest block;
* histories that part somewhere: up to the end of their last equal block;
* a key that does not say who it is: none. The cache fails closed.

Equal means equal digests; that the behaviours match their digests is the caller's word. The answer
may be shorter than the truth where a digest is not known, and is never longer.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from relaygr.schemas.digest import BLOCK, DIGEST_BYTES, DigestChain, digest_at

if TYPE_CHECKING:
    from relaygr.schemas.messages import Behaviours

# Earlier lengths at which an entry was ready: a request of a version that has since grown still finds
# its whole prefix. Few versions of one user are under way at a time.
MAX_MARKS = 8


@dataclass(frozen=True, slots=True)
class Mark:
    """The digest of the first `length` behaviours."""

    length: int
    digest: bytes


@dataclass(frozen=True, slots=True, eq=False)
class PrefixKey:
    """Identity of one prefix.

    `namespace` names all that shapes K,V beside the user: a digest of model revision, layout, dtype,
    N and encodings. `chain` covers features (its seed) and history. `behaviours` are those the chain
    was computed over; with them the digest at any length is known, without them only at block ends,
    marks and the whole. `growable` is false where earlier rows depend on where the history ends: then
    only the whole prefix matches.
    """

    user_id: str
    namespace: bytes
    chain: DigestChain
    behaviours: Behaviours | None = None
    marks: tuple[Mark, ...] = ()
    growable: bool = True

    @property
    def length(self) -> int:
        """Behaviours that the key covers."""
        return self.chain.length

    @property
    def is_known(self) -> bool:
        """Whether the key identifies a prefix at all."""
        return (
            bool(self.user_id)
            and bool(self.namespace)
            and len(self.chain.seed) == DIGEST_BYTES
            and len(self.chain.blocks) == -(-self.chain.length // BLOCK)
            and (self.behaviours is None or len(self.behaviours) == self.chain.length)
        )

    def digest_at(self, length: int) -> bytes | None:
        """The digest of the first `length` behaviours, or None where it is not known."""
        known = self.chain.at(length)
        if known is not None or length > self.length:
            return known
        if self.behaviours is not None:
            return digest_at(self.chain, self.behaviours, length)
        return next((mark.digest for mark in self.marks if mark.length == length), None)

    def head(self, length: int) -> PrefixKey | None:
        """The key of the first `length` behaviours, or None where their digest is not known."""
        digest = self.digest_at(length)
        if digest is None:
            return None
        blocks = self.chain.blocks[: length // BLOCK] + ((digest,) if length % BLOCK else ())
        marks = tuple(mark for mark in self.marks if mark.length < length)
        return PrefixKey(
            self.user_id, self.namespace, DigestChain(self.chain.seed, blocks, length), None, marks, self.growable
        )

    def held(self, marks: tuple[Mark, ...] = ()) -> PrefixKey:
        """The key as an entry keeps it: no behaviours; of its marks and `marks` the longest below its length."""
        known = {mark.length: mark for mark in (*marks, *self.marks) if mark.length < self.length}
        kept = tuple(known[length] for length in sorted(known)[-MAX_MARKS:])
        return PrefixKey(self.user_id, self.namespace, self.chain, None, kept, self.growable)


def common_behaviours(asked: PrefixKey, held: PrefixKey) -> int:
    """How many leading behaviours of `asked` the K,V held for `held` certainly covers."""
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
