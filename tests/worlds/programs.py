"""The programs of a launch, in a chosen order and with all that they read and write seen.

A GPU runs the programs of a launch at the same time and in any order, and orders the loads and stores of one program
only where it must; Triton's interpreter runs one program after another, each instruction whole. So it shows neither
a race nor a dependence on the order. Both are impossible where **no byte that a launch writes is read in it or written
twice**, which `Launches` checks, beside that each access lies in a tensor that the launch was given.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from tests.worlds.triton import INTERPRETED

if INTERPRETED:
    from triton.runtime.interpreter import GridExecutor, InterpreterBuilder


class Order(StrEnum):
    """In which the programs of a launch run."""

    FORWARD = "forward"
    REVERSED = "reversed"
    RANDOM = "random"


@dataclass(slots=True)
class Accesses:
    """Bytes that a launch reads or writes, [accesses] each: their addresses and the programs."""

    bytes: list[NDArray[np.uint64]] = field(default_factory=list)
    programs: list[NDArray[np.int32]] = field(default_factory=list)

    def add(self, addresses: NDArray[np.uint64], size: int, program: int) -> None:
        """Adds values of `size` bytes."""
        if addresses.size:
            each = (addresses[:, None] + np.arange(size, dtype=np.uint64)).ravel()
            self.bytes.append(each)
            self.programs.append(np.full(each.size, program, dtype=np.int32))

    def sorted(self) -> tuple[NDArray[np.uint64], NDArray[np.int32]]:
        """All of them, by address."""
        if not self.bytes:
            return np.empty(0, dtype=np.uint64), np.empty(0, dtype=np.int32)
        addresses, programs = np.concatenate(self.bytes), np.concatenate(self.programs)
        order = np.argsort(addresses, kind="stable")
        return addresses[order], programs[order]


class Launches:
    """Runs the programs of each launch in one order, and raises AssertionError for what a GPU may do otherwise."""

    def __init__(self, order: Order = Order.FORWARD, seed: int = 0) -> None:
        self._order, self._random = order, random.Random(seed)
        self.programs: list[int] = []
        """Of the last launch, as they ran."""
        self._name, self._program = "", 0
        self._memory: list[tuple[int, int]] = []
        """The first address of each tensor, and that after its last."""
        self._reads, self._writes = Accesses(), Accesses()

    def begins(self, name: str, tensors: Sequence[torch.Tensor]) -> None:
        """A launch of this kernel on these tensors follows."""
        self._name = name
        storages = [tensor.untyped_storage() for tensor in tensors]
        self._memory = [(storage.data_ptr(), storage.data_ptr() + storage.nbytes()) for storage in storages]
        self._reads, self._writes = Accesses(), Accesses()

    def next(self, turn: int, programs: int) -> int:
        """The number of the program that runs at this turn, of so many."""
        if turn == 0:
            self.programs = list(range(programs))
            if self._order is Order.REVERSED:
                self.programs.reverse()
            elif self._order is Order.RANDOM:
                self._random.shuffle(self.programs)
        self._program = self.programs[turn]
        return self._program

    def reads(self, addresses: NDArray[np.uint64], size: int) -> None:
        """The program that runs reads these values. Raises AssertionError if they lie outside of the tensors."""
        self._check("reads", addresses, size)
        self._reads.add(np.unique(addresses), size, self._program)

    def writes(self, addresses: NDArray[np.uint64], size: int) -> None:
        """The program that runs writes these values. Raises AssertionError if they lie outside of the tensors."""
        self._check("writes", addresses, size)
        self._writes.add(addresses, size, self._program)

    def _check(self, does: str, addresses: NDArray[np.uint64], size: int) -> None:
        inside = np.zeros(addresses.size, dtype=np.bool_)
        for begin, end in self._memory:
            inside |= (addresses >= begin) & (addresses <= end - size)
        assert inside.all(), f"{self._name}: program {self._program} {does} outside of the tensors that it was given"

    def ends(self) -> None:
        """Raises AssertionError if what the launch has done depends on the order of its programs or threads."""
        read, readers = self._reads.sorted()
        written, writers = self._writes.sorted()
        twice = np.flatnonzero(written[1:] == written[:-1])
        assert not twice.size, (
            f"{self._name}: programs {writers[twice[0]]} and {writers[twice[0] + 1]} write to the same place"
        )
        if written.size:
            at = np.minimum(np.searchsorted(written, read), written.size - 1)
            both = np.flatnonzero(written[at] == read)
            assert not both.size, (
                f"{self._name}: program {readers[both[0]]} reads what program {writers[at[both[0]]]} writes in this "
                "launch"
            )


@contextmanager
def launches(order: Order = Order.FORWARD, seed: int = 0) -> Iterator[Launches]:
    """Every launch in this context. On a GPU the hardware chooses the order, and nothing is seen."""
    seen = Launches(order, seed)
    if not INTERPRETED:
        yield seen
        return
    run, place = GridExecutor.__call__, InterpreterBuilder.set_grid_idx
    load, store = InterpreterBuilder.create_masked_load, InterpreterBuilder.create_masked_store

    def runs(self: Any, *arguments: Any, **named: Any) -> None:
        values = (*arguments, *named.values())
        seen.begins(self.fn.__name__, [value for value in values if torch.is_tensor(value)])
        run(self, *arguments, **named)
        seen.ends()

    def is_placed(self: Any, *at: int) -> None:
        turn = int(np.ravel_multi_index(at, self.grid_dim))
        program = seen.next(turn, int(np.prod(self.grid_dim)))
        place(self, *map(int, np.unravel_index(program, self.grid_dim)))

    def loads(self: Any, pointers: Any, mask: Any, *rest: Any) -> Any:
        seen.reads(*_chosen(pointers, mask))
        return load(self, pointers, mask, *rest)

    def stores(self: Any, pointers: Any, value: Any, mask: Any, *rest: Any) -> Any:
        seen.writes(*_chosen(pointers, mask))
        return store(self, pointers, value, mask, *rest)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(GridExecutor, "__call__", runs)
        patch.setattr(InterpreterBuilder, "set_grid_idx", is_placed)
        patch.setattr(InterpreterBuilder, "create_masked_load", loads)
        patch.setattr(InterpreterBuilder, "create_masked_store", stores)
        yield seen


def _chosen(pointers: Any, mask: Any) -> tuple[NDArray[np.uint64], int]:
    """The addresses that are not masked, and the bytes of each value."""
    return np.ravel(pointers.data)[np.ravel(mask.data)], pointers.get_element_ty().primitive_bitwidth // 8
