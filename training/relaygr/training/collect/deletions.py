"""The users who were deleted lately, by a hash of their ids, so that no older record brings them back.

As the worker's history store does, a folder keeps a deletion for as long as records from before it may come.
"""

from __future__ import annotations

import json
from dataclasses import astuple, dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Final

from relaygr.runtime.errors import RelayError
from relaygr.runtime.files import write_whole
from relaygr.schemas.topics import CATALOGUE, Topic

DELETIONS: Final = "deletions.json"
_DAY_MS: Final = 24 * 3600 * 1000
KEPT_MS: Final = CATALOGUE[Topic.HISTORY].delete_retention_ms or 9 * _DAY_MS
"""No record of the behaviours topic outlives the tombstones of the history topic."""
_HASH_BYTES: Final = 16


@dataclass(frozen=True, slots=True)
class Deletion:
    """What a user's tombstones delete."""

    below: int
    """Snapshots below this offset of the history topic."""
    until_ms: int
    """Records of the behaviours topic with a timestamp up to this."""
    next_snapshot: int
    """The offset after the last tombstone: a worker that had not read it wrote its snapshot too late."""
    noted_ms: int
    """When the tombstone was read."""

    def and_then(self, other: Deletion) -> Deletion:
        """Both together."""
        return Deletion(
            max(self.below, other.below),
            max(self.until_ms, other.until_ms),
            max(self.next_snapshot, other.next_snapshot),
            max(self.noted_ms, other.noted_ms),
        )


class Deletions:
    """Deletions by user. It takes about 320 bytes of memory for each deletion of the last `KEPT_MS`."""

    def __init__(self, path: Path, found: dict[str, Deletion]) -> None:
        self._path = path
        self._found = found
        self._is_saved = True

    @classmethod
    def read(cls, folder: Path) -> Deletions:
        """Those of a folder. Raises RelayError for a broken file."""
        path = folder / DELETIONS
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
            return cls(path, {user: Deletion(*map(int, values)) for user, values in found.items()})
        except FileNotFoundError:
            return cls(path, {})
        except OSError as error:
            raise RelayError(f"{path} cannot be read ({error.strerror}): make it readable for this user.") from error
        except (ValueError, TypeError, AttributeError) as error:
            raise RelayError(f"{path} cannot be read ({error}): collect into a new folder.") from error

    def __len__(self) -> int:
        return len(self._found)

    def of(self, user_id: str) -> Deletion | None:
        """None: the user was not deleted lately."""
        return self._found.get(_hash(user_id)) if self._found else None

    def add(self, user_id: str, deletion: Deletion) -> None:
        before = self.of(user_id)
        self._found[_hash(user_id)] = deletion if before is None else before.and_then(deletion)
        self._is_saved = False

    def save(self, now_ms: int) -> None:
        """Writes the file if something was added, without deletions that are too old to matter. Raises OSError."""
        if self._is_saved:
            return
        self._found = {user: each for user, each in self._found.items() if each.noted_ms >= now_ms - KEPT_MS}
        write_whole(self._path, json.dumps({user: astuple(each) for user, each in self._found.items()}).encode())
        self._is_saved = True


def _hash(user_id: str) -> str:
    return blake2b(user_id.encode(), digest_size=_HASH_BYTES).hexdigest()
