"""The mapping of a source's tensors to ours: each is used at most once, and the report lists every tensor."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

import torch

from relaygr.runtime.errors import RelayError
from relaygr.worker.model.convert.state_dict import StateDict

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Mapped:
    """One of our tensors, its source, and the transform."""

    source: str
    target: str
    source_shape: Shape
    shape: Shape
    transform: str


@dataclass(frozen=True, slots=True)
class Unused:
    """A tensor of the source that does not affect scores, and the reason."""

    source: str
    shape: Shape
    why: str


@dataclass(frozen=True, slots=True)
class LeftOver:
    """A tensor of the source that the conversion did not use."""

    source: str
    shape: Shape


@dataclass(frozen=True, slots=True)
class Missing:
    """One of our tensors without a source. `looked_for`: names of the source that would give it."""

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
    """Differences between the converted model and its source, in sentences."""

    @property
    def is_complete(self) -> bool:
        """Whether no tensor is left over or missing."""
        return not self.left_over and not self.missing

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=1) + "\n"


@dataclass(frozen=True, slots=True)
class Transform:
    """A transform of a tensor, and its name in the report."""

    name: str
    apply: Callable[[torch.Tensor], torch.Tensor]


AS_IS = Transform("as it is", lambda x: x)
TRANSPOSED = Transform("transposed", lambda x: x.T.contiguous())
FLATTENED = Transform("flattened", lambda x: x.flatten())


def both(first: Transform, second: Transform) -> Transform:
    """Both transforms, in order."""
    if first is AS_IS:
        return second
    return (
        first if second is AS_IS else Transform(f"{first.name}; {second.name}", lambda x: second.apply(first.apply(x)))
    )


class Takings:
    """The source's tensors, and our tensors as they are made."""

    def __init__(self, origin: str, source: StateDict) -> None:
        self.tensors: dict[str, torch.Tensor] = {}
        self._origin = origin
        self._source = source.tensors
        self.memory = source.memory
        self._left = dict.fromkeys(source.tensors)
        self._mapped: list[Mapped] = []
        self._unused = [Unused(name, (), "not a tensor") for name in source.others]
        self._looked_for: dict[str, str] = {}
        self._notes: list[str] = []
        self._left_beside = [LeftOver(each.name, each.shape) for each in source.unread if each.is_other_weights]
        self._unused += [
            Unused(each.name, each.shape, "beside the model's weights")
            for each in source.unread
            if not each.is_other_weights
        ]
        if self._left_beside:
            self._notes.append(
                f"{origin} has other weights of the same names, such as {self._left_beside[0].source}. Those of "
                "`state_dict`, `model_state_dict`, `dense_dict` or `model` were read: save the wanted ones alone."
            )

    def names(self, suffix: str = "") -> list[str]:
        """Names of the source that end with `suffix`, in its order."""
        return [name for name in self._source if name.endswith(suffix)]

    def has(self, name: str) -> bool:
        return name in self._source

    def shape(self, name: str) -> tuple[int, ...]:
        """Raises RelayError if the source has no such tensor."""
        return tuple(self.peek(name).shape)

    def peek(self, name: str) -> torch.Tensor:
        """A tensor, without marking it as used. Raises RelayError if the source has no tensor of this name."""
        if name not in self._source:
            raise RelayError(f"{self._origin} has no tensor {name}, from which the model's sizes are read.")
        return self._source[name]

    def take(self, source: str, target: str, transform: Transform = AS_IS) -> None:
        """Uses a tensor of the source as ours. If the source has no such tensor, the report lists ours as missing."""
        if source not in self._source:
            self._looked_for.setdefault(target, source)
            return
        self.give([source], target, transform.apply(self._source[source]), transform.name)

    def take_first(self, sources: Sequence[str], target: str, transform: Transform = AS_IS) -> None:
        """Uses the first of these tensors that the source has."""
        found = next((name for name in sources if name in self._source), None)
        if found is None:
            self._looked_for.setdefault(target, " or ".join(sources))
        else:
            self.take(found, target, transform)

    def give(self, sources: Sequence[str], target: str, tensor: torch.Tensor, how: str) -> None:
        """Adds one of our tensors, made from any number of the source's tensors."""
        for name in sources:
            self._left.pop(name, None)
        kept = tensor.float() if tensor.dtype is torch.float64 else tensor
        self.tensors[target] = kept.contiguous()
        first = tuple(self._source[sources[0]].shape) if sources else ()
        self._mapped.append(Mapped(" + ".join(sources), target, first, tuple(tensor.shape), how))

    def take_own(self, shapes: dict[str, tuple[int, ...]]) -> None:
        """Uses tensors of the source that have our own names, unless they are already given."""
        for target in shapes:
            if target not in self.tensors and target in self._source:
                self.take(target, target)

    def unused(self, name: str, why: str) -> None:
        """Marks a tensor of the source, if it exists, as one that does not affect scores."""
        if name in self._left:
            del self._left[name]
            self._unused.append(Unused(name, tuple(self._source[name].shape), why))

    def note(self, sentence: str) -> None:
        self._notes.append(sentence)

    def report(self, shapes: dict[str, tuple[int, ...]]) -> ConversionReport:
        """The report, with `shapes` as the tensors that the configuration requires."""
        missing = [
            Missing(target, shape, self._looked_for.get(target, target))
            for target, shape in shapes.items()
            if target not in self.tensors
        ]
        return ConversionReport(
            self._origin,
            tuple(self._mapped),
            tuple(self._unused),
            (*(LeftOver(name, tuple(self._source[name].shape)) for name in self._left), *self._left_beside),
            tuple(missing),
            tuple(self._notes),
        )
