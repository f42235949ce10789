"""Test vectors: an `.npz` of inputs, weights and expected values, checked against our own layers.

A file holds `meta.json` (a 0-d string array: case name -> sizes and options) and arrays named `CASE/ARRAY`. The
beginning of a case's name gives its kind (`KINDS`). Sequences are jagged: the users' tokens follow one another, and
`lengths` holds the number for each user. A case passes if every expected array agrees: floats within `TOLERANCE` of the
array's largest value, masks and indices exactly. A case with an unknown option is NOT_UNDERSTOOD, and the result names
the option.

`read_vectors` raises RelayError for a file of another format. `check_case` never raises: an array that is missing or
has the wrong shape fails its case.
"""

from __future__ import annotations

import enum
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from relaygr.runtime.errors import RelayError
from relaygr.worker.model.npy import read_npz

META = "meta.json"
TOLERANCE = 2e-5
"""Largest error allowed, as a share of the largest expected value."""

NOTES = frozenset({"history", "targets", "delta", "max_abs_diff"})
"""Keys of a case's entry in `meta.json` that describe its origin, and are not options."""


class CaseVerdict(enum.StrEnum):
    """The result of a case."""

    PASSED = "passed"
    FAILED = "failed"
    NOT_UNDERSTOOD = "not understood"


@dataclass(frozen=True, slots=True)
class CaseResult:
    """The verdict of one case, and the largest error of its arrays."""

    name: str
    verdict: CaseVerdict
    worst_error: float = 0.0
    """As a share of the largest expected value; 1.0 for a mask or index that differs."""
    worst_array: str = ""
    detail: str = ""


class NotUnderstoodError(Exception):
    """The case has an unknown option or value. The text names it."""


class MalformedCaseError(Exception):
    """The case is inconsistent. The text names the array or option."""


@dataclass(frozen=True, slots=True)
class Checked:
    """The comparison of one array."""

    name: str
    error: float
    detail: str = ""


class VectorCase:
    """Arrays and options of one case, fetched by name."""

    def __init__(self, name: str, options: Mapping[str, Any], arrays: Mapping[str, NDArray[Any]]) -> None:
        self.name = name
        self._options = options
        self._arrays = arrays

    def names(self, prefix: str = "") -> list[str]:
        """Names of the arrays that begin with `prefix`, in the file's order."""
        return [name for name in self._arrays if name.startswith(prefix)]

    def has(self, name: str) -> bool:
        return name in self._arrays

    def array(self, name: str) -> NDArray[Any]:
        """The array of this name. Raises MalformedCaseError if it is missing."""
        if name not in self._arrays:
            raise MalformedCaseError(f"{name} is missing")
        return self._arrays[name]

    def floats(self, name: str) -> torch.Tensor:
        """The array as float32."""
        array = self.array(name)
        if array.dtype.kind not in "fiu":
            raise MalformedCaseError(f"{name} is {array.dtype}, not numbers")
        return torch.from_numpy(np.ascontiguousarray(array, dtype=np.float32))

    def optional_floats(self, name: str) -> torch.Tensor | None:
        return self.floats(name) if self.has(name) else None

    def integers(self, name: str) -> torch.Tensor:
        """The array as int64. An empty array may have any type, and integers may be stored as floats."""
        array = self.array(name)
        if array.size and not _is_whole(array):
            raise MalformedCaseError(f"{name} is {array.dtype}, not whole numbers")
        return torch.from_numpy(np.ascontiguousarray(array, dtype=np.int64))

    def lengths(self, name: str = "lengths") -> list[int]:
        """One integer for each user, none negative."""
        values = self.integers(name).flatten().tolist()
        if any(value < 0 for value in values):
            raise MalformedCaseError(f"{name} has a negative length")
        return [int(value) for value in values]

    def targets(self, users: int, lengths: list[int]) -> list[int] | None:
        """The number of targets of each user; None if the array is missing or empty."""
        counts = self.lengths("num_targets") if self.has("num_targets") else []
        if not counts:
            return None
        if len(counts) != users or any(count > length for count, length in zip(counts, lengths, strict=False)):
            raise MalformedCaseError(f"num_targets {counts} do not fit lengths {lengths}")
        return counts

    def option(self, name: str, default: Any = None) -> Any:
        """An option; null in the file means not set. Raises MalformedCaseError if it is required and not set."""
        value = self._options.get(name)
        if value is not None:
            return value
        if default is None:
            raise MalformedCaseError(f"{name} is missing in {META}")
        return default

    def is_set(self, name: str) -> bool:
        """Whether an option is set."""
        return self._options.get(name) is not None

    def whole(self, name: str, default: int | None = None) -> int:
        value = self.option(name, default)
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int):
            raise MalformedCaseError(f"{name} is {value!r}, not a whole number")
        return value

    def number(self, name: str, default: float | None = None) -> float:
        value = self.option(name, default)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise MalformedCaseError(f"{name} is {value!r}, not a number")
        return float(value)

    def flag(self, name: str, default: bool) -> bool:
        value = self.option(name, default)
        if not isinstance(value, bool | int) or value not in (0, 1):
            raise MalformedCaseError(f"{name} is {value!r}, not true or false")
        return bool(value)

    def require_known(self, known: frozenset[str]) -> None:
        """Raises NotUnderstoodError if an option outside `known` is switched on."""
        unknown = [
            name for name, value in self._options.items() if name not in known | NOTES and value not in (None, False, 0)
        ]
        if unknown:
            options = ", ".join(f"{name}={self._options[name]!r}" for name in unknown)
            raise NotUnderstoodError(f"option {options} is not known")


def _is_whole(array: NDArray[Any]) -> bool:
    if array.dtype.kind == "f":
        return bool((np.isfinite(array) & (array == np.trunc(array))).all())
    return array.dtype.kind in "iub"


def alpha_of(case: VectorCase) -> float | None:
    """The scale of q.k: `attn_alpha`, else `alpha`, which has the same meaning. None: the layer's default."""
    name = next((name for name in ("attn_alpha", "alpha") if case.is_set(name)), None)
    return None if name is None else case.number(name)


def slices(lengths: list[int]) -> Iterator[slice]:
    """The range of each user's tokens in a jagged array."""
    start = 0
    for length in lengths:
        yield slice(start, start + length)
        start += length


def require_rows(name: str, rows: int, lengths: list[int]) -> None:
    """Raises MalformedCaseError unless the rows of a jagged array are the sum of its lengths."""
    if rows != sum(lengths):
        raise MalformedCaseError(f"{name} has {rows} rows, lengths add up to {sum(lengths)}")


def compare(name: str, ours: torch.Tensor, expected: torch.Tensor) -> Checked:
    """Compares floats, by their largest difference."""
    if ours.shape != expected.shape:
        return Checked(name, float("inf"), f"{name} is {list(expected.shape)}, ours {list(ours.shape)}")
    if not expected.numel():
        return Checked(name, 0.0)
    largest = float(expected.abs().max())
    difference = float((ours - expected).abs().max())
    if difference == 0.0:
        return Checked(name, 0.0)
    error = difference / largest if largest > 0 else float("inf")
    # A comparison with NaN is false, so NaN becomes an infinite error.
    return Checked(name, error if error >= 0 else float("inf"))


def compare_exactly(name: str, ours: torch.Tensor, expected: torch.Tensor) -> Checked:
    """Compares masks and indices."""
    if ours.shape != expected.shape:
        return Checked(name, float("inf"), f"{name} is {list(expected.shape)}, ours {list(ours.shape)}")
    wrong = int((ours != expected).sum())
    return Checked(name, 1.0, f"{name}: {wrong} of {ours.numel()} differ") if wrong else Checked(name, 0.0)


def read_vectors(path: Path) -> list[VectorCase]:
    """The cases of a file, in its order. Raises RelayError if it is not of the form described above."""
    try:
        arrays = read_npz(path)
        if META not in arrays:
            raise RelayError(f"{path} has no {META}: it is not a file of test vectors.")
        meta = json.loads(str(arrays.pop(META)))
    except (OSError, ValueError) as error:
        raise RelayError(f"{path} cannot be read as test vectors: {error}.") from error
    if not isinstance(meta, dict) or not all(isinstance(options, dict) for options in meta.values()):
        raise RelayError(f"{path}: {META} is not an object of objects, case name to options.")
    by_case: dict[str, dict[str, NDArray[Any]]] = {name: {} for name in meta}
    for name, array in arrays.items():
        case, slash, array_name = name.partition("/")
        if not slash:
            raise RelayError(f"{path}: array {name!r} belongs to no case: names have the form CASE/ARRAY.")
        by_case.setdefault(case, {})[array_name] = array
    if not by_case:
        raise RelayError(f"{path} holds no case.")
    return [VectorCase(name, meta.get(name, {}), found) for name, found in by_case.items()]


CaseRunner = Callable[[VectorCase], list[Checked]]


def check_case(case: VectorCase, kinds: Mapping[str, CaseRunner]) -> CaseResult:
    """Runs one case through the runner of its kind."""
    runner = next((run for prefix, run in kinds.items() if case.name.startswith(prefix)), None)
    if runner is None:
        known = ", ".join(f"{prefix}*" for prefix in kinds)
        return CaseResult(case.name, CaseVerdict.NOT_UNDERSTOOD, detail=f"the kind is not known; known are {known}")
    try:
        with torch.inference_mode():
            checked = runner(case)
    except NotUnderstoodError as error:
        return CaseResult(case.name, CaseVerdict.NOT_UNDERSTOOD, detail=str(error))
    except MalformedCaseError as error:
        return CaseResult(case.name, CaseVerdict.FAILED, float("inf"), detail=str(error))
    # Inconsistent sizes raise an error in whichever operator uses them first.
    except (RuntimeError, ValueError, ArithmeticError, LookupError, TypeError, AssertionError, MemoryError) as error:
        first_line = str(error).strip().partition("\n")[0]
        return CaseResult(case.name, CaseVerdict.FAILED, float("inf"), detail=f"it cannot be run: {first_line}")
    if not checked:
        return CaseResult(case.name, CaseVerdict.FAILED, float("inf"), detail="it has no expected array")
    worst = max(checked, key=lambda one: one.error)
    passed = all(one.error <= TOLERANCE for one in checked)
    details = "; ".join(one.detail for one in checked if one.detail)
    return CaseResult(case.name, CaseVerdict.PASSED if passed else CaseVerdict.FAILED, worst.error, worst.name, details)
