"""What became of every tensor of a conversion."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Mapped:
    """A tensor of ours, where it came from and what was done to it."""

    source: str
    target: str
    source_shape: Shape
    shape: Shape
    transform: str


@dataclass(frozen=True, slots=True)
class Unused:
    """A tensor of the source that has no part in the scores, and why."""

    source: str
    shape: Shape
    why: str


@dataclass(frozen=True, slots=True)
class LeftOver:
    """A tensor of the source that nothing took."""

    source: str
    shape: Shape


@dataclass(frozen=True, slots=True)
class Missing:
    """A tensor of ours that the source lacks; `looked_for`: names under which it would have been taken."""

    target: str
    shape: Shape
    looked_for: str


@dataclass(frozen=True, slots=True)
class ConversionReport:
    """Every tensor once: mapped, unused, left over or missing."""

    origin: str
    mapped: tuple[Mapped, ...]
    unused: tuple[Unused, ...]
    left_over: tuple[LeftOver, ...]
    missing: tuple[Missing, ...]
    notes: tuple[str, ...]
    """Where the converted model differs from its source, in sentences."""

    @property
    def is_complete(self) -> bool:
        """Whether nothing is left over and nothing missing."""
        return not self.left_over and not self.missing

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=1) + "\n"
