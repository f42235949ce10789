"""How prefixes are cut into objects of the pool: pure functions of keys, pages and a secret.

An object holds the DRAM pages that a run of `Segments.behaviours` behaviours completes, so it never changes: a history
that grows adds objects and rewrites none. The pages of its last, incomplete run are in no object. The key has a digest
of the model and layout, a keyed hash of the user, and the chain digest at the end of the run, so other weights, another
layout and another history are other keys. An object begins with its seal: a keyed digest of its key and of the CRC-32
of each page. Whoever reads computes the seal over the pages that arrived.
"""

from __future__ import annotations

import functools
import hashlib
import re
import zlib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

import numpy as np

from relaygr.schemas.digest import BLOCK
from relaygr.worker.cache.identity import PrefixKey
from relaygr.worker.kv import DramGeometry, PrefixLayout
from relaygr.worker.pool.stores.contract import Memory, ObjectKey

SEAL_BYTES: Final = 32
USER_PART: Final = re.compile(r"[0-9a-f]{32}")
"""What `Segments.user_part` returns."""
_LEAST_BYTES: Final = 256 * 1024
"""Smaller objects take longer for the same bytes: each costs a question to the master."""


@dataclass(frozen=True, slots=True)
class Segment:
    """An object's key, and its pages: those from `first_page` up to `end_page` of the prefix's page table."""

    key: ObjectKey
    first_page: int
    end_page: int


class Segments:
    """The cut of all prefixes with one form of pages."""

    def __init__(self, prefix: str, secret: bytes, geometry: DramGeometry, layout: PrefixLayout) -> None:
        self._prefix = prefix
        self._secret = hashlib.blake2b(secret).digest()
        self._page_tokens, self._page_bytes = geometry.kv.page_tokens, geometry.page_bytes
        self._layout = layout
        self._form = repr((geometry, layout)).encode()
        block_tokens = BLOCK * layout.tokens_per_behaviour
        tokens = max(1, -(-_LEAST_BYTES // self._page_bytes)) * self._page_tokens
        self.behaviours = BLOCK * -(-tokens // block_tokens)
        """Behaviours of a run: the fewest blocks of the digest chain that fill a page and 256 KiB."""

    def pages(self, behaviours: int) -> int:
        """Pages in the objects of a prefix of `behaviours` behaviours."""
        runs = behaviours // self.behaviours
        return self._layout.tokens(runs * self.behaviours) // self._page_tokens if runs else 0

    def covered(self, behaviours: int) -> int:
        """Behaviours whose tokens are all in these pages."""
        in_pages = self.pages(behaviours) * self._page_tokens - self._layout.contextual_tokens
        return max(0, in_pages // self._layout.tokens_per_behaviour)

    def size_bytes(self, behaviours: int) -> int:
        """Bytes of these objects."""
        return self.pages(behaviours) * self._page_bytes

    def of(self, key: PrefixKey, behaviours: int) -> list[Segment]:
        """The objects of the first `behaviours` behaviours of `key`, in order; none if they are not known to last."""
        if not (key.is_known and key.growable):
            return []
        model, user = self._model(key.namespace), self.user_part(key.user_id)
        segments, first_page = [], 0
        for end in range(self.behaviours, behaviours + 1, self.behaviours):
            digest, end_page = key.digest_at(end), self.pages(end)
            if digest is None:
                break
            segments.append(Segment(ObjectKey(model, user, digest.hex()), first_page, end_page))
            first_page = end_page
        return segments

    def user_part(self, user_id: str) -> str:
        """The part of a key that names the user."""
        return hashlib.blake2b(user_id.encode(), key=self._secret, digest_size=16).hexdigest()

    def seal(self, key: ObjectKey, pages: Iterable[Memory]) -> Memory:
        """The seal of an object, uint8 [SEAL_BYTES]."""
        digest = hashlib.blake2b(f"{self._prefix}/{key}".encode(), key=self._secret, digest_size=SEAL_BYTES)
        for page in pages:
            digest.update(zlib.crc32(page.data).to_bytes(4, "little"))
        return np.frombuffer(digest.digest(), np.uint8)

    @functools.lru_cache(maxsize=8)  # noqa: B019 - lives as long as the process
    def _model(self, namespace: bytes) -> str:
        return hashlib.blake2b(namespace + self._form, digest_size=16).hexdigest()
