"""What a ranker of your own gives to the worker, and what it is given.

A user's history is a sequence of *rows*: `Shape.user_rows` rows for the user, then `Shape.rows_per_behaviour` rows for
each behaviour. `Ranker.prefix` computes K,V of rows [start, end) from the history and from K,V of rows [0, start). The
worker keeps them in pages, in device memory, in host memory or in the pool, and gives them back to later calls. Then
`Ranker.rank` scores candidates on them. Calls come one at a time, under `torch.inference_mode`, but not always from the
same thread.

All tensors that a ranker is given are its own: it may change and keep them. What it returns is copied.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias

if TYPE_CHECKING:
    # The simulation reads the shape of a ranker without torch.
    import torch

Kv: TypeAlias = "tuple[torch.Tensor, torch.Tensor]"
"""K [heads, rows, key_dim] and V [heads, rows, value_dim] of one layer."""


@dataclass(frozen=True, slots=True)
class ModelFolder:
    """What a ranker is made from."""

    path: Path
    """The folder of `config.json`, where the ranker finds its weights."""
    options: Mapping[str, Any]
    """`options` of `config.json`, as they stand there."""
    device: torch.device
    dtype: torch.dtype
    """The type of the products, float32 or bfloat16. K,V are given in it, and may be returned in any type."""


@dataclass(frozen=True, slots=True)
class Shape:
    """The sizes of a ranker. They must not change while it lives."""

    layers: int
    heads: int
    """Of K and V, so with grouped heads the number of groups."""
    key_dim: int
    value_dim: int
    num_items: int
    """Items are 0 to this - 1, unless `Ranker.known_items` names others."""
    max_history: int
    """Behaviours of the longest history; of a longer one, the worker takes the newest."""
    max_candidates: int
    max_suffix: int = 0
    """Behaviours between the prefix and the candidates, whose K,V are not kept; 0: `rank` takes none."""
    tasks: tuple[str, ...] = ("score",)
    state_dim: int = 0
    """Numbers that `prefix` returns for each row beside its K,V. `rank` is given those of the last row. A row takes as
    much memory for them as one more layer."""
    rows_per_behaviour: int = 1
    user_rows: int = 0
    num_actions: int = 0
    """Action codes are 0 to this - 1; 0: the ranker reads no actions."""
    feature_cardinalities: tuple[int, ...] = ()
    """A value of the user's features is 0 to its cardinality - 1."""


@dataclass(frozen=True, slots=True, eq=False)
class History:
    """Behaviours of a user in the order of time: int64 [behaviours], on the ranker's device. Unknown items stay."""

    items: torch.Tensor
    actions: torch.Tensor
    times_ms: torch.Tensor
    features: torch.Tensor
    """The user's features, int64 [features]; one that is missing is -1. A suffix has none."""
    query_time_ms: int = 0
    """Of a prefix, 0 unless `model check` found that the prefix depends on it."""

    def __len__(self) -> int:
        return int(self.items.shape[0])


class Past(Sequence[Kv]):
    """K,V of the first rows of a history, layer by layer: `past[layer]` reads that layer's pages."""

    def __init__(self, rows: int, layers: int, read: Callable[[int], Kv]) -> None:
        self.rows = rows
        self._layers = layers
        self._read = read

    def __len__(self) -> int:
        return self._layers

    def __getitem__(self, layer: Any) -> Any:
        if isinstance(layer, slice):
            return [self[each] for each in range(*layer.indices(self._layers))]
        if not -self._layers <= layer < self._layers:
            raise IndexError(f"layer {layer} of {self._layers}")
        return self._read(layer % self._layers)

    def __iter__(self) -> Iterator[Kv]:
        return map(self._read, range(self._layers))


@dataclass(frozen=True, slots=True, eq=False)
class Computed:
    """The result of `Ranker.prefix`: K,V of each layer, and the states [rows, state_dim] if the shape has some."""

    layers: Sequence[Kv]
    states: torch.Tensor | None = None


class RankerBase(ABC):
    """What both forms have. The worker makes one with `YourRanker(folder)`."""

    version: ClassVar[str | None] = None
    """A part of the revision: K,V of another version are never used. None: a hash of the file that defines the class,
    so give one if the model's code lies in several files."""

    def __init__(self, folder: ModelFolder) -> None:
        """Loads the weights. Raises any exception with a message for the operator."""
        # Of an nn.Module, if it is a base, too.
        super().__init__()
        self.folder = folder

    @abstractmethod
    def shape(self) -> Shape:
        """The sizes of this model."""

    def known_items(self) -> Sequence[int] | None:
        """All item ids, in ascending order; None: 0 to `num_items` - 1. Others are counted, and given to the model."""
        return None


class Ranker(RankerBase):
    """A model of your own, which is called once at a time."""

    @abstractmethod
    def prefix(self, history: History, start: int, end: int, past: Past) -> Computed:
        """K,V of rows [start, end) of `history`, which has all its behaviours, from K,V of rows [0, start)."""

    @abstractmethod
    def rank(self, suffix: History, candidates: torch.Tensor, past: Past, state: torch.Tensor | None) -> torch.Tensor:
        """Scores [candidates, tasks] for items int64 [candidates], on K,V of the whole prefix.

        `suffix`: the behaviours after the prefix; its `query_time_ms` is the time of the request. `state` [state_dim]:
        of the last row of the prefix; None without states, and for a prefix without rows.
        """

    def scratch_bytes(self, rows: int) -> int:
        """The most memory that one call needs for `rows` rows and candidates beside weights and K,V.

        By default, what attention of all rows to the longest prefix takes, and sixteen times the rows of a layer.
        """
        shape = self.shape()
        longest = shape.user_rows + shape.max_history * shape.rows_per_behaviour
        width = shape.heads * (shape.key_dim + shape.value_dim)
        return self.folder.dtype.itemsize * (
            2 * shape.heads * rows * (longest + rows) + width * (16 * rows + 2 * longest)
        )


def version_of(ranker: type[RankerBase]) -> str:
    """The version that a class gives, or a hash of the file that defines it."""
    return _source_hash(ranker) if ranker.version is None else ranker.version


def files_beside_version(ranker: type[RankerBase]) -> list[str]:
    """Files of the same package or folder from which the class's file imports, and that its version does not cover."""
    own = inspect.getmodule(ranker)
    package = ranker.__module__.partition(".")[0]
    if ranker.version is not None or own is None or own.__file__ is None or package == "relaygr":
        return []
    files = set()
    for each in (*ranker.__mro__, *vars(own).values()):
        used = inspect.getmodule(each)
        file = getattr(used, "__file__", None)
        if used is None or file is None or file == own.__file__:
            continue
        if used.__name__.partition(".")[0] == package or Path(file).parent == Path(own.__file__).parent:
            files.add(Path(file).name)
    return sorted(files)


@functools.cache
def _source_hash(ranker: type[RankerBase]) -> str:
    """Read once, when the class is new: a file that is replaced later is not the code that runs."""
    source = inspect.getsourcefile(ranker)
    if source is None:
        raise ValueError(f"{ranker.__qualname__} has no source file: give it a `version`")
    return hashlib.blake2b(Path(source).read_bytes(), digest_size=16).hexdigest()
