"""Digest chain of a history: it identifies a prefix, and each shorter prefix that ends at a block.

Publishers compute it for a history's version, workers check it, and the prefix cache uses it as its key.
Schema version 1 fixes the algorithm and the byte layout:

    seed    = blake2b-128( b"relaygr.history.1" | u32le(number of features) | features as i64le )
    d(0)    = seed
    d(k+1)  = blake2b-128( d(k) | items as i64le | actions as u16le | timestamps_ms as i64le )

The chain runs over consecutive blocks of `BLOCK` behaviours; the last block may be shorter. The digest of a
history is the last d, and the seed if the history is empty. Each digest covers all earlier blocks, so two
histories with equal features are equal up to the end of their last equal block.
"""

from __future__ import annotations

import functools
import struct
from hashlib import blake2b
from typing import TYPE_CHECKING

from relaygr.schemas.record import record

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from relaygr.schemas.messages import Behaviours

BLOCK = 64
DIGEST_BYTES = 16
_DOMAIN = b"relaygr.history.1"
_Bytes = bytes | memoryview


@record(frozen=True, slots=True)
class DigestChain:
    """Digests of one history: `seed`, and the digest after each block."""

    seed: bytes
    packed: bytes
    """The digests after behaviours [0, min((k+1)*BLOCK, length)) for k from 0, `DIGEST_BYTES` each, one after another:
    a chain of 128 blocks is one object, which a store copies at once."""
    length: int

    @property
    def blocks(self) -> tuple[bytes, ...]:
        """The digests of `packed`, each on its own."""
        return tuple(self.packed[at : at + DIGEST_BYTES] for at in range(0, len(self.packed), DIGEST_BYTES))

    @property
    def digest(self) -> bytes:
        """The digest of the whole history."""
        return self.packed[-DIGEST_BYTES:] or self.seed

    def after(self, blocks: int) -> bytes:
        """The digest after so many blocks; the seed after none."""
        return self.packed[(blocks - 1) * DIGEST_BYTES : blocks * DIGEST_BYTES] if blocks else self.seed

    def at(self, length: int) -> bytes | None:
        """The digest of the first `length` behaviours; None unless a block or the history ends there."""
        if length == self.length:
            return self.digest
        if length > self.length or length % BLOCK:
            return None
        return self.after(length // BLOCK)

    def cut(self, length: int, digest: bytes) -> DigestChain:
        """The chain of the first `length` behaviours, whose digest is `digest`."""
        packed = self.packed[: length // BLOCK * DIGEST_BYTES]
        return DigestChain(self.seed, packed + digest if length % BLOCK else packed, length)

    def common_length(self, other: DigestChain) -> int:
        """How many leading behaviours are known to be equal: a multiple of BLOCK, or all of both histories."""
        if self.seed != other.seed:
            return 0
        if self.length == other.length and self.digest == other.digest:
            return self.length
        full_blocks = min(self.length, other.length) // BLOCK
        # Each digest covers all earlier blocks: once two digests differ, all later ones do. So bisect.
        low, high = 0, full_blocks
        while low < high:
            middle = (low + high + 1) // 2
            if self.after(middle) == other.after(middle):
                low = middle
            else:
                high = middle - 1
        return low * BLOCK


def digest_chain(features: NDArray, behaviours: Behaviours) -> DigestChain:  # type: ignore[type-arg]
    """The chain of `behaviours` (oldest first) of a user with `features` (i64)."""
    return extend_chain(DigestChain(_seed(features.astype("<i8", copy=False).tobytes()), b"", 0), behaviours)


def extend_chain(chain: DigestChain, behaviours: Behaviours) -> DigestChain:
    """Extends `chain`, which covers the first behaviours of a history, to the whole history.

    `behaviours` is the whole history. Only the behaviours after the last full block of `chain` are hashed. The
    caller ensures that `chain` was computed from the first behaviours of this history.
    """
    length = len(behaviours)
    full = min(chain.length, length) // BLOCK
    digests = [chain.packed[: full * DIGEST_BYTES]]
    current = chain.after(full)
    items = memoryview(behaviours.items.astype("<i8", copy=False).tobytes())
    actions = memoryview(behaviours.actions.astype("<u2", copy=False).tobytes())
    timestamps = memoryview(behaviours.timestamps_ms.astype("<i8", copy=False).tobytes())
    for start in range(full * BLOCK, length, BLOCK):
        end = min(start + BLOCK, length)
        current = _next(
            current, items[start * 8 : end * 8], actions[start * 2 : end * 2], timestamps[start * 8 : end * 8]
        )
        digests.append(current)
    return DigestChain(chain.seed, b"".join(digests), length)


def digest_at(chain: DigestChain, behaviours: Behaviours, length: int) -> bytes:
    """The digest of the first `length` behaviours of a history. It hashes at most one block.

    Raises ValueError if the history is shorter.
    """
    if length > chain.length:
        raise ValueError(f"the history has {chain.length} behaviours, not {length}")
    known = chain.at(length)
    if known is not None:
        return known
    full = length // BLOCK
    block = slice(full * BLOCK, length)
    return _next(
        chain.after(full),
        behaviours.items[block].astype("<i8", copy=False).tobytes(),
        behaviours.actions[block].astype("<u2", copy=False).tobytes(),
        behaviours.timestamps_ms[block].astype("<i8", copy=False).tobytes(),
    )


def _next(before: bytes, items: _Bytes, actions: _Bytes, timestamps: _Bytes) -> bytes:
    """The digest after one more block, whose columns are these."""
    digest = blake2b(before, digest_size=DIGEST_BYTES)
    digest.update(items)
    digest.update(actions)
    digest.update(timestamps)
    return digest.digest()


@functools.lru_cache(maxsize=4096)
def _seed(features: bytes) -> bytes:
    count = struct.pack("<I", len(features) // 8)
    return blake2b(_DOMAIN + count + features, digest_size=DIGEST_BYTES).digest()
