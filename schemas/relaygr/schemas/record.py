"""`record`: a dataclass that is frozen for the type checker only.

The constructor of a frozen dataclass calls `object.__setattr__` for each field: 2.6 µs for 19 fields, where plain
assignments take 0.3. Therefore objects that are made for each message are records. No code changes a record after its
creation: mypy refuses an assignment, Python does not.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

__all__ = ["record"]

T = TypeVar("T")

if TYPE_CHECKING:
    from dataclasses import dataclass as record
else:

    def record(
        *, frozen: bool, slots: bool, eq: bool = True, kw_only: bool = False
    ) -> Callable[[type[Any]], type[Any]]:
        """`dataclass`, but `frozen=True` gives only the hash of a frozen class, and no checks at run time."""
        return dataclasses.dataclass(slots=slots, eq=eq, kw_only=kw_only, unsafe_hash=frozen and eq)
