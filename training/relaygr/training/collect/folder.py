"""A folder of collected behaviours: the names of its files, and the logs that it is of.

    collected.json                      the ids of the logs, and the meaning of the action codes
    deletions.json                      hashes of the users who were deleted lately
    KIND-PARTITION-FIRST-LAST.parquet   the rows of the records FIRST to LAST of a partition of a topic

The file names are the only record of what was read. A file whose range lies within that of another one is a leftover of
a process that died after it had joined files; nobody reads it.
"""

from __future__ import annotations

import enum
import json
import re
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Final

from relaygr.runtime.errors import RelayError
from relaygr.runtime.files import write_whole

MANIFEST: Final = "collected.json"
LAYOUT: Final = 2
METADATA_KEY: Final = b"relaygr.collected"
"""The key in a file's metadata that marks its rows as collected; the value is the kind."""
_NAME = re.compile(r"(histories|behaviours)-(\d{5})-(\d{20})-(\d{20})\.parquet")


class Kind(enum.StrEnum):
    """The topic that rows came from."""

    HISTORIES = "histories"
    BEHAVIOURS = "behaviours"


@dataclass(frozen=True, slots=True)
class Part:
    """One file: the records of one partition of a topic from the offset `first` to `last`."""

    kind: Kind
    partition: int
    first: int
    last: int

    @property
    def name(self) -> str:
        return f"{self.kind}-{self.partition:05}-{self.first:020}-{self.last:020}.parquet"

    @classmethod
    def of(cls, name: str) -> Part | None:
        """The part with this file name; None: it is another file."""
        found = _NAME.fullmatch(name)
        return None if found is None else cls(Kind(found[1]), int(found[2]), int(found[3]), int(found[4]))


@dataclass(frozen=True, slots=True)
class Parts:
    """The files of a folder."""

    live: tuple[Part, ...]
    """In the order of reading: of each partition its histories, then its behaviours, both by offset."""
    leftover: tuple[Part, ...]
    """Their rows are in a live file too."""


@dataclass(frozen=True, slots=True)
class Origin:
    """The logs that a folder is of."""

    cluster_id: str
    history_topic: str
    history_id: str
    """Ids of topics are empty on librdkafka's embedded cluster."""
    behaviours_topic: str
    behaviours_id: str
    partitions: int


@dataclass(frozen=True, slots=True)
class Manifest:
    """The content of `collected.json`."""

    origin: Origin
    has_ratings: bool
    """The action codes are ratings: twice the stars."""
    past_to: tuple[int, ...]
    """For each partition: snapshots that workers wrote below this offset of the histories may carry behaviours that the
    topics do not have any more."""
    histories_from: tuple[int, ...]
    """For each partition: the offset at which the topic began when the folder was made, or after a loss."""
    behaviours_from: tuple[int, ...]
    """The same of the behaviours."""
    current_at_ms: int
    """All tombstones from before this time were read."""

    def begins(self, kind: Kind) -> tuple[int, ...]:
        """Where each partition of a topic began."""
        return self.histories_from if kind is Kind.HISTORIES else self.behaviours_from

    def with_begin(self, kind: Kind, partition: int, offset: int) -> Manifest:
        """With another beginning of one partition."""
        changed = _with(self.begins(kind), partition, offset)
        return (
            replace(self, histories_from=changed) if kind is Kind.HISTORIES else replace(self, behaviours_from=changed)
        )

    def with_past_to(self, partition: int, offset: int) -> Manifest:
        """With another offset for one partition."""
        return replace(self, past_to=_with(self.past_to, partition, offset))


def _with(offsets: tuple[int, ...], partition: int, offset: int) -> tuple[int, ...]:
    return (*offsets[:partition], offset, *offsets[partition + 1 :])


def is_collected(folder: Path) -> bool:
    """Whether the folder has collected behaviours."""
    return (folder / MANIFEST).is_file()


def read_manifest(folder: Path) -> Manifest:
    """Raises RelayError if it cannot be read."""
    path = folder / MANIFEST
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        if found["layout"] != LAYOUT:
            raise RelayError(f"{path} has layout {found['layout']!r}, this version reads {LAYOUT}: use its version.")
        offsets = {name: tuple(map(int, found[name])) for name in ("past_to", "histories_from", "behaviours_from")}
        return Manifest(
            origin=Origin(**found["origin"]),
            has_ratings=bool(found["has_ratings"]),
            current_at_ms=int(found["current_at_ms"]),
            **offsets,
        )
    except OSError as error:
        raise RelayError(f"{path} cannot be read ({error.strerror}): make it readable for this user.") from error
    except (ValueError, KeyError, TypeError) as error:
        raise RelayError(f"{path} cannot be read ({error}): collect into a new folder.") from error


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Replaces the manifest as a whole. Raises OSError."""
    write_whole(folder / MANIFEST, json.dumps({"layout": LAYOUT, **asdict(manifest)}, indent=2).encode())


def parts_of(folder: Path) -> Parts:
    """The files of a folder. Raises RelayError if two overlap, which a process that died does not leave behind."""
    return sorted_parts(part for path in folder.iterdir() if (part := Part.of(path.name)) is not None)


def sorted_parts(parts: Iterable[Part]) -> Parts:
    """See `parts_of`."""
    live: list[Part] = []
    leftover: list[Part] = []
    # A part comes after those that contain it.
    for part in sorted(parts, key=lambda each: (each.partition, each.kind is Kind.BEHAVIOURS, each.first, -each.last)):
        before = live[-1] if live and (live[-1].kind, live[-1].partition) == (part.kind, part.partition) else None
        if before is None or part.first > before.last:
            live.append(part)
        elif part.last <= before.last:
            leftover.append(part)
        else:
            raise RelayError(f"{before.name} and {part.name} have records in common: remove the file that was copied.")
    return Parts(tuple(live), tuple(leftover))
