"""The mapping of a source's tensors to ours: each is used at most once, and the report lists every tensor."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

import torch
import torch.nn.functional as F  # noqa: N812 - its usual name

from relaygr.runtime.errors import RelayError
from relaygr.worker.model.convert.state_dict import StateDict

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


@dataclass(frozen=True, slots=True)
class Transform:
    """What is done to a tensor on its way, and what the report calls it."""

    name: str
    apply: Callable[[torch.Tensor], torch.Tensor]


AS_IS = Transform("as it is", lambda x: x)
TRANSPOSED = Transform("transposed", lambda x: x.T.contiguous())
FLATTENED = Transform("flattened", lambda x: x.flatten())
WITH_UNKNOWN = Transform("a row of zeros added, for what is unknown", lambda x: F.pad(x, (0, 0, 0, 1)))


def both(first: Transform, second: Transform) -> Transform:
    """One after the other."""
    if first is AS_IS:
        return second
    return (
        first if second is AS_IS else Transform(f"{first.name}; {second.name}", lambda x: second.apply(first.apply(x)))
    )


class Takings:
    """The source's tensors, and ours as they come."""

    def __init__(self, origin: str, source: StateDict) -> None:
        self.tensors: dict[str, torch.Tensor] = {}
        self._origin = origin
        self._source = source.tensors
        self._left = dict.fromkeys(source.tensors)
        self._mapped: list[Mapped] = []
        self._unused = [Unused(name, (), "not a tensor") for name in source.others]
        self._looked_for: dict[str, str] = {}
        self._notes: list[str] = []

    def names(self, suffix: str = "") -> list[str]:
        """Names of the source that end so, in its order."""
        return [name for name in self._source if name.endswith(suffix)]

    def has(self, name: str) -> bool:
        return name in self._source

    def shape(self, name: str) -> tuple[int, ...]:
        """Raises RelayError if the source has no such tensor."""
        return tuple(self.peek(name).shape)

    def peek(self, name: str) -> torch.Tensor:
        """A tensor, without taking it. Raises RelayError if the source has none of that name."""
        if name not in self._source:
            raise RelayError(f"{self._origin} has no tensor {name}, which its sizes are read from.")
        return self._source[name]

    def take(self, source: str, target: str, transform: Transform = AS_IS) -> None:
        """The source's tensor as ours; where it lacks it, that is written down for the report."""
        if source not in self._source:
            self._looked_for.setdefault(target, source)
            return
        self.give([source], target, transform.apply(self._source[source]), transform.name)

    def take_first(self, sources: Sequence[str], target: str, transform: Transform = AS_IS) -> None:
        """The first of these names that the source has."""
        found = next((name for name in sources if name in self._source), None)
        if found is None:
            self._looked_for.setdefault(target, " or ".join(sources))
        else:
            self.take(found, target, transform)

    def give(self, sources: Sequence[str], target: str, tensor: torch.Tensor, how: str) -> None:
        """Our tensor, made from several of the source's, or from none."""
        for name in sources:
            self._left.pop(name, None)
        kept = tensor.float() if tensor.dtype is torch.float64 else tensor
        self.tensors[target] = kept.contiguous()
        first = tuple(self._source[sources[0]].shape) if sources else ()
        self._mapped.append(Mapped(" + ".join(sources), target, first, tuple(tensor.shape), how))

    def take_own(self, shapes: dict[str, tuple[int, ...]]) -> None:
        """Tensors that the source has under our own names, where nothing else gave them."""
        for target in shapes:
            if target not in self.tensors and target in self._source:
                self.take(target, target)

    def unused(self, name: str, why: str) -> None:
        """The source's tensor, if it is there, has no part in the scores."""
        if name in self._left:
            del self._left[name]
            self._unused.append(Unused(name, tuple(self._source[name].shape), why))

    def note(self, sentence: str) -> None:
        self._notes.append(sentence)

    def report(self, shapes: dict[str, tuple[int, ...]]) -> ConversionReport:
        """All that happened, against the tensors that the configuration asks for."""
        missing = [
            Missing(target, shape, self._looked_for.get(target, target))
            for target, shape in shapes.items()
            if target not in self.tensors
        ]
        return ConversionReport(
            self._origin,
            tuple(self._mapped),
            tuple(self._unused),
            tuple(LeftOver(name, tuple(self._source[name].shape)) for name in self._left),
            tuple(missing),
            tuple(self._notes),
        )
